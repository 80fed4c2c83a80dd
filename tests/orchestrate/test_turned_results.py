"""Results that a graph wants turned are stored so by the kernel of their product: heads apart, channels last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.orchestrate.graphs import normal
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract

ROW, LAST = Format.ROW, Format.LAST
F16 = DType.F16


def constant(b: GraphBuilder, *shape: int) -> NodeId:
    return b.constant(normal(b, *shape).astype(np.float16))


def heads(*, result: bool = True) -> Graph:
    """relu(x @ W + b) as (image, head, row, column of a head)."""
    b = GraphBuilder()
    y = b.add(Prim.MATMUL, b.input(TensorType(F16, (2 * 24, 64))), constant(b, 64, 4 * 16))
    y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, constant(b, 4 * 16)), 0.0)
    y = b.transpose(b.reshape(y, (2, 24, 4, 16)), (0, 2, 1, 3))
    return b.build([y if result else b.apply(Prim.EXP, b.reduce(Prim.REDUCE_SUM, y, [2]))])


def image() -> Graph:
    """A convolution whose result has its channels last."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (2, 16, 9, 8)))
    y = b.add(Prim.CONV, x, constant(b, 24, 16, 3, 3), attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))
    return b.build([b.transpose(b.apply(Prim.ADD, y, constant(b, 24, 1, 1)), (0, 2, 3, 1))])


def turned() -> Graph:
    """(x @ W)ᵀ"""
    b = GraphBuilder()
    y = b.add(Prim.MATMUL, b.input(TensorType(F16, (48, 64))), constant(b, 64, 40))
    return b.build([b.transpose(y, (1, 0))])


def whole(graph: Graph) -> list[Candidate]:
    """Candidates that hold all there is to do."""
    work = sum(n.prim not in (Prim.INPUT, Prim.CONSTANT, Prim.BROADCAST, Prim.RESHAPE) for n in graph.nodes)
    return [c for c in enumerate_candidates(graph).candidates if c.members.bit_count() == work]


@pytest.mark.parametrize("make", [heads, image, turned])
@pytest.mark.parametrize("first", [ROW, LAST])
def test_one_kernel_does_it(make: Callable[..., Any], first: Format) -> None:
    graph = make()
    (c,) = whole(graph)
    assert c.outputs == graph.outputs
    of_image = [graph.nodes[i].prim is Prim.INPUT and graph.type_of(i).rank == 4 for i in c.inputs]
    made = extract(graph, c, [first if x else ROW for x in of_image], [ROW])
    schedules = templates.schedules(made.problem, GpuFacts())
    assert not isinstance(schedules, Declined), schedules.reason
    x = np.random.default_rng(5).normal(size=graph.type_of(0).shape).astype(np.float16)
    given = [x if graph.nodes[i].prim is Prim.INPUT else graph.constant(i) for i in made.inputs]
    wanted = evaluate(graph, [x], precise=True)
    assert_allclose(evaluate(made.problem.graph, given, precise=True)[0], wanted[0], rtol=1e-12)


def test_what_others_read_turned_is_left_to_them() -> None:
    """Attention reads heads where the product before it wrote them: no candidate is spent on turning them."""
    graph = heads(result=False)
    for c in enumerate_candidates(graph).candidates:
        kinds = Counter(graph.nodes[m].prim for m in bits(c.members))
        assert not (kinds[Prim.MATMUL] and kinds[Prim.TRANSPOSE])
