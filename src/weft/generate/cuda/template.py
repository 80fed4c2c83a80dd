"""What a template of CUDA kernels declares, and what a pattern of problems does; `table` lists both.

A *pattern* is a kind of problem (a product, attention, a chain of layers): it recognises problems, brings them into the
one form that its templates read, and puts what these offer in order. A *template* writes kernels of one pattern. What
asks about templates (`templates`, `predict`, `space`, `shipped`) goes through the table and names none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

from weft.device.cuda.facts import GpuFacts
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

Ranked = list[tuple[float, Schedule]]
"""(modelled cycles in a chain of kernels, schedule); NaN for schedules that a rule chose and no model ranks."""
Alone = Callable[[Any], float]
"""Modelled cycles of the best kernel of one product (`gemm.common.product.Product`) by itself."""
ALL = 1 << 20
"""Configurations to keep where none is left out."""


class Feature(Enum):
    """What a product may have beyond a plain one; a template is asked only about products all of whose it takes."""

    BYTES = auto()
    """Operands of 8 bits, integers or floats."""
    FLOAT8 = auto()
    """Values of 8-bit floats behind a product of wider operands, or beside it."""
    CHANGING = auto()
    """A convolution whose weight is no constant."""
    NORM = auto()
    """A left operand that is normalised on the way, or partial sums of the result for a norm behind it."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Parameters by which schedules of one template differ in kind: within a kind they differ little in time."""

    shipped: tuple[str, ...] = ()
    """In the tables of GPUs that were measured (`shipped`); what follows from sizes and shared memory is none."""
    later: tuple[str, ...] = ()
    """Of them those that came after the first tables: a schedule without them is of the kind as it was then."""
    search: tuple[str, ...] = ()
    """In a search of one product's configurations (`space`)."""


M = TypeVar("M")
T_contra = TypeVar("T_contra", contravariant=True)


class Pattern(Protocol[M]):
    """A kind of problem. `M`: the form that its templates read."""

    @property
    def name(self) -> str:
        """For messages and tests."""

    @property
    def idioms(self) -> tuple[str, ...]:
        """Names of `orchestrate.idioms` that make candidates of this kind; empty where growing groups makes them."""

    def __hash__(self) -> int:
        """By identity: there is one of each."""

    def match(self, problem: Problem, *, tf32: bool) -> M | Declined | None:
        """The problem in the templates' form, or why no template takes it; None for problems of another kind.

        `tf32`: operands of f32 are rounded. The first pattern of the table that does not say None has the problem.
        """

    def offers(self, m: M, facts: GpuFacts, templates: Sequence[Template[M]], alone: Alone) -> Ranked | Declined:
        """What is worth measuring of all that these templates offer, the most promising first."""


@runtime_checkable
class Template(Protocol[T_contra]):
    """A way to write kernels of a pattern. `T_contra`: the form of a problem that the pattern's `match` gives."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of the parameter `template` in its schedules."""

    @property
    def tf32(self) -> frozenset[str]:
        """Of the names those for whose schedules operands of f32 are rounded to TF32."""

    @property
    def pattern(self) -> Pattern[Any]:
        """The problems that it writes kernels of."""

    @property
    def takes(self) -> frozenset[Feature]:
        """What products may have, where the pattern is that of products."""

    @property
    def near(self) -> float:
        """Offered where modelled within so many times the best of the templates before it in the table; inf: always."""

    @property
    def kinds(self) -> Kinds:
        """Parameters by which its schedules differ in kind."""

    def files(self, name: str) -> tuple[str, ...]:
        """Files below `weft/generate` that write the kernels of schedules of one of the names, the roles' first."""

    def config(self, schedule: Schedule) -> object:
        """The parameters of a stored schedule, read back; those that came later are as by default.

        Raises:
            KeyError: a parameter without a default is not there.
        """

    def configurations(self, m: T_contra, facts: GpuFacts) -> Ranked | Declined:
        """The few worth measuring where whole networks are searched, best first; empty or a reason for none."""

    def every(self, m: T_contra, facts: GpuFacts) -> Ranked | Declined:
        """All that fit, in no order, for a search of one problem alone."""

    def cost(self, m: T_contra, schedule: Schedule, facts: GpuFacts) -> float | None:
        """Modelled cycles of a stored schedule, as `configurations` ranks it; None where no model does.

        Raises:
            KeyError: a parameter came later than the schedule.
        """

    def emit(self, m: T_contra, schedule: Schedule, entry: str) -> CudaSource | Declined:
        """The kernel; depends on its arguments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Base of templates: what they say of themselves. What is left out is taken to be least."""

    names: tuple[str, ...]
    pattern: Pattern[Any]
    written: tuple[str, ...]
    """`files`, of all names."""
    kinds: Kinds = Kinds()
    tf32: frozenset[str] = frozenset()
    takes: frozenset[Feature] = frozenset()
    near: float = math.inf

    def files(self, name: str) -> tuple[str, ...]:
        """See `Template.files`."""
        assert name in self.names
        return self.written


class Config(Protocol):
    """The parameters of a template."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""


@overload
def as_ranked(found: Sequence[tuple[float, Config]]) -> Ranked: ...
@overload
def as_ranked(found: Sequence[tuple[float, Config]] | Declined) -> Ranked | Declined: ...
def as_ranked(found: Sequence[tuple[float, Config]] | Declined) -> Ranked | Declined:
    """Configurations with their modelled cycles, as schedules; why there are none stays."""
    return found if isinstance(found, Declined) else [(cycles, config.schedule()) for cycles, config in found]


def ranked_by(template: Template[T_contra], m: T_contra, schedules: Sequence[Schedule], facts: GpuFacts) -> Ranked:
    """Schedules in the order in which a rule has them, each with what the model says."""
    costs = [template.cost(m, s, facts) for s in schedules]
    return [(math.nan if c is None else c, s) for c, s in zip(costs, schedules, strict=True)]


def in_order(templates: Sequence[Template[T_contra]], m: T_contra, facts: GpuFacts) -> Ranked | Declined:
    """What the templates of a pattern offer, in the order of the table; the first reason where none offers any."""
    found = [t.configurations(m, facts) for t in templates]
    offered = [x for ranked in found if not isinstance(ranked, Declined) for x in ranked]
    why = next((x for x in found if isinstance(x, Declined)), None)
    return offered if offered or why is None else why


def too_old(facts: GpuFacts) -> Declined | None:
    """Why no template is for this GPU; None where there may be one."""
    if facts.capability >= 80:
        return None
    return Declined(f"compute capability {facts.capability / 10}; the templates need 8.0")


def slower(one: float, apart: float, worth: float, facts: GpuFacts, *, what: str = "two") -> Declined | None:
    """Why one kernel is not measured where `what` is modelled to take less than the share `worth` of its cycles."""
    if apart >= worth * one:
        return None
    us = facts.clock_ghz * 1e3
    return Declined(f"one kernel is modelled to take {one / us:.1f} us, {what} {apart / us:.1f} us")
