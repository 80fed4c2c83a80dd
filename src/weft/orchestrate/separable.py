"""A convolution, what is elementwise on it, and the 1x1 convolution of that, as one candidate.

A group holds one contraction; this pair is an exception like attention, because a kernel keeps the tile between them in
shared memory: every pixel and channel of it is computed once. The first is depthwise, or has few output channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.orchestrate.idiom import Idiom
from weft.orchestrate.stored import Stored

MOST_BETWEEN, STEP = 128, 16
"""Channels between the convolutions where the first sums over channels: at most so many, in whole steps of a sum."""


def separable_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, NodeId]]:
    """(members, the one member that is written): convex sets, with what is elementwise behind the 1x1 convolution."""
    for second in bits(stored.work):
        if not _is_pointwise(graph, second):
            continue
        core = _core(graph, stored, second)
        if not core:
            continue
        after, sink = behind(graph, stored, second)
        if stored.dag.missing(core | after):
            after, sink = 0, second
        if not stored.dag.missing(core | after):
            yield core | after, sink


def _attrs(graph: Graph, node: NodeId) -> a.ConvAttrs | None:
    record = graph.nodes[node]
    return cast("a.ConvAttrs", record.attrs) if record.prim is Prim.CONV else None


def _is_pointwise(graph: Graph, node: NodeId) -> bool:
    attrs = _attrs(graph, node)
    if attrs is None or attrs.transposed or attrs.groups != 1 or len(attrs.strides) != 2:
        return False
    kernel = graph.type_of(graph.nodes[node].inputs[1]).shape[2:]
    return kernel == (1, 1) and attrs.strides == (1, 1) and not any((*attrs.pads_lo, *attrs.pads_hi))


def _is_depthwise(graph: Graph, node: NodeId) -> bool:
    attrs = _attrs(graph, node)
    if attrs is None or attrs.transposed or len(attrs.strides) != 2:
        return False
    weight = graph.type_of(graph.nodes[node].inputs[1]).shape
    return attrs.groups > 1 and weight[1] == 1 and weight[0] == attrs.groups


def _is_small(graph: Graph, node: NodeId) -> bool:
    """A convolution with windows whose results fit a block's tile with all their channels."""
    attrs = _attrs(graph, node)
    if attrs is None or attrs.transposed or len(attrs.strides) != 2 or attrs.groups > 1:
        return False
    record = graph.nodes[node]
    few = record.type.shape[1] <= MOST_BETWEEN and record.type.shape[1] % STEP == 0
    return few and record.type.dtype in (DType.F16, DType.BF16) and graph.type_of(record.inputs[1]).shape[2:] != (1, 1)


def _core(graph: Graph, stored: Stored, second: NodeId) -> Mask:
    """Both convolutions and what is between them; 0 where that is not elementwise, or read by others."""
    start = graph.nodes[second].inputs[0]
    if not stored.work >> start & 1 or not stored.dag.producers[second] >> start & 1:
        return 0
    size = graph.type_of(start).size
    between = first = 0
    waiting = [start]
    while waiting:
        v = waiting.pop()
        if (between | first) >> v & 1:
            continue
        if _is_depthwise(graph, v) or _is_small(graph, v):
            first |= 1 << v
        elif CATEGORY[graph.nodes[v].prim] is Category.ELEMENTWISE and graph.type_of(v).size == size:
            between |= 1 << v
            waiting.extend(bits(stored.dag.producers[v]))
        else:
            return 0
    inside = between | first | 1 << second
    read_by = 0
    for v in bits(between | first):
        read_by |= stored.dag.consumers[v]
    if first.bit_count() != 1 or read_by & ~inside or stored.results & (between | first):
        return 0
    return inside


def behind(graph: Graph, stored: Stored, second: NodeId) -> tuple[Mask, NodeId]:
    """Elementwise values behind a value, of its size, as long as only they read each other; the last of them."""
    size = graph.type_of(second).size
    found, sink = 0, second
    best = (found, sink)
    frontier = stored.dag.consumers[second]
    inside = 1 << second
    while frontier and not stored.results & inside:
        ready = 0
        for v in bits(frontier):
            record = graph.nodes[v]
            if CATEGORY[record.prim] is not Category.ELEMENTWISE or record.type.size != size:
                return best
            ready |= 1 << v
        found |= ready
        inside |= ready
        frontier = 0
        for v in bits(inside):
            frontier |= stored.dag.consumers[v]
        frontier &= ~inside
        ends = [v for v in bits(inside) if not stored.dag.consumers[v] & inside]
        if len(ends) == 1 and all(stored.dag.consumers[v] & ~inside == 0 for v in bits(inside) if v != ends[0]):
            best = (found, ends[0])
    return best


SEPARABLE = Idiom(
    name="separable",
    patterns=("separable", "stacked"),
    find=lambda scene: ((members, (sink,)) for members, sink in separable_groups(scene.graph, scene.stored)),
    multiplied=None,
)
