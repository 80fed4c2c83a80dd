"""Halves of one product that gate each other: two products, each finished where it is made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.orchestrate.graphs import normal
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.fission.gelu import gelu
from weft.fission.sigmoid import sigmoid, silu
from weft.generate.cuda import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract

H = 16
Activation = Callable[[GraphBuilder, NodeId], NodeId | Declined]


def activated(b: GraphBuilder, x: NodeId, activation: Activation) -> NodeId:
    y = activation(b, x)
    assert not isinstance(y, Declined)
    return y


def part(b: GraphBuilder, y: NodeId, lo: int, size: int, axis: int = -1) -> NodeId:
    shape = list(b.type_of(y).shape)
    axis %= len(shape)
    starts = [lo if i == axis else 0 for i in range(len(shape))]
    shape[axis] = size
    return b.slice(y, starts, shape, (1,) * len(shape))


def linear(
    b: GraphBuilder,
    *,
    rows: tuple[int, ...] = (2, 10),
    bias: bool = True,
    dtype: DType = DType.F32,
    columns: int = 2 * H,
) -> NodeId:
    """x @ W + b, through rows that are one dimension, as `torch.nn.Linear` becomes."""
    x = b.input(TensorType(dtype, (*rows, 24)))
    count = int(np.prod(rows))
    w = b.constant(normal(b, 24, columns).astype(dtype.numpy))
    y = b.reshape(b.add(Prim.MATMUL, b.reshape(x, (count, 24)), w), (*rows, columns))
    if not bias:
        return y
    return b.add(Prim.ADD, y, b.broadcast(b.constant(normal(b, columns).astype(dtype.numpy)), b.type_of(y).shape))


def gated(activation: Activation, **how: object) -> Graph:
    b = GraphBuilder()
    y = linear(b, **how)  # type: ignore[arg-type]
    return b.build([b.apply(Prim.MUL, activated(b, part(b, y, 0, H), activation), part(b, y, H, H))])


def convolved(channels: int = 8, groups: int = 1) -> Graph:
    """The halves of a convolution's channels, multiplied; the second stands first in the product."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, channels, 7, 9)))
    w = b.constant(normal(b, 2 * H, channels // groups, 3, 3).astype(np.float32))
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), groups))
    y = b.apply(Prim.ADD, y, b.constant(normal(b, 2 * H, 1, 1).astype(np.float32)))
    return b.build([b.apply(Prim.MUL, part(b, y, H, H, 1), activated(b, part(b, y, 0, H, 1), sigmoid))])


GATES = {
    "swiglu": gated(silu),
    "geglu": gated(gelu),
    "glu, no bias": gated(sigmoid, bias=False),
    "one matrix": gated(silu, rows=(20,)),
    "convolution": convolved(),
}


def products(found: Alternatives) -> list[int]:
    return [i for i in bits(found.extra) if found.graph.nodes[i].prim in (Prim.MATMUL, Prim.CONV)]


@pytest.mark.parametrize("name", list(GATES))
def test_both_halves_are_products_with_the_same_numbers(name: str) -> None:
    found = find_alternatives(GATES[name])
    verify_graph(found.graph)
    assert len(found.classes) == len(products(found)) == 2
    assert found.versions == 2  # both at once
    graph = found.graph
    whole = Graph(graph.nodes, graph.inputs, tuple(range(len(graph))), graph.constants)
    x = np.random.default_rng(3).normal(size=graph.type_of(0).shape).astype(np.float32)
    values = evaluate(whole, [x], precise=True)
    for extra, original in found.classes.items():
        assert graph.nodes[original].prim is Prim.SLICE
        assert_allclose(values[extra], values[original], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("activation", [silu, gelu])
def test_a_template_finishes_the_gate_in_a_product(activation: Activation) -> None:
    """The kernel of the second product holds all that follows, and reads the first."""
    graph = gated(activation, rows=(64,), dtype=DType.F16)
    found = find_alternatives(graph)
    taken = set()
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        kinds = {found.graph.nodes[m].prim for m in bits(c.members)}
        if c.outputs != found.graph.outputs or Prim.MATMUL not in kinds:
            continue
        ends = len(c.outputs)
        p = extract(found.graph, c, [Format.ROW] * len(c.inputs), [Format.ROW] * ends, found).problem
        schedules = templates.schedules(p, GpuFacts())
        assert not isinstance(schedules, Declined), schedules.reason
        taken |= {s.param("template") for s in schedules}
        assert Prim.SLICE not in kinds
    assert taken >= {"mma", "tma"}


def three() -> Graph:
    b = GraphBuilder()
    y = linear(b, columns=3 * H)
    return b.build([b.apply(Prim.MUL, b.apply(Prim.MUL, part(b, y, 0, H), part(b, y, H, H)), part(b, y, 2 * H, H))])


def apart() -> Graph:
    b = GraphBuilder()
    y = linear(b)
    return b.build([activated(b, part(b, y, 0, H), silu), b.apply(Prim.EXP, part(b, y, H, H))])


def unequal() -> Graph:
    b = GraphBuilder()
    y = linear(b)
    left = b.reduce(Prim.REDUCE_SUM, part(b, y, 0, 4), [2])
    return b.build([b.apply(Prim.MUL, part(b, y, 4, 2 * H - 4), left)])


def read_whole() -> Graph:
    b = GraphBuilder()
    y = linear(b)
    return b.build([b.apply(Prim.MUL, part(b, y, 0, H), part(b, y, H, H)), y])


def overlapping() -> Graph:
    b = GraphBuilder()
    y = linear(b)
    return b.build([b.apply(Prim.MUL, part(b, y, 0, H), part(b, y, H - 2, H))])


def by_rows() -> Graph:
    b = GraphBuilder()
    y = linear(b)
    return b.build([b.apply(Prim.MUL, part(b, y, 0, 5, 1), part(b, y, 5, 5, 1))])


def no_constant() -> Graph:
    b = GraphBuilder()
    y = b.add(Prim.MATMUL, b.input(TensorType(DType.F32, (6, 8))), b.input(TensorType(DType.F32, (8, 2 * H))))
    return b.build([b.apply(Prim.MUL, part(b, y, 0, H), part(b, y, H, H))])


@pytest.mark.parametrize(
    "make", [three, apart, unequal, read_whole, overlapping, by_rows, no_constant, lambda: convolved(8, 2)],
    ids=["three", "apart", "unequal", "read whole", "overlapping", "by rows", "no constant", "groups"],
)  # fmt: skip
def test_where_there_is_none(make: Callable[[], Graph]) -> None:
    assert not find_alternatives(make()).classes


def test_strict_has_none() -> None:
    assert not find_alternatives(GATES["swiglu"], strict=True).classes
