"""Duration models on synthetic data whose truth is known: error bounds, margins, drifts and clocks."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.colocate import durations as d
from weft.errors import ArtifactError
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.scheduling import JobSpec, PairModel, SoloModel, Variant


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 20), st.floats(1, 50), st.integers(8, 500), st.booleans())
def test_a_kernel_alone_is_found_exactly(base: float, wave: float, resident: int, whole: bool) -> None:
    truth = SoloModel(base, wave, resident, whole, 0.0)
    sizes = [resident * k for k in (0.4, 0.9, 1.3, 2.6, 5.2, 9.7)]
    found = d.fit_solo([(n, truth.us(n)) for n in sizes], resident)
    assert found.whole_waves == whole and found.error_q95 < 1e-6
    assert found.us(resident * 7.5) == pytest.approx(truth.us(resident * 7.5), rel=1e-6)


def test_a_kernel_alone_within_two_percent_under_noise() -> None:
    """Six sizes, 1 % of noise: mean error on sizes that were held out at most 2 %, 95 % of them within 5 %."""
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(50):
        truth = SoloModel(rng.uniform(2, 10), rng.uniform(3, 40), 264, False, 0.0)
        sizes = np.array([100, 300, 800, 2000, 5000, 12_000])
        found = d.fit_solo([(n, truth.us(n) * rng.normal(1, 0.01)) for n in sizes], 264)
        errors += [abs(found.us(n) / truth.us(n) - 1) for n in (200, 1500, 8000)]
    assert np.mean(errors) < 0.02 and np.quantile(errors, 0.95) < 0.05


@settings(max_examples=30, deadline=None)
@given(st.floats(10, 200), st.floats(0.1, 1), st.floats(0.3, 1.5), st.floats(1.0, 1.4))
def test_two_lines_are_found(base: float, under: float, ratio: float, over: float) -> None:
    truth = PairModel(base, base * under, base * (under + over), ratio, 0.0)
    fractions = [0.0, 0.1, 0.2, 0.5, ratio * 1.2, 1.8, 2.0, 2.4]
    found = d.fit_pair([(f, truth.us(f)) for f in fractions])
    grid = np.linspace(0, 2.4, 30)
    assert max(abs(found.us(f) / truth.us(f) - 1) for f in grid) < 0.03


def test_two_lines_within_three_percent_under_noise() -> None:
    rng = np.random.default_rng(2)
    errors = []
    for _ in range(30):
        base, ratio = rng.uniform(10, 100), rng.uniform(0.4, 1.2)
        truth = PairModel(base, base * rng.uniform(0.2, 0.8), base * rng.uniform(0.95, 1.3), ratio, 0.0)
        points = [(f, truth.us(f) * rng.normal(1, 0.01)) for f in (0.1, 0.3, 0.5, 0.8, 1.0, 1.3, 1.6, 2.0)]
        found = d.fit_pair(points)
        errors += [abs(found.us(f) / truth.us(f) - 1) for f in (0.2, 0.65, 1.15, 1.8)]
    assert np.mean(errors) < 0.03 and np.quantile(errors, 0.95) < 0.08


def test_one_line_where_there_is_no_second() -> None:
    found = d.fit_pair([(f, 10 + 5 * f) for f in (0.0, 0.5, 1.0, 1.5, 2.0)])
    assert found.us(3.0) == pytest.approx(25.0, rel=1e-6) and found.error_q95 < 1e-9


def test_the_papers_two_lines_of_one_point() -> None:
    found = d.two_lines(100.0, 0.3, 0.5, 0.1)
    assert [found.us(f) for f in (0.0, 0.5, 1.5)] == pytest.approx([110.0, 130.0, 230.0])
    with pytest.raises(ValueError, match="a point of"):
        d.two_lines(100.0, 0.3, 0.0, 0.1)


@pytest.mark.parametrize("points", [
    [], [(1, 1.0)], [(1, 1.0)] * 8, [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)],
    [(1, float("nan")), (2, 1.0), (3, 1.0), (4, 1.0)], [(-1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)],
])  # fmt: skip
def test_points_that_say_nothing_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError):
        d.fit_solo(points, 132)
    with pytest.raises(ValueError):
        d.fit_pair(points)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="resident"):
        d.fit_solo([(1, 1.0), (2, 2.0), (3, 3.0)], 0)
    with pytest.raises(ValueError, match="clocks"):
        d.compute_share([(1980, 5.0), (1980, 6.0)])
    for bad in ((0.0, 1.0, 1980.0, 1.0), (1.0, -1.0, 1980.0, 1.0), (1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1980.0, 2.0)):
        with pytest.raises(ValueError, match="margin"):
            d.Online(bad[0], bad[1], clock_mhz=bad[2], share=bad[3])
    with pytest.raises(ValueError, match="at 1980"):
        d.Online(1.0, 0.0, clock_mhz=1980).observe(float("nan"), clock_mhz=1980)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_share_of_the_clock_is_found(share: float) -> None:
    points = [(mhz, d.at_clock(100.0, 1980, mhz, share)) for mhz in (1980, 1755, 1500, 1200)]
    assert d.compute_share(points) == pytest.approx(share, abs=1e-6)


def feed(model: d.Online, us: float, count: int, *, seed: int, noise: float = 0.01, mhz: float = 1980) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        model.observe(us * rng.normal(1, noise), clock_mhz=mhz)


def test_online_follows_a_slow_change_and_stays_within_five_percent() -> None:
    model, rng, errors = d.Online(100.0, 3.0, clock_mhz=1980), np.random.default_rng(3), []
    for k in range(2000):
        truth = 100.0 * (1 + 0.10 * k / 2000)
        errors.append(abs(model.predict_us(clock_mhz=1980) / truth - 1))
        model.observe(truth * rng.normal(1, 0.01), clock_mhz=1980)
    assert model.is_ready and np.mean(errors) < 0.01 and max(errors) < 0.05


def test_the_margin_is_the_q99_of_the_residuals() -> None:
    model = d.Online(100.0, 50.0, clock_mhz=1980)
    assert model.margin == 0.5  # what was measured before, until there is more
    feed(model, 100.0, 2000, seed=4, noise=0.02)
    assert model.margin == pytest.approx(2.33 * 0.02, rel=0.4)


def test_a_jump_is_a_drift_and_the_model_is_believed_again_once_refitted() -> None:
    model = d.Online(100.0, 3.0, clock_mhz=1980)
    feed(model, 100.0, 300, seed=5)
    ready = [model.is_ready]
    feed(model, 130.0, 5, seed=6)
    ready.append(model.is_ready)
    feed(model, 130.0, d.REFIT, seed=7)
    assert [*ready, model.is_ready] == [True, False, True]
    assert model.predict_us(clock_mhz=1980) == pytest.approx(130.0, rel=0.02)


def test_a_small_lasting_error_is_a_drift_too_and_noise_is_none() -> None:
    quiet = d.Online(100.0, 3.0, clock_mhz=1980)
    rng = np.random.default_rng(8)
    for _ in range(20_000):
        quiet.observe(100.0 * rng.normal(1, 0.02), clock_mhz=1980)
        assert quiet.is_ready
    moved = False
    for _ in range(40):  # 8 %: under the limit of a single error
        quiet.observe(108.0, clock_mhz=1980)
        moved = moved or not quiet.is_ready
    assert moved


def test_one_outlier_is_no_drift() -> None:
    model = d.Online(100.0, 3.0, clock_mhz=1980)
    feed(model, 100.0, 100, seed=9)
    for _ in range(2):
        model.observe(140.0, clock_mhz=1980)
    assert model.is_ready


def test_a_clock_that_was_never_seen_is_predicted_from_the_next_one() -> None:
    model = d.Online(100.0, 3.0, clock_mhz=1980, share=0.7)
    assert model.predict_us(clock_mhz=1980) == 100.0
    feed(model, 105.0, 100, seed=10)
    truth = d.at_clock(105.0, 1980, 1500, 0.7)
    assert model.predict_us(clock_mhz=1500) == pytest.approx(truth, rel=0.02)
    feed(model, truth, 50, seed=11, mhz=1500)
    assert model.is_ready and model.predict_us(clock_mhz=1500) == pytest.approx(truth, rel=0.01)
    assert model.predict_us(clock_mhz=1980) == pytest.approx(105.0, rel=0.01)


def test_buckets_of_inputs_are_apart() -> None:
    model = d.Online(100.0, 3.0, clock_mhz=1980)
    for _ in range(10):
        model.observe(100.0, clock_mhz=1980, inputs=1)
    assert model.predict_us(clock_mhz=1980, inputs=8) == 100.0
    assert d.clock_bucket(1980) == d.clock_bucket(1965) != d.clock_bucket(1890)


@dataclass(frozen=True)
class Known:
    """What is known of a model and a job."""

    variants: tuple[Variant, ...]
    job: JobSpec
    solo: tuple[tuple[str, SoloModel], ...]
    pairs: tuple[tuple[str, PairModel], ...]


KNOWN = Known(
    (Variant(0, "alone", "none", 100.0, 104.0), Variant(1, "r", "role", 110.0, 120.0, 30.0)),
    JobSpec("mriq", "kernels", ("k.toml",)), (("k", SoloModel(1.0, 2.0, 132, True, 0.01)),),
    (("s", PairModel(1.0, 2.0, 3.0, 0.5, 0.01)),),
)  # fmt: skip


def test_as_json_there_and_back() -> None:
    text = json.dumps(to_json(KNOWN))
    assert from_json(Known, json.loads(text)) == KNOWN


@pytest.mark.parametrize(("old", "new"), [
    ('"number": 0', '"number": -1'), ('"sharing": "role"', '"sharing": "x"'),
    ('"lc_q99_us": 104.0', '"lc_q99_us": 99.0'), ('"lc_us": 100.0', '"lc_us": 0.0'),
    ('"resident": 132', '"resident": 0'),
    ('"kind": "kernels"', '"kind": "x"'), ('"be_us": 30.0', '"be_us": -1.0'), ('"ratio": 0.5', '"ratio": "x"'),
])  # fmt: skip
def test_what_cannot_be_is_refused(old: str, new: str) -> None:
    text = json.dumps(to_json(KNOWN))
    assert old in text
    with pytest.raises(ArtifactError, match="malformed Known"):
        from_json(Known, json.loads(text.replace(old, new)))
