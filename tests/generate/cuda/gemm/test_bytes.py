"""Products of 8-bit integers: exact in the emulation, compiled for two architectures, declined where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.fission.quantize import conv_integer, matmul_integer, qlinear_conv, qlinear_matmul
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.narrow import narrow
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as contraction
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

I8, U8, I32 = DType.I8, DType.U8, DType.I32
ROW, LAST = Format.ROW, Format.LAST


def made(b: GraphBuilder, y: NodeId | Declined, *formats: Format) -> Problem:
    assert not isinstance(y, Declined), y
    graph = clean_up(b.build([y]), strict=False).graph
    return Problem(graph, str(graph), formats[:-1], formats[-1:])


def product(m: int, n: int, k: int, left: DType = I8, right: DType = I8, *, turned: bool = False) -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(left, (m, k)))
    w = b.input(TensorType(right, (n, k) if turned else (k, n)), is_weight=not turned)
    return made(b, matmul_integer(b, x, b.transpose(w, (1, 0)) if turned else w), ROW, ROW, ROW)


def requantized(m: int, n: int, k: int) -> Problem:
    b = GraphBuilder()
    x, w = b.input(TensorType(I8, (m, k))), b.input(TensorType(I8, (k, n)), is_weight=True)
    scales = [b.constant(np.array(v, np.float32)) for v in (0.5, 0.25, 2.0)]
    zero = b.constant(np.array(0, np.int8))
    return made(b, qlinear_matmul(b, x, scales[0], zero, w, scales[1], zero, scales[2], zero), ROW, ROW, ROW)


def convolution(n: int, c: int, h: int, w: int, oc: int, k: int, stride: int = 1, pad: int = 0) -> Problem:
    b = GraphBuilder()
    x, f = b.input(TensorType(U8, (n, c, h, w))), b.input(TensorType(I8, (oc, c, k, k)), is_weight=True)
    return made(b, conv_integer(b, x, f, **how(stride, pad)), LAST, ROW, LAST)


def how(stride: int, pad: int) -> dict[str, Any]:
    return {"strides": (stride, stride), "pads_lo": (pad, pad), "pads_hi": (pad, pad), "dilations": (1, 1)}


def requantized_convolution() -> Problem:
    b = GraphBuilder()
    x, f = b.input(TensorType(I8, (2, 32, 9, 9))), b.input(TensorType(I8, (24, 32, 3, 3)), is_weight=True)
    scales = [b.constant(np.array(v, np.float32)) for v in (0.5, 0.25, 4.0)]
    zero = b.constant(np.array(0, np.int8))
    y = qlinear_conv(b, x, scales[0], zero, f, scales[1], zero, scales[2], zero, **how(1, 1))
    return made(b, y, LAST, ROW, LAST)


CASES: dict[str, Problem] = {
    "product": product(70, 40, 128),
    "tails": product(33, 24, 80),
    "odd columns": product(20, 19, 64),
    "u8 and s8": product(40, 32, 96, U8),
    "s8 and u8": product(40, 32, 96, I8, U8),
    "u8 and u8": product(40, 32, 96, U8, U8),
    "both operands": product(40, 32, 96, turned=True),
    "requantised": requantized(50, 48, 96),
    "3x3": convolution(1, 32, 9, 9, 24, 3, 1, 1),
    "1x1": convolution(2, 48, 7, 7, 40, 1),
    "strided": convolution(1, 16, 11, 9, 24, 3, 2, 1),
    "requantised 3x3": requantized_convolution(),
}


def emitted(problem: Problem) -> CudaSource:
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined), found.reason
    source = templates.emit(problem, found[0])
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: emitted(problem) for name, problem in CASES.items()}


def shared_sums() -> dict[str, tuple[Problem, mma.MmaConfig]]:
    """Sums of several warps and blocks."""
    plain = product(70, 40, 512)
    by_work = mma.MmaConfig(32, 32, 64, 16, 16, 1, 3, 3, False)
    return {
        "warps": (plain, mma.MmaConfig(32, 32, 128, 16, 16, 2, 3, 1, False)),
        "workspace": (plain, by_work),
        "workspace, odd columns": (product(40, 19, 512), by_work),
        "cluster": (product(70, 40, 512, U8, I8), replace(by_work, split=4, cluster=True)),
        "cluster and warps": (requantized(70, 48, 512), mma.MmaConfig(64, 32, 128, 32, 16, 2, 3, 2, True)),
        "3x3, workspace": (convolution(1, 32, 9, 9, 24, 3, 1, 1), by_work),
    }


SHARED = shared_sums()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> tuple[dict[str, CudaSource], Emulated]:
    found = {}
    for i, (name, (problem, shape)) in enumerate(SHARED.items()):
        p = contraction(problem)
        assert isinstance(p, Product), p
        source = mma.emit(p, shape.schedule("mma"), f"s{i}")
        assert isinstance(source, CudaSource), source
        found[name] = source
    return found, Emulated(asked(request, found))


@pytest.mark.parametrize("name", few(SHARED, 3))
def test_sums_of_several_warps_and_blocks_are_exact(name: str, shared: tuple[dict[str, CudaSource], Emulated]) -> None:
    problem = SHARED[name][0]
    inputs = numbers(problem)
    got = run(shared[1], problem, shared[0][name], inputs)
    for x, y in zip(got, evaluate(problem.graph, inputs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_few_tiles_of_a_long_sum_are_split() -> None:
    for facts in (H200, A100):
        found = templates.schedules(product(64, 64, 8192), facts)
        assert not isinstance(found, Declined)
        assert any(int(str(s.param("split"))) > 1 for s in found if s.param("template") == "mma")


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


def numbers(problem: Problem) -> list[np.ndarray]:
    """The whole range of each type."""
    rng = np.random.default_rng(0)
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    return [rng.integers(*((-128, 128) if t.dtype is I8 else (0, 256)), t.shape).astype(t.dtype.numpy) for t in types]


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 3))
def test_sums_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name]
    inputs = numbers(problem)
    got = run(kernels, problem, sources[name], inputs, defer=defer)
    for x, y in zip(got, evaluate(problem.graph, inputs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_sample_compiles_without_spills() -> None:
    compiled_well([emitted(product(2048, 1024, 1024)), emitted(requantized_convolution())], "sm_90a", H200)
    found = templates.schedules(product(256, 256, 256), A100)
    assert not isinstance(found, Declined)
    source = templates.emit(product(256, 256, 256), found[0])
    assert isinstance(source, CudaSource)
    compiled_well([source], "sm_80", A100)


def centred() -> Problem:
    b = GraphBuilder()
    x, w = b.input(TensorType(U8, (32, 64))), b.input(TensorType(I8, (64, 32)), is_weight=True)
    return made(b, matmul_integer(b, x, w, b.constant(np.array(3, np.uint8))), ROW, ROW, ROW)


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (product(32, 32, 60), "vectors of 16"),
        (convolution(1, 3, 9, 9, 16, 3), "vectors of 16"),
        (centred(), "i32"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    found = templates.schedules(problem, H200)
    assert isinstance(found, Declined)
    assert part in found.reason


def test_an_operand_that_is_read_elsewhere_stays_as_it_is() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(I8, (32, 32))), b.input(TensorType(I8, (32, 32)), is_weight=True)
    wide = b.cast(x, I32)
    y = b.apply(Prim.ADD, b.add(Prim.MATMUL, wide, b.cast(w, I32)), wide)
    assert narrow(made(b, y, ROW, ROW, ROW)) is None
    assert narrow(product(32, 32, 64)) is not None
