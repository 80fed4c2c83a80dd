"""`export_onnx`: a graph of primitives as an ONNX model that ONNX Runtime executes: `weft fission in.onnx out.onnx`.

Each primitive becomes one or a few nodes of opset 18. Names are synthetic but for inputs and outputs, which keep
theirs where these are unique. `write.write_onnx` puts weights that one protobuf cannot hold into a file beside it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import onnx
from onnx import helper

from weft.errors import UnsupportedError
from weft.frontends.onnx.tensors import ONNX_TYPES, to_proto, type_proto
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType

OPSET = 18
IR_VERSION = 10
MAX_BYTES = 1_900_000_000
"""A protobuf message ends at 2 GB."""
EXTERNAL_BYTES = 1024
"""Smaller constants stay in the model: runtimes want the values of shapes and axes there."""
Keep = Callable[[Array, DType, str], onnx.TensorProto]
"""Puts a large constant somewhere; what stands for it, under the given name, in the model."""

_DIRECT: dict[Prim, str] = {
    Prim.NEG: "Neg", Prim.ABS: "Abs", Prim.SIGN: "Sign", Prim.EXP: "Exp", Prim.LOG: "Log", Prim.SQRT: "Sqrt",
    Prim.RECIPROCAL: "Reciprocal", Prim.ERF: "Erf", Prim.TANH: "Tanh", Prim.SIN: "Sin", Prim.COS: "Cos",
    Prim.TAN: "Tan", Prim.ASIN: "Asin", Prim.ACOS: "Acos", Prim.ATAN: "Atan", Prim.SINH: "Sinh", Prim.COSH: "Cosh",
    Prim.ASINH: "Asinh", Prim.ACOSH: "Acosh", Prim.ATANH: "Atanh", Prim.FLOOR: "Floor", Prim.CEIL: "Ceil",
    Prim.ROUND: "Round", Prim.ISNAN: "IsNaN", Prim.ISINF: "IsInf", Prim.ADD: "Add", Prim.SUB: "Sub",
    Prim.MUL: "Mul", Prim.DIV: "Div", Prim.POW: "Pow", Prim.EQ: "Equal", Prim.LT: "Less", Prim.LE: "LessOrEqual",
    Prim.GT: "Greater", Prim.GE: "GreaterOrEqual", Prim.MATMUL: "MatMul",
}  # fmt: skip
_COMPARISONS = frozenset({Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE})
_F32_ONLY = frozenset(
    {
        Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.SINH, Prim.COSH, Prim.ASINH, Prim.ACOSH, Prim.ATANH, Prim.ERF,
        Prim.ISINF, Prim.COS, Prim.SIN, Prim.SIGN, Prim.CONV, Prim.WINDOW_SUM, Prim.WINDOW_MAX,
    }
)  # fmt: skip
"""Where the runtime's kernels know f32 best; f16 is widened exactly and rounded once, f64 keeps its own type."""
_REDUCE = {
    Prim.REDUCE_SUM: "ReduceSum", Prim.REDUCE_PROD: "ReduceProd", Prim.REDUCE_MAX: "ReduceMax",
    Prim.REDUCE_MIN: "ReduceMin",
}  # fmt: skip


class _Writer:
    """Collects nodes; `put` adds one and returns the name of its result."""

    def __init__(self, graph: Graph, keep: Keep) -> None:
        self.graph = graph
        self.keep = keep
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: list[onnx.TensorProto] = []
        self.names: dict[int, str] = {}
        self.domains: dict[str, int] = {}
        """Of operators that are not ONNX's own, with versions."""
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def put(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = self.fresh()
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"n{len(self.nodes)}", **attributes))
        return name

    def const(self, value: Any, dtype: DType = DType.I64) -> str:
        name = self.fresh()
        self.initialisers.append(to_proto(np.asarray(value, dtype.numpy), dtype, name))
        return name

    def weight(self, value: Array, dtype: DType) -> str:
        """A constant of the graph, which may lie outside of the model."""
        name = self.fresh()
        make = self.keep if value.nbytes >= EXTERNAL_BYTES else to_proto
        self.initialisers.append(make(value, dtype, name))
        return name

    def cast(self, x: str, dtype: DType) -> str:
        return self.put("Cast", x, to=int(ONNX_TYPES[dtype]))

    def x(self, node: Node, k: int = 0) -> str:
        return self.names[node.inputs[k]]

    def type(self, node: Node, k: int = 0) -> TensorType:
        return self.graph.type_of(node.inputs[k])


Emit = Callable[[_Writer, Node], str]


def _elementwise(w: _Writer, n: Node) -> str:
    """In the operand type, or in a wider one where the runtime has no kernel: every narrow integer fits in i32."""
    t = w.type(n)
    xs = [w.x(n, k) for k in range(len(n.inputs))]
    if n.prim in _COMPARISONS and t.dtype is DType.BOOL:
        xs, inner = [w.cast(x, DType.I32) for x in xs], DType.I32
    else:
        inner = _wide(n.prim, t.dtype)
        xs = [x if inner is t.dtype else w.cast(x, inner) for x in xs]
    y = _arithmetic(w, n.prim, xs, inner)
    return y if n.type.dtype is DType.BOOL or inner is n.type.dtype else w.cast(y, n.type.dtype)


def _wide(prim: Prim, dtype: DType) -> DType:
    if dtype is DType.F16:
        return DType.F32
    if dtype in (DType.I8, DType.U8, DType.I16):
        return DType.I32
    if dtype is DType.F64 and prim in (Prim.ERF, Prim.TANH, Prim.TAN, Prim.ASINH, Prim.ACOSH, Prim.ATANH):
        return DType.F64
    return dtype


def _arithmetic(w: _Writer, prim: Prim, xs: list[str], dtype: DType) -> str:
    match prim:
        case Prim.NE:
            return w.put("Not", w.put("Equal", *xs))
        case Prim.MAX | Prim.MIN:
            # written out, since runtimes disagree about NaN
            keep = w.put("GreaterOrEqual" if prim is Prim.MAX else "LessOrEqual", *xs)
            y = w.put("Where", keep, *xs)
            return w.put("Where", w.put("IsNaN", xs[0]), xs[0], y) if dtype.is_float else y
        case Prim.RSQRT:
            return w.put("Reciprocal", w.put("Sqrt", xs[0]))
        case Prim.EXPM1:
            # tanh keeps the digits that exp(x) - 1 loses near 0: expm1(x) = tanh(x/2) (exp(x) + 1)
            half = w.put("Mul", xs[0], w.const(0.5, dtype))
            one = w.const(1.0, dtype)
            e = w.put("Exp", xs[0])
            small = w.put("Mul", w.put("Tanh", half), w.put("Add", e, one))
            near = w.put("Less", w.put("Abs", xs[0]), one)
            return w.put("Where", near, small, w.put("Sub", e, one))
        case Prim.LOG1P:
            # log1p(x) = log(u)·x/(u - 1) with u = 1 + x, exact to rounding (Kahan)
            one = w.const(1.0, dtype)
            u = w.put("Add", xs[0], one)
            d = w.put("Sub", u, one)
            zero = w.put("Equal", d, w.const(0.0, dtype))
            safe = w.put("Where", zero, one, d)
            ratio = w.put("Div", w.put("Mul", w.put("Log", u), xs[0]), safe)
            plain = w.put("Or", w.put("IsInf", u), w.put("LessOrEqual", u, w.const(0.0, dtype)))
            return w.put("Where", plain, w.put("Log", u), w.put("Where", zero, xs[0], ratio))
        case Prim.TRUNC:
            return w.put("Mul", w.put("Sign", xs[0]), w.put("Floor", w.put("Abs", xs[0])))
        case Prim.MOD:
            if dtype.is_float:  # fmod, moved into the range of the divisor's sign
                r = w.put("Mod", *xs, fmod=1)
                zero = w.const(0, dtype)
                off = w.put("And", w.put("Not", w.put("Equal", r, zero)), _signs_differ(w, r, xs[1], zero))
                return w.put("Where", off, w.put("Add", r, xs[1]), r)
            return w.put("Mod", *xs)
        case Prim.FMOD:
            return w.put("Mod", *xs, fmod=1)
        case Prim.ATAN2:
            return _atan2(w, xs[0], xs[1], dtype)
        case Prim.SIGN if dtype.is_float:
            y = w.put("Sign", xs[0])
            return w.put("Where", w.put("IsNaN", xs[0]), xs[0], y)
    return w.put(_DIRECT[prim], *xs)


def _signs_differ(w: _Writer, x: str, y: str, zero: str) -> str:
    return w.put("Xor", w.put("Less", x, zero), w.put("Less", y, zero))


def _atan2(w: _Writer, y: str, x: str, dtype: DType) -> str:
    zero, pi = w.const(0.0, dtype), w.const(np.pi, dtype)
    base = w.put("Atan", w.put("Div", y, x))
    negative_y, negative_x = w.put("Less", y, zero), w.put("Less", x, zero)
    turn = w.put("Where", negative_y, w.put("Neg", pi), pi)
    moved = w.put("Where", negative_x, w.put("Add", base, turn), base)
    both = w.put("And", w.put("Equal", x, zero), w.put("Equal", y, zero))
    return w.put("Where", both, zero, moved)


def _logic(w: _Writer, n: Node) -> str:
    """AND, OR, XOR, NOT: logical on bool, bitwise on integers."""
    name = {Prim.AND: "And", Prim.OR: "Or", Prim.XOR: "Xor", Prim.NOT: "Not"}[n.prim]
    xs = [w.x(n, k) for k in range(len(n.inputs))]
    return w.put(name if n.type.dtype is DType.BOOL else f"Bitwise{name}", *xs)


def _bool_minmax(w: _Writer, n: Node) -> str:
    if n.type.dtype is not DType.BOOL:
        return _elementwise(w, n)
    return w.put("Or" if n.prim is Prim.MAX else "And", w.x(n, 0), w.x(n, 1))


def _shift(w: _Writer, n: Node) -> str:
    """By a power of two: BitShift of signed types came only with opset 28. i64 wraps like the primitive."""
    amount = w.cast(w.x(n, 1), DType.I64)
    inside = w.put("And", w.put("GreaterOrEqual", amount, w.const(0)), w.put("Less", amount, w.const(63)))
    power = w.put("Pow", w.const(2), w.put("Where", inside, amount, w.const(0)))
    x = w.cast(w.x(n), DType.I64)
    if n.prim is Prim.SHL:
        return w.cast(w.put("Mul", x, power), n.type.dtype)
    # floor division: truncation, one less where a negative number leaves a remainder
    r = w.put("Mod", x, power)
    return w.cast(w.put("Div", w.put("Sub", x, r), power), n.type.dtype)


def _cast(w: _Writer, n: Node) -> str:
    return w.cast(w.x(n), n.type.dtype)


def _select(w: _Writer, n: Node) -> str:
    if n.type.dtype in (DType.I16, DType.I8):  # the runtime selects wider integers only
        wide = w.put("Where", w.x(n, 0), w.cast(w.x(n, 1), DType.I32), w.cast(w.x(n, 2), DType.I32))
        return w.cast(wide, n.type.dtype)
    if n.type.dtype is not DType.BOOL:
        return w.put("Where", w.x(n, 0), w.x(n, 1), w.x(n, 2))
    c = w.x(n, 0)
    return w.put("Or", w.put("And", c, w.x(n, 1)), w.put("And", w.put("Not", c), w.x(n, 2)))


def _iota(w: _Writer, n: Node) -> str:
    i = cast("a.IotaAttrs", n.attrs)
    line = np.arange(i.shape[i.axis]).astype(i.dtype.numpy)
    shaped = line.reshape([-1 if k == i.axis else 1 for k in range(len(i.shape))])
    return w.put("Expand", w.const(shaped, i.dtype), w.const(i.shape))


def _broadcast(w: _Writer, n: Node) -> str:
    return w.put("Expand", w.x(n), w.const(np.array(n.type.shape, np.int64)))


def _reshape(w: _Writer, n: Node) -> str:
    return w.put("Reshape", w.x(n), w.const(np.array(n.type.shape, np.int64)), allowzero=1)


def _transpose(w: _Writer, n: Node) -> str:
    return w.put("Transpose", w.x(n), perm=list(cast("a.TransposeAttrs", n.attrs).perm))


def _slice(w: _Writer, n: Node) -> str:
    s = cast("a.SliceAttrs", n.attrs)
    if not s.starts:
        return w.put("Identity", w.x(n))
    ends = [
        start + size * step if step > 0 or start + size * step >= 0 else -(2**62)
        for start, size, step in zip(s.starts, s.sizes, s.steps, strict=True)
    ]
    empty = [k for k, size in enumerate(s.sizes) if size == 0]
    starts = [0 if k in empty else v for k, v in enumerate(s.starts)]
    ends = [0 if k in empty else v for k, v in enumerate(ends)]
    steps = [1 if k in empty else v for k, v in enumerate(s.steps)]
    axes = list(range(len(starts)))
    return w.put("Slice", w.x(n), w.const(starts), w.const(ends), w.const(axes), w.const(steps))


def _concat(w: _Writer, n: Node) -> str:
    axis = cast("a.ConcatAttrs", n.attrs).axis
    return w.put("Concat", *(w.x(n, k) for k in range(len(n.inputs))), axis=axis)


def _pad(w: _Writer, n: Node) -> str:
    p = cast("a.PadAttrs", n.attrs)
    if not p.lo:
        return w.put("Identity", w.x(n))
    dtype = n.type.dtype
    inner = DType.I32 if dtype in (DType.I16, DType.BOOL) else dtype
    x = w.x(n) if inner is dtype else w.cast(w.x(n), inner)
    pads = w.const([*p.lo, *p.hi])
    value = [w.const(p.value, inner)] if p.mode == "constant" else []
    y = w.put("Pad", x, pads, *value, mode=p.mode)
    return y if inner is dtype else w.cast(y, dtype)


def _index(w: _Writer, n: Node, size: int) -> str:
    """Indices outside are clamped, as the primitive promises."""
    idx = w.cast(w.x(n, 1), DType.I64)
    return w.put("Max", w.put("Min", idx, w.const(max(size - 1, 0))), w.const(0))


def _gather(w: _Writer, n: Node) -> str:
    axis = cast("a.GatherAttrs", n.attrs).axis
    op = "Gather" if n.prim is Prim.GATHER else "GatherElements"
    if n.type.size == 0:
        return w.const(np.zeros(n.type.shape), n.type.dtype)
    index = _index(w, n, w.type(n).shape[axis])
    return w.put(op, w.x(n), index, axis=axis)


def _reduce(w: _Writer, n: Node) -> str:
    axes, dtype = cast("a.ReduceAttrs", n.attrs).axes, n.type.dtype
    if w.type(n).size == 0:
        return w.const(_empty_reduction(n), dtype)
    inner = DType.F32 if dtype is DType.F16 else DType.I32 if dtype in (DType.I8, DType.U8, DType.I16) else dtype
    if dtype is DType.BOOL:
        inner = DType.I32
    x = w.x(n) if inner is dtype else w.cast(w.x(n), inner)
    y = w.put(_REDUCE[n.prim], x, w.const(axes), keepdims=1)
    if inner.is_float and n.prim in (Prim.REDUCE_MAX, Prim.REDUCE_MIN):  # NaN wins, whatever the runtime does
        bad = w.put("ReduceMax", w.cast(w.put("IsNaN", x), DType.I32), w.const(axes), keepdims=1)
        y = w.put("Where", w.cast(bad, DType.BOOL), w.const(np.nan, inner), y)
    return y if inner is dtype else w.cast(y, dtype)


def _empty_reduction(n: Node) -> Array:
    dtype = n.type.dtype
    unit: Any = 0 if n.prim is Prim.REDUCE_SUM else 1
    if n.prim in (Prim.REDUCE_MAX, Prim.REDUCE_MIN):
        low = n.prim is Prim.REDUCE_MAX
        if dtype.is_float:
            unit = -np.inf if low else np.inf
        elif dtype is DType.BOOL:
            unit = not low
        else:
            info = np.iinfo(cast("Any", dtype.numpy))
            unit = info.min if low else info.max
    return np.full(n.type.shape, unit, dtype.numpy)


def _arg(w: _Writer, n: Node) -> str:
    axis = cast("a.ArgAttrs", n.attrs).axis
    t = w.type(n)
    op = "ArgMax" if n.prim is Prim.ARGMAX else "ArgMin"
    inner = DType.F32 if t.dtype is DType.F16 else t.dtype
    inner = DType.I32 if t.dtype in (DType.I8, DType.U8, DType.I16, DType.BOOL) else inner
    x = w.x(n) if inner is t.dtype else w.cast(w.x(n), inner)
    y = w.put(op, x, axis=axis, keepdims=1)
    if not inner.is_float:
        return y
    bad = w.cast(w.put("IsNaN", x), DType.I32)  # the first NaN wins
    first = w.put("ArgMax", bad, axis=axis, keepdims=1)
    some = w.put("ReduceMax", bad, w.const([axis]), keepdims=1)
    return w.put("Where", w.cast(some, DType.BOOL), first, y)


def _window(w: _Writer, n: Node) -> str:
    """Windows as a gather of each window's elements, then a plain reduction: any rank, type and dilation."""
    s = cast("a.WindowAttrs", n.attrs)
    t, k = w.type(n), len(s.kernel)
    rank, dtype = t.rank, t.dtype
    if n.type.size == 0:
        return w.const(np.zeros(n.type.shape), dtype)
    inner = DType.F32 if dtype is DType.F16 else DType.I32 if dtype in (DType.I8, DType.U8, DType.I16) else dtype
    x = w.x(n) if inner is dtype else w.cast(w.x(n), inner)
    maximum = n.prim is Prim.WINDOW_MAX
    fill: Any = 0
    if maximum:
        fill = -np.inf if dtype.is_float else np.iinfo(cast("Any", dtype.numpy)).min
    zeros = [0] * (rank - k)
    pads = w.const([*zeros, *s.pads_lo, *zeros, *s.pads_hi])
    x = w.put("Pad", x, pads, w.const(fill, inner))
    for d in range(k):  # axis after axis: (..., out_d, kernel_d, ...) and reduce the second
        axis = rank - k + d
        out = n.type.shape[axis]
        at = np.arange(out)[:, None] * s.strides[d] + np.arange(s.kernel[d])[None, :] * s.dilations[d]
        cut = w.put("Gather", x, w.const(at), axis=axis)
        y = w.put("ReduceMax" if maximum else "ReduceSum", cut, w.const([axis + 1]), keepdims=0)
        if maximum and inner.is_float:
            bad = w.put("ReduceMax", w.cast(w.put("IsNaN", cut), DType.I32), w.const([axis + 1]), keepdims=0)
            y = w.put("Where", w.cast(bad, DType.BOOL), w.const(np.nan, inner), y)
        x = y
    return x if inner is dtype else w.cast(x, dtype)


def _matmul(w: _Writer, n: Node) -> str:
    dtype = n.type.dtype
    if n.type.size == 0 or w.type(n).size == 0:
        return w.const(np.zeros(n.type.shape), dtype)
    inner = DType.F32 if dtype is DType.F16 else DType.I32 if dtype in (DType.I8, DType.U8, DType.I16) else dtype
    xs = [w.x(n, k) if inner is dtype else w.cast(w.x(n, k), inner) for k in (0, 1)]
    y = w.put("MatMul", *xs)
    return y if inner is dtype else w.cast(y, dtype)


def _conv(w: _Writer, n: Node) -> str:
    c = cast("a.ConvAttrs", n.attrs)
    dtype = n.type.dtype
    if dtype not in (DType.F32, DType.F16):
        raise UnsupportedError(op="conv", reason=f"runtimes have no convolution of {dtype.value}")
    inner = DType.F32
    xs = [w.x(n, k) if inner is dtype else w.cast(w.x(n, k), inner) for k in (0, 1)]
    common: dict[str, Any] = {
        "strides": list(c.strides), "pads": [*c.pads_lo, *c.pads_hi], "dilations": list(c.dilations), "group": c.groups,
    }  # fmt: skip
    if c.transposed:
        y = w.put("ConvTranspose", *xs, output_padding=list(c.output_padding), **common)
    else:
        y = w.put("Conv", *xs, **common)
    return y if inner is dtype else w.cast(y, dtype)


def _scan(w: _Writer, n: Node) -> str:
    """Sums by CumSum; products and recurrences, which opset 18 lacks, in steps that double how far a value reaches."""
    s = cast("a.ScanAttrs", n.attrs)
    dtype, size = n.type.dtype, n.type.shape[s.axis]
    if n.type.size == 0:
        return w.const(np.zeros(n.type.shape), dtype)
    narrow = dtype in (DType.F16, DType.I8, DType.U8, DType.I16)
    inner = (DType.F32 if dtype.is_float else DType.I32) if narrow else dtype
    xs = [w.cast(w.x(n, k), inner) if narrow else w.x(n, k) for k in range(len(n.inputs))]
    if s.kind == "sum":
        flags = {"exclusive": int(s.exclusive), "reverse": int(s.reverse)}
        y = w.put("CumSum", xs[0], w.const(s.axis), **flags)
        return w.cast(y, dtype) if narrow else y

    def part(x: str, start: int, end: int) -> str:
        return w.put("Slice", x, w.const([start]), w.const([end]), w.const([s.axis]))

    def flipped(x: str) -> str:
        return w.put("Slice", x, w.const([-1]), w.const([-(2**62)]), w.const([s.axis]), w.const([-1]))

    if s.reverse:
        xs = [flipped(x) for x in xs]
    reach = 1
    while reach < size:
        later = [part(x, reach, size) for x in xs]
        earlier = [part(x, 0, size - reach) for x in xs]
        product = w.put("Mul", later[0], earlier[-1])
        new = [product] if s.kind == "prod" else [w.put("Mul", *(x[0] for x in (later, earlier)))]
        if s.kind == "linear":
            new.append(w.put("Add", product, later[1]))
        xs = [w.put("Concat", part(x, 0, reach), y, axis=s.axis) for x, y in zip(xs, new, strict=True)]
        reach *= 2
    y = xs[-1]
    if s.exclusive:
        first = np.full([1 if k == s.axis else m for k, m in enumerate(n.type.shape)], s.kind == "prod")
        y = w.put("Concat", w.const(first, inner), part(y, 0, size - 1), axis=s.axis)
    y = flipped(y) if s.reverse else y
    return w.cast(y, dtype) if narrow else y


def _never(_: _Writer, n: Node) -> str:
    raise UnsupportedError(op=n.prim.value, reason="it is written apart from the other primitives")


EMITTERS: Mapping[Prim, Emit] = {
    **dict.fromkeys((*_DIRECT, Prim.NE, Prim.RSQRT, Prim.EXPM1, Prim.LOG1P, Prim.TRUNC), _elementwise),
    **dict.fromkeys((Prim.MOD, Prim.FMOD, Prim.ATAN2), _elementwise),
    **dict.fromkeys((Prim.MAX, Prim.MIN), _bool_minmax),
    **dict.fromkeys((Prim.AND, Prim.OR, Prim.XOR, Prim.NOT), _logic),
    **dict.fromkeys((Prim.SHL, Prim.SHR), _shift),
    **dict.fromkeys(_REDUCE, _reduce),
    **dict.fromkeys((Prim.ARGMAX, Prim.ARGMIN), _arg),
    **dict.fromkeys((Prim.WINDOW_SUM, Prim.WINDOW_MAX), _window),
    **dict.fromkeys((Prim.GATHER, Prim.TAKE_ALONG), _gather),
    **dict.fromkeys((Prim.INPUT, Prim.CONSTANT, Prim.OPAQUE), _never),
    Prim.CAST: _cast,
    Prim.SELECT: _select,
    Prim.IOTA: _iota,
    Prim.BROADCAST: _broadcast,
    Prim.RESHAPE: _reshape,
    Prim.TRANSPOSE: _transpose,
    Prim.SLICE: _slice,
    Prim.CONCAT: _concat,
    Prim.PAD: _pad,
    Prim.SCAN: _scan,
    Prim.MATMUL: _matmul,
    Prim.CONV: _conv,
}
"""One emitter per primitive."""


def _opaque(w: _Writer, nodes: list[int]) -> None:
    """One call of an ONNX operator: the nodes of its one-node model, renamed."""
    first = w.graph.nodes[nodes[0]]
    attrs = cast("a.OpaqueAttrs", first.attrs)
    if attrs.framework != "onnx":
        raise UnsupportedError(op=attrs.op, reason="an operator of another framework has no ONNX form")
    model = onnx.ModelProto.FromString(base64.b64decode(json.loads(attrs.payload)["model"]))
    if any(a_.HasField("g") for node in model.graph.node for a_ in node.attribute):
        raise UnsupportedError(op=attrs.op, reason="it holds a subgraph")
    rename = {i.name: w.names[j] for i, j in zip(model.graph.input, first.inputs, strict=True)}
    for used in model.opset_import:
        if used.domain and w.domains.setdefault(used.domain, used.version) != used.version:
            raise UnsupportedError(op=attrs.op, reason=f"'{used.domain}' would have two versions in one model")
    for t in model.graph.initializer:
        rename[t.name] = w.fresh()
        t.name = rename[t.name]
        w.initialisers.append(t)
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"n{len(w.nodes)}"
        for k, name in enumerate(node.input):
            copy.input[k] = rename.get(name, name) if name else ""
        for k, name in enumerate(node.output):
            if name:
                rename[name] = w.fresh()
                copy.output[k] = rename[name]
        w.nodes.append(copy)
    results = [rename[o.name] for o in model.graph.output]
    for i in nodes:
        w.names[i] = results[cast("a.OpaqueAttrs", w.graph.nodes[i].attrs).result]


def export_onnx(graph: Graph, *, keep: Keep = to_proto) -> bytes:
    """The graph as a serialised ONNX model of opset 18.

    Conditions: no bf16 and no 8-bit floats (runtimes lack their kernels); opaque operators of ONNX only; less than
    1.9 GB of constants inside, which is all of them unless `keep` puts large ones elsewhere (see `write_onnx`).

    Raises:
        UnsupportedError: a primitive without an ONNX form here [W201].
    """
    w = _Writer(graph, keep)
    for n in graph.nodes:
        if n.type.dtype.is_emulated:
            reason = f"{n.type.dtype.value} is not exported: runtimes lack its kernels"
            raise UnsupportedError(op=n.prim.value, reason=reason)
    inside = sum(v.nbytes for v in graph.constants.values() if keep is to_proto or v.nbytes < EXTERNAL_BYTES)
    if inside > MAX_BYTES:
        raise UnsupportedError(op="constant", reason=f"more than {MAX_BYTES} bytes of constants inside one model")
    calls: dict[tuple[object, ...], list[int]] = {}
    for i, n in enumerate(graph.nodes):
        if isinstance(n.attrs, a.OpaqueAttrs):
            calls.setdefault((n.inputs, n.attrs.framework, n.attrs.op, n.attrs.payload), []).append(i)
    inputs = []
    taken: set[str] = set()
    for k, i in enumerate(graph.inputs):
        name = graph.input_names[k] if k < len(graph.input_names) else ""
        w.names[i] = name if name and name not in taken and not name.startswith("v") else f"input{k}"
        taken.add(w.names[i])
        inputs.append(helper.make_value_info(w.names[i], type_proto(graph.type_of(i))))
    for i, n in enumerate(graph.nodes):
        if n.prim is Prim.INPUT or i in w.names:
            continue
        if n.prim is Prim.CONSTANT:
            w.names[i] = w.weight(graph.constant(i), n.type.dtype)
        elif isinstance(n.attrs, a.OpaqueAttrs):
            _opaque(w, calls[n.inputs, n.attrs.framework, n.attrs.op, n.attrs.payload])
        else:
            w.names[i] = EMITTERS[n.prim](w, n)
    outputs = []
    for k, i in enumerate(graph.outputs):
        name = graph.output_names[k] if k < len(graph.output_names) else ""
        name = name if name and name not in taken and not name.startswith("v") else f"output{k}"
        taken.add(name)
        w.nodes.append(helper.make_node("Identity", [w.names[i]], [name], name=f"n{len(w.nodes)}"))
        outputs.append(helper.make_value_info(name, type_proto(graph.type_of(i))))
    made = helper.make_graph(w.nodes, "weft", inputs, outputs, w.initialisers)
    imports = [helper.make_opsetid(domain, version) for domain, version in {"": OPSET, **w.domains}.items()]
    model = helper.make_model(made, opset_imports=imports, producer_name="weft")
    model.ir_version = IR_VERSION
    return bytes(model.SerializeToString())
