"""What a convolution or matrix product of a problem may take on a GPU, with what follows it in the same kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from weft.costmodel.constants import LeftLoad
from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import Product, gap_us, memory_us, product_us
from weft.costmodel.tiles import Sizes, least_cycles, least_grouped_cycles
from weft.device.cuda.record import GpuFacts
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import DType
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.orchestrate.narrow import multiplied_as

MATRIX_CHANNELS = 8
"""Channels per group below this leave the matrix units idle: such convolutions are sums of products."""
FIELD_CHANNELS = 64
"""Convolutions with windows of at most so many channels keep their part of the image in shared memory, in any order."""
FEW_INPUTS, FEW_OUTPUTS = 4, 8
FEW_AFTER = 3
CHUNK_BYTES = 16
"""Of one asynchronous copy."""


FLOAT8 = "f8"
"""Name of the rate of all floats of 8 bits."""


def rate_name(dtype: DType) -> str:
    """Name of the rate at which a type is multiplied, in `GpuFacts`."""
    return FLOAT8 if dtype.is_float8 else dtype.value


def on_matrix_units(graph: Graph, node: Node) -> bool:
    """Whether a contraction is worth fragments of matrices."""
    if node.prim is Prim.MATMUL:
        return True
    c, w = cast("a.ConvAttrs", node.attrs), graph.type_of(node.inputs[1]).shape
    return min(w[0] // (1 if c.transposed else c.groups), w[1]) >= MATRIX_CHANNELS or c.groups == 1


def contraction_us(problem: Problem, at: NodeId, facts: GpuFacts) -> float:
    """Microseconds of one contraction on the matrix units without the gap before it; 0 for other contractions."""
    c = costs_of(facts).estimate
    graph = problem.graph
    node = graph.nodes[at]
    if not on_matrix_units(graph, node) or not node.type.size:
        return 0.0
    product = product_of(graph, node)
    load = _left_load(problem, node)
    factor = 1.0
    window = isinstance(node.attrs, a.ConvAttrs) and math.prod(graph.type_of(node.inputs[1]).shape[2:]) > 1
    if window and graph.type_of(node.inputs[1]).shape[1] <= FIELD_CHANNELS:
        product = _from_field(graph, node, product)
        if load == "elements":
            load, factor = "taps", c.one_by_one
    tf32 = facts.tf32 and product.dtype == DType.F32.value
    sizes = replace(_sizes(problem, at, product, load), tf32=tf32)
    block = least_cycles(facts, sizes) / facts.clock_ghz / 1e3 - gap_us(facts)
    persistent = product_us(facts, replace(product, dtype="tf32") if tf32 else product)[0] + c.persistent_us
    best = min(block, persistent if load in ("rows", "taps") and _in_place(graph, node) else math.inf)
    if isinstance(node.attrs, a.ConvAttrs) and node.attrs.transposed and not is_fixed(graph, node.inputs[1]):
        factor *= c.data_gradient
    return best * factor + _turned_us(problem, node, facts)


def _turned_us(problem: Problem, node: Node, facts: GpuFacts) -> float:
    """Microseconds in which a library turns row-major images of 16 bits, of a convolution that no template computes.

    cuDNN multiplies halves with channels last, and copies what lies otherwise before and behind its kernel.
    """
    graph = problem.graph
    image = graph.type_of(node.inputs[0])
    own = node.prim is not Prim.CONV or is_fixed(graph, node.inputs[1])
    if own or image.dtype.itemsize != 2 or Format.LAST in (*problem.input_formats, *problem.output_formats):
        return 0.0
    moved = sum(t.nbytes for t in (image, node.type) if t.shape[1] > 1 and math.prod(t.shape[2:]) > 1)
    return memory_us(facts, moved, moved)


def are_apart(graph: Graph, linear: Sequence[NodeId]) -> bool:
    """Whether there are several products for the matrix units, none of which needs another."""
    if len(linear) < 2 or not all(on_matrix_units(graph, graph.nodes[i]) and graph.nodes[i].type.size for i in linear):
        return False
    after: set[NodeId] = set()
    for i, node in enumerate(graph.nodes):
        if any(j in after for j in node.inputs):
            if i in linear:
                return False
            after.add(i)
        elif i in linear:
            after.add(i)
    return len({graph.nodes[i].type.dtype for i in linear}) == 1


def are_layers(graph: Graph, products: Sequence[NodeId]) -> bool:
    """Whether products are those of a small fully connected network: several, with weights, in 16 bits."""
    if len(products) < 2 or any(graph.nodes[i].prim is not Prim.MATMUL for i in products):
        return False
    if any(graph.type_of(i).dtype not in (DType.F16, DType.BF16) for i in products):
        return False
    return all(is_fixed(graph, graph.nodes[i].inputs[1]) for i in products)


def is_fixed(graph: Graph, node: NodeId) -> bool:
    """Whether a value, or what it is a view of, is the same with each call."""
    while graph.nodes[node].prim in (Prim.RESHAPE, Prim.TRANSPOSE, Prim.BROADCAST):
        node = graph.nodes[node].inputs[0]
    n = graph.nodes[node]
    return n.prim is Prim.CONSTANT or bool(getattr(n.attrs, "is_weight", False))


def layers_us(problem: Problem, products: Sequence[NodeId], facts: GpuFacts) -> float:
    """Microseconds of the products of such a network in one kernel: values stay in registers, so only rates count."""
    c = costs_of(facts).estimate
    graph, flops = problem.graph, 0.0
    peak = facts.peak_flops(rate_name(graph.type_of(products[0]).dtype))
    if math.isinf(peak):
        return sum(contraction_us(problem, i, facts) for i in products)
    for i in products:
        k, columns = graph.type_of(graph.nodes[i].inputs[0]).shape[-1], graph.nodes[i].type.shape[-1]
        rows = graph.nodes[i].type.size // max(1, columns)
        flops += 2.0 * rows * (-(-k // 16) * 16) * (-(-columns // 16) * 16)
    return flops / (c.layer_share * peak) * 1e6


def together_us(problem: Problem, products: Sequence[NodeId], facts: GpuFacts) -> float:
    """Microseconds of products that need nothing of each other in one launch, without the gap before it.

    Of what follows each only a few operations count: that is little of the time, and their number is small.
    """
    graph = problem.graph
    every = []
    for at in products:
        node = graph.nodes[at]
        product = product_of(graph, node)
        sizes = _sizes(problem, at, product, _left_load(problem, node))
        few = replace(sizes, operands=min(sizes.operands, FEW_AFTER), plain=min(sizes.plain, FEW_AFTER))
        every.append(replace(few, special=min(few.special, 1), stored=node.type.dtype.itemsize, tf32=facts.tf32))
    return least_grouped_cycles(facts, tuple(every)) / facts.clock_ghz / 1e3 - gap_us(facts)


def _in_place(graph: Graph, node: Node) -> bool:
    """Whether TMA finds all pixels: borders of zeros it makes itself, reflected and gathered ones not."""
    while (reads := graph.nodes[node.inputs[0]]).prim is Prim.PAD:
        attrs = cast("a.PadAttrs", reads.attrs)
        if attrs.mode != "constant" or attrs.value != 0:
            return False
        node = reads
    return reads.prim is not Prim.GATHER


def _from_field(graph: Graph, node: Node, product: Product) -> Product:
    """The product of a kernel that keeps its part of the image.

    It multiplies four taps at a time of few channels, and puts the columns of the kernel beside few output channels.
    """
    c, w = cast("a.ConvAttrs", node.attrs), graph.type_of(node.inputs[1]).shape
    if c.transposed or len(w) != 4 or c.groups > 1:
        return product
    if w[1] <= FEW_INPUTS:
        return replace(product, k=FEW_INPUTS * math.prod(w[2:]))
    if w[0] <= FEW_OUTPUTS and w[0] * w[3] <= FIELD_CHANNELS and c.strides[1] == 1:
        return replace(product, n=w[0] * w[3], k=product.k // w[3])
    return product


def _sizes(problem: Problem, at: NodeId, product: Product, load: LeftLoad) -> Sizes:
    graph = problem.graph
    node = graph.nodes[at]
    behind = [n for i, n in enumerate(graph.nodes) if i > at and n.prim not in FREE]
    steps = [n for n in behind if CATEGORY[n.prim] is Category.ELEMENTWISE and n.type.size == node.type.size]
    turned = any(n.prim is Prim.TRANSPOSE for n in behind)
    together = node.prim is Prim.MATMUL or _last(problem)
    multiplied = {i for n in graph.nodes if CATEGORY[n.prim] is Category.LINEAR for i in n.inputs}
    operands = {i for i in graph.inputs if i not in multiplied and graph.type_of(i).size > 1}
    return Sizes(
        dtype=_dtype(product),
        m=product.m,
        n=product.n,
        k=product.k,
        z=product.batch,
        a_load=load,
        w_load="packed",
        tables=int(load == "elements" and any(n.prim in (Prim.PAD, Prim.GATHER) for n in graph.nodes[:at])),
        width=8 if together and not turned and product.n % 8 == 0 else 1,
        operands=len(operands),
        plain=len(steps),
        special=sum(n.prim in TRANSCENDENTAL for n in steps),
        stored=sum(graph.type_of(o).dtype.itemsize for o in set(graph.outputs)),
    )


def _dtype(product: Product) -> DType:
    return DType.F8E4M3 if product.dtype == FLOAT8 else DType(product.dtype)


def _last(problem: Problem) -> bool:
    return Format.LAST in problem.input_formats + problem.output_formats


def _left_load(problem: Problem, node: Node) -> LeftLoad:
    """How the left operand is read, by its order in memory: as the templates' own rules, without their walks."""
    graph = problem.graph
    x = graph.type_of(node.inputs[0])
    chunk = CHUNK_BYTES // multiplied_as(graph, node).itemsize
    if node.prim is Prim.MATMUL:
        return "rows" if x.shape[-1] % chunk == 0 else "elements"
    c, w = cast("a.ConvAttrs", node.attrs), graph.type_of(node.inputs[1]).shape
    point = math.prod(w[2:]) == 1 and not c.transposed
    if _last(problem):
        return "elements" if (w[0] // c.groups if c.transposed else w[1]) % chunk else "rows" if point else "taps"
    plain = point and set(c.strides) == {1} and not any(c.pads_lo + c.pads_hi)
    return "columns" if plain and math.prod(x.shape[2:]) % chunk == 0 and chunk == 8 else "elements"


def product_of(graph: Graph, node: Node) -> Product:
    """The matrix product that a MATMUL or CONV node is: a convolution has a row per output position."""
    x, w = graph.type_of(node.inputs[0]), graph.type_of(node.inputs[1])
    multiplied = multiplied_as(graph, node)
    dtype, itemsize = rate_name(multiplied), multiplied.itemsize
    if node.prim is Prim.MATMUL:
        m, n = node.type.shape[-2:]
        batch = math.prod(node.type.shape[:-2])
        if len(w.shape) < 3 or math.prod(w.shape[:-2]) == 1:
            m, batch = m * batch, 1  # one weight for the whole batch
        return Product(m, n, x.shape[-1], batch, dtype, itemsize)
    c = cast("a.ConvAttrs", node.attrs)
    positions = node.type.shape[0] * math.prod(node.type.shape[2:])
    taps = math.prod(w.shape[2:])
    if c.transposed:
        reached = max(1, taps // math.prod(c.strides))  # taps that meet an output position
        return Product(positions, w.shape[1], -(-w.shape[0] // c.groups) * reached, c.groups, dtype, itemsize)
    channels = -(-w.shape[1] // MATRIX_CHANNELS) * MATRIX_CHANNELS
    return Product(positions, w.shape[0] // c.groups, channels * taps, c.groups, dtype, itemsize)
