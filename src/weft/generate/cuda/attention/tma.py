"""Attention on Hopper: TMA fills tiles of keys and values, warpgroups multiply them.

One warpgroup copies, each of the others owns 64 rows. Its scores are products of operands in shared memory and stay in
registers; the weights it makes of them are the left operand of the second product from there. While the weights of one
tile are computed, the products of the next scores and of the last weights are under way; ping-pong warpgroups issue
products one after the other, so that one computes weights while another multiplies. Under a causal mask, tiles that no
row of a block sees are skipped and tiles that all see need no mask; blocks with most tiles come first.

Source: Shah et al., arXiv:2407.08608 (warpgroups for attention); note on matrix products, section 2.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.attention.band import band
from weft.generate.cuda.attention.load import constant_arrays
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.results import functions, results
from weft.generate.cuda.attention.shapes import WIDEST
from weft.generate.cuda.attention.tma_maps import ROWS, Mapped, mapped
from weft.generate.cuda.attention.tma_shapes import (
    MOST,
    TEMPLATE,
    AttentionTmaConfig,
    cycles,
    padded,
    shapes,
    shared_bytes,
    tiles,
)
from weft.generate.cuda.attention.tma_text import Kernel
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.generate.cuda.intrinsics.wgmma import wgmma
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import Pointer, Schedule

__all__ = ["TEMPLATE", "modelled", "operands", "ranked", "roles"]


@cache
def header() -> str:
    """The functions that this template needs besides the prelude and TMA's."""
    return (Path(__file__).parent / "weft_cuda_attention.h").read_text(encoding="utf-8")


def instructions(kind: str, bn: int, head: int) -> tuple[str, str]:
    """Products of 64 rows by 16 of a sum: scores from shared memory, results with weights in registers."""
    return tma.instruction(kind, bn, mn_major_a=False, mn_major_b=False), _weighted(kind, head)


def _weighted(kind: str, columns: int) -> str:
    types, majors = f"{kind}.{kind}", (True,)
    return wgmma(f"w_weighted_{kind}", columns, types, left_in_registers=True, mn_major=majors, always_adds=True)


def operands(p: Attention, s: AttentionTmaConfig) -> tuple[Mapped, Mapped, Mapped] | Declined:
    """q, k and v for TMA."""
    q = mapped(p, p.q, p.qk, ROWS, keyed=False)
    k = mapped(p, p.k, p.qk, s.bn, keyed=True)
    v = mapped(p, p.v, p.head, s.bn, keyed=True)
    if isinstance(q, Declined):
        return q
    if isinstance(k, Declined):
        return k
    if isinstance(v, Declined):
        return v
    return q, k, v


def ranked(p: Attention, facts: GpuFacts, keep: int = MOST) -> list[tuple[float, Schedule]]:
    """Modelled cycles and schedule of the shapes worth measuring; none where the template does not apply."""
    if facts.capability != 90 or p.dtype not in (DType.F16, DType.BF16) or max(p.qk, p.head) > WIDEST:
        return []
    if isinstance(operands(p, AttentionTmaConfig(1, False, 64, 2, False, 1, 0)), Declined):
        return []
    mask = band(p)
    found = shapes(p, facts, lambda s: Kernel.counts(p, s, mask), keep)
    return [(c, s.schedule()) for c, s in found]


def modelled(p: Attention, s: AttentionTmaConfig, facts: GpuFacts) -> float:
    """Cycles of one shape by the model."""
    return cycles(p, s, Kernel.counts(p, s, band(p)), facts)


def roles(p: Attention, schedule: Schedule, exp2: str) -> RoleSource | Declined:
    """The roles of one schedule made by `AttentionTmaConfig.schedule`; `exp2`: the text of its exponential."""
    s = AttentionTmaConfig.of(schedule)
    found = operands(p, s)
    if isinstance(found, Declined):
        return found
    if s.bn % 16 or not 16 <= s.bn <= 256 or s.stages < min(2, tiles(p, s)):
        return Declined("tiles of keys that wgmma does not take, or a single stage")
    # a stage is always of the same warpgroup, so that nobody waits for it before it was filled for another
    if s.split_keys and (s.persistent_ctas or s.pingpong or s.stages < 2 * s.consumers or s.stages % s.consumers):
        return Declined(
            "split over keys excludes persistent CTAs and ping-pong, and needs two stages for each warpgroup"
        )
    kernel = Kernel(p, s, found, band(p))
    if kernel.total >= 1 << 31:
        return Declined("2^31 tiles or more")
    sources = sorted({x.index for x in p.score.leaves if x.kind == "input"})
    check = [Parameter("vs", Pointer("in", p.v.index)), Parameter("st", Pointer("state", 0), "void*")]
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(kernel.lines()),
        parameters=(
            *(Parameter(f"m{name}", x.map) for name, x in zip("qkv", found, strict=True)),
            *(Parameter(f"in{i}", Pointer("in", i)) for i in sources),
            *results(p),
            *(check if kernel.checks else ()),
        ),
        grid=(min(s.persistent_ctas or kernel.total, kernel.total), 1, 1),
        globals=constant_arrays(p),
        min_ctas_per_sm=s.min_ctas,
        shared_bytes=shared_bytes(p, s),
        named_barriers=1 if s.split_keys else 0,
        registers=s.split,
        idle_threads=0 if kernel.checks else 96,
    )
    return RoleSource(
        schedule,
        (prelude(), tma_header(), header(), exp2, *functions(p), *instructions(p.dtype.value, s.bn, padded(p.head))),
        (role,),
        state_bytes=kernel.state_bytes,
        capability=90,
        exact_arch=True,
    )
