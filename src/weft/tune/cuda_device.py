"""One GPU as a measuring worker uses it: wait with a limit, tell whether the context still lives, record, sample.

Everything runs on one stream of the worker's own, so that what is warmed up there can be recorded there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from weft.device.cuda.nvml import sm_clock_of
from weft.errors import DeviceError
from weft.tune.cuda_timing import Sampler

Call = Callable[[], object]
HANG_S = 5.0
"""A kernel that ran so long without an end is given up."""
_SPIN_CYCLES = 120_000
"""About 60 us: the device is busy while the host enqueues what is to be timed."""
_SPIN_S = 2e-3


class HungError(RuntimeError):
    """The device did not finish in time; only the end of this process stops what it runs."""


class CaptureError(RuntimeError):
    """A call that cannot be recorded into a CUDA graph."""


class Gpu(Protocol):
    """What trials need of a device; tests have one that computes on the CPU."""

    @property
    def device(self) -> torch.device:
        """Where buffers are."""
        ...

    @property
    def stream(self) -> int:
        """Handle of the stream that everything runs on."""
        ...

    def wait(self, limit_s: float = HANG_S) -> None:
        """Until all is done. HungError after the limit; an error of a kernel is raised here."""
        ...

    def is_sound(self) -> bool:
        """Does the context still compute?"""
        ...

    def room_bytes(self) -> int:
        """Memory that copies of buffers may take."""
        ...

    def record(self, calls: Sequence[Call], *, evict: bool) -> Sampler:
        """A sampler of the mean time of these calls. CaptureError: they cannot be recorded."""
        ...

    def by_the_clock(self, call: Call) -> Sampler:
        """A sampler of one call that needs the host, by the host's clock."""
        ...

    def sm_clock_mhz(self) -> int:
        """Of this moment; 0: unknown."""
        ...


@final
class CudaGpu:
    """A GPU through torch."""

    def __init__(self, index: int) -> None:
        """Make it current for this thread, together with a stream of its own.

        Raises:
            DeviceError: torch sees no such GPU [W301].
        """
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise DeviceError(problem=f"torch sees no GPU number {index}")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self.stream = int(self._stream.cuda_stream)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self._evict = torch.zeros(max(size // 4, 1024), dtype=torch.float32, device=self.device)
        self._clock = sm_clock_of(str(torch.cuda.get_device_properties(index).uuid))

    def wait(self, limit_s: float = HANG_S) -> None:
        """See `Gpu`. Spins for the first milliseconds, because most waits are short."""
        self._done.record(self._stream)
        start = time.monotonic()
        while not self._done.query():  # type: ignore[no-untyped-call]
            passed = time.monotonic() - start
            if passed > limit_s:
                raise HungError(f"no end within {limit_s:g} s")
            if passed > _SPIN_S:
                time.sleep(1e-4)

    def is_sound(self) -> bool:
        """See `Gpu`."""
        try:
            ones = torch.ones(1024, device=self.device).sum()
            self.wait()
            return float(ones) == 1024.0
        except RuntimeError:
            return False

    def room_bytes(self) -> int:
        """A quarter of what is free."""
        return int(torch.cuda.mem_get_info(self.device)[0]) // 4

    def record(self, calls: Sequence[Call], *, evict: bool) -> Sampler:
        """See `Gpu`. The first call runs once before, outside of the recording: libraries set themselves up."""
        calls[0]()
        self.wait()
        last = self._capture(calls[-1:])
        return _Recorded(self, self._capture(calls), last, len(calls), evict=evict)

    def by_the_clock(self, call: Call) -> Sampler:
        """See `Gpu`."""
        return _Clocked(self, call)

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            if not isinstance(error, RuntimeError | DeviceError):
                raise
            raise CaptureError(_first_line(error)) from None
        try:
            graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(_first_line(error)) from None
        return graph

    def sm_clock_mhz(self) -> int:
        """See `Gpu`."""
        return self._clock()

    def elapsed_us(self, before: Sequence[Call], timed: Call) -> float:
        """Microseconds of `timed` on the device, enqueued while `before` runs."""
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        for call in before:
            call()
        self._first.record(self._stream)
        timed()
        self._last.record(self._stream)
        self.wait()
        return float(self._first.elapsed_time(self._last)) * 1e3

    def evict(self) -> None:
        """Read twice the L2."""
        self._evict.sum()


@final
class _Recorded:
    """A graph of launches, and one of a single launch that goes before it."""

    def __init__(
        self, gpu: CudaGpu, graph: torch.cuda.CUDAGraph, prelude: torch.cuda.CUDAGraph, launches: int, *, evict: bool
    ) -> None:
        self._gpu, self._graph, self._launches = gpu, graph, launches
        self._before: list[Call] = [gpu.evict, prelude.replay] if evict else [prelude.replay]

    def sample(self) -> float:
        """See `Sampler`."""
        return self._gpu.elapsed_us(self._before, self._graph.replay) / self._launches


@final
class _Clocked:
    def __init__(self, gpu: CudaGpu, call: Call) -> None:
        self._gpu, self._call = gpu, call

    def sample(self) -> float:
        """See `Sampler`."""
        self._gpu.wait()
        start = time.perf_counter_ns()
        self._call()
        self._gpu.wait()
        return (time.perf_counter_ns() - start) / 1e3


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
