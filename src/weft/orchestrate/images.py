"""Which values may lie in memory in more than one order."""

from __future__ import annotations

from weft.ir.graph import Graph, Mask, Node, NodeId
from weft.ir.passes.compose_casts import turns_to_first
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.remembered import while_it_lives
from weft.kernels.formats import Format, formats_of

_KEEPS_ORDER = frozenset({Prim.SLICE, Prim.CONCAT, Prim.PAD, Prim.GATHER, Prim.BROADCAST})


def formats_in(graph: Graph, node: NodeId) -> tuple[Format, ...]:
    """Formats worth considering for a value of a graph: two for images, row-major else.

    An image is a value that `kernels.formats.formats_of` allows both, and that is connected with a convolution or a
    window over primitives which keep the order of dimensions, or that a product makes pixel by pixel. Attention heads
    have the shape but not the use: there the second format would only double the kernels to measure. Weights have none:
    generators repack them.
    """
    return formats_of(graph.type_of(node)) if image_values(graph) >> node & 1 else (Format.ROW,)


@while_it_lives
def image_values(graph: Graph) -> Mask:
    """Values connected with a convolution or window; constants are not among them."""
    users = graph.users()
    found = 0
    waiting: list[NodeId] = []

    def reach(node: NodeId) -> None:
        nonlocal found
        n = graph.nodes[node]
        if not found >> node & 1 and n.prim is not Prim.CONSTANT and n.type.rank == 4:
            found |= 1 << node
            waiting.append(node)

    for i, n in enumerate(graph.nodes):
        if n.prim is Prim.CONV or CATEGORY[n.prim] is Category.WINDOW:
            reach(i)
            reach(n.inputs[0])
        elif _of_pixels(graph, n):
            reach(i)
    while waiting:
        node = waiting.pop()
        if _keeps_order(graph, node):
            for operand in graph.nodes[node].inputs:
                reach(operand)
        for user in users[node]:
            if _keeps_order(graph, user):
                reach(user)
    return found


def _of_pixels(graph: Graph, node: Node) -> bool:
    """Whether a value is the rows of a product, as an image: what stands for a convolution of one tap."""
    if not turns_to_first(node):
        return False
    rows = node.inputs[0]
    while graph.nodes[rows].prim in (Prim.RESHAPE, Prim.PAD, Prim.SLICE):
        rows = graph.nodes[rows].inputs[0]
    return graph.nodes[rows].prim is Prim.MATMUL


def _keeps_order(graph: Graph, node: NodeId) -> bool:
    prim = graph.nodes[node].prim
    return prim in _KEEPS_ORDER or CATEGORY[prim] in (Category.ELEMENTWISE, Category.REDUCE)
