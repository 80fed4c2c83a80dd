"""Arrivals: what each process is, what is refused, and the same instants for the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from weft.colocate import arrivals as a


@pytest.mark.parametrize("make", [
    lambda seed: a.poisson(1000.0, 5000, seed=seed),
    lambda seed: a.gamma(1000.0, 5000, cv=3.0, seed=seed),
    lambda seed: a.spikes(1000.0, 5000, [a.Spike(1.0, 0.2, 10.0)], seed=seed),
])  # fmt: skip
def test_a_seed_fixes_all_instants(make: Callable[[int], a.Arrivals]) -> None:
    one, again, other = make(1), make(1), make(2)
    assert one.digest == again.digest != other.digest
    assert len(one) == 5000 and (np.diff(one.times_ns) >= 0).all() and one.times_ns.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        one.times_ns[0] = 0


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gaps_of_gamma_have_the_mean_and_the_variation(cv: float) -> None:
    n = 200_000
    gaps = np.diff(a.gamma(2000.0, n, cv=cv, seed=7).times_ns) / 1e9
    assert gaps.mean() == pytest.approx(1 / 2000, rel=5 * cv / math.sqrt(n))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_gaps_of_poisson_are_exponential() -> None:
    gaps = np.diff(a.poisson(500.0, 100_000, seed=3).times_ns) * 500 / 1e9
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(gaps, q) == pytest.approx(-math.log(1 - q), rel=0.03)


def test_a_spike_has_its_rate_within_and_the_base_outside() -> None:
    given = [a.Spike(10.0, 2.0, 10.0), a.Spike(20.0, 1.0, 5.0)]
    t = a.spikes(1000.0, 80_000, given, seed=5).times_ns / 1e9

    def rate(low: float, high: float) -> float:
        return float(((t >= low) & (t < high)).sum() / (high - low))

    assert rate(0, 10) == pytest.approx(1000, rel=0.05)
    assert rate(10, 12) == pytest.approx(10_000, rel=0.05)
    assert rate(12, 20) == pytest.approx(1000, rel=0.05)
    assert rate(20, 21) == pytest.approx(5000, rel=0.1)
    assert rate(21, 40) == pytest.approx(1000, rel=0.05)


def test_without_spikes_it_is_poisson() -> None:
    t = a.spikes(1000.0, 50_000, [], seed=1)
    assert t.rate_hz == pytest.approx(1000, rel=0.02)


@pytest.mark.parametrize("given", [
    [a.Spike(1.0, 1.0, 2.0), a.Spike(1.5, 1.0, 2.0)], [a.Spike(-1.0, 1.0, 2.0)], [a.Spike(0.0, 0.0, 2.0)],
    [a.Spike(0.0, 1.0, 0.0)], [a.Spike(0.0, math.inf, 2.0)], [a.Spike(math.nan, 1.0, 2.0)],
])  # fmt: skip
def test_spikes_that_cannot_be_are_refused(given: list[a.Spike]) -> None:
    with pytest.raises(a.ArrivalsError, match=r"a spike at .* \[W016\]"):
        a.spikes(1000.0, 10, given, seed=1)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 2e9])
def test_rates_that_cannot_be_are_refused(rate: float) -> None:
    with pytest.raises(a.ArrivalsError, match=r"W016"):
        a.poisson(rate, 10, seed=1)


def test_counts_times_and_coefficients_that_cannot_be_are_refused() -> None:
    for count in (0, -1, a.MOST + 1):
        with pytest.raises(a.ArrivalsError, match="arrivals"):
            a.poisson(1.0, count, seed=1)
    for cv in (0.0, -1.0, 1000.0, math.nan):
        with pytest.raises(a.ArrivalsError, match="coefficient of variation"):
            a.gamma(1.0, 10, cv=cv, seed=1)
    with pytest.raises(a.ArrivalsError, match="last instant"):
        a.poisson(1e-6, 1000, seed=1)


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    made = a.poisson(1000.0, 1000, seed=4)
    path = tmp_path / "burst.txt"
    path.write_text(a.write_trace(made))
    read = a.read_trace(path)
    assert read.digest == made.digest and read.process == "trace burst.txt" and read.seed is None


def test_comments_and_empty_lines_of_a_trace_are_ignored() -> None:
    read = a.parse_trace("weft-arrivals 1 ns\n# two at once\n\n 5 \n5\n7\n")
    assert read.times_ns.tolist() == [5, 5, 7]


@pytest.mark.parametrize(("text", "said"), [
    ("", "first line"), ("1\n2\n", "first line"), ("weft-arrivals 2 ns\n1\n", "first line"),
    ("weft-arrivals 1 ns\n", "no instants"), ("weft-arrivals 1 ns\n# only\n", "no instants"),
    ("weft-arrivals 1 ns\n1\n1.5\n", "line 3 is no whole number"), ("weft-arrivals 1 ns\n-1\n", "line 2 is no whole"),
    ("weft-arrivals 1 ns\n1e3\n", "line 2"), ("weft-arrivals 1 ns\n" + "9" * 5000 + "\n", "line 2 is no whole"),
    ("weft-arrivals 1 ns\n\u0663\n", "line 2 is no whole"), ("weft-arrivals 1 ns\nnan\n", "line 2"),
    (f"weft-arrivals 1 ns\n{a.MOST_NS}\n", "not below"), ("weft-arrivals 1 ns\n5\n4\n", "line 3 lies before"),
])  # fmt: skip
def test_what_is_no_trace_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(a.ArrivalsError, match=said) as refused:
        a.parse_trace(text, "t.txt")
    assert str(refused.value).startswith("t.txt: ") and "[W016]" in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(a.ArrivalsError, match="cannot be read"):
        a.read_trace(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(a.ArrivalsError, match="no text in UTF-8"):
        a.read_trace(tmp_path / "bytes")
    with pytest.raises(a.ArrivalsError, match="cannot be read"):
        a.read_trace(tmp_path)


def test_too_large_a_trace_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a, "MOST_BYTES", 8)
    (tmp_path / "t").write_text("weft-arrivals 1 ns\n1\n")
    with pytest.raises(a.ArrivalsError, match="MiB"):
        a.read_trace(tmp_path / "t")
    monkeypatch.setattr(a, "MOST", 1)
    with pytest.raises(a.ArrivalsError, match="one more than the 1"):
        a.parse_trace("weft-arrivals 1 ns\n1\n2\n")


def test_a_trace_keeps_its_pattern_at_another_rate() -> None:
    made = a.gamma(1000.0, 2000, cv=3.0, seed=1)
    fast = made.scaled(4000.0)
    assert fast.rate_hz == pytest.approx(4000.0, rel=1e-6)
    assert np.allclose(fast.times_ns * 4.0, made.times_ns * (made.rate_hz / 1000), atol=8)
    with pytest.raises(a.ArrivalsError, match="fewer than two"):
        a.parse_trace("weft-arrivals 1 ns\n5\n").scaled(10.0)


def test_a_load_is_a_fraction_of_a_rate() -> None:
    assert a.rate_of_load(0.8, 5000.0) == 4000.0
    for load in (0.0, -0.5, math.nan, math.inf, 11.0):
        with pytest.raises(a.ArrivalsError, match="a load of"):
            a.rate_of_load(load, 5000.0)
    with pytest.raises(a.ArrivalsError, match="a rate of"):
        a.rate_of_load(0.5, math.nan)
