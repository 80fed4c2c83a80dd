"""Products of 8-bit integers by Hopper's warpgroups: every bit is the reference's, in the emulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import goldens, slow
from tests.generate.cuda.gemm.test_bytes import convolution, made, requantized, requantized_convolution
from tests.generate.cuda.gemm.test_tma import compile_all, linear, pixels
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well

from weft.fission.quantize import quantize_linear
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.generate.cuda.gemm.gemv import kernel as gemv
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

I8, U8, I32, F16, BF16, F32 = DType.I8, DType.U8, DType.I32, DType.F16, DType.BF16, DType.F32
ROW = Format.ROW


def product(
    m: int,
    n: int,
    k: int,
    left: DType = I8,
    right: DType = I8,
    out: DType = I32,
    *,
    weight: bool = False,
    turned: bool = True,
    scales: str = "",
    bias: DType | None = None,
    residual: DType | None = None,
    batch: int = 0,
) -> Problem:
    """out = cast(a · b * scales + bias + residual); `scales`: nothing, scalar, rows (and columns); i8 is quantised."""
    b = GraphBuilder()
    lead = (batch,) if batch else ()
    x = b.input(TensorType(left, (*lead, m, k)))
    w = b.input(TensorType(right, (*lead, n, k) if turned else (*lead, k, n)), is_weight=weight)
    y = b.cast(w, I32)
    if turned:
        y = b.transpose(y, (0, 2, 1) if batch else (1, 0))
    y = b.add(Prim.MATMUL, b.cast(x, I32), y)
    if bias is I32:
        y = b.apply(Prim.ADD, y, b.input(TensorType(I32, (n,)), is_weight=True))
    y = y if out is I32 else b.cast(y, F32)
    if scales == "scalar":
        y = b.apply(Prim.MUL, y, b.input(TensorType(F32, ())))
    elif scales == "rows":
        y = b.apply(Prim.MUL, y, b.input(TensorType(F32, (m, 1))))
        y = b.apply(Prim.MUL, y, b.input(TensorType(F32, (1, n))))
    if bias is not None and bias is not I32:
        y = b.apply(Prim.ADD, y, b.cast(b.input(TensorType(bias, (n,)), is_weight=True), F32))
    if residual is not None:
        y = b.apply(Prim.ADD, y, b.cast(b.input(TensorType(residual, (*lead, m, n))), F32))
    return made(b, _narrowed(b, y, out), *(ROW,) * (len(b.build([y]).inputs) + 1))


def _narrowed(b: GraphBuilder, y: NodeId, out: DType) -> NodeId:
    if out not in (I8, U8):
        return b.cast(y, out)
    zero = b.constant(np.array(3, np.int8 if out is I8 else np.uint8))
    narrow = quantize_linear(b, y, b.constant(np.array(64.0, np.float32)), zero)
    assert not isinstance(narrow, Declined)
    return narrow


def contraction(problem: Problem) -> Product:
    p = product_of(problem)
    assert isinstance(p, Product), p
    return p


CASES: dict[str, tuple[Problem, TmaConfig]] = {
    "one tile": (product(64, 32, 128), linear(64, 32)),
    "tails": (product(70, 40, 272), linear(64, 64)),
    "odd columns": (product(33, 19, 80), linear(64, 32)),
    "two columns": (product(33, 42, 80), linear(64, 64)),
    "u8 and s8": (product(70, 40, 272, U8, I8), linear(64, 32)),
    "s8 and u8": (product(70, 40, 272, I8, U8), linear(64, 32)),
    "u8 and u8": (product(70, 40, 272, U8, U8), linear(64, 32)),
    "weight": (product(70, 40, 272, weight=True, bias=I32), linear(64, 64)),
    "weight along columns, odd sizes": (product(70, 41, 272, weight=True, turned=False), linear(64, 64)),
    "one scale, f32": (product(70, 40, 272, out=F32, scales="scalar"), linear(64, 32)),
    "rows and columns, bf16": (product(70, 40, 272, out=BF16, scales="rows", bias=BF16), linear(64, 32)),
    "residual, f16": (product(70, 40, 144, out=F16, scales="scalar", residual=F16, bias=F16), linear(64, 32)),
    "residual of bytes": (product(70, 40, 144, out=I8, scales="rows", residual=I8, bias=F32), linear(64, 32)),
    "to i8": (product(70, 40, 144, out=I8, scales="rows", bias=I32), linear(64, 32)),
    "to u8, 4 columns": (product(70, 44, 144, U8, I8, U8, scales="scalar", weight=True), linear(64, 32)),
    "requantised": (requantized(70, 48, 96), linear(64, 64)),
    "two warpgroups": (product(300, 200, 272), linear(256, 96, consumers=2, persistent_ctas=2)),
    "three warpgroups": (product(200, 72, 400, out=BF16, scales="rows"), linear(192, 64, consumers=3)),
    "in turn": (product(200, 72, 400), linear(64, 32, consumers=2, pingpong=True, persistent_ctas=3, stages=4)),
    "split": (product(70, 72, 1040, out=I8, scales="scalar"), linear(64, 64, split=4)),
    "split, two warpgroups": (product(130, 72, 1040, weight=True), linear(128, 64, split=2, consumers=2)),
    "shared evenly": (
        product(250, 136, 1040, out=BF16, scales="rows"), linear(64, 64, stream_k=True, persistent_ctas=5, stages=4)
    ),
    "by pairs, shared evenly": (
        product(250, 136, 1040), linear(64, 64, multicast=1, stream_k=True, persistent_ctas=8, stages=4)
    ),
    "by pairs beside": (product(250, 136, 400), linear(64, 64, multicast=2, stages=4)),
    "batch": (product(33, 24, 144, batch=3), linear(64, 32)),
    "woven": (product(70, 96, 272, out=BF16, scales="rows", bias=BF16), linear(64, 64, interleaved=True)),
    "woven, split": (product(70, 64, 1040), linear(64, 64, split=4, interleaved=True)),
    "by fours, residual": (
        product(70, 96, 272, out=F32, scales="rows", bias=F32, residual=F32), linear(64, 64, interleaved=True)
    ),
    "by fours, weight, in turn": (
        product(200, 72, 272, out=F32, scales="rows", bias=I32, residual=I32, weight=True),
        linear(64, 64, consumers=2, pingpong=True, persistent_ctas=3, stages=4),
    ),
    "by fours, odd columns": (product(33, 19, 80, out=F32, scales="rows", weight=True), linear(64, 32)),
    "by fours, split, weight": (product(70, 64, 1040, out=F32, bias=I32, weight=True), linear(64, 64, split=4)),
    "1x1": (convolution(2, 48, 7, 7, 40, 1), linear(64, 64)),
    "3x3": (convolution(1, 128, 9, 9, 24, 3, 1, 1), pixels(64, 32, (1, 7, 9))),
    "3x3, narrow panels": (convolution(1, 32, 9, 9, 24, 3, 1, 1), pixels(64, 32, (1, 7, 9), panel=16)),
    "strided": (convolution(1, 64, 11, 9, 24, 3, 2, 1), pixels(64, 32, (1, 6, 5), panel=32)),
    "requantised 3x3": (requantized_convolution(), pixels(64, 32, (1, 7, 9), panel=16)),
    "field": (convolution(1, 64, 12, 16, 24, 3, 1, 1), pixels(64, 32, (1, 8, 8), panel=32, halo_stages=2)),
}  # fmt: skip


def written(problem: Problem, shape: TmaConfig, entry: str) -> CudaSource:
    source = tma.emit(contraction(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: written(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(slow.asked(request, sources))


def operands(problem: Problem) -> list[Array]:
    """The whole range of bytes; scales that are powers of two, and others so small that f32 sums are exact."""
    rng, found = np.random.default_rng(1), numbers_of_bytes(problem)
    for i, node in enumerate(problem.graph.inputs):
        t = problem.graph.type_of(node)
        if t.dtype is F32:
            found[i] = (2.0 ** rng.integers(-6, -2, t.shape)).astype(np.float32)
        elif t.dtype not in (I8, U8):
            found[i] = rng.integers(-64, 65, t.shape).astype(t.dtype.numpy)
    return found


def numbers_of_bytes(problem: Problem) -> list[Array]:
    rng = np.random.default_rng(0)
    ranges = {I8: (-128, 128), U8: (0, 256)}
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    return [rng.integers(*ranges.get(t.dtype, (0, 1)), t.shape).astype(t.dtype.numpy) for t in types]


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", slow.few(CASES, 4))
def test_every_bit_is_that_of_the_reference(
    name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    assert_bits(kernels, CASES[name][0], sources[name], defer=defer)


FEW = {
    "one row": product(1, 40, 256, weight=True),
    "five rows, u8": product(5, 24, 272, U8, I8, BF16, scales="rows", bias=BF16),
    "eight rows, to i8": product(8, 96, 4096, I8, U8, I8, scales="scalar", weight=True, turned=False),
    "both unsigned": product(3, 24, 272, U8, U8),
    "batch": product(2, 24, 144, batch=3),
}


@pytest.fixture(scope="module")
def few() -> tuple[dict[str, CudaSource], Emulated]:
    found = {}
    for i, (name, problem) in enumerate(FEW.items()):
        for k, (_, s) in enumerate(gemv.shapes(contraction(problem), H200, 2)):
            source = gemv.emit(contraction(problem), s.schedule(), f"g{i}_{k}")
            assert isinstance(source, CudaSource), source
            found[f"{name} {k}"] = source
    return found, Emulated(list(found.values()))


@pytest.mark.parametrize("name", list(FEW))
def test_few_rows_are_exact(name: str, few: tuple[dict[str, CudaSource], Emulated]) -> None:
    for k in range(2):
        assert_bits(few[1], FEW[name], few[0][f"{name} {k}"], defer=False)


def test_few_rows_compile() -> None:
    problem = product(1, 11008, 4096, weight=True, out=BF16, scales="rows")
    sources = [gemv.emit(contraction(problem), s.schedule(), "k") for _, s in gemv.shapes(contraction(problem), H200)]
    for facts, arch in ((A100, "sm_80"), (H200, "sm_90a")):
        compiled_well([s for s in sources if isinstance(s, CudaSource)], arch, facts)
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined)
    assert {s.param("template") for s in found} == {"gemv", "mma", "tma"}


def assert_bits(kernels: Emulated, problem: Problem, source: CudaSource, *, defer: bool) -> None:
    inputs = operands(problem)
    got = run(kernels, problem, source, inputs, defer=defer)
    for x, y in zip(got, evaluate(problem.graph, inputs), strict=True):
        np.testing.assert_array_equal(x, y)


def test_every_schedule_compiles() -> None:
    scaled = product(4096, 4096, 4096, out=BF16, scales="rows", bias=BF16)
    narrow = product(2048, 3072, 768, out=I8, scales="rows", bias=I32, weight=True)
    found: list[Any] = []
    for problem in (scaled, narrow, product(512, 512, 8192), convolution(16, 256, 28, 28, 256, 3, 1, 1)):
        shapes = [s for _, s in tma_choose.shapes(contraction(problem), H200, 2)]
        assert shapes
        found += [written(problem, s, f"k{len(found) + i}") for i, s in enumerate(shapes)]
    compile_all(found)


def test_schedules_are_of_both_templates() -> None:
    for problem in (product(2048, 2048, 2048), product(512, 768, 1024, turned=False, weight=True)):
        found = templates.schedules(problem, H200)
        assert not isinstance(found, Declined)
        assert {s.param("template") for s in found} == {"mma", "tma"}
        older = templates.schedules(problem, A100)
        assert not isinstance(older, Declined)
        assert {s.param("template") for s in older} == {"mma"}


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (product(64, 64, 72), "a left operand of 8 bits"),
        (product(64, 64, 128, turned=False), "a right operand of 8 bits"),
    ],
)
def test_what_does_not_lie_along_the_sum_is_declined(problem: Problem, part: str) -> None:
    found = templates.schedules(problem, H200)
    assert isinstance(found, Declined)
    assert part in found.reason


def test_sums_of_integers_need_no_others() -> None:
    found = tma.emit(contraction(product(64, 64, 128)), linear(64, 64, two_level=1).schedule(), "k")
    assert isinstance(found, Declined)
    assert "8-bit floats" in found.reason


GOLDEN = {
    "tma_bytes": (product(512, 512, 512, out=I8, scales="rows", bias=I32), linear(128, 128, consumers=2)),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_text(name: str) -> None:
    source = written(*GOLDEN[name], "ENTRY")
    text = f"// {source.schedule}\n" + source.text.replace(prelude(), "").replace(tma_header(), "")
    goldens.check(f"cuda/kernels/{name}.cu", text)
