"""Attention as one kernel on tensor cores: online softmax over tiles of keys, the scores stay in registers.

A block owns some rows of one head. Its warps share the rows, and the keys of the same rows: every warp keeps its own
maximum, sum and result, which meet in shared memory at the end, in a fixed order. Keys and values arrive by
asynchronous copies in a ring of tiles, or all at once where they fit; what must be computed first (a bias, say) goes
through registers. Scores, maxima and sums are f32; the exponentials are rounded to the operands' type for the second
product, and divided by their sum behind it.

Source: Milakov and Gimelshein, arXiv:1805.02867 (online softmax); Dao et al., arXiv:2205.14135 (attention by tiles);
note on matrix products, section 5 (fragments).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.attention import linear as attention_linear
from weft.generate.cuda.attention import tma as attention_tma
from weft.generate.cuda.attention.load import constant_arrays
from weft.generate.cuda.attention.match import Attention, attention
from weft.generate.cuda.attention.shapes import (
    SPLIT,
    TF32,
    WIDEST,
    AttentionConfig,
    SplitAttentionConfig,
    cycles,
    shapes,
    shared_bytes,
)
from weft.generate.cuda.attention.text import Kernel
from weft.generate.cuda.gemm.common import tf32
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Pointer, Schedule

TEMPLATES = frozenset({"attention", "linear_attention", TF32, SPLIT, attention_tma.TEMPLATE})
"""Of the schedules that are emitted here."""
_EXACT = 2
"""Shapes on CUDA cores where TF32 is allowed."""
_NEAR = 1.5
"""A template is among the first two measured unless it is modelled slower than so many times the other."""
MOST = 8
"""Schedules of one problem."""
_EXP2 = """#ifdef W_EMULATED
#define w_exp2 exp2f
#else
W_FN float w_exp2(float x) {  // within 2 ulp
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
#endif
"""


def schedules(problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """Shapes worth measuring, the most promising first; Declined for what is no attention.

    Linear attention: see `linear`, whose schedules say so.
    """
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; attention needs 8.0")
    if not isinstance(attention_linear.linear(problem), Declined):
        return attention_linear.schedules(problem, facts)
    p = attention(problem)
    if isinstance(p, Declined):
        return p
    if max(p.qk, p.head) > WIDEST:
        return Declined(f"heads of {p.qk} and {p.head} columns; attention takes {WIDEST}")
    found = _ranked(p, facts)
    if facts.tf32 and p.dtype is DType.F32:  # where the library does not round, neither may a kernel
        found = [*(s.schedule(tf32=True) for s in shapes(replace(p, tf32=True), facts)), *found[:_EXACT]]
    return found or Declined("no shape of attention fits")


def _ranked(p: Attention, facts: GpuFacts) -> list[Schedule]:
    """Best first by the models; of two near ones the best of each before the second best of any: few are measured."""
    own = [(cycles(p, s, facts), s.schedule()) for s in shapes(p, facts)]
    other = attention_tma.ranked(p, facts)
    if not own or not other:
        return [s for _, s in own or other]
    near = _NEAR * min(own[0][0], other[0][0])
    first = sorted((x for x in (own[0], other[0]) if x[0] <= near), key=lambda x: x[0])
    rest = sorted((x for x in (*own, *other) if x not in first), key=lambda x: x[0])
    return [s for _, s in (*first, *rest)][:MOST]


def emit(problem: Problem, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only."""
    made = roles(problem, schedule)
    return made if isinstance(made, Declined) else solo(made, entry)


def roles(problem: Problem, schedule: Schedule) -> RoleSource | Declined:
    """What the kernel of one of `schedules` does."""
    if schedule.param("template") == "linear_attention":
        return attention_linear.roles(problem, schedule)
    if schedule.param("template") == attention_tma.TEMPLATE:
        return attention_tma.roles(problem, schedule, _EXP2)
    p = attention(problem)
    if isinstance(p, Declined):
        return p
    p = replace(p, tf32=p.dtype is DType.F32 and schedule.param("template") == TF32)
    split = schedule.param("template") == SPLIT
    s = SplitAttentionConfig.of(schedule) if split else AttentionConfig.of(schedule)
    blocks = -(-p.m // s.bm) * p.blocks * s.parts
    if blocks >= 1 << 31:
        return Declined("2^31 CTAs or more")
    sources = sorted({x.index for e in (p.q, p.k, p.v, p.score) for x in e.leaves if x.kind == "input"})
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(Kernel(p, s).lines()),
        parameters=(
            *(Parameter(f"in{i}", Pointer("in", i)) for i in sources),
            Parameter("out0", Pointer("out", 0), WRITTEN),
        ),
        grid=(blocks, 1, 1),
        globals=constant_arrays(p),
        min_ctas_per_sm=1,
        shared_bytes=shared_bytes(p, s),
        cluster=(s.parts, 1, 1),
    )
    headers = (prelude(), _EXP2, *([tf32.FUNCTIONS] if p.tf32 else []))
    return RoleSource(schedule, headers, (role,), capability=90 if split else 80)
