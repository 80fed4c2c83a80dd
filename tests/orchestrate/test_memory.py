"""A limit on memory against exhaustive search over plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.orchestrate.test_program import ancestors_of, grown_options, option, random_dag, sinks_of

from weft.errors import OptionError
from weft.orchestrate.heuristic import heuristic_plan
from weft.orchestrate.instance import Instance, execute
from weft.orchestrate.memory import fits, peak_bytes
from weft.orchestrate.program import best_solutions, solve


def exhaustive(instance: Instance) -> dict[int, float]:
    """Least cost per peak, over all sets with one producer per value at most, run in their own order."""
    producers: dict[int, list[int]] = {}
    for k, o in enumerate(instance.options):
        producers.setdefault(next(iter(o.writes)), []).append(k)
    found: dict[int, float] = {}
    for choice in itertools.product(*([None, *ks] for ks in producers.values())):
        plan = [k for k in choice if k is not None]
        order, missing = execute(instance, plan)
        if not missing:
            peak, cost = peak_bytes(instance, order), sum(map(instance.price, plan))
            found[peak] = min(cost, found.get(peak, float("inf")))
    return found


def random_instance(rng: random.Random) -> Instance:
    dag = random_dag(rng, rng.randint(2, 5))
    results = sinks_of(dag)
    options = tuple(
        replace(o, workspace=rng.choice((0, 0, 3))) for o in grown_options(dag, rng, reentrant=True, several=False)
    )
    nbytes = tuple(rng.randint(1, 9) for _ in range(len(dag)))
    return Instance(options, frozenset(), results, ancestors_of(dag, results), nbytes=nbytes)


def test_peak_of_a_chain() -> None:
    options = (option((), {0}, 1.0), option({0}, {1}, 1.0), option({1}, {2}, 1.0, workspace=5))
    instance = Instance(options, frozenset(), frozenset({2}), nbytes=(10, 20, 30))
    assert peak_bytes(instance, (0, 1, 2)) == 20 + 30 + 5
    assert peak_bytes(instance, ()) == 0


def test_results_stay_and_what_is_given_does_not_count() -> None:
    options = (option({9}, {0}, 1.0), option({9}, {1}, 1.0), option({1}, {2}, 1.0))
    instance = Instance(options, frozenset({9}), frozenset({0, 2}), nbytes=(10, 20, 30, *[0] * 6, 1000))
    assert peak_bytes(instance, (0, 1, 2)) == 60
    assert peak_bytes(replace(instance, results=frozenset({2})), (0, 1, 2)) == 50, "nobody reads value 0"


def test_a_value_written_twice_counts_once() -> None:
    options = (option((), {0}, 1.0), option((), {0, 1}, 1.0), option({0, 1}, {2}, 1.0))
    assert peak_bytes(Instance(options, frozenset(), frozenset({2}), nbytes=(8, 8, 8)), (0, 1, 2)) == 24


def test_limits_against_exhaustive_search() -> None:
    rng = random.Random(3)
    limited = 0
    for _ in range(40):
        instance = random_instance(rng)
        frontier = exhaustive(instance)
        for peak in sorted(frontier)[:3]:
            cost = min(c for p, c in frontier.items() if p <= peak)
            solution = solve(replace(instance, memory_limit=peak), gap=0.0)
            assert solution.cost_us == pytest.approx(cost, abs=1e-5)
            assert peak_bytes(instance, solution.chosen) <= peak
            limited += cost > min(frontier.values()) + 1e-5
    assert limited > 12, "the limit cost something in some cases"


def test_a_limit_that_no_plan_keeps_is_the_callers_fault() -> None:
    rng = random.Random(4)
    for _ in range(10):
        instance = random_instance(rng)
        least = min(exhaustive(instance))
        with pytest.raises(OptionError, match=r"memory_limit.*takes \d+ \[W001\]"):
            solve(replace(instance, memory_limit=least - 1))


def test_a_limit_that_the_best_plan_keeps_changes_nothing() -> None:
    rng = random.Random(5)
    for _ in range(10):
        instance = random_instance(rng)
        free = solve(instance, gap=0.0)
        kept = solve(replace(instance, memory_limit=peak_bytes(instance, free.chosen)), gap=0.0)
        assert kept.cost_us == pytest.approx(free.cost_us, abs=1e-5)


def test_several_outputs_stay_within_the_limit() -> None:
    """There the constraints are on the safe side, so a plan may be refused, but none exceeds the limit."""
    rng = random.Random(6)
    found = 0
    for _ in range(25):
        dag = random_dag(rng, rng.randint(3, 7))
        results = sinks_of(dag)
        options = tuple(grown_options(dag, rng, reentrant=True, several=True))
        nbytes = tuple(rng.randint(1, 9) for _ in range(len(dag)))
        instance = Instance(options, frozenset(), results, ancestors_of(dag, results), nbytes=nbytes)
        free = solve(instance, gap=0.0)
        instance = replace(instance, memory_limit=peak_bytes(instance, free.chosen) - 1)
        try:
            plans = best_solutions(instance, 2)
        except OptionError:
            continue
        found += 1
        for plan in plans:
            assert fits(instance, plan.chosen)
            assert not execute(instance, plan.chosen)[1]
            assert plan.cost_us >= free.cost_us - 1e-5
    assert found > 5


def test_a_plan_at_hand_above_the_limit_is_not_returned() -> None:
    options = (option((), {0}, 1.0), option({0}, {1}, 1.0), option((), {1}, 9.0))
    instance = Instance(options, frozenset(), frozenset({1}), nbytes=(100, 1), memory_limit=50)
    assert heuristic_plan(instance, range(3)) == (0, 1)
    assert solve(instance).chosen == (2,)
    assert solve(instance, heuristic=(0, 1)).chosen == (2,)


def test_dominated_options_stay_if_they_need_less() -> None:
    """Cheaper and writing more, but for more memory than there is."""
    options = (option((), {0, 1}, 1.0), option((), {1}, 2.0))
    instance = Instance(options, frozenset(), frozenset({1}), nbytes=(100, 1))
    assert solve(instance).chosen == (0,)
    assert solve(replace(instance, memory_limit=50)).chosen == (1,)
