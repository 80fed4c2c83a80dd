"""Work put on streams in the order in which it was asked for: by a thread of C++, or by the caller itself.

    queue = dispatcher(held)
    begin, end = queue.event(), queue.event()
    queue.record(begin, stream); queue.launch(graph, stream); queue.mark(end, stream, since=begin)
    while not queue.happened(end): ...
    queue.seen_ns(end), queue.apart_ns(end)

Both say when events happened, stamp arrivals, and know the clock of the multiprocessors. A call of the driver takes
microseconds, and the interpreter as long around it: the thread takes both off the caller, and sees the end of a query
while the caller still decides about the one before. Where there is no compiler it is the caller. One thread calls a
queue.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, final

from weft.device.cuda import nvml
from weft.device.cuda.api import call, cuda_error, driver_api
from weft.device.toolchain import HostCompiler, find_compiler
from weft.errors import DeviceError, ToolchainError

DRIVER = "libcuda.so.1"
SPIN_NS = 1_000_000_000
"""The thread looks without a rest for so long behind the last thing that happened."""
CLOCK_S = 2.0
"""The clock of the multiprocessors is read so often: on an H200 that takes 5 ms, and launches were seen to wait."""
EVENTS = 16384
"""Of a dispatcher at a time, at most; as in `dispatcher.cpp`."""
_SOURCE = Path(__file__).with_name("dispatcher.cpp")
_FAILED, _RESULT, _DONE, _SENT, _CLOCK, _FIRST = range(6)
"""Words of `Status`, and the first of the events."""
_PUT, _SEEN, _SEEN_NS, _APART, _OF_EVENT = range(5)
_RECORD, _MARK, _WAIT, _GRAPH, _WRITE, _COPY, _FILL = range(7)
_CALLS = (
    "cuEventRecord", "cuEventRecord", "cuStreamWaitEvent", "cuGraphLaunch", "cuStreamWriteValue32", "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
)  # fmt: skip
_NOT_READY = 600


class Queue(Protocol):
    """What puts work on streams. Handles of streams and executable graphs are plain integers, and so are events."""

    def now_ns(self) -> int:
        """The host's clock, which does not go back: `time.perf_counter_ns`."""
        ...

    def sleep(self, ns: int) -> None:
        """About so long."""
        ...

    def event(self) -> int:
        """A new one."""
        ...

    def give_back(self, events: Sequence[int]) -> None:
        """Nobody asks for these any more: `event` gives them out again."""
        ...

    def record(self, event: int, stream: int) -> None:
        """It happens when all before it on the stream has."""
        ...

    def mark(self, event: int, stream: int, *, since: int = -1) -> None:
        """The same, and it is looked at until it has happened. `since`: one before it, from which time is measured."""
        ...

    def happened(self, event: int) -> bool:
        """Whether it has, of one that was marked. What failed before it, or could not be put, is raised [W302]."""
        ...

    def put_ns(self, event: int) -> int:
        """When it was put on its stream, by the host's clock, of one that has happened."""
        ...

    def seen_ns(self, event: int) -> int:
        """When it was seen to have happened, likewise."""
        ...

    def apart_ns(self, event: int) -> int:
        """Since the event that it was marked with, by the GPU's clock."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What follows on the stream waits for the event."""
        ...

    def launch(self, graph: int, stream: int) -> None:
        """A `CUgraphExec`."""
        ...

    def write(self, address: int, value: int, stream: int) -> None:
        """A word of 32 bits into device memory, without a multiprocessor."""
        ...

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        """Device memory into pinned memory of the host."""
        ...

    def fill(self, address: int, place: int, size: int, stream: int) -> None:
        """Pinned memory of the host into device memory."""
        ...

    def drain(self) -> None:
        """Until all that was asked for is on its stream; what failed is raised [W302]."""
        ...

    def finish(self, stream: int) -> None:
        """Until all that is on a stream has ended, too."""
        ...

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """Arrivals so long after `begin_ns`, rising; those of before are forgotten."""
        ...

    def sent(self) -> int:
        """Arrivals until now."""
        ...

    def sent_ns(self, number: int) -> int:
        """When one that was sent was."""
        ...

    def clock_mhz(self) -> int:
        """Of the multiprocessors, as it was seen last; 0: not known."""
        ...


@final
class Sender:
    """Arrivals that come when somebody looks."""

    def __init__(self) -> None:
        self._at: Sequence[int] = ()
        self._begin = 0
        self._seen: list[int] = []

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """See `Queue`."""
        self._at, self._begin, self._seen = times_ns, begin_ns, []

    def sent(self, now_ns: int) -> int:
        """Until now."""
        seen, at = self._seen, self._at
        while len(seen) < len(at) and self._begin + at[len(seen)] <= now_ns:
            seen.append(now_ns)
        return len(seen)

    def sent_ns(self, number: int) -> int:
        """See `Queue`."""
        return self._seen[number]


def dispatcher(held: ExitStack, *, uuid: str = "", spin_ns: int = SPIN_NS) -> Queue:
    """A queue of the current context: a thread's, or the caller's own where no C++ compiler is there.

    `uuid`: of the GPU, whose clock is watched; empty: it is not. `spin_ns`: see `Dispatcher`.

    Raises:
        DeviceError: there is no GPU [W301, W302].
    """
    made: Dispatcher | Direct
    path = compiled()
    if path is None:
        made = Direct(held)
    else:
        made = Dispatcher(path, int(call(driver_api().cuCtxGetCurrent)), held, spin_ns=spin_ns)
    if uuid:
        made.watch_clock(uuid)
    return made


def compiled() -> Path | None:
    """`dispatcher.cpp` as a shared object; None: there is no compiler, or it lacks the system's headers."""
    compiler = find_compiler()
    if not isinstance(compiler, HostCompiler):
        return None
    try:
        return compiler.compile(_SOURCE.read_text(encoding="utf-8")).path
    except ToolchainError:
        return None


@final
class Dispatcher:
    """A thread of C++ does it; see `dispatcher.cpp`."""

    def __init__(
        self, library: Path, context: int, held: ExitStack, *, driver: str = DRIVER, spin_ns: int = SPIN_NS
    ) -> None:
        """Begin the thread; `held` ends it, and gives the events back.

        Args:
            library: `dispatcher.cpp`, compiled.
            context: handle of the context that all work is in; it is the caller's current one.
            held: behind what is made later, such as streams.
            driver: file of the CUDA driver.
            spin_ns: it looks without a rest for so long behind the last thing that happened.

        Raises:
            DeviceError: the driver lacks a function, or there is no thread [W301].
        """
        memory = (ctypes.c_int64 * (_FIRST + EVENTS * _OF_EVENT))()
        self._words = memoryview(memory).cast("B").cast("q")
        found = ctypes.CDLL(str(library))
        found.weft_dispatcher.restype = ctypes.c_void_p
        found.weft_dispatcher.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        made = found.weft_dispatcher(driver.encode(), context, spin_ns, ctypes.addressof(memory))
        if not made:
            raise DeviceError(problem=f"{driver} lacks a function, or no thread could be begun")
        self._own: ctypes.c_void_p | None = ctypes.c_void_p(made)
        self._library, self._events = found, 0
        self._free: list[int] = []
        """Events that were given back."""
        held.callback(self._close)
        found.weft_event.argtypes = [ctypes.c_void_p, ctypes.c_int]
        found.weft_send.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64]
        found.weft_clock.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
        found.weft_clock.restype = ctypes.c_bool
        for f in (found.weft_drain, found.weft_close):
            f.restype = None
        found.weft_drain.argtypes, found.weft_close.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int]
        quick = ctypes.PyDLL(str(library))  # too short to let another thread of the interpreter run
        quick.weft_push.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_uint64] * 4]
        quick.weft_push.restype = quick.weft_acquire.restype = None
        self._push: Callable[..., None] = quick.weft_push
        self._acquire: Callable[[], None] = quick.weft_acquire
        self._told = [0] * EVENTS
        self._sent: Any = (ctypes.c_int64 * 0)()
        self._times: Any = self._sent

    def watch_clock(self, uuid: str, library: str = nvml.LIBRARY) -> None:
        """Let `clock_mhz` know the clock of the GPU with this UUID, if the driver says it."""
        name = nvml.uuid_text(uuid)
        self._library.weft_clock(self._own, library.encode(), name.encode())

    def now_ns(self) -> int:
        """See `Queue`."""
        return time.perf_counter_ns()

    def sleep(self, ns: int) -> None:
        """See `Queue`."""
        time.sleep(ns / 1e9)

    def event(self) -> int:
        """See `Queue`.

        Raises:
            CudaError: the driver has none [W302].
            DeviceError: there are too many [W301].
        """
        if self._free:
            return self._free.pop()
        status = self._library.weft_event(self._own, self._events)
        if status < 0:
            raise DeviceError(problem=f"over {EVENTS} events are waited for")
        if status:
            raise cuda_error("cuEventCreate", status)
        self._events += 1
        return self._events - 1

    def give_back(self, events: Sequence[int]) -> None:
        """See `Queue`."""
        self._free += events

    def record(self, event: int, stream: int) -> None:
        """See `Queue`."""
        self._told[event] += 1
        self._push(self._own, _RECORD, event, stream, 0, 0)

    def mark(self, event: int, stream: int, *, since: int = -1) -> None:
        """See `Queue`."""
        self._told[event] += 1
        self._push(self._own, _MARK, event, stream, since & (1 << 64) - 1, 0)

    def happened(self, event: int) -> bool:
        """See `Queue`."""
        words = self._words
        if words[_FIRST + _OF_EVENT * event + _SEEN] != self._told[event]:
            if words[_FAILED]:
                self._raise()
            return False
        self._acquire()
        if words[_FAILED]:
            self._raise()
        return True

    def put_ns(self, event: int) -> int:
        """See `Queue`."""
        return self._words[_FIRST + _OF_EVENT * event + _PUT]

    def seen_ns(self, event: int) -> int:
        """See `Queue`."""
        return self._words[_FIRST + _OF_EVENT * event + _SEEN_NS]

    def apart_ns(self, event: int) -> int:
        """See `Queue`."""
        return self._words[_FIRST + _OF_EVENT * event + _APART]

    def wait(self, stream: int, event: int) -> None:
        """See `Queue`."""
        self._push(self._own, _WAIT, stream, event, 0, 0)

    def launch(self, graph: int, stream: int) -> None:
        """See `Queue`."""
        self._push(self._own, _GRAPH, graph, stream, 0, 0)

    def write(self, address: int, value: int, stream: int) -> None:
        """See `Queue`."""
        self._push(self._own, _WRITE, stream, address, value, 0)

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        """See `Queue`."""
        self._push(self._own, _COPY, place, address, size, stream)

    def fill(self, address: int, place: int, size: int, stream: int) -> None:
        """See `Queue`."""
        self._push(self._own, _FILL, address, place, size, stream)

    def drain(self) -> None:
        """See `Queue`."""
        if self._own is None:  # all was carried out
            return
        self._library.weft_drain(self._own)
        self._acquire()
        if self._words[_FAILED]:
            self._raise()

    def finish(self, stream: int) -> None:
        """See `Queue`."""
        self.drain()
        api = driver_api()
        call(api.cuStreamSynchronize, api.CUstream(stream))

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """See `Queue`."""
        many = len(times_ns)
        kept = (ctypes.c_int64 * many)(*times_ns), (ctypes.c_int64 * many)()
        if status := self._library.weft_send(self._own, *map(ctypes.addressof, kept), many, begin_ns):
            raise DeviceError(problem=f"no thread could be begun: {status}")
        self._times, self._sent = kept  # those of before were in use until now

    def sent(self) -> int:
        """See `Queue`."""
        return self._words[_SENT]

    def sent_ns(self, number: int) -> int:
        """See `Queue`."""
        self._acquire()
        return int(self._sent[number])

    def clock_mhz(self) -> int:
        """See `Queue`."""
        return self._words[_CLOCK]

    def _raise(self) -> None:
        self._acquire()
        failed = self._words[_FAILED]
        raise cuda_error("cuEventQuery" if failed < 0 else _CALLS[failed - 1], self._words[_RESULT])

    def _close(self) -> None:
        own, self._own, self._push = self._own, None, _closed
        self._library.weft_close(own, self._events)


def _closed(*_command: object) -> None:
    raise DeviceError(problem="work was put on a stream after the end of what puts it there")


@final
class Direct:
    """The caller does it, call by call."""

    def __init__(self, held: ExitStack) -> None:
        """`held` gives the events back."""
        self._api, self._held = driver_api(), held
        self._events: list[Any] = []
        self._free: list[int] = []
        self._streams: dict[int, Any] = {}
        self._since: list[int] = []
        self._put: list[int] = []
        self._seen: list[int] = []
        self._sender = Sender()
        self._mhz = 0
        held.callback(self._close)

    def watch_clock(self, uuid: str, library: str = nvml.LIBRARY) -> None:
        """Let `clock_mhz` know the clock of the GPU with this UUID, if the driver says it; by a thread."""
        read, over = nvml.sm_clock_of(uuid, library), threading.Event()

        def look() -> None:
            while not over.wait(CLOCK_S):
                self._mhz = read()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        self._held.callback(thread.join)
        self._held.callback(over.set)

    def now_ns(self) -> int:
        """See `Queue`."""
        return time.perf_counter_ns()

    def sleep(self, ns: int) -> None:
        """See `Queue`."""
        time.sleep(ns / 1e9)

    def event(self) -> int:
        """See `Queue`."""
        if self._free:
            return self._free.pop()
        self._events.append(call(self._api.cuEventCreate, 0))
        for own, value in ((self._since, -1), (self._put, 0), (self._seen, 0)):
            own.append(value)
        return len(self._events) - 1

    def give_back(self, events: Sequence[int]) -> None:
        """See `Queue`."""
        self._free += events

    def record(self, event: int, stream: int) -> None:
        """See `Queue`."""
        self._put[event], self._seen[event] = time.perf_counter_ns(), 0
        call(self._api.cuEventRecord, self._events[event], self._of(stream))

    def mark(self, event: int, stream: int, *, since: int = -1) -> None:
        """See `Queue`."""
        self._since[event] = since
        self.record(event, stream)

    def happened(self, event: int) -> bool:
        """See `Queue`."""
        if self._seen[event]:
            return True
        (status,) = self._api.cuEventQuery(self._events[event])
        if int(status) == _NOT_READY:
            return False
        if int(status):
            raise cuda_error("cuEventQuery", int(status))
        self._seen[event] = time.perf_counter_ns()
        return True

    def put_ns(self, event: int) -> int:
        """See `Queue`."""
        return self._put[event]

    def seen_ns(self, event: int) -> int:
        """See `Queue`."""
        return self._seen[event]

    def apart_ns(self, event: int) -> int:
        """See `Queue`."""
        first = self._events[self._since[event]]
        return round(float(call(self._api.cuEventElapsedTime, first, self._events[event])) * 1e6)

    def wait(self, stream: int, event: int) -> None:
        """See `Queue`."""
        call(self._api.cuStreamWaitEvent, self._of(stream), self._events[event], 0)

    def launch(self, graph: int, stream: int) -> None:
        """See `Queue`."""
        call(self._api.cuGraphLaunch, self._api.CUgraphExec(graph), self._of(stream))

    def write(self, address: int, value: int, stream: int) -> None:
        """See `Queue`."""
        call(self._api.cuStreamWriteValue32, self._of(stream), address, value, 0)

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        """See `Queue`."""
        call(self._api.cuMemcpyDtoHAsync, place, address, size, self._of(stream))

    def fill(self, address: int, place: int, size: int, stream: int) -> None:
        """See `Queue`."""
        call(self._api.cuMemcpyHtoDAsync, address, place, size, self._of(stream))

    def drain(self) -> None:
        """See `Queue`."""

    def finish(self, stream: int) -> None:
        """See `Queue`."""
        call(self._api.cuStreamSynchronize, self._of(stream))

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        """See `Queue`."""
        self._sender.send(times_ns, begin_ns)

    def sent(self) -> int:
        """See `Queue`."""
        return self._sender.sent(time.perf_counter_ns())

    def sent_ns(self, number: int) -> int:
        """See `Queue`."""
        return self._sender.sent_ns(number)

    def clock_mhz(self) -> int:
        """See `Queue`."""
        return self._mhz

    def _of(self, stream: int) -> Any:
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = self._api.CUstream(stream)
        return found

    def _close(self) -> None:
        for event in self._events:
            call(self._api.cuEventDestroy, event)
        self._events.clear()
