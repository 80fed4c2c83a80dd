"""Comparing in pieces gives what comparing whole tensors gives, and never accepts more."""

from __future__ import annotations

import math

import pytest
import torch

from weft.kernels.measurement import Verdict
from weft.tune import bulk
from weft.tune.tolerance import Limits
from weft.tune.verify import Expected, compare

SIZE = 3 * bulk.CHUNK + 17


def normal(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(value: torch.Tensor, *, limit: float | None, equal: bool = False) -> Expected:
    rounded = value.float()
    finite = bool(torch.isfinite(rounded).all())
    limits = None if limit is None else Limits(limit, 16 * limit, 0)
    return Expected(value, rounded, equal, limits, None, False, finite, None if finite else bulk.classes(rounded))


def test_bytes_are_compared_to_the_last() -> None:
    x = normal()
    y = x.clone()
    assert bulk.same_bytes(x, y)
    y.view(torch.uint8)[-1] ^= 1
    assert not bulk.same_bytes(x, y)
    assert not bulk.same_bytes(x, x[:-1])
    assert bulk.same_bytes(x[:0], y[:0])


def test_error_norms_are_those_of_the_whole() -> None:
    want, off = normal(), 1e-3 * normal(1)
    rmse, largest = bulk.error_norms((want + off).float(), want) or (0.0, 0.0)
    error = (want + off).float().double() - want
    assert rmse == pytest.approx(float(error.square().mean().sqrt()), rel=1e-12)
    assert largest == float(error.abs().max())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, bulk.CHUNK, SIZE - 1])
def test_one_element_that_is_not_finite_is_seen(bad: float, at: int) -> None:
    want = normal()
    got = want.float()
    got[at] = bad
    assert bulk.error_norms(got, want) is None
    assert compare(got, expected(want, limit=1.0), "x").verdict is Verdict.NAN_CLASS
    assert compare(got, expected(want, limit=None), "x").verdict is Verdict.NAN_CLASS


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_where_all_must_be_equal_a_wrong_class_is_told_from_a_wrong_number(bad: float) -> None:
    want = torch.arange(SIZE, dtype=torch.float64) % 100
    want[7] = math.nan
    got = want.float()
    assert compare(got, expected(want, limit=None, equal=True), "x").verdict is Verdict.OK
    got[3] = bad
    assert compare(got, expected(want, limit=None, equal=True), "x").verdict is Verdict.NAN_CLASS
    got[3] = 4.0
    assert compare(got, expected(want, limit=None, equal=True), "x").verdict is Verdict.WRONG


def test_one_wrong_element_is_seen() -> None:
    want = normal()
    got = want.float()
    assert compare(got, expected(want, limit=1e-3), "x").verdict is Verdict.OK
    got[SIZE - 1] += 1
    assert compare(got, expected(want, limit=1e-3), "x").verdict is Verdict.WRONG
    assert compare(got, expected(want, limit=None, equal=True), "x").verdict is Verdict.WRONG


def test_a_sum_that_overflows_the_element_type_is_no_finite_value() -> None:
    value = torch.full((4,), 1e39, dtype=torch.float64)
    got = torch.full((4,), 3e38)
    assert compare(got, expected(value, limit=1e39), "x").verdict is Verdict.NAN_CLASS


def test_memory_order_is_not_mistaken_for_order() -> None:
    value = normal()[:24].reshape(2, 3, 4, 1)
    last = value.float().contiguous(memory_format=torch.channels_last)
    assert not bulk.aligned(last, value)
    assert compare(last, expected(value, limit=1e-6), "x").verdict is Verdict.OK
    moved = expected(value, limit=1e-6).laid_out(last.stride())
    assert bulk.aligned(last, moved.value)
    assert compare(last, moved, "x").verdict is Verdict.OK
    assert compare(value.float().reshape(2, 4, 3, 1).transpose(1, 2), moved, "x").verdict is Verdict.WRONG


def test_gaps_and_overlaps_are_not_dense() -> None:
    x = torch.zeros(4, 6)
    assert bulk.is_dense(x)
    assert bulk.is_dense(x.T)
    assert not bulk.is_dense(x[:, ::2])
    assert not bulk.is_dense(x[:1].expand(4, 6))
