"""Parameters of the attention template for Hopper's warpgroups, and which of them to measure.

Source of the model's terms: products at the rate that warpgroup instructions reach, 16 exponentials per cycle and
multiprocessor, 128 other results; what warpgroups hide of each other is fitted, and stands in the device's profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.occupancy import register_need
from weft.generate.cuda.attention.band import band
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.shapes import score_slots
from weft.generate.cuda.attention.tma_maps import PANEL, ROWS, panels
from weft.generate.cuda.role.role import RegisterSplit
from weft.generate.parameters import Parameters
from weft.kernels.source import Schedule

TEMPLATE = "attention_tma"
MOST = 5
Counted = Callable[["AttentionTmaConfig"], list[int]]
"""Steps of every tile of rows of one pair of keys and values."""


@dataclass(frozen=True, slots=True)
class AttentionTmaConfig(Parameters):
    """Parameters of the template."""

    consumers: int
    """Consumer warpgroups."""
    split_keys: bool
    """Split over keys: warpgroups have the same 64 rows and every other tile of keys each, and their partial results
    are combined at the end; else each has 64 rows of its own."""
    bn: int
    """Keys of a tile, a multiple of 16."""
    stages: int
    """Tiles of keys, and of values, in shared memory."""
    pingpong: bool
    """Ping-pong: warpgroups issue products one after the other; one has its softmax while another multiplies."""
    min_ctas: int
    """CTAs per multiprocessor, of the launch bounds."""
    persistent_ctas: int
    """CTAs of a persistent grid, which go on to further tiles; 0: one CTA per tile."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template=TEMPLATE)

    @property
    def bm(self) -> int:
        """Rows of a block."""
        return ROWS if self.split_keys else ROWS * self.consumers

    @property
    def step(self) -> int:
        """From one tile of keys of a warpgroup to its next."""
        return self.consumers if self.split_keys else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumer warpgroups and the producer."""
        return 128 * (self.consumers + 1)

    @property
    def at_entry(self) -> int:
        """Registers per thread that the block is launched with."""
        return min(255, 65536 // (self.threads * self.min_ctas) // 8 * 8)

    @property
    def moved(self) -> tuple[int, int]:
        """Registers per thread of the warpgroup that copies and of those that multiply; equal: none are moved."""
        entry = self.at_entry
        if entry >= 240:
            return entry, entry
        few = 32 if self.consumers * self.min_ctas > 2 else 40
        return few, min(240, (entry * (self.consumers + 1) - few) // self.consumers // 8 * 8)

    @property
    def split(self) -> RegisterSplit | None:
        """`moved` where some are."""
        few, many = self.moved
        return RegisterSplit(few, many) if few != many else None


def padded(n: int) -> int:
    """Columns that warpgroup products read."""
    return -(-n // 16) * 16


def q_bytes(p: Attention, s: AttentionTmaConfig) -> int:
    """Shared memory of q."""
    return s.bm * panels(p.qk) * PANEL * 2


def k_bytes(p: Attention, s: AttentionTmaConfig) -> int:
    """Shared memory of a tile of k."""
    return s.bn * panels(p.qk) * PANEL * 2


def v_bytes(p: Attention, s: AttentionTmaConfig) -> int:
    """Shared memory of a tile of v."""
    return s.bn * panels(p.head) * PANEL * 2


def shared_bytes(p: Attention, s: AttentionTmaConfig) -> int:
    """Dynamic shared memory of a block: q, tiles, barriers, and the columns that are not finite."""
    meeting = (s.consumers - 1) * 128 * 4 * (padded(p.head) // 2 + 4) if s.split_keys else 0
    return q_bytes(p, s) + s.stages * (k_bytes(p, s) + v_bytes(p, s)) + meeting + 32 * s.stages + 160


def tiles(p: Attention, s: AttentionTmaConfig) -> int:
    """Steps over all keys."""
    return -(-p.keys // s.bn)


def registers(p: Attention, s: AttentionTmaConfig) -> int:
    """Rough number of registers per thread of a warpgroup that multiplies: result, scores, weights and the rest."""
    other = 64 if not p.scale and band(p) is None else 32 if s.consumers > 2 else 36
    return padded(p.head) // 2 + s.bn // 2 + s.bn // 4 + other


_CONSUMERS = ((1, 1, False), (1, 2, False), (1, 3, False), (2, 1, False), (3, 1, False), (2, 1, True), (3, 1, True))
"""Warpgroups, CTAs of a multiprocessor, and whether the warpgroups share keys."""


def possible(p: Attention, facts: GpuFacts) -> Iterable[AttentionTmaConfig]:
    """Shapes that fit."""
    keys = padded(p.keys)
    cuts = {64, 96, 128, 160, 176, *(padded(-(-p.keys // k)) for k in (1, 2, 3, 4))}
    for consumers, min_ctas, split_keys in _CONSUMERS:
        if not split_keys and consumers > 1 and (consumers - 1) * ROWS >= p.m:
            continue
        for bn in sorted(cuts):
            if bn > min(256, max(keys, 16)):
                continue
            count = -(-p.keys // bn)
            if split_keys and count < 2 * consumers:
                continue
            some = (2 * consumers,) if split_keys else (1,) if count == 1 else (2, 3) if count > 2 else (2,)
            for stages in some:
                for pingpong in (False, True) if consumers > 1 and count > 1 and not split_keys else (False,):
                    s = AttentionTmaConfig(consumers, split_keys, bn, stages, pingpong, min_ctas, 0)
                    if fits(p, s, facts):
                        yield s


def fits(p: Attention, s: AttentionTmaConfig, facts: GpuFacts) -> bool:
    """Whether registers and shared memory are enough."""
    shared = shared_bytes(p, s)
    instruction = max(s.bn, padded(p.head)) // 2 + 40
    return (
        registers(p, s) <= s.moved[1]
        and instruction <= s.at_entry
        and s.min_ctas * register_need(s.threads, s.at_entry) <= facts.registers_per_sm
        and shared <= facts.shared_per_block
        and s.min_ctas * (shared + facts.shared_reserved) <= facts.shared_per_sm
    )


def cycles(p: Attention, s: AttentionTmaConfig, counts: list[int], facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel; `counts` are the steps of every tile of rows of one pair of k and v."""
    costs = costs_of(facts)
    c, common = costs.attention_tma, costs.attention
    qk, head = padded(p.qk), padded(p.head)
    scores = ROWS * s.bn
    expression = score_slots(p, common) if band(p) is None else 0.0
    multiply = scores * 2.0 * (qk + head) / c.rate
    special = common.exponential / costs.roofline.sfu_per_clock
    weigh = scores * (special + c.issued * (common.softmax_slots + expression) / 128)
    slots = facts.sms * s.min_ctas
    counts = [-(-n // s.step) for n in counts]
    steps = p.blocks * sum(counts)
    alive = min(s.min_ctas, -(-p.blocks * len(counts) // facts.sms)) * s.consumers
    chain = c.chain + 2.0 * scores * qk / c.rate + weigh
    loaded = s.bn * (qk + head) * p.dtype.itemsize / common.port_bytes * alive / (1 if s.split_keys else s.consumers)
    beside = c.beside + c.beside_column * max(0, s.bn - 128)
    busy = max(alive * multiply, alive * weigh)
    less = c.exposed * min(alive * multiply, alive * weigh)
    step = max(busy + less + beside * min(alive, c.beside_most), chain, loaded)
    rounds = max(steps / slots, *counts)
    if min(counts) == max(counts):
        rounds = -(-p.blocks * len(counts) // slots) * counts[0]
    begun = max(1.0, p.blocks * len(counts) / slots)
    begun *= c.begun + (c.joined if s.split_keys else 0.0)
    return rounds * step + begun / s.min_ctas + c.ended


def shapes(p: Attention, facts: GpuFacts, counted: Counted, keep: int = MOST) -> list[tuple[float, AttentionTmaConfig]]:
    """Modelled cycles and shape, best first; few, and unlike each other."""
    ranked = [(cycles(p, s, counted(s), facts), s) for s in possible(p, facts)]
    ranked.sort(key=lambda x: (x[0], x[1].consumers, -x[1].bn, -x[1].stages, x[1].pingpong))
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for modelled, s in ranked:
        kind = s.consumers, s.min_ctas, s.split_keys
        alike, same = seen.get(kind, 0), seen.get((*kind, s.bn, s.pingpong), 0)
        seen[kind], seen[*kind, s.bn, s.pingpong] = alike + 1, same + 1
        keyed.append((modelled * (1 + 0.03 * alike + 0.1 * same), s))
    keyed.sort(key=lambda x: x[0])
    return [x for x in keyed[:keep] if x[0] < math.inf]
