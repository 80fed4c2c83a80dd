"""Squeeze-excite as one candidate: means of channels, two 1x1 convolutions of them, the image scaled by the result.

By groups alone these are four kernels or five in a row, each of which waits for the one before and hardly reads
anything but weights (`generate.cuda.conv.squeeze_excite`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import memory_us
from weft.device.cuda.record import GpuFacts
from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.orchestrate.idiom import Idiom, Multiplied
from weft.orchestrate.stored import Stored

HALVES = (DType.F16, DType.BF16)
CLUSTER = 8
"""CTAs that share an image, at most."""
MOST = 24
"""Primitives between two products, or behind the second."""


def squeeze_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, NodeId]]:
    """(members, the scaled image): from the sum over pixels to the product with the image."""
    for total in bits(stored.work):
        n = graph.nodes[total]
        if n.prim is not Prim.REDUCE_SUM or n.type.rank != 4 or cast("a.ReduceAttrs", n.attrs).axes != (2, 3):
            continue
        found = _from(graph, stored, total)
        if found is not None:
            yield found


def _from(graph: Graph, stored: Stored, total: NodeId) -> tuple[Mask, NodeId] | None:
    """What belongs to one sum; None where it is no squeeze-excite."""
    image = graph.type_of(graph.nodes[total].inputs[0])
    front, x = _above(graph, stored, total)
    if x < 0 or graph.type_of(x).dtype not in HALVES:
        return None
    members, at = front | 1 << total, total
    for _ in range(2):
        path = _to_product(graph, stored, at)
        if path is None:
            return None
        between, at = path
        members |= between | 1 << at
    scaled = _through(graph, stored, at, lambda v: _is_scaled(graph, v, image))
    if scaled is None:
        return None
    gates, sink = scaled
    if stored.reads[sink] & ~members & ~gates != 1 << x:
        return None
    members |= gates | 1 << sink
    inner = members & ~(1 << sink)
    if stored.results & inner or any(stored.dag.consumers[v] & ~members for v in bits(inner)):
        return None
    return None if stored.dag.missing(members) else (members, sink)


def _above(graph: Graph, stored: Stored, total: NodeId) -> tuple[Mask, NodeId]:
    """Casts that only the sum reads, and the image in front of them; -1: something else is there."""
    found, at = 0, total
    while True:
        before = stored.reads[at]
        if before.bit_count() != 1:
            return 0, -1
        (at,) = bits(before)
        alone = graph.nodes[at].prim is Prim.CAST and stored.dag.consumers[at].bit_count() == 1
        if not alone or stored.results >> at & 1:
            return found, at
        found |= 1 << at


def _to_product(graph: Graph, stored: Stored, start: NodeId) -> tuple[Mask, NodeId] | None:
    """What is elementwise behind a vector up to the 1x1 convolution that alone reads it."""
    return _through(graph, stored, start, lambda v: _is_product(graph, v))


def _through(graph: Graph, stored: Stored, start: NodeId, ends: Callable[[NodeId], bool]) -> tuple[Mask, NodeId] | None:
    """What is elementwise behind a vector, and the one value at which that `ends`; None: several, or something else."""
    size, inside, found = graph.type_of(start).size, 1 << start, 0
    while found.bit_count() <= MOST:
        frontier = 0
        for v in bits(inside):
            frontier |= stored.dag.consumers[v] & ~inside
        last = [v for v in bits(frontier) if ends(v)]
        plain = frontier & ~mask_of(last)
        if not plain:
            return (found, last[0]) if len(last) == 1 else None
        for v in bits(plain):
            if CATEGORY[graph.nodes[v].prim] is not Category.ELEMENTWISE or graph.type_of(v).size != size:
                return None
        found |= plain
        inside |= plain
    return None


def _is_product(graph: Graph, node: NodeId) -> bool:
    n = graph.nodes[node]
    if n.prim is not Prim.CONV or n.type.rank != 4 or n.type.shape[2:] != (1, 1) or n.type.dtype not in HALVES:
        return False
    attrs = cast("a.ConvAttrs", n.attrs)
    weight = graph.type_of(n.inputs[1])
    return attrs.groups == 1 and not attrs.transposed and weight.shape[2:] == (1, 1) and weight.size > 0


def _is_scaled(graph: Graph, node: NodeId, image: TensorType) -> bool:
    n = graph.nodes[node]
    return CATEGORY[n.prim] is Category.ELEMENTWISE and n.type.shape == image.shape and image.shape[2:] != (1, 1)


def is_squeeze(graph: Graph, products: Sequence[NodeId]) -> bool:
    """Whether a problem's products are those of a squeeze-excite."""
    sums = sum(CATEGORY[n.prim] is Category.REDUCE for n in graph.nodes)
    return len(products) == 2 and sums == 1 and all(_is_product(graph, i) for i in products)


def squeeze_us(problem: Problem, products: Sequence[NodeId], facts: GpuFacts) -> float:
    """Microseconds of both products and what they wait for: the image by the CTAs of a few clusters, two exchanges."""
    c = costs_of(facts).halo
    graph = problem.graph
    weights = sum(math.prod(graph.type_of(graph.nodes[i].inputs[1]).shape) for i in products) * 2
    out = graph.type_of(graph.outputs[0])
    ctas = min(facts.sms, CLUSTER * out.shape[0])
    steps = c.launch + c.latency + c.end + 2 * c.cluster + out.nbytes / ctas * (1 / c.port + 1 / c.stored)
    return memory_us(facts, weights, 0) + steps / facts.clock_ghz / 1e3


SQUEEZE_EXCITE = Idiom(
    name="squeeze_excite",
    patterns=("squeeze_excite",),
    find=lambda scene: ((members, (sink,)) for members, sink in squeeze_groups(scene.graph, scene.stored)),
    multiplied=Multiplied(is_squeeze, squeeze_us, hides=False),
)
