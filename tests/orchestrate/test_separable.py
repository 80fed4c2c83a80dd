"""Depthwise and 1x1 convolutions as one candidate: where it is offered, and where not."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.generate.cuda.products import F32, LAST, ROW, convolution, pair

from weft.generate.cuda.conv.separable.match import MOST_BETWEEN, Separable, separable, stacked
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Candidate
from weft.orchestrate import separable as offered
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits

WITH = EnumerationLimits(attention=True)


def fused(graph: Graph, limits: EnumerationLimits = WITH) -> list[Candidate]:
    found = enumerate_candidates(graph, limits).candidates
    return [c for c in found if sum(graph.nodes[m].prim is Prim.CONV for m in bits(c.members)) > 1]


def sigmoid_gate(b: GraphBuilder, y: NodeId) -> NodeId:
    x = b.cast(y, DType.F32)
    return b.cast(b.apply(Prim.DIV, x, b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, x)), 1.0)), DType.F16)


def test_a_pair_is_one_candidate_and_a_problem_of_the_template() -> None:
    graph = pair(1, 32, 9, 9, 24, residual=True, constants=True, middle=sigmoid_gate).graph
    (found,) = fused(graph)
    assert Counter(graph.nodes[m].prim for m in bits(found.members)) == Counter(
        {
            Prim.CONV: 2, Prim.ADD: 4, Prim.CAST: 2, Prim.NEG: 1, Prim.EXP: 1, Prim.DIV: 1, Prim.MAX: 1,
        }
    )  # fmt: skip
    assert found.outputs == graph.outputs
    assert set(found.inputs) >= set(graph.inputs)
    formats = tuple(LAST if graph.nodes[v].prim is Prim.INPUT else ROW for v in found.inputs)
    problem = extract(graph, found, formats, (LAST,)).problem
    assert isinstance(separable(problem), Separable)


def test_a_small_convolution_and_a_1x1_are_one_candidate_too() -> None:
    graph = pair(1, 16, 9, 9, 72, between=32, residual=True, constants=True).graph
    (found,) = fused(graph)
    assert Counter(graph.nodes[m].prim for m in bits(found.members)) == Counter(
        {Prim.CONV: 2, Prim.ADD: 3, Prim.MAX: 2}
    )
    formats = tuple(LAST if graph.nodes[v].prim is Prim.INPUT else ROW for v in found.inputs)
    assert isinstance(stacked(extract(graph, found, formats, (LAST,)).problem), Separable)


@pytest.mark.parametrize(
    "graph",
    [
        pair(1, 32, 9, 9, 24, between=24).graph,
        pair(1, 32, 9, 9, 24, between=144).graph,
        pair(1, 32, 9, 9, 24, between=32, groups=4).graph,
        pair(1, 32, 9, 9, 24, 1, 1, 0, between=32).graph,
        pair(1, 32, 9, 9, 24, between=32, shared=True).graph,
        pair(1, 32, 9, 9, 24, between=32, dtype=F32).graph,
        pair(1, 32, 9, 9, 24, second=3).graph,
        pair(1, 32, 9, 9, 24, shared=True).graph,
        convolution(1, 32, 9, 9, 24, 3, 1, 1).graph,
    ],
    ids=[
        "no whole steps",
        "many channels",
        "groups",
        "two 1x1",
        "between, read by others",
        "f32",
        "not 1x1",
        "read by others",
        "one convolution",
    ],
)
def test_where_it_is_not_offered(graph: Graph) -> None:
    assert fused(graph) == []


def test_not_without_the_limit() -> None:
    assert fused(pair(1, 32, 9, 9, 24).graph, EnumerationLimits()) == []


@pytest.mark.parametrize("between", [MOST_BETWEEN - 16, MOST_BETWEEN, MOST_BETWEEN + 16])
def test_as_many_channels_between_are_offered_as_the_template_takes(between: int) -> None:
    assert offered.MOST_BETWEEN == MOST_BETWEEN  # neither layer may import the other
    problem = pair(1, 16, 9, 9, 72, between=between)
    graph = pair(1, 16, 9, 9, 72, between=between, constants=True).graph
    assert isinstance(stacked(problem), Separable) == (between <= MOST_BETWEEN) == (len(fused(graph)) == 1)
