from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.random_graphs import random_array, random_graph, random_inputs
from tests.ir.small_graphs import GRAPHS
from tests.typed import numbers

from weft.errors import InvalidGraphError, UnsupportedError
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import ARITY, CATEGORY, Category, Prim
from weft.ir.reference import MEANING, erf, evaluate
from weft.ir.shapes import ShapeError
from weft.ir.types import DType, TensorType, round_bf16

NAN, INF = math.nan, math.inf


def run(
    prim: Prim, *operands: np.ndarray, attrs: a.Attrs = a.NO_ATTRS, dtype: DType | None = None, precise: bool = False
) -> Any:
    b = GraphBuilder()
    types = [TensorType(dtype or DType.from_numpy(x.dtype), x.shape) for x in operands]
    node = b.add(prim, *(b.input(t) for t in types), attrs=attrs)
    return evaluate(b.build([node]), operands, precise=precise)[0]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i8(*values: int) -> np.ndarray:
    return np.array(values, np.int8)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal in type, value and sign of zero."""
    equal = np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f")
    return found.dtype == wanted.dtype and equal and np.array_equal(np.signbit(found), np.signbit(wanted))


def test_erf_is_right_to_the_last_bits() -> None:
    x = np.concatenate([np.linspace(-7, 7, 100_001), np.geomspace(1e-300, 7, 20_000), [0.84375, 1.25, 1 / 0.35, 6]])
    wanted = np.array([math.erf(v) for v in x])
    assert np.max(np.abs(erf(x) - wanted) / np.maximum(np.abs(wanted), 1e-300)) < 2.3e-16
    special = erf(np.array([0.0, -0.0, INF, -INF, NAN]))
    assert same(special, np.array([0.0, -0.0, 1.0, -1.0, NAN]))


TORCH: dict[Prim, Callable[..., torch.Tensor]] = {
    Prim.EXPM1: torch.expm1, Prim.LOG1P: torch.log1p, Prim.RSQRT: torch.rsqrt, Prim.RECIPROCAL: torch.reciprocal,
    Prim.ERF: torch.erf, Prim.ASIN: torch.asin, Prim.ACOS: torch.acos, Prim.ATAN: torch.atan, Prim.ASINH: torch.asinh,
    Prim.ACOSH: torch.acosh, Prim.ATANH: torch.atanh, Prim.ROUND: torch.round,
    Prim.FMOD: torch.fmod, Prim.MOD: torch.remainder, Prim.ATAN2: torch.atan2, Prim.POW: torch.pow,
    Prim.MAX: torch.maximum, Prim.MIN: torch.minimum, Prim.TRUNC: torch.trunc, Prim.DIV: torch.div,
}  # fmt: skip


@pytest.mark.parametrize("prim", TORCH)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_agree_with_another_implementation(prim: Prim, dtype: type[np.floating[Any]]) -> None:
    rng = np.random.default_rng(0)
    special: np.ndarray = np.array([0.0, -0.0, 1, -1, INF, -INF, NAN, 0.5, 1.5, 2.5, 1e-30], dtype)
    operands = [np.concatenate([special, rng.permutation(special), rng.standard_normal(200).astype(dtype)])]
    if ARITY[prim] == 2:
        operands.append(np.concatenate([rng.permutation(special), special, rng.standard_normal(200).astype(dtype)]))
    wanted = TORCH[prim](*map(torch.from_numpy, operands)).numpy()
    np.testing.assert_allclose(run(prim, *operands), wanted, rtol=4 * float(np.finfo(dtype).eps), atol=0)


def test_every_elementwise_primitive_runs_on_every_type_it_takes() -> None:
    rng = np.random.default_rng(1)
    ran = set()
    for prim in Prim:
        if CATEGORY[prim] is not Category.ELEMENTWISE or prim in (Prim.CAST, Prim.SELECT):
            continue  # have attributes or mixed operands, tested below
        for dtype in DType:
            type = TensorType(dtype, (5, 7))
            try:
                found = run(prim, *(random_array(rng, type) for _ in range(ARITY[prim] or 0)), dtype=dtype)
            except InvalidGraphError as error:
                assert isinstance(error.__cause__, ShapeError)  # noqa: PT017
                continue  # the shape rule says no
            ran.add(prim)
            assert found.shape == (5, 7)
    assert len(ran) == sum(c is Category.ELEMENTWISE for c in CATEGORY.values()) - 2


@pytest.mark.parametrize(
    ("prim", "x", "y", "wanted"),
    [
        (Prim.ADD, i8(127, -128), i8(1, -1), i8(-128, 127)),
        (Prim.MUL, i8(100), i8(100), i8(16)),
        (Prim.DIV, i8(7, -7, 7, -7, -128), i8(2, 2, -2, -2, -1), i8(3, -3, -3, 3, -128)),
        (Prim.MOD, i8(7, -7, 7, -7), i8(3, 3, -3, -3), i8(1, 2, -2, -1)),
        (Prim.FMOD, i8(7, -7, 7, -7), i8(3, 3, -3, -3), i8(1, -1, 1, -1)),
        (Prim.POW, i8(2, -2, 3, -1, 2, 1), i8(3, 3, 5, -3, -1, -9), i8(8, -8, -13, -1, 0, 1)),
        (Prim.SHR, i8(-8, 8), i8(1, 1), i8(-4, 4)),
        (Prim.MAX, f32(NAN, 1), f32(1, NAN), f32(NAN, NAN)),
        (Prim.LT, f32(NAN, 1), f32(1, 2), np.array([False, True])),
        (Prim.NE, f32(NAN, 1), f32(NAN, 1), np.array([True, False])),
        (Prim.XOR, np.array([True, True]), np.array([True, False]), np.array([False, True])),
    ],
)
def test_corner_cases(prim: Prim, x: np.ndarray, y: np.ndarray, wanted: np.ndarray) -> None:
    assert same(run(prim, x, y), wanted)


def test_sign_of_nan_is_nan() -> None:
    assert same(run(Prim.SIGN, f32(NAN, -2, 0, INF)), f32(NAN, -1, 0, 1))


def test_denormals_are_kept() -> None:
    assert run(Prim.MUL, f32(1e-40), f32(0.5))[0] == np.float32(5e-41)


def test_division_of_integers_by_zero_does_not_trap() -> None:
    for prim in (Prim.DIV, Prim.MOD, Prim.FMOD):
        assert run(prim, i8(1, -128), i8(0, 0)).shape == (2,)


@pytest.mark.parametrize(
    ("x", "dtype", "wanted"),
    [
        (f32(1.9, -1.9), DType.I32, np.array([1, -1], np.int32)),
        (f32(0.5, -0.0, NAN), DType.BOOL, np.array([True, False, True])),
        (np.array([300, -1], np.int32), DType.I8, i8(44, -1)),
        (np.array([True, False]), DType.F16, np.array([1, 0], np.float16)),
        (f32(2049, 1e6), DType.F16, np.array([2048, INF], np.float16)),
        (f32(1 + 2**-8, 1 + 3 * 2**-8), DType.BF16, f32(1, 1 + 2**-6)),
    ],
)
def test_casts(x: np.ndarray, dtype: DType, wanted: np.ndarray) -> None:
    assert same(run(Prim.CAST, x, attrs=a.CastAttrs(dtype)), wanted)


def test_empty_reductions() -> None:
    for data, prim, wanted in (
        (np.zeros((2, 0), np.float32), Prim.REDUCE_SUM, f32(0, 0)),
        (np.zeros((2, 0), np.float32), Prim.REDUCE_PROD, f32(1, 1)),
        (np.zeros((2, 0), np.float32), Prim.REDUCE_MAX, f32(-INF, -INF)),
        (np.zeros((2, 0), np.int8), Prim.REDUCE_MIN, i8(127, 127)),
        (np.zeros((2, 0), np.bool_), Prim.REDUCE_MAX, np.array([False, False])),
    ):
        assert same(run(prim, data, attrs=a.ReduceAttrs((1,))), wanted.reshape(2, 1))


def test_small_integers_wrap_in_sums() -> None:
    assert same(run(Prim.REDUCE_SUM, i8(100, 100), attrs=a.ReduceAttrs((0,))), i8(-56))
    assert same(run(Prim.MATMUL, i8(100, 100).reshape(1, 2), i8(1, 1).reshape(2, 1)), i8(-56).reshape(1, 1))


def test_the_first_maximum_or_nan_wins() -> None:
    x = f32(1, 3, 3, NAN, NAN)
    assert run(Prim.ARGMAX, x, attrs=a.ArgAttrs(0)).tolist() == [3]
    assert run(Prim.ARGMAX, x[:3], attrs=a.ArgAttrs(0)).tolist() == [1]
    assert run(Prim.REDUCE_MAX, x, attrs=a.ReduceAttrs((0,))).tolist()[0] != 3


def test_indices_outside_are_clamped() -> None:
    data, indices = f32(1, 2, 3), np.array([-5, 0, 7], np.int64)
    for prim in (Prim.GATHER, Prim.TAKE_ALONG):
        assert run(prim, data, indices, attrs=a.GatherAttrs(0)).tolist() == [1, 1, 3]


def test_sums_of_bf16_are_not_rounded_on_the_way() -> None:
    x = np.full(4096, 1.0, np.float32)
    assert run(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((0,)), dtype=DType.BF16).tolist() == [4096]


def test_each_primitive_rounds_unless_precise() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (1,)))
    graph = b.build([b.apply(Prim.SUB, b.apply(Prim.ADD, x, 2.0**-10), x)])
    assert evaluate(graph, [f32(1)])[0].tolist() == [0]
    assert evaluate(graph, [f32(1)], precise=True)[0].tolist() == [2.0**-10]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_results_of_sixteen_bits_are_exact_in_their_type(dtype: DType) -> None:
    rng = np.random.default_rng(2)
    x = random_array(rng, TensorType(dtype, (100,)))
    for prim in (Prim.EXP, Prim.ERF, Prim.TANH, Prim.SQRT, Prim.NEG):
        found = run(prim, np.abs(x), dtype=dtype)
        exact = run(prim, np.abs(x), dtype=dtype, precise=True)
        wanted = round_bf16(exact.astype(np.float32)) if dtype is DType.BF16 else exact.astype(np.float16)
        assert same(found, wanted)


CONVOLUTIONS = [
    # x, w, strides, pads, dilations, groups
    ((2, 4, 9), (6, 4, 3), 2, 1, 1, 1),
    ((1, 4, 9, 8), (6, 2, 3, 2), 2, 1, 2, 2),
    ((2, 6, 7, 7), (6, 1, 3, 3), 1, 1, 1, 6),
    ((2, 3, 7, 7), (6, 1, 3, 3), 1, 0, 1, 3),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 1), 1, 1, 1, 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("precise", [False, True])
def test_convolution(case: tuple[Any, ...], precise: bool) -> None:
    xs, ws, s, p, d, groups = case
    k, rng = len(xs) - 2, np.random.default_rng(3)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (xs, ws))
    found = run(Prim.CONV, x, w, attrs=a.ConvAttrs((s,) * k, (p,) * k, (p,) * k, (d,) * k, groups), precise=precise)
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[k - 1]
    wanted = conv(torch.tensor(x).double(), torch.tensor(w).double(), None, s, p, d, groups).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-12 if precise else 1e-5)


@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "groups", "extra"), [(2, 1, 1, 1, 1), (3, 0, 2, 2, 2), (1, 2, 1, 4, 0)]
)
def test_transposed_convolution(stride: int, pad: int, dilation: int, groups: int, extra: int) -> None:
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((2, 4, 5, 6)), rng.standard_normal((4, 3, 3, 2))
    two = (pad, pad)
    attrs = a.ConvAttrs((stride,) * 2, two, two, (dilation,) * 2, groups, True, (extra,) * 2)
    wanted = torch.conv_transpose2d(torch.tensor(x), torch.tensor(w), None, stride, pad, extra, groups, dilation)
    np.testing.assert_allclose(run(Prim.CONV, x, w, attrs=attrs), wanted.numpy(), atol=1e-12)


def test_windows() -> None:
    x = np.random.default_rng(5).standard_normal((2, 3, 9, 8)).astype(np.float32)
    w = a.WindowAttrs((3, 2), (2, 1), (1, 0), (1, 1), (2, 1))
    padded = torch.nn.functional.pad(torch.tensor(x), (0, 1, 1, 1), value=-INF)
    wanted = torch.max_pool2d(padded, (3, 2), (2, 1), 0, (2, 1)).numpy()
    assert same(run(Prim.WINDOW_MAX, x, attrs=w), wanted)
    plain = a.WindowAttrs((3, 2), (2, 1), (1, 1), (1, 1), (1, 1))
    mean = torch.nn.functional.avg_pool2d(torch.tensor(x), (3, 2), (2, 1), (1, 1), count_include_pad=True).numpy()
    np.testing.assert_allclose(run(Prim.WINDOW_SUM, x, attrs=plain) / 6, mean, atol=1e-6)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_pads(mode: a.PadMode) -> None:
    x = np.arange(12.0).reshape(3, 4)
    found = run(Prim.PAD, x, attrs=a.PadAttrs((1, 0), (2, 3), mode, 5.0))
    extra: dict[str, Any] = {"constant_values": 5.0} if mode == "constant" else {}
    assert same(found, np.pad(x, [(1, 2), (0, 3)], mode=mode, **extra))


def test_slices_go_backwards() -> None:
    x = np.arange(10)
    assert run(Prim.SLICE, x, attrs=a.SliceAttrs((9,), (4,), (-3,))).tolist() == [9, 6, 3, 0]
    assert run(Prim.SLICE, x, attrs=a.SliceAttrs((1,), (3,), (4,))).tolist() == [1, 5, 9]
    assert run(Prim.SLICE, x, attrs=a.SliceAttrs((3,), (0,), (1,))).tolist() == []


def test_scalars_survive_every_view() -> None:
    x = np.array(2.0)
    assert run(Prim.PAD, x, attrs=a.PadAttrs((), ())).tolist() == 2
    assert run(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs(())).shape == ()
    assert run(Prim.SLICE, x, attrs=a.SliceAttrs((), (), ())).tolist() == 2


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "opaque"])
def test_small_graphs_give_what_they_promise(name: str) -> None:
    graph = GRAPHS[name]()
    inputs = random_inputs(graph)
    for precise in (False, True):
        for i, found in zip(graph.outputs, evaluate(graph, inputs, precise=precise), strict=True):
            type = graph.type_of(i)
            assert found.shape == type.shape
            assert found.dtype == (np.float64 if precise and type.dtype.is_float else type.dtype.numpy)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_native_and_precise_agree_on_random_graphs(seed: int) -> None:
    graph = random_graph(seed, steps=("unary", "binary", "reduce", "broadcast", "transpose", "matmul"))
    inputs = random_inputs(graph, seed)
    native, precise = (map(numbers, evaluate(graph, inputs, precise=x)) for x in (False, True))
    for x, y in zip(native, precise, strict=True):
        assert np.max(np.abs(x - y), initial=0) <= 1e-4 * max(1, np.max(np.abs(y), initial=0)) ** 2


def test_inputs_that_do_not_fit_are_refused() -> None:
    graph = GRAPHS["softmax"]()
    good = random_inputs(graph)[0]
    with pytest.raises(InvalidGraphError, match="0 inputs for a graph that takes 1"):
        evaluate(graph, [])
    for bad in (good[:2], good.astype(np.float64), good.astype(np.int32)):
        with pytest.raises(InvalidGraphError, match=r"input 0 is .* the graph takes 4x128xf32"):
            evaluate(graph, [bad])
    assert evaluate(graph, [good.astype(np.float64)], precise=True)[0].dtype == np.float64


def test_an_opaque_call_runs_once_for_all_its_results() -> None:
    graph = GRAPHS["opaque"]()
    x = random_inputs(graph)[0]
    calls = []

    def top_2(attrs: a.OpaqueAttrs, operands: Any) -> Any:
        calls.append(attrs.op)
        order = np.argsort(-operands[0], axis=-1)[:, :2]
        return [np.take_along_axis(operands[0], order, -1), order]

    values, indices = evaluate(graph, [x], opaque=top_2)
    assert calls == ["aten.topk.default"]
    assert np.array_equal(np.take_along_axis(x, indices.astype(np.int64), 1), values)
    with pytest.raises(UnsupportedError, match=r"aten.topk.default.*no rule \[W201\]"):
        evaluate(graph, [x])


def test_sources_have_no_meaning_of_their_own() -> None:
    with pytest.raises(InvalidGraphError, match="no meaning of their own"):
        MEANING[Prim.INPUT]((), a.NO_ATTRS, TensorType(DType.F32, ()))


def test_dead_nodes_are_not_computed() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2,)))
    b.add(Prim.OPAQUE, x, attrs=a.OpaqueAttrs("aten", "op", "{}", 0, (TensorType(DType.F32, (2,)),)))
    assert evaluate(b.build([x, x]), [f32(1, 2)])[1].tolist() == [1, 2]
