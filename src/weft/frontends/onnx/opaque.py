"""Operators without a rule: ONNX's own body for them, or one OPAQUE primitive that ONNX Runtime executes.

The payload of an OPAQUE primitive is JSON with a model of static types, of one operator, and of those in front of it
whose results are of types that Weft lacks; no name of the user's model is an input or output name there. Result types
come from ONNX's shape inference, or from ONNX Runtime, both in the parsing process, where every payload runs once.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import helper, shape_inference

from weft.errors import LimitError
from weft.frontends.onnx.call import Call, Foreign, Value
from weft.frontends.onnx.check import RUNTIME_DOMAINS, domain_of, subgraphs, walk_nodes
from weft.frontends.onnx.errors import MismatchError, NeedsValueError, NoRuleError, NoRuntimeError
from weft.frontends.onnx.limits import raised_by
from weft.frontends.onnx.names import shown
from weft.frontends.onnx.pieces import DRAWS, Absent, Runtime, RuntimeWantedError, type_of
from weft.frontends.onnx.tensors import (
    DTYPES,
    FOREIGN,
    ONNX_TYPES,
    tensor_name,
    tensors_of_attributes,
    tensors_of_nodes,
    to_proto,
    type_name,
    type_proto,
)
from weft.ir.attrs import OpaqueAttrs
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType

_IN, _OUT = "weft.in.", "weft.out."
_INITIALISER_ELEMENTS = 1024
_CARRIED_BYTES = 128 << 20
"""Weights inside of the bodies of one operator; it is sent, stored and opened as one message."""
_IR_VERSION = 10
_CAST_OPSET = 13
_PIECE_STEPS = 4096
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
    {
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Dropout",
        "Sampling",
        "BiasDropout",
        "BitmaskDropout",
        "BitmaskBiasDropout",
    }
)
"""A value of the graph is a pure function of its inputs; a draw is not."""


def function_body(call: Call, domain: str) -> onnx.FunctionProto | None:
    """The body that ONNX defines for this call's operator, attribute defaults included; None if there is none."""
    if call.op in RANDOM or domain in RUNTIME_DOMAINS:
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
    if isinstance(value, Foreign):
        return value.type
    if isinstance(value, tuple):
        element = type_proto(call.b.type_of(value[0])) if value else onnx.TypeProto()
        return helper.make_sequence_type_proto(element)
    return onnx.TypeProto() if value < 0 else type_proto(call.b.type_of(value))


def _resolved(call: Call, rename: Mapping[int, str], outs: str = _OUT) -> onnx.NodeProto:
    """The node with synthetic names and the attributes of this call."""
    node = onnx.NodeProto(op_type=call.op, domain=domain_of(call.node.domain), overload=call.node.overload)
    for k, v in enumerate(call.operands):
        node.input.append("" if isinstance(v, int) and v < 0 else rename.get(k, f"{_IN}{k}"))
    node.output.extend(f"{outs}{k}" if name else "" for k, name in enumerate(call.node.output))
    node.attribute.extend(call.im.attributes(call.node, call.scope, call.where))
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


class _Piece:
    """A model of one operator; operands are inputs, or initialisers where their value is given.

    `whole`: with the operators, and their operands, that make its operands of types that Weft lacks; else these are
    inputs too, which only their types need to be known of.
    """

    def __init__(self, call: Call, *, guard: bool, whole: bool = True) -> None:
        self.operands: list[int] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initialisers: list[onnx.TensorProto] = []
        self.before: list[onnx.NodeProto] = []
        self.steps: list[tuple[Call, onnx.NodeProto]] = []
        self.after: list[onnx.NodeProto] = []
        self.call, self._guard = call, guard
        self._carried = 0
        self._captured: dict[str, Value] = {}
        self._made: dict[int, str] = {}
        """By identity: the name of a tensor, or what those of an operator begin with."""
        for maker in _makers(call) if whole else ():
            if isinstance(maker, onnx.TensorProto):
                self._made[id(maker)] = self._tensor(maker, f"weft.{len(self._made)}")
            else:
                begin = self._made[id(maker)] = f"weft.{len(self._made)}."
                self._step(maker, f"{begin}in.", f"{begin}out.")
        self.node = self._step(call, _IN, _OUT)

    def _step(self, call: Call, ins: str, outs: str) -> onnx.NodeProto:
        """One operator with its operands."""
        rename: dict[int, str] = {}
        for k, v in enumerate(call.operands):
            if isinstance(v, tuple):
                raise NoRuleError(where=call.where, op=call.op, reason="it takes a sequence")
            if isinstance(v, int) and v < 0:
                continue
            rename[k] = self._operand(v, f"{ins}{k}", self._guard)
        node = _resolved(call, rename, outs)
        self._inline(tensors_of_attributes(node.attribute, call.where))
        for name in captured(node):
            v = call.scope.get(name)
            if isinstance(v, tuple):
                raise NoRuleError(where=call.where, op=call.op, reason="its body reads a sequence")
            if name in self._captured:
                if self._captured[name] != v:
                    problem = f"two bodies read different values of one name, '{shown(name)}'"
                    raise NoRuleError(where=call.where, op=call.op, reason=problem)
            elif not isinstance(v, int) or v >= 0:
                self._captured[name] = v
                made = self._operand(v, name, False)
                if made != name:
                    self.steps.append((call, helper.make_node("Identity", [made], [name])))
        self.steps.append((call, node))
        return node

    def _operand(self, v: int | Foreign, name: str, guard: bool) -> str:
        """Its name inside: the one given, unless the value is made inside."""
        if not isinstance(v, int):
            return self._foreign(v, name)
        im, t = self.call.im, self.call.b.type_of(v)
        small = t.size <= _INITIALISER_ELEMENTS
        if small and (not im.depends(v) or (guard and t.dtype.is_integer and t.rank <= 1)):
            value = im.need(v, self.call)
            self.initialisers.append(to_proto(value, t.dtype, name))
            return name
        self.operands.append(v)
        # The runtime is fed NumPy arrays, and NumPy has no such type: the value crosses as exact float32.
        if t.dtype.is_emulated:
            outside = f"{name}.f32"
            self.before.append(helper.make_node("Cast", [outside], [name], to=ONNX_TYPES[t.dtype]))
            self.inputs.append(helper.make_value_info(outside, type_proto(TensorType(DType.F32, t.shape))))
        else:
            self.inputs.append(helper.make_value_info(name, type_proto(t)))
        return name

    def _foreign(self, v: Foreign, name: str) -> str:
        if isinstance(v.source, onnx.TensorProto):
            return self._made.get(id(v.source)) or self._tensor(v.source, name)
        made = self._made.get(id(v.source))
        if made is not None:
            return f"{made}out.{v.output}"
        self.inputs.append(onnx.ValueInfoProto(name=name, type=v.type))
        return name

    def _tensor(self, t: onnx.TensorProto, name: str) -> str:
        copied = onnx.TensorProto()
        copied.CopyFrom(t)
        self._inline([(tensor_name(t), copied)])
        copied.name = name
        self.initialisers.append(copied)
        return name

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
        nodes = [node for _, node in self.steps]
        graph = helper.make_graph([*self.before, *nodes, *self.after], "one", self.inputs, outputs, self.initialisers)
        imports = self._imports()
        model = onnx.ModelProto(ir_version=_IR_VERSION, graph=graph)
        model.opset_import.extend(helper.make_opsetid(d, v) for d, v in imports.items())
        functions = self.call.im.checked.functions
        if any((domain_of(n.domain), n.op_type, n.overload) in functions for n in walk_nodes(nodes)):
            model.functions.extend(functions.values())
            for f in model.functions:
                where = f"function '{shown(f.name)}'"
                self._inline(tensors_of_attributes(f.attribute_proto, where))
                self._inline(tensors_of_nodes(f.node, f"{where}, "))
        return model

    def _imports(self) -> dict[str, int]:
        """Without a body, the oldest version that means the same: runtimes trail behind the newest operator set.

        Raises:
            NoRuleError: its operators are of several versions of one domain [W201].
        """
        imports: dict[str, int] = {}
        for call, _ in self.steps:
            for d, v in {
                **call.im.checked.opsets,
                **call.scope.opsets,
                domain_of(call.node.domain): call.opset,
            }.items():
                if imports.setdefault(d, v) != v:
                    problem = f"it would have to run with operators of another version of '{d or 'ai.onnx'}'"
                    raise NoRuleError(where=call.where, op=call.op, reason=problem)
        imports.setdefault("", onnx.defs.onnx_opset_version())
        if any(True for _, node in self.steps for a in node.attribute for _ in subgraphs(a)):
            return imports
        sinces = {domain: [0] for domain in imports}
        for _, node in self.steps:
            domain = domain_of(node.domain)
            if domain in RUNTIME_DOMAINS:
                sinces[domain].append(imports[domain])
                continue
            since = onnx.defs.get_schema(node.op_type, imports[domain], domain).since_version
            sinces[domain].append(SAME_AS.get((node.op_type, since), since) if len(self.steps) == 1 else since)
        oldest = {domain: max(found) for domain, found in sinces.items() if max(found) or not domain}
        oldest[""] = max(oldest[""], _CAST_OPSET)
        call = self.call
        if len(self.steps) == 1 and domain_of(call.node.domain) == "":
            # the casts around it need opset 13; where that is another version of the operator, keep the call's
            since = max(sinces[""])
            newer = onnx.defs.get_schema(call.op, oldest[""], "").since_version
            if SAME_AS.get((call.op, newer), newer) != since:
                oldest[""] = since if not (self.before or self.after) else call.opset
        return oldest

    def infer(self) -> list[onnx.TypeProto | str]:
        """Types of the results, as far as they are known; a text says why there is none.

        Raises:
            onnx.shape_inference.InferenceError: operands and attributes contradict the operator.
        """
        names = [name for name in self.node.output if name]
        model = self.model([onnx.ValueInfoProto(name=name) for name in names])
        known = self.call.im.checked.functions
        if any(domain_of(n.domain) in RUNTIME_DOMAINS and (domain_of(n.domain), n.op_type, n.overload) not in known
               for n in walk_nodes(model.graph.node)):  # fmt: skip
            return ["ONNX does not know the operator"] * len(names)
        try:
            inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        except shape_inference.InferenceError:  # it also takes it ill that two bodies read one value
            inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=False)
        types = {v.name: v.type for v in (*inferred.graph.output, *inferred.graph.value_info)}
        return [types.get(name, "ONNX infers no type for its result") for name in names]

    def types(self) -> list[onnx.TypeProto | str]:
        """The same, by ONNX Runtime where ONNX does not know."""
        found = self.infer()
        runtime = self.call.im.runtime
        if not isinstance(runtime, Runtime) or not any(isinstance(_static(t), str) for t in found):
            return found
        names = [name for name in self.node.output if name]
        model = self.model([onnx.ValueInfoProto(name=name) for name in names]).SerializeToString(deterministic=True)
        known = runtime.types(model, self.call.where)
        own = domain_of(self.call.node.domain) == ""  # what ONNX says of its own operators is all there is
        return [
            better if isinstance(_static(t), str) and not (own and isinstance(t, onnx.TypeProto)) else t
            for t, better in zip(found, known, strict=True)
        ]


def _makers(call: Call) -> list[Call | onnx.TensorProto]:
    """What makes the values of other types that an operator reads, in order.

    Raises:
        LimitError: too many operators for one piece [W105].
    """
    found: dict[int, Call | onnx.TensorProto] = {}
    stack: list[tuple[Call, bool]] = [(call, False)]
    while stack:
        reader, done = stack.pop()
        if done:
            found.setdefault(id(reader), reader)
            continue
        if id(reader) in found:
            continue
        if len(found) + len(stack) > _PIECE_STEPS:
            raise LimitError(
                where=call.where,
                problem=f"more than {_PIECE_STEPS} operators on types that Weft lacks would have to run as one",
                remedy="cast to types that Weft has in between",
            )
        stack.append((reader, True))
        read = [*reader.operands, *(reader.scope.get(name) for name in captured(reader.node))]
        for v in read:
            if isinstance(v, Foreign):
                if isinstance(v.source, onnx.TensorProto):
                    found.setdefault(id(v.source), v.source)
                else:
                    stack.append((v.source, False))
    call.im.work += len(found) - 1
    return [maker for maker in found.values() if maker is not call]


def _static(t: onnx.TypeProto | str) -> TensorType | Foreign | str:
    """A type of ours, or of a value that stays inside of pieces; else why not."""
    if isinstance(t, str):
        return t
    if t.WhichOneof("value") is None:
        return "ONNX infers no type for its result"
    if t.WhichOneof("value") != "tensor_type":
        return f"its result is a {str(t.WhichOneof('value')).removesuffix('_type')}"
    if t.tensor_type.elem_type in FOREIGN:
        return Foreign(onnx.TensorProto(), 0, t)
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
        _Piece(call, guard=False, whole=False).infer()
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        return _said(error)
    except (NoRuleError, NeedsValueError):
        return None
    return None


def opaque_nodes(call: Call, domain: str, reason: str) -> tuple[Value, ...]:
    """One OPAQUE node per result; a constant for one that nothing decides on; a `Foreign` for one of another type.

    Raises:
        NoRuleError: result types that are not static tensors [W201].
        NoRuntimeError: it wants ONNX Runtime, which is not installed [W201].
    """
    if call.op in RANDOM:
        raise NoRuleError(
            where=call.where, op=call.op, reason="it draws random numbers; make them an input of the model"
        )
    if domain == "ai.onnx.preview.training" or call.op.startswith("Optional"):
        raise NoRuleError(where=call.where, op=call.op, reason=f"{reason}; ONNX Runtime has no kernel for it")
    if call.op in ("RNN", "GRU", "LSTM") and call.get("layout", 0):
        raise NoRuleError(where=call.where, op=call.op, reason=f"{reason}; ONNX Runtime has no kernel for layout 1")
    if call.im.runtime is Absent.YET:
        raise RuntimeWantedError
    try:
        kinds, guard = _kinds(call)
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        problem = _said(error)
        remedy = "types and shapes of the model contradict each other: export it again"
        raise MismatchError(where=call.where, problem=problem, remedy=remedy) from None
    places = [k for k, name in enumerate(call.node.output) if name]
    result: list[Value] = [-1] * len(call.node.output)
    for k, kind in zip(places, kinds, strict=True):
        if isinstance(kind, Foreign):
            result[k] = Foreign(call, k, kind.type)
    mine = [(k, kind) for k, kind in zip(places, kinds, strict=True) if not isinstance(kind, Foreign)]
    if not mine:
        return tuple(result)
    piece, types, values = _tried(call, guard, mine, reason)
    for t in types:
        if t.nbytes > call.im.limits.tensor_bytes:
            raise LimitError(
                where=call.where,
                problem=f"a result of {t.nbytes} bytes, the limit is {call.im.limits.tensor_bytes}",
                remedy=f"give smaller sizes, or {raised_by('tensor_bytes')}",
            )
    op = f"onnx::{domain + '.' if domain else ''}{call.op}"
    with call.im.origin(call):
        if values is not None:
            made = [call.b.constant(np.ascontiguousarray(v), t.dtype) for v, t in zip(values, types, strict=True)]
        else:
            payload = json.dumps(
                {"model": base64.b64encode(_model(piece, [k for k, _ in mine], types)).decode("ascii")}
            )
            attrs = [OpaqueAttrs("onnx", op, payload, k, tuple(types), shown(reason)) for k in range(len(types))]
            made = [call.b.add(Prim.OPAQUE, *piece.operands, attrs=a) for a in attrs]
            call.im.opaque[op, reason] += 1
    call.im.hold_types(call)
    for (k, _), node in zip(mine, made, strict=True):
        result[k] = node
    return tuple(result)


def _kinds(call: Call) -> tuple[list[TensorType | Foreign | str], bool]:
    """Result types; whether values of the example inputs were wanted to know them."""
    kinds = [_static(t) for t in _Piece(call, guard=False, whole=False).types()]
    if call.im.examples is None or not any(isinstance(t, str) for t in kinds):
        return kinds, False
    return [_static(t) for t in _Piece(call, guard=True, whole=False).types()], True


def _tried(
    call: Call, guard: bool, mine: Sequence[tuple[int, TensorType | str]], reason: str
) -> tuple[_Piece, list[TensorType], list[Array] | None]:
    """The whole piece, with the types of its results of ours; and the results, where no operand decides on them.

    It runs here once before anything else runs it; where the sizes of a result are not known, a few times.

    Raises:
        NoRuntimeError: only ONNX Runtime knows the types, and it is not installed [W201].
        NoRuleError: it does not run, or sizes depend on its operands' values [W201].
    """
    runtime = call.im.runtime
    unknown = next((kind for _, kind in mine if isinstance(kind, str)), "")
    piece = _Piece(call, guard=guard)
    if not isinstance(runtime, Runtime):
        if unknown and domain_of(call.node.domain) not in RUNTIME_DOMAINS and runtime is not Absent.INSTALLED:
            raise NoRuleError(where=call.where, op=call.op, reason=_both(reason, unknown))
        if unknown or len(piece.steps) > 1:
            raise NoRuntimeError(
                where=call.where, op=call.op, reason=f"{reason}; ONNX Runtime, which may have it, is not here"
            )
        return piece, [kind for _, kind in mine if isinstance(kind, TensorType)], None
    places = [k for k, _ in mine]
    inputs = [call.b.type_of(v) for v in piece.operands]
    types = [kind for _, kind in mine if isinstance(kind, TensorType)]
    if unknown:  # more may be known of the whole
        every = dict(zip((k for k, name in enumerate(call.node.output) if name), piece.types(), strict=True))
        known = [_static(every[k]) for k in places]
        types = [t for t in known if isinstance(t, TensorType)]
        if len(types) != len(places):
            types = _drawn(call, piece, places, [every[k] for k in places], reason)
    ran = runtime.run(_model(piece, places, types), inputs, call.where)
    if isinstance(ran, str):
        if unknown:
            raise NoRuleError(where=call.where, op=call.op, reason=_both(reason, ran))
        return piece, types, None  # it may want other values than those drawn: what runs it for good says so
    return piece, types, ran[0] if not piece.operands and _are(ran[0], types) else None


def _drawn(
    call: Call, piece: _Piece, places: Sequence[int], kinds: Sequence[onnx.TypeProto | str], reason: str
) -> list[TensorType]:
    """Types of results whose sizes nothing says: those that they have for every set of inputs that is tried.

    Raises:
        NoRuleError: as `_tried`.
    """
    runtime = call.im.runtime
    assert isinstance(runtime, Runtime)
    dtypes = []
    for t in kinds:
        problem = _static(t)
        dtype = None if isinstance(t, str) else DTYPES.get(t.tensor_type.elem_type)
        # what ONNX describes and leaves open depends on values: no draw of inputs would tell
        if dtype is None or domain_of(call.node.domain) == "":
            raise NoRuleError(where=call.where, op=call.op, reason=_both(reason, str(problem)))
        dtypes.append(dtype)
    ran = runtime.run(_model(piece, places, dtypes), [call.b.type_of(v) for v in piece.operands], call.where, DRAWS)
    if isinstance(ran, str):
        raise NoRuleError(where=call.where, op=call.op, reason=_both(reason, ran))
    found = [type_of(values, dtype) for dtype, values in zip(dtypes, zip(*ran, strict=True), strict=True)]
    if problem := next((t for t in found if isinstance(t, str)), ""):
        raise NoRuleError(where=call.where, op=call.op, reason=_both(reason, problem))
    return [t for t in found if isinstance(t, TensorType)]


def _both(reason: str, more: str) -> str:
    return reason if not more or reason == more else f"{reason}; {more}"


def _are(values: Sequence[Array], types: Sequence[TensorType]) -> bool:
    held = [np.dtype(np.float32) if t.dtype.is_emulated else t.dtype.numpy for t in types]
    return all(v.shape == t.shape and v.dtype == d for v, t, d in zip(values, types, held, strict=True))


def _model(piece: _Piece, places: Sequence[int], types: Sequence[TensorType | DType]) -> bytes:
    """The model of a piece that gives the results at these places, of these types."""
    outputs = []
    piece.after = []
    for k, t in zip(places, types, strict=True):
        name, dtype = f"{_OUT}{k}", t.dtype if isinstance(t, TensorType) else t
        if dtype.is_emulated:  # as the operands
            piece.after.append(helper.make_node("Cast", [name], [f"{name}.f32"], to=onnx.TensorProto.FLOAT))
            name, dtype = f"{name}.f32", DType.F32
        shape = t.shape if isinstance(t, TensorType) else None
        outputs.append(helper.make_value_info(name, helper.make_tensor_type_proto(ONNX_TYPES[dtype], shape)))
    return bytes(piece.model(outputs).SerializeToString(deterministic=True))
