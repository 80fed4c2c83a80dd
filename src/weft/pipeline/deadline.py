"""One clock for a whole compilation: made when it begins, asked by every stage, given up by none.

    began ------------- by(share) ----------- end ------- last
            stages take shares of this         |  slack  |

`end` is when the budget is spent: nothing that may be left out is begun after it. `last` is when what still runs is
given up: a compiler and a worker are killed, a call that cannot be is left to a thread that nobody waits for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar, final

from weft.tune.thread_pool import ThreadOf, daemon, leave

R = TypeVar("R")
SLACK_SHARE, SLACK_S = 0.1, 2.0
"""By how much a compilation may overrun its budget: the larger of the two."""
GIVE_UP = 0.6
"""The part of that after which what runs is given up; the rest is for what must be done still."""
NO_BUDGET_S = 2.4
"""The same in seconds where there is no budget; the framework's own export of the model is not counted."""
READY_SHARE, READY_BY = 1 / 2, 2 / 3
"""Of the budget: how long a measuring process that was started is waited for, and until when at most."""


class OutOfTime(Exception):  # noqa: N818 - an answer, not an error
    """What was asked for was given up, because the budget is spent."""


@final
class Stop:
    """Says whether a moment is over, and keeps whether it ever said so."""

    def __init__(self, moment: float, clock: Callable[[], float]) -> None:
        self._moment, self._clock = moment, clock
        self.fired = False

    def __call__(self) -> bool:
        """Whether to stop."""
        self.fired = self.fired or self._clock() >= self._moment
        return self.fired


@final
@dataclass(frozen=True)
class Deadline:
    """When a compilation began and may end, in seconds of a monotonic clock."""

    began: float
    budget_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, budget_s: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """A budget that begins to be spent now."""
        return cls(clock(), budget_s, clock)

    def later(self, seconds: float) -> Deadline:
        """As if it had begun so much later."""
        return replace(self, began=self.began + seconds)

    def leaving(self, seconds: float) -> Deadline:
        """As if the budget were so much smaller: for stages after which something of known length is to be done."""
        return replace(self, budget_s=max(0.0, self.budget_s - seconds)) if self.budget_s > 0 else self

    @property
    def end(self) -> float:
        """When the budget is spent."""
        return self.began + self.budget_s

    @property
    def last(self) -> float:
        """When what still runs is given up."""
        slack_s = max(SLACK_SHARE * self.budget_s, SLACK_S)
        return self.end + (GIVE_UP * slack_s if self.budget_s > 0 else NO_BUDGET_S)

    def by(self, share: float) -> float:
        """When that share of the budget is spent."""
        return self.began + share * self.budget_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left, at least 0."""
        return max(0.0, self.end - self.clock())

    @property
    def spent(self) -> float:
        """The share of the budget that is gone; 1 and more: all of it."""
        return (self.clock() - self.began) / self.budget_s if self.budget_s > 0 else math.inf

    def passed(self, moment: float | None = None) -> bool:
        """Whether that moment (None: the end) is over."""
        return self.clock() >= (self.end if moment is None else moment)

    def until(self, moment: float) -> Stop:
        """What says whether to stop because that moment is over."""
        return Stop(moment, self.clock)

    def within(self, share: float) -> float:
        """The moment at which that share of what is left of the budget is gone."""
        return self.clock() + share * self.left_s

    def at_last(self, share: float) -> float:
        """The moment at which that share of what is left until what runs is given up is gone."""
        now = self.clock()
        return now + share * max(0.0, self.last - now)

    @property
    def ready_by(self) -> float:
        """When a measuring process that is started now is not waited for any longer."""
        return min(self.clock() + READY_SHARE * self.budget_s, self.by(READY_BY))

    def seconds_to(self, moment: float) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, moment - self.clock())


FOREVER = Deadline(0.0, math.inf)
"""For callers that have all the time in the world."""


def call_with_timeout(limit_s: float, call: Callable[[], R], thread: ThreadOf = daemon) -> R:
    """The result of a call that may never end: it runs in a thread of its own, which is left to itself in that case.

    `thread` makes it.

    Only for what reads no state of the calling thread (a stream, a mode of the framework) and writes none that is
    used after it was given up.

    Raises:
        OutOfTime: it did not end within `limit_s` seconds.
    """
    if math.isinf(limit_s):
        return call()
    results: list[R] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)  # raised by whoever waits
        finally:
            ended.set()

    mine = thread(run, "weft-timeout")
    mine.start()
    if not ended.wait(max(0.0, limit_s)):
        leave(mine)
        raise OutOfTime
    if errors:
        raise errors[0]
    return results[0]
