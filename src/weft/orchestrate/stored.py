"""Which values of a graph lie in memory, and who reads them: the graph with its FREE primitives taken out.

Free primitives (constants, broadcasts, reshapes, iotas) are index maps of whoever reads through them.
A *stored value* is a node that can stand in memory: a non-free primitive, a graph input, or a large constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import FREE, Prim
from weft.ir.remembered import while_it_lives
from weft.orchestrate.abstract import Dag

INLINE_ELEMENTS = 16
"""Constants of at most so many elements are written into the text of a kernel; larger ones are weights."""


def is_weight(graph: Graph, node: NodeId) -> bool:
    """True for a constant that kernels read from memory."""
    return graph.nodes[node].prim is Prim.CONSTANT and graph.nodes[node].type.size > INLINE_ELEMENTS


def is_leaf(graph: Graph, node: NodeId) -> bool:
    """True for a value that stands in memory before any kernel runs: a graph input or a weight."""
    return graph.nodes[node].prim is Prim.INPUT or is_weight(graph, node)


def tables_inside(graph: Graph, members: Mask) -> Mask:
    """Constants that a kernel of these members holds itself: where a convolution's image is read (upsampling).

    A template must know them to write addresses; as weights, which are read from memory, they would be of no use to it.
    """
    tables, readers, convolutions = _image_tables(graph)
    if not members & convolutions or not members & readers:
        return 0
    return mask_of(
        t for t, gathers, all_readers in tables if members & gathers and not members & all_readers & ~gathers
    )


@while_it_lives
def _image_tables(graph: Graph) -> tuple[tuple[tuple[NodeId, Mask, Mask], ...], Mask, Mask]:
    """(table, the gathers whose indices it is, all its readers) of constants; those gathers; all convolutions."""
    users = graph.users()
    gathers: dict[NodeId, Mask] = {}
    for i, n in enumerate(graph.nodes):
        if n.prim is Prim.GATHER and is_weight(graph, n.inputs[1]) and n.inputs[0] != n.inputs[1]:
            gathers[n.inputs[1]] = gathers.get(n.inputs[1], 0) | 1 << i
    tables = tuple((t, mask, mask_of(users[t])) for t, mask in gathers.items())
    convolutions = mask_of(i for i, n in enumerate(graph.nodes) if n.prim is Prim.CONV)
    return tables, mask_of(i for _, mask, _ in tables for i in bits(mask)), convolutions


def stored_root(graph: Graph, node: NodeId) -> NodeId:
    """The value in memory behind a chain of reshapes and broadcasts; the node itself where there is none.

    A graph output that is free is read from its root: as a view for reshapes, by copying for the others.
    """
    while graph.nodes[node].prim in (Prim.RESHAPE, Prim.BROADCAST):
        node = graph.nodes[node].inputs[0]
    return node


def named_results(graph: Graph) -> Mask:
    """The values in memory behind what source operators give: what lies there if each is a kernel of its own."""
    return mask_of(stored_root(graph, r) for origin in graph.origins for r in origin.results if r >= 0)


@dataclass(frozen=True, slots=True)
class Stored:
    """Reads between stored values."""

    work: Mask
    """Non-free primitives that the graph's outputs depend on."""
    leaves: Mask
    """Graph inputs and weights."""
    reads: tuple[Mask, ...]
    """Per node: the stored values that it reads, through free nodes."""
    results: Mask
    """Non-free primitives whose value the graph returns."""
    dag: Dag
    """Over all node ids; only non-free primitives have edges."""

    @staticmethod
    def of(graph: Graph, instead: Mapping[NodeId, NodeId] | None = None) -> Stored:
        """The stored values of a graph; every reader of `a` reads `instead[a]`.

        Raises:
            ValueError: the replacements close a cycle.
        """
        instead = instead or {}
        leaves = mask_of(i for i in range(len(graph)) if is_leaf(graph, i))
        reads: list[Mask] = []
        stored = leaves | mask_of(i for i, n in enumerate(graph.nodes) if n.prim not in FREE)
        for node in graph.nodes:
            mask = 0
            for operand in node.inputs:
                mask |= 1 << instead.get(operand, operand) if stored >> operand & 1 else reads[operand]
            reads.append(mask)
        results = 0
        for output in graph.outputs:
            root = stored_root(graph, output)
            results |= 1 << instead.get(root, root)
        live = frontier = results
        while frontier:
            grown = 0
            for v in bits(frontier & stored & ~leaves):
                grown |= reads[v]
            frontier = grown & ~live
            live |= frontier
        work = live & stored & ~leaves
        producers = [reads[v] & work if work >> v & 1 else 0 for v in range(len(graph))]
        order = topological(producers) if instead else None
        return Stored(work, leaves, tuple(reads), results & work, Dag.of(producers, order))

    def inputs_of(self, members: Mask) -> Mask:
        """Stored values outside a set that its members read."""
        found = 0
        for m in bits(members):
            found |= self.reads[m]
        return found & ~members


def topological(producers: list[Mask]) -> list[NodeId]:
    """An order in which producers stand first, smallest id first among the ready.

    Raises:
        ValueError: there is a cycle.
    """
    order: list[NodeId] = []
    done = 0
    state = [0] * len(producers)
    for root in range(len(producers)):
        stack = [root]
        while stack:
            v = stack[-1]
            if done >> v & 1:
                stack.pop()
                continue
            waiting = list(bits(producers[v] & ~done))
            if not waiting:
                stack.pop()
                done |= 1 << v
                order.append(v)
                continue
            if state[v]:
                raise ValueError(f"cycle through {v}")
            state[v] = 1
            stack.extend(reversed(waiting))
    return order


def origin_cover(graph: Graph, stored: Stored, index: int) -> tuple[Mask, Mask] | None:
    """Non-free primitives between the operands and the results of a source operator, and the results among them.

    None where a result is gone, or where the walk back from the results meets a graph input that is no operand.
    """
    origin = graph.origins[index]
    if not origin.rule or not origin.results or min(origin.results) < 0:
        return None
    stop = set(origin.operands)
    members = 0
    seen: set[NodeId] = set()
    waiting = list(origin.results)
    if stop & set(waiting):
        return None  # an operator that gave back its operand
    while waiting:
        node = waiting.pop()
        if node in seen or node in stop:
            continue
        seen.add(node)
        if graph.nodes[node].prim is Prim.INPUT:
            return None
        members |= 1 << node & stored.work
        waiting.extend(graph.nodes[node].inputs)
    outputs = mask_of(stored_root(graph, r) for r in origin.results) & members
    return (members, outputs) if outputs else None
