from __future__ import annotations

import numpy as np

from weft.ir.types import DType
from weft.pipeline.finish import as_good, interleave, wins


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
