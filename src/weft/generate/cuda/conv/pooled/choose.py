"""Which shapes of the pooled template to measure, and when computing borders twice is not worth a kernel less."""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us, memory_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.halo.kernel import FEW
from weft.generate.cuda.conv.pooled.kernel import Geometry, PooledConfig
from weft.generate.cuda.conv.pooled.match import Pooled
from weft.generate.cuda.gemm.common import epilogue
from weft.ir.declined import Declined

REPEATED = 1.5
"""Most results of the convolution that all blocks may compute, over those that it has."""


def shapes(p: Pooled, facts: GpuFacts, keep: int = 6) -> list[tuple[float, PooledConfig]] | Declined:
    """(modelled cycles, shape), best first; declined where every tile computes too much that a neighbour computes."""
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; the templates need 8.0")
    tiles = _tiles(p)
    if not tiles:
        least = min(_geometry(p, ph, pw).repeated for ph, pw in _rectangles(p))
        return Declined(f"windows overlap: tiles would compute {least:.1f} times the convolution's results")
    end = halo_choose.end_of(p.first)
    ranked = [(cycles(p, s, facts, end), s) for s in _candidates(p, tiles, facts)]
    ranked = sorted((x for x in ranked if x[0] < math.inf), key=lambda x: (x[0], x[1].wk, x[1].stages))
    if not ranked:
        return Declined("no tile of windows fits the shared memory of a CTA")
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for modelled, s in ranked[:300]:
        alike = [(s.bn, s.split, s.ph * s.pw), (s.ph, s.pw, s.bn, s.early)]
        again = max(seen.get(x, 0) for x in alike)
        for x in alike:
            seen[x] = seen.get(x, 0) + 1
        keyed.append((modelled * (1 + 0.1 * again), modelled, s))
    keyed.sort(key=lambda x: x[0])
    return [(modelled, s) for _, modelled, s in keyed[:keep]]


def cycles(p: Pooled, s: PooledConfig, facts: GpuFacts, end: halo_choose.End | None = None) -> float:
    """Modelled cycles in a chain of kernels: the convolution's tiles, and the windows behind them."""
    fit = costs_of(facts).pooled
    g = Geometry.of(p, s)
    found = halo_choose.cycles(g, facts, end or halo_choose.end_of(p.first))
    busiest = -(-halo.work(g)[0] // facts.sms)
    places = s.ph * s.pw * min(s.bn, p.first.n) * math.prod(p.pool.kernel) / s.split
    again = 1.0 if s.early else math.prod(p.pool.kernel) / math.prod(p.pool.strides)
    slots = fit.place + (0.0 if s.early else 1.0 + (again - 1.0) / again * len(p.first.c.body))
    return found + fit.windows + busiest * places * slots / 128


def apart(p: Pooled, convolution: float, facts: GpuFacts) -> float:
    """Modelled cycles of two kernels: that of the convolution takes `convolution`."""
    read, written = (x.m * x.n * p.between.itemsize for x in (p.first, p.second))
    return convolution + (gap_us(facts) + memory_us(facts, read, written)) * facts.clock_ghz * 1e3


def _geometry(p: Pooled, ph: int, pw: int) -> Geometry:
    return Geometry.of(p, PooledConfig(ph, pw, 16, FEW if p.window.ic <= FEW else 16, 16, 16, 1, 1, 1, True))


def _rectangles(p: Pooled) -> list[tuple[int, int]]:
    """Rectangles of windows whose results are a product of 16 to 512 rows; the smallest if there is none."""
    found = []
    for ph in halo_choose.sides(p.pool.rows, 16):
        for pw in halo_choose.sides(p.pool.cols, 32):
            results = p.pool.reach(ph, 0) * p.pool.reach(pw, 1)
            if results <= 512 and (results >= 16 or (ph, pw) == (p.pool.rows, p.pool.cols)):
                found.append((ph, pw))
    return found or [(1, 1)]


def _tiles(p: Pooled) -> list[tuple[int, int]]:
    """For each number of rows of the product, the rectangles that read and compute the least per window."""
    found: dict[int, list[tuple[float, tuple[int, int]]]] = {}
    for ph, pw in _rectangles(p):
        g = _geometry(p, ph, pw)
        if g.repeated > REPEATED or g.bm > 512:
            continue
        high, broad = g.field
        score = math.prod(g.tiles) * (high * broad + 1.5 * g.bm)
        size = max(16, 1 << (g.bm - 1).bit_length()) if g.bm > 128 else g.bm
        found.setdefault(size, []).append((score, (ph, pw)))
    return [tile for part in found.values() for _, tile in sorted(part)[:2]]


def _widths(columns: int) -> list[int]:
    whole = -(-columns // 16) * 16
    found = [n for n in (16, 32, 48, 64, 96, 128) if n <= whole and -(-columns // n) * n <= 1.25 * whole]
    return found or [min(whole, 32)]


def _depths(w: halo.Window) -> list[int]:
    if w.ic <= FEW:
        return [FEW]
    sixteens = -(-w.ic * w.halves // 16)
    found = {-(-sixteens // k) * 16 for k in range(1, sixteens + 1)}
    return sorted(x for x in found if x <= 128 and (x >= 32 or sixteens < 3 or math.prod(w.kernel) > 16))


def _candidates(p: Pooled, tiles: list[tuple[int, int]], facts: GpuFacts) -> Iterable[PooledConfig]:
    together = epilogue.plan(p.second).width % 4 == 0 and facts.capability >= 90
    for ph, pw in tiles:
        for bn in _widths(p.first.n):
            for bc in _depths(p.window):
                for split in (1, 2, 4, 8) if together else (1,):
                    yield from _blocks(p, PooledConfig(ph, pw, bn, bc, 16, 16, 1, 1, split, False), facts)


def _blocks(p: Pooled, s: PooledConfig, facts: GpuFacts) -> Iterable[PooledConfig]:
    """Stages and warps of one tile."""
    base, w = Geometry.of(p, s), p.window
    if s.split > base.blocks or (s.split > 1 and halo.work(base)[0] > 600):
        return
    if base.blocks % s.split and base.blocks < 3 * s.split:
        return
    stages = min(base.deepest, (facts.shared_per_block - w.tables - 2048) // (base.a_bytes + base.w_bytes), 6)
    if stages < (min(base.deepest, 2) if w.vectorized else base.deepest):  # elements are not copied beside products
        return
    for wm in (16, 32, 64):
        for wn in (16, 32, 64):
            if s.bn % wn or wm * wn > 2048 or (wm > 16 and wm >= 2 * base.bm):
                continue
            for wk in (1, 2, 4):
                for early in (True, False) if wk == s.split == 1 else (False,):
                    shape = PooledConfig(s.ph, s.pw, s.bn, s.bc, wm, wn, wk, stages, s.split, early)
                    g = Geometry.of(p, shape)
                    most = 256 if wk > 1 else 384 if early or wm * wn > 1024 else 512  # more would spill
                    fits = 0.7 * g.bm <= g.s.th * g.s.tw or g.bm <= 16
                    if fits and 64 <= g.threads <= most and halo.refuse(g) is None:
                        yield shape
