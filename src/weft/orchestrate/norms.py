"""A norm in the kernel of a product, as candidates: before it, on the way of its left operand; or the sums behind it.

A group that grows holds nothing computed in front of a product. Here the norm's primitives are members of the product
that reads its result, which is not written then, or is a further output where others read it; and the partial sums that
a following norm needs (`alternatives.norms`) are outputs of the product before. Kernels: the templates' `normed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.separable import behind
from weft.orchestrate.stored import Stored, is_weight, stored_root

HALVES = (DType.F16, DType.BF16)
OWN_LONGEST = 64
"""Elements of rows whose means and variances a product may compute by itself: beyond, every block of columns doing so
costs more than the norm's own kernel (measured on an NVIDIA H200, docs/performance.md)."""
LONGEST, PIECE = 2048, 32
NORM = frozenset({Prim.CAST, Prim.ADD, Prim.SUB, Prim.MUL, Prim.RSQRT, Prim.REDUCE_SUM})
MOST = 20
"""Primitives of a norm."""


def norm_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, those that are written): products with the norm in front of them, and those that leave sums."""
    for v in bits(stored.work):
        if graph.nodes[v].prim is not Prim.MATMUL or not is_weight(graph, stored_root(graph, graph.nodes[v].inputs[1])):
            continue
        value, norm = _in_front(graph, stored, v)
        whole = any(graph.type_of(j).size == graph.type_of(value).size for u in bits(norm) for j in _summed(graph, u))
        if not norm or (whole and graph.type_of(value).shape[-1] > OWN_LONGEST):
            continue
        after, sink = behind(graph, stored, v)
        shared = stored.dag.consumers[value] & ~(1 << v) or stored.results >> value & 1
        # what is behind may also be part of what reads it: heads of attention add their biases themselves
        for members, last in {norm | 1 << v | after: sink, norm | 1 << v: v}.items():
            if _apart(stored, members, (last, value)):
                yield members, (last,)
                if shared:
                    yield members, tuple(sorted((last, value)))
    yield from _leaving(graph, stored)


def _summed(graph: Graph, node: NodeId) -> tuple[NodeId, ...]:
    return graph.nodes[node].inputs if graph.nodes[node].prim is Prim.REDUCE_SUM else ()


def _apart(stored: Stored, members: Mask, written: tuple[NodeId, ...]) -> bool:
    """Whether what is between members needs nothing that they write: a cast is part of them and of sums of pieces."""
    between = stored.dag.missing(members)
    return not any(between & stored.dag.descendants[w] for w in written)


def _in_front(graph: Graph, stored: Stored, product: NodeId) -> tuple[NodeId, Mask]:
    """The normalised value that a product reads, and the norm's primitives; an empty mask where there is no norm."""
    value = graph.nodes[product].inputs[0]
    while graph.nodes[value].prim is Prim.RESHAPE:
        value = graph.nodes[value].inputs[0]
    node = graph.nodes[value]
    shape = node.type.shape
    if not stored.work >> value & 1 or CATEGORY[node.prim] is not Category.ELEMENTWISE or len(shape) < 2:
        return value, 0
    rows = node.type.size // max(1, shape[-1])
    if node.type.dtype not in HALVES or not 0 < shape[-1] <= LONGEST or node.prim is not Prim.CAST:
        return value, 0
    members, sums = 1 << value, 0
    frontier = stored.dag.producers[value]
    while frontier:
        following = 0
        for u in bits(frontier & ~members):
            of = graph.nodes[u].type
            if (of.dtype in HALVES and of.size == node.type.size) or _is_piece(graph, u, shape):
                continue  # what is normalised, or what a product has left of it
            if graph.nodes[u].prim not in NORM or of.dtype is not DType.F32:
                return value, 0
            sums |= of.size == rows
            members |= 1 << u
            following |= stored.dag.producers[u]
        if members.bit_count() > MOST:
            return value, 0
        frontier = following & ~members
    return value, members if sums else 0


def _is_piece(graph: Graph, node: NodeId, shape: tuple[int, ...]) -> bool:
    """Whether a value is the mean or spread of pieces of rows of that shape."""
    of = graph.nodes[node].type
    return of.dtype is DType.F32 and of.shape == (math.prod(shape[:-1]), shape[-1] // PIECE, 1)


def _leaving(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """Products with the partial sums of their result."""
    for spread in bits(stored.work):
        node = graph.nodes[spread]
        if node.prim is not Prim.REDUCE_SUM or node.type.rank != 3 or node.type.dtype is not DType.F32:
            continue
        if graph.type_of(node.inputs[0]).shape != (*node.type.shape[:-1], PIECE):
            continue
        found = _pieces_of(graph, stored, spread)
        if found is None:
            continue
        x, mean, sums = found
        product = _product_of(graph, stored, x)
        if product < 0:
            continue
        between = stored.dag.descendants[product] & stored.dag.ancestors[x] | 1 << product | 1 << x
        members = between | sums
        plain = all(
            CATEGORY[graph.nodes[u].prim] is Category.ELEMENTWISE and graph.type_of(u).size == graph.type_of(x).size
            for u in bits(between & ~(1 << product))
        )
        if plain and not stored.dag.missing(members):
            yield members, tuple(sorted((x, mean, spread)))


def _pieces_of(graph: Graph, stored: Stored, spread: NodeId) -> tuple[NodeId, NodeId, Mask] | None:
    """(value, mean of its pieces, primitives of both sums) below a sum of squared distances."""
    square = graph.nodes[spread].inputs[0]
    if graph.nodes[square].prim is not Prim.MUL or len(set(graph.nodes[square].inputs)) != 1:
        return None
    away = graph.nodes[square].inputs[0]
    if graph.nodes[away].prim is not Prim.SUB:
        return None
    members = mask_of((spread, square, away))
    mean = graph.nodes[away].inputs[1]
    while graph.nodes[mean].prim is Prim.BROADCAST:
        mean = graph.nodes[mean].inputs[0]
    if graph.nodes[mean].prim is not Prim.MUL:
        return None
    members |= 1 << mean
    wide = [u for u in bits(stored.dag.producers[away]) if graph.nodes[u].prim is Prim.CAST]
    total = [u for u in bits(stored.dag.producers[mean]) if graph.nodes[u].prim is Prim.REDUCE_SUM]
    if len(wide) != 1 or len(total) != 1 or stored.dag.producers[total[0]] != 1 << wide[0]:
        return None
    x = graph.nodes[wide[0]].inputs[0]
    if not stored.work >> x & 1 or graph.type_of(x).dtype not in HALVES:
        return None
    return x, mean, members | 1 << wide[0] | 1 << total[0]


def _product_of(graph: Graph, stored: Stored, x: NodeId) -> NodeId:
    """The nearest product that a value is elementwise on; -1: none."""
    size = graph.type_of(x).size
    frontier, seen = 1 << x, 0
    while frontier:
        products = [u for u in bits(frontier) if graph.nodes[u].prim is Prim.MATMUL]
        if products:
            return products[0] if len(products) == 1 and graph.type_of(products[0]).size == size else -1
        seen |= frontier
        before = 0
        for u in bits(frontier):
            if CATEGORY[graph.nodes[u].prim] is Category.ELEMENTWISE and graph.type_of(u).size == size:
                before |= stored.dag.producers[u]
        frontier = before & ~seen
    return -1


NORMS = Idiom(
    name="norms",
    patterns=("product",),
    find=lambda scene: norm_groups(scene.graph, scene.stored),
    multiplied=None,
)
