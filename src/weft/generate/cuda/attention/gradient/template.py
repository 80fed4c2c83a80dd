"""The gradients of attention: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.attention.gradient import kernel
from weft.generate.cuda.attention.gradient.kernel import GradientConfig
from weft.generate.cuda.attention.gradient.match import AttentionGradient, attention_gradient
from weft.generate.cuda.template import Alone, Declared, Ranked, Template, as_ranked, in_order, too_old
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class AttentionGradientPattern:
    """The results of one call of `weft::attention_backward`."""

    name = "attention_gradient"
    idioms = ("called_attention",)

    def match(self, problem: Problem, *, tf32: bool) -> AttentionGradient | Declined | None:
        """The sizes; None where libraries alone are left to take it."""
        calls = any(n.prim is Prim.OPAQUE for n in problem.graph.nodes)
        found = attention_gradient(problem) if calls else None
        return None if isinstance(found, Declined) else found

    def offers(
        self, m: AttentionGradient, facts: GpuFacts, templates: Sequence[Template[AttentionGradient]], alone: Alone
    ) -> Ranked | Declined:
        """As the template has them."""
        return too_old(facts) or in_order(templates, m, facts)


ATTENTION_GRADIENT_PROBLEM = AttentionGradientPattern()


@final
class AttentionGradientTemplate(Declared):
    """On tensor cores, a head in the shared memory of a CTA."""

    def config(self, schedule: Schedule) -> GradientConfig:
        """Warps of a CTA, and CTAs of a multiprocessor."""
        return GradientConfig.of(schedule)

    def configurations(self, m: AttentionGradient, facts: GpuFacts) -> Ranked | Declined:
        """For each number of CTAs one."""
        found = as_ranked(kernel.shapes(m, facts))
        return found or Declined(f"a head of {m.positions} positions does not fit into shared memory")

    def every(self, m: AttentionGradient, facts: GpuFacts) -> Ranked | Declined:
        """The same."""
        return self.configurations(m, facts)

    def cost(self, m: AttentionGradient, schedule: Schedule, facts: GpuFacts) -> float:
        """What bounds it: products, shared memory or memory."""
        return kernel.cycles(m, GradientConfig.of(schedule), facts)

    def emit(self, m: AttentionGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


ATTENTION_GRADIENT = AttentionGradientTemplate(
    names=("attention_gradient",),
    pattern=ATTENTION_GRADIENT_PROBLEM,
    written=("cuda/attention/gradient/kernel.py", "cuda/attention/gradient/weft_cuda_attention_gradient.h"),
)
