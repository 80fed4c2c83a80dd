"""Structural checks of an untrusted ModelProto, in plain Python: counts, names, order, functions, attributes.

ONNX's own checker is C++ that walks untrusted recursion; it is not called on the model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import DecodeError

from weft.errors import LimitError
from weft.frontends.onnx.errors import (
    BadAttributeError,
    BadFunctionError,
    BadGraphError,
    GarbledModelError,
    OpsetError,
    UnknownOperatorError,
)
from weft.frontends.onnx.limits import Limits, raised_by
from weft.frontends.onnx.names import shown

AP = onnx.AttributeProto
MIN_OPSET = 6
ALIASES = {"ai.onnx": ""}
KNOWN_DOMAINS = frozenset({"", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"})
RUNTIME_DOMAINS = frozenset({"com.microsoft", "com.microsoft.experimental", "com.microsoft.nchwc"})
"""Operators that ONNX Runtime has and ONNX does not describe: it alone says whether a node is right."""
_FOREIGN_CODE = frozenset({"EPContext", "PythonOp", "PythonOpGrad", "TritonOp", "Snpe", "QnnContext"})
"""Those of them that run a program or load a file that the model names."""

FunctionKey = tuple[str, str, str]
"""Domain, name, overload."""

_PAYLOAD: dict[int, str] = {
    AP.FLOAT: "f", AP.INT: "i", AP.STRING: "s", AP.TENSOR: "t", AP.GRAPH: "g", AP.SPARSE_TENSOR: "sparse_tensor",
    AP.TYPE_PROTO: "tp", AP.FLOATS: "floats", AP.INTS: "ints", AP.STRINGS: "strings", AP.TENSORS: "tensors",
    AP.GRAPHS: "graphs", AP.SPARSE_TENSORS: "sparse_tensors", AP.TYPE_PROTOS: "type_protos",
}  # fmt: skip
_SINGULAR = frozenset({"t", "g", "sparse_tensor", "tp"})


def domain_of(domain: str) -> str:
    """The domain in its short form."""
    return ALIASES.get(domain, domain)


def node_where(node: onnx.NodeProto, index: int) -> str:
    """For messages: which node."""
    return f"node {index} '{shown(node.name)}' ({shown(node.op_type)})"


@dataclass(frozen=True, slots=True)
class Checked:
    """A model whose structure holds."""

    model: onnx.ModelProto
    opsets: Mapping[str, int]
    functions: Mapping[FunctionKey, onnx.FunctionProto]
    notes: tuple[str, ...] = ()
    """What was mended."""


def parse(data: bytes | memoryview, limits: Limits) -> onnx.ModelProto:
    """Bytes -> message.

    Raises:
        GarbledModelError [W101], LimitError [W105].
    """
    remedy = "is this an ONNX file, completely downloaded? Export it again"
    if len(data) > limits.model_bytes:
        raise LimitError(
            problem=f"the model has {len(data)} bytes, the limit is {limits.model_bytes}",
            remedy=raised_by("model_bytes"),
        )
    if not len(data):
        raise GarbledModelError(problem="the file is empty", remedy=remedy)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RecursionError, MemoryError, TypeError, ValueError):
        raise GarbledModelError(problem="not a readable ONNX protobuf", remedy=remedy) from None
    if not model.HasField("graph"):
        raise GarbledModelError(problem="a model without a graph", remedy=remedy)
    return model


def check_model(model: onnx.ModelProto, limits: Limits) -> Checked:
    """Every structural rule that the importer relies on.

    Raises:
        OpsetError, UnknownOperatorError, BadGraphError, BadFunctionError, BadAttributeError, LimitError.
    """
    opsets = _opsets(model.opset_import, "the model")
    functions: dict[FunctionKey, onnx.FunctionProto] = {}
    for f in model.functions:
        _text("a function", f.domain, f.name, f.overload, *f.output, *f.attribute)
        key = (domain_of(f.domain), f.name, f.overload)
        if key in functions:
            raise BadFunctionError(
                where=f"function '{shown(f.name)}'", problem="defined twice", remedy="rename one of them"
            )
        functions[key] = f
    counter = _Counter(limits)
    seen = set(opsets)
    for f in functions.values():
        where = f"function '{shown(f.name)}'"
        inner = _opsets(f.opset_import, where, lax=opsets)
        seen |= set(inner)
        scope = _names(f.input, where)
        _check_nodes(f.node, scope, where, 0, counter, functions, inner)
        missing = [o for o in f.output if o not in scope]
        if missing:
            raise BadGraphError(
                where=where, problem=f"output '{shown(missing[0])}' is never defined", remedy="export the model again"
            )
    _check_calls(functions, limits)
    _check_graph(model.graph, set(), "graph", 0, counter, functions, opsets)
    notes = tuple(f"the nodes of {where} were not sorted; they are taken in the order of what they read"
                  for where in dict.fromkeys(counter.sorted))  # fmt: skip
    return Checked(model, opsets, functions, notes)


def _opsets(
    imports: Iterable[onnx.OperatorSetIdProto], where: str, lax: Mapping[str, int] | None = None
) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in imports:
        _text(where, item.domain)
        domain = domain_of(item.domain)
        if found.get(domain, item.version) != item.version:
            raise OpsetError(
                where=where,
                problem=f"domain '{shown(domain)}' is imported with versions {found[domain]} and {item.version}",
                remedy="keep one",
            )
        found[domain] = item.version
    if lax is None and not found:
        raise OpsetError(where=where, problem="no operator set is imported", remedy="add an opset_import")
    newest = onnx.defs.onnx_opset_version()
    version = found.get("")
    if version is not None and not MIN_OPSET <= version <= newest:
        hint = "install a newer onnx" if version > newest else f"export with opset {MIN_OPSET} or newer"
        raise OpsetError(
            where=where,
            problem=f"opset {version} is outside of [{MIN_OPSET}, {newest}], what the installed onnx knows",
            remedy=hint,
        )
    return found


class _Counter:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.nodes = 0
        self.sorted: list[str] = []
        """Graphs whose nodes were brought into order."""

    def add(self, n: int) -> None:
        self.nodes += n
        if self.nodes > self.limits.nodes:
            raise LimitError(problem=f"more than {self.limits.nodes} nodes", remedy=raised_by("nodes"))


def _text(where: str, *values: object) -> None:
    """Protobuf hands over a string that is not UTF-8 as bytes."""
    for value in values:
        if not isinstance(value, str):
            raise GarbledModelError(
                where=where, problem=f"a name that is not UTF-8: {shown(value)}", remedy="the file is damaged"
            )


def _names(names: Iterable[str], where: str) -> set[str]:
    scope: set[str] = set()
    for name in names:
        _text(where, name)
        if name and name in scope:
            raise BadGraphError(
                where=where, problem=f"'{shown(name)}' is given twice", remedy="every value needs a name of its own"
            )
        scope.add(name)
    return scope


def _check_graph(
    graph: onnx.GraphProto,
    outer: set[str],
    where: str,
    depth: int,
    counter: _Counter,
    functions: Mapping[FunctionKey, onnx.FunctionProto],
    opsets: Mapping[str, int],
) -> None:
    if depth > counter.limits.graph_depth:
        raise LimitError(
            where=where,
            problem=f"subgraphs are nested deeper than {counter.limits.graph_depth}",
            remedy=f"flatten the control flow, or {raised_by('graph_depth')}",
        )
    _names((i.name for i in graph.input), where)
    _text(where, graph.name, *(o.name for o in graph.output))
    for info in (*graph.input, *graph.output):
        _text(where, *(d.dim_param for d in info.type.tensor_type.shape.dim))
    dense = [t.name for t in graph.initializer]
    sparse = [t.values.name for t in graph.sparse_initializer]
    own = _names([*dense, *sparse], f"{where}, initializers")
    if "" in own:
        raise BadGraphError(where=where, problem="an initializer without a name", remedy="name it")
    scope = outer | own | {i.name for i in graph.input}
    local = own | {i.name for i in graph.input}
    _check_nodes(graph.node, scope, where, depth, counter, functions, opsets, local)
    if depth == 0 and not graph.output:
        raise BadGraphError(where=where, problem="no outputs", remedy="name at least one output")
    for o in graph.output:
        if o.name not in scope:
            raise BadGraphError(
                where=where, problem=f"output '{shown(o.name)}' is never defined", remedy="export the model again"
            )


def _check_nodes(
    nodes: RepeatedCompositeFieldContainer[onnx.NodeProto],
    scope: set[str],
    where: str,
    depth: int,
    counter: _Counter,
    functions: Mapping[FunctionKey, onnx.FunctionProto],
    opsets: Mapping[str, int],
    local: set[str] | None = None,
) -> None:
    """Adds the outputs of the nodes to `scope`. `local`: names of this graph, which may not be defined again."""
    counter.add(len(nodes))
    if _sort(nodes, scope):
        counter.sorted.append(where)
    defined = set(scope) if local is None else local
    later: set[str] | None = None
    for i, node in enumerate(nodes):
        _text(where, node.op_type, node.domain, node.overload, node.name, *node.input, *node.output)
        at = node_where(node, i) if where == "graph" else f"{where}, {node_where(node, i)}"
        for name in node.input:
            if name and name not in scope:
                if later is None:
                    later = {o for n in nodes for o in n.output}
                why = (
                    "is made by this node or a later one: the graph has a cycle"
                    if name in later
                    else "is never defined"
                )
                raise BadGraphError(
                    where=at, problem=f"input '{shown(name)}' {why}", remedy="the file is damaged: export it again"
                )
        _check_operator(node, at, functions, opsets)
        _check_attributes(node, at)
        for attribute in node.attribute:
            for sub in subgraphs(attribute):
                _check_graph(
                    sub, scope, f"{at}, subgraph '{shown(attribute.name)}'", depth + 1, counter, functions, opsets
                )
        for name in node.output:
            if name:
                if name in defined:
                    raise BadGraphError(
                        where=at,
                        problem=f"'{shown(name)}' is defined twice",
                        remedy="every value needs a name of its own",
                    )
                defined.add(name)
                scope.add(name)


def reads(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, those captured by its subgraphs included."""
    found = {name for name in node.input if name}
    for a in node.attribute:
        for sub in subgraphs(a):
            for inner in walk_nodes(sub.node):
                found.update(name for name in inner.input if name)
            found.update(o.name for o in sub.output)
    return found


def _sort(nodes: RepeatedCompositeFieldContainer[onnx.NodeProto], scope: set[str]) -> bool:
    """Bring nodes into an order in which each reads what is there, if there is one and they are not; was it needed?

    Among those that could come next it is the file's order. Cost: linear but for a heap.
    """
    known = set(scope)
    for node in nodes:
        if not all(name in known or not name for name in node.input):
            break
        known.update(node.output)
    else:
        return False
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    waits = [{maker[name] for name in reads(node) if name in maker and name not in scope} for node in nodes]
    readers: dict[int, list[int]] = {}
    for i, before in enumerate(waits):
        for j in before:
            readers.setdefault(j, []).append(i)
    left = [len(before) for before in waits]
    ready = [i for i, n in enumerate(left) if n == 0]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in readers.get(i, ()):
            left[j] -= 1
            if left[j] == 0:
                heapq.heappush(ready, j)
    if len(order) < len(nodes):
        return False  # a cycle: told where it is met
    ordered = [nodes[i] for i in order]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in ordered]
    del nodes[:]
    nodes.extend(copies)
    return True


def _check_operator(
    node: onnx.NodeProto, at: str, functions: Mapping[FunctionKey, onnx.FunctionProto], opsets: Mapping[str, int]
) -> None:
    domain = domain_of(node.domain)
    if (domain, node.op_type, node.overload) in functions:
        return
    if domain not in KNOWN_DOMAINS | RUNTIME_DOMAINS or (domain in RUNTIME_DOMAINS and node.op_type in _FOREIGN_CODE):
        what = "unknown domain" if domain not in RUNTIME_DOMAINS else "domain"
        raise UnknownOperatorError(
            where=at,
            problem=f"operator '{shown(node.op_type)}' of {what} '{shown(domain)}'",
            remedy="Weft loads no custom operators: export them as model-local functions",
        )
    version = opsets.get(domain)
    if version is None:
        raise OpsetError(
            where=at, problem=f"domain '{shown(domain) or 'ai.onnx'}' is not imported", remedy="add its opset_import"
        )
    if domain in RUNTIME_DOMAINS:
        return
    if not onnx.defs.has(node.op_type, domain):
        raise UnknownOperatorError(
            where=at,
            problem=f"no operator '{shown(node.op_type)}' in version {version} of '{shown(domain) or 'ai.onnx'}'",
            remedy="is it misspelt, or newer than the installed onnx?",
        )
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        raise UnknownOperatorError(
            where=at,
            problem=f"operator '{shown(node.op_type)}' does not exist in version {version} of its domain",
            remedy="correct the opset_import",
        ) from None
    _check_schema(node, at, schema)


def _check_schema(node: onnx.NodeProto, at: str, schema: onnx.defs.OpSchema) -> None:
    if not schema.min_input <= len(node.input) <= schema.max_input:
        raise BadGraphError(
            where=at,
            problem=f"{len(node.input)} inputs, {schema.name} takes {schema.min_input} to {schema.max_input}",
            remedy="export the model again",
        )
    if not schema.min_output <= len(node.output) <= schema.max_output:
        raise BadGraphError(
            where=at,
            problem=f"{len(node.output)} outputs, {schema.name} has {schema.min_output} to {schema.max_output}",
            remedy="export the model again",
        )
    known = schema.attributes
    given = set()
    for attribute in node.attribute:
        given.add(attribute.name)
        spec = known.get(attribute.name)
        if spec is None:
            if attribute.name == "consumed_inputs":  # opset 6 and older: a hint without a meaning
                continue
            raise BadAttributeError(
                where=at,
                problem=f"{schema.name} of version {schema.since_version} has no attribute '{shown(attribute.name)}'",
                remedy="remove it, or correct the opset_import",
            )
        want = int(spec.type.value) if hasattr(spec.type, "value") else int(spec.type)  # type: ignore[call-overload]
        if attribute.type not in (want, AP.UNDEFINED):
            raise BadAttributeError(
                where=at,
                problem=f"attribute '{shown(attribute.name)}' is {_type_name(attribute.type)}, not {_type_name(want)}",
                remedy="export the model again",
            )
    missing = [name for name, spec in known.items() if spec.required and name not in given]
    if missing:
        raise BadAttributeError(
            where=at, problem=f"attribute '{missing[0]}' is missing", remedy="the operator needs it: export again"
        )


def _type_name(kind: int) -> str:
    try:
        return str(AP.AttributeType.Name(kind))
    except ValueError:
        return f"number {kind}"


def _check_attributes(node: onnx.NodeProto, at: str) -> None:
    """One payload each, of the declared type, no name twice."""
    seen: set[str] = set()
    for attribute in node.attribute:
        _text(at, attribute.name, attribute.ref_attr_name)
        if attribute.name in seen or not attribute.name:
            raise BadAttributeError(
                where=at, problem=f"attribute '{shown(attribute.name)}' is given twice or unnamed", remedy="keep one"
            )
        seen.add(attribute.name)
        field = _PAYLOAD.get(attribute.type)
        if field is None:
            raise BadAttributeError(
                where=at,
                problem=f"attribute '{shown(attribute.name)}' has type {_type_name(attribute.type)}",
                remedy="export the model again",
            )
        if attribute.ref_attr_name:
            continue
        others = [f for f in ("t", "g", "sparse_tensor", "tp") if f != field and attribute.HasField(f)]
        others += [
            f
            for f in ("floats", "ints", "strings", "tensors", "graphs", "sparse_tensors", "type_protos")
            if f != field and len(getattr(attribute, f))
        ]
        if others or (field in _SINGULAR and not attribute.HasField(field)):
            raise BadAttributeError(
                where=at,
                problem=f"attribute '{shown(attribute.name)}' says {_type_name(attribute.type)}, holds something else",
                remedy="export the model again",
            )


def subgraphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """The graphs inside an attribute."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def walk_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """All nodes, those of subgraphs included; the nesting was bounded before."""
    stack = [iter(nodes)]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            continue
        yield node
        for attribute in node.attribute:
            stack.extend(iter(sub.node) for sub in subgraphs(attribute))


def _check_calls(functions: Mapping[FunctionKey, onnx.FunctionProto], limits: Limits) -> None:
    """No recursion, bounded depth; iterative, since a chain of calls may be thousands long."""
    calls: dict[FunctionKey, list[FunctionKey]] = {}
    for key, f in functions.items():
        targets = ((domain_of(n.domain), n.op_type, n.overload) for n in walk_nodes(f.node))
        calls[key] = [t for t in dict.fromkeys(targets) if t in functions]
    depth: dict[FunctionKey, int] = {}
    active: set[FunctionKey] = set()
    for root in calls:
        stack: list[tuple[FunctionKey, bool]] = [(root, False)]
        while stack:
            key, done = stack.pop()
            if done:
                active.discard(key)
                depth[key] = 1 + max((depth[c] for c in calls[key]), default=0)
                continue
            if key in depth:
                continue
            if key in active:
                raise BadFunctionError(
                    where=f"function '{shown(key[1])}'", problem="calls itself", remedy="ONNX functions cannot recurse"
                )
            active.add(key)
            stack.append((key, True))
            for c in calls[key]:
                if c in active:
                    raise BadFunctionError(
                        where=f"function '{shown(c[1])}'",
                        problem="calls itself, directly or through others",
                        remedy="ONNX functions cannot recurse",
                    )
                if c not in depth:
                    stack.append((c, False))
    worst = max(depth.values(), default=0)
    if worst > limits.call_depth:
        raise BadFunctionError(
            problem=f"function calls are nested {worst} deep, the limit is {limits.call_depth}",
            remedy=f"inline functions before the export, or {raised_by('call_depth')}",
        )
