"""One reshape, transpose or broadcast where several stand in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import Prim
from weft.ir.rewrite import rewrite


def _reshape(b: GraphBuilder, node: Node, x: NodeId) -> NodeId | None:
    inner, shape = b.node(x), node.type.shape
    if inner.type.shape == shape:
        return x
    if inner.prim is Prim.RESHAPE:
        return b.reshape(inner.inputs[0], shape)
    return _of_one_element(b, inner, shape)


def _of_one_element(b: GraphBuilder, inner: Node, shape: tuple[int, ...]) -> NodeId | None:
    """A repeated scalar has no order: any view of it is the scalar repeated to the view's shape."""
    if inner.prim is not Prim.BROADCAST or b.type_of(inner.inputs[0]).size != 1:
        return None
    return b.broadcast(b.reshape(inner.inputs[0], ()), shape)


def _transpose(b: GraphBuilder, node: Node, x: NodeId) -> NodeId | None:
    inner, perm = b.node(x), cast("a.TransposeAttrs", node.attrs).perm
    if perm == tuple(range(len(perm))):
        return x
    if inner.prim is Prim.TRANSPOSE:
        first = cast("a.TransposeAttrs", inner.attrs).perm
        return b.transpose(inner.inputs[0], [first[p] for p in perm])
    moved = [p for p in perm if inner.type.shape[p] != 1]
    if moved == sorted(moved):
        return b.reshape(x, node.type.shape)
    scalar = _of_one_element(b, inner, node.type.shape)
    if scalar is not None or inner.prim is not Prim.BROADCAST:
        return scalar
    source = b.type_of(inner.inputs[0])
    if source.size == inner.type.size:
        return None
    # the repetition is free: move the small tensor instead of the large one
    aligned = b.reshape(inner.inputs[0], (1,) * (len(perm) - source.rank) + source.shape)
    return b.broadcast(b.transpose(aligned, perm), node.type.shape)


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    lead = next((k for k, n in enumerate(shape) if n != 1), len(shape))
    return shape[lead:]


def _broadcast(b: GraphBuilder, node: Node, x: NodeId) -> NodeId | None:
    inner, shape = b.node(x), node.type.shape
    if inner.type.shape == shape:
        return x
    if inner.prim is Prim.BROADCAST:
        return b.broadcast(inner.inputs[0], shape)
    if inner.prim is not Prim.RESHAPE:
        return None
    source = b.type_of(inner.inputs[0])
    same = _without_leading_ones(source.shape) == _without_leading_ones(inner.type.shape)
    # leading dimensions of size 1 say nothing that the alignment to the right does not say
    return b.broadcast(inner.inputs[0], shape) if same and source.rank <= len(shape) else None


_RULES: Mapping[Prim, Callable[[GraphBuilder, Node, NodeId], NodeId | None]] = {
    Prim.RESHAPE: _reshape,
    Prim.TRANSPOSE: _transpose,
    Prim.BROADCAST: _broadcast,
}


_KEEPS_OPERANDS = {
    Prim.TRANSPOSE: frozenset({"sdpa", "attention"}),
    Prim.RESHAPE: frozenset({"linear", "matmul", "gemm"}),
}
"""Operators whose library call needs its operands as they were: their first view is not merged with one outside."""


def _is_boundary(graph: Graph, node: Node, inner: Node) -> bool:
    rules = _KEEPS_OPERANDS.get(node.prim, frozenset())
    return inner.prim is node.prim and inner.origin != node.origin >= 0 and graph.origins[node.origin].rule in rules


@dataclass(frozen=True, slots=True)
class ComposeViewsPass:
    """v(w(x)) → u(x) for reshapes, transposes and broadcasts; v(x) → x where v changes nothing.

    A transpose that only moves dimensions of size 1 becomes a reshape; a transpose of a broadcast a broadcast of the
    transposed small tensor. Dimensions of size 1 that a reshape adds or drops stay as they are.
    """

    name: ClassVar[str] = "compose-views"

    def requires(self, graph: Graph) -> Declined | None:
        """Some view."""
        return needs_any(graph, *_RULES)

    def run(self, graph: Graph) -> PassResult:
        """Exact."""

        def visit(b: GraphBuilder, node: Node, inputs: tuple[NodeId, ...]) -> NodeId | None:
            rule = _RULES.get(node.prim)
            if rule is None or _is_boundary(graph, node, b.node(inputs[0])):
                return None
            return rule(b, node, inputs[0])

        return PassResult(*rewrite(graph, visit))
