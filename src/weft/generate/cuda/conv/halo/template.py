"""The template of convolutions whose tile of the image stays in shared memory for all taps."""

from __future__ import annotations

from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.halo import choose, kernel
from weft.generate.cuda.conv.halo.kernel import HaloConfig
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.template import ALL, Declared, Kinds, Ranked, as_ranked
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule


@final
class Halo(Declared):
    """Convolutions whose windows overlap, by `mma.sync`."""

    def config(self, schedule: Schedule) -> HaloConfig:
        """The rectangle of pixels, and how its sums are divided."""
        return HaloConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked:
        """Few, unlike each other; none where windows do not overlap."""
        return as_ranked(choose.shapes(m, facts))

    def every(self, m: Product, facts: GpuFacts) -> Ranked:
        """Everything that fits."""
        return as_ranked(choose.shapes(m, facts, ALL))

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float | None:
        """None for products that it does not take."""
        return choose.modelled(m, HaloConfig.of(schedule), facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


HALO = Halo(
    names=("halo",),
    pattern=PRODUCT,
    written=("cuda/conv/halo/kernel.py",),
    kinds=Kinds(shipped=("bn", "split", "wk", "wide"), search=("bn", "split", "cluster")),
    tf32=frozenset({"halo"}),
)
