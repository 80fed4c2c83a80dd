"""Reductions, moments, positions and indexing against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.fission.harness import FLOATS, close, declined, random, run, same

AXES = [None, (1,), (0, -1), (0, 1, 2), ()]


def torch_axes(axes: tuple[int, ...] | None) -> tuple[int, ...]:
    return (0, 1, 2) if axes is None else axes


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", AXES)
def test_reductions(axes: tuple[int, ...] | None, keepdims: bool, dtype: torch.dtype) -> None:
    x = random(3, 4, 5, dtype=dtype)
    p = x.abs() + 0.1
    dims, params = torch_axes(axes), dict[str, Any](axes=axes, keepdims=keepdims)
    kw: dict[str, Any] = {"keepdim": keepdims}
    ulps = 16 if dtype in FLOATS[:2] else 2

    def total(y: torch.Tensor) -> torch.Tensor:
        return y.sum(dims, **kw) if dims else y

    xd, pd = x.double(), p.double()
    if dims:
        same(run("reduce_max", x, **params)[0], x.amax(dims, **kw))
        same(run("reduce_min", x, **params)[0], x.amin(dims, **kw))
        close(run("reduce_mean", x, **params)[0], xd.mean(dims, **kw), ulps=ulps, scale=1)
    close(run("reduce_sum", x, **params)[0], total(xd), ulps=ulps, scale=8)
    close(run("reduce_l1", x, **params)[0], total(xd.abs()), ulps=ulps)
    close(run("reduce_l2", x, **params)[0], total(xd**2).sqrt(), ulps=ulps)
    close(run("reduce_sum_square", x, **params)[0], total(xd**2), ulps=ulps)
    close(run("reduce_log_sum", p, **params)[0], total(pd).log(), ulps=ulps, scale=1)
    close(run("reduce_log_sum_exp", x, **params)[0], total(xd.exp()).log(), ulps=ulps, scale=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_prod_norm_and_moments(dtype: torch.dtype) -> None:
    x = random(3, 4, 5, dtype=dtype)
    xd, ulps = x.double(), 16 if dtype in FLOATS[:2] else 2
    close(run("reduce_prod", x, axes=(1,), keepdims=False)[0], xd.prod(1), ulps=ulps)
    for p in (0, 1, 2, 3, 0.5, math.inf, -math.inf):
        wanted = torch.linalg.vector_norm(xd, p, dim=(0, 2))
        close(run("norm", x, p=float(p), axes=(0, 2))[0], wanted, ulps=2 * ulps)
    for correction in (0, 1, 2):
        kw: dict[str, Any] = {"dim": (0, 2), "correction": correction}
        params: dict[str, Any] = {"axes": (0, 2), "correction": correction}
        close(run("var", x, **params)[0], xd.var(**kw), ulps=ulps)
        close(run("std", x, **params)[0], xd.std(**kw), ulps=ulps)
        for f, w in zip(
            run("var_mean", x, keepdims=True, **params), torch.var_mean(xd, keepdim=True, **kw), strict=True
        ):
            close(f, w, ulps=ulps, scale=1)
    close(run("var", x)[0], xd.var(), ulps=ulps)


def test_variance_of_a_large_mean_and_of_one_element() -> None:
    x = (random(2000, dtype=torch.float64) + 1000).float()
    close(run("var", x)[0], x.double().var(), ulps=256)
    one = torch.tensor([[3.0], [math.inf]])
    same(run("var", one, axes=(1,))[0], torch.tensor([math.nan, math.nan]))
    same(run("var", torch.tensor([1.0, 3.0]), correction=3)[0], torch.tensor(math.inf))  # as torch, which warns


def test_reductions_of_integers_bool_and_nothing() -> None:
    x = torch.tensor([[1, -2, 3], [4, 5, -6]])
    same(run("reduce_sum", x, axes=(1,), keepdims=False)[0], x.sum(1))
    same(run("reduce_prod", x, axes=(0,), keepdims=False)[0], x.prod(0))
    same(run("reduce_l1", x, axes=(1,), keepdims=False)[0], x.abs().sum(1))
    same(run("reduce_sum", x > 0, axes=(1,), keepdims=False)[0], (x > 0).sum(1))
    same(run("reduce_max", x > 3, axes=(1,), keepdims=False)[0], (x > 3).any(1))
    same(run("reduce_mean", torch.zeros(2, 0), axes=(1,), keepdims=False)[0], torch.full((2,), math.nan))
    same(run("reduce_sum", torch.zeros(2, 0), axes=(1,), keepdims=False)[0], torch.zeros(2))
    same(run("reduce_max", torch.zeros(2, 0), axes=(1,), keepdims=False)[0], torch.full((2,), -math.inf))
    for rule in ("reduce_mean", "reduce_l2", "reduce_log_sum", "norm", "var", "std"):
        assert "i64" in declined(rule, x)
    assert "bool" in declined("reduce_l1", x > 0)
    assert "axis 2" in declined("reduce_sum", x, axes=(2,))


def test_half_sums_do_not_overflow_inside() -> None:
    x = torch.full((4, 64), 300.0, dtype=torch.float16)
    same(run("reduce_l2", x, axes=(1,), keepdims=False)[0], torch.full((4,), 2400.0, dtype=torch.float16))
    same(run("reduce_mean", x * 100, axes=(1,), keepdims=False)[0], torch.full((4,), 30000.0, dtype=torch.float16))


def test_any_all() -> None:
    x = torch.tensor([[0.0, math.nan], [0.0, -0.0], [1.0, 2.0]])
    same(run("any", x, axes=(1,))[0], x.any(1))
    same(run("all", x, axes=(1,), keepdims=True)[0], x.all(1, keepdim=True))
    same(run("any", x)[0], x.any())
    same(run("all", torch.zeros(2, 0), axes=(1,))[0], torch.ones(2, dtype=torch.bool))


def test_positions() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [math.nan, 9.0, math.nan], [-1.0, -1.0, -2.0]])
    same(run("argmax", x, axis=1)[0], torch.tensor([[1], [0], [0]]))
    same(run("argmax", x, axis=1, select_last=True, keepdims=False)[0], torch.tensor([2, 2, 1]))
    same(run("argmin", x[::2].contiguous(), axis=-1, keepdims=False)[0], torch.tensor([0, 2]))
    same(run("argmin", torch.tensor([5, 1, 1]), axis=0, select_last=True)[0], torch.tensor([2]))
    y = random(3, 4)
    same(run("argmax", y, keepdims=False)[0], y.argmax())
    same(run("argmin", y)[0], y.argmin().reshape(1, 1))
    same(run("argmax", torch.tensor(2.0), axis=0)[0], torch.tensor(0))
    for rule, f in (("max_dim", torch.max), ("min_dim", torch.min)):
        for found, wanted in zip(run(rule, y, axis=1), f(y, 1), strict=True):
            same(found, wanted)
    assert "empty axis" in declined("argmax", torch.zeros(2, 0), axis=1)
    assert "axis 3" in declined("max_dim", y, axis=3)


def test_gather() -> None:
    x, i = random(3, 4, 5), torch.tensor([[0, -1], [2, -4]])
    same(run("gather", x, i, axis=1)[0], x[:, i])
    same(run("gather", x, i, axis=1, constants=(1,))[0], x[:, i])
    same(run("gather", x, torch.tensor(-1, dtype=torch.int32), axis=-1)[0], x[..., -1])
    same(run("gather", x > 0, i[:, 0].to(torch.int8), axis=0)[0], (x > 0)[i[:, 0]])
    assert "gather along" in declined("gather", x, i.float())
    assert "gather along" in declined("gather", x, i, axis=3)


def test_gather_elements() -> None:
    x = random(3, 4)
    i = torch.tensor([[0, -1, 1], [2, 0, -4]])
    same(run("gather_elements", x, i, axis=1)[0], x.gather(1, i % 4))
    j = torch.tensor([[0, 2, 1, 0], [1, 1, 2, 2]], dtype=torch.int32)
    same(run("gather_elements", x, j)[0], x.gather(0, j.long()))
    assert "gather_elements" in declined("gather_elements", x, i[0])


def test_gather_nd() -> None:
    x = random(2, 3, 4)
    i = torch.tensor([[0, 1], [1, -1]])
    same(run("gather_nd", x, i)[0], x[[0, 1], [1, 2]])
    same(run("gather_nd", x, i[..., :1])[0], x[[0, 1]])
    full = torch.tensor([[[1, 2, 3]], [[0, 0, -4]]])
    same(run("gather_nd", x, full)[0], torch.stack([x[1, 2, 3], x[0, 0, 0]]).reshape(2, 1))
    b = torch.tensor([[1], [2]])
    same(run("gather_nd", x, b, batch_dims=1)[0], torch.stack([x[0, 1], x[1, 2]]))
    c = torch.tensor([[[0, 1], [2, 3]], [[1, 1], [-1, 0]]])
    wanted = torch.stack([x[0][[0, 2], [1, 3]], x[1][[1, 2], [1, 0]]])
    same(run("gather_nd", x, c, batch_dims=1)[0], wanted)
    assert "gather_nd" in declined("gather_nd", x, i.float())
    assert "batch dimensions" in declined("gather_nd", x, torch.zeros(3, 1, dtype=torch.int64), batch_dims=1)
    assert "batch dimensions" in declined("gather_nd", x, torch.zeros(1, 4, dtype=torch.int64))


def test_embedding_and_one_hot() -> None:
    w, i = random(7, 3), torch.tensor([[0, 6], [3, 3]])
    same(run("embedding", w, i)[0], w[i])
    assert "embedding" in declined("embedding", w[0], i)
    same(run("one_hot", i, depth=7)[0], torch.nn.functional.one_hot(i, 7))
    values = torch.tensor([2.0, 5.0])
    found = run("one_hot", torch.tensor([0, -7, -8, 1, 9]), values, depth=7, axis=0)[0]
    hot = torch.full((7, 5), 2.0)
    hot[0, 0] = hot[0, 1] = hot[1, 3] = 5.0
    same(found, hot)
    same(run("one_hot", torch.tensor([1.0, 2.0]), values, depth=3, axis=1)[0], torch.tensor([[2.0, 5, 2], [2, 2, 5]]))
    assert "values" in declined("one_hot", i, torch.ones(3), depth=2)
    assert "bool" in declined("one_hot", i > 0, depth=2)
