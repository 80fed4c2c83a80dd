"""Bound and estimate of a problem on a GPU: arithmetic on its graph and the GPU's facts, no device.

At batch 1 most kernels are gaps, latencies and waves of few blocks, so these are what the estimate is made of.

Source: performance notes, sections 3 to 5; the terms stand in `weft.device.cuda.model`.
"""

from __future__ import annotations

import math
from typing import cast

from weft.device.cuda.model import (
    SFU_PER_CLOCK,
    Product,
    achieved,
    gap_us,
    halo_ratio,
    memory_us,
    overlapped,
    product_us,
)
from weft.device.cuda.record import GpuFacts
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import DType
from weft.ir.work import node_flops, node_transcendentals
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.orchestrate.compulsory import compulsory_work

ARITHMETIC_SHARE = 0.25
"""Elementwise operations per second over the multiply-add rate in FLOP: half as one operation is no multiply-add, and
half again for indices and conversions."""
SFU_OPERATIONS = 2.0
"""Special-function operations of one transcendental."""
TRANSCENDENTAL_OPERATIONS = 8.0
"""Plain operations around them."""
REDUCTION_US = 0.2
"""One more reduction that depends on the one before, inside a block."""
ROW_BYTES = 96 * 1024
"""A row of a reduction up to this size stays in one block's shared memory and registers."""
STRIDED = 1.5
"""Factor on traffic when a kernel reads one memory order and writes the other."""
ROW_CONVOLUTION = 1.5
"""Factor on convolutions whose channels do not lie side by side."""
MATRIX_CHANNELS = 8
"""Channels per group below this leave the matrix units idle: such convolutions are sums of products."""
FUSED_TILE = 16
"""Side of the tile of a convolution that computes what it reads."""


def gpu_lower_bound_us(problem: Problem, facts: GpuFacts) -> float:
    """Microseconds that no correct kernel can beat when its inputs may be in the L2 cache.

    Bytes beyond the L2 cache go at most at the bandwidth that clock and bus width state; products at most at the peak
    of the highest clock, those of f32 at the peak of TF32, as options may permit it. Unknown peaks bound nothing.
    """
    work = compulsory_work(problem)
    beyond = max(0, work.read_bytes + work.written_bytes - facts.l2_bytes)
    memory = beyond / facts.peak_bandwidth / 1e3 if facts.peak_bandwidth else 0.0
    types = {n.type.dtype for n in problem.graph.nodes if CATEGORY[n.prim] is Category.LINEAR}
    names = {"tf32" if t is DType.F32 else t.value for t in types}
    peak = max((facts.peak_flops(name) for name in names), default=math.inf)
    return max(memory, work.contraction_flops / peak * 1e6)


def gpu_estimate_us(problem: Problem, facts: GpuFacts) -> float:
    """Microseconds a good kernel may take: one gap, the largest of traffic, products and arithmetic, and latencies.

    Only the order matters.
    """
    graph = problem.graph
    again = _repetitions(problem)
    products = [_contraction_us(problem, node, facts) * again[i] for i, node in _linear(graph)]
    plain = special = 0.0
    for i, node in enumerate(graph.nodes):
        category = CATEGORY[node.prim]
        if node.prim in FREE or (category is Category.LINEAR and _on_matrix_units(graph, node)):
            continue
        transcendental = node_transcendentals(node, graph)
        operations = node.type.size if category is Category.LAYOUT else node_flops(node, graph)
        plain += again[i] * (operations + (TRANSCENDENTAL_OPERATIONS - 1) * transcendental)
        special += again[i] * SFU_OPERATIONS * transcendental
    arithmetic = plain / (achieved(facts, "f32") * ARITHMETIC_SHARE) * 1e6
    functions = special / (SFU_PER_CLOCK * facts.sms * facts.clock_ghz) / 1e3
    levels, traffic = _reductions(graph), _traffic_us(problem, facts)
    return gap_us(facts) + overlapped((sum(products), arithmetic, functions, traffic)) + REDUCTION_US * levels


def _linear(graph: Graph) -> list[tuple[int, Node]]:
    return [(i, n) for i, n in enumerate(graph.nodes) if CATEGORY[n.prim] is Category.LINEAR]


def _on_matrix_units(graph: Graph, node: Node) -> bool:
    if node.prim is Prim.MATMUL:
        return True
    c, w = cast("a.ConvAttrs", node.attrs), graph.type_of(node.inputs[1]).shape
    return min(w[0] // (1 if c.transposed else c.groups), w[1]) >= MATRIX_CHANNELS or c.groups == 1


def _contraction_us(problem: Problem, node: Node, facts: GpuFacts) -> float:
    """Time of one contraction on the matrix units; 0 for what is arithmetic like any other."""
    graph = problem.graph
    if not _on_matrix_units(graph, node) or not node.type.size:
        return 0.0
    time, _ = product_us(facts, product_of(graph, node))
    rows = node.prim is Prim.CONV and Format.LAST not in problem.input_formats + problem.output_formats
    return time * (ROW_CONVOLUTION if rows else 1.0)


def product_of(graph: Graph, node: Node) -> Product:
    """The matrix product that a MATMUL or CONV node is: a convolution has a row per output position."""
    x, w = graph.type_of(node.inputs[0]), graph.type_of(node.inputs[1])
    dtype, itemsize = x.dtype.value, x.dtype.itemsize
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


def _repetitions(problem: Problem) -> list[float]:
    """How often each node's work is done over: what a window, gather or contraction reads is computed by its reader."""
    graph = problem.graph
    again = [1.0] * len(graph)
    for i in reversed(range(len(graph))):
        node = graph.nodes[i]
        for position, operand in enumerate(node.inputs):
            if graph.nodes[operand].prim not in (Prim.INPUT, Prim.CONSTANT):
                again[operand] = max(again[operand], again[i] * _rereads(graph, node, position, operand))
    return again


def _rereads(graph: Graph, node: Node, position: int, operand: int) -> float:
    """How often a reader asks for each element of an operand that the same kernel computes."""
    if isinstance(node.attrs, a.WindowAttrs):
        return max(1.0, math.prod(node.attrs.kernel) / math.prod(node.attrs.strides))
    if isinstance(node.attrs, a.ConvAttrs) and position == 0:
        c, kernel = node.attrs, graph.type_of(node.inputs[1]).shape[2:]
        if _behind_contraction(graph, operand):
            return max(1.0, halo_ratio((FUSED_TILE,) * len(kernel), kernel, c.strides, c.dilations))
        columns = -(-node.type.shape[1] // 128)
        return max(1.0, columns * math.prod(kernel) / math.prod(c.strides))
    if node.prim is Prim.MATMUL and not _behind_contraction(graph, operand):
        return -(-node.type.shape[-1 if position == 0 else -2] // 128)
    return 1.0


def _behind_contraction(graph: Graph, start: int) -> bool:
    """True when a contraction stands in front of a node: a kernel keeps such a value as a tile."""
    todo, seen = [start], {start}
    while todo:
        node = graph.nodes[todo.pop()]
        if CATEGORY[node.prim] is Category.LINEAR:
            return True
        todo += (fresh := set(node.inputs) - seen)
        seen |= fresh
    return False


def _reductions(graph: Graph) -> int:
    """Length of the longest chain of reductions."""
    depth = [0] * len(graph)
    for i, node in enumerate(graph.nodes):
        before = max((depth[j] for j in node.inputs), default=0)
        depth[i] = before + (CATEGORY[node.prim] is Category.REDUCE)
    return max(depth, default=0)


def _traffic_us(problem: Problem, facts: GpuFacts) -> float:
    """Time of the problem's bytes; long rows are read once per reduction of a chain, few rows keep few blocks busy."""
    graph = problem.graph
    read = sum(graph.type_of(i).nbytes for i in graph.inputs)
    written = sum(graph.type_of(o).nbytes for o in set(graph.outputs))
    factor = STRIDED if _mixed(problem) else 1.0
    reductions = [n for n in graph.nodes if CATEGORY[n.prim] is Category.REDUCE]
    if not reductions:
        return memory_us(facts, read, written) * factor
    rows = max(1, min(n.type.size for n in reductions))
    longest = max(graph.type_of(n.inputs[0]).nbytes // max(1, n.type.size) for n in reductions)
    if longest <= ROW_BYTES:
        alone = memory_us(facts, read, written, active_sms=rows)
        spread = memory_us(facts, read, written) + facts.grid_barrier_us
        return min(alone, spread) * factor
    feeds_back = any(graph.type_of(o).size > rows for o in graph.outputs)
    passes = _reductions(graph) - 1 + feeds_back
    return (memory_us(facts, read * (1 + passes), written) + facts.grid_barrier_us * (1 + passes)) * factor


def _mixed(problem: Problem) -> bool:
    """True when images are read in one memory order and written in another."""
    graph = problem.graph
    values = [*zip(graph.inputs, problem.input_formats, strict=True)]
    values += zip(graph.outputs, problem.output_formats, strict=True)
    kinds = {
        f
        for v, f in values
        if graph.type_of(v).rank == 4 and graph.type_of(v).shape[1] > 1 and not _weight(graph.nodes[v])
    }
    return len(kinds) > 1


def _weight(node: Node) -> bool:
    return isinstance(node.attrs, a.InputAttrs) and node.attrs.is_weight
