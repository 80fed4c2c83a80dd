"""A GPU on which best-effort work runs beside queries: loaded kernels, the work counter, its stop and its snapshots."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from benchmarks.co_runner.rows import WHOLE, Sample, Way, lost_or_doubled
from benchmarks.co_runner.units import CELLS, FULL_THREADS, Unit, co_runner, plain, unit_of
from benchmarks.harness.modules import Modules
from weft.device.cuda import streams
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvml import sm_clock_of, watts_of
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.cuda.streams import Stream
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda.role.persistent import needs
from weft.kernels.colocation import BYTES, WorkCounter
from weft.kernels.source import CudaSource
from weft.sm_budget import SmBudget

MOST_BLOCKS = (1 << 31) - 1
GRID = 1 << 30
"""Blocks of the one stage: as in the manifests."""
LIMIT_S = 5.0
"""Of anything that is waited for."""
SETTLE_S = 0.002
"""After which a kernel that was launched on an idle GPU is on all SMs."""
DATA_WORDS = 1 << 28
_METER_S = 0.004


def wait(event: torch.cuda.Event, limit_s: float = LIMIT_S) -> None:
    """Until what was recorded has ended.

    Raises:
        TimeoutError: it has not after so many seconds.
    """
    until = time.monotonic() + limit_s
    while not event.query():
        if time.monotonic() > until:
            raise TimeoutError(f"not done after {limit_s:g} s")
        time.sleep(5e-5)


def timed() -> torch.cuda.Event:
    """An event that knows when it happened."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def apart_us(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    """Microseconds between two events that have happened."""
    return float(first.elapsed_time(last)) * 1e3


@dataclass(frozen=True, slots=True)
class CoRunner:
    """A persistent kernel, bound."""

    unit: Unit
    ctas: int
    launch: Prepared
    takes: SmBudget
    """Of each SM, one CTA."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A plain kernel of so many blocks, bound."""

    unit: Unit
    blocks: int
    launch: Prepared

    @property
    def work(self) -> int:
        """Turns of threads."""
        return self.blocks * self.unit.work


@final
class Meter:
    """Clock and power, read every few milliseconds by a thread while a round runs."""

    def __init__(self, uuid: str) -> None:
        self._clock, self._watts = sm_clock_of(uuid), watts_of(uuid)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[Sample]:
        """What is read lies in the sample when the block has ended."""
        found, ended = Sample(), threading.Event()

        def read() -> None:
            while not ended.wait(_METER_S):
                if mhz := self._clock():
                    found.mhz.append(mhz)
                if watts := self._watts():
                    found.watts.append(watts)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()


@final
class Gpu:
    """The GPU of torch's current device. `held` gives back what is taken."""

    def __init__(self, facts: GpuFacts, nvrtc: Nvrtc, held: ExitStack) -> None:
        self.facts, self.nvrtc, self._held = facts, nvrtc, held
        least, greatest = streams.priorities()
        self.least, self.greatest = least, greatest
        self.high, self.low, self.copies = (self.stream(p) for p in (greatest, least, greatest))
        self.counter = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
        self.ran = torch.zeros(CELLS, dtype=torch.int32, device="cuda")
        self._out = torch.zeros(FULL_THREADS, dtype=torch.int32, device="cuda")
        self._data: torch.Tensor | None = None
        self._seen = torch.zeros(2 * BYTES, dtype=torch.uint8).pin_memory()
        self._driver = Modules(held, prefer=True).driver
        self._co_runners: dict[tuple[Unit, int], CoRunner] = {}
        self._plain: dict[Unit, tuple[CudaSource, Path]] = {}
        self._full: dict[tuple[str, int], float] = {}
        self.period_ns = 100_000
        """Of co-runners whose CTAs work at the same time."""
        self.meter = Meter(str(torch.cuda.get_device_properties(0).uuid))

    def stream(self, priority: int) -> torch.cuda.Stream:
        """A new stream of ours for the framework, closed at the end."""
        own = Stream(priority=priority)
        self._held.callback(own.close)
        return torch.cuda.ExternalStream(own.handle)  # type: ignore[no-untyped-call]

    def _addresses(self, unit: Unit) -> Addresses:
        return Addresses(self.inputs_of(unit), (self.ran.data_ptr(), self._out.data_ptr()))

    def inputs_of(self, unit: Unit) -> tuple[int, ...]:
        """Addresses of what the work reads, drawn once."""
        if unit.kind in ("ffma", "dense", "exponentials"):
            return ()
        if self._data is None:
            self._data = torch.randint(-(1 << 31), (1 << 31) - 1, (DATA_WORDS,), dtype=torch.int32, device="cuda")
        return (self._data.data_ptr(),)

    def co_runner(self, unit: Unit, ctas: int) -> CoRunner:
        """The persistent kernel of so many CTAs, compiled and loaded once."""
        if (unit, ctas) not in self._co_runners:
            source = co_runner(unit, ctas, self.facts)
            cubin = self.nvrtc.compile(source.text, arch=self.facts.arch, flags=source.flags)
            own = cubin.of(source.entry)
            bound = BoundFused(source, cubin.path, driver=self._driver)
            launch = bound.prepare([Addresses(()), self._addresses(unit)], self.counter.data_ptr())
            takes = needs(source, own.registers, own.shared_bytes, 1, self.facts)
            self._co_runners[unit, ctas] = CoRunner(unit, ctas, launch, takes)
        return self._co_runners[unit, ctas]

    def plain(self, unit: Unit, blocks: int) -> Launch:
        """The kernel by itself with so many blocks, compiled once."""
        if unit not in self._plain:
            source = plain(unit, blocks)
            self._plain[unit] = source, self.nvrtc.compile(source.text, arch=self.facts.arch, flags=source.flags).path
        source, path = self._plain[unit]
        sized = replace(source, launches=tuple(replace(x, grid=(blocks, 1, 1)) for x in source.launches))
        return Launch(unit, blocks, BoundCuda(sized, path, driver=self._driver).prepare(self._addresses(unit)))

    # -- the work counter

    def begin(
        self, work: CoRunner, way: Way | None = None, stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.Event:
        """Launch a co-runner on the idle GPU and give it time to be on all SMs; its end."""
        torch.cuda.synchronize()
        duty, sms = (way.duty, way.sms) if way is not None and way.kind == "co-runner" else (WHOLE, 0)
        period = self.period_ns if way is not None and way.sync else 0
        start = replace(WorkCounter.start([GRID], MOST_BLOCKS), duty=duty, sms=sms, period=period)
        streams.write(self.counter.data_ptr(), start.pack())
        self.ran.zero_()
        torch.cuda.synchronize()
        on = stream or self.low
        work.launch(on.cuda_stream)
        ended = timed()
        ended.record(on)
        time.sleep(SETTLE_S)
        return ended

    def stop(self, stream: torch.cuda.Stream | None = None) -> None:
        """Raise `stop`, in the order of a stream, without an SM."""
        api = driver_api()
        on = api.CUstream((stream or self.copies).cuda_stream)
        call(api.cuStreamWriteValue32, on, self.counter.data_ptr() + WorkCounter.offset("stop"), 1, 0)

    def snapshot(self, number: int, stream: torch.cuda.Stream) -> None:
        """Copy the counter to the host, in the order of a stream, by a copy engine."""
        api = driver_api()
        place = self._seen.data_ptr() + number * BYTES
        call(api.cuMemcpyDtoHAsync, place, self.counter.data_ptr(), BYTES, api.CUstream(stream.cuda_stream))

    def between(self) -> int:
        """Blocks that ended between the two snapshots."""
        seen = bytes(self._seen.tolist())
        first, last = (WorkCounter.unpack(seen[k * BYTES : (k + 1) * BYTES]) for k in (0, 1))
        return (last.finished - first.finished) & 0xFFFFFFFF

    def ended(self, event: torch.cuda.Event) -> WorkCounter:
        """The counter of a co-runner that was told to stop.

        Raises:
            TimeoutError: it has not ended.
            ValueError: a block was lost or ran twice.
        """
        wait(event)
        torch.cuda.synchronize()
        found = WorkCounter.unpack(bytes(self.counter.tolist()))
        drawn = min(found.ticket, found.end)
        if found.finished != drawn:
            raise ValueError(f"{drawn} blocks were drawn, {found.finished} have ended")
        if wrong := lost_or_doubled(self.ran.tolist(), found.finished):
            raise ValueError(wrong)
        return found

    # -- alone

    def rate(self, work: CoRunner, ms: float = 8.0, way: Way | None = None) -> float:
        """Turns of threads in a microsecond of a co-runner alone on the GPU."""
        ended = self.begin(work, way)
        marks = timed(), timed()
        for k, mark in enumerate(marks):
            self.snapshot(k, self.copies)
            mark.record(self.copies)
            if k == 0:
                time.sleep(ms / 1e3)
        self.stop()
        self.ended(ended)
        return self.between() * work.unit.work / apart_us(*marks)

    def plain_us(self, work: Launch, rounds: int = 5) -> float:
        """Median microseconds of a plain kernel alone."""
        found = []
        for _ in range(rounds + 1):
            first, last = timed(), timed()
            first.record(self.low)
            work.launch(self.low.cuda_stream)
            last.record(self.low)
            wait(last)
            found.append(apart_us(first, last))
        return statistics.median(found[1:])

    def full(self, kind: str, batch: int) -> float:
        """Turns of threads in a microsecond of this work alone on the whole GPU, at its best."""
        if (kind, batch) not in self._full:
            unit, sms = unit_of(kind, FULL_THREADS, batch), self.facts.sms
            launch = self.plain(unit, 8 * 12 * sms)
            rates = [launch.work / self.plain_us(launch)]
            rates += [self.rate(self.co_runner(unit, many * sms)) for many in (2, 4, 8)]
            self._full[kind, batch] = max(rates)
        return self._full[kind, batch]


def same(outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether results are the same, bit by bit."""
    pairs = zip(outputs, wanted, strict=True)
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)
