"""Squeeze-excite: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.squeeze_excite import kernel
from weft.generate.cuda.conv.squeeze_excite.kernel import SqueezeConfig
from weft.generate.cuda.conv.squeeze_excite.match import SqueezeExcite, is_squeeze, squeeze_excite
from weft.generate.cuda.template import ALL, Alone, Declared, Kinds, Ranked, Template, as_ranked, in_order, too_old
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class SqueezeExcitePattern:
    """An image, the means of its channels, two products of them, and the image scaled."""

    name = "squeeze_excite"
    idioms = ("squeeze_excite",)

    def match(self, problem: Problem, *, tf32: bool) -> SqueezeExcite | Declined | None:
        """The normal form."""
        return squeeze_excite(problem) if is_squeeze(problem.graph) else None

    def offers(
        self,
        m: SqueezeExcite,
        facts: GpuFacts,
        templates: Sequence[Template[SqueezeExcite]],
        alone: Alone,
    ) -> Ranked | Declined:
        """As the template has them."""
        return too_old(facts) or in_order(templates, m, facts)


SQUEEZE_EXCITE_PROBLEM = SqueezeExcitePattern()


@final
class SqueezeExciteTemplate(Declared):
    """A cluster of CTAs to an image."""

    def config(self, schedule: Schedule) -> SqueezeConfig:
        """CTAs and threads."""
        return SqueezeConfig.of(schedule)

    def configurations(self, m: SqueezeExcite, facts: GpuFacts) -> Ranked | Declined:
        """Few."""
        found = kernel.shapes(m, facts)
        return as_ranked(found) if found else Declined("squeeze-excite whose weights do not fit shared memory")

    def every(self, m: SqueezeExcite, facts: GpuFacts) -> Ranked:
        """All that fit."""
        return as_ranked(kernel.shapes(m, facts, ALL))

    def cost(self, m: SqueezeExcite, schedule: Schedule, facts: GpuFacts) -> float:
        """One image after another on a cluster's CTAs."""
        return kernel.cycles(m, SqueezeConfig.of(schedule), facts)

    def emit(self, m: SqueezeExcite, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


SQUEEZE_EXCITE = SqueezeExciteTemplate(
    names=("squeeze_excite",),
    pattern=SQUEEZE_EXCITE_PROBLEM,
    written=("cuda/conv/squeeze_excite/kernel.py",),
    kinds=Kinds(search=("ctas", "threads")),
)
