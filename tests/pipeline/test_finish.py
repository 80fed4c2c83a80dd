from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ir.types import DType
from weft.pipeline import finish
from weft.pipeline.finish import Contender, Expected, as_good, interleave, verify, wins


def test_a_clear_gain_wins_even_with_disturbed_rounds() -> None:
    base = [10.0] * 15
    assert wins([8.0] * 13 + [90.0, 70.0], base)
    assert wins([8.0] * 15, [*base[:13], 900.0, 700.0])


def test_within_two_percent_nothing_is_replaced() -> None:
    assert not wins([9.9] * 15, [10.0] * 15)
    assert wins([9.7] * 15, [10.0] * 15)


def test_a_gain_that_is_not_sure_does_not_win() -> None:
    assert not wins([5.0] * 8 + [15.0] * 7, [10.0] * 15)


def test_rounds_are_interleaved_and_all_are_kept() -> None:
    calls: list[str] = []
    samples = interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=7, seed=0, budget_s=10
    )
    assert {k: len(v) for k, v in samples.items()} == {"a": 7, "b": 7}
    assert min(samples["a"]) >= 0


def test_a_result_as_good_as_the_plain_one_passes_where_both_are_far_from_exact() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(1000)
    plain = exact + 1e-3 * rng.standard_normal(1000)
    assert as_good(DType.F32, exact + 1.5e-3 * rng.standard_normal(1000), plain, exact)
    assert not as_good(DType.F32, exact + 3e-3 * rng.standard_normal(1000), plain, exact)
    wrong = plain.copy()
    wrong[7] += 1.0
    assert not as_good(DType.F32, wrong, plain, exact)


def test_other_classes_or_shapes_never_pass() -> None:
    exact = np.array([1.0, np.inf, np.nan])
    assert as_good(DType.F32, exact, exact, exact)
    assert not as_good(DType.F32, np.array([1.0, np.nan, np.nan]), exact, exact)
    assert not as_good(DType.F32, np.array([1.0, -np.inf, np.nan]), exact, exact)
    assert not as_good(DType.F32, exact[:2], exact, exact)


@pytest.mark.parametrize("part", [1 << 27, 1000, 7])
def test_a_large_output_is_judged_part_by_part(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "PART", part)
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((30, 100))
    expected = Expected([exact], [exact.astype(np.float32)])

    def check(values: np.ndarray) -> finish.Check:
        run = lambda: [torch.from_numpy(values)]  # noqa: E731
        return verify(Contender("plan", run, 1, 0.0, baseline=False, executable=None), expected, DType.F32)

    good = exact.astype(np.float32)
    assert check(good).ok and check(good).worst < 1e-6
    for at in ((0, 0), (29, 99)):
        bad = good.copy()
        bad[at] = np.nan
        assert not check(bad).ok
    wrong = good.copy()
    wrong[20:] += 0.5
    found = check(wrong)
    assert not found.ok and found.note.count("output 0") == 1 and "outside" in found.note
    assert not check(good[:29]).ok
