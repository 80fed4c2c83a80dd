"""Which transposed shapes to measure, by a model of what they cost: weights from memory, and what does not hide there.

Bytes that are on their way at once and what blocks read of the left operand may bound a kernel, too; besides there are
the gap before it, the latency of its first and last bytes, and clusters. The constants were fitted to kernels measured
on an NVIDIA H200 (docs/gemm.md).
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

MOST = 32
"""Rows up to which transposed shapes are offered: of more, other templates have tiles that are as full."""
STREAMED = 0.9
"""Share of the bandwidth of reading that a kernel reaches."""
FIRST = 2600.0
"""Cycles of the first weights from memory and of the last results on their way."""
FLIGHT = 3000.0
"""Cycles from asking for a stage to asking for the next one in its place, while memory is busy."""
RANK = 600.0
"""Cycles for every block of a cluster beyond the first, less what a pair of them saves."""
_PAIR = 400.0
_STAGES = (5, 8, 12)
_RESERVED = 1024


def shapes(p: Product, facts: GpuFacts, keep: int = 3) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first; none for what the template does not take, or has too many rows."""
    seen: set[tuple[int, int]] = set()
    kept = []
    for modelled, s in sorted(every(p, facts), key=_order):
        if (s.bn, s.split) not in seen:
            seen.add((s.bn, s.split))
            kept.append((modelled, s))
    return kept[:keep]


def _order(x: tuple[float, Shape]) -> tuple[float, int, int]:
    """Where the model sees no difference, fewer stages are better for many blocks by themselves, more for clusters."""
    modelled, s = x
    return modelled, s.threads, s.stages if s.split == 1 else -s.stages


def every(p: Product, facts: GpuFacts) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape) of everything that fits, in no order."""
    if facts.capability != 90 or p.m > MOST or swap.applies(p) is not None:
        return []
    return [(cycles(p, s, facts), s) for s in _candidates(p, facts) if not isinstance(swap.operands(p, s), Declined)]


def _candidates(p: Product, facts: GpuFacts) -> Iterable[Shape]:
    bm, kt = -(-p.m // 8) * 8, stages_of_sum(p, STEP)
    for bn in (64, 128):
        if bn > 64 and bn >= 2 * p.n:
            continue
        tiles = -(-p.n // bn) * p.z
        for split in (1, *CLUSTERED):
            if split > 1 and (kt < 4 * split or tiles * split > 2 * facts.sms):
                continue
            for stages in sorted({max(2, min(n, kt // split)) for n in _STAGES}):
                s = Shape(bm, bn, stages, split)
                if s.shared_bytes <= facts.shared_per_block:
                    yield s


def cycles(p: Product, s: Shape, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels."""
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z * s.split
    resident = max(1, min(facts.shared_per_sm // (s.shared_bytes + _RESERVED), facts.threads_per_sm // s.threads))
    room = int(facts.sms * CLUSTERED.get(s.split, 1.0)) * resident
    kt = stages_of_sum(p, STEP)
    far = STREAMED * facts.read_bandwidth[-1][1] / facts.clock_ghz
    flight = min(blocks, room) * s.stages * s.bn * STEP * 2.0 / FLIGHT
    port = min(blocks, facts.sms) * PORT
    main = max(p.n * p.k * p.z * 2.0 / min(far, flight), blocks * kt / s.split * s.stage_bytes / port)
    if blocks > room:  # the last ones are few
        main *= math.sqrt(-(-blocks // room) * room / blocks)
    start = gap_us(facts) * facts.clock_ghz * 1e3 + FIRST
    return start + main + (RANK * (s.split - 1) - _PAIR if s.split > 1 else 0.0)
