"""Runs of tests in random orders: what each came to is a row, a failure is named, what was green is not run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.random_orders import main, read, run, seeds

from tools import random_orders


def test_seeds() -> None:
    assert seeds("1-3,7") == [1, 2, 3, 7]
    with pytest.raises(ValueError, match="invalid literal"):
        seeds("1-x")


def test_what_pytest_says_is_read() -> None:
    output = "...\nFAILED tests/test_a.py::test_b[x - y] - assert 1 == 2\nERROR tests/test_c.py::test_d\n"
    found = read(output + "1 failed, 12 passed, 3 skipped, 1 error in 4.0s\n")
    assert (found["passed"], found["failed"], found["error"], found["skipped"]) == (12, 1, 1, 3)
    assert found["failures"] == ["tests/test_a.py::test_b[x - y]", "tests/test_c.py::test_d"]
    assert read("") == {"passed": 0, "failed": 0, "error": 0, "skipped": 0}


def test_rows_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[int] = []

    def stand_in(seed: int, workers: int, where: Sequence[str], kept: Path, limit_s: float) -> dict[str, object]:
        ran.append(seed)
        return {"seed": seed, "green": seed != 2, "passed": 5}

    monkeypatch.setattr(random_orders, "run", stand_in)
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    out = tmp_path / "record.jsonl"
    assert main(["--seeds", "1-3", "--out", str(out)]) == 1
    lines = [json.loads(x) for x in out.read_text().splitlines()]
    assert [x["record"] for x in lines] == ["environment", "case", "case", "case", "summary"]
    assert (lines[-1]["total"], lines[-1]["green"], lines[-1]["tests"]) == (3, 2, 5)
    assert main(["--seeds", "1-3", "--out", str(out)]) == 1
    assert ran == [1, 2, 3, 2], "a seed that was green at this commit is not run again"
    monkeypatch.setenv("WEFT_COMMIT", "def")
    assert main(["--seeds", "1", "--out", str(out)]) == 0
    assert main(["--seeds", "1", "--out", str(out), "--seconds", "-1", "--again"]) == 0
    assert ran == [1, 2, 3, 2, 1], "no run begins when the time is over"


def test_rows_stay_outside_of_the_tree_until_all_have_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests that run compare the documents' tables with the records: a row would be a difference."""
    (tmp_path / "cpu").mkdir()
    kept = tmp_path / "cpu" / f"{random_orders.SUITE}.jsonl"
    kept.write_text('{"record": "environment"}\n')
    seen: list[str] = []

    def stand_in(seed: int, workers: int, where: Sequence[str], compiled: Path, limit_s: float) -> dict[str, object]:
        seen.append(kept.read_text())
        if seed == 3:
            raise KeyboardInterrupt
        return {"seed": seed, "green": True, "passed": 5}

    monkeypatch.setattr(random_orders, "run", stand_in)
    monkeypatch.setattr(random_orders, "RESULTS", tmp_path)
    monkeypatch.setattr(random_orders, "HELD", tmp_path / "build" / "rows.jsonl")
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    with pytest.raises(KeyboardInterrupt):
        main(["--seeds", "1-4"])
    assert main(["--seeds", "1,2,4"]) == 0
    assert seen == 4 * ['{"record": "environment"}\n'] and not random_orders.HELD.exists()
    assert [json.loads(x).get("seed") for x in kept.read_text().splitlines()][1:4] == [1, 2, 4]


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    row = run(3, 1, ["tests/ir/test_text.py"], tmp_path / "kept", 300.0)
    assert row["green"] and row["exit_code"] == 0 and int(str(row["passed"])) > 0, row
    missing = run(3, 1, ["tests/no_such_file.py"], tmp_path / "kept", 300.0)
    assert not missing["green"] and missing["exit_code"] != 0 and "no tests ran" in str(missing["output"])
