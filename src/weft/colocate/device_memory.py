"""The GPU of the current context as what measures pairs in memory that is somebody else's: a plan's and a job's.

Copies stay on the device (`weft.tune.cuda_pair.Machine`): of hundreds of megabytes nothing crosses to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast, final

import torch

from weft.colocate.pair_machine import forked, interleaved_us
from weft.device.cuda import streams
from weft.device.cuda.streams import Stream
from weft.generate.bind import Prepared
from weft.tune.cuda_pair import Memory


@final
class DeviceMemory:
    """See `weft.tune.cuda_pair.Machine`."""

    def __init__(self, held: ExitStack) -> None:
        """`held` gives the streams back."""
        least, greatest = streams.priorities()
        self._main, self._high, self._low = Stream(), Stream(priority=greatest), Stream(priority=least)
        for s in (self._main, self._high, self._low):
            held.callback(s.close)

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        streams.write(address, data)
        torch.cuda.synchronize()

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        return streams.read_back(address, size)

    def keep(self, memory: Memory) -> object:
        """A copy on the device."""
        kept = _tensor(memory).clone()
        torch.cuda.synchronize()
        return kept

    def restore(self, memory: Memory, kept: object) -> None:
        """Copy back on the device."""
        _tensor(memory).copy_(cast("torch.Tensor", kept))
        torch.cuda.synchronize()

    def differs(self, memory: Memory, kept: object) -> int:
        """Compared on the device."""
        now, then = _tensor(memory), cast("torch.Tensor", kept)
        return -1 if torch.equal(now, then) else int((now != then).nonzero()[0])

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
        """Graphs in interleaved rounds, two of which do not count."""
        return interleaved_us(self._main, works, rounds)


class _Raw:
    """Device memory as the framework takes what others own."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.size,), "typestr": "|u1", "data": (memory.address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _tensor(memory: Memory) -> torch.Tensor:
    return torch.as_tensor(_Raw(memory), device="cuda")
