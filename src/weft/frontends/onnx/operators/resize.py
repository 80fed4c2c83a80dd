"""Resize, Upsample, AffineGrid, GridSample: interpolation whose weights are computed while importing.

A rule of `fission` is asked first. What it declines (antialias, excluded borders, crops) is separable: one small
dense matrix per axis, multiplied in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from weft.frontends.onnx.call import Call, Handler, Result
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_F64 = npt.NDArray[np.float64]


def _scales(c: Call, given: Iterable[float]) -> list[float]:
    found = [float(v) for v in given]
    if not all(0 < v < math.inf for v in found):
        c.fail(f"scales {found[:8]}: each must be positive and finite")
    return found


def _sizes(c: Call) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Output shape, scale of each dimension, region of interest (starts, then ends)."""
    shape = c.shape(0)
    rank = len(shape)
    axes = tuple(c.norm(a, rank) for a in (c.get("axes") or range(rank)))
    roi = [0.0] * rank + [1.0] * rank
    scales, sizes = [1.0] * rank, list(shape)
    if c.op == "Upsample" or c.opset < 11:
        given = c.get("scales") if c.op == "Upsample" and c.opset < 9 else [float(v) for v in c.value(1).reshape(-1)]
        if given is None:
            given = (1.0, 1.0, c.get("height_scale", 1.0), c.get("width_scale", 1.0))
        scales = _scales(c, given)
        return tuple(math.floor(n * s) for n, s in zip(shape, scales, strict=True)), tuple(scales), tuple(roi)
    if c.has(1) and c.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        found = [float(v) for v in c.value(1).reshape(-1)]
        if len(found) != 2 * len(axes):
            c.fail(f"{len(found)} numbers for the region of {len(axes)} axes")
        for k, a in enumerate(axes):
            roi[a], roi[rank + a] = found[k], found[len(axes) + k]
    if c.has(2) and c.type(2).size:
        found = _scales(c, c.value(2).reshape(-1))
        for a, s in zip(axes, found, strict=True):
            scales[a], sizes[a] = s, math.floor(shape[a] * s)
    else:
        wanted = c.ints(3)
        policy = c.get("keep_aspect_ratio_policy", "stretch")
        ratios = [n / shape[a] for a, n in zip(axes, wanted, strict=True)]
        if policy != "stretch":
            common = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [common] * len(axes)
            wanted = tuple(math.floor(common * shape[a] + 0.5) for a in axes)
        for a, s, n in zip(axes, ratios, wanted, strict=True):
            scales[a], sizes[a] = s, n
    return tuple(sizes), tuple(scales), tuple(roi)


def coordinates(mode: str, n: int, out: int, scale: float, start: float, end: float) -> _F64:
    """Where each output element lies in the input, per the specification's `coordinate_transformation_mode`."""
    x: _F64 = np.arange(out, dtype=np.float64)
    width = scale * n
    match mode:
        case "half_pixel":
            return (x + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (x + 0.5) / scale - 0.5 if width != 1 else np.full(out, -0.5)
        case "align_corners":
            return x * (n - 1) / (width - 1) if width != 1 else np.zeros(out)
        case "asymmetric":
            return x / scale
        case "tf_half_pixel_for_nn":
            return (x + 0.5) / scale
        case "half_pixel_symmetric":
            return n / 2 * (1 - out / width) + (x + 0.5) / scale - 0.5
        case "tf_crop_and_resize":
            if width == 1:
                return np.full(out, (start + end) * (n - 1) / 2)
            return start * (n - 1) + x * (end - start) * (n - 1) / (width - 1)
    raise ValueError(f"coordinate_transformation_mode {mode!r}")


def _nearest(at: _F64, mode: str, n: int) -> npt.NDArray[np.int64]:
    rounding: dict[str, Callable[[_F64], _F64]] = {
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
        "simple": np.trunc,
    }
    near: npt.NDArray[np.int64] = np.clip(rounding[mode](at), 0, n - 1).astype(np.int64)
    return near


def _cubic(v: _F64, a: float) -> _F64:
    v = np.abs(v)
    inner = (a + 2) * v**3 - (a + 3) * v**2 + 1
    outer = a * v**3 - 5 * a * v**2 + 8 * a * v - 4 * a
    return np.where(v <= 1, inner, np.where(v < 2, outer, 0.0))


def weights(at: _F64, n: int, mode: str, scale: float, a: float, *, antialias: bool, exclude: bool) -> _F64:
    """(out, n): share of each input element; what lies outside counts for the border element, or not at all."""
    radius = 1.0 if mode == "linear" else 2.0
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = math.ceil(radius / shrink) + 1
    base = np.floor(at).astype(np.int64)
    taps = base[:, None] + np.arange(-reach, reach + 1)[None, :]
    distance = (taps - at[:, None]) * shrink
    w = np.clip(1 - np.abs(distance), 0, 1) if mode == "linear" else _cubic(distance, a)
    if antialias:
        w = w / w.sum(1, keepdims=True)
    if exclude:
        w = np.where((taps < 0) | (taps >= n), 0.0, w)
        w = w / w.sum(1, keepdims=True)
    table = np.zeros((at.size, n))
    rows = np.broadcast_to(np.arange(at.size)[:, None], taps.shape)
    np.add.at(table, (rows, np.clip(taps, 0, n - 1)), w)
    return table


def along(c: Call, x: NodeId, axis: int, table: _F64) -> NodeId:
    """Multiply a (out, n) matrix into one axis."""
    b, t = c.b, c.b.type_of(x)
    perm = (*(k for k in range(t.rank) if k != axis), axis)
    moved = b.transpose(x, perm)
    lead = b.type_of(moved).shape[:-1]
    flat = b.reshape(moved, (math.prod(lead), t.shape[axis]))
    made = b.add(Prim.MATMUL, flat, b.constant(np.asarray(table.T, order="C").astype(t.dtype.numpy), t.dtype))
    back = tuple(sorted(range(t.rank), key=lambda k: perm[k]))
    return b.transpose(b.reshape(made, (*lead, table.shape[0])), back)


_RULES = {"nearest": "resize_nearest", "linear": "resize_linear", "cubic": "resize_cubic"}
_RULE_MODES = {"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"}


def _resize(c: Call) -> Result:
    sizes, scales, roi = _sizes(c)
    t = c.type(0)
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(c.get("mode", "nearest"), c.get("mode", "nearest"))
    old = c.op == "Upsample" or c.opset < 11
    place = c.get("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    near = c.get("nearest_mode", "floor" if old else "round_prefer_floor")
    a, exclude = float(c.get("cubic_coeff_a", -0.75)), bool(c.get("exclude_outside", 0))
    antialias = bool(c.get("antialias", 0))
    if 0 in t.shape or 0 in sizes:
        return Declined("Resize of an empty tensor")
    # ONNX aligns corners by the scaled size before it is rounded down; the rule, as PyTorch, by the rounded one
    fractional = any(n != m * s for n, m, s in zip(sizes, t.shape, scales, strict=True))
    if place in _RULE_MODES and not exclude and not antialias and not (place == "align_corners" and fractional):
        params: dict[str, object] = {
            "sizes": sizes,
            "scales_text": ",".join(map(repr, scales)),
            "coordinate_mode": place,
        }
        if mode == "nearest":
            params["nearest_mode"] = near
        if mode == "cubic":
            params["cubic_coeff"] = a
        try:
            made = c.rule(_RULES[mode], c.x(0), **params)
        except (KeyError, TypeError, ValueError):
            made = Declined("no such rule")
        if not isinstance(made, Declined):
            return made
    return _separable(
        c, sizes, scales, roi, mode=mode, place=place, near=near, a=a, exclude=exclude, antialias=antialias
    )


def _separable(
    c: Call, sizes: tuple[int, ...], scales: tuple[float, ...], roi: tuple[float, ...], *,
    mode: str, place: str, near: str, a: float, exclude: bool, antialias: bool,
) -> Result:  # fmt: skip
    b, t, rank = c.b, c.type(0), c.type(0).rank
    x = c.x(0)
    if mode != "nearest" and t.dtype is not DType.F64:
        x = b.cast(x, DType.F32)
    inside: NodeId | None = None
    for axis in range(rank):
        n, out, scale = t.shape[axis], sizes[axis], scales[axis]
        crop = place == "tf_crop_and_resize"
        if n == out and scale == 1.0 and (not crop or (roi[axis], roi[rank + axis]) == (0.0, 1.0)):
            continue
        at = coordinates(place, n, out, scale, roi[axis], roi[rank + axis])
        if mode == "nearest":
            x = b.add(Prim.GATHER, x, b.constant(_nearest(at, near, n)), attrs=GatherAttrs(axis))
        else:
            x = along(c, x, axis, weights(at, n, mode, scale, a, antialias=antialias, exclude=exclude))
        if crop:
            ok = b.constant((at >= 0) & (at <= n - 1))
            shaped = b.reshape(ok, tuple(out if k == axis else 1 for k in range(rank)))
            inside = shaped if inside is None else b.apply(Prim.AND, inside, shaped)
    if inside is not None:
        x = b.apply(Prim.SELECT, inside, x, float(c.get("extrapolation_value", 0.0)))
    if not t.dtype.is_float and mode != "nearest":
        return Declined("interpolation of integers")
    return b.cast(x, t.dtype)


def affine_grid(size: Sequence[int], *, align: bool) -> _F64:
    """Homogeneous coordinates of every output point: (prod(spatial), len(spatial) + 1), last axis first."""
    axes = []
    for n in size:
        steps = np.arange(n, dtype=np.float64)
        axes.append(
            np.linspace(-1, 1, n) if align and n > 1 else ((2 * steps + 1) / n - 1 if not align else np.zeros(n))
        )
    mesh = np.meshgrid(*axes, indexing="ij")
    return np.stack([*(m.reshape(-1) for m in reversed(mesh)), np.ones(math.prod(size))], 1)


def _affine_grid(c: Call) -> Result:
    b, t = c.b, c.type(0)
    size = c.ints(1)
    batch, spatial = size[0], size[2:]
    base = affine_grid(spatial, align=bool(c.get("align_corners", 0)))
    points = b.constant(base.astype(t.dtype.numpy), t.dtype)
    made = b.add(Prim.MATMUL, points, b.transpose(c.x(0), (0, 2, 1)))
    return b.reshape(made, (batch, *spatial, len(spatial)))


_SAMPLED = {"bilinear": "linear", "bicubic": "cubic"}
"""What modes were called before opset 20."""


def _grid_sample(c: Call) -> Result:
    mode, padding = str(c.get("mode", "linear")), str(c.get("padding_mode", "zeros"))
    aligned = bool(c.get("align_corners", 0))
    return c.rule("grid_sample", c.x(0), c.x(1), mode=_SAMPLED.get(mode, mode), padding=padding, align_corners=aligned)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Resize"): _resize,
    ("", "Upsample"): _resize,
    ("", "AffineGrid"): _affine_grid,
    ("", "GridSample"): _grid_sample,
}
