"""What a form of an elementwise kernel costs: cycles from the end of one kernel to the next.

At batch 1 a thread's own work is most of it: its results one after another, each through all steps. So narrow vectors
beat wide ones as long as threads are few, and tiles in shared memory (`Form.tile`) pay only where there are enough of
them for all multiprocessors. The constants were fitted to 861 kernels of ten networks, some at batch 16, measured on an
NVIDIA H200; see docs/performance-model.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.model import gap_us
from weft.generate.cpp.plan import live_nodes
from weft.generate.cuda.forms import Form
from weft.ir import attrs as a
from weft.ir.prims import CATEGORY, FREE, Category, Prim
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.candidate import Problem

START = 590.0
"""First instructions, the trip to the L2 cache and back, the way of the last results."""
RESULT, PLAIN, SPECIAL = 9.9, 5.9, 28.0
"""Cycles of a result of a thread, and of each elementwise and transcendental step on its way."""
RESULT_SLOTS, PLAIN_SLOTS, SPECIAL_SLOTS = 9.9, 1.9, 0.5
"""Issue slots of the same."""
TILE = 1890.0
"""Filling a tile in shared memory, and the barrier behind it."""
GATHER = 810.0
"""A read at an address that was read."""
SECTOR = 32
"""Bytes that a single element moves where its neighbours lie elsewhere."""
SHOWN = 0.56
"""Share of the traffic that is not hidden."""
MOST_LANES = 8
EDGE, WIDE_EDGE = 64, 32
"""Sides of a tile of elements of less than 4 bytes, and of the others."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an elementwise problem asks of a kernel; counts are those of the longest way to a result."""

    size: int
    itemsize: int
    plain: int
    special: int
    gathers: int
    read: int
    """Bytes."""
    written: int


@lru_cache(maxsize=8)
def work_of(problem: Problem) -> Work:
    """Of a problem without reductions and contractions."""
    graph = problem.graph
    steps: dict[int, tuple[int, int, int]] = {}
    for i in live_nodes(graph):
        node = graph.nodes[i]
        found = [steps.get(j, (0, 0, 0)) for j in node.inputs] or [(0, 0, 0)]
        plain, special, gathers = (max(x[k] for x in found) for k in range(3))
        if node.prim in TRANSCENDENTAL:
            special += 1
        elif isinstance(node.attrs, a.WindowAttrs):
            plain += math.prod(node.attrs.kernel)
        elif node.prim in (Prim.GATHER, Prim.TAKE_ALONG):
            gathers += 1
        elif node.prim not in FREE and CATEGORY[node.prim] is Category.ELEMENTWISE:
            plain += 1
        steps[i] = plain, special, gathers
    outputs = [graph.type_of(o) for o in graph.outputs]
    ends = [steps.get(o, (0, 0, 0)) for o in graph.outputs]
    return Work(
        size=max(t.size for t in outputs),
        itemsize=min(t.dtype.itemsize for t in outputs),
        plain=max(x[0] for x in ends),
        special=max(x[1] for x in ends),
        gathers=max(x[2] for x in ends),
        read=sum(graph.type_of(i).nbytes for i in graph.inputs),
        written=sum(t.nbytes for t in outputs),
    )


def cycles(w: Work, form: Form, turns: bool, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels. `turns`: some input runs along another axis than the outputs."""
    through_tiles = form.tile and turns
    if through_tiles:
        area = (WIDE_EDGE if w.itemsize >= 4 else EDGE) ** 2
        blocks, results = -(-w.size // area), area / form.threads
    else:
        results = form.items * max(1, min(MOST_LANES, form.vector // w.itemsize))
        blocks = -(-w.size // (form.threads * results))
    busiest = -(-blocks // facts.sms)
    waves = -(-busiest // max(1, facts.threads_per_sm // form.threads))
    one = results * (RESULT + PLAIN * w.plain + SPECIAL * w.special) + GATHER * w.gathers
    one += TILE if through_tiles else 0.0
    slots = RESULT_SLOTS + PLAIN_SLOTS * w.plain + SPECIAL_SLOTS * w.special
    issue = busiest * form.threads * results * slots / 128
    moved = w.read + w.written
    if turns and not through_tiles:
        moved += w.read // w.itemsize * SECTOR
    traffic = SHOWN * moved / (facts.l2_bandwidth / facts.clock_ghz)
    return gap_us(facts) * facts.clock_ghz * 1e3 + START + max(waves * one, issue) + traffic
