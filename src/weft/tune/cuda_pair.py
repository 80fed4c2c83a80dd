"""An LC kernel and a best-effort job on one GPU: the same bits in every form, then times beside their peers.

Forms of a job: its kernels by themselves, a persistent co-runner, roles in the CTAs of the LC kernel, and all splits of
its blocks between these two. A form is right where LC's and BE's memory hold bit by bit what each leaves by itself, and
the work counter says that every block ran once. Results with atomics of floats have no order of sums: where a job says
so, its memory is compared by the caller.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weft.generate.bind import Prepared
from weft.kernels.colocation import BYTES, WorkCounter

LIMIT_OFFSET = 8
"""Of `limit` in a work counter."""
SPLITS = (1, 131, 132, 133)
"""Limits besides nothing and everything: around the multiprocessors of a GPU."""


class Machine(Protocol):
    """A GPU with one stream for whoever measures."""

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""

    def run(self, work: Sequence[Prepared]) -> None:
        """One launch after the other, until all have ended; what fails is raised here."""

    def samples_us(self, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
        """Microseconds of each work, a graph of its own, in interleaved rounds; a list per work."""

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy on the device, in the order of a stream."""

    def beside(self, first: Sequence[Prepared], second: Sequence[Prepared], stream: int) -> None:
        """`first` on a stream of the highest priority and `second` on one of the lowest; `stream` waits for both."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory, and what it holds before a run that is compared."""

    address: int
    before: bytes


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its own kernels, bound, and its memory."""

    alone: tuple[Prepared, ...]
    memory: tuple[Memory, ...]
    """All that a kernel reads or writes, with zones around it that none may."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Everything bound to addresses."""

    lc: Side
    be: Side
    fused: Prepared
    drain: Prepared
    """The job as a persistent kernel that ends when the limit is reached."""
    counter: int
    """Device memory of the work counter."""
    fresh: int
    """Device memory of a counter at the begin of the job, from which `counter` is copied in a graph."""
    stages: tuple[int, ...]
    """Blocks of each stage."""
    exact: bool = True
    """Whether BE's results have one value, bit by bit."""

    @property
    def total(self) -> int:
        """Blocks of the job."""
        return sum(self.stages)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Medians in microseconds of `launches` LC kernels with one run of the job."""

    launches: int
    lc_us: float
    """LC alone, all launches."""
    be_us: float
    """The job alone, as its own kernels."""
    serial_us: float
    """One after the other in one graph."""
    streams_us: float
    """Two streams of different priority in one graph."""
    fused_us: float
    """Fused launches, then what is left of the job."""
    inside_us: float
    """The fused launches without what is left."""
    inside_blocks: int
    """Blocks of the job that ran in the fused launches, in the run that was looked at."""
    drained: bool
    """Whether the counter said that the whole job had run, after the last round."""

    @property
    def ratio(self) -> float:
        """Time of the best peer over that of the fused form; above 1: it won."""
        return min(self.serial_us, self.streams_us) / self.fused_us

    @property
    def slowdown(self) -> float:
        """What LC pays: time of the fused launches over those alone, less 1."""
        return self.inside_us / self.lc_us - 1.0


@dataclass(slots=True)
class _Kept:
    lc: list[bytes] = field(default_factory=list)
    be: list[bytes] = field(default_factory=list)


def verify(machine: Machine, pair: Pair, limits: Sequence[int] = SPLITS) -> str:
    """What is wrong with the fused or the persistent form; empty: nothing."""
    _restore(machine, pair)
    machine.run([*pair.lc.alone, *pair.be.alone])
    want = _Kept(_contents(machine, pair.lc), _contents(machine, pair.be))
    untouched = _Kept([m.before for m in pair.lc.memory], [m.before for m in pair.be.memory])
    if want.lc == untouched.lc or (pair.total and want.be == untouched.be):
        return "a kernel by itself leaves its memory as it was: there is nothing to compare"
    every = pair.total
    if wrong := _form(machine, pair, "persistent", pair.drain, every, _Kept(untouched.lc, want.be)):
        return wrong
    if wrong := _form(machine, pair, "fused without blocks", pair.fused, 0, _Kept(want.lc, untouched.be)):
        return wrong
    stopped = replace(WorkCounter.start(pair.stages, every), stop=1)
    _restore(machine, pair, stopped)
    machine.run([pair.fused])
    if wrong := _compared(machine, pair, "fused and stopped", _Kept(want.lc, untouched.be)):
        return wrong
    if (ran := _counter(machine, pair).finished) != 0:
        return f"fused and stopped: {ran} blocks ran"
    for limit in (*sorted({n for n in limits if 0 < n < every}), every):
        if wrong := _split(machine, pair, limit, want):
            return wrong
    return ""


def _split(machine: Machine, pair: Pair, limit: int, want: _Kept) -> str:
    """Blocks below `limit` may run in the LC kernel, the others and what it left by themselves."""
    name = f"fused with {limit} of {pair.total} blocks"
    _restore(machine, pair, WorkCounter.start(pair.stages, limit))
    machine.run([pair.fused])
    inside = _counter(machine, pair).finished
    if inside > limit:
        return f"{name}: {inside} blocks ran"
    if _contents(machine, pair.lc) != want.lc:
        return f"{name}: the latency-critical results differ"
    machine.write(pair.counter + LIMIT_OFFSET, pair.total.to_bytes(4, "little"))
    machine.run([pair.drain])
    return _compared(machine, pair, name, want) or _uncounted(machine, pair, name, pair.total)


def _form(machine: Machine, pair: Pair, name: str, work: Prepared, limit: int, want: _Kept) -> str:
    """One kernel alone runs all blocks below the limit."""
    _restore(machine, pair, WorkCounter.start(pair.stages, limit))
    machine.run([work])
    return _compared(machine, pair, name, want) or _uncounted(machine, pair, name, limit)


def _uncounted(machine: Machine, pair: Pair, name: str, wanted: int) -> str:
    found = _counter(machine, pair).finished
    return "" if found == wanted else f"{name}: the counter has {found} of {wanted} blocks"


def _compared(machine: Machine, pair: Pair, name: str, want: _Kept) -> str:
    for role, side, wanted in (("latency-critical", pair.lc, want.lc), ("best-effort", pair.be, want.be)):
        if role == "best-effort" and not pair.exact:
            continue
        for number, (found, exact) in enumerate(zip(_contents(machine, side), wanted, strict=True)):
            if found != exact:
                at = next(i for i, (a, b) in enumerate(zip(found, exact, strict=True)) if a != b)
                return f"{name}: {role} memory {number} differs from byte {at} of {len(exact)} on"
    return ""


def _contents(machine: Machine, side: Side) -> list[bytes]:
    return [machine.read(m.address, len(m.before)) for m in side.memory]


def _counter(machine: Machine, pair: Pair) -> WorkCounter:
    return WorkCounter.unpack(machine.read(pair.counter, BYTES))


def _restore(machine: Machine, pair: Pair, counter: WorkCounter | None = None) -> None:
    for m in (*pair.lc.memory, *pair.be.memory):
        machine.write(m.address, m.before)
    machine.write(pair.counter, (counter or WorkCounter()).pack())


def launches_for(lc_us: float, be_us: float, fractions: Sequence[float], most: int = 256) -> Iterator[int]:
    """Numbers of LC launches beside which one run of the job is such a fraction of LC's time; each number once."""
    found = {max(1, min(most, round(be_us / (lc_us * f)))) for f in fractions}
    yield from sorted(found)


def measure(machine: Machine, pair: Pair, launches: int, rounds: int) -> PairTimes:
    """Times of so many LC launches and one run of the job, in every form, in interleaved rounds."""
    machine.write(pair.fresh, WorkCounter.start(pair.stages, pair.total).pack())

    def many(work: Sequence[Prepared], n: int = 1) -> Callable[[int], None]:
        def put(stream: int) -> None:
            for _ in range(n):
                for one in work:
                    one(stream)

        return put

    def begun(work: Callable[[int], None]) -> Callable[[int], None]:
        def put(stream: int) -> None:
            machine.copy(pair.counter, pair.fresh, BYTES, stream)
            work(stream)

        return put

    lc, be, inside = many(pair.lc.alone, launches), many(pair.be.alone), many([pair.fused], launches)
    serial = many([lc, be])
    streams: Callable[[int], None] = lambda stream: machine.beside([lc], [be], stream)  # noqa: E731
    fused = many([inside, pair.drain])
    works = [lc, be, serial, streams, begun(inside), begun(fused)]
    found = [statistics.median(x) for x in machine.samples_us(works, rounds)]
    drained = _counter(machine, pair).finished == pair.total  # the fused form comes last in every round
    machine.write(pair.counter, WorkCounter.start(pair.stages, pair.total).pack())
    machine.run([inside])
    ran = _counter(machine, pair).finished
    lc_us, be_us, serial_us, streams_us, inside_us, fused_us = found
    return PairTimes(launches, lc_us, be_us, serial_us, streams_us, fused_us, inside_us, ran, drained)
