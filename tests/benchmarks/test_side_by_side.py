"""Workers that prepare beside each other and time one after another: locks, barrier, failures, limits."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.harness import side_by_side
from benchmarks.harness.side_by_side import Task, Turn, run

LONG_S = 300.0
"""More than anything takes that ends, on a busy machine too."""
WORKER = """
import argparse, json, os, subprocess, sys, time
from pathlib import Path
from benchmarks.harness import side_by_side
from benchmarks.harness.side_by_side import Turn, work

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--line", type=int)
parser.add_argument("--parent", type=int)
given = parser.parse_args()
folder = Path.cwd()
turn = Turn(folder / "turn")

def note(what, began):
    with (folder / "notes").open("a") as notes:
        notes.write(json.dumps([given.name, what, began, time.monotonic()]) + "\\n")

def until(file):
    while not (folder / file).exists():
        time.sleep(0.01)

def prepare():
    began = time.monotonic()
    kind = given.name.partition("-")[0]
    if kind == "bad":
        print("the compiler's last words")
        raise RuntimeError("no such kernel")
    if kind == "dies":
        os._exit(7)
    if kind == "slow":
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "helper-is").write_text(str(helper.pid))
        (folder / "helper-is").rename(folder / "helper")
        time.sleep(600)
    if kind == "behind":
        until("helper")
    if kind == "meets":
        (folder / given.name).touch()
        until("meets-1" if given.name == "meets-2" else "meets-2")
    if kind == "stuck":
        side_by_side.HELD_S = 0.2
        with turn:
            time.sleep(600)
    for _ in range(3):
        with turn, turn:  # timings may nest
            started = time.monotonic()
            time.sleep(0.01)
            note("choice", started)
        time.sleep(0.005)
    note("prepared", began)
    return measure

def measure():
    started = time.monotonic()
    if given.name.startswith("hangs"):
        time.sleep(600)
    time.sleep(0.01)
    note("timed", started)
    return {"case": given.name}

work(given.line, given.parent, turn, prepare)
"""


def tasks(folder: Path, names: Sequence[str]) -> list[Task]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    root = Path(side_by_side.__file__).parents[2]
    code = f"import os, runpy, sys; os.chdir({str(folder)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return [Task(x, [sys.executable, "-S", "-c", code, x], folder / f"{x}.log", environment) for x in names]


def notes(folder: Path, what: str) -> list[tuple[float, float, str]]:
    """(began, ended, who) of what the workers noted, by time."""
    lines = [json.loads(x) for x in (folder / "notes").read_text().splitlines()]
    return sorted((began, ended, who) for who, kind, began, ended in lines if kind == what)


def apart(spans: Sequence[tuple[float, float, str]]) -> bool:
    return all(first[1] <= second[0] for first, second in pairwise(spans))


def gone(pid: int) -> bool:
    for _ in range(1500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    assert not any("does not end" in x for x in lines)


def outcome(results: Iterator[tuple[str, float, Any]]) -> dict[str, Any]:
    return {name: result for name, _, result in results}


def test_no_two_timings_overlap_and_failures_are_named(tmp_path: Path, said: list[str]) -> None:
    names = ["a", "bad-1", "b", "dies-1", "c", "hangs-1", "d"]
    found = outcome(run(tasks(tmp_path, names), jobs=3, prepare_s=LONG_S, measure_s=3, say=said.append))
    assert found == {x: {"case": x} for x in "abcd"}
    choices, timed, prepared = (notes(tmp_path, x) for x in ("choice", "timed", "prepared"))
    assert len(choices) == 15
    assert len(timed) == 4
    assert apart(choices + timed)  # in this order: the barrier
    assert max(x[1] for x in prepared) < timed[0][0]
    for name, why in (("bad-1", "no such kernel"), ("dies-1", "died (status 7)"), ("hangs-1", "said nothing for")):
        (line,) = [x for x in said if x.startswith(f"{name}: ") and "ready" not in x]
        assert why in line
    assert any("| the compiler's last words" in x for x in said)


def test_preparations_go_on_beside_each_other(tmp_path: Path, said: list[str]) -> None:
    """Each of two is ready only when the other has begun."""
    found = outcome(
        run(tasks(tmp_path, ["meets-1", "meets-2"]), jobs=2, prepare_s=LONG_S, measure_s=LONG_S, say=said.append)
    )
    assert found == {x: {"case": x} for x in ("meets-1", "meets-2")}


def test_what_takes_too_long_is_ended_with_its_helpers_and_the_rest_is_timed(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up when the others are ready; by then the slow one has its helper."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (LONG_S if len(ready()) == 2 else 0))
    monkeypatch.setattr(side_by_side, "time", clock)

    def ready() -> list[str]:
        return [x for x in said if ": ready after" in x]

    names = ["slow-1", "behind-a", "behind-b"]
    found = outcome(run(tasks(tmp_path, names), jobs=2, prepare_s=LONG_S, measure_s=LONG_S, say=said.append))
    assert found == {x: {"case": x} for x in names[1:]}
    assert any(x.startswith("slow-1: not ready after") for x in said)
    assert gone(int((tmp_path / "helper").read_text()))


def test_what_hangs_in_its_turn_ends_itself(tmp_path: Path, said: list[str]) -> None:
    found = outcome(run(tasks(tmp_path, ["stuck-1", "a"]), jobs=2, prepare_s=LONG_S, measure_s=LONG_S, say=said.append))
    assert found == {"a": {"case": "a"}}
    (line,) = [x for x in said if x.startswith("stuck-1: ")]
    assert "died (status -9)" in line
    assert "kept its turn" in line


def test_no_time_at_all_begins_nothing(tmp_path: Path, said: list[str]) -> None:
    assert not outcome(run(tasks(tmp_path, ["a", "b"]), jobs=2, prepare_s=0, measure_s=5, say=said.append))
    assert said == ["a: no time left, not begun", "b: no time left, not begun"]
    assert not (tmp_path / "notes").exists()


def test_a_caller_that_stops_ends_all_workers(tmp_path: Path, said: list[str]) -> None:
    results = run(tasks(tmp_path, ["a", "b"]), jobs=2, prepare_s=LONG_S, measure_s=LONG_S, say=said.append)
    first, _, _ = next(results)
    results.close()
    assert [x[2] for x in notes(tmp_path, "timed")] == [first]


def test_a_turn_counts_once_and_is_given_back(tmp_path: Path) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    mine, theirs = Turn(tmp_path / "turn"), Turn(tmp_path / "turn")
    with mine, mine:
        assert mine.since > 0
    assert mine.since == 0
    with pytest.raises(ZeroDivisionError), mine:
        1 / 0  # noqa: B018
    assert mine.since == 0
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    with (tmp_path / "turn").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    with theirs, (tmp_path / "turn").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
