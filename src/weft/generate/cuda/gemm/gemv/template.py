"""The template of products with few rows, which stream the weights."""

from __future__ import annotations

from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.gemv import kernel
from weft.generate.cuda.gemm.gemv.kernel import GemvConfig
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.template import ALL, Declared, Feature, Kinds, Ranked, as_ranked
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule


@final
class Gemv(Declared):
    """Up to eight rows, on CUDA cores."""

    def config(self, schedule: Schedule) -> GemvConfig:
        """Columns and warps."""
        return GemvConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked | Declined:
        """The best few."""
        return kernel.applies(m) or as_ranked(kernel.shapes(m, facts))

    def every(self, m: Product, facts: GpuFacts) -> Ranked | Declined:
        """Everything that fits."""
        return kernel.applies(m) or as_ranked(kernel.shapes(m, facts, ALL))

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float:
        """Bytes at the rate that so many in flight sustain, and latencies."""
        return kernel.cycles(m, GemvConfig.of(schedule), facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


GEMV = Gemv(
    names=("gemv",),
    pattern=PRODUCT,
    written=("cuda/gemm/gemv/kernel.py",),
    kinds=Kinds(shipped=("cols", "slices", "warps"), search=("cols", "slices")),
    takes=frozenset({Feature.BYTES, Feature.FLOAT8}),
)
