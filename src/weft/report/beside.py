"""Two plans of a model side by side: which kernels of the one do what those of the other do, and who is faster where.

Kernels belong together where they come from the same operators of the model, in as many steps as that takes. So plans
of other budgets, devices and versions can be compared, whatever primitives they were made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.kernels.record import CompileRecord, StepRecord
from weft.report.data import summarised
from weft.report.frame import template

MAX_ROWS = 400
MAX_KERNELS = 12
"""Of a side that a row lists."""
MAX_OPERATORS = 4


@dataclass(slots=True)
class Side:
    """Kernels of one plan in a row."""

    steps: list[StepRecord] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Of all kernels, each alone; NaN where one was not measured."""
        return sum(s.cost_us if s.measured else math.nan for s in self.steps)

    @property
    def shown(self) -> list[tuple[str, str]]:
        """(schedule, primitives) of the dearest kernels, with how often each stands there."""
        count: dict[tuple[str, str], int] = {}
        for s in sorted(self.steps, key=lambda s: -s.cost_us):
            one = s.schedule, summarised(s.primitives)
            count[one] = count.get(one, 0) + 1
        found = [(f"{n} × {schedule}" if n > 1 else schedule, prims) for (schedule, prims), n in count.items()]
        left_out = len(found) - MAX_KERNELS
        return [*found[:MAX_KERNELS], *([(f"… {left_out} more", "")] if left_out > 0 else [])]


@dataclass(slots=True)
class Row:
    """What both plans do for some operators."""

    operators: tuple[str, ...]
    mine: Side
    other: Side

    @property
    def difference_us(self) -> float:
        """By how much the other takes longer; NaN where that is not known."""
        return self.other.us - self.mine.us


def rows_of(mine: Sequence[StepRecord], other: Sequence[StepRecord]) -> list[Row]:
    """Both plans in rows, the largest difference first; those whose difference nobody knows last."""
    parent: dict[object, object] = {}

    def root(x: object) -> object:
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    sides = (mine, other)
    for side, steps in enumerate(sides):
        for i, s in enumerate(steps):
            for name in s.operators or ("",):
                parent[root((side, i))] = root(name)
    found: dict[object, Row] = {}
    names: dict[object, dict[str, None]] = {}
    for side, steps in enumerate(sides):
        for i, s in enumerate(steps):
            at = root((side, i))
            row = found.setdefault(at, Row((), Side(), Side()))
            (row.other if side else row.mine).steps.append(s)
            names.setdefault(at, {}).update(dict.fromkeys(s.operators))
    for at, row in found.items():
        row.operators = tuple(names[at])
    return sorted(found.values(), key=lambda r: -math.inf if math.isnan(r.difference_us) else abs(r.difference_us),
                  reverse=True)  # fmt: skip


def section(mine: CompileRecord, other: CompileRecord) -> str:
    """The section of a report that compares its plan with another one, as HTML."""
    rows = rows_of(mine.steps, other.steps)
    same = [r for r in rows if r.mine.shown == r.other.shown]
    return template("beside.jinja").render(
        mine=mine, other=other, rows=rows[:MAX_ROWS], left_out=max(0, len(rows) - MAX_ROWS), same=len(same),
        total=len(rows), sums=(Side(list(mine.steps)).us, Side(list(other.steps)).us), most=MAX_OPERATORS,
    )  # fmt: skip
