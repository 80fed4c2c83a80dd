"""Groups of products on a real GPU: every shape, exact on integers and near float64 on random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.gemm.test_grouped import CASES, GIVEN, network
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.gpu.machine import TF32_ERROR, Gpu, Known, normal
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 300
PROBLEMS: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    **{name: network(name) for name in ("inception", "segformer", "heads", "experts")},
    "more than 4 KB of arguments": GIVEN,
}


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_every_shape(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem, tf32 = PROBLEMS[name], name.endswith("tf32")
    found = grouped.matched(problem, tf32=tf32)
    assert not isinstance(found, Declined), found.reason
    facts = replace(facts, tf32=tf32)
    schedules = [s.schedule(tensor=name != "f32") for _, s in grouped.shapes(found, facts)]
    if name != "f32":
        schedules += [s.schedule() for _, s in grouped_tma.shapes(found, facts)]
    if name in CASES:
        schedules.append(CASES[name][1].schedule(tensor=name != "f32"))
    sources = [templates.emit(problem, s) for s in schedules]
    made = [s for s in sources if isinstance(s, CudaSource) and s.capability <= facts.capability]
    assert made
    machine = Gpu(Known(machine.nvrtc, machine.arch, made), machine.arch)
    whole, random = small_integers(problem, most=1), normal(problem)
    right, near = (evaluate(problem.graph, x, precise=True) for x in (whole, random))
    k = max(m.product.k for m in found)
    for source in made:
        said = str(source.schedule)
        for x, y, node in zip(machine.run(problem, source, whole), right, problem.graph.outputs, strict=True):
            np.testing.assert_array_equal(x, rounded(y, problem.graph.type_of(node).dtype), err_msg=said)
        for x, y, node in zip(machine.run(problem, source, random), near, problem.graph.outputs, strict=True):
            unit = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8, DType.F32: 2.0**-24}[problem.graph.type_of(node).dtype]
            rms = float(np.sqrt(np.mean(np.square(y)))) + 1e-30
            error = float(np.sqrt(np.mean(np.square(x.astype(np.float64) - numbers(y))))) / rms
            assert error <= (TF32_ERROR if tf32 else unit) + 2.0**-24 * k**0.5, (said, error)
