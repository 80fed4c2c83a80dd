"""Squeeze-excite on a real GPU: every schedule, and the shapes of the emulation, near float64."""

from __future__ import annotations

import pytest
from tests.generate.cuda.conv.test_squeeze_excite import CASES, REAL, inputs_of, near, written
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_a_shape_of_the_emulation(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem, shape = CASES[name]
    source = written(problem, shape, "k")
    if source.capability > facts.capability:
        pytest.skip("no clusters")
    inputs = inputs_of(problem)
    near(problem, machine.run(problem, source, inputs)[0], inputs)


@pytest.mark.parametrize("name", REAL)
def test_every_schedule(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = REAL[name]
    found = templates.schedules(problem, facts)
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    made = [templates.emit(problem, s) for s in found]
    sources = [x for x in made if isinstance(x, CudaSource)]
    assert sources == made
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = inputs_of(problem)
    for source in sources:
        near(problem, machine.run(problem, source, inputs)[0], inputs)
