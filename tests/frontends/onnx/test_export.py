from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from tests.typed import assert_allclose

from weft.errors import UnsupportedError
from weft.frontends.onnx.export import EMITTERS, export_onnx
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import ARITY, CATEGORY, Category, Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType


def run(graph: Any, inputs: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(export_onnx(graph), options, providers=["CPUExecutionProvider"])
    feed = {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return session.run(None, feed)


def check(graph: Any, *inputs: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    for got, want in zip(run(graph, inputs), evaluate(graph, inputs), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert_allclose(got, want, rtol=rtol, atol=atol)


def test_table_is_total() -> None:
    assert set(EMITTERS) == set(Prim)


BOOL_OK = {Prim.NOT, Prim.AND, Prim.OR, Prim.XOR, Prim.EQ, Prim.NE, Prim.MAX, Prim.MIN}
ELEMENTWISE = [p for p in Prim if CATEGORY[p] is Category.ELEMENTWISE and p not in (Prim.CAST, Prim.SELECT)]
SPECIAL = np.array([0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 2.5, -2.5, 1e-6, -1e-6, np.nan, np.inf, -np.inf, 40.0], np.float32)
ONE_SIDED = {Prim.ACOSH: (1, 9), Prim.ASIN: (-1, 1), Prim.ACOS: (-1, 1), Prim.ATANH: (-0.9, 0.9)}


@pytest.mark.parametrize("prim", ELEMENTWISE, ids=lambda p: p.value)
def test_elementwise(prim: Prim) -> None:
    b = GraphBuilder()
    bitwise = prim in (Prim.AND, Prim.OR, Prim.XOR, Prim.NOT, Prim.SHL, Prim.SHR)
    rng = np.random.default_rng(3)
    if bitwise:
        data = [rng.integers(0, 20, 12, dtype=np.int32) for _ in range(2)]
    else:
        lo, hi = ONE_SIDED.get(prim, (-3, 3))
        data = [rng.uniform(lo, hi, 12).astype(np.float32) for _ in range(2)]
        if prim in (
            Prim.MAX,
            Prim.MIN,
            Prim.ABS,
            Prim.NEG,
            Prim.LT,
            Prim.EQ,
            Prim.TRUNC,
            Prim.ROUND,
            Prim.ISNAN,
            Prim.ISINF,
            Prim.EXPM1,
            Prim.LOG1P,
            Prim.SIGN,
        ):
            data = [np.concatenate([data[0], SPECIAL]), np.concatenate([data[1], SPECIAL[::-1]])]
        if prim is Prim.POW:
            data[0] = np.abs(data[0])
    arity = ARITY[prim]
    data = data[:arity]
    nodes = [b.input(TensorType(DType.from_numpy(x.dtype), x.shape)) for x in data]
    check(b.build([b.add(prim, *nodes)]), *data)


@pytest.mark.parametrize("dtype", [DType.I8, DType.U8, DType.I32, DType.I64, DType.F16], ids=lambda d: d.value)
@pytest.mark.parametrize("prim", [Prim.ADD, Prim.MUL, Prim.MOD, Prim.MAX, Prim.LT], ids=lambda p: p.value)
def test_other_types(prim: Prim, dtype: DType) -> None:
    b = GraphBuilder()
    x = np.array([1, 2, 3, 5, 7, 9]).astype(dtype.numpy)
    y = np.array([3, 2, 2, 3, 4, 4]).astype(dtype.numpy)
    nodes = [b.input(TensorType(dtype, (6,))) for _ in range(2)]
    check(b.build([b.add(prim, *nodes)]), x, y)


def test_negative_modulo() -> None:
    b = GraphBuilder()
    nodes = [b.input(TensorType(DType.F32, (4,))) for _ in range(2)]
    x, y = np.array([5, -5, 5, -5], np.float32), np.array([3, 3, -3, -3], np.float32)
    check(b.build([b.add(Prim.MOD, *nodes), b.add(Prim.FMOD, *nodes)]), x, y)


def test_index_space() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3, 4)), "x")
    outs = [
        b.slice(x, (2, 3), (3, 2), (-1, -2)),
        b.slice(x, (0, 1), (3, 0), (1, 1)),
        b.transpose(x, (1, 0)),
        b.reshape(x, (2, 6)),
        b.broadcast(x, (2, 3, 4)),
        b.add(Prim.CONCAT, x, x, attrs=a.ConcatAttrs(1)),
        b.add(Prim.PAD, x, attrs=a.PadAttrs((1, 0), (0, 2), "constant", 2.5)),
        b.add(Prim.PAD, x, attrs=a.PadAttrs((1, 0), (0, 2), "reflect")),
        b.iota((2, 3), 1, DType.F32),
        b.add(Prim.ARGMAX, x, attrs=a.ArgAttrs(1)),
        x,
    ]
    check(b.build(outs, ["x"] * len(outs)), np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))


def test_gather_clamps() -> None:
    b = GraphBuilder()
    x, i = b.input(TensorType(DType.F32, (5, 2))), b.input(TensorType(DType.I64, (3,)))
    graph = b.build([b.add(Prim.GATHER, x, i, attrs=a.GatherAttrs(0))])
    check(graph, np.arange(10, dtype=np.float32).reshape(5, 2), np.array([0, 9, 4]))


@pytest.mark.parametrize(
    "prim", [Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN], ids=lambda p: p.value
)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (2, 0)])
def test_reductions(prim: Prim, shape: tuple[int, int]) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, shape))
    graph = b.build([b.reduce(prim, x, (0,))])
    data = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    if data.size:
        data[0, 0] = np.nan
    check(graph, data)


@pytest.mark.parametrize("prim", [Prim.WINDOW_SUM, Prim.WINDOW_MAX], ids=lambda p: p.value)
@pytest.mark.parametrize("dtype", [DType.F32, DType.I32, DType.F16], ids=lambda d: d.value)
def test_windows(prim: Prim, dtype: DType) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (2, 7, 6)))
    graph = b.build([b.add(prim, x, attrs=a.WindowAttrs((3, 2), (2, 1), (1, 0), (2, 1), (1, 2)))])
    check(graph, np.random.default_rng(2).integers(-9, 9, (2, 7, 6)).astype(dtype.numpy))


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed: bool) -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (1, 4, 7, 6))), b.input(TensorType(DType.F32, (4, 2, 3, 3)))
    extra = (1, 0) if transposed else ()
    attrs = a.ConvAttrs((2, 1), (1, 0), (0, 1), (1, 2), 2, transposed, extra)
    rng = np.random.default_rng(4)
    data = [rng.normal(size=s).astype(np.float32) for s in ((1, 4, 7, 6), (4, 2, 3, 3))]
    check(b.build([b.add(Prim.CONV, x, w, attrs=attrs)]), *data, rtol=1e-4, atol=1e-5)


def test_select_and_bool() -> None:
    b = GraphBuilder()
    c, x, y = (b.input(TensorType(d, (4,))) for d in (DType.BOOL, DType.I8, DType.I8))
    graph = b.build([b.add(Prim.SELECT, c, x, y), b.add(Prim.SELECT, c, b.add(Prim.NOT, c), c), b.add(Prim.EQ, c, c)])
    check(graph, np.array([True, False, True, False]), np.arange(4, dtype=np.int8), -np.arange(4, dtype=np.int8))


def test_what_is_declined() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (2,)))
    with pytest.raises(UnsupportedError, match="bf16"):
        export_onnx(b.build([b.add(Prim.EXP, x)]))
