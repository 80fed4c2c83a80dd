"""Which transposed shapes to measure, by a model of what they cost: weights from memory, and what does not hide there.

Of many rows they are offered where memory runs along the columns of the right operand: other tiles then have columns by
64, these have rows by 8, so that all multiprocessors get a tile of the same size.

Bytes that are on their way at once and what blocks read of the left operand may bound a kernel, too; besides there are
the gap before it, the latency of its first and last bytes, and clusters. The constants are those of the device's
profile (docs/gemm.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.swap_ab.kernel import SwapAbConfig
from weft.generate.cuda.gemm.tma.operands import STEP, rows_of, stages_of_sum
from weft.generate.cuda.gemm.tma.shape import CLUSTER_SHAPES
from weft.ir.declined import Declined

MOST = 32
"""Rows up to which transposed shapes are offered: of more, other templates have tiles that are as full."""
_STAGES = (5, 8, 12)
_RESERVED = 1024
_CLUSTER_SHAPES = (0, 1, 2, 3, 5, 7)
"""Ways to share operands of tiles of many rows."""
_TILES: Mapping[int, int] = {128: 200, 192: 160}
"""Most rows of tiles of many rows by their columns: what registers are left for."""
_FEWEST = 64
_MOST_STAGES, _LEAST_STAGES = 8, 4
SECTOR = 16
"""Words of 16 bits."""


def shapes(p: Product, facts: GpuFacts, keep: int = 3) -> list[tuple[float, SwapAbConfig]]:
    """(modelled cycles, shape), best first; none for what the template does not take, or has too many rows."""
    seen: set[tuple[int, int, int]] = set()
    kept = []
    for modelled, s in sorted(every(p, facts), key=_order):
        if (s.bn, s.split, s.multicast) not in seen:
            seen.add((s.bn, s.split, s.multicast))
            kept.append((modelled, s))
    return kept[:keep]


def _order(x: tuple[float, SwapAbConfig]) -> tuple[float, int, int]:
    """Where the model sees no difference, fewer stages are better for many blocks by themselves, more for clusters."""
    modelled, s = x
    return modelled, s.threads, s.stages if s.split == 1 else -s.stages


def every(p: Product, facts: GpuFacts) -> list[tuple[float, SwapAbConfig]]:
    """(modelled cycles, shape) of everything that fits, in no order."""
    if facts.capability != 90 or swap.applies(p) is not None:
        return []
    if p.m > MOST:
        return _of_many(p, facts)
    return [(cycles(p, s, facts), s) for s in _candidates(p, facts) if not isinstance(swap.operands(p, s), Declined)]


def _candidates(p: Product, facts: GpuFacts) -> Iterable[SwapAbConfig]:
    bm, kt = -(-p.m // 8) * 8, stages_of_sum(p, STEP)
    for bn in (64, 128):
        if bn > 64 and bn >= 2 * p.n:
            continue
        tiles = -(-p.n // bn) * p.z
        for split in (1, *costs_of(facts).tma.clustered):
            if split > 1 and (kt < 4 * split or tiles * split > 2 * facts.sms):
                continue
            for stages in sorted({max(2, min(n, kt // split)) for n in _STAGES}):
                s = SwapAbConfig(bm, bn, stages, split)
                if s.shared_bytes <= facts.shared_per_block:
                    yield s


def _of_many(p: Product, facts: GpuFacts) -> list[tuple[float, SwapAbConfig]]:
    """(modelled cycles, shape) for many rows: the lowest tiles of which all run at once, in no order."""
    found = []
    if p.w_load != "kn" or p.z > 1 or p.m < 2 * _FEWEST:
        return []
    for bn, most in _TILES.items():
        for multicast in _CLUSTER_SHAPES:
            cluster_m, cluster_n = CLUSTER_SHAPES[multicast]
            multicast_ctas = cluster_m * cluster_n
            room = int(costs_of(facts).tma.clustered.get(multicast_ctas, 1.0) * facts.sms) // multicast_ctas
            wide = -(-p.n // (bn * cluster_n))
            high = room // wide * cluster_m
            bm = max(_FEWEST, -(-p.m // (8 * high)) * 8) if high else most + 1
            if bm > most or bn >= 2 * p.n or p.m <= bm * cluster_m // 2:
                continue
            stages = min(_MOST_STAGES, (facts.shared_per_block - 16) // ((bm + bn) * STEP * 2 + 16))
            s = SwapAbConfig(bm, bn, min(stages, max(2, stages_of_sum(p, STEP))), 1, multicast)
            if stages >= _LEAST_STAGES and swap.refused(p, s) is None and not isinstance(swap.operands(p, s), Declined):
                found.append((_cycles_of_many(p, s, facts), s))
    return found


def _cycles_of_many(p: Product, s: SwapAbConfig, facts: GpuFacts) -> float:
    """As of the tma template: a tile's steps, each bound by what is slowest, and its end."""
    c, tma = costs_of(facts).swap_ab, costs_of(facts).tma
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    loaded = s.stage_bytes
    rows = rows_of(p)
    within = not isinstance(rows, Declined) and rows.steps[2] % SECTOR != 0
    ported = (s.bm * (tma.within if within else 1.0) / cluster_n + s.bn / cluster_m) * STEP * 2
    port = c.by_turns if s.multicast else c.apart if within else tma.port
    products = s.consumers * 2 * s.bm / tma.busy
    reads = (s.consumers * (64 + s.bm) * 128 + loaded) / tma.shared
    step = max(products, reads, ported / port, tma.latency / s.stages, 2 * s.bm + tma.again)
    area = s.bm * s.bn
    end = tma.late + area / c.turned + area * p.dtype.itemsize / tma.store
    start = gap_us(facts) * facts.clock_ghz * 1e3 + tma.start + c.mates[cluster_m * cluster_n]
    return start + stages_of_sum(p, STEP) * step + end


def cycles(p: Product, s: SwapAbConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels."""
    c, tma = costs_of(facts).swap_ab, costs_of(facts).tma
    if p.m > MOST:
        return _cycles_of_many(p, s, facts)
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z * s.split
    resident = max(1, min(facts.shared_per_sm // (s.shared_bytes + _RESERVED), facts.threads_per_sm // s.threads))
    room = int(facts.sms * tma.clustered.get(s.split, 1.0)) * resident
    kt = stages_of_sum(p, STEP)
    far = c.streamed * facts.read_bandwidth[-1][1] / facts.clock_ghz
    flight = min(blocks, room) * s.stages * s.bn * STEP * 2.0 / c.flight
    port = min(blocks, facts.sms) * tma.port
    main = max(p.n * p.k * p.z * 2.0 / min(far, flight), blocks * kt / s.split * s.stage_bytes / port)
    if blocks > room:  # the last ones are few
        main *= math.sqrt(-(-blocks // room) * room / blocks)
    start = gap_us(facts) * facts.clock_ghz * 1e3 + c.first
    return start + main + (c.rank * (s.split - 1) - c.pair if s.split > 1 else 0.0)
