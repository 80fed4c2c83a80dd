"""Rounds of queries back to back, beside nothing and beside best-effort work in every way."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from benchmarks.co_runner.machine import LIMIT_S, CoRunner, Gpu, Launch, apart_us, same, timed, wait
from benchmarks.co_runner.rows import Sample, Way
from weft.runtime.cuda_executable import CudaExecutable

AHEAD_QUERIES, AHEAD_LAUNCHES = 3, 10
"""Queries, and launches of short blocks, that are on their streams at once."""


@final
class Served:
    """A plan whose graph was recorded on `stream`, which queries are put on."""

    def __init__(
        self,
        executable: CudaExecutable,
        stream: torch.cuda.Stream,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor] = (),
    ) -> None:
        """`wanted`: what the same plan gave elsewhere; none: what it gives now, alone."""
        self.executable, self.stream = executable, stream
        for static, given in zip(executable.static_inputs, inputs, strict=True):
            static.copy_(given)
        torch.cuda.synchronize()
        self.query()
        stream.synchronize()  # of a part of the GPU the device's own wait may know nothing
        self.wanted = list(wanted) or [x.clone() for x in executable.static_outputs]
        torch.cuda.synchronize()
        self.right()

    def query(self) -> None:
        """Put one on the stream."""
        with torch.cuda.stream(self.stream):
            self.executable.replay()

    def right(self) -> None:
        """ValueError: the last query's results are others than those alone."""
        self.stream.synchronize()
        if not same(self.executable.static_outputs, self.wanted):
            pairs = zip(self.executable.static_outputs, self.wanted, strict=True)
            off = max(float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs)
            raise ValueError(f"the model's results are others than alone, by {off:.3g} of the largest")


@dataclass(slots=True)
class Queries:
    """Events at the ends of queries."""

    served: Served
    ends: list[torch.cuda.Event]

    @staticmethod
    def begun(served: Served) -> Queries:
        """The first event."""
        first = timed()
        first.record(served.stream)
        return Queries(served, [first])

    def one(self) -> None:
        """A further query."""
        self.served.executable.replay()
        self.mark()

    def mark(self) -> None:
        """What was put on the stream since the last mark is a query."""
        self.ends.append(timed())
        self.ends[-1].record(self.served.stream)

    def sample(self, work: float) -> Sample:
        """When all have ended."""
        wait(self.ends[-1])
        us = [apart_us(a, b) for a, b in itertools.pairwise(self.ends)]
        return Sample(us, apart_us(self.ends[0], self.ends[-1]), work)


def alone(served: Served, count: int) -> Sample:
    """Beside nothing."""
    with torch.cuda.stream(served.stream):
        queries = Queries.begun(served)
        for _ in range(count):
            queries.one()
    found = queries.sample(0.0)
    served.right()
    return found


def with_co_runner(
    gpu: Gpu, served: Served, work: CoRunner, way: Way, count: int, stream: torch.cuda.Stream | None = None
) -> Sample:
    """Beside a persistent kernel, which stops behind the last query. `stream`: the co-runner's, in place of the lowest.

    Raises:
        TimeoutError: a query waits for the co-runner.
        ValueError: wrong results, or a block that was lost or ran twice.
    """
    ended = gpu.begin(work, way, stream)
    try:
        with torch.cuda.stream(served.stream):
            gpu.snapshot(0, served.stream)
            queries = Queries.begun(served)
            for _ in range(count):
                queries.one()
            gpu.snapshot(1, served.stream)
            gpu.stop(served.stream)
        found = queries.sample(0.0)
    except TimeoutError:
        gpu.stop()
        gpu.ended(ended)
        raise TimeoutError("a query waited until the co-runner was stopped") from None
    gpu.ended(ended)
    found.work = gpu.between() * float(work.unit.work)
    served.right()
    return found


def with_short_blocks(gpu: Gpu, served: Served, launch: Launch, count: int) -> Sample:
    """Beside plain kernels of short blocks on the stream of lowest priority; both streams always have work."""
    put: list[torch.cuda.Event] = []
    until = time.monotonic() + LIMIT_S

    def more() -> None:
        launch.launch(gpu.low.cuda_stream)
        put.append(timed())
        put[-1].record(gpu.low)

    torch.cuda.synchronize()
    for _ in range(AHEAD_LAUNCHES):
        more()
    with torch.cuda.stream(served.stream):
        queries = Queries.begun(served)
        answered = ended = 0
        while answered < count:
            while answered < len(queries.ends) - 1 and queries.ends[answered + 1].query():
                answered += 1
            while ended < len(put) and put[ended].query():
                ended += 1
            if len(queries.ends) <= count and len(queries.ends) - 1 - answered < AHEAD_QUERIES:
                queries.one()
            if len(put) - ended < AHEAD_LAUNCHES:
                more()
            if time.monotonic() > until:
                raise TimeoutError(f"{answered} of {count} queries after {LIMIT_S:g} s")
    found = queries.sample(0.0)
    wait(put[-1])
    inside = sum(apart_us(queries.ends[0], x) > 0 and apart_us(x, queries.ends[-1]) >= 0 for x in put)
    found.work = float(inside * launch.work)
    served.right()
    return found


def in_turns(served: Served, launch: Launch, count: int, together: int) -> Sample:
    """On one stream: so many queries, then one launch of best-effort work, which the next query waits for."""
    with torch.cuda.stream(served.stream):
        queries = Queries.begun(served)
        launches = 0
        for k in range(count):
            if k and k % together == 0:
                launch.launch(served.stream.cuda_stream)
                launches += 1
            queries.one()
    found = queries.sample(float(launches * launch.work))
    served.right()
    return found


def quietly(work: Callable[[], Sample], gpu: Gpu) -> Sample:
    """A round without garbage collection in it, with clock and power."""
    gc.disable()
    try:
        with gpu.meter.sampling() as seen:
            found = work()
    finally:
        gc.enable()
    found.mhz, found.watts = seen.mhz, seen.watts
    return found
