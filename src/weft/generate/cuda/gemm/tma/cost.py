"""What a shape of the tma template costs: cycles of the busiest multiprocessor from the end of one kernel to the next.

A tile costs its k-blocks, each bound by the tensor cores, shared memory, the L2 cache or the chain of one warpgroup,
and its epilogue: a thread's results one after another, and what all of them issue and store. With ping-pong consumers,
or several CTAs per multiprocessor, a tile hides behind another one as far as neither a resource nor a warpgroup is
theirs both. The constants are those of the device's profile (docs/performance-model.md); the model ranks, and measuring
decides. Source: note on matrix products, section 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.costmodel.constants import Tma
from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.occupancy import occupancy
from weft.generate.cuda.gemm.mma.cost import Sizes
from weft.generate.cuda.gemm.tma.operands import STEP, Rows, Three
from weft.generate.cuda.gemm.tma.shape import StreamK, TmaConfig

_LEAST_BESIDE = 24
"""Registers of a thread that no kernel does without beside its sums: addresses, counters, an instruction's operands."""


@dataclass(frozen=True, slots=True)
class Case:
    """What decides about shapes, so that a network's many products of the same kind are ranked once."""

    sizes: Sizes
    """The sum in words of 16 bits."""
    rows: Rows
    stages: tuple[tuple[int, int], ...]
    """K-blocks by panel."""
    stride: Three
    columns: bool
    """The left operand's rows are neighbours."""
    residuals: int
    """Operands of what follows the sum that differ by row."""
    taps: int
    reach: tuple[int, int]
    """Rows and columns of pixels that a pixel of the result reads beside its own; (0, 0): no halo tile."""
    across: int
    """Columns of the kernel."""
    packed: bool
    """Weights that are repacked once."""
    stored: tuple[int, ...] = (2,)
    """Bytes of an element of each output."""
    clipped: int = 0
    """Exact divisions by constants."""
    divided: int = 0
    """Other exact divisions."""
    exact: int = 0
    """Other exact functions."""
    within: tuple[bool, bool] = (False, False)
    """Whether rows of the left and the right operand begin within sectors of memory."""
    copied: int = 0
    """Bytes of operands that a launch before moves to rows of whole lines."""
    residual_bytes: int = 0
    """Bytes of residuals of one result."""


def halo_bytes(case: Case, box: Three, panel: int) -> int:
    """Shared memory of one buffer of pixels."""
    return -(-box[0] * (box[1] + case.reach[0]) * (box[2] + case.reach[1]) * 2 * panel // 1024) * 1024


def units(case: Case, s: TmaConfig) -> int:
    """Tiles, or clusters of them."""
    high, wide = math.prod(case.rows.tiles(s.box)), -(-case.sizes.n // s.bn)
    return -(-high // s.cluster_m) * -(-wide // s.cluster_n) * case.sizes.z


def cycles(case: Case, s: TmaConfig, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel in a chain of kernels."""
    c = costs_of(facts).tma
    inside = busy(case, s, facts)
    memory = moved(case, facts)
    hidden = c.exposed * min(inside, memory)
    gap = gap_us(facts) * facts.clock_ghz * 1e3 + c.multicast[s.multicast_ctas]
    if case.copied:
        gap += gap + c.copying + case.copied * 2 * facts.clock_ghz / facts.read_bandwidth[-1][1]
    return gap + c.start + max(inside, memory) + hidden


def busy(case: Case, s: TmaConfig, facts: GpuFacts) -> float:
    """Cycles of the busiest multiprocessor."""
    c = costs_of(facts).tma
    k_tiles = k_blocks(case, s)
    tiles = units(case, s)
    busiest = -(-tiles // active_clusters(case, s, facts))
    flow, alone = _step(case, s, k_tiles, c)
    flow, main = flow * k_tiles, alone * k_tiles
    waited, shared = _end(case, s, c)
    end = waited + shared
    apart = min(busiest, 2 if s.pingpong else s.min_ctas)
    rounds = -(-busiest // apart)
    if s.coop_fixup:
        sharers = StreamK(tiles, s.persistent_ctas // s.multicast_ctas, k_tiles).sharers
        left = s.bm * s.bn * 4 * (sharers - 1) / sharers
        each = max(alone, ported(case, s, c) / c.apart_port)
        inside = -(-k_tiles // sharers) * each + c.late + (end - c.late) / sharers
        inside += 2 * left / c.handed + c.coop_fixup * sharers
    elif s.stream_k:
        e = StreamK(tiles, s.persistent_ctas // s.multicast_ctas, k_tiles)
        others = max(1.0, e.units / e.shared)
        inside = e.tiles * k_tiles / e.units * alone * (1.0 if s.multicast else c.drift) + busiest * end
        inside += (1 + others) * s.bm * s.bn * 4 / c.handed + c.handed_latency
    elif s.pingpong:
        inside = max(busiest * main + end, rounds * (main + end) + (busiest - 1) % 2 * main, busiest * shared + main)
    elif apart > 1:
        inside = c.strangers * max(busiest * flow + end, rounds * (main + end), busiest * shared + main)
    else:
        inside = busiest * (main + end)
    return inside + (c.field + halo_bytes(case, s.box, s.panel) / c.port if s.halo_stages else 0.0)


def fits_budget(s: TmaConfig, facts: GpuFacts) -> bool:
    """Whether the CTAs of an SM may find room in its budget, by threads and registers; true where there is none.

    Where registers move, the launch takes what its bounds allow; elsewhere at least its sums and some more, and the
    assembler has the last word.
    """
    if facts.sm_budget is None:
        return True
    allowed = min(255, facts.whole.registers_per_sm // (s.threads * s.min_ctas) // 8 * 8)
    sums = (s.rows + 64 * s.two_level) * s.bn // 128
    registers = allowed if s.moves_registers else min(allowed, sums + _LEAST_BESIDE)
    return occupancy(facts, s.threads, 0, registers) >= s.min_ctas


def active_clusters(case: Case, s: TmaConfig, facts: GpuFacts) -> int:
    """Units that all multiprocessors begin at once, one each, or as many as clusters find room for."""
    c = costs_of(facts).tma
    if s.split == 1:
        return int(c.clustered.get(s.multicast_ctas, 1.0) * facts.sms) // s.multicast_ctas
    bytes_ = s.shared_bytes(halo_bytes(case, s.box, s.panel) if s.halo_stages else 0)
    registers = facts.registers_per_sm // (s.threads * c.cluster_registers)
    fit = min(facts.shared_per_sm // (bytes_ + facts.shared_reserved), registers)
    return max(1, int(c.clustered[s.split] * facts.sms) // s.split * max(1, fit))


def traffic(case: Case, s: TmaConfig) -> tuple[float, float]:
    """Bytes of a k-block in a CTA: through shared memory, written and read by wgmma; and loaded by TMA."""
    loaded = (s.bm + s.bn + s.overfetch) * 2.0 * STEP
    if s.halo_stages:
        loaded = halo_bytes(case, s.box, s.panel) * s.taps_per_stage / case.taps + s.bn * 2 * s.step
    return s.bm // 64 * (64 + s.bn) * 128 * (s.step / STEP) + loaded, loaded


def k_blocks(case: Case, s: TmaConfig) -> int:
    """Of a tile, in one CTA."""
    if s.halo_stages:
        blocks = -(-case.sizes.k // case.taps // s.panel)
        return -(-blocks // s.split) * (case.taps // s.taps_per_stage)
    return -(-dict(case.stages)[s.panel] // s.split)


def _step(case: Case, s: TmaConfig, k_tiles: int, c: Tma) -> tuple[float, float]:
    """Cycles of a k-block that a multiprocessor is busy with, and those of one tile that is alone."""
    part, high = s.step / STEP, s.bm // 64
    through, loaded = traffic(case, s)
    products = high * 2 * s.bn * part / c.busy
    reads = through / c.shared
    flow = max(products, reads, (ported(case, s, c) if any(case.within) or s.multicast else loaded) / c.port)
    if s.multicast:  # copies cost a little even where products hide them: of two ways, the one that copies less
        flow *= 1.0 - c.less * (s.bn if s.cluster_n == 1 else s.bm) / (s.bm + s.bn)
    own = (high if s.pingpong else high / s.consumers) * 2 * s.bn * part + (c.again if k_tiles > s.stages else 0.0)
    if s.two_level == 1:
        own += high / s.consumers * (c.moved + s.bn / 2)
    return flow, max(flow, c.latency / s.stages, own)


def ported(case: Case, s: TmaConfig, c: Tma) -> float:
    """Bytes of a stage that come through the port, where rows begin within sectors as if they were longer."""
    by_left, by_right = (c.within if x else 1.0 for x in case.within)
    left, right = s.bm * by_left, (s.bn + s.overfetch) * by_right
    return (left / s.cluster_n + right / s.cluster_m) * 2.0 * s.step


def _end(case: Case, s: TmaConfig, c: Tma) -> tuple[float, float]:
    """Cycles from the last product of a tile to its last result: of waiting threads, and of the multiprocessor."""
    p, area = case.sizes, s.bm * s.bn
    each = c.vector * (1 + case.residuals) + c.steps * p.plain + c.specials * p.special
    each += c.clipped * case.clipped + c.divided * case.divided + c.exact * case.exact
    each -= c.exchanged if s.interleaved else 0.0
    waited = c.late + each * area / 8 / (128 * (1 if s.pingpong else s.consumers)) / s.split
    slots = (
        c.result
        + c.plain * p.plain
        + c.special * p.special
        + c.divided_slots * case.divided
        + c.exact_slots * case.exact
    )
    shared = area / s.split * (slots / 128 + (_stored(case, s, c) + case.residual_bytes) / c.store)
    if s.split > 1:
        waited += c.cluster + c.rank * s.split + area * 4 / c.exchange
    return waited, shared


def _stored(case: Case, s: TmaConfig, c: Tma) -> float:
    """Bytes that stores of one result cost, by how they fill sectors."""
    p = case.sizes
    element = case.stored[0] if p.dtype.is_integer else p.dtype.itemsize
    if p.width * element < min(16, 8 * element):
        return c.single * len(case.stored) / p.width
    apart = p.width == 4 and not case.packed and not s.interleaved  # two stores of 16 bytes beside each other
    return sum(size * (c.half if size * p.width > 16 or (apart and size == 4) else 1.0) for size in case.stored)


def moved(case: Case, facts: GpuFacts) -> float:
    """Cycles of the bytes: weights were last used a whole inference ago, the rest may be in the L2 cache."""
    c = costs_of(facts).tma
    p = case.sizes
    weights = p.n * p.k * p.z * 2.0
    others = p.m * p.k * p.z * 2.0 / case.taps + p.m * p.n * p.z * (p.stored + case.residual_bytes)
    far = facts.read_bandwidth[-1][1]
    near = weights + others < c.near * facts.l2_bytes
    return (weights / far + others / (facts.l2_bandwidth if near else far)) * facts.clock_ghz
