"""Kernels around a scan on a real GPU: every schedule, against the reference, equal from run to run."""

from __future__ import annotations

import numpy as np
import pytest
from tests.generate.cpp.run_kernels import difference
from tests.generate.cuda.loops.test_scans import COMPILED, LONG
from tests.generate.scans import CASES, drawn
from tests.gpu.machine import Gpu

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*CASES, *LONG, *(f"compiled {n}" for n in COMPILED)])
def test_every_schedule(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = COMPILED[name.removeprefix("compiled ")]() if name.startswith("compiled ") else {**CASES, **LONG}[name]()
    inputs = [np.asarray(x) for x in drawn(problem)]
    wanted = evaluate(problem.graph, inputs)
    schedules = CudaGenerator().schedules(problem, facts)
    assert not isinstance(schedules, Declined)
    for schedule in schedules:
        source = CudaGenerator().emit(problem, schedule)
        assert isinstance(source, CudaSource)
        found = machine.run(problem, source, inputs)
        for got, want, node in zip(found, wanted, problem.graph.outputs, strict=True):
            assert not difference(got, want, problem.graph.type_of(node).dtype), (name, schedule)
