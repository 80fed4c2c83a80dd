"""The replay of the search on a GPU: what it invents is the same each time, and the plan gets better with time."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest
from benchmarks.search_replay import Outcome, Truth, read_times, replay
from tests.orchestrate.graphs import residual_net

from weft.device.cuda.facts import profile
from weft.kernels.codec import schedule_to_json
from weft.kernels.source import Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import Task, collect


def run(budget_s: float) -> Outcome:
    options = Options(device="cuda", budget_s=budget_s)
    alternatives = find_alternatives(residual_net(1))
    return replay(alternatives, Truth({}), options, (1.0, budget_s), log=False)


def test_the_plan_gets_better_until_nothing_is_left_to_ask() -> None:
    found = run(300.0)
    assert found.complete
    assert found.batches > 2
    assert found.plans_us[300.0] < found.plans_us[1.0], "after a second there are library calls alone"
    assert 0.999 * found.best_us <= found.plans_us[300.0] < 1.15 * found.best_us
    assert not run(4.5).complete


def tasks() -> list[Task]:
    alternatives = find_alternatives(residual_net(1))
    candidates = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    return list(collect(alternatives.graph, candidates, alternatives, profile("h200")).tasks.values())


def test_times_are_those_of_the_database_where_it_has_them(tmp_path: Path) -> None:
    known, other = tasks()[:2]
    schedule = Schedule("cuda", (("number", 7),))
    bodies = [
        {"problem_key": known.problem.key, "schedule": schedule_to_json(s), "verdict": verdict, "samples_us": samples}
        for s, verdict, samples in ((schedule, "ok", [5.0, 4.0, 9.0]), (Schedule("library"), "wrong", []))
    ]
    with sqlite3.connect(tmp_path / "t.sqlite3") as base:
        base.execute("CREATE TABLE trials (body TEXT)")
        base.executemany("INSERT INTO trials VALUES (?)", [(json.dumps({"measurement": b}),) for b in bodies])
    truth = Truth(read_times(tmp_path / "t.sqlite3"))
    assert truth.us(known, schedule) == 5.0
    assert math.isinf(truth.us(known, Schedule("library")))
    assert truth.schedules(known)[0] == schedule
    assert truth.best_us(known) == pytest.approx(5.0), "those beyond are no faster"
    assert truth.us(other, schedule) == Truth({}).us(other, schedule) >= other.bound_us
