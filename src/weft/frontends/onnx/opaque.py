"""Operators without a rule: ONNX's own body for them, or one OPAQUE primitive that ONNX Runtime executes.

The payload of an OPAQUE primitive is JSON with a one-node model of static types; no name of the user's model is an
input or output name there. Result types come from ONNX's shape inference, run in the parsing process.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper, shape_inference

from weft.errors import LimitError
from weft.frontends.onnx.check import domain_of, subgraphs, walk_nodes
from weft.frontends.onnx.errors import MismatchError, NeedsValueError, NoRuleError
from weft.frontends.onnx.limits import raised_by
from weft.frontends.onnx.names import shown
from weft.frontends.onnx.tensors import (
    DTYPES,
    ONNX_TYPES,
    tensors_of_attributes,
    tensors_of_nodes,
    to_proto,
    type_name,
    type_proto,
)
from weft.ir.attrs import OpaqueAttrs
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType

if TYPE_CHECKING:
    from weft.frontends.onnx.importer import Call, Value

_IN, _OUT = "weft.in.", "weft.out."
_INITIALISER_ELEMENTS = 1024
_CARRIED_BYTES = 128 << 20
"""Weights inside of the bodies of one operator; it is sent, stored and opened as one message."""
_IR_VERSION = 10
_CAST_OPSET = 13
_STAGES = re.compile(r"^(\[\w+\] )?(Inference error\(s\): )?(\(op_type:[^()]*\): )?(\[\w+\] )?")
SAME_AS: Mapping[tuple[str, int], int] = MappingProxyType(
    {
        ("RoiAlign", 22): 16, ("DeformConv", 22): 19, ("TopK", 24): 11, ("GRU", 22): 14, ("LSTM", 22): 14,
        ("RNN", 22): 14, ("MaxUnpool", 22): 11, ("GridSample", 22): 20, ("Pad", 24): 19, ("Pad", 23): 19,
        ("Pad", 21): 19, ("Scan", 24): 19, ("Det", 22): 11,
    }
)  # fmt: skip
"""Versions that only admit more element types than the older one: a runtime knows the older one more often."""
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Dropout"}
)
"""A value of the graph is a pure function of its inputs; a draw is not."""


def function_body(call: Call, domain: str) -> onnx.FunctionProto | None:
    """The body that ONNX defines for this call's operator, attribute defaults included; None if there is none."""
    if call.op in RANDOM:
        return None
    schema: Any = onnx.defs.get_schema(call.op, call.opset, domain)  # the stubs lack its functions
    body = onnx.FunctionProto()
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= call.opset] or [schema.since_version]
        raw = schema.get_function_with_opset_version(versions[-1])
    elif schema.has_context_dependent_function:
        types = [_value_type(call, v).SerializeToString() for v in call.operands]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= call.opset]
        node = _resolved(call, {})
        try:
            raw = schema.get_context_dependent_function_with_opset_version(
                versions[-1] if versions else schema.since_version, node.SerializeToString(), types
            )
        except (RuntimeError, ValueError, IndexError, shape_inference.InferenceError):
            return None
    else:
        return None
    if not raw:
        return None
    body.ParseFromString(raw)
    given = {a.name for a in body.attribute_proto}
    for name, spec in schema.attributes.items():
        if spec.default_value.name and name not in given:
            body.attribute_proto.append(spec.default_value)
    if not any(domain_of(o.domain) == "" for o in body.opset_import):
        body.opset_import.append(helper.make_opsetid("", call.im.checked.opsets.get("", call.opset)))
    return body


def _value_type(call: Call, value: Value) -> onnx.TypeProto:
    if isinstance(value, tuple):
        element = type_proto(call.b.type_of(value[0])) if value else onnx.TypeProto()
        return helper.make_sequence_type_proto(element)
    return onnx.TypeProto() if value < 0 else type_proto(call.b.type_of(value))


def _resolved(call: Call, rename: Mapping[int, str]) -> onnx.NodeProto:
    """The node with synthetic names and the attributes of this call."""
    node = onnx.NodeProto(op_type=call.op, domain=domain_of(call.node.domain), overload=call.node.overload)
    for k, v in enumerate(call.operands):
        node.input.append("" if isinstance(v, int) and v < 0 else rename.get(k, f"{_IN}{k}"))
    node.output.extend(f"{_OUT}{k}" if name else "" for k, name in enumerate(call.node.output))
    node.attribute.extend(call.im._attributes(call.node, call.scope, call.where))
    return node


def captured(node: onnx.NodeProto) -> list[str]:
    """Names that the node's subgraphs read from outside, in order of first use."""
    found: dict[str, None] = {}
    for a in node.attribute:
        for graph in subgraphs(a):
            _captured(graph, frozenset(), found)
    return list(found)


def _captured(graph: onnx.GraphProto, outer: frozenset[str], found: dict[str, None]) -> None:
    known = set(outer) | {i.name for i in graph.input} | {t.name for t in graph.initializer}
    known |= {s.values.name for s in graph.sparse_initializer}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                found.setdefault(name)
        for a in node.attribute:
            for sub in subgraphs(a):
                _captured(sub, frozenset(known), found)
        known |= set(node.output)
    for o in graph.output:
        if o.name not in known:
            found.setdefault(o.name)


class _OneNode:
    """A model of one operator; operands are inputs, or initialisers where their value is given."""

    def __init__(self, call: Call, *, guard: bool) -> None:
        self.operands: list[int] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initialisers: list[onnx.TensorProto] = []
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []
        self.call = call
        node = _resolved(call, {})
        self._carried = 0
        self._inline(tensors_of_attributes(node.attribute, call.where))
        seen: set[str] = set()
        for k, v in enumerate(call.operands):
            if isinstance(v, tuple):
                raise NoRuleError(where=call.where, op=call.op, reason="it takes a sequence")
            if v >= 0:
                self._operand(v, f"{_IN}{k}", guard)
        for name in captured(node):
            v = call.scope.get(name)
            if isinstance(v, tuple):
                raise NoRuleError(where=call.where, op=call.op, reason="its body reads a sequence")
            if name not in seen and v >= 0:
                seen.add(name)
                self._operand(v, name, False)
        self.node = node
        self.bf16_inputs: set[str] = set()

    def _operand(self, v: int, name: str, guard: bool) -> None:
        im, t = self.call.im, self.call.b.type_of(v)
        small = t.size <= _INITIALISER_ELEMENTS
        if small and (not im.depends(v) or (guard and t.dtype.is_integer and t.rank <= 1)):
            value = im.need(v, self.call)
            self.initialisers.append(to_proto(value, t.dtype, name))
            return
        self.operands.append(v)
        # The runtime is fed NumPy arrays, and NumPy has no such type: the value crosses as exact float32.
        if t.dtype.is_held:
            outside = f"{name}.f32"
            self.before.append(helper.make_node("Cast", [outside], [name], to=ONNX_TYPES[t.dtype]))
            self.inputs.append(helper.make_value_info(outside, type_proto(TensorType(DType.F32, t.shape))))
        else:
            self.inputs.append(helper.make_value_info(name, type_proto(t)))

    def _inline(self, tensors: Iterable[tuple[str, onnx.TensorProto]]) -> None:
        """Bring external data in: the runtime is given bytes, never the name of a file.

        Raises:
            LimitError: more than one message should carry [W105].
        """
        for where, t in tensors:
            self._carried += self.call.im.reader.inline(t, where) + len(t.raw_data)
            if self._carried > _CARRIED_BYTES:
                raise LimitError(
                    where=where,
                    problem=f"an operator with bodies that hold more than {_CARRIED_BYTES} bytes of weights",
                    remedy="make the weights initializers of the main graph, which its bodies may read",
                )

    def model(self, outputs: Sequence[onnx.ValueInfoProto]) -> onnx.ModelProto:
        graph = helper.make_graph(
            [*self.before, self.node, *self.after], "one", self.inputs, outputs, self.initialisers
        )
        imports = self._imports()
        model = onnx.ModelProto(ir_version=_IR_VERSION, graph=graph)
        model.opset_import.extend(helper.make_opsetid(d, v) for d, v in imports.items())
        functions = self.call.im.checked.functions
        if any((domain_of(n.domain), n.op_type, n.overload) in functions for n in walk_nodes([self.node])):
            model.functions.extend(functions.values())
            for f in model.functions:
                where = f"function '{shown(f.name)}'"
                self._inline(tensors_of_attributes(f.attribute_proto, where))
                self._inline(tensors_of_nodes(f.node, f"{where}, "))
        return model

    def _imports(self) -> dict[str, int]:
        """Without a body, the oldest version that means the same: runtimes trail behind the newest operator set."""
        call = self.call
        domain = domain_of(call.node.domain)
        imports = {**call.im.checked.opsets, **call.scope.opsets, domain: call.opset}
        imports.setdefault("", onnx.defs.onnx_opset_version())
        if not any(True for a in self.node.attribute for _ in subgraphs(a)):
            since = onnx.defs.get_schema(call.op, call.opset, domain).since_version
            since = SAME_AS.get((call.op, since), since)
            imports = {"": max(since if domain == "" else 0, _CAST_OPSET), domain: since}
            if domain == "":
                # the casts around it need opset 13; where that is another version of the operator, keep the call's
                newer = onnx.defs.get_schema(call.op, imports[""], "").since_version
                if SAME_AS.get((call.op, newer), newer) != since:
                    imports[""] = since if not (self.before or self.after) else call.opset
        return imports

    def infer(self) -> list[TensorType | str]:
        """Result types; a text says why there is none.

        Raises:
            onnx.shape_inference.InferenceError: operands and attributes contradict the operator.
        """
        names = [name for name in self.node.output if name]
        model = self.model([onnx.ValueInfoProto(name=name) for name in names])
        inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        types = {v.name: v.type for v in (*inferred.graph.output, *inferred.graph.value_info)}
        return [_static(types.get(name)) for name in names]


def _static(t: onnx.TypeProto | None) -> TensorType | str:
    if t is None or t.WhichOneof("value") is None:
        return "ONNX infers no type for its result"
    if t.WhichOneof("value") != "tensor_type":
        return f"its result is a {str(t.WhichOneof('value')).removesuffix('_type')}"
    dtype = DTYPES.get(t.tensor_type.elem_type)
    if dtype is None:
        return f"its result has type {type_name(t.tensor_type.elem_type)}"
    if not t.tensor_type.HasField("shape"):
        return "the rank of its result depends on run-time values"
    dims = t.tensor_type.shape.dim
    if any(not d.HasField("dim_value") or d.dim_value < 0 for d in dims):
        return "the shape of its result depends on run-time values"
    return TensorType(dtype, tuple(d.dim_value for d in dims))


def _said(error: Exception) -> str:
    """The last line of ONNX's message, without the names of its own stages in front."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shown(_STAGES.sub("", lines[-1]) if lines else "") or "operands do not fit"


def type_problem(call: Call) -> str | None:
    """What ONNX's type and shape inference has against this call; None if nothing."""
    try:
        _OneNode(call, guard=False).infer()
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        return _said(error)
    except (NoRuleError, NeedsValueError):
        return None
    return None


def opaque_nodes(call: Call, domain: str, reason: str) -> tuple[int, ...]:
    """One OPAQUE node per result.

    Raises:
        NoRuleError: result types that are not static tensors of ours [W201].
    """
    if call.op in RANDOM:
        raise NoRuleError(
            where=call.where, op=call.op, reason="it draws random numbers; make them an input of the model"
        )
    if domain == "ai.onnx.preview.training" or call.op.startswith("Optional"):
        raise NoRuleError(where=call.where, op=call.op, reason=f"{reason}; ONNX Runtime has no kernel for it")
    if call.op in ("RNN", "GRU", "LSTM") and call.get("layout", 0):
        raise NoRuleError(where=call.where, op=call.op, reason=f"{reason}; ONNX Runtime has no kernel for layout 1")
    one = _OneNode(call, guard=False)
    try:
        types = one.infer()
        if any(isinstance(t, str) for t in types) and call.im.examples is not None:
            one = _OneNode(call, guard=True)
            types = one.infer()
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        problem = _said(error)
        remedy = "types and shapes of the model contradict each other: export it again"
        raise MismatchError(where=call.where, problem=problem, remedy=remedy) from None
    good = [t for t in types if isinstance(t, TensorType)]
    if any(t.nbytes > call.im.limits.tensor_bytes for t in good):
        raise LimitError(
            where=call.where,
            problem=f"a result of {max(t.nbytes for t in good)} bytes, the limit is {call.im.limits.tensor_bytes}",
            remedy=f"give smaller sizes, or {raised_by('tensor_bytes')}",
        )
    if len(good) != len(types):
        bad = next(t for t in types if isinstance(t, str))
        raise NoRuleError(where=call.where, op=call.op, reason=reason if reason == bad else f"{reason}; {bad}")
    outputs = []
    names = [name for name in one.node.output if name]
    for name, t in zip(names, good, strict=True):
        if t.dtype.is_held:
            one.after.append(helper.make_node("Cast", [name], [f"{name}.f32"], to=onnx.TensorProto.FLOAT))
            outputs.append(helper.make_value_info(f"{name}.f32", type_proto(TensorType(DType.F32, t.shape))))
        else:
            outputs.append(helper.make_value_info(name, type_proto(t)))
    model = one.model(outputs).SerializeToString(deterministic=True)
    payload = json.dumps({"model": base64.b64encode(model).decode("ascii")})
    op = f"onnx::{domain + '.' if domain else ''}{call.op}"
    with call.im.origin(call):
        made = [
            call.b.add(
                Prim.OPAQUE, *one.operands, attrs=OpaqueAttrs("onnx", op, payload, k, tuple(good), shown(reason))
            )
            for k in range(len(good))
        ]
    call.im._hold_types(call)
    taken = iter(made)
    return tuple(next(taken) if name else -1 for name in call.node.output)
