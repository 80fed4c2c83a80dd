"""Running sums and products, and linear recurrences."""

from __future__ import annotations

from weft.fission.rule import axis_of, full, not_float
from weft.ir.attrs import ScanAttrs, ScanKind
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def _scan(
    b: GraphBuilder, kind: ScanKind, operands: tuple[NodeId, ...], axis: int, exclusive: bool, reverse: bool
) -> NodeId | Declined:
    t = b.type_of(operands[-1])
    if t.dtype.is_float8:
        return Declined(f"scan of {t.dtype.value}")
    found = axis_of(axis, t.rank)
    if isinstance(found, Declined):
        return found
    if t.rank == 0 or t.shape[found] <= 1:  # nothing is carried
        first = float(kind == "prod")
        return full(b, first if t.dtype.is_float else int(first), t.dtype, t.shape) if exclusive else operands[-1]
    return b.add(Prim.SCAN, *operands, attrs=ScanAttrs(found, kind, exclusive, reverse))


def cumulative_sum(
    b: GraphBuilder, x: NodeId, *, axis: int, exclusive: bool = False, reverse: bool = False
) -> NodeId | Declined:
    """cumulative_sum(x) → scan(x); bool counts as i64.

    Shapes: any; a scalar is its own sum.
    Conditions: no 8-bit floats. 16-bit floats accumulate in f32. `exclusive`: the sum before each element, 0 at first;
    `reverse`: from the end.
    Source: `torch.cumsum`; ONNX CumSum.
    """
    if b.type_of(x).dtype is DType.BOOL:
        x = b.cast(x, DType.I64)
    return _scan(b, "sum", (x,), axis, exclusive, reverse)


def cumulative_prod(
    b: GraphBuilder, x: NodeId, *, axis: int, exclusive: bool = False, reverse: bool = False
) -> NodeId | Declined:
    """cumulative_prod(x) → scan(x); bool counts as i64.

    Shapes: as cumulative_sum.
    Conditions: as cumulative_sum; exclusive gives 1 at first.
    Source: `torch.cumprod`; ONNX CumProd.
    """
    if b.type_of(x).dtype is DType.BOOL:
        x = b.cast(x, DType.I64)
    return _scan(b, "prod", (x,), axis, exclusive, reverse)


def linear_recurrence(
    b: GraphBuilder, factor: NodeId, term: NodeId, *, axis: int, reverse: bool = False
) -> NodeId | Declined:
    """linear_recurrence(a, b) → h, where h[0] = b[0] and h[t] = a[t]·h[t-1] + b[t].

    Shapes: both alike.
    Conditions: floats of one type; 16-bit ones accumulate in f32. A value before the first is part of b[0].
    Source: arXiv:2312.00752, equation 2a; arXiv:2111.00396.
    """
    if problem := not_float(b, "linear_recurrence", factor, term):
        return problem
    if b.type_of(factor) != b.type_of(term):
        return Declined(f"linear_recurrence of {b.type_of(factor)} and {b.type_of(term)}")
    return _scan(b, "linear", (factor, term), axis, False, reverse)
