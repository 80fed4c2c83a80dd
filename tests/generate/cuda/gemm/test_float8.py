"""Products of 8-bit floats: exact in the emulation, compiled for two architectures, declined where they cannot be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests import goldens
from tests.generate.cuda import products
from tests.generate.cuda.emulate import build, trials
from tests.generate.cuda.emulate import run as run_loops
from tests.generate.cuda.gemm.test_tma import compile_all, linear
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, rounded, run, small_integers
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.generate.cuda.gemm.gemv import kernel as gemv
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.prelude import float8, prelude, tma_header
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType, TensorType, f8_values
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

E4, E5, F16, BF16, F32 = DType.F8E4M3, DType.F8E5M2, DType.F16, DType.BF16, DType.F32
ROW = Format.ROW


def product(
    m: int,
    n: int,
    k: int,
    left: DType = E4,
    right: DType = E4,
    out: DType = F16,
    *,
    weight: bool = False,
    turned: bool = True,
    scales: str = "scalar",
    bias: DType | None = None,
    residual: DType | None = None,
    batch: int = 0,
) -> Problem:
    """out = cast(a · b * scales + bias + residual); `scales`: scalar, rows (and columns), or none."""
    b = GraphBuilder()
    lead = (batch,) if batch else ()
    x = b.input(TensorType(left, (*lead, m, k)))
    w = b.input(TensorType(right, (*lead, n, k) if turned else (*lead, k, n)), is_weight=weight)
    y = b.cast(w, F32)
    if turned:
        y = b.transpose(y, (0, 2, 1) if batch else (1, 0))
    y = b.add(Prim.MATMUL, b.cast(x, F32), y)
    if scales == "scalar":
        y = b.apply(Prim.MUL, y, b.apply(Prim.MUL, b.input(TensorType(F32, ())), b.input(TensorType(F32, ()))))
    elif scales == "rows":
        y = b.apply(Prim.MUL, y, b.input(TensorType(F32, (m, 1))))
        y = b.apply(Prim.MUL, y, b.input(TensorType(F32, (1, n))))
    if bias is not None:
        y = b.apply(Prim.ADD, y, b.cast(b.input(TensorType(bias, (n,)), is_weight=True), F32))
    if residual is not None:
        y = b.apply(Prim.ADD, y, b.cast(b.input(TensorType(residual, (*lead, m, n))), F32))
    graph = b.build([b.cast(y, out)])
    return Problem(graph, str(graph), (ROW,) * len(graph.inputs), (ROW,))


def contraction(problem: Problem) -> Product:
    p = product_of(problem)
    assert isinstance(p, Product), p
    return p


TMA: dict[str, tuple[Problem, TmaConfig]] = {
    "one tile": (product(64, 32, 128), linear(64, 32)),
    "tails": (product(70, 40, 272), linear(64, 64, two_level=1)),
    "e4m3 and e5m2, bf16": (product(70, 40, 272, E4, E5, BF16), linear(64, 32, two_level=1)),
    "e5m2 and e4m3, f32": (product(70, 40, 272, E5, E4, F32), linear(64, 32)),
    "e5m2 and e5m2": (product(70, 40, 272, E5, E5), linear(64, 32, two_level=1)),
    "weight": (product(70, 40, 272, weight=True, bias=F16), linear(64, 64, two_level=1)),
    "weight of odd sizes": (product(70, 41, 272, weight=True, turned=False), linear(64, 64, two_level=1)),
    "rows and columns": (product(70, 40, 272, scales="rows", bias=BF16, out=BF16), linear(64, 32, two_level=1)),
    "residual": (product(70, 40, 144, residual=F16, bias=F16), linear(64, 32, two_level=1)),
    "to e4m3": (product(70, 40, 144, out=E4), linear(64, 32, two_level=1)),
    "to e5m2, narrow": (product(70, 42, 144, out=E5, weight=True), linear(64, 32)),
    "residual of e5m2": (product(70, 40, 144, residual=E5), linear(64, 32, two_level=1)),
    "two warpgroups": (product(300, 200, 272), linear(256, 96, consumers=2, two_level=1, persistent_ctas=2)),
    "two warpgroups in turn": (
        product(200, 72, 400), linear(64, 32, consumers=2, pingpong=True, persistent_ctas=3, stages=4)
    ),
    "split": (product(70, 72, 1040), linear(64, 64, split=4, two_level=1)),
    "batch": (product(33, 24, 144, batch=3), linear(64, 32, two_level=1)),
    "in turn": (product(70, 96, 784, bias=BF16, out=BF16), linear(64, 64, two_level=2, interleaved=True)),
    "in turn, one stage": (product(64, 32, 128), linear(64, 32, two_level=2)),
    "in turn, two stages": (product(64, 32, 256), linear(64, 32, two_level=2)),
    "in turn, three stages": (product(64, 32, 272, E4, E5), linear(64, 32, two_level=2, stages=4)),
    "in turn, two warpgroups": (
        product(300, 96, 528, out=F32), linear(128, 64, consumers=2, two_level=2, persistent_ctas=2)
    ),
    "in turn, 128 rows each": (
        product(300, 200, 400), linear(256, 96, consumers=2, two_level=2, persistent_ctas=2, stages=4)
    ),
    "in turn, one stage of 128 rows": (product(128, 64, 96), linear(128, 64, two_level=2)),
    "in turn, split": (product(70, 72, 1040), linear(64, 64, split=4, two_level=2)),
    "woven": (product(70, 96, 272, bias=BF16, out=BF16), linear(64, 64, two_level=1, interleaved=True)),
    "woven, two warpgroups": (
        product(300, 224, 400, residual=F16), linear(256, 96, consumers=2, interleaved=True, persistent_ctas=2)
    ),
    "woven, split": (product(70, 64, 1040, out=F32), linear(64, 64, split=4, two_level=1, interleaved=True)),
}  # fmt: skip


def made(problem: Problem, shape: TmaConfig, entry: str) -> CudaSource:
    source = tma.emit(contraction(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


MMA = {
    "product": product(70, 40, 128),
    "tails": product(33, 24, 80),
    "weight, odd": product(20, 19, 64, weight=True, turned=False),
    "e4m3 and e5m2": product(40, 32, 96, E4, E5, BF16, scales="rows"),
    "e5m2 and e4m3": product(40, 32, 96, E5, E4, F32),
    "e5m2 and e5m2": product(40, 32, 96, E5, E5, E4),
    "long": product(16, 32, 1024, bias=F16),
}
FEW = {
    "one row": product(1, 40, 256, weight=True),
    "five rows, e5m2": product(5, 24, 272, E4, E5, BF16),
}


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {f"tma {name}": made(*case, f"k{i}") for i, (name, case) in enumerate(TMA.items())}
    for name, problem in MMA.items():
        schedules = templates.schedules(problem, A100)
        assert not isinstance(schedules, Declined), schedules.reason
        picked = [s for s in schedules if s.param("template") == "mma"]
        picked = [
            *picked[:1],
            *[s for s in picked if int(str(s.param("split"))) > 1 or int(str(s.param("wk"))) > 1][:1],
        ]
        for i, schedule in enumerate(picked):
            source = templates.emit(problem, schedule)
            assert isinstance(source, CudaSource), source
            found[f"mma {i} {name}"] = source
    for name, problem in FEW.items():
        source = gemv.emit(
            contraction(problem), gemv.shapes(contraction(problem), H200)[0][1].schedule(), f"g{len(name)}"
        )
        assert isinstance(source, CudaSource), source
        found[f"gemv {name}"] = source
    return found


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


ALL = {f"tma {k}": p for k, (p, _) in TMA.items()} | {f"mma 0 {k}": p for k, p in MMA.items()}
ALL |= {"mma 1 long": MMA["long"]} | {f"gemv {k}": p for k, p in FEW.items()}


@pytest.mark.parametrize("name", few(reversed(ALL), 5))
def test_sums_of_integers_are_exact(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, ALL[name], sources[name])


def readings(dtype: DType) -> list[tuple[Problem, list[Array]]]:
    """Every byte widened; numbers around every value and half-way between two, and beyond the greatest, narrowed."""
    values = f8_values(dtype)
    finite = np.sort(values[np.isfinite(values)])
    between = (finite[1:] + finite[:-1]) / 2
    edges = np.array([np.nan, np.inf, -np.inf, 464, -465, 480, 61439, 61440, -1e9, 1e-30, -0.0, 1e-40], np.float32)
    wanted = np.concatenate([finite, between, np.nextafter(between, np.inf), np.nextafter(between, -np.inf), edges])
    cases: list[tuple[Problem, list[Array]]] = []
    for x, source, target in ((values, dtype, F32), (wanted.astype(np.float32), F32, dtype), (values, dtype, F16)):
        padded = np.resize(x, -(-x.size // 16) * 16)
        b = GraphBuilder()
        graph = b.build([b.cast(b.input(TensorType(source, padded.shape)), target)])
        cases.append((Problem(graph, str(graph), (ROW,), (ROW,)), [padded]))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few([E4, E5], 1))
def test_conversions(dtype: DType) -> None:
    for problem, inputs in readings(dtype):
        (want,) = evaluate(problem.graph, inputs)
        batch = trials(problem, inputs)[:2]
        library = build(batch)
        for one in batch:
            np.testing.assert_array_equal(run_loops(one, library)[0], want, err_msg=str(one.source.schedule))


def test_both_architectures_compile() -> None:
    fast = replace(H200, fast_f8=True)
    problem = product(4096, 4096, 4096, out=BF16, scales="rows", bias=BF16)
    for facts in (H200, fast):
        shapes = [s for _, s in tma_choose.shapes(contraction(problem), facts, 3)]
        assert all(bool(s.two_level) != facts.fast_f8 for s in shapes)
        compile_all([made(problem, s, f"k{i}") for i, s in enumerate(shapes)])
    for facts, arch in ((A100, "sm_80"), (H200, "sm_90a")):
        found = templates.schedules(product(512, 768, 1024, E4, E5, weight=True), facts)
        assert not isinstance(found, Declined)
        picked = next(s for s in found if s.param("template") == "mma")
        few = templates.schedules(product(1, 768, 1024, E5, E4, weight=True), facts)
        assert not isinstance(few, Declined)
        rows = next(s for s in few if s.param("template") == "gemv")
        sources = [
            templates.emit(product(512, 768, 1024, E4, E5, weight=True), picked),
            templates.emit(product(1, 768, 1024, E5, E4, weight=True), rows),
        ]
        compiled_well([s for s in sources if isinstance(s, CudaSource)], arch, facts)


GOLDEN = {
    "tma_float8": (
        product(512, 512, 512, out=BF16, scales="rows", bias=BF16),
        linear(128, 128, consumers=2, two_level=1),
    ),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_text(name: str) -> None:
    source = made(*GOLDEN[name], "ENTRY")
    text = source.text.replace(prelude(), "").replace(tma_header(), "").replace(float8(), "")
    text = f"// {source.schedule}\n{text}"
    goldens.check(f"cuda/kernels/{name}.cu", text)


def test_without_leave_sums_move() -> None:
    problem = product(2048, 2048, 2048)
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined)
    own = [s for s in found if s.param("template") == "tma"]
    assert own
    assert all(s.param("two_level") in (1, 2) for s in own)
    assert all(s.param("template") in ("mma", "gemv") for s in templates.schedules(problem, A100))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (product(32, 32, 72), "a left operand of 8 bits"),
        (product(32, 40, 64, turned=False), "a right operand of 8 bits"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    found = templates.schedules(problem, H200)
    assert isinstance(found, Declined)
    assert part in found.reason


@pytest.mark.parametrize(
    "shape",
    [
        linear(64, 64, consumers=2, pingpong=True, two_level=1, stages=4),
        linear(128, 256, consumers=2, two_level=1, stages=3),
    ],
)
def test_sums_apart_need_registers(shape: TmaConfig) -> None:
    found = tma.emit(contraction(product(256, 256, 256)), shape.schedule(), "k")
    assert isinstance(found, Declined)
    assert "leave registers" in found.reason


@pytest.mark.parametrize(
    "problem",
    [product(64, 40, 128), product(64, 64, 128, weight=True), product(64, 64, 128, batch=2)],
    ids=["columns", "packed", "batch"],
)
def test_columns_that_cannot_be_woven(problem: Problem) -> None:
    found = tma.emit(contraction(problem), linear(64, 32, interleaved=True).schedule(), "k")
    assert isinstance(found, Declined)
    assert "interleaved" in found.reason


@pytest.mark.slow
def test_halves_are_woven_too() -> None:
    problem = products.product((70, 136), (96, 136), turn_right=True, weight=False)
    source = made(problem, linear(64, 64, interleaved=True), "kw")
    inputs = small_integers(problem)
    (exact,) = evaluate(problem.graph, inputs, precise=True)
    (got,) = run(Emulated([source]), problem, source, inputs)
    np.testing.assert_array_equal(got, rounded(exact, F16))


def test_halves_have_no_sums_of_their_own() -> None:
    half = product_of(products.product((64, 64), (64, 64)))
    assert isinstance(half, Product)
    found = tma.emit(half, linear(64, 64, two_level=1).schedule(), "k")
    assert isinstance(found, Declined)
    assert "8-bit floats" in found.reason
