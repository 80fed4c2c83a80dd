"""What a tile shape of a matrix product costs: cycles of a multiprocessor from the end of one kernel to the next.

    gap + start + waves * (k-tiles * k-tile + end) (+ the fix-up of CTAs that split K), or the weights from memory

A k-tile is bound by one of: matrix instructions, shared memory, the ports to the L2 cache, issue slots of the copies,
the chain of one k-tile (barrier, fragments, products that wait for each other), or the latency of memory over those
that run ahead; the others are hidden but for a small share. CTAs on one multiprocessor share all but the last two. The
constants are those of the device's profile (docs/performance-model.md says how well they hold for networks that were
left out); the model ranks, and measuring decides. Source: performance notes, sections 3 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from weft.costmodel.constants import LeftLoad, Unit
from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.record import FLOPS_PER_CLOCK, GpuFacts
from weft.ir.types import DType


def crowded(active: int, ctas: int, sms: int, ctas_per_sm: int) -> int:
    """CTAs of the busiest multiprocessor, where `active` were its share of so many CTAs on so many multiprocessors.

    A kernel's CTAs are placed while the one before it runs: where both together do not fit, those that must wait go
    to the multiprocessors that are done first, which take as many as fit (`ctas_per_sm`). Where a share of the CTAs
    fills a multiprocessor, or all are resident at once, each has its share.
    """
    return ctas_per_sm if active < ctas_per_sm < 2 * active and 2 * ctas > ctas_per_sm * sms else active


RightLoad = Literal["packed", "nk", "kn", "elements"]
"""The same of the right operand; constant weights are packed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A product out[z, m, n] = sum over k of a[z, m, k] * w[z, n, k], and its epilogue."""

    dtype: DType
    m: int
    n: int
    k: int
    z: int
    a_load: LeftLoad
    w_load: RightLoad
    tables: int
    """Bytes of shared memory for tables of rows and columns."""
    width: int
    """Results that a thread finishes at once."""
    operands: int
    """Values read per result."""
    plain: int
    """Elementwise operations per result."""
    special: int
    """Transcendental ones among them."""
    stored: int
    """Bytes written per result, all outputs together."""
    tf32: bool = False
    """Products of f32 on the tensor cores."""

    @property
    def tensor(self) -> bool:
        """True where tensor cores multiply."""
        return self.tf32 or self.dtype.itemsize <= 2


class TileConfig(Protocol):
    """The tile of a CTA, and of its warps; sizes in elements."""

    @property
    def bm(self) -> int:
        """Rows of the product."""

    @property
    def bn(self) -> int:
        """Columns."""

    @property
    def bk(self) -> int:
        """Of K, in a k-tile."""

    @property
    def wm(self) -> int:
        """Rows of a warp, or of a group of four."""

    @property
    def wn(self) -> int:
        """Columns of it."""

    @property
    def wk(self) -> int:
        """Warps that split K."""

    @property
    def group(self) -> bool:
        """Warpgroup products."""

    @property
    def warps(self) -> int:
        """Of a CTA."""

    @property
    def threads(self) -> int:
        """Of a CTA."""

    @property
    def ahead(self) -> int:
        """K-tiles that copies run ahead."""


class TileCost:
    """A product by one tile configuration, whatever its split-K: what does not depend on that is computed once."""

    def __init__(self, p: Sizes, s: TileConfig, facts: GpuFacts, ctas_per_sm: int) -> None:
        c = self.costs = costs_of(facts).tiles
        self.sizes, self.config, self.facts = p, s, facts
        self.ctas_per_sm = ctas_per_sm
        self.tiles = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z
        self.k_tiles = math.ceil(p.k / s.bk)
        self.gap = gap_us(facts) * facts.clock_ghz * 1e3 + c.start
        size = p.dtype.itemsize
        self.kind: Unit = "group" if s.group else "mma" if p.tensor else "simt"
        peak = FLOPS_PER_CLOCK.get(facts.capability, {}).get("tf32" if p.tf32 else p.dtype.value, math.inf)
        rate = c.rate[self.kind] * (2 / size if p.tensor and not p.dtype.is_float8 else 1)  # those multiply as halves
        self.products = 2.0 * s.bm * s.bn * s.bk / min(rate, c.reached * peak)
        self.loaded = (s.bm + s.bn) * s.bk * size
        if s.group:
            fragments = s.bm / 64 * (64 + s.bn) * s.bk * size
        else:
            fragments = (s.bm // s.wm) * (s.bn // s.wn) * (s.wm + s.wn) * s.bk * size
        self.shared = (fragments + self.loaded) / 128
        if self.kind == "simt":
            reads = (s.bm // s.wm) * (s.bn // s.wn) * s.bk / 4 * (s.wm / 4 + s.wn / 8)
            self.shared = c.simt_read * reads + self.loaded / 128
        self.issue = s.bk * size / 16 * (s.bm * c.issue[p.a_load] + s.bn * c.issue_weights)
        self.chain = self._chain()
        self.tile = s.bm * s.bn
        self.slots = c.result + c.plain * p.plain + c.special * p.special

    def _chain(self) -> float:
        """Cycles of a k-tile that more CTAs do not share."""
        c = self.costs
        p, s = self.sizes, self.config
        chain = c.chain[self.kind]
        if self.kind == "mma":
            chain += c.mma * (s.bk * p.dtype.itemsize // 32 / s.wk) * (s.wm // 16) * (s.wn // 8)
            chain += c.remainder if (s.ahead + 1) & s.ahead else 0.0
        by_element = (s.bm if p.a_load == "elements" else 0) + (s.bn if p.w_load == "elements" else 0)
        if by_element:
            chain += c.elements + by_element * s.bk / s.threads * (c.element_of_tables if p.tables else c.element)
        return chain

    def cycles(self, split: int, cluster: bool, *, spread: bool = False) -> float:
        """The whole kernel with so many CTAs to a tile (split-K); infinite where a CTA does not fit.

        `spread`: as if multiprocessors shared all CTAs evenly.
        """
        c = self.costs
        if not self.ctas_per_sm:
            return math.inf
        p, facts = self.sizes, self.facts
        ctas = self.tiles * split
        sms = facts.sms
        if cluster and p.dtype is DType.F32:
            sms = int(sms * c.clustered.get(split, 1.0)) // split * split
        busiest = -(-ctas // sms)
        waves = -(-busiest // self.ctas_per_sm)
        active = -(-busiest // waves)
        if not spread:
            active = crowded(active, ctas, sms, self.ctas_per_sm)
        sms = min(ctas, sms)
        end = self._end(active, split, cluster)
        inside = waves * (-(-self.k_tiles // split) * self._k_tile(active, sms) + end)
        memory = c.latency + self.weights / port_bytes(facts, sms)
        return max(inside, memory) + self.gap

    def cta_cycles(self, split: int, cluster: bool, active: int, sms: int) -> float:
        """Cycles of one CTA of `split` to a tile, `active` of them on each of so many multiprocessors."""
        return -(-self.k_tiles // split) * self._k_tile(active, sms) + self._end(active, split, cluster)

    @property
    def weights(self) -> int:
        """Bytes of the right operand."""
        p = self.sizes
        return p.n * p.k * p.z * p.dtype.itemsize

    def _k_tile(self, active: int, sms: int) -> float:
        """Cycles of a k-tile with so many CTAs on each multiprocessor that has some."""
        c = self.costs
        s, facts = self.config, self.facts
        # four tensor cores or groups of lanes: fewer warps leave some idle, and one warp each does not hide latencies
        warps = active * s.warps
        busy = 1.0 if s.group else min(1.0, warps / 4) * (c.few_warps if warps < 8 else 1.0)
        port = self.loaded / min(
            costs_of(facts).roofline.l2_port_bytes, max(c.port_bytes, facts.l2_bandwidth / facts.clock_ghz / sms)
        )
        shared = (self.products / busy, self.shared, port, self.issue)
        costs = (*(active * x for x in shared), self.chain, c.latency / s.ahead)
        if self.kind == "simt":
            less, more = sorted(costs[:2])
            costs = (more + c.simt_exposed * less, *costs[2:])
        largest = max(costs)
        return largest + c.exposed * (sum(costs) - largest)

    def _end(self, active: int, split: int, cluster: bool) -> float:
        """Cycles from the last k-tile to the last result."""
        c = self.costs
        p, s = self.sizes, self.config
        share = split if cluster else 1
        items = -(-self.tile // (p.width * s.threads * share))
        end = c.end + items * (c.item + c.item_operand * p.operands)
        end += active * self.tile * (s.wk * 8 / 128 + (self.slots / 128 + p.stored / c.store_bytes) / share)
        if cluster:
            end += c.cluster_rank * split + self.tile * s.wk * 4 / c.cluster_bytes
        elif split > 1:
            end += c.meeting + self.tile * 4.0 * split / c.meeting_bytes
        return end


def port_bytes(facts: GpuFacts, sms: int) -> float:
    """Bytes per cycle that so many multiprocessors read from memory."""
    return min(facts.read_bandwidth[-1][1] / facts.clock_ghz, sms * costs_of(facts).roofline.dram_port_bytes)


def grouped_cycles(products: Sequence[TileCost], splits: Sequence[int], cluster: int = 1) -> float:
    """Cycles of several products in one launch, a CTA for each tile or, with a split, its share of K.

    `cluster`: CTAs of a cluster, if those of a tile are one. Where all CTAs are resident at once, the slowest
    counts, with as many others on its multiprocessor as there are; else all share the multiprocessors, and a part of
    the slowest is waited for at the end. Infinite where a CTA does not fit.
    """
    c = costs_of(products[0].facts).tiles
    ctas_per_sm = min(b.ctas_per_sm for b in products)
    if not ctas_per_sm:
        return math.inf
    facts = products[0].facts
    counts = [b.tiles * s for b, s in zip(products, splits, strict=True)]
    total = sum(counts)
    sms = min(total, facts.sms)
    busiest = -(-total // facts.sms)
    active = min(busiest, ctas_per_sm)
    each = [b.cta_cycles(s, cluster > 1 and s > 1, active, sms) for b, s in zip(products, splits, strict=True)]
    inside = max(each)
    if busiest > ctas_per_sm:
        shared = sum(n * t for n, t in zip(counts, each, strict=True)) / (facts.sms * ctas_per_sm)
        inside = max(inside, shared + c.waited * inside)
    memory = c.latency + sum(b.weights for b in products) / port_bytes(facts, sms)
    return max(inside, memory) + products[0].gap


@dataclass(frozen=True, slots=True)
class TileShape:
    """A tile that good kernels of many products have."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    wk: int = 1
    group: bool = False
    ahead: int = 4

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return self.bm // self.wm * (self.bn // self.wn) * self.wk * (4 if self.group else 1)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.warps

    def ctas_per_sm(self, facts: GpuFacts, itemsize: int) -> int:
        """CTAs that a multiprocessor holds at once."""
        shared = (
            max((self.ahead + 1) * (self.bm + self.bn) * self.bk * itemsize, self.wk * self.bm * self.bn * 4) + 2048
        )
        registers = self.wm * self.wn // (128 if self.group else 32) + 64
        by_registers = facts.registers_per_sm // (registers * self.threads)
        return min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // self.threads)


TILE_SHAPES = {
    "group": (
        *(TileShape(64, n, 64, 64, n, group=True) for n in (16, 32, 64, 96, 128)),
        *(TileShape(128, n, 64, 64, n, group=True) for n in (32, 64, 128)),
        TileShape(128, 256, 64, 128, 128, group=True, ahead=2),
    ),
    "mma": tuple(
        TileShape(*sizes)
        for sizes in (
            (16, 16, 64, 16, 16, 4), (16, 32, 64, 16, 16, 2), (16, 64, 64, 16, 32, 2), (32, 32, 64, 16, 32, 2),
            (32, 64, 64, 32, 32), (64, 32, 64, 32, 32), (64, 64, 32, 32, 32), (128, 64, 32, 64, 32),
            (128, 128, 32, 64, 32),
        )
    ),
    "simt": (
        TileShape(32, 32, 32, 16, 16), TileShape(64, 32, 32, 32, 16), TileShape(64, 64, 32, 32, 32),
        TileShape(128, 64, 32, 32, 32), TileShape(128, 128, 32, 32, 64), TileShape(128, 128, 32, 64, 64, ahead=2),
    ),
}  # fmt: skip
SPLITS = (1, 2, 4, 8)


@lru_cache(maxsize=4096)
def least_cycles(facts: GpuFacts, p: Sizes) -> float:
    """The least of the model over usual tiles and splits: what a good kernel for the product may take."""
    kinds = ["mma"] if p.tensor else ["simt"]
    if p.dtype.itemsize == 2 and facts.capability >= 90 and p.a_load != "columns" and p.w_load != "kn":
        kinds.append("group")
    cluster = facts.capability >= 90 and p.width % 4 == 0
    best = math.inf
    for tile in (tile for kind in kinds for tile in TILE_SHAPES[kind]):
        cost = TileCost(p, tile, facts, tile.ctas_per_sm(facts, p.dtype.itemsize))
        for split in SPLITS:
            if split > 1 and (cost.k_tiles < 2 * split or cost.tiles * split > 3 * facts.sms):
                break
            best = min(best, cost.cycles(split, cluster and split > 1, spread=True))  # others fit otherwise
    return best


@lru_cache(maxsize=1024)
def least_grouped_cycles(facts: GpuFacts, every: tuple[Sizes, ...]) -> float:
    """The same of several products in one launch, whose CTAs have one tile shape."""
    tensor = every[0].tensor
    best = math.inf
    for tile in TILE_SHAPES["mma" if tensor else "simt"]:
        costs = [TileCost(p, tile, facts, tile.ctas_per_sm(facts, p.dtype.itemsize)) for p in every]
        for split in SPLITS:
            splits = [split if b.k_tiles >= 2 * split else 1 for b in costs]
            if split > 1 and (max(splits) == 1 or sum(b.tiles * s for b, s in zip(costs, splits, strict=True)) > 600):
                break
            cluster = facts.capability >= 90 and all(p.width % 4 == 0 for p in every)
            best = min(best, grouped_cycles(costs, splits, split if cluster else 1))
    return best
