"""Latency statistics: the histogram against the raw times, intervals against known truth, what makes a run void."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.colocate import latency as lat
from weft.errors import ArtifactError


def histogram(values: list[int]) -> lat.Histogram:
    found = lat.Histogram()
    found.add(np.array(values, dtype=np.int64))
    return found


@settings(max_examples=300, deadline=None)
@given(st.integers(lat.LEAST_NS, lat.MOST_NS))
def test_a_value_is_known_to_three_digits(value: int) -> None:
    assert histogram([value]).quantile(0.5) == pytest.approx(value, rel=5e-4)


@pytest.mark.parametrize("value", [1000, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 10**9 - 1, 2**35, lat.MOST_NS])
def test_borders_of_buckets(value: int) -> None:
    assert histogram([value]).quantile(1.0) == pytest.approx(value, rel=5e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(lat.LEAST_NS, lat.MOST_NS), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.99, 1])
)
def test_quantiles_are_those_of_the_sorted_values(values: list[int], q: float) -> None:
    wanted = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert histogram(values).quantile(q) == pytest.approx(wanted, rel=5e-4)


def test_what_lies_outside_is_counted_at_the_ends() -> None:
    found = histogram([0, 10, lat.MOST_NS * 5])
    assert len(found) == 3 and found.over == 1
    assert found.quantile(0.5) == pytest.approx(lat.LEAST_NS, rel=5e-4)
    assert found.quantile(1.0) == pytest.approx(lat.MOST_NS, rel=5e-4)
    with pytest.raises(ValueError, match="negative"):
        histogram([-1])
    with pytest.raises(ValueError, match="no fraction"):
        found.quantile(0.0)


def test_nothing_has_no_quantile() -> None:
    found = histogram([])
    assert math.isnan(found.quantile(0.5)) and found.cdf() == () and len(found) == 0


def test_two_histograms_merge_to_that_of_all() -> None:
    one, other, both = histogram([5000, 7000]), histogram([10**6, lat.MOST_NS + 1]), histogram([])
    both.merge(one)
    both.merge(other)
    assert both.to_json() == histogram([5000, 7000, 10**6, lat.MOST_NS + 1]).to_json() and both.over == 1


def test_the_cdf_rises_to_one() -> None:
    found = histogram([5000] * 3 + [9000]).cdf()
    assert [s for _, s in found] == [0.75, 1.0] and found[0][0] == pytest.approx(5000, rel=5e-4)


def test_json_there_and_back() -> None:
    one = histogram([5000, 5000, 10**7, lat.MOST_NS * 2])
    again = lat.Histogram.from_json(json.loads(json.dumps(one.to_json())))
    assert again.to_json() == one.to_json() and again.over == 1


@pytest.mark.parametrize("data", [
    None, [], {}, {"format": 2, "over": 0, "counts": []}, {"format": 1, "over": 0, "counts": [[10**9, 1]]},
    {"format": 1, "over": 0, "counts": [[1, -1]]}, {"format": 1, "over": 5, "counts": [[1, 1]]},
    {"format": 1, "over": 0, "counts": [[1]]}, {"format": 1, "over": 0, "counts": [["a", 1]]},
    {"format": 1, "over": 0, "counts": [[True, 1]]}, {"format": 1, "over": "x", "counts": []},
])  # fmt: skip
def test_what_is_no_histogram_is_refused(data: object) -> None:
    with pytest.raises(ArtifactError, match=r"malformed histogram \[W401\]"):
        lat.Histogram.from_json(data)  # type: ignore[arg-type]


def test_intervals_cover_the_truth() -> None:
    """Of 95 % intervals of a known quantile, about 95 % hold it; those of an independent series are no wider."""
    truth, held = -math.log(0.1), 0
    for seed in range(100):
        values = (np.random.default_rng(seed).exponential(1e6, 1000)).astype(np.int64)
        low, high = lat.interval(values, 0.9, seed=seed, resamples=200)
        assert low <= np.quantile(values, 0.9) * 1.02 and high >= np.quantile(values, 0.9) * 0.98
        held += low <= truth * 1e6 <= high
    assert 85 <= held <= 99


def test_series_that_hang_together_have_wider_intervals() -> None:
    rng = np.random.default_rng(5)
    values = np.repeat(rng.exponential(1e6, 100), 100).astype(np.int64)  # neighbours are equal
    by_blocks = lat.interval(values, 0.9, seed=1)
    as_independent = lat.interval(values, 0.9, seed=1, block=1)
    assert by_blocks[1] - by_blocks[0] > 3 * (as_independent[1] - as_independent[0])


def test_intervals_are_the_same_for_a_seed() -> None:
    values = np.arange(1000, dtype=np.int64)
    assert lat.interval(values, 0.5, seed=3) == lat.interval(values, 0.5, seed=3) != lat.interval(values, 0.5, seed=4)


def test_intervals_of_nothing_and_of_what_cannot_be() -> None:
    none = np.array([], dtype=np.int64)
    assert all(map(math.isnan, lat.interval(none, 0.5, seed=1)))
    with pytest.raises(ValueError, match="blocks of"):
        lat.interval(np.arange(5, dtype=np.int64), 0.5, seed=1, block=6)
    with pytest.raises(ValueError, match="no fraction"):
        lat.interval(np.arange(5, dtype=np.int64), 1.5, seed=1)


def run(latency_ns: list[int], sent_late_ns: list[int] | None = None, **more: int) -> lat.Latencies:
    scheduled = np.arange(len(latency_ns), dtype=np.int64) * 10**6
    sent = None if sent_late_ns is None else scheduled + np.array(sent_late_ns, dtype=np.int64)
    return lat.Latencies(scheduled, scheduled + np.array(latency_ns, dtype=np.int64), sent, **more)


def test_latency_counts_from_the_scheduled_instant() -> None:
    found = run([50_000] * 100, [10_000] * 100)
    assert (found.raw_ns == 50_000).all() and found.send_delay_ns == 10_000 and not found.void


def test_a_late_sender_makes_the_run_void() -> None:
    found = run([50_000] * 100, [0] * 97 + [30_000] * 3)
    assert found.void == "send delay p99 30.0 us is over 20 us"
    assert not run([50_000] * 1000, [0] * 995 + [30_000] * 5).void
    assert "before they were scheduled" in run([5000], [-1]).void
    assert run([]).void == "no query counts"


def test_violations_and_the_warm_up() -> None:
    found = run([10**6, 5000, 6000, 7000], warm_up=1)
    assert found.violations(5999) == 2 and len(found.histogram) == 3
    for warm_up in (-1, 5):
        with pytest.raises(ValueError, match="warm-up"):
            run([1, 2, 3, 4], warm_up=warm_up)
    with pytest.raises(ValueError, match="other numbers"):
        lat.Latencies(np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64))


def test_a_summary_has_intervals_around_its_quantiles() -> None:
    found = run(np.random.default_rng(1).integers(10**5, 10**6, 2000).tolist()).summary(900_000, seed=1)
    assert [x.q for x in found.quantiles] == list(lat.QUANTILES)
    assert all(x.low_us <= x.us <= x.high_us for x in found.quantiles)
    assert found.quantile_us(0.99) == pytest.approx(991, abs=5) and math.isnan(found.quantile_us(0.3))
    assert 150 < found.violations < 280 and found.queries == 2000


def test_throughputs() -> None:
    assert lat.be_throughput(3.0, 10.0) == 0.3
    assert lat.system_throughput(1000, 0.005, 6.0, 10.0) == pytest.approx(1.1)
    with pytest.raises(ValueError, match="a run of"):
        lat.be_throughput(1.0, 0.0)


def test_only_runs_on_the_same_arrivals_are_compared() -> None:
    assert lat.over_exclusive(110.0, "x", 100.0, "x") == pytest.approx(1.1)
    with pytest.raises(ValueError, match="compared"):
        lat.over_exclusive(110.0, "x", 100.0, "y")
