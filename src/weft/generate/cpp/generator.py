"""The `cpp` generator: which problems it takes, in which ways, and the kernel of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast, final

from weft.device.any import DeviceFacts
from weft.device.facts import CpuFacts
from weft.generate.cpp import scan, templates
from weft.generate.cpp.kernel import Form, KernelText, Oversized
from weft.generate.loopnest.plan import EXPENSIVE, REDUCTIONS, live_nodes
from weft.generate.loopnest.scans import has_scan, scan_group
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource, Schedule
from weft.kernels.stored_names import entry_name

MAX_CONSTANT_BYTES = 64 * 1024
"""More than this belongs into memory that the plan owns, not into the text of a kernel."""
SERIAL_WORK = 60_000
"""Element operations below which a parallel region costs more than it gains (some 10 microseconds)."""
PARALLEL_WORK = 2_000_000
"""Element operations above which running on one thread is not worth measuring."""


def work_of(graph: Graph) -> int:
    """Rough number of element operations: an expensive one counts ten."""
    total = 0
    for node in live_nodes(graph):
        record = graph.nodes[node]
        if CATEGORY[record.prim] in (Category.SOURCE, Category.BROADCAST, Category.VIEW):
            continue
        size = max([record.type.size, *(graph.type_of(i).size for i in record.inputs)])
        total += size * (10 if record.prim in EXPENSIVE else 1)
    return total


@final
class CppGenerator:
    """C++ kernels for the CPU, see `weft.generate.protocol.Generator`."""

    name = "cpp"

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        """Some forms, the most promising first; a decline names the primitive that stands in the way."""
        if not isinstance(facts, CpuFacts):
            return Declined("C++ kernels run on the CPU")
        if _has_contraction(problem.graph):
            return templates.schedules(problem, facts)
        declined = _refuse(problem)
        if declined is not None:
            return declined
        graph = problem.graph
        live = live_nodes(graph)
        lanes = _lanes(graph, facts.simd_bytes)
        reductions = any(graph.nodes[n].prim in REDUCTIONS for n in live)
        work = work_of(graph)
        threads: list[int] = []
        if facts.threads > 1 and work >= SERIAL_WORK:
            threads.append(facts.threads)
        if not threads or work < PARALLEL_WORK:
            threads.append(1)
        if has_scan(graph):
            group = scan_group(graph)
            if isinstance(group, Declined):
                return group
            return [c.schedule() for c in scan.configs(group, lanes, threads)]
        found = []
        for count in threads:
            if not reductions:
                found.append(_schedule(lanes, count, rows=True, keep=False, unroll=1))
                if sum(graph.nodes[n].prim in EXPENSIVE for n in live) > 1:
                    found.append(_schedule(lanes, count, rows=True, keep=True, unroll=1))
                continue
            # costly functions need registers of their own: fewer copies of the loop's body first
            first = 2 if any(graph.nodes[n].prim in EXPENSIVE for n in live) else 4
            found.append(_schedule(lanes, count, rows=True, keep=True, unroll=first))
            found.append(_schedule(lanes, count, rows=True, keep=False, unroll=4))
            found.append(_schedule(lanes, count, rows=False, keep=True, unroll=4))
            if count == threads[0]:
                found.append(_schedule(lanes, count, rows=True, keep=True, unroll=6 - first))
                found.append(_schedule(lanes, count, rows=False, keep=False, unroll=4))
        return found

    def emit(self, problem: Problem, schedule: Schedule) -> KernelSource | Declined:
        """The kernel's text, or why there is none."""
        if _has_contraction(problem.graph):
            return templates.emit(problem, schedule)
        declined = _refuse(problem)
        if declined is not None:
            return declined
        if has_scan(problem.graph):
            return scan.emit(problem, schedule)
        form = Form(
            lanes=cast("int", schedule.param("lanes")),
            threads=cast("int", schedule.param("threads")),
            rows=cast("bool", schedule.param("rows")),
            keep=cast("bool", schedule.param("keep")),
            unroll=cast("int", schedule.param("unroll")),
        )
        entry = entry_name(problem.key, schedule)
        try:
            kernel = KernelText(problem, form, entry)
        except Oversized:
            return Declined("too many values in one kernel")
        return KernelSource(schedule, kernel.text, entry, workspace_bytes=kernel.workspace_bytes)


def _schedule(lanes: int, threads: int, *, rows: bool, keep: bool, unroll: int) -> Schedule:
    return Schedule(
        "cpp",
        (("keep", keep), ("lanes", lanes), ("rows", rows), ("threads", threads), ("unroll", unroll)),
    )


def _lanes(graph: Graph, simd_bytes: int) -> int:
    """Elements per vector: the widest floating type in the graph fills a register; without floats, 4 bytes do."""
    width = 4
    for node in live_nodes(graph):
        dtype = graph.type_of(node).dtype
        if dtype is DType.F64:
            width = 8
    return max(4, simd_bytes // width)


def _has_contraction(graph: Graph) -> bool:
    return any(CATEGORY[graph.nodes[n].prim] is Category.LINEAR for n in live_nodes(graph))


def _refuse(problem: Problem) -> Declined | None:
    graph = problem.graph
    for node in live_nodes(graph):
        record = graph.nodes[node]
        if CATEGORY[record.prim] in (Category.LINEAR, Category.OPAQUE):
            return Declined(f"{record.prim.value} is not a primitive of fused loops")
        if record.type.dtype.is_float8:
            return Declined(f"{record.type.dtype.value}: C++ kernels have no floats of 8 bits")
        if record.prim is Prim.CONSTANT and record.type.size == 0:
            return Declined("a constant without elements")
        if record.prim is Prim.CONSTANT and record.type.nbytes > MAX_CONSTANT_BYTES:
            return Declined(f"a constant of {record.type.nbytes} B in the text of a kernel")
        if record.prim in (Prim.GATHER, Prim.TAKE_ALONG) and max(graph.type_of(record.inputs[0]).shape) >= 2**31:
            return Declined("indices past 32 bits")
        if math.prod(record.type.shape) >= 2**48:
            return Declined(f"{record.type} is too large")
    if len(set(graph.outputs)) != len(graph.outputs):
        return Declined("an output occurs twice")
    for node in graph.outputs:
        if CATEGORY[graph.nodes[node].prim] is Category.SOURCE:
            return Declined("an output is an input or a constant")
    return None
