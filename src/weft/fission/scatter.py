"""Writing by index as sums over what is written: gradients of what reads by index, with one order of addition."""

from __future__ import annotations

import math

from weft.fission.rule import axis_of, narrow, shape_of, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def scatter_one(
    b: GraphBuilder, x: NodeId, idx: NodeId, src: NodeId, *, axis: int, add: bool = False
) -> NodeId | Declined:
    """scatter_one(x, i, s) → select(iota = i, s, x); with `add` x + select(iota = i, s, 0).

    Shapes: i and s have the shape of x but for `axis`, where they have 1.
    Conditions: one type, no bool to be added; integer indices in [0, n). One outside writes nothing.
    Source: `aten.scatter`, `aten.scatter_add`.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined):
        return k
    one = tuple(1 if d == k else n for d, n in enumerate(shape))
    if not shape or shape_of(b, idx) != one or shape_of(b, src) != one or not b.type_of(idx).dtype.is_integer:
        return Declined(f"scatter of more than one element of a row of {b.type_of(x)}")
    if b.type_of(src).dtype is not b.type_of(x).dtype or (add and b.type_of(x).dtype is DType.BOOL):
        return Declined(f"scatter of {b.type_of(src)} into {b.type_of(x)}")
    place = b.apply(Prim.EQ, b.iota(shape, k, DType.I64), b.cast(idx, DType.I64))
    if not add:
        return b.apply(Prim.SELECT, place, src, x)
    return b.apply(Prim.ADD, x, b.apply(Prim.SELECT, place, src, b.scalar(0, b.type_of(x).dtype)))


FEW_PLACES, MOST_LOOKS = 64, 1 << 26
"""Places, or writes, among which each place looks for its own; how often all look."""


def scatter_sum(b: GraphBuilder, src: NodeId, idx: NodeId, *, size: int, axis: int = 0) -> NodeId | Declined:
    """scatter_sum(s, i) → Σ_k select(i_k = iota, s_k, 0) along `axis`, in the order of k.

    Shapes: i has the shape of s, or (k,) for the k slices of s along `axis`; the result that of s with `size` there.
    Conditions: numbers; integer indices in [0, size), any other writes nothing; at most 64 places, or 64 indices of a
    row, and 2²⁶ comparisons. f32 inside for 16 bits, rounded once.
    Source: the gradients of `aten.gather`, `aten.index` and `aten.embedding`.
    """
    shape, at = shape_of(b, src), shape_of(b, idx)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined):
        return k
    if not shape or at not in (shape, shape[k : k + 1]) or not b.type_of(idx).dtype.is_integer:
        return Declined(f"scatter_sum of {b.type_of(src)} by {b.type_of(idx)}")
    if b.type_of(src).dtype is DType.BOOL or size < 1 or 0 in shape:
        return Declined(f"scatter_sum of {b.type_of(src)} into {size} places")
    if min(size, shape[k]) > FEW_PLACES or size * math.prod(shape) > MOST_LOOKS:
        return Declined(f"scatter_sum of {shape[k]} into {size} places")
    wide = b.reshape(widen(b, src), (*shape[:k], 1, *shape[k:]))
    behind = len(shape) - k - 1
    own = (*shape[:k], 1, *shape[k:]) if at == shape else (1, shape[k], *(1,) * behind)
    places = b.iota((size, *(1,) * (behind + 1)), 0, DType.I64)
    hit = b.apply(Prim.EQ, b.reshape(b.cast(idx, DType.I64), own), places)
    added = b.apply(Prim.SELECT, hit, wide, b.scalar(0, b.type_of(wide).dtype))
    total = b.reduce(Prim.REDUCE_SUM, added, (k + 1,))
    return narrow(b, b.reshape(total, (*shape[:k], size, *shape[k + 1 :])), src)
