"""Which shapes of the attention template to measure: a model of cycles ranks them.

Per step a block is bound by its matrix instructions, its reads of shared memory, its exponentials and other arithmetic,
its share of the L2 cache, or the latency of one step. At batch 1 the latencies decide: keys are split over the warps of
a block, rows are cut small until all multiprocessors have a block. The constants are those of the device's profile;
measuring decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from weft.costmodel.constants import Attention as Costs
from weft.costmodel.constants import Operands
from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.attention.match import Attention
from weft.generate.parameters import Parameters
from weft.kernels.source import Schedule

PAD_BYTES = 16
"""Behind each row of q, k and v in shared memory: eight rows of a matrix lie in different banks."""
TF32 = "attention_tf32"
"""Name of the template where operands of f32 are rounded to TF32."""
SPLIT = "attention_split"
"""Name of the template where the blocks of a cluster share the keys."""
SUM_PAD = 8
"""Floats behind each row of the sums."""
WIDEST = 256
"""Columns of q, k and v."""
IN_REGISTERS = 128
"""Up to so many columns of two bytes q stays in registers, on tensor cores."""
WEIGHTS_PAD = 4
"""Floats behind each row of a warp's weights in shared memory, where CUDA cores multiply them."""
MOST = 6
_MANY_KEYS = 256
"""From so many keys on they may be shared by blocks."""
_UNROLLED = 8
"""Tiles whose text is written one by one."""
_AT_ONCE = 112 * 1024
"""Shared memory of a block that holds all keys and values."""


@dataclass(frozen=True, slots=True)
class AttentionConfig(Parameters):
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

    def schedule(self, *, tf32: bool = False) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template=TF32 if tf32 else "attention")

    @property
    def kv_splits(self) -> int:
        """CTAs of a cluster that share the keys of the same rows."""
        return 1

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


@dataclass(frozen=True, slots=True)
class SplitAttentionConfig(AttentionConfig):
    """The same with keys shared by the blocks of a cluster, whose results meet in distributed shared memory."""

    split: int

    def schedule(self, *, tf32: bool = False) -> Schedule:
        """As a schedule of the cuda generator; no TF32."""
        assert not tf32
        return self.named("cuda", template=SPLIT)

    @property
    def kv_splits(self) -> int:
        """CTAs of a cluster."""
        return self.split


def padded(n: int) -> int:
    """Columns in shared memory that matrix instructions read."""
    return -(-n // 16) * 16


def tiles(p: Attention, s: AttentionConfig) -> int:
    """Steps of a block over its keys."""
    return -(-p.keys // (s.bn * s.kv_splits))


def row_bytes(p: Attention, width: int) -> int:
    """From row to row of an operand in shared memory."""
    return padded(width) * p.dtype.itemsize + PAD_BYTES


def weights_bytes(p: Attention, s: AttentionConfig) -> int:
    """Shared memory through which weights reach the second product on CUDA cores."""
    return 4 * s.wr * s.wk * 16 * s.mi * (s.nb + WEIGHTS_PAD) if not p.tensor else 0


def pipeline_bytes(p: Attention, s: AttentionConfig) -> int:
    """Shared memory of q, of all stages of k and v, and of weights."""
    qk, head = row_bytes(p, p.qk), row_bytes(p, p.head)
    return s.bm * qk + s.stages * s.bn * (qk + head) + weights_bytes(p, s)


def shared_bytes(p: Attention, s: AttentionConfig) -> int:
    """Dynamic shared memory of a block: the sums of its warps take the place of keys and values."""
    sums = 4 * s.wk * s.bm * (padded(p.head) + SUM_PAD + 2)
    sums += 16 * s.bm if s.kv_splits > 1 else 0
    return -(-max(pipeline_bytes(p, s), sums) // 16) * 16


def q_in_registers(p: Attention) -> bool:
    """Whether q stays in registers."""
    return p.tensor and p.qk * p.dtype.itemsize <= 2 * IN_REGISTERS


def overlapped(p: Attention, s: AttentionConfig) -> bool:
    """Whether the products of a tile are under way while the weights of the one before are computed."""
    return 2 < tiles(p, s) <= min(s.stages, _UNROLLED) and p.tensor


def registers(p: Attention, s: AttentionConfig) -> int:
    """Rough number of registers per thread."""
    q = padded(p.qk) * p.dtype.itemsize // 8 if q_in_registers(p) else 8
    scores = s.nb if overlapped(p, s) else s.nb // 2
    return s.mi * (q + padded(p.head) // 2 + scores + 4) + (64 if p.tf32 else 48)


def shapes(p: Attention, facts: GpuFacts, keep: int = MOST) -> list[AttentionConfig]:
    """Best first by the model; few, and unlike each other."""
    ranked = [(c, s) for s in (*_possible(p), *_split(p, facts)) if (c := cycles(p, s, facts)) < math.inf]
    ranked.sort(key=lambda x: (x[0], x[1].threads, x[1].bm, -x[1].nb))
    seen: dict[tuple[int, int, bool, int], int] = {}
    keyed = []
    for modelled, s in ranked[:100]:
        kind = (s.bm, s.wk, tiles(p, s) > s.stages, s.kv_splits)
        alike = seen.get(kind, 0)
        seen[kind] = alike + 1
        keyed.append((modelled * (1 + 0.2 * alike), s))
    keyed.sort(key=lambda x: x[0])
    return [s for _, s in keyed[:keep]]


def _possible(p: Attention) -> Iterable[AttentionConfig]:
    """Blocks that are not mostly outside of the rows or keys, among them those that cut both into equal parts."""
    rows = -(-p.m // 16)
    for mi in (1, 2):
        for wr in sorted({1, 2, 4, 8, *(-(-rows // mi // k) for k in (1, 2, 3))}):
            if not 1 <= wr <= 16 or (wr * mi > 1 and wr * mi >= 2 * rows):
                continue
            for wk in (1, 2, 4, 8):
                if wr * wk > (16 if wk == 1 else 8):
                    continue
                for nb in sorted({16, 32, 64, 128, *(padded(-(-p.keys // (wk * k))) for k in (1, 2, 3, 4))}):
                    if nb <= 208 and (wk * nb <= 16 or wk * nb < 2 * padded(p.keys)):
                        yield from _staged(p, AttentionConfig(wr, mi, wk, nb, 1))


def _split(p: Attention, facts: GpuFacts) -> Iterable[SplitAttentionConfig]:
    """Few rows of many keys: several blocks for the same rows. Sums of 16-bit types, stored in whole chunks."""
    if facts.capability < 90 or not p.tensor or p.tf32 or p.head % 4 or p.keys < _MANY_KEYS:
        return
    aligned = all(x % 4 == 0 for n, x in zip(p.out.shape[:-1], p.out.strides[:-1], strict=True) if n > 1)
    if p.out.strides[-1] != 1 or p.out.offset % 4 or not aligned:
        return
    for kv_splits in (2, 4, 8):
        for wr in (1, 2, 4):
            if -(-p.m // (16 * wr)) * p.blocks * kv_splits > 4 * facts.sms or (wr > 1 and 16 * wr >= 2 * p.m):
                continue
            for wk in (1, 2, 4, 8):
                for nb in (16, 32, 64):
                    s = SplitAttentionConfig(wr, 1, wk, nb, 2, kv_splits)
                    if wr * wk > 8 or wr * wk < 4 or tiles(p, s) * s.bn * kv_splits >= 2 * p.keys:
                        continue
                    for staged in _staged(p, s):
                        yield cast("SplitAttentionConfig", staged)


def _staged(p: Attention, s: AttentionConfig) -> Iterable[AttentionConfig]:
    """All tiles at once where they fit, rings of tiles where there are more."""
    count = tiles(p, s)
    if count == 1 or (count <= 16 and pipeline_bytes(p, replace(s, stages=count)) <= _AT_ONCE):
        yield replace(s, stages=count)
    if count > 2:
        yield replace(s, stages=2)
    if count > 3:
        yield replace(s, stages=3)


def _through_registers(p: Attention, s: AttentionConfig, stages: int, c: Costs) -> float:
    """Cycles until the first tiles are there, where threads compute them: batches of loads wait for each other."""
    operands = ((p.q, s.bm * padded(p.qk)), (p.k, stages * s.bn * padded(p.qk)), (p.v, stages * s.bn * padded(p.head)))
    chunks = [-(-n * p.dtype.itemsize // 16 // s.threads) for expr, n in operands if expr.kind != "input"]
    return sum(-(-n // 8) * c.batch for n in chunks)


def cycles(p: Attention, s: AttentionConfig, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel; infinite where it does not fit."""
    costs = costs_of(facts)
    c = costs.attention
    used = registers(p, s)
    shared = shared_bytes(p, s) + facts.shared_reserved
    most = facts.registers_per_sm // (-(-s.threads // 128) * 128) - 20  # the compiler's own bound, and our error
    if used > min(216, most) or shared - facts.shared_reserved > facts.shared_per_block:
        return math.inf
    by_registers = facts.registers_per_sm // (-(-used // 8) * 8 * s.threads)
    resident = min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // s.threads)
    if not resident:
        return math.inf
    blocks = -(-p.m // s.bm) * p.blocks * s.kv_splits
    busiest = -(-blocks // facts.sms)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    count = tiles(p, s)
    ring = count > s.stages
    size = p.dtype.itemsize
    qk, head = padded(p.qk), padded(p.head)
    scores = s.bm * s.bn
    expression = score_slots(p, c)
    kind: Operands = "half" if size == 2 else "tf32" if p.tensor else "f32"
    per_score = 2.0 * (qk + head) / c.rate[kind]
    per_score += c.reads[kind] * size * (qk + head) / (2048 * s.mi)
    per_score += c.exponential / costs.roofline.sfu_per_clock + c.issued * (c.softmax_slots + expression) / 128
    warp_step = c.warp + (c.rescaled * s.mi * head / 2 if count > 1 else 0.0)
    work = scores * per_score + s.wr * s.wk / 4 * warp_step
    chain = (
        c.chain
        + c.chain_product * (2 if p.tf32 else 1) * (qk + head) / 16 * s.nb / 8 * s.mi
        + c.chain_score * s.nb * s.mi * (1 + expression / c.chain_slots)
    )
    chain += c.apart if ring or count == 2 else 0.0
    if not p.tensor:
        chain += 2.0 * 16 * s.mi * s.nb * (qk + head) / 64
    if overlapped(p, s):
        work, chain = c.overlapped * work, c.overlapped_chain * chain
    latency = c.latency / (s.stages - 1) if ring else 0.0
    loaded = s.bn * (qk + head) * size / c.port_bytes
    step = max(active * work, active * loaded if ring else 0.0, chain, latency)
    first = active * (s.bm * qk + min(s.stages, count) * s.bn * (qk + head)) * size / c.port_bytes
    first += _through_registers(p, s, min(s.stages, count), c)
    end = c.end + active * s.bm * head * s.wk * 2 / 64
    end += c.meeting + s.bm * head * 4 / c.meeting_bytes if s.kv_splits > 1 else 0.0
    return waves * (first + count * step + end) + c.launch


def score_slots(p: Attention, c: Costs) -> float:
    """Issue slots of what is done to a score before its softmax; 0: it is scaled, which the exponential does."""
    if p.scale:
        return 0.0
    return c.step_slots * sum(x.kind == "apply" for x in p.score.parts()) + c.operand_slots * len(p.score.leaves)
