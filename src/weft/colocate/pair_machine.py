"""The GPU of the current context as what measures pairs (`weft.tune.cuda_pair.Machine`), with memory of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import cast, final

import numpy as np

from weft.colocate.contents import contents
from weft.colocate.side import Buffer
from weft.device.cuda import streams
from weft.device.cuda.partition import Part, partitioned
from weft.device.cuda.streams import Stream, device_memory
from weft.generate.bind import Prepared
from weft.ir.declined import Declined
from weft.tune.cuda_pair import Memory, many

GUARD = bytes(range(1, 256)) + b"\0"
"""In front of each buffer and behind it."""
PARTS = (64, 96, 112, 120)
"""Multiprocessors of LC in the peer of two parts, where the GPU can be divided so."""
PEER_TIMES = 5
"""Rounds in which the sizes of two parts are compared."""


class ThreeStreams:
    """What a machine of pairs does with works, wherever their memory is (`weft.tune.cuda_pair.Machine`)."""

    def __init__(self, held: ExitStack) -> None:
        """`held` gives the streams back."""
        least, greatest = streams.priorities()
        self._main, self._high, self._low = Stream(), Stream(priority=greatest), Stream(priority=least)
        for s in (self._main, self._high, self._low):
            held.callback(s.close)

    def run(self, work: Sequence[Prepared]) -> None:
        """One after the other, until all have ended."""
        for one in work:
            one(self._main.handle)
        self._main.synchronise()

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """On the device, in the order of a stream."""
        streams.copy(to, source, size, stream)

    def beside(self, first: Sequence[Prepared], second: Sequence[Prepared], stream: int) -> None:
        """On streams of the highest and the lowest priority; `stream` waits for both."""
        forked(((self._high, first), (self._low, second)), stream)

    def samples_us(self, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
        """Graphs in interleaved rounds, two of which do not count: each round has them in a random order of its own."""
        return interleaved_us(self._main, works, rounds)


@final
class PairMachine(ThreeStreams):
    """Buffers between guards, and works as graphs in interleaved rounds."""

    def __init__(self, held: ExitStack) -> None:
        """`held` gives back all that this takes."""
        super().__init__(held)
        self._held = held
        self._close: dict[int, tuple[str, float]] = {}
        self._parts: list[tuple[str, Stream, Stream]] | None = None

    def room(self, size: int) -> int:
        """Address of so much memory."""
        return self._held.enter_context(device_memory(size))

    def place(self, buffer: Buffer) -> tuple[int, Memory]:
        """Address of a buffer, and its memory with the guards around it."""
        data = GUARD + contents(buffer) + GUARD
        base = self.room(len(data))
        if buffer.rtol > 0.0 and buffer.scalar in ("f4", "f8"):
            self._close[base] = (buffer.scalar, buffer.rtol)
        return base + len(GUARD), Memory(base, len(data), data)

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        streams.write(address, data)

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        return streams.read_back(address, size)

    def keep(self, memory: Memory) -> object:
        """A copy on the host."""
        return self.read(memory.address, memory.size)

    def restore(self, memory: Memory, kept: object) -> None:
        """Copy back."""
        self.write(memory.address, cast("bytes", kept))

    def differs(self, memory: Memory, kept: object) -> int:
        """The first byte that differs; of results that need only be near, that of one that is not."""
        got, want = self.read(memory.address, memory.size), cast("bytes", kept)
        at = first_difference(got, want)
        if at < 0 or memory.address not in self._close:
            return at
        return far(got, want, *self._close[memory.address])

    def parts(
        self, first: Sequence[Prepared], second: Sequence[Prepared], launches: int
    ) -> dict[str, Callable[[int], None]]:
        """The peer of two parts of the GPU, of the best size; empty where it cannot be divided."""
        if self._parts is None:
            self._parts = list(self._divided())
        works: dict[str, Callable[[int], None]] = {
            name: lambda stream, a=a, b=b: forked(((a, [*first] * launches), (b, second)), stream)  # type: ignore[misc]
            for name, a, b in self._parts
        }
        if not works:
            return {}
        times = self.samples_us(list(works.values()), PEER_TIMES)
        name = min(zip(times, works, strict=True), key=lambda x: sorted(x[0])[len(x[0]) // 2])[1]
        return {name: works[name]}

    def _divided(self) -> Iterator[tuple[str, Stream, Stream]]:
        for sms in PARTS:
            found = self._held.enter_context(partitioned(sms))
            if not isinstance(found, Declined):
                yield f"parts:{sms}", self._stream(found.first), self._stream(found.rest)

    def _stream(self, part: Part) -> Stream:
        found = Stream(part.stream())
        self._held.callback(found.close)
        return found


def forked(sides: Sequence[tuple[Stream, Sequence[Prepared]]], stream: int) -> None:
    """Each side on its stream, beside the others; `stream` waits for all."""
    for side, work in sides:
        side.fork(many(work), stream)
    for side, _ in sides:
        side.join(stream)


def interleaved_us(main: Stream, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
    """Microseconds of graphs in rounds, two of which do not count: each has them in a random order of its own."""
    found: list[list[float]] = [[] for _ in works]
    chance = random.Random(len(works))
    with ExitStack() as held:
        graphs = [held.enter_context(main.graph(work)) for work in works]
        for number in range(rounds + 2):
            for k in chance.sample(range(len(works)), len(works)):
                us = main.time_us(graphs[k])
                if number >= 2:
                    found[k].append(us)
    return found


def first_difference(got: bytes, want: bytes) -> int:
    """Of two texts of one length; -1: they are equal."""
    if got == want:
        return -1
    return int(np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8))[0])


def far(got: bytes, want: bytes, scalar: str, rtol: float) -> int:
    """The first byte of a guard that differs, or of a number over rtol (|want| + rms) away; -1: there is none."""
    zone, end = len(GUARD), len(want) - len(GUARD)
    for part, begin in ((slice(0, zone), 0), (slice(end, None), end)):
        if (at := first_difference(got[part], want[part])) >= 0:
            return begin + at
    x, y = (np.frombuffer(t[zone:end], f"<{scalar}").astype(np.float64) for t in (got, want))
    with np.errstate(invalid="ignore", over="ignore"):
        rms = float(np.sqrt(np.mean(y * y))) if y.size else 0.0
        near = (np.abs(x - y) <= rtol * (np.abs(y) + rms)) | (x == y)
    wrong = np.flatnonzero(~near)
    return zone + int(scalar[1]) * int(wrong[0]) if wrong.size else -1
