"""Products that need nothing of each other as one candidate; products whose results are slices of their columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.orchestrate.graphs import normal
from tests.typed import assert_allclose, numbers

from weft.device.cuda.facts import profile
from weft.generate.cuda import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Problem
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate_cuda import gpu_estimate_us
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.select import Priced, select
from weft.pipeline.problems import collect

H200 = profile("h200")
LIMITS = EnumerationLimits(attention=True, multiprocessors=H200.sms)
F16, F32 = DType.F16, DType.F32


def constant(b: GraphBuilder, *shape: int, dtype: DType = F16) -> NodeId:
    return b.constant((numbers(normal(b, *shape)) * 0.1).astype(dtype.numpy))


def linear(b: GraphBuilder, x: NodeId, n: int, *, relu: bool = True) -> NodeId:
    dtype = b.type_of(x).dtype
    y = b.add(Prim.MATMUL, x, constant(b, b.type_of(x).shape[-1], n, dtype=dtype))
    y = b.apply(Prim.ADD, y, constant(b, n, dtype=dtype))
    return b.apply(Prim.MAX, y, 0.0) if relu else y


def branches(*, tail: bool = True) -> Graph:
    """x -> A, x -> B -> C, y -> D; the sum of A, C and D: A, B and D first, or A, C and D last."""
    b = GraphBuilder()
    x, y = b.input(TensorType(F16, (64, 128))), b.input(TensorType(F16, (64, 96)))
    one, two, three = linear(b, x, 256), linear(b, linear(b, x, 512), 256), linear(b, y, 256)
    whole = b.apply(
        Prim.ADD, b.apply(Prim.ADD, b.apply(Prim.EXP, one), b.apply(Prim.EXP, two)), b.apply(Prim.EXP, three)
    )
    return b.build([whole, one, two, three] if tail else [one, two, three])


def heads(way: str) -> Graph:
    """q, k and v of one operand as heads, summed: three products, or slices of one."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (48, 64)))

    def parted(y: NodeId) -> NodeId:
        return b.transpose(b.reshape(y, (2, 24, 4, 16)), (0, 2, 1, 3))

    if way == "three":
        parts = [parted(linear(b, x, 64, relu=False)) for _ in range(3)]
    elif way == "slices":
        y = linear(b, x, 192, relu=False)
        parts = [parted(b.slice(y, (0, 64 * i), (48, 64), (1, 1))) for i in range(3)]
    else:
        y = b.transpose(b.reshape(linear(b, x, 192, relu=False), (2, 24, 3, 4, 16)), (2, 0, 3, 1, 4))
        parts = [b.reshape(b.slice(y, (i, 0, 0, 0, 0), (1, 2, 4, 24, 16), (1,) * 5), (2, 4, 24, 16)) for i in range(3)]
    return b.build(parts)


def products(graph: Graph, c: Candidate) -> int:
    return sum(CATEGORY[graph.nodes[m].prim] is Category.LINEAR for m in bits(c.members))


def grouped(graph: Graph, limits: EnumerationLimits = LIMITS) -> list[Candidate]:
    found = enumerate_candidates(graph, limits).candidates
    return [c for c in found if products(graph, c) > 1 and len(c.outputs) > 1]


def split(graph: Graph) -> list[Candidate]:
    found = enumerate_candidates(graph, LIMITS).candidates
    sliced = [c for c in found if any(graph.nodes[m].prim is Prim.SLICE for m in bits(c.members))]
    return [c for c in sliced if products(graph, c) == 1]


def problem_of(graph: Graph, c: Candidate) -> Problem:
    choice = format_choices(graph, c)[0]
    return extract(graph, c, choice.inputs, choice.outputs).problem


def check_meaning(graph: Graph, c: Candidate) -> None:
    """The problem means what the graph does, and the template takes it."""
    choice = format_choices(graph, c)[0]
    made = extract(graph, c, choice.inputs, choice.outputs)
    rng = np.random.default_rng(3)
    inputs = [rng.normal(size=graph.type_of(i).shape).astype(np.float16) for i in graph.inputs]
    every = returning(graph, (*made.inputs, *made.outputs))
    values = evaluate(every, inputs, precise=True)
    got = evaluate(made.problem.graph, values[: len(made.inputs)], precise=True)
    for x, y in zip(got, values[len(made.inputs) :], strict=True):
        assert_allclose(x, y, rtol=1e-10)


def returning(graph: Graph, outputs: tuple[NodeId, ...]) -> Graph:
    return replace(graph, outputs=outputs, output_names=("",) * len(outputs))


def test_products_of_one_depth_are_candidates_together() -> None:
    graph = branches()
    found = grouped(graph)
    assert found
    for c in found:
        assert products(graph, c) in (2, 3)
        assert len(c.outputs) == products(graph, c)
        schedules = templates.schedules(problem_of(graph, c), H200)
        assert not isinstance(schedules, Declined), schedules.reason
        check_meaning(graph, c)
    # A, B and D from the inputs on, A, C and D up to the results
    assert sum(products(graph, c) == 3 for c in found) >= 2


def test_no_candidate_holds_products_that_need_each_other() -> None:
    graph = branches()
    ancestors: list[set[NodeId]] = []
    for n in graph.nodes:
        ancestors.append(set(n.inputs).union(*(ancestors[i] for i in n.inputs)))
    for c in grouped(graph):
        inside = [m for m in bits(c.members) if CATEGORY[graph.nodes[m].prim] is Category.LINEAR]
        assert not any(x in ancestors[y] for x in inside for y in inside)


def test_what_follows_one_product_and_reads_another_keeps_them_apart() -> None:
    b = GraphBuilder()
    x, y = b.input(TensorType(F16, (64, 128))), b.input(TensorType(F16, (64, 96)))
    one, two = linear(b, x, 256, relu=False), linear(b, y, 256, relu=False)
    graph = b.build([b.apply(Prim.EXP, one), b.apply(Prim.MAX, b.apply(Prim.ADD, two, one), 0.0)])
    for c in grouped(graph):
        assert not isinstance(templates.schedules(problem_of(graph, c), H200), Declined)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        (replace(LIMITS, multiprocessors=0), ((64, 128, 256), (64, 96, 256))),
        (LIMITS, ((16384, 128, 4096), (16384, 96, 4096))),
    ],
    ids=["no GPU", "products that fill it"],
)
def test_none_is_offered(limits: EnumerationLimits, sizes: tuple[tuple[int, int, int], ...]) -> None:
    b = GraphBuilder()
    graph = b.build([linear(b, b.input(TensorType(F16, (m, k))), n) for m, k, n in sizes])
    assert not grouped(graph, limits)


def test_types_are_not_mixed() -> None:
    b = GraphBuilder()
    graph = b.build([linear(b, b.input(TensorType(t, (64, 64))), 64) for t in (F16, F32, F16, F32)])
    found = grouped(graph)
    assert {products(graph, c) for c in found} == {2}
    for c in found:
        assert len({graph.type_of(o).dtype for o in c.outputs}) == 1


def test_more_than_a_kernel_takes_are_no_candidate() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (64, 64)))
    graph = b.build([linear(b, x, 64) for _ in range(17)])
    assert not grouped(graph)


def test_convolutions_of_different_windows_are_candidates_together() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (1, 32, 17, 17)))
    found = []
    for kh, kw in ((1, 7), (7, 1), (1, 1)):
        attrs = a.ConvAttrs((1, 1), (kh // 2, kw // 2), (kh // 2, kw // 2), (1, 1), 1)
        y = b.add(Prim.CONV, x, constant(b, 64, 32, kh, kw), attrs=attrs)
        found.append(b.apply(Prim.MAX, b.apply(Prim.ADD, y, constant(b, 64, 1, 1)), 0.0))
    graph = b.build(found)
    whole = [c for c in grouped(graph) if products(graph, c) == 3]
    assert len(whole) == 1
    for choice in format_choices(graph, whole[0]):
        problem = extract(graph, whole[0], choice.inputs, choice.outputs).problem
        if Format.LAST in problem.input_formats:
            assert not isinstance(templates.schedules(problem, H200), Declined)


@pytest.mark.parametrize("way", ["slices", "stacked"])
def test_a_product_is_stored_as_heads(way: str) -> None:
    graph = heads(way)
    found = split(graph)
    assert any(set(c.outputs) == {_root(graph, o) for o in graph.outputs} for c in found)
    for c in found:
        schedules = templates.schedules(problem_of(graph, c), H200)
        if any(graph.nodes[o].prim is Prim.TRANSPOSE for o in c.outputs) or way == "stacked":
            assert not isinstance(schedules, Declined), schedules.reason
        else:  # as they are, readers find the columns in one result as well
            assert isinstance(schedules, Declined)
            assert "the product with one result" in schedules.reason
        check_meaning(graph, c)


def _root(graph: Graph, node: NodeId) -> NodeId:
    while graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node


def test_three_products_of_one_operand_are_stored_as_heads() -> None:
    graph = heads("three")
    whole = [c for c in grouped(graph) if set(c.outputs) == set(graph.outputs)]
    assert len(whole) == 1
    assert not isinstance(templates.schedules(problem_of(graph, whole[0]), H200), Declined)
    check_meaning(graph, whole[0])


def test_merged_products_find_their_siblings_in_every_version() -> None:
    """x @ A and x @ B are one product beside y @ C, and so not two."""
    b = GraphBuilder()
    x, y = b.input(TensorType(F16, (64, 128))), b.input(TensorType(F16, (64, 96)))
    graph = b.build([linear(b, x, 128), linear(b, x, 64), linear(b, y, 256)])
    alternatives = find_alternatives(graph, strict=False)
    assert alternatives.versions > 1
    found = enumerate_candidates(alternatives.graph, LIMITS, alternatives).candidates
    union = alternatives.graph
    widths = set()
    for c in (c for c in found if len(c.outputs) > 1):
        inside = [union.nodes[m] for m in bits(c.members)]
        widths.add(tuple(sorted(n.type.shape[-1] for n in inside if CATEGORY[n.prim] is Category.LINEAR)))
    assert (192, 256) in widths
    assert (64, 128, 256) not in widths


def test_a_group_is_estimated_below_its_members_and_above_the_slowest() -> None:
    graph = branches(tail=False)
    singles: dict[Any, Any] = {}
    for c in enumerate_candidates(graph, LIMITS).candidates:
        if products(graph, c) == 1 and len(c.outputs) == 1:
            us = gpu_estimate_us(problem_of(graph, c), H200)
            singles[c.outputs[0]] = min(us, singles.get(c.outputs[0], us))
    (whole,) = [c for c in grouped(graph) if set(c.outputs) == set(graph.outputs)]
    us = gpu_estimate_us(problem_of(graph, whole), H200)
    each = [singles[o] for o in whole.outputs]
    assert 0.7 * max(each) < us < 0.8 * sum(each)


def test_a_plan_takes_a_group_where_that_is_cheapest() -> None:
    graph = branches(tail=False)
    candidates = enumerate_candidates(graph, LIMITS).candidates
    priced = []
    for c in candidates:
        choice = format_choices(graph, c)[0]
        priced.append(Priced(c, choice.inputs, choice.outputs, gpu_estimate_us(problem_of(graph, c), H200)))
    best = select(graph, priced)[0]
    assert any(products(graph, priced[k].candidate) > 1 for k in best.chosen)


def test_groups_miss_their_estimates_apart_from_single_products() -> None:
    """What is learned of groups says nothing about one of their members alone."""
    graph = branches(tail=False)
    problems = collect(graph, enumerate_candidates(graph, LIMITS).candidates, Alternatives(graph, {}), H200)
    sorts: dict[Any, Any] = {}
    for entry in problems.tasks.values():
        count = sum(CATEGORY[n.prim] is Category.LINEAR for n in entry.problem.graph.nodes)
        if count:
            sorts.setdefault(count > 1 and len(entry.problem.graph.outputs) > 1, set()).add((entry.sort, entry.family))
    assert {sort for sort, _ in sorts[True]} == {"group"}
    assert not {family for _, family in sorts[True]} & {family for _, family in sorts[False]}


def test_products_of_different_depths_that_one_product_needs_next_are_candidates_together() -> None:
    """As the heads of a decoder: at four resolutions, each repeated to the finest, side by side before a product."""
    b = GraphBuilder()
    x, found = b.input(TensorType(F16, (128, 32))), []
    for i in range(3):
        found.append(linear(b, x, 64, relu=False))
        if i < 2:
            x = linear(b, b.slice(x, (0, 0), (b.type_of(x).shape[0] // 2, 32), (1, 1)), 32)
    fine = []
    for y in found:
        index = b.constant((np.arange(128) * b.type_of(y).shape[0] // 128).astype(np.int64))
        fine.append(b.add(Prim.GATHER, y, index, attrs=a.GatherAttrs(0)))
    graph = b.build([linear(b, b.add(Prim.CONCAT, *fine, attrs=a.ConcatAttrs(1)), 64)])
    rows = {tuple(sorted(graph.type_of(o).shape[0] for o in c.outputs)) for c in grouped(graph)}
    assert (32, 64, 128) in rows
