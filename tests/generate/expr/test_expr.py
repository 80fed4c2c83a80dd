"""The expression emitter: total, exact literals, one statement per primitive."""

from __future__ import annotations

import numpy as np
import pytest

from weft.generate.expr import ELEMENTWISE, Value, elementwise, emit_expression, literal
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType


def test_the_table_is_total() -> None:
    assert set(ELEMENTWISE) == {p for p in Prim if CATEGORY[p] is Category.ELEMENTWISE}


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.5, DType.F32, "0.5f"),
        (1e-5, DType.F64, "1e-05"),
        (-2.0, DType.F32, "(-2.0f)"),
        (float("inf"), DType.F32, "__builtin_inff()"),
        (float("nan"), DType.F64, '__builtin_nan("")'),
        (-(2**63), DType.I64, "(-9223372036854775807LL-1)"),
        (-(2**31), DType.I32, "(-2147483647-1)"),
        (True, DType.BOOL, "true"),
        (7, DType.U8, "((w_u8)7)"),
    ],
)
def test_literals(value: float, dtype: DType, text: str) -> None:
    assert literal(value, dtype) == text


def test_float_literals_read_back_exactly() -> None:
    for x in np.random.default_rng(0).standard_normal(200).astype(np.float32):
        assert np.float32(literal(float(x), DType.F32).strip("()f")) == x


def test_scalars_are_splat_beside_vectors() -> None:
    x, y = Value("x", DType.F32, vector=True), Value("y", DType.F32)
    assert elementwise(Prim.ADD, [x, y], DType.F32) == ("(x + w_splat_f32(y))", True)
    assert elementwise(Prim.ADD, [y, y], DType.F32) == ("(y + y)", False)


def test_integers_wrap_and_bools_compare_by_logic() -> None:
    x = Value("x", DType.I32)
    assert elementwise(Prim.MUL, [x, x], DType.I32)[0] == "w_mul(x, x)"
    p, q = Value("p", DType.BOOL, vector=True), Value("q", DType.BOOL, vector=True)
    assert elementwise(Prim.LT, [p, q], DType.BOOL)[0] == "((~p) & q)"


def test_a_maximum_with_a_constant_is_one_instruction() -> None:
    x, zero = Value("x", DType.F32), Value("0.0f", DType.F32, constant=0.0)
    assert elementwise(Prim.MAX, [zero, x], DType.F32)[0] == "w_max_const(x, 0.0f)"
    nan = Value("n", DType.F32, constant=float("nan"))
    assert elementwise(Prim.MAX, [x, nan], DType.F32)[0] == "w_max(x, n)"


def test_a_tree_is_printed_once_per_node() -> None:
    b = GraphBuilder()
    x, y = b.input(TensorType(DType.F32, (4,))), b.input(TensorType(DType.F32, (4,)))
    s = b.apply(Prim.ADD, x, y)
    graph = b.build([b.apply(Prim.MUL, b.apply(Prim.EXP, s), b.apply(Prim.MAX, s, 0.0))])
    names = {x: Value("acc", DType.F32, vector=True), y: Value("bias", DType.F32)}

    def load(node: NodeId) -> Value:
        return names[node]

    found = emit_expression(graph, graph.outputs[0], load)
    assert found.statements == (
        "const w_f32v e2 = (acc + w_splat_f32(bias));",
        "const w_f32v e3 = w_exp(e2);",
        "const w_f32v e6 = w_max_const(e2, w_splat_f32(0.0f));",
        "const w_f32v e7 = (e3 * e6);",
    )
    assert found.result == Value("e7", DType.F32, vector=True)
    names[s] = Value("sum", DType.F32)
    assert emit_expression(graph, graph.outputs[0], load).statements[0] == "const w_f32 e3 = w_exp(sum);"


def test_what_cannot_be_loaded_is_an_error() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4,)))
    graph = b.build([b.apply(Prim.EXP, b.transpose(b.reshape(x, (2, 2)), (1, 0)))])
    with pytest.raises(KeyError):
        emit_expression(graph, graph.outputs[0], dict[NodeId, Value]().__getitem__)
