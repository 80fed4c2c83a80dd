"""Sampling at the points of a grid against torch, and against the formula written out point by point."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, close, declined, random, run, same

MODES = {"linear": "bilinear", "nearest": "nearest"}
PADDINGS = ("zeros", "border", "reflection")
ALIGNED = pytest.mark.parametrize("aligned", [False, True])
PADDED = pytest.mark.parametrize("padding", PADDINGS)


def grid(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Points inside and, up to twice as far from the middle, outside."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 4 - 2).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@ALIGNED
@PADDED
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_torch(mode: str, padding: str, aligned: bool, dtype: torch.dtype) -> None:
    x, g = random(2, 3, 5, 7, dtype=dtype), grid(2, 4, 6, 2, dtype=dtype)
    # torch computes in the type of its operands, 16 bits included
    wanted = F.grid_sample(x.double(), g.double(), MODES[mode], padding, aligned)
    found = run("grid_sample", x, g, mode=mode, padding=padding, align_corners=aligned)[0]
    assert found.dtype is dtype
    close(found, wanted, ulps=64 if dtype in FLOATS[:2] else 1, scale=3)


@ALIGNED
@PADDED
@pytest.mark.parametrize("mode", MODES)
def test_it_equals_torch_in_three_dimensions(mode: str, padding: str, aligned: bool) -> None:
    x, g = random(2, 3, 4, 5, 3), grid(2, 3, 2, 4, 3)
    wanted = F.grid_sample(x.double(), g.double(), MODES[mode], padding, aligned)
    found = run("grid_sample", x, g, mode=mode, padding=padding, align_corners=aligned)[0]
    close(found, wanted, ulps=128, scale=3)


@PADDED
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 1)])
def test_an_axis_of_one_element(size: tuple[int, int], padding: str) -> None:
    x, g = random(1, 2, *size), grid(1, 3, 4, 2)
    for aligned in (False, True):
        wanted = F.grid_sample(x, g, "bilinear", padding, aligned)
        close(run("grid_sample", x, g, padding=padding, align_corners=aligned)[0], wanted, ulps=16, scale=2)


@PADDED
@pytest.mark.parametrize("mode", MODES)
def test_places_that_are_no_numbers_or_far_away(mode: str, padding: str) -> None:
    """As the framework has them on a CPU; no index is made of what fits into no integer."""
    x = random(1, 2, 4, 4)
    bad = [math.nan, math.inf, -math.inf, 1e30, -1e30]
    g = torch.tensor([[v, 0.1] for v in bad] + [[0.1, v] for v in bad]).reshape(1, 10, 1, 2)
    wanted = F.grid_sample(x, g, MODES[mode], padding, align_corners=False)
    found = run("grid_sample", x, g, mode=mode, padding=padding)[0]
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_what_lies_beyond_the_last_element_has_no_part() -> None:
    x = torch.tensor([[[[1.0, 2.0], [3.0, math.inf]]]])
    g = torch.tensor([[[[-1.0, 1.0], [-1.0, -1.0]]]])
    for padding in PADDINGS:
        found = run("grid_sample", x, g, padding=padding, align_corners=True)[0]
        torch.testing.assert_close(found, F.grid_sample(x, g, "bilinear", padding, True), equal_nan=True)


def by_hand(x: Any, g: Any) -> float:
    """Bilinear, zeros, edges at -1 and 1: the formula of ONNX GridSample for one point of one channel."""
    height, width = x.shape
    at = [((v + 1) * n - 1) / 2 for v, n in zip(g.tolist(), (width, height), strict=True)]
    total = 0.0
    for i in range(math.floor(at[1]), math.floor(at[1]) + 2):
        for j in range(math.floor(at[0]), math.floor(at[0]) + 2):
            if 0 <= i < height and 0 <= j < width:
                total += float(x[i, j]) * (1 - abs(at[1] - i)) * (1 - abs(at[0] - j))
    return total


def test_it_equals_the_formula_point_by_point() -> None:
    x, g = random(1, 1, 4, 6, dtype=torch.float64), grid(1, 5, 5, 2, dtype=torch.float64)
    found = run("grid_sample", x, g)[0]
    wanted = torch.tensor([by_hand(x[0, 0], point) for point in g.reshape(-1, 2)], dtype=torch.float64)
    close(found.reshape(-1), wanted, ulps=16, scale=2)


def test_integers_are_sampled_by_the_nearest_alone() -> None:
    x, g = (random(1, 2, 4, 4) * 50).to(torch.int64), grid(1, 3, 3, 2)
    wanted = F.grid_sample(x.double(), g.double(), "nearest", "border", False).to(torch.int64)
    same(run("grid_sample", x, g, mode="nearest", padding="border")[0], wanted)
    assert "i64" in declined("grid_sample", x, g)


def test_it_declines() -> None:
    x, g = random(2, 3, 5, 7), grid(2, 4, 6, 2)
    assert "cubic" in declined("grid_sample", x, g, mode="cubic")
    assert "wrap" in declined("grid_sample", x, g, padding="wrap")
    assert "grid_sample of" in declined("grid_sample", x, g[:1])
    assert "grid_sample of" in declined("grid_sample", x, g[..., :1])
    assert "grid_sample of" in declined("grid_sample", x[..., :0], g)
    assert "i64" in declined("grid_sample", x, g.long())
