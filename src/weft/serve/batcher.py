"""Which waiting queries make the next batch: first in, first out, no thread and no clock of its own."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from weft.serve.errors import OverloadedError
from weft.serve.query import Query


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How long and how many wait."""

    max_rows: int
    """Of a batch."""
    max_delay_s: float = 0.0
    """How long a batch that is not full waits for further queries."""
    max_queries: int = 1024
    """That wait at once."""


@final
class Batcher:
    """The queue of one model. Whoever uses it from several threads holds a lock.

    A batch is a prefix of the queue: no query overtakes another, and none is divided. It is due when it is full, when
    the next query would not fit, or when its first one has waited `max_delay_s`. One that is to be alone is a batch.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._waiting: OrderedDict[int, Query] = OrderedDict()
        self.rows = 0
        """Of all that wait."""
        self._places = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, query: Query, *, retry_after_s: float = 1.0) -> None:
        """At the end of the queue.

        Raises:
            OverloadedError: it is full [W304].
        """
        if len(self._waiting) >= self.limits.max_queries:
            problem = f"{len(self._waiting)} queries wait, which is the most"
            raise OverloadedError(problem=problem, retry_after_s=retry_after_s)
        query.place = next(self._places)
        self._waiting[query.number] = query
        self.rows += query.rows

    def again(self, queries: Iterable[Query]) -> None:
        """Each where it would be, had it never been taken. The limit does not count."""
        for query in queries:
            self._waiting[query.number] = query
            self.rows += query.rows
        self._waiting = OrderedDict(sorted(self._waiting.items(), key=lambda item: item[1].place))

    def remove(self, query: Query) -> bool:
        """Whether it waited."""
        if self._waiting.pop(query.number, None) is None:
            return False
        self.rows -= query.rows
        return True

    def clear(self) -> list[Query]:
        """All that waited, in order."""
        found = list(self._waiting.values())
        self._waiting.clear()
        self.rows = 0
        return found

    def expired(self, now: float) -> list[Query]:
        """Those whose time is over; they wait no longer."""
        found = [q for q in self._waiting.values() if q.deadline <= now]
        for query in found:
            self.remove(query)
        return found

    def due_at(self) -> float | None:
        """When the next batch is due, which may be in the past; None: nothing waits."""
        first = next(iter(self._waiting.values()), None)
        if first is None:
            return None
        _, full = self._prefix()
        return first.arrived if full else first.arrived + self.limits.max_delay_s

    def take(self, now: float) -> list[Query]:
        """The next batch; nothing where none is due."""
        due = self.due_at()
        if due is None or due > now:
            return []
        found, _ = self._prefix()
        for query in found:
            self.remove(query)
        return found

    def _prefix(self) -> tuple[list[Query], bool]:
        """What the next batch would be, and whether nothing can be added to it."""
        found: list[Query] = []
        rows = 0
        for query in self._waiting.values():
            if found and (query.alone or rows + query.rows > self.limits.max_rows):
                return found, True
            found.append(query)
            rows += query.rows
            if query.alone or rows >= self.limits.max_rows:
                return found, True
        return found, False
