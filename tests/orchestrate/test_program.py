"""The integer program against an oracle that knows nothing of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.orchestrate.oracle import oracle
from tests.slow import few

from weft.errors import InvalidGraphError
from weft.ir.graph import bits, mask_of
from weft.orchestrate import program
from weft.orchestrate.abstract import Dag, Reentry, grow
from weft.orchestrate.heuristic import _Cover, heuristic_plan, improved
from weft.orchestrate.instance import Instance, Option, Way, execute, out_of_reach, trim
from weft.orchestrate.program import best_solutions, presolve, solve


def option(reads: Any, writes: Any, cost: Any, computes: Any = (), **more: Any) -> Any:
    return Option(frozenset(reads), frozenset(writes), cost, frozenset(computes), **more)


def random_dag(rng: random.Random, n: int) -> Dag:
    return Dag.of([mask_of(rng.sample(range(v), min(v, rng.choice((0, 1, 1, 2, 2, 3))))) for v in range(n)])


def sinks_of(dag: Dag) -> frozenset[int]:
    return frozenset(v for v in range(len(dag)) if not dag.consumers[v])


def ancestors_of(dag: Dag, results: Any) -> frozenset[int]:
    mask = mask_of(results)
    for r in results:
        mask |= dag.ancestors[r]
    return frozenset(bits(mask))


def grown_options(dag: Dag, rng: random.Random, *, reentrant: bool, several: bool) -> list[Option]:
    n = len(dag)
    reentry = Reentry.of(dag, (1 << n) - 1) if reentrant else None
    options = []
    for v in range(n):
        for s in grow(dag, v, lambda m: "", reentry=reentry).sets:
            if s.bit_count() > 1 and rng.random() < 0.4:
                continue
            cost = rng.uniform(1, 4) * (1 + 0.3 * s.bit_count())
            outputs = {v}
            if several and not dag.missing(s):
                outputs |= {m for m in bits(s) if rng.random() < 0.3}
            options.append(option(bits(dag.inputs_of(s)), outputs, cost, bits(s)))
    if several:  # unions of unrelated sets
        for _ in range(6):
            s = rng.getrandbits(n)
            if s and not dag.missing(s):
                outputs = set(bits(dag.written(s, mask_of(sinks_of(dag)))))
                if outputs:
                    options.append(option(bits(dag.inputs_of(s)), outputs, rng.uniform(1, 4), bits(s)))
    return options


@pytest.fixture(params=[0, 10**9], ids=["relaxed first", "all at once"], autouse=True)
def relax_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RELAX_FROM", request.param)


GRAPHS = 500
"""Random graphs per feature; each is compared with the oracle by itself."""
TOGETHER = 20
"""Instances solved side by side: a solver starts in the time that it needs for twenty of them."""


def side_by_side(instances: list[Instance]) -> tuple[Instance, list[range]]:
    """One instance that holds all, with nothing in common; and whose options are whose."""
    options: list[Option] = []
    owners: list[range] = []
    given: set[int] = set()
    results: set[int] = set()
    unavoidable: set[int] = set()
    ways: list[Way] = []
    ranks: list[int] = []

    def moved(values: Any) -> frozenset[int]:
        return frozenset(v + shift for v in values)

    for instance in instances:
        shift = len(ranks)  # of values and of bases alike
        used = instance.given.union(instance.results, *(o.reads | o.writes | o.computes for o in instance.options))
        for o in instance.options:
            o = replace(o, reads=moved(o.reads), writes=moved(o.writes), computes=moved(o.computes))
            options.append(replace(o, cost=o.cost + instance.launch_us * o.launches))
        owners.append(range(len(options) - len(instance.options), len(options)))
        given |= moved(instance.given)
        results |= moved(instance.results)
        unavoidable |= moved(instance.unavoidable)
        ways += [Way(way.base + shift, way.own + shift, moved(way.needs)) for way in instance.ways]
        width = max((*used, len(instance.rank) - 1)) + 1
        ranks += [
            shift + (instance.rank_of(v) if v < len(instance.rank) or not instance.rank else 0) for v in range(width)
        ]
    whole = Instance(
        tuple(options), frozenset(given), frozenset(results), frozenset(unavoidable), tuple(ways), tuple(ranks)
    )
    return whole, owners


def check(instances: list[Instance]) -> None:
    """The program finds the optimum of each instance, from the heuristic plan and from a dear one."""
    for start in range(0, len(instances), TOGETHER):
        some = instances[start : start + TOGETHER]
        expected = [oracle(i) for i in some]
        whole, owners = side_by_side(some)
        # a dear plan in place of the heuristic, so that it is the program that is tested
        everything = range(len(whole.options))
        solutions = [solve(whole, gap=0.0), solve(whole, gap=0.0, heuristic=everything)]
        if not program.RELAX_FROM:
            solutions += best_solutions(whole, 1, core=True)
        for solution in solutions:
            order, missing = execute(whole, solution.chosen)
            assert not missing
            assert order == solution.chosen, "in execution order"
            assert solution.report.status == "optimal"
            assert solution.report.bound_us <= sum(expected) + 1e-5
            for own, cost in zip(owners, expected, strict=True):
                found = sum(whole.price(k) for k in solution.chosen if k in own)
                assert found == pytest.approx(cost, rel=1e-6, abs=1e-5)
    for instance in instances:
        plan = heuristic_plan(instance, range(len(instance.options)))
        assert not execute(instance, plan)[1]


@pytest.fixture
def no_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks ties between equal plans is no part of the optimum."""
    monkeypatch.setattr(program, "TIE_US", 0.0)


@pytest.mark.usefixtures("no_ties")
@pytest.mark.parametrize(
    ("reentrant", "several"), few([(True, True), (False, False), (True, False), (False, True)], 2, unpack=True)
)
def test_random_graphs_against_dijkstra(reentrant: bool, several: bool) -> None:
    rng = random.Random(int(reentrant) * 2 + int(several))
    instances = []
    for _ in range(GRAPHS // 4):
        dag = random_dag(rng, rng.randint(1, 8))
        results = sinks_of(dag)
        options = tuple(grown_options(dag, rng, reentrant=reentrant, several=several))
        launch_us = rng.choice((0.0, 1.0))
        instances.append(Instance(options, frozenset(), results, ancestors_of(dag, results), launch_us=launch_us))
    check(instances)


def test_one_by_one_as_side_by_side() -> None:
    rng = random.Random(12)
    for _ in range(10):
        dag = random_dag(rng, 8)
        results = sinks_of(dag)
        options = tuple(grown_options(dag, rng, reentrant=True, several=True))
        instance = Instance(options, frozenset(), results, ancestors_of(dag, results))
        solution = solve(instance, gap=0.0, heuristic=range(len(options)))
        assert solution.cost_us == pytest.approx(oracle(instance), rel=1e-6, abs=1e-5)
        assert solution.report.status == "optimal"


@pytest.mark.slow
@pytest.mark.usefixtures("no_ties")
def test_cover_cuts_change_nothing_but_speed() -> None:
    rng = random.Random(9)
    instances = []
    for _ in range(GRAPHS // 4):
        dag = random_dag(rng, rng.randint(3, 8))
        options = tuple(grown_options(dag, rng, reentrant=True, several=True))
        instances.append(Instance(options, frozenset(), sinks_of(dag)))
    check(instances)


def formats_instance(rng: random.Random, dag: Dag) -> Instance:
    """Every value in two formats: 2v as given, 2v + 1 the other; conversions both ways."""
    n = len(dag)
    options = []
    for o in grown_options(dag, rng, reentrant=False, several=False):
        for _ in range(3):
            at = {v: rng.randint(0, 1) for v in o.reads | o.writes}
            reads = {2 * v + at[v] for v in o.reads}
            options.append(option(reads, {2 * v + at[v] for v in o.writes}, o.cost * rng.uniform(0.5, 1.5), o.computes))
    for v in range(n):
        for f in (0, 1):
            cost = rng.uniform(0.01, 0.4)
            options.append(option({2 * v + f}, {2 * v + 1 - f}, cost, conversion=True))
    results = sinks_of(dag)
    return Instance(
        tuple(options),
        frozenset(),
        frozenset(2 * r for r in results),
        ancestors_of(dag, results),
        rank=tuple(v // 2 for v in range(2 * n)),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_ties")
def test_formats_against_dijkstra() -> None:
    rng = random.Random(21)
    instances: list[Instance] = []
    while len(instances) < GRAPHS:
        instance = formats_instance(rng, random_dag(rng, rng.randint(1, 6)))
        if oracle(instance) < float("inf"):  # else a single primitive came in formats that nothing connects
            instances.append(instance)
    check(instances)


def test_conversions_do_not_feed_each_other() -> None:
    """The phantom: v in format 0 from format 1 and the other way round, and nobody computes v."""
    options = (
        option({0}, {1}, 0.1, conversion=True),
        option({1}, {0}, 0.1, conversion=True),
        option((), {0}, 10.0, (0,)),
        option({1}, {2}, 1.0, (1,)),
    )
    instance = Instance(options, frozenset(), frozenset({2}), frozenset({0, 1}), rank=(0, 0, 1))
    solution = solve(instance)
    assert solution.chosen == (2, 0, 3)
    assert solution.cost_us == pytest.approx(11.1)


def test_deadlock_of_two_convex_kernels_is_cut() -> None:
    """a→b and c→d; K1 writes {a, d}, K2 writes {b, c}: each convex, together stuck."""
    a, b, c, d = range(4)
    options = (
        option({c}, {a, d}, 1.0, (a, d)),
        option({a}, {b, c}, 1.0, (b, c)),
        option((), {a}, 3.0, (a,)),
        option({a}, {b}, 3.0, (b,)),
        option((), {c}, 4.0, (c,)),
        option({c}, {d}, 3.0, (d,)),
    )
    instance = Instance(options, frozenset(), frozenset({b, d}), frozenset(range(4)))
    solution = solve(instance)
    assert not execute(instance, solution.chosen)[1]
    assert solution.cost_us == pytest.approx(oracle(instance)) == pytest.approx(5.0)
    assert solution.report.cuts > 0
    assert execute(instance, (0, 1)) == ((), frozenset({a, b, c, d}))


def alternatives_case(rng: random.Random) -> Any:
    """Values with several primitives: `primitives[i] = (value, reads)`; kernels are chains of them.

    Bases are the values, and n + i for primitive i. What a way needs is found by leaving out one base after the other.
    """
    n = rng.randint(2, 7)
    primitives = [
        (v, frozenset(rng.sample(range(v), min(v, rng.choice((0, 1, 1, 2))))))
        for v in range(n)
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    results = frozenset({n - 1})
    options = []
    for i, (v, reads) in enumerate(primitives):
        options.append(option(reads, {v}, rng.uniform(1, 4), (v, n + i)))
        for j, (u, inner) in enumerate(primitives):  # two-primitive kernels
            if u in reads:
                options.append(option((reads - {u}) | inner, {v}, rng.uniform(1, 5), (u, v, n + j, n + i)))

    def derived(without: int) -> set[int]:
        have: set[int] = set()
        for i, (v, reads) in enumerate(primitives):  # values ascend, so one sweep derives everything
            if without not in (v, n + i) and reads <= have:
                have.add(v)
        return have

    bases = range(n + len(primitives))
    have = {p: derived(p) for p in bases}
    unavoidable = frozenset(p for p in bases if not results <= have[p])
    ways = tuple(
        Way(v, n + i, frozenset(p for p in bases if p == n + i or not reads <= have[p]))
        for i, (v, reads) in enumerate(primitives)
        if sum(v == u for u, _ in primitives) > 1
    )
    return Instance(tuple(options), frozenset(), results, unavoidable, ways), n


@pytest.mark.slow
@pytest.mark.usefixtures("no_ties")
def test_alternatives_against_dijkstra() -> None:
    rng = random.Random(33)
    check([alternatives_case(rng)[0] for _ in range(GRAPHS)])


def test_cover_cuts_for_every_value_cut_optima_off() -> None:
    """As they are without alternatives."""
    rng = random.Random(34)
    wrong = 0
    for _ in range(40):
        instance, n = alternatives_case(rng)
        everything = replace(instance, unavoidable=frozenset(range(n)))
        wrong += solve(everything, heuristic=range(len(everything.options))).cost_us > oracle(instance) + 1e-5
    assert wrong > 3, wrong


def test_given_values_need_no_kernel() -> None:
    instance = Instance((option({0}, {1}, 2.0, (1,)),), frozenset({0}), frozenset({0, 1}))
    assert solve(instance).chosen == (0,)


def test_nothing_to_do() -> None:
    solution = solve(Instance((), frozenset({0}), frozenset({0})))
    assert solution.chosen == ()
    assert solution.cost_us == 0.0


def test_an_impossible_instance_is_our_bug() -> None:
    with pytest.raises(InvalidGraphError, match=r"no kernel produces the values \[5\] \[W901\]"):
        solve(Instance((option({5}, {1}, 2.0),), frozenset({0}), frozenset({1})))


def test_what_is_out_of_reach_is_told_by_its_first_cause() -> None:
    kernels = (option({0}, {1}, 1.0), option({2}, {3}, 1.0), option({3}, {4}, 1.0), option({1, 6}, {7}, 1.0))
    turned = tuple(replace(option({a}, {b}, 1.0), conversion=True) for a, b in [(2, 8), (8, 2), (3, 9), (9, 3)])
    instance = Instance(kernels + turned, frozenset({0}), frozenset({1, 4, 9}))
    assert out_of_reach(instance) == (2, 8), "one value in two formats; what is computed of it follows"
    assert out_of_reach(replace(instance, results=frozenset({1}))) == ()
    assert out_of_reach(replace(instance, results=frozenset({7}))) == (6,)
    circle = (option({1}, {2}, 1.0), option({2}, {1}, 1.0))
    assert out_of_reach(Instance(circle, frozenset({0}), frozenset({2}))) == (2,)


def test_presolve_drops_the_dominated() -> None:
    options = (
        option({0}, {1}, 2.0),
        option({0}, {1}, 3.0),  # dearer
        option({0, 2}, {1}, 2.5),  # reads more
        option({0}, {1, 2}, 4.0),  # writes more: stays
        option({9}, {1}, 0.1),  # never producible
        option({1}, {0}, 0.1),  # writes what is given
    )
    assert presolve(Instance(options, frozenset({0}), frozenset({1}))) == [0, 3]


def test_presolve_keeps_the_optimum() -> None:
    rng = random.Random(2)
    for _ in range(GRAPHS):
        dag = random_dag(rng, rng.randint(2, 8))
        options = tuple(grown_options(dag, rng, reentrant=True, several=True))
        instance = Instance(options, frozenset(), sinks_of(dag))
        kept = presolve(instance)
        smaller = Instance(tuple(options[k] for k in kept), frozenset(), instance.results)
        assert oracle(smaller) == pytest.approx(oracle(instance))


def test_references_are_what_the_choice_says() -> None:
    """However options with several outputs took each other's place, by the definition: what is needed, counted anew."""
    rng = random.Random(5)
    for _ in range(GRAPHS):
        dag = random_dag(rng, rng.randint(5, 9))
        options = grown_options(dag, rng, reentrant=True, several=True)
        cover = _Cover(Instance(tuple(options), frozenset(), sinks_of(dag)), range(len(options)), several=True)
        plan = cover.plan()
        needs, used, waiting = Counter[int](), Counter[int](), sorted(sinks_of(dag))
        while waiting:
            v = waiting.pop()
            needs[v] += 1
            if needs[v] == 1:
                k = cover.choice[v]
                used[k] += 1
                waiting += options[k].reads if used[k] == 1 else ()
        assert {v: n for v, n in cover.needs.items() if n} == needs
        assert {k: n for k, n in cover.used.items() if n} == used
        assert set(plan) == set(used) and not execute(cover.instance, plan)[1]


def test_trim_drops_what_is_not_needed() -> None:
    instance = Instance(
        (option((), {0}, 1.0), option({0}, {1}, 1.0), option((), {1}, 1.5), option((), {2}, 9.0)),
        frozenset(),
        frozenset({1}),
    )
    assert trim(instance, (0, 1, 2, 3)) == (0, 1)
    with pytest.raises(InvalidGraphError, match="a plan cannot run"):
        trim(instance, (1,))


def test_launch_cost_decides() -> None:
    options = (option((), {0}, 1.0), option({0}, {1}, 1.0), option((), {1}, 3.0))
    two = Instance(options, frozenset(), frozenset({1}))
    assert solve(two).chosen == (0, 1)
    assert solve(Instance(options, frozenset(), frozenset({1}), launch_us=5.0)).chosen == (2,)


def test_ties_have_one_winner() -> None:
    options = tuple(option((), {0}, 1.0, launches=1) for _ in range(5))
    assert solve(Instance(options, frozenset(), frozenset({0}))).chosen == (0,)


def test_three_plans_that_differ() -> None:
    rng = random.Random(8)
    for _ in range(20):
        dag = random_dag(rng, 7)
        options = tuple(grown_options(dag, rng, reentrant=False, several=False))
        results = sinks_of(dag)
        plans = best_solutions(Instance(options, frozenset(), results, ancestors_of(dag, results)), 3)
        costs = [p.cost_us for p in plans]
        assert costs == sorted(costs)
        assert len({frozenset(p.chosen) for p in plans}) == len(plans)
        for p in plans:
            assert not execute(Instance(options, frozenset(), results), p.chosen)[1]


def test_a_core_is_solved_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RELAX_FROM", 0)
    sizes = []
    whole = program._milp

    def watched(costs: Any, rows: Any, columns: Any, *rest: Any) -> Any:
        sizes.append(len(columns))
        return whole(costs, rows, columns, *rest)

    monkeypatch.setattr(program, "_milp", watched)
    chain = tuple(option({v - 1} if v else (), {v}, cost, (v,)) for v in range(20) for cost in (1.0, 1.3))
    chain += tuple(option({v - 2} if v > 1 else (), {v}, 2.2, (v - 1, v)) for v in range(1, 20, 2))
    instance = Instance(chain, frozenset(), frozenset({19}), frozenset(range(20)))
    found = best_solutions(instance, 2, gap=1e-3, core=True)
    assert found[0].report.status == "optimal"
    assert found[0].cost_us == pytest.approx(20.0)
    assert sizes[0] < len(chain), "not what lifts the relaxation"
    assert found[0].cost_us <= found[1].cost_us < 21.0
    again = best_solutions(instance, 1, gap=1e-3, core=True, start=found[0].chosen)
    assert again[0].chosen == found[0].chosen


def test_a_core_out_of_time_gives_the_heuristic_plan_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RELAX_FROM", 0)
    options = (option((), {0}, 1.0, (0,)), option((), {0, 1}, 5.0, (0, 1)), option({0}, {1}, 1.0, (1,)))
    instance = Instance(options, frozenset(), frozenset({1}), frozenset({0, 1}))
    found = best_solutions(instance, 1, seconds=0.0, core=True)[0]
    assert found.chosen == (0, 2)
    assert best_solutions(instance, 1, seconds=0.0, core=True, start=(1,))[0].chosen == (1,)


def test_small_kernels_are_joined_though_the_gap_is_worth_more_than_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "RELAX_FROM", 0)
    updates = tuple(option({0}, {v}, 0.5, (v,)) for v in range(1, 11))
    options = (option((), {0}, 1000.0, (0,)), *updates, option({0}, range(1, 11), 1.0, range(1, 11)))
    results = frozenset(range(1, 11))
    instance = Instance(options, frozenset(), results, frozenset(range(11)))
    found = best_solutions(instance, 1, gap=0.015, seconds=0.0, core=True, start=range(11))[0]
    assert found.chosen == (0, 11)
    assert found.report.objective_us == found.cost_us == 1001.0
    assert found.report.bound_us <= 1001.0


@pytest.mark.parametrize("seed", few(list(range(12)), 6))
def test_an_improved_plan_runs_and_is_never_dearer(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        dag = random_dag(rng, rng.randint(2, 9))
        options = tuple(grown_options(dag, rng, reentrant=True, several=True))
        instance = Instance(options, frozenset(), sinks_of(dag))
        everything = range(len(options))
        plan = trim(instance, rng.sample(everything, len(options)))
        found = improved(instance, presolve(instance), plan)
        assert not execute(instance, found)[1]
        cost = sum(map(instance.price, found))
        assert cost <= sum(map(instance.price, plan))
        assert sum(map(instance.price, improved(instance, presolve(instance), found))) <= cost
        assert improved(instance, everything, ()) == (), "a plan that gives no result is left as it is"


def test_no_second_plan_where_there_is_one() -> None:
    assert len(best_solutions(Instance((option((), {0}, 1.0),), frozenset(), frozenset({0})), 3)) == 1


def test_without_time_the_heuristic_answers() -> None:
    dag = Dag.of([0, 1, 2, 4])
    options = tuple(grown_options(dag, random.Random(0), reentrant=False, several=False))
    everything = range(len(options))  # as a plan: too dear for the relaxation to prove it
    solution = solve(Instance(options, frozenset(), frozenset({3})), seconds=0.0, heuristic=everything)
    assert solution.report.status == "heuristic"
    assert set(solution.chosen) == set(everything)
    assert not execute(Instance(options, frozenset(), frozenset({3})), solution.chosen)[1]


def test_heuristic_survives_long_chains() -> None:
    n = 3000
    options = tuple(option({v - 1} if v else (), {v}, 1.0) for v in range(n))
    assert len(heuristic_plan(Instance(options, frozenset(), frozenset({n - 1})), range(n))) == n


def test_heuristic_is_close() -> None:
    rng = random.Random(6)
    ratios = []
    for _ in range(100):
        dag = random_dag(rng, 8)
        results = sinks_of(dag)
        options = tuple(grown_options(dag, rng, reentrant=True, several=False))
        instance = Instance(options, frozenset(), results, ancestors_of(dag, results))
        cost = sum(map(instance.price, heuristic_plan(instance, presolve(instance))))
        ratios.append(cost / oracle(instance))
    ratios.sort()
    assert ratios[0] >= 1 - 1e-9
    assert ratios[50] < 1.02
    assert ratios[90] < 1.05


def test_a_plan_within_the_gap_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RELAX_FROM", 0)
    options = tuple(option({v - 1} if v else (), {v}, 1.0, (v,)) for v in range(20))
    instance = Instance(options, frozenset(), frozenset({19}), frozenset(range(20)))

    def never(*_: Any) -> None:
        raise AssertionError("the solver ran although the relaxation proves the plan")

    monkeypatch.setattr(program, "_milp", never)
    solution = solve(instance, gap=1e-3)
    assert solution.report.status == "optimal"
    assert solution.report.gap < 1e-3
    assert solution.cost_us == pytest.approx(20.0)


def test_a_dear_plan_at_hand_does_not_stop_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RELAX_FROM", 0)
    options = (option((), {0}, 1.0, (0,)), option((), {0, 1}, 5.0, (0, 1)), option({0}, {1}, 1.0, (1,)))
    instance = Instance(options, frozenset(), frozenset({1}), frozenset({0, 1}))
    assert solve(instance, heuristic=(1,)).chosen == (0, 2)
