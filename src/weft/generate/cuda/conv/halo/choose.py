"""Which shapes of the halo template to measure: a model of cycles ranks them; see `gemm.mma.choose`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from weft.costmodel.constants import Halo
from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.halo.kernel import FEW, Geometry, HaloConfig, Window, refuse, window, work
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.work import TRANSCENDENTAL

WASTE = 1.15
"""Most pixels that tiles may cover over those of the image."""


@dataclass(frozen=True, slots=True)
class End:
    """What follows a sum; counts per result."""

    operands: int
    plain: int
    special: int
    clipped: int
    exact: int
    single: bool
    """Results are stored one by one."""


def end_of(p: Product) -> End:
    """What the model asks about the end of a product."""
    prims = [step.prim for step in p.c.body if step.source is None and step.prim is not Prim.CAST]
    special = sum(x in TRANSCENDENTAL for x in prims)
    plain = sum(CATEGORY[x] is Category.ELEMENTWISE for x in prims) - special
    clipped, divided, others = epilogue.exact(p.c)
    operands = len(epilogue.leaves(p.c))
    return End(operands, plain, special, clipped, others + 3 * divided, epilogue.plan(p).by_row)


def shapes(p: Product, facts: GpuFacts, keep: int = 4) -> list[tuple[float, HaloConfig]]:
    """(modelled cycles, shape), best first; none for products that the template does not take."""
    w = window(p)
    if isinstance(w, Declined) or (w.kernel[0] <= w.strides[0] and w.kernel[1] <= w.strides[1]):
        return []  # where windows do not overlap, nothing is read twice
    cluster = epilogue.plan(p).width % 4 == 0 and facts.capability >= 90
    return list(_ranked(w, cluster, end_of(p), facts, keep))


def modelled(p: Product, s: HaloConfig, facts: GpuFacts) -> float | None:
    """Cycles of one shape; None for products that the template does not take."""
    w = window(p)
    if isinstance(w, Declined):
        return None
    return cycles(Geometry(w, s), facts, end_of(p))


@lru_cache(maxsize=1024)
def _ranked(w: Window, cluster: bool, end: End, facts: GpuFacts, keep: int) -> tuple[tuple[float, HaloConfig], ...]:
    ranked = [(cycles(Geometry(w, s), facts, end), s) for s in _candidates(w, cluster, facts)]
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


def sides(size: int, most: int, least: int = 1) -> list[int]:
    """Sides of tiles that cover `size` with little waste."""
    found = {-(-size // k) for k in range(1, size + 1)}
    return sorted(x for x in found if least <= x <= most and -(-size // x) * x <= WASTE * size)


def _tiles(w: Window, wide: bool) -> Sequence[tuple[int, int]]:
    """For each number of rows of the product, the rectangle that reads the least of the image per pixel."""
    best: dict[int, tuple[float, tuple[int, int]]] = {}
    for th in sides(w.rows, 32):
        for tw in sides(w.cols, 64, min(w.cols, 4)):
            g = Geometry(w, HaloConfig(th, tw, 16, 16, 16, 16, 1, 1, 1, False, wide))
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
    sixteens = -(-w.ic * w.halves // 16)
    found = {-(-sixteens // k) * 16 for k in range(1, sixteens + 1)}
    return sorted(x for x in found if x <= 128 and (x >= 32 or sixteens < 3 or math.prod(w.kernel) > 16))


def _candidates(w: Window, cluster: bool, facts: GpuFacts) -> Iterable[HaloConfig]:
    wide = w.oc * w.kernel[1] <= 64 and w.oc <= 8 and w.strides[1] == 1 and w.groups == 1 and w.ic > FEW
    for is_wide in (False, True) if wide else (False,):
        columns = w.oc * (w.kernel[1] if is_wide else 1)
        widths = [-(-columns // 16) * 16] if is_wide else _widths(columns)
        for th, tw in _tiles(w, is_wide):
            for bn in widths:
                for bc in _depths(w):
                    yield from _blocks(
                        Geometry(w, HaloConfig(th, tw, bn, bc, 16, 16, 1, 1, 1, False, is_wide)), cluster, facts
                    )


def _blocks(base: Geometry, cluster: bool, facts: GpuFacts) -> Iterable[HaloConfig]:
    """Splits of the sum and warps of one tile."""
    s, w = base.s, base.w
    for split in (1, 2, 4, 8):
        if split > base.blocks or (split > 1 and (s.wide or work(base)[0] * split > 600)):
            break
        if base.blocks % split and base.blocks < 3 * split:
            continue
        deepest = -(-base.blocks // split)
        stages = min(deepest, (facts.shared_per_block - w.tables - 2048) // (base.a_bytes + base.w_bytes), 6)
        if stages < (
            min(deepest, 2) if w.vectorized else deepest
        ):  # elements are not copied while others are multiplied
            continue
        for wm in (16, 32, 64):
            for wn in (16, 32, 64):
                if s.bn % wn or wm * wn > 2048 or (wm > 16 and wm >= 2 * base.bm):
                    continue
                for wk in (1, 2, 4):
                    g = Geometry(
                        w, HaloConfig(s.th, s.tw, s.bn, s.bc, wm, wn, wk, stages, split, split > 1 and cluster, s.wide)
                    )
                    most = 256 if wk > 1 else 384 if wm * wn > 1024 else 512  # more would spill
                    if 64 <= g.threads <= most and refuse(g) is None:
                        yield g.s


def registers(g: Geometry) -> int:
    """Rough number of registers per thread."""
    s = g.s
    return s.wm * s.wn // 32 + (s.wm + s.wn) // 2 + 20


class Divided(Protocol):
    """How sums are divided between warps and CTAs."""

    @property
    def wk(self) -> int:
        """Warps that share a sum."""
        ...

    @property
    def split(self) -> int:
        """CTAs that share one."""
        ...

    @property
    def cluster(self) -> bool:
        """Whether these are a cluster."""
        ...


def cycles(g: Geometry, facts: GpuFacts, end: End) -> float:
    """Modelled cycles in a chain of kernels; infinite where it does not fit."""
    c = costs_of(facts).halo
    w, s = g.w, g.s

    def inside(active: int) -> float:
        finished = s.th * s.tw * min(s.bn, w.oc)
        return _body(g, active, c) + end_cycles(s, end, active, c, g.threads, g.bm * s.bn, finished, w.halves)

    weights = g.columns * g.taps * w.ic * w.groups * 2 * w.halves
    return in_waves(s, facts, g.threads, registers(g), g.shared + 1024, work(g)[0], weights, inside)


def in_waves(
    s: Divided, facts: GpuFacts, threads: int, registers: int, shared: int, ctas: int, weights: int,
    inside: Callable[[int], float],
) -> float:  # fmt: skip
    """Modelled cycles of a grid in a chain of kernels; infinite where no CTA fits.

    Args:
        s: how sums are divided.
        facts: the GPU.
        threads: of a CTA.
        registers: of a thread, about.
        shared: bytes of a CTA, with what the system takes.
        ctas: of the grid.
        weights: bytes that are read from memory.
        inside: cycles of so many CTAs that share a multiprocessor.
    """
    c = costs_of(facts).halo
    if shared > facts.shared_per_block:
        return math.inf
    by_registers = facts.registers_per_sm // (min(255, -(-registers // 8) * 8) * threads)
    resident = min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // threads, facts.blocks_per_sm)
    if not resident:
        return math.inf
    room = facts.sms
    if s.cluster:
        room = max(s.split, int(c.clustered[s.split] * room) // s.split * s.split)
    busiest = -(-ctas // room)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    within = waves * (inside(active) + (c.alone if 2 * shared > facts.shared_per_sm else 0.0))
    outside = weights / (facts.bandwidth_at(max(weights, 1)) / facts.clock_ghz)
    return gap_us(facts) * facts.clock_ghz * 1e3 + c.launch + c.block * busiest + max(within, outside)


def _body(g: Geometry, active: int, c: Halo) -> float:
    """Cycles of the sums of so many blocks that share a multiprocessor."""
    w, s = g.w, g.s
    high, broad = g.field
    pieces = high * broad * (1 if g.few else s.bc // 8)
    warps, steps = g.threads // 32, g.steps // s.wk
    mi, ni = s.wm // 16, s.wn // 16
    # one block of channels
    issue = (pieces * (c.chunk if w.vectorized else c.element) + g.w_bytes / 16 * c.weight) / 128
    arrival = (pieces * 16.0 + c.shared_weights * g.w_bytes) / c.port
    together = active * warps
    used = min(1.0, together / 4) * (c.lone if together <= 4 else c.several if together < 8 else 1.0)
    tensor = work(g)[1] / g.deepest * c.tensor / used
    fragments = warps * steps * (mi + ni) * 512.0 / c.fragments
    rounded = warps * steps * mi * 4 * c.round if w.halves == 2 else 0.0
    compute = max(active * tensor, active * fragments, steps * max(c.step, mi * ni * 2 * c.product)) + active * rounded
    load = active * max(issue, arrival)
    if g.deepest == 1:
        return load + compute
    if g.deepest <= s.stages:
        return c.first * load * (1 + g.deepest) + max(c.first * load * (g.deepest - 1), compute * g.deepest)
    return load * s.stages + c.turn * max(load, compute, c.latency / s.stages) * g.deepest


def end_cycles(
    s: Divided, end: End, active: int, c: Halo, threads: int, tile: int, finished: int, halves: int = 1
) -> float:
    """Cycles from the last step to the last result of so many CTAs that share a multiprocessor.

    `tile`: sums of a CTA; `finished`: its results; `halves`: of 16 bits, in one of them.
    """
    stores = tile * s.wk * 8 / 128 + finished * 2.0 * halves * (1 + end.operands) / c.stored
    stores += finished * c.single if end.single else 0.0
    slots = c.result_slots + c.plain_slots * end.plain + c.special_slots * end.special + c.clipped_slots * end.clipped
    each = c.result + c.plain * end.plain + c.special * end.special + c.clipped * end.clipped
    each += c.exact * end.exact + c.operand * end.operands
    found = c.end + finished / threads * each + active * (stores + finished / 128 * slots)
    if s.split > 1:
        meeting = c.cluster if s.cluster else c.meeting + tile * 4.0 * s.split / 64
        found += meeting + tile * 4.0 / c.exchange + c.rank * s.split
    return found
