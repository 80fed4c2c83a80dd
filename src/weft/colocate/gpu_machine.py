"""One GPU as what policies run on: queries as recorded graphs, and the job as a persistent kernel that is told to stop.

Everything is put on streams and nothing is waited for while a run lasts. A query's begin and end are events on its
stream: the end counts when it is seen to have happened, the begin is so much earlier as the events say. The job draws
from one work counter in device memory (`weft.kernels.colocation.WorkCounter`) in every form; what tells it to stop is a
word written in the order of a stream, by no multiprocessor.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from weft.colocate.live import Ended, JobWork, Machine
from weft.colocate.process_words import Confinement
from weft.device.cuda.dispatch import Queue
from weft.errors import DeviceError
from weft.kernels.scheduling import NEVER, OFF, Query

WHOLE = 256
"""Of a duty: all of the time."""
AHEAD = 4
"""Times that plain kernels of a job are queued at once, where it runs beside queries by itself."""
SPIN_NS = 20_000_000
"""Before what is due the thread looks again and again; further ahead it sleeps. Who sleeps is woken some 100 us late
now and then, and is slow in what follows."""
FEED_NS = 100_000
"""So often it looks after plain kernels, or all the time where a few such times are as long as what is queued."""
LIMIT_S = 10.0
"""Of what is waited for at the end of a run."""


class Job(Protocol):
    """A job with a work counter on the device."""

    @property
    def block_us(self) -> float:
        """Time of the whole GPU that a block takes alone."""
        ...

    @property
    def kernel_us(self) -> float:
        """Of the longest that is launched plainly and that nothing stops, alone: all its kernels once, or a stage."""
        ...

    def arm(self, stream: int, *, duty: int, period_ns: int) -> None:
        """In the order of a stream: what is launched behind it draws, under this throttle."""
        ...

    def stop(self, stream: int) -> None:
        """In the order of a stream: no further block is drawn."""
        ...

    def plain(self, stream: int, us: float) -> float:
        """Kernels as they are on a stream, of about so much time alone, the least that there is in any case.

        How much time: 0 where there is nothing to launch now.
        """
        ...

    def blocks(self) -> int:
        """That have ended by persistent kernels since it began. Nothing of it may run."""
        ...

    def is_done(self) -> bool:
        """Whether its last block was drawn, as far as is known; never waits."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """How the job runs beside the queries of a plan variant, or where none runs."""

    stream: int
    launch: Callable[[int], None] | None
    """Puts its persistent kernel on a stream; None: its kernels are launched plainly, again and again."""
    duty: int = WHOLE
    period_ns: int = 0
    ahead: int = AHEAD
    """Times that plain kernels are queued at once."""
    apart: bool = False
    """Of plain kernels: they run beside queries of the form's own variant alone, and while these do. All others wait
    for those that are queued. Otherwise they run beside any query."""
    inside: bool = False
    """Roles in the kernels of queries draw its blocks: it is armed on their stream, and has no kernel of its own."""

    @property
    def is_plain(self) -> bool:
        """Whether its kernels are launched as they are."""
        return self.launch is None and not self.inside


@dataclass(frozen=True, slots=True)
class Lane:
    """How queries run by a plan variant."""

    stream: int
    launch: Callable[[], None]
    """Puts the graph of a query on the stream."""
    form: Form | None = None
    """Of the job beside it; None: none runs."""
    process: Confinement | None = None
    """Where a job in another process runs beside it (`ProcessMachine`)."""


@dataclass(frozen=True, slots=True)
class _Flying:
    """A query that was launched and has not been seen to end: events around it."""

    begin: int
    end: int
    stops: bool
    """The job was told to stop and still ran when it was launched."""


@final
class GpuMachine:
    """A `Machine` for one run of a policy."""

    def __init__(
        self,
        device: Queue,
        lanes: Mapping[str, Sequence[Lane]],
        *,
        copies: int,
        job: Job | None = None,
        idle: Form | None = None,
        begins: Callable[[Query], None] | None = None,
    ) -> None:
        """Lanes by model and variant.

        Args:
            device: what puts work on streams.
            lanes: by model, in the order of its variants.
            copies: a stream on which words of the counter are written.
            job: the job, if there is one.
            idle: its form where no query runs, on the whole GPU.
            begins: called with each query before its lane launches it.

        Raises:
            ValueError: a job without a form, or a form without a job.
        """
        forms = any(x.form is not None for own in lanes.values() for x in own) or idle is not None
        if forms != (job is not None) or (job is not None and idle is None):
            raise ValueError("a job has a form where no query runs, and without a job there is none")
        self._device, self._lanes, self._copies, self._job, self._idle = device, lanes, copies, job, idle
        self._begins = begins
        self._flying: deque[_Flying] = deque()
        self._taken: list[int] = []
        """Events, all of them."""
        self._pool: list[int] = []
        self._done = 0
        """When the last query was seen to have ended."""
        self._last: tuple[int, int] | None = None
        """Stream and end of the query that was launched last."""
        self._running: Form | None = None
        """Of the job, as long as it was not told to stop."""
        self._owned = False
        """It runs for the queries in flight, not because it was told to."""
        self._armed, self._job_end = self._event(), self._event()
        self._job_stream, self._job_apart = 0, False
        """Of the persistent kernel, or of plain ones apart from queries, that was launched last; 0: none was."""
        self._feeding: Form | None = None
        self._fed: deque[int] = deque()
        self._kernels: list[int] = []
        """The event behind plain kernels that queries wait for; empty: none run."""
        self._plain_us = 0.0
        """Of plain kernels that were launched, alone."""

    # -- Machine

    def now_ns(self) -> int:
        """See `Machine`."""
        return self._device.now_ns()

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """See `Machine`."""
        self._device.send(times_ns, begin_ns)

    def sent(self) -> int:
        """See `Machine`."""
        return self._device.sent()

    def sent_ns(self, number: int) -> int:
        """See `Machine`."""
        return self._device.sent_ns(number)

    def launch(self, query: Query, variant: int) -> None:
        """See `Machine`.

        A job that runs only beside queries of this variant begins with the first of them, and is told to stop when one
        of another follows, or none is in flight. A query does not wait for the end of a job that was told to stop: its
        CTAs take their places as those of the job leave them, whatever else happens.
        """
        device, lane = self._device, self._lanes[query.model][variant]
        if self._last is not None and self._last[0] != lane.stream:
            device.wait(lane.stream, self._last[1])
        if self._owned and lane.form is not (self._running or self._feeding):
            assert self._last is not None
            self._end(self._last[0])  # behind the query that it was for
        self._after_kernels(lane.stream)
        own = lane.form if self._running is None and self._feeding is None else None
        apart = self._job_stream != 0 and self._job_apart
        if apart and (lane.form is None or lane.form is not self._feeding):
            device.wait(lane.stream, self._job_end)  # kernels that nothing stops
        stops = self._running is None and self._job_stream != 0 and not apart and not device.happened(self._job_end)
        if own is not None and own.inside:  # in front of the roles that draw, and behind what drew before
            self._begin(own, behind=None)
            self._owned, stops = True, False
        begin, end = self._event(), self._event()
        if self._begins is not None:
            self._begins(query)
        device.record(begin, lane.stream)
        lane.launch()
        device.mark(end, lane.stream, since=begin)
        if own is not None and own.is_plain and not own.apart:
            self._one_pass(own)
        elif own is not None and not own.inside:
            self._begin(own, behind=self._last)
            self._owned = True
        if self._last is not None and not any(self._last[1] == f.end for f in self._flying):
            self._pool.append(self._last[1])
        self._last = lane.stream, end
        self._flying.append(_Flying(begin, end, stops))

    def ended(self) -> Sequence[Ended]:
        """See `Machine`."""
        if self._feeding is not None:
            self._feed()
        found: list[Ended] = []
        device = self._device
        while self._flying and device.happened(self._flying[0].end):
            flying = self._flying.popleft()
            begin, end = flying.begin, flying.end
            # one after the other, and none before all of it was put on its stream
            done = max(device.seen_ns(end), self._done)
            began = min(done, max(done - device.apart_ns(end), self._done, device.put_ns(end)))
            found.append(Ended(began, done, device.clock_mhz(), device.put_ns(begin), flying.stops))
            self._done = done
            self._pool.append(begin)
            if self._last is None or self._last[1] != end:  # else the next query may still wait for it
                self._pool.append(end)
        if self._owned and not self._flying:
            self._end(self._copies)
        return found

    def set_form(self, form: int) -> None:
        """See `Machine`."""
        self._end(self._copies)
        if form != OFF:
            self._begin(self._form(form), behind=self._last)

    def kernels(self, us: float) -> None:
        """See `Machine`: whole passes or stages, at least one."""
        assert self._job is not None
        device, stream = self._device, self._first_stream()
        self._end(self._copies)
        if self._job_stream:
            device.wait(stream, self._job_end)
        if self._last is not None and self._last[0] != stream:
            device.wait(stream, self._last[1])
        for event in self._fed:  # passes are counted in their order
            device.wait(stream, event)
        self._plain_us += self._job.plain(stream, us)
        event = self._event()
        device.mark(event, stream)
        self._pool += self._kernels
        self._kernels = [event]

    def kernels_run(self) -> bool:
        """See `Machine`."""
        if self._kernels and self._device.happened(self._kernels[0]):
            self._pool.append(self._kernels.pop())
        return bool(self._kernels)

    def job_is_done(self) -> bool:
        """See `Machine`."""
        return self._job is not None and self._job.is_done()

    def pause(self, until_ns: int) -> None:
        """See `Machine`. While something is under way it returns at once."""
        if self._flying or self._kernels:
            return
        left = until_ns - self._device.now_ns() - SPIN_NS
        if self._feeding is not None:
            assert self._job is not None
            self._feed()
            if self._fed and self._feeding.ahead * self._job.kernel_us * 1e3 < 4 * FEED_NS:
                return
            left = min(left, FEED_NS)
        if left > 0:
            self._device.sleep(left)

    def rest_ns(self) -> int:
        """See `Machine`: half of the plain kernels that are queued at a time."""
        if self._feeding is None:
            return NEVER
        assert self._job is not None
        return round(self._feeding.ahead * self._job.kernel_us * 1e3 / 2)

    def close_job(self) -> JobWork:
        """See `Machine`.

        Raises:
            DeviceError: it does not end [W301].
        """
        if self._job is None:
            return JobWork(0, 0.0)
        self.set_form(OFF)
        events = [self._job_end] * bool(self._job_stream) + list(self._fed) + self._kernels
        until = self._device.now_ns() + round(LIMIT_S * 1e9)
        while not all(self._device.happened(e) for e in events):
            if self._device.now_ns() > until:
                raise DeviceError(problem=f"the best-effort job was told to stop, and runs on after {LIMIT_S:g} s")
            self._device.sleep(50_000)
        blocks = self._job.blocks()
        return JobWork(blocks, blocks * self._job.block_us + self._plain_us)

    def give_back(self) -> None:
        """See `Machine`."""
        self._device.give_back(self._taken)
        self._taken = []

    # -- the job

    def _form(self, variant: int) -> Form:
        if variant == 0:
            assert self._idle is not None
            return self._idle
        found = next(iter(self._lanes.values()))[variant].form
        if found is None:
            raise ValueError(f"variant {variant} has no form of the job")
        return found

    def _first_stream(self) -> int:
        return next(iter(self._lanes.values()))[0].stream

    def _after_kernels(self, stream: int) -> None:
        """What follows on a stream waits for plain kernels that nothing stops."""
        for event in self._kernels:
            self._device.wait(stream, event)

    def _one_pass(self, form: Form) -> None:
        """Its plain kernels once beside a query, if none of before are under way."""
        self._drain()
        if not self._fed:
            self._after_kernels(form.stream)
            self._pass(form)

    def _drain(self) -> None:
        while self._fed and self._device.happened(self._fed[0]):
            self._pool.append(self._fed.popleft())

    def _pass(self, form: Form) -> bool:
        """Plain kernels once; False: there is nothing to launch now."""
        assert self._job is not None
        us = self._job.plain(form.stream, 0.0)
        if us <= 0:
            return False
        self._plain_us += us
        event = self._event()
        self._device.mark(event, form.stream)
        self._fed.append(event)
        if form.apart:
            self._ends_on(form.stream, apart=True)
        return True

    def _begin(self, form: Form, *, behind: tuple[int, int] | None) -> None:
        """The job in a form, behind the end of a query on its stream: that may need what the job would take."""
        assert self._job is not None
        self._after_kernels(form.stream)
        if self._job_stream and (form.launch is None or self._job_stream != form.stream):
            self._device.wait(form.stream, self._job_end)
        if behind is not None and (form.launch is not None or form.apart):
            self._device.wait(form.stream, behind[1])
        if form.is_plain:
            self._feeding = form
            self._feed()
            return
        for event in self._fed:
            self._device.wait(form.stream, event)
        self._running = form  # an interrupt behind this has it told to stop
        self._job.arm(form.stream, duty=form.duty, period_ns=form.period_ns)
        self._device.record(self._armed, form.stream)
        if form.launch is not None:
            form.launch(form.stream)
            self._ends_on(form.stream, apart=False)

    def _end(self, stream: int) -> None:
        """No more of the job: what draws is told in the order of a stream, behind what let it draw."""
        if self._running is not None:
            assert self._job is not None
            self._device.wait(stream, self._armed)
            self._job.stop(stream)
            if self._running.inside:  # its end is that of the queries that draw, and it is told before it begins anew
                if self._last is not None:
                    self._device.wait(stream, self._last[1])
                self._ends_on(stream, apart=False)
        self._running = self._feeding = None
        self._owned = False

    def _ends_on(self, stream: int, *, apart: bool) -> None:
        """What follows of the job waits for this; `apart`: queries do, too."""
        self._device.mark(self._job_end, stream)
        self._job_stream, self._job_apart = stream, apart

    def _feed(self) -> None:
        """Plain kernels, as many as are to be queued."""
        assert self._feeding is not None
        self._drain()
        while len(self._fed) < self._feeding.ahead and self._pass(self._feeding):
            pass

    def _event(self) -> int:
        if self._pool:
            return self._pool.pop()
        self._taken.append(self._device.event())
        return self._taken[-1]


@contextlib.contextmanager
def ending(machine: Machine) -> Iterator[None]:
    """The job does not run on where something is raised; at the end all is given back that was taken for the run."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(DeviceError):  # of what is raised already
            machine.close_job()
        raise
    finally:
        machine.give_back()
