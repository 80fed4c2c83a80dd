"""A machine whose clock goes on by itself only where nobody looks: what queries and a job are launched on in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.colocate.live import Ended, JobWork
from weft.device.cuda.dispatch import Sender
from weft.kernels.scheduling import NEVER, OFF, Query


@dataclass
class VirtualMachine:
    """Times are nanoseconds. `service[variant]` of a query, or of query `number` with `draws`."""

    service: Sequence[int]
    rates: Sequence[float] = (1.0,)
    """Of the job where no query runs, by form."""
    beside: Sequence[float] = (0.0,)
    """Of the job while a query runs, by its variant."""
    draws: Sequence[Sequence[int]] = ()
    launch_ns: int = 0
    stop_ns: int = 0
    look_ns: int = 0
    """What a look at the clock takes."""
    most_us: float = float("inf")
    """The job's work."""
    now: int = 1_000
    stands_still: bool = False
    log: list[tuple[str, int]] = field(default_factory=list)
    """Calls, with their form, variant or microseconds."""
    form: int = OFF
    work_us: float = 0.0
    free: int = 0
    idle_from: int = 0
    kernels_end: int = 0
    flying: list[tuple[int, int, int]] = field(default_factory=list)
    sender: Sender = field(default_factory=Sender)

    def now_ns(self) -> int:
        self.now += self.look_ns
        return self.now

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        self.sender.send(times_ns, begin_ns)

    def sent(self) -> int:
        return self.sender.sent(self.now_ns())

    def sent_ns(self, number: int) -> int:
        return self.sender.sent_ns(number)

    def launch(self, query: Query, variant: int) -> None:
        self.log.append(("launch", variant))
        begin = max(self.now + self.launch_ns, self.free)
        if self.form != OFF:
            self._idle(begin)
        service = self.draws[variant][query.number] if self.draws else self.service[variant]
        end = begin + service
        self._work(service / 1e3 * self.beside[variant])
        self.free = self.idle_from = end
        self.flying.append((begin, end, self.now))

    def ended(self) -> Sequence[Ended]:
        found = [Ended(b, e, 1980, put) for b, e, put in self.flying if e <= self.now and not self.stands_still]
        del self.flying[: len(found)]
        return found

    def set_form(self, form: int) -> None:
        self.log.append(("form", form))
        assert form != self.form
        if self.form != OFF:
            began = self.idle_from < self.now
            self._idle(self.now)
            if began:
                self.free = max(self.free, self.now + self.stop_ns)
        self.form = form
        if form != OFF:
            self.idle_from = max(self.now + self.launch_ns, self.free)

    def kernels(self, us: float) -> None:
        self.log.append(("kernels", round(us)))
        assert self.form == OFF
        begin = max(self.now + self.launch_ns, self.free)
        self.free = self.kernels_end = begin + round(us * 1e3)
        self._work(us)

    def kernels_run(self) -> bool:
        return self.kernels_end > self.now

    def job_is_done(self) -> bool:
        return self.work_us >= self.most_us

    def pause(self, until_ns: int) -> None:
        ends = [e for _, e, _ in self.flying if not self.stands_still] + [self.kernels_end]
        self.now = max(self.now + 1, min([until_ns, *(e for e in ends if e > self.now)]))

    def rest_ns(self) -> int:
        return NEVER

    def close_job(self) -> JobWork:
        assert self.form == OFF
        return JobWork(round(self.work_us), self.work_us)

    def give_back(self) -> None:
        assert not self.flying, "a query is under way"

    def _idle(self, until: int) -> None:
        if until > self.idle_from:
            self._work((until - self.idle_from) / 1e3 * self.rates[self.form])
            self.idle_from = until

    def _work(self, us: float) -> None:
        self.work_us = min(self.most_us, self.work_us + us)
