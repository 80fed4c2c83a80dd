"""Piecewise linear stand-ins for smooth activations, and the shrinking ones."""

from __future__ import annotations

from weft.fission.rule import full, narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def hard_sigmoid(b: GraphBuilder, x: NodeId, *, alpha: float = 1 / 6, beta: float = 0.5) -> NodeId | Declined:
    """hard_sigmoid(x) → min(max(α·x + β, 0), 1).

    Shapes: any.
    Conditions: floats. α and β are 1/6 and ½ in PyTorch, 0.2 and ½ by default in ONNX.
    Source: `torch.nn.functional.hardsigmoid`; ONNX HardSigmoid.
    """
    if problem := not_float(b, "hard_sigmoid", x):
        return problem
    line = b.apply(Prim.ADD, b.apply(Prim.MUL, widen(b, x), float(alpha)), float(beta))
    return narrow(b, b.apply(Prim.MIN, b.apply(Prim.MAX, line, 0.0), 1.0), x)


def hard_swish(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """hard_swish(x) → x·min(max(x + 3, 0), 6)/6.

    Shapes: any.
    Conditions: floats; f32 inside for 16-bit x.
    Source: arXiv:1905.02244; ONNX HardSwish.
    """
    if problem := not_float(b, "hard_swish", x):
        return problem
    wide = widen(b, x)
    gate = b.apply(Prim.MIN, b.apply(Prim.MAX, b.apply(Prim.ADD, wide, 3.0), 0.0), 6.0)
    return narrow(b, b.apply(Prim.DIV, b.apply(Prim.MUL, wide, gate), 6.0), x)


def softsign(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """softsign(x) → x / (1 + |x|).

    Shapes: any.
    Conditions: floats; f32 inside for 16-bit x.
    Source: `torch.nn.functional.softsign`; ONNX Softsign.
    """
    if problem := not_float(b, "softsign", x):
        return problem
    wide = widen(b, x)
    return narrow(b, b.apply(Prim.DIV, wide, b.apply(Prim.ADD, b.apply(Prim.ABS, wide), 1.0)), x)


def shrink(b: GraphBuilder, x: NodeId, *, lambd: float = 0.5, bias: float = 0.0) -> NodeId | Declined:
    """shrink(x) → select(x < −λ, x + bias, select(x > λ, x − bias, 0)).

    Shapes: any.
    Conditions: floats. With bias = λ it is PyTorch's softshrink, but NaN gives 0.
    Source: ONNX Shrink.
    """
    if problem := not_float(b, "shrink", x):
        return problem
    wide = widen(b, x)
    right = b.apply(
        Prim.SELECT,
        b.apply(Prim.GT, wide, float(lambd)),
        b.apply(Prim.SUB, wide, float(bias)),
        full(b, 0.0, b.type_of(wide).dtype),
    )
    left = b.apply(Prim.LT, wide, -float(lambd))
    return narrow(b, b.apply(Prim.SELECT, left, b.apply(Prim.ADD, wide, float(bias)), right), x)


def soft_shrink(b: GraphBuilder, x: NodeId, *, lambd: float = 0.5) -> NodeId | Declined:
    """soft_shrink(x) → max(x − λ, 0) + min(x + λ, 0).

    Shapes: any.
    Conditions: floats; λ ≥ 0. NaN stays NaN.
    Source: `torch.nn.functional.softshrink`.
    """
    if problem := not_float(b, "soft_shrink", x):
        return problem
    if lambd < 0:
        return Declined("soft_shrink with a negative lambda")
    wide = widen(b, x)
    up = b.apply(Prim.MAX, b.apply(Prim.SUB, wide, float(lambd)), 0.0)
    down = b.apply(Prim.MIN, b.apply(Prim.ADD, wide, float(lambd)), 0.0)
    return narrow(b, b.apply(Prim.ADD, up, down), x)


def hard_shrink(b: GraphBuilder, x: NodeId, *, lambd: float = 0.5) -> NodeId | Declined:
    """hard_shrink(x) → select(|x| ≤ λ, 0, x).

    Shapes: any.
    Conditions: floats. NaN stays NaN.
    Source: `torch.nn.functional.hardshrink`.
    """
    if problem := not_float(b, "hard_shrink", x):
        return problem
    small = b.apply(Prim.LE, b.apply(Prim.ABS, widen(b, x)), float(lambd))
    return b.apply(Prim.SELECT, small, 0.0, x)


def tanh_shrink(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """tanh_shrink(x) → x − tanh(x).

    Shapes: any.
    Conditions: floats. Cancels near 0, as the definition does.
    Source: `torch.nn.functional.tanhshrink`.
    """
    if problem := not_float(b, "tanh_shrink", x):
        return problem
    wide = widen(b, x)
    return narrow(b, b.apply(Prim.SUB, wide, b.apply(Prim.TANH, wide)), x)
