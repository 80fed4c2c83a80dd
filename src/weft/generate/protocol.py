"""What a generator is: it says how it could make a problem's kernel, and makes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from weft.device.any import DeviceFacts
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Kernel, Schedule

CONTRACT = 2
"""Version of what plug-ins and Weft expect of each other.

1: `name`, `schedules`, `emit`; asked for every kind of device. A plug-in that declares nothing is of this version.
2: the plug-in also declares `contract` and `devices`, and is asked for these kinds of devices alone.
"""
OLDEST = 1
"""Oldest version that is still taken; each that is older than `CONTRACT` with a DeprecationWarning."""


class Generator(Protocol):
    """Stateless, made without arguments."""

    name: str
    """First word of every schedule that it lists."""

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        """Ways to run the problem, the most promising first, or the reason why it cannot be made."""

    def emit(self, problem: Problem, schedule: Schedule) -> Kernel | Declined:
        """The kernel of one schedule from `schedules`; depends on nothing but its arguments."""


class PlugIn(Generator, Protocol):
    """A generator of the entry-point group `weft.generators`, by the contract of today."""

    contract: int
    """The version of the contract that it was written for: a number, not `CONTRACT` itself."""
    devices: Collection[str]
    """Kinds of devices that it makes kernels for: names of `weft.device.kinds`."""
