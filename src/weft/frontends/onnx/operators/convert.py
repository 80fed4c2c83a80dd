"""Constants, casts, quantisation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.frontends.onnx.errors import NoRuleError
from weft.frontends.onnx.tensors import dtype_of
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import FLOAT8, DType, round_emulated


def _constant(c: Call) -> Result:
    given = [k for k in c.attrs if k.startswith(("value", "sparse"))]
    if len(given) != 1:
        c.fail("a Constant needs exactly one value")
    name, value = given[0], c.attrs[given[0]]
    if name == "value":
        return c.im.tensor(value, c.where)
    if name == "sparse_value":
        return c.im.sparse(value, c.where)
    if name in ("value_float", "value_floats"):
        return c.b.constant(np.asarray(value, np.float32))
    if name in ("value_int", "value_ints"):
        return c.b.constant(np.asarray(value, np.int64))
    raise NoRuleError(where=c.where, op=c.op, reason="a string constant")


def _constant_of_shape(c: Call) -> Result:
    shape = c.ints(0)
    if any(n < 0 for n in shape):
        c.fail(f"negative size in {shape}")
    value = c.get("value")
    one = c.im.tensor(value, c.where) if value is not None else c.b.constant(np.zeros((), np.float32))
    return c.b.broadcast(c.b.reshape(one, ()), shape)


def _shape(c: Call) -> Result:
    shape = c.shape(0)
    rank = len(shape)
    start, end = int(c.get("start", 0)), int(c.get("end", rank))
    start = min(max(start + rank if start < 0 else start, 0), rank)
    end = min(max(end + rank if end < 0 else end, 0), rank)
    return c.b.constant(np.array(shape[start:end], np.int64))


def _size(c: Call) -> Result:
    return c.b.constant(np.array(c.type(0).size, np.int64))


def _to_float8(c: Call, x: NodeId, dtype: DType) -> NodeId:
    """Rounded to an 8-bit float; beyond the greatest it is that one, or without `saturate` infinite or NaN."""
    b, most = c.b, FLOAT8[dtype].greatest
    source = b.type_of(x).dtype
    if not source.is_float or source.is_float8:
        x = b.cast(x, DType.F32)
    if int(c.get("saturate", 1)):
        x = b.apply(Prim.MAX, b.apply(Prim.MIN, x, most), -most)
    elif dtype is DType.F8E4M3:  # half a unit beyond the greatest still rounds to it
        beyond = b.apply(Prim.GT, b.add(Prim.ABS, x), most * (1 + 1 / 28))
        x = b.apply(Prim.SELECT, beyond, b.broadcast(b.scalar(math.nan, b.type_of(x).dtype), b.type_of(x).shape), x)
    return b.cast(x, dtype)


def _cast_to(c: Call, dtype: DType) -> Result:
    source = c.type(0).dtype
    if dtype.is_float8:
        return _to_float8(c, c.x(0), dtype)
    if source.is_float and dtype is DType.BOOL:
        return c.b.cast(c.x(0), dtype)
    if source.is_float and dtype in (DType.I8, DType.U8, DType.I16):
        # out of range is undefined as a primitive; the specification wraps what fits in 32 bits
        return c.b.cast(c.b.cast(c.x(0), DType.I32), dtype)
    return c.rule("cast", c.x(0), dtype=dtype.value)


def _cast(c: Call) -> Result:
    to = c.get("to")
    if isinstance(to, str):  # opset 6 and older: the name of the type
        to = dict(onnx.TensorProto.DataType.items()).get(to, 0)
    return _cast_to(c, dtype_of(to, "the target of Cast", c.where))


def _cast_like(c: Call) -> Result:
    return _cast_to(c, c.type(1).dtype)


def _identity(c: Call) -> Result:
    return (c.operands[0],)


def _dropout(c: Call) -> Result:
    training = bool(c.value(2).item()) if c.opset >= 12 and c.has(2) else False
    if c.opset < 7:
        training = not c.get("is_test", 0)
    if training:
        ratio = float(c.value(1).item()) if c.has(1) else float(c.get("ratio", 0.5))
        if ratio != 0:
            return Declined("Dropout in training mode is random")
    mask_type = DType.BOOL if c.opset >= 10 else c.type(0).dtype
    mask = c.b.broadcast(c.b.constant(np.ones((), mask_type.numpy), mask_type), c.shape(0))
    return (c.x(0), mask)[: max(c.num_outputs, 1)]


def _axis_vector(c: Call, v: NodeId, rank: int, axis: int) -> NodeId:
    shape = c.b.type_of(v).shape
    if len(shape) == 1 and rank >= 1:
        if shape[0] == 1 and rank != 1:
            return c.b.reshape(v, ())
        return c.b.reshape(v, tuple(shape[0] if k == axis else 1 for k in range(rank)))
    return v


def _blocked(c: Call, v: NodeId, axis: int, block: int) -> NodeId:
    """Scales per block of `block` elements along `axis`, repeated to the size of x."""
    b, shape, full = c.b, c.b.type_of(v).shape, c.shape(0)
    wide = b.broadcast(
        b.reshape(v, (*shape[: axis + 1], 1, *shape[axis + 1 :])), (*shape[: axis + 1], block, *shape[axis + 1 :])
    )
    flat = b.reshape(wide, (*shape[:axis], shape[axis] * block, *shape[axis + 1 :]))
    return b.slice(flat, (0,) * len(full), full, (1,) * len(full))


def _scales(c: Call) -> tuple[NodeId, NodeId]:
    """Scale and zero point (or -1), shaped to broadcast with x."""
    rank = c.type(0).rank
    # one scale is the whole tensor's, whatever axis is said: 1 is the default, of vectors too
    axis = c.norm(int(c.get("axis", 1)), rank) if c.type(1).size != 1 or c.get("block_size", 0) else 0
    block = int(c.get("block_size", 0))
    zero = c.x(2)
    if block and c.type(1).rank == rank:
        return _blocked(c, c.x(1), axis, block), zero if zero == ABSENT else _blocked(c, zero, axis, block)
    return _axis_vector(c, c.x(1), rank, axis), zero if zero == ABSENT else _axis_vector(c, zero, rank, axis)


def _quantise(c: Call) -> Result:
    b = c.b
    scale, zero = _scales(c)
    target = c.type(2).dtype if c.has(2) else DType.U8
    if c.get("output_dtype", 0):
        target = dtype_of(c.get("output_dtype"), "the target of QuantizeLinear", c.where)
    if target in (DType.I64, DType.I32) or not (target.is_integer or target.is_float8):
        return Declined(f"QuantizeLinear to {target.value}")
    precision = c.get("precision", 0)
    wide = dtype_of(precision, "the precision", c.where) if precision else b.type_of(scale).dtype
    x = b.cast(c.x(0), wide)
    wide = wide.accumulator
    y = b.apply(Prim.DIV, b.cast(x, wide), b.cast(scale, wide))
    if target.is_float8:  # its zero point is zero
        return _to_float8(c, y, target)
    y = b.apply(Prim.ROUND, y)
    if zero != ABSENT:
        y = b.apply(Prim.ADD, y, b.cast(zero, wide))
    info = np.iinfo(target.numpy)  # type: ignore[type-var]
    y = b.apply(Prim.MAX, b.apply(Prim.MIN, y, float(info.max)), float(info.min))
    return b.cast(y, target)


def _dequantise(c: Call) -> Result:
    b = c.b
    scale, zero = _scales(c)
    out = b.type_of(scale).dtype
    if c.get("output_dtype", 0):
        out = dtype_of(c.get("output_dtype"), "the target of DequantizeLinear", c.where)
    if c.type(0).dtype.is_float8:
        wide = b.type_of(scale).dtype.accumulator
        return b.cast(b.apply(Prim.MUL, b.cast(c.x(0), wide), b.cast(scale, wide)), out)
    if c.type(0).dtype.is_float:
        return Declined("DequantizeLinear of floats")
    x = b.cast(c.x(0), DType.I32)
    if zero != ABSENT:
        x = b.apply(Prim.SUB, x, b.cast(zero, DType.I32))
    wide = b.type_of(scale).dtype.accumulator
    return b.cast(b.apply(Prim.MUL, b.cast(x, wide), b.cast(scale, wide)), out)


def _dynamic_quantise(c: Call) -> Result:
    """uint8 from the range of x, which always includes 0."""
    b, x = c.b, c.x(0)
    axes = tuple(range(c.type(0).rank))
    lo = b.apply(Prim.MIN, b.reshape(b.reduce(Prim.REDUCE_MIN, x, axes), ()), 0.0)
    hi = b.apply(Prim.MAX, b.reshape(b.reduce(Prim.REDUCE_MAX, x, axes), ()), 0.0)
    scale = b.apply(Prim.DIV, b.apply(Prim.SUB, hi, lo), b.scalar(255.0, DType.F32))

    def clamp(v: NodeId) -> NodeId:
        return b.apply(Prim.MAX, b.apply(Prim.MIN, v, 255.0), 0.0)

    zero = b.apply(Prim.ROUND, clamp(b.apply(Prim.SUB, b.scalar(0.0, DType.F32), b.apply(Prim.DIV, lo, scale))))
    y = clamp(b.apply(Prim.ADD, b.apply(Prim.ROUND, b.apply(Prim.DIV, x, scale)), zero))
    return (b.cast(y, DType.U8), scale, b.cast(zero, DType.U8))


def _bit_cast(c: Call) -> Result:
    """Only of a constant: there is no primitive that reinterprets bits."""
    target = dtype_of(c.get("to"), "the target of BitCast", c.where)
    source = c.type(0).dtype
    if target is source:
        return c.x(0)
    if (source, target) == (DType.BOOL, DType.U8):
        return c.b.cast(c.x(0), target)  # a bool is one byte that is 0 or 1
    if c.im.depends(c.x(0)) or source.is_emulated or target.is_emulated or target.itemsize != source.itemsize:
        return Declined("BitCast of a run-time value")
    return c.b.constant(np.asarray(c.value(0), order="C").view(target.numpy), target)


def _long_range(c: Call, n: int, start: Any, delta: Any) -> Result:
    """The same numbers, counted where they are read: nothing is stored, however many there are."""
    b, dtype = c.b, c.type(0).dtype
    if n * dtype.itemsize >= 2**62:
        c.fail(f"a range of {n} elements")
    wide = DType.I64 if dtype.is_integer else DType.F64
    scaled = b.apply(Prim.MUL, b.iota((n,), 0, wide), b.constant(np.array(delta, wide.numpy), wide))
    return b.cast(b.apply(Prim.ADD, scaled, b.constant(np.array(start, wide.numpy), wide)), dtype)


def _range(c: Call) -> Result:
    start, limit, delta = (c.value(k).reshape(-1)[0] for k in range(3))
    dtype = c.type(0).dtype
    if delta == 0 or not all(np.isfinite(v) for v in (start, limit, delta)):
        c.fail(f"a range from {start} to {limit} in steps of {delta}")
    if dtype.is_integer:
        n = max(-(-(int(limit) - int(start)) // int(delta)), 0)
    else:
        n = max(int(np.ceil((float(limit) - float(start)) / float(delta))), 0)
    if n > c.im.limits.fold_elements:
        return _long_range(c, n, start, delta)
    wide: Any = np.int64 if dtype.is_integer else np.float64
    data: Any = np.arange(n, dtype=wide) * wide(delta) + wide(start)
    out = data.astype(dtype.numpy)
    return c.b.constant(round_emulated(out, dtype), dtype)


def _eye_like(c: Call) -> Result:
    shape = c.shape(0)
    given = c.get("dtype")
    dtype = dtype_of(given, "the type of EyeLike", c.where) if given is not None else c.type(0).dtype
    if len(shape) != 2:
        c.fail(f"EyeLike of rank {len(shape)}")
    return c.b.constant(np.eye(*shape, k=int(c.get("k", 0)), dtype=dtype.numpy), dtype)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Constant"): _constant,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast_like,
    ("", "BitCast"): _bit_cast,
    ("", "Identity"): _identity,
    ("", "Dropout"): _dropout,
    ("", "QuantizeLinear"): _quantise,
    ("", "DequantizeLinear"): _dequantise,
    ("", "DynamicQuantizeLinear"): _dynamic_quantise,
    ("", "Range"): _range,
    ("", "EyeLike"): _eye_like,
}
