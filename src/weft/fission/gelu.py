"""The Gaussian error linear unit in its two published forms."""

from __future__ import annotations

import math

from weft.fission.rule import narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def gelu(b: GraphBuilder, x: NodeId, *, approximate: str = "none") -> NodeId | Declined:
    """gelu(x) → 0.5·x·(1 + erf(x·√½)); approximate="tanh" → x / (1 + exp(−2u)), u = √(2/π)·(x + 0.044715·x³).

    Shapes: any.
    Conditions: floats; f32 inside for 16-bit x (x³ overflows f16 above 40.3). The second form equals
    0.5·x·(1 + tanh u), which in f32 loses every digit in the left tail.
    Source: arXiv:1606.08415; `torch.nn.functional.gelu`; ONNX Gelu.
    """
    if problem := not_float(b, "gelu", x):
        return problem
    wide = widen(b, x)
    if approximate == "none":
        one_plus = b.apply(Prim.ADD, b.apply(Prim.ERF, b.apply(Prim.MUL, wide, math.sqrt(0.5))), 1.0)
        return narrow(b, b.apply(Prim.MUL, b.apply(Prim.MUL, wide, 0.5), one_plus), x)
    if approximate != "tanh":
        return Declined(f"gelu with approximate = {approximate!r}")
    cube = b.apply(Prim.MUL, b.apply(Prim.MUL, wide, wide), wide)
    u = b.apply(Prim.ADD, wide, b.apply(Prim.MUL, cube, 0.044715))
    e = b.apply(Prim.EXP, b.apply(Prim.MUL, u, -2.0 * math.sqrt(2.0 / math.pi)))
    return narrow(b, b.apply(Prim.DIV, wide, b.apply(Prim.ADD, e, 1.0)), x)
