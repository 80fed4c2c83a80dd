"""A static arena: every intermediate value gets an offset once, values that live together never overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; one cache line, and the widest vector."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `size` bytes that is needed from step `first` through step `last`."""

    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Offsets in bytes, one per lifetime, and how good they are."""

    offsets: tuple[int, ...]
    arena_bytes: int
    live_bytes: int
    """The largest sum of sizes (rounded up to the alignment) that are alive at one step: no arena is smaller."""

    @property
    def overhead(self) -> float:
        """Share of the arena above the largest live set: 0.05 is 5 %."""
        return self.arena_bytes / self.live_bytes - 1 if self.live_bytes else 0.0


Conflict = Callable[[int, int], bool]
"""May two buffers, by position, be needed at the same time?"""


def plan_memory(
    lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT, conflict: Conflict | None = None
) -> MemoryPlan:
    """Best of several first-fit orders (by size, by length, by area, by start); offsets are multiples of `alignment`.

    `conflict` replaces the rule that buffers conflict where their steps overlap, for steps that run side by side;
    it must hold wherever that rule does.
    Cost: O(n^2) per order. Source: greedy by size, as in Pisarchyk and Lee, arXiv:2001.03288, section 5.
    """
    sizes = [-(-x.size // alignment) * alignment for x in lifetimes]
    keys = (
        lambda i: (-sizes[i], lifetimes[i].first),
        lambda i: (-(lifetimes[i].last - lifetimes[i].first), -sizes[i]),
        lambda i: (-sizes[i] * (lifetimes[i].last - lifetimes[i].first + 1), lifetimes[i].first),
        lambda i: (lifetimes[i].first, -sizes[i]),
    )
    live = largest_live_set(lifetimes, sizes)
    conflict = conflict or (lambda i, j: _overlap(lifetimes[i], lifetimes[j]))
    best: tuple[int, list[int]] | None = None
    for key in keys:
        offsets, top = _first_fit(conflict, sizes, sorted(range(len(sizes)), key=key))
        if best is None or top < best[0]:
            best = top, offsets
        if best[0] == live:
            break
    top, offsets = best if best is not None else (0, [])
    return MemoryPlan(tuple(offsets), top, live)


def _overlap(x: Lifetime, y: Lifetime) -> bool:
    return x.first <= y.last and y.first <= x.last


def _first_fit(conflict: Conflict, sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    offsets = [0] * len(sizes)
    placed: list[int] = []
    """Placed buffers by ascending offset."""
    top = 0
    for i in order:
        best_gap, best_offset, cursor = None, None, 0
        for j in placed:
            if not conflict(i, j):
                continue
            gap = offsets[j] - cursor
            if gap >= sizes[i] and (best_gap is None or gap < best_gap):
                best_gap, best_offset = gap, cursor
            cursor = max(cursor, offsets[j] + sizes[j])
        offsets[i] = cursor if best_offset is None else best_offset
        top = max(top, offsets[i] + sizes[i])
        at = next((k for k, j in enumerate(placed) if offsets[j] > offsets[i]), len(placed))
        placed.insert(at, i)
    return offsets, top


def largest_live_set(lifetimes: Sequence[Lifetime], sizes: Sequence[int]) -> int:
    """The largest sum of these sizes, one for each lifetime, that is needed at one step."""
    if not lifetimes:
        return 0
    change = [0] * (max(x.last for x in lifetimes) + 2)
    for x, size in zip(lifetimes, sizes, strict=True):
        change[x.first] += size
        change[x.last + 1] -= size
    alive = largest = 0
    for delta in change:
        alive += delta
        largest = max(largest, alive)
    return largest
