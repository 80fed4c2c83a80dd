"""Rules of backward passes against float64 finite differences on small sizes, and against eager's own gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import declined, random, run, same

from weft.fission import apply
from weft.fission.pool_gradient import taps_behind
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

Function = Callable[[torch.Tensor], torch.Tensor]
KINDS = (torch.float32, torch.float16, torch.bfloat16)


def _differences(function: Function, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """d(function · dy)/dx by central differences in float64."""
    step, found = 1e-6, torch.empty_like(x)
    for k in range(x.numel()):
        moved = [x.clone(), x.clone()]
        moved[0].view(-1)[k] += step
        moved[1].view(-1)[k] -= step
        high, low = (torch.sum(function(m) * dy) for m in moved)
        found.view(-1)[k] = (high - low) / (2 * step)
    return found


def _gradient(function: Function, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x, dy)[0]


def _check(rule: str, operands: Callable[[torch.dtype], Sequence[Any]], function: Callable[[torch.dtype], Function],
           x: torch.Tensor, dy: torch.Tensor, **params: Any) -> None:  # fmt: skip
    """In float64 the finite differences; in each other type at most 1.2 times as far from the exact one as eager."""
    wide = torch.float64
    (exact,) = run(rule, *operands(wide), **params)
    torch.testing.assert_close(exact, _differences(function(wide), x, dy), rtol=1e-6, atol=1e-7)
    for kind in KINDS:
        rounded = [t.to(kind) for t in (x, dy)]
        # exact for the values that both are given
        of_rounded = [t if t is None or not t.is_floating_point() else t.to(wide) for t in operands(kind)]
        (wanted,) = run(rule, *of_rounded, **params)
        (found,) = run(rule, *operands(kind), **params)
        eager = _gradient(function(kind), *rounded)
        assert found.dtype is eager.dtype and found.shape == eager.shape
        mine, own = (float((t.to(wide) - wanted).abs().max()) for t in (found, eager))
        last = float(wanted.abs().max()) * torch.finfo(kind).eps  # one rounding of the sum, one of the result
        assert mine <= max(1.2 * own, last), (kind, mine, own, last)


CONVOLUTIONS = [
    # spatial, kernel, stride, pad, dilation, groups
    ((6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1), ((7, 6), (3, 2), (2, 3), (1, 0), (1, 1), 1),
    ((6, 6), (2, 2), (2, 2), (0, 0), (1, 1), 2), ((9,), (3,), (2,), (2,), (2,), 1),
    ((4, 4), (1, 1), (2, 2), (0, 0), (1, 1), 4),
    ((3, 4, 3), (2, 2, 2), (1, 2, 1), (1, 0, 1), (1, 1, 1), 2),
]  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_conv_data_gradient(case: tuple[Any, ...], transposed: bool) -> None:
    spatial, kernel, stride, pad, dilation, groups = case
    x = random(2, 4, *spatial, dtype=torch.float64)
    w = random(4, 4 // groups, *kernel, seed=1, dtype=torch.float64)
    forward: Any = [F.conv1d, F.conv2d, F.conv3d][len(kernel) - 1]
    if transposed:
        forward = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][len(kernel) - 1]

    def function(kind: torch.dtype) -> Function:
        return lambda y: forward(y, w.to(kind), None, stride, pad, dilation=dilation, groups=groups)

    dy = random(*function(torch.float64)(x).shape, seed=2, dtype=torch.float64)
    _check(
        "conv_data_gradient", lambda kind: [dy.to(kind), w.to(kind)], function, x, dy,
        sizes=spatial, strides=stride, pads=pad, dilations=dilation, groups=groups, transposed=transposed,
    )  # fmt: skip


WEIGHTS = [
    # channels, spatial, kernel, stride, pad, dilation, groups
    *((8, *c) for c in CONVOLUTIONS), *((4, *c) for c in CONVOLUTIONS),
    (8, (6, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1), (8, (7,), (1,), (1,), (0,), (1,), 2),
    (8, (7, 6), (1, 1), (2, 3), (0, 0), (1, 1), 1), (8, (6, 5), (1, 1), (1, 1), (1, 2), (1, 1), 1),
    (8, (9, 8), (3, 3), (2, 2), (1, 1), (2, 1), 1), (8, (9, 9), (3, 2), (3, 2), (2, 0), (2, 3), 1),
    (16, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), 2), (4, (9, 8), (3, 3), (2, 1), (1, 0), (1, 2), 4),
    (8, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1), 8), (8, (7, 7), (2, 2), (4, 3), (0, 0), (1, 1), 1),
    (2, (16, 9), (8, 7), (8, 7), (0, 0), (1, 1), 1),
]  # fmt: skip
"""Channels of 8 and more in a group: ranges of rows; fewer, or windows apart: side by side; one: sums."""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", WEIGHTS)
def test_conv_weight_and_bias_gradient(case: tuple[Any, ...], transposed: bool) -> None:
    channels, spatial, kernel, stride, pad, dilation, groups = case
    x = random(2, channels, *spatial, dtype=torch.float64)
    w, bias = (random(*s, seed=1, dtype=torch.float64) for s in ((channels, channels // groups, *kernel), (channels,)))
    forward: Any = [F.conv1d, F.conv2d, F.conv3d][len(kernel) - 1]
    if transposed:
        forward = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][len(kernel) - 1]
    how: dict[str, Any] = {"stride": stride, "padding": pad, "dilation": dilation, "groups": groups}
    given: dict[str, Any] = {"kernel": kernel, "strides": stride, "pads": pad, "dilations": dilation, "groups": groups}
    shape = forward(x, w, **how).shape
    dy = random(*shape, seed=2, dtype=torch.float64)
    (exact,) = run("conv_weight_gradient", dy, x, **given, transposed=transposed)
    wanted = _differences(lambda v: forward(x, v, **how), w, dy)
    torch.testing.assert_close(exact, wanted, rtol=1e-6, atol=1e-7)
    terms = (x if transposed else dy).numel() // channels
    for kind in KINDS:
        # which of two sums is nearer is chance: the norms of eight draws' errors
        squares = torch.zeros(3, dtype=torch.float64)
        for seed in range(8):
            dy, x = (random(*s, seed=3 + seed + k, dtype=kind) for k, s in ((0, shape), (9, x.shape)))
            mine, truth = (
                run("conv_weight_gradient", dy.to(to), x.to(to), **given, transposed=transposed)[0].double()
                for to in (kind, torch.float64)
            )
            eager = _gradient(partial(forward, x, **how), w.to(kind), dy).double()
            squares += torch.stack([(t * t).sum() for t in (mine - truth, eager - truth, truth)])
        errors = squares.sqrt()
        # f32: 1.2 times what is to be expected of the terms added one by one, which eager's are not
        plain = 1.2 * torch.finfo(torch.float32).eps / 2 * (terms / 6) ** 0.5 if kind is torch.float32 else 0.0
        assert errors[0] <= max(1.2 * errors[1], max(torch.finfo(kind).eps, plain) * errors[2]), (kind, errors)
    dy, x = (random(*s, seed=k, dtype=torch.float64) for k, s in enumerate((shape, x.shape)))
    _check(
        "conv_bias_gradient",
        lambda kind: [dy.to(kind)],
        lambda kind: lambda v: forward(x.to(kind), w.to(kind), v, **how),
        bias,
        dy,
    )


POOLS = [
    # spatial, kernel, stride, pad
    ((6, 4), (2, 2), (2, 2), (0, 0)), ((7, 8), (3, 3), (2, 2), (1, 1)), ((5, 6), (3, 2), (1, 3), (1, 0)),
    ((7, 5), (2, 2), (3, 2), (0, 1)), ((4, 4), (4, 4), (1, 1), (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("case", "dilation"), [*((c, 1) for c in POOLS), (((9, 8), (3, 2), (2, 1), (1, 1)), 2)])
def test_max_pool_gradient(case: tuple[Any, ...], dilation: int, ceil: bool) -> None:
    spatial, kernel, stride, pad = case
    x = random(2, 2, *spatial, dtype=torch.float64)
    more: dict[str, Any] = {"dilation": dilation, "ceil_mode": ceil}
    y, at = F.max_pool2d(x, kernel, stride, pad, return_indices=True, **more)
    dy = random(*y.shape, seed=1, dtype=torch.float64)
    given = {"kernel": kernel, "strides": stride, "pads": pad, "dilations": (dilation, dilation), "ceil": ceil}
    found = run("max_pool_gradient", dy, at, sizes=spatial, **given)[0]
    function = lambda v: F.max_pool2d(v, kernel, stride, pad, **more)  # noqa: E731
    torch.testing.assert_close(found, _differences(function, x, dy), rtol=1e-6, atol=1e-7)
    for kind in KINDS:
        mine = run("max_pool_gradient", dy.to(kind), at, sizes=spatial, **given)[0]
        wanted = run("max_pool_gradient", dy.to(kind).double(), at, sizes=spatial, **given)[0]
        torch.testing.assert_close(mine.double(), wanted, rtol=torch.finfo(kind).eps, atol=4 * torch.finfo(kind).eps)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("case", "dilation"), [*((c, 1) for c in POOLS), (((9, 8), (3, 2), (2, 1), (1, 1)), 2)])
def test_max_pool_gradient_by_tap_numbers(case: tuple[Any, ...], dilation: int, ceil: bool) -> None:
    """Of images full of ties, bit for bit what autograd and positions give: all add the windows in one order."""
    spatial, kernel, stride, pad = case
    x = random(2, 2, *spatial, dtype=torch.float64).round()
    x[0, 0] = -torch.inf
    given = {"kernel": kernel, "strides": stride, "pads": pad, "dilations": (dilation, dilation), "ceil": ceil}
    y, at = F.max_pool2d(x, kernel, stride, pad, dilation, ceil_mode=ceil, return_indices=True)
    dy = random(*y.shape, seed=1, dtype=torch.float64)
    taps = run("max_pool_taps", x, **given)[1]
    found = run("max_pool_taps_gradient", dy, taps, sizes=spatial, **given)[0]
    same(found, _gradient(lambda v: F.max_pool2d(v, kernel, stride, pad, dilation, ceil), x, dy))
    for kind in KINDS:
        wanted = run("max_pool_gradient", dy.to(kind), at, sizes=spatial, **given)[0]
        same(run("max_pool_taps_gradient", dy.to(kind), taps, sizes=spatial, **given)[0], wanted)


def test_only_positions_of_the_same_windows_have_tap_numbers_behind_them() -> None:
    how: dict[str, Any] = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1)}
    b = GraphBuilder()
    y, taps = apply(b, "max_pool_taps", [b.input(TensorType(DType.F32, (1, 2, 8, 8)))], how)  # type: ignore[misc]
    (at,) = apply(b, "max_pool_positions", [taps], {"sizes": (8, 8), **how})  # type: ignore[misc]
    assert taps_behind(b, at, sizes=(8, 8), **how) == taps
    assert taps_behind(b, at, sizes=(8, 7), **how) is None
    assert taps_behind(b, at, sizes=(8, 8), **how | {"pads": (0, 1)}) is None
    assert taps_behind(b, b.apply(Prim.ADD, at, at), sizes=(8, 8), **how) is None
    assert taps_behind(b, b.input(TensorType(DType.I64, (1, 2, 4, 4))), sizes=(8, 8), **how) is None
    assert taps_behind(b, b.cast(b.cast(y, DType.U8), DType.I64), sizes=(8, 8), **how) is None


def test_max_pool_gradient_goes_to_the_first_of_equal_values() -> None:
    x = torch.zeros(1, 1, 5, 5)
    wanted = _gradient(lambda v: F.max_pool2d(v, 3, 2, 1), x, torch.ones(1, 1, 3, 3))
    at = F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]
    given: dict[str, Any] = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1)}
    same(run("max_pool_gradient", torch.ones(1, 1, 3, 3), at, sizes=(5, 5), **given)[0], wanted)


@pytest.mark.parametrize(
    ("ceil", "include", "divisor"), [*itertools.product((False, True), (False, True), (0,)), (False, True, 3)]
)
@pytest.mark.parametrize("case", POOLS)
def test_avg_pool_gradient(case: tuple[Any, ...], ceil: bool, include: bool, divisor: int) -> None:
    spatial, kernel, stride, pad = case
    x = random(2, 2, *spatial, dtype=torch.float64)
    function: Function = lambda v: F.avg_pool2d(v, kernel, stride, pad, ceil, include, divisor or None)  # noqa: E731
    dy = random(*function(x).shape, seed=1, dtype=torch.float64)
    _check(
        "avg_pool_gradient", lambda kind: [dy.to(kind)], lambda kind: function, x, dy, sizes=spatial, kernel=kernel,
        strides=stride, pads=pad, ceil=ceil, count_include_pad=include, divisor=divisor,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(6, 4), (7, 5), (3, 2), (2, 3)])
def test_adaptive_avg_pool_gradient(sizes: tuple[int, int]) -> None:
    x, dy = random(2, 2, *sizes, dtype=torch.float64), random(2, 2, 3, 2, seed=1, dtype=torch.float64)
    _check(
        "adaptive_avg_pool_gradient", lambda kind: [dy.to(kind)],
        lambda kind: lambda v: F.adaptive_avg_pool2d(v, (3, 2)), x, dy, sizes=sizes,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_scatter_one(kind: torch.dtype) -> None:
    x, src = (random(*shape, seed=k).mul(8).to(kind) for k, shape in enumerate(((3, 5, 2), (3, 1, 2))))
    at = torch.tensor([[[4, 0]], [[2, 2]], [[0, 1]]])
    same(run("scatter_one", x, at, src, axis=1)[0], x.scatter(1, at, src))
    same(run("scatter_one", x, at.int(), src, axis=-2, add=True)[0], x.scatter_add(1, at, src))


def _converted(dy: torch.Tensor, at: torch.Tensor, kind: torch.dtype) -> list[torch.Tensor]:
    return [dy.to(kind), at]


def _same_in_all(function: Function) -> Callable[[torch.dtype], Function]:
    return lambda kind: function


@pytest.mark.parametrize(
    ("shape", "axis", "count"), [((5, 3), 0, 7), ((2, 4, 3), 1, 9), ((2, 3, 4), 2, 5), ((6,), 0, 2)]
)
def test_scatter_sum(shape: tuple[int, ...], axis: int, count: int) -> None:
    src, size = (*shape[:axis], count, *shape[axis + 1 :]), shape[axis]
    x, dy = random(*shape, dtype=torch.float64), random(*src, seed=1, dtype=torch.float64)
    g = torch.Generator().manual_seed(2)
    for at in (torch.randint(size, (count,), generator=g), torch.randint(size, src, generator=g)):
        each = at.dim() == len(shape) and at.shape == dy.shape
        function: Function = partial(torch.gather if each else torch.index_select, dim=axis, index=at)
        _check("scatter_sum", partial(_converted, dy, at), _same_in_all(function), x, dy, size=size, axis=axis)
    outside = torch.full((count,), -1)
    same(run("scatter_sum", dy, outside, size=size, axis=axis)[0], torch.zeros(shape, dtype=torch.float64))


def test_scatter_sum_of_integers_and_nan() -> None:
    src, at = torch.arange(6).reshape(3, 2), torch.tensor([1, 1, 0])
    same(run("scatter_sum", src, at.int(), size=3)[0], torch.tensor([[4, 5], [2, 4], [0, 0]]))
    found = run("scatter_sum", torch.tensor([float("nan"), 1.0, float("inf")]), at, size=3)[0]
    same(found, torch.tensor([float("inf"), float("nan"), 0.0]))


RESIZED = [
    # spatial, size, scale
    ((3,), None, (2.0,)), ((4, 5), None, (2.0, 2.0)), ((4, 5), (9, 7), None), ((6, 5), (3, 4), None),
    ((4, 3), None, (1.5, 2.5)), ((2, 3, 2), (4, 6, 2), None), ((4, 5), (4, 1), None),
]  # fmt: skip


@pytest.mark.parametrize(("spatial", "size", "scale"), RESIZED)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "aligned", "cubic"])
def test_resize_gradients(spatial: tuple[int, ...], size: Any, scale: Any, mode: str) -> None:
    rank, aligned = len(spatial), mode == "aligned"
    if mode == "cubic" and rank != 2:
        return
    name = {"linear": ["linear", "bilinear", "trilinear"][rank - 1], "cubic": "bicubic"}.get(mode, mode)
    how: dict[str, Any] = {"size": size, "scale_factor": scale, "mode": name}
    if aligned:
        how.update(mode=["linear", "bilinear", "trilinear"][rank - 1], align_corners=True)
    x = random(2, 2, *spatial, dtype=torch.float64)
    function: Function = lambda v: F.interpolate(v, **how)  # noqa: E731
    dy = random(*function(x).shape, seed=1, dtype=torch.float64)
    params: dict[str, Any] = {"sizes": x.shape, "scales_text": ""}
    if scale is not None:
        params["scales_text"] = ",".join(map(repr, (1.0, 1.0, *scale)))
    if mode.startswith("nearest"):
        params["exact"] = mode == "nearest-exact"
    else:
        params["coordinate_mode"] = "align_corners" if aligned else "half_pixel"
    rule = f"resize_{ {'aligned': 'linear', 'nearest-exact': 'nearest'}.get(mode, mode) }_gradient"
    (found,) = run(rule, dy, **params)
    torch.testing.assert_close(found, _differences(function, x, dy), rtol=1e-6, atol=1e-7)
    for kind in KINDS:
        # ATen's weights of aligned corners and cubes are those of f32: it is held to a few of their digits
        (mine,) = run(rule, dy.to(kind), **params)
        (wanted,) = run(rule, dy.to(kind).double(), **params)
        own = _gradient(function, x.to(kind), dy.to(kind))
        errors = [float((t.double() - wanted).abs().max()) for t in (mine, own)]
        assert errors[0] <= max(1.2 * errors[1], float(wanted.abs().max()) * torch.finfo(kind).eps), (kind, errors)


def test_what_gradients_decline() -> None:
    x, i = random(1, 2, 4, 4), torch.zeros(1, 2, 4, 4, dtype=torch.int64)
    pool: dict[str, Any] = {"kernel": (2, 2), "strides": (2, 2), "pads": (0, 0)}
    assert "for sizes (11, 9)" in declined("avg_pool_gradient", x, sizes=(11, 9), **pool)
    assert "for sizes (4, 4)" in declined("max_pool_gradient", x, i, sizes=(4, 4), **pool)
    assert "for sizes (4, 4)" in declined("max_pool_taps_gradient", x, i.to(torch.uint8), sizes=(4, 4), **pool)
    assert "of i64" in declined("max_pool_taps_gradient", x, i, sizes=(8, 8), **pool)
    assert "of i64" in declined("max_pool_taps_gradient", i, i, sizes=(8, 8), **pool)
    assert "of i64" in declined("avg_pool_gradient", i, sizes=(8, 8), **pool)
    assert "for sizes (8,)" in declined("adaptive_avg_pool_gradient", x, sizes=(8,))
    conv: dict[str, Any] = {"strides": (1, 1), "pads": (0, 0), "dilations": (1, 1)}
    assert "of size (9, 9)" in declined("conv_data_gradient", x, random(2, 3, 3, 3), sizes=(9, 9), **conv)
    assert "of i64" in declined("conv_bias_gradient", i)
    one: dict[str, Any] = {**conv, "kernel": (1, 1)}
    assert "conv_weight_gradient of" in declined("conv_weight_gradient", x, random(1, 2, 4, 5), **one)
    assert "conv_weight_gradient of" in declined("conv_weight_gradient", x, random(2, 2, 4, 4), **one)
    assert "conv_weight_gradient of" in declined("conv_weight_gradient", x, random(1, 2, 4, 4).half(), **one)
    assert "conv_weight_gradient of" in declined("conv_weight_gradient", x, x, **one, groups=3)
    assert "of i64" in declined("conv_weight_gradient", i, i, **one)
    wide: dict[str, Any] = {**conv, "kernel": (10, 5)}
    assert "more than 49 taps" in declined("conv_weight_gradient", x, random(1, 8, 13, 8), **wide)
    assert "more than 49 taps" in declined("conv_weight_gradient", x, random(1, 2, 13, 8), **wide, groups=2)
    assert "more than one element" in declined("scatter_one", x, i, x, axis=1)
    assert "axis 7" in declined("scatter_one", x, i, x, axis=7)
    many = torch.zeros(65, dtype=torch.int64)
    assert "of 65 into 66 places" in declined("scatter_sum", random(65, 2), many, size=66)
    assert "scatter_sum of" in declined("scatter_sum", random(65, 2), many[1:], size=3)
    assert "scatter_sum of" in declined("scatter_sum", random(65, 2), random(65), size=3)
    assert "of 65x2xbool" in declined("scatter_sum", random(65, 2) > 0, many, size=3)
    assert "axis 2" in declined("scatter_sum", random(65, 2), many, size=3, axis=2)
    for rule in ("resize_nearest_gradient", "resize_linear_gradient", "resize_cubic_gradient"):
        assert "of rank 3" in declined(rule, x, sizes=(1, 2, 4))
        assert "of i64" in declined(rule, i, sizes=(1, 2, 2, 2))
    assert "coordinates 'odd'" in declined("resize_linear_gradient", x, sizes=(1, 2, 2, 2), coordinate_mode="odd")
