"""What a problem must cost at least, and what it may cost: arithmetic on its graph, no device.

`lower_bound_us` must be sound: it discards. `estimate_us` must rank: it orders what is left. Library calls are never
modelled better than this; they are measured.

Source: roofline; performance notes on the CPU variant of the model.
"""

from __future__ import annotations

from typing import Protocol, cast

from weft.device.any import DeviceFacts
from weft.device.kinds import kind_with, part
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.ir.work import node_flops, node_transcendentals
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.orchestrate.compulsory import Work, compulsory_work, fully_needed

__all__ = ["Facts", "Work", "compulsory_work", "estimate_us", "fully_needed", "lower_bound_us"]


class Facts(Protocol):
    """The part of the CPU's facts that an estimate reads; `weft.device.facts.CpuFacts` has it."""

    @property
    def threads(self) -> int:
        """Threads that kernels use."""

    @property
    def frequency_ghz(self) -> float:
        """Clock of a busy core."""

    @property
    def l2_bytes(self) -> int:
        """Second-level cache of one core."""

    @property
    def l3_bytes(self) -> int:
        """Last-level cache."""

    @property
    def peak_flops_f32(self) -> float:
        """FLOP/s with all threads."""

    @property
    def ceiling_flops_f32(self) -> float:
        """FLOP/s that no kernel exceeds."""

    @property
    def lanes_f32(self) -> int:
        """f32 lanes of a vector."""

    @property
    def bandwidth(self) -> tuple[tuple[int, float], ...]:
        """(array bytes, GB/s read plus written), sizes ascending."""

    @property
    def read_bandwidth(self) -> tuple[tuple[int, float], ...]:
        """The same for reading only."""

    @property
    def fork_us(self) -> float:
        """Microseconds of an empty parallel region."""

    def bandwidth_at(self, size_bytes: int, *, read_only: bool = False) -> float:
        """GB/s for a working set of this size."""

    def source_of(self, field: str) -> str:
        """Where a field's value comes from: `measured`, or something that bounds nothing."""


def lower_bound_us(problem: Problem, facts: DeviceFacts) -> float:
    """Microseconds that no correct kernel can beat on such a device when its inputs may be warm; 0: unknown."""
    found: float = part(kind_with(facts).bound)(problem, facts)
    return found


def estimate_us(problem: Problem, facts: DeviceFacts) -> float:
    """Microseconds that a good kernel may take on such a device. Only the order matters."""
    found: float = part(kind_with(facts).estimate)(problem, facts)
    return found


MARGIN = 1.1
"""Probes may miss the best bandwidth and clock by so much."""


def host_lower_bound_us(problem: Problem, facts: Facts) -> float:
    """Microseconds that no correct kernel can beat when its inputs may be warm.

    Bytes that fit no cache go at most at the probed memory bandwidth, all bytes at most at the best probed one;
    products at most at the full clock. Each with a margin. f64 runs at half the rate of f32; narrower types may have
    units that were not probed, so their products count as nothing. Where the device was not probed, or the probes did
    not show what a machine with nothing else to do shows, nothing is known, and the bound is 0.
    """
    if any(facts.source_of(x) != "measured" for x in ("peak_flops_f32", "bandwidth", "read_bandwidth")):
        return 0.0
    work = compulsory_work(problem)
    total = work.read_bytes + work.written_bytes
    fastest = max(b for _, b in facts.bandwidth + facts.read_bandwidth)
    cached = facts.l3_bytes + facts.l2_bytes * facts.threads
    dram = max(facts.bandwidth_at(total), facts.bandwidth_at(total, read_only=True))
    beyond = max(0, total - cached)
    memory = max(total / fastest, beyond / dram) / MARGIN / 1e3  # bytes per GB/s are nanoseconds
    rate = {DType.F32: facts.ceiling_flops_f32, DType.F64: facts.ceiling_flops_f32 / 2}
    types = {n.type.dtype for n in problem.graph.nodes if CATEGORY[n.prim] is Category.LINEAR}
    peak = max((rate.get(t, float("inf")) for t in types), default=float("inf"))
    compute = work.contraction_flops / peak / MARGIN * 1e6
    return max(memory, compute)


EFFICIENCY = {Prim.MATMUL: 0.6, Prim.CONV: 0.45}
"""Share of the ceiling that a good kernel reaches on common shapes."""
LAST_GAIN = 1.2
"""Convolutions that vectorise over channels read them side by side."""
TRANSCENDENTAL_OPERATIONS = 12.0
"""Vector operations of one exp, tanh or erf, in units of one addition."""
STRIDED, SCATTERED = 2.5, 6.0
"""Factor on traffic when a kernel reads one memory order and writes another, and when it writes channels-last what it
reads row-major: rows of images are often powers of two long, so that what is gathered shares few sets of the caches."""
WRITTEN = 2.0
"""A line that is written is read before."""
PICKED = 40.0
"""Additions that one element costs which is gathered along the innermost dimension."""


def host_estimate_us(problem: Problem, facts: Facts) -> float:
    """Microseconds a good kernel may take: the larger of arithmetic and traffic, a share of the other, one fork.

    Only the order matters. Arithmetic in front of a window or gather is not charged for being done again.
    """
    graph = problem.graph
    read = sum(graph.type_of(i).nbytes for i in graph.inputs)
    written = sum(graph.type_of(o).nbytes for o in graph.outputs)
    contraction = elementwise = 0.0
    for node in graph.nodes:
        flops = float(node_flops(node, graph))
        if CATEGORY[node.prim] is Category.LINEAR:
            gain = LAST_GAIN if node.prim is Prim.CONV and Format.LAST in problem.input_formats else 1.0
            contraction += flops / (EFFICIENCY[node.prim] * gain * _fill(graph, node, facts))
        elif CATEGORY[node.prim] is Category.LAYOUT:
            elementwise += (PICKED if _picks(problem, node) else 1.0) * node.type.size
        else:
            elementwise += flops + (TRANSCENDENTAL_OPERATIONS - 1) * node_transcendentals(node, graph)
    # an addition per lane and cycle is a fourth of the peak of two FMA units
    compute = (contraction + 4.0 * elementwise) / facts.ceiling_flops_f32 * 1e6
    # what is measured has left the second-level caches: buffers are rotated
    rate = facts.bandwidth_at(max(read + written, 4 * facts.l2_bytes * facts.threads))
    traffic = (read + WRITTEN * written) / rate / 1e3 * _order_factor(problem)
    parallel = facts.fork_us if facts.threads > 1 and max(compute, traffic) > facts.fork_us / 4 else 0.0
    return 0.2 + parallel + max(compute, traffic) + 0.2 * min(compute, traffic)


def _fill(graph: Graph, node: Node, facts: Facts) -> float:
    """Share of a vector, and of a register tile, that a contraction can use."""
    w = graph.type_of(node.inputs[1]).shape
    if node.prim is Prim.MATMUL:
        m, k, n = graph.type_of(node.inputs[0]).shape[-2], w[-2], w[-1]
        fill = min(1.0, max(m, n) / facts.lanes_f32) * min(1.0, min(m, n) / 4) * k / (k + 8)
        return max(fill, 0.02)
    c = cast("a.ConvAttrs", node.attrs)
    outs, ins = (w[1] * c.groups, w[0]) if c.transposed else (w[0], w[1] * c.groups)
    per_group = min(outs, ins) / c.groups
    return 0.12 if per_group <= 1 else max(0.05, min(1.0, per_group / facts.lanes_f32))


def _picks(problem: Problem, node: Node) -> bool:
    """Does a primitive gather single elements, along what lies innermost in memory?"""
    if node.prim not in (Prim.GATHER, Prim.TAKE_ALONG) or Format.LAST in problem.output_formats:
        return False
    return cast("a.GatherAttrs", node.attrs).axis == problem.graph.type_of(node.inputs[0]).rank - 1


def _order_factor(problem: Problem) -> float:
    """Reading one memory order and writing the other costs cache lines that are used in part."""
    graph = problem.graph

    def orders_of(nodes: tuple[NodeId, ...], formats: tuple[Format, ...]) -> set[Format]:
        images = ((v, f) for v, f in _formatted(problem, nodes, formats) if graph.type_of(v).rank == 4)
        return {f for v, f in images if graph.type_of(v).shape[1] > 1}

    read, written = orders_of(graph.inputs, problem.input_formats), orders_of(graph.outputs, problem.output_formats)
    orders = read | written
    if len(orders) > 1 and Format.LAST in written and Format.LAST not in read:
        return SCATTERED
    transposes = any(
        n.prim is Prim.TRANSPOSE and cast("a.TransposeAttrs", n.attrs).perm[-1] != n.type.rank - 1 for n in graph.nodes
    )
    return STRIDED if len(orders) > 1 or transposes else 1.0


def _formatted(problem: Problem, nodes: tuple[NodeId, ...], formats: tuple[Format, ...]) -> list[tuple[NodeId, Format]]:
    pairs = zip(nodes, formats, strict=True)
    return [(v, f) for v, f in pairs if not _weight(problem.graph.nodes[v])]


def _weight(node: Node) -> bool:
    return isinstance(node.attrs, a.InputAttrs) and node.attrs.is_weight
