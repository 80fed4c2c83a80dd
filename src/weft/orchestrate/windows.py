"""A plan made cheaper window by window: what some steps that follow each other do is chosen anew, all else stays.

Where many values are alive at every step, as in a training step, a plan cannot be cut into parts, and the relaxation of
the whole takes seconds and is far from any plan. A window is small all the same: what was written before it is given,
what is read behind it is to be written. A solver does that exactly in milliseconds, and finds what no change of a
single option does.

Source: large neighbourhood search (Shaw, CP 1998).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from weft.orchestrate.instance import Instance, execute, trim
from weft.orchestrate.partition import Part, part_of

SIZES = (16, 24)
"""Steps of a window, half of which the next one has, too; larger ones where the smaller find nothing any more.

A sweep by windows of 16 takes no longer than one of 8, as there are half as many of them."""
LEAST_GAIN = 1e-6
"""Microseconds that a change saves at least."""
Signature = tuple[object, ...]
Solve = Callable[[Part, float], tuple[int, ...]]
"""Options of a part that do what its plan does, in the seconds that are left."""


def improved_by_windows(
    instance: Instance,
    kept: Sequence[int],
    plan: Sequence[int],
    solve: Solve,
    *,
    seconds: float,
    begin: float = 0.0,
    sizes: Sequence[int] = SIZES,
) -> tuple[tuple[int, ...], float]:
    """A plan of the options in `kept` and its own that costs no more, in execution order; the plan itself at worst.

    Sweeps go over it in an order that keeps the readers of a value together, and in one that keeps what a step gives
    and its reader together, until neither finds anything, or for so many seconds. (As it runs, what reads a row's
    statistics may stand hundreds of steps behind what makes them.) Equal windows are solved once. `begin` is what the
    last call came to, which is given back: the order of the first sweep, 0 or 1, and the share of the steps behind
    which it begins; 0 where nothing is left to find.

    A limit on memory is not looked at.
    """
    ends = time.perf_counter() + seconds
    windows = _Windows(instance, kept, solve, ends)
    number, begin = int(begin), begin % 1.0
    best = execute(instance, plan)[0]
    for size in sizes:
        found_nothing = 0
        while found_nothing < len(_ORDERS):
            order = _ORDERS[number](instance, best)
            gained, came_to = windows.sweep(order, size, begin)
            found_nothing = 0 if gained or begin else found_nothing + 1
            best, begin = trim(instance, order) if gained else best, 0.0
            number = number if came_to else (number + 1) % len(_ORDERS)
            if time.perf_counter() >= ends:
                return best, number + came_to
    return best, 0.0


class _Windows:
    """The windows of plans of one instance."""

    def __init__(self, instance: Instance, kept: Sequence[int], solve: Solve, ends: float) -> None:
        self.instance, self.solve, self.ends = instance, solve, ends
        self.solved: dict[Signature, tuple[int, ...]] = {}
        self.computing: dict[int, list[int]] = {}
        self.converting: dict[int, list[int]] = {}
        for k in kept:
            option = instance.options[k]
            for base in option.computes:
                self.computing.setdefault(base, []).append(k)
            if option.conversion:
                for v in option.reads:
                    self.converting.setdefault(v, []).append(k)

    def sweep(self, order: list[int], size: int, begin: float = 0.0) -> tuple[float, float]:
        """Replace steps of a plan, in place; what is saved by it, and the share of the steps that was looked at."""
        options = self.instance.options
        start, gained = int(begin * len(order)), 0.0
        before = set(self.instance.given).union(*(options[k].writes for k in order[:start]))
        unread = Counter(v for k in order[start:] for v in options[k].reads)
        unread.update(self.instance.results)
        while start < len(order) and time.perf_counter() < self.ends:
            steps = order[start : start + size]
            unread.subtract(v for k in steps for v in options[k].reads)
            written = {v for k in steps for v in options[k].writes} - before
            found = self._chosen(steps, before, frozenset(v for v in written if unread[v] > 0))
            gained += self._total(steps) - self._total(found)
            order[start : start + size] = found
            half = min(max(1, size // 2), len(found))  # 0 where nobody needs the steps any more: the next are looked at
            before.update(v for k in found[:half] for v in options[k].writes)
            unread.update(v for k in found[half:] for v in options[k].reads)
            start += half
        return gained, start / max(1, len(order)) if start < len(order) else 0.0

    def _chosen(self, steps: list[int], before: set[int], alive: frozenset[int]) -> list[int]:
        """What does best what some steps do: themselves, or others, in an order in which they run."""
        inside = self._inside(steps, before)
        read = frozenset(v for k in inside for v in self.instance.options[k].reads)
        part = part_of(self.instance, inside, steps, read & before, alive)
        found = self.solved.get(part.signature)
        if found is None:
            left = self.ends - time.perf_counter()
            found = self.solved[part.signature] = self.solve(part, left) if left > 0 else part.plan
        if sum(map(part.instance.price, found)) >= self._total(steps) - LEAST_GAIN:
            return steps
        order, missing = execute(part.instance, found)
        return steps if missing else [part.options[k] for k in order]

    def _inside(self, steps: Iterable[int], before: set[int]) -> set[int]:
        """The options that a window is chosen from: they compute some of what its steps do, of what is there."""
        options = self.instance.options
        waiting = {q for k in steps for base in options[k].computes for q in self.computing.get(base, ())}
        waiting = {q for q in waiting if not options[q].writes & before}
        have, inside = set(before), set(steps)
        for k in inside:
            have |= options[k].writes
        while ready := [q for q in waiting if options[q].reads <= have]:
            waiting.difference_update(ready)
            inside.update(ready)
            for q in ready:
                have |= options[q].writes
        touched = {v for k in inside for v in options[k].reads | options[k].writes}
        inside.update(q for v in touched & have for q in self.converting.get(v, ()) if not options[q].writes <= before)
        return inside

    def _total(self, steps: Iterable[int]) -> float:
        return sum(map(self.instance.price, steps))


def _depth_first(instance: Instance, plan: Sequence[int]) -> list[int]:
    """A plan in an order in which a step follows what it waited for last."""
    options = instance.options
    writer: dict[int, int] = {}
    for k in plan:
        for v in options[k].writes - instance.given:
            writer.setdefault(v, k)
    waits = {k: {writer[v] for v in options[k].reads if v in writer} - {k} for k in plan}
    readers: dict[int, list[int]] = {}
    for k, some in waits.items():
        for q in some:
            readers.setdefault(q, []).append(k)
    place = {k: i for i, k in enumerate(plan)}
    left = {k: len(some) for k, some in waits.items()}
    ready = [(0, -place[k], k) for k in plan if not left[k]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, _, k = heapq.heappop(ready)
        order.append(k)
        for q in readers.get(k, ()):
            left[q] -= 1
            if not left[q]:
                heapq.heappush(ready, (-len(order), place[q], q))
    return order


def _by_levels(instance: Instance, plan: Sequence[int]) -> list[int]:
    """A plan in an order in which steps stand side by side that as many others come before, one after another."""
    options = instance.options
    level: dict[int, int] = {}
    """Of values."""
    steps: list[tuple[int, int, int]] = []
    for place, k in enumerate(plan):
        above = 1 + max((level[v] for v in options[k].reads if v in level), default=-1)
        steps.append((above, place, k))
        for v in options[k].writes:
            level.setdefault(v, above)
    return [k for _, _, k in sorted(steps)]


_ORDERS = (_by_levels, _depth_first)
