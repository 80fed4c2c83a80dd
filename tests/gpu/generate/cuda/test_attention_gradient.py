"""The gradients of attention on a real GPU: near float64 at sizes of networks, the same bits in three runs."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.cases.attention_gradient import gradient_problem
from tests.generate.cuda.attention.test_attention_gradient import CASES, SIZES
from tests.generate.cuda.calls_of_attention import drawn, exact
from tests.generate.cuda.products import BF16, F16
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu
PROBLEMS: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    **{name: p for name, p in SIZES.items() if "ViT" not in name},
    "197 positions": gradient_problem(3, 197, 12, 64),
    "197 positions, packed": gradient_problem(3, 197, 12, 64, packed=True, joined=True),
    "f16, causal": gradient_problem(2, 197, 3, 64, dtype=F16, causal=True),
    "384 positions": gradient_problem(2, 384, 2, 64),
    "wide heads, causal": gradient_problem(2, 100, 3, 128, causal=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_near_float64(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = PROBLEMS[name]
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    made = [CudaGenerator().emit(problem, s) for s in found]
    sources = [x for x in made if isinstance(x, CudaSource)]
    assert sources == made
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = drawn(problem)
    right = exact(problem, inputs)
    unit = 2.0**-8 if problem.graph.type_of(problem.graph.inputs[0]).dtype is BF16 else 2.0**-11
    for source in sources:
        for got, want in zip(machine.run(problem, source, inputs), right, strict=True):
            error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(want)) / np.linalg.norm(want)
            assert error <= unit, (str(source.schedule), error)
