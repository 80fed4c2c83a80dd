"""Split reductions: long rows in parts, by a graph-to-graph step before planning that makes two reductions of one.

Few long rows do not fill a GPU. Each of their parts is reduced by itself, and the parts' results after that: sums,
products and extrema by associativity, squares about the mean by their sums about the mean of a part: with S_b, m_b the
sum and mean of part b, Q elements in a part, N in all,

    Σ (x - m)² = Σ_b [ Σ_{x in b} (x - m_b)² + (S_b - S_0)² / Q ] - (S - P·S_0)² / N.

So mean and variance need one pass over memory and one exchange among the parts, where the definition has two passes
that depend on each other. What is subtracted at the end is at most P times what remains, so that P roundings bound the
relative error.

Source: Chan, Golub, LeVeque: Algorithms for computing the sample variance: analysis and recommendations (1983).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from weft.generate.loopnest.plan import live_nodes
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.moments import centred
from weft.ir.prims import Prim
from weft.ir.rewrite import Rewriter

SPLIT = frozenset({Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN})


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the rows of a reduction are cut: `axis` into `outer` parts, each of the axes `whole` into its elements."""

    whole: tuple[int, ...]
    axis: int
    outer: int
    num_splits: int
    """Parts of a row."""


def split_rows(graph: Graph, num_splits: int, *, last: bool = False) -> Graph | None:
    """The graph with every reduction of the longest rows made of `num_splits` parts; None where that cannot be.

    `last`: images lie channels-last, so that parts are ranges of positions rather than of channels.
    Every chain of reductions over the same values must be understood: sums, products, extrema, and squares about the
    mean.
    """
    roots = long_reductions(graph)
    if not roots or num_splits < 2:
        return None
    moments = {n: mean for n in roots if (mean := centred(graph, n)) is not None}
    above = _depends(graph, roots)
    if any(above[n] - {moments.get(n, -1)} for n in roots):
        return None
    cuts = {n: cut(graph, n, num_splits, last=last) for n in roots}
    if None in cuts.values():
        return None

    rewriter = Rewriter(graph)
    partial: dict[NodeId, NodeId] = {}

    def visit(b: GraphBuilder, _node: object, inputs: tuple[NodeId, ...]) -> NodeId | None:
        n = rewriter.position
        if n not in cuts:
            return None
        where = cast("Cut", cuts[n])
        if n in moments:
            return _squares(b, graph, n, where, rewriter.mapped[moments[n]], partial[moments[n]], partial[n])
        x = _opened(b, inputs[0], where)
        partial[n] = b.reduce(graph.nodes[n].prim, x, _inner(graph, n, where))
        for square in (s for s, total in moments.items() if total == n):  # here, so that one pass makes both
            partial[square] = _inside(b, graph, square, where, x, partial[n])
        return _joined(b, graph, n, where, partial[n], graph.nodes[n].prim)

    return rewriter.run(visit)


def long_reductions(graph: Graph) -> list[NodeId]:
    """Reductions over the longest rows of a graph, if parts of them can be joined; positions cannot."""
    live = [n for n in live_nodes(graph) if isinstance(graph.nodes[n].attrs, a.ReduceAttrs)]
    length = max((_length(graph, n) for n in live), default=1)
    found = [n for n in live if _length(graph, n) == length]
    good = length > 1 and all(
        graph.nodes[n].prim in SPLIT and graph.type_of(graph.nodes[n].inputs[0]).dtype.is_float for n in found
    )
    return found if good else []


def possible_splits(graph: Graph, node: NodeId, *, last: bool = False) -> list[int]:
    """Numbers of parts into which `cut` can divide the rows of a reduction, ascending."""
    whole, found = 1, {1}
    for axis in _slowest_first(graph, node, last=last):
        size = graph.type_of(graph.nodes[node].inputs[0]).shape[axis]
        found |= {whole * d for d in range(1, size + 1) if size % d == 0}
        whole *= size
    return sorted(found)


def cut(graph: Graph, node: NodeId, num_splits: int, *, last: bool = False) -> Cut | None:
    """The cut of a reduction's rows into so many parts; none, where axes do not divide so."""
    whole = 1
    axes = _slowest_first(graph, node, last=last)
    for number, axis in enumerate(axes):
        size = graph.type_of(graph.nodes[node].inputs[0]).shape[axis]
        if num_splits <= whole * size:
            even = num_splits % whole == 0 and size % (num_splits // whole) == 0
            return Cut(axes[:number], axis, num_splits // whole, num_splits) if even else None
        whole *= size
    return None


def _slowest_first(graph: Graph, node: NodeId, *, last: bool) -> tuple[int, ...]:
    """Reduced axes in the order of memory; channels, all axes between the first and the last two, may be fastest."""
    rank = graph.type_of(graph.nodes[node].inputs[0]).rank
    return tuple(sorted(_axes(graph, node), key=lambda k: (last and 0 < k < rank - 2, k)))


def _axes(graph: Graph, node: NodeId) -> tuple[int, ...]:
    return tuple(sorted(cast("a.ReduceAttrs", graph.nodes[node].attrs).axes))


def _length(graph: Graph, node: NodeId) -> int:
    shape = graph.type_of(graph.nodes[node].inputs[0]).shape
    return math.prod(shape[k] for k in _axes(graph, node))


def _depends(graph: Graph, roots: list[NodeId]) -> dict[NodeId, set[NodeId]]:
    """For each node the nearest of the roots that it needs, other than itself."""
    need: dict[NodeId, set[NodeId]] = {}
    for n in range(len(graph)):
        need[n] = set()
        for i in graph.nodes[n].inputs:
            need[n] |= {i} if i in roots else need[i]
    return need


def _opened(b: GraphBuilder, x: NodeId, where: Cut) -> NodeId:
    """A value with the axis of the cut made two."""
    shape = b.type_of(x).shape
    k = where.axis
    return b.reshape(x, (*shape[:k], where.outer, shape[k] // where.outer, *shape[k + 1 :]))


def _moved(axis: int, where: Cut) -> int:
    """Number of an axis in the opened shape."""
    return axis if axis <= where.axis else axis + 1


def _inner(graph: Graph, node: NodeId, where: Cut) -> tuple[int, ...]:
    """Axes inside a part, in the opened shape."""
    others = [_moved(k, where) for k in _axes(graph, node) if k not in (*where.whole, where.axis)]
    return tuple(sorted([*others, where.axis + 1]))


def _joined(b: GraphBuilder, graph: Graph, node: NodeId, where: Cut, value: NodeId, prim: Prim) -> NodeId:
    outer = (*(_moved(k, where) for k in where.whole), where.axis)
    return b.reshape(b.reduce(prim, value, outer), graph.type_of(node).shape)


def _inside(b: GraphBuilder, graph: Graph, node: NodeId, where: Cut, x: NodeId, sums: NodeId) -> NodeId:
    """Σ (x - S_b/Q)² of each part."""
    each = _length(graph, node) // where.num_splits
    means = b.broadcast(b.apply(Prim.MUL, sums, 1.0 / each), b.type_of(x).shape)
    apart = b.apply(Prim.SUB, x, means)
    return b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, apart, apart), _inner(graph, node, where))


def _squares(
    b: GraphBuilder, graph: Graph, node: NodeId, where: Cut, total: NodeId, sums: NodeId, inside: NodeId
) -> NodeId:
    """Σ (x - mean)², see the head of the file; `total`: sum of the row; of the parts `sums` and, `inside`, squares."""
    length, shape = _length(graph, node), b.type_of(sums).shape
    opened = _opened_axes(graph, node, where)
    single = tuple(1 if k in opened else s for k, s in enumerate(shape))
    first = b.slice(sums, (0,) * len(shape), single, (1,) * len(shape))
    off = b.apply(Prim.SUB, sums, b.broadcast(first, shape))
    between = _square(b, off, math.sqrt(where.num_splits / length))
    about_first = _joined(b, graph, node, where, b.apply(Prim.ADD, inside, between), Prim.REDUCE_SUM)
    firsts = b.apply(Prim.MUL, b.reshape(first, b.type_of(total).shape), float(where.num_splits))
    moved = _square(b, b.apply(Prim.SUB, total, firsts), math.sqrt(1.0 / length))
    too_large = b.apply(Prim.EQ, about_first, math.inf)  # what is infinite stays so: inf - inf were no number
    return b.apply(Prim.SELECT, too_large, about_first, b.apply(Prim.SUB, about_first, moved))


def _square(b: GraphBuilder, x: NodeId, factor: float) -> NodeId:
    """(x·factor)²: not too large where x² alone were."""
    scaled = b.apply(Prim.MUL, x, factor)
    return b.apply(Prim.MUL, scaled, scaled)


def _opened_axes(graph: Graph, node: NodeId, where: Cut) -> set[int]:
    """All reduced axes, in the opened shape."""
    return {_moved(k, where) for k in _axes(graph, node)} | {where.axis + 1}
