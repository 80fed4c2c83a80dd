"""Gradients of embedding tables with the optimizer's update of the table behind them, as candidates.

An opaque call stands alone elsewhere. The kernel that sums rows of a table can update them in the same turn: the
gradient, which is as large as the table, is neither written nor read. Only where nobody else reads the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.graph import Graph, Mask, NodeId, bits
from weft.ir.opaque import embedding_table
from weft.ir.prims import CATEGORY, Category
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.stored import Stored


def updated_tables(graph: Graph, stored: Stored, most: int) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, those that are written, `most` of them): the call, what is elementwise behind it, and what that reads.

    All but the call's operands is of the table's shape, or of one element and computed elsewhere; the sets are convex.
    """
    for call in bits(stored.work):
        if embedding_table(graph.nodes[call].attrs) is None:
            continue
        members = _with_operands(graph, stored, call, _behind(graph, stored, call))
        written = stored.dag.written(members, stored.results)
        outside = stored.inputs_of(members & ~(1 << call))
        sizes = {graph.type_of(call).size, 1}
        if members == 1 << call or written >> call & 1 or written.bit_count() > most or stored.dag.missing(members):
            continue
        if all(graph.type_of(v).size in sizes for v in bits(outside)):
            yield members, tuple(bits(written))


def _behind(graph: Graph, stored: Stored, call: NodeId) -> Mask:
    """The call and all that is computed of it element by element."""
    found = frontier = 1 << call
    while frontier:
        readers = 0
        for v in bits(frontier):
            readers |= stored.dag.consumers[v]
        frontier = _elementwise(graph, readers & ~found, call)
        found |= frontier
    return found


def _with_operands(graph: Graph, stored: Stored, call: NodeId, members: Mask) -> Mask:
    """With elementwise values that only members behind the call read."""
    frontier = members & ~(1 << call)
    while frontier:
        operands = 0
        for v in bits(frontier):
            operands |= stored.dag.producers[v]
        operands = _elementwise(graph, operands & ~members & ~stored.results, call)
        frontier = 0
        for v in bits(operands):
            if not stored.dag.consumers[v] & ~members:
                frontier |= 1 << v
        members |= frontier
    return members


def _elementwise(graph: Graph, values: Mask, call: NodeId) -> Mask:
    """Those that are elementwise and of as many elements as the call's result."""
    size, found = graph.type_of(call).size, 0
    for v in bits(values):
        if CATEGORY[graph.nodes[v].prim] is Category.ELEMENTWISE and graph.type_of(v).size == size:
            found |= 1 << v
    return found


EMBEDDING_UPDATE = Idiom(
    name="embedding_update",
    patterns=("embedding_gradient",),
    find=lambda scene: updated_tables(scene.graph, scene.stored, scene.limits.max_outputs),
    multiplied=None,
    most_inputs=16,
)
