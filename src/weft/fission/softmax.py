"""softmax, log_softmax and logsumexp: everything that shifts by the maximum before exp."""

from __future__ import annotations

from collections.abc import Sequence

from weft.fission.rule import (
    axes_of,
    axis_of,
    drop_axes,
    narrow,
    not_float,
    shape_of,
    widen,
)
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def softmax(b: GraphBuilder, x: NodeId, *, axis: int) -> NodeId | Declined:
    """softmax(x) → e / sum(e), where e = exp(x − max(x)).

    Shapes: x (…, n, …) gives (…, n, …); max and sum are (…, 1, …) along `axis`.
    Conditions: a floating dtype and n ≥ 1. Finite for every finite x, since exp sees values ≤ 0. A row of only −∞,
    or one that holds +∞, gives NaN, as PyTorch's does.
    Source: safe softmax, arXiv:1805.02867, algorithm 2.
    """
    shifted = _shifted(b, x, "softmax", axis)
    if isinstance(shifted, Declined):
        return shifted
    k, d = shifted
    e = b.apply(Prim.EXP, d)
    s = b.reduce(Prim.REDUCE_SUM, e, (k,))
    return narrow(b, b.reshape(b.apply(Prim.DIV, e, s), shape_of(b, x)), x)


def log_softmax(b: GraphBuilder, x: NodeId, *, axis: int) -> NodeId | Declined:
    """log_softmax(x) → d − log(sum(exp(d))), where d = x − max(x).

    Shapes: as softmax.
    Conditions: as softmax. Never log(softmax(x)), which underflows to −∞.
    Source: orchestration of log-probabilities in PyTorch, `aten._log_softmax`.
    """
    shifted = _shifted(b, x, "log_softmax", axis)
    if isinstance(shifted, Declined):
        return shifted
    k, d = shifted
    s = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.EXP, d), (k,))
    return narrow(b, b.reshape(b.apply(Prim.SUB, d, b.apply(Prim.LOG, s)), shape_of(b, x)), x)


def logsumexp(
    b: GraphBuilder, x: NodeId, *, axes: Sequence[int] | None = None, keepdims: bool = True
) -> NodeId | Declined:
    """logsumexp(x) → m + log(sum(exp(x − m))), where m = max(x) if finite, else 0.

    Shapes: `axes` become 1, or go if not `keepdims`; None is all of them.
    Conditions: a floating dtype. A slice of only −∞ gives −∞ and one with +∞ gives +∞, without NaN.
    Source: `torch.logsumexp`; ONNX ReduceLogSumExp.
    """
    if problem := not_float(b, "logsumexp", x):
        return problem
    found = axes_of(axes, b.type_of(x).rank)
    if isinstance(found, Declined):
        return found
    wide = widen(b, x)
    top = b.reduce(Prim.REDUCE_MAX, wide, found)
    # ∞ − ∞ would be NaN, so an infinite maximum is not subtracted: exp then gives the 0 or ∞ that is meant
    m = b.apply(Prim.SELECT, b.apply(Prim.ISINF, top), 0.0, top)
    s = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.EXP, b.apply(Prim.SUB, wide, m)), found)
    y = b.apply(Prim.ADD, m, b.apply(Prim.LOG, s))
    return narrow(b, drop_axes(b, y, found, keepdims=keepdims), x)


def _shifted(b: GraphBuilder, x: NodeId, operator: str, axis: int) -> tuple[int, NodeId] | Declined:
    """The axis and x − max(x) along it in the wide type; a scalar becomes a vector of one."""
    if problem := not_float(b, operator, x):
        return problem
    k = axis_of(axis, b.type_of(x).rank)
    if isinstance(k, Declined):
        return k
    wide = widen(b, x if b.type_of(x).rank else b.reshape(x, (1,)))
    if shape_of(b, wide)[k] == 0:
        return Declined(f"{operator} along an empty axis")
    return k, b.apply(Prim.SUB, wide, b.reduce(Prim.REDUCE_MAX, wide, (k,)))
