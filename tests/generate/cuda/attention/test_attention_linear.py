"""Linear attention on the host: emulated kernels against float64, what compiles, what is declined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.generate.cuda.attentions import BF16, F16, F32, Heads, linear, plain, problem_of
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.typed import narrow

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.generate.cuda import templates
from weft.generate.cuda.attention import linear as attention_linear
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, Schedule
from weft.tune.verify import build_reference, compare

H200 = GpuFacts()

CASES: dict[str, tuple[Problem, int]] = {
    "one part": (linear(Heads(1, (2,), 8, 4, 5)), 128),
    "two parts": (linear(Heads(2, (1, 2), 8, 4, 4)), 128),
    "channels last": (linear(Heads(2, (1, 2), 8, 5, 5, format=Format.LAST)), 128),
    "odd channels last": (linear(Heads(1, (2, 1), 5, 3, 3, format=Format.LAST)), 128),
    "odd": (linear(Heads(1, (3,), 7, 7, 7)), 128),
    "many tokens": (linear(Heads(1, (1, 1), 8, 20, 27)), 128),
    "as in the network": (linear(Heads(1, (1, 1), 16, 7, 7, format=Format.LAST)), 256),
    "bf16": (linear(Heads(1, (2,), 8, 4, 6, dtype=BF16)), 128),
    "f32": (linear(Heads(1, (2, 2), 8, 4, 6, dtype=F32, format=Format.LAST)), 128),
    "16 bits throughout": (linear(Heads(1, (2,), 8, 4, 6, inner=F16)), 128),
}


def schedule_of(threads: int) -> Schedule:
    return Schedule("cuda", (("template", "linear_attention"), ("threads", threads)))


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {}
    for name, (problem, threads) in CASES.items():
        source = templates.emit(problem, schedule_of(threads))
        assert isinstance(source, CudaSource), source.reason
        found[name] = source
    return found


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("name", list(CASES))
def test_the_tuner_accepts_it(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Integers, NaN and infinities, normal values: the same inputs, limits and comparison as on a device."""
    problem = CASES[name][0]
    types = [problem.graph.type_of(i).dtype for i in problem.graph.inputs]
    out = TORCH_DTYPE[problem.graph.type_of(problem.graph.outputs[0]).dtype]
    for case in build_reference(problem, seed=3).cases:
        inputs = [x.float().numpy() if t is BF16 else x.numpy() for x, t in zip(case.inputs, types, strict=True)]
        got = torch.from_numpy(np.ascontiguousarray(run(kernels, problem, sources[name], inputs)[0])).to(out)
        finding = compare(got, case.expected[0], case.kind.value)
        assert finding.verdict is Verdict.OK, finding


def test_it_compiles_without_spills() -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    problems = [
        linear(Heads(1, (8, 8), 16, 14, 14, format=Format.LAST)),
        linear(Heads(16, (16, 16), 16, 7, 7)),
        linear(Heads(1, (2, 2), 32, 64, 64, dtype=F32)),
    ]
    jobs = []
    for problem in problems:
        found = templates.schedules(problem, H200)
        assert not isinstance(found, Declined), found.reason
        source = templates.emit(problem, found[0])
        assert isinstance(source, CudaSource), source.reason
        jobs.append(source)
    for source, result in zip(
        jobs, nvrtc.compile_many([CompileJob(s.text, "sm_90a", s.flags) for s in jobs]), strict=True
    ):
        assert isinstance(result, CompiledCubin), result
        assert result.warnings == ()
        own = result.of(source.launches[0].entry)
        assert own.spill_stores == own.spill_loads == 0
        assert gate(result, source.launches[0], H200) is None


def test_what_is_declined_says_why() -> None:
    wide = templates.schedules(linear(Heads(1, (1,), 64, 8, 8)), H200)
    assert isinstance(wide, Declined)
    assert "65 by 64" in narrow(Declined, attention_linear.linear(linear(Heads(1, (1,), 64, 8, 8)))).reason
    b = GraphBuilder()
    x = b.input(TensorType(F16, (2, 8, 8)))
    y = b.apply(Prim.EXP, b.add(Prim.MATMUL, b.add(Prim.MATMUL, x, x), x))
    other = problem_of(b, b.apply(Prim.ADD, y, b.input(TensorType(F16, (2, 8, 8)))))
    found = attention_linear.linear(other)
    assert isinstance(found, Declined)
    assert "another operand" in found.reason or "no function" in found.reason
    assert isinstance(attention_linear.linear(plain((1, 2), 16, 16, 16)), Declined)
