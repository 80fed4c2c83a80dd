"""What the models that rank schedules say about one of them: microseconds in a chain of kernels."""

from __future__ import annotations

from functools import lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.pooled import choose as pooled_choose
from weft.generate.cuda.conv.pooled import kernel as pooled
from weft.generate.cuda.conv.pooled import match as pooled_match
from weft.generate.cuda.conv.separable import match as separable_match
from weft.generate.cuda.conv.stacked import kernel as stacked
from weft.generate.cuda.gemm import normed_choose
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.gemv import kernel as gemv
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.gemm.mma.kernel import MmaConfig
from weft.generate.cuda.gemm.swap_ab import choose as swap_choose
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import cost as tma_cost
from weft.generate.cuda.gemm.tma import shape as tma_shape
from weft.generate.cuda.gemm.tma import store as tma_store
from weft.generate.cuda.loops import pointwise
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.templates import TENSOR
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule


def predicted_us(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    """Time of a kernel of the `cuda` generator, the gap before it included; None where no model ranks it (any more).

    Only the order within a problem is what the models are made for.
    """
    if schedule.generator != "cuda":
        return None
    template = str(dict(schedule.params).get("template", ""))
    try:
        cycles = _cycles(problem, template, schedule, facts) if template else _loops(problem, schedule, facts)
    except KeyError:
        return None  # a parameter came later than the schedule
    return None if cycles is None else cycles / facts.clock_ghz / 1e3


def _loops(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    """Elementwise kernels; reductions have rules, no model."""
    if any(CATEGORY[n.prim] in (Category.REDUCE, Category.LINEAR) for n in problem.graph.nodes):
        return None
    return pointwise.cycles(pointwise.work_of(problem), Form.of(schedule), facts)


def _cycles(problem: Problem, template: str, schedule: Schedule, facts: GpuFacts) -> float | None:
    if template == "pooled":
        whole = pooled_match.pooled(problem, tf32=True)
        return (
            None
            if isinstance(whole, Declined)
            else pooled_choose.cycles(whole, pooled.PooledConfig.of(schedule), facts)
        )
    if template == "stacked":
        two = separable_match.stacked(problem)
        return None if isinstance(two, Declined) else stacked.cycles(two, stacked.StackedConfig.of(schedule), facts)
    if template in grouped.TEMPLATES:
        found = grouped.matched(problem, tf32=template in TENSOR)
        return None if isinstance(found, Declined) else grouped.cycles(found, grouped.GroupedConfig.of(schedule), facts)
    if template == grouped_tma.TEMPLATE:
        found = grouped.matched(problem, tf32=True)
        every = grouped_tma.GroupedTmaConfig.of(schedule)
        return None if isinstance(found, Declined) else grouped_tma.cycles(found, every, facts)
    p = _product(problem, tf32=template in TENSOR)
    if isinstance(p, Declined):
        return None
    if p.norm is not None or p.parts is not None:
        return normed_choose.cycles(p, schedule, facts)
    if template in ("mma", "wgmma", "simt"):
        return cost.cycles(cost.sizes_of(p), MmaConfig.of(schedule), facts)
    if template == "swap_ab":
        return swap_choose.cycles(p, swap.SwapAbConfig.of(schedule), facts)
    if template == "gemv":
        return gemv.cycles(p, gemv.GemvConfig.of(schedule), facts)
    if template == "depthwise":
        by_channel, at = depthwise.normal(p), depthwise.DepthwiseConfig.of(schedule)
        return None if isinstance(by_channel, Declined) else depthwise.cycles(by_channel, at, facts)
    if template == "halo":
        return halo_choose.modelled(p, halo.HaloConfig.of(schedule), facts)
    if template != "tma":
        return None
    shape = tma_shape.TmaConfig.of(schedule)
    case = _tma_case(problem, facts)
    gain = tma_store.GAIN if shape.store else 1.0
    return None if case is None else gain * tma_cost.cycles(case, shape, facts)


@lru_cache(maxsize=8)
def _product(problem: Problem, *, tf32: bool) -> Product | Declined:
    return product(problem, tf32=tf32)


@lru_cache(maxsize=8)
def _tma_case(problem: Problem, facts: GpuFacts) -> tma_cost.Case | None:
    p = _product(problem, tf32=True)
    return None if isinstance(p, Declined) else tma_choose.case_for(p, facts)


def forget() -> None:
    """Ask anew what was asked about the latest problems."""
    _product.cache_clear()
    _tma_case.cache_clear()
