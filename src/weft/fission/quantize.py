"""Linear quantisation, and products of quantised tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weft.fission.conv import conv
from weft.fission.layout import repeat_interleave
from weft.fission.linear import matmul
from weft.fission.rule import ABSENT, axis_of, dtype_of, keywords_of, not_float, per_channel, shape_of, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def _aligned(b: GraphBuilder, p: NodeId, shape: tuple[int, ...], axis: int, block: int) -> NodeId | Declined:
    """A scale or zero point, per tensor, per channel of `axis` or per block along it, so that it broadcasts."""
    own = shape_of(b, p)
    if math.prod(own) == 1 and not block:
        return b.reshape(p, ())
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape:
        return Declined(f"a scale of shape {own} along axis {axis} of {shape}")
    if not block:
        return per_channel(b, p, len(shape), k) if len(own) == 1 else Declined(f"a scale of shape {own} for {shape}")
    if len(own) != len(shape) or own[k] * block < shape[k]:
        return Declined(f"a scale of shape {own} in blocks of {block} for {shape}")
    many = repeat_interleave(b, p, repeats=block, axis=k)
    return many if isinstance(many, Declined) else b.slice(many, (0,) * len(shape), shape, (1,) * len(shape))


def _saturated(b: GraphBuilder, y: NodeId, dtype: DType) -> NodeId:
    """Rounded floats → integers, clamped to their range."""
    info = np.iinfo(np.dtype(dtype.numpy).name)
    return b.cast(b.apply(Prim.MIN, b.apply(Prim.MAX, y, float(info.min)), float(info.max)), dtype)


def quantize_linear(
    b: GraphBuilder,
    x: NodeId,
    scale: NodeId,
    zero: NodeId = ABSENT,
    *,
    axis: int = 1,
    block_size: int = 0,
    dtype: str = "u8",
) -> NodeId | Declined:
    """quantize_linear(x, s, z) → cast(clamp(round(x/s) + z)).

    Shapes: s and z are scalars, (C,) along `axis`, or blocked along it.
    Conditions: 8- or 16-bit integers that this program has; `dtype` counts where z is absent. Ties go to even.
    Source: ONNX QuantizeLinear.
    """
    target = DType(dtype) if zero == ABSENT else dtype_of(b, zero)
    if target not in (DType.U8, DType.I8, DType.I16) or not dtype_of(b, scale).is_float:
        return Declined(f"quantize_linear to {target.value} with a scale of {dtype_of(b, scale).value}")
    shape = shape_of(b, x)
    s = _aligned(b, scale, shape, axis, block_size)
    if isinstance(s, Declined):
        return s
    s = widen(b, s)
    wide = dtype_of(b, s)
    y = b.apply(Prim.ROUND, b.apply(Prim.DIV, b.cast(x, wide), s))
    if zero != ABSENT:
        z = _aligned(b, zero, shape, axis, block_size)
        if isinstance(z, Declined):
            return z
        y = b.apply(Prim.ADD, y, b.cast(z, wide))
    return _saturated(b, y, target)


def dequantize_linear(
    b: GraphBuilder, x: NodeId, scale: NodeId, zero: NodeId = ABSENT, *, axis: int = 1, block_size: int = 0
) -> NodeId | Declined:
    """dequantize_linear(x, s, z) → (x − z)·s, in the type of s.

    Shapes: as quantize_linear.
    Conditions: integers; a floating scale. The difference is exact in i32.
    Source: ONNX DequantizeLinear.
    """
    target = dtype_of(b, scale)
    if not dtype_of(b, x).is_integer or not target.is_float:
        return Declined(f"dequantize_linear of {dtype_of(b, x).value} with a scale of {target.value}")
    shape = shape_of(b, x)
    s = _aligned(b, scale, shape, axis, block_size)
    if isinstance(s, Declined):
        return s
    y = b.cast(x, DType.I32)
    if zero != ABSENT:
        z = _aligned(b, zero, shape, axis, block_size)
        if isinstance(z, Declined):
            return z
        y = b.apply(Prim.SUB, y, b.cast(z, DType.I32))
    s = widen(b, s)
    return b.cast(b.apply(Prim.MUL, b.cast(y, dtype_of(b, s)), s), target)


def dynamic_quantize_linear(b: GraphBuilder, x: NodeId) -> tuple[NodeId, ...] | Declined:
    """dynamic_quantize_linear(x) → (quantize_linear(x, s, z), s, z), s = (max − min)/255, z = round(clamp(−min/s)).

    Shapes: s and z are scalars; the range always holds 0.
    Conditions: f32; u8 results.
    Source: ONNX DynamicQuantizeLinear.
    """
    if problem := not_float(b, "dynamic_quantize_linear", x):
        return problem
    if dtype_of(b, x) is not DType.F32 or b.type_of(x).size == 0:
        return Declined(f"dynamic_quantize_linear of {b.type_of(x)}")
    axes = tuple(range(b.type_of(x).rank))
    top = b.apply(Prim.MAX, b.reshape(b.reduce(Prim.REDUCE_MAX, x, axes), ()), 0.0)
    low = b.apply(Prim.MIN, b.reshape(b.reduce(Prim.REDUCE_MIN, x, axes), ()), 0.0)
    s = b.apply(Prim.DIV, b.apply(Prim.SUB, top, low), 255.0)
    start = b.apply(Prim.DIV, b.apply(Prim.NEG, low), s)
    z = _saturated(b, b.apply(Prim.ROUND, start), DType.U8)
    y = quantize_linear(b, x, s, z)
    return y if isinstance(y, Declined) else (y, s, z)


def _centred(b: GraphBuilder, x: NodeId, zero: NodeId, axis: int) -> NodeId | Declined:
    """x − z in i32; z per tensor or a vector along `axis`."""
    y = b.cast(x, DType.I32)
    if zero == ABSENT:
        return y
    own = shape_of(b, zero)
    z = zero if len(own) > 1 else _aligned(b, zero, shape_of(b, x), axis, 0)
    return z if isinstance(z, Declined) else b.apply(Prim.SUB, y, b.broadcast(b.cast(z, DType.I32), shape_of(b, x)))


def matmul_integer(
    b: GraphBuilder, x: NodeId, y: NodeId, x_zero: NodeId = ABSENT, y_zero: NodeId = ABSENT
) -> NodeId | Declined:
    """matmul_integer(x, y, zx, zy) → (x − zx) @ (y − zy) in i32.

    Shapes: NumPy's matmul; zx is a scalar or one per row, zy a scalar or one per column.
    Conditions: 8-bit integers.
    Source: ONNX MatMulInteger.
    """
    rank = b.type_of(x).rank
    left = _centred(b, x, x_zero, max(rank - 2, 0))
    right = _centred(b, y, y_zero, -1)
    if isinstance(left, Declined) or isinstance(right, Declined):
        return left if isinstance(left, Declined) else right
    return matmul(b, left, right)


@keywords_of(conv)
def conv_integer(
    b: GraphBuilder, x: NodeId, w: NodeId, x_zero: NodeId = ABSENT, w_zero: NodeId = ABSENT, **how: Any
) -> NodeId | Declined:
    """conv_integer(x, w, zx, zw) → conv(x − zx, w − zw) in i32; padding counts as zx.

    Shapes: as conv; zw is a scalar or one per output channel.
    Conditions: 8-bit integers.
    Source: ONNX ConvInteger.
    """
    left, right = _centred(b, x, x_zero, 1), _centred(b, w, w_zero, 0)
    if isinstance(left, Declined) or isinstance(right, Declined):
        return left if isinstance(left, Declined) else right
    return conv(b, left, right, **how)


def _requantized(
    b: GraphBuilder, total: NodeId, scales: tuple[NodeId, NodeId, NodeId], zero: NodeId, axis: int
) -> NodeId | Declined:
    """i32 sums → clamp(round(total·(s₁·s₂/s₃)) + z), s₂ a scalar or a vector along `axis`."""
    wide = DType.F32
    shape = shape_of(b, total)
    first, second, out = (_aligned(b, s, shape, axis, 0) for s in scales)
    if isinstance(first, Declined) or isinstance(second, Declined) or isinstance(out, Declined):
        return Declined("requantisation: scales do not fit")
    factor = b.apply(Prim.DIV, b.apply(Prim.MUL, b.cast(first, wide), b.cast(second, wide)), b.cast(out, wide))
    y = b.apply(Prim.ROUND, b.apply(Prim.MUL, b.cast(total, wide), factor))
    return _saturated(b, b.apply(Prim.ADD, y, b.cast(b.reshape(zero, ()), wide)), dtype_of(b, zero))


def qlinear_matmul(
    b: GraphBuilder,
    x: NodeId,
    x_scale: NodeId,
    x_zero: NodeId,
    y: NodeId,
    y_scale: NodeId,
    y_zero: NodeId,
    scale: NodeId,
    zero: NodeId,
) -> NodeId | Declined:
    """qlinear_matmul → clamp(round(((x − zx) @ (y − zy))·(sx·sy/s)) + z).

    Shapes: NumPy's matmul; scales of x and of the result are scalars, that of y a scalar or one per column.
    Conditions: 8-bit integers.
    Source: ONNX QLinearMatMul.
    """
    if b.type_of(x_scale).size != 1 or b.type_of(zero).size != 1 or not dtype_of(b, zero).is_integer:
        return Declined("qlinear_matmul with scales per row")
    total = matmul_integer(b, x, y, x_zero, y_zero)
    return total if isinstance(total, Declined) else _requantized(b, total, (x_scale, y_scale, scale), zero, -1)


@keywords_of(conv)
def qlinear_conv(
    b: GraphBuilder,
    x: NodeId,
    x_scale: NodeId,
    x_zero: NodeId,
    w: NodeId,
    w_scale: NodeId,
    w_zero: NodeId,
    scale: NodeId,
    zero: NodeId,
    bias: NodeId = ABSENT,
    **how: Any,
) -> NodeId | Declined:
    """qlinear_conv → clamp(round((conv(x − zx, w − zw) + bias)·(sx·sw/s)) + z).

    Shapes: as conv; the scale and zero point of w are scalars or one per output channel; bias is i32 in units sx·sw.
    Conditions: 8-bit integers.
    Source: ONNX QLinearConv.
    """
    if b.type_of(x_scale).size != 1 or b.type_of(zero).size != 1 or not dtype_of(b, zero).is_integer:
        return Declined("qlinear_conv with scales per row")
    total = conv_integer(b, x, w, x_zero, w_zero, **how)
    if isinstance(total, Declined):
        return total
    if bias != ABSENT:
        total = b.apply(Prim.ADD, total, per_channel(b, b.cast(bias, DType.I32), b.type_of(total).rank))
    return _requantized(b, total, (x_scale, w_scale, scale), zero, 1)
