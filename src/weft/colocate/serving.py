"""A policy on a machine whose queries come from a server, for as long as that sends them; a job has what they leave.

One thread looks at what has come and at the machine in turn, as in `weft.colocate.live`. While a query runs it looks
without a rest; else it sleeps until the next one comes, `IDLE_NS` at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from weft.colocate.live import Ended, Machine, MachineBackend
from weft.colocate.operating import Prepared
from weft.colocate.outcome import Targets
from weft.colocate.policy import Policy
from weft.kernels.scheduling import Query, Running

IDLE_NS = 200_000
"""A sleep while nothing is under way: then kernels of the job that are launched plainly are looked after."""
LOOK_NS = 200_000_000
"""So often it is looked at what the job has done, though no query comes."""
TICK_NS = 1_000_000_000
"""So often `Inbox.tick` is called, where no query is kept from running by it."""
_TICK_LATE_NS = 10 * TICK_NS
"""And so often in any case."""


@dataclass(frozen=True, slots=True)
class Come:
    """A query that has come."""

    number: int
    waited_ns: int
    """Before it did, in the queue of whoever sent it: its target counts from there."""


@dataclass(slots=True)
class Served:
    """What became of queries until now."""

    queries: int = 0
    """That have ended."""
    late: int = 0
    """Behind their target."""
    variants: list[int] = field(default_factory=list)
    """How many ran by each plan variant."""


class Inbox(Protocol):
    """Whence queries come, and whom their ends are told. Called by the thread of the run."""

    @property
    def is_open(self) -> bool:
        """Whether further queries may come."""
        ...

    def take(self) -> Sequence[Come]:
        """What has come since it was asked last, in order; never waits."""
        ...

    def wait(self, ns: int) -> None:
        """Until something comes, or so long."""
        ...

    def done(self, number: int, ended: Ended) -> None:
        """Its results are there."""
        ...

    def tick(self, served: Served, cap: int) -> None:
        """About once a second. `cap`: the highest plan variant that is allowed now; -1: there is no such limit."""
        ...


@final
class ServingBackend(MachineBackend):
    """One model's queries as an inbox has them; ends when that is closed and all that came has ended."""

    def __init__(self, machine: Machine, prepared: Prepared, inbox: Inbox, *, policy: Policy) -> None:
        """`policy` decides, by the variants that were prepared for it."""
        self._model, self._target = prepared.model.name, prepared.target_ns
        variants = {self._model: [x.variant for x in prepared.points]}
        super().__init__(machine, variants, Targets({self._model: self._target}), policy)
        self._inbox, self._cap = inbox, policy
        self._look = self._tick = 0
        self.served = Served(variants=[0] * len(prepared.points))

    def advance(self) -> bool:
        """Wait for the next arrival, end or wake-up; the first time there is none, and the job may begin.

        Raises:
            DeviceError: nothing has happened for half a minute, though queries are under way or wait [W301].
        """
        machine, inbox = self._machine, self._inbox
        self._finished.clear()
        if self._begin < 0:
            self._begin = machine.now_ns()
            self._turn()
            return True
        while True:
            come = inbox.take()  # before the clock is looked at
            self._now = max(self._now, machine.now_ns() - self._begin)
            for query in come:
                self._arrived(query)
            happened = self._ends() or bool(come)
            if happened or self._kernels_end or self._now >= self._look:
                self._look = self._now + LOOK_NS
                self._note()
            idle = not (self._running or self._waiting)
            if idle and not inbox.is_open:  # whatever the job does
                self._close()
                inbox.tick(self.served, self._cap.cap)
                return False
            if happened:
                break
            self._check_silence()
            if self._now >= self._tick + (0 if idle else _TICK_LATE_NS):
                self._tick = self._now + TICK_NS
                inbox.tick(self.served, self._cap.cap)
            rest = min(IDLE_NS, self._wake - self._now)
            machine.pause(self._begin + self._now + rest)  # far less than it would sleep for
            if not (self._running or self._kernels_end):
                inbox.wait(min(rest, machine.rest_ns()))
        self._turn()
        return True

    def _arrived(self, come: Come) -> None:
        scheduled = self._now - come.waited_ns
        self._waiting.append(Query(self._model, come.number, scheduled, scheduled + self._target))
        self._window.arrived(self._now)

    def _decided(self, took_ns: int) -> None:
        """Nobody asks."""

    def _launched(self, query: Query, variant: int) -> None:  # noqa: ARG002 - as it is called
        self.served.variants[variant] += 1

    def _left(self, first: Running, found: Ended, begin: int, done: int) -> None:  # noqa: ARG002 - as it is called
        self.served.queries += 1
        self.served.late += done > first.query.deadline_ns
        self._inbox.done(first.query.number, found)
