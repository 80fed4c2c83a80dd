from __future__ import annotations

import os
import time
from functools import partial
from operator import call
from typing import Any

import pytest

from tools import pool


def outcomes(tasks: Any, **options: Any) -> Any:
    return {tasks.index(task): found for task, found in pool.run(call, tasks, **options)}


def test_a_crash_and_a_hang_cost_one_task_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_S", 300.0)
    tasks = [partial(abs, -1), partial(os.abort), partial(abs, -2), partial(os._exit, 3), partial(int, "x")]
    found = outcomes(tasks, jobs=2, timeout_s=10.0)
    assert found[0] == 1
    assert found[1] == pool.Lost("the process died of SIGABRT")
    assert found[2] == 2
    assert found[3] == pool.Lost("the process ended with status 3")
    assert isinstance(found[4], pool.Lost)
    assert "ValueError" in found[4].reason


def test_a_hang_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_S", 0.0)
    found = outcomes([partial(time.sleep, 1e6)], jobs=1, timeout_s=1.0)
    assert found[0] == pool.Lost("out of time: over 1 s")


def test_processes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LIFETIME", 2)
    pids = [pid for _, pid in pool.run(call, [os.getpid] * 5, jobs=1, timeout_s=60.0)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]


def test_no_tasks_no_processes() -> None:
    assert list(pool.run(call, [], jobs=2, timeout_s=1.0)) == []
