"""Which steps of a plan may run side by side on a GPU, and in which of several lanes (streams) each of them runs.

A lane is a chain: its steps run one after another. Between lanes only what data need is ordered, by events. `Order`
says which steps are sure to have ended before another begins; memory may be shared only along it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray

from weft.kernels.plan import Plan
from weft.runtime.values import Key, Values

CROSSING_US = 1.2
"""What it costs to wait for another lane, over following in one's own, where a kernel starts before its predecessor
has ended."""


def dependencies(plan: Plan, values: Values) -> list[frozenset[int]]:
    """Per step the earlier steps that it must wait for.

    A reader waits for the writer of the value; all accesses to a value that is written twice keep their order.
    """
    accesses: dict[Key, list[int]] = {}
    writers: dict[Key, set[int]] = {}
    found: list[frozenset[int]] = []
    for i, step in enumerate(plan.steps):
        mine: set[int] = set()
        for key in {*step.inputs, *step.outputs}:
            twice = key in values.first_write and values.first_write[key] != values.last_write[key]
            mine.update(accesses.get(key, ()) if twice else writers.get(key, ()))
            accesses.setdefault(key, []).append(i)
        for key in step.outputs:
            writers.setdefault(key, set()).add(i)
        found.append(frozenset(mine))
    return found


def assign(needs: Sequence[frozenset[int]], cost_us: Sequence[float], lanes: int) -> list[int]:
    """A lane per step, by list scheduling in plan order: where the step could begin first.

    Of several such lanes it takes the one whose last step it waits for (and among those the one that ends last), so
    that a chain stays in one lane. Cost: O(steps x lanes).
    """
    ends = [0.0] * lanes
    last = [-1] * lanes
    finish: list[float] = []
    chosen: list[int] = []
    for i, mine in enumerate(needs):

        def begin(lane: int, mine: frozenset[int] = mine) -> float:
            other = max((finish[p] + CROSSING_US for p in mine if chosen[p] != lane), default=0.0)
            return max(ends[lane], other)

        lane = min(range(lanes), key=lambda k: (begin(k), last[k] not in mine, -ends[k], k))
        ends[lane] = begin(lane) + cost_us[i]
        last[lane] = i
        finish.append(ends[lane])
        chosen.append(lane)
    return chosen


@dataclass(frozen=True, slots=True)
class Use:
    """A buffer: the step that writes it first, all steps that touch it; `kept`: it is needed after the last step."""

    first: int
    steps: tuple[int, ...]
    kept: bool = False


@final
@dataclass(frozen=True, slots=True)
class Order:
    """What follows from lanes and events."""

    lanes: tuple[int, ...]
    """Per step."""
    waits: tuple[tuple[int, ...], ...]
    """Per step the steps of other lanes whose end it waits for; those that follow from others are left out."""
    before: tuple[int, ...]
    """Per step a set of bits: the steps that have ended when it begins."""

    @property
    def width(self) -> int:
        """Lanes in use."""
        return len(set(self.lanes))

    @staticmethod
    def of(needs: Sequence[frozenset[int]], lanes: Sequence[int]) -> Order:
        """The order that keeps every need."""
        before: list[int] = []
        waits: list[tuple[int, ...]] = []
        last: dict[int, int] = {}
        for i, mine in enumerate(needs):
            known = 0
            if (previous := last.get(lanes[i])) is not None:
                known = before[previous] | 1 << previous
            crossing = []
            for p in sorted(mine, reverse=True):
                if not known >> p & 1:
                    crossing.append(p)
                    known |= before[p] | 1 << p
            before.append(known)
            waits.append(tuple(crossing))
            last[lanes[i]] = i
        return Order(tuple(lanes), tuple(waits), tuple(before))

    def conflicts(self, uses: Sequence[Use]) -> NDArray[np.bool_]:
        """Which two of these buffers, by position, may be needed at the same time?"""
        count = len(self.before)
        width = -(-count // 8)
        packed = np.frombuffer(b"".join(x.to_bytes(width, "little") for x in self.before), np.uint8)
        ended = np.unpackbits(packed.reshape(count, width), axis=1, bitorder="little").astype(np.bool_)
        """Of each step the steps that have ended when it begins."""
        done = np.zeros((len(uses), count), np.bool_)
        """Of each buffer the steps before which all its uses have ended."""
        for i, use in enumerate(uses):
            if not use.kept:
                done[i] = ended[:, list(use.steps)].all(axis=1)
        early = done[:, [use.first for use in uses]]
        return ~(early | early.T)


NOTHING_MORE: Mapping[int, frozenset[int]] = MappingProxyType({})


def order_of(plan: Plan, values: Values, lanes: int, more: Mapping[int, frozenset[int]] = NOTHING_MORE) -> Order:
    """The order of a plan in at most so many lanes; in one, the plan's own.

    `more`: earlier steps by step that it waits for, though no value tells that.
    """
    needs = dependencies(plan, values)
    if lanes <= 1:
        return Order.of(needs, [0] * len(needs))
    needs = [mine | more.get(i, frozenset()) for i, mine in enumerate(needs)]
    return Order.of(needs, assign(needs, [max(s.cost_us, 0.5) for s in plan.steps], lanes))
