"""What a generator is: it says how it could make a problem's kernel, and makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Kernel, Schedule


class Facts(Protocol):
    """What a CPU generator needs to know about the machine."""

    @property
    def simd_bytes(self) -> int:
        """Width of the widest vector registers in use, bytes."""

    @property
    def threads(self) -> int:
        """Threads that kernels will run with."""


class Generator(Protocol):
    """A plug-in of the entry-point group `weft.generators`; stateless, made without arguments."""

    name: str
    """First word of every schedule that it lists."""

    def schedules(self, problem: Problem, facts: Facts) -> Sequence[Schedule] | Declined:
        """Ways to run the problem, the most promising first, or the reason why it cannot be made."""

    def emit(self, problem: Problem, schedule: Schedule) -> Kernel | Declined:
        """The kernel of one schedule from `schedules`; depends on nothing but its arguments."""
