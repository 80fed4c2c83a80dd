"""Cuts a model in two (`Partition`): imports what has primitives, and gathers the rest as a model of ONNX Runtime's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from weft.errors import LimitError, UnsupportedError
from weft.frontends.onnx.call import ABSENT, Scope
from weft.frontends.onnx.check import domain_of, reads
from weft.frontends.onnx.errors import NoRuntimeError, UnsupportedTypeError
from weft.frontends.onnx.importer import Importer, live
from weft.frontends.onnx.names import kept, shown
from weft.frontends.onnx.partition import Partition
from weft.frontends.onnx.tensors import tensors_of_model, to_proto, type_proto
from weft.frontends.onnx.trial import MOST_BYTES
from weft.ir.attrs import InputAttrs
from weft.ir.prims import Prim

_NAME_BYTES = 100
_MAX_UNPOOL_SIZED = 3
"""Operands of a MaxUnpool that is told the size of its result: ONNX Runtime (1.32) puts values elsewhere then."""
_NO_NUMBERS = (onnx.TensorProto.STRING, onnx.TensorProto.BFLOAT16)
"""What ONNX Runtime gives as no array of numbers."""


@dataclass(slots=True)
class _Cut:
    """Which nodes of the model's own graph are left."""

    nodes: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """What they give."""


def partitioned(importer: Callable[[], Importer]) -> Partition:
    """The model as two; `importer` makes a new import of it each time.

    Raises:
        UnsupportedError: no operator can be left to ONNX Runtime, or what it needs cannot be handed to it.
        ModelError: see `errors`.
    """
    left: set[int] = set()
    while True:
        im = importer()
        scope = im.begin()
        cut = _cut(im, scope, left)
        more = _lists_and_foreign(im, scope, cut)
        if not more:
            return _made(im, scope, cut)
        left |= more


def _cut(im: Importer, scope: Scope, left: set[int]) -> _Cut:
    """Import what can be, but for the nodes that are `left` already."""
    graph = im.checked.model.graph
    cut = _Cut()
    for i in live(graph.node, {o.name for o in graph.output}):
        node = graph.node[i]
        if i not in left and not reads(node) & cut.names:
            before = im.operators, Counter(im.opaque), dict(im.guards)
            try:
                im.node(node, i, scope)
                continue
            except NoRuntimeError:
                raise
            except UnsupportedError:
                im.operators, im.opaque, im.guards = before
        cut.nodes.append(i)
        cut.names.update(name for name in node.output if name)
    return cut


def _lists_and_foreign(im: Importer, scope: Scope, cut: _Cut) -> set[int]:
    """Nodes whose results go to the other side, or out, and are no tensors of ours."""
    graph = im.checked.model.graph
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    found = set()
    for name in [*_read(graph, cut), *(o.name for o in graph.output if o.name not in cut.names)]:
        if not isinstance(scope.names.get(name, ABSENT), int) and name in maker:
            found.add(maker[name])
    return found


def _read(graph: onnx.GraphProto, cut: _Cut) -> list[str]:
    """Names that nodes which are left read, and others give, in the order in which they are first read."""
    names: dict[str, None] = {}
    for i in cut.nodes:
        names.update(dict.fromkeys(sorted(reads(graph.node[i]))))
    return [name for name in names if name and name not in cut.names]


def _made(im: Importer, scope: Scope, cut: _Cut) -> Partition:
    graph = im.checked.model.graph
    ours: dict[str, int] = {}
    """Outputs of the first partition, by name."""
    fed: list[int] = []
    inputs: list[onnx.ValueInfoProto] = []
    constants: dict[str, onnx.TensorProto] = {}
    dense = {t.name: t for t in graph.initializer}
    sparse = {s.values.name: s for s in graph.sparse_initializer}
    names = _read(graph, cut)
    for name in names:
        value = scope.names.get(name)
        if name in sparse or value == ABSENT or value is None:
            continue
        if name in dense and name not in im.initializers:
            constants[name] = dense[name]
        elif not isinstance(value, int):
            raise _not_handed(name, "ONNX Runtime would have to be handed it")
        elif not im.depends(value) and (known := im.known(value)) is not None:
            constants[name] = to_proto(known, im.b.type_of(value).dtype, name)
        else:
            node = im.b.node(value)
            inputs.append(onnx.helper.make_value_info(name, type_proto(node.type)))
            if node.prim is Prim.INPUT and isinstance(node.attrs, InputAttrs):
                fed.append(-1 - node.attrs.index)
            else:
                fed.append(ours.setdefault(name, len(ours)))
    outputs = [o for o in graph.output if o.name in cut.names]
    theirs = {o.name: k for k, o in enumerate(outputs)}
    results = []
    for o in graph.output:
        if o.name in theirs:
            results.append(theirs[o.name])
        else:
            im.output(o, scope.names[o.name])
            results.append(-1 - ours.setdefault(o.name, len(ours)))
    for o in outputs:
        if o.type.WhichOneof("value") not in (None, "tensor_type") or o.type.tensor_type.elem_type in _NO_NUMBERS:
            raise _not_handed(o.name, "it is no tensor of numbers")
    nodes = [graph.node[i] for i in cut.nodes]
    for node in nodes:
        if node.op_type == "MaxUnpool" and len(node.input) == _MAX_UNPOOL_SIZED:
            raise _not_handed(node.output[0], "ONNX Runtime's MaxUnpool with a size of its result is not ONNX's")
    rest = _model(im, nodes, inputs, outputs, constants, [sparse[n] for n in names if n in sparse])
    # of `compiled` each output is there once, whoever reads it
    values = [scope.names[name] for name in ours]
    compiled = im.finish([v for v in values if isinstance(v, int)], list(ours))
    counts = Counter(kept(f"{domain_of(n.domain)}::{n.op_type}".removeprefix("::"), _NAME_BYTES) for n in nodes)
    return Partition(compiled, rest, tuple(fed), tuple(results), dict(counts))


def _not_handed(name: str, reason: str) -> UnsupportedTypeError:
    return UnsupportedTypeError(where=f"value '{shown(name)}'", op="", what="it", type="of its own", reason=reason)


def _model(
    im: Importer,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Mapping[str, onnx.TensorProto],
    sparse: Sequence[onnx.SparseTensorProto],
) -> bytes:
    """The second partition with its data.

    Raises:
        LimitError: it is too large [W105].
    """
    whole = im.checked.model
    graph = onnx.helper.make_graph(nodes, "rest", inputs, outputs)
    graph.initializer.extend(constants.values())
    graph.sparse_initializer.extend(sparse)
    made = onnx.helper.make_model(graph, opset_imports=whole.opset_import, ir_version=whole.ir_version)
    made.functions.extend(whole.functions)
    size = made.ByteSize()
    for where, t in tensors_of_model(made):
        size += im.reader.inline(t, where)
        if size > MOST_BYTES:
            raise LimitError(
                problem=f"what ONNX Runtime is to run has over {MOST_BYTES} bytes",
                remedy="export the model without operators whose results have sizes of their own",
            )
    data: bytes = made.SerializeToString()
    return data
