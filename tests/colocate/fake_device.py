"""Streams and events on a host: work takes given times, a persistent kernel runs until it is told to stop."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.device.cuda.dispatch import Sender


@dataclass
class Op:
    kind: str
    value: Any = None
    since: int = -1
    """When it began; -1: it has not."""


@dataclass
class FakeDevice:
    """Times are nanoseconds of one clock, which goes on by `look_ns` at each look and where somebody sleeps."""

    look_ns: int = 500
    stop_ns: int = 8_000
    """From the word to the end of a persistent kernel."""
    blocks_ns: int = 1_000
    """A persistent kernel ends a block in so much time."""
    slow: float = 1.0
    """How much longer queries take while a persistent kernel runs."""
    now: int = 0
    queues: dict[int, deque[Op]] = field(default_factory=lambda: defaultdict(deque))
    at: dict[int, int] = field(default_factory=dict)
    """Event -> when it happened."""
    told: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Event -> how often it was recorded."""
    seen: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Event -> how often it has happened."""
    stop: int = 0
    stopped_at: int = 0
    resident: int = 0
    inside: int = 0
    """Queries under way whose kernels draw blocks, unless the job is told to stop."""
    blocks: float = 0.0
    log: list[tuple[int, str, Any]] = field(default_factory=list)
    """What was done when."""
    events: int = 0
    free: list[int] = field(default_factory=list)
    """Events that were given back."""
    put: dict[int, int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    noticed: dict[int, int] = field(default_factory=dict)
    """Event -> when somebody saw that it had happened."""
    sender: Sender = field(default_factory=Sender)

    # -- Queue

    def now_ns(self) -> int:
        self.run(self.now + self.look_ns)
        return self.now

    def event(self) -> int:
        if self.free:
            return self.free.pop()
        self.events += 1
        return self.events

    def give_back(self, events: Sequence[int]) -> None:
        assert not set(events) & set(self.free), "given back twice"
        self.free += events

    def record(self, event: int, stream: int) -> None:
        self.told[event] += 1
        self.put[event] = self.now
        self.queues[stream].append(Op("record", event))

    def mark(self, event: int, stream: int, *, since: int = -1) -> None:
        self.since[event] = since
        self.record(event, stream)

    def happened(self, event: int) -> bool:
        self.run(self.now + self.look_ns)
        self.noticed[event] = self.now
        return self.seen[event] == self.told[event]

    def put_ns(self, event: int) -> int:
        return self.put[event]

    def seen_ns(self, event: int) -> int:
        return self.noticed[event]

    def apart_ns(self, event: int) -> int:
        return self.at[event] - self.at[self.since[event]]

    def send(self, times_ns: Sequence[int], begin_ns: int) -> None:
        self.sender.send(times_ns, begin_ns)

    def sent(self) -> int:
        self.run(self.now + self.look_ns)
        return self.sender.sent(self.now)

    def sent_ns(self, number: int) -> int:
        return self.sender.sent_ns(number)

    def clock_mhz(self) -> int:
        return 1980

    def launch(self, graph: int, stream: int) -> None:
        raise AssertionError("work of tests is put on queues by themselves")

    def write(self, address: int, value: int, stream: int) -> None:
        raise AssertionError("a job of tests has no words")

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        raise AssertionError("a job of tests has no copies")

    def fill(self, address: int, place: int, size: int, stream: int) -> None:
        raise AssertionError("a job of tests has no copies")

    def drain(self) -> None:
        self.run(self.now)

    def finish(self, stream: int) -> None:
        while self.queues[stream]:
            self.run(self.now + self.look_ns)

    def wait(self, stream: int, event: int) -> None:
        self.queues[stream].append(Op("wait", (event, self.told[event])))

    def sleep(self, ns: int) -> None:
        self.run(self.now + ns)

    # -- what is put on streams

    def work(self, stream: int, ns: int, what: str = "work") -> None:
        self.queues[stream].append(Op(what, ns))

    def call(self, stream: int, what: str, value: Any = None) -> None:
        self.queues[stream].append(Op("call", (what, value)))

    def do(self, stream: int, what: Callable[[], object]) -> None:
        self.queues[stream].append(Op("do", what))

    def persistent(self, stream: int) -> None:
        self.queues[stream].append(Op("persistent"))

    # -- time

    def run(self, until: int) -> None:
        """Let the device work until then."""
        while True:
            while any(self._step(q) for q in self.queues.values() if q):
                pass
            ends = [self._end(q[0]) for q in self.queues.values() if q and q[0].since >= 0]
            later = min([until, *(e for e in ends if e > self.now)])
            if later == self.now or later > until:
                return
            self.blocks += (later - self.now) / self.blocks_ns * (self.resident + self.inside * (not self.stop))
            self.now = later
            if later == until:
                while any(self._step(q) for q in self.queues.values() if q):
                    pass
                return

    def _end(self, op: Op) -> int:
        if op.kind == "persistent":
            return max(op.since, self.stopped_at) + self.stop_ns if self.stop else 1 << 62
        return op.since + round(op.value)

    def _step(self, queue: deque[Op]) -> bool:
        """The first on a stream, if it can go on now."""
        op = queue[0]
        if op.kind == "record":
            self.seen[op.value] += 1
            self.at[op.value] = self.now
        elif op.kind == "wait":
            event, told = op.value
            if self.seen[event] < told:
                return False
        elif op.kind == "do":
            op.value()
        elif op.kind == "call":
            what, value = op.value
            self.log.append((self.now, what, value))
            if what == "arm":
                self.stop = 0
                assert not self.inside, "armed while kernels of a query draw"
            elif what == "stop":
                self.stop, self.stopped_at = 1, self.now
        elif op.since < 0:
            op.since = self.now
            self.log.append((self.now, op.kind, "begin"))
            if op.kind == "persistent":
                assert not self.inside, "the job on the GPU beside roles that draw its blocks"
                self.resident += 1
            elif op.kind == "drawing":
                assert not self.resident, "roles that draw beside the job on the GPU"
                self.inside += 1
            elif op.kind == "query" and self.resident:
                op.value *= self.slow
            return True
        else:
            if self._end(op) > self.now:
                return False
            self.log.append((self.now, op.kind, "end"))
            if op.kind == "persistent":
                self.resident -= 1
            elif op.kind == "drawing":
                self.inside -= 1
        queue.popleft()
        return True


@dataclass
class RealTimeDevice(FakeDevice):
    """The same by the host's clock: beside processes, which have no other."""

    def __post_init__(self) -> None:
        self.now = time.perf_counter_ns()

    def now_ns(self) -> int:
        self.run(max(self.now, time.perf_counter_ns()))
        return self.now

    def happened(self, event: int) -> bool:
        self.noticed[event] = self.now_ns()
        return self.seen[event] == self.told[event]

    def sent(self) -> int:
        return self.sender.sent(self.now_ns())

    def sleep(self, ns: int) -> None:
        time.sleep(ns / 1e9)
        self.now_ns()


@dataclass
class FakeJob:
    device: FakeDevice
    block_us: float = 1.0
    kernel_us: float = 300.0
    done: bool = False

    def arm(self, stream: int, *, duty: int, period_ns: int) -> None:
        self.device.call(stream, "arm", (duty, period_ns))

    def stop(self, stream: int) -> None:
        self.device.call(stream, "stop")

    def plain(self, stream: int, us: float) -> float:
        passes = max(1, round(us / self.kernel_us))
        for _ in range(passes):
            self.device.work(stream, round(self.kernel_us * 1e3), "plain")
        return passes * self.kernel_us

    def blocks(self) -> int:
        assert self.device.resident == self.device.inside == 0, "something still draws"
        return round(self.device.blocks)

    def is_done(self) -> bool:
        return self.done


def query(device: FakeDevice, stream: int, us: float, *, draws: bool = False) -> Callable[[], None]:
    """`draws`: roles in its kernels draw the job's blocks."""
    return lambda: device.work(stream, round(us * 1e3), "drawing" if draws else "query")
