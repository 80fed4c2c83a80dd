"""All tests in many random orders, on a busy machine: `python -m tools.random_orders --seeds 1-20 [--seconds S]`.

Each seed is one run of all tests that need no GPU, in the order that the seed gives (`--shuffle`), by more processes
than the machine has cores; whatever else the machine does meanwhile is load, too, and the row has the mean of the load.
A run that was green at this commit is not made again; a test that fails is named in the row, and the exit code is 1.
Rows are kept outside of the tree until all have run (`HELD`), and are still there where the tool was ended before.
What compilers make of a text is kept from run to run (`tests/compiled.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.harness.record import RESULTS, Record

ROOT = Path(__file__).resolve().parent.parent
SUITE = "random-order"
HELD = ROOT / "build" / f"{SUITE}.jsonl"
"""Rows of runs that go on: a test compares the tables of the documents with the records of the tree that it runs in."""
MARKS = "not gpu and not multigpu and not whole"
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.M)
SHOWN = 20
"""Failures that a row names."""


@dataclass
class Load:
    """The load of the machine while it lasts, looked at every few seconds."""

    seen: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(10.0):
            self.seen.append(os.getloadavg()[0])

    @property
    def mean(self) -> float:
        """Processes that ran or wanted to."""
        return statistics.fmean(self.seen) if self.seen else os.getloadavg()[0]


def seeds(text: str) -> list[int]:
    """`1-3,7` -> 1, 2, 3, 7; raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def read(output: str) -> dict[str, object]:
    """What pytest's last lines say: counts, and the tests that failed."""
    lines = output.rstrip().splitlines()
    counts = {kind.rstrip("s"): int(n) for n, kind in _COUNTS.findall(lines[-1] if lines else "")}
    failed = _NAMED.findall(output)
    return {
        **{kind: counts.get(kind, 0) for kind in ("passed", "failed", "error", "skipped")},
        **({"failures": failed[:SHOWN]} if failed else {}),
    }


def run(seed: int, workers: int, where: Sequence[str], kept: Path, limit_s: float) -> dict[str, object]:
    """One run; a run that did not end is one that failed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", MARKS, "-n", str(workers)]
    command += ["--dist", "worksteal", "--shuffle", str(seed), *where]
    environ = {**os.environ, "PYTHONPATH": f"src{os.pathsep}.", "WEFT_TESTS_COMPILED": str(kept)}
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    with Load() as load:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    found = read(output)
    green = process.returncode == 0 and not found["failed"] and not found["error"]
    return {
        "seed": seed, "green": green, **found, "exit_code": process.returncode, "workers": workers,
        "load": round(load.mean, 1), "seconds": round(time.monotonic() - begun),
        **({} if green else {"output": output[-2000:]}),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs them; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("where", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--seeds", type=seeds, default=list(range(1, 21)), help="such as 1-20 or 3,8")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) + 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run begins after them")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of one run")
    parser.add_argument("--out", type=Path, help="a record in place of benchmarks/results/cpu/random-order.jsonl")
    parser.add_argument("--again", action="store_true", help="also seeds that were green at this commit")
    chosen = parser.parse_args(argv)
    held = chosen.out or HELD
    if chosen.out is None and not held.exists():
        held.parent.mkdir(exist_ok=True)
        shutil.copy(RESULTS / "cpu" / f"{SUITE}.jsonl", held)
    record = Record("cpu", SUITE, path=held)
    known = {r["seed"] for r in record.cases if r.get("green") and r.get("commit") == record.head["commit"]}
    end = time.monotonic() + chosen.seconds
    green = True
    for seed in chosen.seeds:
        if (seed in known and not chosen.again) or time.monotonic() > end:
            continue
        row = run(seed, chosen.workers, chosen.where, ROOT / "build" / "compiled", chosen.limit)
        green = green and bool(row["green"])
        record.add({"record": "case", "suite": SUITE, "case": f"seed {seed}", **row})
    rows = record.cases
    record.add(
        {
            "record": "summary", "suite": SUITE, "total": len(rows), "green": sum(bool(r.get("green")) for r in rows),
            "tests": max((int(str(r.get("passed", 0))) for r in rows), default=0),
        }
    )  # fmt: skip
    if chosen.out is None:
        shutil.move(held, RESULTS / "cpu" / f"{SUITE}.jsonl")
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
