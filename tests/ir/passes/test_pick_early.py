"""Elements of rows that are read behind sums over the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.passes.pick_early import DEPTH, FEWER
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType, TensorType

ROWS, COLUMNS = 3, 2 * FEWER


def logarithms(b: GraphBuilder, x: NodeId, axis: int) -> NodeId:
    """Of the softmax along an axis."""
    shape = b.type_of(x).shape
    y = b.apply(Prim.SUB, x, b.broadcast(b.reduce(Prim.REDUCE_MAX, x, (axis,)), shape))
    total = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.EXP, y), (axis,))
    return b.apply(Prim.SUB, y, b.broadcast(b.apply(Prim.LOG, total), shape))


def picked(
    made: Callable[[GraphBuilder, NodeId], NodeId] = lambda b, x: logarithms(b, x, 1),
    *,
    shape: tuple[int, ...] = (ROWS, COLUMNS),
    axis: int = 1,
    each: int = 1,
    also: Callable[[GraphBuilder, NodeId], list[NodeId]] = lambda b, y: [],
    dtype: DType = DType.F32,
) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(dtype, shape))
    index = b.input(TensorType(DType.I64, tuple(each if k == axis else n for k, n in enumerate(shape))))
    y = made(b, b.cast(x, DType.F32))
    found = b.add(Prim.TAKE_ALONG, y, index, attrs=a.GatherAttrs(axis))
    return b.build([found, *also(b, y)])


def source_of(graph: Graph) -> list[int]:
    """What elements are picked from: numbers of the nodes."""
    return [n.inputs[0] for n in graph.nodes if n.prim is Prim.TAKE_ALONG]


def is_moved(graph: Graph) -> bool:
    """Whether elements are picked from the input itself, as its bits are the same as before, for all of them."""
    cleaned = clean_up(graph, strict=True, verify=True).graph
    rng = np.random.default_rng(0)
    types = [graph.type_of(n) for n in graph.inputs]
    x = rng.standard_normal(types[0].shape) * 4
    x.flat[5], x.flat[COLUMNS + 1] = np.nan, np.inf
    index = rng.integers(0, types[0].shape[1], types[1].shape)
    given: list[Array] = [x.astype(np.float32), index.astype(np.int64)]
    with np.errstate(all="ignore"):
        for before, after in zip(evaluate(graph, given), evaluate(cleaned, given), strict=True):
            assert np.array_equal(after, before, equal_nan=True)
    return source_of(cleaned) == [cleaned.inputs[0]]


def test_one_of_a_row_is_picked_from_what_the_sums_read() -> None:
    graph = picked()
    assert is_moved(graph)
    cleaned = clean_up(graph).graph
    wide = [n.prim for n in cleaned.nodes if n.type.shape == (ROWS, COLUMNS) and n.prim is Prim.SUB]
    assert len(wide) == 1, "the logarithms of the others are computed by nobody"


def test_of_narrower_rows_the_narrow_ones_are_read() -> None:
    b = picked(dtype=DType.F16)
    cleaned = clean_up(b).graph
    assert source_of(cleaned) == [cleaned.inputs[0]]


def test_along_the_channels_of_images() -> None:
    assert is_moved(picked(lambda b, x: logarithms(b, x, 1), shape=(2, 100, 2, 3)))


def test_what_reads_the_rest_elementwise_does_not_matter() -> None:
    def gradient(b: GraphBuilder, y: NodeId) -> list[NodeId]:
        return [b.apply(Prim.EXP, y)]

    assert is_moved(picked(also=gradient))


def normalised(b: GraphBuilder, x: NodeId) -> NodeId:
    return b.apply(Prim.MUL, x, x)


def deep(b: GraphBuilder, x: NodeId) -> NodeId:
    y = logarithms(b, x, 1)
    for _ in range(DEPTH):
        y = b.apply(Prim.TANH, y)
    return y


def over_columns(b: GraphBuilder, x: NodeId) -> NodeId:
    total = b.reduce(Prim.REDUCE_SUM, x, (0,))
    return b.apply(Prim.SUB, x, b.broadcast(total, b.type_of(x).shape))


def multiplied(b: GraphBuilder, y: NodeId) -> list[NodeId]:
    return [b.add(Prim.MATMUL, y, b.constant(np.ones((COLUMNS, 2), np.float32)))]


LEFT = {
    "few columns": lambda: picked(shape=(ROWS, FEWER - 1)),
    "several of a row": lambda: picked(each=3),
    "no sum in front": lambda: picked(normalised),
    "a sum over the other axis": lambda: picked(over_columns),
    "many primitives": lambda: picked(deep),
    "a result": lambda: picked(also=lambda b, y: [y]),
    "a product reads it": lambda: picked(also=multiplied),
    "a part of it is read": lambda: picked(also=lambda b, y: [b.slice(y, (0, 0), (1, 4), (1, 1))]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name: str) -> None:
    assert not is_moved(LEFT[name]())
