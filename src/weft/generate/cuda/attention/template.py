"""Attention and linear attention: the patterns and their templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.attention import kernel, tma, tma_shapes
from weft.generate.cuda.attention import linear as attention_linear
from weft.generate.cuda.attention.called import called_attention
from weft.generate.cuda.attention.linear import Linear, linear
from weft.generate.cuda.attention.match import Attention, attention
from weft.generate.cuda.attention.shapes import (
    SPLIT,
    TF32,
    WIDEST,
    AttentionConfig,
    SplitAttentionConfig,
    cycles,
    shapes,
)
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.template import Alone, Declared, Kinds, Ranked, Template, in_order, ranked_by, too_old
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

_EXACT = 2
"""Configurations on CUDA cores where TF32 is allowed."""
_NEAR = 1.5
"""A template is among the first measured unless it is modelled slower than so many times the best."""
MOST = 8
"""Schedules of one problem."""


def _has_two_products(problem: Problem) -> bool:
    return sum(n.prim is Prim.MATMUL for n in problem.graph.nodes) == 2


@final
class LinearAttentionPattern:
    """(A B) C, where A B is small."""

    name = "linear attention"
    idioms = ("attention",)

    def match(self, problem: Problem, *, tf32: bool) -> Linear | None:
        """The operands; products in f32, which TF32 is not for."""
        found = linear(problem) if _has_two_products(problem) else None
        return None if isinstance(found, Declined) else found

    def offers(
        self, m: Linear, facts: GpuFacts, templates: Sequence[Template[Linear]], alone: Alone
    ) -> Ranked | Declined:
        """As the template has them."""
        return too_old(facts) or in_order(templates, m, facts)


@final
class AttentionPattern:
    """Two products with a softmax between them, or a call of `weft::attention`."""

    name = "attention"
    idioms = ("attention", "called_attention")

    def match(self, problem: Problem, *, tf32: bool) -> Attention | Declined | None:
        """q, k, v and the scores; whether f32 is rounded is the template's choice. Calls may be left to libraries."""
        if _has_two_products(problem):
            return attention(problem)
        calls = any(n.prim is Prim.OPAQUE for n in problem.graph.nodes)
        found = called_attention(problem) if calls else None
        return None if isinstance(found, Declined) else found

    def offers(
        self, m: Attention, facts: GpuFacts, templates: Sequence[Template[Attention]], alone: Alone
    ) -> Ranked | Declined:
        """Best first by the models; of near templates the best of each before the second best of any."""
        old = too_old(facts)
        if old is not None:
            return old
        if max(m.qk, m.head) > WIDEST:
            return Declined(f"heads of {m.qk} and {m.head} columns; attention takes {WIDEST}")
        each = [found for t in templates if (found := t.configurations(m, facts)) and not isinstance(found, Declined)]
        if not each:
            return Declined("no shape of attention fits")
        if len(each) == 1:
            return each[0]
        near = _NEAR * min(found[0][0] for found in each)
        first = sorted((found[0] for found in each if found[0][0] <= near), key=lambda x: x[0])
        rest = sorted((x for found in each for x in found if x not in first), key=lambda x: x[0])
        return [*first, *rest][:MOST]


LINEAR_ATTENTION_PROBLEM = LinearAttentionPattern()
ATTENTION_PROBLEM = AttentionPattern()


@final
class FragmentAttention(Declared):
    """By `mma.sync`, or CUDA cores; the keys of the same rows may be shared by a cluster."""

    def config(self, schedule: Schedule) -> AttentionConfig:
        """How rows and keys are divided."""
        return (SplitAttentionConfig if schedule.param("template") == SPLIT else AttentionConfig).of(schedule)

    def configurations(self, m: Attention, facts: GpuFacts) -> Ranked:
        """Few, unlike each other; where f32 may be rounded, a few that are not."""
        found = _ranked(m, facts)
        if not facts.tf32 or m.dtype is not DType.F32:
            return found
        rounded = replace(m, tf32=True)  # where the library does not round, neither may a kernel
        return [*((cycles(rounded, s, facts), s.schedule(tf32=True)) for s in shapes(rounded, facts)), *found[:_EXACT]]

    def every(self, m: Attention, facts: GpuFacts) -> Ranked:
        """As offered: nobody searches attention alone."""
        return self.configurations(m, facts)

    def cost(self, m: Attention, schedule: Schedule, facts: GpuFacts) -> float:
        """Infinite where it does not fit."""
        rounded = schedule.param("template") == TF32
        return cycles(replace(m, tf32=rounded), self.config(schedule), facts)

    def emit(self, m: Attention, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return kernel.emit(m, schedule, entry)


def _ranked(p: Attention, facts: GpuFacts) -> Ranked:
    return [(cycles(p, s, facts), s.schedule()) for s in shapes(p, facts)]


@final
class AttentionTma(Declared):
    """By TMA and warpgroups."""

    def config(self, schedule: Schedule) -> tma_shapes.AttentionTmaConfig:
        """Warpgroups, and tiles of keys."""
        return tma_shapes.AttentionTmaConfig.of(schedule)

    def configurations(self, m: Attention, facts: GpuFacts) -> Ranked:
        """None for what TMA does not take."""
        return tma.ranked(m, facts)

    def every(self, m: Attention, facts: GpuFacts) -> Ranked:
        """As offered: nobody searches attention alone."""
        return self.configurations(m, facts)

    def cost(self, m: Attention, schedule: Schedule, facts: GpuFacts) -> float:
        """By the steps of every tile of rows."""
        return tma.modelled(m, tma_shapes.AttentionTmaConfig.of(schedule), facts)

    def emit(self, m: Attention, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return solo(tma.roles(m, schedule, kernel.EXP2), entry)


@final
class LinearAttention(Declared):
    """A block owns one head, on CUDA cores."""

    def config(self, schedule: Schedule) -> attention_linear.LinearAttentionConfig:
        """Threads."""
        return attention_linear.LinearAttentionConfig.of(schedule)

    def configurations(self, m: Linear, facts: GpuFacts) -> Ranked | Declined:
        """Numbers of threads, as a rule orders them."""
        found = attention_linear.schedules(m, facts)
        return found if isinstance(found, Declined) else ranked_by(self, m, found, facts)

    def every(self, m: Linear, facts: GpuFacts) -> Ranked | Declined:
        """As offered: there are no others."""
        return self.configurations(m, facts)

    def cost(self, m: Linear, schedule: Schedule, facts: GpuFacts) -> float | None:
        """None: a rule orders the few."""
        return None

    def emit(self, m: Linear, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel."""
        return solo(attention_linear.roles(m, schedule), entry)


ATTENTION = FragmentAttention(
    names=("attention", TF32, SPLIT),
    pattern=ATTENTION_PROBLEM,
    written=("cuda/attention/kernel.py",),
    tf32=frozenset({TF32}),
)
ATTENTION_TMA = AttentionTma(
    names=(tma_shapes.TEMPLATE,),
    pattern=ATTENTION_PROBLEM,
    written=("cuda/attention/tma.py",),
    kinds=Kinds(search=("bn", "pingpong")),
)
LINEAR_ATTENTION = LinearAttention(
    names=("linear_attention",),
    pattern=LINEAR_ATTENTION_PROBLEM,
    written=("cuda/attention/linear.py",),
)
