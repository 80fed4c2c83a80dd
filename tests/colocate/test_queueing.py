"""Lindley's recursion, M/D/1, and the peak load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.colocate.arrivals import poisson
from weft.colocate.queueing import (
    TargetError,
    batch_mean,
    latencies,
    lindley,
    md1_mean_wait,
    peak_load,
    waits,
)


def by_hand(arrivals: list[int], service: list[int]) -> list[int]:
    ends, free = [], 0
    for at, s in zip(arrivals, service, strict=True):
        free = max(at, free) + s
        ends.append(free)
    return ends


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), max_size=60))
def test_the_recursion_is_that_of_a_loop(queries: list[tuple[int, int]]) -> None:
    arrivals = np.cumsum(np.array([q[0] for q in queries], dtype=np.int64))
    service = np.array([q[1] for q in queries], dtype=np.int64)
    assert lindley(arrivals, service).tolist() == by_hand(arrivals.tolist(), service.tolist())


def test_what_is_no_queue_is_refused() -> None:
    one = np.array([1, 2], dtype=np.int64)
    with pytest.raises(ValueError, match="service times"):
        lindley(one, one[:1])
    with pytest.raises(ValueError, match="negative"):
        lindley(one, -one)
    with pytest.raises(ValueError, match="out of order"):
        lindley(one[::-1], one)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_the_mean_wait_is_that_of_md1(load: float) -> None:
    n, service = 400_000, 100_000
    arrivals = poisson(load * 1e9 / service, n, seed=11).times_ns
    mean, error = batch_mean(waits(arrivals, np.full(n, service, dtype=np.int64)))
    wanted = md1_mean_wait(load, service)
    assert abs(mean - wanted) < 4 * error and error < 0.1 * wanted
    assert abs(mean - md1_mean_wait(load + 0.1, service)) > 4 * error  # another load would be told apart


def test_loads_and_batches_without_an_answer_are_refused() -> None:
    for load in (1.0, -0.1, 2.0):
        with pytest.raises(ValueError, match="no stationary"):
            md1_mean_wait(load, 1.0)
    with pytest.raises(ValueError, match="batches"):
        batch_mean(np.arange(10), 50)


def test_the_peak_load_keeps_the_target_and_one_above_does_not() -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(90_000, 110_000, 500)
    target = 500_000
    found = peak_load(samples, target, seed=3, count=200_000)
    assert found.low_hz < found.rate_hz < found.high_hz and 0.5 < found.load < 0.95

    def p99(rate: float) -> float:
        service = np.random.default_rng(9).choice(samples, 400_000)
        return float(np.quantile(latencies(poisson(rate, 400_000, seed=8).times_ns, service), 0.99))

    assert p99(found.rate_hz * 0.97) < target < p99(found.rate_hz * 1.03)
    assert found.high_hz - found.low_hz < 0.08 * found.rate_hz


def test_the_peak_load_is_the_same_for_a_seed_and_grows_with_the_target() -> None:
    samples = np.array([100_000], dtype=np.int64)
    one, again = (peak_load(samples, 400_000, seed=1, count=100_000) for _ in range(2))
    assert one == again
    assert peak_load(samples, 800_000, seed=1, count=100_000).rate_hz > one.rate_hz


def test_the_interval_is_narrower_with_more_arrivals() -> None:
    samples = np.array([100_000], dtype=np.int64)
    few, many = (peak_load(samples, 400_000, seed=1, count=n) for n in (100_000, 1_000_000))
    assert many.high_hz - many.low_hz < few.high_hz - few.low_hz
    assert many.rate_hz == pytest.approx(few.rate_hz, rel=0.02)


def test_targets_and_samples_without_a_peak_are_refused() -> None:
    samples = np.array([100_000], dtype=np.int64)
    with pytest.raises(TargetError, match=r"the model alone takes 0.1 ms .*\[W017\]"):
        peak_load(samples, 99_999, seed=1)
    with pytest.raises(ValueError, match="above 0"):
        peak_load(samples[:0], 10**6, seed=1)
    with pytest.raises(ValueError, match="too few"):
        peak_load(samples, 10**6, seed=1, count=1000)


def test_a_million_arrivals_are_quick_enough_for_a_search() -> None:
    n = 1_000_000
    ends = lindley(poisson(8000.0, n, seed=1).times_ns, np.full(n, 100_000, dtype=np.int64))
    assert len(ends) == n and (np.diff(ends) >= 100_000).all()
