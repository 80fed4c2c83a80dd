"""Operators of mutants, what means the same, and the memory of a soak."""

from __future__ import annotations

import pytest

from benchmarks import mutants, soak
from weft.device.facts import CpuFacts


def changed(operator: str, line: str) -> list[str]:
    return [line[: c.start] + c.new + line[c.end :] for c in mutants.OPERATORS[operator](line)]


@pytest.mark.parametrize(
    ("operator", "line", "found"),
    [
        ("off-by-one bound", "for (long i = 0; i < 7; i += 1) {", ["for (long i = 0; i < 6; i += 1) {"]),
        ("off-by-one bound", "r1 = (b + 1) * 3 < 5 ? (b + 1) * 3 : 5;", ["r1 = (b + 1) * 3 < 4 ? (b + 1) * 3 : 4;"]),
        ("wrong axis", "w_ld(in0 + i5 * 756 + i6 * 4);", ["w_ld(in0 + i5 * 4 + i6 * 756);"]),
        ("wrong axis", "w_ld(in0 + i5 * 0 + i6 * 4);", []),
        ("dropped term", "rv6 = w_plus(rv6, e13);", ["rv6 = rv6;", "rv6 = e13;"]),
        ("dropped term", "w_ld(v2 + i5 * 3 + i6);", ["w_ld(v2 + i6);"]),
        ("swapped operand", "const w_f32 e3 = (e1 - e2);", ["const w_f32 e3 = (e2 - e1);"]),
        ("lost tail", "if (x < 130) {", ["if (x < 128) {"]),
        ("lost tail", "if (x < 128) {", []),
        ("wrong constant", "const w_f32 e3 = (e2 + 0.5f);", ["const w_f32 e3 = (e2 + 0.625f);"]),
        ("wrong dtype", "const w_f32v e3 = (e2 * e1);", ["const w_f32v e3 = m_narrow((e2 * e1));"]),
        ("missing barrier", "#pragma omp barrier", [";"]),
        ("missing wait", "w_wait(); w_release();", ["; w_release();"]),
        ("missing wait", "w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1);", []),
    ],
)  # fmt: skip
def test_an_operator_changes_what_it_names(operator: str, line: str, found: list[str]) -> None:
    made = changed(operator, line)
    assert made[: len(found)] == found and (found or not made)


def test_mutants_of_a_number_are_always_the_same_and_of_every_operator() -> None:
    kernels = mutants.origins("cpu", CpuFacts(simd_bytes=64, threads=2), 0, most=1)
    drawn, again = (mutants.draw(kernels, 40, 0, "") for _ in range(2))
    assert [m.source for m in drawn] == [m.source for m in again]
    assert {m.operator for m in drawn} == set(mutants.OPERATORS) - {"missing wait"}
    for m in drawn:
        before, after = m.origin.source.text.split("\n"), m.source.text.split("\n")
        assert before[m.number].strip() == m.before and m.after in [x.strip() for x in after]
        assert m.before != m.after and m.before not in mutants.header_lines()


def test_a_difference_that_is_only_squared_means_the_same() -> None:
    kernels = mutants.origins("cpu", CpuFacts(simd_bytes=64, threads=2), 0, most=1)
    swapped = mutants.draw(kernels, 30, 0, "swapped operand")
    reasons = {m.after: mutants.known_equivalent(m) for m in swapped}
    assert "the difference is only squared" in reasons.values()
    assert "" in reasons.values()


def test_memory_that_grows_is_not_flat() -> None:
    assert soak.growth([400.0 + k % 7 for k in range(600)])[0] < 2
    rise, median = soak.growth([400.0 + 0.2 * k for k in range(600)])
    assert rise == pytest.approx(120.0) and median > 400
    log = soak.Log(rss_mb=[400.0 + 0.2 * k for k in range(600)])
    assert soak.summary(log, 600)["flat"] is False
