"""One GPU as what policies run on: queries as recorded graphs, and the job as a persistent kernel that is told to stop.

Everything is put on streams and nothing is waited for while a run lasts. A query's begin and end are events on its
stream: the end counts when the thread sees it, the begin is so much earlier as the events say. The job draws from one
work counter in device memory (`weft.kernels.colocation.WorkCounter`) in every form; what tells it to stop is a word
written in the order of a stream, by no multiprocessor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from weft.colocate.live import Ended, JobWork
from weft.errors import DeviceError
from weft.kernels.scheduling import OFF, Query

WHOLE = 256
"""Of a duty: all of the time."""
AHEAD = 4
"""Plain kernels of a job that are queued at once, where it runs beside queries by itself."""
SPIN_NS = 250_000
"""Before what is due the thread looks again and again; further ahead it sleeps."""
FEED_NS = 100_000
"""So often it looks after plain kernels."""
LIMIT_S = 10.0
"""Of what is waited for at the end of a run."""


class Device(Protocol):
    """Streams and events, by handles. Nothing but `synchronise` waits."""

    def now_ns(self) -> int:
        """The host's clock, which does not go back."""
        ...

    def event(self) -> int:
        """A new one that knows when it happened."""
        ...

    def record(self, event: int, stream: int) -> None:
        """It happens when all before it on the stream has."""
        ...

    def happened(self, event: int) -> bool:
        """Whether it has; errors of kernels before it are raised here."""
        ...

    def apart_ns(self, first: int, last: int) -> int:
        """Between two that have happened."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What follows on the stream waits for the event."""
        ...

    def sleep(self, ns: int) -> None:
        """About so long."""
        ...


class Job(Protocol):
    """A job with a work counter on the device."""

    @property
    def block_us(self) -> float:
        """Time of the whole GPU that a block takes alone."""
        ...

    @property
    def kernel_us(self) -> float:
        """Of all its kernels once, launched plainly, alone."""
        ...

    def arm(self, stream: int, *, duty: int, period_ns: int) -> None:
        """In the order of a stream: what is launched behind it draws, under this throttle."""
        ...

    def stop(self, stream: int) -> None:
        """In the order of a stream: no further block is drawn."""
        ...

    def plain(self, stream: int) -> None:
        """All its kernels once, as they are, on a stream."""
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


@final
class GpuMachine:
    """A `Machine` for one run of a policy."""

    def __init__(
        self,
        device: Device,
        lanes: Mapping[str, Sequence[Lane]],
        *,
        copies: int,
        job: Job | None = None,
        idle: Form | None = None,
        clock_mhz: Callable[[], int] = lambda: 0,
    ) -> None:
        """Lanes by model and variant.

        Args:
            device: streams and events.
            lanes: by model, in the order of its variants.
            copies: a stream on which words of the counter are written.
            job: the job, if there is one.
            idle: its form where no query runs, on the whole GPU.
            clock_mhz: the clock of the SMs as it was seen last.

        Raises:
            ValueError: a job without a form, or a form without a job.
        """
        forms = any(x.form is not None for own in lanes.values() for x in own) or idle is not None
        if forms != (job is not None) or (job is not None and idle is None):
            raise ValueError("a job has a form where no query runs, and without a job there is none")
        self._device, self._lanes, self._copies, self._job, self._idle = device, lanes, copies, job, idle
        self._clock_mhz = clock_mhz
        self._flying: deque[tuple[int, int, int]] = deque()
        """Events around queries, and when their graphs were launched."""
        self._pool: list[int] = []
        self._done = 0
        """When the last query was seen to have ended."""
        self._last: tuple[int, int] | None = None
        """Stream and end of the query that was launched last."""
        self._running: Form | None = None
        """Of the job, as long as it was not told to stop."""
        self._owned = False
        """It runs for the queries in flight, not because it was told to."""
        self._armed, self._job_end = device.event(), device.event()
        self._job_stream = 0
        """Of the persistent kernel that was launched last; 0: none was."""
        self._feeding: Form | None = None
        self._fed: deque[int] = deque()
        self._kernels: list[int] = []
        """The event behind plain kernels that queries wait for; empty: none run."""
        self._plain_passes = 0

    # -- Machine

    def now_ns(self) -> int:
        """See `Machine`."""
        return self._device.now_ns()

    def launch(self, query: Query, variant: int) -> None:
        """See `Machine`.

        A job that runs only beside queries of this variant begins with the first of them, and is told to stop when one
        of another follows, or none is in flight.
        """
        device, lane = self._device, self._lanes[query.model][variant]
        if self._last is not None and self._last[0] != lane.stream:
            device.wait(lane.stream, self._last[1])
        if self._owned and lane.form is not self._running:
            assert self._last is not None
            self._halt(self._last[0])  # behind the query that it was for
        self._after_kernels(lane.stream)
        own = lane.form if self._running is None and self._feeding is None else None
        if self._running is None and self._job_stream:
            device.wait(lane.stream, self._job_end)  # it was told to stop
        if own is not None and own.is_plain:
            self._one_pass(own)
        elif own is not None:
            self._begin(own)
            self._owned = True
            device.wait(lane.stream, self._armed)
        begin, end = self._event(), self._event()
        device.record(begin, lane.stream)
        lane.launch()
        put = device.now_ns()
        device.record(end, lane.stream)
        if self._last is not None and not any(self._last[1] == e for _, e, _ in self._flying):
            self._pool.append(self._last[1])
        self._last = lane.stream, end
        self._flying.append((begin, end, put))

    def ended(self) -> Sequence[Ended]:
        """See `Machine`."""
        if self._feeding is not None:
            self._feed()
        found: list[Ended] = []
        device = self._device
        while self._flying and device.happened(self._flying[0][1]):
            begin, end, put = self._flying.popleft()
            done = device.now_ns()
            # one after the other; and the begin is marked before the graph is launched
            began = min(done, max(done - device.apart_ns(begin, end), self._done, put))
            found.append(Ended(began, done, self._clock_mhz()))
            self._done = done
            self._pool.append(begin)
            if self._last is None or self._last[1] != end:  # else the next query may still wait for it
                self._pool.append(end)
        if self._owned and not self._flying:
            self._halt(self._copies)
        return found

    def set_form(self, form: int) -> None:
        """See `Machine`."""
        if self._running is not None:
            self._halt(self._copies)
        self._feeding = None
        if form != OFF:
            self._begin(self._form(form))

    def kernels(self, us: float) -> None:
        """See `Machine`: whole passes, at least one."""
        assert self._job is not None
        device, stream = self._device, self._first_stream()
        if self._running is not None:
            self._halt(self._copies)
        if self._job_stream:
            device.wait(stream, self._job_end)
        if self._last is not None and self._last[0] != stream:
            device.wait(stream, self._last[1])
        for _ in range(max(1, round(us / self._job.kernel_us))):
            self._job.plain(stream)
            self._plain_passes += 1
        event = self._event()
        device.record(event, stream)
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
            self._feed()
            left = min(left, FEED_NS)
        if left > 0:
            self._device.sleep(left)

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
        return JobWork(blocks, blocks * self._job.block_us + self._plain_passes * self._job.kernel_us)

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
        assert self._job is not None
        self._drain()
        if not self._fed:
            self._pass(form.stream)

    def _drain(self) -> None:
        while self._fed and self._device.happened(self._fed[0]):
            self._pool.append(self._fed.popleft())

    def _pass(self, stream: int) -> None:
        assert self._job is not None
        self._job.plain(stream)
        self._plain_passes += 1
        event = self._event()
        self._device.record(event, stream)
        self._fed.append(event)

    def _begin(self, form: Form) -> None:
        assert self._job is not None
        self._after_kernels(form.stream)
        if self._job_stream and (form.launch is None or self._job_stream != form.stream):
            self._device.wait(form.stream, self._job_end)
        if form.is_plain:
            self._feeding = form
            self._feed()
            return
        if self._last is not None:  # it may need what the job would take
            self._device.wait(form.stream, self._last[1])
        for event in self._fed:
            self._device.wait(form.stream, event)
        self._job.arm(form.stream, duty=form.duty, period_ns=form.period_ns)
        self._device.record(self._armed, form.stream)
        if form.launch is not None:
            form.launch(form.stream)
            self._ends_on(form.stream)
        self._running = form

    def _halt(self, stream: int) -> None:
        """Told in the order of a stream, behind what let it draw."""
        assert self._job is not None
        assert self._running is not None
        self._device.wait(stream, self._armed)
        self._job.stop(stream)
        if self._running.inside:  # its end is that of the queries that draw, and the word is told before it begins anew
            if self._last is not None:
                self._device.wait(stream, self._last[1])
            self._ends_on(stream)
        self._running, self._owned = None, False

    def _ends_on(self, stream: int) -> None:
        """What follows waits for this."""
        self._device.record(self._job_end, stream)
        self._job_stream = stream

    def _feed(self) -> None:
        """Plain kernels, as many as are to be queued."""
        assert self._feeding is not None
        assert self._job is not None
        self._drain()
        while len(self._fed) < AHEAD:
            self._pass(self._feeding.stream)

    def _event(self) -> int:
        return self._pool.pop() if self._pool else self._device.event()
