"""A dozen small graphs by name, one per kind of primitive or network block."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId, Origin
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

CONV = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1))


def ramp(*shape: int, dtype: DType = DType.F32, start: float = 0.25) -> np.ndarray:
    """Different simple values, exact in every float type for small sizes."""
    return (np.arange(np.prod(shape)).reshape(shape) % 8 * 0.25 + start).astype(dtype.numpy)


def _elementwise() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 3)), "x")
    y = b.apply(Prim.MUL, b.apply(Prim.ADD, b.add(Prim.EXP, x), 1.0), 0.1)
    return b.build([b.add(Prim.SELECT, b.apply(Prim.GT, x, 0.0), y, x)], ["y"])


def _softmax() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 128)), 'x "1"')
    with b.origin(Origin("softmax", (("axis", -1),), (x,), source="node 'softmax_0'", location="m.onnx:3")) as origin:
        e = b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, [1])))
        y = b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, [1]))
        b.set_origin_results(origin, [y])
    return b.build([y], ["y"])


def conv_batch_norm(dtype: DType = DType.F32, *, other_user: bool = False) -> Graph:
    """relu((conv(x, w) + bias)·s + t) with s = γ/√(σ² + ε), t = β - μ·s as the fission rule writes it."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (1, 3, 6, 6)), "x")
    with b.origin(Origin("conv", (("groups", 1),), (x,))) as origin:
        z = b.add(Prim.CONV, x, b.constant(ramp(4, 3, 3, 3, dtype=dtype), dtype), attrs=CONV)
        z = b.apply(Prim.ADD, z, b.constant(ramp(4, 1, 1, dtype=dtype), dtype))
        b.set_origin_results(origin, [z])

    def parameter(start: float) -> NodeId:
        return b.constant(ramp(4, 1, 1, dtype=dtype, start=start), dtype)

    with b.origin(Origin("batch_norm", (("eps", 1e-5),), (z,))) as origin:
        s = b.add(Prim.MUL, parameter(0.5), b.add(Prim.RSQRT, b.apply(Prim.ADD, parameter(1.0), 1e-5)))
        t = b.add(Prim.SUB, parameter(-1.0), b.add(Prim.MUL, parameter(-0.5), s))
        y = b.apply(Prim.ADD, b.apply(Prim.MUL, z, s), t)
        b.set_origin_results(origin, [y])
    return b.build([b.apply(Prim.MAX, y, 0.0), *([z] if other_user else [])], ["y", "z"][: 1 + other_user])


def _matmul() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 5, 8)), "x")
    y = b.add(Prim.MATMUL, x, b.constant(ramp(8, 4)))
    y = b.apply(Prim.MUL, y, b.constant(ramp(4, start=1.0)))
    return b.build([b.apply(Prim.ADD, y, b.constant(ramp(4)))], ["y"])


def _views() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 1, 3)), "x")
    y = b.transpose(b.transpose(x, (2, 1, 0)), (2, 1, 0))
    z = b.reshape(b.reshape(b.transpose(x, (1, 0, 2)), (6,)), (3, 2))
    return b.build([b.broadcast(b.broadcast(y, (2, 4, 3)), (5, 2, 4, 3)), z], ["y", "z"])


def _layout() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 6)), "x")
    both = b.add(Prim.CONCAT, x, b.add(Prim.NEG, x), attrs=a.ConcatAttrs(1))
    padded = b.add(Prim.PAD, both, attrs=a.PadAttrs((0, 1), (1, 0), "constant", -np.inf))
    edge = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 2), (0, 2), "reflect"))
    return b.build([b.slice(b.slice(padded, (0, 1), (2, 12), (1, 1)), (1, 11), (1, 3), (1, -2)), edge], ["y", "z"])


def _gather() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (5, 3)), "table")
    i = b.input(TensorType(DType.I64, (2, 2)), "rows")
    along = b.constant(np.array([[0], [2], [1], [0], [4]], np.int64))
    take = b.add(Prim.TAKE_ALONG, x, b.slice(along, (0, 0), (5, 1), (1, 1)), attrs=a.GatherAttrs(1))
    fixed = b.add(Prim.GATHER, x, b.constant(np.array([0, 2, 4], np.int64)), attrs=a.GatherAttrs(0))
    return b.build([b.add(Prim.GATHER, x, i, attrs=a.GatherAttrs(0)), take, fixed], ["a", "b", "c"])


def _pool() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 2, 5, 5)), "x")
    w = a.WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
    mean = b.apply(Prim.MUL, b.add(Prim.WINDOW_SUM, x, attrs=w), 1 / 9)
    return b.build([b.add(Prim.WINDOW_MAX, x, attrs=w), mean], ["max", "mean"])


def _integers() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.I8, (3,)), "x")
    y = b.add(
        Prim.SHL, b.apply(Prim.DIV, x, b.constant(np.array(3, np.int8))), b.constant(np.array([1, 2, 3], np.int8))
    )
    positions = b.iota((3,), 0, DType.I64)
    z = b.add(Prim.AND, b.add(Prim.LT, b.cast(x, DType.I64), positions), b.cast(x, DType.BOOL))
    return b.build([y, b.add(Prim.ARGMAX, b.reshape(x, (1, 3)), attrs=a.ArgAttrs(1)), z], ["y", "where", "z"])


def _half() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (2, 4)), "x")
    wide = b.apply(Prim.MUL, b.cast(x, DType.F32), 0.1)
    return b.build([b.cast(wide, DType.BF16), b.apply(Prim.ADD, b.cast(x, DType.F16), 0.1)], ["y", "z"])


def _opaque() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 9)), "x")
    types = (TensorType(DType.F32, (4, 2)), TensorType(DType.I64, (4, 2)))
    payload = '{"k": 2, "axis": -1}'

    def result(i: int) -> NodeId:
        return b.add(Prim.OPAQUE, x, attrs=a.OpaqueAttrs("aten", "aten.topk.default", payload, i, types, "no rule"))

    return b.build([result(0), result(1)], ["values", "indices"])


def _transposed_conv() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 4, 5, 5)), "x")
    conv = a.ConvAttrs((2, 2), (1, 1), (1, 1), (1, 1), groups=2, transposed=True, output_padding=(1, 1))
    y = b.add(Prim.CONV, x, b.constant(ramp(4, 3, 3, 3)), attrs=conv)
    return b.build([b.apply(Prim.MUL, y, b.constant(ramp(6, 1, 1, start=1.0)))], ["y"])


GRAPHS: Mapping[str, Callable[[], Graph]] = {
    "elementwise": _elementwise,
    "softmax": _softmax,
    "conv_batch_norm": conv_batch_norm,
    "matmul": _matmul,
    "views": _views,
    "layout": _layout,
    "gather": _gather,
    "pool": _pool,
    "integers": _integers,
    "half": _half,
    "opaque": _opaque,
    "transposed_conv": _transposed_conv,
}
