"""CUDA kernels for problems with a convolution or matrix product in them: what asks the table of templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.pooled.template import has_window
from weft.generate.cuda.gemm.common.float8 import has_float8
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.shipped import product_bucket, promoted
from weft.generate.cuda.table import NAMED, PATTERNS, TENSOR, of_pattern
from weft.generate.cuda.template import Pattern, Ranked, Template
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule
from weft.kernels.stored_names import entry_name

__all__ = ["TENSOR", "emit", "forget", "has_window", "matched", "modelled", "schedules", "template_of"]


def schedules(problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """Parameter sets worth measuring, the most promising first; Declined for what no template takes.

    Which problems that are, each pattern of the table says. Schedules carry `template`.
    """
    if has_float8(problem.graph) and sum(CATEGORY[n.prim] is Category.LINEAR for n in problem.graph.nodes) != 1:
        return Declined("several contractions around 8-bit floats")
    for pattern in PATTERNS:
        form = pattern.match(problem, tf32=facts.tf32)
        if form is None:
            continue
        if isinstance(form, Declined):
            return form
        ranked = pattern.offers(form, facts, of_pattern(pattern), lambda p: _alone(p, facts))
        if isinstance(ranked, Declined):
            return ranked
        return _promoted(form, ranked, facts) if pattern is PRODUCT else [s for _, s in ranked]
    return Declined("no product that a template takes")


def _promoted(p: Product, ranked: Ranked, facts: GpuFacts) -> list[Schedule]:
    """With the one in front that was fastest where the GPU was measured; tables know no norms."""
    plain = p.norm is None and p.partial_stats is None
    bucket = product_bucket(p, cost.sizes_of(p)) if plain else None
    return promoted(bucket, [s for _, s in ranked], facts.name, {s: cycles for cycles, s in ranked})


def modelled(p: Product, facts: GpuFacts) -> Ranked:
    """(modelled cycles, schedule) of a product or convolution, in the order in which the models would measure them."""
    ranked = PRODUCT.offers(p, facts, of_pattern(PRODUCT), lambda p: _alone(p, facts))
    return [] if isinstance(ranked, Declined) else ranked


def _alone(p: Product, facts: GpuFacts) -> float:
    """Modelled cycles of the best kernel for a product alone."""
    return min((cycles for cycles, _ in modelled(p, facts)), default=math.inf)


def template_of(schedule: Schedule) -> Template[Any] | Declined:
    """The template that wrote a schedule."""
    name = dict(schedule.params).get("template")
    found = NAMED.get(str(name))
    return Declined(f"no template is called {name!r} (any more)") if found is None else found


@lru_cache(maxsize=8)
def matched(pattern: Pattern[Any], problem: Problem, *, tf32: bool) -> object:
    """A problem in the form of a pattern's templates, or why not; asked once for several schedules."""
    found = pattern.match(problem, tf32=tf32)
    return Declined(f"no problem of the pattern {pattern.name!r}") if found is None else found


def forget() -> None:
    """Ask anew what was asked about the latest problems."""
    matched.cache_clear()


def emit(problem: Problem, schedule: Schedule) -> CudaSource | Declined:
    """The kernel of one of `schedules`; depends on its arguments only."""
    template = template_of(schedule)
    if isinstance(template, Declined):
        return template
    form = matched(template.pattern, problem, tf32=schedule.param("template") in template.tf32)
    if isinstance(form, Declined):
        return form
    entry = entry_name(problem.key, schedule)
    return template.emit(form, schedule, entry)
