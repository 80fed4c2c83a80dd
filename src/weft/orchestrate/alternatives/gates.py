"""Gates inside a product's kernel: SwiGLU, GEGLU and their like, whose two halves come from one product.

A kernel of a product finishes its own columns only, so the halves of one product cannot meet in it. As two products,
the second multiplies by the first where it is finished, or a kernel of layers holds both; nothing merged is written.
Source: Shazeer 2020 (arXiv:2002.05202) has such layers; that a column of a product needs no other is linear algebra.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import Array
from weft.orchestrate.alternatives.union import Maker

DEPTH = 16
"""Elementwise primitives between a half and where it meets the other."""


def part_gated_products(m: Maker) -> None:
    """f(slice of x @ W + b) · slice of x @ W + b → f(x @ W₁ + b₁) · (x @ W₂ + b₂); the same for convolutions.

    Conditions: constant W and b; nothing else reads the product; the halves are all its columns and meet in one
    elementwise value. Every result is the same sum in the same order.
    """
    for i, node in enumerate(m.graph.nodes):
        if node.prim in (Prim.MATMUL, Prim.CONV) and m.room:
            _try(m, i)


def _try(m: Maker, i: NodeId) -> None:
    graph, node = m.graph, m.graph.nodes[i]
    weight = graph.nodes[node.inputs[1]]
    conv = node.prim is Prim.CONV
    attrs = node.attrs
    if weight.prim is not Prim.CONSTANT or (not conv and weight.type.rank != 2):
        return
    if isinstance(attrs, a.ConvAttrs) and (attrs.transposed or attrs.groups > 1):
        return
    steps, halves = _behind(m, i)
    if len(halves) != 2 or not _meet(m, *halves):
        return
    columns = node.type.shape[1 if conv else -1]
    places = [_columns(m, h, conv=conv) for h in halves]
    if None in places or sorted(cast("list[tuple[int, int]]", places)) != [(0, columns // 2), (columns // 2, columns)]:
        return
    data = graph.constant(node.inputs[1])
    for half, (lo, hi) in zip(halves, cast("list[tuple[int, int]]", places), strict=True):
        part = np.ascontiguousarray(data[lo:hi] if conv else data[:, lo:hi])
        y = m.b.add(node.prim, node.inputs[0], m.b.constant(part, node.type.dtype), attrs=attrs)
        for before, step in zip([i, *steps], steps, strict=False):
            y = _follow(m, step, before, y, lo, hi, conv=conv)
        m.stands_for(y, half)


def _behind(m: Maker, i: NodeId) -> tuple[list[NodeId], list[NodeId]]:
    """Reshapes and constant biases behind a product, each the one reader of what is before it; who reads the last."""
    graph, conv = m.graph, m.graph.nodes[i].prim is Prim.CONV
    steps: list[NodeId] = []
    at = i
    while at not in graph.outputs and len(m.users[at]) == 1:
        user = m.users[at][0]
        n = graph.nodes[user]
        columns = n.type.shape[1 if conv else -1 :][:1] == graph.type_of(at).shape[1 if conv else -1 :][:1]
        bias = n.prim is Prim.ADD and _bias(m, user, at, conv=conv) is not None
        if not (bias or (n.prim is Prim.RESHAPE and not conv and columns)):
            break
        steps.append(user)
        at = user
    if at in graph.outputs:
        return steps, []
    return steps, list(m.users[at])


def _bias(m: Maker, add: NodeId, x: NodeId, *, conv: bool) -> Array | None:
    """The constant of an addition to `x`, one value per column (or one for all)."""
    n = m.graph.nodes[add]
    other = [j for j in n.inputs if j != x]
    axis = 1 if conv else n.type.rank - 1
    return m.factor(other[0], n.type.rank, axis) if len(other) == 1 else None


def _columns(m: Maker, half: NodeId, *, conv: bool) -> tuple[int, int] | None:
    """First and last column (behind) of a slice that takes all of the other dimensions."""
    n = m.graph.nodes[half]
    if not isinstance(n.attrs, a.SliceAttrs):
        return None
    shape = m.graph.type_of(n.inputs[0]).shape
    axis = 1 if conv else len(shape) - 1
    s = n.attrs
    whole = all(j == axis or (s.starts[j] == 0 and s.sizes[j] == size) for j, size in enumerate(shape))
    return (s.starts[axis], s.starts[axis] + s.sizes[axis]) if whole and set(s.steps) == {1} else None


def _meet(m: Maker, first: NodeId, second: NodeId) -> bool:
    """Whether elementwise values of both halves come together."""
    return bool(_elementwise_of(m, first) & _elementwise_of(m, second))


def _elementwise_of(m: Maker, start: NodeId) -> set[NodeId]:
    found: set[NodeId] = set()
    frontier = [start]
    for _ in range(DEPTH):
        frontier = [
            u
            for v in frontier
            for u in m.users[v]
            if u not in found and CATEGORY[m.graph.nodes[u].prim] is Category.ELEMENTWISE
        ]
        found.update(frontier)
    return found


def _follow(m: Maker, step: NodeId, before: NodeId, y: NodeId, lo: int, hi: int, *, conv: bool) -> NodeId:
    """`step`, a reshape or bias of `before`, of `y`, which are its columns lo … hi - 1."""
    n, b = m.graph.nodes[step], m.b
    if n.prim is Prim.RESHAPE:
        return b.reshape(y, (*n.type.shape[:-1], hi - lo))
    axis = 1 if conv else n.type.rank - 1
    values = _bias(m, step, before, conv=conv)
    assert values is not None
    part = np.ascontiguousarray(np.broadcast_to(values, (n.type.shape[axis],))[lo:hi])
    shaped = b.reshape(b.constant(part, n.type.dtype), (hi - lo, *(1,) * (n.type.rank - 1 - axis)))
    return b.add(Prim.ADD, y, b.broadcast(shaped, b.type_of(y).shape))
