"""The benchmarks of the server, with few queries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.harness.memory import rise
from benchmarks.serve_soak import Told

from benchmarks import serve, serve_faults, serve_many, serve_overload
from weft.serve import ServeOptions


def test_few_queries(tmp_path: Path) -> None:
    path = tmp_path / "serve.jsonl"
    serve.main(["--count", "30", "--seconds", "10", "--only", "loop", "embedded"], path)
    rows = {x["case"]: x for x in map(json.loads, path.read_text().splitlines()) if x.get("record") == "case"}
    assert set(rows) == {f"{c}: {k}" for c in ("loop", "embedded") for k in ("closed", "open")}
    for row in rows.values():
        assert row["queries"] > 20 and row["wrong"] == row["errors"] == 0 and row["p50_ms"] <= row["p99_ms"]


def rows_of(path: Path) -> dict[str, dict[str, object]]:
    return {x["case"]: x for x in map(json.loads, path.read_text().splitlines()) if x.get("record") == "case"}


@pytest.mark.slow
def test_each_of_many_queries_has_its_own_answer(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    serve_many.main(["--count", "600", "--share", "100", "--loop", "50"], path)
    rows = rows_of(path)
    for case, asked in (("plain loop", 50), ("HTTP", 100), ("gRPC", 100), ("Server", 400)):
        row = rows[case]
        assert row["asked"] == row["queries"] == asked
        assert row["wrong"] == row["errors"] == row["lost"] == row["doubled"] == 0
        assert case == "plain loop" or row["answered_by_the_server"] == asked
    assert {"memory: HTTP, front end", "memory: Server, worker"} <= set(rows)


def test_an_answer_of_another_query_and_one_that_is_lost_are_found() -> None:
    queries = np.zeros((serve_many.QUERIES, 1), np.float32)
    answers = np.arange(serve_many.QUERIES, dtype=np.float32)[:, None]
    there = serve.Setting(Path(), ServeOptions(), (), queries, answers)

    def call(i: int) -> serve.Numbers:
        if i == 7:
            raise RuntimeError("none")
        return answers[8] if i == 9 else answers[i]

    row = serve_many.many(lambda: call, there, 2, 20, {})
    assert (row["wrong"], row["errors"], row["lost"], row["doubled"], row["queries"]) == (1, 1, 0, 0, 19)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    serve_faults.main(["--kills", "1", "--only", "worker"], path)
    row = rows_of(path)["worker"]
    assert row["wrong"] == row["lost"] == 0 and row["kills"] == 1
    assert 0 < float(str(row["p50_s"])) == float(str(row["most_s"])) < serve_faults.LONG_S


def test_arrivals_have_the_rate_and_the_time_that_were_asked_for() -> None:
    due = serve_overload.arrivals(200.0, 10.0, 1)
    assert due[-1] < 10.0 and abs(len(due) - 2000) < 200 and (np.diff(due) > 0).all()
    assert (serve_overload.arrivals(200.0, 10.0, 1) == due).all()


def test_memory_that_rises_is_not_flat() -> None:
    at = [10.0 * k for k in range(100)]
    assert rise(at, [100.0 + (k < 50) * k for k in range(100)])["flat"]
    found = rise(at, [100.0 + 0.1 * k for k in range(100)])
    assert not found["flat"] and found["mib_an_hour"] == pytest.approx(36.0)
    assert rise(at[:4], [1.0] * 4) == {"samples": 4}


def test_hours_are_told_window_by_window() -> None:
    one = Told()
    for k in range(1300):
        one.add(float(k), 0.002 if k < 600 else 0.004, 0.0, right=k != 3)
    row = one.row(1300.0)
    assert row["windows"] == [[600, 2.0, 2.0], [600, 4.0, 4.0], [100, 4.0, 4.0]] and row["wrong"] == 1
