"""Which values index a tensor, and within what: `Options(check_indices=True)` has plans give them out to be checked.

What is checked is what the model gave: an index that the rules count from the end where it is negative is looked for in
front of that (`fission.rule.as_index`), part by part where several make one position. Values that depend on no input,
and positions of a maximum, are not checked. Opaque operators check what they are given themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from weft.frontends.imported import Imported
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.plan import IndexCheck

_SCATTERS = re.compile(r"\((Scatter|ScatterElements)\)$")
"""Operators that compare their indices with every position instead of following them."""
_KEEPS_ORDER = frozenset({Prim.CAST, Prim.RESHAPE})


def with_checks(imported: Imported) -> tuple[Imported, tuple[IndexCheck, ...]]:
    """The same model with the values of its indices as further outputs, and what is to be checked of each."""
    graph = imported.graph
    found = list(dict.fromkeys(_found(graph)))
    if not found:
        return imported, ()
    places: dict[NodeId, int] = {}
    for node, *_ in found:
        places.setdefault(node, len(graph.outputs) + len(places))
    outputs = (*graph.outputs, *places)
    names = (*graph.output_names, *[""] * (len(outputs) - len(graph.output_names))) if graph.output_names else ()
    checks = tuple(
        IndexCheck(places[node], low, bound, what, _input_of(graph, node)) for node, low, bound, what in found
    )
    return replace(imported, graph=replace(graph, outputs=outputs, output_names=names)), checks


def _found(graph: Graph) -> Iterator[tuple[NodeId, int, int, str]]:
    """(values, the least index, the first that is too large, operator) of everything that is indexed at run time."""
    varies = _varying(graph)
    for i, node in enumerate(graph.nodes):
        source = graph.origins[node.origin].source if node.origin >= 0 else ""
        wrapped = _wrapped(graph, i) if varies[i] and _SCATTERS.search(source) else None
        if wrapped is not None:
            yield wrapped[0], -wrapped[1], wrapped[1], source
        if not isinstance(node.attrs, a.GatherAttrs) or not varies[node.inputs[1]]:
            continue
        size = graph.type_of(node.inputs[0]).shape[node.attrs.axis]
        parts = list(_parts(graph, node.inputs[1]))
        for values, bound in parts:
            if varies[values] and not _is_position(graph, values, bound):
                yield values, -bound, bound, source
        if not parts and not _is_position(graph, node.inputs[1], size):
            yield node.inputs[1], 0, size, source


def _varying(graph: Graph) -> list[bool]:
    """For each node whether it depends on an input."""
    varies: list[bool] = []
    for node in graph.nodes:
        varies.append(node.prim is Prim.INPUT or any(varies[j] for j in node.inputs))
    return varies


def _wrapped(graph: Graph, i: NodeId) -> tuple[NodeId, int] | None:
    """(x, n) where a node is select(x < 0, x + n, x)."""
    node = graph.nodes[i]
    if node.prim is not Prim.SELECT:
        return None
    condition, moved, x = node.inputs
    less, added = graph.nodes[condition], graph.nodes[moved]
    if less.prim is not Prim.LT or less.inputs[0] != x or _number(graph, less.inputs[1]) != 0:
        return None
    if added.prim is not Prim.ADD or x not in added.inputs:
        return None
    size = _number(graph, added.inputs[1] if added.inputs[0] == x else added.inputs[0])
    return None if size is None else (x, size)


def _number(graph: Graph, i: NodeId) -> int | None:
    """The integer that a constant of one element holds, repeated or not."""
    while graph.nodes[i].prim in (Prim.BROADCAST, Prim.RESHAPE):
        i = graph.nodes[i].inputs[0]
    node = graph.nodes[i]
    if node.prim is not Prim.CONSTANT or node.type.size != 1 or node.type.dtype.is_float:
        return None
    return int(graph.constant(i).reshape(-1)[0])


def _parts(graph: Graph, root: NodeId) -> Iterator[tuple[NodeId, int]]:
    """The (x, n) of which arithmetic makes an index, each once."""
    seen: set[NodeId] = set()
    stack = [root]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        found = _wrapped(graph, i)
        if found is not None:
            yield found
        elif CATEGORY[graph.nodes[i].prim] in (Category.ELEMENTWISE, Category.VIEW, Category.BROADCAST):
            stack.extend(graph.nodes[i].inputs)


def _is_position(graph: Graph, i: NodeId, bound: int) -> bool:
    """A position along an axis that is no longer than what it indexes."""
    while graph.nodes[i].prim in (Prim.RESHAPE, Prim.BROADCAST, Prim.CAST):
        i = graph.nodes[i].inputs[0]
    node = graph.nodes[i]
    return isinstance(node.attrs, a.ArgAttrs) and graph.type_of(node.inputs[0]).shape[node.attrs.axis] <= bound


def _input_of(graph: Graph, i: NodeId) -> int:
    """The graph's input whose elements these are, in its order; -1: they are computed."""
    while graph.nodes[i].prim in _KEEPS_ORDER:
        i = graph.nodes[i].inputs[0]
    return graph.inputs.index(i) if i in graph.inputs else -1
