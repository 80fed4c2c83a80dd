"""Scaled dot-product attention."""

from __future__ import annotations

import math

from weft.fission.rule import ABSENT, full, narrow, not_float, shape_of, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def sdpa(
    b: GraphBuilder,
    q: NodeId,
    k: NodeId,
    v: NodeId,
    mask: NodeId = ABSENT,
    *,
    scale: float | None = None,
    causal: bool = False,
    enable_gqa: bool = False,
    causal_offset: int = 0,
    softcap: float = 0.0,
) -> NodeId | Declined:
    """sdpa(q, k, v, mask) → softmax(cap((q @ kᵀ)·scale) + mask) @ v, cap(s) = c·tanh(s/c).

    Shapes: q (*B, H, L, E), k (*B, Hk, S, E), v (*B, Hk, S, F), mask broadcasts to (*B, H, L, S); gives (*B, H, L, F).
    With `enable_gqa` Hk divides H, and consecutive query heads share one head of k and v.
    Conditions: floats of one type. A bool mask keeps where true; a float mask is added. `causal` keeps the columns
    j ≤ i + causal_offset. The softmax is in f32 for 16-bit types. A row without any column left is 0, not NaN.
    Source: `torch.nn.functional.scaled_dot_product_attention`.
    """
    if problem := not_float(b, "sdpa", q, k, v):
        return problem
    if not b.type_of(q).dtype is b.type_of(k).dtype is b.type_of(v).dtype:
        return Declined("sdpa of several element types")
    s, t, u = shape_of(b, q), shape_of(b, k), shape_of(b, v)
    if min(len(s), len(t), len(u)) < 2 or s[-1] != t[-1] or t[-2] != u[-2]:
        return Declined(f"sdpa of {b.type_of(q)}, {b.type_of(k)}, {b.type_of(v)}")
    if t[-2] == 0 or s[-1] == 0:
        return Declined("sdpa over nothing")
    grouped = enable_gqa and len(s) >= 3 and s[-3] != t[-3]
    rows = s
    if grouped:
        if len(s) != len(t) or len(s) != len(u) or t[-3] == 0 or s[-3] % t[-3] or t[-3] != u[-3]:
            return Declined(f"sdpa with {s[-3]} query heads for {t[-3:]} and {u[-3:]}")
        # the heads that share k and v become further rows of one product: no copies of k and v
        rows = (*s[:-3], t[-3], s[-3] // t[-3] * s[-2], s[-1])
    scores = _scores(b, b.reshape(q, rows), k, 1.0 / math.sqrt(s[-1]) if scale is None else scale)
    if grouped:
        scores = b.reshape(scores, (*shape_of(b, scores)[:-3], *s[-3:-1], t[-2]))
    if softcap:
        inner = b.apply(Prim.TANH, b.apply(Prim.DIV, scores, float(softcap)))
        scores = b.apply(Prim.MUL, inner, float(softcap))
    if causal:
        scores = _causal(b, scores, causal_offset)
    if mask != ABSENT:
        scores = _masked(b, scores, mask)
    weights = narrow(b, _softmax(b, scores, safe=mask != ABSENT or (causal and causal_offset < 0)), q)
    if grouped:
        weights = b.reshape(weights, (*shape_of(b, weights)[:-3], *rows[-3:-1], t[-2]))
    y = b.add(Prim.MATMUL, weights, v)
    return b.reshape(y, (*shape_of(b, y)[:-3], *s[-3:-1], u[-1])) if grouped else y


def _scores(b: GraphBuilder, q: NodeId, k: NodeId, scale: float) -> NodeId:
    """(q @ kᵀ)·scale in the wide type."""
    rank = b.type_of(k).rank
    if b.type_of(q).dtype is DType.F16 and 0 < abs(scale) < 1:
        # q·k may pass 65504 where q·k·scale does not: the power of two, exact in f16, goes to q before the product
        fraction, exponent = math.frexp(scale)
        if abs(fraction) == 0.5:
            fraction, exponent = 2 * fraction, exponent - 1
        q, scale = b.apply(Prim.MUL, q, 2.0**exponent), fraction
    turned = b.transpose(k, (*range(rank - 2), rank - 1, rank - 2))
    scores = widen(b, b.add(Prim.MATMUL, q, turned))
    return scores if scale == 1 else b.apply(Prim.MUL, scores, float(scale))


def _causal(b: GraphBuilder, scores: NodeId, offset: int) -> NodeId:
    shape = shape_of(b, scores)[-2:]
    row, column = b.iota(shape, 0, DType.I64), b.iota(shape, 1, DType.I64)
    last = b.apply(Prim.ADD, row, full(b, offset, DType.I64)) if offset else row
    return b.apply(Prim.SELECT, b.apply(Prim.LE, column, last), scores, full(b, -math.inf, b.type_of(scores).dtype))


def _masked(b: GraphBuilder, scores: NodeId, mask: NodeId) -> NodeId:
    t = b.type_of(scores)
    if b.type_of(mask).dtype is DType.BOOL:
        return b.apply(Prim.SELECT, b.broadcast(mask, t.shape), scores, full(b, -math.inf, t.dtype))
    return b.apply(Prim.ADD, scores, b.broadcast(b.cast(mask, t.dtype), t.shape))


def _softmax(b: GraphBuilder, s: NodeId, *, safe: bool) -> NodeId:
    """Softmax of the last axis; with `safe` a row of only −∞ gives zeros."""
    axis = (b.type_of(s).rank - 1,)
    m = b.reduce(Prim.REDUCE_MAX, s, axis)
    if safe:
        m = b.apply(Prim.SELECT, b.apply(Prim.EQ, m, -math.inf), 0.0, m)
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, s, m))
    total = b.reduce(Prim.REDUCE_SUM, e, axis)
    if safe:
        total = b.apply(Prim.SELECT, b.apply(Prim.EQ, total, 0.0), 1.0, total)
    return b.apply(Prim.DIV, e, total)
