"""Streams, device memory and graphs of our own, for calibration and tests; a framework brings its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

from weft.device.cuda.api import call, driver_api


@contextlib.contextmanager
def device_memory(size_bytes: int) -> Iterator[int]:
    """Address of uninitialised device memory, freed at the end.

    Raises:
        CudaError: there is not so much [W302].
    """
    api = driver_api()
    pointer = call(api.cuMemAlloc, size_bytes, detail=f"{size_bytes} bytes")
    try:
        yield int(pointer)
    finally:
        call(api.cuMemFree, pointer)


def pinned(held: contextlib.ExitStack, place: int, size_bytes: int) -> None:
    """Lock memory of the host until `held` ends, so that no copy of it is waited for.

    Raises:
        CudaError: it cannot be [W302].
    """
    api = driver_api()
    call(api.cuMemHostRegister, place, size_bytes, 0, detail=f"{size_bytes} bytes")
    held.callback(call, api.cuMemHostUnregister, place)


def copy(to: int, source: int, size_bytes: int, stream: int) -> None:
    """Copy within the device, in the order of a stream."""
    api = driver_api()
    call(api.cuMemcpyDtoDAsync, to, source, size_bytes, api.CUstream(stream))


def priorities() -> tuple[int, int]:
    """The numbers of the lowest and of the highest priority of a stream."""
    least, greatest = call(driver_api().cuCtxGetStreamPriorityRange)
    return int(least), int(greatest)


def fill(address: int, byte: int, size_bytes: int) -> None:
    """Set memory, after all work of the default stream."""
    call(driver_api().cuMemsetD8, address, byte, size_bytes)


def read_back(address: int, size_bytes: int) -> bytes:
    """Copy device memory to the host, after all work of the default stream."""
    data = bytearray(size_bytes)
    call(driver_api().cuMemcpyDtoH, data, address, size_bytes)
    return bytes(data)


def write(address: int, data: bytes) -> None:
    """Copy host memory to the device."""
    call(driver_api().cuMemcpyHtoD, address, data, len(data))


def captured(work: Callable[[int], None], stream: int) -> int:
    """Capture work that is put on a stream: a `CUgraphExec`, for `destroyed`. Priorities are those of the stream."""
    api, handle = driver_api(), driver_api().CUstream(stream)
    call(api.cuStreamBeginCapture, handle, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        work(stream)
    except BaseException:
        _, broken = api.cuStreamEndCapture(handle)
        if int(broken or 0):
            api.cuGraphDestroy(broken)
        raise
    graph = call(api.cuStreamEndCapture, handle)
    try:
        return int(call(api.cuGraphInstantiate, graph, 0))
    finally:
        call(api.cuGraphDestroy, graph)


def destroyed(graph: int) -> None:
    """Give an executable graph back; no launch of it is under way."""
    api = driver_api()
    call(api.cuGraphExecDestroy, api.CUgraphExec(graph))


@final
class Stream:
    """A stream that does not wait for the default one."""

    def __init__(self, handle: int = 0, *, priority: int = 0) -> None:
        """`handle`: of a stream that belongs to somebody else; 0: a new one. Lower numbers of priority go first."""
        api = driver_api()
        self._owned = not handle
        if not self._owned:
            self._stream = api.CUstream(handle)
        elif priority:
            self._stream = call(api.cuStreamCreateWithPriority, 1, priority)
        else:
            self._stream = call(api.cuStreamCreate, 1)
        self._events = tuple(call(api.cuEventCreate, 0) for _ in range(2))
        self.handle = int(self._stream)

    def synchronise(self) -> None:
        """Wait for all its work; an error of a kernel is raised here [W302]."""
        call(driver_api().cuStreamSynchronize, self._stream)

    def time_us(self, work: Callable[[int], None]) -> float:
        """Microseconds between two events around the work that is put on the stream."""
        api = driver_api()
        first, last = self._events
        call(api.cuEventRecord, first, self._stream)
        work(self.handle)
        call(api.cuEventRecord, last, self._stream)
        call(api.cuEventSynchronize, last)
        return float(call(api.cuEventElapsedTime, first, last)) * 1e3

    @contextlib.contextmanager
    def graph(self, work: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
        """Capture work that is put on the stream; gives what launches it as one graph on a stream."""
        api = driver_api()
        executable = api.CUgraphExec(captured(work, self.handle))
        try:
            yield lambda stream: _launch(api, executable, stream)
        finally:
            self.synchronise()
            call(api.cuGraphExecDestroy, executable)

    def fork(self, work: Callable[[int], None], stream: int) -> None:
        """Put work on this stream behind what is on `stream` now, captured where that is captured; see `join`."""
        api = driver_api()
        there = api.CUstream(stream)
        call(api.cuEventRecord, self._events[0], there)
        call(api.cuStreamWaitEvent, self._stream, self._events[0], 0)
        work(self.handle)

    def join(self, stream: int) -> None:
        """Let `stream` wait for what is on this one."""
        api = driver_api()
        call(api.cuEventRecord, self._events[1], self._stream)
        call(api.cuStreamWaitEvent, api.CUstream(stream), self._events[1], 0)

    def close(self) -> None:
        """Give the events back, and the stream if it is ours."""
        api = driver_api()
        for event in self._events:
            call(api.cuEventDestroy, event)
        if self._owned:
            call(api.cuStreamDestroy, self._stream)


def _launch(api: Any, executable: Any, stream: int) -> None:
    call(api.cuGraphLaunch, executable, stream)
