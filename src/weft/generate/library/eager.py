"""A model as its framework would run it: each source operator as one ATen call, in a module of torch.

This is the baseline for a model that came without one (an ONNX file). It is built from the origins of the imported
graph, before any clean-up, so nothing of it is fused, folded or rewritten. It never becomes part of a plan.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from weft.errors import UnsupportedError
from weft.generate.library.execute import TORCH_DTYPE, resolve
from weft.generate.library.operators import OPERATORS, Operator, Row, resize_linear
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId, Origin
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.source import CallValue, LibraryCall, Ref, Schedule

_VIEWS = frozenset(
    f"aten.{name}" for name in ("reshape.default", "expand.default", "permute.default", "slice.Tensor", "t.default")
)


@dataclass(frozen=True)
class EagerModel:
    """The module, and how close it is to one call per operator."""

    module: fx.GraphModule
    """Called with the graph's inputs; gives a tuple. Weights are buffers; `torch.compile` takes it."""
    operators: int
    parts: Mapping[str, int]
    """Operators of the model that take several ATen calls, by type."""


def eager_model(graph: Graph) -> EagerModel:
    """The graph's source operators through ATen.

    Raises:
        UnsupportedError: an operator that only ONNX Runtime runs here, or one that this torch lacks [W201].
    """
    for n in graph.nodes:
        if isinstance(n.attrs, a.OpaqueAttrs) and n.attrs.framework != "aten":
            raise UnsupportedError(op=n.attrs.op, reason="ATen has no form of it here: another runtime executes it")
    program = Program(graph)
    weights: dict[int, torch.Tensor] = {}
    for node, n in enumerate(graph.nodes):
        if n.prim is Prim.CONSTANT:
            position = len(graph.inputs) + len(weights)
            program.bind_weight(node, position)
            weights[position] = _weight(graph, node)
    parts: Counter[str] = Counter()
    origins = [o for o in graph.origins if o.rule and any(r >= 0 for r in o.results)]
    for origin in sorted(origins, key=lambda o: max(o.results)):
        for operand in origin.operands:
            if operand >= 0:
                program.value(operand)
        before = len(program.run)
        _bind(program, origin)
        for result in origin.results:
            if result >= 0:
                program.value(result)
        calls = [s for s in program.run[before:] if s.target not in _VIEWS]
        parts[_type_of(origin)] += len(calls) > 1
    call = program.finish(Schedule("library", (("form", "eager"),)))
    return EagerModel(
        _module(graph, call, weights), len(origins), MappingProxyType({k: n for k, n in parts.items() if n})
    )


def _weight(graph: Graph, node: NodeId) -> torch.Tensor:
    data, dtype = graph.constant(node), graph.type_of(node).dtype
    tensor = torch.from_numpy(np.array(data, copy=True).reshape(data.shape))
    return tensor.to(TORCH_DTYPE[dtype]) if dtype.is_emulated else tensor


def _bind(program: Program, origin: Origin) -> None:
    """Bind the operator's result to its one call, where there is a row that means exactly this operator.

    Its operands have values already, so that a row which gives up leaves nothing but its own steps behind.
    """
    row = ROWS.get(origin.rule)
    if row is None or len(origin.results) != 1 or -1 in origin.operands[:1]:
        return
    (result,) = origin.results
    if result in origin.operands or program.is_bound(result):
        return
    source = Operator(program, origin.operands, origin.params)
    steps = len(program.run), len(program.prepare)
    ref = row(source, result)
    if ref is not None and not source.unread():
        program.bind(result, ref)
    else:
        del program.run[steps[0] :], program.prepare[steps[1] :]


def _type_of(origin: Origin) -> str:
    """`Conv` of the source text `node 'conv_3' (Conv)`; the rule's name where there is none."""
    return origin.source.rpartition("(")[2].rstrip(")") or origin.rule


# -- rows that no candidate of the generator needs: their operators have forms of their own there


def _of(row: Row) -> Any:
    return lambda o, _: row(o)


def _same(target: str) -> Any:
    """A call of all operands, which broadcast as the operator's do."""

    def row(o: Operator, _: NodeId) -> Ref | None:
        return o.call(target, *(o.ref(k) for k in range(len(o.operands)))) if -1 not in o.operands else None

    return row


_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "mod": "remainder", "fmod": "fmod", "pow": "pow", "eq": "eq", "ne": "ne",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "max": "maximum", "min": "minimum", "atan2": "atan2",
}  # fmt: skip


def _binary(o: Operator, result: NodeId) -> Ref | None:
    op = str(o.param("op", ""))
    if op == "div" and o.graph.type_of(result).dtype.is_float:
        return o.call("aten.div.Tensor", o.ref(0), o.ref(1))
    name = _BINARY.get(op)
    if name is None or (op in ("max", "min") and o.graph.type_of(result).dtype is DType.BOOL):
        return None
    overload = {"maximum": "default", "minimum": "default", "atan2": "default", "pow": "Tensor_Tensor"}.get(
        name, "Tensor"
    )
    return o.call(f"aten.{name}.{overload}", o.ref(0), o.ref(1))


def _unary(o: Operator, _: NodeId) -> Ref | None:
    return o.call("aten.sign.default", o.ref(0)) if o.param("op", "") == "sign" else None


def _clip(o: Operator, _: NodeId) -> Ref | None:
    if o.has(1) or o.has(2):
        o.implied("lo", "hi")
        return o.call("aten.clamp.Tensor", o.ref(0), o.ref(1), o.ref(2))
    low, high = o.number("lo", -np.inf), o.number("hi", np.inf)
    if not o.graph.type_of(o.node(0)).dtype.is_float or (np.isinf(low) and np.isinf(high)):
        return None
    return o.call("aten.clamp.default", o.ref(0), None if np.isinf(low) else low, None if np.isinf(high) else high)


def _batch_norm(o: Operator, _: NodeId) -> Ref | None:
    values = [o.ref(k) for k in range(5)]
    return o.call("aten.batch_norm.default", *values, False, 0.0, o.number("eps", 1e-5), False)


def _gemm(o: Operator, _: NodeId) -> Ref | None:
    alpha, beta = o.number("alpha", 1), o.number("beta", 1)
    transposed = bool(o.param("trans_a", False)), bool(o.param("trans_b", False))
    x, y, c = o.ref(0), o.ref(1), o.ref(2)
    if not o.graph.type_of(o.node(0)).dtype.is_float:
        return None
    if transposed == (False, True) and alpha == 1 and (c is None or (beta == 1 and len(o.shape(2)) == 1)):
        return o.call("aten.linear.default", x, y, c)
    left, right = (o.call("aten.t.default", v) if t else v for v, t in zip((x, y), transposed, strict=True))
    if c is None:
        return o.call("aten.mm.default", left, right) if alpha == 1 else None
    return o.program.call("aten.addmm.default", c, left, right, alpha=alpha, beta=beta)


def _conv(o: Operator, _: NodeId) -> Ref | None:
    low, high = o.ints("pads_lo"), o.ints("pads_hi")
    x, spatial = o.ref(0), len(low)
    if len(o.shape(0)) != spatial + 2:
        return None
    pads: CallValue = low
    if low != high:
        flat = tuple(v for pair in zip(reversed(low), reversed(high), strict=True) for v in pair)
        x, pads = o.call("aten.constant_pad_nd.default", x, flat, 0), (0,) * spatial
    return o.call(
        "aten.convolution.default", x, o.ref(1), o.ref(2), o.ints("strides"), pads, o.ints("dilations"),
        False, (0,) * spatial, int(o.number("groups", 1)),
    )  # fmt: skip


def _gather(o: Operator, _: NodeId) -> Ref | None:
    axis = int(o.number("axis", 0)) % len(o.shape(0))
    wide = o.ref(1)
    if o.graph.type_of(o.node(1)).dtype not in (DType.I64, DType.I32):
        return None
    return o.call("aten.index.Tensor", o.ref(0), (*(None,) * axis, wide))


def _global_pool(o: Operator, _: NodeId) -> Ref | None:
    return o.call("aten.mean.dim", o.ref(0), tuple(range(2, len(o.shape(0)))), True)


def _hard_sigmoid(o: Operator, _: NodeId) -> Ref | None:
    alpha, beta = o.number("alpha", 1 / 6), o.number("beta", 0.5)
    return o.call("aten.hardsigmoid.default", o.ref(0)) if abs(alpha - 1 / 6) < 1e-7 and beta == 0.5 else None


def _prelu(o: Operator, _: NodeId) -> Ref | None:
    o.implied("axis")
    shape, slope = o.shape(0), o.shape(1)
    size = math.prod(slope)
    along = len(shape) < 2 or len(slope) < 2 or slope[-len(shape) + 1 :][:1] == (size,)
    if size not in (1, shape[1] if len(shape) > 1 else 1) or not along or (len(slope) == 1 and size > 1):
        return None
    return o.call("aten.prelu.default", o.ref(0), o.call("aten.reshape.default", o.ref(1), (size,)))


def _resize_nearest(o: Operator, result: NodeId) -> Ref | None:
    """Where the tables of the gathers are those of `upsample_nearest2d`: floor(i·n/m)."""
    node, sizes = result, o.ints("sizes")
    for name in ("scales_text", "coordinate_mode", "nearest_mode", "roi_text", "extrapolation"):
        o.implied(name)
    while node != o.node(0):
        n = o.graph.nodes[node]
        if n.prim is not Prim.GATHER or o.graph.nodes[n.inputs[1]].prim is not Prim.CONSTANT:
            return None
        axis, size = cast("a.GatherAttrs", n.attrs).axis, o.shape(0)[cast("a.GatherAttrs", n.attrs).axis]
        table = np.arange(sizes[axis]) * size // sizes[axis]
        if axis < 2 or not np.array_equal(o.graph.constant(n.inputs[1]), table):
            return None
        node = n.inputs[0]
    return o.call("aten.upsample_nearest2d.default", o.ref(0), sizes[2:]) if len(sizes) == 4 else None


ROWS: Mapping[str, Any] = {
    **{rule: _of(row) for rule, row in OPERATORS.items()},
    "matmul": _same("aten.matmul.default"),
    "where": _same("aten.where.self"),
    "binary": _binary,
    "pow": _same("aten.pow.Tensor_Tensor"),
    "unary": _unary,
    "clip": _clip,
    "batch_norm": _batch_norm,
    "gemm": _gemm,
    "conv": _conv,
    "gather": _gather,
    "prelu": _prelu,
    "global_avg_pool": _global_pool,
    "hard_sigmoid": _hard_sigmoid,
    "resize_nearest": _resize_nearest,
    "resize_linear": _of(resize_linear),
}
"""Rule → the one call of its operator, given the node of its result; None where ATen's operator means another."""


# -- the module


def _module(graph: Graph, call: LibraryCall, weights: Mapping[int, torch.Tensor]) -> fx.GraphModule:
    """The call as a graph of torch: names are synthetic, nothing of the model reaches the text that fx makes."""
    root = torch.nn.Module()
    made = fx.Graph()
    inputs = [made.placeholder(f"x{k}") for k in range(len(graph.inputs))]
    held: dict[Ref, fx.Node] = {}
    values: list[fx.Node] = []
    prepared = _prepared(call, weights)

    def look(v: Ref) -> Any:
        if v.kind == "tmp":
            return values[v.index]
        if v.kind == "in" and v.index not in weights:
            return inputs[v.index]
        if v not in held:
            tensor = prepared[v.index] if v.kind == "prep" else weights[v.index]
            name = f"w{len(held)}"
            root.register_buffer(name, tensor)
            held[v] = made.get_attr(name)
        return held[v]

    for step in call.run:
        function = resolve(step.target)
        keywords = {k: _value(v, look) for k, v in step.kwargs}
        node = made.call_function(function, tuple(_value(v, look) for v in step.args), keywords)
        values.append(made.call_function(operator.getitem, (node, step.result)) if _gives_several(function) else node)
    made.output(tuple(map(look, call.outputs)))
    return fx.GraphModule(root, made)


def _prepared(call: LibraryCall, weights: Mapping[int, torch.Tensor]) -> list[Any]:
    """What depends on weights only."""
    found: list[Any] = []

    def look(v: Ref) -> Any:
        return found[v.index] if v.kind == "prep" else weights[v.index]

    for step in call.prepare:
        function = resolve(step.target)
        keywords = {k: _value(v, look) for k, v in step.kwargs}
        made = function(*(_value(v, look) for v in step.args), **keywords)
        found.append(made[step.result] if isinstance(made, tuple | list) else made)
    return found


def _value(v: CallValue, look: Callable[[Ref], Any]) -> Any:
    """What stands for an argument, given what stands for references."""
    if isinstance(v, tuple):
        return [_value(x, look) for x in v]
    return look(v) if isinstance(v, Ref) else _plain(v)


def _plain(v: object) -> object:
    return TORCH_DTYPE[DType(v[6:])] if isinstance(v, str) and v.startswith("dtype:") else v


def _gives_several(function: Any) -> bool:
    returns = function._schema.returns
    return len(returns) > 1 or not isinstance(returns[0].type, torch.TensorType)
