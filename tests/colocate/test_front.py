"""The front of plan variants against brute force over all assignments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.colocate.front import Choice, best, front, front_of_measured, settled
from weft.ir.declined import Declined
from weft.kernels.scheduling import Assignment, Variant

ALONE = Variant(0, "alone", "none", 100.0, 104.0)


def choice(steps: tuple[int, ...], cost: float, work: float, name: str = "role") -> Choice:
    return Choice(steps, Assignment(f"step {steps[0]}", "co-runner" if len(steps) > 1 else "role", name, cost, work))


def brute(choices: list[Choice], limit: float) -> tuple[float, float]:
    """Most work within the limit, and the least cost at which it is had."""
    top = (0.0, 0.0)
    for r in range(len(choices) + 1):
        for taken in itertools.combinations(choices, r):
            covered = [s for c in taken for s in c.steps]
            cost = sum(c.assignment.cost_us for c in taken)
            if len(covered) == len(set(covered)) and cost <= limit + 1e-6:
                top = max(top, (sum(c.assignment.be_us for c in taken), -cost))
    return top[0], -top[1]


@st.composite
def some_choices(draw: st.DrawFn) -> list[Choice]:
    count = draw(st.integers(0, 9))
    found = []
    for _ in range(count):
        first, length = draw(st.integers(0, 4)), draw(st.sampled_from([1, 1, 1, 2, 3]))
        cost, work = draw(st.integers(-2, 20)), draw(st.integers(0, 30))
        found.append(choice(tuple(range(first, first + length)), float(cost), float(work)))
    return found


@settings(max_examples=60, deadline=None)
@given(some_choices(), st.integers(0, 40))
def test_the_program_finds_what_brute_force_does(choices: list[Choice], limit: int) -> None:
    taken = [choices[i] for i in best(choices, float(limit))]
    work, cost = brute(choices, limit)
    assert sum(c.assignment.be_us for c in taken) == pytest.approx(work)
    assert sum(c.assignment.cost_us for c in taken) == pytest.approx(cost, abs=1e-6)
    covered = [s for c in taken for s in c.steps]
    assert len(covered) == len(set(covered))


@settings(max_examples=25, deadline=None)
@given(some_choices())
def test_a_front_rises_and_each_of_it_is_the_best_within_its_slowdown(choices: list[Choice]) -> None:
    found = front(ALONE, choices, slack=0.4, most=8)
    assert found[0] == ALONE and [v.number for v in found] == list(range(len(found))) and len(found) <= 9
    for low, high in itertools.pairwise(found):
        assert high.be_us > low.be_us and high.lc_us <= 140.0 + 1e-6 and not high.measured
    wanted = {round(brute(choices, 5.0 * k)[0], 6) for k in range(1, 9)} - {0.0}
    assert {round(v.be_us, 6) for v in found[1:]} == wanted


def test_each_step_has_one_assignment_and_a_segment_takes_all_of_its_steps() -> None:
    choices = [choice((0,), 1, 5), choice((0,), 2, 8), choice((1,), 2, 5), choice((0, 1), 3, 12, "256 threads")]
    assert best(choices, 3.0) == (3,)
    assert best(choices, 4.0) == (1, 2)
    assert best(choices, 2.0) == (1,)
    assert best(choices, 0.5) == ()
    found = front(ALONE, choices, slack=0.04, most=4)
    assert [v.be_us for v in found] == [0.0, 5.0, 8.0, 12.0, 13.0]
    assert [v.sharing for v in found] == ["none", "role", "role", "co-runner", "role"]
    assert found[3].lc_us == pytest.approx(103.0) and found[3].lc_q99_us == pytest.approx(104 * 1.03)


def test_of_equal_work_the_cheapest_is_taken() -> None:
    assert best([choice((0,), 5, 9), choice((0,), 1, 9), choice((0,), 3, 9)], 10.0) == (1,)


def test_without_choices_or_slack_there_is_the_plan_alone() -> None:
    assert front(ALONE, [], slack=1.0) == (ALONE,)
    assert front(ALONE, [choice((0,), 1, 5)], slack=0.0) == (ALONE,)


def test_what_costs_nothing_is_taken_without_slack_but_not_as_variant_0() -> None:
    found = front(ALONE, [choice((0,), 0, 5)], slack=0.0)
    assert [v.be_us for v in found] == [0.0, 5.0] and found[0] == ALONE


def test_limits_that_cannot_be_are_refused() -> None:
    for slack in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a slack"):
            front(ALONE, [], slack=slack)
    with pytest.raises(ValueError, match="0 slowdowns"):
        front(ALONE, [], slack=1.0, most=0)
    with pytest.raises(ValueError, match="a cost of at most"):
        best([], float("nan"))
    for steps in ((), (-1,), (0, 2), (1, 0)):
        with pytest.raises(ValueError, match="for steps"):
            Choice(steps, Assignment("s", "role", "", 1.0, 1.0))


def test_of_measured_variants_those_stay_that_do_most_within_a_slowdown() -> None:
    given = [Variant(9, n, "co-runner", us, us, be) for n, us, be in
             [("a", 105.0, 10.0), ("worse", 110.0, 9.0), ("b", 120.0, 30.0), ("too slow", 190.0, 99.0)]]  # fmt: skip
    found = front_of_measured(ALONE, given, slack=0.5)
    assert [(v.number, v.name) for v in found] == [(0, "alone"), (1, "a"), (2, "b")]


def test_a_variant_that_is_off_its_prediction_is_not_taken() -> None:
    predicted = Variant(1, "role 10%", "role", 110.0, 112.0, 20.0, measured=False)
    near = settled(predicted, 114.0, 113.0)
    assert isinstance(near, Variant) and near.measured and (near.lc_us, near.lc_q99_us) == (114.0, 114.0)
    off = settled(predicted, 120.0, 121.0)
    assert isinstance(off, Declined) and "+9.1%" in off.reason


@pytest.mark.slow
def test_plans_of_many_steps_are_solved() -> None:
    four = [(s, k) for s in range(88) for k in range(4)]
    choices = [choice((s,), 0.1 * (k + 1) + 0.01 * (s % 7), (k + 1) * (3.0 + s % 5)) for s, k in four]
    found = front(Variant(0, "alone", "none", 300.0, 310.0), choices, slack=0.12)
    assert len(found) == 9 and all(v.lc_us <= 336.0 + 1e-6 for v in found)
