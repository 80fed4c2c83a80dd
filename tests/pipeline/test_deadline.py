"""The clock of a compilation, and calls that are not waited for."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time

import pytest

from weft.pipeline.deadline import FOREVER, Deadline, OutOfTime, call_with_timeout


def test_shares_of_a_budget() -> None:
    now = [100.0]
    deadline = Deadline.of(30.0, clock=lambda: now[0])
    assert (deadline.end, deadline.by(1 / 3), deadline.left_s, deadline.spent) == (130.0, 110.0, 30.0, 0.0)
    now[0] = 115.0
    assert (deadline.left_s, deadline.spent, deadline.passed()) == (15.0, 0.5, False)
    stop, later = deadline.until(115.0), deadline.until(120.0)
    assert (stop(), stop.fired, later(), later.fired) == (True, True, False, False)
    assert deadline.ready_by == 120.0, "two thirds at most"
    now[0] = 131.0
    assert deadline.left_s == 0.0 and deadline.passed() and not deadline.passed(deadline.last)


@pytest.mark.parametrize("budget_s", [0.0, 1.0, 5.0, 15.0, 40.0, 600.0])
def test_what_runs_is_given_up_within_the_slack(budget_s: float) -> None:
    deadline = Deadline(0.0, budget_s, clock=lambda: 0.0)
    slack_s = max(0.1 * budget_s, 2.0) if budget_s else 3.0
    assert deadline.end < deadline.last < budget_s + slack_s, "some of the slack is left for what follows"
    assert deadline.at_last(0.25) == pytest.approx(0.25 * deadline.last)
    assert deadline.within(0.5) == pytest.approx(0.5 * budget_s)
    assert deadline.ready_by == pytest.approx(budget_s / 2)
    assert deadline.seconds_to(deadline.end) == budget_s and deadline.seconds_to(-1.0) == 0.0


def test_there_is_a_clock_that_never_ends() -> None:
    assert not FOREVER.passed() and math.isinf(FOREVER.left_s) and FOREVER.spent == 0.0


def test_a_call_that_ends_gives_its_result_or_raises() -> None:
    assert call_with_timeout(5.0, lambda: divmod(7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(5.0, lambda: divmod(7, 0))
    assert call_with_timeout(math.inf, threading.get_ident) == threading.get_ident(), (
        "no thread where nothing is bounded"
    )


def test_a_call_that_does_not_end_is_left() -> None:
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(OutOfTime):
        call_with_timeout(0.1, release.wait)
    assert time.monotonic() - began < 2.0
    release.set()


AT_WORK = """
import torch
from weft.pipeline.deadline import OutOfTime, call_with_timeout

x = torch.ones(1500, 1500)
at_work = lambda: [x @ x for _ in range({runs})]
at_work()
try:
    call_with_timeout(1e-4, at_work)
except OutOfTime:
    print("left")
"""


@pytest.mark.slow
def test_the_process_ends_in_peace_though_a_call_is_at_work() -> None:
    """A thread that comes back from native code while the interpreter ends would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", AT_WORK.format(runs=12)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
