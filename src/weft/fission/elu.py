"""The exponential linear units."""

from __future__ import annotations

from weft.fission.rule import narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def elu(
    b: GraphBuilder, x: NodeId, *, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> NodeId | Declined:
    """elu(x) → scale·select(x > 0, x, α·expm1(input_scale·min(x, 0))).

    Shapes: any.
    Conditions: floats. The min keeps the branch that is not taken finite; expm1 keeps small |x|.
    Source: arXiv:1511.07289; `aten.elu`; ONNX Elu.
    """
    if problem := not_float(b, "elu", x):
        return problem
    wide = widen(b, x)
    below = b.apply(Prim.MIN, wide, 0.0)
    if input_scale != 1:
        below = b.apply(Prim.MUL, below, float(input_scale))
    negative = b.apply(Prim.EXPM1, below)
    if alpha != 1:
        negative = b.apply(Prim.MUL, negative, float(alpha))
    y = b.apply(Prim.SELECT, b.apply(Prim.GT, wide, 0.0), wide, negative)
    return narrow(b, y if scale == 1 else b.apply(Prim.MUL, y, float(scale)), x)


def selu(
    b: GraphBuilder, x: NodeId, *, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805
) -> NodeId | Declined:
    """selu(x) → γ·select(x > 0, x, α·expm1(min(x, 0))).

    Shapes: any.
    Conditions: floats.
    Source: arXiv:1706.02515; ONNX Selu.
    """
    return elu(b, x, alpha=alpha, scale=gamma)


def celu(b: GraphBuilder, x: NodeId, *, alpha: float = 1.0) -> NodeId | Declined:
    """celu(x) → select(x > 0, x, α·expm1(min(x, 0)/α)).

    Shapes: any.
    Conditions: floats; α ≠ 0.
    Source: arXiv:1704.07483; ONNX Celu.
    """
    if problem := not_float(b, "celu", x):
        return problem
    if alpha == 0:
        return Declined("celu with alpha = 0")
    return elu(b, x, alpha=alpha, input_scale=1.0 / alpha)
