"""Products of 8-bit integers on a real GPU: every schedule, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from tests.generate.cuda.gemm.test_bytes import CASES, I8, U8, convolution, numbers, product, requantized
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 300
SHAPES = CASES | {
    "1024^3": product(1024, 1024, 1024),
    "u8, 500 x 264 x 1040": product(500, 264, 1040, U8, I8),
    "requantised, 512 x 768 x 768": requantized(512, 768, 768),
    "3x3 at 28": convolution(4, 64, 28, 28, 96, 3, 1, 1),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_schedule(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = SHAPES[name]
    found = templates.schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    sources = [s for s in (templates.emit(problem, x) for x in found) if isinstance(s, CudaSource)]
    assert len(sources) == len(found)
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = numbers(problem)
    exact = evaluate(problem.graph, inputs)
    for source in sources:
        for x, y in zip(machine.run(problem, source, inputs), exact, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=str(source.schedule))
