"""Every elementwise primitive in every element type it takes; f32 functions to 2 ulp on a million arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special
from tests.generate.cpp.run_kernels import FACTS, Trial, build, check, run, trials
from tests.slow import few

from weft.generate.cpp import CppGenerator
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import ARITY, CATEGORY, Category, Prim
from weft.ir.shapes import ShapeError, infer
from weft.ir.types import Array, DType, TensorType, round_bf16
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

FUNCTIONS: dict[Prim, Callable[[np.ndarray], np.ndarray]] = {
    Prim.EXP: np.exp, Prim.EXPM1: np.expm1, Prim.LOG: np.log, Prim.LOG1P: np.log1p, Prim.ERF: special.erf,
    Prim.TANH: np.tanh, Prim.SIN: np.sin, Prim.COS: np.cos, Prim.TAN: np.tan, Prim.ASIN: np.arcsin,
    Prim.ACOS: np.arccos, Prim.ATAN: np.arctan, Prim.SINH: np.sinh, Prim.COSH: np.cosh, Prim.ASINH: np.arcsinh,
    Prim.ACOSH: np.arccosh, Prim.ATANH: np.arctanh, Prim.SQRT: np.sqrt, Prim.RSQRT: lambda x: 1 / np.sqrt(x),
    Prim.RECIPROCAL: lambda x: 1 / x, Prim.FLOOR: np.floor, Prim.CEIL: np.ceil, Prim.TRUNC: np.trunc,
    Prim.ROUND: np.rint, Prim.SIGN: np.sign, Prim.ABS: np.abs,
}  # fmt: skip
EDGES = [
    np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4e38, -3.4e38, 88.7, 88.72284, 88.73, -87.3,
    -103.9, -104, -105, 1, -1, 0.5, 2, -2, 1 - 6e-8, -1 + 6e-8, 0.25, 0.625, 10, 9.01, 4, 3.9999998, 1e5, 1.0001e5,
    6.5e4, np.pi, np.pi / 2, 2.0**23, 2.0**23 + 0.5, 2.0**22 + 0.5, -0.5, 1.5, 2.5, -1.5,
]  # fmt: skip


def unary(prim: Prim, dtype: DType, size: int) -> Problem:
    b = GraphBuilder()
    graph = b.build([b.add(prim, b.input(TensorType(dtype, (size,))))])
    return Problem(graph, f"{prim.value}-{dtype.value}-{size}", (Format.ROW,), (Format.ROW,))


def test_functions_of_f32_are_within_two_ulp() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    near = rng.standard_normal(580_000).astype(np.float32) * 3
    x = np.concatenate([np.array(EDGES, np.float32), bits, near, rng.uniform(-110, 110, 20_003).astype(np.float32)])
    batch = [trials(unary(p, DType.F32, x.size), [x])[-1] for p in FUNCTIONS]
    kernels = build(batch)
    for prim, trial in zip(FUNCTIONS, batch, strict=True):
        result = run(trial, kernels[trial.source.entry])[0]
        with np.errstate(all="ignore"):
            got = result.astype(np.float64)
            exact = np.asarray(FUNCTIONS[prim](x.astype(np.float64)))
            rounded = exact.astype(np.float32)
            ulp = np.abs(got - exact) / np.spacing(np.abs(rounded)).astype(np.float64)
        finite = np.isfinite(rounded)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        assert same[~finite].all(), f"{prim.value} of {x[~finite & ~same][:3]}"
        ulp = np.where(finite, ulp, 0.0)
        worst = int(np.argmax(ulp))
        assert ulp[worst] <= 2.0, f"{prim.value}({x[worst]!r}) is off by {ulp[worst]:.2f} ulp"


def arguments(rng: np.random.Generator, prim: Prim, dtype: DType, size: int, position: int) -> Array:
    if dtype is DType.BOOL:
        return rng.random(size) < 0.5
    if dtype.is_integer:
        low, high = (0, 8) if prim in (Prim.SHL, Prim.SHR) and position else (0 if dtype is DType.U8 else -100, 100)
        x: Array = rng.integers(low, high, size)
        if position and prim in (Prim.DIV, Prim.MOD, Prim.FMOD):
            x = np.where(x == 0, 3, x)  # division by zero is undefined
        if prim is Prim.POW:
            x = rng.integers(0, 4, size)
        return x.astype(dtype.numpy)
    x = (
        rng.uniform(0.1, 0.9, size)
        if prim in (Prim.LOG, Prim.LOG1P, Prim.SQRT, Prim.RSQRT, Prim.POW)
        else rng.uniform(-0.9, 0.9, size)
    )
    x = x + 1.5 if prim is Prim.ACOSH else x
    x = np.where(np.abs(x) < 0.1, 0.3, x)
    return round_bf16(x.astype(np.float32)) if dtype is DType.BF16 else x.astype(dtype.numpy)


KNOWN = [d for d in DType if not d.is_float8]


@pytest.mark.parametrize("dtype", few(KNOWN, 3), ids=lambda d: d.value)
def test_every_primitive(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    batch: list[Trial] = []
    for prim in Prim:
        if CATEGORY[prim] is not Category.ELEMENTWISE or prim is Prim.CAST:
            continue
        for size in (1, 37):
            type = TensorType(dtype, (size,))
            types = [type] * (ARITY[prim] or 0)
            if prim is Prim.SELECT:
                types[0] = TensorType(DType.BOOL, (size,))
            try:
                infer(prim, tuple(types), a.NO_ATTRS)
            except ShapeError:
                continue
            b = GraphBuilder()
            graph = b.build([b.add(prim, *(b.input(t) for t in types))])
            key = f"{prim.value}-{dtype.value}-{size}"
            data = [arguments(rng, prim, t.dtype, size, k) for k, t in enumerate(types)]
            batch += trials(Problem(graph, key, (Format.ROW,) * len(types), (Format.ROW,)), data)
    for target in KNOWN:
        b = GraphBuilder()
        x = b.input(TensorType(dtype, (37,)))
        if target is not dtype:
            graph = b.build([b.cast(x, target)])
            data = (
                [np.abs(arguments(rng, Prim.CAST, dtype, 37, 0))]
                if target is DType.U8
                else [arguments(rng, Prim.CAST, dtype, 37, 0)]
            )
            batch += trials(Problem(graph, f"cast-{dtype.value}-{target.value}", (Format.ROW,), (Format.ROW,)), data)
    check(batch)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float8], ids=lambda d: d.value)
def test_floats_of_8_bits_are_declined(dtype: DType) -> None:
    for source, target in ((dtype, DType.F32), (DType.F32, dtype), (dtype, dtype)):
        b = GraphBuilder()
        x = b.input(TensorType(source, (37,)))
        graph = b.build([b.cast(x, target) if target is not source else b.add(Prim.NEG, x)])
        problem = Problem(graph, str(graph), (Format.ROW,), (Format.ROW,))
        found = CppGenerator().schedules(problem, FACTS)
        assert isinstance(found, Declined)
        assert dtype.value in found.reason
        product = GraphBuilder()
        x = product.cast(product.input(TensorType(dtype, (8, 16))), DType.F32)
        w = product.cast(product.input(TensorType(dtype, (16, 8)), is_weight=True), DType.F32)
        wide = product.build([product.add(Prim.MATMUL, x, w)])
        assert isinstance(
            CppGenerator().schedules(Problem(wide, str(wide), (Format.ROW,) * 2, (Format.ROW,)), FACTS), Declined
        )


def test_the_error_function_ends_at_one() -> None:
    given = np.tile(np.array([3.9, 4.0, 6.0, 1e4, 1e30, np.inf], np.float32), 12)
    given[1::2] *= -1
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, given.shape))
    batch = trials(Problem(b.build([b.add(Prim.ERF, x)]), "erf-far", (Format.ROW,), (Format.ROW,)), [given])
    found = build(batch)
    for t in batch:
        (got,) = run(t, found[t.source.entry])
        far = np.abs(given) >= 4.0
        assert np.array_equal(got[far], np.sign(given[far])), t.source.entry
        # at 3.9 it is 1 - 3.5e-8, and the numbers next to it are 1 and 1 - 6.0e-8
        assert np.all((got * np.sign(given))[~far] >= np.float32(1 - 2**-24)) and np.max(np.abs(got)) == 1.0


@pytest.mark.parametrize("source", [DType.F32, DType.F64, DType.F16])
@pytest.mark.parametrize("target", [DType.U8, DType.I8, DType.I16])
def test_a_cast_to_few_bits_leaves_no_more_than_those(source: DType, target: DType) -> None:
    given = np.array([-1.9, 255.0, 256.0, 300.0, -129.0, 128.0, -40000.0, 65000.0] * 5 + [-2.0], source.numpy)
    b = GraphBuilder()
    x = b.input(TensorType(source, given.shape))
    batch = trials(
        Problem(
            b.build([b.cast(b.cast(x, target), DType.F32)]), f"few-{source}-{target}", (Format.ROW,), (Format.ROW,)
        ),
        [given],
    )
    found = build(batch)
    want = given.astype(np.int32).astype(target.numpy).astype(np.float32)
    for t in batch:
        assert np.array_equal(run(t, found[t.source.entry])[0], want), t.source.entry


def test_integers_never_trap() -> None:
    least = np.array([-(2**31), -(2**31), 7, 0] * 5, np.int32)
    other = np.array([-1, 0, 0, 0] * 5, np.int32)
    for prim in (Prim.DIV, Prim.MOD, Prim.FMOD, Prim.SHL, Prim.SHR, Prim.POW):
        b = GraphBuilder()
        t = TensorType(DType.I32, (20,))
        graph = b.build([b.add(prim, b.input(t), b.input(t))])
        batch = trials(Problem(graph, f"trap-{prim.value}", (Format.ROW,) * 2, (Format.ROW,)), [least, other])
        got = run(batch[0], build(batch)[batch[0].source.entry])[0]
        if prim is Prim.DIV:
            assert got[0] == -(2**31)
