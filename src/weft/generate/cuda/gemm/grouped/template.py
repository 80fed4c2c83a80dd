"""Products that need nothing of each other in one launch: the pattern and its templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.grouped import kernel, match, tma
from weft.generate.cuda.gemm.grouped.kernel import GroupedConfig
from weft.generate.cuda.gemm.grouped.match import Member
from weft.generate.cuda.gemm.pattern import ordered
from weft.generate.cuda.template import Alone, Declared, Kinds, Ranked, Template, as_ranked, too_old
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


class Group(NamedTuple):
    """Products, and the problem that they are."""

    problem: Problem
    members: tuple[Member, ...]
    tf32: bool


@final
class GroupPattern:
    """Several products, each with results of its own, or one whose results are slices of its columns."""

    name = "grouped"
    idioms = ("grouped",)

    def match(self, problem: Problem, *, tf32: bool) -> Group | Declined | None:
        """The products, in the order of their results."""
        if not match.is_group(problem):
            return None
        found = kernel.matched(problem, tf32=tf32)
        return found if isinstance(found, Declined) else Group(problem, found, tf32)

    def offers(
        self, m: Group, facts: GpuFacts, templates: Sequence[Template[Group]], alone: Alone
    ) -> Ranked | Declined:
        """Where one launch is modelled to take less than the members' own kernels."""
        old = too_old(facts)
        if old is not None:
            return old
        ranked: Ranked = []
        for template in templates:
            found = template.configurations(m, facts)
            ranked += [] if isinstance(found, Declined) else found
        if not ranked:
            return Declined("no CTA shape that all products of the group take")
        ranked = ordered(ranked)
        least, apart, what = min(cycles for cycles, _ in ranked), 0.0, "several"
        if match.is_split(m.problem):  # what is turned, others would have to turn
            whole, what = match.merged(m.problem, tf32=m.tf32), "the product with one result"
            apart = math.inf if whole is None else alone(whole)
        else:
            apart = sum(alone(x.product) for x in m.members)
        if least > costs_of(facts).grouped.worth * apart:
            us = facts.clock_ghz * 1e3
            return Declined(f"one launch is modelled to take {least / us:.1f} us, {what} {apart / us:.1f} us")
        return ranked


PRODUCTS_IN_ONE_LAUNCH = GroupPattern()


@final
class Grouped(Declared):
    """A block runs the kernel of `mma` of the member whose tile it has."""

    def config(self, schedule: Schedule) -> GroupedConfig:
        """The tile, and each member's split."""
        return GroupedConfig.of(schedule)

    def configurations(self, m: Group, facts: GpuFacts) -> Ranked:
        """The best of each tile first."""
        tensor = m.members[0].product.tensor
        return [(cycles, s.schedule(tensor=tensor)) for cycles, s in kernel.shapes(m.members, facts)]

    def every(self, m: Group, facts: GpuFacts) -> Ranked:
        """As offered: members multiply what there is."""
        return self.configurations(m, facts)

    def cost(self, m: Group, schedule: Schedule, facts: GpuFacts) -> float:
        """All members' blocks on the device together."""
        return kernel.cycles(m.members, GroupedConfig.of(schedule), facts)

    def emit(self, m: Group, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m.members, schedule, entry)


@final
class GroupedTma(Declared):
    """The same with the kernels of `tma`."""

    def config(self, schedule: Schedule) -> tma.GroupedTmaConfig:
        """A configuration of `tma` to each member."""
        return tma.GroupedTmaConfig.of(schedule)

    def configurations(self, m: Group, facts: GpuFacts) -> Ranked:
        """None where a member is not for the template."""
        return as_ranked(tma.shapes(m.members, facts))

    def every(self, m: Group, facts: GpuFacts) -> Ranked:
        """As offered: members multiply what there is."""
        return self.configurations(m, facts)

    def cost(self, m: Group, schedule: Schedule, facts: GpuFacts) -> float | None:
        """The slowest member, and what all move through memory."""
        return tma.cycles(m.members, tma.GroupedTmaConfig.of(schedule), facts)

    def emit(self, m: Group, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return tma.emit(m.members, schedule, entry)


_BESIDE = "cuda/role/beside.py"
_KINDS = Kinds(search=("bm", "bn", "cluster"))
GROUPED = Grouped(
    names=kernel.TEMPLATES,
    pattern=PRODUCTS_IN_ONE_LAUNCH,
    written=("cuda/gemm/mma/kernel.py", "cuda/gemm/grouped/kernel.py", _BESIDE),
    kinds=_KINDS,
    tf32=frozenset({kernel.TEMPLATES[0]}),
)
GROUPED_TMA = GroupedTma(
    names=(tma.TEMPLATE,),
    pattern=PRODUCTS_IN_ONE_LAUNCH,
    written=("cuda/gemm/tma/kernel.py", "cuda/gemm/grouped/tma.py", _BESIDE),
    kinds=_KINDS,
    tf32=frozenset({tma.TEMPLATE}),
)
