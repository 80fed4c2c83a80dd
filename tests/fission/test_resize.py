"""Resizing against torch, and against the ONNX formulas written out element by element."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, close, declined, random, run, same

SIZES = [(8, 10), (3, 4), (5, 7), (11, 3), (1, 1), (4, 14), (5, 1)]
"""Result sizes for a 5 × 7 input."""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_linear_and_cubic_equal_torch(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(2, 3, 5, 7, dtype=dtype)
    full = (2, 3, *size)
    ulps = 16 if dtype in FLOATS[:2] else 1
    for mode, rule in (("bilinear", "resize_linear"), ("bicubic", "resize_cubic")):
        wanted = F.interpolate(x.double(), size, mode=mode)
        close(run(rule, x, sizes=full, coordinate_mode="half_pixel")[0], wanted, ulps=ulps, scale=2)
        wanted = F.interpolate(x.double(), size, mode=mode, align_corners=True)
        close(run(rule, x, sizes=full, coordinate_mode="align_corners")[0], wanted, ulps=ulps, scale=2)


def test_linear_in_one_and_three_dimensions() -> None:
    x = random(2, 3, 6)
    close(run("resize_linear", x, sizes=(2, 3, 10))[0], F.interpolate(x.double(), 10, mode="linear"), ulps=16, scale=2)
    x = random(1, 2, 3, 4, 5)
    wanted = F.interpolate(x.double(), (5, 4, 7), mode="trilinear")
    close(run("resize_linear", x, sizes=(1, 2, 5, 4, 7))[0], wanted, ulps=16, scale=2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_nearest_equals_torch(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = (random(2, 3, 5, 7) * 50).abs().to(dtype)
    full = (2, 3, *size)
    torch_modes = {"nearest": "torch_nearest", "nearest-exact": "torch_nearest_exact"}
    for mode, coordinates in torch_modes.items():
        wanted = F.interpolate(x.double(), size, mode=mode).to(dtype)
        same(run("resize_nearest", x, sizes=full, coordinate_mode=coordinates, nearest_mode="floor")[0], wanted)


def test_nearest_equals_torch_for_many_sizes() -> None:
    for n, out in itertools.product(range(1, 24), range(1, 24)):
        x = torch.arange(float(n)).reshape(1, 1, n)
        for mode, coordinates in {"nearest": "torch_nearest", "nearest-exact": "torch_nearest_exact"}.items():
            found = run("resize_nearest", x, sizes=(1, 1, out), coordinate_mode=coordinates, nearest_mode="floor")[0]
            same(found, F.interpolate(x, out, mode=mode))


def onnx_coordinate(mode: str, i: int, n: int, out: int, scale: float) -> float:
    match mode:
        case "half_pixel":
            return (i + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            adjustment = out / (scale * n)
            return n / 2 * (1 - adjustment) + (i + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (i + 0.5) / scale - 0.5 if out > 1 else 0.0
        case "align_corners":
            return i * (n - 1) / (out - 1) if out > 1 else 0.0
        case "asymmetric":
            return i / scale
        case _:
            return (i + 0.5) / scale


def onnx_nearest(mode: str, x: float) -> int:
    low = math.floor(x)
    if x == low:
        return low
    match mode:
        case "round_prefer_floor":
            return low if x - low <= 0.5 else low + 1
        case "round_prefer_ceil":
            return low if x - low < 0.5 else low + 1
        case "floor":
            return low
        case _:
            return low + 1


MODES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest_follows_onnx(mode: str, nearest: str) -> None:
    for n, scale in itertools.product((1, 4, 5, 8), (0.5, 0.6, 0.8, 1.0, 2.0, 2.3, 3.0)):
        out = math.floor(n * scale)
        if not out:
            continue  # an empty result
        x = torch.arange(float(n))
        at = [onnx_nearest(nearest, onnx_coordinate(mode, i, n, out, scale)) for i in range(out)]
        found = run(
            "resize_nearest", x, sizes=(out,), scales_text=repr(scale), coordinate_mode=mode, nearest_mode=nearest
        )[0]
        same(found, torch.tensor([float(min(max(k, 0), n - 1)) for k in at]))


def keys(d: float, a: float) -> float:
    d = abs(d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
def test_linear_and_cubic_follow_onnx(mode: str, exclude: bool, antialias: bool) -> None:
    for n, scale in itertools.product((1, 4, 7), (0.3, 0.6, 0.8, 1.0, 2.3)):
        out = math.floor(n * scale)
        if not out:
            continue  # an empty result
        x = random(n, dtype=torch.float64)
        shrink = min(scale, 1.0) if antialias else 1.0
        for rule, kernel, reach in (
            ("resize_linear", lambda d: max(0.0, 1 - abs(d)), 1),
            ("resize_cubic", lambda d: keys(d, -0.5), 2),
        ):
            wanted = []
            for i in range(out):
                c = onnx_coordinate(mode, i, n, out, scale)
                span = range(math.floor(c) - math.ceil(reach / shrink), math.floor(c) + math.ceil(reach / shrink) + 2)
                w = {k: kernel((k - c) * shrink) for k in span if not exclude or 0 <= k < n}
                total = sum(w.values()) if exclude or antialias else 1.0
                wanted.append(sum(v / total * float(x[min(max(k, 0), n - 1)]) for k, v in w.items()))
            params: dict[str, Any] = {} if rule == "resize_linear" else {"cubic_coeff": -0.5}
            found = run(
                rule, x,
                sizes=(out,), scales_text=repr(scale), coordinate_mode=mode, exclude_outside=exclude,
                antialias=antialias, **params,
            )[0]  # fmt: skip
            close(found, torch.tensor(wanted, dtype=torch.float64), ulps=64, scale=4)


def test_crop_and_resize() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    params: dict[str, Any] = {"sizes": (3, 3), "coordinate_mode": "tf_crop_and_resize", "roi_text": "0.4,0.6,0.6,0.8"}
    found = run("resize_linear", x, **params)[0]
    rows, cols = [0.4 * 3 + i * 0.2 * 3 / 2 for i in range(3)], [0.6 * 3 + i * 0.2 * 3 / 2 for i in range(3)]
    close(found, torch.tensor([[4 * r + c for c in cols] for r in rows]), ulps=16)
    params["roi_text"] = "0.4,0.6,1.2,1.7"
    found = run("resize_linear", x, extrapolation=10.0, **params)[0]
    assert (found[2] == 10).all() and (found[:, 2] == 10).all() and found[0, 0] != 10
    assert "constant region" in declined("resize_linear", x, sizes=(3, 3), coordinate_mode="tf_crop_and_resize")


def test_identity_and_whole_factors_cost_nothing_extra() -> None:
    x = random(1, 2, 3, 3)
    same(run("resize_nearest", x, sizes=(1, 2, 3, 3))[0], x)
    same(run("resize_linear", x, sizes=(1, 2, 3, 3))[0], x)
    same(run("resize_cubic", x, sizes=(1, 2, 3, 3))[0], x)


@pytest.mark.parametrize("rule", ["resize_nearest", "resize_linear", "resize_cubic"])
def test_resize_declines(rule: str) -> None:
    x = random(2, 3)
    assert "coordinates 'other'" in declined(rule, x, sizes=(4, 6), coordinate_mode="other")
    assert "resize" in declined(rule, x, sizes=(4, 6, 1))
    assert "resize" in declined(rule, x, sizes=(4, 6), scales_text="2.0")
    assert "resize" in declined(rule, x, sizes=(4, 6), scales_text="2.0,import os")
    assert "resize" in declined(rule, x, sizes=(4, 6), scales_text="2.0,nan")
    assert "resize" in declined(rule, x, sizes=(4, 6), scales_text="2.0,-1.0")
    assert "resize" in declined(rule, x[:0], sizes=(4, 6))
    if rule != "resize_nearest":
        assert "i64" in declined(rule, x.long(), sizes=(4, 6))
    else:
        assert "nearest mode" in declined(rule, x, sizes=(4, 6), nearest_mode="up")
