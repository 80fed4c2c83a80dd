"""Rectifiers: relu and everything that is linear on each side of a point."""

from __future__ import annotations

from weft.fission.rule import axis_of, full, narrow, not_float, per_channel, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def relu(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """relu(x) → max(x, 0).

    Shapes: any.
    Conditions: any number type; NaN stays NaN.
    Source: `torch.relu`; ONNX Relu.
    """
    if b.type_of(x).dtype is DType.BOOL:
        return Declined("relu of bool")
    return b.apply(Prim.MAX, x, 0.0)


def leaky_relu(b: GraphBuilder, x: NodeId, *, alpha: float = 0.01) -> NodeId | Declined:
    """leaky_relu(x) → select(x > 0, x, α·x).

    Shapes: any.
    Conditions: floats. Not max(x, α·x), which is wrong for α > 1 and NaN for x = ∞, α = 0.
    Source: `torch.nn.functional.leaky_relu`; ONNX LeakyRelu.
    """
    if problem := not_float(b, "leaky_relu", x):
        return problem
    wide = widen(b, x)
    y = b.apply(Prim.SELECT, b.apply(Prim.GT, wide, 0.0), wide, b.apply(Prim.MUL, wide, float(alpha)))
    return narrow(b, y, x)


def prelu(b: GraphBuilder, x: NodeId, slope: NodeId, *, axis: int | None = None) -> NodeId | Declined:
    """prelu(x, a) → select(x > 0, x, a·x).

    Shapes: a broadcasts to x as in NumPy; with `axis` given a is (C,) or (1,) and lies along that axis.
    Conditions: one number type for both, not bool.
    Source: `torch.nn.functional.prelu` (axis 1); ONNX PRelu.
    """
    t = b.type_of(x)
    if t.dtype is DType.BOOL or b.type_of(slope).dtype is not t.dtype:
        return Declined(f"prelu of {t.dtype.value} with a slope of {b.type_of(slope).dtype.value}")
    if axis is not None and b.type_of(slope).rank == 1 and t.rank > 1:
        k = axis_of(axis, t.rank)
        if isinstance(k, Declined):
            return k
        slope = per_channel(b, slope, t.rank, k)
    scaled = b.apply(Prim.MUL, x, b.broadcast(slope, t.shape))
    return b.apply(Prim.SELECT, b.apply(Prim.GT, x, 0.0), x, scaled)


def thresholded_relu(b: GraphBuilder, x: NodeId, *, alpha: float = 1.0) -> NodeId | Declined:
    """thresholded_relu(x) → select(x > α, x, 0).

    Shapes: any.
    Conditions: floats; the comparison is made in f32 for 16-bit x. NaN gives 0.
    Source: ONNX ThresholdedRelu.
    """
    if problem := not_float(b, "thresholded_relu", x):
        return problem
    return b.apply(Prim.SELECT, b.apply(Prim.GT, widen(b, x), float(alpha)), x, full(b, 0.0, b.type_of(x).dtype))


def threshold(b: GraphBuilder, x: NodeId, *, threshold: float, value: float) -> NodeId | Declined:
    """threshold(x) → select(x ≤ threshold, value, x).

    Shapes: any.
    Conditions: floats. NaN stays NaN.
    Source: `torch.nn.functional.threshold`.
    """
    if problem := not_float(b, "threshold", x):
        return problem
    below = b.apply(Prim.LE, widen(b, x), float(threshold))
    return b.apply(Prim.SELECT, below, full(b, float(value), b.type_of(x).dtype), x)
