from __future__ import annotations

import pytest
from tests.ir.small_graphs import GRAPHS

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.ir.work import TRANSCENDENTAL, flops, node_bytes, node_flops, node_transcendentals, transcendentals


def one(prim: Prim, *shapes: tuple[int, ...], attrs: a.Attrs = a.NO_ATTRS) -> Graph:
    b = GraphBuilder()
    return b.build([b.add(prim, *(b.input(TensorType(DType.F32, s)) for s in shapes), attrs=attrs)])


def conv(groups: int = 1, transposed: bool = False) -> a.ConvAttrs:
    return a.ConvAttrs((2, 2), (1, 1), (1, 1), (1, 1), groups, transposed, (0, 0) if transposed else ())


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        (one(Prim.ADD, (3, 4), (3, 4)), 12),
        (one(Prim.MATMUL, (5, 2, 3), (3, 7)), 2 * 5 * 2 * 7 * 3),
        (one(Prim.CONV, (1, 4, 8, 8), (6, 4, 3, 3), attrs=conv()), 2 * 6 * 16 * 4 * 9),
        (one(Prim.CONV, (1, 4, 8, 8), (4, 1, 3, 3), attrs=conv(4)), 2 * 4 * 16 * 9),
        (one(Prim.CONV, (1, 4, 8, 8), (4, 3, 3, 3), attrs=conv(2, transposed=True)), 2 * 4 * 64 * 3 * 9),
        (one(Prim.REDUCE_SUM, (3, 4), attrs=a.ReduceAttrs((1,))), 12),
        (one(Prim.WINDOW_MAX, (1, 5), attrs=a.WindowAttrs((3,), (1,), (0,), (0,), (1,))), 9),
        (one(Prim.TRANSPOSE, (3, 4), attrs=a.TransposeAttrs((1, 0))), 0),
    ],
)
def test_flops(graph: Graph, wanted: int) -> None:
    assert flops(graph) == wanted


def test_transcendentals_are_counted_apart() -> None:
    graph = GRAPHS["softmax"]()
    assert transcendentals(graph) == 2 * 4 * 128  # exp and div
    assert flops(graph) == 5 * 4 * 128  # max, sub, exp, sum, div
    assert all(CATEGORY[p] is Category.ELEMENTWISE for p in TRANSCENDENTAL)


def test_transcendentals_are_flops_too() -> None:
    for make in GRAPHS.values():
        graph = make()
        for node in graph.nodes:
            assert node_transcendentals(node, graph) <= node_flops(node, graph)


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        (one(Prim.ADD, (3, 4), (3, 4)), (96, 48)),
        (one(Prim.RESHAPE, (3, 4), attrs=a.ReshapeAttrs((12,))), (0, 0)),
        (one(Prim.SLICE, (30, 4), attrs=a.SliceAttrs((0, 0), (2, 4), (1, 1))), (32, 32)),
    ],
)
def test_bytes(graph: Graph, wanted: tuple[int, int]) -> None:
    assert node_bytes(graph.nodes[-1], graph) == wanted


def test_sources_cost_nothing() -> None:
    graph = GRAPHS["matmul"]()
    for node in graph.nodes:
        if CATEGORY[node.prim] is Category.SOURCE:
            assert node_flops(node, graph) == 0
            assert node_bytes(node, graph) == (0, 0)
