"""What one call of a GPU's libraries covers, besides a primitive or a source operator: the library plan is made of it.

    products          a product with its bias, then an activation, or a residual and an activation
    rounded once      a sum or a product in f32 between two casts
    views             a primitive, an operator or such a product, with the views in front that it reads as strides

They are told from the graph, not from the source operators, whose operands clean-ups fold: batch normalisation into
weights, weights into the order that a product reads. No generated kernel is looked for in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.orchestrate.stored import Stored, is_leaf, stored_root

ACTIVATIONS = frozenset({"relu", "gelu"})
"""Rules of what libraries apply to a product; whether in this form, the generator knows."""
Call = tuple[Mask, NodeId]
"""Members, and the one whose value is written."""


def library_calls(graph: Graph, stored: Stored, operators: Iterable[Call]) -> list[Call]:
    """The sets, those of views with their products and `operators`: members and result of each source operator."""
    covers = list(operators)
    activations = [(members, sink) for members, sink in covers if graph_rule(graph, sink) in ACTIVATIONS]
    products: list[Call] = []
    for node in bits(stored.work):
        if graph.nodes[node].prim in (Prim.CONV, Prim.MATMUL):
            products += _with_tails(graph, stored, node, activations)
    products += _rounded_once(graph, stored)
    singles = [(1 << node, node) for node in bits(stored.work) if not is_view(graph, node)]
    found = dict.fromkeys(products)
    for members, sink in (*singles, *covers, *products):
        wide = members | views_in_front(graph, stored, members)
        if wide != members:
            found[wide, sink] = None
    return list(found)


def graph_rule(graph: Graph, node: NodeId) -> str:
    """The rule of the source operator that a node is of."""
    origin = graph.nodes[node].origin
    return graph.origins[origin].rule if origin >= 0 else ""


def is_view(graph: Graph, node: NodeId) -> bool:
    """Whether a primitive only says in which order values are read: strides do."""
    attrs = graph.nodes[node].attrs
    return isinstance(attrs, a.TransposeAttrs) or (isinstance(attrs, a.SliceAttrs) and min(attrs.steps) > 0)


def views_in_front(graph: Graph, stored: Stored, members: Mask) -> Mask:
    """The views that the members of a set read through, outside of it."""
    found = 0
    waiting = stored.inputs_of(members) & stored.work
    while waiting:
        grown = 0
        for node in bits(waiting):
            if is_view(graph, node):
                found |= 1 << node
                grown |= stored.reads[node] & stored.work
        waiting = grown & ~found & ~members
    return found


def _with_tails(graph: Graph, stored: Stored, product: NodeId, activations: Sequence[Call]) -> Iterator[Call]:
    """The product with what follows it and reads nothing else but a weight, or one residual."""
    members, at = 1 << product, product
    biased = added = False
    while True:
        yield from (
            (members | tail, sink)
            for tail, sink in activations
            if stored.inputs_of(tail) & stored.work == 1 << at and _only_reader(stored, at, tail)
        )
        following = _only_addition(graph, stored, at)
        if following is None:
            return
        others = stored.reads[following] & ~(1 << at)
        is_bias = bool(others) and all(is_leaf(graph, i) and graph.nodes[i].prim is Prim.CONSTANT for i in bits(others))
        is_bias = is_bias or not others  # a small constant
        if added or (is_bias and biased):
            return
        biased, added = biased or is_bias, not is_bias
        members, at = members | 1 << following, following
        yield members, at


def _rounded_once(graph: Graph, stored: Stored) -> Iterator[Call]:
    for node in bits(stored.work):
        n = graph.nodes[node]
        if n.prim is not Prim.CAST or n.type.dtype not in (DType.F16, DType.BF16):
            continue
        inner = n.inputs[0]
        casts = [i for i in graph.nodes[inner].inputs if graph.nodes[i].prim is Prim.CAST and stored.work >> i & 1]
        if (
            graph.nodes[inner].prim in (Prim.ADD, Prim.MUL)
            and len(casts) == 1
            and _only_reader(stored, inner, 1 << node)
        ):
            yield 1 << node | 1 << inner | 1 << casts[0], node


def _only_reader(stored: Stored, value: NodeId, members: Mask) -> bool:
    return not stored.dag.consumers[value] & ~members and not stored.results >> value & 1


def _only_addition(graph: Graph, stored: Stored, value: NodeId) -> NodeId | None:
    """The addition that alone reads a value."""
    readers = stored.dag.consumers[value]
    if not readers or readers & (readers - 1) or stored.results >> value & 1:
        return None
    (reader,) = bits(readers)
    n = graph.nodes[reader]
    once = sum(stored_root(graph, i) == value for i in n.inputs) == 1
    return reader if n.prim is Prim.ADD and once else None
