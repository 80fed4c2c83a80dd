"""Which shapes of the mma template to measure: a model of cycles ranks them.

Per k-block a block is bound by its matrix instructions, its shared memory, its share of the L2 cache, or the latency of
one step; blocks on one multiprocessor share all but the last. Constants: performance notes, sections 3 and 6, and the
note on matrix products, section 9; everything else is our estimate. The model ranks; measuring decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates import epilogue
from weft.generate.cuda.templates.mma import Shape, shared_of, table_bytes
from weft.generate.cuda.templates.product import ALoad, Product, WLoad
from weft.ir.types import DType

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_LAUNCH = 1500.0
"""Cycles from the start of a block to its first product: launch, addresses, first copies."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the model knows of a product; see `Product`."""

    dtype: DType
    m: int
    n: int
    k: int
    z: int
    a_load: ALoad
    w_load: WLoad
    tables: int
    """Bytes of shared memory for tables of rows and columns."""


@cache
def _blocks(size: int) -> tuple[Shape, ...]:
    """Tiles, warps and stages that make sense for some product of 2- or 4-byte elements."""
    found = []
    for bm in (16, 32, 64, 128):
        for bn in (16, 32, 64, 128, 256):
            for wm in (16, 32, 64):
                for wn in (16, 32, 64):
                    for wk in (1, 2, 4):
                        if bm % wm or bn % wn:
                            continue
                        warps = bm // wm * (bn // wn) * wk
                        if not 2 <= warps <= 8 or (size == 4 and (wm > 32 or wm * wn > 2048)):
                            continue
                        if max(wm, wn) > 2 * min(wm, wn) and min(bm, bn) >= 2 * min(wm, wn):
                            continue  # a squarer warp tile reads less
                        if wm * wn > 2048 and warps > 4 and size == 2 and bm * bn < 128 * 128:
                            continue
                        found += [
                            Shape(bm, bn, bk, wm, wn, wk, stages, 1, False)
                            for bk in ((32, 64) if size == 2 else (16, 32))
                            for stages in (3, 4, 5)
                            if bk * size // 32 // wk >= 1
                        ]
    return tuple(found)


@cache
def _groups() -> tuple[Shape, ...]:
    """The same for warpgroup products."""
    tiles = [(64, n, 64, n) for n in (16, 32, 64, 96, 128, 192)] + [(64, 256, 64, 128)]
    tiles += [(128, n, 64, n) for n in (16, 32, 64, 96, 128, 192, 256)] + [(128, 256, 128, 128)]
    tiles += [(256, 32, 64, 32), (256, 64, 64, 64), (256, 96, 128, 96), (256, 128, 128, 128), (256, 128, 64, 128)]
    return tuple(Shape(bm, bn, 64, wm, wn, 1, n, 1, False, True) for bm, bn, wm, wn in tiles for n in (4, 5, 6))


def registers(s: Shape) -> int:
    """Rough number of registers per thread."""
    if s.group:
        return s.wm * s.wn // 128 + 56
    return s.wm * s.wn // 32 + (s.wm + s.wn) // 16 * 4 + 44


def _resident(p: Sizes, s: Shape, facts: GpuFacts) -> int:
    """Blocks that fit on one multiprocessor."""
    shared = shared_of(s, p.dtype.itemsize, p.tables) + 1024
    if shared > facts.shared_per_block:
        return 0
    by_registers = facts.registers_per_sm // (min(255, -(-registers(s) // 8) * 8) * s.threads)
    return min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // s.threads, facts.blocks_per_sm)


def _fragments(s: Shape, size: int) -> float:
    """Cycles of one k-block in which warps read their operands from shared memory."""
    return (s.bm // s.wm) * (s.bn // s.wn) * (s.wm + s.wn) * s.bk * size / 128


def cycles(p: Sizes, s: Shape, facts: GpuFacts, operands: int) -> float:
    """Modelled cycles of the whole kernel, whose epilogue reads `operands`; infinite where it does not fit."""
    resident = _resident(p, s, facts)
    if not resident:
        return math.inf
    size = p.dtype.itemsize
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z * s.split
    busiest = -(-blocks // facts.sms)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    steps = math.ceil(math.ceil(p.k / s.bk) / s.split)
    # four tensor cores or groups of lanes: fewer warps leave some idle, and one warp each does not hide its latencies
    warps = active * s.warps * (2 if s.group else 1)
    busy = min(1.0, warps / 4) * (0.65 if warps <= 4 else 0.85 if warps < 8 else 1.0)
    rate = (3500.0 if s.group else 2400.0 if size == 2 else 220.0) * busy
    compute = 2.0 * s.bm * s.bn * s.bk / rate
    fragments = s.bm / 64 * (64 + s.bn) * s.bk * size / 128 if s.group else _fragments(s, size)
    shared = (fragments + (s.bm + s.bn) * s.bk * size / 128) * (1.0 if size == 2 else 1.3)
    cache_traffic = (s.bm + s.bn) * s.bk * size / 40
    per_warp = s.bk * size // 32 // s.wk
    issue = (s.bm + s.bn) * s.bk * size / 16 * (14.0 if p.a_load == "taps" else 8.0) / 128
    chain = 150.0 if s.group else 60.0 + per_warp * (40.0 + (s.wm // 16) * (s.wn // 8) * 2 * 2.0) if size == 2 else 60.0
    if p.a_load == "elements":
        shared += s.bm * s.bk * 6.0 / 32
        chain += 500.0 / s.ahead + s.bm * s.bk / s.threads * 6.0
    latency = 800.0 / s.ahead
    step = max(active * compute, active * shared, active * cache_traffic, active * issue, latency, chain)
    tile = s.bm * s.bn
    stores = tile * s.wk * 8 / 128 + tile * 2.0 * (1 + operands) / 32
    end = 500.0 + max(active * stores, tile / s.threads * 12.0)
    if s.split > 1:
        end += (700.0 if s.cluster else 1800.0 + tile * 4.0 * s.split / 64) + tile * 4.0 / 64
    # memory that must come from outside once
    weights = p.n * p.k * p.z * size
    outside = weights / (facts.bandwidth_at(max(weights, 1)) / facts.clock_ghz)
    return max(waves * (steps * step + end), outside) + _LAUNCH + 40.0 * math.log2(1 + s.split)


def shapes(p: Product, facts: GpuFacts, keep: int = 10) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first; alike shapes later than their number says."""
    sizes = Sizes(p.dtype, p.m, p.n, p.k, p.z, p.a_load, p.w_load, table_bytes(p))
    cluster = epilogue.plan(p).width % 4 == 0 and facts.capability >= 90
    return list(_ranked(sizes, cluster, len(epilogue.leaves(p.c)), facts, keep))


@lru_cache(maxsize=1024)
def _ranked(p: Sizes, cluster: bool, operands: int, facts: GpuFacts, keep: int) -> tuple[tuple[float, Shape], ...]:
    """`shapes` of all products of these sizes: a network has the same one before many epilogues."""
    ranked: list[tuple[float, Shape]] = []
    for base in _fitting(p, facts):
        ranked += [(cycles(p, s, facts, operands), s) for s in _split(p, base, cluster)]
    ranked = [x for x in ranked if x[0] < math.inf]
    ranked.sort(key=lambda x: (x[0], -x[1].stages, x[1].threads))
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for modelled, s in ranked[:400]:
        tile = (s.bm, s.bn, s.split, int(s.group))
        alike = seen.get(tile, 0)
        seen[tile] = alike + 1
        keyed.append((modelled * (1 + 0.15 * alike), modelled, s))
    keyed.sort(key=lambda x: x[0])
    return tuple((modelled, s) for _, modelled, s in keyed[:keep])


def _fitting(p: Sizes, facts: GpuFacts) -> Iterable[Shape]:
    """Blocks whose tile is not mostly outside the product."""
    group = facts.capability == 90 and p.dtype is not DType.F32 and p.a_load != "columns" and p.w_load != "kn"
    for s in (*_blocks(p.dtype.itemsize), *(_groups() if group else ())):
        if (s.bm > (64 if s.group else 16) and s.bm >= 2 * p.m) or (s.bn > 16 and s.bn >= 2 * p.n):
            continue
        if s.bk >= 2 * p.k and s.bk > (32 if p.dtype is not DType.F32 else 16) and not s.group:
            continue
        if p.a_load == "columns" and s.bm < 16:
            continue
        yield s


def _split(p: Sizes, s: Shape, cluster: bool) -> Iterable[Shape]:
    kt = -(-p.k // s.bk)
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z
    for alone, together in _variants(s):
        if alone.split > 1 and (kt < 2 * alone.split or blocks * alone.split > 600):
            break
        yield alone
        if together is not None and cluster:
            yield together


@cache
def _variants(s: Shape) -> tuple[tuple[Shape, Shape | None], ...]:
    """A shape with each split, and that as a cluster."""
    return tuple((replace(s, split=n), replace(s, split=n, cluster=True) if n in (2, 4, 8) else None) for n in _SPLITS)
