"""What `generate` has of it: here the C++ of Weft's own, under another name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.platform.vendor.facts import XpuFacts

from weft.device.any import DeviceFacts
from weft.device.facts import CpuFacts
from weft.generate.cpp import CppGenerator
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource, Schedule


class XpuGenerator:
    """See `Generator`."""

    name = "xpu"

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        """Those of the CPU."""
        assert isinstance(facts, XpuFacts)
        found = CppGenerator().schedules(problem, CpuFacts())
        return found if isinstance(found, Declined) else [Schedule(self.name, s.params) for s in found]

    def emit(self, problem: Problem, schedule: Schedule) -> KernelSource | Declined:
        """The kernel of one of them."""
        made = CppGenerator().emit(problem, Schedule("cpp", schedule.params))
        return made if isinstance(made, Declined) else replace(made, schedule=schedule)
