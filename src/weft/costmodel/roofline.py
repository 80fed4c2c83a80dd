"""What tiles, waves and bytes cost on a GPU, as plain numbers: no graph, no device.

These are expectations that rank; none of them is a bound.

Source: performance notes, sections 3 (equations 1 to 6) and 5 (halo).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.costmodel.profile import costs_of
from weft.device.cuda.record import GpuFacts
from weft.device.stored import Table


def wave_efficiency(ctas: int, sms: int) -> float:
    """E_wave: work over what all multiprocessors do while the busiest one works; CTAs of equal size."""
    return ctas / (-(-ctas // sms) * sms)


def tile_efficiency(extents: Sequence[int], tiles: Sequence[int]) -> float:
    """E_tile: useful over executed work when every extent is cut into tiles of that size."""
    return math.prod(d / (-(-d // t) * t) for d, t in zip(extents, tiles, strict=True))


def halo_ratio(tile: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> float:
    """ρ: elements of its input that a tile of windows reads, over those that are its own share.

    Per dimension ((t-1)·s + k') / (s·t) with k' = g(k-1) + 1. Below 1 some elements need not be there at all.
    """
    return math.prod(
        ((t - 1) * s + g * (k - 1) + 1) / (s * t) for t, k, s, g in zip(tile, kernel, strides, dilations, strict=True)
    )


def overlapped(costs: Sequence[float], facts: GpuFacts) -> float:
    """Time of costs on different resources at once: the largest and a small share of the second."""
    c = costs_of(facts).roofline
    first, second = sorted([0.0, 0.0, *costs])[:-3:-1]
    return first + c.overlap * second


def gap_us(facts: GpuFacts) -> float:
    """What a kernel costs in a graph before it does anything."""
    return facts.dependent_launch_us if facts.capability >= 90 else facts.launch_us


def memory_us(facts: GpuFacts, read_bytes: int, written_bytes: int, active_sms: int = 0) -> float:
    """Microseconds of moving so many bytes, the gap before the kernel not included.

    Fewer `active_sms` than there are (0: all) may not fill the memory interface.
    """
    c = costs_of(facts).roofline
    total = read_bytes + written_bytes
    if total == 0:
        return 0.0
    written = 2 * min(written_bytes, total // 2) / total  # a copy writes half of what it moves
    copied, only_read = chained_us(facts.bandwidth, total), chained_us(facts.read_bandwidth, total)
    moving = written * copied + (1 - written) * only_read - facts.launch_us
    moving = max(moving, total / max(facts.l2_bandwidth, facts.bandwidth[-1][1]) / 1e3)
    sms = min(active_sms or facts.sms, facts.sms)
    port = c.l2_port_bytes if total <= facts.l2_bytes // 2 else c.dram_port_bytes
    return max(moving, total / (sms * port * facts.clock_ghz) / 1e3)


def chained_us(table: Table, size_bytes: int) -> float:
    """Microseconds per kernel of a chain that a bandwidth table stands for, gap included; never falls with size."""
    rows = [(0, 0.0), *((size, size / rate / 1e3) for size, rate in table)]
    at = bisect.bisect_left(rows, (size_bytes, 0.0))
    if at == len(rows):
        return size_bytes / table[-1][1] / 1e3
    (s0, t0), (s1, t1) = rows[at - 1], rows[at]
    return t0 + max(0.0, t1 - t0) * (size_bytes - s0) / (s1 - s0)


@dataclass(frozen=True, slots=True)
class Product:
    """C[b, m, n] = A[b, m, k] · B[b, k, n]; a convolution is one with k = channels × kernel."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "f16"
    itemsize: int = 2

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a product that one CTA makes: rows and columns of C, and parts of the contraction."""

    m: int
    n: int
    split: int = 1


TILES = ((16, 64), (16, 128), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 4, 8, 16)
_STEP_BYTES = 128
"""Bytes of a row of an operand in one step of the contraction loop."""
_FILL_STEPS = 2
"""Steps until the first operands are there."""


def tile_us(facts: GpuFacts, product: Product, tile: Tile) -> float:
    """Microseconds of a product with this tile, operands coming from the L2 cache; no gap, no traffic with memory."""
    c = costs_of(facts).roofline
    p = product
    ctas = p.batch * -(-p.m // tile.m) * -(-p.n // tile.n) * tile.split
    busiest = -(-ctas // facts.sms)
    useful = wave_efficiency(ctas, facts.sms) * tile_efficiency((p.m, p.n), (tile.m, tile.n))
    compute = p.flops / (achieved(facts, p.dtype) * _reach(tile, facts) * useful) * 1e6
    steps = -(-p.k * p.itemsize // (_STEP_BYTES * tile.split))
    min_ctas = 2 if tile.m * tile.n <= 128 * 128 else 1
    latency = -(-ctas // (facts.sms * min_ctas)) * (steps + _FILL_STEPS) * facts.step_us
    loaded = (tile.m + tile.n) * steps * _STEP_BYTES
    shared = c.multicast if facts.capability >= 90 and tile.m * tile.n >= 128 * 128 else 1.0
    l2 = max(ctas * loaded / facts.l2_bandwidth / shared, busiest * loaded / (c.l2_port_bytes * facts.clock_ghz)) / 1e3
    return overlapped((compute, latency, l2), facts) + _split_us(facts, p, tile)


@lru_cache(maxsize=4096)
def product_us(facts: GpuFacts, product: Product) -> tuple[float, Tile]:
    """The least of `tile_us` over usual tiles, and that tile."""
    steps = -(-product.k * product.itemsize // _STEP_BYTES)
    tiles = [Tile(m, n, s) for m, n in TILES for s in SPLITS if s == 1 or steps >= 2 * s]
    return min(((tile_us(facts, product, t), t) for t in tiles), key=lambda pair: pair[0])


def achieved(facts: GpuFacts, dtype: str) -> float:
    """FLOP/s that a large product reaches; types without a rate of their own are taken for f32."""
    c = costs_of(facts).roofline
    known = dict(facts.achieved_flops)
    peaks = dict(facts.flops)
    return known.get(dtype) or c.unmeasured * peaks.get(dtype, peaks.get("f32", 1e12))


def _reach(tile: Tile, facts: GpuFacts) -> float:
    """Share of the rate of large tiles that smaller ones reach."""
    c = costs_of(facts).roofline
    rows = c.narrow_rows if tile.m < 64 else 1.0
    return rows * min(1.0, c.narrow_columns + (1 - c.narrow_columns) * tile.n / 128)


def _split_us(facts: GpuFacts, p: Product, tile: Tile) -> float:
    """Writing and adding partial sums, and one more hand-over between CTAs."""
    if tile.split == 1:
        return 0.0
    waited = costs_of(facts).roofline.barrier * facts.grid_barrier_us
    return 2 * tile.split * p.batch * p.m * p.n * 4 / facts.l2_bandwidth / 1e3 + waited
