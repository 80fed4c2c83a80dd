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


WIDTH_OF_UNITS = 8
"""Columns that matrix units work on side by side."""
WIDEST = 1.5
"""A product may grow by this factor when it is given further columns."""


def column_of_ones(m: Maker) -> None:
    """(e / sum e) @ v → z[:, :d] / z[:, d] with z = e @ [v | 1 | 0 …]; e @ v, sum e → slices of the same z (A4).

    One product gives numerator and denominator, from the same rounded e. Conditions: f32 or f64; the sum runs along
    the contraction; for the quotient e = exp(…), as in A2; v has the batch dimensions of e; z is not much wider than v.
    """
    graph = m.graph
    for s, node in enumerate(graph.nodes):
        if not m.room:
            return
        if node.prim is not Prim.REDUCE_SUM or node.type.dtype not in FLOATS:
            continue
        e = node.inputs[0]
        if cast("a.ReduceAttrs", node.attrs).axes != (node.type.rank - 1,):
            continue
        for i in m.users[e]:
            if _is_product(m, i, e):
                z = _with_sum(m, e, graph.nodes[i].inputs[1])
                m.stands_for(_columns(m, z, 0, _width(m, i)), i)
                m.stands_for(_columns(m, z, _width(m, i), 1), s)
        for quotient in _quotients(m, e, s):
            for i in m.users[quotient]:
                if _is_product(m, i, quotient):
                    d = _width(m, i)
                    z = _with_sum(m, e, graph.nodes[i].inputs[1])
                    total = m.b.broadcast(_columns(m, z, d, 1), graph.type_of(i).shape)
                    m.stands_for(m.b.add(Prim.DIV, _columns(m, z, 0, d), total), i)


def _width(m: Maker, product: NodeId) -> int:
    """Columns of a product's result."""
    return m.graph.type_of(product).shape[-1]


def _quotients(m: Maker, e: NodeId, s: NodeId) -> list[NodeId]:
    """exp(…) over the sum of its last axis."""
    nodes = m.graph.nodes
    if nodes[e].prim is not Prim.EXP:
        return []
    broadcasts = [u for u in m.users[s] if nodes[u].prim is Prim.BROADCAST]
    return [u for b in broadcasts for u in m.users[b] if nodes[u].prim is Prim.DIV and nodes[u].inputs == (e, b)]


def _is_product(m: Maker, i: NodeId, left: NodeId) -> bool:
    node, v = m.graph.nodes[i], m.graph.type_of(m.graph.nodes[i].inputs[-1])
    if node.prim is not Prim.MATMUL or node.inputs[0] != left or left == node.inputs[1]:
        return False
    same_batch = v.shape[:-2] == m.graph.type_of(left).shape[:-2]
    return same_batch and -(-(v.shape[-1] + 1) // WIDTH_OF_UNITS) * WIDTH_OF_UNITS <= WIDEST * v.shape[-1]


def _with_sum(m: Maker, e: NodeId, v: NodeId) -> NodeId:
    """e @ [v | 1 | 0 …]."""
    type = m.graph.type_of(v)
    ahead = (0,) * (type.rank - 1)
    ones = m.b.add(Prim.PAD, v, attrs=a.PadAttrs((*ahead, 0), (*ahead, 1), "constant", 1.0))
    rest = -(type.shape[-1] + 1) % WIDTH_OF_UNITS
    if rest:
        ones = m.b.add(Prim.PAD, ones, attrs=a.PadAttrs((*ahead, 0), (*ahead, rest), "constant", 0.0))
    return m.b.add(Prim.MATMUL, e, ones)


def _columns(m: Maker, z: NodeId, first: int, count: int) -> NodeId:
    shape = m.b.type_of(z).shape
    ahead = (0,) * (len(shape) - 1)
    return m.b.slice(z, (*ahead, first), (*shape[:-1], count), (1,) * len(shape))
