"""A depthwise convolution and the 1x1 convolution behind it: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.separable import kernel
from weft.generate.cuda.conv.separable.kernel import SeparableConfig
from weft.generate.cuda.conv.separable.match import Separable, convolutions, separable
from weft.generate.cuda.template import ALL, Alone, Declared, Ranked, Template, as_ranked, in_order
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class SeparablePattern:
    """Two convolutions, the first by channel."""

    name = "separable"
    idioms = ("separable",)

    def match(self, problem: Problem, *, tf32: bool) -> Separable | Declined | None:
        """Both as products; TF32 is not for them."""
        found = convolutions(problem)
        return separable(problem) if len(found) == 2 and found[0].groups > 1 else None

    def offers(
        self, m: Separable, facts: GpuFacts, templates: Sequence[Template[Separable]], alone: Alone
    ) -> Ranked | Declined:
        """As the template has them."""
        return in_order(templates, m, facts)


SEPARABLE_CONVOLUTIONS = SeparablePattern()


@final
class SeparableTemplate(Declared):
    """The tile between them stays in shared memory."""

    def config(self, schedule: Schedule) -> SeparableConfig:
        """Pixels and channels of a block, and how sums are divided."""
        return SeparableConfig.of(schedule)

    def configurations(self, m: Separable, facts: GpuFacts) -> Ranked:
        """Few, unlike each other."""
        return as_ranked(kernel.shapes(m, facts))

    def every(self, m: Separable, facts: GpuFacts) -> Ranked:
        """Everything that fits."""
        return as_ranked(kernel.shapes(m, facts, ALL))

    def cost(self, m: Separable, schedule: Schedule, facts: GpuFacts) -> float:
        """Infinite where it does not fit."""
        return kernel.cycles(m, SeparableConfig.of(schedule), facts)

    def emit(self, m: Separable, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


SEPARABLE = SeparableTemplate(
    names=("separable",),
    pattern=SEPARABLE_CONVOLUTIONS,
    written=("cuda/conv/separable/kernel.py",),
)
