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

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.templates import attention_linear, attention_tma, tf32
from weft.generate.cuda.templates.attention_load import constant_arrays
from weft.generate.cuda.templates.attention_match import Attention, attention
from weft.generate.cuda.templates.attention_shapes import (
    SPLIT,
    TF32,
    WIDEST,
    Shape,
    Split,
    cycles,
    shapes,
    shared_bytes,
)
from weft.generate.cuda.templates.attention_text import Kernel
from weft.generate.cuda.templates.prelude import prelude
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule

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

    Linear attention: see `attention_linear`, whose schedules say so.
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


def emit(problem: Problem, schedule: Schedule) -> CudaSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only."""
    if schedule.param("template") == "linear_attention":
        return attention_linear.emit(problem, schedule)
    if schedule.param("template") == attention_tma.TEMPLATE:
        return attention_tma.emit(problem, schedule, _EXP2)
    p = attention(problem)
    if isinstance(p, Declined):
        return p
    p = replace(p, tf32=p.dtype is DType.F32 and schedule.param("template") == TF32)
    split = schedule.param("template") == SPLIT
    s = Split.of(schedule) if split else Shape.of(schedule)
    blocks = -(-p.m // s.bm) * p.blocks * s.parts
    if blocks >= 1 << 31:
        return Declined("2^31 blocks or more")
    entry = f"k{hashlib.sha256(f'{problem.key}|{schedule}'.encode()).hexdigest()[:16]}"
    sources = sorted({x.index for e in (p.q, p.k, p.v, p.score) for x in e.leaves if x.kind == "input"})
    parameters = ", ".join((*(f"const void* __restrict__ in{i}" for i in sources), "void* __restrict__ out0"))
    head = f'extern "C" __global__ void __launch_bounds__({s.threads}, 1) {entry}({parameters}) {{'
    own = tf32.FUNCTIONS if p.tf32 else ""
    text = "\n".join((prelude() + _EXP2 + own + constant_arrays(p) + head, *Kernel(p, s).lines(), "}\n"))
    pointers = (*(Pointer("in", i) for i in sources), Pointer("out", 0))
    launch = Launch(entry, (blocks, 1, 1), (s.threads, 1, 1), pointers, shared_bytes(p, s), (s.parts, 1, 1))
    return CudaSource(schedule=schedule, text=text, launches=(launch,), capability=90 if split else 80)
