"""The tma template on a real Hopper GPU: exact on integers, near float64 on random numbers, bit-identical over runs."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.generate.cuda.products import BF16, F16, convolution, product
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.generate.cuda.test_templates_gpu import Gpu, normal
from tests.generate.cuda.test_tma import CASES, contraction, made

from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.templates import tma_choose
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 60
"""A kernel whose barriers are wrong never ends: the whole run ends instead, with the name of the test."""
SHAPES: dict[str, Problem] = {
    **{
        f"512 x 768 x 1024, {d.value}": product((512, 1024), (768, 1024), turn_right=True, dtype=d) for d in (F16, BF16)
    },
    "tails": product((1000, 520), (392, 520), turn_right=True),
    "gelu": product((600, 768), (768, 1024), gelu=True),
    "long sum": product((192, 4096), (256, 4096), turn_right=True),
    "nt": product((3, 200, 72), (3, 136, 72), weight=False, turn_right=True, bias=False),
    "nn": product((3, 200, 136), (3, 136, 320), weight=False, bias=False),
    "tn": product((136, 256), (136, 320), weight=False, turn_left=True, bias=False),
    "tt": product((136, 256), (320, 136), weight=False, turn_left=True, turn_right=True, bias=False),
    **{f"3x3, {d.value}": convolution(4, 64, 28, 28, 96, 3, 1, 1, dtype=d, residual=True) for d in (F16, BF16)},
    "3x3 strided": convolution(4, 96, 29, 29, 64, 3, 2, 1),
    "3x3 at 7": convolution(16, 256, 7, 7, 256, 3, 1, 1, residual=True),
    "5x5": convolution(2, 64, 20, 20, 64, 5, 1, 2),
    "7x7 strided": convolution(2, 32, 40, 40, 64, 7, 2, 3),
    "1x1": convolution(4, 64, 28, 28, 256, 1, residual=True),
    "1x1 strided": convolution(4, 64, 28, 28, 128, 1, 2),
}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gpu, GpuFacts]]:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc), nvrtc.reason
    torch.zeros(1, device="cuda")
    with primary_context():
        facts = gpu_facts(tmp_path_factory.mktemp("facts"), calibrate=False)
        if facts.capability != 90:
            pytest.skip("the tma template is for compute capability 9.0")
        yield Gpu(nvrtc, facts.arch), facts


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def check(machine: Gpu, problem: Problem, source: CudaSource, *, exact: bool = True) -> None:
    """Integers exactly; random numbers within the error of one rounding of the result."""
    kinds = [problem.graph.type_of(node).dtype for node in problem.graph.outputs]
    if exact:
        whole = small_integers(problem)
        for x, y, dtype in zip(
            machine.run(problem, source, whole), evaluate(problem.graph, whole, precise=True), kinds, strict=True
        ):
            np.testing.assert_array_equal(x, rounded(y, dtype), err_msg=str(source.schedule))
    random = normal(problem)
    for x, y, dtype in zip(
        machine.run(problem, source, random), evaluate(problem.graph, random, precise=True), kinds, strict=True
    ):
        unit = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8, DType.F32: 2.0**-20}[dtype]
        difference = x.astype(np.float64) - y
        error = float(np.sqrt(np.mean(np.square(difference)) / np.mean(np.square(y))))
        assert error <= 2.0 * unit, (str(source.schedule), error)


@pytest.mark.parametrize("name", list(CASES))
def test_every_feature(name: str, gpu: tuple[Gpu, GpuFacts]):
    problem, shape = CASES[name]
    check(gpu[0], problem, made(problem, shape, "k0"))


@pytest.mark.parametrize("name", list(SHAPES))
def test_what_is_chosen(name: str, gpu: tuple[Gpu, GpuFacts]):
    machine, facts = gpu
    problem = SHAPES[name]
    found = tma_choose.shapes(contraction(problem), facts)
    assert found
    for _, shape in found:
        check(machine, problem, made(problem, shape, "k0"), exact=name != "gelu")


@pytest.mark.parametrize(
    "tile",
    [(128, 256, 2, False), (256, 128, 2, False), (128, 128, 2, True), (64, 256, 2, True), (64, 256, 1, False)],
    ids=str,
)
def test_large_tiles(tile: tuple[int, int, int, bool], gpu: tuple[Gpu, GpuFacts]):
    bm, bn, groups, turns = tile
    problem = product((1100, 520), (1032, 520), turn_right=True)
    base = tma_choose.shapes(contraction(problem), gpu[1])[0][1]
    fields = {f: getattr(base, f) for f in ("panel",)}
    shape = type(base)(
        bm=bm, bn=bn, stages=3, groups=groups, turns=turns, split=1, box=(1, 1, bm), blocks=7, resident=1, **fields
    )
    check(gpu[0], problem, made(problem, shape, "k0"))
