"""Policies on a machine that runs by itself: an open loop of queries, and a job beside them, by one thread.

Queries come at instants fixed before the run, and latency counts from these: what keeps the thread from looking counts
against all queries behind it. It looks at the clock and at the machine in turn, and sleeps only where nothing is due.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from weft.colocate.arrivals import Arrivals
from weft.colocate.operating import Prepared
from weft.colocate.outcome import Outcome, Targets, Window, queries_of, take
from weft.colocate.policy import MOST_IN_FLIGHT, Admission, Policy, drive
from weft.errors import DeviceError
from weft.kernels.scheduling import (
    NEVER,
    OFF,
    Cursor,
    Decision,
    Finished,
    Query,
    Recent,
    Running,
    Situation,
    Variant,
)

LEAD_NS = 5_000_000
"""From the begin of a run to the instant from which arrivals count."""
_DECISIONS = 4
"""To a query, as room is made for."""
SILENT_NS = 30_000_000_000
"""Queries are under way or wait, and nothing has happened for so long: the run has failed."""
UNSENT_NS = 1_000_000_000
"""So long behind its instant, look after look, a query was not sent: what sends them has ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A query that has ended, by the machine's clock."""

    begin_ns: int
    """When the machine began with it."""
    done_ns: int
    clock_mhz: int
    """Of the SMs; 0: not known."""
    put_ns: int
    """When it was put on its stream."""
    stops: bool = False
    """A job that had been told to stop still ran when it was launched: its time is not that alone."""


@dataclass(frozen=True, slots=True)
class JobWork:
    """What the job has done since the run began."""

    blocks: int
    """That have ended."""
    work_us: float
    """In its time alone on the whole GPU."""


class Machine(Protocol):
    """What queries and one job are launched on. One thread calls it; nothing but `pause` and `close_job` waits."""

    def now_ns(self) -> int:
        """A clock that does not go back."""
        ...

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """Let queries come so long after `begin_ns`."""
        ...

    def sent(self) -> int:
        """How many have come."""
        ...

    def sent_ns(self, number: int) -> int:
        """When one of them did."""
        ...

    def launch(self, query: Query, variant: int) -> None:
        """Put a query behind all that was launched for queries before, by a plan variant."""
        ...

    def ended(self) -> Sequence[Ended]:
        """Queries that have ended since it was asked last, in the order of their launches."""
        ...

    def set_form(self, form: int) -> None:
        """The job in the form of a variant (0: on the whole GPU), or `OFF`: it stops, before what is launched later."""
        ...

    def kernels(self, us: float) -> None:
        """Kernels of the job, of so much time alone, in front of whatever is launched later; nothing stops them."""
        ...

    def kernels_run(self) -> bool:
        """Whether such kernels are under way."""
        ...

    def job_is_done(self) -> bool:
        """Whether the job's last block was drawn."""
        ...

    def pause(self, until_ns: int) -> None:
        """Until then, or a while less."""
        ...

    def rest_ns(self) -> int:
        """How long nobody needs to look, as far as the job is concerned, where no query runs: it may run dry."""
        ...

    def close_job(self) -> JobWork:
        """Stop the job, wait for its end, and say what it has done."""
        ...

    def give_back(self) -> None:
        """What was taken for this run: nothing is asked of it any more."""
        ...


class MachineBackend(ABC):
    """Carries a policy's decisions out on a machine; when queries come, and what becomes of them, others know.

    Instants are nanoseconds since `_begin`.
    """

    def __init__(
        self, machine: Machine, variants: Mapping[str, Sequence[Variant]], targets: Targets, policy: Policy | None
    ) -> None:
        self._machine, self._variants, self._targets, self._policy = machine, variants, targets, policy
        self._waiting: deque[Query] = deque()
        self._running: list[Running] = []
        self._finished: list[Finished] = []
        self._begin = -1
        """By the machine's clock; -1: the run has not begun."""
        self._now = self._asked = self._last_done = self._happened = 0
        self._form = OFF
        self._wake = NEVER
        self._kernels_end = 0
        """When kernels that nothing stops are expected to have ended; 0: none runs."""
        self._window = Window()
        self._situation = Situation(
            0, self._running, self._waiting, Cursor(OFF, 0, 0, False), Recent(), 0, self._finished
        )
        """The same one for all decisions."""

    @abstractmethod
    def advance(self) -> bool:
        """Wait for the next arrival, end or wake-up; False once there will be none."""

    @abstractmethod
    def _decided(self, took_ns: int) -> None:
        """A decision was made in so much time."""

    @abstractmethod
    def _launched(self, query: Query, variant: int) -> None:
        """A query was put on its stream."""

    @abstractmethod
    def _left(self, first: Running, found: Ended, begin: int, done: int) -> None:
        """A query has ended."""

    def situation(self) -> Situation:
        """As of now."""
        self._asked = self._machine.now_ns()
        return self._situation

    def apply(self, decision: Decision) -> None:
        """As `Backend` says.

        Raises:
            ValueError: a query that does not wait or is not its model's first, or more in flight than may be.
        """
        machine = self._machine
        self._decided(machine.now_ns() - self._asked)
        if decision.co_runner != "keep":
            self._set(decision.form if decision.co_runner == "on" else OFF)
        if decision.kernels_us > 0:
            self._set(OFF)
            machine.kernels(decision.kernels_us)
            self._kernels_end = max(self._now, self._kernels_end) + round(decision.kernels_us * 1e3)
        for query, variant in decision.launch:
            self._start(query, variant)
        if self._now < decision.wake_ns < self._wake:
            self._wake = decision.wake_ns
        self._note()

    def _ends(self) -> bool:
        """Take what has ended, or is due, until now; False: nothing has."""
        happened = False
        for found in self._machine.ended() if self._running else ():
            self._done(found)
            happened = True
        if self._kernels_end and not self._machine.kernels_run():
            self._kernels_end = 0
            happened = True
        if self._wake <= self._now:
            self._wake = NEVER
            happened = True
        return happened

    def _turn(self) -> None:
        """Something has happened: what the policy is told is as of now."""
        self._happened = self._now
        s, window = self._situation, self._window
        if self._now >= window.until:
            s.recent = window.turn(self._now)
        elif s.recent.violations != window.violations:
            s.recent = window.with_violations(s.recent)
        s.now_ns, s.last_done_ns = self._now, self._last_done

    def _check_silence(self) -> None:
        """Raise where nothing happens though queries are under way or wait."""
        if self._now - self._happened > SILENT_NS and (self._running or self._waiting):
            raise DeviceError(
                problem=f"{len(self._running)} queries were launched and {len(self._waiting)} wait, and nothing has"
                f" happened for {SILENT_NS // 1_000_000_000} s"
            )

    def _done(self, found: Ended) -> None:
        first = self._running.pop(0)
        q = first.query
        begin, done = found.begin_ns - self._begin, found.done_ns - self._begin
        self._left(first, found, begin, done)
        self._finished.append(Finished(q, first.variant, begin, done, found.clock_mhz, found.stops))
        self._last_done = done
        self._window.ended(self._targets.scaled(q.model, done - q.scheduled_ns), late=done > q.deadline_ns)

    def _start(self, query: Query, variant: int) -> None:
        if len(self._running) >= MOST_IN_FLIGHT:
            raise ValueError(f"query {query.number} is one more than {MOST_IN_FLIGHT} in flight")
        take(self._waiting, query)
        if self._form != OFF and not (self._variants[query.model][variant].resident and self._form == variant):
            self._set(OFF)
        self._machine.launch(query, variant)
        self._launched(query, variant)
        self._running.append(Running(query, variant, self._now))

    def _set(self, form: int) -> None:
        if form != self._form:
            self._machine.set_form(form)
            self._form = form

    def _note(self) -> None:
        busy = max(self._kernels_end, self._now + 1) if self._kernels_end else 0
        form, done, before = self._form, self._machine.job_is_done(), self._situation.job
        if form != before.form or busy != before.busy_until_ns or done != before.is_done:
            self._situation.job = Cursor(form, busy, 0, done)

    def _close(self) -> JobWork:
        """The job is told to stop, if it runs, and has."""
        self._set(OFF)
        return self._machine.close_job()


@final
class LiveBackend(MachineBackend):
    """A run of given arrivals on a machine: carries a policy's decisions out, and keeps what came of them."""

    def __init__(
        self, machine: Machine, given: Sequence[tuple[Prepared, Arrivals]], *, policy: Policy | None = None,
        admission: Admission | None = None,
    ) -> None:  # fmt: skip
        """Models with their arrivals; every model has the same job.

        `policy`: whose cap is noted beside each launch. `admission`: refuses queries as they come; None: all wait.

        Raises:
            ValueError: no model, or one of them twice.
        """
        self._queries = queries_of(given)
        variants = {p.model.name: [x.variant for x in p.points] for p, _ in given}
        super().__init__(machine, variants, Targets({p.model.name: p.target_ns for p, _ in given}), policy)
        self._admission = admission
        n = len(self._queries)
        begin, done, sent, put, clock = (array("q", [-1]) * n for _ in range(5))
        self._took = array("q", [0]) * (_DECISIONS * n)
        """Of decisions. No memory is taken during a run: the kernel gives pages when they are written first."""
        self.outcome = Outcome(
            self._queries, begin, done, [-1] * n, [-1] * n, sent_ns=sent, put_ns=put, clock_mhz=clock
        )
        self._next = self._ended = 0
        self._unsent = NEVER

    def advance(self) -> bool:
        """Wait for the next arrival, end or wake-up; False once all queries have ended.

        Raises:
            DeviceError: nothing has happened for half a minute, though queries are under way or wait; a query was not
                sent; or the clock went back [W301].
        """
        if self._begin < 0:
            self._begin = self._machine.now_ns() + LEAD_NS
            self._now = self._happened = -LEAD_NS
            self._machine.send([q.scheduled_ns for q in self._queries], self._begin)
        self._finished.clear()
        if self._ended == len(self._queries):
            self._end()
            return False
        while True:
            sent = self._machine.sent()  # before the clock is looked at
            before, self._now = self._now, self._machine.now_ns() - self._begin
            if self._now < before:
                raise DeviceError(problem=f"the host's clock went back by {(before - self._now) / 1e9:.3g} s")
            self._check_sender(sent)
            if self._look(sent):
                break
            self._check_silence()
            self._machine.pause(self._begin + min(self._due(), self._now + SILENT_NS))
        self._turn()
        return True

    def _look(self, sent: int) -> bool:
        """Take what has happened until now; False: nothing has."""
        happened = False
        while self._next < sent:
            query = self._queries[self._next]
            if self._admits(query):
                self._waiting.append(query)
                self._window.arrived(query.scheduled_ns)
            self.outcome.sent_ns[query.number] = self._machine.sent_ns(self._next) - self._begin
            self._next += 1
            happened = True
        happened |= self._ends()
        if happened or self._kernels_end:
            self._note()
        return happened

    def _admits(self, query: Query) -> bool:
        """Whether it may wait; one that may not has ended."""
        if self._admission is None or self._admission.admits(
            query, self._waiting, self._running, now_ns=self._now, last_done_ns=self._last_done,
            busy_until_ns=self._kernels_end,
        ):  # fmt: skip
            return True
        self.outcome.refused.append(query.number)
        self._ended += 1
        return False

    def _check_sender(self, sent: int) -> None:
        """Raise where a query is not sent, look after look: a jump of the clock alone is over at the next one."""
        at = self._queries[sent].scheduled_ns if sent < len(self._queries) else NEVER
        if at + UNSENT_NS >= self._now:
            self._unsent = NEVER
            return
        self._unsent = min(self._unsent, self._now)
        if self._now - self._unsent > UNSENT_NS:
            problem = f"query {sent} was not sent, {(self._now - at) / 1e9:.1f} s behind its instant"
            raise DeviceError(problem=f"{problem}: what sends queries has ended")

    def _due(self) -> int:
        """The next instant that is known of now."""
        arrival = self._queries[self._next].scheduled_ns if self._next < len(self._queries) else NEVER
        return min(arrival, self._wake)

    def _decided(self, took_ns: int) -> None:
        out = self.outcome
        if out.decisions < len(self._took):
            self._took[out.decisions] = took_ns
        else:
            self._took.append(took_ns)
        out.decisions += 1

    def _launched(self, query: Query, variant: int) -> None:
        self.outcome.variants[query.number] = variant
        if self._policy is not None:
            self.outcome.caps[query.number] = self._policy.cap

    def _left(self, first: Running, found: Ended, begin: int, done: int) -> None:
        out, number = self.outcome, first.query.number
        out.begin_ns[number], out.done_ns[number] = begin, done
        out.put_ns[number] = found.put_ns - self._begin
        out.clock_mhz[number] = found.clock_mhz
        out.busy_ns += done - begin
        self._ended += 1

    def _end(self) -> None:
        self.outcome.span_ns = self._now
        self.outcome.decision_ns = self._took[: self.outcome.decisions]
        work = self._close()
        self.outcome.blocks, self.outcome.work_us = work.blocks, work.work_us


def run(policy: Policy, backend: LiveBackend) -> Outcome:
    """A whole run, without garbage collection in it.

    Raises:
        DeviceError: the machine stands still, or what was launched fails [W301, W302].
    """
    with quietly():
        drive(policy, backend)
    return backend.outcome


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Nothing is collected meanwhile, nor looked through of what there is now; what others froze stays frozen."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    if not frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
