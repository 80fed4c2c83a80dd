"""Every kind of latency-critical kernel with two best-effort kernels: fused, or declined by name.

The table is `tests/golden/cuda/fused_pairs.txt` (WEFT_UPDATE_GOLDEN=1 writes it). What is fused compiles without spills
in at least one of its shapes, as the assembler reports, for each architecture that the latency-critical kernel is for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests import goldens
from tests.generate.cuda.attentions import plain
from tests.generate.cuda.fusing import fma, meet
from tests.generate.cuda.gemm.test_grouped import group
from tests.generate.cuda.loops.test_groups import norm
from tests.generate.cuda.loops.test_pointwise import chain
from tests.generate.cuda.mlps import Net, mlp
from tests.generate.cuda.products import convolution, product
from tests.slow import few

from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.errors import ToolchainError
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.gemm.swap_ab.kernel import SwapAbConfig
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.role import fused
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.colocation import FusedSource, FusionShape
from weft.kernels.source import Schedule

BEST_EFFORT = {"arithmetic": fma(1009), "meets and leaves": meet(133)}
LARGE = product((4096, 1024), (1024, 1024), weight=False, turn_right=True)
FEW_ROWS = product((16, 1024), (4096, 1024), turn_right=True)
ATTENTION = plain((16, 12), 384, 384, 64)
QKV = group(*[lambda m: m.linear(196, 768, 768)] * 3)
BASE = TmaConfig(128, 128, 64, 5, 2, False, 1, (1, 1, 128), 132, 1)

LATENCY_CRITICAL: dict[str, tuple[Problem, str | Schedule]] = {
    "tma 128x128": (LARGE, BASE.schedule()),
    "tma 128x256": (LARGE, replace(BASE, bn=256, stages=3).schedule()),
    "tma 64x128, ping-pong": (LARGE, replace(BASE, bm=64, box=(1, 1, 64), pingpong=True).schedule()),
    "tma 64x96, two CTAs": (LARGE, replace(BASE, bm=64, bn=96, box=(1, 1, 64), consumers=1, min_ctas=2).schedule()),
    "tma, split in a cluster": (LARGE, replace(BASE, split=2, persistent_ctas=0).schedule()),
    "tma, multicast": (LARGE, replace(BASE, multicast=2).schedule()),
    "tma, convolution": (convolution(16, 256, 14, 14, 256, 3, 1, 1), "tma"),
    "mma": (FEW_ROWS, "mma on sm_80"),
    "mma, large": (LARGE, "mma on sm_80"),
    "wgmma": (LARGE, "wgmma"),
    "attention, tma": (ATTENTION, "attention_tma"),
    "attention": (ATTENTION, "attention"),
    "swap-AB, split in a cluster": (FEW_ROWS, SwapAbConfig(16, 64, 8, 2).schedule()),
    "swap-AB": (FEW_ROWS, SwapAbConfig(16, 64, 8, 1).schedule()),
    "gemv": (product((1, 1024), (4096, 1024), turn_right=True), "gemv"),
    "depthwise": (convolution(16, 96, 56, 56, 96, 3, 1, 1, groups=96), "depthwise"),
    "pointwise": (chain((4096, 1024)), ""),
    "norm": (norm(4096, 1024), ""),
    "norm in one pass, in a cluster": (
        norm(96, 16384),
        Form(threads=256, per_row=256, cluster=4, single_pass=True).schedule(),
    ),
    "mlp chain": (mlp(Net(65536, (64, 64, 64, 64))), "mlp"),
    "grouped": (QKV, "grouped"),
    "grouped, tma": (QKV, "grouped_tma"),
}

SPILLS = {("attention", "meets and leaves")}
"""Pairs whose roles want more registers than there are: 234 of 192 threads, and 96 more threads that must meet."""


@cache
def latency_critical(name: str) -> RoleSource:
    problem, wanted = LATENCY_CRITICAL[name]
    generator = CudaGenerator()
    schedule = wanted
    if isinstance(schedule, str):
        template, _, arch = schedule.partition(" on ")
        found = generator.schedules(problem, profile("a100" if arch else "h200"))
        assert not isinstance(found, Declined), found.reason
        schedule = next(s for s in found if dict(s.params).get("template", "") == template)
    source = generator.roles(problem, schedule)
    assert isinstance(source, RoleSource), source
    return source


PAIRS = [(lc, be) for lc in LATENCY_CRITICAL for be in BEST_EFFORT]


def facts_of(lc: RoleSource) -> GpuFacts:
    return profile("h200")


def shown(shapes: list[FusionShape]) -> str:
    """Shapes of one place and number of roles in a line, with the registers that LC may have."""
    lines: dict[str, list[str]] = {}
    for s in shapes:
        r = s.registers
        split = f"{r.producer}/{r.consumer}/{r.best_effort}" if r else f"{s.min_ctas_per_sm} CTAs"
        where = f"{s.place} {s.replicas} x {s.threads}, at {s.shared_offset}, from {s.barrier} on"
        lines.setdefault(where, []).append(split)
    return "".join(f"    {place}: {' '.join(splits)}\n" for place, splits in sorted(lines.items()))


def test_every_pair_is_fused_or_declined_by_name() -> None:
    text = ""
    for lc_name, be_name in PAIRS:
        lc, be = latency_critical(lc_name), BEST_EFFORT[be_name]
        found = fused.shapes(lc, [be], facts_of(lc))
        any_shape = FusionShape("extra", 128, fused.first_barrier(lc.roles[0]), 229376)
        made = [fused.fuse(lc, [be], s) for s in found or [any_shape]]
        assert all(isinstance(m, FusedSource) for m in made) == bool(found)
        why = f"declined: {made[0].reason}" if isinstance(made[0], Declined) else f"{len(found)} shapes"
        text += f"{lc_name} ({lc.roles[0].threads} threads) with {be_name}: {why}\n{shown(found)}"
    goldens.check("cuda/fused_pairs.txt", text)


def compiled(lc: RoleSource, be: RoleSource, arch: str) -> str:
    """Where the BE role of the first shape is that compiles without spills; why none does, where none does."""
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined)
    facts = profile("h200" if arch == "sm_90a" else "a100")
    reasons = []
    for shape in fused.shapes(lc, [be], facts):
        if shape.replicas > 1:
            continue
        made = fused.fuse(lc, [be], shape, facts=facts)
        assert isinstance(made, FusedSource)
        cubin = nvrtc.compile(made.text, arch=arch)
        slow = [w for w in cubin.warnings if "C7510" in w or "C7508" in w]
        wrong = fused.judge(made, cubin.of(made.entry), facts)
        if wrong is None and not slow:
            return shape.place
        reasons.append(wrong.reason if wrong is not None else slow[0])
    return " ".join(reasons)


@pytest.mark.skipif(isinstance(find_nvrtc(), Declined), reason="no NVRTC")
@pytest.mark.parametrize(("lc", "be"), few(PAIRS, 5, unpack=True))
def test_what_is_fused_compiles_without_spills(lc: str, be: str) -> None:
    source = latency_critical(lc)
    if not fused.shapes(source, [BEST_EFFORT[be]], facts_of(source)):
        return  # declined, as the table says
    for arch in ["sm_90a"] + ["sm_80"] * (source.capability <= 80 and not source.exact_arch):
        how = compiled(source, BEST_EFFORT[be], arch)
        if (lc, be) in SPILLS:
            assert how.endswith("bytes of registers spilled per thread")
        else:
            assert how in ("extra", "idle"), how


@pytest.mark.skipif(isinstance(find_nvrtc(), Declined), reason="no NVRTC")
@pytest.mark.parametrize("columns", [96, 128, 192, 256])
def test_registers_that_a_product_by_warpgroups_wants_at_launch(columns: int) -> None:
    """A shape with fewer is declined; with the check left out, the assembler refuses it and names the same number."""
    lc = CudaGenerator().roles(
        LARGE, replace(BASE, bm=64, bn=columns, box=(1, 1, 64), consumers=1, stages=2).schedule()
    )
    assert isinstance(lc, RoleSource)
    wanted = fused.wgmma_registers(lc)
    shape = FusionShape(
        "extra", 32 * (24 if columns < 192 else 16), fused.first_barrier(lc.roles[0]), 131072, 1, None, 1
    )
    made = fused.fuse(lc, [fma(9)], shape)
    assert isinstance(made, Declined) and f"wants {wanted} registers" in made.reason
    roles = (replace(lc.roles[0], globals=lc.roles[0].globals.replace("m64n", 'm64" "n')),)
    shown = fused.fuse(replace(lc, roles=roles), [fma(9)], shape)
    assert isinstance(shown, FusedSource)
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined)
    with pytest.raises(ToolchainError, match=f"register target of {wanted} or higher"):
        nvrtc.compile(shown.text, arch="sm_90a")
