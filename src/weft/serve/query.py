"""One query of a caller: what it gave, until when it waits, and the one answer that it gets."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future, InvalidStateError
from typing import final

from weft.ir.types import Array
from weft.serve.errors import InferenceFailedError

Outputs = tuple[Array, ...]
_numbers = itertools.count(1)


@final
class Query:
    """Answered exactly once, by whoever is first: a result, an error, or its caller who cancels it."""

    __slots__ = ("alone", "arrays", "arrived", "began", "deadline", "future", "losses", "number", "place", "rows")

    def __init__(self, arrays: Outputs, rows: int, *, arrived: float, deadline: float = math.inf) -> None:
        """`arrays` have an axis of `rows` in front; times are of `time.monotonic`."""
        self.arrays, self.rows = arrays, rows
        self.arrived, self.deadline = arrived, deadline
        self.number = next(_numbers)
        self.future: Future[Outputs] = Future()
        self.place = -1
        """In the order in which queries came to their queue."""
        self.losses = 0
        """How often a worker died while it ran this."""
        self.alone = False
        """It shares no run: what it ran in failed, and it may be why."""
        self.began = math.nan
        """When it was last taken into a batch."""

    def begin(self, now: float) -> bool:
        """From here on its caller cannot take it back; False: that has happened."""
        self.began = now
        return self.future.running() or (not self.future.done() and self.future.set_running_or_notify_cancel())

    def answer(self, outputs: Outputs) -> bool:
        """False: it was answered before."""
        try:
            self.future.set_result(outputs)
        except InvalidStateError:
            return False
        return True

    def refuse(self, error: Exception) -> bool:
        """As `answer`."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def lost(self) -> InferenceFailedError | None:
        """A worker died with it; an error: once too often."""
        self.losses += 1
        self.alone = True
        if self.losses < 2:
            return None
        return InferenceFailedError(problem="the worker died twice while it ran this query")
