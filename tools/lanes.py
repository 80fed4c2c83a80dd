"""The tests that need a GPU, several processes at once: `python tools/lanes.py --lanes 8 [--limit 540] [--out DIR]`.

Each lane is one process at a time with cores, a cache and a GPU of its own (`CUDA_VISIBLE_DEVICES`, in turn over those
there are). It takes the file of tests that is expected to take longest among those left; files longer than `--split`
seconds are taken in parts. What each test took on an H200 is in `tests/gpu/durations.json`; what it took in this run is
written to `--durations`. Tests stay right beside others, but nothing is timed for the record here. Whatever has not
begun or ended at `--limit` is named.

Everything a lane prints is in `--out`/FILE.log. The exit code is 0 where every test passed or was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOK = "tests/gpu/durations.json"
"""What each test took: file -> name -> seconds."""
UNKNOWN_S = 30.0
"""Of a file that never ran."""
UNKNOWN_TEST_S = 5.0
"""Of a test that never ran."""
START_S = 6.0
"""A process takes that long before its first test."""
END_S = 5.0
"""After SIGTERM a process may say what it was doing."""
OUTCOMES = ("passed", "failed", "error", "skipped")
_TAGS = {"error": "error", "failure": "failed", "skipped": "skipped"}
"""Element of a report -> outcome."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Tests that one process runs: a file, or some tests of it."""

    file: str
    tests: tuple[str, ...] = ()
    expected_s: float = UNKNOWN_S

    @property
    def arguments(self) -> tuple[str, ...]:
        """For pytest."""
        return self.tests or (self.file,)


@dataclass(slots=True)
class Ran:
    """What came of a unit."""

    unit: Unit
    seconds: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)
    """Test -> one of `OUTCOMES`."""
    durations: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """Why it is not whole; empty: it is."""

    @property
    def good(self) -> bool:
        """Whether everything ran and nothing failed."""
        return not self.note and not any(x in ("failed", "error") for x in self.outcomes.values())


def units(
    files: Sequence[str],
    known: Mapping[str, Mapping[str, float]],
    split_s: float,
    there: Sequence[str] | None = None,
) -> list[Unit]:
    """Longest first. `known`: file -> test -> seconds of an earlier run; such files are cut into parts of `split_s`.

    `there`: the tests to run, which are named one by one where a file is cut; without, files are taken whole.
    """
    found = []
    inside: dict[str, list[str]] = {}
    for test in there or ():
        inside.setdefault(test.partition("::")[0], []).append(test)
    for file in files:
        if there is not None and file not in inside:
            continue
        times = known.get(file, {})
        tests = {t: times.get(t, UNKNOWN_TEST_S) for t in inside.get(file, ())}
        if not tests:
            found.append(Unit(file, (), START_S + sum(times.values()) if times else UNKNOWN_S))
            continue
        part: list[str] = []
        took = START_S
        for test, seconds in tests.items():  # in the order of the file: what a module's fixtures make is used together
            if part and took + seconds > split_s:
                found.append(Unit(file, tuple(part), took))
                part, took = [], START_S
            part.append(test)
            took += seconds
        found.append(Unit(file, tuple(part), took))
    return sorted(found, key=lambda u: -u.expected_s)


def collected(where: Sequence[str], mark: str) -> list[str] | None:
    """The tests of a mark in files or folders, as pytest names them; None where it does not say."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", mark, "-p", "no:cacheprovider", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [x for x in done.stdout.splitlines() if "::" in x and x.partition("::")[0].endswith(".py")]
    return found if done.returncode in (0, 5) else None


def read_report(path: Path) -> tuple[dict[str, str], dict[str, float]]:
    """(test -> outcome, test -> seconds) of a JUnit file that pytest wrote; raises ValueError where it is not whole."""
    try:
        cases = ET.parse(path).getroot().iter("testcase")
    except (OSError, ET.ParseError) as error:
        raise ValueError(f"no report: {error}") from error
    outcomes, durations = {}, {}
    for case in cases:
        module, name = case.get("classname", ""), case.get("name", "")
        kinds = {child.tag for child in case}
        test = f"{module.replace('.', '/')}.py::{name}"
        outcome = next((found for tag, found in _TAGS.items() if tag in kinds), "passed")
        outcomes[test] = outcome
        durations[test] = float(case.get("time", "0"))
    return outcomes, durations


class Lanes:
    """Lanes that take units until none is left or the time is up."""

    def __init__(self, waiting: Sequence[Unit], lanes: int, gpus: int, limit_s: float, out: Path, mark: str) -> None:
        self.waiting = list(waiting)
        self.ran: list[Ran] = []
        self._lanes, self._gpus, self._out, self._mark = lanes, max(1, gpus), out, mark
        self._end = time.monotonic() + limit_s
        self._lock = threading.Lock()
        cores = sorted(os.sched_getaffinity(0))
        each = -(-len(cores) // lanes)  # cores of several lanes where they do not divide evenly
        self._cores = [cores[i * each % len(cores) :][:each] for i in range(lanes)]

    def run(self) -> None:
        """Until all is done; returns what ran in `ran`, and leaves in `waiting` what had no time."""
        threads = [threading.Thread(target=self._lane, args=(i,), daemon=True) for i in range(self._lanes)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def _lane(self, number: int) -> None:
        while True:
            with self._lock:
                if not self.waiting or time.monotonic() + START_S > self._end:
                    return
                unit = self.waiting.pop(0)
                name = f"{len(self.ran):03d}-{Path(unit.file).stem}"
                ran = Ran(unit)
                self.ran.append(ran)
            self._one(number, ran, name)

    def _one(self, number: int, ran: Ran, name: str) -> None:
        log, report = self._out / f"{name}.log", self._out / f"{name}.xml"
        cache = self._out / f"cache-{number}"
        cache.mkdir(mode=0o700, exist_ok=True)
        environ = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": self._visible(number),
            "WEFT_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": str(len(self._cores[number])),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-m", self._mark, "-p", "no:cacheprovider"]
        # xunit2 has no properties of a test: pytest warns of `record_property`, and warnings are errors
        command += ["--show-capture=no", "-o", "junit_family=xunit1", f"--junitxml={report}", *ran.unit.arguments]
        begun = time.monotonic()
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
            os.sched_setaffinity(process.pid, self._cores[number])
            try:
                code = process.wait(max(1.0, self._end - time.monotonic()))
            except subprocess.TimeoutExpired:
                ran.note = "the time was up"
                code = _ended(process)
        ran.seconds = time.monotonic() - begun
        try:
            ran.outcomes, ran.durations = read_report(report)
        except ValueError as error:
            ran.note = ran.note or f"exit code {code}: {error}"
        if code not in (0, 1, 5) and not ran.note:
            ran.note = f"exit code {code}"

    def _visible(self, number: int) -> str:
        """The GPU of a lane, among those that this process may use."""
        allowed = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
        choice = allowed or [str(i) for i in range(self._gpus)]
        return choice[number % len(choice)]


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Ends a process and all of its own; what hangs in a driver is killed."""
    for sign, wait_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        try:
            os.killpg(process.pid, sign)
            return process.wait(wait_s)
        except ProcessLookupError:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    return -signal.SIGKILL


def table(ran: Sequence[Ran], waiting: Sequence[Unit]) -> list[str]:
    """A line for each file, then every test that failed and everything that did not run."""
    lines = []
    files: dict[str, list[Ran]] = {}
    for r in ran:
        files.setdefault(r.unit.file, []).append(r)
    for file, parts in sorted(files.items(), key=lambda x: -sum(r.seconds for r in x[1])):
        count = Counter(o for r in parts for o in r.outcomes.values())
        told = ", ".join(f"{count[o]} {o}" for o in OUTCOMES if count[o]) or "nothing"
        lines.append(f"{sum(r.seconds for r in parts):7.1f} s  {file}: {told}")
    for r in ran:
        lines += [f"{o.upper()} {test}" for test, o in r.outcomes.items() if o in ("failed", "error")]
        if r.note:
            lines.append(f"NOT WHOLE {' '.join(r.unit.arguments[:3])}: {r.note}")
    lines += [f"NOT BEGUN {' '.join(u.arguments[:3])}" for u in waiting]
    return lines


def known_durations(path: Path) -> dict[str, dict[str, float]]:
    """What an earlier run kept: file -> test -> seconds; nothing where that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(f): {t if t.startswith(f"{f}::") else f"{f}::{t}": float(s) for t, s in tests.items()}
            for f, tests in found.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _may_hold(path: Path, mark: str) -> bool:
    """Whether a file may hold tests of a mark: all those marked `gpu` stand in one folder, which a test holds."""
    return mark != "gpu" or ROOT / "tests" / "gpu" in path.parents


def _gpus() -> int:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return sum(line.startswith("GPU ") for line in found.splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs them; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("where", nargs="*", default=["tests/gpu"], help="files or folders of tests")
    parser.add_argument("--lanes", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument("--split", type=float, default=90.0, help="seconds of a part of a file")
    parser.add_argument("--out", type=Path, help="folder of the logs; default: a temporary one")
    parser.add_argument("--mark", default="gpu", help="of pytest, as its -m")
    parser.add_argument("--tests", type=Path, help="file with the tests to run, one in each line: no others are")
    parser.add_argument("--durations", type=Path, help="JSON of what each test took; read, and written anew")
    chosen = parser.parse_args(argv)
    if chosen.lanes < 1:
        parser.error("--lanes: at least one")
    out = chosen.out or Path(tempfile.mkdtemp(prefix="weft-lanes-"))
    out.mkdir(parents=True, exist_ok=True)
    durations = chosen.durations or out / "durations.json"
    files = []
    for given in chosen.where:
        path = ROOT / given
        if not path.exists():
            parser.error(f"{given}: no such file or folder")
        inside = [p for p in path.rglob("test_*.py") if _may_hold(p, chosen.mark)] if path.is_dir() else [path]
        files += sorted(str(p.relative_to(ROOT)) for p in inside)
    known = known_durations(durations) or known_durations(ROOT / TOOK)
    there = chosen.tests.read_text(encoding="utf-8").splitlines() if chosen.tests else collected(files, chosen.mark)
    lanes = Lanes(units(files, known, chosen.split, there), chosen.lanes, _gpus(), chosen.limit, out, chosen.mark)
    lanes.run()
    for r in lanes.ran:
        known.setdefault(r.unit.file, {}).update(r.durations)
    short = {f: {t.removeprefix(f"{f}::"): round(s, 1) for t, s in tests.items()} for f, tests in known.items()}
    durations.write_text(json.dumps(short, indent=0, separators=(",", ":")) + "\n", encoding="utf-8")
    print("\n".join([*table(lanes.ran, lanes.waiting), f"logs: {out}"]))
    return 0 if all(r.good for r in lanes.ran) and not lanes.waiting else 1


if __name__ == "__main__":
    sys.exit(main())
