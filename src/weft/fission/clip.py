"""Clamping: clip and the activations that are nothing else."""

from __future__ import annotations

import math

import numpy as np

from weft.fission.rule import ABSENT, full
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def clip(
    b: GraphBuilder,
    x: NodeId,
    low: NodeId = ABSENT,
    high: NodeId = ABSENT,
    *,
    lo: float = -math.inf,
    hi: float = math.inf,
) -> NodeId | Declined:
    """clip(x, low, high) → min(max(x, low), high); with numbers min(max(x, lo), hi).

    Shapes: low and high broadcast with x (scalars as a rule). An absent bound, or an infinite number, is no bound.
    Conditions: not bool; the bounds have the type of x, and numbers are integral for integers. NaN stays NaN; where
    low > high the result is high.
    Source: `torch.clamp`; ONNX Clip.
    """
    dtype = b.type_of(x).dtype
    if dtype is DType.BOOL:
        return Declined("clip of bool")
    y = x
    for prim, node, number in ((Prim.MAX, low, lo), (Prim.MIN, high, hi)):
        if node != ABSENT:
            if b.type_of(node).dtype is not dtype:
                return Declined(f"clip of {dtype.value} with a bound of {b.type_of(node).dtype.value}")
            y = b.apply(prim, y, node)
        elif not math.isinf(number) or (number > 0) == (prim is Prim.MAX):
            bound = _bound(number, dtype)
            if isinstance(bound, Declined):
                return bound
            y = b.apply(prim, y, full(b, bound, dtype))
    return y


def _bound(number: float, dtype: DType) -> float | Declined:
    """A bound as a value of the type: integers saturate at the ends of their range."""
    if dtype.is_float:
        return float(number)
    info = np.iinfo(np.dtype(dtype.numpy).name)
    if math.isinf(number) or not float(number).is_integer():
        return Declined(f"clip of {dtype.value} at {number}")
    return min(max(int(number), info.min), info.max)


def relu6(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """relu6(x) → min(max(x, 0), 6).

    Shapes: any.
    Conditions: not bool.
    Source: `torch.nn.functional.relu6`.
    """
    return clip(b, x, lo=0.0, hi=6.0)


def hard_tanh(b: GraphBuilder, x: NodeId, *, lo: float = -1.0, hi: float = 1.0) -> NodeId | Declined:
    """hard_tanh(x) → min(max(x, lo), hi).

    Shapes: any.
    Conditions: not bool.
    Source: `torch.nn.functional.hardtanh`.
    """
    return clip(b, x, lo=lo, hi=hi)
