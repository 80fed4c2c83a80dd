"""Plans made part by part: they run, and cost little more than the optimum."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.orchestrate.graphs import residual_net, transformer
from tests.orchestrate.test_program import ancestors_of, grown_options, option, random_dag, sinks_of
from tests.orchestrate.test_scale import block_options
from tests.typed import noting

from weft.ir.graph import Graph
from weft.orchestrate import program
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import format_choices
from weft.orchestrate.heuristic import heuristic_plan
from weft.orchestrate.instance import Instance, execute
from weft.orchestrate.partition import parts_of, tighten
from weft.orchestrate.program import plan_by_parts, presolve, solve
from weft.orchestrate.select import Priced, build_instance

FACTOR = 1.02
"""A plan by parts costs at most so many times the optimum on these graphs."""


def total(instance: Instance, plan: Any) -> float:
    return sum(map(instance.price, plan))


def network(graph: Graph, seed: int) -> Instance:
    """Every kernel of a graph, with costs that are equal for equal work."""
    found = find_alternatives(graph)
    noise: dict[object, float] = {}
    rng = random.Random(seed)
    priced = []
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        for f in format_choices(found.graph, c):
            shapes = tuple(found.graph.type_of(v) for v in c.inputs + c.outputs)
            factor = noise.setdefault((c.members.bit_count(), shapes, f), rng.uniform(0.7, 1.5))
            nbytes = sum(t.nbytes for t in shapes)
            priced.append(Priced(c, f.inputs, f.outputs, (2.0 + nbytes / 1e4) * factor))
    return build_instance(found.graph, priced, alternatives=found)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("graph", [transformer(3), residual_net(6)], ids=["attention", "conv"])
def test_networks_by_parts(graph: Graph, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = network(graph, seed)
    kept = presolve(instance)
    quick = heuristic_plan(instance, kept)
    monkeypatch.setattr(program, "PART", len(kept) // 6)
    parts = parts_of(instance, kept, quick, len(kept) // 6)
    assert len(parts) > 2
    plan = plan_by_parts(instance, kept, quick)
    assert not execute(instance, plan)[1]
    assert execute(instance, plan)[0] == plan, "in execution order"
    best = solve(instance, gap=1e-4).cost_us
    assert best * (1 - 2e-4) <= total(instance, plan) <= best * FACTOR
    assert total(instance, plan) <= total(instance, quick)


def test_random_graphs_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the graph: it runs, and is no dearer than the plan that was cut."""
    monkeypatch.setattr(program, "PART", 5)
    rng = random.Random(1)
    cut = 0
    for number in range(24):
        dag = random_dag(rng, 9)
        results = sinks_of(dag)
        options = tuple(grown_options(dag, rng, reentrant=True, several=number % 2 == 1))
        instance = Instance(options, frozenset(), results, ancestors_of(dag, results))
        kept = presolve(instance)
        quick = heuristic_plan(instance, kept)
        cut += len(parts_of(instance, kept, quick, 5)) > 1
        plan = plan_by_parts(instance, kept, quick)
        assert not execute(instance, plan)[1]
        assert solve(instance).cost_us - 1e-5 <= total(instance, plan) <= total(instance, quick) + 1e-9
    assert cut > 8


def test_what_a_cut_costs_is_what_crosses_it() -> None:
    """One kernel over the whole chain is cheapest, and in no part of it."""
    chain = [option({v - 1} if v else (), {v}, 1.0, (v,)) for v in range(4)]
    whole = option((), {3}, 0.5, range(4))
    instance = Instance((*chain, whole), frozenset(), frozenset({3}), frozenset(range(4)))
    assert len(parts_of(instance, range(5), (0, 1, 2, 3), 2)) == 2
    assert solve(instance).chosen == (4,)
    assert len(parts_of(instance, range(5), (4,), 2)) == 1, "a plan of one kernel cannot be cut"


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, _ = block_options(1, random.Random(0))
    size = 12
    options = []
    for block in range(20):  # the same costs in every block
        for o in instance.options:
            reads = {v + size * block for v in o.reads}
            if block and 0 in o.computes:
                reads.add(size * block - 1)
            writes, computes = ({v + size * block for v in some} for some in (o.writes, o.computes))
            options.append(replace(o, reads=frozenset(reads), writes=frozenset(writes), computes=frozenset(computes)))
    n = 20 * size
    instance = Instance(tuple(options), frozenset(), frozenset({n - 1}), frozenset(range(n)))
    kept = presolve(instance)
    quick = heuristic_plan(instance, kept)
    least = len(kept) // 20 - 2
    parts = parts_of(instance, kept, quick, least)
    assert len(parts) >= 10
    assert len({p.signature for p in parts}) <= 4
    monkeypatch.setattr(program, "PART", least)
    calls = []
    real = program._milp
    monkeypatch.setattr(program, "_milp", noting(lambda *args: calls.append(1), real))
    plan = plan_by_parts(instance, kept, quick)
    assert len(calls) <= 8
    assert total(instance, plan) == pytest.approx(solve(instance).cost_us, rel=1e-6)


def test_needs_of_options_against_leaving_out() -> None:
    rng = random.Random(2)
    for _ in range(60):
        dag = random_dag(rng, rng.randint(2, 7))
        options = tuple(grown_options(dag, rng, reentrant=True, several=True))
        instance = Instance(options, frozenset(), sinks_of(dag))

        def derived(without: int, options: Any = options) -> set[int]:
            have: set[int] = set()
            while True:
                more = {v for o in options if without not in o.computes and o.reads <= have for v in o.writes} - have
                if not more:
                    return have
                have |= more

        expected = {p for p in range(len(dag)) if not instance.results <= derived(p)}
        assert tighten(instance).unavoidable == expected


def test_out_of_time_the_parts_answer() -> None:
    instance, _ = block_options(40, random.Random(0))
    started = time.perf_counter()
    quick = heuristic_plan(instance, presolve(instance))
    solution = program._first(program._Model.of(instance), quick, 0.0, 0.6)
    assert time.perf_counter() - started < 30.0
    assert solution.report.status in ("parts", "optimal", "limit", "heuristic")
    assert solution.cost_us <= total(instance, quick) + 1e-9
    assert not execute(instance, solution.chosen)[1]


def test_a_solver_that_gives_up_leaves_it_to_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole fails, its parts are small enough."""
    instance, _ = block_options(12, random.Random(0))
    quick = heuristic_plan(instance, presolve(instance))
    real = program._milp

    def small_only(costs: Any, *args: Any) -> Any:
        return real(costs, *args) if len(costs) < len(instance.options) / 2 else program._Answer(1, None, None)

    monkeypatch.setattr(program, "_milp", small_only)
    monkeypatch.setattr(program, "PART", len(instance.options) // 6)
    solution = solve(instance)
    assert solution.report.status == "parts"
    assert solution.cost_us < total(instance, quick)
    assert solution.report.bound_us <= solution.cost_us
    assert solution.report.gap == pytest.approx(1 - solution.report.bound_us / solution.cost_us)
    monkeypatch.setattr(program, "_milp", real)
    assert solution.cost_us <= FACTOR * solve(instance, gap=1e-4).cost_us
