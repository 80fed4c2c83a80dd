"""Rebuilding graphs: copy every live node, replace some, keep the signature, names and origins in step.

Every clean-up pass is a `visit` function; what is true of all of them is written here once: a replacement has the
type of what it replaces, dead nodes go, inputs stay, origins follow their nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId, Origin
from weft.ir.prims import Prim

Visit = Callable[[GraphBuilder, Node, tuple[NodeId, ...]], NodeId | None]
"""(builder, old node, its operands in the builder) -> a node of the builder that replaces it, None to copy it."""

GONE = -1
LOST = -2
"""An operand that was given and is no longer there; an absent one stays -1."""
"""Stands in an origin for a node that is no longer there."""


def live_nodes(graph: Graph) -> list[bool]:
    """For each node whether an output depends on it or it is an input."""
    marked = [node.prim is Prim.INPUT for node in graph.nodes]
    for i in graph.outputs:
        marked[i] = True
    for i in reversed(range(len(graph.nodes))):
        if marked[i]:
            for j in graph.nodes[i].inputs:
                marked[j] = True
    return marked


@final
class Rewriter:
    """Copies a graph node by node into a `GraphBuilder`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = GraphBuilder()
        self.builder.adopt_origins(graph.origins)
        self.mapped: dict[NodeId, NodeId] = {}
        """Old node -> new node, for the nodes that were copied or replaced so far."""
        self.position: NodeId = GONE
        """The old node that is being visited."""
        self.num_replaced = 0

    def run(self, visit: Visit) -> Graph:
        """The rewritten graph. New nodes that `visit` adds count as parts of the origin of the node they replace.

        Raises:
            InvalidGraphError: a replacement of another type than the node it replaces [W901].
        """
        self.walk(visit)
        return self.finish()

    def walk(self, visit: Visit) -> None:
        """Fill the builder; the first half of `run`, after which `num_replaced` is known."""
        live = live_nodes(self.graph)
        for position in self.graph.inputs:
            # inputs go first and in the order of the signature, which numbers them
            self._copy_input(position)
        for position, node in enumerate(self.graph.nodes):
            if live[position] and node.prim is not Prim.INPUT:
                self.mapped[position] = self._step(position, node, visit)

    def _copy_input(self, position: NodeId) -> None:
        node, names = self.graph.nodes[position], self.graph.input_names
        index = len(self.builder)
        name = names[index] if index < len(names) else ""
        is_weight = isinstance(node.attrs, a.InputAttrs) and node.attrs.is_weight
        self.mapped[position] = self.builder.input(node.type, name, is_weight=is_weight)

    def _step(self, position: NodeId, node: Node, visit: Visit) -> NodeId:
        inputs = tuple([self.mapped[j] for j in node.inputs])
        self.position = position
        outer = self.builder.enter(node.origin)
        found = visit(self.builder, node, inputs)
        self.builder.enter(outer)
        if found is None:
            return self.copy(node, inputs)
        if self.builder.type_of(found) != node.type:
            problem = f"%{position} = {node.prim.value} : {node.type} replaced by {self.builder.type_of(found)}"
            raise InvalidGraphError(problem=problem)
        self.num_replaced += 1
        return found

    def copy(self, node: Node, inputs: tuple[NodeId, ...]) -> NodeId:
        """The same node on the builder's operands."""
        if isinstance(node.attrs, a.ConstantAttrs):
            digest = node.attrs.digest
            return self.builder.adopt_constant(digest, self.graph.constants[digest], node.type)
        return self.builder.adopt(node, inputs)

    def finish(self) -> Graph:
        """What was filled in as a graph; the second half of `run`."""
        graph = self.graph
        outputs = [self.mapped[i] for i in graph.outputs]
        built = self.builder.build(outputs, graph.output_names)
        # an origin that `visit` opened already speaks of nodes of the builder
        opened = built.origins[len(graph.origins) :]
        origins = (*(_map_origin(origin, self.mapped) for origin in graph.origins), *opened)
        return compact(replace(built, origins=origins, input_names=graph.input_names))


def _map_nodes(nodes: Sequence[NodeId], mapped: dict[NodeId, NodeId]) -> tuple[NodeId, ...]:
    return tuple([mapped.get(j, GONE) for j in nodes])


def _map_origin(origin: Origin, mapped: dict[NodeId, NodeId]) -> Origin:
    operands = tuple([j if j < 0 else mapped.get(j, LOST) for j in origin.operands])
    results = _map_nodes(origin.results, mapped)
    if operands == origin.operands and results == origin.results:
        return origin
    return Origin(origin.rule, origin.params, operands, results, origin.source, origin.location)


def compact(graph: Graph) -> Graph:
    """The graph without its dead nodes, the constants they held, and the origins that nothing speaks of any more."""
    live = live_nodes(graph)
    mapped: dict[NodeId, NodeId] = {}
    for i, is_live in enumerate(live):
        if is_live:
            mapped[i] = len(mapped)
    kept = [graph.nodes[i] for i in mapped]
    used = {node.origin for node in kept}
    origins: list[Origin] = []
    renumbered = {GONE: GONE}
    for k, origin in enumerate(graph.origins):
        moved = _map_origin(origin, mapped)
        if k in used or any(result != GONE for result in moved.results):
            renumbered[k] = len(origins)
            origins.append(moved)
    nodes = tuple([_renumbered(n, tuple([mapped[j] for j in n.inputs]), renumbered[n.origin]) for n in kept])
    digests = dict.fromkeys(n.attrs.digest for n in nodes if isinstance(n.attrs, a.ConstantAttrs))
    return replace(
        graph,
        nodes=nodes,
        inputs=tuple(mapped[i] for i in graph.inputs),
        outputs=tuple(mapped[i] for i in graph.outputs),
        constants={digest: graph.constants[digest] for digest in digests},
        origins=tuple(origins),
    )


def _renumbered(node: Node, inputs: tuple[NodeId, ...], origin: int) -> Node:
    if inputs == node.inputs and origin == node.origin:
        return node
    return Node(node.prim, inputs, node.attrs, node.type, origin)


def rewrite(graph: Graph, visit: Visit) -> tuple[Graph, int]:
    """The rewritten graph and the number of nodes that `visit` replaced; the old graph itself if that is none."""
    rewriter = Rewriter(graph)
    rewriter.walk(visit)
    return (rewriter.finish(), rewriter.num_replaced) if rewriter.num_replaced else (graph, 0)


Replacement = Callable[[GraphBuilder, Mapping[NodeId, NodeId]], NodeId]
"""(builder, old node -> new node for everything before the replaced one) -> the new node."""


def replace_nodes(graph: Graph, replacements: Mapping[NodeId, Replacement]) -> tuple[Graph, int]:
    """Like `rewrite`, for a pass that has decided on the old graph which nodes to replace."""
    if not replacements:
        return graph, 0
    rewriter = Rewriter(graph)

    def visit(b: GraphBuilder, _: Node, _inputs: tuple[NodeId, ...]) -> NodeId | None:
        make = replacements.get(rewriter.position)
        return None if make is None else make(b, rewriter.mapped)

    return rewriter.run(visit), rewriter.num_replaced
