"""Attention by warpgroups, one thing changed at a time, on an NVIDIA GPU: which shape is fastest, and what bounds it.

    python -m lab.gpu_attention_grid [--only TEXT] [--seconds S] [--dtype T] [--peers] [--meeting] [--dry]

Per case: every shape of a grid against float64 and by the clock (see `gpu_attention`), with what the model expects; for
two shapes, times with parts of the kernel left out (`no exp`: weights by a multiplication), whose results are wrong and
not checked. `--meeting`: instead, where warpgroups share keys, how the first one learns that the others have left
their results: at a named barrier (as it is; on an NVIDIA H200 1 to 3 % faster), or at one in shared memory, where
every thread arrives, or one of each warp (which racecheck takes for a race). A kernel that does not end within 20 s
ends the program. `--dry` compiles only. Nothing is written but standard output.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from benchmarks.gpu_attention import CASES, LONG, TOLERANCE, TORCH, Case, Data, error_of, launches_of, peers, problem_of
from benchmarks.harness.gpu_time import Kernel

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.attention import shapes as attention_shapes
from weft.generate.cuda.attention import tma as attention_tma
from weft.generate.cuda.attention.match import attention
from weft.generate.cuda.attention.tma_shapes import AttentionTmaConfig, fits, tiles
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource

CHOSEN = (
    "causal 1024, 64",
    "causal 2048, 128",
    "2048, 64",
    "causal 4096, 128",
    "4096, 128",
    "causal 4096, 64",
    "grouped causal 4096, 128",
    "heads of 80",
    "vit_b16 b16",
    "segformer_b0 1 b16",
    "segformer_b0 2 b16",
    "bert_base b16",
    "grouped, 1 row of 1024 keys",
)
LEFT_OUT = {
    "no exp": ("ex2.approx.ftz.f32 %0, %1;", "mul.f32 %0, %1, %1;"),
}

MEETING: dict[str, tuple[str, int]] = {
    "every thread arrives": ("w_bar_arrive(sb + MET);", 128),
    "one of each warp": ("w_together(); if (lane == 0) w_bar_arrive(sb + MET);", 4),
}
"""What the others do, and how many arrivals the first one waits for."""
MEETS = ("bert_base b1", "vit_b16 b1", "bert_base b1 512 masked", "grouped, 1 row of 1024 keys")


@dataclass(slots=True)
class Trial:
    """A kernel of a case."""

    case: Case
    name: str
    source: CudaSource
    modelled: float
    """µs; NaN for what is no shape."""
    path: str = ""


def grid(c: Case, dtype: DType, facts: GpuFacts, most: int = 11) -> list[Trial]:
    """Shapes that differ in one thing or two."""
    problem = problem_of(c, dtype, bias=False)
    p = attention(problem)
    if isinstance(p, Declined):
        return []
    found = []
    exact = -(-c.keys // 16) * 16
    for groups, resident, keyed in (
        (1, 1, False),
        (1, 2, False),
        (1, 3, False),
        (2, 1, False),
        (3, 1, False),
        (2, 1, True),
    ):
        for bn in sorted({64, 96, 128, 176, min(exact, 256), -(-exact // 32) * 16}):
            for stages, pingpong in ((1, False), (2, False), (3, False), (4, False), (2, True)):
                s = AttentionTmaConfig(groups, keyed, bn, stages, pingpong, resident, 0)
                count = tiles(p, s)
                if (count == 1) != (stages == 1) or (pingpong and (groups == 1 or keyed)) or bn > 256:
                    continue
                if (keyed and count < 4) or (stages == 4) != keyed or (bn == 96 and stages == 3):
                    continue
                if bn >= 2 * exact or not fits(p, s, facts) or (not keyed and (groups - 1) * 64 >= p.m):
                    continue
                source = templates.emit(problem, s.schedule())
                if isinstance(source, CudaSource):
                    name = f"{groups} x {bn} keys, {stages} stages, {resident} blocks"
                    name += f"{', turns' if pingpong else ''}{', shared' if keyed else ''}"
                    found.append(Trial(c, name, source, attention_tma.modelled(p, s, facts) / facts.clock_ghz / 1e3))
    found.sort(key=lambda t: t.modelled)
    return [*found[:most], *without(c, dtype, facts)]


def without(c: Case, dtype: DType, facts: GpuFacts) -> list[Trial]:
    """The first shapes without warpgroups by the model, and the first whose keys are shared by a cluster."""
    problem = problem_of(c, dtype, bias=False)
    p = attention(problem)
    if isinstance(p, Declined):
        return []
    found = []
    ranked = attention_shapes.shapes(p, facts, keep=60)
    split = [s for s in ranked if s.kv_splits > 1][: 8 if c.rows < 64 else 1]
    for s in [*[s for s in ranked if s.kv_splits == 1][:2], *split]:
        source = templates.emit(problem, s.schedule())
        if isinstance(source, CudaSource):
            cycles = attention_shapes.cycles(p, s, facts)
            found.append(Trial(c, str(source.schedule), source, cycles / facts.clock_ghz / 1e3))
    return found


def left_out(t: Trial) -> list[Trial]:
    """The kernel without some of its parts."""
    found = []
    for name, (old, new) in LEFT_OUT.items():
        if old in t.source.text:
            source = replace(t.source, text=t.source.text.replace(old, new))
            found.append(Trial(t.case, f"{t.name}: {name}", source, math.nan))
    return found


def meeting(c: Case, dtype: DType, facts: GpuFacts) -> list[Trial]:
    """Kernels of two warpgroups that share keys, each in three ways."""
    found = []
    for t in [x for x in grid(c, dtype, facts, most=60) if "shared" in x.name][:3]:
        found.append(t)
        for name, (arrive, count) in MEETING.items():
            before, left, taken = t.source.text.split("role.named_barrier(0, 256);")
            text = f"{before}{arrive}{left}w_bar_wait(sb + MET, 0);{taken}"
            text = text.replace("w_bar_init(sb + MET, 4);", f"w_bar_init(sb + MET, {count});")
            found.append(Trial(c, f"{t.name}: {name}", replace(t.source, text=text), t.modelled))
    return found


def measured(t: Trial, d: Data, dtype: DType) -> tuple[float, float]:
    """(µs, error)"""
    out = torch.full(d.exact.shape, math.nan, dtype=d.q.dtype, device="cuda")
    faulthandler.dump_traceback_later(20, exit=True)
    us = Kernel(t.source, t.path).time(d.inputs, out, launches=launches_of(t.case), rounds=5)
    faulthandler.cancel_dump_traceback_later()
    error = error_of(out, d.exact)
    if error > TOLERANCE[TORCH[dtype]] and not math.isnan(t.modelled):
        print(f"WRONG: {t.case.name} {t.source.schedule} error {error:.2g}")
    return us, error


def compiled(trials: list[Trial], facts: GpuFacts) -> list[Trial]:
    """Those that compile; says of the others why they do not, and which spill."""
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined), nvrtc.reason
    results = nvrtc.compile_many([CompileJob(t.source.text, facts.arch, t.source.flags) for t in trials])
    found = []
    for t, result in zip(trials, results, strict=True):
        if not isinstance(result, CompiledCubin):
            print(f"{t.case.name} {t.source.schedule}: {str(result)[:300]}")
            continue
        used = result.of(t.source.launches[0].entry)
        if used.spill_stores or result.warnings:
            print(f"{t.case.name} {t.source.schedule}: spills {used.spill_stores} B {result.warnings[:1]}")
        t.path = str(result.path)
        found.append(t)
    return found


def main() -> int:
    """Compile all, then measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=60.0, help="no case is begun after so many")
    parser.add_argument("--dtype", default="f16", choices=["f16", "bf16"])
    parser.add_argument("--peers", action="store_true", help="torch's backends too")
    parser.add_argument("--meeting", action="store_true", help="how warpgroups that share keys meet")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    given = parser.parse_args()
    started = time.perf_counter()
    dtype = DType(given.dtype)
    facts = GpuFacts()
    if not given.dry:
        torch.zeros(1, device="cuda")
        facts = gpu_facts(None, calibrate=False)
    chosen, made = (MEETS, meeting) if given.meeting else (CHOSEN, grid)
    cases = [c for name in chosen for c in (*CASES, *LONG) if c.name == name and given.only in name]
    trials = [t for c in cases for t in made(c, dtype, facts)]
    some = [] if given.meeting else cases[:3]
    ablated = [x for c in some for t in [x for x in trials if x.case is c][:2] for x in left_out(t)]
    ready = compiled([*trials, *ablated], facts)
    print(f"{len(ready)} kernels compiled after {time.perf_counter() - started:.1f} s", flush=True)
    if given.dry:
        return 0
    for c in cases:
        if time.perf_counter() - started > given.seconds:
            print(f"no time left for {c.name} and what follows")
            break
        d = Data.of(c, dtype)
        print(f"{c.name}")
        for t in (t for t in ready if t.case is c):
            us, error = measured(t, d, dtype)
            if given.meeting:
                us = statistics.median([us, *(measured(t, d, dtype)[0] for _ in range(4))])
            print(f"  {us:8.2f} us, model {t.modelled:7.1f}, error {error:.1e}: {t.name}", flush=True)
        if given.peers:
            found = peers(c, d)[0]
            print(f"  peers { ({k: round(v, 2) for k, v in found.items()}) }", flush=True)
        del d
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
