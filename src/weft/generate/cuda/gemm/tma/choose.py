"""Which shapes of the tma template to measure: those that the model of `cost` puts first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.gemm.tma.align import aligned
from weft.generate.cuda.gemm.tma.cost import Case, active_clusters, cycles, fits_budget, halo_bytes, ported, units
from weft.generate.cuda.gemm.tma.operands import (
    INTERLEAVED,
    STEP,
    Rows,
    Three,
    halo_tile,
    left,
    right,
    rows_of,
    stages_of_sum,
)
from weft.generate.cuda.gemm.tma.shape import (
    CLUSTER_SHAPES,
    MOST_SHARES,
    MOST_TWO_LEVEL,
    StreamK,
    TmaConfig,
    two_level_registers,
)
from weft.ir.declined import Declined

_SHARED_COPY = 0.8
"""Cluster multicast is worth trying where the loads of a stage take this share of its products' time."""
_FEW_ROUNDS, _STEPS_EACH = 10, 6
"""Tiles of a CTA beyond which the last wave matters little; k-tiles of a CTA from which on stream-K is offered."""
_STEPS_TOGETHER, _LEAST_TOGETHER = 8, 64 * 128
"""K-tiles of a CTA, and results of a tile, from which on the fix-up is cooperative: less was not measured."""
_SECTOR = 16
"""Words of 16 bits; rows that begin within lines but not within sectors were not seen to be slower."""
_STAGES = 8
_FEWER = 128
"""Registers of sums per thread where blocks share a multiprocessor."""
_FEWEST = 3

_OFFERED = (1, 2, 3, 4, 5)
"""Cluster shapes between which the model can decide."""
_TILES: tuple[tuple[int, int, int, bool, int], ...] = (
    *((128, n, 2, False, 1) for n in (64, 96, 128, 160, 192, 256)),
    *((256, n, 2, False, 1) for n in (32, 64, 96, 128, 160)),
    *((128, n, 2, True, 1) for n in (32, 64, 96, 128)),
    *((192, n, 3, False, 1) for n in (64, 96, 128, 160, 192)),
    *((64, n, 2, True, 1) for n in (32, 64, 96, 128, 192, 256)),
    *((64, n, 1, False, 2) for n in (32, 64, 96, 128)),
    *((64, n, 1, False, 3) for n in (32, 64)),
    *((64, n, 1, False, 1) for n in (64, 128, 192, 256)),
    *((128, n, 1, False, 2) for n in (32, 64)),
)
"""Rows, columns, consumer warpgroups, ping-pong, CTAs of a multiprocessor."""


_BETWEEN: tuple[tuple[int, int, int, bool, int], ...] = (
    *((128, n, 2, False, 1) for n in (112, 144, 208)),
    (256, 112, 2, False, 1),
)
"""Tiles whose columns are no whole pieces of 32: of halves that are no constants, where memory runs along the sum."""


def shapes(p: Product, facts: GpuFacts, keep: int = 4) -> list[tuple[float, TmaConfig]]:
    """(modelled cycles, shape), best first; none for what the template does not take."""
    case = case_for(p, facts)
    if case is None:
        return []
    p = _copied(p)
    found: list[tuple[float, TmaConfig]] = []
    most = {0: (keep + 1) // 2, 1: keep // 4, case.across: keep // 4} if any(case.reach) else {0: keep}
    for modelled, s in _ranked(case, facts):
        # taps one by one, and pixels once for all taps by both sizes of stages: which is best the model cannot tell
        kind = s.taps_per_stage if s.halo_stages else 0
        if most[kind] and _possible(p, case, s):
            most[kind] -= 1
            found.append((modelled, s))
    return found


def _copied(p: Product) -> Product:
    """As the template sees it once operands are copied."""
    moved = aligned(p)
    return p if isinstance(moved, Declined) else moved.product


def case_for(p: Product, facts: GpuFacts) -> Case | None:
    """As `case_of`, with the copies of operands that there must be."""
    moved = aligned(p)
    if isinstance(moved, Declined):
        return case_of(p, facts)
    case = case_of(moved.product, facts)
    return None if case is None else replace(case, copied=moved.bytes)


def every(p: Product, facts: GpuFacts) -> list[tuple[float, TmaConfig]]:
    """(modelled cycles, shape) of everything that fits, in no order.

    Also with fewer stages, and with a block for each tile where `shapes` has blocks go on to further ones.
    """
    case = case_for(p, facts)
    if case is None:
        return []
    p = _copied(p)
    found: dict[TmaConfig, float] = {}
    for base in _candidates(case, facts):
        if not _possible(p, case, base):
            continue
        for blocks in {base.persistent_ctas, base.persistent_ctas if base.pingpong or base.stream_k else 0}:
            for stages in range(min(_FEWEST, base.stages), base.stages + 1):
                s = replace(base, persistent_ctas=blocks, stages=stages)
                if s.split == 1 or s.halo_stages or s.bm * s.bn * 4 <= stages * s.stage_bytes:
                    found[s] = cycles(case, s, facts)
    return [(modelled, s) for s, modelled in found.items() if modelled < math.inf]


def _possible(p: Product, case: Case, s: TmaConfig) -> bool:
    """Whether there are tensor maps for both operands."""
    if s.halo_stages:
        a = halo_tile(p, case.rows, s.box, s.panel)
    else:
        a = left(p, case.rows, s.bm, s.panel, s.box, share=s.left_share)
    return not isinstance(a, Declined) and not isinstance(
        right(
            p,
            s.bn + s.overfetch,
            s.panel,
            s.step,
            share=s.right_share,
            interleaved=s.interleaved,
            halo=s.halo_stages > 0,
        ),
        Declined,
    )


def case_of(p: Product, facts: GpuFacts) -> Case | None:
    """What the model asks about a product; None for what the template does not take."""
    rows = rows_of(p)
    if facts.capability != 90 or isinstance(rows, Declined) or epilogue.plan(p).by_row:
        return None
    stride = (1, *p.c.strides) if rows.image else (1, 1, 1)
    mn_major = p.a_load == "columns" or p.w_load == "kn"
    panels = (STEP,) if mn_major else _panels(p.in_halves(p.c.ic), p.c.kernel != (1, 1))
    stages = tuple((panel, stages_of_sum(p, panel)) for panel in panels)
    (kh, kw), (dh, dw) = p.c.kernel, p.c.dilations
    halo = rows.image and stride == (1, 1, 1) and kh * kw > 1
    reach = ((kh - 1) * dh, (kw - 1) * dw) if halo else (0, 0)
    read = [(step.layout, step.dtype.itemsize) for _, step in epilogue.leaves(p.c) if step.layout is not None]
    residuals = [size for w, size in read if any(s for s, n in zip(w.dims, p.c.dims, strict=True) if n > 1)]
    sizes = replace(cost.sizes_of(p), k=p.in_halves(p.k), width=epilogue.plan(p, p.vector).width)
    packed = p.w_load == "packed"
    stored = tuple((p.sum_dtype if slot < 0 else p.c.body[slot].dtype).itemsize for slot, _ in p.c.outputs)
    exact = epilogue.exact(p.c)
    columns = p.a_load == "columns"
    within = _within(p, rows, columns)
    return Case(
        sizes, rows, stages, stride, columns, len(residuals), kh * kw, reach, kw, packed, stored, *exact, within,
        residual_bytes=sum(residuals),
    )  # fmt: skip


def _within(p: Product, rows: Rows, columns: bool) -> tuple[bool, bool]:
    """Whether rows of matrices begin within sectors of memory; images and packed weights count as if not."""
    if not rows.linear or p.c.kernel != (1, 1):
        return False, False
    right = 0 if p.w_load == "packed" else p.c.w_k if p.w_load == "kn" else p.c.w_layout.channel
    left = p.c.a_layout.channel if columns else rows.steps[2]
    return (p.in_halves(left) % _SECTOR != 0, p.in_halves(right) % _SECTOR != 0)


def _panels(channels: int, taps: bool) -> tuple[int, ...]:
    """Widths of panels that waste least, wide ones first."""
    if not taps:
        return (STEP,)
    return min(((-(-channels // n) * n * (1.0 + 0.1 * i), (n,)) for i, n in enumerate((64, 32, 16))))[1]


@lru_cache(maxsize=1024)
def _ranked(case: Case, facts: GpuFacts) -> tuple[tuple[float, TmaConfig], ...]:
    found = [(cycles(case, s, facts), s) for s in _candidates(case, facts) if fits_budget(s, facts)]
    found = [x for x in found if x[0] < math.inf]
    found.sort(key=lambda x: (x[0], x[1].bm * x[1].bn, x[1].threads))
    seen: set[tuple[int, ...]] = set()
    kept = []
    for modelled, s in found:
        shared = int(s.stream_k) + int(s.coop_fixup)
        alike = (
            s.bm * s.bn,
            s.split,
            int(s.pingpong),
            s.halo_stages,
            s.taps_per_stage,
            s.multicast_ctas,
            shared,
            s.two_level,
        )
        if alike not in seen:
            seen.add(alike)
            kept.append((modelled, s))
    return tuple(kept)


def _candidates(case: Case, facts: GpuFacts) -> Iterable[TmaConfig]:
    p, clustered = case.sizes, costs_of(facts).tma.clustered
    tiles_ = (*_TILES, *(_BETWEEN if p.w_load == "nk" and p.dtype.itemsize == 2 else ()))
    for bm, bn, consumers, pingpong, min_ctas in tiles_:
        if (bm > 64 and bm >= 2 * p.m) or (bn > 32 and bn >= 2 * p.n):
            continue
        overfetch = -bn % STEP if p.w_load == "kn" else 0
        if overfetch * 4 > bn:
            continue
        two_level = 0
        if p.dtype.is_float8 and not facts.fast_f8:
            most_sums = MOST_TWO_LEVEL if min_ctas == 1 else _FEWER
            two_level = next((n for n in (2, 1) if two_level_registers(bm // consumers, bn, n) <= most_sums), 0)
            if pingpong or not two_level:
                continue
        interleaved = p.w_load == "nk" and p.n % INTERLEAVED == 0 and p.z == 1 and bn % INTERLEAVED == 0
        box = (1, 1, bm) if case.rows.linear or case.columns else best_box(case.rows.sizes, bm, case.stride)
        shared = min(facts.shared_per_block, facts.shared_per_sm // min_ctas - facts.shared_reserved)
        for panel, kt in case.stages:
            base = TmaConfig(
                bm,
                bn,
                panel,
                0,
                consumers,
                pingpong,
                1,
                box,
                0,
                min_ctas,
                two_level=two_level,
                overfetch=overfetch,
                interleaved=interleaved,
            )
            most = min(_STAGES, (shared - 16) // (base.stage_bytes + 16))
            tiles = math.prod(case.rows.tiles(box)) * -(-p.n // bn) * p.z
            rounds = -(-tiles // (facts.sms * min_ctas))
            if most < _FEWEST or (pingpong and rounds == 1):
                continue
            blocks = facts.sms * min_ctas if rounds > 1 else 0
            usual = replace(base, stages=max(2, min(most, kt * rounds)), persistent_ctas=blocks)
            yield usual
            yield from _cooperating(case, usual, facts)
            if any(case.reach):
                yield from _with_halo(case, base, shared, facts)
            for split, share in clustered.items():
                stages = max(2, min(most, kt // split))
                s = replace(base, stages=stages, split=split, min_ctas=1)
                fits = bm * bn * 4 <= stages * base.stage_bytes
                if (
                    bn % INTERLEAVED == 0
                    and not pingpong
                    and fits
                    and kt >= 4 * split
                    and tiles * split <= share * facts.sms
                ):
                    yield s


def _cooperating(case: Case, usual: TmaConfig, facts: GpuFacts) -> Iterable[TmaConfig]:
    """The same tile with cluster multicast, or stream-K for the tiles that do not fill the grid, or both."""
    p = case.sizes
    if usual.min_ctas > 1:
        return
    counts, columns = math.prod(case.rows.tiles(usual.box)), -(-p.n // usual.bn)
    k_tiles = dict(case.stages)[usual.panel]
    c = costs_of(facts).tma
    copies = ported(case, usual, c) / c.port
    clusters = [0]
    # of 8-bit floats they were 1.3 to 2 times slower on an H200, whatever the shape
    if not p.dtype.is_float8 and copies > _SHARED_COPY * (usual.bm // 64) * 2 * usual.bn:
        clusters += [multicast for multicast in _OFFERED if _clusters_fit(case, counts, columns, multicast)]
    plain = usual
    for multicast in clusters:
        cluster_m, _ = CLUSTER_SHAPES[multicast]
        usual = replace(
            plain, multicast=multicast, interleaved=plain.interleaved and plain.bn % (cluster_m * INTERLEAVED) == 0
        )
        tiles, multicast_ctas = units(case, usual), usual.multicast_ctas
        count = active_clusters(case, usual, facts)
        if multicast:
            yield replace(usual, persistent_ctas=count * multicast_ctas if tiles > count else 0)
        # twice as many find room, see `Function.require_co_resident`
        sharers = min(count // tiles, usual.rows // 64 * (usual.bn // INTERLEAVED), facts.sms // (2 * multicast_ctas))
        large = case.rows.linear and usual.bm * usual.bn >= _LEAST_TOGETHER and usual.bn % INTERLEAVED == 0
        if large and not usual.pingpong and sharers >= 2 and k_tiles >= _STEPS_TOGETHER * sharers:
            both = replace(usual, persistent_ctas=sharers * tiles * multicast_ctas, stream_k=True, coop_fixup=True)
            yield replace(both, stages=max(usual.stages, _FEWEST))
        e = StreamK(
            tiles, count // tiles * tiles if count >= 2 * tiles else count, k_tiles
        )  # shares that end with tiles
        enough = _STEPS_EACH * e.units <= e.shared * k_tiles < 2**31 // e.units
        if not usual.pingpong and enough and e.units <= MOST_SHARES * e.shared and tiles < _FEW_ROUNDS * e.units:
            yield replace(
                usual, persistent_ctas=e.units * multicast_ctas, stream_k=True, stages=max(usual.stages, _FEWEST)
            )


def _clusters_fit(case: Case, counts: int, columns: int, multicast: int) -> bool:
    """Whether clusters of this shape fit so many boxes of rows and tiles of columns."""
    cluster_m, cluster_n = CLUSTER_SHAPES[multicast]
    linear = case.rows.linear or case.columns
    if counts <= cluster_m // 2 or columns <= cluster_n // 2 or (cluster_m > 1 and not linear and counts % cluster_m):
        return False
    return cluster_n == 1 or (linear and case.rows.sizes[2] > 1 and not (case.packed and columns % cluster_n))


def _with_halo(case: Case, base: TmaConfig, shared: int, facts: GpuFacts) -> Iterable[TmaConfig]:
    """The same tile of 8 columns of pixels, read once for all taps."""
    clustered = costs_of(facts).tma.clustered
    images, tall, _ = case.rows.sizes
    lines = base.bm // 8
    even = -(-tall // -(-tall // lines))
    boxes = {(1, even, 8), *((n, lines // n, 8) for n in (2, 4) if lines // n % 8 == 0 and images >= n)}
    box = min(boxes, key=lambda b: (math.prod(case.rows.tiles(b)), b))
    bytes_ = halo_bytes(case, box, base.panel)
    tiles = math.prod(case.rows.tiles(box)) * -(-case.sizes.n // base.bn) * case.sizes.z
    rounds = -(-tiles // (facts.sms * base.min_ctas))
    blocks = facts.sms * base.min_ctas if rounds > 1 else 0
    for unit in sorted({1, case.across}):
        most = min(_STAGES, (shared - 2 * (bytes_ + 16) - 16) // (base.bn * base.panel * unit * 2 + 16))
        if most < _FEWEST or (base.pingpong and rounds == 1):
            continue
        s = replace(base, stages=most, box=box, halo_stages=2, taps_per_stage=unit, persistent_ctas=blocks)
        yield s
        channels = -(-case.sizes.k // case.taps // base.panel)
        fits = s.bm * s.bn * 4 <= 2 * bytes_ + most * s.stage_bytes
        for split, share in clustered.items():
            if not s.pingpong and fits and channels >= split and tiles * split <= share * facts.sms:
                yield replace(s, split=split, min_ctas=1, persistent_ctas=0)


@lru_cache(maxsize=4096)
def best_box(sizes: Three, rows: int, stride: Three) -> Three:
    """The box of at most so many rows that covers the dimensions with fewest boxes; long runs where that is equal."""
    n2, n1, n0 = sizes
    best: tuple[int, int, int, Three] | None = None
    for b0 in range(1, min(n0, rows, 256 // stride[2]) + 1):
        for b1 in range(1, min(n1, rows // b0, 256 // stride[1]) + 1):
            b2 = min(n2, rows // (b0 * b1), 256)
            key = (-(-n0 // b0) * -(-n1 // b1) * -(-n2 // b2), -b0, -b1, (b2, b1, b0))
            if best is None or key < best:
                best = key
    assert best is not None
    return best[3]
