"""Equal kernels, and layers of them: what a page of 800 kernels shows once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from weft.kernels.record import StepRecord

LONGEST = 400
"""Kernels of a layer at most."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of kernels that stands several times in a row."""

    start: int
    period: int
    """Kernels of one of them."""
    count: int
    """At least two."""

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.start + self.period * self.count


def key_of(s: StepRecord) -> Hashable:
    """Equal for kernels that do the same: by schedule, primitives, and the types and formats of what they write."""
    return s.schedule, s.primitives, tuple(x.partition(" ")[2] for x in s.outputs)


def equal(keys: Sequence[Hashable]) -> list[int]:
    """For each kernel the position of the first that is equal to it."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(k, i) for i, k in enumerate(keys)]


def repeats(keys: Sequence[Hashable]) -> list[Repeat]:
    """Runs that repeat, from the front.

    Of those that begin at a place, the one that covers most; the shorter period where two cover as many.
    """
    numbers = equal(keys)
    places: dict[int, list[int]] = {}
    for i, number in enumerate(numbers):
        places.setdefault(number, []).append(i)
    found: list[Repeat] = []
    at = 0
    while at < len(numbers):
        best: Repeat | None = None
        for other in places[numbers[at]]:
            period = other - at
            if 0 < period <= LONGEST:
                count = _count(numbers, at, period)
                if count > 1 and (best is None or period * count > best.end - best.start):
                    best = Repeat(at, period, count)
        if best is None:
            at += 1
        else:
            found.append(best)
            at = best.end
    return found


def _count(numbers: Sequence[int], start: int, period: int) -> int:
    one, count = numbers[start : start + period], 1
    while numbers[start + count * period : start + (count + 1) * period] == one:
        count += 1
    return count


def shown_once(keys: Sequence[Hashable]) -> list[int]:
    """For each kernel the one that stands for it: itself, or its place in the first of the layers that repeat."""
    stands = list(range(len(keys)))
    for r in repeats(keys):
        for i in range(r.start + r.period, r.end):
            stands[i] = r.start + (i - r.start) % r.period
    return stands
