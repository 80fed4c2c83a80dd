"""The rule of 'no slower', on times that are made up."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from benchmarks.harness import noise
from benchmarks.harness.noise import Judged, Row, Said, bound, compared, judged, of_rounds, rows


def times(seed: int, us: float, spread: float, rounds: int = 15) -> list[float]:
    chance = random.Random(seed)
    return [us * math.exp(chance.gauss(0.0, spread)) for _ in range(rounds)]


def test_times_of_one_thing_are_seldom_apart_by_more_than_the_bound() -> None:
    apart = 0
    for k in range(200):
        a, a_again, b, b_again = (times(4 * k + j, 100.0, 0.01) for j in range(4))
        apart += judged(b, a, bound([(a, a_again), (b, b_again)], draws=200)).said is not Said.NO_SLOWER
    assert 0 < apart <= 20  # one in twenty is expected


@pytest.mark.parametrize(("faster", "said"), [(0.9, Said.FASTER), (1.0, Said.NO_SLOWER), (1.1, Said.SLOWER)])
def test_what_is_further_away_than_the_noise_is_told(faster: float, said: Said) -> None:
    samples = {"weft": times(1, 100.0 * faster, 0.01), "weft_again": times(2, 100.0 * faster, 0.01)}
    samples |= {"eager": times(3, 100.0, 0.01), "eager_again": times(4, 100.0, 0.01)}
    assert noise.twice({"weft": 1, "eager": 2}).keys() == samples.keys()
    found = of_rounds(samples, "weft", "eager")
    assert found.said is said and found.no_slower is (said is not Said.SLOWER)
    assert found.record()["said"] == said.value and found.ratio == pytest.approx(faster, rel=0.02)


def test_one_side_alone_does_not_know_its_noise() -> None:
    samples = {"weft": times(1, 100.0, 0.01), "weft_again": times(2, 100.0, 0.01), "eager": times(3, 100.0, 0.01)}
    with pytest.raises(ValueError, match="eager took part once"):
        of_rounds(samples, "weft", "eager")


def test_noise_excuses_nothing() -> None:
    wild = bound([(times(1, 100.0, 0.4), times(2, 100.0, 0.4))])
    assert wild > noise.MOST
    for ratio in (0.97, 1.0, 1.05):
        assert Judged(ratio, wild).said is Said.NOISY and not Judged(ratio, wild).no_slower
    assert Judged(9.0, wild).said is Said.SLOWER and Judged(0.1, wild).said is Said.FASTER


def test_the_noisiest_pair_counts_and_what_was_seen_does() -> None:
    calm, wild = ((times(k, 100.0, s), times(k + 1, 100.0, s)) for k, s in ((1, 0.001), (3, 0.02)))
    assert bound([calm, wild]) == bound([wild]) > bound([calm]) >= noise.LEAST
    steady = [100.0] * 15
    assert bound([(steady, steady)]) == noise.LEAST
    assert bound([(steady, [103.0] * 15)]) == pytest.approx(math.log(1.03))
    assert bound([(a := times(9, 5.0, 0.01), b := times(8, 5.0, 0.01))]) == bound([(a, b)])
    assert bound([(a, b)]) == pytest.approx(bound([([10 * x for x in a], [10 * x for x in b])]))


def test_a_round_that_was_disturbed_decides_nothing() -> None:
    a, again, b = (times(k, 100.0, 0.005) for k in (1, 2, 3))
    a[4] = b[9] = 900.0
    assert judged(b, a, bound([(a, again)])).said is Said.NO_SLOWER


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [([], "no pair"), ([([1.0, 2.0], [1.0])], "2 and 1 rounds"), ([([1.0], [1.0])], "1 and 1 rounds"),
     ([([1.0, 0.0], [1.0, 1.0])], "not positive"), ([([1.0, math.inf], [1.0, 1.0])], "finite")],
)  # fmt: skip
def test_times_that_say_nothing_are_refused(pairs: list[tuple[list[float], list[float]]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        bound(pairs)


def test_records_of_two_commits_are_compared_by_what_one_of_them_shows_twice() -> None:
    before = {c: Row(1.0, 0.006) for c in "abcd"} | {"gone": Row(1.0, 0.006)}
    again = {
        "a": Row(1.0, 0.006),
        "b": Row(1.002, 0.006),
        "c": Row(1.0, 0.006),
        "d": Row(1.03, 0.006),
        "gone": Row(1, 0),
    }
    after = {"a": Row(1.05, 0.006), "b": Row(0.9, 0.006), "c": Row(1.02, 0.006), "d": Row(1.02, 0.1), "new": Row(1, 0)}
    found = dict(compared(before, again, after))
    told = {c: None if j is None else j.said for c, j in found.items()}
    assert told == {"a": Said.SLOWER, "b": Said.FASTER, "c": Said.NO_SLOWER, "d": Said.NOISY, "gone": None}
    assert found["c"] is not None and found["c"].bound == pytest.approx(math.log(1.03))  # the most of all rows


def test_the_command_reads_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record(name: str, ms: float, said: float = 0.01) -> str:
        case = {"record": "case", "case": "net/b1", "weft_ms": ms, "noise": {"noise": said}}
        old = {"record": "case", "case": "net/b1", "weft_ms": 9.0, "noise": {"noise": said}}
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, ({"record": "environment"}, old, case, {"record": "summary"}))))
        assert rows(path.read_text().splitlines()) == {"net/b1": Row(ms, math.log1p(said))}
        return str(path)

    files = [record("before", 1.0), record("again", 1.0)]
    with pytest.raises(SystemExit) as ended:
        noise.main([*files, record("same", 1.005)])
    assert ended.value.code == 0 and "1 of 1 cases are no slower" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        noise.main([*files, record("slow", 1.1)])
    assert ended.value.code == 1 and "net/b1: slower: 1.1000, noise 1.00%" in capsys.readouterr().out
    (tmp_path / "empty").write_text("")
    with pytest.raises(SystemExit, match="no case with its noise"):
        noise.main([str(tmp_path / "empty")] * 3)
