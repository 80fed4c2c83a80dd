"""The template of fragments: `mma.sync` and `wgmma` without TMA, and CUDA cores."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import choose, cost, kernel, normed
from weft.generate.cuda.gemm.mma.kernel import MmaConfig
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.template import Declared, Feature, Kinds, Ranked
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

_EXACT = 2
"""Of a product that may be rounded to TF32, those that do not."""
_BLOCK = ("bm", "bn", "wm", "wn", "wk", "split", "cluster")


@final
class Mma(Declared):
    """Of f32 by `mma` where it may be rounded to TF32, else by `simt`; `wgmma`: warpgroups multiply."""

    def files(self, name: str) -> tuple[str, ...]:
        """Warpgroup products have a text of their own."""
        assert name in self.names
        return (*self.written, "cuda/gemm/mma/wgmma.py") if name == "wgmma" else self.written

    def config(self, schedule: Schedule) -> MmaConfig:
        """The tile and how it is divided."""
        return MmaConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked:
        """One of each kind at least."""
        if m.norm is not None or m.partial_stats is not None:
            return [(cycles, s.schedule(_name(m, s))) for cycles, s in normed.shapes(m, facts)]
        ranked = [(cycles, s.schedule(_name(m, s))) for cycles, s in choose.shapes(m, facts)]
        if m.tf32:  # where the library does not round, neither may a kernel
            exact = choose.shapes(replace(m, tf32=False), facts, _EXACT)
            ranked += [(cycles, s.schedule("simt")) for cycles, s in exact]
        return ranked

    def every(self, m: Product, facts: GpuFacts) -> Ranked:
        """All tiles, each with each split."""
        ranked = [(cycles, s.schedule(_name(m, s))) for cycles, s in choose.every(m, facts)]
        if m.tf32:
            ranked += [(cycles, s.schedule("simt")) for cycles, s in choose.every(replace(m, tf32=False), facts)]
        return ranked

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float:
        """By the model of blocks, and what a norm adds."""
        if m.norm is not None or m.partial_stats is not None:
            return normed.cycles(m, MmaConfig.of(schedule), facts)
        return cost.cycles(cost.sizes_of(m), MmaConfig.of(schedule), facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


def _name(p: Product, s: MmaConfig) -> str:
    return "wgmma" if s.group else "mma" if p.tensor else "simt"


MMA = Mma(
    names=("mma", "wgmma", "simt"),
    pattern=PRODUCT,
    written=("cuda/gemm/mma/kernel.py",),
    kinds=Kinds(shipped=_BLOCK, search=("bm", "bn", "split", "cluster")),
    tf32=frozenset({"mma", "wgmma"}),
    takes=frozenset(Feature),
)
