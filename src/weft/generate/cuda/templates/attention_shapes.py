"""Which shapes of the attention template to measure: a model of cycles ranks them.

Per step a block is bound by its matrix instructions, its reads of shared memory, its exponentials and other arithmetic,
its share of the L2 cache, or the latency of one step. At batch 1 the latencies decide: keys are split over the warps of
a block, rows are cut small until all multiprocessors have a block. Constants are estimates; measuring decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates.attention_match import Attention
from weft.ir.types import DType
from weft.kernels.source import Schedule

PAD_BYTES = 16
"""Behind each row of q, k and v in shared memory: eight rows of a matrix lie in different banks."""
SUM_PAD = 8
"""Floats behind each row of the sums."""
WIDEST = 256
"""Columns of q, k and v."""
IN_REGISTERS = 128
"""Up to so many columns q stays in registers, on tensor cores."""
WEIGHTS_PAD = 4
"""Floats behind each row of a warp's weights in shared memory, where CUDA cores multiply them."""
MOST = 6
_LAUNCH = 1500.0
"""Cycles from the start of a block to its first product."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of the template."""

    wr: int
    """Warps along the rows of a block."""
    mi: int
    """Matrix tiles of 16 rows of one warp."""
    wk: int
    """Warps that share the keys of the same rows."""
    nb: int
    """Keys that a warp takes at once."""
    stages: int
    """Tiles of wk * nb keys in shared memory."""

    @staticmethod
    def of(schedule: Schedule) -> Shape:
        """Read back what `schedule` wrote."""
        p = dict(schedule.params)
        return Shape(**{f: p[f] for f in Shape.__dataclass_fields__})  # type: ignore[arg-type]

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        fields = {f: getattr(self, f) for f in Shape.__dataclass_fields__}
        return Schedule("cuda", tuple(sorted({**fields, "template": "attention"}.items())))

    @property
    def bm(self) -> int:
        """Rows of a block."""
        return 16 * self.wr * self.mi

    @property
    def bn(self) -> int:
        """Keys of a tile."""
        return self.wk * self.nb

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.wr * self.wk


def padded(n: int) -> int:
    """Columns in shared memory that matrix instructions read."""
    return -(-n // 16) * 16


def tiles(p: Attention, s: Shape) -> int:
    """Steps over the keys."""
    return -(-p.keys // s.bn)


def row_bytes(p: Attention, width: int) -> int:
    """From row to row of an operand in shared memory."""
    return padded(width) * p.dtype.itemsize + PAD_BYTES


def weights_bytes(p: Attention, s: Shape) -> int:
    """Shared memory through which weights reach the second product on CUDA cores."""
    return 4 * s.wr * s.wk * 16 * s.mi * (s.nb + WEIGHTS_PAD) if p.dtype is DType.F32 else 0


def pipeline_bytes(p: Attention, s: Shape) -> int:
    """Shared memory of q, of all stages of k and v, and of weights."""
    qk, head = row_bytes(p, p.qk), row_bytes(p, p.head)
    return s.bm * qk + s.stages * s.bn * (qk + head) + weights_bytes(p, s)


def shared_bytes(p: Attention, s: Shape) -> int:
    """Dynamic shared memory of a block: the sums of its warps take the place of keys and values."""
    sums = 4 * s.wk * s.bm * (padded(p.head) + SUM_PAD + 2)
    return -(-max(pipeline_bytes(p, s), sums) // 16) * 16


def registers(p: Attention, s: Shape) -> int:
    """Rough number of registers per thread."""
    q = padded(p.qk) // 4 if p.qk <= IN_REGISTERS and p.dtype is not DType.F32 else 8
    return s.mi * (q + padded(p.head) // 2 + s.nb // 2 + 4) + 48


def shapes(p: Attention, facts: GpuFacts, keep: int = MOST) -> list[Shape]:
    """Best first by the model; few, and unlike each other."""
    ranked = [(c, s) for s in _possible(p) if (c := cycles(p, s, facts)) < math.inf]
    ranked.sort(key=lambda x: (x[0], x[1].threads, x[1].bm, -x[1].nb))
    seen: dict[tuple[int, int], int] = {}
    keyed = []
    for modelled, s in ranked[:60]:
        alike = seen.get((s.bm, s.wk), 0)
        seen[s.bm, s.wk] = alike + 1
        keyed.append((modelled * (1 + 0.2 * alike), s))
    keyed.sort(key=lambda x: x[0])
    return [s for _, s in keyed[:keep]]


def _possible(p: Attention) -> Iterable[Shape]:
    most_rows = -(-p.m // 16)
    for wr in (1, 2, 4, 8):
        for mi in (1, 2):
            if wr * mi > 1 and wr * mi >= 2 * most_rows:
                continue
            for wk in (1, 2, 4, 8):
                for nb in (16, 32, 64):
                    if wr * wk > 8 or (wk * nb > 16 and wk * nb >= 2 * padded(p.keys)):
                        continue
                    base = Shape(wr, mi, wk, nb, 1)
                    count = tiles(p, base)
                    if count == 1:
                        yield base
                    elif count <= 4 and pipeline_bytes(p, Shape(wr, mi, wk, nb, count)) <= 112 * 1024:
                        yield Shape(wr, mi, wk, nb, count)
                    else:
                        yield Shape(wr, mi, wk, nb, 2)
                        yield Shape(wr, mi, wk, nb, 3)


def _through_registers(p: Attention, s: Shape, stages: int) -> float:
    """Cycles until the first tiles are there, where threads compute them: batches of loads wait for each other."""
    operands = ((p.q, s.bm * padded(p.qk)), (p.k, stages * s.bn * padded(p.qk)), (p.v, stages * s.bn * padded(p.head)))
    chunks = [-(-n * p.dtype.itemsize // 16 // s.threads) for expr, n in operands if expr.kind != "input"]
    return sum(-(-n // 8) * 700.0 for n in chunks)


def cycles(p: Attention, s: Shape, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel; infinite where it does not fit."""
    used = registers(p, s)
    shared = shared_bytes(p, s) + facts.shared_reserved
    if used > 216 or shared - facts.shared_reserved > facts.shared_per_block:
        return math.inf
    by_registers = facts.registers_per_sm // (-(-used // 8) * 8 * s.threads)
    resident = min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // s.threads)
    blocks = -(-p.m // s.bm) * p.blocks
    busiest = -(-blocks // facts.sms)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    count = tiles(p, s)
    qk, head = padded(p.qk), padded(p.head)
    warps = s.wr * s.wk
    busy = min(1.0, active * warps / 4) * (0.65 if active * warps <= 4 else 0.85 if active * warps < 8 else 1.0)
    size = p.dtype.itemsize
    rate = 2400.0 if size == 2 else 200.0
    products = 2.0 * s.bm * s.bn * (qk + head) / (rate * busy)
    shared_read = (s.wr * s.bn * (1 if size == 2 else 4 // s.mi) + s.bn) * (qk + head) * size / 128
    plain = 6.0 + 3.0 * (0 if p.scale else sum(x.kind == "apply" for x in p.score.parts()) + 2 * len(p.score.leaves))
    arithmetic = s.bm * s.bn * max(1 / 16, plain / 128) / busy
    loaded = s.bn * (qk + head) * size / 40
    chain = products * active / 4 if size == 4 else 0.0
    chain += 250.0 + (qk // 16 + head // 16) * s.nb // 8 * s.mi * 2.0 + s.nb * s.mi * plain / 4
    latency = 800.0 / max(1, s.stages - 1) if count > s.stages else 0.0
    step = max(active * max(products, shared_read, arithmetic, loaded), chain, latency) + 60.0
    first = active * (s.bm * qk + min(s.stages, count) * s.bn * (qk + head)) * size / 40
    first += _through_registers(p, s, min(s.stages, count))
    end = 300.0 + active * s.bm * head * s.wk * 2 / 64 + s.bm * head * s.wk / s.threads * 2.0
    return waves * (_LAUNCH + first + count * step + end)
