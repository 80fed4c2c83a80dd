"""Templates for problems with one convolution or matrix product: register-tiled, weights repacked, epilogue fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.generate.contraction.match import match
from weft.generate.cpp.templates import choose, depthwise, direct, winograd
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource, Schedule
from weft.kernels.stored_names import entry_name

_SMALL = 4_000_000
"""Operations below which one thread is worth a try: forking costs a microsecond or more."""


class Facts(Protocol):
    """The part of `device.facts.CpuFacts` that the templates look at."""

    @property
    def simd_bytes(self) -> int:
        """Width of the widest vectors."""

    @property
    def threads(self) -> int:
        """Threads that kernels will run with."""


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
    alone = c.flops < _SMALL
    counts = [n for n in (1, facts.threads) if n == facts.threads or alone] if facts.threads > 1 else [1]
    ranked: list[tuple[float, Schedule]] = []
    for threads in counts:
        fork = 2000.0 if threads > 1 else 0.0
        if not isinstance(by_channel, Declined):
            shapes = depthwise.shapes(by_channel, lanes, threads)
            ranked += [(fork + cycles / threads, s.schedule()) for cycles, s in shapes]
            continue
        most = 4 if alone else 8
        ranked += [(fork + cycles, s.schedule()) for cycles, s in choose.shapes(c, lanes, threads, most)]
        if winograd.applies(c, lanes) is None:
            ranked += [(fork + cycles, s.schedule()) for cycles, s in winograd.shapes(c, lanes, threads)]
    return _ordered(ranked)


def _ordered(ranked: list[tuple[float, Schedule]]) -> list[Schedule]:
    """Best first by the model, but the best of every algorithm before the second best of any.

    Only the first few are measured, and a fast algorithm may fail the check of precision: then there must be another.
    Schedules that share a register tile come later than their number says, since they are alike.
    """
    keyed: list[tuple[bool, float, Schedule]] = []
    algorithms: set[object] = set()
    tiles: dict[tuple[object, ...], int] = {}
    for cycles, schedule in sorted(ranked, key=lambda x: x[0]):
        p = dict(schedule.params)
        tile = tuple(p.get(name) for name in ("algorithm", "threads", "th", "tw", "r", "v", "dot"))
        keyed.append((p["algorithm"] in algorithms, cycles * (1 + 0.04 * tiles.get(tile, 0)), schedule))
        algorithms.add(p["algorithm"])
        tiles[tile] = tiles.get(tile, 0) + 1
    return [schedule for *_, schedule in sorted(keyed, key=lambda x: x[:2])]


def emit(problem: Problem, schedule: Schedule) -> KernelSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only."""
    c = match(problem)
    if isinstance(c, Declined):
        return c
    entry = entry_name(problem.key, schedule)
    if dict(schedule.params).get("template") == "depthwise":
        by_channel = depthwise.normal(c)
        return by_channel if isinstance(by_channel, Declined) else depthwise.emit(by_channel, schedule, entry)
    if dict(schedule.params).get("template") == "winograd":
        return winograd.emit(c, schedule, entry)
    return direct.emit(c, schedule, entry)
