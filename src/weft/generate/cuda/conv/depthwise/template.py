"""Depthwise convolutions: the pattern and its one template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.depthwise import kernel
from weft.generate.cuda.conv.depthwise.kernel import DepthwiseConfig
from weft.generate.cuda.gemm.common.float8 import has_float8
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.template import ALL, Alone, Declared, Ranked, Template, as_ranked, in_order, too_old
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule


@final
class DepthwisePattern:
    """A convolution of one channel to each group."""

    name = "depthwise"
    idioms = ()

    def match(self, problem: Problem, *, tf32: bool) -> Product | Declined | None:
        """The product's normal form, with groups as columns."""
        if not any(isinstance(n.attrs, a.ConvAttrs) and n.attrs.groups > 1 for n in problem.graph.nodes):
            return None
        p = product(problem, tf32=tf32, by_channel=True)
        if isinstance(p, Declined) or p.bytes is not None:
            return None
        by_channel = kernel.normal(p)
        if isinstance(by_channel, Declined):
            return None
        return Declined("a depthwise convolution around 8-bit floats") if has_float8(problem.graph) else by_channel

    def offers(
        self, m: Product, facts: GpuFacts, templates: Sequence[Template[Product]], alone: Alone
    ) -> Ranked | Declined:
        """As the template has them."""
        return too_old(facts) or in_order(templates, m, facts)


DEPTHWISE_CONVOLUTION = DepthwisePattern()


@final
class Depthwise(Declared):
    """On CUDA cores."""

    def config(self, schedule: Schedule) -> DepthwiseConfig:
        """The tile of a thread."""
        return DepthwiseConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked:
        """The best of either width first."""
        return as_ranked(kernel.shapes(m, facts))

    def every(self, m: Product, facts: GpuFacts) -> Ranked:
        """All tiles."""
        return as_ranked(kernel.shapes(m, facts, ALL))

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float:
        """The largest of five costs, and what it does not hide of the others."""
        return kernel.cycles(m, DepthwiseConfig.of(schedule), facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


DEPTHWISE = Depthwise(
    names=("depthwise",),
    pattern=DEPTHWISE_CONVOLUTION,
    written=("cuda/conv/depthwise/kernel.py",),
)
