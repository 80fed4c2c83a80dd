"""The GPU of the current context as what measures pairs in memory that is somebody else's: a plan's and a job's.

Copies stay on the device (`weft.tune.cuda_pair.Machine`): of hundreds of megabytes nothing crosses to the host.
"""

from __future__ import annotations

from typing import cast, final

import torch

from weft.colocate.pair_machine import ThreeStreams
from weft.device.cuda import streams
from weft.tune.cuda_pair import Memory


@final
class DeviceMemory(ThreeStreams):
    """See `weft.tune.cuda_pair.Machine`."""

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


class _Raw:
    """Device memory as the framework takes what others own."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.size,), "typestr": "|u1", "data": (memory.address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _tensor(memory: Memory) -> torch.Tensor:
    return torch.as_tensor(_Raw(memory), device="cuda")
