"""Softmax and the normalisations against torch in f64, in every floating type."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, build, close, declined, random, run, same

from weft.ir.declined import Declined
from weft.ir.prims import Prim

INF, NAN = math.inf, math.nan


def data(kind: str, dtype: torch.dtype) -> torch.Tensor:
    x = random(2, 6, 5, 4, dtype=torch.float64)
    x = {"normal": x, "mean": x + 1000, "large": x * 200, "tiny": x * 1e-3, "zero": x * 0}[kind]
    return x.to(dtype)


KINDS = ("normal", "mean", "large", "tiny", "zero")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_softmax_and_log_softmax(kind: str, dtype: torch.dtype, axis: int) -> None:
    x = data(kind, dtype)
    # exp turns the rounding of x − m, up to 1000·eps/2 where x is 1000, into a relative error of that size
    ulps = 1 if dtype in FLOATS[2:] else 16 if kind in ("normal", "tiny", "zero") else 1200
    close(run("softmax", x, axis=axis)[0], x.double().softmax(axis), ulps=ulps)
    close(run("log_softmax", x, axis=axis)[0], x.double().log_softmax(axis), ulps=4, scale=1)


def test_softmax_rows_with_infinities_follow_torch() -> None:
    x = torch.tensor([[-INF, -INF, -INF], [-INF, 0.0, 1.0], [INF, 0.0, 1.0], [NAN, 0.0, 1.0], [-0.0, 0.0, -INF]])
    for rule, f in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        found, wanted = run(rule, x, axis=-1)[0], f(x, -1)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_softmax_of_a_scalar_and_of_nothing() -> None:
    same(run("softmax", torch.tensor(3.0), axis=0)[0], torch.tensor(1.0))
    same(run("log_softmax", torch.tensor(3.0), axis=-1)[0], torch.tensor(0.0))
    assert "empty axis" in declined("softmax", torch.zeros(2, 0), axis=1)
    same(run("softmax", torch.zeros(0, 2), axis=1)[0], torch.zeros(0, 2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logsumexp(dtype: torch.dtype) -> None:
    for kind in KINDS:
        x = data(kind, dtype)
        close(run("logsumexp", x, axes=(1, 3), keepdims=False)[0], x.double().logsumexp((1, 3)), ulps=4, scale=1)
    x = torch.tensor([[-INF, -INF], [INF, 0.0], [NAN, 1.0], [-INF, 2.0], [INF, -INF]], dtype=dtype)
    same(run("logsumexp", x, axes=(1,), keepdims=True)[0], x.logsumexp(1, keepdim=True))


@pytest.mark.parametrize("rule", ["softmax", "log_softmax"])
def test_softmax_declines_integers_and_bad_axes(rule: str) -> None:
    assert f"{rule} of i64" in declined(rule, torch.tensor([1, 2]), axis=0)
    assert "axis 2 of rank 2" in declined(rule, random(2, 2), axis=2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layer_norm(kind: str, dtype: torch.dtype) -> None:
    x, g, c = data(kind, dtype), random(5, 4, seed=1, dtype=dtype), random(5, 4, seed=2, dtype=dtype)
    wanted = F.layer_norm(x.double(), (5, 4), g.double(), c.double(), 1e-5)
    # the sum of 20 values near 1000 is rounded several times, each time by up to 500 ulp of a deviation of 1
    ulps = (4000 if kind == "mean" else 32) if dtype in FLOATS[:2] else 2
    close(run("layer_norm", x, g, c, axes=(-2, -1), eps=1e-5)[0], wanted, ulps=ulps, scale=3)
    plain = F.layer_norm(x.double(), (5, 4))
    close(run("layer_norm", x, None, None, axes=(2, 3), eps=1e-5)[0], plain, ulps=ulps, scale=3)


def test_layer_norm_variance_survives_a_large_mean() -> None:
    x = (random(4, 1024, dtype=torch.float64) + 1000).float()
    y = run("layer_norm", x, axes=(-1,), eps=0.0)[0].double()
    assert (y.var(-1, correction=0) - 1).abs().max() < 1e-5  # E[x²] − μ² in f32 is off by 0.2 here


def test_layer_norm_statistics() -> None:
    x = random(3, 8, dtype=torch.float16)
    y, mean, rstd = run("layer_norm_stats", x, None, None, axes=(1,), eps=1e-5)
    assert y.dtype is torch.float16 and mean.dtype is rstd.dtype is torch.float32
    wanted = torch.native_layer_norm(x.double(), (8,), None, None, 1e-5)
    for found, w in zip((y, mean, rstd), wanted, strict=True):
        close(found, w, ulps=8, scale=1)


def test_layer_norm_mixed_types_follow_x() -> None:
    x, g = random(3, 8, dtype=torch.float16), random(8, seed=1)
    found = run("layer_norm", x, g, axes=(-1,), eps=1e-5)[0]
    assert found.dtype is torch.float16
    close(found, F.layer_norm(x.double(), (8,), g.double()), ulps=1, scale=1)


def test_layer_norm_keeps_nan_in_its_row() -> None:
    x = random(3, 8)
    x[1, 2] = NAN
    found = run("layer_norm", x, axes=(-1,), eps=1e-5)[0]
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_instance_and_group_norm(kind: str, dtype: torch.dtype) -> None:
    x, g, c = data(kind, dtype), random(6, seed=1, dtype=dtype), random(6, seed=2, dtype=dtype)
    xd, gd, cd = x.double(), g.double(), c.double()
    ulps = (4000 if kind == "mean" else 32) if dtype in FLOATS[:2] else 2
    close(run("instance_norm", x, g, c, eps=1e-5)[0], F.instance_norm(xd, None, None, gd, cd), ulps=ulps, scale=3)
    for groups in (1, 2, 3, 6):
        wanted = F.group_norm(xd, groups, gd, cd)
        close(run("group_norm", x, g, c, groups=groups, eps=1e-5)[0], wanted, ulps=ulps, scale=3)
    close(run("group_norm", x, None, None, groups=3, eps=1e-5)[0], F.group_norm(xd, 3), ulps=ulps, scale=3)


def test_group_norm_statistics_and_rank_two() -> None:
    x = random(4, 6)
    close(run("group_norm", x, None, None, groups=2, eps=1e-5)[0], F.group_norm(x.double(), 2), ulps=16, scale=1)
    x = random(2, 6, 5)
    found = run("group_norm_stats", x, None, None, groups=3, eps=1e-5)
    wanted = torch.native_group_norm(x.double(), None, None, 2, 6, 5, 3, 1e-5)
    for f, w in zip(found, wanted, strict=True):
        close(f, w, ulps=16, scale=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(5, 6), (2, 6, 4), (2, 6, 3, 4), (2, 6, 2, 3, 2)])
def test_batch_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtype)
    g, c, mu = (random(6, seed=s, dtype=dtype) for s in (1, 2, 3))
    v = random(6, seed=4).abs().to(dtype) + 0.1
    wanted = F.batch_norm(x.double(), mu.double(), v.double(), g.double(), c.double(), False, 0.0, 1e-3)
    # x·s + t: as many ulp as the terms are larger than their sum
    ulps = 16 if dtype in FLOATS[:2] else 1
    close(run("batch_norm", x, g, c, mu, v, eps=1e-3, constants=(1, 2, 3, 4))[0], wanted, ulps=ulps, scale=8)
    wanted = F.batch_norm(x.double(), mu.double(), v.double(), None, None, False, 0.0, 1e-3)
    close(run("batch_norm", x, None, None, mu, v, eps=1e-3)[0], wanted, ulps=ulps, scale=8)


def test_batch_norm_is_one_multiply_and_one_add_of_x() -> None:
    vectors = [random(6, seed=s).abs() for s in range(4)]
    built = build("batch_norm", [random(2, 6, 3, 4), *vectors], (1, 2, 3, 4), eps=1e-5)
    assert not isinstance(built, Declined)
    full = [n.prim for n in built[0].nodes if n.type.shape == (2, 6, 3, 4) and n.prim is not Prim.BROADCAST]
    assert full == [Prim.INPUT, Prim.MUL, Prim.ADD]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm(kind: str, dtype: torch.dtype) -> None:
    x, g = data(kind, dtype), random(4, seed=1, dtype=dtype)
    ulps = 16 if dtype in FLOATS[:2] else 1
    wanted = F.rms_norm(x.double(), (4,), g.double(), 1e-6)
    close(run("rms_norm", x, g, axes=(-1,), eps=1e-6)[0], wanted, ulps=ulps, scale=1e-3)
    wanted = F.rms_norm(x.double(), (4,), None, 1e-6).to(dtype).double() * g.double()
    close(run("rms_norm", x, g, axes=(-1,), eps=1e-6, cast_before_scale=True)[0], wanted, ulps=max(ulps, 2), scale=1e-3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_divisions_by_norms(dtype: torch.dtype) -> None:
    x = data("normal", dtype)
    xd, ulps = x.double(), 8 if dtype in FLOATS[:2] else 1
    close(run("l2_normalize", x, axes=(1,), eps=1e-12)[0], F.normalize(xd, dim=1), ulps=ulps)
    close(run("lp_normalize", x, axis=1, p=1)[0], F.normalize(xd, p=1, dim=1), ulps=ulps)
    close(run("lp_normalize", x, axis=-1)[0], F.normalize(xd, dim=-1), ulps=ulps)
    zero = torch.zeros(2, 3, dtype=dtype)
    same(run("lp_normalize", zero, axis=1)[0], zero)
    same(run("l2_normalize", zero, axes=(1,), eps=1e-5)[0], zero)
    mean, var = xd.mean((0, 2, 3), keepdim=True), xd.var((0, 2, 3), keepdim=True, correction=0)
    wanted = (xd - mean) / (var.sqrt() + 1e-9)
    close(run("mean_variance_normalization", x, axes=(0, 2, 3))[0], wanted, ulps=4 * ulps, scale=1)


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_local_response_norm(size: int, dtype: torch.dtype) -> None:
    x = data("normal", dtype)
    found = run("local_response_norm", x, size=size, alpha=0.3, beta=0.6, bias=1.5)[0]
    wanted = F.local_response_norm(x.double(), size, 0.3, 0.6, 1.5)
    close(found, wanted, ulps=16 if dtype in FLOATS[:2] else 1)


def test_local_response_norm_of_even_size_looks_ahead() -> None:
    x = torch.arange(1.0, 5.0).reshape(1, 4, 1)
    total = torch.tensor([1 + 4, 4 + 9, 9 + 16, 16.0]).reshape(1, 4, 1)  # ⌊1/2⌋ = 0 before, ⌈1/2⌉ = 1 after
    found = run("local_response_norm", x, size=2, alpha=2.0, beta=1.0, bias=0.0)[0]
    close(found, x / total, ulps=4)


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("layer_norm", {"axes": (0,), "eps": 1e-5}), ("rms_norm", {"axes": (0,), "eps": 1e-5}),
        ("l2_normalize", {"axes": (0,), "eps": 1e-5}), ("lp_normalize", {"axis": 0}),
        ("instance_norm", {"eps": 1e-5}), ("group_norm", {"groups": 2, "eps": 1e-5}),
        ("local_response_norm", {"size": 3}), ("mean_variance_normalization", {"axes": (0,)}),
    ],
)  # fmt: skip
def test_norms_decline_integers(rule: str, params: dict[str, Any]) -> None:
    assert "i32" in declined(rule, torch.ones(2, 2, 2, dtype=torch.int32), **params)


def test_norms_decline_what_they_cannot_mean() -> None:
    assert "rank 2" in declined("instance_norm", random(2, 3), eps=1e-5)
    assert "4 groups" in declined("group_norm", random(2, 6, 3), groups=4, eps=1e-5)
    assert "empty" in declined("layer_norm", torch.zeros(2, 0), axes=(1,), eps=1e-5)
    assert "repeat" in declined("layer_norm", random(2, 3), axes=(1, -1), eps=1e-5)
    assert "does not broadcast" in declined("layer_norm", random(2, 3), random(5), axes=(1,), eps=1e-5)
    assert "p = 3" in declined("lp_normalize", random(2, 3), axis=0, p=3)
    assert "rank 1" in declined("batch_norm", random(3), *(random(3),) * 4, eps=1e-5)
