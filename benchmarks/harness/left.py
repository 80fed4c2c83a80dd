"""What of a suite is left to be measured: runs that go on where the one before ended.

With `--left` (`add_option`) a suite passes over what has a row of these sources, measures what it begins to its end,
and ends with status 75 where more is left. So `benchmarks.every` calls it again, until it ends otherwise.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import final

from benchmarks.harness.record import Record, Row

MORE = os.EX_TEMPFAIL
"""The exit status of a run that leaves something to the next one."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--left`."""
    told = f"pass over what has a row of these sources; status {MORE} where more is left"
    parser.add_argument("--left", action="store_true", help=told)


def _did_not_fail(row: Mapping[str, object]) -> bool:
    return "failed" not in row


@final
class Left:
    """Which cases a run begins, and what it leaves to the next one."""

    def __init__(
        self,
        record: Record | None,
        end: float,
        *,
        only: bool,
        good: Callable[[Row], bool] = _did_not_fail,
    ) -> None:
        """`end`: of `time.perf_counter`, after which nothing is begun. `only`: `--left` was given.

        `good`: whether the row of a case lets the suite pass.
        """
        self._record, self.end, self.only, self._good = record, end, only, good
        self.late: list[str] = []
        """What was not begun in time."""
        self.bad: list[str] = []
        """Cases of earlier runs at these sources that failed."""

    @property
    def until(self) -> float:
        """When what was begun is cut short: with `--left` never, as its row would count as measured."""
        return math.inf if self.only else self.end

    def begins(self, **case: object) -> bool:
        """Whether a case is measured now: it is not known, and there is time."""
        return not self.known(**case) and not self.over(" ".join(map(str, case.values())))

    def known(self, **case: object) -> bool:
        """With `--left`: whether a case has a row of these sources."""
        row = self._record.at_these_sources(**case) if self._record is not None and self.only else None
        if row is not None and not self._good(row):
            self.bad.append(" ".join(map(str, case.values())))
        return row is not None

    def over(self, what: str) -> bool:
        """Whether there is no time to begin something, which is said."""
        if time.perf_counter() <= self.end:
            return False
        self.put_off(what)
        return True

    def put_off(self, what: str) -> None:
        """Something that is left to the next run, which is said."""
        self.late.append(what)
        print(f"not begun in time: {what}", flush=True)

    def status(self, bad: object = False) -> int:
        """The exit status of a run in which something was `bad`, or not."""
        if self.only and self.late:
            return MORE
        if self.bad:
            print(f"failed before at these sources: {', '.join(self.bad)}", file=sys.stderr, flush=True)
        return int(bool(bad or self.bad))

    def close(self) -> None:
        """SystemExit with that status, unless all is well; it names the cases of this run that failed."""
        status = self.status()
        if status != MORE and self._record is not None:
            self._record.close()
        if status:
            sys.exit(status)
