"""Pareto fronts of (LC lost, BE gained), and successive halving over what may be on them. Pure functions.

Successive halving (Jamieson and Talwalkar, 2016; for several objectives by non-dominated layers, Deb et al., 2002):
all candidates are measured a little, the better half some more, until few are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
MOST_POINTS = 4
"""Of a front, beside `do not fuse`."""
MOST_SLOWDOWN = 2.0
"""No point is taken with which a launch of LC lasts three times as long as alone."""


class Point(Protocol):
    """What is lost and gained."""

    @property
    def slowdown(self) -> float:
        """LC time lost, over LC's alone."""

    @property
    def fraction(self) -> float:
        """BE time gained, over LC's alone."""


P = TypeVar("P", bound=Point)


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` loses no more and gains no less than `b`, and one of them is better."""
    if a.slowdown > b.slowdown or a.fraction < b.fraction:
        return False
    return a.slowdown < b.slowdown or a.fraction > b.fraction


def front(points: Sequence[P]) -> list[P]:
    """Those that none dominates, by rising slowdown; of equal ones the first."""
    found: list[P] = []
    for p in sorted(points, key=lambda p: (p.slowdown, -p.fraction)):
        if not found or p.fraction > found[-1].fraction:
            found.append(p)
    return found


def worth(points: Sequence[Point], most_slowdown: float = MOST_SLOWDOWN) -> float:
    """Mean gain where the slowdown that is allowed is anywhere from 0 to `most_slowdown`, equally likely.

    The area under the staircase of a front, over its width: what choosing a point by the slack at hand brings.
    """
    steps = [p for p in front(points) if p.slowdown < most_slowdown]
    if not steps:
        return 0.0
    ends = [*(max(0.0, p.slowdown) for p in steps[1:]), most_slowdown]
    area = math.fsum(p.fraction * (e - max(0.0, p.slowdown)) for p, e in zip(steps, ends, strict=True))
    return area / most_slowdown


def thinned(points: Sequence[P], most: int = MOST_POINTS, most_slowdown: float = MOST_SLOWDOWN) -> list[P]:
    """At most so many points of a front, of those below `most_slowdown`, that are worth most together.

    One of them is the one with the largest sum of what both do in a launch, (1 + f) / (1 + s). Exact, by dynamic
    programming over the front: O(points² · most).

    Raises:
        ValueError: less than one point is wanted.
    """
    if most < 1:
        raise ValueError(f"a front of {most} points")
    steps = [p for p in front(points) if p.slowdown < most_slowdown]
    if len(steps) <= most:
        return steps
    must = max(range(len(steps)), key=lambda i: added_work(steps[i]))
    at = [max(0.0, p.slowdown) for p in steps]
    # value[k][i]: the most that k + 1 points up to i are worth, i among them, up to where i begins; must not be passed
    before: list[list[int]] = []
    value = [0.0] * len(steps)
    possible = [i <= must for i in range(len(steps))]
    best: tuple[float, int, int] = (-1.0, 0, 0)
    for k in range(most):
        for i in range(len(steps)):
            end = value[i] + steps[i].fraction * (most_slowdown - at[i])
            if possible[i] and i >= must and end > best[0]:
                best = (end, k, i)
        longer, came, can = [0.0] * len(steps), [-1] * len(steps), [False] * len(steps)
        for j in range(len(steps)):
            for i in range(j):
                if not possible[i] or (i < must < j):
                    continue
                gained = value[i] + steps[i].fraction * (at[j] - at[i])
                if not can[j] or gained > longer[j]:
                    longer[j], came[j], can[j] = gained, i, True
        before.append(came)
        value, possible = longer, can
    _, k, i = best
    chosen = [i]
    while k > 0:
        i = before[k - 1][i]
        chosen.append(i)
        k -= 1
    return [steps[i] for i in reversed(chosen)]


def added_work(p: Point) -> float:
    """Work of both in the time of one launch, in times of each alone; 1.0: no more than one after the other."""
    return (1.0 + p.fraction) / (1.0 + p.slowdown)


def layers(points: Sequence[Point]) -> list[list[int]]:
    """Positions: those that none dominates, then those that only these do, and so on; each by falling added work."""
    left = list(range(len(points)))
    found: list[list[int]] = []
    while left:
        first = [i for i in left if not any(dominates(points[j], points[i]) for j in left)]
        found.append(sorted(first, key=lambda i: (-added_work(points[i]), i)))
        left = [i for i in left if i not in set(first)]
    return found


@dataclass(frozen=True, slots=True)
class Measured(Generic[T, P]):
    """A candidate and what was last measured of it."""

    candidate: T
    point: P
    effort: int
    """With which it was."""


@dataclass(frozen=True, slots=True)
class Halved(Generic[T, P]):
    """What a search came to."""

    survivors: tuple[Measured[T, P], ...]
    """Measured with the most effort, the first layer in front."""
    dropped: tuple[Measured[T, P], ...]
    """As they were when they were dropped, the latest first."""
    failed: tuple[T, ...]
    """Of which nothing could be measured."""
    effort: int
    """Sum over all measurements."""
    unmeasured: tuple[T, ...] = ()
    """For which the budget was too small."""


def halve(
    candidates: Sequence[T],
    measure: Callable[[T, int], P | None],
    *,
    effort: int = 3,
    most_effort: int = 12,
    least: int = 2,
    share: int = 2,
    budget: int | None = None,
) -> Halved[T, P]:
    """Measure all candidates with little effort, then round by round fewer of them with `share` times as much.

    A round keeps one of `share` candidates, but all of the first layer (what no other dominates) and at least `least`.
    So where measuring has no noise and no budget is given, nothing that is on the front is ever dropped. A budget
    that is too small for all is divided evenly among the rounds, as in the published form.

    Args:
        candidates: what may be measured; of equals the first is preferred.
        measure: the point of a candidate with some effort (rounds, say); None: it cannot run.
        effort: of the first round.
        most_effort: beyond which nothing is measured again.
        least: so few are all measured to the end.
        share: the part that a round keeps, as one of so many.
        budget: the most effort that all measurements may take together; the first candidates are then preferred.

    Raises:
        ValueError: efforts that do not rise, a share that keeps all, or a budget below the first round's effort.
    """
    if not 1 <= effort <= most_effort or share < 2 or least < 1:
        raise ValueError(f"efforts of {effort} to {most_effort}, one of {share}, at least {least}")
    if budget is not None and budget < effort:
        raise ValueError(f"a budget of {budget}, where one measurement takes {effort}")
    failed: list[T] = []
    dropped: list[Measured[T, P]] = []
    spent = 0
    alive: list[T] = list(candidates)
    unmeasured: tuple[T, ...] = ()
    if budget is not None:
        first = max(1, budget // (effort * _rounds(effort, most_effort, share)))
        alive, unmeasured = alive[:first], tuple(alive[first:])
    while True:
        measured: list[Measured[T, P]] = []
        for candidate in alive:
            point = measure(candidate, effort)
            spent += effort
            if point is None:
                failed.append(candidate)
            else:
                measured.append(Measured(candidate, point, effort))
        ranked = layers([m.point for m in measured])
        order = [i for layer in ranked for i in layer]
        longer = min(most_effort, effort * share)
        left = len(measured) if budget is None else (budget - spent) // longer
        if effort >= most_effort or not measured or left < 1:
            return Halved(tuple(measured[i] for i in order), tuple(dropped), tuple(failed), spent, unmeasured)
        slots = min(left, max(least, -(-len(measured) // share), len(ranked[0])))
        kept = sorted(order[:slots])
        dropped[:0] = [m for i, m in enumerate(measured) if i not in set(kept)]
        alive = [measured[i].candidate for i in kept]
        effort = longer


def _rounds(effort: int, most_effort: int, share: int) -> int:
    """Of a search."""
    count = 1
    while effort < most_effort:
        effort, count = effort * share, count + 1
    return count
