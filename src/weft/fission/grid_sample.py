"""Sampling an image at the points of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from weft.fission.rule import dtype_of, full, narrow, not_float, shape_of, widen
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

PADDINGS = ("zeros", "border", "reflection")


def grid_sample(
    b: GraphBuilder,
    x: NodeId,
    grid: NodeId,
    *,
    mode: str = "linear",
    padding: str = "zeros",
    align_corners: bool = False,
) -> NodeId | Declined:
    """grid_sample(x, g) → Σ take_along(x, corner)·weight over the 2^d corners round each point; nearest → the nearest.

    Shapes: x (N, C, *S), g (N, *O, d) with d the rank of S give (N, C, *O); g[..., 0] is the place along the last axis.
    Conditions: floats, of x in nearest mode any type; non-empty. Places and sums in f32 for 16-bit operands. -1 and 1
    are the middles of the outermost elements with align_corners, else their outer edges. Outside lies 0, the nearest
    element (border), or the image mirrored at these (reflection), where a place that is NaN is 0.
    Source: `aten.grid_sampler_2d`, `aten.grid_sampler_3d`; ONNX GridSample.
    """
    shape, points = shape_of(b, x), shape_of(b, grid)
    d = len(shape) - 2
    if problem := not_float(b, "grid_sample", *((x, grid) if mode == "linear" else (grid,))):
        return problem
    if mode not in ("linear", "nearest") or padding not in PADDINGS:
        return Declined(f"grid_sample in mode {mode} with padding {padding}")
    if d < 1 or len(points) != d + 2 or points[0] != shape[0] or points[-1] != d or 0 in (*shape, *points):
        return Declined(f"grid_sample of {b.type_of(x)} at {b.type_of(grid)}")
    sizes, out = shape[2:], points[1:-1]
    flat = (shape[0], 1, math.prod(out))
    wide = widen(b, grid)
    places = []
    for k, n in enumerate(sizes):
        along = b.slice(wide, (*(0,) * (d + 1), d - 1 - k), (*points[:-1], 1), (1,) * (d + 2))
        places.append(_place(b, b.reshape(along, flat), n, padding, align_corners=align_corners))
    image = b.reshape(x, (*shape[:2], math.prod(sizes)))
    if mode == "nearest":
        nearest = [b.apply(Prim.ROUND, p) for p in places]
        y = _taken(b, image, nearest, sizes, is_padded=padding == "zeros")
    else:
        y = _between(b, image, places, sizes, is_padded=padding == "zeros")
    return b.reshape(narrow(b, y, x), (*shape[:2], *out))


def _place(b: GraphBuilder, g: NodeId, n: int, padding: str, *, align_corners: bool) -> NodeId:
    """Where points lie along an axis of n elements, in elements."""
    above = b.apply(Prim.ADD, g, 1.0)
    if align_corners:
        at = b.apply(Prim.MUL, above, (n - 1) / 2)
    else:
        at = b.apply(Prim.MUL, b.apply(Prim.SUB, b.apply(Prim.MUL, above, float(n)), 1.0), 0.5)
    if padding == "zeros":
        return at
    if padding == "reflection":
        low, span = (0.0, n - 1.0) if align_corners else (-0.5, float(n))
        at = _mirrored(b, at, low, span) if span else b.apply(Prim.MUL, at, 0.0)
    # not the maximum, which NaN would pass: an index is made of it
    positive = b.apply(Prim.SELECT, b.apply(Prim.GT, at, 0.0), at, full(b, 0.0, dtype_of(b, at)))
    return b.apply(Prim.MIN, positive, n - 1.0)


def _mirrored(b: GraphBuilder, at: NodeId, low: float, span: float) -> NodeId:
    """Places in [low, low + span], mirrored at its ends as often as it takes."""
    away = b.apply(Prim.ABS, b.apply(Prim.SUB, at, low))
    rest = b.apply(Prim.FMOD, away, span)
    times = b.apply(Prim.FLOOR, b.apply(Prim.DIV, away, span))
    is_even = b.apply(Prim.EQ, b.apply(Prim.FMOD, times, 2.0), 0.0)
    back = b.apply(Prim.SUB, full(b, span, dtype_of(b, at)), rest)
    return b.apply(Prim.ADD, b.apply(Prim.SELECT, is_even, rest, back), low)


def _between(
    b: GraphBuilder, image: NodeId, places: Sequence[NodeId], sizes: Sequence[int], *, is_padded: bool
) -> NodeId:
    """Linear interpolation between the corners round each place."""
    below = [b.apply(Prim.FLOOR, p) for p in places]
    above = [b.apply(Prim.ADD, p, 1.0) for p in below]
    near = [b.apply(Prim.SUB, hi, p) for hi, p in zip(above, places, strict=True)]
    far = [b.apply(Prim.SUB, p, lo) for lo, p in zip(below, places, strict=True)]
    y = -1
    for corner in product((0, 1), repeat=len(sizes)):
        at = [(below, above)[side][k] for k, side in enumerate(corner)]
        weight = -1
        for part in ((near, far)[side][k] for k, side in reversed(list(enumerate(corner)))):
            weight = part if weight < 0 else b.apply(Prim.MUL, weight, part)
        # the corner above a place on the last element has no weight, but what lies there may be infinite
        value = widen(b, _taken(b, image, at, sizes, is_padded=is_padded or 1 in corner))
        term = b.apply(Prim.MUL, value, b.cast(weight, dtype_of(b, value)))
        y = term if y < 0 else b.apply(Prim.ADD, y, term)
    return y


def _taken(b: GraphBuilder, image: NodeId, at: Sequence[NodeId], sizes: Sequence[int], *, is_padded: bool) -> NodeId:
    """Elements at whole places, (N, C, P); with `is_padded` 0 where one lies outside."""
    flat, inside = -1, -1
    for place, n in zip(at, sizes, strict=True):
        held = b.apply(Prim.MIN, b.apply(Prim.MAX, place, 0.0), n - 1.0)  # an integer is made of what fits into one
        index = b.cast(held, DType.I64)
        flat = index if flat < 0 else b.apply(Prim.ADD, b.apply(Prim.MUL, flat, full(b, n, DType.I64)), index)
        if is_padded:
            within = b.apply(Prim.AND, b.apply(Prim.GE, place, 0.0), b.apply(Prim.LE, place, n - 1.0))
            inside = within if inside < 0 else b.apply(Prim.AND, inside, within)
    shape, points = shape_of(b, image), b.type_of(flat).size // shape_of(b, image)[0]
    every = (*shape[:2], points)
    found = b.add(Prim.TAKE_ALONG, image, b.broadcast(flat, every), attrs=GatherAttrs(2))
    if not is_padded:
        return found
    zero = b.constant(np.zeros((), dtype_of(b, image).numpy), dtype_of(b, image))
    return b.apply(Prim.SELECT, inside, found, zero)
