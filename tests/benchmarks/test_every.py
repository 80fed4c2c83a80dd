"""Every suite in calls that go on: progress, failures, the limit, interruptions; whether every record has a suite."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.every import OTHERS, SUITES, Call, Progress, Suite, measure, suite
from benchmarks.harness.left import MORE

from benchmarks import every

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200"
SCRIPT = """
import json, pathlib, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
counter = folder / f"{name}.count"
count = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(count))
"""
"""Counts its calls; what it does then is the test's."""
HANGS = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1], "pids").write_text(f"{os.getpid()} {child.pid}")
print("it waits for a device", flush=True)
time.sleep(600)
"""


class Bench:
    """Modules in a folder as suites, and calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"
        self.results.mkdir()

    def suite(self, name: str, *does: str, script: str = SCRIPT, **more: Any) -> Suite:
        steps = []
        for i, text in enumerate(does):
            (self.folder / f"weft_{name}_{i}.py").write_text(script + text)
            steps.append(f"weft_{name}_{i} {self.folder} {name}{i}")
        return suite(name, *steps, **{"case_s": 1.0, **more})

    def call(self, *suites: Suite, seconds: float = 300.0) -> int:
        progress = Progress(self.folder / "progress.json", "s1")
        call = Call(progress, self.folder / "kept", self.results, seconds, str(self.folder))
        return measure(suites, call, progress)

    def count(self, name: str) -> int:
        path = self.folder / f"{name}.count"
        return int(path.read_text()) if path.exists() else 0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(every, "START_S", 0.0)
    monkeypatch.setattr(every, "END_S", 0.5)
    monkeypatch.setattr(every, "SPARE_S", 1.0)
    return Bench(tmp_path)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_suite_goes_on_until_it_is_done_and_is_not_run_again(bench: Bench) -> None:
    more = f"print(f'not begun in time: case {{count}}')\n(folder / 'x.txt').write_text(str(count))\nsys.exit({MORE})"
    two = bench.suite("two", f"if count < 3:\n    {more.replace(chr(10), chr(10) + '    ')}", "print('fine')")
    two = Suite(two.name, tuple((*c, "{kept}/../x.txt") for c in two.steps), two.records, two.case_s)
    assert bench.call(two) == 0
    assert (bench.count("two0"), bench.count("two1")) == (3, 1)
    assert bench.call(two) == 0 and bench.count("two0") == 3, "it is done"


def test_time_that_is_over_leaves_the_rest_to_the_next_call(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    first = bench.suite("first", "print('fine')")
    long = bench.suite("long", "print('fine')", case_s=1000.0)
    assert bench.call(first, long) == MORE
    said = capsys.readouterr().out
    assert "done (1): first" in said and "long: 0 of 1 commands done; it needs a call of 1001 s" in said
    assert bench.count("first0") == 1 and bench.count("long0") == 0
    assert bench.call(first, long, seconds=2000) == 0 and bench.count("first0") == 1 and bench.count("long0") == 1


def test_progress_is_of_these_sources_alone(bench: Bench) -> None:
    one = bench.suite("one", "print('fine')")
    assert bench.call(one) == 0
    path = bench.folder / "progress.json"
    assert Progress(path, "s1").of("one").done == 1 and Progress(path, "s2").of("one").done == 0
    Progress(path, "s2").keep("one", every.State(failed="no"))
    assert Progress(path, "s1").of("one").done == 1, "that of others stays"
    path.write_text('{"s1": {"one": {"done": 1')
    assert bench.call(one) == 0 and bench.count("one0") == 2, "a file that is none"


def test_a_failure_is_told_stops_no_other_and_is_not_tried_again(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bench.suite("bad", "print('first')\nsys.exit('out of memory')", "print('fine')")
    dies = bench.suite("dies", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    fine = bench.suite("fine", "print('fine')")
    assert bench.call(bad, dies, fine) == 1
    said = capsys.readouterr().out
    assert "bad: status 1: out of memory" in said and "dies: ended by SIGKILL: it said nothing" in said
    assert "done (1): fine" in said
    assert bench.count("bad1") == 1, "the other commands of the suite are run"
    assert bench.call(bad, dies, fine) == 1 and bench.count("bad0") == 1
    late = bench.suite("late", f"sys.exit({MORE})", case_s=1000.0)
    assert bench.call(bad, late) == MORE, "more to do comes before what failed"


def test_what_is_not_prepared_is_not_measured(bench: Bench) -> None:
    made = bench.suite("made", "print('fine')")
    unmade = bench.suite("unmade", "sys.exit(3)")
    assert bench.call(Suite("x", made.steps, (), 1.0, unmade.steps)) == 1 and bench.count("made0") == 0
    assert bench.call(Suite("y", made.steps, (), 1.0, made.steps)) == 0 and bench.count("made0") == 2


def test_what_needs_something_is_passed_over_and_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    alone = bench.suite("alone", "print('fine')", needs=lambda: "it needs 2 GPUs")
    assert bench.call(alone) == 0 and bench.count("alone0") == 0
    assert "passed over (1):\n    alone: it needs 2 GPUs" in capsys.readouterr().out
    assert every.program("no-such-program", "nothing")() and not every.program("sh", "the system")()
    assert "no_such_package" in every.libraries("json", "no_such_package")() and every.libraries("json")() == ""
    assert every.file("Makefile", "")() == "" and every.file("build/none", "make it")() == "no build/none (make it)"


def test_a_child_that_hangs_is_ended_with_its_own_children(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = bench.suite("hangs", "", script=HANGS)
    began = time.monotonic()
    assert bench.call(hangs, seconds=8) == MORE
    assert time.monotonic() - began < 10, "the call has ended in its time"
    assert not any(map(alive, map(int, (bench.folder / "pids").read_text().split())))
    assert "hangs: cut short: ended after" in capsys.readouterr().out
    assert "it waits for a device" in (bench.folder / "kept" / "hangs.log").read_text()
    assert bench.call(hangs, seconds=8) == MORE
    assert bench.call(hangs, seconds=8) == 1, "nothing new again and again"
    assert "hangs: nothing new after 2 more runs: ended after" in capsys.readouterr().out


def test_children_that_outlive_a_suite_are_ended(bench: Bench) -> None:
    text = "import subprocess\nx = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint(x.pid)\n"
    text += "(folder / 'pids').write_text(str(x.pid))"
    assert bench.call(bench.suite("leaves", text)) == 0
    assert not alive(int((bench.folder / "pids").read_text()))


def test_who_interrupts_a_call_loses_nothing(bench: Bench) -> None:
    def late(_sign: int, _frame: object) -> None:
        raise KeyboardInterrupt

    first, hangs = bench.suite("first", "print('fine')"), bench.suite("hangs", "", script=HANGS)
    before = signal.signal(signal.SIGALRM, late)
    try:
        assert bench.call(first) == 0
        signal.alarm(5)
        with pytest.raises(KeyboardInterrupt):
            bench.call(first, hangs)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not any(map(alive, map(int, (bench.folder / "pids").read_text().split())))
    assert Progress(bench.folder / "progress.json", "s1").of("hangs").cut == "it was interrupted"
    hangs = bench.suite("hangs", "print('fine')")
    assert bench.call(first, hangs) == 0 and (bench.count("first0"), bench.count("hangs0")) == (1, 1)


def test_what_failed_is_tried_again_where_it_is_asked_for(bench: Bench) -> None:
    bad = bench.suite("bad", "sys.exit(count == 1)")
    rows = [{"record": "environment", "src": "s1"}, {"record": "case", "case": "a", "src": "s1"},
            {"record": "case", "case": "b", "src": "s1", "failed": "no"}]  # fmt: skip
    path = bench.results / "bad.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))
    assert bench.call(bad) == 1
    call = Call(Progress(bench.folder / "progress.json", "s1"), bench.folder, bench.results, 100.0, "x")
    call.retry(bad)
    assert [x["src"] for x in map(json.loads, path.read_text().splitlines())] == ["s1", "s1", ""]
    assert bench.call(bad) == 0 and bench.count("bad0") == 2
    call = Call(Progress(bench.folder / "progress.json", "s1"), bench.folder, bench.results, 100.0, "x")
    call.retry(bad)
    assert bench.call(bad) == 0 and bench.count("bad0") == 2, "nothing failed"
    call.forget(bad)
    assert [x["src"] for x in map(json.loads, path.read_text().splitlines())] == ["s1", "", ""]
    assert bench.call(bad) == 0 and bench.count("bad0") == 3


def test_every_record_has_a_suite() -> None:
    written = {name for s in SUITES for name in s.records}
    there = {p.stem for p in RESULTS.glob("*.jsonl")}
    assert len(there) > 30
    assert there - written - set(OTHERS) == set(), "put its suite into benchmarks/every.py, or say why there is none"
    assert not written & set(OTHERS) and set(OTHERS) <= there
    assert len({s.name for s in SUITES}) == len(SUITES)


class Accepted(Exception):
    """A parser took the arguments."""


@pytest.mark.parametrize("name", [s.name for s in SUITES])
def test_every_command_is_accepted_by_its_parser(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A suite has the options that it is given, a limit that it keeps, and fits into a call."""
    taken = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        taken(self, *given, **named)
        raise Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    s = next(x for x in SUITES if x.name == name)
    assert s.case_s + every.START_S + every.SPARE_S < 540
    call = Call(Progress(tmp_path / "progress.json", "s1"), tmp_path, tmp_path, 540.0, "x")
    for number in range(len(s.commands)):
        module, *arguments = call.command(s, number, 500.0)
        assert "{" not in " ".join(arguments)
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Accepted):
            importlib.import_module(module).main()
        resumes = "--left" in arguments or "--journal" in arguments or len(s.steps) > 1
        assert resumes, "a suite goes on where it was cut short"


def test_commands_that_are_no_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        every.main(["--only", "gemm,nothing"])
    assert ended.value.code == 2 and "no suite 'nothing'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        every.main(["--seconds", "20"])
    assert "a case may take" in capsys.readouterr().err
    assert every.main(["--list", "--only", "zoo"]) == 0
    assert capsys.readouterr().out.startswith("zoo\n    python -m benchmarks.zoo --device cuda")
