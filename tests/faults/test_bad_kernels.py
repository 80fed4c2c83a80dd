"""Whatever a kernel does, the tuner lives on, nothing bad is selected, and every outcome has its class."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from tests.faults.fake import EXPECTED, FakeTransport, Plan, fake_trial

from weft.device.facts import CpuFacts
from weft.errors import DeviceError
from weft.kernels.measurement import Verdict
from weft.kernels.source import Schedule
from weft.options import Options
from weft.tune.store import Database
from weft.tune.tuner import Tuner, winner

FAULTS = [p for p in Plan if p not in (Plan.OK, Plan.CRASH_ONCE)]
N = 2_000


def test_every_plan_has_its_class() -> None:
    assert set(EXPECTED) == set(Plan)


@pytest.mark.parametrize("plan", Plan, ids=lambda p: p.name)
def test_one_bad_kernel_among_good_ones(plan: Plan) -> None:
    schedules = [Schedule("library"), Schedule("cpp", (("t", 1),)), Schedule("cpp", (("t", 2),))]
    transport = FakeTransport({schedules[1]: plan})
    with Tuner(Options(), CpuFacts(), Database.open(None), transport=transport) as tuner:
        found = list(tuner.measure([fake_trial(7, schedules)]))
    assert [m.schedule for m in found] == schedules
    assert found[1].verdict in EXPECTED[plan], found[1]
    assert found[0].verdict is Verdict.OK and found[2].verdict is Verdict.OK
    assert len(found[0].samples_us) >= 3
    assert not transport._alive


@pytest.mark.slow
def test_two_thousand_faults() -> None:
    """0 fatal, 0 selected, all classified."""
    rng = random.Random(1)
    counts: Counter[tuple[Plan, Verdict]] = Counter()
    database = Database.open(None)
    injected, number = 0, 0
    plans: dict[Schedule, Plan] = {}
    transport = FakeTransport(plans)
    trials, wanted = [], {}
    while injected < N:
        schedules = [Schedule("library", (("n", number),))]
        for k in range(10):
            s = Schedule("cpp", (("k", k), ("n", number)))
            plans[s] = rng.choice(FAULTS) if k < 9 else Plan.OK
            schedules.append(s)
            injected += plans[s] is not Plan.OK
        trial = fake_trial(number, schedules)
        wanted[trial.problem.key] = schedules
        trials.append(trial)
        number += 1
    with Tuner(Options(), CpuFacts(), database, transport=transport) as tuner:
        by_problem: dict[str, list[Any]] = {}
        for m in tuner.measure(trials):
            by_problem.setdefault(m.problem_key, []).append(m)
            plan = plans.get(m.schedule, Plan.OK)
            counts[plan, m.verdict] += 1
            assert m.verdict in EXPECTED[plan], (plan, m)
    assert {k: [m.schedule for m in v] for k, v in by_problem.items()} == wanted
    for measurements in by_problem.values():
        best = winner(measurements, None)
        assert best is not None and plans.get(best.schedule, Plan.OK) is Plan.OK
    assert sum(n for (p, _), n in counts.items() if p is not Plan.OK) == injected >= N
    assert {p for p, _ in counts} >= set(FAULTS)
    assert database.stats().rows == sum(counts.values())


def test_the_wrong_kernel_is_rejected_even_when_it_is_fastest() -> None:
    schedules = [Schedule("library"), Schedule("cpp")]
    transport = FakeTransport({schedules[1]: Plan.WRONG}, costs_ns={schedules[1]: 60_000})
    with Tuner(Options(), CpuFacts(), Database.open(None), transport=transport) as tuner:
        best = winner(list(tuner.measure([fake_trial(3, schedules)])), None)
    assert best is not None and best.schedule == schedules[0]


def test_a_poisoned_kernel_is_never_tried_again() -> None:
    schedules = [Schedule("library"), Schedule("cpp")]
    database = Database.open(None)
    transport = FakeTransport({schedules[1]: Plan.CRASH})
    for retry in (False, True):
        with Tuner(Options(), CpuFacts(), database, transport=transport, retry_failed=retry) as tuner:
            found = list(tuner.measure([fake_trial(3, schedules)]))
            assert found[1].verdict is Verdict.POISONED
    assert transport.faults == 2


def test_a_hanging_kernel_gets_one_more_chance_when_asked_and_is_then_poisoned() -> None:
    schedules = [Schedule("library"), Schedule("cpp")]
    database = Database.open(None)
    transport = FakeTransport({schedules[1]: Plan.HANG})
    verdicts = []
    for retry in (False, False, True, True):
        with Tuner(Options(), CpuFacts(), database, transport=transport, retry_failed=retry) as tuner:
            verdicts.append(list(tuner.measure([fake_trial(3, schedules)]))[1].verdict)
    assert verdicts == [Verdict.HANG, Verdict.HANG, Verdict.POISONED, Verdict.POISONED]
    assert transport.faults == 2


def test_a_wrong_canary_stops_tuning() -> None:
    schedules = [Schedule("library"), Schedule("cpp")]
    transport = FakeTransport({schedules[1]: Plan.CRASH}, sound=False)
    tuner = Tuner(Options(), CpuFacts(), Database.open(None), transport=transport)
    with tuner, pytest.raises(DeviceError, match="computes wrongly"):
        list(tuner.measure([fake_trial(3, schedules)]))
    assert not transport._alive


def test_a_worker_that_never_starts_is_an_error_of_the_machine() -> None:
    transport = FakeTransport({}, dead_on_arrival=2)
    tuner = Tuner(Options(), CpuFacts(), Database.open(None), transport=transport)
    with tuner, pytest.raises(DeviceError, match="does not start"):
        list(tuner.measure([fake_trial(3, [Schedule("library")])]))


def test_a_worker_that_fails_to_start_once_is_started_again() -> None:
    transport = FakeTransport({}, dead_on_arrival=1)
    with Tuner(Options(), CpuFacts(), Database.open(None), transport=transport) as tuner:
        (found,) = tuner.measure([fake_trial(3, [Schedule("library")])])
    assert found.verdict is Verdict.OK and transport.started == 2


def test_interrupt_keeps_what_was_measured() -> None:
    database = Database.open(None)
    trials = [fake_trial(n, [Schedule("library"), Schedule("cpp")]) for n in range(5)]
    seen = 0

    def interrupt() -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise KeyboardInterrupt

    transport = FakeTransport({}, on_trial=interrupt)
    with Tuner(Options(), CpuFacts(), database, transport=transport) as tuner, pytest.raises(KeyboardInterrupt):
        list(tuner.measure(trials))
    assert database.stats().problems == 2
    assert not transport._alive
    with Tuner(Options(), CpuFacts(), database, transport=FakeTransport({})) as tuner:
        assert len(list(tuner.measure(trials))) == 10
        assert tuner.workers_started == 1


def test_replay_of_a_run_is_the_same() -> None:
    def run() -> list[tuple[Any, ...]]:
        schedules = [Schedule("library"), *(Schedule("cpp", (("t", k),)) for k in range(12))]
        costs = {s: 200_000 + 10_000 * k for k, s in enumerate(schedules)}
        transport = FakeTransport({}, costs_ns=costs)
        with Tuner(Options(), CpuFacts(), Database.open(None), transport=transport) as tuner:
            return [(m.schedule, m.verdict, m.samples_us) for m in tuner.measure([fake_trial(1, schedules)])]

    assert run() == run()
