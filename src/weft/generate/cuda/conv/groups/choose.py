"""Which configurations of the template of groups to measure: a model of cycles ranks them.

The kernel is built as that of `conv.halo` is (a field in shared memory, fragments, mma.sync, the same end), so the
model has that one's terms and constants; nothing was fitted to kernels of this template.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from weft.costmodel.constants import Halo
from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.groups.kernel import (
    MOST_STEPS,
    Geometry,
    GroupConfig,
    ending,
    joined,
    refuse,
    window,
)
from weft.generate.cuda.conv.halo.choose import End, end_cycles, end_of, in_waves, sides
from weft.generate.cuda.conv.halo.kernel import Window
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.ir.declined import Declined

_SPLITS = (1, 2, 4, 8)
_MOST_CHANNELS = 128
"""Channels of all groups of a CTA, where there are several."""
_UNROLLED = 40
"""Steps of a k-block, where the taps can be parted."""
_MOST_CTAS = 600
"""With split-K."""
_SECTOR = 32
"""Bytes that the L2 cache gives at least."""


def shapes(p: Product, facts: GpuFacts, keep: int = 4) -> list[tuple[float, GroupConfig]]:
    """(modelled cycles, configuration), best first; none for products that the template does not take."""
    w = window(p)
    if isinstance(w, Declined):
        return []
    whole = joined(p)
    return list(_ranked(w, epilogue.plan(whole).width, end_of(whole), facts, keep))


def modelled(p: Product, s: GroupConfig, facts: GpuFacts) -> float | None:
    """Cycles of one configuration; None for products that the template does not take."""
    w = window(p)
    if isinstance(w, Declined):
        return None
    g = Geometry(w, s)
    whole = joined(p)
    return cycles(g, facts, replace(end_of(whole), single=ending(whole, g).by_row))


@lru_cache(maxsize=512)
def _ranked(w: Window, width: int, end: End, facts: GpuFacts, keep: int) -> tuple[tuple[float, GroupConfig], ...]:
    ranked = [(cycles(Geometry(w, s), facts, end), s) for s in _candidates(w, width, facts)]
    ranked = sorted((x for x in ranked if x[0] < math.inf), key=lambda x: (x[0], x[1].wk, x[1].gs, x[1].stages))
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for found, s in ranked if keep > len(ranked) else ranked[:300]:
        alike = [(s.gs, s.split, s.th * s.tw), (s.th, s.tw, s.gs), (s.wk, s.wm, s.wn)]
        again = max(seen.get(x, 0) for x in alike)
        for x in alike:
            seen[x] = seen.get(x, 0) + 1
        keyed.append((found * (1 + 0.1 * again), found, s))
    keyed.sort(key=lambda x: x[0])
    return tuple((found, s) for _, found, s in keyed[:keep])


def _tiles(w: Window) -> list[tuple[int, int]]:
    """For each number of rows of the sums, the rectangle that reads the least of the image per pixel."""
    best: dict[int, tuple[float, tuple[int, int]]] = {}
    for th in sides(w.rows, 16):
        for tw in sides(w.cols, 64, min(w.cols, 4)):
            bm = -(-th * tw // 16) * 16
            if bm > 256 or th * tw < 0.7 * bm:
                continue
            g = Geometry(w, GroupConfig(th, tw, 1, 16, 8, 1, 1, 1, 1, False))
            score = math.prod(g.tiles) * (math.prod(g.field) + 0.5 * bm) / (w.rows * w.cols)
            size = bm if bm <= 64 else -(-bm // 64) * 64
            if size not in best or score < best[size][0]:
                best[size] = (score, (th, tw))
    return [tile for _, tile in best.values()] or [(1, min(w.cols, 16))]


def _blocks(w: Window) -> list[int]:
    """Taps of a k-block: all of them, as long as their steps can be unrolled; else rows, or parts of the only row."""
    per = 0.25 if w.ic < 8 else w.ic / 16
    taps, across = math.prod(w.kernel), w.kernel[1]
    found = [taps] if math.ceil(taps * per) <= _UNROLLED else []
    if w.kernel[0] > 1:
        found += [across] if math.ceil(across * per) <= MOST_STEPS else []
    else:
        parts = [d for d in range(1, across) if across % d == 0 and d * w.dilations[1] % w.strides[1] == 0]
        fitting = [d for d in parts if 4 <= math.ceil(d * per) <= _UNROLLED]
        found += fitting[-2:]
    return found or ([taps] if math.ceil(taps * per) <= MOST_STEPS else [])


def _candidates(w: Window, width: int, facts: GpuFacts) -> Iterable[GroupConfig]:
    eights = -(-w.oc // 8)
    widths = [8 * eights, *([4 * eights] if eights % 2 == 0 else []), *([8] if eights == 3 else [])]
    together = [n for n in (1, 2, 3, 4, 6, 8, 16) if n <= w.groups and n * w.ic % 8 == 0]
    together = [n for n in together if n * max(w.ic, w.oc) <= _MOST_CHANNELS] or together[:1]
    for th, tw in _tiles(w):
        for gs in together:
            for taps in _blocks(w):
                base = GroupConfig(th, tw, gs, 16, widths[0], 1, taps, 1, 1, False)
                yield from _divided(Geometry(w, base), widths, width, facts)


def _divided(base: Geometry, widths: list[int], width: int, facts: GpuFacts) -> Iterable[GroupConfig]:
    """Splits of the sum and warps of one tile."""
    s, w = base.s, base.w
    cluster = facts.capability >= 90 and math.gcd(width, base.bn) % 4 == 0
    for split in _SPLITS:
        if split > 1 and (split > base.blocks or base.ctas * split > _MOST_CTAS):
            break
        deepest = -(-base.blocks // split)
        room = facts.shared_per_block - base.a_bytes - w.tables - 4096
        stages = min(deepest, room // base.w_bytes, 4 if deepest > 8 else 8)
        if stages < min(deepest, 3):
            continue
        for wm in (16, 32, 64):
            if wm > 16 and wm >= 2 * base.bm:
                continue
            for wn in widths:
                for wk in (1, 2, 4):
                    if wm * wn > 2048 or wk > base.steps:
                        continue
                    for together in (True, False) if split > 1 and cluster else (False,):
                        g = Geometry(w, replace(s, wm=wm, wn=wn, wk=wk, stages=stages, split=split, cluster=together))
                        if 64 <= g.threads <= (512 if wm * wn <= 1024 else 256) and refuse(g) is None:
                            yield g.s


def registers(g: Geometry) -> int:
    """Rough number of registers per thread: sums, two steps' fragments, addresses."""
    mi, nj = g.s.wm // 16, g.s.wn // 8
    return 4 * mi * nj + 2 * (4 * mi + 2 * nj) + 14


def cycles(g: Geometry, facts: GpuFacts, end: End) -> float:
    """Modelled cycles in a chain of kernels; infinite where it does not fit."""
    c = costs_of(facts).halo
    w, s = g.w, g.s

    def inside(active: int) -> float:
        return _body(g, active, c) + end_cycles(s, end, active, c, g.threads, g.bm * g.bn, s.th * s.tw * g.bn)

    weights = w.groups * w.oc * w.ic * math.prod(w.kernel) * 2
    return in_waves(s, facts, g.threads, registers(g), g.shared + 1024, g.ctas, weights, inside)


def _body(g: Geometry, active: int, c: Halo) -> float:
    """Cycles of the sums of so many CTAs that share a multiprocessor."""
    s = g.s
    pixels = math.prod(g.field)
    own = g.pieces * 16
    sectors = own if own % _SECTOR == 0 else -(-own // _SECTOR) * _SECTOR
    warps, mi, nj = g.threads // 32, s.wm // 16, s.wn // 8
    field = max(pixels * g.pieces * c.chunk / 128, pixels * sectors / c.port)
    weights = max(g.w_bytes / 16 * c.weight / 128, c.shared_weights * g.w_bytes / c.port)
    # one k-block
    steps = -(-g.steps // s.wk)
    together = active * warps
    used = min(1.0, together / 4) * (c.lone if together <= 4 else c.several if together < 8 else 1.0)
    tensor = g.bm // 16 * s.gs * g.eights * g.steps * c.tensor / used
    fragments = warps * steps * (mi * 512.0 + nj * 256.0) / c.fragments
    compute = max(active * tensor, active * fragments, steps * max(c.step, mi * nj * c.product))
    if g.deepest <= s.stages:
        return active * (field + g.deepest * weights) + g.deepest * compute
    first = active * (field + s.stages * weights)
    return first + c.turn * max(active * weights, compute, c.latency / s.stages) * g.deepest
