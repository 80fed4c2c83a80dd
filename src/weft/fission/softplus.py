"""Softplus and mish, which is x·tanh(softplus(x))."""

from __future__ import annotations

import math

from weft.fission.rule import narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def softplus(b: GraphBuilder, x: NodeId, *, beta: float = 1.0, threshold: float = math.inf) -> NodeId | Declined:
    """softplus(x) → select(z > threshold, x, (max(z, 0) + log1p(exp(−|z|)))/β), where z = β·x.

    Shapes: any.
    Conditions: floats; β ≠ 0. exp sees values ≤ 0. PyTorch's threshold is 20, ONNX has none.
    Source: `torch.nn.functional.softplus`; ONNX Softplus.
    """
    if problem := not_float(b, "softplus", x):
        return problem
    if beta == 0:
        return Declined("softplus with beta = 0")
    wide = widen(b, x)
    z = wide if beta == 1 else b.apply(Prim.MUL, wide, float(beta))
    tail = b.apply(Prim.LOG1P, b.apply(Prim.EXP, b.apply(Prim.NEG, b.apply(Prim.ABS, z))))
    y = b.apply(Prim.ADD, b.apply(Prim.MAX, z, 0.0), tail)
    if beta != 1:
        y = b.apply(Prim.DIV, y, float(beta))
    if not math.isinf(threshold):
        y = b.apply(Prim.SELECT, b.apply(Prim.GT, z, float(threshold)), wide, y)
    return narrow(b, y, x)


def mish(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """mish(x) → select(x > 20, x, x·n/(n + 2)), where n = e·(e + 2), e = exp(min(x, 20)).

    Shapes: any.
    Conditions: floats. tanh(log1p(e)) = n/(n + 2) exactly; the min keeps the branch that is not taken finite.
    Source: arXiv:1908.08681; ONNX Mish.
    """
    if problem := not_float(b, "mish", x):
        return problem
    wide = widen(b, x)
    e = b.apply(Prim.EXP, b.apply(Prim.MIN, wide, 20.0))
    n = b.apply(Prim.MUL, e, b.apply(Prim.ADD, e, 2.0))
    y = b.apply(Prim.MUL, wide, b.apply(Prim.DIV, n, b.apply(Prim.ADD, n, 2.0)))
    return narrow(b, b.apply(Prim.SELECT, b.apply(Prim.GT, wide, 20.0), wide, y), x)
