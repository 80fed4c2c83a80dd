"""From a task to its kernels: how many are asked of the generators, and which of these are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from weft.device.any import DeviceFacts
from weft.generate.library.algorithm import names_algorithm
from weft.generate.offer import Offer, kernels_of
from weft.generate.protocol import Generator
from weft.kernels.source import Kernel, LibraryCall, Schedule
from weft.options import Options
from weft.pipeline.problems import Task

FIRST = 1
"""Kernels of each generator that are made first at least, and in a hurry at most."""
FIRST_CALLS = 3
"""Library calls that are made first where they are spared and nothing is generated."""
LIBRARY_FROM_US = 7.0
"""Where calls are spared, products whose estimate is below this are first tried without the library: it seldom won."""


class Depth(IntEnum):
    """How many of a task's kernels are measured."""

    ONE = 0
    """Of each generator, as time is short."""
    FEW = 1
    """The best-looking few of each generator."""
    ALL = 2


@final
@dataclass(frozen=True, slots=True)
class Kernels:
    """What generators wrote for a task so far."""

    pairs: tuple[tuple[Schedule, Kernel], ...]
    """Those that are measured first stand in front."""
    first: int = 0
    """How many these are."""
    more: bool = False
    """Whether a generator may make more for the asking."""
    each: int = 0
    """How many each generator was asked for to be measured first."""
    declined: tuple[str, ...] = ()
    """Why generators made none, or fewer."""


@final
@dataclass(frozen=True, slots=True)
class Order:
    """A task whose kernels are to be written and measured."""

    task: Task
    depth: Depth = Depth.FEW
    library_near: bool = True
    """Whether a library's further algorithms are worth a trial."""
    before: Kernels | None = None
    """What was written for it already."""

    @property
    def written(self) -> Kernels | None:
        """What was written before, where all is there that is to be measured; None: generators must be asked."""
        had = self.before
        if had is None or (self.depth is Depth.ALL and had.more):
            return None
        enough = self.depth is Depth.ALL or had.each >= self.first_few or not (had.more or had.first < len(had.pairs))
        return had if enough else None

    @property
    def first_few(self) -> int:
        """Kernels of each generator that are measured first, at most."""
        return FIRST if self.depth is Depth.ONE else self.task.policy.first

    def most(self, options: Options) -> int:
        """Kernels to ask each generator for."""
        return options.keep_per_problem if self.depth is Depth.ALL else min(self.first_few, options.keep_per_problem)

    def chosen(self, kernels: Kernels) -> tuple[tuple[Schedule, Kernel], ...]:
        """Those that are to be measured."""
        if self.depth is not Depth.ALL:
            return kernels.pairs[: kernels.first]
        return kernels.pairs if self.library_near else tuple(x for x in kernels.pairs if not names_algorithm(x[1]))

    def taken(self, offers: Sequence[Offer]) -> Kernels:
        """What the generators made, in their order."""
        counts = self._first_of(offers)
        first = [pair for offer, n in zip(offers, counts, strict=True) for pair in offer.kernels[:n]]
        others = [pair for offer, n in zip(offers, counts, strict=True) for pair in offer.kernels[n:]]
        more = any(offer.more for offer in offers) and self.depth is not Depth.ALL
        declined = tuple(why for offer in offers for why in offer.declined)
        if self.before is not None:
            declined = self.before.declined
        return Kernels((*first, *others), len(first), more, self.first_few, declined)

    def _first_of(self, offers: Sequence[Offer]) -> list[int]:
        """How many kernels of each offer are measured first."""
        task = self.task
        if not task.policy.spares_calls:
            return [self.first_few] * len(offers)
        library = [any(isinstance(kernel, LibraryCall) for _, kernel in offer.kernels) for offer in offers]
        generated = any(offer.kernels for offer, its in zip(offers, library, strict=True) if not its)
        if self.depth is Depth.ONE:
            return [0 if its and generated else FIRST for its in library]
        worth = task.sort.startswith("product") and task.estimate_us >= LIBRARY_FROM_US
        calls = 1 if worth else 0 if generated else FIRST_CALLS
        return [calls if its else task.policy.first for its in library]


def write(order: Order, generators: Sequence[Generator], facts: DeviceFacts, options: Options) -> Kernels:
    """The kernels of an order, written here; what was written before is not written again."""
    if (had := order.written) is not None:
        return had
    most = order.most(options)
    return order.taken([kernels_of(g, order.task.problem, facts, most) for g in generators])
