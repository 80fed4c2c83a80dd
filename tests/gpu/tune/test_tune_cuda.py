"""Tuning on a real GPU: every way to be wrong is found, every way to die costs one kernel, and times are sound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tune.cases import problem, single_graphs

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc
from weft.generate.library.execute import plain_math
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import (
    CallStep,
    CudaSource,
    Kernel,
    KernelBinary,
    Launch,
    LibraryCall,
    Pointer,
    Ref,
    Schedule,
)
from weft.options import Options
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.oracle import Evaluation, Mode, evaluate
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Tuner

pytestmark = pytest.mark.gpu

SIZE = 1 << 20
BLOCK = 256
HEAD = """
#if __CUDA_ARCH__ >= 900
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory"); \\
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#else
#define WAIT
#endif
extern "C" __global__ void pack(const float* w, float* p) {
  WAIT;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  p[i] = w[i] * 2.0f;
}
extern "C" __global__ void run(const float* x, const float* p, float* y, float* work, unsigned* state) {
  WAIT;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float before = work[i];
  work[i] = x[i] * p[i];
  float v = work[i] * 0.5f;
"""
BODIES = {
    "ok": "y[i] = v;",
    "counts": "y[i] = v; atomicInc(state, gridDim.x * blockDim.x - 1);",
    "wrong": "y[i] = i == 777777 ? v * 2.0f + 1.0f : v;",
    "half": f"if (i < {SIZE // 2}) y[i] = v;",
    "guard": f"y[i] = v; if (i == 0) y[{SIZE}] = v;",
    "before": "y[i] = v; if (i == 0) y[-1] = v;",
    "nan": "y[i] = i == 5 ? 0.0f / (v - v) : v;",
    "input": "y[i] = v; if (i == 9) ((float*)x)[i] = v + 1.0f;",
    "state": "y[i] = v; if (i == 0) *state = 1;",
    "stale": "y[i] = i == 0 ? v + before : v;",
    "racy": "y[i] = i < 4096 ? v * (1.0f + 1.2e-7f * (float)(clock64() & 1)) : v;",
    "illegal": "y[i] = v; if (i == 0) *(float*)0x10 = v;",
    "misaligned": "y[i] = v; if (i == 0) *(float4*)(y + 1) = make_float4(v, v, v, v);",
    "trap": 'y[i] = v; if (i == 0) asm volatile("trap;");',
    "hang": "volatile float* q = work; while (q[i] != 123456.789f) {} y[i] = v;",
}
VERDICTS = {
    "ok": Verdict.OK,
    "counts": Verdict.OK,
    "wrong": Verdict.WRONG,
    "half": Verdict.UNWRITTEN,
    "guard": Verdict.GUARD,
    "before": Verdict.GUARD,
    "nan": Verdict.NAN_CLASS,
    "input": Verdict.INPUT_MODIFIED,
    "state": Verdict.UNSTABLE,
    "illegal": Verdict.CRASH,
    "misaligned": Verdict.CRASH,
    "trap": Verdict.CRASH,
    "hang": Verdict.HANG,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def facts(cache: Path) -> GpuFacts:
    return gpu_facts(cache)


def product() -> Problem:
    b = GraphBuilder()
    t = TensorType(DType.F32, (SIZE,))
    x, w = b.input(t), b.input(t, is_weight=True)
    return problem(b.build([b.add(Prim.MUL, x, w)]))


def kernel(name: str) -> CudaSource:
    pointers = (Pointer("in", 0), Pointer("packed"), Pointer("out"), Pointer("work"), Pointer("state"))
    grid, block = (SIZE // BLOCK, 1, 1), (BLOCK, 1, 1)
    return CudaSource(
        Schedule("cuda", (("name", name),)),
        HEAD + BODIES[name] + "\n}\n",
        (Launch("run", grid, block, pointers),),
        pack=(Launch("pack", grid, block, (Pointer("in", 1), Pointer("packed"))),),
        workspace_bytes=4 * SIZE,
        state_bytes=4,
        packed_bytes=(4 * SIZE,),
        replaces_weights=(1,),
    )


MULTIPLY = LibraryCall(
    Schedule("library"), (), (CallStep("aten.mul.Tensor", (Ref("in", 0), Ref("in", 1))),), (Ref("tmp", 0),)
)


def trial(names: Sequence[str]) -> ProblemTrial:
    kernels: list[tuple[Schedule, Kernel, KernelBinary | None]] = [(MULTIPLY.schedule, MULTIPLY, None)]
    kernels += [(k.schedule, k, None) for k in map(kernel, names)]
    return ProblemTrial(product(), kernels)


def measure(
    works: Sequence[ProblemTrial], cache: Path, facts: GpuFacts, nvrtc: Nvrtc, **options: object
) -> tuple[dict[str, Measurement], Tuner]:
    chosen = Options(device="cuda", cache_dir=cache, **options)  # type: ignore[arg-type]
    with Tuner(chosen, facts, Database.open(None), compiler=nvrtc) as tuner:
        found = list(tuner.measure(works))
    return {str(dict(m.schedule.params).get("name", m.schedule.generator)): m for m in found}, tuner


def test_every_kind_of_wrong_kernel_is_found(cache: Path, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    names = ["ok", "counts", "wrong", "half", "guard", "before", "nan", "input", "state", "stale", "racy"]
    found, tuner = measure([trial(names)], cache, facts, nvrtc)
    assert found["library"].verdict is Verdict.OK, found["library"]
    assert found["stale"].verdict in (Verdict.WRONG, Verdict.NAN_CLASS)
    assert found["racy"].verdict in (Verdict.WRONG, Verdict.UNSTABLE)
    for name in names:
        assert found[name].verdict is VERDICTS.get(name, found[name].verdict), found[name]
    assert tuner.workers_started == 1


@pytest.mark.parametrize("name", ["illegal", "misaligned", "trap", "hang"])
def test_a_kernel_that_takes_the_context_with_it_costs_one_worker(
    name: str, cache: Path, facts: GpuFacts, nvrtc: Nvrtc
) -> None:
    before, _ = measure([trial(["ok"])], cache, facts, nvrtc)
    start = time.monotonic()
    found, tuner = measure([trial([name, "ok", "counts"])], cache, facts, nvrtc)
    seconds = time.monotonic() - start
    assert found[name].verdict is VERDICTS[name], found[name]
    assert found["ok"].verdict is found["counts"].verdict is found["library"].verdict is Verdict.OK
    assert found["ok"].median_us == pytest.approx(before["ok"].median_us, rel=0.2)
    assert tuner.workers_started == 2 and seconds < 90, f"{seconds:.1f} s"


def test_a_call_that_waits_for_the_device_cannot_be_recorded(cache: Path, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    steps = (
        CallStep("aten.sum.default", (Ref("in", 0),)),
        CallStep("aten._local_scalar_dense.default", (Ref("tmp", 0),)),
        CallStep("aten.mul.Tensor", (Ref("in", 0), Ref("in", 1))),
    )
    waits = replace(MULTIPLY, schedule=Schedule("waits"), run=steps, outputs=(Ref("tmp", 2),))
    work = trial(["ok"])
    found, tuner = measure([replace(work, kernels=[(waits.schedule, waits, None), *work.kernels])], cache, facts, nvrtc)
    assert found["waits"].verdict is Verdict.RESOURCE, found["waits"]
    assert found["library"].verdict is found["ok"].verdict is Verdict.OK and tuner.workers_started == 1


def negated(count: int) -> tuple[ProblemTrial, int]:
    b = GraphBuilder()
    graph = b.build([b.add(Prim.NEG, b.input(TensorType(DType.F32, (count,))))])
    text = """extern "C" __global__ void run(const float4* x, float4* y) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      float4 v = x[i];
      y[i] = make_float4(-v.x, -v.y, -v.z, -v.w);
    }"""
    launch = Launch(
        "run", (count // 4 // BLOCK, 1, 1), (BLOCK, 1, 1), (Pointer("in", 0), Pointer("out")), dependent=False
    )
    source = CudaSource(Schedule("cuda", (("name", f"negate{count}"),)), text, (launch,))
    return ProblemTrial(problem(graph), [(source.schedule, source, None)]), 8 * count


def test_a_copy_takes_what_the_bandwidth_says(cache: Path, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    for count in (1 << 25, 1 << 27):
        work, moved = negated(count)
        found, _ = measure([work], cache, facts, nvrtc)
        (m,) = found.values()
        expected = moved / facts.bandwidth_at(moved) / 1e3
        assert m.verdict is Verdict.OK
        assert m.median_us == pytest.approx(expected, rel=0.2), f"{moved} bytes"
        # another process's turn on the GPU may fall into one sample, which moves no median; a timer that is wrong
        # scatters more of them, and nothing makes a copy shorter than it is
        *others, _ = sorted(m.samples_us)
        assert len(others) >= 4
        assert others[-1] < 1.25 * m.median_us, m.samples_us
        assert others[0] > m.median_us / 1.25, m.samples_us


def test_what_is_small_and_warm_is_faster_than_memory(cache: Path, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    work, moved = negated(1 << 20)
    found, _ = measure([work], cache, facts, nvrtc)
    (m,) = found.values()
    assert m.verdict is Verdict.OK and 1.0 < m.median_us < 12.0, (m.median_us, moved)


def test_a_time_below_the_roofline_is_impossible(cache: Path, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    work, _ = negated(1 << 20)
    found, _ = measure([replace(work, bound_us=1e4)], cache, facts, nvrtc)
    (m,) = found.values()
    assert m.verdict is Verdict.IMPOSSIBLE


def matrices(dtype: DType) -> tuple[Graph, LibraryCall]:
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, (512, 1024))), b.input(TensorType(dtype, (1024, 768)), is_weight=True)
    graph = b.build([b.add(Prim.MATMUL, x, w)])
    call = LibraryCall(
        Schedule("library"), (), (CallStep("aten.mm.default", (Ref("in", 0), Ref("in", 1))),), (Ref("tmp", 0),)
    )
    return graph, call


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
def test_library_products_pass_and_tf32_does_not_pass_for_f32(
    dtype: DType, cache: Path, facts: GpuFacts, nvrtc: Nvrtc
) -> None:
    graph, call = matrices(dtype)
    work = ProblemTrial(problem(graph), [(call.schedule, call, None)])
    found, _ = measure([work], cache, facts, nvrtc)
    assert found["library"].verdict is Verdict.OK, found["library"]
    flops = 2 * 512 * 1024 * 768
    assert found["library"].median_us > flops / max(f for _, f in facts.flops) * 1e6
    if dtype is DType.F32:
        rounded = CallStep("aten.bitwise_and.Scalar", (Ref("tmp", 0), -8192))
        steps: tuple[CallStep, ...] = (CallStep("aten.view.dtype", (Ref("in", 0), "dtype:i32")), rounded)
        steps += (CallStep("aten.view.dtype", (Ref("tmp", 1), "dtype:f32")),)
        steps += (CallStep("aten.mm.default", (Ref("tmp", 2), Ref("in", 1))),)
        coarse = replace(call, schedule=Schedule("coarse"), run=steps, outputs=(Ref("tmp", 3),))
        found, _ = measure([replace(work, kernels=[(coarse.schedule, coarse, None)])], cache, facts, nvrtc)
        assert found["coarse"].verdict is Verdict.WRONG, found["coarse"]


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
def test_a_library_convolution_passes(dtype: DType, cache: Path, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (4, 64, 56, 56)))
    w = b.input(TensorType(dtype, (96, 64, 3, 3)), is_weight=True)
    graph = b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))])
    step = CallStep(
        "aten.convolution.default",
        (Ref("in", 0), Ref("in", 1), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    )
    call = LibraryCall(Schedule("library"), (), (step,), (Ref("tmp", 0),))
    found, _ = measure([ProblemTrial(problem(graph), [(call.schedule, call, None)])], cache, facts, nvrtc)
    assert found["library"].verdict is Verdict.OK, found["library"]


NO_MEANING = {Prim.INPUT, Prim.CONSTANT, Prim.OPAQUE}


@pytest.mark.parametrize("prim", [p for p in Prim if p not in NO_MEANING], ids=lambda p: p.value)
def test_the_oracle_of_the_gpu_agrees_with_that_of_the_cpu(prim: Prim) -> None:
    compared = 0
    for graph in single_graphs(prim):
        for kind in InputSet:
            inputs = draw(graph, kind, Domain.ZERO_MEAN, seed=5)
            here = evaluate(graph, inputs, Mode.PRECISE, seed=0)
            with plain_math():
                there = evaluate(graph, [x.cuda() for x in inputs], Mode.PRECISE, seed=0, device="cuda")
            assert isinstance(here, Evaluation) and isinstance(there, Evaluation)
            assert here.undefined == there.undefined and here.exact == there.exact
            if here.undefined[0]:
                continue  # any value is right
            want, got = here.outputs[0], there.outputs[0]
            assert got.is_cuda and got.dtype == want.dtype and got.shape == want.shape
            if want.dtype.is_floating_point:
                torch.testing.assert_close(got.cpu(), want, rtol=1e-12, atol=1e-280, equal_nan=True)
            else:
                assert torch.equal(got.cpu(), want), (str(graph), kind)
            compared += 1
    assert compared >= 2
