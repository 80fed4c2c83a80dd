"""Resizing along axes: nearest, linear and cubic, each a gather by constant indices per axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.fission import resize_table
from weft.fission.resize_table import Axis
from weft.fission.rule import dtype_of, full, keywords_of, narrow, not_float, shape_of, table, widen
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def resize_nearest(
    b: GraphBuilder,
    x: NodeId,
    *,
    sizes: Sequence[int],
    scales_text: str = "",
    coordinate_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    roi_text: str = "",
    extrapolation: float = 0.0,
) -> NodeId | Declined:
    """resize_nearest(x) → gather(x, table) per resized axis.

    Shapes: `sizes` is the whole result shape. `scales_text` holds one number per axis, "2.0,1.5"; empty: the quotient.
    Conditions: non-empty axes; any element type. `roi_text` holds starts, then ends, for tf_crop_and_resize, where
    positions outside the input give `extrapolation`.
    Source: ONNX Resize; `aten.upsample_nearest2d` with the torch_nearest coordinates and floor.
    """
    placed = _placed(shape_of(b, x), sizes, scales_text, roi_text, coordinate_mode)
    if isinstance(placed, Declined):
        return placed
    axes, places = placed
    y = x
    for k, (axis, at) in enumerate(zip(axes, places, strict=True)):
        index = resize_table.nearest(at, axis.size, nearest_mode)
        if isinstance(index, Declined):
            return index
        if not _stays(axis, index):
            y = b.add(Prim.GATHER, y, b.constant(index), attrs=GatherAttrs(k))
    return _extrapolated(b, y, axes, places, extrapolation) if coordinate_mode == "tf_crop_and_resize" else y


def _weighted(
    b: GraphBuilder,
    x: NodeId,
    kind: str,
    *,
    sizes: Sequence[int],
    scales_text: str = "",
    coordinate_mode: str = "half_pixel",
    cubic_coeff: float = -0.75,
    antialias: bool = False,
    exclude_outside: bool = False,
    roi_text: str = "",
    extrapolation: float = 0.0,
) -> NodeId | Declined:
    if problem := not_float(b, f"resize_{kind}", x):
        return problem
    placed = _placed(shape_of(b, x), sizes, scales_text, roi_text, coordinate_mode)
    if isinstance(placed, Declined):
        return placed
    axes, places = placed
    y = widen(b, x)
    for k, (axis, at) in enumerate(zip(axes, places, strict=True)):
        if _stays(axis, at):
            continue
        index, weight = resize_table.taps(
            at, axis, kind, cubic=cubic_coeff, antialias=antialias, exclude_outside=exclude_outside
        )
        y = _along(b, y, k, index, weight)
    if coordinate_mode == "tf_crop_and_resize":
        y = _extrapolated(b, y, axes, places, extrapolation)
    return narrow(b, y, x)


@keywords_of(_weighted, without=("cubic_coeff",))
def resize_linear(b: GraphBuilder, x: NodeId, **how: Any) -> NodeId | Declined:
    """resize_linear(x) → gather(x, i)·(1 − w) + gather(x, i + 1)·w per resized axis; antialias → sum of all its taps.

    Shapes: as resize_nearest.
    Conditions: floats, non-empty axes; f32 inside for 16-bit x.
    Source: ONNX Resize; `aten.upsample_bilinear2d`.
    """
    return _weighted(b, x, "linear", **how)


@keywords_of(_weighted)
def resize_cubic(b: GraphBuilder, x: NodeId, **how: Any) -> NodeId | Declined:
    """resize_cubic(x) → Σ gather(x, i + j)·wⱼ over four taps per resized axis; antialias → sum of all its taps.

    Shapes: as resize_nearest.
    Conditions: floats, non-empty axes; f32 inside for 16-bit x.
    Source: ONNX Resize; `aten.upsample_bicubic2d` (coefficient −0.75).
    """
    return _weighted(b, x, "cubic", **how)


def resize_nearest_gradient(
    b: GraphBuilder, dy: NodeId, *, sizes: Sequence[int], scales_text: str = "", exact: bool = False
) -> NodeId | Declined:
    """resize_nearest_gradient(dy) → reduce_sum of the copies of an element, per axis; uneven ones by a table.

    Shapes: dy as the result of the resize; `sizes` is the shape of x. `scales_text` as in resize_nearest.
    Conditions: floats, non-empty axes; f32 inside for 16 bits. `exact`: positions from the centres of the pixels.
    Source: `aten.upsample_nearest2d_backward`.
    """
    if problem := not_float(b, "resize_nearest_gradient", dy):
        return problem
    axes = _axes(tuple(sizes), shape_of(b, dy), scales_text, "", "asymmetric")
    if isinstance(axes, Declined):
        return axes
    y = widen(b, dy)
    for k, axis in enumerate(axes):
        places = resize_table.coordinates(axis, "torch_nearest_exact" if exact else "torch_nearest")
        assert not isinstance(places, Declined), "a mode of the table's own"
        index = np.minimum(np.floor(places), axis.size - 1).astype(np.int64)
        shape = shape_of(b, y)
        if _stays(axis, index):
            continue
        if axis.out % axis.size == 0 and np.array_equal(index, np.arange(axis.out) // (axis.out // axis.size)):
            split = b.reshape(y, (*shape[:k], axis.size, axis.out // axis.size, *shape[k + 1 :]))
            y = b.reshape(b.reduce(Prim.REDUCE_SUM, split, (k + 1,)), (*shape[:k], axis.size, *shape[k + 1 :]))
        else:
            y = _along(b, y, k, *resize_table.transposed(index[:, None], np.ones((axis.out, 1)), axis.size))
    return narrow(b, y, dy)


def _weighted_gradient(
    b: GraphBuilder,
    dy: NodeId,
    kind: str,
    *,
    sizes: Sequence[int],
    scales_text: str = "",
    coordinate_mode: str = "half_pixel",
    cubic_coeff: float = -0.75,
    antialias: bool = False,
) -> NodeId | Declined:
    if problem := not_float(b, f"resize_{kind}_gradient", dy):
        return problem
    placed = _placed(tuple(sizes), shape_of(b, dy), scales_text, "", coordinate_mode)
    if isinstance(placed, Declined):
        return placed
    axes, places = placed
    y = widen(b, dy)
    for k, (axis, at) in enumerate(zip(axes, places, strict=True)):
        if _stays(axis, at):
            continue
        taps = resize_table.taps(at, axis, kind, cubic=cubic_coeff, antialias=antialias, exclude_outside=antialias)
        y = _along(b, y, k, *resize_table.transposed(*taps, axis.size))
    return narrow(b, y, dy)


@keywords_of(_weighted_gradient, without=("cubic_coeff",))
def resize_linear_gradient(b: GraphBuilder, dy: NodeId, **how: Any) -> NodeId | Declined:
    """resize_linear_gradient(dy) → Σ gather(dy, those that read the element)·w per resized axis.

    Shapes: dy as the result of the resize; `sizes` is the shape of x.
    Conditions: floats, non-empty axes; f32 inside for 16 bits.
    Source: `aten.upsample_bilinear2d_backward`.
    """
    return _weighted_gradient(b, dy, "linear", **how)


@keywords_of(_weighted_gradient)
def resize_cubic_gradient(b: GraphBuilder, dy: NodeId, **how: Any) -> NodeId | Declined:
    """resize_cubic_gradient(dy) → Σ gather(dy, those that read the element)·w per resized axis.

    Shapes: dy as the result of the resize; `sizes` is the shape of x.
    Conditions: floats, non-empty axes; f32 inside for 16 bits.
    Source: `aten.upsample_bicubic2d_backward`.
    """
    return _weighted_gradient(b, dy, "cubic", **how)


def _placed(
    shape: tuple[int, ...], sizes: Sequence[int], scales_text: str, roi_text: str, mode: str
) -> tuple[list[Axis], list[npt.NDArray[np.float64]]] | Declined:
    """What is done to each axis, and where each result lies in the operand."""
    axes = _axes(shape, sizes, scales_text, roi_text, mode)
    if isinstance(axes, Declined):
        return axes
    places = _coordinates(axes, mode)
    return places if isinstance(places, Declined) else (axes, places)


def _stays(axis: Axis, at: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> bool:
    """Whether every element stays where it is."""
    return axis.out == axis.size and np.array_equal(at, np.arange(axis.size))


def _coordinates(axes: Sequence[Axis], mode: str) -> list[npt.NDArray[np.float64]] | Declined:
    """Per axis, where each result lies in the operand."""
    found = []
    for axis in axes:
        at = resize_table.coordinates(axis, mode)
        if isinstance(at, Declined):
            return at
        found.append(at)
    return found


def _along(b: GraphBuilder, x: NodeId, k: int, index: npt.NDArray[np.int64], weight: npt.NDArray[np.float64]) -> NodeId:
    """Σ_j gather(x, index[:, j])·weight[:, j] along axis k; unrolled up to four taps, else one reduction."""
    dtype, trailing = dtype_of(b, x), (1,) * (b.type_of(x).rank - k - 1)
    live = [j for j in range(index.shape[1]) if weight[:, j].any()]
    if len(live) > 4:
        near = b.add(Prim.GATHER, x, b.constant(index), attrs=GatherAttrs(k))
        scaled = b.apply(Prim.MUL, near, table(b, weight.reshape(*weight.shape, *trailing), dtype))
        total = b.reduce(Prim.REDUCE_SUM, scaled, (k + 1,))
        shape = shape_of(b, total)
        return b.reshape(total, shape[: k + 1] + shape[k + 2 :])
    terms = []
    for j in live:
        near = b.add(Prim.GATHER, x, b.constant(np.ascontiguousarray(index[:, j])), attrs=GatherAttrs(k))
        terms.append(b.apply(Prim.MUL, near, table(b, weight[:, j].reshape(-1, *trailing), dtype)))
    y = terms[0]
    for term in terms[1:]:
        y = b.apply(Prim.ADD, y, term)
    return y


def _extrapolated(
    b: GraphBuilder, y: NodeId, axes: Sequence[Axis], places: Sequence[npt.NDArray[np.float64]], value: float
) -> NodeId:
    """select(any coordinate lies outside, value, y)."""
    for k, (axis, at) in enumerate(zip(axes, places, strict=True)):
        outside = (at < 0) | (at > axis.size - 1)
        if outside.any():
            column = b.constant(outside.reshape(-1, *(1,) * (len(axes) - k - 1)))
            y = b.apply(Prim.SELECT, column, full(b, float(value), dtype_of(b, y)), y)
    return y


def _axes(
    shape: tuple[int, ...], sizes: Sequence[int], scales_text: str, roi_text: str, mode: str
) -> list[Axis] | Declined:
    """What is done to each axis; scales default to the quotients of the sizes."""
    scales, roi = _numbers(scales_text), _numbers(roi_text)
    if scales is None or roi is None:
        return Declined(f"resize with scales {scales_text!r}, region {roi_text!r}")
    if len(sizes) != len(shape) or len(scales) not in (0, len(shape)) or len(roi) not in (0, 2 * len(shape)):
        return Declined(f"resize of rank {len(shape)} to {tuple(sizes)} by {scales_text!r}")
    if min(shape, default=1) < 1 or min(sizes, default=1) < 1 or min(scales, default=1.0) <= 0:
        return Declined(f"resize of {shape} to {tuple(sizes)}")
    if mode == "tf_crop_and_resize" and not roi:
        return Declined("tf_crop_and_resize without a constant region")
    rank = len(shape)
    return [
        Axis(
            shape[k],
            sizes[k],
            scales[k] if scales else sizes[k] / shape[k],
            roi[k] if roi else 0.0,
            roi[rank + k] if roi else 1.0,
        )
        for k in range(rank)
    ]


def _numbers(text: str) -> list[float] | None:
    """Finite numbers between commas; None for any other text."""
    if not text:
        return []
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    return found if all(math.isfinite(x) for x in found) else None
