"""Large arrays: hashed and laid out in pieces, with the results of the plain way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from weft.ir.graph import digest_of
from weft.ir.large import PIECE, STRIP_BYTES, InStrips, hash_all, hash_bytes, in_strips, row_major
from weft.ir.types import DType

ROWS, COLS = 1100, 2080  # 9 MB of f32: more than a piece


@pytest.fixture(scope="module")
def large() -> Any:
    return np.arange(ROWS * COLS, dtype=np.float32).reshape(ROWS, COLS)


def test_the_case_is_large(large: Any) -> None:
    assert large.nbytes > PIECE


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x.reshape(20, 55, COLS).transpose(2, 0, 1),
        lambda x: x.reshape(20, 55, COLS).transpose(1, 2, 0),
        lambda x: x[::-1].T,
        lambda x: np.broadcast_to(x[:, :1], (ROWS, COLS)),
    ],
)
def test_row_major_keeps_values(large: Any, view: Callable[..., Any]) -> None:
    x = view(large)
    out = row_major(x)
    assert out.flags.c_contiguous
    assert out.shape == x.shape and np.array_equal(out, x)


def test_what_is_row_major_is_not_copied(large: Any) -> None:
    assert row_major(large) is large


def test_a_scalar_keeps_its_shape() -> None:
    assert row_major(np.array(3, np.float32)).shape == ()


def test_digest_is_of_the_row_major_bytes(large: Any) -> None:
    assert digest_of(DType.F32, large.T) == digest_of(DType.F32, np.ascontiguousarray(large.T))
    assert digest_of(DType.F32, large.T) != digest_of(DType.F32, large)


@pytest.mark.parametrize("at", [0, PIECE // 4 - 1, PIECE // 4, -1])
def test_every_element_counts(large: Any, at: int) -> None:
    other = large.copy()
    other.reshape(-1)[at] += 1
    assert digest_of(DType.F32, other) != digest_of(DType.F32, large)


def test_pieces_in_another_order_are_another_array() -> None:
    one, two = np.zeros(PIECE // 4, np.float32), np.ones(PIECE // 4, np.float32)
    assert hash_bytes(b"", np.concatenate([one, two])) != hash_bytes(b"", np.concatenate([two, one]))


def test_small_arrays_have_the_plain_digest() -> None:
    x = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert hash_bytes(b"head", x.T) == hashlib.sha256(b"head" + np.ascontiguousarray(x.T).tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("rows", "num_bytes"), [(0, 0), (1, 1), (7, 100 * STRIP_BYTES), (1000, 3 * STRIP_BYTES), (5, 10)]
)
def test_strips_cover_every_row_once(rows: int, num_bytes: int) -> None:
    seen = np.zeros(rows, np.int64)

    def count(first: Any, end: Any) -> None:
        seen[first:end] += 1

    in_strips([InStrips(rows, num_bytes, count)])
    assert (seen == 1).all()


def test_strips_of_several_parts_are_all_done() -> None:
    seen = np.zeros((3, 50), np.int64)

    def count(part: Any, first: Any, end: Any) -> None:
        seen[part, first:end] += 1

    in_strips([InStrips(50, (k + 1) * STRIP_BYTES, partial(count, k)) for k in range(3)])
    assert (seen == 1).all()


def test_hashing_many_is_hashing_each(large: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.random(n) for n in (0, 1, 7, 9_000, 200_000)] + [large, large.T, np.float32(2).reshape(())]
    items = [(f"{k}:".encode(), x) for k, x in enumerate(arrays)]
    plain = [np.ascontiguousarray(x).tobytes() for x in arrays]
    found = hash_all(items)
    for digest, (header, data), raw in zip(found, items, plain, strict=True):
        assert digest == hash_bytes(header, data)
        if len(raw) <= PIECE:
            assert digest == hashlib.sha256(header + raw).hexdigest()
    pieces = [hashlib.sha256(plain[5][k : k + PIECE]).digest() for k in range(0, len(plain[5]), PIECE)]
    assert found[5] == hashlib.sha256(b"5:in pieces:" + b"".join(pieces)).hexdigest()
