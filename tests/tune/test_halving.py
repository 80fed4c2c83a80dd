"""Fronts and successive halving against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.tune.halving import MOST_POINTS, added_work, dominates, front, halve, layers, thinned, worth


@dataclass(frozen=True)
class At:
    slowdown: float
    fraction: float
    name: int = 0


NUMBERS = st.integers(-4, 24).map(lambda n: n / 16)
POINTS = st.lists(st.builds(At, NUMBERS, NUMBERS.map(abs)), max_size=12).map(
    lambda found: [At(p.slowdown, p.fraction, i) for i, p in enumerate(found)]
)


def staircase(points: Sequence[At], slack: float) -> float:
    """What the best point within a slack gains, by looking at all."""
    return max((p.fraction for p in points if max(0.0, p.slowdown) <= slack), default=0.0)


@given(POINTS)
def test_the_front_is_what_no_other_dominates(points: list[At]) -> None:
    found = front(points)
    assert all(p in points for p in found)
    for p in points:
        beaten = any(dominates(q, p) for q in points)
        assert beaten == (not any((p.slowdown, p.fraction) == (q.slowdown, q.fraction) for q in found))
    assert [p.slowdown for p in found] == sorted({p.slowdown for p in found}), "each slowdown once, rising"
    assert [p.fraction for p in found] == sorted({p.fraction for p in found})
    for p in found:
        assert p.name == min(q.name for q in points if (q.slowdown, q.fraction) == (p.slowdown, p.fraction))


@given(POINTS)
def test_worth_is_the_mean_gain_over_the_slack(points: list[At]) -> None:
    # all slowdowns are multiples of 1/16: within a step the gain is constant
    steps = [staircase([p for p in points if p.slowdown < 1], (k + 0.5) / 16) for k in range(16)]
    assert worth(points, 1.0) == pytest.approx(sum(steps) / 16)


@given(POINTS, st.integers(1, 5))
def test_a_thinned_front_is_the_best_of_all_choices(points: list[At], most: int) -> None:
    found = thinned(points, most, 1.0)
    every = [p for p in front(points) if p.slowdown < 1]
    assert len(found) == min(most, len(every)) and found == front(found)
    if not every:
        return
    best = max(every, key=added_work)
    assert best in found, "what does most work together stays"
    choices = [c for n in range(1, most + 1) for c in itertools.combinations(every, n) if best in c]
    assert worth(found, 1.0) == pytest.approx(max(worth(c, 1.0) for c in choices))


def test_a_front_keeps_four_points_beside_not_fusing() -> None:
    points = [At(k / 20, 0.5 + math.sqrt(k) / 4, k) for k in range(12)]
    assert len(thinned(points)) == MOST_POINTS == 4 and len(front(points)) == 12
    with pytest.raises(ValueError, match="a front of 0 points"):
        thinned(points, 0)
    assert thinned([At(2.0, 5.0), At(3.0, 9.0)]) == [], "three times as long is never taken"
    assert thinned([At(1.9, 5.0)]) == [At(1.9, 5.0)]


@given(POINTS)
def test_layers_are_fronts_of_what_is_left(points: list[At]) -> None:
    found = layers(points)
    assert sorted(itertools.chain(*found)) == list(range(len(points)))
    left = list(range(len(points)))
    for layer in found:
        undominated = {i for i in left if not any(dominates(points[j], points[i]) for j in left)}
        assert set(layer) == undominated
        works = [added_work(points[i]) for i in layer]
        assert works == sorted(works, reverse=True)
        left = [i for i in left if i not in undominated]


@given(POINTS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(2, 4))
def test_without_noise_the_front_is_found(points: list[At], effort: int, rounds: int, least: int, share: int) -> None:
    calls: list[tuple[int, int]] = []

    def measure(candidate: int, with_: int) -> At:
        calls.append((candidate, with_))
        return points[candidate]

    most = effort * share ** (rounds - 1)
    found = halve(range(len(points)), measure, effort=effort, most_effort=most, least=least, share=share)
    survived = [m.point for m in found.survivors]
    assert {(p.slowdown, p.fraction) for p in front(survived)} == {(p.slowdown, p.fraction) for p in front(points)}
    assert {m.candidate for m in found.survivors} | {m.candidate for m in found.dropped} == set(range(len(points)))
    assert found.effort == sum(e for _, e in calls) and not found.failed
    if points:
        assert max(points, key=added_work) in survived or added_work(max(points, key=added_work)) == max(
            map(added_work, survived)
        )
        assert found.survivors[0].point in front(points), "the first layer stands in front"
    assert all(m.effort == most for m in found.survivors)
    first = len(layers(points)[0]) if points else 0
    alive, total = len(points), 0
    for k in range(rounds):
        total += alive * effort * share**k
        alive = min(alive, max(least, -(-alive // share), first))
    assert found.effort == total, "a round keeps one of `share`, but the first layer and the least"


@given(POINTS.filter(lambda p: len(p) > 1), st.integers(0, 2**32))
def test_noise_that_keeps_the_order_changes_nothing(points: list[At], seed: int) -> None:
    def measure(candidate: int, effort: int) -> At:
        p = points[candidate]
        squeeze = 1 + (seed % 7) / (4 * effort)  # monotone in both, another one for each effort
        return At(p.slowdown * squeeze, p.fraction * squeeze, candidate)

    found = halve(range(len(points)), measure, effort=1, most_effort=4)
    survivors = {m.candidate for m in found.survivors}
    for p in front(points):
        assert any((points[i].slowdown, points[i].fraction) == (p.slowdown, p.fraction) for i in survivors)


def test_candidates_that_fail_are_told_and_not_tried_again() -> None:
    tried: list[str] = []

    def measure(candidate: str, effort: int) -> At | None:
        tried.append(candidate)
        return None if candidate in "bd" or (candidate == "c" and effort > 1) else At(0.1 * ord(candidate) - 9, 1.0)

    found = halve("abcde", measure, effort=1, most_effort=2, least=4)
    assert found.failed == ("b", "d", "c") and tried.count("b") == 1 and tried.count("c") == 2
    assert [m.candidate for m in found.survivors] == ["a", "e"]
    assert halve("bd", measure).survivors == () == halve("", measure).survivors


def test_effort_goes_where_it_matters() -> None:
    points = [At(0.1 + i / 100, 1.0, i) for i in range(64)]
    spent = dict.fromkeys(range(64), 0)

    def measure(candidate: int, effort: int) -> At:
        spent[candidate] += effort
        return points[candidate]

    found = halve(range(64), measure, effort=1, most_effort=32, least=1)
    assert spent[0] == 63 and spent[63] == 1 and found.effort == 64 * 6
    assert [m.candidate for m in found.survivors] == [0, 1] and len(found.dropped) == 62
    assert found.dropped[-1].effort == 1 and found.dropped[0].effort == 16


@given(POINTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.integers(2, 3), st.integers(1, 200))
def test_a_budget_is_never_exceeded(
    points: list[At], effort: int, doublings: int, least: int, share: int, budget: int
) -> None:
    spent = 0

    def measure(candidate: int, with_: int) -> At | None:
        nonlocal spent
        spent += with_
        return None if candidate % 5 == 4 else points[candidate]

    most = effort * share**doublings
    if budget < effort:
        with pytest.raises(ValueError, match="a budget of"):
            halve(range(len(points)), measure, effort=effort, most_effort=most, least=least, share=share, budget=budget)
        return
    found = halve(range(len(points)), measure, effort=effort, most_effort=most, least=least, share=share, budget=budget)
    assert spent == found.effort <= budget
    seen = [*(m.candidate for m in (*found.survivors, *found.dropped)), *found.failed, *found.unmeasured]
    assert sorted(seen) == list(range(len(points))), "each candidate is told once"
    assert len(found.unmeasured) < max(1, len(points)), "something is measured where there is something"
    whole = halve(range(len(points)), measure, effort=effort, most_effort=most, least=least, share=share)
    if budget >= (doublings + 1) * max(1, len(points)) * most:
        assert found == whole, "a budget that suffices changes nothing"


@pytest.mark.parametrize("wrong", [{"effort": 0}, {"effort": 8, "most_effort": 4}, {"share": 1}, {"least": 0}])
def test_searches_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="efforts of"):
        halve([1], lambda c, e: At(0, 1), **wrong)
