"""The template of convolutions in groups of few channels."""

from __future__ import annotations

from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.groups import choose, kernel
from weft.generate.cuda.conv.groups.kernel import GroupConfig
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.template import ALL, Declared, Kinds, Ranked, as_ranked
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule


@final
class GroupConv(Declared):
    """Groups of 4 to 128 channels of f16 and bf16, several to a CTA, by `mma.sync`."""

    def config(self, schedule: Schedule) -> GroupConfig:
        """The rectangle of pixels, the groups, and how their sums are divided."""
        return GroupConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked:
        """Few, unlike each other."""
        return as_ranked(choose.shapes(m, facts))

    def every(self, m: Product, facts: GpuFacts) -> Ranked:
        """Everything that fits."""
        return as_ranked(choose.shapes(m, facts, ALL))

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float | None:
        """None for products that it does not take."""
        return choose.modelled(m, GroupConfig.of(schedule), facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


GROUP_CONV = GroupConv(
    names=("group_conv",),
    pattern=PRODUCT,
    written=("cuda/conv/groups/kernel.py",),
    kinds=Kinds(search=("gs", "split", "cluster")),
)
