from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from tests.runtime.plans import executable
from tests.tune.cases import problem
from tests.typed import assert_allclose

from weft.generate.library import opaque_aten
from weft.generate.library.execute import BoundCall
from weft.generate.library.translate import TRANSLATE, Program
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import ARITY, CATEGORY, Category, Prim
from weft.ir.reference import evaluate
from weft.ir.shapes import SHAPE_RULES
from weft.ir.types import DType, TensorType
from weft.kernels.source import Schedule
from weft.pipeline.reference import primitive_by_primitive

F32, I64, I32, BOOL = DType.F32, DType.I64, DType.I32, DType.BOOL
INTEGER_ONLY = {Prim.SHL, Prim.SHR, Prim.AND, Prim.OR, Prim.XOR, Prim.NOT}


def test_every_primitive_has_a_row() -> None:
    assert set(TRANSLATE) == set(Prim) == set(SHAPE_RULES)


def check(graph: Graph, *arrays: np.ndarray, rtol: float = 2e-6) -> None:
    want = evaluate(graph, list(arrays))
    got = executable(graph)(*[torch.from_numpy(x) for x in arrays])
    for g, w in zip(got, want, strict=True):
        assert g.numpy().dtype == w.dtype and g.shape == w.shape
        assert_allclose(g.numpy(), w, rtol=rtol, atol=1e-6)


ELEMENTWISE = [p for p in Prim if CATEGORY[p] is Category.ELEMENTWISE and p not in (Prim.CAST, Prim.SELECT)]


@pytest.mark.parametrize("prim", ELEMENTWISE, ids=lambda p: p.value)
def test_elementwise(prim: Prim) -> None:
    rng = np.random.default_rng(0)
    dtype = I32 if prim in INTEGER_ONLY else F32
    b = GraphBuilder()
    ids = [b.input(TensorType(dtype, (3, 5))) for _ in range(ARITY[prim] or 0)]
    graph = b.build([b.add(prim, *ids)])
    if dtype is I32:
        arrays = [rng.integers(0, 9, (3, 5)).astype(np.int32) for _ in ids]
    else:
        low = 1.1 if prim is Prim.ACOSH else 0.05
        arrays = [rng.uniform(low, low + 0.9, (3, 5)).astype(np.float32) for _ in ids]
    check(graph, *arrays)


@pytest.mark.parametrize("prim", [Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.MOD, Prim.FMOD, Prim.MAX, Prim.MIN])
def test_integer_arithmetic(prim: Prim) -> None:
    b = GraphBuilder()
    x, y = (b.input(TensorType(I32, (4,))) for _ in range(2))
    check(b.build([b.add(prim, x, y)]), np.array([-7, 7, -7, 7], np.int32), np.array([2, 2, -2, -2], np.int32))


def test_sign_keeps_nan() -> None:
    b = GraphBuilder()
    graph = b.build([b.add(Prim.SIGN, b.input(TensorType(F32, (3,))))])
    got = executable(graph)(torch.tensor([float("nan"), -2.0, 0.0]))[0]
    assert torch.isnan(got[0]) and got[1:].tolist() == [-1.0, 0.0]


def one(attrs: a.Attrs, prim: Prim, *types: TensorType) -> Graph:
    b = GraphBuilder()
    return b.build([b.add(prim, *[b.input(t) for t in types], attrs=attrs)])


X = TensorType(F32, (2, 3, 6, 5))
CASES: dict[str, tuple[Prim, a.Attrs, tuple[TensorType, ...]]] = {
    "transpose": (Prim.TRANSPOSE, a.TransposeAttrs((0, 2, 3, 1)), (X,)),
    "slice": (Prim.SLICE, a.SliceAttrs((1, 0, 5, 0), (1, 3, 3, 2), (1, 1, -2, 3)), (X,)),
    "empty slice": (Prim.SLICE, a.SliceAttrs((0, 0, 0, 0), (2, 0, 6, 5), (1, 1, 1, 1)), (X,)),
    "concat": (Prim.CONCAT, a.ConcatAttrs(1), (X, X)),
    "pad constant": (Prim.PAD, a.PadAttrs((0, 0, 1, 2), (0, 1, 0, 3), "constant", 0.5), (X,)),
    "pad reflect": (Prim.PAD, a.PadAttrs((0, 0, 1, 2), (0, 0, 0, 3), "reflect"), (X,)),
    "pad reflect channels": (Prim.PAD, a.PadAttrs((0, 1, 1, 2), (0, 2, 0, 3), "reflect"), (X,)),
    "pad edge": (Prim.PAD, a.PadAttrs((0, 0, 1, 2), (0, 0, 0, 3), "edge"), (X,)),
    "sum": (Prim.REDUCE_SUM, a.ReduceAttrs((1, 3)), (X,)),
    "prod": (Prim.REDUCE_PROD, a.ReduceAttrs((1, 3)), (X,)),
    "max": (Prim.REDUCE_MAX, a.ReduceAttrs((0, 2)), (X,)),
    "min of nothing": (Prim.REDUCE_MIN, a.ReduceAttrs((0,)), (TensorType(F32, (0, 3)),)),
    "argmax": (Prim.ARGMAX, a.ArgAttrs(2), (X,)),
    "argmin": (Prim.ARGMIN, a.ArgAttrs(0), (X,)),
    "window max": (Prim.WINDOW_MAX, a.WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1)), (X,)),
    "window max wide pad": (Prim.WINDOW_MAX, a.WindowAttrs((2, 2), (1, 1), (2, 1), (1, 0), (1, 1)), (X,)),
    "window max dilated": (Prim.WINDOW_MAX, a.WindowAttrs((2, 2), (1, 1), (0, 1), (1, 0), (2, 1)), (X,)),
    "window sum": (Prim.WINDOW_SUM, a.WindowAttrs((3, 2), (1, 2), (1, 1), (1, 1), (1, 1)), (X,)),
    "window sum 1d": (Prim.WINDOW_SUM, a.WindowAttrs((3,), (1,), (1,), (0,), (2,)), (TensorType(F32, (2, 9)),)),
    "matmul": (Prim.MATMUL, a.NO_ATTRS, (TensorType(F32, (2, 1, 3, 4)), TensorType(F32, (5, 4, 2)))),
    "conv": (Prim.CONV, a.ConvAttrs((2, 1), (1, 0), (1, 2), (1, 1)), (X, TensorType(F32, (4, 3, 3, 2)))),
    "conv groups": (Prim.CONV, a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 2), 3), (X, TensorType(F32, (6, 1, 3, 3)))),
    "conv transposed": (
        Prim.CONV,
        a.ConvAttrs((2, 2), (1, 0), (1, 0), (1, 1), 1, transposed=True, output_padding=(1, 0)),
        (X, TensorType(F32, (3, 4, 3, 3))),
    ),
    "conv transposed uneven": (
        Prim.CONV,
        a.ConvAttrs((2, 2), (1, 0), (0, 2), (1, 1), 1, transposed=True, output_padding=(0, 0)),
        (X, TensorType(F32, (3, 4, 3, 3))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_index_space_and_contractions(name: str) -> None:
    prim, attrs, types = CASES[name]
    rng = np.random.default_rng(1)
    check(one(attrs, prim, *types), *[rng.standard_normal(t.shape).astype(np.float32) for t in types], rtol=2e-5)


def test_gather_clamps_and_keeps_the_shape_of_its_indices() -> None:
    b = GraphBuilder()
    data, index = b.input(TensorType(F32, (4, 3))), b.input(TensorType(I64, (2, 2)))
    graph = b.build([b.add(Prim.GATHER, data, index, attrs=a.GatherAttrs(0))])
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    check(graph, x, np.array([[0, 3], [2, 9]]))


def test_take_along() -> None:
    b = GraphBuilder()
    data, index = b.input(TensorType(F32, (4, 3))), b.input(TensorType(I64, (2, 3)))
    graph = b.build([b.add(Prim.TAKE_ALONG, data, index, attrs=a.GatherAttrs(0))])
    check(graph, np.arange(12, dtype=np.float32).reshape(4, 3), np.array([[0, 3, 1], [2, 0, 0]]))


def test_select_iota_and_free_outputs() -> None:
    b = GraphBuilder()
    c, x = b.input(TensorType(BOOL, (2, 3))), b.input(TensorType(F32, (2, 3)))
    y = b.apply(Prim.SELECT, c, x, b.apply(Prim.NEG, x))
    counted = b.iota((2, 3), 1, F32)
    graph = b.build([b.reshape(y, (3, 2)), b.broadcast(y, (4, 2, 3)), counted, x, b.scalar(2.5, F32)])
    check(graph, np.array([[True, False, True]] * 2), np.arange(6, dtype=np.float32).reshape(2, 3))


def test_a_join_of_what_other_steps_compute() -> None:
    b = GraphBuilder()
    x, y = (b.input(TensorType(F32, (n,))) for n in (2, 3))
    grid = [
        b.reshape(b.broadcast(b.reshape(v, (n, 1) if k == 0 else (1, n)), (2, 3)), (6, 1))
        for k, (v, n) in enumerate(((x, 2), (y, 3)))
    ]
    graph = b.build([b.add(Prim.CONCAT, *grid, attrs=a.ConcatAttrs(1))])
    program = Program(graph)
    call = program.finish(Schedule("library", (("form", "primitives"),)), problem(graph))
    assert call.out_variant
    given = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    out = torch.full((6, 2), -1.0)
    BoundCall(call, {}).launcher(given, [out])()
    torch.testing.assert_close(out, torch.cartesian_prod(*given))


def test_an_opaque_onnx_operator_on_bf16() -> None:
    """It takes and gives f32, because NumPy has no bf16; around it the values are bf16."""
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    one = helper.make_graph(nodes, "one", [info("x", kind, [3])], [info("y", kind, [3])])
    model = helper.make_model(one, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    payload = json.dumps({"model": base64.b64encode(model).decode()})
    bf16 = TensorType(DType.BF16, (3,))
    b = GraphBuilder()
    y = b.add(Prim.OPAQUE, b.input(bf16), attrs=a.OpaqueAttrs("onnx", "onnx::Twice", payload, 0, (bf16,), "a test"))
    graph = b.build([b.apply(Prim.NEG, y), y])
    x = torch.tensor([1.0, -2.5, 3.0], dtype=torch.bfloat16)
    for found in (primitive_by_primitive(graph, [x]), executable(graph)(x)):
        assert [f.dtype for f in found] == [torch.bfloat16] * 2
        assert [f.tolist() for f in found] == [[-2.0, 5.0, -6.0], [2.0, -5.0, 6.0]]


def test_an_operator_of_several_results_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both are read: a sort has its values and their places."""
    types = (TensorType(F32, (2, 3)), TensorType(I64, (2, 3)))
    payload = json.dumps({"op": "aten::sort", "overload": "", "args": [{"tensor": 0}, 1], "kwargs": {}})
    b = GraphBuilder()
    x = b.input(types[0])
    made = [b.add(Prim.OPAQUE, x, attrs=a.OpaqueAttrs("aten", "sort", payload, k, types, "a test")) for k in (0, 1)]
    other = b.add(Prim.OPAQUE, b.apply(Prim.NEG, x), attrs=a.OpaqueAttrs("aten", "sort", payload, 1, types, "a test"))
    graph = b.build([b.apply(Prim.NEG, made[0]), made[1], made[0], other])
    calls: list[str] = []
    run = opaque_aten.run_aten

    def counted(payload: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(payload)
        return run(payload, inputs)

    monkeypatch.setattr(opaque_aten, "run_aten", counted)
    given = torch.tensor([[3.0, 1.0, 2.0], [5.0, 4.0, 6.0]])
    values, places = given.sort(1)
    call = Program(graph).finish(Schedule("library", (("form", "primitives"),)), problem(graph))
    outs = [torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int64), torch.empty(2, 3), torch.empty(2, 3).long()]
    BoundCall(call, {}).launcher([given], outs)()
    assert len(calls) == 2  # of two different tensors
    for found in (outs, BoundCall(call, {}).run([given]), executable(graph)(given)):
        for got, want in zip(found, (-values, places, values, (-given).sort(1)[1]), strict=True):
            torch.testing.assert_close(got, want)
