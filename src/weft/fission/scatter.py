"""Writing by index where one place is written in each row: what a gather of one element per row has as gradient."""

from __future__ import annotations

from weft.fission.rule import axis_of, shape_of
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
