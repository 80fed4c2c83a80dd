"""The runner of hostile files: what kills, hangs or is slow costs one file; a run that is broken off goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tools import hostile

RIGHT = {"code": "W105", "text": "too much", "seconds": 0.5, "cpu_s": 0.1, "bytes": 1 << 20}


def by_name(name: str, folder: str) -> hostile.Found:
    """Stands in for `answer`; it runs in a process of its own."""
    assert Path(folder).is_dir()
    kind, _, place = name.partition(" ")
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "ends":
        os._exit(3)
    if kind == "hangs":
        time.sleep(600)
    if kind == "busy":  # slow the first time only
        first = not Path(place).exists()
        Path(place).touch()
        return {**RIGHT, "seconds": 9.0 if first else 1.0}
    odd: dict[str, hostile.Found] = {"wrong": {"code": "none"}, "slow": {"seconds": 9.0}, "large": {"bytes": 3 << 30}}
    return RIGHT | odd.get(kind, {})


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "answer", by_name)
    monkeypatch.setattr(hostile, "prepare", lambda: None)
    monkeypatch.setattr(hostile, "ENDS_S", 10.0)


def children() -> set[int]:
    """Process numbers of this one's children, those that nobody waited for included."""
    lists = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    return {int(x) for text in lists for x in text.split()}


def test_every_end_of_a_process_is_the_answer_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()  # others of this process may have some: a measuring worker is kept
    names = ["right", "dies", "ends", "wrong", "slow", "large", f"busy {tmp_path / 'seen'}"]
    found = {r["name"].split()[0]: r for r in hostile.outcomes(names, 2)}
    assert {k for k, r in found.items() if r["named"]} == {"right", "busy"}
    assert [found["dies"]["text"], found["ends"]["text"]] == [
        "the process died: signal 9", "the process died: status 3",
    ]  # fmt: skip
    assert (found["busy"]["asked"], found["busy"]["seconds"]) == (2, 1.0)
    assert (found["slow"]["asked"], found["slow"]["seconds"]) == (hostile.ASKED, 9.0)
    monkeypatch.setattr(hostile, "ENDS_S", 0.3)
    (late,) = hostile.outcomes(["hangs"], 1)
    assert not late["named"] and late["text"] == "more than 0.3 s" and late["asked"] == 1
    assert children() == before, "every process was waited for"


def test_a_run_that_was_broken_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.hostile.corpus.corpus", lambda: {f"right {k}": None for k in range(6)})
    out = tmp_path / "hostile.jsonl"
    assert hostile.main(["-o", str(out), "--part", "1/3"]) == 0
    whole = out.read_text()
    assert [json.loads(x)["record"] for x in whole.splitlines()] == ["environment", "file", "file", "summary"]
    out.write_text(whole[: whole.index('{"record": "summary"')] + '{"record": "file", "na')  # in the middle of a line
    capsys.readouterr()
    assert hostile.main(["-o", str(out)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [x.split(":")[0].split()[-1] for x in told[:-1]] == ["1", "2", "4", "5"]
    end = json.loads(told[-1])
    assert (end["suite"], end["total"], end["named"], end["worst_s"]) == ("hostile", 6, 6, 0.5)
    files = [json.loads(x) for x in out.read_text().splitlines()][1:-1]
    assert [r["name"] for r in files] == [f"right {k}" for k in range(6)]
    head = json.loads(out.read_text().splitlines()[0])
    out.write_text(out.read_text().replace(head["sources"], "other"))
    assert hostile.known(out, hostile.header("again")) == []


def test_a_file_without_a_name_fails_the_run_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.hostile.corpus.corpus", lambda: {"right": None, "wrong": None})
    out = tmp_path / "hostile.jsonl"
    for asked in (["named     right", "NOT NAMED wrong"], ["NOT NAMED wrong"]):
        assert hostile.main(["-o", str(out)]) == 1
        assert [x.split(":")[0] for x in capsys.readouterr().out.splitlines()[:-1]] == asked
