"""What one call of a GPU's libraries covers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft import fission
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import FREE, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.legality import EnumerationLimits


def calls_of(graph: Graph) -> set[tuple[str, ...]]:
    """The primitives of every set, in order."""
    found = enumerate_candidates(graph, EnumerationLimits(library_calls=True)).candidates
    members = [c.members for c in found if c.kind is Kind.CALL]
    return {tuple(graph.nodes[m].prim.value for m in bits(x)) for x in members}


def weight(b: GraphBuilder, *shape: int) -> NodeId:
    return b.constant(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float16))


def product(b: GraphBuilder) -> NodeId:
    x = b.input(TensorType(DType.F16, (2, 5, 32)))
    y = b.add(Prim.MATMUL, b.reshape(x, (10, 32)), weight(b, 32, 24))
    return b.reshape(y, (2, 5, 24))


def biased(b: GraphBuilder) -> NodeId:
    return b.apply(Prim.ADD, product(b), b.broadcast(weight(b, 24), (2, 5, 24)))


def relu(b: GraphBuilder, x: NodeId) -> NodeId:
    (found,) = fission.apply(b, "relu", [x], {})  # type: ignore[misc]
    return found


def test_a_product_with_bias_residual_and_activation() -> None:
    b = GraphBuilder()
    added = b.apply(Prim.ADD, biased(b), b.input(TensorType(DType.F16, (2, 5, 24))))
    graph = b.build([relu(b, added)])
    assert calls_of(graph) == {
        ("matmul", "add"),
        ("matmul", "add", "add"),
        ("matmul", "add", "add", *relu_names()),
    }


def relu_names() -> list[str]:
    b = GraphBuilder()
    graph = b.build([relu(b, b.input(TensorType(DType.F16, (3,))))])
    return [n.prim.value for n in graph.nodes if n.prim not in FREE and n.prim is not Prim.INPUT]


def test_what_others_read_is_no_part_of_a_call() -> None:
    b = GraphBuilder()
    y = product(b)
    graph = b.build([b.apply(Prim.ADD, y, b.broadcast(weight(b, 24), (2, 5, 24))), b.apply(Prim.EXP, y)])
    assert calls_of(graph) == set()


def test_a_result_of_the_graph_is_no_part_of_a_call() -> None:
    b = GraphBuilder()
    y = product(b)
    graph = b.build([b.apply(Prim.ADD, y, b.broadcast(weight(b, 24), (2, 5, 24))), y])
    assert calls_of(graph) == set()


@pytest.mark.parametrize("several", [False, True])
def test_views_are_strides_of_whoever_reads_them(several: bool) -> None:
    b = GraphBuilder()
    x = b.transpose(b.reshape(b.input(TensorType(DType.F16, (2, 5, 24))), (2, 5, 3, 8)), (0, 2, 1, 3))
    outputs = [b.apply(Prim.EXP, x), b.apply(Prim.ABS, x)]
    graph = b.build(outputs if several else outputs[:1])
    assert calls_of(graph) == ({("transpose", "exp"), ("transpose", "abs")} if several else {("transpose", "exp")})


def test_an_operator_keeps_its_name_behind_views() -> None:
    from weft.kernels.formats import Format
    from weft.orchestrate.extract import extract

    b = GraphBuilder()
    x = b.transpose(b.input(TensorType(DType.F16, (4, 6))), (1, 0))
    (y,) = fission.apply(b, "softmax", [x], {"axis": -1})  # type: ignore[misc]
    graph = b.build([y])
    found = enumerate_candidates(graph, EnumerationLimits(library_calls=True)).candidates
    (call,) = (c for c in found if c.kind is Kind.CALL and c.outputs == graph.outputs and len([*bits(c.members)]) > 2)
    problem = extract(graph, call, (Format.ROW,), (Format.ROW,)).problem
    assert problem.origin_rule == "softmax"
    (operand,) = problem.origin_operand_nodes
    assert problem.graph.nodes[operand].prim is Prim.TRANSPOSE


def between(of: DType, to: DType) -> Callable[[GraphBuilder], NodeId]:
    def make(b: GraphBuilder) -> NodeId:
        x = b.cast(b.input(TensorType(of, (3, 4))), DType.F32)
        return b.cast(b.apply(Prim.MUL, x, b.broadcast(b.scalar(0.3, DType.F32), (3, 4))), to)

    return make


def test_a_factor_in_f32_between_casts_is_one_call() -> None:
    b = GraphBuilder()
    assert ("cast", "mul", "cast") in calls_of(b.build([between(DType.F16, DType.F16)(b)]))
    b = GraphBuilder()
    assert calls_of(b.build([between(DType.F16, DType.I32)(b)])) == set()


def test_the_search_knows_nothing_of_them() -> None:
    b = GraphBuilder()
    graph = b.build([relu(b, biased(b))])
    with_calls = enumerate_candidates(graph, EnumerationLimits(library_calls=True)).candidates
    without = enumerate_candidates(graph, EnumerationLimits()).candidates
    assert tuple(c for c in with_calls if c.kind is not Kind.CALL) == without
    assert any(c.kind is Kind.CALL for c in with_calls)
