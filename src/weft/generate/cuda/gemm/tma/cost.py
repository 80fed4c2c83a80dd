"""What a shape of the tma template costs: cycles of the busiest multiprocessor from the end of one kernel to the next.

A tile costs its k-blocks, each bound by the tensor cores, shared memory, the L2 cache or the chain of one warpgroup,
and its epilogue: a thread's results one after another, and what all of them issue and store. With ping-pong consumers,
or several CTAs per multiprocessor, a tile hides behind another one as far as neither a resource nor a warpgroup is
theirs both. The constants were fitted to 1,539 kernels of ten networks measured on an NVIDIA H200, those of clusters
and stream-K apart (docs/performance-model.md); the model ranks, and measuring decides. Source: note on matrix products,
section 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.model import gap_us
from weft.generate.cuda.gemm.mma.cost import Sizes
from weft.generate.cuda.gemm.tma.operands import STEP, Rows, Three
from weft.generate.cuda.gemm.tma.shape import StreamK, TmaConfig

PORT = 56.0
"""Bytes per cycle and multiprocessor from the L2 cache while all load."""
SHARED = 138.0
"""Bytes per cycle that shared memory takes and gives: 128, at the clock of an H200 where copies bound products."""
BUSY = 0.79
"""Share of the tensor cores' peak that a stream of products reaches."""
START = 583.0
"""Descriptors, barriers, and the first copies on their way."""
LATENCY = 602.0
"""Cycles of a copy, over the stages that are under way."""
AGAIN = 215.0
"""Cycles in which a stage is used again: its products have ended, and the copies know."""
FIELD = 1628.0
"""Cycles until the first pixels of a field are there, besides their bytes."""
LATE = 365.0
"""From the last product of a tile to the first of the next one of the same warpgroup."""
VECTOR, STEPS, SPECIALS = 7.8, 4.1, 39.0
"""Latency of one vector of results: beside it, of each operand that is read for it, elementwise step and function."""
CLIPPED, DIVIDED, EXACT = 1270.0, 360.0, 66.0
"""Latency of a vector whose results are divided exactly: by constants, where a numerator of 0 takes the long way and
all lanes wait, or by others; and of another function of all bits of f32."""
RESULT, PLAIN, SPECIAL, DIVIDED_SLOTS, EXACT_SLOTS = 0.93, 0.84, 3.9, 15.5, 6.4
"""Issue slots of lanes: per result, elementwise operation, function, and the exact ones of them."""
STORE = 25.5
"""Bytes per cycle that a multiprocessor stores, or reads of residuals."""
HALF = 2.8
"""Factor where a thread's results are more bytes than one store: each fills every other half of a sector."""
SINGLE = 37.0
"""Bytes that a store of single results costs: what it takes of sectors that others fill."""
CLUSTER, RANK, EXCHANGE = 1180.0, 324.0, 18.7
"""A cluster: cycles, cycles per block, and bytes per cycle of its exchange."""
CLUSTERED = {2: 1.0, 3: 0.89, 4: 0.91, 6: 0.775, 8: 0.91}
"""Share of the multiprocessors that clusters of so many blocks can fill: those of one cluster are neighbours.

An H200 says that it runs 66 clusters of 2 at once, 39 of 3, 30 of 4, 17 of 6 and 15 of 8.
"""
CLUSTER_REGISTERS = 168
"""Registers of a thread, roughly, by which several blocks of clusters may share a multiprocessor."""
HANDED = 45.0
"""Bytes per cycle in which a block leaves sums in memory, or reads what others have left."""
HANDED_LATENCY = 4000.0
MUTUAL = 600.0
"""Cycles for each of the CTAs of a cooperative fix-up, besides the bytes of their partial sums."""
APART_PORT = 40.0
"""Bytes per cycle and multiprocessor from the L2 cache where neighbours are at different parts of a sum."""
PAIRED = {1: 0.0, 2: 1700.0, 4: 600.0}
"""Cycles in which the CTAs of a multicast cluster start and leave together, less what else they save: of four
too little is looked up to be in the way of anything."""
DRIFT = 1.04
"""Blocks that are at different steps of their sums find less of each other's operands on its way from the L2 cache."""
LESS = 0.01
"""Share of a step that copies cost though products take longer."""
WITHIN = 1.5
"""Factor for the copy of 128 bytes that begin within a sector: five are asked for, of two lines."""
COPYING = 2000.0
"""Cycles of a launch that copies operands, besides their bytes and the gap to the next one."""
EXCHANGED = 4.0
"""Latency that a vector saves whose results no lane exchanges."""
MOVED = 40.0
"""Cycles before a sum of 64 rows that is to move is complete, besides an addition for each register."""
NEAR = 0.6
"""Share of the L2 cache that operands and results may take and still be there."""
STRANGERS = 1.06
"""CTAs of one multiprocessor are not ordered as ping-pong consumers are: their epilogues coincide."""
EXPOSED = 0.41
"""Share of the memory's time, or of the multiprocessors', whichever is less, that the other does not hide."""


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
    inside = busy(case, s, facts)
    memory = moved(case, facts)
    hidden = EXPOSED * min(inside, memory)
    gap = gap_us(facts) * facts.clock_ghz * 1e3 + PAIRED[s.multicast_ctas]
    if case.copied:
        gap += gap + COPYING + case.copied * 2 * facts.clock_ghz / facts.read_bandwidth[-1][1]
    return gap + START + max(inside, memory) + hidden


def busy(case: Case, s: TmaConfig, facts: GpuFacts) -> float:
    """Cycles of the busiest multiprocessor."""
    blocks = -(-case.sizes.k // case.taps // s.panel)
    k_tiles = (
        -(-blocks // s.split) * (case.taps // s.taps_per_stage)
        if s.halo_stages
        else -(-dict(case.stages)[s.panel] // s.split)
    )
    tiles = units(case, s)
    busiest = -(-tiles // active_clusters(case, s, facts))
    flow, alone = _step(case, s, k_tiles)
    flow, main = flow * k_tiles, alone * k_tiles
    waited, shared = _end(case, s)
    end = waited + shared
    apart = min(busiest, 2 if s.pingpong else s.min_ctas)
    rounds = -(-busiest // apart)
    if s.coop_fixup:
        sharers = StreamK(tiles, s.persistent_ctas // s.multicast_ctas, k_tiles).sharers
        left = s.bm * s.bn * 4 * (sharers - 1) / sharers
        each = max(alone, ported(case, s) / APART_PORT)
        inside = -(-k_tiles // sharers) * each + LATE + (end - LATE) / sharers
        inside += 2 * left / HANDED + MUTUAL * sharers
    elif s.stream_k:
        e = StreamK(tiles, s.persistent_ctas // s.multicast_ctas, k_tiles)
        others = max(1.0, e.units / e.shared)
        inside = e.tiles * k_tiles / e.units * alone * (1.0 if s.multicast else DRIFT) + busiest * end
        inside += (1 + others) * s.bm * s.bn * 4 / HANDED + HANDED_LATENCY
    elif s.pingpong:
        inside = max(busiest * main + end, rounds * (main + end) + (busiest - 1) % 2 * main, busiest * shared + main)
    elif apart > 1:
        inside = STRANGERS * max(busiest * flow + end, rounds * (main + end), busiest * shared + main)
    else:
        inside = busiest * (main + end)
    return inside + (FIELD + halo_bytes(case, s.box, s.panel) / PORT if s.halo_stages else 0.0)


def active_clusters(case: Case, s: TmaConfig, facts: GpuFacts) -> int:
    """Units that all multiprocessors begin at once, one each, or as many as clusters find room for."""
    if s.split == 1:
        return int(CLUSTERED.get(s.multicast_ctas, 1.0) * facts.sms) // s.multicast_ctas
    bytes_ = s.shared_bytes(halo_bytes(case, s.box, s.panel) if s.halo_stages else 0)
    registers = facts.registers_per_sm // (s.threads * CLUSTER_REGISTERS)
    fit = min(facts.shared_per_sm // (bytes_ + facts.shared_reserved), registers)
    return max(1, int(CLUSTERED[s.split] * facts.sms) // s.split * max(1, fit))


def _step(case: Case, s: TmaConfig, k_tiles: int) -> tuple[float, float]:
    """Cycles of a k-block that a multiprocessor is busy with, and those of one tile that is alone."""
    part, high = s.step / STEP, s.bm // 64
    loaded = (s.bm + s.bn + s.overfetch) * 2.0 * STEP
    if s.halo_stages:
        loaded = halo_bytes(case, s.box, s.panel) * s.taps_per_stage / case.taps + s.bn * 2 * s.step
    products = high * 2 * s.bn * part / BUSY
    reads = (high * (64 + s.bn) * 128 * part + loaded) / SHARED
    flow = max(products, reads, (ported(case, s) if any(case.within) or s.multicast else loaded) / PORT)
    if s.multicast:  # copies cost a little even where products hide them: of two ways, the one that copies less
        flow *= 1.0 - LESS * (s.bn if s.cluster_n == 1 else s.bm) / (s.bm + s.bn)
    own = (high if s.pingpong else high / s.consumers) * 2 * s.bn * part + (AGAIN if k_tiles > s.stages else 0.0)
    if s.two_level == 1:
        own += high / s.consumers * (MOVED + s.bn / 2)
    return flow, max(flow, LATENCY / s.stages, own)


def ported(case: Case, s: TmaConfig) -> float:
    """Bytes of a stage that come through the port, where rows begin within sectors as if they were longer."""
    by_left, by_right = (WITHIN if x else 1.0 for x in case.within)
    left, right = s.bm * by_left, (s.bn + s.overfetch) * by_right
    return (left / s.cluster_n + right / s.cluster_m) * 2.0 * s.step


def _end(case: Case, s: TmaConfig) -> tuple[float, float]:
    """Cycles from the last product of a tile to its last result: of waiting threads, and of the multiprocessor."""
    p, area = case.sizes, s.bm * s.bn
    each = VECTOR * (1 + case.residuals) + STEPS * p.plain + SPECIALS * p.special
    each += CLIPPED * case.clipped + DIVIDED * case.divided + EXACT * case.exact
    each -= EXCHANGED if s.interleaved else 0.0
    waited = LATE + each * area / 8 / (128 * (1 if s.pingpong else s.consumers)) / s.split
    slots = RESULT + PLAIN * p.plain + SPECIAL * p.special + DIVIDED_SLOTS * case.divided + EXACT_SLOTS * case.exact
    shared = area / s.split * (slots / 128 + (_stored(case, s) + case.residual_bytes) / STORE)
    if s.split > 1:
        waited += CLUSTER + RANK * s.split + area * 4 / EXCHANGE
    return waited, shared


def _stored(case: Case, s: TmaConfig) -> float:
    """Bytes that stores of one result cost, by how they fill sectors."""
    p = case.sizes
    element = case.stored[0] if p.dtype.is_integer else p.dtype.itemsize
    if p.width * element < min(16, 8 * element):
        return SINGLE * len(case.stored) / p.width
    apart = p.width == 4 and not case.packed and not s.interleaved  # two stores of 16 bytes beside each other
    return sum(size * (HALF if size * p.width > 16 or (apart and size == 4) else 1.0) for size in case.stored)


def moved(case: Case, facts: GpuFacts) -> float:
    """Cycles of the bytes: weights were last used a whole inference ago, the rest may be in the L2 cache."""
    p = case.sizes
    weights = p.n * p.k * p.z * 2.0
    others = p.m * p.k * p.z * 2.0 / case.taps + p.m * p.n * p.z * (p.stored + case.residual_bytes)
    far = facts.read_bandwidth[-1][1]
    near = weights + others < NEAR * facts.l2_bytes
    return (weights / far + others / (facts.l2_bandwidth if near else far)) * facts.clock_ghz
