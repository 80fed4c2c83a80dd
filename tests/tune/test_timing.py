from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.tune.timing import TimingPolicy, sets_needed, time_kernels
from weft.tune.tuner import beats, half_interval, winner

POLICY = TimingPolicy()


class World:
    """A clock that only calls move."""

    def __init__(self) -> None:
        self.now = 0
        self.log: list[tuple[int, int]] = []
        self.collecting = False

    def call(self, kernel: int, buffer: int, cost_ns: int) -> Callable[[], None]:
        def run() -> None:
            self.now += cost_ns
            self.log.append((kernel, buffer))
            self.collecting |= gc.isenabled()

        return run

    def time(
        self,
        costs: dict[int, int],
        sets: int = 3,
        always: tuple[int, ...] = (),
        seed: int = 0,
        policy: TimingPolicy = POLICY,
    ) -> Any:
        calls = {k: [self.call(k, b, c) for b in range(sets)] for k, c in costs.items()}
        return time_kernels(
            calls,
            policy=policy,
            always=always,
            seed=seed,
            before=lambda k: None,
            clock=lambda: self.now,
            preempted=lambda: 0,
        )


def test_samples_are_times_per_call() -> None:
    timed = World().time({0: 10_000, 1: 2_500_000})
    assert set(timed.samples_us[0]) == {10.0} and set(timed.samples_us[1]) == {2500.0}
    assert len(timed.samples_us[0]) == 3 + 15


def test_rounds_are_interleaved_in_random_order() -> None:
    world = World()
    world.time({0: 300_000, 1: 300_000, 2: 300_000}, sets=1)
    order = [k for k, _ in world.log[6:]]  # after calibration: an untimed and a timed call per sample
    samples = order[1::2]
    rounds = [tuple(samples[i : i + 3]) for i in range(0, len(samples), 3)]
    assert all(sorted(r) == [0, 1, 2] for r in rounds) and len(set(rounds)) > 2


def test_the_best_and_those_always_wanted_reach_the_final() -> None:
    timed = World().time({k: 300_000 + 10_000 * k for k in range(12)}, always=(11,))
    long = {k for k, v in timed.samples_us.items() if len(v) > POLICY.screening_rounds}
    assert long == {*range(8), 11}


def test_long_kernels_take_few_rounds() -> None:
    timed = World().time({0: 400_000_000, 1: 500_000_000})
    assert len(timed.samples_us[0]) == 3 + 2


def test_every_set_of_buffers_is_used_in_turn() -> None:
    world = World()
    timed = world.time({0: 1_000_000}, sets=5)
    assert [b for _, b in world.log] == [i % 5 for i in range(len(world.log))]
    assert timed.calls[0] == len(world.log)


def test_a_seed_repeats_the_order() -> None:
    logs = []
    for seed in (1, 1, 2):
        world = World()
        world.time({0: 300_000, 1: 300_000, 2: 310_000}, seed=seed)
        logs.append(world.log)
    assert logs[0] == logs[1] != logs[2]


def test_no_garbage_is_collected_during_rounds() -> None:
    assert gc.isenabled()
    world = World()
    world.time({0: 300_000})
    assert gc.isenabled()


def test_preempted_samples_are_taken_again() -> None:
    world = World()
    switches = 0

    def disturbed() -> None:
        nonlocal switches
        slow = len(world.log) % 7 == 3
        switches += slow
        world.now += 90_000_000 if slow else 300_000
        world.log.append((0, 0))

    timed = time_kernels(
        {0: [disturbed]},
        policy=POLICY,
        always=(),
        seed=0,
        before=lambda k: None,
        clock=lambda: world.now,
        preempted=lambda: switches,
    )
    assert sorted(timed.samples_us[0])[len(timed.samples_us[0]) // 2] == 300.0


def test_sets_exceed_twice_the_cache() -> None:
    l2 = 2 << 20
    assert sets_needed(POLICY, 8 << 20, l2) == 1
    assert sets_needed(POLICY, 1 << 20, l2) == 5
    assert sets_needed(POLICY, 100, l2) == POLICY.max_sets
    assert sets_needed(POLICY, 3 << 20, l2) == 3
    assert sets_needed(replace(POLICY, cache="warm"), 100, l2) == 1


def measured(name: str, *samples: float, verdict: Verdict = Verdict.OK) -> Measurement:
    return Measurement("p", Schedule(name), verdict, samples)


def test_a_challenger_needs_the_margin() -> None:
    holder = measured("b", *[100.0] * 9)
    for time_us, wins in ((97.9, True), (98.1, False), (100.0, False), (50.0, True), (120.0, False)):
        challenger = measured("a", *[time_us] * 9)
        assert beats(challenger, holder) is wins
        best = winner([holder, challenger], holder.schedule)
        assert best is (challenger if wins else holder)


def test_noise_widens_the_margin() -> None:
    holder = measured("b", *[90.0, 95.0, 100.0, 105.0, 110.0, 60.0, 140.0, 100.0])
    challenger = measured("a", *[80.0, 96.0, 94.0, 120.0, 70.0, 95.0, 130.0, 60.0])
    assert half_interval(challenger.samples_us, holder.samples_us) > 5
    assert winner([holder, challenger], holder.schedule) is holder


def test_within_the_noise_a_fixed_order_decides() -> None:
    one, two = measured("a", *[100.5] * 9), measured("b", *[100.0] * 9)
    assert winner([one, two], None) is one and winner([two, one], None) is one
    far = measured("c", *[10.0] * 9)
    assert winner([one, two, far], None) is far


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.OK])
def test_what_is_not_ok_never_wins(verdict: Verdict) -> None:
    bad = measured("a", 1.0, 1.0, 1.0, verdict=verdict)
    good = measured("b", 9.0, 9.0, 9.0)
    assert winner([bad], None) is None and winner([bad, good], None) is good
    assert winner([bad, good], bad.schedule) is good
    assert winner([], None) is None
