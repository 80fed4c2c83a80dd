"""Training steps on the processor beside peers, and rows from processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cases.training import CASES, HOST_CASES
from benchmarks.harness import own_process
from benchmarks.harness.record import lines_of

from benchmarks import training as suite


def test_a_small_case_is_measured_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    more = ["--small", "--budget", "0", "--rounds", "5", "--timed", "1", "--out", str(path), "--who", "weft,eager"]
    suite.main(["dlrm", *more])
    head, row, last = lines_of(path)
    runs: Any = row["runs"]
    assert head["record"] == "environment" and row["case"] == "dlrm/b2048"
    assert row["right"] is True and row["weft_ms"] == runs["weft"]["ms"] > 0 and row["best_peer"] == "eager"
    assert len(runs["eager"]["losses_f64"]) == len(runs["weft"]["losses"]) == 5
    assert runs["weft"]["plan"] in ("library", "eager") and "graph" not in runs["eager"]
    assert (last["cases"], last["right"], last["wrong"]) == (1, 1, 0)
    before = path.read_text()
    suite.main(["--seconds", "0", *more])
    assert [x["case"] for x in lines_of(path) if x["record"] == "case"] == ["dlrm/b2048"]
    assert json_of(before) == json_of(path.read_text())


def json_of(text: str) -> str:
    return text.splitlines()[1]


def test_the_networks_are_those_of_a_gpu() -> None:
    assert {c.partition("/")[0] for c in HOST_CASES} == {c.partition("/")[0] for c in CASES}


@pytest.mark.parametrize("bad", [["nothing"], ["--who", "other"]])
def test_what_is_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        suite.main(["--small", *bad])


def _odd(how: str) -> dict[str, object]:
    sys.stdout.write("said before\n")
    sys.stdout.flush()
    if how == "raises":
        raise ValueError("no\nmore")
    if how == "dies":
        os.abort()
    if how == "ends":
        os._exit(3)
    if how == "hangs":
        time.sleep(60)
    return {"found": how}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "ValueError: no"),
        ("dies", "the process died: SIGABRT"),
        ("ends", "the process ended with status 3"),
        ("hangs", "no answer in 1 s"),
        ("works", ""),
    ],
)
def test_a_process_that_fails_is_a_row(how: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("forkserver")
    limit_s = 1.0 if how == "hangs" else 60.0
    row = own_process.asked(context, _odd, (how,), limit_s, tmp_path / "log.txt")
    assert row.get("failed", "") == told and float(str(row["seconds"])) < 50
    assert row.get("found") == (None if told else "works")
    assert ("said before" in capfd.readouterr().err) == bool(told)
