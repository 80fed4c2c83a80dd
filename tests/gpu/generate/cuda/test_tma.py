"""The tma template on a real Hopper GPU: exact on integers, near float64 on random numbers, bit-identical over runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.generate.cuda.gemm.test_tma import CASES, contraction, made
from tests.generate.cuda.gemm.test_tma_mutual import CASES as TOGETHER
from tests.generate.cuda.products import BF16, F16, F32, convolution, product
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.gpu.machine import TF32_ERROR, Gpu, Known, normal
from tests.typed import numbers

from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 60
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
    "512 x 768 x 1024, tf32": product((512, 1024), (768, 1024), turn_right=True, dtype=F32),
    "tails, tf32": product((1000, 516), (392, 516), turn_right=True, dtype=F32),
    "long sum, tf32": product((192, 4096), (256, 4096), turn_right=True, dtype=F32),
    "3x3, tf32": convolution(4, 64, 28, 28, 96, 3, 1, 1, dtype=F32, residual=True),
    "3x3 strided, tf32": convolution(4, 96, 29, 29, 64, 3, 2, 1, dtype=F32),
    "3x3 at 7, tf32": convolution(16, 256, 7, 7, 256, 3, 1, 1, dtype=F32, residual=True),
}


TILES = [(128, 256, 2, False), (256, 128, 2, False), (128, 128, 2, True), (64, 256, 2, True), (64, 256, 1, False)]
LARGE = product((1100, 520), (1032, 520), turn_right=True)


def large(tile: tuple[int, int, int, bool]) -> CudaSource:
    bm, bn, groups, pingpong = tile
    return made(LARGE, TmaConfig(bm, bn, 64, 3, groups, pingpong, 1, (1, 1, bm), 7, 1), "k0")


def chosen(problem: Problem, facts: GpuFacts) -> list[CudaSource]:
    return [made(problem, shape, "k0") for _, shape in tma_choose.shapes(contraction(problem), facts)]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gpu, GpuFacts]]:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc), nvrtc.reason
    torch.zeros(1, device="cuda")
    with primary_context():
        facts = gpu_facts(tmp_path_factory.mktemp("facts"), calibrate=False)
        if facts.capability != 90:
            pytest.skip("the tma template is for compute capability 9.0")
        sources = [made(*case, "k0") for case in (*CASES.values(), *TOGETHER.values())] + [
            large(tile) for tile in TILES
        ]
        sources += [source for problem in SHAPES.values() for source in chosen(problem, facts)]
        yield Gpu(Known(nvrtc, facts.arch, sources), facts.arch), facts


def check(machine: Gpu, problem: Problem, sources: list[CudaSource], *, exact: bool = True) -> None:
    """Integers exactly; random numbers within the error of one rounding of the result."""
    kinds = [problem.graph.type_of(node).dtype for node in problem.graph.outputs]
    whole, random = small_integers(problem), normal(problem)
    right = evaluate(problem.graph, whole, precise=True) if exact else []
    near = evaluate(problem.graph, random, precise=True)
    for source in sources:
        if exact:
            for x, y, dtype in zip(machine.run(problem, source, whole), right, kinds, strict=True):
                np.testing.assert_array_equal(x, rounded(y, dtype), err_msg=str(source.schedule))
        for x, y, dtype in zip(machine.run(problem, source, random), near, kinds, strict=True):
            limit = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7, DType.F32: 2.0**-19}[dtype]
            if problem.graph.type_of(problem.graph.inputs[0]).dtype is F32:
                limit = TF32_ERROR
            difference = x.astype(np.float64) - numbers(y)
            error = float(np.sqrt(np.mean(np.square(difference)) / np.mean(np.square(y))))
            assert error <= limit, (str(source.schedule), error)


@pytest.mark.parametrize("name", list(CASES))
def test_every_feature(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    problem, shape = CASES[name]
    check(gpu[0], problem, [made(problem, shape, "k0")])


@pytest.mark.parametrize("name", list(TOGETHER))
def test_tiles_that_blocks_finish_together(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    problem, shape = TOGETHER[name]
    source = made(problem, shape, "k0")
    check(gpu[0], problem, [source])
    inputs = normal(problem)
    first = gpu[0].run(problem, source, inputs)[0]
    for _ in range(20):  # sums are added in one order, whoever comes first
        np.testing.assert_array_equal(gpu[0].run(problem, source, inputs)[0], first)


@pytest.mark.parametrize("name", list(SHAPES))
def test_what_is_chosen(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    sources = chosen(SHAPES[name], facts)
    assert sources
    check(machine, SHAPES[name], sources, exact=name != "gelu")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_large_tiles(tile: tuple[int, int, int, bool], gpu: tuple[Gpu, GpuFacts]) -> None:
    check(gpu[0], LARGE, [large(tile)])


def test_products_of_fields_begin_at_any_row(gpu: tuple[Gpu, GpuFacts]) -> None:
    """The swizzle of an operand follows its address: a failure says whether the descriptor's base offset would help."""
    problem, shape = CASES["field"]
    source = made(problem, shape, "k0")
    whole = small_integers(problem)
    exact = rounded(evaluate(problem.graph, whole, precise=True)[0], F16)
    (got,) = gpu[0].run(problem, source, whole)
    if np.array_equal(got, exact):
        return
    based = source.text.replace("(u64)mode << 62;", "(u64)mode << 62 | (u64)(at >> 7 & 7) << 49;")
    assert based != source.text
    (other,) = gpu[0].run(problem, dataclasses.replace(source, text=based), whole)
    wrong = np.unique(np.nonzero(got != exact)[-1])
    pytest.fail(f"columns {wrong} differ; with a base offset: {'right' if np.array_equal(other, exact) else 'wrong'}")
