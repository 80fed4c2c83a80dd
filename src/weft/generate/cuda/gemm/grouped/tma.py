"""Products of different sizes in one launch by TMA and warpgroups: `kernel` with the roles of `gemm.tma`.

Members share the threads of a block and how many blocks are on a multiprocessor; tiles, stages and boxes are each one's
own. Every member has blocks that go on to further tiles of it: multiprocessors are divided among the members so that
the slowest is done as early as possible. Or sums are divided among the blocks of a cluster, which has one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.grouped.match import Member
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import cost as tma_cost
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.cost import Case
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.role import beside
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule, ScheduleParam

TEMPLATE = "grouped_tma"
KEPT = 4
_EACH = (*range(1, 13), 14, 16, 20, 24, 32, 48, 64)
"""Tiles of a multiprocessor."""
_TRIED = 24
"""Shapes of each member, the best by itself first."""
_BOX = 3


@dataclass(frozen=True, slots=True)
class GroupedTmaConfig:
    """A shape of `tma` for each member."""

    members: tuple[TmaConfig, ...]

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator: of each parameter the members' values, where one is not the default."""
        params: dict[str, ScheduleParam] = {"template": TEMPLATE}
        for f in fields(TmaConfig):
            values = [getattr(m, f.name) for m in self.members]
            if f.default is MISSING or any(v != f.default for v in values):
                params[f.name] = tuple(int(x) for v in values for x in (v if isinstance(v, tuple) else (v,)))
        return Schedule("cuda", tuple(sorted(params.items())))

    @staticmethod
    def of(schedule: Schedule) -> GroupedTmaConfig:
        """Read back.

        Raises:
            KeyError: a schedule of another template.
        """
        given = dict(schedule.params)
        count = len(_tuple(given["bm"]))
        found = []
        for i in range(count):
            own: dict[str, object] = {}
            for f in fields(TmaConfig):
                if f.name in given:
                    values = _tuple(given[f.name])
                    value = values[i] if len(values) == count else values[_BOX * i : _BOX * (i + 1)]
                    own[f.name] = bool(value) if f.type == "bool" else value
            found.append(TmaConfig(**own))  # type: ignore[arg-type]
        return GroupedTmaConfig(tuple(found))


def _tuple(value: ScheduleParam) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else ()


def shapes(found: Sequence[Member], facts: GpuFacts) -> list[tuple[float, GroupedTmaConfig]]:
    """(modelled cycles, shape), best first; none where a member is not for the template."""
    cases: list[Case] = []
    options: list[dict[tuple[int, int, bool], list[TmaConfig]]] = []
    for m in found:
        case = tma_choose.case_for(m.product, facts)
        if case is None or case.copied:
            return []
        cases.append(case)
        by_kind: dict[tuple[int, int, bool], list[TmaConfig]] = {}
        for _, s in tma_choose.shapes(m.product, facts, _TRIED):
            if not s.multicast and not s.stream_k and not s.store:
                for resident in {s.min_ctas, 1}:
                    one = replace(s, min_ctas=resident)
                    by_kind.setdefault((one.threads, resident, one.pingpong), []).append(one)
        options.append(by_kind)
    ranked: list[tuple[float, GroupedTmaConfig]] = []
    for kind in options[0]:
        every = [o.get(kind, []) for o in options]
        for cluster in sorted({s.split for own in every for s in own}):
            allowed = [[s for s in own if s.split in (1, cluster)] for own in every]
            ranked.append(_divided(cases, allowed, cluster, facts))
    unlike: dict[object, tuple[float, GroupedTmaConfig]] = {}
    for cycles, shape in sorted(ranked, key=lambda x: x[0]):
        if cycles < math.inf:
            tiles = tuple((s.bm, s.bn, s.split, s.halo_stages, s.pingpong) for s in shape.members)
            unlike.setdefault(tiles, (cycles, shape))
    return list(unlike.values())[:KEPT]


def _divided(
    cases: Sequence[Case], options: Sequence[Sequence[TmaConfig]], cluster: int, facts: GpuFacts
) -> tuple[float, GroupedTmaConfig]:
    """The best shape of each member and its multiprocessors, so that all are done as early as possible."""
    c = costs_of(facts).tma
    room = int(facts.sms * c.clustered.get(cluster, 1.0))
    points = []
    for case, shapes_ in zip(cases, options, strict=True):
        own = []
        for s in shapes_:
            tiles = tma_cost.units(case, s)
            counts = {-(-tiles // each) for each in _EACH if each <= tiles} if s.split == 1 else {tiles * s.split}
            own += [(n, _busy(case, s, n, facts), s) for n in counts if n <= room]
        points.append(sorted(own, key=lambda x: x[1]))
    if not all(points):
        return math.inf, GroupedTmaConfig(())
    times = sorted({t for own in points for _, t, _ in own})
    low, high = 0, len(times) - 1
    best = None
    while low <= high:
        middle = (low + high) // 2
        chosen = [min((x for x in own if x[1] <= times[middle]), default=None, key=lambda x: x[0]) for own in points]
        if all(chosen) and sum(x[0] for x in chosen if x is not None) <= room:
            best, high = [x for x in chosen if x is not None], middle - 1
        else:
            low = middle + 1
    if best is None:
        return math.inf, GroupedTmaConfig(())
    members = []
    for (n, _, s), case in zip(best, cases, strict=True):
        tiles = tma_cost.units(case, s)
        on = s.split == 1 and (n * s.min_ctas < tiles or s.pingpong)
        members.append(replace(s, persistent_ctas=n * s.min_ctas if on else 0))
    # operands and results of all come through the same memory
    memory = sum(tma_cost.moved(case, facts) for case in cases)
    inside = max(t for _, t, _ in best)
    gap = gap_us(facts) * facts.clock_ghz * 1e3 + c.start
    return gap + max(inside, memory) + c.exposed * min(inside, memory), GroupedTmaConfig(tuple(members))


def _busy(case: Case, s: TmaConfig, multiprocessors: int, facts: GpuFacts) -> float:
    """Cycles of a member that has so many multiprocessors to itself, in clusters as many as hold its blocks."""
    share = costs_of(facts).tma.clustered.get(s.split, 1.0)
    return tma_cost.busy(case, s, replace(facts, sms=max(1, math.ceil(multiprocessors / share))))


def cycles(found: Sequence[Member], s: GroupedTmaConfig, facts: GpuFacts) -> float | None:
    """Modelled cycles of one shape; None for members that the template does not take."""
    cases = [tma_choose.case_for(m.product, facts) for m in found]
    counts = []
    for case, one in zip(cases, s.members, strict=True):
        if case is None:
            return None
        counts.append(one.persistent_ctas or tma_cost.units(case, one) * one.split)
    beside = min(s.members[0].min_ctas, -(-sum(counts) // facts.sms))
    each, moved = [], 0.0
    for case, one, blocks in zip(cases, s.members, counts, strict=True):
        assert case is not None
        each.append(_busy(case, one, min(-(-blocks // beside), facts.sms), facts))
        moved += tma_cost.moved(case, facts)
    c = costs_of(facts).tma
    gap = gap_us(facts) * facts.clock_ghz * 1e3 + c.start
    return gap + max(*each, moved) + c.exposed * min(max(each), moved)


def emit(found: Sequence[Member], schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `GroupedTmaConfig.schedule`."""
    s = GroupedTmaConfig.of(schedule)
    if len(s.members) != len(found):
        return Declined(f"{len(s.members)} shapes for {len(found)} products")
    cluster = max(one.cluster for one in s.members)
    placed = []
    for member, one in zip(found, s.members, strict=True):
        if one.store:
            return Declined("TMA stores in a group")
        if one.multicast or one.stream_k or one.split not in (1, cluster):
            return Declined("multicast, stream-K, or split-K over other CTAs than those of one cluster, in a group")
        made = tma.roles(member.product, one.schedule())
        if isinstance(made, Declined):
            return made
        placed.append(beside.Member(made, member.inputs, member.outputs, member.product.k / one.split))
    return beside.side_by_side(schedule, entry, placed, cluster)
