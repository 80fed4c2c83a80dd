"""An executable of whatever device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weft.ir.graph import Graph, NodeId
from weft.kernels.formats import Format
from weft.kernels.plan import Plan
from weft.runtime.executable import Linked
from weft.runtime.memory import MemoryPlan


class AnyExecutable(Protocol):
    """A plan that runs, as a kind of device made it: `Platform.link`, `Kind.saved` of `weft.device.kinds`."""

    check_indices: bool
    """Whether calls look for indices out of bounds, which waits for the device."""

    @property
    def linked(self) -> Linked:
        """What it was made of."""
        ...

    @property
    def graph(self) -> Graph:
        """Of the model, with its constants."""
        ...

    @property
    def plan(self) -> Plan:
        """The steps."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs and outputs are."""
        ...

    @property
    def memory(self) -> MemoryPlan:
        """Where values between the steps lie."""
        ...

    @property
    def sm_shares(self) -> Sequence[str]:
        """What each step takes of an SM of an NVIDIA GPU, where plans are made under a budget of one; else nothing."""
        ...

    @property
    def kernels(self) -> int:
        """What a call launches."""
        ...

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs of the model, in tensors of their own.

        Raises:
            InputError: tensors that do not fit the compiled signature [W011].
        """
        ...

    def run_steps(self, before: Callable[[int], None], *tensors: torch.Tensor) -> None:
        """Run the steps one by one, for looking at the values between them (`stored`).

        Args:
            before: called with a step's number before it is launched, and with the number of steps at the end.
            tensors: what the model is called with.
        """
        ...

    def stored(self, key: tuple[NodeId, Format]) -> torch.Tensor:
        """What a value holds now, inside of `before`: memory that later steps may write."""
        ...

    def poison(self, byte: int) -> None:
        """Have the next call find this byte in all memory that its steps write, outputs too: 0xFF is NaN in floats."""
        ...

    def with_graph(self, graph: Graph) -> AnyExecutable:
        """The same plan with the constants of another graph, which has the same nodes."""
        ...
