"""The template of TMA and warpgroups."""

from __future__ import annotations

from typing import final

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.pattern import NEAR, PRODUCT
from weft.generate.cuda.gemm.tma import choose, cost, kernel, normed_choose, store
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.template import Declared, Feature, Kinds, Ranked, as_ranked
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

_KEPT, _OF_BYTES = 4, 6
"""Configurations of a product, and of one of numbers of 8 bits."""


@final
class Tma(Declared):
    """Products and convolutions on sm_90a."""

    def config(self, schedule: Schedule) -> TmaConfig:
        """The tile, its stages and its cluster."""
        return TmaConfig.of(schedule)

    def configurations(self, m: Product, facts: GpuFacts) -> Ranked:
        """Also with results stored by TMA, where that was seen to gain."""
        if m.norm is not None or m.partial_stats is not None:
            return as_ranked(normed_choose.shapes(m, facts))
        found = choose.shapes(m, facts, _KEPT if m.bytes is None else _OF_BYTES)
        found += store.offered(m, found, facts)
        return as_ranked(found)

    def every(self, m: Product, facts: GpuFacts) -> Ranked:
        """Also with fewer stages, and a CTA for each tile."""
        found = choose.every(m, facts)
        found += store.offered(m, choose.shapes(m, facts, _KEPT), facts)
        return as_ranked(found)

    def cost(self, m: Product, schedule: Schedule, facts: GpuFacts) -> float | None:
        """None for products that it does not take."""
        s = TmaConfig.of(schedule)
        if m.norm is not None or m.partial_stats is not None:
            return normed_choose.cycles(m, s, facts)
        case = choose.case_for(m, facts)
        return None if case is None else (costs_of(facts).tma.stored if s.store else 1.0) * cost.cycles(case, s, facts)

    def emit(self, m: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


_LATER = ("multicast", "stream_k", "coop_fixup", "store")

TMA = Tma(
    names=("tma",),
    pattern=PRODUCT,
    written=("cuda/gemm/tma/kernel.py",),
    kinds=Kinds(
        shipped=("bm", "bn", "consumers", "pingpong", "min_ctas", "split", "halo_stages", "taps_per_stage"),
        later=_LATER,
        search=("bm", "bn", "split", "pingpong", *_LATER),
    ),
    tf32=frozenset({"tma"}),
    takes=frozenset(Feature),
    near=NEAR,
)
