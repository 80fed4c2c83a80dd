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

from dataclasses import replace

from weft.generate.cuda.attention.load import constant_arrays
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.results import functions, results
from weft.generate.cuda.attention.shapes import SPLIT, TF32, AttentionConfig, SplitAttentionConfig, shared_bytes
from weft.generate.cuda.attention.text import Kernel
from weft.generate.cuda.gemm.common import tf32
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Pointer, Schedule

EXP2 = """#ifdef W_EMULATED
#define w_exp2 exp2f
#else
W_FN float w_exp2(float x) {  // within 2 ulp
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
#endif
"""


def emit(p: Attention, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `AttentionConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Attention, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `AttentionConfig.schedule`."""
    p = replace(p, tf32=p.dtype is DType.F32 and schedule.param("template") == TF32)
    split = schedule.param("template") == SPLIT
    s = SplitAttentionConfig.of(schedule) if split else AttentionConfig.of(schedule)
    blocks = -(-p.m // s.bm) * p.blocks * s.kv_splits
    if blocks >= 1 << 31:
        return Declined("2^31 CTAs or more")
    sources = sorted({x.index for e in (p.q, p.k, p.v, p.score) for x in e.leaves if x.kind == "input"})
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(Kernel(p, s).lines()),
        parameters=(
            *(Parameter(f"in{i}", Pointer("in", i)) for i in sources),
            *results(p),
        ),
        grid=(blocks, 1, 1),
        globals=constant_arrays(p),
        min_ctas_per_sm=1,
        shared_bytes=shared_bytes(p, s),
        cluster=(s.kv_splits, 1, 1),
    )
    headers = (prelude(), EXP2, *functions(p), *([tf32.FUNCTIONS] if p.tf32 else []))
    return RoleSource(schedule, headers, (role,), capability=90 if split else 80)
