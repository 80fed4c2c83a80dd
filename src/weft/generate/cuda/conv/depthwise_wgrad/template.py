"""Gradients of the weights of depthwise convolutions: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.depthwise_wgrad import kernel
from weft.generate.cuda.conv.depthwise_wgrad.kernel import WgradConfig
from weft.generate.cuda.conv.depthwise_wgrad.match import RULE, WeightGradient, weight_gradient
from weft.generate.cuda.template import ALL, Alone, Declared, Ranked, Template, as_ranked, in_order, too_old
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class WeightGradientPattern:
    """Sums over images and positions of one operand times the other, shifted by each tap; no contraction is in it."""

    name = "depthwise_wgrad"
    idioms = ()

    def match(self, problem: Problem, *, tf32: bool) -> WeightGradient | Declined | None:
        """The sizes; None where fused loops, or products, are left to take it."""
        found = weight_gradient(problem) if problem.origin_rule == RULE else None
        return None if isinstance(found, Declined) else found

    def offers(
        self, m: WeightGradient, facts: GpuFacts, templates: Sequence[Template[WeightGradient]], alone: Alone
    ) -> Ranked | Declined:
        """As the template has them."""
        return too_old(facts) or in_order(templates, m, facts)


DEPTHWISE_WEIGHT_GRADIENT = WeightGradientPattern()


@final
class DepthwiseWgrad(Declared):
    """On CUDA cores, in two kernels."""

    def config(self, schedule: Schedule) -> WgradConfig:
        """The strip of a thread and the parts of the sum."""
        return WgradConfig.of(schedule)

    def configurations(self, m: WeightGradient, facts: GpuFacts) -> Ranked:
        """The best of each width and strip."""
        return as_ranked(kernel.shapes(m, facts))

    def every(self, m: WeightGradient, facts: GpuFacts) -> Ranked:
        """Of each width and strip the best, all of them."""
        return as_ranked(kernel.shapes(m, facts, ALL))

    def cost(self, m: WeightGradient, schedule: Schedule, facts: GpuFacts) -> float:
        """The largest of five costs, and what it does not hide of the others."""
        return kernel.cycles(m, WgradConfig.of(schedule), facts)

    def emit(self, m: WeightGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernels."""
        return kernel.emit(m, schedule, entry)


DEPTHWISE_WGRAD = DepthwiseWgrad(
    names=("depthwise_wgrad",),
    pattern=DEPTHWISE_WEIGHT_GRADIENT,
    written=("cuda/conv/depthwise_wgrad/kernel.py",),
)
