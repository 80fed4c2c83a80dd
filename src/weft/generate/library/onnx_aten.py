"""ONNX operators without a rule as calls of ATen, which a GPU runs and records: ONNX Runtime would take the host.

    TopK              a stable sort and a slice: equal elements in the order of their indices, as ONNX has it
    LSTM, GRU, RNN    the framework's recurrent layers, with gates in their order; weights are turned when a plan is
                      linked, and lie as cuDNN reads them
    ScatterElements,  which update an element is left with is found first, as the largest number among those written
    ScatterND         there: the same in every run. Only those for which the rules would compare too much come here

What the framework computes otherwise is declined with a reason and stays with ONNX Runtime. Of the operator's model
only numbers are taken over, and texts that are compared with those known here.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import cast

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from weft.generate.library.onnx_wire import carries_its_data
from weft.generate.library.recurrent_call import WEIGHTS
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import LibraryCall, Ref, Schedule

_DTYPES = MappingProxyType(
    {
        onnx.TensorProto.DOUBLE: DType.F64, onnx.TensorProto.FLOAT: DType.F32, onnx.TensorProto.FLOAT16: DType.F16,
        onnx.TensorProto.INT64: DType.I64, onnx.TensorProto.INT32: DType.I32, onnx.TensorProto.INT16: DType.I16,
        onnx.TensorProto.INT8: DType.I8, onnx.TensorProto.UINT8: DType.U8,
    }
)  # fmt: skip
Attribute = int | float | str | bytes | Sequence[int] | Sequence[float] | Sequence[bytes]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The one operator of a payload."""

    op: str
    attributes: Mapping[str, Attribute]
    operands: tuple[int | Array | None, ...]
    """Position among the primitive's operands, or the value inside of the payload; None: absent."""
    outputs: tuple[int, ...]
    """Per result of the primitive: which of the operator's it is."""


@lru_cache(maxsize=256)
def _read(payload: str) -> _Piece | Declined:
    try:
        data = base64.b64decode(json.loads(payload)["model"], validate=True)
        if not carries_its_data(data):
            return Declined("a payload that names a file")
        graph = onnx.load_model_from_string(data).graph
        if len(graph.node) != 1 or graph.node[0].domain not in ("", "ai.onnx"):
            return Declined("several operators, or one of another domain, in one payload")
        (node,) = graph.node
        inputs = {v.name: k for k, v in enumerate(graph.input)}
        values = {t.name: numpy_helper.to_array(t) for t in graph.initializer if t.data_type in _DTYPES}
        known: Mapping[str, int | Array] = {**values, **inputs}
        return _Piece(
            node.op_type,
            {x.name: helper.get_attribute_value(x) for x in node.attribute},
            tuple(known[name] if name else None for name in node.input),
            tuple([*node.output].index(o.name) for o in graph.output),
        )
    except (binascii.Error, DecodeError, KeyError, TypeError, ValueError):
        return Declined("a payload that is no model of one operator")


class _Operator:
    """The operator where it stands: its operands as values of a program."""

    def __init__(self, program: Program, node: NodeId, piece: _Piece) -> None:
        self.program = program
        self._inputs = program.graph.nodes[node].inputs
        self._piece = piece
        self._made: dict[int, Ref] = {}

    def has(self, position: int) -> bool:
        """True when an optional operand is present."""
        return position < len(self._piece.operands) and self._piece.operands[position] is not None

    def constant(self, position: int) -> Array | None:
        """The operand's value, where the payload has it."""
        value = self._piece.operands[position] if self.has(position) else None
        return None if value is None or isinstance(value, int) else value

    def type(self, position: int) -> TensorType:
        """Of an operand that is present."""
        value = self._piece.operands[position]
        if isinstance(value, int):
            return self.program.graph.type_of(self._inputs[value])
        assert value is not None
        return TensorType(_DTYPES[helper.np_dtype_to_tensor_dtype(value.dtype)], value.shape)

    def ref(self, position: int) -> Ref:
        """The value of an operand that is present."""
        value = self._piece.operands[position]
        if isinstance(value, int):
            return self.program.value(self._inputs[value])
        assert value is not None
        if position not in self._made:
            t = self.type(position)
            self._made[position] = self.program.tensor(tuple(value.reshape(-1).tolist()), t.dtype, t.shape)
        return self._made[position]

    def is_static(self, position: int) -> bool:
        """Whether the value is known when a plan is linked."""
        return self.program.is_static(self.ref(position))

    def number(self, name: str, default: int) -> int:
        """An attribute that is an integer."""
        value = self._piece.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def text(self, name: str, default: str) -> str:
        """An attribute that is a text."""
        value = self._piece.attributes.get(name, default)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def texts(self, name: str) -> list[str]:
        """An attribute that is a list of texts; empty where it is absent."""
        value = self._piece.attributes.get(name, ())
        texts = () if isinstance(value, int | float | str | bytes) else value
        return [x.decode(errors="replace") if isinstance(x, bytes) else str(x) for x in texts]

    def given(self, *names: str) -> list[str]:
        """Which of these attributes the operator has."""
        return [name for name in names if name in self._piece.attributes]


Form = Callable[[_Operator], Sequence[Ref] | Declined]
"""The operator's results; as many of the first as it may have."""


def _top_k(o: _Operator) -> Sequence[Ref] | Declined:
    """TopK(x, k) → slice(sort(x)).

    NaN, of which ONNX says nothing, is larger than any number.
    """
    if not o.has(0):
        return Declined("TopK of nothing")
    x, p = o.type(0), o.program
    if not x.dtype.is_float and not x.dtype.is_integer:
        return Declined(f"TopK of {x.dtype}")
    if o.has(1):
        given = o.constant(1)
        if given is None or given.size != 1:
            return Declined("TopK of as many elements as a value says")
        k = int(given.reshape(()))
    else:
        k = o.number("k", -1)
    axis = o.number("axis", -1) % max(x.rank, 1)
    if not x.rank or 0 in x.shape or not 0 < k <= x.shape[axis]:
        return Declined("TopK of nothing, or of more elements than there are")
    if not o.number("sorted", 1) and k > 1:
        return Declined("TopK in an order that nothing defines")
    every = p.call(
        "aten.sort.stable", o.ref(0), stable=True, dim=axis, descending=bool(o.number("largest", 1)), result=-1
    )
    both = [p.call("weft.result", every, which) for which in (0, 1)]
    return both if k == x.shape[axis] else [p.call("aten.slice.Tensor", y, axis, 0, k) for y in both]


def _scatter_elements(o: _Operator) -> Sequence[Ref] | Declined:
    """data with updates (of the shape of indices) written where indices say along an axis; at their own place else."""
    if problem := _not_written(o):
        return problem
    p, shape, inner = o.program, o.type(0).shape, o.type(1).shape
    axis = o.number("axis", 0) % len(shape) if shape else 0
    if not shape or len(inner) != len(shape) or o.type(2).shape != inner:
        return Declined("a scatter of operands of other shapes")
    where, inside = _place(o, o.ref(1), shape[axis])
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    where = p.call("aten.mul.Scalar", where, strides[axis])
    for k, stride in enumerate(strides):
        if k != axis:
            line = p.call("aten.arange.default", inner[k], dtype="dtype:i64")
            steps = p.call("aten.mul.Scalar", line, stride)
            column = tuple(inner[k] if d == k else 1 for d in range(len(shape)))
            where = p.call("aten.add.Tensor", where, p.call("aten.reshape.default", steps, column))
    return [_written(o, where, inside, math.prod(shape), math.prod(inner), 1)]


def _scatter_nd(o: _Operator) -> Sequence[Ref] | Declined:
    """data with rows of updates written where the last dimension of indices says."""
    if problem := _not_written(o):
        return problem
    p, shape, inner = o.program, o.type(0).shape, o.type(1).shape
    deep = inner[-1] if inner else 0
    if not 0 < deep <= len(shape) or o.type(2).shape != (*inner[:-1], *shape[deep:]):
        return Declined("a scatter of operands of other shapes")
    rows = math.prod(inner[:-1])
    every = p.call("aten.reshape.default", o.ref(1), (rows, deep))
    places = []
    for k, size in enumerate(shape[:deep]):
        column = p.call("aten.reshape.default", p.call("aten.slice.Tensor", every, 1, k, k + 1), (rows,))
        one, valid = _place(o, column, size)
        places.append((p.call("aten.mul.Scalar", one, math.prod(shape[k + 1 : deep])), valid))
    where, inside = places[0]
    for one, valid in places[1:]:
        where = p.call("aten.add.Tensor", where, one)
        inside = p.call("aten.bitwise_and.Tensor", inside, valid)
    return [_written(o, where, inside, math.prod(shape[:deep]), rows, math.prod(shape[deep:]))]


def _not_written(o: _Operator) -> Declined | None:
    if o.text("reduction", "none") != "none":
        return Declined("a scatter that combines values: their order decides")
    if not all(o.has(k) for k in range(3)) or not o.type(1).dtype.is_integer or o.type(0).dtype is not o.type(2).dtype:
        return Declined("a scatter of operands of other types")
    if 0 in (o.type(0).size, o.type(1).size):
        return Declined("a scatter of nothing")
    return None


def _place(o: _Operator, index: Ref, size: int) -> tuple[Ref, Ref]:
    """An index that counted from the end, and whether it is one of a dimension of that size."""
    p = o.program
    index = p.call("aten._to_copy.default", index, dtype="dtype:i64")
    found = p.call("aten.where.self", p.call("aten.lt.Scalar", index, 0), p.call("aten.add.Scalar", index, size), index)
    low, high = p.call("aten.ge.Scalar", found, 0), p.call("aten.lt.Scalar", found, size)
    return found, p.call("aten.bitwise_and.Tensor", low, high)


def _written(o: _Operator, where: Ref, inside: Ref, places: int, count: int, width: int) -> Ref:
    """data (places, width) with the last of the rows of updates (count, width) that is written to each place.

    What lies outside is written behind the last place, which is then cut off.
    """
    p = o.program
    where = p.call("aten.reshape.default", p.call("aten.where.ScalarOther", inside, where, places), (count,))
    none = p.call("aten.full.default", (places + 1,), -1, dtype="dtype:i64")
    order = p.call("aten.arange.default", count, dtype="dtype:i64")
    last = p.call("aten.scatter_reduce.two", none, 0, where, order, "amax")
    last = p.call("aten.slice.Tensor", last, 0, 0, places)
    updates = p.call("aten.reshape.default", o.ref(2), (count, width))
    picked = p.call("aten.index_select.default", updates, 0, p.call("aten.clamp.default", last, 0))
    hit = p.call("aten.reshape.default", p.call("aten.ge.Scalar", last, 0), (places, 1))
    data = p.call("aten.reshape.default", o.ref(0), (places, width))
    return p.call("aten.reshape.default", p.call("aten.where.self", hit, picked, data), o.type(0).shape)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A recurrent layer of the framework."""

    gates: tuple[int, ...]
    """Per gate as the framework orders them: which of ONNX's it is."""
    activations: Mapping[tuple[str, ...], tuple[str, int]]
    """Names of ONNX's activations of one direction -> the framework's operator, and cuDNN's number for it."""

    def of(self, names: Sequence[str], directions: int) -> tuple[str, int] | None:
        """The operator for activations as ONNX lists them, one direction behind the other; none: the first."""
        if not names:
            return next(iter(self.activations.values()))
        each = len(next(iter(self.activations)))
        given = tuple(x.lower() for x in names)
        return self.activations.get(given[:each]) if given == given[:each] * directions else None


_LAYERS: Mapping[str, _Layer] = {
    "LSTM": _Layer((0, 2, 3, 1), {("sigmoid", "tanh", "tanh"): ("aten.lstm.input", 2)}),
    "GRU": _Layer((1, 0, 2), {("sigmoid", "tanh"): ("aten.gru.input", 3)}),
    "RNN": _Layer((0,), {("tanh",): ("aten.rnn_tanh.input", 1), ("relu",): ("aten.rnn_relu.input", 0)}),
}
_X, _W, _R, _B, _LENGTHS, _H, _C, _PEEPHOLES = range(8)


def _recurrent(op: str) -> Form:
    layer = _LAYERS[op]

    def form(o: _Operator) -> Sequence[Ref] | Declined:
        return _odd(op, o) or _layer(op, layer, o)

    return form


def _odd(op: str, o: _Operator) -> Declined | None:
    """What the framework's layers do not have."""
    if odd := o.given("clip", "activation_alpha", "activation_beta"):
        return Declined(f"{op} with {odd[0]}")
    if o.number("layout", 0) or o.number("input_forget", 0) or o.has(_PEEPHOLES):
        return Declined(f"{op} with peepholes, coupled gates, or the batch in front")
    if op == "GRU" and not o.number("linear_before_reset", 0):
        return Declined("GRU that resets its state before the product")
    if any(o.type(k).dtype is not DType.F32 for k in (_X, _W, _R, _B, _H, _C) if o.has(k)):
        return Declined(f"{op} of another type than f32")
    if not all(o.is_static(k) for k in (_W, _R, _B) if o.has(k)):
        return Declined(f"{op} whose weights are computed")
    return None


def _layer(op: str, layer: _Layer, o: _Operator) -> Sequence[Ref] | Declined:
    """LSTM(x, W, R, B, h, c) → lstm(x, (h, c), weights), turned.

    Shapes: x (t, b, i), W (d, g·h, i), R (d, g·h, h), B (d, 2·g·h), h and c (d, b, h); gives (t, d, b, h), h and c.
    """
    p = o.program
    if not all(o.has(k) and o.type(k).rank == 3 for k in (_X, _W, _R)):
        return Declined(f"{op} without operands of three dimensions")
    (t, batch, width), hidden = o.type(_X).shape, o.type(_R).shape[-1]
    direction = o.text("direction", "forward")
    directions = {"forward": 1, "reverse": 1, "bidirectional": 2}.get(direction, 0)
    found = layer.of(o.texts("activations"), directions)
    if not directions or found is None:
        return Declined(f"{op} with activations that the framework's has not")
    rows = len(layer.gates) * hidden
    state = directions, batch, hidden
    shapes = {
        _W: (directions, rows, width),
        _R: (directions, rows, hidden),
        _B: (directions, 2 * rows),
        _H: state,
        _C: state,
    }
    if any(o.has(k) and o.type(k).shape != shape for k, shape in shapes.items()):
        return Declined(f"{op} with operands of other shapes")
    if 0 in (t, batch, width, hidden):
        return Declined(f"{op} of nothing")
    if o.has(_LENGTHS):
        lengths = o.constant(_LENGTHS)
        if lengths is None or not np.all(lengths == t):
            return Declined(f"{op} of sequences that may differ in length")
    target, mode = found
    weights = p.call(WEIGHTS, mode, width, hidden, directions, *_weights(o, layer, directions, hidden), result=-1)
    states = [_state(o, k, state) for k in ((_H, _C) if op == "LSTM" else (_H,))]
    x = o.ref(_X) if direction != "reverse" else p.call("aten.flip.default", o.ref(_X), (0,))
    every = p.call(
        target, x, tuple(states) if op == "LSTM" else states[0], weights,
        o.has(_B), 1, 0.0, False, directions == 2, False, result=-1, live=True,
    )  # fmt: skip
    y, *last = (p.call("weft.result", every, k, live=True) for k in range(1 + len(states)))
    y = p.call("aten.reshape.default", y, (t, batch, directions, hidden))
    y = p.call("aten.permute.default", y, (0, 2, 1, 3))
    return [y if direction != "reverse" else p.call("aten.flip.default", y, (0,)), *last]


def _weights(o: _Operator, layer: _Layer, directions: int, hidden: int) -> list[Ref]:
    """Per direction: of the input, of the state, and the biases of both, with gates in the framework's order."""
    p, gates = o.program, len(layer.gates)
    order = p.tensor(layer.gates, DType.I64, (gates,))

    def part(position: int, d: int, start: int = 0) -> Ref:
        one = p.call("aten.slice.Tensor", o.ref(position), 0, d, d + 1)
        wide = position != _B
        if not wide:
            one = p.call("aten.slice.Tensor", one, 1, start, start + gates * hidden)
        shape = (hidden, o.type(position).shape[-1]) if wide else (hidden,)
        split = p.call("aten.reshape.default", one, (gates, *shape))
        turned = p.call("aten.index_select.default", split, 0, order)
        return p.call("aten.reshape.default", turned, (gates * hidden, *shape[1:]))

    found: list[Ref] = []
    for d in range(directions):
        found += [part(_W, d), part(_R, d)]
        found += [part(_B, d), part(_B, d, gates * hidden)] if o.has(_B) else []
    return found


def _state(o: _Operator, position: int, shape: tuple[int, ...]) -> Ref:
    """What a recurrence begins with. cuDNN takes dense states alone."""
    if o.has(position):
        return o.program.call("aten.contiguous.default", o.ref(position))
    return o.program.call("aten.full.default", shape, 0.0, dtype=f"dtype:{DType.F32.value}")


FORMS: Mapping[str, Form] = {
    "TopK": _top_k,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    **{op: _recurrent(op) for op in _LAYERS},
}
EXACT = frozenset(FORMS) - set(_LAYERS)
"""Operators whose results are operands moved, and their positions."""


def operator_of(graph: Graph) -> str:
    """The operator of this table that a graph's one opaque call is; empty: it is none."""
    every = {n.attrs.op for n in graph.nodes if isinstance(n.attrs, a.OpaqueAttrs)}
    if len(every) != 1 or any(isinstance(n.attrs, a.OpaqueAttrs) and n.attrs.framework != "onnx" for n in graph.nodes):
        return ""
    namespace, _, name = every.pop().partition("::")
    return name if namespace == "onnx" and name in FORMS else ""


def on_device(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """The call that stands for ONNX Runtime's; the problem's graph has one opaque call, and views of its operands."""
    program = Program(problem.graph)
    made: dict[tuple[str, tuple[NodeId, ...]], Sequence[Ref]] = {}
    for node, n in enumerate(problem.graph.nodes):
        if n.prim is not Prim.OPAQUE:
            continue
        at = cast("a.OpaqueAttrs", n.attrs)
        piece = _read(at.payload)
        if isinstance(piece, Declined):
            return piece
        form = FORMS.get(piece.op)
        if at.framework != "onnx" or form is None:
            return Declined(f"no form of {at.op} by ATen")
        call = at.payload, n.inputs
        if call not in made:
            found = form(_Operator(program, node, piece))
            if isinstance(found, Declined):
                return found
            made[call] = found
        if not 0 <= at.result < len(piece.outputs) or piece.outputs[at.result] >= len(made[call]):
            return Declined(f"a result that {piece.op} has not")
        program.bind(node, made[call][piece.outputs[at.result]])
    return program.finish(schedule, problem) if program.run else Declined("nothing left to run")
