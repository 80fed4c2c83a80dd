"""All configurations of the templates that a product fits, and the few of them that are worth measuring.

The compiler asks `templates.schedules` for a dozen, by which whole networks are searched in seconds; here one product
may have all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import cast

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import product
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.gemm.pattern import PRODUCT, taking
from weft.generate.cuda.shipped import kind_of, measured_best, product_bucket
from weft.generate.cuda.table import NAMED, of_pattern
from weft.generate.cuda.template import Ranked, too_old
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

__all__ = ["Ranked", "kind", "pruned", "space"]

_NEAR = 1.5
"""What the model has slower than so many times the best is measured late, if at all."""
_ALIKE = 0.15
"""Share by which the model must have one faster for each of the same kind before it."""
_FROM_TABLE = 4
"""Kinds that are measured because they were fastest elsewhere."""


def space(problem: Problem, facts: GpuFacts) -> Ranked | Declined:
    """Every feasible configuration of the templates for one product, the most promising first."""
    p = product(problem, tf32=facts.tf32)
    if isinstance(p, Declined):
        return p
    old = too_old(facts)
    if old is not None:
        return old
    found: Ranked = []
    for template in taking(p, of_pattern(PRODUCT)):
        every = template.every(p, facts)
        found += [] if isinstance(every, Declined) else every
    per_us = facts.clock_ghz * 1e3
    return sorted(((cycles / per_us, s) for cycles, s in found), key=_rank)


def _rank(item: tuple[float, Schedule]) -> tuple[float, int, int, int, str]:
    """Where the model sees no difference, more stages, blocks that go on, and sums of more warps come first."""
    us, s = item
    known = dict(s.params)
    stages, blocks, slices = (-cast("int", known.get(name, 0)) for name in ("stages", "persistent_ctas", "slices"))
    return us, stages, blocks, slices, str(s)


def pruned(problem: Problem, facts: GpuFacts, ranked: Ranked, keep: int = 16) -> Ranked:
    """The few that are worth measuring.

    First the kinds that the compiler would measure, as far as the model has them near the best, and one of each
    template, and among them those that were fastest where the GPU was measured before; then the others, those of new
    kinds before those alike.
    """
    modelled = {s: us for us, s in ranked}
    found = templates.schedules(problem, facts)
    listed = [] if isinstance(found, Declined) else list(found)
    listed[1:1] = _measured_best(problem, facts, ranked)
    near = _NEAR * ranked[0][0] if ranked else 0.0
    chosen: list[Schedule] = []
    kinds: set[object] = set()
    for s in listed:
        new = all(x.param("template") != s.param("template") for x in chosen)
        if s in modelled and (new or (modelled[s] <= near and kind(s) not in kinds)):
            kinds.add(kind(s))
            chosen.append(s)
    known = set(chosen)
    chosen += [s for s in _spread(ranked, kinds) if s not in known]
    return [(modelled[s], s) for s in chosen[:keep]]


def _spread(ranked: Ranked, kinds: Collection[object]) -> list[Schedule]:
    """By rank, but those alike later than their number says; each of `kinds` is there once already."""
    counts = Counter(kinds)
    seen: set[object] = set()
    keyed = []
    for us, s in ranked:
        alike = tuple(x for x in s.params if x[0] != "stages")
        again = s.param("template") == "tma" and alike in seen  # with fewer stages these are hardly ever faster
        seen.add(alike)
        keyed.append((again, us * (1.0 + _ALIKE * counts[kind(s)]), s))
        counts[kind(s)] += 1
    return [s for _, _, s in sorted(keyed, key=lambda x: x[:2])]


def _measured_best(problem: Problem, facts: GpuFacts, ranked: Ranked) -> list[Schedule]:
    """Of each of the kinds that the GPU's table has as the fastest, the one that the model likes best."""
    p = product(problem, tf32=facts.tf32)
    if isinstance(p, Declined):
        return []
    firsts: dict[str, Schedule] = {}
    for _, s in ranked:
        firsts.setdefault(kind_of(s), s)
    kinds = measured_best(product_bucket(p, cost.sizes_of(p)), facts.name, _FROM_TABLE)
    return [firsts[k] for k in kinds if k in firsts]


def kind(s: Schedule) -> tuple[object, ...]:
    """What makes configurations different; those of one kind differ little in time."""
    known = dict(s.params)
    name = str(known.get("template"))
    return name, *(known.get(x) for x in (NAMED[name].kinds.search if name in NAMED else ()))
