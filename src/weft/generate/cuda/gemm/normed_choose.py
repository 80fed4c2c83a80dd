"""Which shapes to measure of products that normalise their left operand, or leave partial sums of their result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.normed import MOST_PIECES, Norm
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import choose, cost
from weft.generate.cuda.gemm.mma.kernel import MmaConfig, shared_of, whole_pieces
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import cost as tma_cost
from weft.generate.cuda.gemm.tma import normed as tma_normed
from weft.generate.cuda.gemm.tma.operands import rows_of
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined
from weft.kernels.source import Schedule

MOST = 6
"""Schedules of one problem."""
LOOKED_AT = 40
ISSUE = 5.0
"""Instructions for an element on its way: half of unpacking and packing, and what the norm does."""
OWN = 4.0
"""And for an element that its mean and variance are computed from: read, added, its distance squared and added."""
SHORT = 128
"""Elements of a row whose mean and variance cost little in any block."""
ROWS_AT_ONCE = 32
"""Rows of a block that are worth computing means and variances for: all its blocks of columns do the same."""


def schedules(p: Product, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """Shapes of both templates, the best by their models and the norm's instructions first."""
    found = [(cycles, s.schedule("wgmma" if s.group else "mma")) for cycles, s in fragments(p, facts)]
    found += [(cycles, s.schedule()) for cycles, s in warpgroups(p, facts)]
    if not found:
        return Declined("no shape has registers and shared memory for the norm")
    found.sort(key=lambda x: x[0])
    best = found[0][1].param("template")
    other = next((x for x in found if x[1].param("template") != best), None)
    kept = found[:MOST]
    if other is not None and other not in kept:
        kept = [*kept[: MOST - 1], other]
    return [s for _, s in kept]


def fragments(p: Product, facts: GpuFacts) -> list[tuple[float, MmaConfig]]:
    """(modelled cycles, shape) of the template of fragments, best first."""
    width = epilogue.plan(p).width
    found = []
    for cycles, s in choose.shapes(p, facts, LOOKED_AT):
        if p.parts is not None and not whole_pieces(s, width):
            continue
        if p.norm is not None and p.norm.own and p.norm.length > SHORT and s.bm > ROWS_AT_ONCE and not s.group:
            continue
        if shared_of(s, p.dtype.itemsize, cost.sizes_of(p).tables) > facts.shared_per_block:
            continue
        found.append((cycles + (_extra(p.norm, p, s, facts) if p.norm is not None else 0.0), s))
    return sorted(found, key=lambda x: x[0])[:MOST]


def _extra(norm: Norm, p: Product, s: MmaConfig, facts: GpuFacts) -> float:
    """Cycles in which the busiest multiprocessor normalises."""
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * s.split
    each = -(-blocks // facts.sms)
    elements = s.bm * -(-norm.length // s.split)
    sums = OWN * s.bm * norm.length if norm.own else 2.0 * s.bm * min(MOST_PIECES, norm.length / 32)
    return each * (ISSUE * elements + sums) / 128 + (600.0 if norm.own else 300.0)


def warpgroups(p: Product, facts: GpuFacts) -> list[tuple[float, TmaConfig]]:
    """(modelled cycles, shape) of the tma template, best first."""
    rows, width = rows_of(p), epilogue.plan(p).width
    if isinstance(rows, Declined):
        return []
    found = []
    seen: set[tuple[int, int, int, bool]] = set()
    for cycles, given in tma_choose.shapes(p, facts, LOOKED_AT):
        s = given
        more = tma_normed.bytes_of(p)
        most = min(facts.shared_per_block, facts.shared_per_sm // s.min_ctas - facts.shared_reserved)
        while s.stages > 2 and s.shared_bytes() + more > most:
            s = replace(s, stages=s.stages - 1)
        fits = s.split == 1 or s.bm * s.bn * 4 <= s.stages * s.stage_bytes
        if s.stages < min(3, given.stages) or not fits or tma_normed.declined(p, rows, s, width) is not None:
            continue
        alike = (s.bm, s.bn, s.split, s.pingpong)
        if math.isfinite(cycles) and alike not in seen:
            seen.add(alike)
            found.append((cycles + _behind(p, s, facts), s))
    return sorted(found, key=lambda x: x[0])[:MOST]


def cycles(p: Product, schedule: Schedule, facts: GpuFacts) -> float | None:
    """Modelled cycles of one schedule of either template, the norm's included."""
    if schedule.param("template") != "tma":
        s = MmaConfig.of(schedule)
        return cost.cycles(cost.sizes_of(p), s, facts) + (_extra(p.norm, p, s, facts) if p.norm is not None else 0.0)
    case, shape = tma_choose.case_for(p, facts), TmaConfig.of(schedule)
    return None if case is None else tma_cost.cycles(case, shape, facts) + _behind(p, shape, facts)


def _behind(p: Product, s: TmaConfig, facts: GpuFacts) -> float:
    """Cycles of the norm that products do not hide."""
    if p.norm is None:
        return 0.0
    tiles = -(-p.m // s.bm) * -(-p.n // s.bn) * s.split
    each = -(-tiles // facts.sms)
    steps = -(-p.norm.length // 64 // s.split)
    normalised = ISSUE * s.bm * 64 / 128
    multiplied = s.bm / 64 * 2 * s.bn
    return each * (700.0 + steps * (0.3 * normalised + max(0.0, normalised - multiplied)))
