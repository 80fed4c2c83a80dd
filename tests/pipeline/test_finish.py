from __future__ import annotations

from weft.pipeline.finish import interleave, wins


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
