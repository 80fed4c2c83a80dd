"""What one generator makes of one problem: a pure function, the same in this process and in another."""

from __future__ import annotations

from dataclasses import dataclass

from weft.device.any import DeviceFacts
from weft.generate.protocol import Generator
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Kernel, Schedule


@dataclass(frozen=True, slots=True)
class Offer:
    """Kernels of one generator for one problem."""

    kernels: tuple[tuple[Schedule, Kernel], ...]
    """The most promising first."""
    declined: tuple[str, ...] = ()
    """Why the problem, or a schedule of it, has no kernel, each after the generator's name."""
    more: bool = False
    """Whether schedules were left alone."""


def kernels_of(generator: Generator, problem: Problem, facts: DeviceFacts, most: int) -> Offer:
    """The first `most` kernels; schedules after them are not looked at."""
    schedules = generator.schedules(problem, facts)
    if isinstance(schedules, Declined):
        return Offer((), (f"{generator.name}: {schedules.reason}",))
    found: list[tuple[Schedule, Kernel]] = []
    declined: list[str] = []
    for number, schedule in enumerate(schedules, 1):
        kernel = generator.emit(problem, schedule)
        if isinstance(kernel, Declined):
            declined.append(f"{generator.name}: {kernel.reason}")
            continue
        found.append((schedule, kernel))
        if len(found) == most:
            known = isinstance(schedules, list | tuple)  # the length of others may take work
            return Offer(tuple(found), tuple(declined), not known or number < len(schedules))
    return Offer(tuple(found), tuple(declined))
