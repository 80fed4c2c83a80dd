"""Pooling against torch and, for what torch lacks, against the definition written out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, close, declined, random, run, same

MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVG = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
CASES = [
    # spatial, kernel, stride, pad
    ((9,), (3,), (2,), (1,)), ((7, 8), (2, 2), (2, 2), (0, 0)), ((7, 8), (3, 2), (2, 3), (1, 0)),
    ((5, 5), (3, 3), (1, 1), (1, 1)), ((4, 5, 6), (2, 3, 2), (2, 1, 2), (1, 1, 0)), ((6, 6), (5, 5), (4, 4), (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_max_pool(case: tuple[Any, ...], ceil: bool, dtype: torch.dtype) -> None:
    spatial, kernel, stride, pad = case
    x = random(2, 3, *spatial, dtype=dtype)
    x.view(-1)[5] = -math.inf
    x.view(-1)[11] = math.nan
    params = {"kernel": kernel, "strides": stride, "pads_lo": pad, "pads_hi": pad, "ceil": ceil}
    wanted = MAX[len(kernel) - 1](x, kernel, stride, pad, ceil_mode=ceil)
    same(run("max_pool", x, **params)[0], wanted)
    same(run("max_pool", x[0], **params)[0], wanted[0])


def test_max_pool_dilated_and_of_negative_values_and_bytes() -> None:
    x = -random(1, 2, 9, 9).abs() - 1
    params = {"kernel": (3, 2), "strides": (2, 1), "pads_lo": (1, 1), "pads_hi": (1, 1), "dilations": (2, 3)}
    same(run("max_pool", x, **params)[0], F.max_pool2d(x, (3, 2), (2, 1), 1, (2, 3)))
    u = torch.arange(50, dtype=torch.uint8).reshape(1, 2, 5, 5)
    params = {"kernel": (2, 2), "strides": (2, 2), "pads_lo": (1, 1), "pads_hi": (1, 1)}
    same(run("max_pool", u, **params)[0], F.max_pool2d(u.int(), 2, 2, 1).to(torch.uint8))


PLACES = [*((*c, 1) for c in CASES), ((9, 8), (3, 2), (2, 1), (1, 1), 2), ((40, 6), (3, 3), (16, 1), (1, 0), 2)]


def with_ties(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of which many are equal, infinite or NaN; the first plane is of minus infinity."""
    x, draw = random(*shape, dtype=dtype).mul(2).round(), random(*shape, seed=1)
    x[draw < -1.2] = -math.inf
    x[draw > 1.5] = math.nan
    x[0, 0] = -math.inf
    return x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("case", PLACES)
def test_places_of_maxima(case: tuple[Any, ...], ceil: bool, dtype: torch.dtype) -> None:
    spatial, kernel, stride, pad, dilation = case
    x, n = with_ties(2, 3, *spatial, dtype=dtype), len(kernel)
    how = {"kernel": kernel, "strides": stride, "pads": pad, "dilations": (dilation,) * n, "ceil": ceil}
    wanted = MAX[n - 1](x, kernel, stride, pad, dilation, ceil_mode=ceil, return_indices=True)
    grid = math.prod(-(-((k - 1) * dilation + 1) // s) * s for k, s in zip(kernel, stride, strict=True))
    for image, want in ((x, wanted), (x[0], [t[0] for t in wanted])):
        y, taps = run("max_pool_taps", image, **how)
        assert taps.dtype is (torch.uint8 if grid < 256 else torch.int32)
        same(y, want[0])
        same(run("max_pool_positions", taps, sizes=spatial, **how)[0], want[1])


def test_places_of_maxima_that_have_no_rule() -> None:
    x = random(1, 2, 9, 9)
    how: dict[str, Any] = {"kernel": (2, 2), "strides": (2, 2), "pads": (0, 0)}
    assert "of i64" in declined("max_pool_taps", x.long(), **how)
    assert "windows of 36 elements" in declined("max_pool_taps", x, **how | {"kernel": (6, 6)})
    assert "larger than" in declined("max_pool_taps", x[..., :1, :1], **how)
    taps = run("max_pool_taps", x, **how)[1]
    assert "for sizes (11, 9)" in declined("max_pool_positions", taps, sizes=(11, 9), **how)
    assert "positions of" in declined("max_pool_positions", taps.long(), sizes=(9, 9), **how)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_avg_pool(case: tuple[Any, ...], include: bool, ceil: bool, dtype: torch.dtype) -> None:
    spatial, kernel, stride, pad = case
    x = random(2, 3, *spatial, dtype=dtype)
    wanted = AVG[len(kernel) - 1](x.double(), kernel, stride, pad, ceil, include)
    found = run(
        "avg_pool", x,
        kernel=kernel, strides=stride, pads_lo=pad, pads_hi=pad, ceil=ceil, count_include_pad=include,
    )[0]  # fmt: skip
    close(found, wanted, ulps=8 if dtype in FLOATS[:2] else 1, scale=1)


def test_avg_pool_divisor_and_dilation() -> None:
    x = random(1, 2, 6, 7)
    params = {"kernel": (3, 2), "strides": (2, 1), "pads_lo": (1, 1), "pads_hi": (1, 1)}
    found = run("avg_pool", x, divisor=5, **params)[0]
    close(found, F.avg_pool2d(x.double(), (3, 2), (2, 1), 1, divisor_override=5), ulps=8, scale=1)
    w = torch.full((1, 1, 2, 2), 0.25, dtype=torch.float64)
    found = run("avg_pool", x[:, :1], kernel=(2, 2), strides=(1, 1), pads_lo=(0, 0), pads_hi=(0, 0), dilations=(2, 3))[
        0
    ]
    close(found, F.conv2d(x[:, :1].double(), w, dilation=(2, 3)), ulps=8, scale=1)


def test_avg_pool_with_unequal_pads_counts_what_is_there() -> None:
    x = torch.arange(1.0, 6.0).reshape(1, 1, 5)
    params = {"kernel": (3,), "strides": (2,), "pads_lo": (0,), "pads_hi": (2,)}
    close(run("avg_pool", x, **params)[0], torch.tensor([[[2.0, 4.0, 5.0]]]), ulps=2)
    close(run("avg_pool", x, count_include_pad=True, **params)[0], torch.tensor([[[2.0, 4.0, 5.0 / 3]]]), ulps=2)


def test_avg_pool_window_of_padding_only_is_zero() -> None:
    x = torch.ones(1, 1, 2)
    found = run("avg_pool", x, kernel=(1,), strides=(1,), pads_lo=(1,), pads_hi=(1,))[0]
    same(found, torch.tensor([[[0.0, 1.0, 1.0, 0.0]]]))


@pytest.mark.parametrize(("p", "ceil"), [(1, False), (2, False), (3, True)])
def test_lp_pool(p: int, ceil: bool) -> None:
    x = random(2, 3, 7, 8)
    params: dict[str, Any] = {"kernel": (3, 2), "strides": (2, 2), "pads_lo": (0, 0), "pads_hi": (0, 0), "ceil": ceil}
    found = run("lp_pool", x, p=p, **params)[0]
    total = F.avg_pool2d(x.double().abs() ** p, (3, 2), (2, 2), 0, ceil, divisor_override=1)
    close(found, total ** (1 / p), ulps=16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_global_pools(dtype: torch.dtype) -> None:
    x = random(2, 3, 4, 5, dtype=dtype)
    ulps = 8 if dtype in FLOATS[:2] else 1
    close(run("global_avg_pool", x)[0], x.double().mean((2, 3), keepdim=True), ulps=ulps, scale=1)
    same(run("global_max_pool", x)[0], x.amax((2, 3), keepdim=True))
    for p in (1, 2, 3):
        wanted = (x.double().abs() ** p).sum((2, 3), keepdim=True) ** (1 / p)
        close(run("global_lp_pool", x, p=p)[0], wanted, ulps=2 * ulps)


ADAPTIVE = [
    ((7, 5), (3, 4)),
    ((8, 6), (4, 3)),
    ((5, 5), (1, 1)),
    ((3, 4), (5, 7)),
    ((10,), (4,)),
    ((4, 5, 6), (2, 3, 4)),
    ((6, 5), (1, 5)),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("spatial", "out"), ADAPTIVE)
def test_adaptive_pools(spatial: tuple[Any, ...], out: tuple[Any, ...], dtype: torch.dtype) -> None:
    x = random(2, 3, *spatial, dtype=dtype)
    n = len(out) - 1
    wanted = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[n](x.double(), out)
    close(run("adaptive_avg_pool", x, output_size=out)[0], wanted, ulps=8 if dtype in FLOATS[:2] else 1, scale=1)
    same(
        run("adaptive_max_pool", x, output_size=out)[0],
        (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[n](x, out),
    )


def test_adaptive_avg_pool_keeps_infinities_in_their_window() -> None:
    x = random(1, 1, 5, 5)
    x[0, 0, 0, 0] = math.inf
    found, wanted = run("adaptive_avg_pool", x, output_size=(3, 3))[0], F.adaptive_avg_pool2d(x, 3)
    assert torch.equal(found.isinf(), wanted.isinf()) and not found.isnan().any()


def test_pools_decline() -> None:
    x = random(1, 2, 5, 5)
    params = {"kernel": (2, 2), "strides": (1, 1), "pads_lo": (0, 0), "pads_hi": (0, 0)}
    assert "bool" in declined("max_pool", x > 0, **params)
    assert "i64" in declined("avg_pool", x.long(), **params)
    assert "negative pad" in declined("max_pool", x, **{**params, "pads_lo": (-1, 0)})
    assert "larger than" in declined("max_pool", x, **{**params, "kernel": (9, 9)})
    assert "window" in declined("max_pool", x, **{**params, "strides": (1,)})
    assert "order 0" in declined("lp_pool", x, p=0, **params)
    assert "rank 2" in declined("global_avg_pool", random(2, 3))
    assert "adaptive" in declined("adaptive_avg_pool", x, output_size=(0, 2))


def test_ceil_mode_never_starts_a_window_in_the_right_padding() -> None:
    for n, k, s, p in itertools.product(range(1, 9), (1, 2, 3, 4), (1, 2, 3, 4), (0, 1)):
        if p > k // 2 or n + 2 * p < k:
            continue  # torch refuses those
        x = random(1, 1, n)
        wanted = F.max_pool1d(x, k, s, p, ceil_mode=True)
        same(run("max_pool", x, kernel=(k,), strides=(s,), pads_lo=(p,), pads_hi=(p,), ceil=True)[0], wanted)
        found = run(
            "avg_pool", x, kernel=(k,), strides=(s,), pads_lo=(p,), pads_hi=(p,), ceil=True, count_include_pad=True
        )[0]
        close(found, F.avg_pool1d(x.double(), k, s, p, True, True), ulps=8, scale=1)
