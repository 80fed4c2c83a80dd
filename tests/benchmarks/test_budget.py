"""The arithmetic of the record of budgets; measuring is the benchmark's own business."""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Any

import pytest
from benchmarks.budget import Case, Lane, busy, cases_of, lanes_of, measured, summary


def given(**changes: object) -> argparse.Namespace:
    named = {"names": ["candy", "vgg16"], "budgets": "5,40", "loads": "idle,load", "only": "", "part": "1/1"}
    return argparse.Namespace(**{**named, **changes})


def test_parts_are_the_whole() -> None:
    every = cases_of(given())
    assert [c.name for c in every[:3]] == ["candy/5s/idle", "candy/5s/load", "candy/40s/idle"] and len(every) == 8
    parts = [cases_of(given(part=f"{k}/3")) for k in (1, 2, 3)]
    assert sorted(c.name for p in parts for c in p) == sorted(c.name for c in every)
    assert cases_of(given(only="vgg16/40s/load")) == [Case("vgg16", 40.0, "load")]


@pytest.mark.parametrize(("budget_s", "limit_s"), [(0.0, 3.0), (5.0, 7.0), (15.0, 17.0), (40.0, 44.0)])
def test_limits(budget_s: float, limit_s: float) -> None:
    assert Case("candy", budget_s, "idle").limit_s == pytest.approx(limit_s)


def test_lanes_share_no_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    lanes = lanes_of(min(2, len(cores)), "cpu")
    assert sorted(core for lane in lanes for core in lane.cores) == cores[: len(cores) // len(lanes) * len(lanes)]
    assert lanes[0].environ["OMP_NUM_THREADS"] == str(len(lanes[0].cores))


@pytest.mark.slow
def test_a_process_that_fails_has_not_kept_its_budget() -> None:
    found = measured(Case("no such network", 0.0, "idle"), lanes_of(1, "cpu")[0], "cpu")
    assert found["kept"] is False and "exit status 1" in str(found["error"])


def test_the_load_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with busy(Lane(tuple(sorted(os.sched_getaffinity(0)))[:1], None), "cpu"):
        assert len(begun) == 1 and begun[0].poll() is None
    assert begun[0].poll() is not None


def test_summary() -> None:
    lines: list[dict[str, object]] = [
        {"record": "environment"},
        {"record": "case", "device": "A", "load": "idle", "kept": True, "over_s": -1.0},
        {"record": "case", "device": "B", "load": "load", "kept": False, "over_s": 4.5},
        {"record": "case", "device": "B", "load": "load", "kept": False, "error": "did not end"},
    ]
    found = {"record": "summary", "suite": "budget", "total": 3, "kept": 1, "worst_over_s": 4.5}
    assert summary(lines) == {**found, "by_machine": "A idle: 1 of 1; B load: 0 of 2"}
