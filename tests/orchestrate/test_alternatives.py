"""Alternatives compute what they stand for, and the program may pick them."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from tests.ir.random_graphs import random_inputs
from tests.orchestrate.graphs import Net, residual_net, transformer
from tests.typed import assert_allclose

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, NodeId, bits, mask_of
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.verify import verify_graph
from weft.kernels.candidate import Kind
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.select import Needs, Priced, build_instance, execution_order, heuristic, select
from weft.orchestrate.stored import Stored, stored_root


def alternatives_of(*outputs: NodeId, net: Net) -> Alternatives:
    return find_alternatives(net.build(*outputs))


def check_values(found: Alternatives) -> None:
    graph = found.graph
    whole = Graph(graph.nodes, graph.inputs, tuple(range(len(graph))), graph.constants)
    values = evaluate(whole, random_inputs(graph), precise=True)
    assert found.classes
    for extra, original in found.classes.items():
        assert_allclose(values[extra], values[original], rtol=1e-5, atol=1e-6)


def prims(found: Alternatives) -> list[str]:
    return [found.graph.nodes[i].prim.value for i in bits(found.extra)]


def run(found: Alternatives, priced: Any, chosen: Any) -> list[np.ndarray]:
    """Execute a plan on the reference, problem by problem."""
    graph = found.graph
    given = zip(graph.inputs, random_inputs(graph), strict=True)
    memory: dict[tuple[int, Format], np.ndarray] = {(v, Format.ROW): x.astype(np.float64) for v, x in given}
    for k in chosen:
        p = priced[k]
        e = extract(graph, p.candidate, p.input_formats, p.output_formats, found)
        operands = []
        for i, f in zip(e.inputs, e.problem.input_formats, strict=True):
            weight = graph.nodes[i].prim is Prim.CONSTANT
            operands.append(graph.constant(i) if weight else memory[i, f])
        results = evaluate(e.problem.graph, operands, precise=True)
        for o, f, value in zip(e.outputs, e.problem.output_formats, results, strict=True):
            memory[found.classes.get(o, o), f] = value
    return [memory[stored_root(graph, o), Format.ROW] for o in graph.outputs]


def priced_of(found: Alternatives, rng: random.Random) -> list[Priced]:
    priced = []
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        for f in format_choices(found.graph, c):
            cost = rng.uniform(1, 4) * (0.3 if c.members & found.extra else 1.0)
            priced.append(Priced(c, f.inputs, f.outputs, cost if c.kind is not Kind.CONVERT else 0.2))
    return priced


def qkv() -> tuple[Net, list[NodeId]]:
    net = Net()
    x = net.input(4, 32)
    return net, [net.relu(net.linear(x, n)) for n in (16, 16, 8)]


def test_products_of_one_operand_merge_with_their_biases() -> None:
    net, outputs = qkv()
    found = alternatives_of(*outputs, net=net)
    assert [p for p in prims(found) if p not in ("constant", "broadcast", "reshape")] == ["matmul", "add"] + [
        "slice"
    ] * 3
    assert {found.graph.nodes[o].prim for o in found.classes.values()} == {Prim.ADD}
    check_values(found)
    verify_graph(found.graph)


def linear_of_rows(net: Net, rows: NodeId, shape: tuple[int, ...], columns: int) -> NodeId:
    """A product of flat rows, their dimensions as they were, then the bias: how an importer writes a linear layer."""
    product = net.b.add(Prim.MATMUL, rows, net.weight(32, columns))
    return net.b.apply(Prim.ADD, net.b.reshape(product, (*shape, columns)), net.weight(columns))


def test_biases_behind_reshapes_of_rows_are_merged_too() -> None:
    net = Net()
    rows = net.b.reshape(net.input(2, 3, 32), (6, 32))
    found = alternatives_of(*(net.relu(linear_of_rows(net, rows, (2, 3), n)) for n in (16, 8)), net=net)
    assert {found.graph.nodes[o].prim for o in found.classes.values()} == {Prim.ADD}
    assert {found.graph.nodes[e].prim for e in found.classes} == {Prim.SLICE}
    check_values(found)
    verify_graph(found.graph)


def test_biases_of_unlike_rows_stay_outside() -> None:
    net = Net()
    rows = net.b.reshape(net.input(2, 3, 32), (6, 32))
    outputs = [net.relu(linear_of_rows(net, rows, shape, 8)) for shape in ((2, 3), (3, 2))]
    found = alternatives_of(*outputs, net=net)
    assert {found.graph.nodes[o].prim for o in found.classes.values()} == {Prim.MATMUL}
    check_values(found)


def test_a_bias_that_others_cannot_share_stays_outside() -> None:
    net = Net()
    x = net.input(4, 32)
    y = net.linear(x, 8)
    z = net.b.add(Prim.MATMUL, x, net.weight(32, 16))
    found = alternatives_of(y, z, net=net)
    assert {found.graph.nodes[o].prim for o in found.classes.values()} == {Prim.MATMUL}
    check_values(found)


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_of_one_image_merge(bias: bool) -> None:
    net = Net()
    x = net.input(1, 4, 6, 6)
    found = alternatives_of(*(net.relu(net.conv(x, n, 1, bias=bias)) for n in (8, 24)), net=net)
    assert len(found.classes) == 2
    check_values(found)


def test_convolutions_that_differ_do_not_merge() -> None:
    net = Net()
    x = net.input(1, 4, 6, 6)
    found = alternatives_of(net.conv(x, 8, 1), net.conv(x, 8, 3), net.conv(x, 8, 1, stride=2), net=net)
    assert not found.classes
    assert len(found.graph) == len(net.b)


def test_division_moves_behind_the_product() -> None:
    graph = transformer(1)
    found = find_alternatives(graph)
    moved = [e for e, o in found.classes.items() if found.graph.nodes[e].prim is Prim.DIV]
    assert len(moved) == 2, "over the sum as it is (A2), and over a column of the product (A4)"
    check_values(found)


def test_sum_of_a_left_operand_becomes_a_product_with_ones() -> None:
    found = find_alternatives(transformer(1))
    sums = [o for o in found.classes.values() if found.graph.nodes[o].prim is Prim.REDUCE_SUM]
    assert len(sums) == 1, "the softmax; norms feed no product with their operand"


def attention(
    *, queries: int = 6, keys: int = 5, width: int = 8, batch: Any = (2,), shift: Any = None, over: Any = None
) -> tuple[Net, list[NodeId]]:
    """exp(q) over the sum of its rows, times v."""
    net = Net()
    b = net.b
    e = b.apply(Prim.EXP, net.input(*batch, queries, keys))
    v = net.input(*batch, keys, width)
    s = b.reduce(Prim.REDUCE_SUM, e if over is None else over(net, e), (len(batch) + 1,))
    p = b.apply(Prim.DIV, e, s if shift is None else b.apply(Prim.ADD, s, shift))
    return net, [b.add(Prim.MATMUL, p, v)]


def quotients_of_one_product(found: Alternatives) -> list[NodeId]:
    """Extra divisions of which both operands are columns of one product (A4)."""
    nodes = found.graph.nodes
    sliced = []
    for e in found.classes:
        if nodes[e].prim is Prim.DIV:
            x, y = nodes[e].inputs
            y = nodes[y].inputs[0] if nodes[y].prim is Prim.BROADCAST else y
            if nodes[x].prim is nodes[y].prim is Prim.SLICE and nodes[x].inputs == nodes[y].inputs:
                sliced.append(e)
    return sliced


@pytest.mark.parametrize(("width", "columns"), [(8, 16), (7, 8), (15, 16), (23, 24), (32, 40)])
def test_a_column_of_ones_gives_the_sum(width: int, columns: int) -> None:
    net, outputs = attention(width=width)
    found = alternatives_of(*outputs, net=net)
    assert len(quotients_of_one_product(found)) == (columns <= 1.5 * width)
    products = {found.graph.type_of(i).shape[-1] for i in bits(found.extra) if found.graph.nodes[i].prim is Prim.MATMUL}
    assert (columns in products) == (columns <= 1.5 * width), (
        "padded to the width of the units, unless that is too wide"
    )
    check_values(found)


def test_a_column_of_ones_without_a_quotient() -> None:
    """Linear attention: numerator and denominator are products of the same operand already."""
    net = Net()
    b = net.b
    e, v = net.input(6, 5), net.input(5, 16)
    outputs = [b.add(Prim.MATMUL, e, v), b.reduce(Prim.REDUCE_SUM, e, (1,))]
    found = alternatives_of(*outputs, net=net)
    sliced = {o for x, o in found.classes.items() if found.graph.nodes[x].prim is Prim.SLICE}
    assert sliced == set(outputs)
    check_values(found)


@pytest.mark.parametrize(
    "changed",
    [
        {"shift": 1e-6},
        {"over": lambda net, e: net.b.apply(Prim.ABS, e)},
        {"width": 4},
    ],
    ids=["a sum that is shifted", "a sum of something else", "few columns"],
)
def test_no_column_of_ones_where_it_gives_something_else(changed: dict[str, Any]) -> None:
    net, outputs = attention(**{"width": 32} | changed)
    found = alternatives_of(*outputs, net=net)
    assert not quotients_of_one_product(found)
    assert not any(found.graph.nodes[i].prim is Prim.PAD and changed != {"shift": 1e-6} for i in bits(found.extra))


def test_no_column_of_ones_for_a_sum_over_another_axis() -> None:
    net = Net()
    b = net.b
    e, v = net.input(5, 5), net.input(5, 16)
    found = alternatives_of(b.add(Prim.MATMUL, e, v), b.reduce(Prim.REDUCE_SUM, e, (0,)), net=net)
    assert not found.classes


def test_no_column_of_ones_for_values_of_fewer_batches() -> None:
    net = Net()
    b = net.b
    e, v = net.input(3, 6, 5), net.input(5, 16)
    found = alternatives_of(b.add(Prim.MATMUL, e, v), b.reduce(Prim.REDUCE_SUM, e, (2,)), net=net)
    assert Prim.PAD.value not in prims(found)


def test_a_sum_that_its_values_are_made_of_closes_no_cycle() -> None:
    """v needs the sum of e, so the sum must not come from e @ [v | 1]; the rest is offered all the same."""
    net = Net()
    b = net.b
    e = net.input(5, 5)
    s = b.reduce(Prim.REDUCE_SUM, e, (1,))
    v = b.apply(Prim.MUL, net.input(5, 16), s)
    found = alternatives_of(b.add(Prim.MATMUL, e, v), net=net)
    assert found.acyclic()
    by_class = {o: x for x, o in found.classes.items()}
    assert found.graph.nodes[by_class[s]].prim is Prim.MATMUL, "as e @ 1"
    assert Prim.SLICE.value in prims(found)
    check_values(found)


def test_scale_folds_where_others_read_the_product() -> None:
    net = Net()
    conv = net.conv(net.input(1, 4, 6, 6), 8, bias=False)
    y = net.batch_norm(conv)
    found = alternatives_of(net.relu(y), net.b.apply(Prim.EXP, conv), net=net)
    assert list(found.classes.values()) == [y]
    check_values(found)


def test_scale_of_a_product_alone_is_the_clean_ups_business() -> None:
    net = Net()
    y = net.batch_norm(net.conv(net.input(1, 4, 6, 6), 8, bias=False))
    assert not alternatives_of(net.relu(y), net=net).classes


def test_scale_that_overflows_is_not_folded() -> None:
    net = Net()
    conv = net.conv(net.input(1, 4, 6, 6), 8, bias=False)
    big = net.b.constant(np.full((8, 1, 1), 3e38, np.float32))
    y = net.b.apply(Prim.MUL, conv, big)
    assert not alternatives_of(y, net.b.apply(Prim.EXP, conv), net=net).classes


def test_strict_has_none() -> None:
    graph = transformer(1)
    assert find_alternatives(graph).classes
    assert not find_alternatives(graph, strict=True).classes
    assert find_alternatives(graph, strict=True).graph is graph


def test_originals_keep_their_ids_and_never_read_extras() -> None:
    graph = transformer(2)
    found = find_alternatives(graph)
    old = len(graph)
    assert found.graph.nodes[:old] == graph.nodes
    assert found.graph.outputs == graph.outputs
    assert found.extra == mask_of(range(old, len(found.graph)))
    assert len(found.graph) <= 2 * old + 16
    assert set(found.classes) <= set(bits(found.extra))


def test_candidates_without_extras_are_those_of_the_graph() -> None:
    graph = transformer(1)
    found = find_alternatives(graph)
    plain = {(c.members, c.outputs) for c in enumerate_candidates(graph).candidates if c.members}
    union = enumerate_candidates(found.graph, alternatives=found).candidates
    old = {(c.members, c.outputs) for c in union if c.members and not c.members & found.extra}
    assert old == plain
    new = [c for c in union if c.members & found.extra]
    assert any(c.members & ~found.extra for c in new), "an alternative fused with a reader"
    for c in union:
        assert not set(c.inputs) & set(found.classes), "inputs are named by the class"


@pytest.mark.parametrize("seed", range(6))
def test_plans_with_alternatives_compute_the_graph(seed: int) -> None:
    rng = random.Random(seed)
    if seed % 3 == 0:
        net, outputs = qkv()
        graph = net.build(*outputs)
    else:
        graph = transformer(1) if seed % 3 == 1 else residual_net(1)
    found = find_alternatives(graph)
    priced = priced_of(found, rng)
    expected = evaluate(graph, [x.astype(np.float64) for x in random_inputs(graph)], precise=True)
    solution = select(found.graph, priced, alternatives=found, plans=1, gap=0.0)[0]
    plans = [solution.chosen, heuristic(found.graph, priced, alternatives=found)]
    if found.classes:
        assert any(priced[k].candidate.members & found.extra for k in solution.chosen), "cheap here, so it is used"
    for chosen in plans:
        for value, wanted in zip(run(found, priced, chosen), expected, strict=True):
            assert_allclose(value.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def unavoidable_kinds(found: Alternatives) -> set[Prim]:
    unavoidable = Needs.of(Stored.of(found.graph), found).unavoidable
    return {found.graph.nodes[v].prim for v in unavoidable if v < len(found.graph)}


def test_cover_cuts_ask_only_for_the_unavoidable() -> None:
    net, outputs = qkv()
    found = alternatives_of(*outputs, net=net)
    kinds = unavoidable_kinds(found)
    assert Prim.MATMUL not in kinds, "every product has a way around"
    assert {Prim.ADD, Prim.MAX} <= kinds, "the biased value is computed one way or the other"
    plain = Alternatives(found.graph, {})
    assert Prim.MATMUL in unavoidable_kinds(plain)


def merged_products() -> Graph:
    net, outputs = qkv()
    return net.build(*outputs)


def bases_needed(found: Alternatives, targets: Collection[NodeId]) -> set[int]:
    """Bases without which some target cannot be derived, by leaving out one after the other."""
    stored, classes, n = Stored.of(found.graph), found.classes, len(found.graph)
    ranks = found.ranks()
    order = sorted(bits(stored.work | found.work), key=lambda v: (ranks[v], v))
    needed = set()
    for base in range(2 * n):
        have: set[int] = set()
        for v in order:
            reads = {classes.get(r, r) for r in bits(stored.reads[v] & ~stored.leaves)}
            if base not in (classes.get(v, v), n + v) and reads <= have:
                have.add(classes.get(v, v))
        if not set(targets) <= have:
            needed.add(base)
    return needed


@pytest.mark.parametrize(
    "graph", [transformer(1), residual_net(1), merged_products()], ids=["attention", "conv", "products"]
)
def test_needs_against_leaving_out(graph: Graph) -> None:
    found = find_alternatives(graph)
    stored = Stored.of(found.graph)
    needs = Needs.of(stored, found)
    n = len(found.graph)
    several = set(found.classes) | set(found.classes.values())
    known = set(range(n)) | {n + v for v in several}
    every = bases_needed(found, list(bits(stored.results))) & known
    assert needs.unavoidable == every
    members = [
        v
        for c in sorted(set(found.classes.values()))
        for v in sorted({c} | {e for e, o in found.classes.items() if o == c})
    ]
    assert [w.base for w in needs.ways] == [found.classes.get(v, v) for v in members]
    for way, v in list(zip(needs.ways, members, strict=True))[:8]:
        reads = [found.classes.get(r, r) for r in bits(stored.reads[v] & ~stored.leaves)]
        assert way.needs == (bases_needed(found, reads) & known | {n + v}) - every


def test_the_subtlety_of_cover_cuts_costs_the_optimum() -> None:
    """With a cut for every original primitive the merged product could never replace the three."""
    net, outputs = qkv()
    found = alternatives_of(*outputs, net=net)
    priced = priced_of(found, random.Random(1))
    instance = build_instance(found.graph, priced, alternatives=found)
    assert any(p.candidate.members & found.extra for p in priced)
    solution = select(found.graph, priced, alternatives=found, plans=1)[0]
    used = mask_of(m for k in solution.chosen for m in bits(priced[k].candidate.members))
    matmuls = mask_of(i for i, n in enumerate(found.graph.nodes) if n.prim is Prim.MATMUL)
    assert used & matmuls & ~found.extra == 0
    assert solution.cost_us <= sum(instance.price(k) for k in heuristic(found.graph, priced, alternatives=found)) + 1e-6


def test_types_of_a_class_must_agree() -> None:
    net = Net()
    x = net.input(4, 8)
    y, z = net.relu(x), net.b.reduce(Prim.REDUCE_SUM, x, (1,))
    with pytest.raises(InvalidGraphError, match="types differ"):
        Alternatives(net.build(y, z), {z: y})


def test_cycles_are_refused() -> None:
    net = Net()
    b = net.b
    x = net.input(4, 8)
    y = b.apply(Prim.EXP, x)
    z = b.apply(Prim.NEG, y)
    w = b.apply(Prim.ABS, z)
    with pytest.raises(InvalidGraphError, match="alternatives close a cycle"):
        Alternatives(net.build(z), {w: y}, 1 << w).ranks()


def test_library_choice_runs_in_the_union() -> None:
    net, outputs = qkv()
    found = alternatives_of(*outputs, net=net)
    priced = priced_of(found, random.Random(0))
    singles = [
        k for k, p in enumerate(priced) if p.candidate.kind is Kind.SINGLE and not p.candidate.members & found.extra
    ]
    order = execution_order(found.graph, priced, singles, alternatives=found)
    assert sorted(order) == singles
    with pytest.raises(InvalidGraphError, match="never writes"):
        execution_order(found.graph, priced, singles[1:], alternatives=found)
