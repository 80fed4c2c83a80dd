"""A convolution and the pool behind it: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.pooled import choose, kernel
from weft.generate.cuda.conv.pooled.kernel import PooledConfig
from weft.generate.cuda.conv.pooled.match import Pooled, pooled
from weft.generate.cuda.template import ALL, Alone, Declared, Kinds, Ranked, Template, as_ranked, in_order, slower
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


def has_window(problem: Problem) -> bool:
    """Whether a problem holds a window's maximum or sum."""
    return any(CATEGORY[n.prim] is Category.WINDOW for n in problem.graph.nodes)


@final
class PooledPattern:
    """A convolution with a window's maximum or sum behind it."""

    name = "pooled"
    idioms = ("pooled",)

    def match(self, problem: Problem, *, tf32: bool) -> Pooled | Declined | None:
        """The convolution, the window, and what is elementwise on either."""
        return pooled(problem, tf32=tf32) if has_window(problem) else None

    def offers(
        self, m: Pooled, facts: GpuFacts, templates: Sequence[Template[Pooled]], alone: Alone
    ) -> Ranked | Declined:
        """Where two kernels are not modelled far ahead."""
        found = in_order(templates, m, facts)
        if isinstance(found, Declined):
            return found
        two = choose.apart(m, alone(m.first), facts)
        return slower(found[0][0], two, costs_of(facts).pooled.worth, facts) or found


CONVOLUTION_AND_POOL = PooledPattern()


@final
class PooledTemplate(Declared):
    """The tile of results stays in shared memory, one value to a window is stored."""

    def config(self, schedule: Schedule) -> PooledConfig:
        """The rectangle of windows, and how sums are divided."""
        return PooledConfig.of(schedule)

    def configurations(self, m: Pooled, facts: GpuFacts) -> Ranked | Declined:
        """Few, unlike each other."""
        return as_ranked(choose.shapes(m, facts))

    def every(self, m: Pooled, facts: GpuFacts) -> Ranked | Declined:
        """Everything that fits."""
        return as_ranked(choose.shapes(m, facts, ALL))

    def cost(self, m: Pooled, schedule: Schedule, facts: GpuFacts) -> float:
        """The convolution's tiles, and the windows behind them."""
        return choose.cycles(m, PooledConfig.of(schedule), facts)

    def emit(self, m: Pooled, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


POOLED = PooledTemplate(
    names=("pooled",),
    pattern=CONVOLUTION_AND_POOL,
    written=("cuda/conv/pooled/kernel.py",),
    kinds=Kinds(search=("bn", "split")),
    tf32=frozenset({"pooled"}),
)
