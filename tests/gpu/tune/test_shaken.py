"""On a GPU: kernels that are right only while nothing delays a warp, or while memory holds what the last one left."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.generate.cuda.products import product
from tests.tune.cases import problem

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda import CudaGenerator
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule
from weft.options import Options
from weft.tune.cuda_shaken import header_lines
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Tuner

pytestmark = pytest.mark.gpu

SIZE, BLOCK = 1 << 14, 256
EXCHANGE = """extern "C" __global__ void run(const float* x, float* y) {
__shared__ float held[256];
#if __CUDA_ARCH__ >= 900
asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
const int t = threadIdx.x, i = blockIdx.x * 256;
held[t] = x[i + t];
MEET
for (long long end = clock64() + 3000; clock64() < end;) {}
y[i + (t ^ 128)] = 2.0f * held[t ^ 128];
}
"""
LEFT = """extern "C" __global__ void run(const float* x, float* y) {
__shared__ volatile float held[1024];
#if __CUDA_ARCH__ >= 900
asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
const int i = blockIdx.x * 256 + threadIdx.x;
SET
y[i] = 2.0f * x[i] + 0.0f * held[threadIdx.x];
}
"""


def doubled() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (SIZE,)))
    return problem(b.build([b.apply(Prim.MUL, x, 2.0)]))


def kernel(text: str, name: str) -> CudaSource:
    pointers = (Pointer("in", 0), Pointer("out", 0))
    launch = Launch("run", (SIZE // BLOCK, 1, 1), (BLOCK, 1, 1), pointers)
    return CudaSource(Schedule("cuda", (("name", name),)), text, (launch,))


def measured(posed: Problem, sources: list[CudaSource], cache: Path, facts: GpuFacts) -> list[Measurement]:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    options = Options(device="cuda", cache_dir=cache, trial_timeout_s=60.0)
    kernels = [(s.schedule, s, None) for s in sources]
    with Tuner(options, facts, Database.open(None), compiler=nvrtc) as tuner:
        by = {m.schedule: m for m in tuner.measure([ProblemTrial(posed, kernels)])}
    return [by[s.schedule] for s in sources]


def test_a_barrier_that_nothing_shows_to_be_missing_is_missed(tmp_path: Path) -> None:
    sound = kernel(EXCHANGE.replace("MEET", "__syncthreads();"), "meets")
    racing = kernel(EXCHANGE.replace("MEET", ""), "races")
    found = measured(doubled(), [sound, racing], tmp_path, gpu_facts(tmp_path, calibrate=False))
    assert found[0].verdict is Verdict.OK, found[0]
    assert found[1].verdict is not Verdict.OK and found[1].error.startswith("with warps delayed"), found[1]


def test_what_a_kernel_finds_in_shared_memory_is_no_number(tmp_path: Path) -> None:
    sound = kernel(LEFT.replace("SET", "held[threadIdx.x] = 1.0f;"), "sets")
    reads = kernel(LEFT.replace("SET", ""), "reads")
    found = measured(doubled(), [sound, reads], tmp_path, gpu_facts(tmp_path, calibrate=False))
    assert found[0].verdict is Verdict.OK, found[0]
    assert found[1].verdict in (Verdict.NAN_CLASS, Verdict.WRONG), found[1]


@pytest.mark.parametrize(
    ("template", "waits", "which"),
    [
        ("mma", r"w_arrived<\d+>\(\);", 0),  # for the copies of a step
        ("mma", r"role\.sync\(\);", -1),  # for the sums of others
        ("tma", r"role\.sync\(\);", 0),  # for barriers that one thread makes
    ],
)
def test_a_template_without_one_of_its_waits_is_rejected(template: str, waits: str, which: int, tmp_path: Path) -> None:
    case, facts = product((50, 136), (136, 72)), gpu_facts(tmp_path, calibrate=False)
    schedules = CudaGenerator().schedules(case, facts)
    assert isinstance(schedules, list | tuple)
    named = [s for s in schedules if dict(s.params).get("template") == template]
    if not named:
        pytest.skip(f"no {template} on {facts.name}")
    own = [s for s in named if dict(s.params).get("wk", 2) != 1][:1] or named[:1]  # sums of several warps
    sound = CudaGenerator().emit(case, own[0])
    assert isinstance(sound, CudaSource)
    lines = sound.text.split("\n")
    at = [k for k, line in enumerate(lines) if line not in header_lines() and re.search(waits, line)][which]
    lines[at] = re.sub(waits, ";", lines[at], count=1)
    lost = replace(sound, schedule=Schedule("cuda", (*sound.schedule.params, ("lost", at))), text="\n".join(lines))
    found = measured(case, [sound, lost], tmp_path, facts)
    assert found[0].verdict is Verdict.OK, found[0]
    assert found[1].verdict is not Verdict.OK, found[1]
