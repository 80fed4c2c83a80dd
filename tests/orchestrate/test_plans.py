"""Plans that are executed: what was selected computes what the graph computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.ir.random_graphs import random_graph, random_inputs
from tests.orchestrate.graphs import Net, residual_net, transformer
from tests.typed import assert_allclose

from weft.errors import InvalidGraphError, OptionError
from weft.ir.graph import Graph, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.kernels.candidate import Kind
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.images import formats_in, image_values
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.memory import peak_bytes
from weft.orchestrate.select import Priced, build_instance, execution_order, heuristic, select
from weft.orchestrate.stored import Stored, stored_root


def random_prices(graph: Graph, rng: random.Random, limits: EnumerationLimits) -> list[Priced]:
    priced = []
    for c in enumerate_candidates(graph, limits).candidates:
        for f in format_choices(graph, c):
            base = 0.3 if c.kind is Kind.CONVERT else 1.0 + 0.2 * c.members.bit_count()
            priced.append(Priced(c, f.inputs, f.outputs, base * rng.uniform(0.3, 2.0)))
    return priced


def check_plan(graph: Graph, priced: list[Priced], chosen: Any) -> None:
    memory = {(i, Format.ROW): x for i, x in zip(graph.inputs, random_inputs(graph), strict=True)}
    for k in chosen:
        p = priced[k]
        cut = extract(graph, p.candidate, p.input_formats, p.output_formats)
        operands = []
        for i, f in zip(cut.inputs, cut.problem.input_formats, strict=True):
            operands.append(graph.constant(i) if graph.nodes[i].prim is Prim.CONSTANT else memory[i, f])
        results = evaluate(cut.problem.graph, operands, precise=True)
        memory.update(zip(zip(cut.outputs, cut.problem.output_formats, strict=True), results, strict=True))
    expected = evaluate(graph, random_inputs(graph), precise=True)
    live = Stored.of(graph).work
    for o, wanted in zip(graph.outputs, expected, strict=True):
        root = stored_root(graph, o)
        if live >> root & 1 and root == o:
            assert_allclose(memory[o, Format.ROW], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs(seed: int) -> None:
    graph = random_graph(seed)
    priced = random_prices(graph, random.Random(seed), EnumerationLimits.complete())
    for solution in select(graph, priced, gap=0.0):
        check_plan(graph, priced, solution.chosen)
    check_plan(graph, priced, heuristic(graph, priced))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("graph", [transformer(1), residual_net(2)], ids=["attention", "conv"])
def test_networks(graph: Graph, seed: int) -> None:
    priced = random_prices(graph, random.Random(seed), EnumerationLimits())
    solutions = select(graph, priced, gap=0.0)
    assert len(solutions) == 3
    for solution in solutions:
        check_plan(graph, priced, solution.chosen)
    quick = heuristic(graph, priced)
    check_plan(graph, priced, quick)
    cost = sum(priced[k].cost_us for k in quick)
    assert solutions[0].cost_us <= cost + 1e-6
    assert cost <= 1.25 * solutions[0].cost_us


def test_library_plan_is_never_better_than_the_optimum() -> None:
    graph = transformer(2)
    priced = random_prices(graph, random.Random(0), EnumerationLimits())
    singles = [k for k, p in enumerate(priced) if p.candidate.kind is Kind.SINGLE]
    order = execution_order(graph, priced, singles)
    check_plan(graph, priced, order)
    best = select(graph, priced, plans=1)[0].cost_us
    assert best <= sum(priced[k].cost_us for k in order)


def test_a_limit_on_memory_is_kept_and_costs_something() -> None:
    """Fusing costs more here, so only the limit brings it about."""
    net = Net()
    x = net.input(16, 64)
    maps = [net.relu(net.b.apply(Prim.EXP, net.b.apply(Prim.MUL, x, float(i)))) for i in range(2, 6)]
    total = maps[0]
    for y in maps[1:]:
        total = net.b.apply(Prim.ADD, total, y)
    graph = net.build(total, net.b.apply(Prim.NEG, maps[0]))
    found = enumerate_candidates(graph).candidates
    row = [format_choices(graph, c)[0] for c in found]
    priced = [
        Priced(c, f.inputs, f.outputs, 0.9 + 0.2 * c.members.bit_count() ** 2) for c, f in zip(found, row, strict=True)
    ]
    instance = build_instance(graph, priced)
    free = select(graph, priced, plans=1, gap=0.0)[0]
    peak = peak_bytes(instance, free.chosen)
    size = graph.type_of(x).nbytes
    limited = select(graph, priced, plans=1, gap=0.0, memory_limit=peak - size)[0]
    assert peak_bytes(instance, limited.chosen) <= peak - size
    assert limited.cost_us > free.cost_us
    check_plan(graph, priced, limited.chosen)
    with pytest.raises(OptionError, match=f"memory_limit.* takes {peak} "):
        select(graph, priced, plans=1, memory_limit=2 * size - 1)


def test_channels_last_is_chosen_where_it_is_cheap() -> None:
    graph = residual_net(2)
    priced = []
    for c in enumerate_candidates(graph).candidates:
        for f in format_choices(graph, c):
            last = Format.LAST in f.inputs + f.outputs
            priced.append(Priced(c, f.inputs, f.outputs, 1.0 if c.kind is Kind.CONVERT else (2.0 if last else 20.0)))
    solution = select(graph, priced, gap=0.0, plans=1)[0]
    used = [priced[k] for k in solution.chosen]
    assert sum(p.candidate.kind is Kind.CONVERT for p in used) >= 1, "the input arrives row-major"
    convs = [p for p in used if any(graph.nodes[m].prim is Prim.CONV for m in bits(p.candidate.members))]
    assert all(p.output_formats == (Format.LAST,) for p in convs)
    check_plan(graph, priced, solution.chosen)


def test_results_are_row_major() -> None:
    net = Net()
    x = net.input(1, 4, 6, 6)
    graph = net.build(net.relu(net.conv(x, 8)))
    priced = random_prices(graph, random.Random(0), EnumerationLimits())
    rows = [p for p in priced if p.output_formats != (Format.ROW,)]
    with pytest.raises(InvalidGraphError, match="no kernel produces"):
        select(graph, rows)


def test_heads_of_attention_have_one_format() -> None:
    graph = transformer(1)
    assert image_values(graph) == 0
    assert all(formats_in(graph, i) == (Format.ROW,) for i in range(len(graph)))


def test_images_have_two_and_weights_one() -> None:
    graph = residual_net(1)
    for i, n in enumerate(graph.nodes):
        if n.prim is Prim.CONV:
            assert formats_in(graph, i) == (Format.ROW, Format.LAST)
            assert formats_in(graph, n.inputs[1]) == (Format.ROW,)
    assert formats_in(graph, graph.inputs[0]) == (Format.ROW, Format.LAST)
    assert formats_in(graph, graph.outputs[0]) == (Format.ROW,)


@pytest.mark.parametrize("make", [select, heuristic])
def test_what_is_missing_first_is_named_and_not_what_follows_from_it(make: Callable[..., Any]) -> None:
    graph = residual_net(1)
    first = next(i for i, n in enumerate(graph.nodes) if n.prim is Prim.CONV)
    priced = [
        p for p in random_prices(graph, random.Random(0), EnumerationLimits()) if not p.candidate.members >> first & 1
    ]
    with pytest.raises(InvalidGraphError, match=rf"no kernel produces the values %{first} conv [^%]*\[W901\]"):
        make(graph, priced)


def test_a_missing_kernel_is_named() -> None:
    graph = residual_net(1)
    priced = [p for p in random_prices(graph, random.Random(0), EnumerationLimits()) if len(p.candidate.outputs) > 1]
    with pytest.raises(InvalidGraphError, match=r"no kernel produces the values .* \[W901\]"):
        select(graph, priced)
