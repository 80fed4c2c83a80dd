"""A convolution, what is elementwise on it, and a maximum or average pool of that, as one candidate.

Elsewhere nothing but elementwise primitives stands behind a contraction; here a kernel keeps the tile of results that
its windows see in shared memory (`generate.cuda.conv.pooled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.separable import behind
from weft.orchestrate.stored import Stored


def pooled_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, NodeId]]:
    """(members, the one member that is written): convex sets, with what is elementwise behind the window."""
    for conv in bits(stored.work):
        if not _has_field(graph, conv):
            continue
        core, window = _core(graph, stored, conv)
        if not core:
            continue
        after, sink = behind(graph, stored, window)
        if stored.dag.missing(core | after):
            after, sink = 0, window
        if not stored.dag.missing(core | after):
            yield core | after, sink


def _has_field(graph: Graph, node: NodeId) -> bool:
    """A convolution of images, not in groups, whose results each see several pixels."""
    record = graph.nodes[node]
    if record.prim is not Prim.CONV or record.type.rank != 4:
        return False
    attrs = cast("a.ConvAttrs", record.attrs)
    kernel = graph.type_of(record.inputs[1]).shape[2:]
    return attrs.groups == 1 and not attrs.transposed and kernel != (1, 1)


def _core(graph: Graph, stored: Stored, conv: NodeId) -> tuple[Mask, NodeId]:
    """The convolution, what is elementwise on it and the window that alone reads that; 0 where there is none."""
    size = graph.type_of(conv).size
    inside = 1 << conv
    while not stored.results & inside:
        frontier = 0
        for v in bits(inside):
            frontier |= stored.dag.consumers[v]
        frontier &= ~inside
        if frontier and not frontier & (frontier - 1):
            (v,) = bits(frontier)
            if _is_pool(graph, v):
                return inside | frontier, v
        elementwise = all(
            CATEGORY[graph.nodes[v].prim] is Category.ELEMENTWISE and graph.type_of(v).size == size
            for v in bits(frontier)
        )
        if not frontier or not elementwise:
            break
        inside |= frontier
    return 0, -1


def _is_pool(graph: Graph, node: NodeId) -> bool:
    record = graph.nodes[node]
    return CATEGORY[record.prim] is Category.WINDOW and len(cast("a.WindowAttrs", record.attrs).kernel) == 2


POOLED = Idiom(
    name="pooled",
    patterns=("pooled",),
    find=lambda scene: ((members, (sink,)) for members, sink in pooled_groups(scene.graph, scene.stored)),
    multiplied=None,
)
