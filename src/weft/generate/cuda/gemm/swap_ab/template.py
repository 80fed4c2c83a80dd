"""The template of transposed products (swap-AB): few rows, or rows by eights."""

from __future__ import annotations

from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.pattern import NEAR, PRODUCT
from weft.generate.cuda.gemm.swap_ab import choose, kernel
from weft.generate.cuda.gemm.swap_ab.kernel import SwapAbConfig
from weft.generate.cuda.template import Declared, Kinds, Ranked, as_ranked
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule


@final
class SwapAb(Declared):
    """16-bit products on sm_90a."""

    def config(self, schedule: Schedule) -> SwapAbConfig:
        """The tile, its stages and its cluster."""
        return SwapAbConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked:
        """Few, unlike each other."""
        return as_ranked(choose.shapes(m, facts))

    def every(self, m: Product, facts: GpuFacts) -> Ranked:
        """Everything that fits."""
        return as_ranked(choose.every(m, facts))

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float:
        """Weights from memory, and what does not hide there."""
        return choose.cycles(m, SwapAbConfig.of(schedule), facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


SWAP_AB = SwapAb(
    names=("swap_ab",),
    pattern=PRODUCT,
    written=("cuda/gemm/swap_ab/kernel.py",),
    kinds=Kinds(shipped=("bn", "split"), later=("multicast",), search=("bm", "bn", "split", "multicast")),
    near=NEAR,
)
