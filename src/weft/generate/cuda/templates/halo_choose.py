"""Which shapes of the halo template to measure: a model of cycles ranks them; see `choose`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates import epilogue
from weft.generate.cuda.templates.halo import FEW, Geometry, Shape, Window, refuse, window, work
from weft.generate.cuda.templates.product import Product
from weft.ir.declined import Declined

_LAUNCH = 2200.0
"""Cycles from the start of a block to its first copy's arrival: launch, addresses, one trip to the L2 cache."""
_WASTE = 1.15
"""Most pixels that tiles may cover over those of the image."""
_PORT = 26.0
"""Bytes that a multiprocessor gets from the L2 cache per cycle, while all ask."""


_ALONE = 600.0
"""Cycles lost by blocks beside which none of the next kernel can start: its weights are not on their way early."""


def shapes(p: Product, facts: GpuFacts, keep: int = 4) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first; none for products that the template does not take."""
    w = window(p)
    if isinstance(w, Declined) or (w.kernel[0] <= w.strides[0] and w.kernel[1] <= w.strides[1]):
        return []  # where windows do not overlap, nothing is read twice
    cluster = epilogue.plan(p).width % 4 == 0 and facts.capability >= 90
    return list(_ranked(w, cluster, len(epilogue.leaves(p.c)), len(p.c.body), facts, keep))


def modelled(p: Product, s: Shape, facts: GpuFacts) -> float | None:
    """Cycles of one shape; None for products that the template does not take."""
    w = window(p)
    if isinstance(w, Declined):
        return None
    return cycles(Geometry(w, s), facts, len(epilogue.leaves(p.c)), len(p.c.body))


@lru_cache(maxsize=1024)
def _ranked(
    w: Window, cluster: bool, operands: int, operations: int, facts: GpuFacts, keep: int
) -> tuple[tuple[float, Shape], ...]:
    ranked = [(cycles(Geometry(w, s), facts, operands, operations), s) for s in _candidates(w, cluster, facts)]
    ranked = sorted((x for x in ranked if x[0] < math.inf), key=lambda x: (x[0], x[1].wk, x[1].stages))
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for modelled, s in ranked[:300]:
        alike = [(s.bn, s.split, s.th * s.tw), (s.th, s.tw, s.bn)]
        again = max(seen.get(x, 0) for x in alike)
        for x in alike:
            seen[x] = seen.get(x, 0) + 1
        keyed.append((modelled * (1 + 0.1 * again), modelled, s))
    keyed.sort(key=lambda x: x[0])
    return tuple((modelled, s) for _, modelled, s in keyed[:keep])


def _sides(size: int, least: int, most: int) -> list[int]:
    """Sides of tiles that cover `size` with little waste."""
    found = {-(-size // k) for k in range(1, size + 1)}
    return sorted(x for x in found if least <= x <= most and -(-size // x) * x <= _WASTE * size)


def _tiles(w: Window, wide: bool) -> Sequence[tuple[int, int]]:
    """For each number of rows of the product, the rectangle that reads the least of the image per pixel."""
    best: dict[int, tuple[float, tuple[int, int]]] = {}
    for th in _sides(w.rows, 1, 32):
        for tw in _sides(w.cols, min(w.cols, 4), 64):
            g = Geometry(w, Shape(th, tw, 16, 16, 16, 16, 1, 1, 1, False, wide))
            if not 16 <= g.bm <= 512 or (g.bm > 256 and not wide) or th * g.across < 0.7 * g.bm:
                continue
            high, broad = g.field
            pixels = w.rows * w.cols
            covered = math.prod(g.tiles)
            size = max(16, 1 << (g.bm - 1).bit_length()) if g.bm > 128 else g.bm
            score = covered * (high * broad + 0.5 * g.bm) / pixels
            if size not in best or score < best[size][0]:
                best[size] = (score, (th, tw))
    return [tile for _, tile in best.values()]


def _widths(columns: int) -> list[int]:
    """Numbers of output channels of a block."""
    whole = -(-columns // 16) * 16
    found = [n for n in (16, 32, 48, 64, 96, 128) if n <= whole and -(-columns // n) * n <= 1.25 * whole]
    return found or [min(whole, 32)]


def _depths(w: Window) -> list[int]:
    """Channels of a block."""
    if w.ic <= FEW:
        return [FEW]
    sixteens = -(-w.ic * w.words // 16)
    found = {-(-sixteens // k) * 16 for k in range(1, sixteens + 1)}
    return sorted(x for x in found if x <= 128 and (x >= 32 or sixteens < 3 or math.prod(w.kernel) > 16))


def _candidates(w: Window, cluster: bool, facts: GpuFacts) -> Iterable[Shape]:
    wide = w.oc * w.kernel[1] <= 64 and w.oc <= 8 and w.strides[1] == 1 and w.groups == 1 and w.ic > FEW
    for is_wide in (False, True) if wide else (False,):
        columns = w.oc * (w.kernel[1] if is_wide else 1)
        widths = [-(-columns // 16) * 16] if is_wide else _widths(columns)
        for th, tw in _tiles(w, is_wide):
            for bn in widths:
                for bc in _depths(w):
                    yield from _blocks(
                        Geometry(w, Shape(th, tw, bn, bc, 16, 16, 1, 1, 1, False, is_wide)), cluster, facts
                    )


def _blocks(base: Geometry, cluster: bool, facts: GpuFacts) -> Iterable[Shape]:
    """Splits of the sum and warps of one tile."""
    s, w = base.s, base.w
    for split in (1, 2, 4, 8):
        if split > base.blocks or (split > 1 and (s.wide or work(base)[0] * split > 600)):
            break
        if base.blocks % split and base.blocks < 3 * split:
            continue
        deepest = -(-base.blocks // split)
        stages = min(deepest, (facts.shared_per_block - w.tables - 2048) // (base.a_bytes + base.w_bytes), 6)
        if stages < (min(deepest, 2) if w.chunks else deepest):  # elements are not copied while others are multiplied
            continue
        for wm in (16, 32, 64):
            for wn in (16, 32, 64):
                if s.bn % wn or wm * wn > 2048 or (wm > 16 and wm >= 2 * base.bm):
                    continue
                for wk in (1, 2, 4):
                    g = Geometry(
                        w, Shape(s.th, s.tw, s.bn, s.bc, wm, wn, wk, stages, split, split > 1 and cluster, s.wide)
                    )
                    most = 256 if wk > 1 else 384 if wm * wn > 1024 else 512  # more would spill
                    if 64 <= g.threads <= most and refuse(g) is None:
                        yield g.s


def registers(g: Geometry) -> int:
    """Rough number of registers per thread."""
    s = g.s
    return s.wm * s.wn // 32 + (s.wm + s.wn) // 2 + 20


def cycles(g: Geometry, facts: GpuFacts, operands: int, operations: int = 0) -> float:
    """Modelled cycles of the whole kernel; infinite where it does not fit.

    Its epilogue reads `operands` and has `operations`. Constants: fitted to an H200.
    """
    w, s = g.w, g.s
    shared = g.shared + 1024
    if shared > facts.shared_per_block:
        return math.inf
    by_registers = facts.registers_per_sm // (min(255, -(-registers(g) // 8) * 8) * g.threads)
    resident = min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // g.threads, facts.blocks_per_sm)
    if not resident:
        return math.inf
    blocks, products = work(g)
    busiest = -(-blocks // facts.sms)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    high, broad = g.field
    pieces = high * broad * (1 if g.few else s.bc // 8)
    warps = g.threads // 32
    steps = g.steps // s.wk
    mi, ni = s.wm // 16, s.wn // 16
    # one block of channels
    issue = (pieces * (16.0 if w.chunks else 60.0) + g.w_bytes / 16 * 6.0) / 128
    arrival = pieces * 16.0 / _PORT + 0.4 * g.w_bytes / _PORT
    together = active * warps
    used = min(1.0, together / 4) * (0.65 if together <= 4 else 0.85 if together < 8 else 1.0)
    tensor = products / g.deepest * 1.7 / used
    fragments = warps * steps * (mi + ni) * 512.0 / (100.0 if not g.few else 60.0)
    chain = steps * max(36.0, (mi * ni * 2) * 8.0)
    compute = max(active * tensor, active * fragments, chain)
    load = active * max(issue, arrival)
    if g.deepest == 1:
        body = load + compute
    elif g.deepest <= s.stages:
        body = 0.5 * load * (1 + g.deepest) + max(0.5 * load * (g.deepest - 1), compute * g.deepest)
    else:
        body = load * s.stages + 1.3 * max(load, compute, 900.0 / s.stages) * g.deepest
    tile = g.bm * s.bn
    finished = s.th * s.tw * min(s.bn, w.oc)
    stores = tile * s.wk * 8 / 128 + finished * 2.0 * w.words * (1 + operands) / 32
    end = 500.0 + max(active * stores, finished / g.threads * (12.0 if not s.wide else 40.0))
    end += max(active * g.threads / 128, 1.0) * finished / g.threads * 3.0 * operations
    if s.split > 1:
        end += (1500.0 if s.cluster else 1800.0 + tile * 4.0 * s.split / 64) + tile * 4.0 / 64
    if 2 * shared > facts.shared_per_sm:
        end += _ALONE
    weights = g.columns * g.taps * w.ic * w.groups * 2 * w.words
    outside = weights / (facts.bandwidth_at(max(weights, 1)) / facts.clock_ghz)
    return 1.1 * max(waves * (body + end), outside) + _LAUNCH + 40.0 * math.log2(1 + s.split)
