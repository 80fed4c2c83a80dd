"""Which shapes to measure of products that normalise their left operand, or leave partial sums of their result."""

from __future__ import annotations

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.normed import LOOKED_AT, MOST_PIECES, MOST_SHAPES, PIECE, Norm
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import choose, cost
from weft.generate.cuda.gemm.mma.kernel import MmaConfig, shared_of, whole_pieces

SHORT = 128
"""Elements of a row whose mean and variance cost little in any block."""
ROWS_AT_ONCE = 32
"""Rows of a block that are worth computing means and variances for: all its blocks of columns do the same."""


def shapes(p: Product, facts: GpuFacts) -> list[tuple[float, MmaConfig]]:
    """(modelled cycles, shape), best first."""
    width = epilogue.plan(p).width
    found = []
    for cycles, s in choose.shapes(p, facts, LOOKED_AT):
        if p.partial_stats is not None and not whole_pieces(s, width):
            continue
        if p.norm is not None and p.norm.own and p.norm.length > SHORT and s.bm > ROWS_AT_ONCE and not s.group:
            continue
        if shared_of(s, p.dtype.itemsize, cost.sizes_of(p).tables) > facts.shared_per_block:
            continue
        found.append((cycles + (_extra(p.norm, p, s, facts) if p.norm is not None else 0.0), s))
    return sorted(found, key=lambda x: x[0])[:MOST_SHAPES]


def _extra(norm: Norm, p: Product, s: MmaConfig, facts: GpuFacts) -> float:
    """Cycles in which the busiest multiprocessor normalises."""
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * s.split
    each = -(-blocks // facts.sms)
    elements = s.bm * -(-norm.length // s.split)
    c = costs_of(facts).normed
    pieces = min(MOST_PIECES, norm.length / PIECE)
    sums = c.own_slots * s.bm * norm.length if norm.own else c.piece_slots * s.bm * pieces
    return each * (c.element_slots * elements + sums) / 128 + (c.own if norm.own else c.given)


def cycles(p: Product, s: MmaConfig, facts: GpuFacts) -> float:
    """Modelled cycles of a shape, the norm's included."""
    return cost.cycles(cost.sizes_of(p), s, facts) + (_extra(p.norm, p, s, facts) if p.norm is not None else 0.0)
