"""Bound and estimate of a problem on a GPU: arithmetic on its graph and the GPU's facts, no device.

At batch 1 most kernels are gaps, latencies and waves of few blocks, so these are what the estimate is made of.

Source: performance notes, sections 3 to 5; the terms stand in `weft.costmodel`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from weft.costmodel.constants import Estimate
from weft.costmodel.profile import CostProfile, costs_of
from weft.costmodel.roofline import (
    gap_us,
    halo_ratio,
    memory_us,
    overlapped,
)
from weft.device.cuda.record import GpuFacts
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.moments import centred
from weft.ir.passes.compose_casts import FIRST_TO_LAST, LAST_TO_FIRST
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.types import DType
from weft.ir.work import TRANSCENDENTAL, node_flops
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.orchestrate.compulsory import compulsory_work
from weft.orchestrate.contraction_cuda import (
    contraction_us,
    is_fixed,
    on_matrix_units,
    rate_name,
)
from weft.orchestrate.idioms import multiplied_together
from weft.orchestrate.narrow import multiplied_as, widening

ROW_BYTES = 96 * 1024
"""A row of a reduction up to this size stays in one block's shared memory and registers."""
NEIGHBOURS = 16
"""Rows whose elements share the sectors of memory that a block reads."""
SECTOR = 32
"""Bytes that a store of one element costs where its neighbours are stored by others."""
VECTOR, WARP = 8, 32
"""Elements of a row that a thread has at once; threads of a warp."""
SMALL_SHARE = 16
"""What is so many times smaller than all that is moved, a weight say, costs nothing to speak of where it is turned."""
FUSED_TILE = 16
"""Side of the tile of a convolution that computes what it reads."""


class Trait(NamedTuple):
    """What the estimate asks about a primitive, under one look-up: enumerations hash slowly."""

    category: Category
    free: bool
    gathers: bool
    special: bool
    step_us: float


_GATHERS = frozenset({Prim.GATHER, Prim.TAKE_ALONG})
_ROUNDED = frozenset({Prim.EXP, Prim.DIV, Prim.RECIPROCAL, Prim.SQRT, Prim.RSQRT, Prim.ERF})


@lru_cache(maxsize=8)
def _table(costs: CostProfile) -> Mapping[str, Trait]:
    """By the primitive's value."""
    c = costs.estimate
    steps = {
        Category.ELEMENTWISE: c.elementwise_step_us,
        Category.WINDOW: c.window_step_us,
        Category.REDUCE: c.reduce_step_us,
        Category.SCAN: c.reduce_step_us,
    }
    return {
        str(p.value): Trait(
            CATEGORY[p],
            p in FREE,
            p in _GATHERS,
            p in TRANSCENDENTAL,
            c.gather_us if p in _GATHERS else c.special_step_us if p in TRANSCENDENTAL else steps.get(CATEGORY[p], 0.0),
        )
        for p in Prim
    }


def gpu_lower_bound_us(problem: Problem, facts: GpuFacts) -> float:
    """Microseconds that no correct kernel can beat when its inputs may be in the L2 cache.

    Bytes beyond the L2 cache go at most at the bandwidth that clock and bus width state; products at most at the peak
    of the highest clock, those of f32 at the peak of TF32, as options may permit it. Unknown peaks bound nothing.
    """
    work = compulsory_work(problem)
    beyond = max(0, work.read_bytes + work.written_bytes - facts.l2_bytes)
    memory = beyond / facts.peak_bandwidth / 1e3 if facts.peak_bandwidth else 0.0
    linear = [n for n in problem.graph.nodes if CATEGORY[n.prim] is Category.LINEAR]
    types = {multiplied_as(problem.graph, n) for n in linear}
    names = {"tf32" if t is DType.F32 else rate_name(t) for t in types}
    peak = max((facts.peak_flops(name) for name in names), default=math.inf)
    return max(memory, work.contraction_flops / peak * 1e6)


def gpu_estimate_us(problem: Problem, facts: GpuFacts) -> float:
    """Microseconds a good kernel may take: one gap, the largest of traffic, products and arithmetic, and latencies.

    Only the order matters.
    """
    if problem.origin_rule == WEIGHT_GRADIENT and (whole := _weight_gradient_us(problem, facts)) < math.inf:
        return whole
    c = costs_of(facts).estimate
    graph = problem.graph
    traits = _traits(graph, costs_of(facts))
    again = _repetitions(problem)
    linear = [i for i, t in enumerate(traits) if t.category is Category.LINEAR]
    together = multiplied_together(graph, linear)
    products = [contraction_us(problem, i, facts) * again[i] for i in linear] if together is None else []
    multiplied_on = {i for i in linear if on_matrix_units(graph, graph.nodes[i])}
    in_front = _in_front(graph, traits, multiplied_on)
    taken = frozenset[NodeId]().union(*(widening(graph, graph.nodes[i]) for i in multiplied_on))
    unmoved = _unmoved(problem)
    slots = special = before = 0.0
    for i, (node, trait) in enumerate(zip(graph.nodes, traits, strict=True)):
        if trait.free or i in multiplied_on or i in taken or i in unmoved:
            continue
        if in_front[i]:
            before += again[i] * _slots(graph, node, trait, c)
        else:
            slots += again[i] * _slots(graph, node, trait, c)
        if trait.special:
            special += again[i] * c.sfu_operations * node.type.size
    if not multiplied_on:
        slots += c.result_slots * sum(graph.type_of(o).size for o in graph.outputs)
    clocks = facts.sms * facts.clock_ghz * 1e3
    if len(linear) == 1 and any(f and n.prim is Prim.RSQRT for f, n in zip(in_front, graph.nodes, strict=True)):
        before = _on_the_way(before, sum(products) * c.lanes * clocks, c)
    # what is computed in front of a product takes its loads through registers: it is not hidden behind the product
    waited = (before + _exact_slots(graph, traits, linear, again, c)) / c.lanes / clocks
    multiplied = sum(products) if together is None else together.us(problem, linear, facts)
    if together is not None and together.hides:
        slots += before
    else:
        multiplied += waited
    mixed = _mixed(problem)
    traffic = _traffic_us(problem, facts, traits, unmoved, mixed)
    if Format.LAST in problem.output_formats and Format.LAST not in problem.input_formats:
        across = sum(graph.nodes[i].type.size for i in linear if i not in multiplied_on)
        traffic = max(traffic, c.across_cycles * across / clocks)
    costs = (multiplied, slots / c.lanes / clocks, special / costs_of(facts).roofline.sfu_per_clock / clocks, traffic)
    share = c.one_tap if any(_is_library_tap(graph, graph.nodes[i]) for i in linear) else 1.0
    return gap_us(facts) + overlapped(costs, facts) * share + _latency_us(problem, traits, multiplied_on, mixed, c)


def _is_library_tap(graph: Graph, node: Node) -> bool:
    """Whether it is a convolution of one tap over all channels that no template computes, as its weight changes."""
    if not isinstance(node.attrs, a.ConvAttrs) or node.attrs.groups > 1:
        return False
    return math.prod(graph.type_of(node.inputs[1]).shape[2:]) == 1 and not is_fixed(graph, node.inputs[1])


WEIGHT_GRADIENT = "conv_weight_gradient"
"""The operator that a library computes in one call."""


def _weight_gradient_us(problem: Problem, facts: GpuFacts) -> float:
    """Microseconds of the operator by one call, or of a depthwise one by kernels; infinite for types without a rate."""
    c, graph = costs_of(facts).estimate, problem.graph
    linear = [n for n in graph.nodes if n.prim is Prim.MATMUL]
    flops = sum(2.0 * n.type.size * graph.type_of(n.inputs[0]).shape[-1] for n in linear)
    peak = facts.peak_flops(rate_name(graph.type_of(graph.outputs[0]).dtype))
    if not math.isfinite(peak):
        return math.inf
    read, written = (sum(graph.type_of(i).nbytes for i in values) for values in (graph.inputs, graph.outputs))
    last = Format.LAST in problem.input_formats
    turned = 0 if last else read
    traffic = memory_us(facts, read, written)
    by_channel = (c.depthwise_sums if last else c.depthwise_gradient) * traffic
    product = max(flops / (c.gradient_share * peak) * 1e6, traffic) if flops else by_channel
    return gap_us(facts) + product + memory_us(facts, turned, turned)


def _on_the_way(before: float, products: float, c: Estimate) -> float:
    """Instructions of a norm in front of a product that show: a part is normalised while another is multiplied."""
    issued = c.norm_issued * before
    return c.norm_shown * issued + max(0.0, issued - products)


def _exact_slots(
    graph: Graph, traits: Sequence[Trait], linear: Sequence[NodeId], again: Sequence[float], c: Estimate
) -> float:
    """Instructions of correctly rounded functions behind products, where nothing hides them."""
    if not linear or not any(t.special for t in traits):
        return 0.0
    functions, divisions = _exact_ends(graph)
    if not functions and not divisions:
        return 0.0
    found, behind = 0.0, [False] * len(graph)
    for i, (node, trait) in enumerate(zip(graph.nodes, traits, strict=True)):
        behind[i] = trait.category is Category.LINEAR or any(behind[j] for j in node.inputs)
        if not behind[i] or node.prim not in _ROUNDED:
            continue
        if node.prim is Prim.DIV and (divisor := _scalar(graph, node.inputs[1])) is not None:
            slow = divisions and abs(math.frexp(divisor)[0]) != 0.5
            found += again[i] * node.type.size * (c.clipped_slots if slow else 0.0)
        elif functions:
            one = node.prim is Prim.DIV and _scalar(graph, node.inputs[0]) is None
            found += again[i] * node.type.size * (c.divided_slots if one else c.exact_slots)
    return found


def _exact_ends(graph: Graph) -> tuple[bool, bool]:
    """Whether functions, and divisions by constants other than powers of two, round correctly behind a product.

    Where all results have 16 bits, the machine's own functions and a product by the inverse are exact enough.
    """
    wide = any(graph.type_of(o).dtype.itemsize > 2 for o in graph.outputs)
    return wide, wide


def _scalar(graph: Graph, at: NodeId) -> float | None:
    """The one value of a constant."""
    while graph.nodes[at].prim is Prim.BROADCAST:
        at = graph.nodes[at].inputs[0]
    node = graph.nodes[at]
    return float(graph.constant(at).reshape(())) if node.prim is Prim.CONSTANT and node.type.size == 1 else None


def _in_front(graph: Graph, traits: Sequence[Trait], multiplied_on: Collection[NodeId]) -> list[bool]:
    """Which nodes compute what a product on the matrix units reads; layout is a matter of addresses."""
    found = [False] * len(graph)
    if not multiplied_on:
        return found
    for i in reversed(range(len(graph))):
        if found[i] or i in multiplied_on:
            for j in graph.nodes[i].inputs:
                found[j] = True
    return [f and t.category is not Category.LAYOUT for f, t in zip(found, traits, strict=True)]


def _slots(graph: Graph, node: Node, trait: Trait, c: Estimate) -> float:
    """Instructions of all lanes for one node."""
    category = trait.category
    if category is Category.LINEAR:
        return c.multiply_slots * node_flops(node, graph)
    if category is Category.WINDOW:
        return c.window_slots * node_flops(node, graph)
    if trait.gathers:
        return c.gather_slots * node.type.size
    if category is Category.LAYOUT:
        return c.slots * node.type.size
    if category is Category.REDUCE:
        return c.reduce_slots * node_flops(node, graph)
    if node.prim is Prim.CAST:
        return c.cast_slots * node.type.size
    return c.special_slots * node.type.size if trait.special else c.slots * node_flops(node, graph)


def _latency_us(
    problem: Problem, traits: Sequence[Trait], multiplied_on: Collection[NodeId], mixed: bool, c: Estimate
) -> float:
    """Steps that wait for each other; those behind a matrix product are part of its end."""
    graph = problem.graph
    waited: list[float] = []
    behind: list[bool] = []
    for i, (node, trait) in enumerate(zip(graph.nodes, traits, strict=True)):
        before, follows = 0.0, i in multiplied_on
        for j in node.inputs:
            before = max(before, waited[j])
            follows = follows or behind[j]
        behind.append(follows)
        if follows and trait.category is not Category.REDUCE:
            step = 0.0
        elif trait.category is Category.LINEAR:
            step = c.weights_us + c.tap_us * math.prod(graph.type_of(node.inputs[1]).shape[2:])
        else:
            step = trait.step_us
        waited.append(before + step)
    return max((waited[o] for o in graph.outputs), default=0.0) + (c.strided_us if mixed else 0.0)


def _traits(graph: Graph, costs: CostProfile) -> list[Trait]:
    table = _table(costs)
    return [table[n.prim._value_] for n in graph.nodes]


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
        w = node.attrs
        if _behind_contraction(graph, operand):  # a tile of results stays in shared memory
            return max(1.0, halo_ratio((FUSED_TILE,) * len(w.kernel), w.kernel, w.strides, w.dilations))
        return max(1.0, math.prod(w.kernel) / math.prod(w.strides))
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


def _reductions(graph: Graph, traits: Sequence[Trait]) -> int:
    """Length of the longest chain of reductions; squares about a mean are had in the pass of its sum."""
    depth = [0] * len(graph)
    for i, (node, trait) in enumerate(zip(graph.nodes, traits, strict=True)):
        before = max((depth[j] for j in node.inputs), default=0)
        one_more = trait.category is Category.REDUCE and not (before and centred(graph, i) is not None)
        depth[i] = before + one_more
    return max(depth, default=0)


def _traffic_us(
    problem: Problem, facts: GpuFacts, traits: Sequence[Trait], unmoved: Collection[NodeId], mixed: bool
) -> float:
    """Time of the problem's bytes; long rows are read once per reduction of a chain, few rows keep few blocks busy."""
    c = costs_of(facts).estimate
    graph = problem.graph
    read = _touched(graph, traits)
    written = sum(graph.type_of(o).nbytes for o in set(graph.outputs))
    reductions = [n for n, t in zip(graph.nodes, traits, strict=True) if t.category is Category.REDUCE]
    moves = any(
        n.prim is Prim.TRANSPOSE
        and _moves_last(n)
        and i not in unmoved
        and n.type.nbytes * SMALL_SHARE > read + written
        for i, n in enumerate(graph.nodes)
    )
    sectors = _scattered(problem, traits) if moves or Format.LAST in problem.output_formats else 0.0
    scattered = sectors * SECTOR / facts.l2_bandwidth / 1e3 + c.scattered_us * sectors / max(1, written // 2)
    if not reductions:
        turned = c.turned if moves else 1.0
        return memory_us(facts, read, written) * (c.strided if mixed else turned) + scattered
    factor = c.strided if mixed else 1.0
    rows = max(1, min(n.type.size for n in reductions))
    longest = max(graph.type_of(n.inputs[0]).nbytes // max(1, n.type.size) for n in reductions)
    if _side_by_side(problem, reductions):
        longest *= NEIGHBOURS
    if longest <= ROW_BYTES:
        alone = memory_us(facts, read, written, active_sms=rows)
        spread = memory_us(facts, read, written) + facts.grid_barrier_us
        return min(alone, spread) * factor + scattered
    feeds_back = any(graph.type_of(o).size > rows for o in graph.outputs)
    passes = _reductions(graph, traits) - 1 + feeds_back
    moved = memory_us(facts, read * (1 + passes), written) + facts.grid_barrier_us * (1 + passes)
    return moved * factor + scattered


def _scattered(problem: Problem, traits: Sequence[Trait]) -> float:
    """Sectors that stores touch one by one: elements whose neighbours in memory are other blocks'.

    Those are results of rows that are written across, of which a warp has several where they are short, and results
    that are also written as they are: tiles turn what is read.
    """
    graph = problem.graph
    last = Format.LAST in problem.input_formats
    rowless = all(t.category is not Category.REDUCE for t in traits)
    if rowless and len(graph.outputs) == 1:
        return 0.0
    after, turned, length = [False] * len(graph), [False] * len(graph), [0] * len(graph)
    for i, (node, trait) in enumerate(zip(graph.nodes, traits, strict=True)):
        reduces = trait.category is Category.REDUCE
        after[i] = reduces or any(after[j] for j in node.inputs)
        own = graph.type_of(node.inputs[0]).size // max(1, node.type.size) if reduces else 0
        length[i] = max([own, *(length[j] for j in node.inputs)])
        turned[i] = (after[i] or rowless) and (_moves_last(node) != any(turned[j] for j in node.inputs))
    both = rowless and len({turned[o] for o in graph.outputs}) > 1
    found = 0.0
    for output, fmt in zip(graph.outputs, problem.output_formats, strict=True):
        type_ = graph.type_of(output)
        image = type_.rank == 4 and type_.shape[1] > 1 and math.prod(type_.shape[2:]) > 1
        across = turned[output] != (image and not last and fmt is Format.LAST)
        if after[output] and across:
            threads = 1 << (-(-length[output] // VECTOR) - 1).bit_length()
            found += type_.size * min(1.0, threads / WARP)
        elif both and turned[output]:
            found += type_.size
    return found


def _side_by_side(problem: Problem, reductions: list[Node]) -> bool:
    """True where images lie channels-last and their pixels are reduced: a block reads whole sectors of channels."""
    last = Format.LAST in problem.input_formats
    return last and any(
        isinstance(n.attrs, a.ReduceAttrs) and n.type.rank == 4 and 1 not in n.attrs.axes for n in reductions
    )


def _touched(graph: Graph, traits: Sequence[Trait]) -> int:
    """Bytes of inputs that are read at most: those of slices and of what is gathered, where nothing else reads them."""
    whole = {i: graph.type_of(i).nbytes for i in graph.inputs}
    read = dict.fromkeys(whole, 0)
    for node, trait in zip(graph.nodes, traits, strict=True):
        for value in set(node.inputs) if len(node.inputs) > 1 else node.inputs:
            if value in read:
                part = node.prim is Prim.SLICE or (trait.gathers and node.inputs[0] == value)
                read[value] += node.type.nbytes if part else whole[value]
    return sum(min(whole[i], n) or whole[i] for i, n in read.items())


def _mixed(problem: Problem) -> bool:
    """True when images are read in one memory order and written in another."""
    graph = problem.graph
    values = [*zip(graph.inputs, problem.input_formats, strict=True)]
    values += zip(graph.outputs, problem.output_formats, strict=True)
    kinds = {
        f
        for v, f in values
        if graph.type_of(v).rank == 4 and graph.type_of(v).shape[1] > 1 and not _weight(graph.nodes[v])
        and math.prod(graph.type_of(v).shape[2:]) > 1  # a vector of channels lies alike in both
    }  # fmt: skip
    return len(kinds) > 1


def _unmoved(problem: Problem) -> frozenset[NodeId]:
    """Transposes between images that lie channels-last and rows of their pixels: nothing lies elsewhere then."""
    graph = problem.graph
    read = {v for v, f in zip(graph.inputs, problem.input_formats, strict=True) if f is Format.LAST}
    written = {v for v, f in zip(graph.outputs, problem.output_formats, strict=True) if f is Format.LAST}
    turns = [(i, n.inputs[0], n.attrs.perm) for i, n in enumerate(graph.nodes) if isinstance(n.attrs, a.TransposeAttrs)]
    return frozenset(
        i for i, x, p in turns if (x in read and p == FIRST_TO_LAST) or (i in written and p == LAST_TO_FIRST)
    )


def _moves_last(node: Node) -> bool:
    """True when the last axis becomes another one."""
    return isinstance(node.attrs, a.TransposeAttrs) and node.attrs.perm[-1] != len(node.attrs.perm) - 1


def _weight(node: Node) -> bool:
    return isinstance(node.attrs, a.InputAttrs) and node.attrs.is_weight
