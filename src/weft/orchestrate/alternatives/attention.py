"""The sums and divisions of attention, moved into or behind its products."""

from __future__ import annotations

from typing import cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.orchestrate.alternatives.union import FLOATS, Maker


def divide_after_product(m: Maker) -> None:
    """(e / s) @ v → (e @ v) / s, where s is constant along the contraction (A2).

    Conditions: f32 or f64, so that the undivided sums do not overflow where the divided ones do not by design:
    e = exp(x - max) is at most 1, so a sum is at most the length of the row times max |v|.
    """
    graph = m.graph
    for i, node in enumerate(graph.nodes):
        if not m.room:
            return
        if node.prim is not Prim.MATMUL or node.type.dtype not in FLOATS:
            continue
        quotient = graph.nodes[node.inputs[0]]
        if quotient.prim is not Prim.DIV or quotient.type.shape[:-2] != node.type.shape[:-2]:
            continue
        e, divisor = quotient.inputs
        if graph.nodes[divisor].prim is not Prim.BROADCAST or graph.nodes[e].prim is not Prim.EXP:
            continue  # only exponentials are known to be bounded
        s = graph.nodes[divisor].inputs[0]
        if graph.type_of(s).shape[-1:] == (1,):
            product = m.b.add(Prim.MATMUL, e, node.inputs[1])
            m.stands_for(m.b.add(Prim.DIV, product, m.b.broadcast(s, node.type.shape)), i)


def sum_as_product(m: Maker) -> None:
    """sum over the last axis of e → e @ 1, where e is the left operand of a product anyway (A1)."""
    graph = m.graph
    for i, node in enumerate(graph.nodes):
        if not m.room:
            return
        if node.prim is not Prim.REDUCE_SUM or node.type.dtype not in FLOATS or node.type.rank < 2:
            continue
        e = node.inputs[0]
        axes = cast("a.ReduceAttrs", node.attrs).axes
        if axes == (node.type.rank - 1,) and _multiplied(m, e):
            ones = np.ones((graph.type_of(e).shape[-1], 1), node.type.dtype.numpy)
            m.stands_for(m.b.add(Prim.MATMUL, e, m.b.constant(ones, node.type.dtype)), i)


def _multiplied(m: Maker, e: NodeId) -> bool:
    """True if a product reads e on the left, or e over a row-wise divisor."""
    nodes = m.graph.nodes
    for u in m.users[e]:
        if nodes[u].prim is Prim.MATMUL and nodes[u].inputs[0] == e:
            return True
        if nodes[u].prim is Prim.DIV and nodes[u].inputs[0] == e:
            return any(nodes[w].prim is Prim.MATMUL and nodes[w].inputs[0] == u for w in m.users[u])
    return False
