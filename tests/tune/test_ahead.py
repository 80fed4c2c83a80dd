"""A worker that is started before the tuner asks for one."""

from __future__ import annotations

import pytest
from tests.faults.fake import FakeTransport, fake_trial
from tests.tune.test_tuner import PAIR, tuner

from weft.kernels.measurement import Verdict
from weft.tune.ahead import Ahead
from weft.tune.store import Database
from weft.tune.transport import Fault, WorkerFault


def test_the_worker_that_was_started_is_the_one_that_measures() -> None:
    inner = FakeTransport({})
    with Ahead(inner) as ahead:
        assert inner.started == 1
        with tuner(Database.open(None), ahead) as t:  # type: ignore[arg-type]
            assert [m.verdict for m in t.measure([fake_trial(1, PAIR)])] == [Verdict.OK] * 2
        assert inner.started == 1
        ahead.start()  # the next one is another
    assert inner.started == 2


def test_one_that_cannot_be_started_ahead_is_started_when_it_is_needed() -> None:
    inner = FakeTransport({}, dead_on_arrival=1)
    with Ahead(inner) as ahead, tuner(Database.open(None), ahead) as t:  # type: ignore[arg-type]
        assert [m.verdict for m in t.measure([fake_trial(1, PAIR)])] == [Verdict.OK] * 2
    assert inner.started == 2


def test_one_that_the_system_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FakeTransport({})
    real, faults = inner.start, [WorkerFault(Fault.CRASH, "no memory")]

    def start() -> None:
        if faults:
            raise faults.pop()
        real()

    monkeypatch.setattr(inner, "start", start)
    with Ahead(inner) as ahead, tuner(Database.open(None), ahead) as t:  # type: ignore[arg-type]
        assert inner.started == 0
        assert [m.verdict for m in t.measure([fake_trial(1, PAIR)])] == [Verdict.OK] * 2
    assert inner.started == 1


def test_leaving_ends_it_whether_it_was_used_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FakeTransport({})
    ahead = Ahead(inner)
    ahead.__enter__()
    killed: list[int] = []
    monkeypatch.setattr(inner, "kill", lambda: killed.append(1))
    ahead.__exit__(KeyError, KeyError(), None)
    assert killed
    ahead.start()
    assert inner.started == 2  # what was ended is not given out
