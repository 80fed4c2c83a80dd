"""The logistic function and what is built on it."""

from __future__ import annotations

from weft.fission.rule import narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def _one_plus_exp_minus(b: GraphBuilder, x: NodeId) -> NodeId:
    """1 + exp(−x) of a wide x; ∞ for x below −88 in f32, where the quotient is then the right 0."""
    return b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, x)), 1.0)


def sigmoid(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """sigmoid(x) → 1 / (1 + exp(−x)).

    Shapes: any.
    Conditions: floats; f32 inside for 16-bit x, because exp overflows f16 above 11.09.
    Source: `torch.sigmoid`; ONNX Sigmoid.
    """
    if problem := not_float(b, "sigmoid", x):
        return problem
    return narrow(b, b.apply(Prim.DIV, 1.0, _one_plus_exp_minus(b, widen(b, x))), x)


def silu(b: GraphBuilder, x: NodeId, *, alpha: float = 1.0) -> NodeId | Declined:
    """silu(x) → x / (1 + exp(−α·x)).

    Shapes: any.
    Conditions: floats; f32 inside for 16-bit x.
    Source: arXiv:1702.03118; `torch.nn.functional.silu`; ONNX Swish with its α.
    """
    if problem := not_float(b, "silu", x):
        return problem
    wide = widen(b, x)
    inner = wide if alpha == 1.0 else b.apply(Prim.MUL, wide, float(alpha))
    return narrow(b, b.apply(Prim.DIV, wide, _one_plus_exp_minus(b, inner)), x)


def log_sigmoid(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """log_sigmoid(x) → min(x, 0) − log1p(exp(−|x|)).

    Shapes: any.
    Conditions: floats; exp sees values ≤ 0 only.
    Source: `torch.nn.functional.logsigmoid`.
    """
    if problem := not_float(b, "log_sigmoid", x):
        return problem
    wide = widen(b, x)
    tail = b.apply(Prim.LOG1P, b.apply(Prim.EXP, b.apply(Prim.NEG, b.apply(Prim.ABS, wide))))
    return narrow(b, b.apply(Prim.SUB, b.apply(Prim.MIN, wide, 0.0), tail), x)


def glu(b: GraphBuilder, x: NodeId, *, axis: int = -1) -> NodeId | Declined:
    """glu([a, g]) → a / (1 + exp(−g)).

    Shapes: x (…, 2n, …) gives (…, n, …) along `axis`.
    Conditions: floats; an even size.
    Source: `torch.nn.functional.glu`.
    """
    if problem := not_float(b, "glu", x):
        return problem
    shape = b.type_of(x).shape
    if not -len(shape) <= axis < len(shape) or shape[axis] % 2:
        return Declined(f"glu along axis {axis} of {b.type_of(x)}")
    k = axis % len(shape)
    half = tuple(n // 2 if i == k else n for i, n in enumerate(shape))
    ones = (1,) * len(shape)
    a, g = (
        widen(b, b.slice(x, tuple(start if i == k else 0 for i in range(len(shape))), half, ones))
        for start in (0, shape[k] // 2)
    )
    return narrow(b, b.apply(Prim.DIV, a, _one_plus_exp_minus(b, g)), x)
