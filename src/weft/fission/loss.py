"""Losses of classification."""

from __future__ import annotations

from typing import TypedDict, Unpack

from weft.fission.rule import ABSENT, full, keywords_of, narrow, not_float, same_dtype, shape_of, widen
from weft.fission.softmax import log_softmax
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


class _How(TypedDict, total=False):
    """Keywords that the losses share."""

    reduction: str
    ignore_index: int | None


def nll_loss_forward(
    b: GraphBuilder,
    x: NodeId,
    target: NodeId,
    weight: NodeId = ABSENT,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> tuple[NodeId, ...] | Declined:
    """nll_loss_forward(x, t, w) → (nll_loss(x, t, w), Σ w[t]).

    Shapes: as nll_loss; the sum is a scalar.
    Conditions: as nll_loss.
    Source: `aten.nll_loss_forward`.
    """
    if problem := not_float(b, "nll_loss", x, weight):
        return problem
    shape, at = shape_of(b, x), shape_of(b, target)
    if reduction not in ("none", "sum", "mean") or not b.type_of(target).dtype.is_integer or not shape:
        return Declined(f"nll_loss of {b.type_of(x)}, {b.type_of(target)}, reduction {reduction!r}")
    axis = 0 if len(shape) == 1 else 1
    if at != shape[:axis] + shape[axis + 1 :] or shape[axis] == 0:
        return Declined(f"nll_loss of {b.type_of(x)} with targets {b.type_of(target)}")
    wide = widen(b, x)
    dtype = b.type_of(wide).dtype
    zero = full(b, 0.0, dtype)
    index, valid = b.cast(target, DType.I64), ABSENT
    if ignore_index is not None:
        valid = b.apply(Prim.NE, index, full(b, ignore_index, DType.I64))
        index = b.apply(Prim.SELECT, valid, index, full(b, 0, DType.I64))
    tall = b.reshape(index, (*at[:axis], 1, *at[axis:]))
    picked = b.reshape(b.add(Prim.TAKE_ALONG, wide, tall, attrs=GatherAttrs(axis)), at)
    loss = b.apply(Prim.NEG, picked)
    w = full(b, 1.0, dtype, at)
    if weight != ABSENT:
        w = b.add(Prim.GATHER, same_dtype(b, weight, dtype), index, attrs=GatherAttrs(0))
        loss = b.apply(Prim.MUL, loss, w)
    if valid != ABSENT:
        w, loss = (b.apply(Prim.SELECT, valid, y, zero) for y in (w, loss))
    axes = tuple(range(len(at)))
    total = b.reshape(b.reduce(Prim.REDUCE_SUM, w, axes), ())
    if reduction != "none":
        loss = b.reshape(b.reduce(Prim.REDUCE_SUM, loss, axes), ())
    if reduction == "mean":
        loss = b.apply(Prim.DIV, loss, total)
    return narrow(b, loss, x), narrow(b, total, x)


@keywords_of(nll_loss_forward)
def nll_loss(
    b: GraphBuilder, x: NodeId, target: NodeId, weight: NodeId = ABSENT, **how: Unpack[_How]
) -> NodeId | Declined:
    """nll_loss(x, t, w) → −take_along(x, t)·w[t], summed, or divided by Σ w[t].

    Shapes: x (N, C, *S) or (C,), t (N, *S) or (), w (C,); "none" gives the shape of t, "sum" and "mean" a scalar.
    Conditions: floats x; integer targets in [0, C), or `ignore_index`, whose weight is 0.
    Source: `aten.nll_loss_forward`; ONNX NegativeLogLikelihoodLoss.
    """
    found = nll_loss_forward(b, x, target, weight, **how)
    return found if isinstance(found, Declined) else found[0]


@keywords_of(nll_loss_forward)
def softmax_cross_entropy(
    b: GraphBuilder, x: NodeId, target: NodeId, weight: NodeId = ABSENT, **how: Unpack[_How]
) -> tuple[NodeId, ...] | Declined:
    """softmax_cross_entropy(x, t, w) → (nll_loss(p, t, w), p), where p = log_softmax(x) along the classes.

    Shapes: as nll_loss; p has the shape of x.
    Conditions: as nll_loss.
    Source: ONNX SoftmaxCrossEntropyLoss.
    """
    p = log_softmax(b, x, axis=0 if b.type_of(x).rank == 1 else 1)
    if isinstance(p, Declined):
        return p
    found = nll_loss_forward(b, p, target, weight, **how)
    return found if isinstance(found, Declined) else (found[0], p)
