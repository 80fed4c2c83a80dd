"""CUDA kernels for problems with one convolution or matrix product, with what surrounds it in the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.attention import kernel as attention
from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.pooled import choose as pooled_choose
from weft.generate.cuda.conv.pooled import kernel as pooled
from weft.generate.cuda.conv.pooled import match as pooled_match
from weft.generate.cuda.conv.separable import kernel as separable
from weft.generate.cuda.conv.separable import match as separable_match
from weft.generate.cuda.conv.stacked import kernel as stacked
from weft.generate.cuda.gemm import normed_choose
from weft.generate.cuda.gemm.common.float8 import has_float8
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.gemv import kernel as gemv
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import match as grouped_match
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.generate.cuda.gemm.mma import choose, cost
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.swap_ab import choose as swap_choose
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma import store as tma_store
from weft.generate.cuda.mlp import kernel as mlp
from weft.generate.cuda.shipped import product_place, promoted
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule
from weft.kernels.stored_names import entry_name

_MOST = 12
"""Schedules of one problem."""
_EXACT = 2
"""Of a product that may be rounded to TF32, those that do not."""
_FIRST = 3
"""Schedules that are measured of every problem."""
TENSOR = frozenset({"mma", "wgmma", "halo", "tma", "pooled", "grouped", "grouped_tma"})
"""Templates for tensor cores: a schedule of one of them for a product of f32 means TF32."""
_OWN = 6
"""Shapes of the tma template for numbers of 8 bits."""
_NEAR = 1.5
"""Shapes of the tma template that are modelled slower than so many times the best are not measured."""


def schedules(problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """Parameter sets worth measuring, the most promising first; Declined for what no template takes.

    Takes f16, bf16 and f32 problems with one CONV (1-d or 2-d) or MATMUL whose other members are elementwise on its
    result, or renamings, padding and constant gathers of its input; one MATMUL of a normalised left operand, or with
    partial sums of its result for a norm behind it; attention (two MATMULs around a softmax);
    chains of MATMULs with constant weights; a CONV, by channel or not, with a 1x1 CONV behind it; a CONV with a
    window's maximum or sum behind it; and several of the first that need nothing of each other, each with results of
    its own, or one whose results are slices of its columns. Schedules carry `template`.
    """
    if has_float8(problem.graph) and sum(CATEGORY[n.prim] is Category.LINEAR for n in problem.graph.nodes) != 1:
        return Declined("several contractions around 8-bit floats")
    if grouped_match.is_group(problem):
        return _of_group(problem, facts)
    products = sum(n.prim is Prim.MATMUL for n in problem.graph.nodes)
    if products > 1:
        layers = mlp.schedules(problem, facts)
        if products > 2 or not isinstance(layers, Declined):
            return layers
        return attention.schedules(problem, facts)
    if sum(n.prim is Prim.CONV for n in problem.graph.nodes) == 2:
        return _of_two(problem, facts)
    if has_window(problem):
        return _of_pool(problem, facts)
    p = product(problem, tf32=facts.tf32)
    if isinstance(p, Declined):
        return p
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; the templates need 8.0")
    if p.norm is not None or p.parts is not None:
        return normed_choose.schedules(p, facts)
    if p.bytes:
        return _of_bytes(p, facts)
    plain = not has_float8(problem.graph)
    by_channel = depthwise.normal(p)
    if not isinstance(by_channel, Declined):
        if not plain:
            return Declined("a depthwise convolution around 8-bit floats")
        return [s.schedule() for _, s in depthwise.shapes(by_channel, facts)]
    ranked = modelled(p, facts, plain=plain)
    place = product_place(p, cost.sizes_of(p))
    return promoted(place, [s for _, s in ranked], facts.name, {s: cycles for cycles, s in ranked})


def _of_two(problem: Problem, facts: GpuFacts) -> list[Schedule] | Declined:
    """Two convolutions, the first by channel or not."""
    first = next(n for n in problem.graph.nodes if n.prim is Prim.CONV)
    if cast("a.ConvAttrs", first.attrs).groups > 1:
        pair = separable_match.separable(problem)
        return pair if isinstance(pair, Declined) else [s.schedule() for _, s in separable.shapes(pair, facts)]
    pair = separable_match.stacked(problem)
    if isinstance(pair, Declined):
        return pair
    found = stacked.shapes(pair, facts)
    if isinstance(found, Declined):
        return found
    two = sum(_least(p, facts) for p in (pair.first, pair.second))
    return _worth(found[0][0], two, facts) or [s.schedule() for _, s in found]


def _of_pool(problem: Problem, facts: GpuFacts) -> list[Schedule] | Declined:
    """A convolution and a window of its results."""
    whole = pooled_match.pooled(problem, tf32=facts.tf32)
    if isinstance(whole, Declined):
        return whole
    found = pooled_choose.shapes(whole, facts)
    if isinstance(found, Declined):
        return found
    two = pooled_choose.apart(whole, _least(whole.first, facts), facts)
    return _worth(found[0][0], two, facts) or [s.schedule() for _, s in found]


def _of_group(problem: Problem, facts: GpuFacts) -> list[Schedule] | Declined:
    """Products that need nothing of each other."""
    found = grouped.matched(problem, tf32=facts.tf32)
    if isinstance(found, Declined):
        return found
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; the templates need 8.0")
    tensor = found[0].product.tensor
    ranked = [(cycles, s.schedule(tensor=tensor)) for cycles, s in grouped.shapes(found, facts)]
    ranked += [(cycles, s.schedule()) for cycles, s in grouped_tma.shapes(found, facts)]
    if not ranked:
        return Declined("no block that all products of the group take")
    ranked = _ordered(ranked)
    least, apart, what = min(cycles for cycles, _ in ranked), 0.0, "several"
    if grouped_match.is_split(problem):  # what is turned, others would have to turn
        whole, what = grouped_match.merged(problem, tf32=facts.tf32), "the product with one result"
        apart = math.inf if whole is None else _least(whole, facts)
    else:
        apart = sum(_least(m.product, facts) for m in found)
    if least > grouped.WORTH * apart:
        us = facts.clock_ghz * 1e3
        return Declined(f"one launch is modelled to take {least / us:.1f} us, {what} {apart / us:.1f} us")
    return [s for _, s in ranked]


def _least(p: Product, facts: GpuFacts) -> float:
    """Modelled cycles of the best kernel for a product alone."""
    return min((cycles for cycles, _ in modelled(p, facts)), default=math.inf)


def _worth(one: float, two: float, facts: GpuFacts) -> Declined | None:
    """Why one kernel is not measured where two are modelled to be that much faster."""
    if two >= pooled_choose.WORTH * one:
        return None
    us = facts.clock_ghz * 1e3
    return Declined(f"one kernel is modelled to take {one / us:.1f} us, two {two / us:.1f} us")


def has_window(problem: Problem) -> bool:
    """Whether a problem holds a window's maximum or sum."""
    return any(CATEGORY[n.prim] is Category.WINDOW for n in problem.graph.nodes)


def modelled(p: Product, facts: GpuFacts, *, plain: bool = True) -> list[tuple[float, Schedule]]:
    """(modelled cycles, schedule) of a product or convolution, in the order in which the models would measure them.

    `plain`: no value is a float of 8 bits.
    """
    name = "mma" if p.tensor else "simt"
    ranked = [(cycles, s.schedule("wgmma" if s.group else name)) for cycles, s in choose.shapes(p, facts)]
    if p.tf32:  # where the library does not round, neither may a kernel
        ranked += [(cycles, s.schedule("simt")) for cycles, s in choose.shapes(replace(p, tf32=False), facts, _EXACT)]
    ranked += [(cycles, s.schedule()) for cycles, s in (halo_choose.shapes(p, facts) if plain else ())]
    near = _NEAR * min(cycles for cycles, _ in ranked) if ranked else 0.0
    copied = tma_choose.shapes(p, facts)
    copied += tma_store.offered(p, copied, facts)
    ranked += [(cycles, s.schedule()) for cycles, s in copied if cycles <= near]
    if plain:
        ranked += [(cycles, s.schedule()) for cycles, s in swap_choose.shapes(p, facts) if cycles <= near]
    if gemv.applies(p) is None:
        ranked += [(cycles, s.schedule()) for cycles, s in gemv.shapes(p, facts)]
    return _ordered(ranked)[:_MOST]


def _of_bytes(p: Product, facts: GpuFacts) -> list[Schedule]:
    """Products of numbers of 8 bits: by `mma.sync`, floats as halves, and where TMA feeds warpgroups."""
    ranked = [(cycles, s.schedule("mma")) for cycles, s in choose.shapes(p, facts)]
    ranked += [(cycles, s.schedule()) for cycles, s in tma_choose.shapes(p, facts, _OWN)]
    if gemv.applies(p) is None:
        ranked += [(cycles, s.schedule()) for cycles, s in gemv.shapes(p, facts)]
    return [s for _, s in _ordered(ranked)[:_MOST]]


def _ordered(ranked: list[tuple[float, Schedule]]) -> list[tuple[float, Schedule]]:
    """Best first by the model, but the best of every near template before the second best of any: few are measured."""
    seen: dict[object, int] = {}
    keyed = []
    ranked = sorted(ranked, key=lambda x: x[0])
    for cycles, schedule in ranked:
        template = schedule.param("template")
        seen[template] = seen.get(template, 0) + 1
        keyed.append((seen[template] > 1 or cycles > _NEAR * ranked[0][0], cycles, schedule))
    found = [(cycles, schedule) for _, cycles, schedule in sorted(keyed, key=lambda x: x[:2])]
    # the first three are measured: one of another template is among them, however sure the models are
    first = found[0][1].param("template") if found else None
    if len(found) > _FIRST and all(s.param("template") == first for _, s in found[:_FIRST]):
        other = next((x for x in found if x[1].param("template") != first), None)
        if other is not None:
            found.remove(other)
            found.insert(_FIRST - 1, other)
    return found


def emit(problem: Problem, schedule: Schedule) -> CudaSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only."""
    entry = entry_name(problem.key, schedule)
    if schedule.param("template") in attention.TEMPLATES:
        return attention.emit(problem, schedule, entry)
    if schedule.param("template") in ("mlp", "mlp_pair", "mlp_wide"):
        return mlp.emit(problem, schedule)
    if schedule.param("template") == "separable":
        pair = separable_match.separable(problem)
        return pair if isinstance(pair, Declined) else separable.emit(pair, schedule, entry)
    if schedule.param("template") == "stacked":
        pair = separable_match.stacked(problem)
        return pair if isinstance(pair, Declined) else stacked.emit(pair, schedule, entry)
    if schedule.param("template") in grouped.TEMPLATES:
        return grouped.emit(problem, schedule, entry)
    if schedule.param("template") == grouped_tma.TEMPLATE:
        every = grouped.matched(problem, tf32=True)
        return every if isinstance(every, Declined) else grouped_tma.emit(every, schedule, entry)
    if schedule.param("template") == "pooled":
        whole = pooled_match.pooled(problem, tf32=True)
        return whole if isinstance(whole, Declined) else pooled.emit(whole, schedule, entry)
    p = product(problem, tf32=schedule.param("template") in TENSOR)
    if isinstance(p, Declined):
        return p
    if schedule.param("template") == "depthwise":
        by_channel = depthwise.normal(p)
        return by_channel if isinstance(by_channel, Declined) else depthwise.emit(by_channel, schedule, entry)
    if schedule.param("template") == "gemv":
        return gemv.emit(p, schedule, entry)
    if schedule.param("template") == "halo":
        return halo.emit(p, schedule, entry)
    if schedule.param("template") == "tma":
        return tma.emit(p, schedule, entry)
    if schedule.param("template") == "swap_ab":
        return swap.emit(p, schedule, entry)
    return mma.emit(p, schedule, entry)
