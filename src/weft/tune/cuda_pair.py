"""An LC kernel and a best-effort job on one GPU: the same bits in every form, then times beside their peers.

Forms of a job: its kernels by themselves, a persistent co-runner, roles in the CTAs of the LC kernel, and all splits of
its blocks between these two. A form is right where LC's and BE's memory hold bit by bit what each leaves by itself, and
the work counter says that every block ran once. Results with atomics of floats have no order of sums: where a job says
so, its memory is compared by the caller.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from weft.generate.bind import Prepared
from weft.kernels.colocation import BYTES, WorkCounter

LEARNING = 4
"""Launches before a fused kernel is timed: kernels that draw in time take the clocks of LC and of a block."""
ENDLESS = (1 << 31) - 1
"""Blocks of a job that is not to end while fused kernels are timed."""
SPLITS = (1, 131, 132, 133)
"""Limits besides nothing and everything: around the multiprocessors of a GPU."""


class Machine(Protocol):
    """A GPU with one stream for whoever measures."""

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""

    def keep(self, memory: Memory) -> object:
        """A copy of what it holds."""

    def restore(self, memory: Memory, kept: object) -> None:
        """Copy back what was kept."""

    def differs(self, memory: Memory, kept: object) -> int:
        """The first byte in which it differs from what was kept; -1: none."""

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
    size: int
    """Bytes."""
    before: object
    """As `Machine.keep` gives it."""


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
    peers: Mapping[str, float]
    """`serial`: one after the other in one graph; `streams`: of different priority in one graph; and what else there
    is."""
    fused_us: float
    """Fused launches, then what is left of the job."""
    inside_us: float
    """The fused launches without what is left."""
    idle_us: float
    """The fused launches with nothing to draw: what the shape of the kernel costs."""
    inside_blocks: int
    """Blocks of the job that ran in the fused launches, in the run that was looked at."""
    drained: bool
    """Whether the counter said that the whole job had run, in a run that was looked at."""

    @property
    def ratio(self) -> float:
        """Time of the best peer over that of the fused form; above 1: it won."""
        return min(self.peers.values()) / self.fused_us

    @property
    def slowdown(self) -> float:
        """What LC pays: time of the fused launches over those alone, less 1."""
        return self.inside_us / self.lc_us - 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What memory holds after LC alone, and after the job alone."""

    lc: tuple[object, ...]
    be: tuple[object, ...]


def alone(machine: Machine, pair: Pair) -> Wanted | str:
    """Results of the two kernels by themselves; or why they are no proof."""
    _restore(machine, pair)
    machine.run([*pair.lc.alone, *pair.be.alone])
    for name, side in (("latency-critical", pair.lc), ("best-effort", pair.be)):
        idle = name == "best-effort" and pair.total == 0
        if not idle and all(machine.differs(m, m.before) < 0 for m in side.memory):
            return f"the {name} kernel by itself leaves its memory as it was: there is nothing to compare"
    return Wanted(_contents(machine, pair.lc), _contents(machine, pair.be))


def verify_drain(machine: Machine, pair: Pair, want: Wanted) -> str:
    """What is wrong with the persistent form of the job; empty: nothing."""
    before = tuple(m.before for m in pair.lc.memory)
    return _form(machine, pair, "persistent", pair.drain, pair.total, Wanted(before, want.be))


def verify(machine: Machine, pair: Pair, want: Wanted, limits: Sequence[int] = SPLITS) -> str:
    """What is wrong with the fused form; empty: nothing. Compared without blocks, stopped, at `limits` and with all."""
    before = tuple(m.before for m in pair.be.memory)
    every = pair.total
    if wrong := _form(machine, pair, "fused without blocks", pair.fused, 0, Wanted(want.lc, before)):
        return wrong
    stopped = replace(WorkCounter.start(pair.stages, every), stop=1)
    _restore(machine, pair, stopped)
    machine.run([pair.fused])
    if wrong := _compared(machine, pair, "fused and stopped", Wanted(want.lc, before)):
        return wrong
    if (ran := _counter(machine, pair).finished) != 0:
        return f"fused and stopped: {ran} blocks ran"
    for limit in (*sorted({n for n in limits if 0 < n < every}), every):
        if wrong := _split(machine, pair, limit, want):
            return wrong
    return ""


def _split(machine: Machine, pair: Pair, limit: int, want: Wanted) -> str:
    """Blocks below `limit` may run in the LC kernel, the others and what it left by themselves."""
    name = f"fused with {limit} of {pair.total} blocks"
    _restore(machine, pair, WorkCounter.start(pair.stages, limit))
    machine.run([pair.fused])
    inside = _counter(machine, pair).finished
    if inside > limit:
        return f"{name}: {inside} blocks ran"
    if any(machine.differs(m, kept) >= 0 for m, kept in zip(pair.lc.memory, want.lc, strict=True)):
        return f"{name}: the latency-critical results differ"
    machine.write(pair.counter + WorkCounter.offset("limit"), pair.total.to_bytes(4, "little"))
    machine.run([pair.drain])
    return _compared(machine, pair, name, want) or _uncounted(machine, pair, name, pair.total)


def _form(machine: Machine, pair: Pair, name: str, work: Prepared, limit: int, want: Wanted) -> str:
    """One kernel alone runs all blocks below the limit."""
    _restore(machine, pair, WorkCounter.start(pair.stages, limit))
    machine.run([work])
    return _compared(machine, pair, name, want) or _uncounted(machine, pair, name, limit)


def _uncounted(machine: Machine, pair: Pair, name: str, wanted: int) -> str:
    found = _counter(machine, pair).finished
    return "" if found == wanted else f"{name}: the counter has {found} of {wanted} blocks"


def _compared(machine: Machine, pair: Pair, name: str, want: Wanted) -> str:
    for role, side, wanted in (("latency-critical", pair.lc, want.lc), ("best-effort", pair.be, want.be)):
        if role == "best-effort" and not pair.exact:
            continue
        for number, (m, kept) in enumerate(zip(side.memory, wanted, strict=True)):
            if (at := machine.differs(m, kept)) >= 0:
                return f"{name}: {role} memory {number} differs from byte {at} of {m.size} on"
    return ""


def _contents(machine: Machine, side: Side) -> tuple[object, ...]:
    return tuple(machine.keep(m) for m in side.memory)


def _counter(machine: Machine, pair: Pair) -> WorkCounter:
    return WorkCounter.unpack(machine.read(pair.counter, BYTES))


def _restore(machine: Machine, pair: Pair, counter: WorkCounter | None = None) -> None:
    for m in (*pair.lc.memory, *pair.be.memory):
        machine.restore(m, m.before)
    machine.write(pair.counter, (counter or WorkCounter()).pack())


def many(work: Sequence[Callable[[int], None]], n: int = 1) -> Callable[[int], None]:
    """What puts all of it on a stream, one after the other, so many times."""

    def put(stream: int) -> None:
        for _ in range(n):
            for one in work:
                one(stream)

    return put


def _begun(machine: Machine, pair: Pair, work: Callable[[int], None]) -> Callable[[int], None]:
    """The work behind a copy of the counter as it is at the begin of the job."""

    def put(stream: int) -> None:
        machine.copy(pair.counter, pair.fresh, BYTES, stream)
        work(stream)

    return put


def _start(machine: Machine, pair: Pair) -> WorkCounter:
    """A counter at the begin of the job, with the clocks that kernels which draw in time have learnt of each other."""
    fresh = WorkCounter.start(pair.stages, pair.total)
    machine.write(pair.counter, fresh.pack())
    machine.run([pair.fused] * LEARNING)
    found = _counter(machine, pair)
    return replace(fresh, lc_clocks=found.lc_clocks, be_clocks=found.be_clocks)


@dataclass(frozen=True, slots=True)
class Rate:
    """How much of the job fused launches run."""

    inside_us: float
    """Of one launch, in the mean."""
    blocks: float
    """That run in one launch, in the mean."""


def rate(machine: Machine, pair: Pair, launches: int, rounds: int) -> Rate:
    """Fused launches in one graph, with the whole job to draw from."""
    machine.write(pair.fresh, _start(machine, pair).pack())
    (found,) = machine.samples_us([_begun(machine, pair, many([pair.fused], launches))], rounds)
    return Rate(statistics.median(found) / launches, _counter(machine, pair).finished / launches)


@dataclass(frozen=True, slots=True)
class Moment:
    """One launch, in the mean, of a fused kernel beside LC alone."""

    lc_us: float
    fused_us: float
    idle_us: float
    """With nothing to draw."""
    blocks: float
    """That run in one launch."""


def moment(machine: Machine, pair: Pair, launches: int, rounds: int) -> Moment:
    """So many launches in a graph, of a job without end."""
    machine.write(pair.fresh, WorkCounter.start(pair.stages, ENDLESS).pack())
    machine.write(pair.counter, WorkCounter.start(pair.stages, 0).pack())
    inside, lc = many([pair.fused], launches), many(pair.lc.alone, launches)
    (idle,) = machine.samples_us([inside], rounds)
    found = machine.samples_us([lc, _begun(machine, pair, inside)], rounds)
    machine.write(pair.counter, WorkCounter.start(pair.stages, ENDLESS).pack())
    machine.run([inside])
    blocks = _counter(machine, pair).finished
    lc_us, fused_us, idle_us = (statistics.median(x) / launches for x in (*found, idle))
    return Moment(lc_us, fused_us, idle_us, blocks / launches)


def launches_for(total: int, blocks: float, most: int = 256) -> int:
    """LC launches that run the whole job, at so many blocks in one; at most `most`."""
    return most if blocks * most <= total else max(1, math.ceil(total / blocks))


def forms(machine: Machine, pair: Pair, launches: int) -> dict[str, Callable[[int], None]]:
    """So many launches of LC alone, the job alone, and as many fused launches from the job's begin on."""
    machine.write(pair.fresh, _start(machine, pair).pack())
    inside = many([pair.fused], launches)
    return {"lc": many(pair.lc.alone, launches), "be": many(pair.be.alone), "fused": _begun(machine, pair, inside)}


def measure(
    machine: Machine,
    pair: Pair,
    launches: int,
    rounds: int,
    peers: Mapping[str, Callable[[int], None]] | None = None,
) -> PairTimes:
    """Times of so many LC launches and one run of the job, in every form, in interleaved rounds.

    `peers`: further forms that do both.
    """
    start = _start(machine, pair)
    machine.write(pair.fresh, start.pack())
    machine.write(pair.counter, WorkCounter.start(pair.stages, 0).pack())
    lc, be, inside = many(pair.lc.alone, launches), many(pair.be.alone), many([pair.fused], launches)
    streams: Callable[[int], None] = lambda stream: machine.beside([lc], [be], stream)  # noqa: E731
    others = {"serial": many([lc, be]), "streams": streams, **(peers or {})}
    fused = many([inside, pair.drain])
    (idle,) = machine.samples_us([inside], rounds)  # with a counter that lets nothing be drawn
    works = [_begun(machine, pair, inside), _begun(machine, pair, fused), lc, be, *others.values()]
    found = [statistics.median(x) for x in machine.samples_us(works, rounds)]
    machine.write(pair.counter, start.pack())
    machine.run([fused])
    drained = _counter(machine, pair).finished == pair.total
    machine.write(pair.counter, start.pack())
    machine.run([inside])
    ran = _counter(machine, pair).finished
    inside_us, fused_us, lc_us, be_us, *times = found
    by_name = dict(zip(others, times, strict=True))
    return PairTimes(launches, lc_us, be_us, by_name, fused_us, inside_us, statistics.median(idle), ran, drained)
