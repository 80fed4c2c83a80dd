"""Gradients of embedding tables: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.embedding_gradient import kernel
from weft.generate.cuda.embedding_gradient.kernel import EmbeddingConfig
from weft.generate.cuda.embedding_gradient.match import EmbeddingGradient, embedding_gradient
from weft.generate.cuda.template import Alone, Declared, Ranked, Template, as_ranked, in_order, too_old
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class EmbeddingGradientPattern:
    """A call of `aten::embedding_dense_backward`: rows of a gradient, summed by index; with an update behind it."""

    name = "embedding_gradient"
    idioms = ("embedding_update",)

    def match(self, problem: Problem, *, tf32: bool) -> EmbeddingGradient | Declined | None:
        """The sizes; None where libraries alone are left to take it."""
        calls = any(n.prim is Prim.OPAQUE for n in problem.graph.nodes)
        found = embedding_gradient(problem) if calls else None
        return None if isinstance(found, Declined) else found

    def offers(
        self, m: EmbeddingGradient, facts: GpuFacts, templates: Sequence[Template[EmbeddingGradient]], alone: Alone
    ) -> Ranked | Declined:
        """As the template has them."""
        return too_old(facts) or in_order(templates, m, facts)


EMBEDDING_GRADIENT_PROBLEM = EmbeddingGradientPattern()


@final
class EmbeddingGradientTemplate(Declared):
    """On CUDA cores, in two kernels: indices are sorted, rows are summed."""

    def config(self, schedule: Schedule) -> EmbeddingConfig:
        """Lanes of a row and the width of a vector."""
        return EmbeddingConfig.of(schedule)

    def configurations(self, m: EmbeddingGradient, facts: GpuFacts) -> Ranked:
        """For each number of lanes one."""
        return as_ranked(kernel.shapes(m, facts))

    def every(self, m: EmbeddingGradient, facts: GpuFacts) -> Ranked:
        """The same."""
        return self.configurations(m, facts)

    def cost(self, m: EmbeddingGradient, schedule: Schedule, facts: GpuFacts) -> float:
        """Comparisons, then memory or the latency of rows."""
        return kernel.cycles(m, EmbeddingConfig.of(schedule), facts)

    def emit(self, m: EmbeddingGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernels."""
        return kernel.emit(m, schedule, entry)


EMBEDDING_GRADIENT = EmbeddingGradientTemplate(
    names=("embedding_gradient",),
    pattern=EMBEDDING_GRADIENT_PROBLEM,
    written=("cuda/embedding_gradient/kernel.py", "cuda/embedding_gradient/epilogue.py"),
)
