from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases.class_models import CPU, GPU, First, Member

from benchmarks import classes
from tools import tables


@pytest.mark.parametrize(("members", "groups"), [(CPU, 6), (GPU, 8)], ids=["cpu", "gpu"])
def test_each_class_has_three_members_two_of_which_nobody_looked_at(members: tuple[Member, ...], groups: int) -> None:
    assert len({m.case for m in members}) == len(members) >= 3 * groups
    of = Counter(m.group for m in members)
    assert len(of) == groups and min(of.values()) >= 3
    for group in of:
        mine = [m for m in members if m.group == group]
        assert any(m.tuned for m in mine) and sum(not m.tuned for m in mine) >= 2, group


def test_a_member_of_transformers_gives_its_first_tensor() -> None:
    pytest.importorskip("transformers")
    small = next(m for m in CPU if m.name == "gpt2")
    module, (ids,) = small.make()
    with torch.no_grad():
        found = module(ids)
    assert ids.dtype == torch.int64 and tuple(found.shape) == (1, 64, 768) and bool(torch.isfinite(found).all())


def tiny() -> Member:
    def make() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        return First(torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.GELU())).eval(), (torch.randn(3, 12),)

    return Member("tiny", "tiny", make, 3, library="")


def asked(**changes: Any) -> argparse.Namespace:
    given = classes.parser().parse_args([])
    return argparse.Namespace(**{**vars(given), "budget": 2.0, "rounds": 5, "timed": 0.5, "peers": "eager", **changes})


def test_a_row_holds_right_contenders_only_and_says_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_or_raising(name: str, module: torch.nn.Module, inputs: Any, folder: Path) -> classes.Call:
        if name == "freezing":
            raise RuntimeError("of no use\nmore")
        return lambda: module(*inputs) * (1 if name == "eager" else 2)

    monkeypatch.setattr(classes, "on_host", wrong_or_raising)
    with torch.no_grad():
        row = classes.measured(tiny(), asked(peers="eager,inductor,freezing"))
    assert set(row["peers_ms"]) == {"eager"} and row["best_peer"] == "eager"  # type: ignore[call-overload]
    assert row["speedup_best"] > 0 and row["weft_ms"] > 0  # type: ignore[operator]
    failed = row["failed_peers"]
    assert isinstance(failed, dict)
    assert failed["freezing"] == "RuntimeError: of no use" and "error of 1.0e+00" in failed["inductor"]
    errors = row["errors"]
    assert isinstance(errors, dict) and errors["weft"] < 1e-5
    json.dumps(row)


@pytest.mark.filterwarnings("ignore:Weft has no plan")  # in a second of a busy machine
def test_a_search_curve_is_over_what_the_longest_finds() -> None:
    row = classes.searched(tiny(), asked(search="1,2"))
    over = row["over_last"]
    assert isinstance(over, dict) and set(over) == {"1", "2"} and over["2"] == 1.0 and over["1"] > 0


def test_what_takes_too_long_is_interrupted() -> None:
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"not done in 0\.05 s"), classes.limited(0.05):
        time.sleep(5)
    assert time.perf_counter() - began < 2
    with classes.limited(5):
        pass


def test_an_error_is_infinite_where_shapes_differ_or_a_value_is_nan() -> None:
    exact = torch.ones(2, 2, dtype=torch.float64)
    assert classes.error_of(torch.ones(2, 2), exact) == 0.0
    assert classes.error_of((torch.full((2, 2), 1.1),), exact) == pytest.approx(0.1)
    assert classes.error_of(torch.ones(4), exact) == math.inf
    assert classes.error_of(torch.tensor([[1.0, math.nan], [1, 1]]), exact) == math.inf


def test_a_process_that_dies_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        classes.asked(tiny(), asked())


def _row(name: str, group: str, speed: float, *, tuned: bool) -> dict[str, Any]:
    return {
        "record": "case", "case": name, "class": group, "tuned": tuned, "weft_ms": 1.0, "peers_ms": {"eager": speed},
        "best_peer": "eager", "speedup_best": speed, "kernels": 3, "plan": "solution-1", "tuning_s": 4.0,
        "failed_peers": {"inductor": "a | b"}, "commit": "abc",
    }  # fmt: skip


def test_the_summary_and_the_table_tell_apart_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_row("a", "x", 2.0, tuned=True), _row("b", "x", 0.5, tuned=False), {"case": "c", "failed": "?"}]
    found = classes.summary(rows)
    assert (found["total"], found["measured"], found["mean"]) == (3, 2, 1.0)
    assert (found["mean_tuned"], found["mean_others"], found["behind"]) == (2.0, 0.5, ["b"])
    head = {"record": "environment", "device": "some", "threads": 2, "torch": "2", "command": "x", "commit": "abc"}
    monkeypatch.setattr(tables, "records", lambda *_: [head, *rows[:2]])
    shown = tables.classes("cpu")
    assert "| `b` | no | 1.000 | 0.500 (eager) | **0.50** |" in shown and "a / b" in shown
    assert "geometric mean, not looked at" in shown


def test_max_autotune_of_other_runs_stands_beside_a_class_by_eagers_times(monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"record": "environment", "device": "some", "threads": 2, "torch": "2", "command": "x", "commit": "abc"}
    rows = [_row(name, "x", 4.0, tuned=name < "d") for name in "abcde"]
    rows[4]["peers_ms"] = {"eager": 4.0, "autotune_last": 5.0}  # measured beside Weft
    slow = [
        {"record": "case", "case": "a/f16", "peers_ms": {"eager": 9.0, "eager_last": 8.0, "autotune_last": 4.0}},
        {"record": "case", "case": "b/f16", "peers_ms": {"eager": 2.0, "autotune": 5.0}},
        {"record": "case", "case": "c/f16", "failed": "OutOfMemoryError: no", "commit": "abc"},
        {"record": "case", "case": "d/f16", "peers_ms": {"eager": 2.0}, "failed_peers": {"autotune": "an error of 1"}},
        {"record": "case", "case": "e/f16", "peers_ms": {"eager": 4.0, "autotune": 1.0}},
    ]  # fmt: skip
    kept = {"classes": [head, *rows], "autotune": [head, *slow]}
    monkeypatch.setattr(tables, "records", lambda folder, suite: kept[suite])
    shown = tables.classes("nvidia-h200")
    assert "| class | case | looked at | Weft ms | max-autotune in a graph | best peer | × best peer |" in shown
    assert "| `a` | yes | 1.000 | 2.000 | 2.000 (autotune) | 2.00 |" in shown, "eager took twice as long there"
    assert "| `b` | yes | 1.000 | 5.000 | 4.000 (eager) | 4.00 |" in shown, "it was never faster than it was"
    assert "| `c` | yes | 1.000 |  | 4.000 (eager) | 4.00 |" in shown and "autotune: OutOfMemoryError: no" in shown
    assert "| `d` | no | 1.000 |  | 4.000 (eager) | 4.00 |" in shown and "autotune: an error of 1, inductor" in shown
    assert "| `e` | no | 1.000 | 5.000 | 4.000 (eager) | 4.00 |" in shown
    assert "| geometric mean, all |  |  |  |  |  | **3.48** |" in shown  # of 2, 4, 4, 4 and 4
    assert "| geometric mean, not looked at |  |  |  |  |  | **4.00** |" in shown
    assert shown.endswith("scaled by eager's times where those became less")
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1
    kept["autotune"] = []
    alone = tables.classes("nvidia-h200")
    assert "| `a` | yes | 1.000 |  | 4.000 (eager) | 4.00 |" in alone and "scaled" not in alone
    assert "max-autotune" not in tables.classes("cpu")


def test_nothing_measured_says_how() -> None:
    assert "python -m benchmarks.classes --device cuda" in tables.classes("no such device")
    assert "--search 5,10,15,30,60" in tables.classes_search("cpu-without-records")
