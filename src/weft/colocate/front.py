"""The Pareto front of plan variants: for each slowdown that LC may pay, the assignments that do most BE work.

A multiple-choice knapsack as an integer program (scipy's HiGHS): of the choices that cover a step at most one is
taken; a co-runner's segment covers several steps in a row. Nothing here knows a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from weft.errors import InvalidGraphError
from weft.ir.declined import Declined
from weft.kernels.scheduling import Assignment, Variant

MOST = 8
"""Slowdowns that variants are made for."""
OFF_BY = 0.05
"""Of its prediction: a variant that was measured as a whole and is off by more is not taken."""
_SECONDS = 20.0
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """What may share the GPU with one step of LC's plan, or with several in a row."""

    steps: tuple[int, ...]
    assignment: Assignment

    def __post_init__(self) -> None:
        first = self.steps[0] if self.steps else -1
        if first < 0 or self.steps != tuple(range(first, first + len(self.steps))):
            raise ValueError(f"a choice for steps {self.steps}: one step, or some in a row")


def best(choices: Sequence[Choice], most_cost_us: float) -> tuple[int, ...]:
    """Positions of the choices with the most BE work whose cost is at most that; of equal ones the cheapest.

    Raises:
        ValueError: a cost that is no bound.
        InvalidGraphError: the solver gave no answer [W901].
    """
    if not (math.isfinite(most_cost_us) and most_cost_us >= 0):
        raise ValueError(f"a cost of at most {most_cost_us} us")
    if not choices:
        return ()
    work = np.array([c.assignment.be_us for c in choices])
    cost = np.array([c.assignment.cost_us for c in choices])
    at = [(step, column) for column, c in enumerate(choices) for step in c.steps]
    rows, columns = zip(*at, strict=True)
    covers = csr_matrix((np.ones(len(at)), (rows, columns)), shape=(max(rows) + 1, len(choices)))
    once = LinearConstraint(covers, -np.inf, 1.0)
    within = LinearConstraint(cost[None, :], -np.inf, most_cost_us)
    first = _solve(-work, [once, within])
    least = float(work[list(first)].sum()) * (1 - _TINY)
    return _solve(cost + _TINY, [once, within, LinearConstraint(work[None, :], least, np.inf)])


def _solve(objective: np.ndarray, constraints: list[LinearConstraint]) -> tuple[int, ...]:
    found = milp(
        objective, constraints=constraints, integrality=np.ones(len(objective)), bounds=Bounds(0, 1),
        options={"time_limit": _SECONDS, "mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.x is None:
        raise InvalidGraphError(problem=f"the program of plan variants has no answer: {found.message}")
    return tuple(int(i) for i in np.nonzero(np.round(found.x))[0])


def front(alone: Variant, choices: Sequence[Choice], *, slack: float, most: int = MOST) -> tuple[Variant, ...]:
    """Variant 0, then one for each of `most` slowdowns up to the slack that does more BE work than those before.

    Args:
        alone: the plan by itself.
        choices: all that may be, of all steps.
        slack: the largest slowdown, as a fraction of the plan's time.
        most: slowdowns that are tried, evenly apart.

    Raises:
        ValueError: a slack or a number of slowdowns that cannot be.
    """
    limits = _limits(slack, most)
    found = [replace(alone, number=0)]
    for limit in limits:
        taken = [choices[i] for i in best(choices, limit * alone.lc_us)]
        cost = sum(c.assignment.cost_us for c in taken)
        work = sum(c.assignment.be_us for c in taken)
        if work <= found[-1].be_us * (1 + _TINY) + _TINY or alone.lc_us + cost <= 0:
            continue
        steps = tuple(c.assignment for c in sorted(taken, key=lambda c: c.steps))
        kinds = {a.sharing for a in steps}
        grown = (alone.lc_us + cost) / alone.lc_us
        found.append(
            Variant(
                number=len(found), name=f"{'+'.join(sorted(kinds))} {cost / alone.lc_us:.1%}",
                sharing=kinds.pop() if len(kinds) == 1 else "role", lc_us=alone.lc_us * grown,
                lc_q99_us=alone.lc_q99_us * grown, be_us=work, measured=False, steps=steps,
            )
        )  # fmt: skip
    return tuple(found)


def front_of_measured(
    alone: Variant, measured: Sequence[Variant], *, slack: float, most: int = MOST
) -> tuple[Variant, ...]:
    """The same of variants that were measured as a whole: for each slowdown the one that does most BE work.

    Raises:
        ValueError: a slack or a number of slowdowns that cannot be.
    """
    found = [replace(alone, number=0)]
    for limit in _limits(slack, most):
        fit = [v for v in measured if v.lc_us <= alone.lc_us * (1 + limit) and v.be_us > found[-1].be_us]
        if fit:
            taken = max(fit, key=lambda v: (v.be_us, -v.lc_us))
            found.append(replace(taken, number=len(found)))
    return tuple(found)


def settled(predicted: Variant, lc_us: float, lc_q99_us: float) -> Variant | Declined:
    """A variant once it was measured as a whole; not taken if that is off its prediction by more than `OFF_BY`."""
    off = lc_us / predicted.lc_us - 1
    if abs(off) > OFF_BY:
        return Declined(f"{predicted.name} took {lc_us:.1f} us, {off:+.1%} of what was predicted")
    return replace(predicted, lc_us=lc_us, lc_q99_us=max(lc_us, lc_q99_us), measured=True)


def _limits(slack: float, most: int) -> list[float]:
    if not (math.isfinite(slack) and slack >= 0):
        raise ValueError(f"a slack of {slack}")
    if most < 1:
        raise ValueError(f"{most} slowdowns")
    return [slack * k / most for k in range(1, most + 1)]
