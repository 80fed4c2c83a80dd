"""What a run under a policy came to, and what is seen of it while it lasts: of a GPU and of its simulation alike."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from weft.colocate.arrivals import Arrivals
from weft.colocate.operating import Prepared
from weft.colocate.queueing import lindley
from weft.kernels.scheduling import Query, Recent

WINDOW_NS = 100_000_000
"""Of what controllers see."""
_WINDOWS = 5
_LONGEST = 128
"""Latencies of a window that are kept: of up to 12,800 in all windows p99 is exact."""


@dataclass(frozen=True, slots=True)
class Piece:
    """BE work: whence, when, and which blocks of the job."""

    origin: str
    """`idle`, `kernels` or `beside`."""
    begin_ns: int
    end_ns: int
    first: int
    last: int
    """Behind the last block."""


@dataclass(slots=True)
class Outcome:
    """What a run came to, measured or simulated; lists are by the number of the query, in order of arrival."""

    queries: list[Query]
    begin_ns: MutableSequence[int]
    done_ns: MutableSequence[int]
    variants: list[int]
    caps: list[int]
    """What the policy allowed when the query was launched."""
    work_us: float = 0.0
    """BE work, in its time alone."""
    blocks: int = 0
    span_ns: int = 0
    """From the begin of the run to the end of its last query."""
    busy_ns: int = 0
    """In which queries ran."""
    decisions: int = 0
    pieces: list[Piece] = field(default_factory=list)
    """With `trace`."""
    sent_ns: MutableSequence[int] = field(default_factory=list)
    """When each query was sent; empty: simulated, at its instant."""
    put_ns: MutableSequence[int] = field(default_factory=list)
    """When each query was put on its stream; empty: simulated, when it began."""
    clock_mhz: MutableSequence[int] = field(default_factory=list)
    """Of the SMs when each query was seen to end, 0: not known; empty: simulated."""
    decision_ns: MutableSequence[int] = field(default_factory=list)
    """What each decision took; empty: simulated."""
    refused: list[int] = field(default_factory=list)
    """Queries that were refused as they came; their other figures are -1."""


def queries_of(given: Sequence[tuple[Prepared, Arrivals]]) -> list[Query]:
    """All queries of models with their arrivals, in the order in which they come.

    Raises:
        ValueError: no model, or one of them twice.
    """
    names = [p.model.name for p, _ in given]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"models {names}: at least one, each once")
    at = np.concatenate([a.times_ns for _, a in given])
    whose = np.concatenate([np.full(len(a), i) for i, (_, a) in enumerate(given)])
    order = np.argsort(at, kind="stable")
    targets = [p.target_ns for p, _ in given]
    return [
        Query(names[m], number, t, t + targets[m])
        for number, (t, m) in enumerate(zip(at[order].tolist(), whose[order].tolist(), strict=True))
    ]


@final
class Targets:
    """Latencies of models with targets of their own, as those of one: scaled to the shortest target."""

    def __init__(self, own: Mapping[str, int]) -> None:
        """Nanoseconds, by model."""
        self._own = own
        self._shortest = min(self._own.values())

    def scaled(self, model: str, latency_ns: int) -> int:
        """Above the shortest target exactly where it is above its own."""
        own = self._own[model]
        return latency_ns if own == self._shortest else -(-latency_ns * self._shortest // own)


def take(waiting: deque[Query], query: Query) -> None:
    """Off those that wait: each model's in the order of arrival.

    Raises:
        ValueError: it does not wait, or another of its model came before.
    """
    if waiting and waiting[0] is query:
        waiting.popleft()
        return
    for position, other in enumerate(waiting):
        if other is query:
            del waiting[position]
            return
        if other.model == query.model:
            break
    raise ValueError(f"query {query.number} does not wait, or another of {query.model} came before")


def off_lindley_us(out: Outcome) -> float:
    """p99 of how far latencies are from those of a single queue with the service times that were measured.

    Of a run without a job, in the order in which queries ran: of several models not that of arrival. A query is served
    from when it is put on its stream, or the one before it has ended; its launch is part of that, and what is between
    the two is the harness. 0 of no query.
    """
    if not out.queries:
        return 0.0
    scheduled = np.array([q.scheduled_ns for q in out.queries], dtype=np.int64)
    put, done = (np.array(x, dtype=np.int64) for x in (out.put_ns or out.begin_ns, out.done_ns))
    scheduled, put, done = (np.delete(x, out.refused) for x in (scheduled, put, done))
    if not len(done):
        return 0.0
    order = np.argsort(done, kind="stable")
    scheduled, put, done = scheduled[order], put[order], done[order]
    begin = np.maximum(put, np.concatenate([[0], done[:-1]]))
    # none begins before the one before it has come
    apart = np.abs(done - lindley(np.maximum.accumulate(scheduled), done - begin))
    return float(np.quantile(apart, 0.99)) / 1e3


@final
class Window:
    """What was seen in the last windows of time. All of it takes microseconds: a query may wait for it."""

    def __init__(self) -> None:
        self.until = WINDOW_NS
        self.violations = 0
        self._before = -1
        self._gaps = self._squares = 0.0
        self._count = self._ended = 0
        self._longest: list[int] = []
        """Latencies of the window, rising, at most `_LONGEST`."""
        self._kept: deque[tuple[int, float, float, int, list[int]]] = deque(maxlen=_WINDOWS)

    def arrived(self, at: int) -> None:
        """A query came at this instant."""
        if self._before >= 0:
            gap = float(at - self._before)
            self._gaps += gap
            self._squares += gap * gap
        self._before = at
        self._count += 1

    def ended(self, latency: int, *, late: bool) -> None:
        """A query has ended, so long after its arrival."""
        self._ended += 1
        self.violations += late
        longest = self._longest
        if len(longest) == _LONGEST:
            if latency <= longest[0]:
                return
            del longest[0]
        insort(longest, latency)

    def turn(self, now: int) -> Recent:
        """End of a window."""
        self._kept.append((self._count, self._gaps, self._squares, self._ended, self._longest))
        self._count, self._gaps, self._squares, self._ended, self._longest = 0, 0.0, 0.0, 0, []
        self.until += WINDOW_NS * max(1, (now - self.until) // WINDOW_NS + 1)
        arrivals = sum(k[0] for k in self._kept)
        gaps, squares = sum(k[1] for k in self._kept), sum(k[2] for k in self._kept)
        variation = max(0.0, squares * arrivals / gaps**2 - 1) if gaps and arrivals > 1 else 1.0
        return Recent(now, arrivals, max(1, round(gaps)), variation, self._p99(), self.violations)

    def with_violations(self, recent: Recent) -> Recent:
        """The same with the violations until now."""
        return Recent(recent.at_ns, recent.arrivals, recent.length_ns, recent.variation, recent.p99_ns, self.violations)

    def _p99(self) -> int:
        """Of all windows; of more than 100 x `_LONGEST` latencies it may be too long."""
        many = sum(k[3] for k in self._kept)
        if not many:
            return 0
        above = many - max(1, math.ceil(0.99 * many)) + 1
        return sorted(x for k in self._kept for x in k[4][-above:])[-min(above, _LONGEST)]
