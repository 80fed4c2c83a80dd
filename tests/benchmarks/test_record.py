"""Records: the newest row of every case, failures that are rows, and sources that are not those of a commit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from benchmarks.harness import record
from benchmarks.harness.record import Record, environment, lines_of, merge


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records, at commit c1 and sources s1."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv("WEFT_COMMIT", "c1")
    monkeypatch.setattr(record, "sources", lambda: "s1")
    return tmp_path / "cpu" / "x.jsonl"


def row(case: str, **more: object) -> dict[str, object]:
    return {"record": "case", "suite": "x", "case": case, **more}


def fail(why: str) -> None:
    raise RuntimeError(why)


def kept(path: Path) -> dict[str, dict[str, object]]:
    head, *rows = lines_of(path)
    assert head["record"] == "environment"
    return {str(x["case"]): x for x in rows}


def again(monkeypatch: pytest.MonkeyPatch, commit: str) -> Record:
    monkeypatch.setenv("WEFT_COMMIT", commit)
    return Record("cpu", "x", command="again")


def test_a_run_replaces_what_it_measures_and_keeps_the_rest(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Record("cpu", "x", command="first")
    for case in "abc":
        first.add(row(case, ms=1.0))
    first.add({"record": "summary", "total": 3})
    second = again(monkeypatch, "c2")
    second.add(row("b", ms=2.0))
    found = lines_of(place)
    assert [x.get("case") for x in found] == [None, "a", "b", "c"], "in their order, and no count of an older run"
    assert [(x["ms"], x["commit"]) for x in found[1:]] == [(1.0, "c1"), (2.0, "c2"), (1.0, "c1")]
    assert (found[0]["commit"], found[0]["command"]) == ("c2", "again")
    second.forget("a")
    assert set(kept(place)) == {"b", "c"} == second.known()


def test_a_case_that_fails_takes_the_place_of_what_was_measured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Record("cpu", "x").add(row("a", ms=1.0))
    then = again(monkeypatch, "c2")
    with then.measuring(case="a"):
        fail("out of memory\nmore")
    with then.measuring(case="b"):
        then.add(row("b", ms=3.0))
    assert kept(place)["a"] == row("a", failed="RuntimeError: out of memory", last_measured="c1", commit="c2", src="s1")
    assert kept(place)["b"]["ms"] == 3.0, "the others are measured"
    with pytest.raises(SystemExit, match=r"failed: a$"):
        then.close()
    third = again(monkeypatch, "c3")
    with third.measuring(case="a"):
        pass
    assert kept(place)["a"]["failed"] == "it gave no row" and kept(place)["a"]["last_measured"] == "c1"
    with third.measuring(case="b"):
        third.add(row("b", ms=4.0))
        fail("")
    assert kept(place)["b"]["failed"] == "RuntimeError"
    assert kept(place)["b"]["last_measured"] == "c2", "the row of a run that then failed is none"
    fourth = again(monkeypatch, "c4")
    with fourth.measuring(case="a"):
        fourth.add(row("a", ms=1.5))
    fourth.close()
    assert "failed" not in kept(place)["a"]


def test_a_process_that_is_killed_leaves_what_it_was_at_as_failed(place: Path) -> None:
    given = Record("cpu", "x")
    with given.measuring(case="a"):
        assert kept(place)["a"]["failed"] == "the run ended meanwhile"
        given.add(row("a", ms=1.0))
    assert kept(place)["a"]["ms"] == 1.0


def test_who_interrupts_a_run_loses_nothing(place: Path) -> None:
    given = Record("cpu", "x")
    given.add(row("a", ms=1.0))
    for case in "ab":
        with pytest.raises(KeyboardInterrupt), given.measuring(case=case):
            raise KeyboardInterrupt
    assert kept(place) == {"a": row("a", ms=1.0, commit="c1", src="s1")}


def test_a_case_may_have_several_names(place: Path) -> None:
    given = Record("cpu", "x", key=("case", "batch"))
    for batch in (1, 16):
        given.add(row("a", batch=batch, us=1.0))
    with given.measuring(case="a", batch=16):
        fail("no")
    first, second = lines_of(place)[1:]
    assert first["us"] == 1.0 and (second["batch"], second["failed"]) == (16, "RuntimeError: no")


def test_rows_of_another_machine_say_so(place: Path) -> None:
    place.parent.mkdir()
    lines = [{"record": "environment", "device": "another", "commit": "c0"}, row("a"), row("b", device="a third")]
    place.write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"cut o')
    Record("cpu", "x").add(row("c"))
    assert [kept(place)[k].get("device") for k in "abc"] == ["another", "a third", None]


def test_a_run_that_was_recorded_elsewhere_is_put_in(place: Path) -> None:
    merge(place, {"record": "environment", "commit": "c1"}, [row("a", ms=1.0), row("b", ms=1.0)], ("case",))
    merge(place, {"record": "environment", "commit": "c2"}, [row("b", failed="no"), row("c", ms=2.0)], ("case",))
    assert {k: (x.get("ms"), x["commit"]) for k, x in kept(place).items()} == {
        "a": (1.0, "c1"), "b": (None, "c2"), "c": (2.0, "c2"),
    }  # fmt: skip


def test_sources_that_are_not_the_commits_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    monkeypatch.setattr(record, "ROOT", tmp_path / "benchmarks")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    assert environment("x")["commit"] == "unknown", "no history"
    source, result = tmp_path / "src" / "a.py", tmp_path / "benchmarks" / "results" / "x.jsonl"
    source.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    result.write_text("{}")
    (tmp_path / "notes.md").write_text("results and notes are no sources")
    clean = environment("x")
    assert len(str(clean["commit"])) >= 7 and "changed" not in clean
    source.write_text("2")
    (tmp_path / "src" / "b.py").write_text("new")
    dirty = environment("x")
    assert dirty["commit"] == f"{clean['commit']}-dirty" and dirty["changed"] == ["src/a.py", "src/b.py"]
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    assert environment("x")["commit"] == "abc", "a copy without history is told"


def test_what_ran_on_the_processor_is_said_to_have_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "_gpu", lambda: {"device": "a GPU"})
    assert environment("x")["device"] == "a GPU" != environment("x", on_cpu=True)["device"]
    heads = [Record(at, "budget", path=tmp_path / f"{at}.jsonl").head["device"] for at in ("cpu", "a-gpu")]
    assert heads[0] != "a GPU" == heads[1]
