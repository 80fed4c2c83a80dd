"""ModelProto -> primitives: walks the graph, asks the operator table, inlines functions, evaluates what is constant.

The walk knows no operator by itself: `operators` holds one handler per operator, which mostly names a fission rule.
What no handler takes is tried, in this order: the body that ONNX gives for the operator, an OPAQUE primitive, refusal.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import onnx

from weft.errors import InvalidGraphError, LimitError, UserError
from weft.frontends.imported import Imported, OpaqueUse, ValueGuard
from weft.frontends.onnx import opaque as fallback
from weft.frontends.onnx.call import ABSENT, REEXPORT, Call, Foreign, Handler, Scope, Value, foreign_type
from weft.frontends.onnx.check import AP, RUNTIME_DOMAINS, Checked, FunctionKey, domain_of, node_where, reads
from weft.frontends.onnx.errors import (
    BadAttributeError,
    BadFunctionError,
    BadGraphError,
    BadTensorError,
    BindingError,
    MismatchError,
    NeedsValueError,
    NoRuleError,
    UnsupportedTypeError,
)
from weft.frontends.onnx.limits import Limits, raised_by
from weft.frontends.onnx.names import kept, shown
from weft.frontends.onnx.operators import HANDLERS
from weft.frontends.onnx.pieces import Absent, Runtime
from weft.frontends.onnx.tensors import FOREIGN, MAX_RANK, TensorReader, dtype_of, tensor_name
from weft.ir.attrs import ConstantAttrs, InputAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId, Origin
from weft.ir.prims import FREE, Prim
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType, TensorType, round_emulated

_OPAQUE_BIT = 1
FEW_FLOATS = 16
"""As many may be factors of a resize, or thresholds, that stay the same from call to call."""
_VALUE_LIMIT = 1 << 22
"""Elements of a value that is evaluated because an operator needs it."""


def too_many(rank: int, where: str) -> LimitError:
    """Of dimensions."""
    problem = f"a tensor of rank {rank}; the most is {MAX_RANK}"
    return LimitError(where=where, problem=problem, remedy="merge dimensions before the export")


def live(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> list[int]:
    """Which nodes `wanted` needs, in their order."""
    needed = set(wanted)
    found = []
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if any(o in needed for o in node.output):
            found.append(i)
            needed |= reads(node)
    return found[::-1]


class Importer:
    """One import; see `run`."""

    def __init__(
        self,
        checked: Checked,
        reader: TensorReader,
        limits: Limits,
        dims: Mapping[str, int],
        examples: Examples | None,
        file_name: str = "",
        initializers: Mapping[str, Array] = MappingProxyType({}),
        runtime: Runtime | Absent = Absent.UNUSED,
        *,
        on_data: bool = True,
    ) -> None:
        self.on_data = on_data
        """Whether a graph may be specialised on the values of inputs that are data: floats, more than `FEW_FLOATS`."""
        self.runtime = runtime
        """What tries the operators that ONNX Runtime is to run."""
        self.initializers = initializers
        """Data that the caller gives for those of the model."""
        self.checked = checked
        self.reader = reader
        self.limits = limits
        self.dims = dict(dims)
        self._given = examples
        self.examples: Sequence[ExampleInput | None] | None = None
        """One for each input, once they are known; None: that one is not given."""
        self.file_name = file_name
        self.b = GraphBuilder()
        self.operators = 0
        self.work = 0
        self.opaque: Counter[tuple[str, str]] = Counter()
        self.notes: list[str] = list(checked.notes)
        self.set_to_1: dict[str, str] = {}
        """Symbolic dimensions that nobody gave a size, by what `dims` calls them: where the first one is."""
        self.guards: dict[int, str] = {}
        self._depends: list[int] = []
        self._known: dict[NodeId, Array] = {}
        self._call_depth = 0
        self._held = self._working = 0
        self._callers: list[str] = []
        """Operators whose bodies, which ONNX defines, are being imported, the outermost first."""

    # The walk

    def run(self) -> Imported:
        """Import the model.

        Raises:
            ModelError, UnsupportedError: the reason of the refusal; see `errors`.
        """
        graph = self.checked.model.graph
        scope = self.begin()
        self.nodes(graph.node, scope, {o.name for o in graph.output})
        outputs = [self.output(o, scope.names[o.name]) for o in graph.output]
        return self.finish(outputs, [o.name for o in graph.output])

    def begin(self) -> Scope:
        """The model's own scope, with its initializers and inputs."""
        graph = self.checked.model.graph
        scope = Scope(None, self.checked.opsets)
        self._initialisers(graph, scope, self.initializers)
        given = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
        inputs = [i for i in graph.input if i.name not in given]
        self._bind(inputs)
        for k, info in enumerate(inputs):
            scope.names[info.name] = self.b.input(self._input_type(info, k), kept(info.name, self.limits.name_bytes))
        return scope

    def output(self, info: onnx.ValueInfoProto, value: Value) -> NodeId:
        """An output of the model, held against what the model says of it.

        Raises:
            UnsupportedTypeError: it is no tensor of ours [W203].
            MismatchError: it is declared to be another one [W108].
        """
        where = f"output '{shown(info.name)}'"
        if isinstance(value, tuple):
            raise UnsupportedTypeError(
                where=where, op="", what="the output", type="a sequence", reason="Weft computes tensors"
            )
        if isinstance(value, Foreign):
            raise foreign_type(value, "the output", where)
        self._check_declared(info, value)
        return value

    def finish(self, outputs: Sequence[NodeId], names: Sequence[str]) -> Imported:
        """What these values need."""
        built = prune(self.b.build(outputs, [kept(name, self.limits.name_bytes) for name in names]))
        for n in built.nodes:
            if n.type.nbytes > self.limits.tensor_bytes:
                where = built.origins[n.origin].source if n.origin >= 0 else ""
                raise LimitError(
                    where=shown(where),
                    problem=f"a value of {n.type.nbytes} bytes, the limit is {self.limits.tensor_bytes}",
                    remedy=f"give smaller sizes, or {raised_by('tensor_bytes')}",
                )
        guards = tuple(
            ValueGuard.of(i, self._example(i), reason, self.b.type_of(self._input_node(i)).dtype)
            for i, reason in sorted(self.guards.items())
        )
        uses = tuple(OpaqueUse(op, reason, n) for (op, reason), n in self.opaque.most_common())
        if self.set_to_1:
            more = ", ..." if len(self.set_to_1) > 8 else ""
            listed = ", ".join([*self.set_to_1.values()][:8]) + more
            flags = " ".join(f"--dim {shown(name)}=SIZE" for name in [*self.set_to_1][:8]) + (" ..." if more else "")
            self.notes.append(
                f"symbolic dimensions are set to 1: {listed}; other sizes: {flags} (in Python `dims`) or example inputs"
            )
        return Imported(built, self.operators, uses, guards, tuple(dict.fromkeys(self.notes)))

    def nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope, wanted: set[str]) -> None:
        """Import the nodes that `wanted` needs, into `scope`."""
        for i in live(nodes, wanted):
            self.node(nodes[i], i, scope)

    def node(self, node: onnx.NodeProto, index: int, scope: Scope) -> None:
        """Import one node; its outputs become names of `scope`."""
        self.work += 1
        if self.work > self.limits.nodes or len(self.b) > 4 * self.limits.nodes:
            raise LimitError(
                problem=f"more than {self.limits.nodes} operators once functions and loops are unrolled",
                remedy=raised_by("nodes"),
            )
        where = node_where(node, index)
        domain = domain_of(node.domain)
        operands = tuple(self._operand(name, scope, where) for name in node.input)
        attrs = {a.name: a for a in self.attributes(node, scope, where)}
        key = (domain, node.op_type, node.overload)
        local = self.checked.functions.get(key)
        if local is not None:
            self._bind_outputs(node, scope, self.inline(local, operands, attrs, where), where)
            return
        version = scope.opsets.get(domain)
        if version is None:  # a body that ONNX gives for an operator may use the model's own imports
            version = self.checked.opsets.get(domain, onnx.defs.onnx_opset_version())
        decoded = {name: self.decode(a, where) for name, a in attrs.items()}
        call = Call(self, node, scope, version, operands, decoded, where)
        self.operators += self._call_depth == 0
        try:
            results = self.operator(call, domain, attrs)
        except MemoryError:
            problem = "the operator asks for more memory than the reading of a model may take"
            remedy = f"give smaller sizes, or {raised_by('parse_memory_bytes')}"
            raise LimitError(where=where, problem=problem, remedy=remedy) from None
        self._bind_outputs(node, scope, results, where)

    def _operand(self, name: str, scope: Scope, where: str) -> Value:
        if not name:
            return ABSENT
        try:
            return scope.get(name)
        except KeyError:
            raise BadGraphError(
                where=where, problem=f"input '{shown(name)}' has no value", remedy="the function does not define it"
            ) from None

    def operator(self, call: Call, domain: str, attrs: Mapping[str, onnx.AttributeProto]) -> tuple[Value, ...]:
        """Handler, then ONNX's own body, then an opaque primitive."""
        for k in required(call.op, call.opset, domain):
            if k >= len(call.operands) or call.operands[k] == ABSENT:
                raise BadGraphError(
                    where=call.where, problem=f"operand {k} is missing", remedy="the operator needs it: export again"
                )
        handler = HANDLERS.get((domain, call.op))
        reason = "no rule"
        refused: UnsupportedTypeError | None = None
        outside = next((v.name for v in call.operands if isinstance(v, Foreign)), "")
        if outside:
            reason = f"an operand is {outside}, which Weft has no type for"
        elif handler is not None:
            try:
                taken = self._attempt(call, handler)
            except UnsupportedTypeError as error:
                refused = error
                taken = Declined(f"{error.details['what']} has type {error.details['type']}")
            if not isinstance(taken, Declined):
                return self._folded(call, taken)
            reason = taken.reason
        body = None if outside else fallback.function_body(call, domain)
        if body is not None:
            counts = Counter(self.opaque)
            self._callers.append(self.source_of(call))
            try:
                return self.inline(body, call.operands, attrs, call.where, dict(call.scope.opsets))
            except UserError as error:
                # the body may be written for other types or ranks than this call has: try the operator as a whole
                reason = f"{reason}; its ONNX body: {error.args[0].splitlines()[0]}"
                self.opaque = counts
            finally:
                self._callers.pop()
        try:
            return fallback.opaque_nodes(call, domain, reason)
        except NoRuleError:
            if refused is None:
                raise
            raise refused from None

    def origin(self, call: Call) -> contextlib.AbstractContextManager[int]:
        """Nodes added inside name the operator, unless a rule that is applied there says more."""
        return self.b.origin(Origin("", source=self.source_of(call), location=self.location_of(call)))

    def hold_types(self, call: Call) -> None:
        """What an operator has added are tensors that something can compute.

        Raises:
            MismatchError: a negative size [W108].
            LimitError: more dimensions than anything takes [W105].
        """
        first, self._held = self._held, len(self.b)
        if self._working > self.limits.primitives:
            raise LimitError(
                where=call.where,
                problem=f"more than {self.limits.primitives} primitives up to here",
                remedy=f"compile the model in parts, or {raised_by('primitives')}",
            )
        for i in range(first, len(self.b)):
            self._working += self.b.node(i).prim not in FREE and self.depends(i) != 0
            shape = self.b.type_of(i).shape
            if len(shape) > MAX_RANK:
                raise too_many(len(shape), call.where)
            if shape and min(shape) < 0:
                raise MismatchError(where=call.where, problem=f"a result of shape {list(shape[:8])}", remedy=REEXPORT)

    def _attempt(self, call: Call, handler: Handler) -> tuple[Value, ...] | Declined:
        try:
            with self.origin(call):
                taken = handler(call)
            self.hold_types(call)
        except (
            InvalidGraphError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError
        ) as error:  # fmt: skip
            # Either the model does not type-check or a rule has a gap: ONNX's own inference tells which.
            problem = fallback.type_problem(call)
            if problem is not None:
                raise MismatchError(where=call.where, problem=problem, remedy=REEXPORT) from error
            return Declined(f"rule failed: {shown(str(error).splitlines()[0] if str(error) else type(error).__name__)}")
        if isinstance(taken, Declined):
            return taken
        return taken if isinstance(taken, tuple) else (taken,)

    def _folded(self, call: Call, results: tuple[Value, ...]) -> tuple[Value, ...]:
        """Results of small constant operands become constants at once: most of them compute shapes."""
        if call.op in ("Constant", "ConstantOfShape"):
            return results
        operands = [v for v in call.operands if isinstance(v, int) and v != ABSENT]
        if any(self.depends(v) or self.b.type_of(v).size > self.limits.fold_elements for v in operands):
            return results
        return tuple(self._fold_one(v) for v in results)

    def _fold_one(self, value: Value) -> Value:
        if not isinstance(value, int):
            return value
        t = self.b.type_of(value)
        if self.depends(value) or t.size > self.limits.fold_elements or self.b.node(value).prim is Prim.CONSTANT:
            return value
        known = self.known(value)
        return value if known is None else self.b.constant(contiguous(known), t.dtype)

    def _bind_outputs(self, node: onnx.NodeProto, scope: Scope, results: Sequence[Value], where: str) -> None:
        for k, name in enumerate(node.output):
            if not name:
                continue
            if k >= len(results) or results[k] == ABSENT:
                raise NoRuleError(where=where, op=node.op_type, reason=f"output {k} is not computed")
            scope.names[name] = results[k]

    def inline(
        self,
        body: onnx.FunctionProto,
        operands: Sequence[Value],
        attrs: Mapping[str, onnx.AttributeProto],
        where: str,
        opsets: Mapping[str, int] | None = None,
    ) -> tuple[Value, ...]:
        """The outputs of a function body.

        Raises:
            BadFunctionError: too deep, or more operands than the function takes [W109].
        """
        if self._call_depth >= self.limits.call_depth:
            raise BadFunctionError(
                where=where,
                problem=f"calls are nested deeper than {self.limits.call_depth}",
                remedy=f"inline functions before the export, or {raised_by('call_depth')}",
            )
        if len(operands) > len(body.input):
            raise BadFunctionError(
                where=where,
                problem=f"{len(operands)} operands, the function takes {len(body.input)}",
                remedy="export again",
            )
        given = dict(attrs)
        for default in body.attribute_proto:
            given.setdefault(default.name, default)
        inner = dict(opsets or {})
        inner.update({domain_of(o.domain): o.version for o in body.opset_import})
        scope = Scope(None, inner, given)
        for k, name in enumerate(body.input):
            scope.names[name] = operands[k] if k < len(operands) else ABSENT
        scope.names.setdefault("", ABSENT)
        if self._call_depth == 0 and opsets is None:
            self.operators += 1
        self._call_depth += 1
        try:
            self.nodes(body.node, scope, set(body.output))
        finally:
            self._call_depth -= 1
        return tuple(scope.names.get(name, ABSENT) for name in body.output)

    def subgraph(self, graph: onnx.GraphProto, outer: Scope, operands: Sequence[Value] = ()) -> tuple[Value, ...]:
        """The outputs of a subgraph (a branch, or one turn of a loop) for some operands."""
        scope = Scope(outer, outer.opsets)
        self._initialisers(graph, scope)
        if len(operands) != len(graph.input):
            raise MismatchError(
                where=f"subgraph '{shown(graph.name)}'",
                problem=f"{len(graph.input)} inputs for {len(operands)} values",
                remedy=REEXPORT,
            )
        for info, value in zip(graph.input, operands, strict=True):
            scope.names[info.name] = value
        self.nodes(graph.node, scope, {o.name for o in graph.output})
        return tuple(scope.get(o.name) for o in graph.output)

    def _initialisers(
        self, graph: onnx.GraphProto, scope: Scope, given: Mapping[str, Array] = MappingProxyType({})
    ) -> None:
        """Constants in the model's order, whether the data are its own or given by name."""
        dense = {t.name for t in graph.initializer}
        for name in given:
            if name not in dense:
                sparse = any(s.values.name == name for s in graph.sparse_initializer)
                raise BindingError(
                    where=f"initializer '{shown(name)}'",
                    problem="it is sparse: its data cannot be given" if sparse else "the model has none of this name",
                    remedy="give data by the names of the model's initializers",
                )
        for t in graph.initializer:
            if t.name in given:
                scope.names[t.name] = self._given_tensor(t, given[t.name])
            else:
                scope.names[t.name] = self._initialiser(t)
        for s in graph.sparse_initializer:
            scope.names[s.values.name] = self.sparse(s, tensor_name(s.values))

    def _given_tensor(self, t: onnx.TensorProto, data: Array) -> NodeId:
        where = f"initializer '{shown(t.name)}'"
        dtype = dtype_of(t.data_type, "the initializer", where)
        if data.dtype != dtype.numpy or data.shape != tuple(t.dims):
            raise BindingError(
                where=where,
                problem=f"the model has {dtype.value} of shape {tuple(t.dims)}, given is {data.dtype} of {data.shape}",
                remedy="give data of the initializer's own type and shape",
            )
        return self.b.constant(round_emulated(contiguous(data), dtype), dtype)

    def _initialiser(self, t: onnx.TensorProto) -> Value:
        if t.data_type not in FOREIGN:
            return self.tensor(t, tensor_name(t))
        shape = self.reader.check_foreign(t, tensor_name(t))
        return Foreign(t, 0, onnx.helper.make_tensor_type_proto(t.data_type, shape))

    def tensor(self, t: onnx.TensorProto, where: str) -> NodeId:
        """A tensor of the model as a constant."""
        dtype, value = self.reader.read(t, where)
        return self.b.constant(contiguous(value), dtype)

    def sparse(self, s: onnx.SparseTensorProto, where: str) -> NodeId:
        """A sparse tensor, made dense."""
        dtype, values = self.reader.read(s.values, where)
        index_type, read = self.reader.read(s.indices, where)
        indices: npt.NDArray[Any] = read
        shape = tuple(s.dims)
        total = int(np.prod([max(d, 0) for d in shape], dtype=np.float64))
        remedy = "the file is damaged or forged: export it again"
        if any(d < 0 for d in shape) or total > self.limits.model_bytes // 8 or index_type is not DType.I64:
            raise BadTensorError(where=where, problem=f"sparse tensor of shape {shape[:8]}", remedy=remedy)
        positions = indices.reshape(-1)
        if indices.ndim == 2:
            if indices.shape != (values.size, len(shape)):
                raise BadTensorError(where=where, problem="sparse indices do not match the values", remedy=remedy)
            if values.size and bool(((indices < 0) | (indices >= np.array(shape))).any()):
                raise BadTensorError(where=where, problem="sparse index out of range", remedy=remedy)
            positions = np.asarray(np.ravel_multi_index(tuple(indices.T), shape))
        if positions.size != values.size or (positions.size and (positions.min() < 0 or positions.max() >= total)):
            raise BadTensorError(where=where, problem="sparse indices do not match the values", remedy=remedy)
        dense = np.zeros(total, dtype.numpy)
        dense[positions.astype(np.int64)] = values.reshape(-1)
        return self.b.constant(dense.reshape(shape), dtype)

    # Attributes

    def attributes(self, node: onnx.NodeProto, scope: Scope, where: str) -> list[onnx.AttributeProto]:
        """The node's attributes with references to the function's own ones resolved."""
        found = []
        for a in node.attribute:
            if not a.ref_attr_name:
                found.append(a)
                continue
            target = scope.attributes.get(a.ref_attr_name)
            if target is None:
                continue  # an optional attribute of the function that the call did not give
            if a.type and target.type != a.type:
                raise BadAttributeError(
                    where=where,
                    problem=f"attribute '{shown(a.name)}' has another type than the function's",
                    remedy=REEXPORT,
                )
            copied = AP()
            copied.CopyFrom(target)
            copied.name = a.name
            found.append(copied)
        return found

    def decode(self, a: onnx.AttributeProto, where: str) -> Any:
        """int, float, str, tuples of them; TensorProto, GraphProto and TypeProto as they are."""
        match a.type:
            case AP.FLOAT:
                return float(a.f)
            case AP.INT:
                return int(a.i)
            case AP.STRING:
                return self._text(a.s, where)
            case AP.FLOATS:
                return tuple(map(float, a.floats))
            case AP.INTS:
                return tuple(map(int, a.ints))
            case AP.STRINGS:
                return tuple(self._text(s, where) for s in a.strings)
            case AP.TENSOR:
                return a.t
            case AP.GRAPH:
                return a.g
            case AP.SPARSE_TENSOR:
                return a.sparse_tensor
            case AP.TYPE_PROTO:
                return a.tp
            case _:
                return a

    def _text(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise BadAttributeError(where=where, problem="a string attribute is not UTF-8", remedy=REEXPORT) from None

    # Types of inputs and outputs

    def _bind(self, inputs: Sequence[onnx.ValueInfoProto]) -> None:
        """Symbolic sizes from the example inputs; explicit `dims` go first."""
        known = {n for info in inputs for k, d in enumerate(_dims(info)) if (n := _dim_name(info, k, d))}
        self.dims = self._by_own_names(inputs, known)
        if unknown := sorted(self.dims.keys() - known):
            raise BindingError(
                problem=f"no input has a symbolic dimension '{shown(unknown[0])}'",
                remedy=f"its symbolic dimensions are: {', '.join(shown(n) for n in sorted(known)[:16]) or 'none'}",
            )
        self.examples = self._in_order(inputs)
        for info, example in zip(inputs, self.examples or [None] * len(inputs), strict=True):
            declared = info.type.tensor_type
            where = f"input '{shown(info.name)}'"
            if example is None or not info.type.HasField("tensor_type"):
                continue
            if declared.HasField("shape") and len(declared.shape.dim) != len(example.shape):
                raise BindingError(
                    where=where,
                    problem=f"the example has rank {len(example.shape)}, the model says {len(declared.shape.dim)}",
                    remedy="give an example of the declared shape",
                )
            for k, (dim, size) in enumerate(zip(declared.shape.dim, example.shape, strict=False)):
                if dim.HasField("dim_value") and dim.dim_value != size and dim.dim_value > 0:
                    raise BindingError(
                        where=where,
                        problem=f"the example has size {size}, the model says {dim.dim_value}",
                        remedy="give an example of the declared shape",
                    )
                name = _dim_name(info, k, dim)
                if name and self.dims.setdefault(name, size) != size:
                    raise BindingError(
                        where=where,
                        problem=f"symbolic size '{shown(name)}' is {self.dims[name]} and {size}",
                        remedy="give examples that agree",
                    )

    def _by_own_names(self, inputs: Sequence[onnx.ValueInfoProto], known: set[str]) -> dict[str, int]:
        """The sizes given, those for INPUT:AXIS by the name of that dimension where it has one."""
        places = {f"{info.name}:{k}": (info, k, d) for info in inputs for k, d in enumerate(_dims(info))}
        found: dict[str, int] = {}
        for given, size in self.dims.items():
            name = given
            if given not in known and given in places:
                info, k, dim = places[given]
                name = _dim_name(info, k, dim) or given
                if name == given:
                    raise BindingError(
                        where=f"input '{shown(info.name)}'",
                        problem=f"dimension {k} has size {dim.dim_value}, not {size}",
                        remedy="only symbolic dimensions can be given a size",
                    )
            if found.setdefault(name, size) != size:
                raise BindingError(
                    problem=f"symbolic size '{shown(name)}' is {found[name]} and {size}", remedy="give one size for it"
                )
        return found

    def _in_order(self, inputs: Sequence[onnx.ValueInfoProto]) -> Sequence[ExampleInput | None] | None:
        given = self._given
        if isinstance(given, Mapping):
            names = [info.name for info in inputs]
            if unknown := next((name for name in given if name not in names), None):
                raise BindingError(
                    problem=f"the model has no input '{shown(unknown)}'",
                    remedy=f"its inputs are: {', '.join(shown(n) for n in names[:16]) or 'none'}",
                )
            return [given.get(name) for name in names]
        if given is not None and len(given) != len(inputs):
            raise BindingError(
                problem=f"{len(given)} example inputs for {len(inputs)} inputs of the model",
                remedy="give one array per input, in the model's order",
            )
        return given

    def _input_type(self, info: onnx.ValueInfoProto, index: int) -> TensorType:
        where = f"input '{shown(info.name)}'"
        kind = info.type.WhichOneof("value")
        if kind != "tensor_type":
            raise UnsupportedTypeError(
                where=where,
                op="",
                what="the input",
                type=str(kind).removesuffix("_type"),
                reason="Weft takes dense tensors",
            )
        t = info.type.tensor_type
        dtype = dtype_of(t.elem_type, "the input", where)
        example = self.examples[index] if self.examples is not None else None
        if (
            example is not None
            and example.dtype is not dtype
            and not (dtype.is_emulated and example.dtype is DType.F32)
        ):
            raise BindingError(
                where=where,
                problem=f"the example is {example.dtype.value}, the model says {dtype.value}",
                remedy="convert the example",
            )
        if not t.HasField("shape"):
            if example is None:
                raise BindingError(
                    where=where, problem="the model does not say the shape", remedy="pass example inputs"
                )
            if len(example.shape) > MAX_RANK:
                raise too_many(len(example.shape), where)
            return TensorType(dtype, example.shape)
        shape = []
        for k, dim in enumerate(t.shape.dim):
            if example is not None:
                shape.append(example.shape[k])
            elif dim.HasField("dim_value"):
                if dim.dim_value < 0 or dim.dim_value >= 2**62:
                    raise BindingError(where=where, problem=f"size {dim.dim_value} of dimension {k}", remedy=REEXPORT)
                shape.append(dim.dim_value)
            elif (name := _dim_name(info, k, dim)) in self.dims:
                shape.append(int(self.dims[name]))
            else:
                shape.append(1)
                told = f"'{shown(name)}'" if name == dim.dim_param else "unnamed"
                self.set_to_1.setdefault(name, f"{told} (dimension {k} of {where})")
        if len(shape) > MAX_RANK:
            raise too_many(len(shape), where)
        result = TensorType(dtype, tuple(shape))
        if any(n < 0 for n in shape) or result.size * dtype.itemsize >= 2**62:
            raise BindingError(
                where=where, problem=f"shape {tuple(shape)[:8]}", remedy="sizes must be >= 0 and fit in memory"
            )
        return result

    def _check_declared(self, info: onnx.ValueInfoProto, value: NodeId) -> None:
        """What the model says about an output must not contradict what was imported."""
        if info.type.WhichOneof("value") != "tensor_type":
            if info.type.WhichOneof("value") is None:
                return
            raise UnsupportedTypeError(
                where=f"output '{shown(info.name)}'", op="", what="the output",
                type=str(info.type.WhichOneof("value")).removesuffix("_type"), reason="Weft computes dense tensors",
            )  # fmt: skip
        t, made = info.type.tensor_type, self.b.type_of(value)
        where = f"output '{shown(info.name)}'"
        if t.elem_type and dtype_of(t.elem_type, "the output", where) is not made.dtype:
            raise MismatchError(
                where=where,
                problem=f"declared {dtype_of(t.elem_type, '', where).value}, computed {made.dtype.value}",
                remedy=REEXPORT,
            )
        if t.HasField("shape"):
            declared = [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in t.shape.dim]
            if len(declared) != made.rank or any(
                d is not None and d != n for d, n in zip(declared, made.shape, strict=True)
            ):
                told = ["?" if d is None else d for d in declared[:8]]
                self.notes.append(
                    f"{where} has shape {list(made.shape[:8])}, not {told} as the model declares".replace("'?'", "?")
                )

    # Values that are known while importing

    def depends(self, node: NodeId) -> int:
        """0 for a constant; else a mask: bit 0 for opaque results, bit 1+i for input i."""
        for i in range(len(self._depends), len(self.b)):
            n = self.b.node(i)
            mask = 0
            if n.prim is Prim.INPUT:
                assert isinstance(n.attrs, InputAttrs)
                mask = 1 << (1 + n.attrs.index)
            elif n.prim is Prim.OPAQUE:
                mask = _OPAQUE_BIT
            for j in n.inputs:
                mask |= self._depends[j]
            self._depends.append(mask)
        return self._depends[node]

    def known(self, node: NodeId, examples: bool = False) -> Array | None:
        """Value of a node that depends on nothing, or on example inputs; None where it takes large ones to find out."""
        memo = {} if examples else self._known
        if node in memo:
            return memo[node]
        direct = self.b.constant_value(node)
        if direct is not None:
            return direct
        needed, stack = set(), [node]
        while stack:
            i = stack.pop()
            if i in needed:
                continue
            needed.add(i)
            if self.b.type_of(i).size > _VALUE_LIMIT:
                return None
            if i not in memo:
                stack.extend(self.b.node(i).inputs)
        sub = GraphBuilder()
        at: dict[NodeId, NodeId] = {}
        for i in sorted(needed):
            n = self.b.node(i)
            if i in memo:
                at[i] = sub.constant(memo[i], n.type.dtype)
            elif n.prim is Prim.INPUT:
                assert isinstance(n.attrs, InputAttrs)
                at[i] = sub.constant(contiguous(self._example(n.attrs.index)), n.type.dtype)
            elif n.prim is Prim.CONSTANT:
                value = self.b.constant_value(i)
                assert value is not None
                at[i] = sub.constant(value, n.type.dtype)
            else:
                at[i] = sub.add(n.prim, *(at[j] for j in n.inputs), attrs=n.attrs)
        with np.errstate(all="ignore"):
            (value,) = evaluate(sub.build([at[node]]), [])
        memo[node] = np.asarray(value)
        return memo[node]

    def need(self, node: NodeId, call: Call) -> Array:
        """Value of a node for an operator that cannot be compiled without it.

        Raises:
            NeedsValueError [W202].
        """
        if node == ABSENT:
            raise MismatchError(where=call.where, problem="a required operand is missing", remedy=REEXPORT)
        mask = self.depends(node)
        used = [i for i in range(mask.bit_length() - 1) if mask >> (1 + i) & 1]
        t = self.b.type_of(node)

        def refuse(reason: str) -> NoReturn:
            raise NeedsValueError(where=call.where, op=call.op, what=f"an operand of type {t}", reason=reason)

        if t.size > _VALUE_LIMIT:
            refuse("it is too large")
        if mask & _OPAQUE_BIT:
            refuse("it is the result of an operator that fell back")
        if any(self._is_data(i) for i in used):
            refuse("it depends on the model's data, which are others in each call")
        if not self.lent(node):
            refuse("it depends on the model's inputs, and no example of them (or only a large one) is given")
        for i in used:
            self.guards.setdefault(i, f"{call.op} needs its value")
        found = self.known(node, examples=bool(used))
        if found is None:
            refuse(f"it is computed from values of more than {_VALUE_LIMIT} elements")
        return found

    def lent(self, node: NodeId) -> bool:
        """Whether a value follows from constants and inputs that have an example with values."""
        mask = self.depends(node)
        used = [i for i in range(mask.bit_length() - 1) if mask >> (1 + i) & 1]
        if mask & _OPAQUE_BIT or (used and self.examples is None) or any(self._is_data(i) for i in used):
            return False
        return all(_data(self.examples[i]) is not None for i in used) if self.examples is not None else True

    def _is_data(self, index: int) -> bool:
        """Whether no graph is to be specialised on the values of this input."""
        example = self.examples[index] if self.examples is not None and not self.on_data else None
        return example is not None and example.dtype.is_float and math.prod(example.shape) > FEW_FLOATS

    def _example(self, index: int) -> Array:
        assert self.examples is not None
        data = _data(self.examples[index])
        assert data is not None
        return data

    def _input_node(self, index: int) -> NodeId:
        return self.b.build([]).inputs[index]

    # Texts for people

    def source_of(self, call: Call) -> str:
        """Name of the operator in the model."""
        own = f"node '{kept(call.node.name, 200)}' ({call.op})" if call.node.name else f"({call.op})"
        return f"{self._callers[0]}, in its body {own}" if self._callers else own

    def location_of(self, call: Call) -> str:
        """File and node."""
        return (
            f"{self.file_name}: {call.where.split(' ', 2)[0]} {call.where.split(' ', 2)[1]}"
            if self.file_name
            else call.where
        )


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """Type of an example input, and its value unless it is large."""

    dtype: DType
    shape: tuple[int, ...]
    data: Array | None


Examples = Sequence[ExampleInput] | Mapping[str, ExampleInput | None]
"""One for each input in order, or some by name; None: there is none."""


def _data(example: ExampleInput | None) -> Array | None:
    return None if example is None else example.data


def _dims(info: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(info.type.tensor_type.shape.dim)


def _dim_name(info: onnx.ValueInfoProto, axis: int, dim: onnx.TensorShapeProto.Dimension) -> str:
    """What `dims` calls a dimension: its own name, else (or where that is `?`) INPUT:AXIS; empty: its size is fixed."""
    if dim.HasField("dim_value"):
        return ""
    return dim.dim_param if dim.dim_param not in ("", "?") else f"{info.name}:{axis}"


@lru_cache(maxsize=1024)
def required(op: str, version: int, domain: str) -> tuple[int, ...]:
    """Positions of the operands that an operator cannot do without, as far as ONNX knows it."""
    if domain in RUNTIME_DOMAINS:
        return ()
    formal = onnx.defs.get_schema(op, version, domain).inputs
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return tuple(k for k, p in enumerate(formal) if p.option == single)


def contiguous(x: Array) -> Array:
    """Row-major; unlike NumPy's own function it leaves a scalar a scalar."""
    return x if x.flags.c_contiguous else x.copy(order="C")


def prune(graph: Graph) -> Graph:
    """Without the nodes that no output needs; inputs stay, in order."""
    alive = [False] * len(graph)
    for i in (*graph.outputs, *graph.inputs):
        alive[i] = True
    for i in range(len(graph) - 1, -1, -1):
        if alive[i]:
            for j in graph.nodes[i].inputs:
                alive[j] = True
    new = {-1: -1}
    nodes: list[Node] = []
    for i, n in enumerate(graph.nodes):
        if alive[i]:
            new[i] = len(nodes)
            nodes.append(n)
    used = sorted({n.origin for n in nodes if n.origin >= 0})
    index = {-1: -1, **{o: k for k, o in enumerate(used)}}
    nodes = [replace(n, inputs=tuple(new[j] for j in n.inputs), origin=index[n.origin]) for n in nodes]
    origins = tuple(
        replace(
            graph.origins[o],
            operands=tuple(new.get(j, -1) for j in graph.origins[o].operands),
            results=tuple(new.get(j, -1) for j in graph.origins[o].results),
        )
        for o in used
    )
    digests = {n.attrs.digest for n in nodes if isinstance(n.attrs, ConstantAttrs)}
    return Graph(
        nodes=tuple(nodes),
        inputs=tuple(new[i] for i in graph.inputs),
        outputs=tuple(new[i] for i in graph.outputs),
        constants={d: graph.constants[d] for d in graph.constants if d in digests},
        origins=origins,
        input_names=graph.input_names,
        output_names=graph.output_names,
    )


FunctionTable = Mapping[FunctionKey, onnx.FunctionProto]
