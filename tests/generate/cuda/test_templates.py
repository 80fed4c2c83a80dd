"""Contractions on a GPU, checked without one: emulated on the host, and compiled for two architectures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F32, ROW, convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, rounded, run, small_integers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

H200 = GpuFacts()
A100 = GpuFacts(capability=80, sms=108, shared_per_sm=167936, shared_per_block=166912)


def split(s: Schedule) -> bool:
    return int(s.param("split")) > 1 and not s.param("cluster")  # type: ignore[arg-type]


def clustered(s: Schedule) -> bool:
    return bool(s.param("cluster"))


def anything(_: Schedule) -> bool:
    return True


def tiled(s: Schedule) -> bool:
    return int(s.param("th")) * int(s.param("tw")) > 1  # type: ignore[arg-type]


def gemv(s: Schedule) -> bool:
    return s.param("template") == "gemv"


CASES: dict[str, tuple[Problem, Callable[[Schedule], bool]]] = {
    "3x3": (convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True), anything),
    "1x1": (convolution(2, 24, 9, 9, 40, 1), anything),
    "1x1 strided": (convolution(2, 16, 9, 9, 24, 1, 2), anything),
    "row-major": (convolution(2, 16, 8, 9, 24, 3, 2, 1, fin=ROW, fout=ROW), anything),
    "1x1 of a row-major image": (convolution(2, 24, 8, 8, 24, 1, fin=ROW), anything),
    "three channels": (convolution(1, 3, 19, 17, 24, 7, 2, 3, fin=ROW), anything),
    "odd channels": (convolution(1, 5, 7, 9, 11, 3, 1, 1), anything),
    "dilated": (convolution(1, 64, 7, 7, 40, 3, 1, 2, 2), anything),
    "groups": (convolution(1, 32, 9, 9, 48, 3, 1, 1, 1, 4), anything),
    "odd groups": (convolution(1, 12, 9, 9, 9, 3, 1, 1, 1, 3), anything),
    "long kernel": (convolution(1, 16, 9, 9, 32, (1, 7), 1, 3), anything),
    "reflect": (convolution(1, 16, 6, 7, 24, 3, before="reflect"), anything),
    "upsampled": (convolution(1, 16, 6, 7, 24, 3, before="up edge"), anything),
    "upsampled, three channels": (convolution(1, 3, 6, 7, 24, 3, before="up reflect", fin=ROW), anything),
    "split over blocks": (convolution(1, 512, 4, 5, 16, 3, 1, 1), split),
    "split over a cluster": (convolution(1, 512, 4, 5, 16, 3, 1, 1), clustered),
    "bf16": (convolution(1, 16, 9, 9, 24, 3, 1, 1, dtype=BF16), anything),
    "f32": (convolution(1, 12, 9, 9, 24, 3, 1, 1, dtype=F32), anything),
    "depthwise": (convolution(2, 24, 9, 11, 24, 3, 2, 1, groups=24, residual=True), tiled),
    "depthwise, no padding": (convolution(1, 20, 8, 9, 20, 3, groups=20), tiled),
    "depthwise, row-major": (convolution(1, 10, 9, 10, 10, 3, 1, 1, groups=10, fin=ROW, fout=ROW), tiled),
    "depthwise, 5x5 bf16": (convolution(1, 16, 7, 7, 16, 5, 1, 2, groups=16, dtype=BF16), anything),
    "depthwise, dilated f32": (convolution(1, 12, 9, 9, 12, 3, 1, 2, 2, 12, dtype=F32), tiled),
    "few rows": (product((3, 520), (12, 520), turn_right=True), gemv),
    "few rows, repacked": (product((2, 264), (264, 10), dtype=BF16), gemv),
    "few rows, batched f32": (product((2, 1, 64), (2, 10, 64), turn_right=True, weight=False, dtype=F32), gemv),
    "linear": (product((50, 40), (72, 40), turn_right=True), anything),
    "linear, three dimensions": (product((2, 5, 40), (40, 18)), anything),
    "one column": (product((33, 40), (40, 1)), anything),
    "batched": (product((3, 50, 40), (3, 40, 72), weight=False, bias=False), anything),
    "batched, transposed": (product((3, 50, 40), (3, 72, 40), weight=False, bias=False, turn_right=True), anything),
    "left transposed": (product((40, 48), (40, 72), weight=False, turn_left=True), anything),
    "odd": (product((2, 3, 33, 17), (2, 3, 17, 19), weight=False), anything),
    "broadcast batch": (product((2, 3, 33, 16), (3, 16, 24), weight=False), anything),
    "f32 batched": (product((3, 50, 44), (3, 44, 20), weight=False, dtype=F32), anything),
    "sums of f16 stored in f32": (product((20, 40), (40, 24), out=F32), anything),
}


def choose(problem: Problem, wanted: Callable[[Schedule], bool]) -> CudaSource:
    found = templates.schedules(problem, A100 if wanted is split else H200)
    assert not isinstance(found, Declined), found.reason
    source = templates.emit(problem, next(s for s in found if wanted(s)))
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: choose(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", list(CASES))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated):
    problem = CASES[name][0]
    inputs = small_integers(problem)
    exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, sources[name], inputs, defer=defer)
    for x, y, node in zip(got, exact, problem.graph.outputs, strict=True):
        np.testing.assert_array_equal(x, rounded(y, problem.graph.type_of(node).dtype))
