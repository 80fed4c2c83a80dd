"""What kernels are verified on."""

from __future__ import annotations

import pytest

from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.oracle import Evaluation, Mode, evaluate


def _layers(count: int, width: int = 64) -> Graph:
    """Products of f16 with a bias and a rectifier after each."""
    b = GraphBuilder()
    y = b.input(TensorType(DType.F16, (500, width)))
    for _ in range(count):
        y = b.add(Prim.MATMUL, y, b.input(TensorType(DType.F16, (width, width)), is_weight=True))
        y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.input(TensorType(DType.F16, (width,)), is_weight=True)), 0.0)
    return b.build([y])


@pytest.mark.parametrize(("count", "width"), [(3, 256), (5, 64), (8, 128), (24, 32)])
def test_whole_numbers_stay_exact_through_a_chain_of_products(count: int, width: int):
    graph = _layers(count, width)
    inputs = draw(graph, InputSet.INTEGERS, Domain.ZERO_MEAN, seed=3)
    found = evaluate(graph, inputs, Mode.PRECISE, seed=0)
    assert isinstance(found, Evaluation) and found.exact == (True,)
    (y,) = found.outputs
    assert 2 <= float(y.max()) < 2048, "all of them are whole in f16, and not all are zero"
    for weight in inputs[1::2]:
        assert set(weight.unique().tolist()) == {-1.0, 0.0, 1.0}
        assert 1 <= float((weight != 0).double().sum(0).mean()) <= 3


def test_few_products_keep_all_their_terms():
    inputs = draw(_layers(2), InputSet.INTEGERS, Domain.ZERO_MEAN, seed=3)
    assert all(set(x.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0} for x in inputs)
