"""Results of one opaque call belong together."""

from __future__ import annotations

from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId
from weft.ir.prims import Prim

LARGEST_SCORES = 1 << 28
"""Scores of attention up to which a call of it is computed in float64, where kernels are held to it."""


def call_members(graph: Graph, node: NodeId) -> Mask:
    """All results of the call that OPAQUE `node` is a result of, itself included."""
    first = graph.nodes[node]
    call = cast("a.OpaqueAttrs", first.attrs)
    members = 0
    for i, other in enumerate(graph.nodes):
        if other.prim is Prim.OPAQUE and other.inputs == first.inputs:
            attrs = cast("a.OpaqueAttrs", other.attrs)
            if (attrs.framework, attrs.op, attrs.payload) == (call.framework, call.op, call.payload):
                members |= 1 << i
    return members
