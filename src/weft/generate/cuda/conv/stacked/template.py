"""A convolution with windows and the 1x1 convolution behind it: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.separable.match import Separable, convolutions, stacked
from weft.generate.cuda.conv.stacked import kernel
from weft.generate.cuda.conv.stacked.kernel import StackedConfig
from weft.generate.cuda.template import ALL, Alone, Declared, Kinds, Ranked, Template, as_ranked, in_order, slower
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class StackedPattern:
    """Two convolutions, the first of which sums over channels."""

    name = "stacked"
    idioms = ("separable",)

    def match(self, problem: Problem, *, tf32: bool) -> Separable | Declined | None:
        """Both as products; TF32 is not for them."""
        return stacked(problem) if len(convolutions(problem)) == 2 else None

    def offers(
        self, m: Separable, facts: GpuFacts, templates: Sequence[Template[Separable]], alone: Alone
    ) -> Ranked | Declined:
        """Where two kernels are not modelled far ahead."""
        found = in_order(templates, m, facts)
        if isinstance(found, Declined):
            return found
        return slower(found[0][0], alone(m.first) + alone(m.second), costs_of(facts).pooled.worth, facts) or found


STACKED_CONVOLUTIONS = StackedPattern()


@final
class StackedTemplate(Declared):
    """All channels between them stay in shared memory."""

    def config(self, schedule: Schedule) -> StackedConfig:
        """The rectangle of pixels, and the tiles of both products."""
        return StackedConfig.of(schedule)

    def configurations(self, m: Separable, facts: GpuFacts) -> Ranked | Declined:
        """Few, unlike each other."""
        return as_ranked(kernel.shapes(m, facts))

    def every(self, m: Separable, facts: GpuFacts) -> Ranked | Declined:
        """Everything that fits."""
        return as_ranked(kernel.shapes(m, facts, ALL))

    def cost(self, m: Separable, schedule: Schedule, facts: GpuFacts) -> float:
        """The first convolution, and the second product's parts behind it."""
        return kernel.cycles(m, StackedConfig.of(schedule), facts)

    def emit(self, m: Separable, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


STACKED = StackedTemplate(
    names=("stacked",),
    pattern=STACKED_CONVOLUTIONS,
    written=("cuda/conv/stacked/kernel.py",),
    kinds=Kinds(search=("bn",)),
)
