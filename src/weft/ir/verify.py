"""The invariants of a graph, each checked by name. A violation is a bug of ours, never of the user's."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, digest_of
from weft.ir.prims import Prim
from weft.ir.shapes import ShapeError, infer


def verify_graph(graph: Graph, *, data: bool = False) -> None:
    """Check every invariant of a graph; with `data` also hash the constants again.

    Cost: linear in nodes and edges; with `data` also in the bytes of the constants.

    Raises:
        InvalidGraphError: names the first broken rule; the graph's text is attached as a note [W901].
    """
    problem = next(_problems(graph, data), None)
    if problem is None:
        return
    error = InvalidGraphError(problem=problem)
    try:
        text = str(graph)
    except Exception as failure:  # a graph too broken to print must not hide what is wrong with it
        text = f"(the graph cannot be printed: {failure!r})"
    error.add_note(text)
    raise error


def _problems(graph: Graph, data: bool) -> Iterator[str]:
    yield from _node_problems(graph)
    yield from _constant_problems(graph, data)
    yield from _signature_problems(graph)
    yield from _origin_problems(graph)


def _node_problems(graph: Graph) -> Iterator[str]:
    for i, node in enumerate(graph.nodes):
        for j in node.inputs:
            if not 0 <= j < i:
                yield f"%{i} reads %{j}, which does not stand before it"
        if not isinstance(node.attrs, a.ATTRS[node.prim]):
            yield f"%{i} = {node.prim.value} carries {type(node.attrs).__name__}"
        if node.prim in (Prim.INPUT, Prim.CONSTANT):
            if node.inputs:
                yield f"%{i} = {node.prim.value} has operands"
            if min(node.type.shape, default=0) < 0:
                yield f"%{i} has the negative shape {node.type}"
            continue  # a source has no type rule
        try:
            inferred = infer(node.prim, tuple(graph.nodes[j].type for j in node.inputs), node.attrs)
        except ShapeError as error:
            yield f"%{i} = {node.prim.value}: {error}"
            continue  # without a type there is nothing to compare
        if inferred != node.type:
            yield f"%{i} = {node.prim.value} gives {inferred} but says {node.type}"


def _constant_problems(graph: Graph, data: bool) -> Iterator[str]:
    for i, node in enumerate(graph.nodes):
        if not isinstance(node.attrs, a.ConstantAttrs):
            continue  # not a constant
        digest = node.attrs.digest
        array = graph.constants.get(digest)
        if array is None:
            yield f"the data of constant %{i} are missing"
            continue  # nothing to look at
        if array.dtype != node.type.dtype.numpy or array.shape != node.type.shape:
            yield f"constant %{i} is {node.type}, its data are {array.dtype} {array.shape}"
        if array.flags.writeable:
            yield f"the data of constant %{i} can be written"
        if data and digest_of(node.type.dtype, array) != digest:
            yield f"the data of constant %{i} are not those of its digest"


def _signature_problems(graph: Graph) -> Iterator[str]:
    nodes = graph.nodes
    for k, i in enumerate(graph.inputs):
        if not (0 <= i < len(nodes) and nodes[i].prim is Prim.INPUT):
            yield f"input {k} is %{i}, which is no input node"
            continue  # no attributes to look at
        attrs = nodes[i].attrs
        if isinstance(attrs, a.InputAttrs) and attrs.index != k:
            yield f"input {k} is %{i}, whose index is {attrs.index}"
    num_inputs = sum(node.prim is Prim.INPUT for node in nodes)
    if num_inputs != len(graph.inputs) or len(set(graph.inputs)) != len(graph.inputs):
        yield f"{num_inputs} input nodes, but the signature lists {len(graph.inputs)}"
    for k, i in enumerate(graph.outputs):
        if not 0 <= i < len(nodes):
            yield f"output {k} is %{i}, which does not exist"
    for what, names, number in (
        ("input", graph.input_names, len(graph.inputs)),
        ("output", graph.output_names, len(graph.outputs)),
    ):
        if len(names) not in (0, number):
            yield f"{len(names)} {what} names for {number} {what}s"


def _origin_problems(graph: Graph) -> Iterator[str]:
    for i, node in enumerate(graph.nodes):
        if not -1 <= node.origin < len(graph.origins):
            yield f"%{i} comes from origin @{node.origin}, which does not exist"
    for k, origin in enumerate(graph.origins):
        for least, named in ((-2, origin.operands), (-1, origin.results)):  # absent or no longer there
            for j in named:
                if not least <= j < len(graph.nodes):
                    yield f"origin @{k} names %{j}, which does not exist"
