"""Mean and variance of rows from those of pieces of the rows, which the product before a norm leaves.

A kernel of a product ends with tiles of some columns: it cannot know a row's mean, but that of each 32 neighbours. What
is left are a few numbers per row; the norm itself is then elementwise, and goes into the product behind it.
Source: Chan, Golub and LeVeque 1979, updating formulae for sums of squares.
"""

from __future__ import annotations

import math
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import NodeId, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.orchestrate.alternatives.union import Maker

OFFERED = False
"""Whether plans may have them. No: at 768 elements a product with the norm on its way took 1.4 to 2.7 times as long on
an NVIDIA H200, more than the norm's own kernel; short rows are normalised without them (docs/performance.md)."""
PIECE = 32
"""Neighbours of a row whose mean and spread a kernel leaves."""
LONGEST = 2048
"""Elements of a row."""
DEPTH = 8
"""Elementwise primitives between the product and what is normalised."""


def norms_of_pieces(m: Maker) -> None:
    """mean(x), mean((x - mean(x))²) → the same from mean and sum of squared distances of each piece of 32.

    Conditions: x of 16 bits, elementwise on a product; the means are over the last axis, in whole pieces. Nothing large
    is taken from something large, so that no digits are lost at a large mean.
    """
    for i, node in enumerate(m.graph.nodes):
        if node.prim is Prim.CAST and node.type.dtype is DType.F32 and m.room:
            _try(m, i)


def _try(m: Maker, wide: NodeId) -> None:
    graph, x = m.graph, m.graph.nodes[wide].inputs[0]
    shape = graph.type_of(wide).shape
    halves = graph.type_of(x).dtype in (DType.F16, DType.BF16)
    if not halves or len(shape) < 2 or shape[-1] % PIECE or not PIECE < shape[-1] <= LONGEST:
        return
    mean = _mean_of(m, wide)
    if mean < 0 or not _is_result(m, x):
        return
    away = next((u for u in m.users[wide] if _is_away(m, u, wide, mean)), -1)
    square = next((u for u in m.users[away] if graph.nodes[u].inputs == (away, away)), -1) if away >= 0 else -1
    variance = _mean_of(m, square) if square >= 0 and graph.nodes[square].prim is Prim.MUL else -1
    if variance < 0:
        return
    b, count, start = m.b, shape[-1] // PIECE, len(m.b)
    short, rows = (*shape[:-1], 1), math.prod(shape[:-1])
    pieces = b.reshape(wide, (rows, count, PIECE))
    means = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, pieces, (2,)), 1.0 / PIECE)
    apart = b.apply(Prim.SUB, pieces, means)
    spreads = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, apart, apart), (2,))
    whole = b.apply(Prim.MUL, b.reshape(b.reduce(Prim.REDUCE_SUM, means, (1,)), short), 1.0 / count)
    between = b.apply(Prim.SUB, b.reshape(means, (rows, count)), b.reshape(whole, (rows, 1)))
    far = b.reshape(b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, between, between), (1,)), short)
    near = b.reshape(b.reduce(Prim.REDUCE_SUM, spreads, (1,)), short)
    total = b.apply(Prim.ADD, near, b.apply(Prim.MUL, far, float(PIECE)))
    m.stands_for(whole, mean)
    m.stands_for(b.apply(Prim.MUL, total, 1.0 / shape[-1]), variance)
    m.apart |= mask_of(range(start, len(b)))


def _mean_of(m: Maker, x: NodeId) -> NodeId:
    """The mean of x over its last axis, as a rule of fission writes it; -1: there is none."""
    graph = m.graph
    last = graph.type_of(x).rank - 1
    for total in m.users[x]:
        node = graph.nodes[total]
        if node.prim is not Prim.REDUCE_SUM or cast("a.ReduceAttrs", node.attrs).axes != (last,):
            continue
        for user in m.users[total]:
            n = graph.nodes[user]
            other = [j for j in n.inputs if j != total]
            scale = m.factor(other[0], n.type.rank, last) if n.prim is Prim.MUL and len(other) == 1 else None
            if scale is not None and scale.size == 1 and _inverse(float(scale[0]), graph.type_of(x).shape[-1]):
                return user
    return -1


def _inverse(scale: float, length: int) -> bool:
    """A reciprocal as it is rounded to f32."""
    return abs(scale * length - 1.0) < 1e-6


def _is_away(m: Maker, u: NodeId, wide: NodeId, mean: NodeId) -> bool:
    node = m.graph.nodes[u]
    if node.prim is not Prim.SUB or node.inputs[0] != wide:
        return False
    under = node.inputs[1]
    while m.graph.nodes[under].prim is Prim.BROADCAST:
        under = m.graph.nodes[under].inputs[0]
    return under == mean


def _is_result(m: Maker, x: NodeId) -> bool:
    """Whether a product's result is x but for elementwise primitives and reshapes."""
    graph, size = m.graph, m.graph.type_of(x).size
    frontier = [x]
    for _ in range(DEPTH):
        before: list[NodeId] = []
        for v in frontier:
            node = graph.nodes[v]
            if node.prim is Prim.MATMUL:
                return node.type.size == size and node.type.shape[-1] == graph.type_of(x).shape[-1]
            if node.prim is Prim.RESHAPE or CATEGORY[node.prim] is Category.ELEMENTWISE:
                before += [j for j in node.inputs if graph.type_of(j).size == size]
        frontier = before
    return False
