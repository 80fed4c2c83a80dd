"""A GPU with two jobs, simulated: discrete events on one heap, durations drawn from recorded samples.

The policies are those of the GPU; `SimulatedBackend` stands in for it. One query runs at a time, in the order of the
launches; a launch on an idle stream takes time, behind a running query it hides. Stopping the job takes a recorded stop
latency, in which nothing counts as done. All draws are by seed: the same run twice is the same, and every policy sees
the same draw for the same query.

Not simulated: a query that is slower because of what ran before it (caches, clocks), and a best-effort kernel whose
length varies.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from weft.colocate.arrivals import Arrivals
from weft.colocate.operating import Prepared
from weft.colocate.outcome import Outcome, Piece, Targets, Window, queries_of, take
from weft.colocate.policy import MOST_IN_FLIGHT, Admission, Policy
from weft.kernels.samples import Spread
from weft.kernels.scheduling import NEVER, OFF, Cursor, Decision, Finished, Query, Recent, Running, Situation

_TABLE = 4096
"""Draws of latencies that do not belong to a query; then they begin again."""
_ARRIVAL, _DONE, _WAKE = 1, 0, 2


@dataclass(slots=True)
class _Model:
    """Times of one model's variants."""

    prepared: Prepared
    draws: list[float]
    """Of each query, by number."""
    tables: dict[int, list[int]] = field(default_factory=dict)

    def service(self, number: int, variant: int) -> int:
        table = self.tables.get(variant)
        if table is None:
            table = self.tables[variant] = drawn_ns(self.prepared.points[variant].lc, self.draws)
        return table[number]


def drawn_ns(spread: Spread, draws: Sequence[float]) -> list[int]:
    """The values of a spread at uniform draws, in whole nanoseconds and at least one."""
    qs, us = zip(*spread.quantiles, strict=True)
    found = np.rint(np.interp(np.asarray(draws), qs, us) * 1e3).astype(np.int64)
    return [int(x) for x in np.maximum(found, 1).tolist()]


@final
class SimulatedBackend:
    """The GPU of a run: queries that arrive as given, and one best-effort job."""

    def __init__(
        self,
        given: Sequence[tuple[Prepared, Arrivals]],
        *,
        seed: int,
        most_blocks: int = 0,
        trace: bool = False,
        policy: Policy | None = None,
        admission: Admission | None = None,
    ) -> None:
        """Models with their arrivals; the job, launches and stops are those of the first.

        Args:
            given: a model's samples and when its queries come; every model has the same job.
            seed: of all draws.
            most_blocks: of the job, which then ends; 0: it does not.
            trace: keep every piece of BE work.
            policy: whose cap is noted beside each launch.
            admission: refuses queries as they come; None: all wait.

        Raises:
            ValueError: no model, or one of them twice.
        """
        self._queries = queries_of(given)
        self._targets = Targets({p.model.name: p.target_ns for p, _ in given})
        rng = np.random.default_rng(seed)
        draws = rng.random(len(self._queries)).tolist()
        self._models: Mapping[str, _Model] = {p.model.name: _Model(p, draws) for p, _ in given}
        first = given[0][0]
        self._launch = drawn_ns(first.launch, rng.random(_TABLE).tolist()) if first.launch.at(1.0) > 0 else [0]
        stop = first.job.stop if first.job is not None else None
        self._stop = drawn_ns(stop, rng.random(_TABLE).tolist()) if stop is not None and stop.at(1.0) > 0 else [0]
        self._block_ns = first.job.block_us * 1e3 if first.job is not None else math.inf
        self._idle_rates = [p.variant.idle_rate for p in first.points]
        self._most = most_blocks
        self._trace, self._policy, self._admission = trace, policy, admission

        n = len(self._queries)
        self.outcome = Outcome(self._queries, [-1] * n, [-1] * n, [-1] * n, [-1] * n)
        self._now = 0
        self._heap: list[tuple[int, int, int]] = [(self._queries[0].scheduled_ns, _ARRIVAL, 0)] if n else []
        self._waiting: deque[Query] = deque()
        self._running: list[Running] = []
        self._finished: list[Finished] = []
        self._free = self._last_done = self._busy_until = self._idle_from = 0
        self._form = OFF
        self._wake = NEVER
        self._launches = self._stops = self._left = 0
        self._carry = 0.0
        self._cursor = Cursor(OFF, 0, 0, False)
        self._recent = Recent()
        self._window = Window()

    def advance(self) -> bool:
        """The next thing that happens; False once all queries have ended."""
        if self._left == len(self._queries):
            self._end()
            return False
        if not self._heap:
            raise ValueError(f"nothing is launched, and {len(self._waiting)} queries wait for ever")
        at, kind, number = heapq.heappop(self._heap)
        self._now = at
        self._finished.clear()
        if kind == _ARRIVAL:
            query = self._queries[number]
            if self._admits(query):
                self._waiting.append(query)
                self._window.arrived(at)
            if number + 1 < len(self._queries):
                heapq.heappush(self._heap, (self._queries[number + 1].scheduled_ns, _ARRIVAL, number + 1))
        elif kind == _DONE:
            self._done(at)
        elif at == self._wake:
            self._wake = NEVER
        if at >= self._window.until:
            self._recent = self._window.turn(at)
        elif self._recent.violations != self._window.violations:
            self._recent = self._window.with_violations(self._recent)
        return True

    def situation(self) -> Situation:
        """As of now."""
        return Situation(
            self._now, self._running, self._waiting, self._cursor, self._recent, self._last_done, self._finished
        )

    def apply(self, decision: Decision) -> None:
        """As `Backend` says.

        Raises:
            ValueError: a query that does not wait or is not its model's first, or more in flight than may be.
        """
        self.outcome.decisions += 1
        if decision.co_runner != "keep":
            self._set(decision.form if decision.co_runner == "on" else OFF)
        if decision.kernels_us > 0:
            self._kernels(round(decision.kernels_us * 1e3))
        for query, variant in decision.launch:
            self._start(query, variant)
        if decision.wake_ns < self._wake and decision.wake_ns > self._now:
            self._wake = decision.wake_ns
            heapq.heappush(self._heap, (decision.wake_ns, _WAKE, 0))

    def _admits(self, query: Query) -> bool:
        """Whether it may wait; one that may not has ended."""
        if self._admission is None or self._admission.admits(
            query, self._waiting, self._running, now_ns=self._now, last_done_ns=self._last_done,
            busy_until_ns=self._busy_until,
        ):  # fmt: skip
            return True
        self.outcome.refused.append(query.number)
        self._left += 1
        return False

    def _done(self, at: int) -> None:
        first = self._running.pop(0)
        q = first.query
        self._left += 1
        began = self.outcome.begin_ns[q.number]
        clock = self._models[q.model].prepared.points[first.variant].clock_mhz
        self._finished.append(Finished(q, first.variant, began, at, clock))
        self._last_done = at
        self._window.ended(self._targets.scaled(q.model, at - q.scheduled_ns), late=at > q.deadline_ns)

    def _start(self, query: Query, variant: int) -> None:
        if len(self._running) >= MOST_IN_FLIGHT:
            raise ValueError(f"query {query.number} is one more than {MOST_IN_FLIGHT} in flight")
        model = self._models[query.model]
        point = model.prepared.points[variant].variant
        ready = self._now + self._launch_ns()
        if self._form != OFF and not (point.resident and self._form == variant):
            ready = max(ready, self._halt())
        begin = max(ready, self._free)
        take(self._waiting, query)
        if self._form != OFF:
            self._idle(begin)
        service = model.service(query.number, variant)
        end = begin + service
        out, number = self.outcome, query.number
        out.begin_ns[number], out.done_ns[number], out.variants[number] = begin, end, variant
        if self._policy is not None:
            out.caps[number] = self._policy.cap
        out.busy_ns += service
        if point.be_us > 0:
            self._work("beside", begin, end, point.be_us / (point.lc_us * 1e3) * service)
        self._free = end
        self._idle_from = end
        self._running.append(Running(query, variant, self._now))
        heapq.heappush(self._heap, (end, _DONE, number))

    def _kernels(self, length: int) -> None:
        """BE kernels in front of whatever is launched later."""
        ready = self._now + self._launch_ns()
        if self._form != OFF:
            ready = max(ready, self._halt())
        begin = max(ready, self._free)
        end = begin + length
        self._work("kernels", begin, end, length / 1e3)
        self._free = self._busy_until = end
        heapq.heappush(self._heap, (end, _WAKE, 0))
        self._note()

    def _set(self, form: int) -> None:
        """The job in another form, or off."""
        if form == self._form:
            return
        ready = self._now + self._launch_ns() if form != OFF else self._now
        if self._form != OFF:
            ready = max(ready, self._halt())
        self._form = form
        if form != OFF:
            self._idle_from = max(ready, self._free)
        self._note()

    def _halt(self) -> int:
        """Stop the job; when it has ended."""
        began = self._idle_from < self._now
        self._idle(self._now)
        self._form = OFF
        self._note()
        if not began:
            return self._now
        self._stops += 1
        end = self._now + self._stop[self._stops % len(self._stop)]
        self._free = max(self._free, end)
        return end

    def _idle(self, until: int) -> None:
        """Note what the job did in idle time up to now."""
        if until > self._idle_from:
            work = (until - self._idle_from) / 1e3 * self._idle_rates[self._form]
            self._work("idle", self._idle_from, until, work)
            self._idle_from = until

    def _work(self, origin: str, begin: int, end: int, us: float) -> None:
        out = self.outcome
        total = self._carry + us * 1e3
        blocks = int(total // self._block_ns)
        if self._most and out.blocks + blocks >= self._most:
            blocks = self._most - out.blocks
            us = max(0.0, min(us, (blocks * self._block_ns - self._carry) / 1e3))
            total = blocks * self._block_ns
        self._carry = total - blocks * self._block_ns if math.isfinite(self._block_ns) else 0.0
        if self._trace:
            out.pieces.append(Piece(origin, begin, end, out.blocks, out.blocks + blocks))
        out.blocks += blocks
        out.work_us += us
        if self._most and out.blocks >= self._most and not self._cursor.is_done:
            self._note()

    def _note(self) -> None:
        done = bool(self._most) and self.outcome.blocks >= self._most
        self._cursor = Cursor(self._form, self._busy_until, self.outcome.blocks, done)

    def _launch_ns(self) -> int:
        self._launches += 1
        return self._launch[self._launches % len(self._launch)]

    def _end(self) -> None:
        if self._form != OFF:
            self._idle(self._now)
        self.outcome.span_ns = self._now
