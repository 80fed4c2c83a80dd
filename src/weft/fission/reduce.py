"""Reductions along axes. `axes` = None means all of them, () none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.fission.rule import axes_of, axis_of, drop_axes, extent, full, mean, narrow, not_float, shape_of, widen
from weft.ir.attrs import ArgAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

Axes = Sequence[int] | None


def _reduced(b: GraphBuilder, prim: Prim, x: NodeId, axes: Axes, keepdims: bool) -> NodeId | Declined:
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    return drop_axes(b, b.reduce(prim, x, found), found, keepdims=keepdims)


def reduce_sum(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_sum(x) → sum(x); bool counts as i64.

    Shapes: `axes` become 1, or go if not `keepdims`.
    Conditions: none. 16-bit floats accumulate in f32.
    Source: `torch.sum`; ONNX ReduceSum.
    """
    if b.type_of(x).dtype is DType.BOOL:
        x = b.cast(x, DType.I64)
    return _reduced(b, Prim.REDUCE_SUM, x, axes, keepdims)


def reduce_prod(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_prod(x) → prod(x); bool counts as i64.

    Shapes: as reduce_sum.
    Conditions: none. 16-bit floats accumulate in f32.
    Source: `torch.prod`; ONNX ReduceProd.
    """
    if b.type_of(x).dtype is DType.BOOL:
        x = b.cast(x, DType.I64)
    return _reduced(b, Prim.REDUCE_PROD, x, axes, keepdims)


def reduce_max(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_max(x) → max(x).

    Shapes: as reduce_sum.
    Conditions: none. NaN wins; an empty slice gives −∞ or the least integer.
    Source: `torch.amax`; ONNX ReduceMax.
    """
    return _reduced(b, Prim.REDUCE_MAX, x, axes, keepdims)


def reduce_min(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_min(x) → min(x).

    Shapes: as reduce_sum.
    Conditions: none. NaN wins; an empty slice gives ∞ or the greatest integer.
    Source: `torch.amin`; ONNX ReduceMin.
    """
    return _reduced(b, Prim.REDUCE_MIN, x, axes, keepdims)


def reduce_mean(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_mean(x) → sum(x)·(1/N).

    Shapes: as reduce_sum.
    Conditions: floats; f32 inside for 16-bit x. An empty slice gives NaN.
    Source: `torch.mean`; ONNX ReduceMean.
    """
    if problem := not_float(b, "reduce_mean", x):
        return problem
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    if not found:
        return x
    return narrow(b, drop_axes(b, mean(b, widen(b, x), found), found, keepdims=keepdims), x)


def reduce_l1(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_l1(x) → sum(|x|).

    Shapes: as reduce_sum.
    Conditions: not bool.
    Source: ONNX ReduceL1.
    """
    if b.type_of(x).dtype is DType.BOOL:
        return Declined("reduce_l1 of bool")
    return _reduced(b, Prim.REDUCE_SUM, b.apply(Prim.ABS, x), axes, keepdims)


def reduce_sum_square(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_sum_square(x) → sum(x²).

    Shapes: as reduce_sum.
    Conditions: not bool; f32 inside for 16-bit x (x² overflows f16 above 255.9).
    Source: ONNX ReduceSumSquare.
    """
    if b.type_of(x).dtype is DType.BOOL:
        return Declined("reduce_sum_square of bool")
    wide = widen(b, x)
    y = _reduced(b, Prim.REDUCE_SUM, b.apply(Prim.MUL, wide, wide), axes, keepdims)
    return y if isinstance(y, Declined) else narrow(b, y, x)


def reduce_l2(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_l2(x) → √sum(x²).

    Shapes: as reduce_sum.
    Conditions: floats; f32 inside for 16-bit x.
    Source: ONNX ReduceL2.
    """
    if problem := not_float(b, "reduce_l2", x):
        return problem
    wide = widen(b, x)
    y = _reduced(b, Prim.REDUCE_SUM, b.apply(Prim.MUL, wide, wide), axes, keepdims)
    return y if isinstance(y, Declined) else narrow(b, b.apply(Prim.SQRT, y), x)


def reduce_log_sum(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = True) -> NodeId | Declined:
    """reduce_log_sum(x) → log(sum(x)).

    Shapes: as reduce_sum.
    Conditions: floats; f32 inside for 16-bit x.
    Source: ONNX ReduceLogSum.
    """
    if problem := not_float(b, "reduce_log_sum", x):
        return problem
    y = _reduced(b, Prim.REDUCE_SUM, widen(b, x), axes, keepdims)
    return y if isinstance(y, Declined) else narrow(b, b.apply(Prim.LOG, y), x)


def norm(b: GraphBuilder, x: NodeId, *, p: float = 2.0, axes: Axes = None, keepdims: bool = False) -> NodeId | Declined:
    """norm(x) → sum(|x|^p)^(1/p); max(|x|) and min(|x|) for p = ±∞, the number of x ≠ 0 for p = 0.

    Shapes: as reduce_sum.
    Conditions: floats; f32 inside for 16-bit x.
    Source: `aten.linalg_vector_norm`.
    """
    if problem := not_float(b, "norm", x):
        return problem
    wide = widen(b, x)
    size = b.apply(Prim.ABS, wide)
    if math.isinf(p):
        y = _reduced(b, Prim.REDUCE_MAX if p > 0 else Prim.REDUCE_MIN, size, axes, keepdims)
    elif p == 0:
        present = b.cast(b.apply(Prim.NE, wide, 0.0), b.type_of(wide).dtype)
        y = _reduced(b, Prim.REDUCE_SUM, present, axes, keepdims)
    else:
        each = size if p == 1 else b.apply(Prim.MUL, wide, wide) if p == 2 else b.apply(Prim.POW, size, float(p))
        y = _reduced(b, Prim.REDUCE_SUM, each, axes, keepdims)
        if not isinstance(y, Declined) and p == 2:
            y = b.apply(Prim.SQRT, y)
        elif not isinstance(y, Declined) and p != 1:
            y = b.apply(Prim.POW, y, 1.0 / p)
    return y if isinstance(y, Declined) else narrow(b, y, x)


def var(
    b: GraphBuilder, x: NodeId, *, axes: Axes = None, correction: float = 1, keepdims: bool = False
) -> NodeId | Declined:
    """var(x) → sum(d²)/(N − correction), where d = x − mean(x).

    Shapes: as reduce_sum.
    Conditions: floats; f32 inside for 16-bit x. N ≤ correction divides by 0, as PyTorch does.
    Source: `aten.var.correction`.
    """
    found = var_mean(b, x, axes=axes, correction=correction, keepdims=keepdims)
    return found if isinstance(found, Declined) else found[0]


def std(
    b: GraphBuilder, x: NodeId, *, axes: Axes = None, correction: float = 1, keepdims: bool = False
) -> NodeId | Declined:
    """std(x) → √(sum(d²)/(N − correction)), where d = x − mean(x).

    Shapes: as reduce_sum.
    Conditions: as var.
    Source: `aten.std.correction`.
    """
    if problem := not_float(b, "std", x):
        return problem
    found = _moments(b, widen(b, x), axes, correction, keepdims)
    return found if isinstance(found, Declined) else narrow(b, b.apply(Prim.SQRT, found[0]), x)


def var_mean(
    b: GraphBuilder, x: NodeId, *, axes: Axes = None, correction: float = 1, keepdims: bool = False
) -> tuple[NodeId, ...] | Declined:
    """var_mean(x) → (sum(d²)/(N − correction), mean(x)), where d = x − mean(x).

    Shapes: as reduce_sum.
    Conditions: as var.
    Source: `aten.var_mean.correction`.
    """
    if problem := not_float(b, "var", x):
        return problem
    found = _moments(b, widen(b, x), axes, correction, keepdims)
    return found if isinstance(found, Declined) else (narrow(b, found[0], x), narrow(b, found[1], x))


def _moments(
    b: GraphBuilder, x: NodeId, axes: Axes, correction: float, keepdims: bool
) -> tuple[NodeId, NodeId] | Declined:
    """Variance and mean of an x that is already wide."""
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    mu = mean(b, x, found)
    d = b.apply(Prim.SUB, x, mu)
    left = max(extent(b, x, found) - correction, 0.0)
    total = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), found)
    v = b.apply(Prim.MUL, total, 1.0 / left) if left else b.apply(Prim.DIV, total, 0.0)
    return drop_axes(b, v, found, keepdims=keepdims), drop_axes(b, mu, found, keepdims=keepdims)


def any_(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = False) -> NodeId | Declined:
    """any(x) → max(x ≠ 0).

    Shapes: as reduce_sum; the result is bool.
    Conditions: none. An empty slice gives False; NaN counts as true.
    Source: `torch.any`.
    """
    return _reduced(b, Prim.REDUCE_MAX, b.cast(x, DType.BOOL), axes, keepdims)


def all_(b: GraphBuilder, x: NodeId, *, axes: Axes = None, keepdims: bool = False) -> NodeId | Declined:
    """all(x) → min(x ≠ 0).

    Shapes: as reduce_sum; the result is bool.
    Conditions: none. An empty slice gives True.
    Source: `torch.all`.
    """
    return _reduced(b, Prim.REDUCE_MIN, b.cast(x, DType.BOOL), axes, keepdims)


def argmax(
    b: GraphBuilder, x: NodeId, *, axis: int | None = None, keepdims: bool = True, select_last: bool = False
) -> NodeId | Declined:
    """argmax(x) → argmax(x); select_last → (n − 1) − argmax(reversed x).

    Shapes: `axis` becomes 1, or goes if not `keepdims`; None is the flat position. The result is i64.
    Conditions: a non-empty axis. The first maximum, or with `select_last` the last; NaN counts as the maximum.
    Source: `torch.argmax`; ONNX ArgMax.
    """
    return _arg(b, Prim.ARGMAX, x, axis, keepdims, select_last)


def argmin(
    b: GraphBuilder, x: NodeId, *, axis: int | None = None, keepdims: bool = True, select_last: bool = False
) -> NodeId | Declined:
    """argmin(x) → argmin(x); select_last → (n − 1) − argmin(reversed x).

    Shapes: as argmax.
    Conditions: as argmax; NaN counts as the minimum.
    Source: `torch.argmin`; ONNX ArgMin.
    """
    return _arg(b, Prim.ARGMIN, x, axis, keepdims, select_last)


def _arg(
    b: GraphBuilder, prim: Prim, x: NodeId, axis: int | None, keepdims: bool, select_last: bool
) -> NodeId | Declined:
    t = b.type_of(x)
    if axis is None:
        flat = _arg(b, prim, b.reshape(x, (t.size,)), 0, False, select_last)
        return flat if isinstance(flat, Declined) or not keepdims else b.reshape(flat, (1,) * t.rank)
    k = axis_of(axis, t.rank)
    if isinstance(k, Declined):
        return k
    if t.rank == 0:
        return full(b, 0, DType.I64)
    n = t.shape[k]
    if n == 0:
        return Declined(f"{prim.value} along an empty axis")
    if select_last:
        starts = tuple(n - 1 if i == k else 0 for i in range(t.rank))
        x = b.slice(x, starts, t.shape, tuple(-1 if i == k else 1 for i in range(t.rank)))
    at = b.add(prim, x, attrs=ArgAttrs(k))
    if select_last:
        at = b.apply(Prim.SUB, full(b, n - 1, DType.I64, shape_of(b, at)), at)
    return drop_axes(b, at, (k,), keepdims=keepdims)


def max_dim(b: GraphBuilder, x: NodeId, *, axis: int, keepdims: bool = False) -> tuple[NodeId, ...] | Declined:
    """max_dim(x) → (max(x), argmax(x)).

    Shapes: `axis` becomes 1, or goes if not `keepdims`; the positions are i64.
    Conditions: a non-empty axis.
    Source: `aten.max.dim`.
    """
    return _with_position(b, Prim.REDUCE_MAX, Prim.ARGMAX, x, axis, keepdims)


def min_dim(b: GraphBuilder, x: NodeId, *, axis: int, keepdims: bool = False) -> tuple[NodeId, ...] | Declined:
    """min_dim(x) → (min(x), argmin(x)).

    Shapes: as max_dim.
    Conditions: a non-empty axis.
    Source: `aten.min.dim`.
    """
    return _with_position(b, Prim.REDUCE_MIN, Prim.ARGMIN, x, axis, keepdims)


def _with_position(
    b: GraphBuilder, value: Prim, position: Prim, x: NodeId, axis: int, keepdims: bool
) -> tuple[NodeId, ...] | Declined:
    at = _arg(b, position, x, axis, keepdims, False)
    if isinstance(at, Declined):
        return at
    top = _reduced(b, value, x, (axis,), keepdims)
    return top if isinstance(top, Declined) else (top, at)
