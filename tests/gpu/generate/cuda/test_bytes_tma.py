"""Products of 8-bit integers by warpgroups on a real Hopper GPU: every bit is the reference's, in every run.

Also tiles of any 16 columns, clusters of eight and f32 columns in the order of registers, exactly on integers.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.generate.cuda.gemm.test_bytes import convolution
from tests.generate.cuda.gemm.test_bytes import product as constant
from tests.generate.cuda.gemm.test_bytes_tma import BF16, CASES, F16, F32, I8, I32, U8, operands, product, written
from tests.generate.cuda.gemm.test_tma import made
from tests.generate.cuda.gemm.test_tma_tiles import CASES as TILES
from tests.generate.cuda.gemm.test_tma_tiles import INTEGERS
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 60
SIZES = ((257, 203, 272), (1000, 392, 528), (64, 128, 4096), (1, 96, 1024))
ENDS = {
    "sums": {},
    "one scale": {"out": F32, "scales": "scalar"},
    "scales of rows and columns, bias": {"out": BF16, "scales": "rows", "bias": BF16},
    "residual": {"out": F16, "scales": "scalar", "residual": F16, "bias": F16},
    "to i8": {"out": I8, "scales": "rows", "bias": I32},
    "u8 to u8": {"left": U8, "out": U8, "scales": "scalar"},
}
PLACES = {"nt": {}, "nt, constant": {"weight": True}, "nn, constant": {"weight": True, "turned": False}}
GRID: dict[str, Problem] = {
    f"{m} x {n} x {k}, {place}, {end}": product(m, n, k, **where, **what)  # type: ignore[arg-type]
    for m, n, k in SIZES
    for place, where in PLACES.items()
    for end, what in ENDS.items()
}
GRID |= {
    "few rows, 4096 columns": product(5, 4096, 1024, out=BF16, scales="rows"),
    "batch": product(200, 136, 144, batch=3, out=BF16, scales="scalar"),
    "both signs": product(300, 200, 272, U8, I8, weight=True),
    "1024^3": constant(1024, 1024, 1024),
    "3x3 at 28": convolution(4, 64, 28, 28, 96, 3, 1, 1),
    "3x3 at 7": convolution(16, 256, 7, 7, 256, 3, 1, 1),
    "1x1 strided": convolution(4, 64, 28, 28, 128, 1, 2),
}


@pytest.fixture(scope="module")
def hopper(gpu: tuple[Gpu, GpuFacts]) -> tuple[Gpu, GpuFacts]:
    if gpu[1].capability != 90:
        pytest.skip("the tma template is for compute capability 9.0")
    return gpu


@pytest.fixture(scope="module")
def grid(hopper: tuple[Gpu, GpuFacts]) -> tuple[Gpu, dict[str, list[CudaSource]]]:
    """All kernels, compiled at once."""
    machine, facts = hopper
    found: dict[str, list[CudaSource]] = {}
    for name, problem in GRID.items():
        schedules = templates.schedules(problem, facts)
        assert not isinstance(schedules, Declined), (name, schedules.reason)
        first = [s for s in schedules if s.param("template") == "tma"][:3]
        for other in ("mma", "gemv"):
            first += [s for s in schedules if s.param("template") == other][:1]
        sources = [templates.emit(problem, s) for s in first]
        found[name] = [s for s in sources if isinstance(s, CudaSource)]
        assert len(found[name]) == len(sources), name
    every = [s for sources in found.values() for s in sources]
    return Gpu(Known(machine.nvrtc, machine.arch, every), machine.arch), found


def same(machine: Gpu, problem: Problem, sources: list[CudaSource]) -> None:
    inputs = operands(problem)
    exact = evaluate(problem.graph, inputs)
    for source in sources:
        for x, y in zip(machine.run(problem, source, inputs), exact, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=str(source.schedule))


@pytest.mark.parametrize("name", list(GRID))
def test_every_layout_end_and_size(name: str, grid: tuple[Gpu, dict[str, list[CudaSource]]]) -> None:
    machine, found = grid
    assert any(s.schedule.param("template") == "tma" for s in found[name])
    same(machine, GRID[name], found[name])


@pytest.fixture(scope="module")
def features(hopper: tuple[Gpu, GpuFacts]) -> tuple[Gpu, dict[str, CudaSource]]:
    machine, _ = hopper
    found = {name: written(*case, "k0") for name, case in (CASES | INTEGERS).items()}
    found |= {name: made(*case, "k0") for name, case in TILES.items()}
    return Gpu(Known(machine.nvrtc, machine.arch, list(found.values())), machine.arch), found


@pytest.mark.parametrize("name", list(CASES | INTEGERS))
def test_every_feature(name: str, features: tuple[Gpu, dict[str, CudaSource]]) -> None:
    machine, found = features
    same(machine, (CASES | INTEGERS)[name][0], [found[name]])


@pytest.mark.parametrize("name", list(TILES))
def test_tiles_of_any_width(name: str, features: tuple[Gpu, dict[str, CudaSource]]) -> None:
    machine, found = features
    problem = TILES[name][0]
    inputs = small_integers(problem)
    exact = evaluate(problem.graph, inputs, precise=True)
    for x, y, node in zip(machine.run(problem, found[name], inputs), exact, problem.graph.outputs, strict=True):
        np.testing.assert_array_equal(x, rounded(y, problem.graph.type_of(node).dtype))
