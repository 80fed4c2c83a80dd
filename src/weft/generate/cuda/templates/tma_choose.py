"""Which shapes of the tma template to measure: the number of tiles of the busiest multiprocessor times their cycles.

A tile costs its k-blocks, each bound by the tensor cores, shared memory or the L2 cache, and its end, which hides
behind the products of another tile where warpgroups take turns or several blocks are resident. The model ranks;
measuring decides. Source: note on matrix products, section 9; ports as measured by its probes on an NVIDIA H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.model import gap_us
from weft.generate.cuda.templates import cost, epilogue
from weft.generate.cuda.templates.cost import Sizes
from weft.generate.cuda.templates.product import Product
from weft.generate.cuda.templates.tma_operands import STEP, Rows, Three, field, left, right, rows_of, stages_of_sum
from weft.generate.cuda.templates.tma_shape import MOST_APART, Even, Shape, sums_apart
from weft.ir.declined import Declined

_PORT = 50.0
"""Bytes per cycle and multiprocessor from the L2 cache while all load."""
_BUSY = 0.9
"""Share of the tensor cores' peak that a stream of products reaches."""
_LATENCY = 950.0
"""Cycles of a copy."""
_LATE = 300.0
"""Cycles from the last product of a tile to the first of the next one of the same warpgroup."""
_ROUND = 60.0
"""Latency of one vector of results, with one operand more for each that is read."""
_RANK, _EXCHANGE = 470.0, 28.0
"""A cluster: cycles per block, and bytes per cycle of its exchange."""
_CLUSTERED = {2: 0.97, 4: 0.87, 8: 0.85}
"""Share of the multiprocessors that clusters of so many blocks can fill: those of one cluster are neighbours.

On an H200 24 clusters of 4 run at once and 12 of 8, while 32 of 4, or 16 of 8, took twice as long as the model says.
"""
_SHARED_COPY = 0.8
"""An operand of which two blocks copy halves for each other is worth pairing where copies take this share of the
products' time."""
_HANDED = 45.0
"""Bytes per cycle in which a block leaves sums in memory, or reads what others have left."""
_HANDED_LATENCY = 1500.0
_NEAR = 0.6
"""Share of the L2 cache that operands and results may take and still be there."""
_STRANGERS = 1.15
"""Blocks on one multiprocessor do not take turns: their ends meet."""
_MOVED = 40.0
"""Cycles before a sum of 64 rows that is to move is complete, besides an addition for each register."""
_FEW_ROUNDS, _STEPS_EACH = 10, 6
"""Tiles of a block beyond which the last ones matter little; steps of a block from which on they may be divided."""
_STAGES = 8
_FEWEST = 3

_TILES: tuple[tuple[int, int, int, bool, int], ...] = (
    *((128, n, 2, False, 1) for n in (64, 96, 128, 160, 192, 256)),
    *((256, n, 2, False, 1) for n in (32, 64, 96, 128)),
    *((128, n, 2, True, 1) for n in (32, 64, 96, 128)),
    *((64, n, 2, True, 1) for n in (32, 64, 96, 128, 192, 256)),
    *((64, n, 1, False, 2) for n in (32, 64, 96, 128)),
    *((64, n, 1, False, 3) for n in (32, 64)),
    *((64, n, 1, False, 1) for n in (64, 128, 192, 256)),
    *((128, n, 1, False, 2) for n in (32, 64)),
)
"""Rows, columns, warpgroups, whether they take turns, blocks on a multiprocessor."""


@dataclass(frozen=True, slots=True)
class _Case:
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
    """Rows and columns of pixels that a pixel of the result reads beside its own; (0, 0): fields do not apply."""
    across: int
    """Columns of the kernel."""
    packed: bool
    """Weights that are repacked once."""


def shapes(p: Product, facts: GpuFacts, keep: int = 4) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first; none for what the template does not take."""
    case = _case(p, facts)
    if case is None:
        return []
    found: list[tuple[float, Shape]] = []
    most = {0: (keep + 1) // 2, 1: keep // 4, case.across: keep // 4} if any(case.reach) else {0: keep}
    for modelled, s in _ranked(case, facts):
        # taps one by one, and pixels once for all taps by both sizes of stages: which is best the model cannot tell
        kind = s.unit if s.fields else 0
        if most[kind] and _possible(p, case, s):
            most[kind] -= 1
            found.append((modelled, s))
    return found


def every(p: Product, facts: GpuFacts) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape) of everything that fits, in no order.

    Also with fewer stages, and with a block for each tile where `shapes` has blocks go on to further ones.
    """
    case = _case(p, facts)
    if case is None:
        return []
    found: dict[Shape, float] = {}
    for base in _candidates(case, facts):
        if not _possible(p, case, base):
            continue
        for blocks in {base.blocks, base.blocks if base.turns or base.even else 0}:
            for stages in range(min(_FEWEST, base.stages), base.stages + 1):
                s = replace(base, blocks=blocks, stages=stages)
                if s.split == 1 or s.fields or s.bm * s.bn * 4 <= stages * s.stage_bytes:
                    found[s] = cycles(case, s, facts)
    return [(modelled, s) for s, modelled in found.items() if modelled < math.inf]


def _possible(p: Product, case: _Case, s: Shape) -> bool:
    """Whether there are tensor maps for both operands."""
    if s.fields:
        a = field(p, case.rows, s.box, s.panel)
    else:
        a = left(p, case.rows, s.bm, s.panel, s.box, shared=s.pair == 2)
    return not isinstance(a, Declined) and not isinstance(
        right(p, s.bn + s.spare, s.panel, shared=s.pair == 1), Declined
    )


def _case(p: Product, facts: GpuFacts) -> _Case | None:
    """None for what the template does not take."""
    rows = rows_of(p)
    if facts.capability != 90 or isinstance(rows, Declined) or epilogue.plan(p).by_row:
        return None
    stride = (1, *p.c.strides) if rows.image else (1, 1, 1)
    turned = p.a_load == "columns" or p.w_load == "kn"
    panels = (STEP,) if turned else _panels(p.in_words(p.c.ic), p.c.kernel != (1, 1))
    stages = tuple((panel, stages_of_sum(p, panel)) for panel in panels)
    (kh, kw), (dh, dw) = p.c.kernel, p.c.dilations
    fields = rows.image and stride == (1, 1, 1) and kh * kw > 1
    reach = ((kh - 1) * dh, (kw - 1) * dw) if fields else (0, 0)
    walks = [step.walk for _, step in epilogue.leaves(p.c) if step.walk is not None]
    residuals = sum(any(s for s, n in zip(w.dims, p.c.dims, strict=True) if n > 1) for w in walks)
    sizes = replace(cost.sizes_of(p), k=p.in_words(p.k))
    packed = p.w_load == "packed"
    return _Case(sizes, rows, stages, stride, p.a_load == "columns", residuals, kh * kw, reach, kw, packed)


def _panels(channels: int, taps: bool) -> tuple[int, ...]:
    """Widths of panels that waste least, wide ones first."""
    if not taps:
        return (STEP,)
    return min(((-(-channels // n) * n * (1.0 + 0.1 * i), (n,)) for i, n in enumerate((64, 32, 16))))[1]


@lru_cache(maxsize=1024)
def _ranked(case: _Case, facts: GpuFacts) -> tuple[tuple[float, Shape], ...]:
    found = [(cycles(case, s, facts), s) for s in _candidates(case, facts)]
    found = [x for x in found if x[0] < math.inf]
    found.sort(key=lambda x: (x[0], x[1].bm * x[1].bn, x[1].threads))
    seen: set[tuple[int, ...]] = set()
    kept = []
    for modelled, s in found:
        alike = (s.bm * s.bn, s.split, int(s.turns), s.fields, s.unit, int(s.pair > 0), int(s.even))
        if alike not in seen:
            seen.add(alike)
            kept.append((modelled, s))
    return tuple(kept)


def _candidates(case: _Case, facts: GpuFacts) -> Iterable[Shape]:
    p = case.sizes
    for bm, bn, groups, turns, resident in _TILES:
        if (bm > 64 and bm >= 2 * p.m) or (bn > 32 and bn >= 2 * p.n):
            continue
        spare = -bn % STEP if p.w_load == "kn" else 0
        if spare * 4 > bn:
            continue
        apart = p.dtype.is_float8 and not facts.fast_f8
        if apart and (turns or sums_apart(bm // groups, bn) > MOST_APART):
            continue
        box = (1, 1, bm) if case.rows.linear or case.columns else best_box(case.rows.sizes, bm, case.stride)
        shared = min(facts.shared_per_block, facts.shared_per_sm // resident - facts.shared_reserved)
        for panel, kt in case.stages:
            base = Shape(bm, bn, panel, 0, groups, turns, 1, box, 0, resident, apart=apart, spare=spare)
            most = min(_STAGES, (shared - 16) // (base.stage_bytes + 16))
            tiles = math.prod(case.rows.tiles(box)) * -(-p.n // bn) * p.z
            rounds = -(-tiles // (facts.sms * resident))
            if most < _FEWEST or (turns and rounds == 1):
                continue
            blocks = facts.sms * resident if rounds > 1 else 0
            usual = replace(base, stages=max(2, min(most, kt * rounds)), blocks=blocks)
            yield usual
            yield from _together(case, usual, facts)
            if any(case.reach):
                yield from _with_fields(case, base, shared, facts)
            for split, share in _CLUSTERED.items():
                stages = max(2, min(most, kt // split))
                s = replace(base, stages=stages, split=split, resident=1)
                fits = bm * bn * 4 <= stages * base.stage_bytes
                if not turns and fits and kt >= 4 * split and tiles * split <= share * facts.sms:
                    yield s


def _together(case: _Case, usual: Shape, facts: GpuFacts) -> Iterable[Shape]:
    """The same tile by blocks that copy for each other, or that divide what does not fill the grid evenly."""
    p = case.sizes
    if usual.resident > 1:
        return
    grid = facts.sms // 2 * 2
    counts, columns = math.prod(case.rows.tiles(usual.box)), -(-p.n // usual.bn)
    steps = dict(case.stages)[usual.panel]
    copies = (usual.bm + usual.bn) * 2.0 * STEP / _PORT
    pairs = [0]
    if copies > _SHARED_COPY * (usual.bm // 64) * 2 * usual.bn:
        linear = case.rows.linear or case.columns
        pairs += [1] if counts > 1 and (linear or counts % 2 == 0) else []
        pairs += [2] if columns > 1 and linear and case.rows.sizes[2] > 1 and not (case.packed and columns % 2) else []
    for pair in pairs:
        together = 2 if pair else 1
        units = _units(case, replace(usual, pair=pair))
        if pair:
            yield replace(usual, pair=pair, blocks=grid if units * together > grid else 0)
        e = Even(units, grid // together, steps)
        each = e.shared * steps
        if not usual.turns and _STEPS_EACH * e.units <= each < 2**31 // e.units and units < _FEW_ROUNDS * e.units:
            yield replace(usual, pair=pair, blocks=grid, even=True, stages=max(usual.stages, _FEWEST))


def _units(case: _Case, s: Shape) -> int:
    """Tiles, or pairs of them."""
    high, wide = math.prod(case.rows.tiles(s.box)), -(-case.sizes.n // s.bn)
    return (-(-high // 2) if s.pair == 1 else high) * (-(-wide // 2) if s.pair == 2 else wide) * case.sizes.z


def _with_fields(case: _Case, base: Shape, shared: int, facts: GpuFacts) -> Iterable[Shape]:
    """The same tile of 8 columns of pixels, read once for all taps."""
    images, tall, _ = case.rows.sizes
    lines = base.bm // 8
    even = -(-tall // -(-tall // lines))
    boxes = {(1, even, 8), *((n, lines // n, 8) for n in (2, 4) if lines // n % 8 == 0 and images >= n)}
    box = min(boxes, key=lambda b: (math.prod(case.rows.tiles(b)), b))
    bytes_ = field_bytes(case, box, base.panel)
    tiles = math.prod(case.rows.tiles(box)) * -(-case.sizes.n // base.bn) * case.sizes.z
    rounds = -(-tiles // (facts.sms * base.resident))
    blocks = facts.sms * base.resident if rounds > 1 else 0
    for unit in sorted({1, case.across}):
        most = min(_STAGES, (shared - 2 * (bytes_ + 16) - 16) // (base.bn * base.panel * unit * 2 + 16))
        if most < _FEWEST or (base.turns and rounds == 1):
            continue
        s = replace(base, stages=most, box=box, fields=2, unit=unit, blocks=blocks)
        yield s
        channels = -(-case.sizes.k // case.taps // base.panel)
        fits = s.bm * s.bn * 4 <= 2 * bytes_ + most * s.stage_bytes
        for split, share in _CLUSTERED.items():
            if not s.turns and fits and channels >= split and tiles * split <= share * facts.sms:
                yield replace(s, split=split, resident=1, blocks=0)


def field_bytes(case: _Case, box: Three, panel: int) -> int:
    """Shared memory of one buffer of pixels."""
    return -(-box[0] * (box[1] + case.reach[0]) * (box[2] + case.reach[1]) * 2 * panel // 1024) * 1024


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


def cycles(case: _Case, s: Shape, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel in a chain of kernels."""
    p = case.sizes
    part = s.step / STEP
    blocks = -(-p.k // case.taps // s.panel)
    steps = -(-blocks // s.split) * (case.taps // s.unit) if s.fields else -(-dict(case.stages)[s.panel] // s.split)
    tiles = _units(case, s)
    busiest = -(-tiles // (facts.sms // 2)) if s.pair else -(-tiles * s.split // facts.sms)
    high = s.bm // 64
    loaded = (s.bm + s.bn + s.spare) * 2.0 * STEP
    if s.fields:
        loaded = field_bytes(case, s.box, s.panel) * s.unit / case.taps + s.bn * 2 * s.step
    products = high * 2 * s.bn * part / _BUSY
    reads = high * (64 + s.bn) * part + loaded / 128
    bound = max(products, reads, (loaded - {0: 0, 1: s.bn + s.spare, 2: s.bm}[s.pair] * s.step) / _PORT)
    busy = min(busiest, s.resident)
    own = 60.0 + (high if s.turns else high / s.groups) * 2 * s.bn * part
    if s.apart:
        own += high / s.groups * (_MOVED + s.bn / 2)
    alone = max(bound, _LATENCY / s.stages, own)
    step = max(bound, alone / busy)
    main = steps * step
    slots = cost.RESULT + cost.PLAIN * p.plain + cost.SPECIAL * p.special
    area = s.bm * s.bn
    vectors = area / 8 / (128 * (1 if s.turns else s.groups)) / s.split
    end = (
        _LATE
        + vectors * _ROUND * (1 + case.residuals)
        + area / s.split * (slots / 128 + (p.stored + 2 * case.residuals) / 32)
    )
    if s.split > 1:
        end += _RANK * s.split + area * 4 / _EXCHANGE
    if s.even:
        e = Even(tiles, s.blocks // (2 if s.pair else 1), steps)
        others = max(1.0, e.units / e.shared)
        inside = e.tiles * steps / e.units * step + busiest * end
        inside += (1 + others) * area * 4 / _HANDED + _HANDED_LATENCY
    elif s.turns or s.resident > 1:
        inside = busiest * max(main, end / 2) + min(main, end) if busiest > 1 else main + end
        inside *= _STRANGERS if s.resident > 1 and busiest > 1 else 1.0
    else:
        inside = busiest * (main + end)
    moved = p.m * p.k * p.z * 2.0 / case.taps
    moved += p.n * p.k * p.z * 2.0 + p.m * p.n * p.z * (p.stored + 2.0 * case.residuals)
    near = moved < _NEAR * facts.l2_bytes  # what a neighbour in the network has left in the cache
    memory = moved / ((facts.l2_bandwidth if near else facts.read_bandwidth[-1][1]) / facts.clock_ghz)
    return max(inside, memory) + cost.EXPOSED * min(inside, memory) + _LATENCY + gap_us(facts) * facts.clock_ghz * 1e3
