"""Every primitive as ATen calls: the table that makes any graph runnable by the framework alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.opaque import call_members
from weft.ir.prims import Prim
from weft.ir.types import FLOAT8, DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CallStep, CallValue, LibraryCall, Ref, Schedule


class Program:
    """Collects the steps of a library call for one problem graph.

    Steps whose operands are all weights or constants are run once, at link time.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.prepare: list[CallStep] = []
        self.run: list[CallStep] = []
        self._refs: dict[NodeId, Ref] = {}
        self._weights = {i for i, n in enumerate(graph.inputs) if cast("a.InputAttrs", graph.nodes[n].attrs).is_weight}
        for position, node in enumerate(graph.inputs):
            self._refs[node] = Ref("in", position)

    def is_static(self, value: CallValue) -> bool:
        """True when a value is known at link time."""
        if isinstance(value, Ref):
            return value.kind == "prep" or (value.kind == "in" and value.index in self._weights)
        return not isinstance(value, tuple) or all(self.is_static(v) for v in value)

    def call(self, target: str, *args: CallValue, result: int = 0, live: bool = False, **kwargs: CallValue) -> Ref:
        """Append one step; `live` keeps it out of the prepare list."""
        step = CallStep(target, args, tuple(sorted(kwargs.items())), result)
        static = not live and all(self.is_static(v) for v in [*args, *kwargs.values()])
        steps = self.prepare if static else self.run
        steps.append(step)
        return Ref("prep" if static else "tmp", len(steps) - 1)

    def once(self, target: str, *args: CallValue) -> Ref:
        """The results, together, of a step that several values are picked from."""
        step = CallStep(target, args, (), -1)
        if step in self.run:
            return Ref("tmp", self.run.index(step))
        return self.call(target, *args, result=-1, live=True)

    def tensor(self, values: Sequence[float], dtype: DType, shape: Sequence[int]) -> Ref:
        """A small constant made at link time."""
        return self.call("weft.tensor", tuple(values), f"dtype:{dtype.value}", tuple(shape))

    def value(self, node: NodeId) -> Ref:
        """The node's value, translated on demand with all that it reads."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._refs:
                stack.pop()
                continue
            missing = [i for i in self.graph.nodes[top].inputs if i not in self._refs]
            if missing:
                stack.extend(missing)
                continue
            self._refs[top] = TRANSLATE[self.graph.nodes[top].prim](self, top, self.graph.nodes[top])
            stack.pop()
        return self._refs[node]

    def bind(self, node: NodeId, ref: Ref) -> None:
        """Say that a node's value is computed by other means."""
        self._refs[node] = ref

    def is_bound(self, node: NodeId) -> bool:
        """True once the node's value has a name."""
        return node in self._refs

    def used_inputs(self) -> frozenset[int]:
        """Positions of the inputs that some step reads."""
        return LibraryCall(Schedule("library", ()), tuple(self.prepare), tuple(self.run), ()).reads

    def bind_weight(self, node: NodeId, position: int) -> None:
        """Say that a node's value is passed in as a weight, at a position after the graph's own inputs."""
        self._refs[node] = Ref("in", position)
        self._weights.add(position)

    def finish(self, schedule: Schedule, problem: Problem | None = None) -> LibraryCall:
        """The call that yields the graph's outputs.

        `problem`: the last step may write its output itself where that has the shape of its result, and is known to
        do so for how the problem's inputs and outputs lie. Without it, or elsewhere, results are copied.
        """
        outputs = tuple(self.value(n) for n in self.graph.outputs)
        if problem is None or len(outputs) != 1 or not self.run or outputs[0] != Ref("tmp", len(self.run) - 1):
            return LibraryCall(schedule, tuple(self.prepare), tuple(self.run), outputs)
        last = self.run[-1]
        target = OUT_VARIANTS.get(last.target) if self._lies_alike(problem) else None
        transposed = last.target in _LIKE_OPERAND and any(step.target == "aten.permute.default" for step in self.run)
        if target is None and not transposed and set(problem.input_formats + problem.output_formats) <= {Format.ROW}:
            target = ROW_MAJOR_OUT_VARIANTS.get(last.target)
        if target is None or last.result != 0:
            return LibraryCall(schedule, tuple(self.prepare), tuple(self.run), outputs)
        self.run[-1] = CallStep(target, last.args, last.kwargs, last.result)
        return LibraryCall(schedule, tuple(self.prepare), tuple(self.run), outputs, out_variant=True)

    def _lies_alike(self, problem: Problem) -> bool:
        """Every operand of the output's shape lies as the output does.

        Where one does not, an operator may make its result elsewhere and leave `out` as it was: the framework's GELU
        gives a row-major operand to oneDNN, which then has a result of its own.
        """
        (output,), (format_,) = self.graph.outputs, problem.output_formats
        shape = self.graph.type_of(output).shape
        formats = zip(self.graph.inputs, problem.input_formats, strict=True)
        if any(f is not format_ for n, f in formats if self.graph.type_of(n).shape == shape):
            return False
        return format_ is Format.ROW or not any(step.target in _TURNS for step in self.run)


Translation = Callable[[Program, NodeId, Node], Ref]


def _simple(target: str) -> Translation:
    def translate(p: Program, _: NodeId, n: Node) -> Ref:
        return p.call(target, *(p.value(i) for i in n.inputs))

    return translate


def number_in(graph: Graph, node: NodeId) -> float | None:
    """The one number that a value consists of; None where there are several, or where it is none of floats."""
    n = graph.nodes[node]
    while n.prim in (Prim.BROADCAST, Prim.RESHAPE):
        node = n.inputs[0]
        n = graph.nodes[node]
    if n.prim is not Prim.CONSTANT or n.type.size != 1 or not n.type.dtype.is_float:
        return None
    return float(graph.constant(node).reshape(-1)[0])


def with_number(p: Program, target: str, n: Node) -> Ref | None:
    """An addition or a product with one number, which the framework's kernels take by value; None for another."""
    for x, number in (n.inputs, n.inputs[::-1]):
        if p.graph.type_of(x).shape == n.type.shape and (value := number_in(p.graph, number)) is not None:
            return p.call(target, p.value(x), p.call("weft.number", value, f"dtype:{n.type.dtype.value}"))
    return None


def _with_number(target: str) -> Translation:
    def translate(p: Program, i: NodeId, n: Node) -> Ref:
        return with_number(p, target, n) or _simple(target)(p, i, n)

    return translate


def _div(p: Program, _: NodeId, n: Node) -> Ref:
    x, y = (p.value(i) for i in n.inputs)
    if n.type.dtype.is_float:
        return p.call("aten.div.Tensor", x, y)
    return p.call("aten.div.Tensor_mode", x, y, rounding_mode="trunc")


def _logical(on_bool: str, otherwise: str) -> Translation:
    def translate(p: Program, _: NodeId, n: Node) -> Ref:
        return p.call(on_bool if n.type.dtype is DType.BOOL else otherwise, *(p.value(i) for i in n.inputs))

    return translate


def _sign(p: Program, _: NodeId, n: Node) -> Ref:
    x = p.value(n.inputs[0])
    sign = p.call("aten.sign.default", x)
    if not n.type.dtype.is_float:
        return sign
    return p.call("aten.where.self", p.call("aten.isnan.default", x), x, sign)  # torch.sign(NaN) is 0


def _cast(p: Program, _: NodeId, n: Node) -> Ref:
    x = p.value(n.inputs[0])
    if n.type.dtype is DType.F8E4M3:  # whether torch saturates depends on its version
        most = FLOAT8[DType.F8E4M3].greatest
        if p.graph.type_of(n.inputs[0]).dtype.itemsize < 4:
            x = p.call("aten._to_copy.default", x, dtype="dtype:f32")
        x = p.call("aten.clamp.default", x, -most, most)
    return p.call("aten._to_copy.default", x, dtype=f"dtype:{n.type.dtype.value}")


def _constant(p: Program, i: NodeId, n: Node) -> Ref:
    data = p.graph.constant(i)
    return p.tensor(tuple(data.reshape(-1).tolist()), n.type.dtype, n.type.shape)


def _input(p: Program, i: NodeId, _: Node) -> Ref:
    return Ref("in", p.graph.inputs.index(i))


def _iota(p: Program, _: NodeId, n: Node) -> Ref:
    at = cast("a.IotaAttrs", n.attrs)
    size = at.shape[at.axis]
    line = p.call("aten.arange.default", size, dtype=f"dtype:{at.dtype.value}")
    column = tuple(size if k == at.axis else 1 for k in range(len(at.shape)))
    return p.call("aten.expand.default", p.call("aten.reshape.default", line, column), at.shape)


def _broadcast(p: Program, _: NodeId, n: Node) -> Ref:
    return p.call("aten.expand.default", p.value(n.inputs[0]), n.type.shape)


def _reshape(p: Program, _: NodeId, n: Node) -> Ref:
    return p.call("aten.reshape.default", p.value(n.inputs[0]), n.type.shape)


def _transpose(p: Program, _: NodeId, n: Node) -> Ref:
    return p.call("aten.permute.default", p.value(n.inputs[0]), cast("a.TransposeAttrs", n.attrs).perm)


def _slice(p: Program, _: NodeId, n: Node) -> Ref:
    at = cast("a.SliceAttrs", n.attrs)
    x = p.value(n.inputs[0])
    shape = p.graph.type_of(n.inputs[0]).shape
    backwards = tuple(k for k, step in enumerate(at.steps) if step < 0)
    if backwards:
        x = p.call("aten.flip.default", x, backwards)
    for k, (start, size, step, extent) in enumerate(zip(at.starts, at.sizes, at.steps, shape, strict=True)):
        first, stride = (extent - 1 - start, -step) if step < 0 else (start, step)
        if (first, size, stride) != (0, extent, 1):
            end = first + (size - 1) * stride + 1 if size else first
            x = p.call("aten.slice.Tensor", x, k, first, end, stride)
    return x


def _concat(p: Program, _: NodeId, n: Node) -> Ref:
    return p.call("aten.cat.default", tuple(p.value(i) for i in n.inputs), cast("a.ConcatAttrs", n.attrs).axis)


def _pad(p: Program, _: NodeId, n: Node) -> Ref:
    at = cast("a.PadAttrs", n.attrs)
    x, shape = p.value(n.inputs[0]), p.graph.type_of(n.inputs[0]).shape
    if at.mode == "constant":
        value: float | int | bool = at.value
        if not n.type.dtype.is_float:
            value = bool(at.value) if n.type.dtype is DType.BOOL else int(at.value)
        return p.call("aten.constant_pad_nd.default", x, _flat_pads(at.lo, at.hi), value)
    spatial = len(shape) - 2
    whole = spatial in (1, 2, 3) and not any(at.lo[:2] + at.hi[:2]) and n.type.dtype.is_float
    if whole and 0 not in shape:
        kind = "reflection" if at.mode == "reflect" else "replication"
        return p.call(f"aten.{kind}_pad{spatial}d.default", x, _flat_pads(at.lo[2:], at.hi[2:]))
    for k, (size, lo, hi) in enumerate(zip(shape, at.lo, at.hi, strict=True)):
        if lo or hi:
            index = [
                _mirror(i, size) if at.mode == "reflect" else min(max(i, 0), size - 1) for i in range(-lo, size + hi)
            ]
            x = p.call("aten.index_select.default", x, k, p.tensor(index, DType.I64, (len(index),)))
    return x


def _mirror(i: int, size: int) -> int:
    i = abs(i)
    return i if i < size else 2 * (size - 1) - i


def _gather(p: Program, _: NodeId, n: Node) -> Ref:
    axis = cast("a.GatherAttrs", n.attrs).axis
    data, index = n.inputs
    shape = p.graph.type_of(index).shape
    limit = max(p.graph.type_of(data).shape[axis] - 1, 0)
    clamped = p.call("aten.clamp.default", p.value(index), 0, limit)
    flat = p.call("aten.reshape.default", clamped, (math.prod(shape),))
    out = p.call("aten.index_select.default", p.value(data), axis, flat)
    return out if len(shape) == 1 else p.call("aten.reshape.default", out, n.type.shape)


def _take_along(p: Program, _: NodeId, n: Node) -> Ref:
    axis = cast("a.GatherAttrs", n.attrs).axis
    data, index = n.inputs
    limit = max(p.graph.type_of(data).shape[axis] - 1, 0)
    wide = p.call("aten._to_copy.default", p.value(index), dtype="dtype:i64")
    return p.call("aten.gather.default", p.value(data), axis, p.call("aten.clamp.default", wide, 0, limit))


_LEAST = {DType.I64: -(2**63), DType.I32: -(2**31), DType.I16: -(2**15), DType.I8: -128, DType.U8: 0, DType.BOOL: False}
_MOST = {
    DType.I64: 2**63 - 1,
    DType.I32: 2**31 - 1,
    DType.I16: 2**15 - 1,
    DType.I8: 127,
    DType.U8: 255,
    DType.BOOL: True,
}


def least(dtype: DType) -> float | int | bool:
    """The identity of MAX."""
    return -math.inf if dtype.is_float else _LEAST[dtype]


def most(dtype: DType) -> float | int | bool:
    """The identity of MIN."""
    return math.inf if dtype.is_float else _MOST[dtype]


def _reduce_sum(p: Program, _: NodeId, n: Node) -> Ref:
    axes = cast("a.ReduceAttrs", n.attrs).axes
    return p.call("aten.sum.dim_IntList", p.value(n.inputs[0]), axes, True, dtype=f"dtype:{n.type.dtype.value}")


def _reduce_prod(p: Program, _: NodeId, n: Node) -> Ref:
    x, axes = p.value(n.inputs[0]), cast("a.ReduceAttrs", n.attrs).axes
    held = n.type.dtype.accumulator  # rounded once, at the end
    for axis in axes:
        x = p.call("aten.prod.dim_int", x, axis, True, dtype=f"dtype:{held.value}")
    return x if held is n.type.dtype else p.call("aten._to_copy.default", x, dtype=f"dtype:{n.type.dtype.value}")


def _reduce_extreme(target: str, identity: Callable[[DType], float | int | bool]) -> Translation:
    def translate(p: Program, _: NodeId, n: Node) -> Ref:
        axes = cast("a.ReduceAttrs", n.attrs).axes
        if 0 in (p.graph.type_of(n.inputs[0]).shape[k] for k in axes):
            line = p.tensor([identity(n.type.dtype)], n.type.dtype, (1,) * n.type.rank)
            return p.call("aten.expand.default", line, n.type.shape)
        return p.call(target, p.value(n.inputs[0]), axes, True)

    return translate


def _arg(target: str) -> Translation:
    def translate(p: Program, _: NodeId, n: Node) -> Ref:
        x = p.value(n.inputs[0])
        if p.graph.type_of(n.inputs[0]).dtype is DType.BOOL:
            x = p.call("aten._to_copy.default", x, dtype=f"dtype:{DType.U8.value}")
        return p.call(target, x, cast("a.ArgAttrs", n.attrs).axis, True)

    return translate


def _window(p: Program, _: NodeId, n: Node) -> Ref:
    at = cast("a.WindowAttrs", n.attrs)
    is_max = n.prim is Prim.WINDOW_MAX
    x = p.value(n.inputs[0])
    t, k = p.graph.type_of(n.inputs[0]), len(at.kernel)
    symmetric = at.pads_lo == at.pads_hi and all(2 * lo <= kk for lo, kk in zip(at.pads_lo, at.kernel, strict=True))
    plain = t.dtype in (DType.F32, DType.F64) and t.rank == 4 and k == 2 and 0 not in t.shape and 0 not in n.type.shape
    if plain and is_max and symmetric:
        return p.call("aten.max_pool2d_with_indices.default", x, at.kernel, at.strides, at.pads_lo, at.dilations, False)
    if plain and not is_max and symmetric and set(at.dilations) == {1}:
        return p.call("aten.avg_pool2d.default", x, at.kernel, at.strides, at.pads_lo, False, True, 1)
    if any(at.pads_lo + at.pads_hi):
        fill = least(t.dtype) if is_max else 0
        x = p.call("aten.constant_pad_nd.default", x, _flat_pads(at.pads_lo, at.pads_hi), fill)
    first = t.rank - k
    for d in range(k):
        span = (at.kernel[d] - 1) * at.dilations[d] + 1
        x = p.call("aten.unfold.default", x, first + d, span, at.strides[d])
        if at.dilations[d] != 1:
            x = p.call("aten.slice.Tensor", x, t.rank + d, 0, span, at.dilations[d])
    axes = tuple(range(t.rank, t.rank + k))
    if is_max:
        return p.call("aten.amax.default", x, axes, False)
    return p.call("aten.sum.dim_IntList", x, axes, False, dtype=f"dtype:{t.dtype.value}")


def _scan(p: Program, _: NodeId, n: Node) -> Ref:
    """The framework's running sum or product; a recurrence in steps that double how far back a value reaches."""
    at = cast("a.ScanAttrs", n.attrs)
    t = n.type
    size = t.shape[at.axis]
    half = t.dtype in (DType.F16, DType.BF16)
    wide = DType.F32 if half else t.dtype
    xs = [p.value(i) for i in n.inputs]
    if half:
        xs = [p.call("aten._to_copy.default", x, dtype=f"dtype:{wide.value}") for x in xs]
    if at.reverse:
        xs = [p.call("aten.flip.default", x, (at.axis,)) for x in xs]
    if at.kind == "linear":
        y = _recurrence(p, xs[0], xs[1], at.axis, size)
    else:
        target = "aten.cumsum.default" if at.kind == "sum" else "aten.cumprod.default"
        y = p.call(target, xs[0], at.axis, dtype=f"dtype:{wide.value}")
    if at.exclusive and size:
        y = p.call("aten.slice.Tensor", y, at.axis, 0, size - 1)
        pads = (0, 0) * (t.rank - 1 - at.axis) + (1, 0)
        y = p.call("aten.constant_pad_nd.default", y, pads, int(at.kind == "prod"))
    if at.reverse:
        y = p.call("aten.flip.default", y, (at.axis,))
    return p.call("aten._to_copy.default", y, dtype=f"dtype:{t.dtype.value}") if half else y


def _recurrence(p: Program, factors: Ref, terms: Ref, axis: int, size: int) -> Ref:
    reach = 1
    while reach < size:

        def part(x: Ref, start: int, end: int) -> Ref:
            return p.call("aten.slice.Tensor", x, axis, start, end)

        later, factor = part(terms, reach, size), part(factors, reach, size)
        later = p.call("aten.addcmul.default", later, factor, part(terms, 0, size - reach))
        if 2 * reach < size:
            factor = p.call("aten.mul.Tensor", factor, part(factors, 0, size - reach))
            factors = p.call("aten.cat.default", (part(factors, 0, reach), factor), axis)
        terms = p.call("aten.cat.default", (part(terms, 0, reach), later), axis)
        reach *= 2
    return terms


def _conv(p: Program, _: NodeId, n: Node) -> Ref:
    return convolution(p, n, p.value(n.inputs[0]), p.value(n.inputs[1]), None)


def convolution(p: Program, n: Node, x: Ref, w: Ref, bias: Ref | None) -> Ref:
    """`aten.convolution` of a CONV node; unequal pads become a constant pad in front."""
    at = cast("a.ConvAttrs", n.attrs)
    zeros = (0,) * len(at.strides)
    uneven = at.pads_lo != at.pads_hi
    pads = zeros if uneven else at.pads_lo
    if uneven and not at.transposed:
        x = p.call("aten.constant_pad_nd.default", x, _flat_pads(at.pads_lo, at.pads_hi), 0)
    added = at.output_padding if at.transposed and not uneven else zeros
    out = p.call(
        "aten.convolution.default", x, w, bias, at.strides, pads, at.dilations, at.transposed, added, at.groups
    )
    if not (at.transposed and uneven):
        return out
    # the unpadded result, cut on both sides; an output padding past its end reads only padding
    for d, (size, lo, hi, more) in enumerate(
        zip(n.type.shape[2:], at.pads_lo, at.pads_hi, at.output_padding, strict=True)
    ):
        full = size + lo + hi - more
        missing = max(0, lo + size - full)
        out = p.call("aten.slice.Tensor", out, 2 + d, lo, min(full, lo + size))
        if missing:
            sides = tuple(missing if k == d else 0 for k in range(len(zeros)))
            out = p.call("aten.constant_pad_nd.default", out, _flat_pads(zeros, sides), 0)
    return out


def _flat_pads(lo: Sequence[int], hi: Sequence[int]) -> tuple[int, ...]:
    """Pads in ATen's order: last dimension first."""
    return tuple(v for pair in zip(reversed(lo), reversed(hi), strict=True) for v in pair)


def _opaque(p: Program, node: NodeId, n: Node) -> Ref:
    at = cast("a.OpaqueAttrs", n.attrs)
    target, operands = f"weft.opaque_{at.framework}", [p.value(i) for i in n.inputs]
    if call_members(p.graph, node).bit_count() > 1:
        every = p.once(target, at.payload, -1, *operands)
        found = p.call("weft.result", every, at.result, live=True)
    else:
        found = p.call(target, at.payload, at.result, *operands, live=True)
    if at.framework == "onnx" and n.type.dtype.is_emulated:
        return p.call("aten._to_copy.default", found, dtype=f"dtype:{n.type.dtype.value}")  # it crosses NumPy as f32
    return found


TRANSLATE: Mapping[Prim, Translation] = {
    Prim.INPUT: _input,
    Prim.CONSTANT: _constant,
    Prim.NEG: _simple("aten.neg.default"),
    Prim.ABS: _simple("aten.abs.default"),
    Prim.SIGN: _sign,
    Prim.EXP: _simple("aten.exp.default"),
    Prim.EXPM1: _simple("aten.expm1.default"),
    Prim.LOG: _simple("aten.log.default"),
    Prim.LOG1P: _simple("aten.log1p.default"),
    Prim.SQRT: _simple("aten.sqrt.default"),
    Prim.RSQRT: _simple("aten.rsqrt.default"),
    Prim.RECIPROCAL: _simple("aten.reciprocal.default"),
    Prim.ERF: _simple("aten.erf.default"),
    Prim.TANH: _simple("aten.tanh.default"),
    Prim.SIN: _simple("aten.sin.default"),
    Prim.COS: _simple("aten.cos.default"),
    Prim.TAN: _simple("aten.tan.default"),
    Prim.ASIN: _simple("aten.asin.default"),
    Prim.ACOS: _simple("aten.acos.default"),
    Prim.ATAN: _simple("aten.atan.default"),
    Prim.SINH: _simple("aten.sinh.default"),
    Prim.COSH: _simple("aten.cosh.default"),
    Prim.ASINH: _simple("aten.asinh.default"),
    Prim.ACOSH: _simple("aten.acosh.default"),
    Prim.ATANH: _simple("aten.atanh.default"),
    Prim.FLOOR: _simple("aten.floor.default"),
    Prim.CEIL: _simple("aten.ceil.default"),
    Prim.TRUNC: _simple("aten.trunc.default"),
    Prim.ROUND: _simple("aten.round.default"),
    Prim.ISNAN: _simple("aten.isnan.default"),
    Prim.ISINF: _simple("aten.isinf.default"),
    Prim.NOT: _simple("aten.bitwise_not.default"),
    Prim.CAST: _cast,
    Prim.ADD: _with_number("aten.add.Tensor"),
    Prim.SUB: _simple("aten.sub.Tensor"),
    Prim.MUL: _with_number("aten.mul.Tensor"),
    Prim.DIV: _div,
    Prim.POW: _simple("aten.pow.Tensor_Tensor"),
    Prim.MOD: _simple("aten.remainder.Tensor"),
    Prim.FMOD: _simple("aten.fmod.Tensor"),
    Prim.ATAN2: _simple("aten.atan2.default"),
    Prim.MAX: _logical("aten.bitwise_or.Tensor", "aten.maximum.default"),
    Prim.MIN: _logical("aten.bitwise_and.Tensor", "aten.minimum.default"),
    Prim.AND: _simple("aten.bitwise_and.Tensor"),
    Prim.OR: _simple("aten.bitwise_or.Tensor"),
    Prim.XOR: _simple("aten.bitwise_xor.Tensor"),
    Prim.SHL: _simple("aten.bitwise_left_shift.Tensor"),
    Prim.SHR: _simple("aten.bitwise_right_shift.Tensor"),
    Prim.EQ: _simple("aten.eq.Tensor"),
    Prim.NE: _simple("aten.ne.Tensor"),
    Prim.LT: _simple("aten.lt.Tensor"),
    Prim.LE: _simple("aten.le.Tensor"),
    Prim.GT: _simple("aten.gt.Tensor"),
    Prim.GE: _simple("aten.ge.Tensor"),
    Prim.SELECT: _simple("aten.where.self"),
    Prim.BROADCAST: _broadcast,
    Prim.RESHAPE: _reshape,
    Prim.TRANSPOSE: _transpose,
    Prim.SLICE: _slice,
    Prim.CONCAT: _concat,
    Prim.PAD: _pad,
    Prim.GATHER: _gather,
    Prim.TAKE_ALONG: _take_along,
    Prim.IOTA: _iota,
    Prim.REDUCE_SUM: _reduce_sum,
    Prim.REDUCE_PROD: _reduce_prod,
    Prim.REDUCE_MAX: _reduce_extreme("aten.amax.default", least),
    Prim.REDUCE_MIN: _reduce_extreme("aten.amin.default", most),
    Prim.ARGMAX: _arg("aten.argmax.default"),
    Prim.ARGMIN: _arg("aten.argmin.default"),
    Prim.WINDOW_SUM: _window,
    Prim.WINDOW_MAX: _window,
    Prim.SCAN: _scan,
    Prim.MATMUL: _simple("aten.matmul.default"),
    Prim.CONV: _conv,
    Prim.OPAQUE: _opaque,
}

_TURNS = frozenset({"aten.permute.default", "aten.reshape.default"})
"""Views that change in which order a value's elements lie."""
_STRIDED = "neg abs exp expm1 log log1p sqrt rsqrt reciprocal erf tanh sin cos floor ceil trunc maximum minimum sigmoid"
_STRIDED += " relu gelu silu mish hardswish leaky_relu elu softplus"
_DENSE = "matmul mm cat index_select addmm linear upsample_nearest2d upsample_bilinear2d"
OUT_VARIANTS: Mapping[str, str] = {
    **{f"aten.{name}.default": f"aten.{name}.out" for name in _STRIDED.split()},
    **{f"aten.{name}.Tensor": f"aten.{name}.out" for name in ("add", "sub", "mul", "div")},
    "aten.where.self": "aten.where.self_out",
    "aten.cudnn_convolution.default": "aten.cudnn_convolution.out",
    "aten.sum.dim_IntList": "aten.sum.IntList_out",
    "aten.amax.default": "aten.amax.out",
    "aten.amin.default": "aten.amin.out",
}
"""Operators that write a result of the right shape in place, with the strides of their operands."""
ROW_MAJOR_OUT_VARIANTS: Mapping[str, str] = {
    **{f"aten.{name}.default": f"aten.{name}.out" for name in _DENSE.split()},
    "aten.avg_pool2d.default": "aten.avg_pool2d.out",
    "aten._addmm_activation.default": "aten._addmm_activation.out",
    "aten._softmax.default": "aten._softmax.out",
    "aten._log_softmax.default": "aten._log_softmax.out",
    "aten.gather.default": "aten.gather.out",
    "aten.reflection_pad2d.default": "aten.reflection_pad2d.out",
}
"""Operators that keep the strides of their output only where everything is row-major."""
_LIKE_OPERAND = frozenset(
    f"aten.{name}.default" for name in ("avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d", "reflection_pad2d")
)
"""Of these, the ones that make an image in the memory format of their operand, which a view gives them: on a GPU the
average pool writes so into a row-major `out`, too."""
