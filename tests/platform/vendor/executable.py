"""What `runtime` has of it: the CPU's executable, which this one is none of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.ir.graph import Graph, NodeId
from weft.kernels.formats import Format
from weft.kernels.plan import Plan
from weft.runtime.artifact import Read, host_saved
from weft.runtime.executable import Executable, Linked
from weft.runtime.memory import MemoryPlan


class XpuExecutable:
    """See `AnyExecutable`."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner
        self.check_indices = True

    @property
    def linked(self) -> Linked:
        return self._inner.linked

    @property
    def graph(self) -> Graph:
        return self._inner.graph

    @property
    def plan(self) -> Plan:
        return self._inner.plan

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def memory(self) -> MemoryPlan:
        return self._inner.memory

    @property
    def sm_shares(self) -> Sequence[str]:
        return ()

    @property
    def kernels(self) -> int:
        return self._inner.kernels

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._inner(*tensors)

    def run_steps(self, before: Callable[[int], None], *tensors: torch.Tensor) -> None:
        self._inner.run_steps(before, *tensors)

    def stored(self, key: tuple[NodeId, Format]) -> torch.Tensor:
        return self._inner.stored(key)

    def poison(self, byte: int) -> None:
        self._inner.poison(byte)

    def with_graph(self, graph: Graph) -> XpuExecutable:
        return XpuExecutable(self._inner.with_graph(graph))


def saved(read: Read) -> XpuExecutable:
    """See `Kind.saved`."""
    return XpuExecutable(host_saved(read))
