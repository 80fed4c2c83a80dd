"""Attention as candidates: which sets are offered, and which are not."""

from __future__ import annotations

from collections import Counter

from tests.generate.cuda.attentions import BF16, ROW, Block, Heads, block, linear, plain
from tests.orchestrate.graphs import transformer

from weft.ir.graph import Graph, GraphBuilder, bits
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits

WITH = EnumerationLimits(attention=True)


def fused(graph: Graph, limits: EnumerationLimits = WITH) -> list[Candidate]:
    found = enumerate_candidates(graph, limits).candidates
    return [c for c in found if sum(graph.nodes[m].prim is Prim.MATMUL for m in bits(c.members)) > 1]


def prims(graph: Graph, c: Candidate) -> Counter[Prim]:
    return Counter(graph.nodes[m].prim for m in bits(c.members))


def test_the_core_with_index_maps_with_biases() -> None:
    graph = block(Block(1, 16, 16, 2, 8, dtype=BF16)).graph
    core, maps, cheap = fused(graph)
    softmax = Counter(
        {
            Prim.MATMUL: 2, Prim.MUL: 1, Prim.CAST: 2, Prim.REDUCE_MAX: 1, Prim.SUB: 1, Prim.EXP: 1,
            Prim.REDUCE_SUM: 1, Prim.DIV: 1, Prim.TRANSPOSE: 1,
        }
    )  # fmt: skip
    assert prims(graph, core) == softmax
    assert prims(graph, maps) == softmax + Counter({Prim.TRANSPOSE: 3})
    assert prims(graph, cheap) == softmax + Counter({Prim.TRANSPOSE: 3, Prim.ADD: 3, Prim.SLICE: 3})
    assert all(c.outputs == (graph.outputs[0],) for c in (core, maps, cheap))
    assert set(cheap.inputs) == set(graph.inputs)


def test_every_candidate_is_a_problem_of_its_own() -> None:
    graph = block(Block(2, 16, 16, 2, 8)).graph
    keys = {extract(graph, c, (ROW,) * len(c.inputs), (ROW,)).problem.key for c in fused(graph)}
    assert len(keys) == 3


def test_a_mask_is_computed_inside() -> None:
    graph = plain((1, 2), 16, 16, 8, causal=True).graph
    found = fused(graph)
    assert found
    assert all(prims(graph, c)[Prim.LE] == 1 for c in found)


def test_not_without_the_limit_or_without_a_softmax() -> None:
    graph = block(Block(1, 16, 16, 2, 8)).graph
    assert fused(graph, EnumerationLimits()) == []
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (2, 8, 8)))
    twice = b.build([b.add(Prim.MATMUL, b.apply(Prim.EXP, b.add(Prim.MATMUL, x, x)), x)])
    assert fused(twice) == []


def test_too_many_inputs_are_counted() -> None:
    graph = block(Block(1, 16, 16, 2, 8)).graph
    found = enumerate_candidates(graph, EnumerationLimits(attention=True, max_inputs=3))
    assert found.rejected["too many inputs"]


def test_every_layer_of_a_network() -> None:
    graph = transformer(3)
    assert len({c.outputs for c in fused(graph)}) == 3


def test_linear_attention_with_all_around_it() -> None:
    graph = linear(Heads(1, (1, 1), 8, 4, 4)).graph
    found = fused(graph)
    with_concat, without = sorted(found, key=lambda c: -c.members.bit_count())
    assert prims(graph, with_concat) == prims(graph, without) + Counter({Prim.CONCAT: 1})
    assert prims(graph, without) == Counter(
        {
            Prim.MATMUL: 2, Prim.SLICE: 5, Prim.CAST: 4, Prim.MAX: 2, Prim.PAD: 1, Prim.TRANSPOSE: 1, Prim.ADD: 1,
            Prim.DIV: 1,
        }
    )  # fmt: skip
    assert all(c.outputs == (graph.outputs[0],) for c in found)


def test_large_products_are_no_linear_attention() -> None:
    assert fused(linear(Heads(1, (1,), 64, 4, 4)).graph) == []


def test_a_first_product_that_others_read_is_no_linear_attention() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 8, 8)))
    first = b.add(Prim.MATMUL, x, x)
    assert fused(b.build([b.add(Prim.MATMUL, first, x), b.apply(Prim.ADD, first, 1.0)])) == []
