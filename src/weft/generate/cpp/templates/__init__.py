"""Templates for problems with one convolution or matrix product: register-tiled, weights repacked, epilogue fused."""

from __future__ import annotations

from collections.abc import Sequence

from weft.generate.cpp.templates import choose, depthwise, direct
from weft.generate.cpp.templates.match import match
from weft.generate.protocol import Facts
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource, Schedule


def schedules(problem: Problem, facts: Facts) -> Sequence[Schedule] | Declined:
    """Parameter sets worth measuring, the most promising first; Declined for what no template takes.

    Takes f32 problems with one CONV (1-d or 2-d) or MATMUL whose other members are elementwise on its result, or
    renamings, padding and constant gathers of its input. Schedules carry `template`, `algorithm`, the lanes and the
    threads that they were made for.
    """
    c = match(problem)
    if isinstance(c, Declined):
        return c
    lanes = max(4, min(16, facts.simd_bytes // 4))
    by_channel = depthwise.normal(c)
    if not isinstance(by_channel, Declined):
        return [s.schedule() for s in depthwise.shapes(by_channel, lanes, max(1, facts.threads))]
    return [s.schedule() for s in choose.shapes(c, lanes, max(1, facts.threads))]


def emit(problem: Problem, schedule: Schedule) -> KernelSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only."""
    c = match(problem)
    if isinstance(c, Declined):
        return c
    if dict(schedule.params).get("template") == "depthwise":
        by_channel = depthwise.normal(c)
        return by_channel if isinstance(by_channel, Declined) else depthwise.emit(by_channel, schedule)
    return direct.emit(c, schedule)
