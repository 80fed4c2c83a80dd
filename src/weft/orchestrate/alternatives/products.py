"""Products of one operand in one, and scales inside their weights."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array
from weft.orchestrate.alternatives.union import FLOATS, Maker

_Numbers = npt.NDArray[np.floating[npt.NBitBase]]
MAX_MERGED = 8
"""Contractions merged into one."""


def merge_contractions(m: Maker) -> None:
    """x @ A, x @ B → slices of x @ [A | B]; the same for convolutions of one input (A3).

    Conditions: constant weights, equal attributes; biases that are the only readers of every product are merged along.
    Products and sums per result are the same, in an order that the library may change with the width.
    """
    graph = m.graph
    groups: dict[object, list[NodeId]] = {}
    for i, node in enumerate(graph.nodes):
        if node.prim not in (Prim.MATMUL, Prim.CONV) or graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT:
            continue
        weight = graph.type_of(node.inputs[1])
        if node.prim is Prim.MATMUL and weight.rank == 2:
            groups.setdefault((node.inputs[0], "matmul"), []).append(i)
        elif isinstance(node.attrs, a.ConvAttrs) and node.attrs.groups == 1 and not node.attrs.transposed:
            groups.setdefault((node.inputs[0], node.attrs, weight.shape[2:]), []).append(i)
    for group in groups.values():
        if 2 <= len(group) <= MAX_MERGED and m.room:
            _merge(m, group)


def _merge(m: Maker, group: list[NodeId]) -> None:
    graph, first = m.graph, m.graph.nodes[group[0]]
    is_conv = first.prim is Prim.CONV
    rank = first.type.rank
    axis = 1 if is_conv else rank - 1
    weights = [graph.constant(graph.nodes[i].inputs[1]) for i in group]
    joined = m.b.constant(np.concatenate(weights, axis=0 if is_conv else 1), first.type.dtype)
    product = m.b.add(first.prim, first.inputs[0], joined, attrs=first.attrs)
    sizes = [graph.type_of(i).shape[axis] for i in group]
    biased = [_bias_of(m, i, axis) for i in group]
    originals = list(group)
    pairs = [b for b in biased if b is not None]
    alike = is_conv or len({graph.type_of(node).shape[:-1] for node, _ in pairs}) == 1
    if len(pairs) == len(group) and alike:
        originals = [node for node, _ in pairs]
        values = [np.broadcast_to(v, (n,)) for (_, v), n in zip(pairs, sizes, strict=True)]
        if not is_conv:
            rows = graph.type_of(originals[0]).shape[:-1]
            rank, axis = len(rows) + 1, len(rows)
            product = m.b.reshape(product, (*rows, sum(sizes)))
        product = _add_along(m, Prim.ADD, product, np.concatenate(values), axis)
    start = 0
    shape = m.b.type_of(product).shape
    for original, size in zip(originals, sizes, strict=True):
        starts = tuple(start if i == axis else 0 for i in range(rank))
        sliced = tuple(size if i == axis else n for i, n in enumerate(shape))
        m.stands_for(m.b.slice(product, starts, sliced, (1,) * rank), original)
        start += size


def _bias_of(m: Maker, node: NodeId, axis: int) -> tuple[NodeId, Array] | None:
    """The addition of a per-channel constant that alone reads a product, whose rows may have been reshaped between."""
    graph, value = m.graph, node
    columns = graph.type_of(node).shape[-1:]
    while True:
        if len(m.users[value]) != 1 or value in graph.outputs:
            return None
        user = m.users[value][0]
        n = graph.nodes[user]
        if graph.nodes[node].prim is not Prim.MATMUL or n.prim is not Prim.RESHAPE or n.type.shape[-1:] != columns:
            break
        value = user
    other = [i for i in n.inputs if i != value]
    if n.prim is not Prim.ADD or len(other) != 1:
        return None
    along = n.type.rank - 1 if graph.nodes[node].prim is Prim.MATMUL else axis
    values = m.factor(other[0], n.type.rank, along)
    return None if values is None else (user, values)


def _add_along(m: Maker, prim: Prim, x: NodeId, values: Array, axis: int) -> NodeId:
    """x (prim) values, which lie along one axis of x."""
    type = m.b.type_of(x)
    constant = m.b.constant(np.ascontiguousarray(values), type.dtype)
    shaped = m.b.reshape(constant, (len(values), *(1,) * (type.rank - 1 - axis)))
    return m.b.add(prim, x, m.b.broadcast(shaped, type.shape))


def fold_scale(m: Maker) -> None:
    """conv(x, w)·s + t → conv(x, w·s) + t, where others read the product too (A6); the same for x @ w.

    Conditions: constant weights, s and t per output channel, scaled weights finite. Where nobody else reads it the
    clean-up has folded it already.
    """
    graph = m.graph
    for i, node in enumerate(graph.nodes):
        if node.prim not in (Prim.MATMUL, Prim.CONV) or graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT:
            continue
        if not m.room:
            return
        attrs = node.attrs
        if isinstance(attrs, a.ConvAttrs) and attrs.transposed:
            continue
        weight = graph.constant(node.inputs[1])
        is_conv = node.prim is Prim.CONV
        if node.type.dtype not in FLOATS or (not is_conv and weight.ndim != 2):
            continue
        axis = 1 if is_conv else node.type.rank - 1
        for scaled in m.users[i]:
            s = _operand(m, scaled, i, Prim.MUL, axis)
            if s is None or len(m.users[i]) == 1:
                continue
            column = s.reshape(-1, *(1,) * (weight.ndim - 1)) if is_conv else s.reshape(1, -1)
            with np.errstate(over="ignore"):
                folded = np.multiply(cast("_Numbers", weight), cast("_Numbers", column)).astype(weight.dtype)
            if not np.isfinite(folded).all():
                continue
            product = m.b.add(node.prim, node.inputs[0], m.b.constant(folded, node.type.dtype), attrs=attrs)
            shifts = [(u, t) for u in m.users[scaled] if (t := _operand(m, u, scaled, Prim.ADD, axis)) is not None]
            if len(m.users[scaled]) == 1 and shifts and scaled not in graph.outputs:
                u, t = shifts[0]
                values = np.broadcast_to(t, (node.type.shape[axis],))
                m.stands_for(_add_along(m, Prim.ADD, product, values, axis), u)
            else:
                m.stands_for(product, scaled)


def _operand(m: Maker, node: NodeId, x: NodeId, prim: Prim, axis: int) -> Array | None:
    """The constant along `axis` that `node` = x (prim) constant takes; None if it is no such node."""
    n = m.graph.nodes[node]
    other = [i for i in n.inputs if i != x]
    return m.factor(other[0], n.type.rank, axis) if n.prim is prim and len(other) == 1 else None
