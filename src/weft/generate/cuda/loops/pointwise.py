"""What a form of an elementwise kernel costs: cycles from the end of one kernel to the next.

A multiprocessor starts its blocks one after another, computes in issue slots, moves bytes, and waits for a thread's own
results. The largest of these hides the others only as far as many blocks follow each other: blocks that all start at
once load, compute and store in step. What a thread does follows from its loops (`pieces`). The constants were fitted to
2,695 kernels of ten networks, some at batch 16, measured on an NVIDIA H200; see docs/performance-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from weft.device.cuda.blocks import crowded
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.model import gap_us, memory_us
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.pieces import Piece, pieces_of
from weft.generate.loopnest.plan import live_nodes
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem

BLOCK = 222.0
"""Cycles in which a multiprocessor starts one block: addresses, and the first instructions of its warps."""
RESULT, VALUE, SPECIAL, TAP, APART = 30.3, 0.63, 32.4, 6.8, 10.6
"""Cycles of a thread for a result, and for each value, transcendental step, element of a window and read at a distance
on the way to it: its results come one after another."""
THREAD_SLOTS = 13.0
"""Issue slots of a thread besides its results."""
RESULT_SLOTS, VALUE_SLOTS, SPECIAL_SLOTS, TAP_SLOTS, SHARED_SLOTS = 8.5, 0.09, 3.3, 5.2, 13.7
"""Of a result, and of the same steps; of a read that the neighbours of a vector share."""
TILE = 770.0
"""Filling a tile in shared memory, and the barrier behind it."""
GATHER = 255.0
"""A read at an address that was read."""
PORT_BYTES = 67.0
"""Bytes side by side that a multiprocessor loads and stores in a cycle."""
SCATTERED, SCATTERED_TILE = 0.35, 0.16
"""Cycles of a multiprocessor for an element by itself, and where a tile turns it."""
SECTORS = 1.58
"""Time of sectors of which little is used, over that of as many bytes from the L2 cache."""
MEMORY = 0.64
"""Time of the bytes over that of a copy of as many: what was just written is still in the L2 cache."""
SHOWN, IN_STEP = 0.24, 0.41
"""Share of the smaller costs that is not hidden, and what is added to it where each multiprocessor has one block."""
LANES = 128
"""Issue slots of a cycle."""
REGISTERS, RESULT_REGISTERS, VALUE_REGISTERS, MOST_REGISTERS = 16, 0.5, 0.13, 255
"""Registers of a thread: for addresses, for each result, and for each of its values."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an elementwise problem asks of a kernel; counts are those of the longest way to a result."""

    special: int
    gathers: int
    taps: float
    """Elements that windows look at for one result of a piece."""
    read: int
    """Bytes."""
    written: int
    flat: tuple[Piece, ...]
    """Its loops."""
    tiled: tuple[Piece, ...]
    """Its loops where what strides may go through tiles."""

    @property
    def turns(self) -> bool:
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
    flat = pieces_of(problem)
    return Work(
        special=max(x[0] for x in ends),
        gathers=max(x[1] for x in ends),
        taps=taps / max(1, len(flat)),
        read=_touched(graph),
        written=sum(graph.type_of(o).nbytes for o in graph.outputs),
        flat=flat,
        tiled=pieces_of(problem, tile=True) if any(p.apart for p in flat) else flat,
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
    """One piece with a form; cycles of all multiprocessors together, except where it says otherwise."""

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
    costs = list(_costs(w, form))
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
        uneven * busiest * BLOCK,
        max(
            MEMORY * memory_us(facts, w.read, w.written) * facts.clock_ghz * 1e3,
            SECTORS * sum(c.sectors for c in costs) / l2,
        ),
        uneven * sum(c.loaded for c in costs) / facts.sms,
    )
    largest = max(shares)
    return gaps + largest + min(1.0, SHOWN + IN_STEP / busiest) * (sum(shares) - largest)


def _costs(w: Work, form: Form) -> Iterator[_Cost]:
    """Of each piece."""
    for p in w.tiled if form.tile else w.flat:
        lanes = p.lanes(form.vector)
        results = p.edge * p.edge / form.threads if p.tiles else lanes * form.items
        blocks = p.tiles or -(-p.size // (lanes * form.threads * form.items))
        slots = RESULT_SLOTS + VALUE_SLOTS * p.values + SPECIAL_SLOTS * w.special + TAP_SLOTS * w.taps
        slots += p.same * SHARED_SLOTS / lanes
        way = RESULT + VALUE * p.values + SPECIAL * w.special + TAP * w.taps
        scattered, sectors = p.apart * SCATTERED_TILE, 0.0
        if not p.tiles:
            way += p.apart * APART
            scattered = p.apart * SCATTERED
            # further rows of the same block use the rest of a sector
            sectors = p.size * max(p.least, p.sectors / max(1.0, form.threads * results / p.along))
        yield _Cost(
            blocks=blocks,
            issued=(blocks * form.threads * THREAD_SLOTS + p.size * slots) / LANES,
            loaded=p.size * (scattered + p.near / PORT_BYTES),
            sectors=sectors,
            thread=(TILE if p.tiles else 0.0) + results * way + GATHER * w.gathers,
            registers=REGISTERS if p.tiles else REGISTERS + results * (RESULT_REGISTERS + VALUE_REGISTERS * p.values),
        )
