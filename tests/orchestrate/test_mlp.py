"""Chains of layers as candidates: which sets are offered, and which are not."""

from __future__ import annotations

import cProfile
import random

import numpy as np
import pytest

from weft.device.cuda.facts import GpuFacts, profile
from weft.fission.softplus import softplus
from weft.generate.cuda.mlp.match import Chain, chain
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Mask, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.kernels.formats import Format
from weft.orchestrate import mlp
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate import estimate_us
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.stored import Stored

WITH = EnumerationLimits(attention=True)


def layer(b: GraphBuilder, x: NodeId, cols: int, *, act: bool = True, dtype: DType = DType.F16) -> NodeId:
    k = b.type_of(x).shape[-1]
    rng = np.random.default_rng(len(b))
    w = b.constant(rng.standard_normal((k, cols)).astype(dtype.numpy))
    y = b.add(Prim.MATMUL, x, w)
    y = b.apply(Prim.ADD, y, b.constant(rng.standard_normal(cols).astype(dtype.numpy)))
    return b.apply(Prim.MAX, y, 0.0) if act else y


def chains(graph: Graph, limits: EnumerationLimits = WITH) -> list[Candidate]:
    found = enumerate_candidates(graph, limits).candidates
    return [c for c in found if products(graph, c) > 1]


def products(graph: Graph, c: Candidate) -> int:
    return sum(graph.nodes[m].prim is Prim.MATMUL for m in bits(c.members))


def matched(graph: Graph, c: Candidate) -> Chain:
    found = chain(extract(graph, c, (Format.ROW,) * len(c.inputs), (Format.ROW,)).problem)
    assert isinstance(found, Chain), found.reason
    return found


def matched_by_all(graph: Graph, c: Candidate) -> Chain:
    """With several results."""
    found = chain(extract(graph, c, (Format.ROW,) * len(c.inputs), (Format.ROW,) * len(c.outputs)).problem)
    assert isinstance(found, Chain), found.reason
    return found


def test_a_network_is_one_candidate_with_what_is_around() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (100, 24)))
    h = b.cast(x, DType.F16)
    for cols in (32, 32, 48):
        h = layer(b, h, cols)
    graph = b.build([b.cast(layer(b, h, 17, act=False), DType.F32)])
    (found,) = chains(graph)
    assert products(graph, found) == 4
    assert found.outputs == graph.outputs
    assert [i for i in found.inputs if graph.nodes[i].prim is Prim.INPUT] == [x]
    assert matched(graph, found).rows == 100


def test_more_inputs_than_other_groups_may_have() -> None:
    b = GraphBuilder()
    h = b.input(TensorType(DType.F16, (64, 32)))
    for _ in range(20):
        h = layer(b, h, 32)
    graph = b.build([h])
    (found,) = chains(graph)
    assert len(found.inputs) == 41 > WITH.max_inputs
    problem = extract(graph, found, (Format.ROW,) * 41, (Format.ROW,)).problem
    assert 0 < estimate_us(problem, GpuFacts()) < 20 * 10


def test_residuals_stay_inside() -> None:
    b = GraphBuilder()
    x = h = b.input(TensorType(DType.F16, (64, 32)))
    for _ in range(3):
        h = b.apply(Prim.ADD, layer(b, h, 32), h)
    graph = b.build([h])
    (found,) = chains(graph)
    assert products(graph, found) == 3
    assert matched(graph, found).x == 0
    assert x in found.inputs


def test_an_input_beside_a_value_stays_inside() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (64, 31)))
    h = layer(b, layer(b, x, 64), 64)
    h = b.add(Prim.CONCAT, x, h, attrs=a.ConcatAttrs(1))
    graph = b.build([layer(b, layer(b, h, 64), 4)])
    (found,) = chains(graph)
    assert products(graph, found) == 4
    assert matched(graph, found).layers[2].widths == (31, 64)


def test_a_chain_ends_where_others_read_and_where_it_gets_wide() -> None:
    b = GraphBuilder()
    h = b.input(TensorType(DType.F16, (64, 32)))
    for _ in range(2):
        h = layer(b, h, 32)
    read = h
    wide = layer(b, layer(b, layer(b, h, 32), 600), 32)
    graph = b.build([read, layer(b, layer(b, wide, 32), 32)])
    assert sorted((products(graph, c), len(c.outputs)) for c in chains(graph)) == [(2, 1), (3, 1), (3, 2)]
    for c in chains(graph):
        matched_by_all(graph, c)


def test_layers_over_two_inputs_that_meet_are_one_candidate() -> None:
    b = GraphBuilder()
    one, two = (b.input(TensorType(DType.F16, (64, 32))) for _ in range(2))
    h = b.apply(Prim.MUL, layer(b, one, 32), layer(b, two, 32))
    graph = b.build([layer(b, h, 8)])
    (found,) = chains(graph)
    p = matched(graph, found)
    assert [len(x.beside) for x in p.layers] == [0, 1, 0]
    assert len(p.memory) == 2


def test_more_than_four_inputs_are_none_of_its_business() -> None:
    b = GraphBuilder()
    given = [b.input(TensorType(DType.F16, (64, 16))) for _ in range(5)]
    h = layer(b, b.add(Prim.CONCAT, *given, attrs=a.ConcatAttrs(1)), 32)
    graph = b.build([layer(b, layer(b, h, 16), 16)])
    assert all(len(matched(graph, c).memory) == 1 for c in chains(graph))


def test_columns_of_one_input_are_read_where_they_lie() -> None:
    b = GraphBuilder()
    whole = b.input(TensorType(DType.F16, (64, 47)))
    x, direction = (
        b.add(Prim.SLICE, whole, attrs=a.SliceAttrs((0, at), (64, n), (1, 1))) for at, n in ((0, 32), (32, 15))
    )
    h = b.add(Prim.CONCAT, layer(b, layer(b, x, 64), 64), direction, attrs=a.ConcatAttrs(1))
    graph = b.build([layer(b, layer(b, h, 64), 3)])
    found = {products(graph, c): c for c in chains(graph)}
    p = matched(graph, found[4])
    assert [(g.index, g.steps, g.offset) for g in p.inputs.values()] == [(0, (47, 1), 0), (0, (47, 1), 32)]


def test_around_a_second_input_there_is_one_chain_and_there_are_two() -> None:
    """A radiance field: the direction beside the features of the position. What is faster is measured."""
    b = GraphBuilder()
    x, direction = b.input(TensorType(DType.F16, (64, 32))), b.input(TensorType(DType.F16, (64, 16)))
    features = layer(b, layer(b, x, 64), 64)
    h = b.add(Prim.CONCAT, features, direction, attrs=a.ConcatAttrs(1))
    graph = b.build([layer(b, layer(b, layer(b, h, 64), 64), 3)])
    found = {products(graph, c): c for c in chains(graph)}
    assert set(found) == {2, 3, 5}
    assert {x, direction} < set(found[5].inputs) and h not in found[5].inputs
    assert matched(graph, found[5]).layers[2].widths == (64, 16)
    assert matched(graph, found[3]).x == 0
    assert h in found[3].inputs
    assert found[2].outputs == (features,)
    assert direction not in found[2].inputs


def field(b: GraphBuilder, width: int = 64) -> tuple[NodeId, NodeId]:
    """(colour, density) of a radiance field."""
    x, direction = b.input(TensorType(DType.F16, (64, 32))), b.input(TensorType(DType.F16, (64, 16)))
    h = layer(b, layer(b, x, width), width)
    density = layer(b, h, 1)
    features = b.add(Prim.CONCAT, layer(b, h, width, act=False), direction, attrs=a.ConcatAttrs(1))
    return layer(b, layer(b, features, width), 3, act=False), density


def test_two_heads_are_one_candidate_and_others() -> None:
    b = GraphBuilder()
    color, density = field(b)
    graph = b.build([color, density])
    whole = [c for c in chains(graph) if products(graph, c) == 6]
    assert len(whole) == 1 and set(whole[0].outputs) == {color, density}
    p = matched_by_all(graph, whole[0])
    assert [e.part for e in p.ends] == [6, 3] and p.layers[2].n == 1
    assert any(len(c.outputs) == 1 for c in chains(graph))  # the cut ones, too


def test_an_activation_with_a_short_way_through_ends_a_chain() -> None:
    """Softplus: the way of what it leaves as it is ends before the other one does."""
    b = GraphBuilder()
    h = layer(b, layer(b, b.input(TensorType(DType.F16, (64, 32))), 32), 8, act=False)
    end = softplus(b, h, threshold=20.0)
    assert isinstance(end, int)
    graph = b.build([end])
    (found,) = chains(graph)
    assert found.outputs == graph.outputs


def test_results_beside_each_other_are_one_candidate() -> None:
    b = GraphBuilder()
    color, density = field(b)
    graph = b.build([b.add(Prim.CONCAT, color, density, attrs=a.ConcatAttrs(1))])
    (found,) = [c for c in chains(graph) if products(graph, c) == 6]
    p = matched(graph, found)
    assert [(e.step, e.offset) for e in p.ends] == [(4, 0), (4, 3)]


def test_a_value_between_layers_that_is_returned_is_stored_on_the_way() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (64, 32)))
    h = layer(b, layer(b, x, 32), 32)
    graph = b.build([layer(b, layer(b, h, 32), 8), h])
    (found,) = [c for c in chains(graph) if products(graph, c) == 4]
    assert set(found.outputs) == set(graph.outputs)
    assert [e.part for e in matched_by_all(graph, found).ends] == [4, 2]


def test_a_second_input_that_scales_a_value_is_read_inside_or_ends_the_chain_before_it() -> None:
    b = GraphBuilder()
    x, scale = b.input(TensorType(DType.F16, (64, 32))), b.input(TensorType(DType.F16, (64, 32)))
    scaled = b.apply(Prim.MUL, layer(b, layer(b, x, 32), 32), scale)
    graph = b.build([layer(b, layer(b, scaled, 32), 8)])
    assert sorted(products(graph, c) for c in chains(graph)) == [2, 2, 2, 4]
    for c in chains(graph):
        matched(graph, c)


def test_an_encoding_is_offered_inside_and_outside() -> None:
    """Sines of frequencies in front of the first layer: the template does not take them, so they may stand apart."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (64, 3)))
    bands = b.constant((2.0 ** np.arange(4)).astype(np.float16))
    t = b.reshape(b.apply(Prim.MUL, b.reshape(x, (64, 3, 1)), bands), (64, 12))
    h = b.add(Prim.CONCAT, b.apply(Prim.SIN, t), b.apply(Prim.COS, t), attrs=a.ConcatAttrs(1))
    graph = b.build([layer(b, layer(b, layer(b, h, 64), 64), 3)])
    bare = [c for c in chains(graph) if h in c.inputs]
    assert len(chains(graph)) == 2 and len(bare) == 1
    assert products(graph, bare[0]) == 3
    matched(graph, bare[0])


@pytest.mark.parametrize(("rows", "columns", "hidden"), [(0, 32, 32), (4, 0, 32), (4, 32, 0)])
def test_layers_without_elements_are_in_no_chain(rows: int, columns: int, hidden: int) -> None:
    b = GraphBuilder()
    h = b.input(TensorType(DType.F16, (rows, columns)))
    graph = b.build([layer(b, layer(b, layer(b, layer(b, h, 16), hidden), 16), 8)])
    for c in chains(graph):
        assert all(graph.type_of(m).size for m in bits(c.members))
        assert all(graph.type_of(i).size for m in bits(c.members) for i in graph.nodes[m].inputs)


def test_not_in_f32_and_not_without_the_limit() -> None:
    for dtype, limits in ((DType.F32, WITH), (DType.F16, EnumerationLimits())):
        b = GraphBuilder()
        h = b.input(TensorType(dtype, (64, 32)))
        h = layer(b, layer(b, h, 32, dtype=dtype), 32, dtype=dtype)
        assert not chains(b.build([h]), limits)


def test_matrices_that_are_computed_are_no_layers() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (32, 32)))
    y = b.add(Prim.MATMUL, x, b.add(Prim.MATMUL, x, x))
    assert not chains(b.build([y]))


def test_a_deep_chain_is_not_estimated_above_its_parts() -> None:
    """What lies behind a layer does not make its product dearer: the whole is measured before its pieces."""

    def estimate(depth: int) -> float:
        b = GraphBuilder()
        h = b.input(TensorType(DType.F16, (1 << 18, 64)))
        for _ in range(depth):
            h = layer(b, h, 64)
        graph = b.build([h])
        (found,) = chains(graph)
        problem = extract(graph, found, (Format.ROW,) * len(found.inputs), (Format.ROW,)).problem
        return estimate_us(problem, profile("h200"))

    whole, part = estimate(12), estimate(4)
    assert part < whole < 3 * part
    assert 30 < whole < 90  # 58.7 us for eleven layers of a radiance field, on an NVIDIA H200


def random_chain(seed: int) -> Graph:
    """Layers of a few widths, some read twice, joined with an input, added to one before, or a result as well."""
    chance = random.Random(seed)
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (64, 32)))
    h, before, results = layer(b, b.apply(Prim.EXP, x), 32), x, []
    for _ in range(chance.randrange(2, 9)):
        match chance.randrange(6):
            case 0 if b.type_of(h) == b.type_of(before):
                h, before = b.apply(Prim.ADD, h, before), h
            case 1 if b.type_of(h).shape[-1] <= 64:
                h = b.add(Prim.CONCAT, h, x, attrs=a.ConcatAttrs(1))
            case 2:
                results.append(h)
            case 3:
                h = b.apply(Prim.MUL, h, b.apply(Prim.TANH, h))
            case _:
                h, before = layer(b, h, chance.choice((16, 32, 32, 48)), act=chance.random() < 0.7), h
    return b.build([h, *results])


def grown_round_by_round(graph: Graph, stored: Stored, layers: Mask, last: NodeId, sinks: Mask, apart: Mask) -> Mask:
    """The definition: whatever may join joins, until nothing does."""
    rows, members = mlp._rows(graph, last), sinks
    while True:
        joining = 0
        for u in bits(~members & ~apart & (1 << len(graph)) - 1 & stored.work):
            inner = layers >> u & 1 and mlp._rows(graph, u) == rows
            plain = mlp._is_plain(graph, u) and graph.type_of(u).size % rows == 0
            read_here = stored.dag.consumers[u] & members and not stored.dag.consumers[u] & ~members
            if (inner or plain) and read_here and not stored.results >> u & 1:
                joining |= 1 << u
        if not joining:
            return members
        members |= joining


def reads_a_layer(stored: Stored, members: Mask, layers: Mask, v: NodeId) -> bool:
    """The definition of standing behind one."""
    inside = stored.dag.producers[v] & members
    return bool(inside & layers) or any(reads_a_layer(stored, members, layers, u) for u in bits(inside))


def test_chains_grow_as_far_as_their_definition_says() -> None:
    longest = []
    for seed in range(40):
        graph = random_chain(seed)
        stored = Stored.of(graph)
        layers = sum(1 << v for v in bits(stored.work) if mlp._is_layer(graph, stored, v))
        longest.append(0)
        for last, sink in [(v, sink) for v in bits(layers) for sink in mlp._sinks(graph, stored, v)]:
            for apart in (0, 1 << next(bits(layers)), stored.work & ~layers & ~(1 << sink)):
                found = mlp._grown(graph, stored, layers, last, 1 << sink, apart)
                assert found == grown_round_by_round(graph, stored, layers, last, 1 << sink, apart)
                behind = sum(1 << v for v in bits(found) if reads_a_layer(stored, found, layers, v))
                assert mlp._behind(stored, found, layers) == behind
                assert mlp._front(stored, layers, found) == found & ~layers & ~behind
                longest[-1] = max(longest[-1], (found & layers).bit_count())
    assert max(longest) > 4 and sum(n > 1 for n in longest) > 20 and 1 in longest


def steps_of(depth: int) -> int:
    """Function calls that it takes to find the groups of a chain."""
    b = GraphBuilder()
    h = b.input(TensorType(DType.F16, (64, 32)))
    for _ in range(depth):
        h = layer(b, h, 32)
    graph = b.build([h])
    stored = Stored.of(graph)
    profile = cProfile.Profile()
    profile.enable()
    ((members, _),) = mlp.mlp_groups(graph, stored)
    profile.disable()
    assert sum(graph.nodes[m].prim is Prim.MATMUL for m in bits(members)) == depth
    return sum(row.callcount for row in profile.getstats())


def test_long_chains_take_steps_in_proportion() -> None:
    assert steps_of(160) < 2.5 * steps_of(80)
