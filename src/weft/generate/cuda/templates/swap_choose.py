"""Which transposed shapes to measure, by a model of what they cost: weights from memory, and what does not hide there.

Bytes that are on their way at once, what the blocks read of the left operand, and clusters bound a kernel, beside the
gap before it and the latency of its first bytes, of which hints to the L2 cache take a part where the next kernel's
blocks find room beside those that run. The constants were fitted to kernels measured on an NVIDIA H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.model import gap_us
from weft.generate.cuda.templates import swap
from weft.generate.cuda.templates.product import Product
from weft.generate.cuda.templates.swap import Shape
from weft.generate.cuda.templates.tma_cost import CLUSTERED, PORT
from weft.generate.cuda.templates.tma_operands import STEP, stages_of_sum
from weft.ir.declined import Declined

MOST = 0
"""Rows up to which transposed shapes are offered; 0: not before they have run."""
BUDGETS = (72 << 10, 110 << 10)
"""Shared memory of a block, so that three or two find room on a multiprocessor."""
STREAMED = 0.95
"""Share of the bandwidth of reading that a kernel reaches."""
FIRST = 1600.0
"""Cycles of the first weights from memory and of the last results on their way."""
FLIGHT = 1100.0
"""Cycles of a copy from memory."""
HINTED = 0.5
"""Share of the gap and of the first bytes' latency that hints hide."""
CLUSTER, RANK = 900.0, 150.0
"""A cluster: cycles, and cycles per block."""
_STAGES = 16
_RESERVED = 1024


def shapes(p: Product, facts: GpuFacts, keep: int = 3) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first; none for what the template does not take, or has too many rows."""
    found = sorted(every(p, facts), key=lambda x: (x[0], x[1].threads, x[1].stages))
    seen: set[tuple[int, int]] = set()
    kept = []
    for cycles_, s in found:
        if (s.bn, s.split) not in seen:
            seen.add((s.bn, s.split))
            kept.append((cycles_, s))
    return kept[:keep]


def every(p: Product, facts: GpuFacts) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape) of everything that fits, in no order."""
    if facts.capability != 90 or p.m > MOST or swap.applies(p) is not None:
        return []
    return [(cycles(p, s, facts), s) for s in _candidates(p, facts) if not isinstance(swap.operands(p, s), Declined)]


def _candidates(p: Product, facts: GpuFacts) -> Iterable[Shape]:
    bm, kt = -(-p.m // 8) * 8, stages_of_sum(p, STEP)
    for bn in (32, 64, 128, 256):
        if bn > 32 and bn >= 2 * p.n:
            continue
        tiles = -(-p.n // bn) * p.z
        for split in (1, *CLUSTERED):
            if split > 1 and (kt < 4 * split or tiles * split > 2 * facts.sms):
                continue
            for budget in BUDGETS:
                one = Shape(bm, bn, 1, 1, split, 0)
                stages = min(_STAGES, budget // one.stage_bytes, max(2, kt // split))
                s = Shape(bm, bn, 1, stages, split, 2 * stages)
                if stages >= 2 and swap.refused(p, s) is None:
                    yield s


def cycles(p: Product, s: Shape, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels."""
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z * s.split
    resident = max(1, min(facts.shared_per_sm // (s.shared_bytes + _RESERVED), facts.threads_per_sm // s.threads))
    room = facts.sms * resident
    rounds = -(-blocks // room)
    kt = stages_of_sum(p, STEP)
    weights = p.n * p.k * p.z * 2.0
    far = STREAMED * facts.read_bandwidth[-1][1] / facts.clock_ghz
    flight = min(blocks, room) * s.stages * s.bn * STEP * 2.0 / FLIGHT
    copied = blocks * kt / s.split * s.stage_bytes
    port = min(blocks, facts.sms) * PORT
    busiest = rounds * room / blocks if rounds > 1 else 1.0
    start = gap_us(facts) * facts.clock_ghz * 1e3 + FIRST
    if s.ahead and 2 * blocks <= room:
        start *= 1.0 - HINTED
    end = (CLUSTER + RANK * s.split if s.split > 1 else 0.0) + s.bm * s.bn / s.split / s.groups / 16.0
    return start + max(weights / far, weights / flight, copied / port) * math.sqrt(busiest) + end
