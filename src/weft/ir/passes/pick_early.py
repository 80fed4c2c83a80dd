"""Single elements of rows that are computed from sums over the rows: picked in front of what is computed.

Cross entropy reads one logarithm of each row. Read behind the logarithms, it has all of them stored, 823 MB of f32 for
4096 rows of 50257. Picked from the row that the sums read, it wants these sums besides, which their kernel has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.rewrite import rewrite

FEWER = 64
"""Elements of a row for each that is read of it. The few probabilities of a router are stored for others anyway."""
DEPTH = 16
"""Primitives that are computed of what was picked."""


def _visit(
    graph: Graph, users: Sequence[Sequence[NodeId]], b: GraphBuilder, node: Node, given: tuple[NodeId, ...]
) -> NodeId | None:
    if node.prim is not Prim.TAKE_ALONG or not 0 < FEWER * node.type.size <= b.type_of(given[0]).size:
        return None
    others = (graph.nodes[u].prim for u in users[node.inputs[0]])
    stored = node.inputs[0] in graph.outputs or any(_stores(prim) for prim in others)
    axis = cast("a.GatherAttrs", node.attrs).axis
    inside = _inside(b, given[0], axis)
    return None if stored or not inside else _picked(b, node, given[1], inside, axis)


def _stores(prim: Prim) -> bool:
    """Whether a reader wants its operand in memory."""
    return prim is not Prim.TAKE_ALONG and CATEGORY[prim] in (Category.LINEAR, Category.OPAQUE, Category.LAYOUT)


def _inside(b: GraphBuilder, root: NodeId, axis: int) -> list[NodeId]:
    """Elementwise primitives behind a reduction along the axis, and casts in front of these; none: too many.

    What no reduction has gone into is left: the reductions read it, as it is or as they compute it.
    """
    found: set[NodeId] = set()
    waiting = [root]
    while waiting:
        at = waiting.pop()
        node = b.node(at)
        if at in found or CATEGORY[node.prim] is not Category.ELEMENTWISE:
            continue
        if node.prim is Prim.CAST or _is_behind(b, at, axis):
            found.add(at)
            waiting.extend(node.inputs)
        if len(found) > DEPTH:
            return []
    return sorted(found) if any(_is_behind(b, at, axis) for at in found) else []


def _is_behind(b: GraphBuilder, root: NodeId, axis: int) -> bool:
    """Whether a reduction along the axis goes into it, by elementwise primitives and views alone, and not many."""
    seen: set[NodeId] = set()
    waiting = [root]
    while waiting and len(seen) <= DEPTH:
        at = waiting.pop()
        node = b.node(at)
        if at in seen:
            continue
        seen.add(at)
        if CATEGORY[node.prim] is Category.REDUCE and axis in _axes(node):
            return True
        if CATEGORY[node.prim] is Category.ELEMENTWISE or node.prim in FREE:
            waiting.extend(node.inputs)
    return False


def _axes(node: Node) -> tuple[int, ...]:
    return node.attrs.axes if isinstance(node.attrs, a.ReduceAttrs) else ()


def _picked(b: GraphBuilder, node: Node, index: NodeId, inside: list[NodeId], axis: int) -> NodeId:
    done: dict[NodeId, NodeId] = {}

    def of(operand: NodeId) -> NodeId:
        if operand not in done:
            at = b.node(operand)
            if at.prim is Prim.BROADCAST and _is_same_along(b.type_of(at.inputs[0]).shape, node.type.rank, axis):
                done[operand] = b.broadcast(at.inputs[0], node.type.shape)
            else:
                done[operand] = b.add(Prim.TAKE_ALONG, operand, index, attrs=node.attrs)
        return done[operand]

    for at in inside:
        done[at] = b.add(b.node(at).prim, *map(of, b.node(at).inputs), attrs=b.node(at).attrs)
    return done[inside[-1]]


def _is_same_along(shape: tuple[int, ...], rank: int, axis: int) -> bool:
    """Whether what is broadcast has one element along the axis."""
    at = axis - rank + len(shape)
    return at < 0 or shape[at] == 1


@dataclass(frozen=True, slots=True)
class PickEarlyPass:
    """take_along(f(x, Σ x), i) → f(take_along(x, i), Σ x), f elementwise: the same bits.

    Conditions: one element is read of `FEWER` or more; of the others nobody wants f in memory.
    """

    name: ClassVar[str] = "pick-early"

    def requires(self, graph: Graph) -> Declined | None:
        """Some element is picked along an axis."""
        return needs_any(graph, Prim.TAKE_ALONG)

    def run(self, graph: Graph) -> PassResult:
        """Exact."""
        return PassResult(*rewrite(graph, partial(_visit, graph, graph.users())))
