"""What a form of an elementwise kernel costs: cycles from the end of one kernel to the next.

A multiprocessor starts its blocks one after another, computes in issue slots, moves bytes, and waits for a thread's own
results. The largest of these hides the others only as far as many blocks follow each other: blocks that all start at
once load, compute and store in step. What a thread does follows from its loops (`profiles`). The constants are those of
the device's profile; see docs/performance-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from weft.costmodel.constants import Pointwise
from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us, memory_us
from weft.costmodel.tiles import crowded
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.profile import LoopProfile, profiles_of
from weft.generate.loopnest.plan import live_nodes
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem

LANES = 128
"""Issue slots of a cycle."""
MOST_REGISTERS = 255
"""Of a thread."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an elementwise problem asks of a kernel; counts are those of the longest way to a result."""

    special: int
    gathers: int
    taps: float
    """Elements that windows look at for one result of a loop."""
    read: int
    """Bytes."""
    written: int
    flat: tuple[LoopProfile, ...]
    """Its loops."""
    tiled: tuple[LoopProfile, ...]
    """Its loops where what strides may go through tiles."""

    @property
    def transposes(self) -> bool:
        """Whether tiles are any use."""
        return any(p.tiles for p in self.tiled)


@lru_cache(maxsize=64)
def work_of(problem: Problem) -> Work:
    """Of a problem without reductions and contractions."""
    graph = problem.graph
    steps: dict[int, tuple[int, int]] = {}
    taps = 0
    for i in live_nodes(graph):
        node = graph.nodes[i]
        found = [steps.get(j, (0, 0)) for j in node.inputs] or [(0, 0)]
        special, gathers = (max(x[k] for x in found) for k in range(2))
        special += node.prim in TRANSCENDENTAL
        gathers += node.prim in (Prim.GATHER, Prim.TAKE_ALONG)
        taps += math.prod(node.attrs.kernel) if isinstance(node.attrs, a.WindowAttrs) else 0
        steps[i] = special, gathers
    ends = [steps.get(o, (0, 0)) for o in graph.outputs]
    flat = profiles_of(problem)
    return Work(
        special=max(x[0] for x in ends),
        gathers=max(x[1] for x in ends),
        taps=taps / max(1, len(flat)),
        read=_touched(graph),
        written=sum(graph.type_of(o).nbytes for o in graph.outputs),
        flat=flat,
        tiled=profiles_of(problem, tile=True) if any(p.apart for p in flat) else flat,
    )


def _touched(graph: Graph) -> int:
    """Bytes of inputs that are read at most: of those that only slices read, their parts."""
    whole = {i: graph.type_of(i).nbytes for i in graph.inputs}
    read = dict.fromkeys(whole, 0)
    for node in graph.nodes:
        for i in set(node.inputs) & whole.keys():
            read[i] += node.type.nbytes if node.prim is Prim.SLICE else whole[i]
    return sum(min(whole[i], n) or whole[i] for i, n in read.items())


@dataclass(frozen=True, slots=True)
class _Cost:
    """One loop profile with a form; cycles of all multiprocessors together, except where it says otherwise."""

    blocks: int
    issued: float
    loaded: float
    sectors: float
    """Bytes."""
    thread: float
    """Cycles of one thread."""
    registers: float


def cycles(w: Work, form: Form, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels."""
    fit = costs_of(facts).pointwise
    costs = list(_costs(w, form, fit))
    launches = 1 + max((p.launch for p in w.flat), default=0)
    gaps = launches * gap_us(facts) * facts.clock_ghz * 1e3
    if not costs:
        return gaps
    blocks = sum(c.blocks for c in costs)
    busiest = -(-blocks // facts.sms)
    registers = min(MOST_REGISTERS, max(c.registers for c in costs))
    resident = min(
        facts.threads_per_sm // form.threads,
        facts.blocks_per_sm,
        int(facts.registers_per_sm / (registers * form.threads)),
    )
    waves = -(-busiest // max(1, resident))
    uneven = crowded(busiest, blocks, facts.sms, resident) / busiest
    l2 = facts.l2_bandwidth / facts.clock_ghz
    shares = (
        waves * max(c.thread for c in costs),
        uneven * sum(c.issued for c in costs) / facts.sms,
        uneven * busiest * fit.block,
        max(
            fit.memory * memory_us(facts, w.read, w.written) * facts.clock_ghz * 1e3,
            fit.sectors * sum(c.sectors for c in costs) / l2,
        ),
        uneven * sum(c.loaded for c in costs) / facts.sms,
    )
    largest = max(shares)
    return gaps + largest + min(1.0, fit.shown + fit.in_step / busiest) * (sum(shares) - largest)


def _costs(w: Work, form: Form, fit: Pointwise) -> Iterator[_Cost]:
    """Of each profile."""
    for p in w.tiled if form.tile else w.flat:
        lanes = p.lanes(form.vector)
        results = p.edge * p.edge / form.threads if p.tiles else lanes * form.items
        blocks = p.tiles or -(-p.size // (lanes * form.threads * form.items))
        slots = fit.result_slots + fit.value_slots * p.values + fit.special_slots * w.special + fit.tap_slots * w.taps
        slots += p.same * fit.shared_slots / lanes
        way = fit.result + fit.value * p.values + fit.special * w.special + fit.tap * w.taps
        scattered, sectors = p.apart * fit.scattered_tile, 0.0
        if not p.tiles:
            way += p.apart * fit.apart
            scattered = p.apart * fit.scattered
            # further rows of the same block use the rest of a sector
            sectors = p.size * max(p.least, p.sectors / max(1.0, form.threads * results / p.along))
        yield _Cost(
            blocks=blocks,
            issued=(blocks * form.threads * fit.thread_slots + p.size * slots) / LANES,
            loaded=p.size * (scattered + p.near / fit.port_bytes),
            sectors=sectors,
            thread=(fit.tile if p.tiles else 0.0) + results * way + fit.gather * w.gathers,
            registers=fit.registers
            if p.tiles
            else fit.registers + results * (fit.result_registers + fit.value_registers * p.values),
        )
