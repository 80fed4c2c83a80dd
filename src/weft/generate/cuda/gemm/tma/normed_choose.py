"""Which shapes to measure of products that normalise their left operand, where TMA feeds warpgroups."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.normed import LOOKED_AT, MOST_SHAPES
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.tma import choose, cost, normed
from weft.generate.cuda.gemm.tma.operands import rows_of
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined


def shapes(p: Product, facts: GpuFacts) -> list[tuple[float, TmaConfig]]:
    """(modelled cycles, shape), best first."""
    rows, width = rows_of(p), epilogue.plan(p).width
    if isinstance(rows, Declined):
        return []
    found = []
    seen: set[tuple[int, int, int, bool]] = set()
    for cycles, given in choose.shapes(p, facts, LOOKED_AT):
        s = given
        more = normed.bytes_of(p)
        most = min(facts.shared_per_block, facts.shared_per_sm // s.min_ctas - facts.shared_reserved)
        while s.stages > 2 and s.shared_bytes() + more > most:
            s = replace(s, stages=s.stages - 1)
        fits = s.split == 1 or s.bm * s.bn * 4 <= s.stages * s.stage_bytes
        if s.stages < min(3, given.stages) or not fits or normed.declined(p, rows, s, width) is not None:
            continue
        alike = (s.bm, s.bn, s.split, s.pingpong)
        if math.isfinite(cycles) and alike not in seen:
            seen.add(alike)
            found.append((cycles + _behind(p, s, facts), s))
    return sorted(found, key=lambda x: x[0])[:MOST_SHAPES]


def cycles(p: Product, s: TmaConfig, facts: GpuFacts) -> float | None:
    """Modelled cycles of a shape, the norm's included; None for products that it does not take."""
    case = choose.case_for(p, facts)
    return None if case is None else cost.cycles(case, s, facts) + _behind(p, s, facts)


def _behind(p: Product, s: TmaConfig, facts: GpuFacts) -> float:
    """Cycles of the norm that products do not hide."""
    if p.norm is None:
        return 0.0
    tiles = -(-p.m // s.bm) * -(-p.n // s.bn) * s.split
    each = -(-tiles // facts.sms)
    steps = -(-p.norm.length // 64 // s.split)
    c = costs_of(facts).normed
    normalised = c.element_slots * s.bm * 64 / 128
    multiplied = s.bm / 64 * 2 * s.bn
    return each * (c.start + steps * (c.exposed * normalised + max(0.0, normalised - multiplied)))
