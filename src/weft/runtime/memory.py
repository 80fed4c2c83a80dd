"""A static arena: every intermediate value gets an offset once, values that live together never overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


Conflicts = NDArray[np.bool_]
"""Of each two buffers, by position: may they be needed at the same time?"""


def plan_memory(
    lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT, conflicts: Conflicts | None = None
) -> MemoryPlan:
    """Best of several first-fit orders (by size, by length, by area, by start); offsets are multiples of `alignment`.

    `conflicts` replaces the rule that buffers conflict where their steps overlap, for steps that run side by side;
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
    conflicts = _overlaps(lifetimes) if conflicts is None else conflicts
    best: tuple[int, list[int]] | None = None
    for key in keys:
        offsets, top = _first_fit(conflicts, sizes, sorted(range(len(sizes)), key=key))
        if best is None or top < best[0]:
            best = top, offsets
        if best[0] == live:
            break
    top, offsets = best if best is not None else (0, [])
    return MemoryPlan(tuple(offsets), top, live)


def _overlaps(lifetimes: Sequence[Lifetime]) -> Conflicts:
    first = np.array([x.first for x in lifetimes], np.int64)
    last = np.array([x.last for x in lifetimes], np.int64)
    begins = first[:, None] <= last
    return begins & begins.T


def _first_fit(conflicts: Conflicts, sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Each buffer into the smallest gap that holds it between those it conflicts with, else behind them."""
    count, top = len(sizes), 0
    offsets, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    placed, starts = np.zeros(count, np.int64), np.zeros(count, np.int64)
    """Placed buffers by ascending offset, and these."""
    for number, i in enumerate(order):
        others = placed[:number]
        others = others[conflicts[i][others]]
        reach = np.maximum.accumulate(ends[others])  # up to there memory is taken, behind each
        cursor = int(reach[-1]) if len(others) else 0
        if len(others):
            begins = np.concatenate((_NOWHERE, reach[:-1]))
            gaps = offsets[others] - begins
            fits = gaps >= sizes[i]
            if fits.any():
                cursor = int(begins[np.where(fits, gaps, _NO_GAP).argmin()])
        offsets[i], ends[i] = cursor, cursor + sizes[i]
        top = max(top, cursor + sizes[i])
        at = int(np.searchsorted(starts[:number], cursor, side="right"))
        placed[at + 1 : number + 1], starts[at + 1 : number + 1] = placed[at:number].copy(), starts[at:number].copy()
        placed[at], starts[at] = i, cursor
    return offsets.tolist(), top


_NOWHERE = np.zeros(1, np.int64)
_NO_GAP = np.iinfo(np.int64).max


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
