"""Candidates of real graphs: kinds, legality, completeness on small random ones."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.ir.random_graphs import random_graph
from tests.orchestrate.graphs import Net, attention_block, instance_norm_relu_pad, residual_net, transformer

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId, Origin, bits, mask_of
from weft.ir.passes import clean_up
from weft.ir.prims import FREE, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Kind
from weft.kernels.formats import Format
from weft.orchestrate.abstract import single_sink
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits, Legality
from weft.orchestrate.stored import Stored

COMPLETE = EnumerationLimits.complete()


def prims_of(graph: Graph, candidate: Candidate) -> Counter[Prim]:
    return Counter(graph.nodes[m].prim for m in bits(candidate.members))


def has(graph: Graph, found: Any, *prims: Prim, outputs: int = 1) -> bool:
    return any(prims_of(graph, c) == Counter(prims) and len(c.outputs) == outputs for c in found.candidates)


def check_candidates(graph: Graph, found: Any) -> None:
    """What the contract says of every candidate."""
    stored = Stored.of(graph)
    seen = set()
    for c in found.candidates:
        if c.kind is Kind.CONVERT:
            assert c.members == 0
            assert c.inputs == c.outputs
            continue
        assert (c.members, c.outputs) not in seen
        seen.add((c.members, c.outputs))
        assert all(graph.nodes[m].prim not in FREE for m in bits(c.members))
        assert list(c.outputs) == sorted(c.outputs)
        assert mask_of(c.outputs) & ~c.members == 0
        assert mask_of(c.inputs) == stored.inputs_of(c.members)
        assert list(c.inputs) == sorted(c.inputs)
        for i in c.inputs:
            node = graph.nodes[i]
            assert node.prim not in FREE or node.prim is Prim.INPUT or node.type.size > 16
        if len(c.outputs) > 1:
            assert not stored.dag.missing(c.members), "several outputs need a convex set"
    singles = [c for c in found.candidates if c.kind is Kind.SINGLE]
    assert mask_of(m for c in singles for m in bits(c.members)) == stored.work


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_keep_the_contract(seed: int) -> None:
    graph = random_graph(seed)
    check_candidates(graph, enumerate_candidates(graph))
    check_candidates(graph, enumerate_candidates(graph, COMPLETE))


def test_complete_mode_against_brute_force() -> None:
    done = 0
    for seed in range(400):
        graph = random_graph(seed)
        stored = Stored.of(graph)
        work = list(bits(stored.work))
        if not 2 <= len(work) <= 8:
            continue
        done += 1
        limits = EnumerationLimits(per_sink=0, max_candidates=0, every_cut=True, reentrant=False, multi_output=False)
        legality = Legality.of(graph, stored, limits)
        expected = set()
        for choice in range(1, 1 << len(work)):
            s = mask_of(v for i, v in enumerate(work) if choice >> i & 1)
            if single_sink(stored.dag, s) < 0 or stored.dag.missing(s) or legality.admit(s):
                continue
            if stored.inputs_of(s).bit_count() <= limits.max_inputs:
                expected.add(s)
        found = enumerate_candidates(graph, limits)
        sets = {c.members for c in found.candidates if c.kind is not Kind.CONVERT}
        assert expected <= sets
        assert {c.members for c in found.candidates if c.kind in (Kind.GROUP, Kind.SINGLE)} <= expected
        assert not found.capped
    assert done > 50


def test_admit_is_monotone() -> None:
    rng = random.Random(1)
    for seed in range(60):
        graph = random_graph(seed)
        stored = Stored.of(graph)
        legality = Legality.of(graph, stored, EnumerationLimits(max_members=5, max_reductions=1))
        work = list(bits(stored.work))
        for _ in range(60):
            s = mask_of(v for v in work if rng.random() < 0.5)
            if s and legality.admit(s):
                larger = s | mask_of(v for v in work if rng.random() < 0.3)
                assert legality.admit(larger)


def test_free_primitives_are_nobodys_kernel() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 6)))
    y = b.apply(Prim.EXP, x)
    z = b.apply(Prim.NEG, b.broadcast(b.reshape(y, (1, 24)), (3, 24)))
    graph = b.build([z])
    found = enumerate_candidates(graph)
    assert {tuple(bits(c.members)) for c in found.candidates} == {(y,), (z,), (y, z)}
    assert {c.inputs for c in found.candidates} == {(x,), (y,)}


def test_small_constants_are_inside_and_large_ones_are_inputs() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 17)))
    small = b.constant(np.ones((16,), np.float32))
    large = b.constant(np.ones((17,), np.float32))
    y = b.apply(Prim.ADD, x, large)
    z = b.apply(Prim.MUL, b.slice(y, (0, 0), (2, 16), (1, 1)), small)
    found = enumerate_candidates(b.build([z]))
    assert {i for c in found.candidates for i in c.inputs} & {small, large} == {large}


def test_a_contraction_takes_epilogue_and_index_only_prologue() -> None:
    net = Net()
    b = net.b
    x = net.input(1, 4, 6, 6)
    pad = b.add(Prim.PAD, b.apply(Prim.EXP, x), attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))
    conv = b.add(Prim.CONV, pad, net.weight(8, 4, 3, 3), attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))
    y = b.apply(Prim.ADD, conv, net.weight(8, 1, 1))
    z = net.relu(y)
    graph = net.build(b.reduce(Prim.REDUCE_SUM, z, (2, 3)))
    found = enumerate_candidates(graph, COMPLETE)
    assert has(graph, found, Prim.PAD, Prim.CONV, Prim.ADD, Prim.MAX)
    assert has(graph, found, Prim.CONV, Prim.ADD, Prim.MAX)
    linear = [prims_of(graph, c) for c in found.candidates if prims_of(graph, c)[Prim.CONV]]
    assert not any(p[Prim.EXP] for p in linear), "arithmetic in front of a convolution is no prologue"
    assert not any(p[Prim.REDUCE_SUM] for p in linear), "a reduction is no epilogue"
    assert found.rejected["neither prologue nor epilogue of its contraction"] > 0


@pytest.mark.parametrize(
    ("starts", "sizes", "steps", "taken"),
    [
        ((1, 0), (15, 8), (1, 1), True), ((4, 0), (12, 8), (1, 1), True), ((5, 0), (11, 8), (1, 1), False),
        ((0, 0), (8, 8), (2, 1), False), ((15, 0), (16, 8), (-1, 1), False),
    ],
)  # fmt: skip
def test_a_product_reads_most_of_a_tensor_where_it_lies(
    starts: tuple[int, int], sizes: tuple[int, int], steps: tuple[int, int], taken: bool
) -> None:
    net = Net()
    x = net.b.apply(Prim.EXP, net.input(16, 8))
    graph = net.build(net.b.add(Prim.MATMUL, net.b.slice(x, starts, sizes, steps), net.weight(8, 8)))
    assert has(graph, enumerate_candidates(graph, COMPLETE), Prim.SLICE, Prim.MATMUL) == taken


def test_two_contractions_never_share_a_kernel() -> None:
    graph = transformer(1)
    for c in enumerate_candidates(graph).candidates:
        p = prims_of(graph, c)
        assert p[Prim.MATMUL] <= 1 or c.kind is Kind.ORIGIN


def opaque(b: GraphBuilder, x: int, result: int) -> int:
    types = (TensorType(DType.F32, (4, 2)), TensorType(DType.I64, (4, 2)))
    return b.add(Prim.OPAQUE, x, attrs=a.OpaqueAttrs("aten", "aten.topk.default", "[2]", result, types, "no rule"))


def test_results_of_an_opaque_call_stand_together_and_alone() -> None:
    b = GraphBuilder()
    x = b.apply(Prim.EXP, b.input(TensorType(DType.F32, (4, 6))))
    values, indices = opaque(b, x, 0), opaque(b, x, 1)
    out = b.apply(Prim.ADD, values, b.cast(indices, DType.F32))
    graph = b.build([out])
    found = enumerate_candidates(graph, COMPLETE)
    with_opaque = [c for c in found.candidates if c.members & mask_of((values, indices))]
    assert with_opaque == [Candidate(mask_of((values, indices)), (x,), (values, indices), Kind.SINGLE)]
    assert found.rejected["an opaque call or wide concat stands alone"] > 0


def test_operators_get_their_own_candidate() -> None:
    """softmax(q kᵀ) v under one origin is more than growth allows: two contractions."""
    net = Net()
    b = net.b
    q, k, v = (net.input(2, 4, 8) for _ in range(3))
    with b.origin(Origin("sdpa", (("scale", 1.0),), (q, k, v))) as index:
        s = b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1)))
        e = b.apply(Prim.EXP, b.apply(Prim.SUB, s, b.reduce(Prim.REDUCE_MAX, s, (2,))))
        p = b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (2,)))
        o = b.add(Prim.MATMUL, p, v)
    b.set_origin_results(index, (o,))
    graph = net.build(net.relu(o))
    (origin,) = [c for c in enumerate_candidates(graph).candidates if c.kind is Kind.ORIGIN]
    assert origin.inputs == (q, k, v)
    assert origin.outputs == (o,)
    assert origin.members.bit_count() == 8


@pytest.mark.parametrize("broken", ["inner value read", "result gone", "operand gone", "returns its operand"])
def test_operators_that_are_no_longer_whole_get_none(broken: str) -> None:
    net = Net()
    b = net.b
    x = net.input(4, 8)
    y = b.add(Prim.MATMUL, x, net.weight(8, 8))
    with b.origin(Origin("f", (), (-1,) if broken == "operand gone" else (y,))) as index:
        inner = b.add(Prim.MATMUL, y, net.weight(8, 8))
        o = b.add(Prim.MATMUL, inner, net.weight(8, 8))
    b.set_origin_results(index, {"result gone": (-1,), "returns its operand": (y,)}.get(broken, (o,)))
    graph = net.build(o, inner) if broken == "inner value read" else net.build(o)
    assert not any(c.kind is Kind.ORIGIN for c in enumerate_candidates(graph).candidates)


def test_store_through_writes_the_residual_and_its_norm() -> None:
    net = Net()
    x, y = net.input(4, 32), net.input(4, 32)
    residual = net.b.apply(Prim.ADD, x, y)
    normed = net.layer_norm(residual)
    graph = net.build(net.linear(normed, 32), residual)
    found = enumerate_candidates(graph)
    assert any(c.outputs == (residual, normed) and c.inputs[:2] == (x, y) for c in found.candidates)
    single = enumerate_candidates(graph, EnumerationLimits(multi_output=False))
    assert all(len(c.outputs) == 1 for c in single.candidates)


def test_siblings_share_a_pass() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 32)))
    total = b.reduce(Prim.REDUCE_SUM, x, (1,))
    squares = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, x, x), (1,))
    graph = b.build([total, squares])
    found = enumerate_candidates(graph)
    assert any(c.outputs == (total, squares) and c.inputs == (x,) for c in found.candidates)


def test_reentrant_norm_recomputes_the_difference() -> None:
    """{x - mean, ... · r} with r stored: not convex, 4 volumes instead of 6 (S2)."""
    graph = instance_norm_relu_pad()
    limits = EnumerationLimits(max_reductions=1)
    stored = Stored.of(graph)
    sets = [c for c in enumerate_candidates(graph, limits).candidates if stored.dag.missing(c.members)]
    assert sets
    assert all(len(c.outputs) == 1 for c in sets)
    assert any(Prim.SUB in prims_of(graph, c) and Prim.PAD in prims_of(graph, c) for c in sets)
    without = enumerate_candidates(graph, EnumerationLimits(max_reductions=1, reentrant=False)).candidates
    assert not any(stored.dag.missing(c.members) for c in without)


def test_caps_are_reported() -> None:
    net = Net()
    b = net.b
    parts = []
    for _ in range(6):
        y = net.input(4, 32)
        for _ in range(3):
            y = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.EXP, y), (1,))
            y = b.broadcast(y, (4, 32))
        parts.append(b.apply(Prim.EXP, y))
    graph = net.build(b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1)))
    limits = EnumerationLimits(per_sink=20, max_reductions=50, max_members=50)
    found = enumerate_candidates(graph, limits)
    assert found.capped
    check_candidates(graph, found)
    few = enumerate_candidates(graph, EnumerationLimits(max_candidates=50))
    assert few.capped
    assert few.rejected["over the limit of candidates"] > 0
    check_candidates(graph, few)
    assert sum(c.kind is not Kind.CONVERT for c in few.candidates) == 50


def batch_norm_and_relu(b: GraphBuilder, x: NodeId) -> tuple[NodeId, ...]:
    """(result, mean, variance, inverse deviation) of the batch, in the primitives that training has."""
    shape = b.type_of(x).shape
    wide = b.cast(x, DType.F32)
    share = shape[1] / b.type_of(x).size
    mean = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, wide, (0, 2, 3)), share)
    away = b.apply(Prim.SUB, wide, b.broadcast(mean, shape))
    square = b.apply(Prim.MUL, away, away)
    var = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, square, (0, 2, 3)), share)
    rstd = b.apply(Prim.RSQRT, b.apply(Prim.ADD, var, 1e-5))
    y = b.apply(Prim.MUL, away, b.broadcast(rstd, shape))
    return b.apply(Prim.MAX, b.cast(y, DType.BF16), 0.0), mean, var, rstd


@pytest.mark.parametrize("limits", [COMPLETE, EnumerationLimits()], ids=["complete", "usual"])
def test_a_hurry_leaves_out_sets_of_a_value_and_nothing_else(limits: EnumerationLimits) -> None:
    graph = transformer(2)
    every = enumerate_candidates(graph, limits).candidates
    late = iter(range(10_000))
    found = {
        "from the start": enumerate_candidates(graph, limits, hurry=lambda: True),
        "later": enumerate_candidates(graph, limits, hurry=lambda: next(late) > 20),
        "stopped": enumerate_candidates(graph, limits, stop=lambda: True),
    }
    for name, made in found.items():
        assert set(made.candidates) <= set(every) and made.capped, name
        kept = {k: sum(c.kind is k for c in made.candidates) for k in Kind}
        whole = {k: sum(c.kind is k for c in every) for k in Kind}
        assert all(kept[k] == whole[k] for k in Kind if k is not Kind.GROUP), name
        assert (kept[Kind.GROUP] > 0) == (name != "stopped")
    written = {c.outputs for c in every if len(c.outputs) == 1}
    assert {c.outputs for c in found["from the start"].candidates if len(c.outputs) == 1} == written
    assert len(found["later"].candidates) > len(found["from the start"].candidates)


def test_statistics_are_written_without_what_they_are_made_of() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (4, 16, 8, 8)))
    graph = clean_up(b.build(list(batch_norm_and_relu(b, x)))).graph
    _, mean, var, rstd = graph.outputs
    sums = mask_of(n for n in range(len(graph)) if graph.nodes[n].prim is Prim.REDUCE_SUM)
    assert any(
        c.inputs == graph.inputs and c.outputs == (mean, var, rstd) and not sums & ~c.members
        for c in enumerate_candidates(graph).candidates
    )


def test_what_reads_least_is_kept_of_every_value() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (4, 16, 8, 8)))
    results, y = [], x
    for _ in range(4):
        y, *statistics = batch_norm_and_relu(b, y)
        results += statistics
    graph = clean_up(b.build([*results, y])).graph
    every = enumerate_candidates(graph, EnumerationLimits(per_sink=64))
    fixed = sum(c.kind is not Kind.GROUP for c in every.candidates)
    few = enumerate_candidates(graph, EnumerationLimits(per_sink=64, max_candidates=fixed + 200))
    assert few.rejected["over the limit of candidates"] > 400

    def least(candidates: tuple[Candidate, ...]) -> dict[tuple[NodeId, ...], int]:
        """By what is written, the fewest bytes that a group reads."""
        of: dict[tuple[NodeId, ...], int] = {}
        for c in candidates:
            if c.kind is Kind.GROUP:
                read = sum(graph.type_of(i).nbytes for i in c.inputs)
                of[c.outputs] = min(of.get(c.outputs, read), read)
        return of

    assert least(few.candidates) == least(every.candidates)


def test_wide_concats_stand_alone() -> None:
    b = GraphBuilder()
    xs = [b.apply(Prim.EXP, b.input(TensorType(DType.F32, (4, 3)))) for _ in range(9)]
    graph = b.build([b.add(Prim.CONCAT, *xs, attrs=a.ConcatAttrs(1))])
    assert not any(c.kind is Kind.GROUP for c in enumerate_candidates(graph).candidates)
    wide = enumerate_candidates(graph, EnumerationLimits(concat_sources=9))
    assert any(c.kind is Kind.GROUP for c in wide.candidates)


def test_sensible_cuts_only_remove_and_keep_whole_operators() -> None:
    graph = transformer(1)
    few = enumerate_candidates(graph, EnumerationLimits(per_sink=0))
    all_ = enumerate_candidates(graph, EnumerationLimits(per_sink=0, every_cut=True))
    sets = {(c.members, c.outputs) for c in few.candidates if len(c.outputs) == 1 and c.kind is Kind.GROUP}
    assert sets < {(c.members, c.outputs) for c in all_.candidates}
    assert has(graph, few, Prim.ADD, Prim.MUL, Prim.ERF, Prim.ADD, Prim.MUL, Prim.MUL), "bias and gelu"


def test_repeated_blocks_scale_linearly_and_fast() -> None:
    two, six = (enumerate_candidates(transformer(n)) for n in (2, 6))
    assert len(six.candidates) < 3.3 * len(two.candidates)
    assert six.seconds < 1.0
    assert not six.capped


def test_conversions_exist_for_images_only() -> None:
    graph = residual_net(1)
    found = enumerate_candidates(graph)
    convert = {c.outputs[0] for c in found.candidates if c.kind is Kind.CONVERT}
    assert convert
    assert all(graph.type_of(v).rank == 4 and graph.type_of(v).shape[2] > 1 for v in convert)
    assert graph.inputs[0] in convert


def test_outputs_behind_views_ask_for_their_root() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 6)))
    y = b.apply(Prim.EXP, x)
    graph = b.build([b.reshape(y, (24,)), x])
    stored = Stored.of(graph)
    assert stored.results == 1 << y
    assert [c.outputs for c in enumerate_candidates(graph).candidates] == [(y,)]


def test_graph_without_work() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 6)))
    found = enumerate_candidates(b.build([x]))
    assert found.candidates == ()


def test_a_block_of_attention_has_its_classics() -> None:
    net = Net()
    x = net.input(1, 8, 32)
    graph = net.build(attention_block(net, x, 2))
    found = enumerate_candidates(graph)
    softmax = (Prim.REDUCE_MAX, Prim.SUB, Prim.EXP, Prim.REDUCE_SUM, Prim.DIV)
    assert has(graph, found, *softmax)
    assert has(graph, found, Prim.MUL, *softmax), "with the scale"
    assert has(graph, found, Prim.MATMUL, Prim.ADD), "with bias"
    assert has(graph, found, Prim.MATMUL, Prim.ADD, Prim.ADD), "with bias and residual"


def test_attention_keeps_its_operands_through_the_clean_up() -> None:
    """The head split of k must not melt into the operator's own transpose: the library call needs k as it was."""
    net = Net()
    b = net.b
    x = net.input(1, 8, 32)
    q, k, v = (b.transpose(b.reshape(net.linear(x, 32), (1, 8, 2, 16)), (0, 2, 1, 3)) for _ in range(3))
    o = net.rule("sdpa", q, k, v, scale=0.25)
    y = net.linear(b.reshape(b.transpose(o, (0, 2, 1, 3)), (8, 32)), 32)
    graph = clean_up(net.build(y)).graph
    rules: Counter[Any] = Counter()
    for c in enumerate_candidates(graph).candidates:
        e = extract(graph, c, (Format.ROW,) * len(c.inputs), (Format.ROW,) * len(c.outputs))
        rules[e.problem.origin_rule] += 1
        if e.problem.origin_rule == "sdpa":
            assert c.kind is Kind.ORIGIN
            assert len(e.problem.origin_operands) >= 3
            assert min(e.problem.origin_operands[:3]) >= 0
    assert rules["sdpa"] == 1
    assert rules["linear"] == 4
