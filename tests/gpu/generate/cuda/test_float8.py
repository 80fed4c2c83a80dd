"""Products of 8-bit floats on a real GPU: every schedule, exactly on integers and near float64 on random numbers.

`pytest -s` shows the errors: how many bits the tensor cores keep is what limits rest on.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.gemm.test_float8 import BF16, E4, E5, F16, F32, MMA, TMA, contraction, made, product, readings
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.gpu.machine import Gpu, Known
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator, templates
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.ir.declined import Declined
from weft.ir.reference import evaluate, round_to
from weft.ir.types import Array, DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 60
APART, FAST = 2e-4, 2e-3
"""Limits of the error over the root mean square of the result, where sums move to f32 and where they do not: an H200
had 1.3e-4 at any length, and 1.2e-4 to 1.3e-3 for 128 to 32768 terms."""
SHAPES: dict[str, Problem] = {
    "512 x 768 x 1024": product(512, 768, 1024, bias=F16),
    "tails, bf16": product(1000, 392, 528, E4, E5, BF16, scales="rows", bias=BF16, residual=BF16),
    "weight of odd sizes": product(300, 203, 272, weight=True, turned=False),
    "to e4m3": product(256, 256, 512, E5, E4, E4),
    "few rows": product(3, 1024, 2048, weight=True, out=BF16),
    "batch": product(200, 136, 144, E5, E5, F32, batch=3),
    "deep": product(128, 128, 16384, out=F32),
}


def normal(problem: Problem) -> list[Array]:
    rng = np.random.default_rng(1)
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    return [round_to(rng.standard_normal(t.shape).astype(np.float32), t.dtype) for t in types]


def check(machine: Gpu, problem: Problem, sources: list[CudaSource], name: str) -> None:
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    out = problem.graph.type_of(problem.graph.outputs[0]).dtype
    whole, random = small_integers(problem), normal(problem)
    right = rounded(evaluate(problem.graph, whole, precise=True)[0], out)
    near = numbers(evaluate(problem.graph, random, precise=True)[0])
    rounding = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-18, E4: 2.0**-4, E5: 2.0**-3}[out]
    for source in sources:
        np.testing.assert_array_equal(machine.run(problem, source, whole)[0], right, err_msg=str(source.schedule))
        (got,) = machine.run(problem, source, random)
        error = float(np.sqrt(np.mean(np.square(got.astype(np.float64) - near)) / np.mean(np.square(near))))
        known = dict(source.schedule.params)
        fast = known["template"] == "tma" and not known.get("two_level", False)
        sys.stdout.write(f"{name:24} {known['template']:5} {'fast' if fast else '':5} error {error:.2e}\n")
        assert error <= rounding + (FAST if fast else APART), (str(source.schedule), error)


@pytest.mark.parametrize("fast", [False, True], ids=["apart", "fast"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_every_schedule(name: str, fast: bool, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = SHAPES[name]
    found = templates.schedules(problem, replace(facts, fast_f8=fast))
    assert not isinstance(found, Declined), found.reason
    sources = [templates.emit(problem, s) for s in found]
    assert all(isinstance(s, CudaSource) for s in sources)
    check(machine, problem, [s for s in sources if isinstance(s, CudaSource)], name)


@pytest.mark.parametrize("name", list(TMA))
def test_every_feature(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    if facts.capability != 90:
        pytest.skip("the tma template is for compute capability 9.0")
    problem, shape = TMA[name]
    check(machine, problem, [made(problem, shape, "k0")], name)


def test_halves_are_exact(gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    for name, problem in MMA.items():
        found = templates.schedules(problem, replace(facts, capability=80))
        assert not isinstance(found, Declined), found.reason
        source = templates.emit(problem, found[0])
        assert isinstance(source, CudaSource)
        check(machine, problem, [source], name)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "fast"])
@pytest.mark.parametrize("k", [128, 512, 2048, 8192, 32768])
def test_bits_of_sums(k: int, apart: bool, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    if facts.capability != 90:
        pytest.skip("the tma template is for compute capability 9.0")
    problem = product(256, 256, k, out=F32, scales="none")
    shapes = tma_choose.shapes(contraction(problem), replace(facts, fast_f8=not apart), 1)
    check(machine, problem, [made(problem, shapes[0][1], "k0")], f"sum of {k}")


@pytest.mark.parametrize("dtype", [E4, E5])
def test_conversions(dtype: DType, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    for problem, inputs in readings(dtype):
        generator = CudaGenerator()
        found = generator.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        source = generator.emit(problem, found[0])
        assert isinstance(source, CudaSource)
        (got,) = machine.run(problem, source, inputs)
        np.testing.assert_array_equal(got, evaluate(problem.graph, inputs)[0])
