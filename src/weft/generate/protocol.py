"""What a generator is: it says how it could make a problem's kernel, and makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.device.any import DeviceFacts
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Kernel, Schedule


class Generator(Protocol):
    """A plug-in of the entry-point group `weft.generators`; stateless, made without arguments."""

    name: str
    """First word of every schedule that it lists."""

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        """Ways to run the problem, the most promising first, or the reason why it cannot be made."""

    def emit(self, problem: Problem, schedule: Schedule) -> Kernel | Declined:
        """The kernel of one schedule from `schedules`; depends on nothing but its arguments."""
