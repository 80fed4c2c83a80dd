"""Gradients of embedding tables on a real GPU: exact on integers, near float64 at sizes of networks."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.cases.embedding_gradient import embedding_problem
from tests.generate.cuda.products import BF16, F16, F32
from tests.generate.cuda.tensor_emulator import offered, rounded
from tests.generate.cuda.test_embedding_gradient import CASES, drawn, right
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.kernels.candidate import Problem

pytestmark = pytest.mark.gpu
PROBLEMS: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    "4096 indices": embedding_problem((8, 512), 5000, 768),
    "padding, f16": embedding_problem((16, 128), 3000, 256, padding=7, dtype=F16),
    "few rows": embedding_problem((2048,), 70, 64),
    "16384 indices": embedding_problem((16384,), 2000, 96, dtype=BF16),
}
UNIT = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_kernel(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = PROBLEMS[name]
    sources = offered(problem, facts)
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    whole, normal = drawn(problem), drawn(problem, whole=False, seed=1)
    dtype = problem.graph.type_of(problem.graph.outputs[0]).dtype
    exact, near = rounded(right(problem, whole), dtype), np.asarray(right(problem, normal), np.float64)
    for source in sources:
        (got,) = machine.run(problem, source, whole)
        np.testing.assert_array_equal(got, exact, err_msg=str(source.schedule))
        (got,) = machine.run(problem, source, normal)
        error = np.linalg.norm(np.asarray(got, np.float64) - near) / np.linalg.norm(near)
        assert error <= 2 * UNIT[dtype] + 2.0**-24 * np.sqrt(normal[1].size), str(source.schedule)
