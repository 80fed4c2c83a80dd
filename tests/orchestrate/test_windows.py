"""Plans made window by window: they run, cost no more than the plan they begin with, and come near the optimum."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from tests.orchestrate.graphs import residual_net, transformer
from tests.orchestrate.test_partition import network, total
from tests.orchestrate.test_program import ancestors_of, grown_options, option, random_dag, sinks_of
from tests.orchestrate.test_scale import block_options
from tests.typed import noting

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph
from weft.orchestrate import program
from weft.orchestrate.heuristic import heuristic_plan
from weft.orchestrate.instance import Instance, execute
from weft.orchestrate.partition import Part
from weft.orchestrate.program import plan_by_windows, presolve, solve
from weft.orchestrate.windows import improved_by_windows

FACTOR = 1.002
"""A plan by windows costs at most so many times the optimum on these graphs."""


def exactly(part: Part, left: float) -> tuple[int, ...]:
    return solve(part.instance, heuristic=part.plan, seconds=left).chosen


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("graph", [transformer(3), residual_net(6)], ids=["attention", "conv"])
def test_networks_come_near_the_optimum(graph: Graph, seed: int) -> None:
    instance = network(graph, seed)
    found, came_to = plan_by_windows(instance, seconds=60.0)
    assert came_to == 0.0, "until nothing was left to find"
    assert execute(instance, found.chosen) == (found.chosen, frozenset())
    assert found.cost_us == pytest.approx(total(instance, found.chosen)) and found.report.status == "windows"
    best = solve(instance, gap=1e-4).cost_us
    assert best * (1 - 2e-4) <= found.cost_us <= best * FACTOR
    assert found.cost_us <= total(instance, heuristic_plan(instance, presolve(instance)))


def test_random_graphs() -> None:
    """Whatever the graph, where sweeps begin and how large windows are: it runs, and is no dearer."""
    rng = random.Random(3)
    cheaper = 0
    for number in range(40):
        dag = random_dag(rng, 9)
        results = sinks_of(dag)
        options = tuple(grown_options(dag, rng, reentrant=True, several=number % 2 == 1))
        instance = Instance(options, frozenset(), results, ancestors_of(dag, results))
        kept = presolve(instance)
        quick = tuple(rng.sample(kept, len(kept)))  # all of them: as dear as can be
        if execute(instance, quick)[1]:
            quick = heuristic_plan(instance, kept)
        begin, sizes = rng.choice((0.0, 0.3, 0.9)), rng.choice(((2,), (3, 6), (8, 16)))
        plan, _ = improved_by_windows(instance, kept, quick, exactly, seconds=30.0, begin=begin, sizes=sizes)
        assert not execute(instance, plan)[1]
        best, given = solve(instance).cost_us, total(instance, quick)
        assert best - 1e-5 <= total(instance, plan) <= given + 1e-9
        cheaper += total(instance, plan) < given - 1e-6
    assert cheaper > 20


def test_one_window_over_all_is_the_optimum() -> None:
    chain = [option({v - 1} if v else (), {v}, 1.0, (v,)) for v in range(4)]
    whole = option((), {3}, 2.5, range(4))
    instance = Instance((*chain, whole), frozenset(), frozenset({3}), frozenset(range(4)))
    assert improved_by_windows(instance, range(5), (0, 1, 2, 3), exactly, seconds=9.0, sizes=(4,))[0] == (4,)
    assert improved_by_windows(instance, range(5), (0, 1, 2, 3), exactly, seconds=9.0, sizes=(2,))[0] == (0, 1, 2, 3)


def test_steps_that_an_earlier_window_made_superfluous_are_left_out() -> None:
    """What follows them is looked at with all that was written before it."""
    both = option((), {0, 1, 2, 3}, 3.0, (0, 1, 2, 3))
    first = [option((), {v}, 2.0, (v,)) for v in range(4)]
    reads = {v: {v - 4} | ({v - 1} if v > 4 else set()) for v in range(4, 8)}
    behind, cheaper = ([option(reads[v], {v}, cost, (v,)) for v in range(4, 8)] for cost in (1.0, 0.5))
    instance = Instance((*first, *behind, both, *cheaper), frozenset(), frozenset(range(4, 8)), frozenset(range(8)))
    seen: list[Part] = []
    solve_ = noting(lambda part, _: seen.append(part), exactly)
    for sizes in ((2,), (2, 4)):
        plan, _ = improved_by_windows(instance, range(13), range(8), solve_, seconds=9.0, sizes=sizes)
        assert total(instance, plan) == 5.0 and set(plan) == {8, 9, 10, 11, 12}
    assert all(not execute(part.instance, part.plan)[1] for part in seen), "each window's steps run where they stand"


def test_a_plan_of_options_that_are_not_kept() -> None:
    chain = [option({v - 1} if v else (), {v}, 1.0, (v,)) for v in range(4)]
    same = option({2}, {3}, 1.0, (3, 9))
    instance = Instance((*chain, same), frozenset(), frozenset({3}), frozenset(range(4)))
    assert improved_by_windows(instance, range(4), (0, 1, 2, 4), exactly, seconds=9.0)[0] == (0, 1, 2, 4)


def test_equal_windows_are_solved_once() -> None:
    size, blocks = 4, 12
    options = []
    for b in range(blocks):
        first = b * size
        options += [option({first + v - 1} if first + v else (), {first + v}, 2.0, (first + v,)) for v in range(size)]
        options.append(option({first - 1} if b else (), {first + 1}, 3.0, (first, first + 1)))
    n = size * blocks
    instance = Instance(tuple(options), frozenset(), frozenset({n - 1}), frozenset(range(n)))
    asked: list[int] = []
    plan, _ = improved_by_windows(
        instance,
        range(len(options)),
        tuple(k for k in range(len(options)) if k % 5 != 4),
        noting(lambda *_: asked.append(1), exactly),
        seconds=60.0,
        sizes=(4,),
    )
    assert total(instance, plan) == solve(instance).cost_us == blocks * 7.0
    assert len(asked) <= 12 < 2 * blocks, "a window in the middle of a block, at its beginning, at either end of all"


def test_without_time_the_plan_stays() -> None:
    instance, _ = block_options(6, random.Random(0))
    kept = presolve(instance)
    quick = heuristic_plan(instance, kept)

    def never(part: Part, left: float) -> Any:
        raise AssertionError

    plan, came_to = improved_by_windows(instance, kept, quick, never, seconds=0.0, begin=0.25)
    assert plan == quick and came_to == pytest.approx(0.25, abs=1 / len(quick))


def test_the_next_one_begins_where_time_was_up(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, _ = block_options(6, random.Random(0))
    kept = presolve(instance)
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slowly(part: Part, left: float) -> tuple[int, ...]:
        now[0] += 1.0
        return part.plan

    quick = heuristic_plan(instance, kept)
    plan, came_to = improved_by_windows(instance, kept, quick, slowly, seconds=2.5, sizes=(8,))
    assert plan == quick and came_to == pytest.approx(12 / len(quick)), "three windows, each half over the one before"
    _, further = improved_by_windows(instance, kept, quick, slowly, seconds=2.5, begin=came_to, sizes=(8,))
    assert further == pytest.approx(24 / len(quick))
    _, other = improved_by_windows(instance, kept, quick, slowly, seconds=3.5, begin=further, sizes=(8,))
    assert 1.0 < other < 2.0, "in the other order, once the first has come to its end"
    _, same = improved_by_windows(instance, kept, quick, slowly, seconds=0.5, begin=other, sizes=(8,))
    assert other < same < 2.0


def test_readers_of_a_value_that_run_far_apart_are_looked_at_together() -> None:
    """One step makes what two need; of the plan one makes it again, behind a chain longer than a window."""
    first, chain = option((), {0}, 5.0, (0,)), [option({v - 1}, {v}, 1.0, (v,)) for v in range(1, 40)]
    beside, cheap = option((), {0, 99}, 5.5, (0, 99)), option({99}, {100}, 0.5, (100,))
    last = option({100}, {101}, 1.0, (101,))
    late = option({0}, {100}, 5.0, (99, 100))
    options = (first, *chain, late, last, beside, cheap)
    instance = Instance(options, frozenset(), frozenset({39, 101}), frozenset({*range(40), 99, 100, 101}))
    begun = (*range(42),)
    plan, _ = improved_by_windows(instance, range(len(options)), begun, exactly, seconds=20.0, sizes=(8,))
    assert total(instance, plan) == total(instance, begun) - 4.0


def test_a_plan_that_lost_a_kernel_is_begun_with() -> None:
    instance, _ = block_options(6, random.Random(0))
    best = plan_by_windows(instance, seconds=60.0)[0]
    rest = best.chosen[:3] + best.chosen[4:]
    assert execute(instance, rest)[1]
    again, _ = plan_by_windows(instance, seconds=0.0, start=rest)
    assert execute(instance, again.chosen) == (again.chosen, frozenset())
    assert len(set(rest) & set(again.chosen)) > len(rest) // 2
    assert plan_by_windows(instance, seconds=60.0, start=rest)[0].cost_us == pytest.approx(best.cost_us, rel=1e-3)


def test_what_no_option_writes_is_said() -> None:
    instance = Instance((option({7}, {1}, 1.0, (1,)),), frozenset(), frozenset({1}))
    with pytest.raises(InvalidGraphError):
        plan_by_windows(instance, seconds=1.0)


def test_a_solver_without_a_plan_leaves_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, _ = block_options(4, random.Random(0))
    monkeypatch.setattr(program, "_milp", lambda *_: program._Answer(1, None, None))
    found, _ = plan_by_windows(instance, seconds=5.0)
    assert not execute(instance, found.chosen)[1]
