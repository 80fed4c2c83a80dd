"""What a block shape of a matrix product costs: cycles of a multiprocessor from the end of one kernel to the next.

    gap + start + waves * (steps * step + end) (+ the meeting of blocks that share a sum), or the weights from memory

A step of the sum is bound by one of: matrix instructions, shared memory, the ports to the L2 cache, issue slots of the
copies, the chain of one step (barrier, fragments, products that wait for each other), or the latency of memory over the
steps that run ahead; the others are hidden but for a small share. Blocks on one multiprocessor share all but the last
two. The constants without a unit of hardware behind them were fitted to 1,091 kernels of ten networks measured on an
NVIDIA H200 (docs/performance-model.md says how well they hold for networks that were left out); the model ranks, and
measuring decides. Source: performance notes, sections 3 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from weft.device.cuda.model import DRAM_PORT_BYTES, L2_PORT_BYTES, gap_us
from weft.device.cuda.record import FLOPS_PER_CLOCK, GpuFacts
from weft.ir.types import DType

START = 90.0
"""Addresses, and the first copies on their way."""
END = 825.0
"""The last barrier, the sums into shared memory, and the way of the last results to memory."""
LATENCY = 870.0
"""Of a copy from memory: weights were last used a whole inference ago."""
EXPOSED = 0.14
"""Share of the smaller costs of a step that is not hidden behind the largest."""
RATE = {"group": 3700.0, "mma": 2500.0, "simt": 250.0}
"""FLOP per cycle on Hopper: warpgroup products, those of warps (62 % of the peak at most), multiply-adds."""
REACHED = 0.9
"""Share of the peak that any of them reaches."""
CHAIN = {"group": 328.0, "mma": 170.0, "simt": 440.0}
"""Cycles of a step of one block that nothing shortens."""
MMA = 15.0
"""Cycles of one 16x8x16 product of a warp that does not overlap with the next."""
REMAINDER = 12.0
"""Cycles of a step whose stage is a remainder by what is no power of two: 64 kernels with 5 stages took 3 % longer than
those with 4 and nothing else different."""
SIMT_READ, SIMT_EXPOSED = 1.9, 0.73
"""Cycles in which a warp reads 16 bytes per thread, however many threads read the same; and the share of the reads or
the multiply-adds, whichever takes less, that the other does not hide. Fitted, with the rate and the chain, to 443
kernels of two networks in f32; 70 of products by themselves were left out (77 % of their pairs are in order)."""
CLUSTERED = {4: 0.92, 8: 0.86}
"""Share of the multiprocessors that clusters of so many blocks fill. In f16 the fitted constants have that in them."""
ISSUE = {"rows": 0.056, "columns": 0.054, "taps": 0.26, "elements": 2.5}
"""Cycles in which a multiprocessor issues the copy of 16 bytes of the left operand, by how they are found."""
ISSUE_WEIGHTS = 0.052
ELEMENTS = 690.0
"""Latency of a step whose elements pass through registers."""
ELEMENT, ELEMENT_OF_TABLES = 59.0, 168.0
"""Further latency per element of a thread: they are read one after another; through tables of places yet slower."""
ITEM, ITEM_OPERAND = 78.0, 94.0
"""Latency of one vector of results of a thread, and of each operand that is read for it."""
RESULT, PLAIN, SPECIAL = 0.93, 3.3, 16.6
"""Issue slots of lanes: per result, and per elementwise and per transcendental operation on it."""
PORT_BYTES = 42.0
"""Bytes per cycle that a multiprocessor gets from the L2 cache while all ask for the same few lines: more than their
share of what the cache gives to a copy."""
STORE_BYTES = 32
"""Bytes per cycle that a multiprocessor stores."""
CLUSTER_RANK = 583.0
"""Per block of a cluster: they start together, and wait for each other twice."""
CLUSTER_BYTES = 10.3
"""Bytes per cycle that a block reads from the shared memory of its cluster."""
MEETING = 5400.0
"""Blocks that meet through memory: fences, a counter, and the last one reads what all have written."""
MEETING_BYTES = 6.5
"""Bytes per cycle of that."""

WAITED = 0.1
"""Share of the slowest block of several products in one launch that is waited for where not all find room at once; 58
kernels on an NVIDIA H200 took 0.94 of the model by that (a median; half of them were within a factor of 1.12)."""


def crowded(active: int, blocks: int, room: int, fit: int) -> int:
    """Blocks of the busiest multiprocessor, where `active` were its share of so many blocks on so much room.

    A kernel's blocks are placed while the one before it runs: where both together do not fit, those that must wait go
    to the multiprocessors that are done first, which take as many as fit. Where a share of the blocks fills a
    multiprocessor, or all find room at once, each has its share.
    """
    return fit if active < fit < 2 * active and 2 * blocks > fit * room else active


LeftLoad = Literal["rows", "taps", "columns", "elements"]
RightLoad = Literal["packed", "nk", "kn", "elements"]
"""How tiles of the operands are found: by chunks of 16 bytes along the sum or across it, or by single elements."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A product out[z, m, n] = sum over k of a[z, m, k] * w[z, n, k], and what follows the sum."""

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
    """How one block is cut; sizes in elements."""

    @property
    def bm(self) -> int:
        """Rows of the product."""

    @property
    def bn(self) -> int:
        """Columns."""

    @property
    def bk(self) -> int:
        """Of the sum, in one step."""

    @property
    def wm(self) -> int:
        """Rows of a warp, or of a group of four."""

    @property
    def wn(self) -> int:
        """Columns of it."""

    @property
    def wk(self) -> int:
        """Warps that share a sum."""

    @property
    def group(self) -> bool:
        """Warpgroup products."""

    @property
    def warps(self) -> int:
        """Of a block."""

    @property
    def threads(self) -> int:
        """Of a block."""

    @property
    def ahead(self) -> int:
        """Steps that copies run ahead."""


class Block:
    """A shape apart from how its sum is divided: what does not depend on that is computed once."""

    def __init__(self, p: Sizes, s: TileConfig, facts: GpuFacts, fit: int) -> None:
        self.sizes, self.shape, self.facts = p, s, facts
        self.fit = fit
        """Blocks that a multiprocessor holds at once."""
        self.tiles = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z
        self.steps = math.ceil(p.k / s.bk)
        self.gap = gap_us(facts) * facts.clock_ghz * 1e3 + START
        size = p.dtype.itemsize
        self.kind = "group" if s.group else "mma" if p.tensor else "simt"
        peak = FLOPS_PER_CLOCK.get(facts.capability, {}).get("tf32" if p.tf32 else p.dtype.value, math.inf)
        rate = RATE[self.kind] * (2 / size if p.tensor and not p.dtype.is_float8 else 1)  # those multiply as halves
        self.products = 2.0 * s.bm * s.bn * s.bk / min(rate, REACHED * peak)
        self.loaded = (s.bm + s.bn) * s.bk * size
        if s.group:
            fragments = s.bm / 64 * (64 + s.bn) * s.bk * size
        else:
            fragments = (s.bm // s.wm) * (s.bn // s.wn) * (s.wm + s.wn) * s.bk * size
        self.shared = (fragments + self.loaded) / 128
        if self.kind == "simt":
            reads = (s.bm // s.wm) * (s.bn // s.wn) * s.bk / 4 * (s.wm / 4 + s.wn / 8)
            self.shared = SIMT_READ * reads + self.loaded / 128
        self.issue = s.bk * size / 16 * (s.bm * ISSUE[p.a_load] + s.bn * ISSUE_WEIGHTS)
        self.chain = self._chain()
        self.tile = s.bm * s.bn
        self.slots = RESULT + PLAIN * p.plain + SPECIAL * p.special

    def _chain(self) -> float:
        """Cycles of a step that more blocks do not share."""
        p, s = self.sizes, self.shape
        chain = CHAIN[self.kind]
        if self.kind == "mma":
            chain += MMA * (s.bk * p.dtype.itemsize // 32 / s.wk) * (s.wm // 16) * (s.wn // 8)
            chain += REMAINDER if (s.ahead + 1) & s.ahead else 0.0
        by_element = (s.bm if p.a_load == "elements" else 0) + (s.bn if p.w_load == "elements" else 0)
        if by_element:
            chain += ELEMENTS + by_element * s.bk / s.threads * (ELEMENT_OF_TABLES if p.tables else ELEMENT)
        return chain

    def cycles(self, split: int, cluster: bool, *, spread: bool = False) -> float:
        """The whole kernel with so many blocks to a sum; infinite where a block does not fit.

        `spread`: as if multiprocessors shared all blocks evenly.
        """
        if not self.fit:
            return math.inf
        p, facts = self.sizes, self.facts
        blocks = self.tiles * split
        room = facts.sms
        if cluster and p.dtype is DType.F32:
            room = int(room * CLUSTERED.get(split, 1.0)) // split * split
        busiest = -(-blocks // room)
        waves = -(-busiest // self.fit)
        active = -(-busiest // waves)
        if not spread:
            active = crowded(active, blocks, room, self.fit)
        sms = min(blocks, room)
        end = self._end(active, split, cluster)
        inside = waves * (-(-self.steps // split) * self._step(active, sms) + end)
        memory = LATENCY + self.weights / port_bytes(facts, sms)
        return max(inside, memory) + self.gap

    def one(self, split: int, cluster: bool, active: int, sms: int) -> float:
        """Cycles of one block of `split` to a sum, `active` of them on each of so many multiprocessors."""
        return -(-self.steps // split) * self._step(active, sms) + self._end(active, split, cluster)

    @property
    def weights(self) -> int:
        """Bytes of the right operand."""
        p = self.sizes
        return p.n * p.k * p.z * p.dtype.itemsize

    def _step(self, active: int, sms: int) -> float:
        """Cycles of one step of the sum with so many blocks on each multiprocessor that has some."""
        s, facts = self.shape, self.facts
        # four tensor cores or groups of lanes: fewer warps leave some idle, and one warp each does not hide latencies
        warps = active * s.warps
        busy = 1.0 if s.group else min(1.0, warps / 4) * (0.85 if warps < 8 else 1.0)
        port = self.loaded / min(L2_PORT_BYTES, max(PORT_BYTES, facts.l2_bandwidth / facts.clock_ghz / sms))
        shared = (self.products / busy, self.shared, port, self.issue)
        costs = (*(active * x for x in shared), self.chain, LATENCY / s.ahead)
        if self.kind == "simt":
            less, more = sorted(costs[:2])
            costs = (more + SIMT_EXPOSED * less, *costs[2:])
        largest = max(costs)
        return largest + EXPOSED * (sum(costs) - largest)

    def _end(self, active: int, split: int, cluster: bool) -> float:
        """Cycles from the last step to the last result."""
        p, s = self.sizes, self.shape
        share = split if cluster else 1
        items = -(-self.tile // (p.width * s.threads * share))
        end = END + items * (ITEM + ITEM_OPERAND * p.operands)
        end += active * self.tile * (s.wk * 8 / 128 + (self.slots / 128 + p.stored / STORE_BYTES) / share)
        if cluster:
            end += CLUSTER_RANK * split + self.tile * s.wk * 4 / CLUSTER_BYTES
        elif split > 1:
            end += MEETING + self.tile * 4.0 * split / MEETING_BYTES
        return end


def port_bytes(facts: GpuFacts, sms: int) -> float:
    """Bytes per cycle that so many multiprocessors read from memory."""
    return min(facts.read_bandwidth[-1][1] / facts.clock_ghz, sms * DRAM_PORT_BYTES)


def together(blocks: Sequence[Block], splits: Sequence[int], cluster: int = 1) -> float:
    """Cycles of several products in one launch, a block for each tile or, with a split, its share of the sum.

    `cluster`: blocks of a cluster, if those that share a sum are one. Where all blocks find room at once, the slowest
    counts, with as many others on its multiprocessor as there are; else all share the multiprocessors, and a part of
    the slowest is waited for at the end. Infinite where a block does not fit.
    """
    fit = min(b.fit for b in blocks)
    if not fit:
        return math.inf
    facts = blocks[0].facts
    counts = [b.tiles * s for b, s in zip(blocks, splits, strict=True)]
    total = sum(counts)
    sms = min(total, facts.sms)
    busiest = -(-total // facts.sms)
    active = min(busiest, fit)
    each = [b.one(s, cluster > 1 and s > 1, active, sms) for b, s in zip(blocks, splits, strict=True)]
    inside = max(each)
    if busiest > fit:
        shared = sum(n * t for n, t in zip(counts, each, strict=True)) / (facts.sms * fit)
        inside = max(inside, shared + WAITED * inside)
    memory = LATENCY + sum(b.weights for b in blocks) / port_bytes(facts, sms)
    return max(inside, memory) + blocks[0].gap


@dataclass(frozen=True, slots=True)
class Cut:
    """A shape of a block that good kernels of many products have."""

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
        """Of a block."""
        return self.bm // self.wm * (self.bn // self.wn) * self.wk * (4 if self.group else 1)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    def fit(self, facts: GpuFacts, itemsize: int) -> int:
        """Blocks that a multiprocessor holds at once."""
        shared = (
            max((self.ahead + 1) * (self.bm + self.bn) * self.bk * itemsize, self.wk * self.bm * self.bn * 4) + 2048
        )
        registers = self.wm * self.wn // (128 if self.group else 32) + 64
        by_registers = facts.registers_per_sm // (registers * self.threads)
        return min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // self.threads)


CUTS = {
    "group": (
        *(Cut(64, n, 64, 64, n, group=True) for n in (16, 32, 64, 96, 128)),
        *(Cut(128, n, 64, 64, n, group=True) for n in (32, 64, 128)),
        Cut(128, 256, 64, 128, 128, group=True, ahead=2),
    ),
    "mma": (
        Cut(16, 16, 64, 16, 16, 4), Cut(16, 32, 64, 16, 16, 2), Cut(16, 64, 64, 16, 32, 2), Cut(32, 32, 64, 16, 32, 2),
        Cut(32, 64, 64, 32, 32), Cut(64, 32, 64, 32, 32), Cut(64, 64, 32, 32, 32), Cut(128, 64, 32, 64, 32),
        Cut(128, 128, 32, 64, 32),
    ),
    "simt": (
        Cut(32, 32, 32, 16, 16), Cut(64, 32, 32, 32, 16), Cut(64, 64, 32, 32, 32), Cut(128, 64, 32, 32, 32),
        Cut(128, 128, 32, 32, 64), Cut(128, 128, 32, 64, 64, ahead=2),
    ),
}  # fmt: skip
SPLITS = (1, 2, 4, 8)


@lru_cache(maxsize=4096)
def least_cycles(facts: GpuFacts, p: Sizes) -> float:
    """The least of the model over usual blocks and splits: what a good kernel for the product may take."""
    kinds = ["mma"] if p.tensor else ["simt"]
    if p.dtype.itemsize == 2 and facts.capability >= 90 and p.a_load != "columns" and p.w_load != "kn":
        kinds.append("group")
    cluster = facts.capability >= 90 and p.width % 4 == 0
    best = math.inf
    for cut in (cut for kind in kinds for cut in CUTS[kind]):
        block = Block(p, cut, facts, cut.fit(facts, p.dtype.itemsize))
        for split in SPLITS:
            if split > 1 and (block.steps < 2 * split or block.tiles * split > 3 * facts.sms):
                break
            best = min(best, block.cycles(split, cluster and split > 1, spread=True))  # others fit otherwise
    return best


@lru_cache(maxsize=1024)
def least_together(facts: GpuFacts, every: tuple[Sizes, ...]) -> float:
    """The same of several products in one launch, whose blocks have one shape."""
    tensor = every[0].tensor
    best = math.inf
    for cut in CUTS["mma" if tensor else "simt"]:
        blocks = [Block(p, cut, facts, cut.fit(facts, p.dtype.itemsize)) for p in every]
        for split in SPLITS:
            splits = [split if b.steps >= 2 * split else 1 for b in blocks]
            if split > 1 and (max(splits) == 1 or sum(b.tiles * s for b, s in zip(blocks, splits, strict=True)) > 600):
                break
            cluster = facts.capability >= 90 and all(p.width % 4 == 0 for p in every)
            best = min(best, together(blocks, splits, split if cluster else 1))
    return best
