"""Runs that go on: what has a row of these sources is passed over, and the exit status says whether more is left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from benchmarks.harness import record
from benchmarks.harness.left import MORE, Left
from benchmarks.harness.record import ENDED, TRIES, Record, exchange, lines_of


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_COMMIT", "c1")
    monkeypatch.setattr(record, "sources", lambda: "s1")
    return tmp_path / "x.jsonl"


def opened(place: Path) -> Record:
    return Record("cpu", "x", path=place, command="test")


def left(given: Record | None, *, seconds: float = 60.0, only: bool = True) -> Left:
    return Left(given, time.perf_counter() + seconds, only=only)


def row(case: str, **more: object) -> dict[str, object]:
    return {"record": "case", "case": case, **more}


def test_what_has_a_row_of_these_sources_is_passed_over(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(place).add(row("a"))
    assert lines_of(place)[1]["src"] == "s1"
    assert not left(opened(place)).begins(case="a") and left(opened(place)).begins(case="b")
    assert left(opened(place), only=False).begins(case="a"), "without --left all is measured"
    monkeypatch.setenv("WEFT_COMMIT", "c2")
    assert not left(opened(place)).begins(case="a"), "another commit has the same sources"
    monkeypatch.setattr(record, "sources", lambda: "s2")
    then = opened(place)
    assert left(then).begins(case="a"), "other sources"
    then.add(row("b"))
    assert [x.get("src") for x in lines_of(place)[1:]] == ["s1", "s2"], "a row of before keeps its sources"


def test_rows_from_before_sources_were_named_are_measured(place: Path) -> None:
    place.write_text("".join(json.dumps(x) + "\n" for x in ({"record": "environment", "commit": "c0"}, row("a"))))
    given = opened(place)
    given.add(row("b"))
    again = opened(place)
    assert left(again).begins(case="a") and not left(again).begins(case="b")
    again.add({**again.before()["a"], "chosen": True})
    assert "src" not in again.before()["a"], "a row that is written again was not measured again"


def test_the_status_says_what_is_left_and_what_failed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = opened(place)
    assert left(given).status() == 0 and left(given).status(["a"]) == 1
    late = left(given, seconds=-1)
    assert not late.begins(case="a", batch=16) and late.status(bad=True) == MORE
    assert "not begun in time: a 16" in capsys.readouterr().out
    late = left(given, seconds=-1, only=False)
    assert not late.begins(case="a") and late.status() == 0, "without --left it is as it was"
    given.fail("no", case="a")
    then = left(opened(place))
    assert not then.begins(case="a") and then.status() == 1, "a failure of an earlier call is not forgotten"
    wrong = Left(opened(place), time.perf_counter() + 60, only=True, good=lambda x: bool(x.get("right")))
    given.add(row("b", right=False))
    assert not Left(opened(place), wrong.end, only=True).known(case="c") and wrong.status() == 0
    again = Left(opened(place), wrong.end, only=True, good=lambda x: bool(x.get("right")))
    assert again.known(case="b") and again.status() == 1
    with pytest.raises(SystemExit) as ended:
        again.close()
    assert ended.value.code == 1
    assert left(None).begins(case="a"), "nothing is recorded"


def test_with_whom_the_process_was_killed_is_tried_again_and_then_failed(place: Path) -> None:
    for _ in range(TRIES):
        given = opened(place)
        assert left(given).begins(case="a")
        with given.measuring(case="a"):
            killed = place.read_text()
            given.add(row("a"))
        place.write_text(killed)
    found = left(opened(place))
    assert not found.begins(case="a") and found.status() == 1
    assert lines_of(place)[1]["failed"] == ENDED and lines_of(place)[1]["tries"] == TRIES


def test_several_rows_of_a_case_are_exchanged_together(place: Path) -> None:
    head: record.Row = {"record": "environment", "commit": "c1", "src": "s1"}
    exchange(place, head, [row("a", who="x"), row("a", who="y"), row("b", who="x")], ("case",))
    exchange(place, {**head, "commit": "c2"}, [row("a", who="z")], ("case",))
    found = [(x["case"], x["who"], x["commit"]) for x in lines_of(place)[1:]]
    assert found == [("b", "x", "c1"), ("a", "z", "c2")] and lines_of(place)[0]["commit"] == "c2"
