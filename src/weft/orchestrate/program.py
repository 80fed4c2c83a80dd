"""The integer program that chooses kernels, on bare numbers.

Values are small integers; a value in two formats is two values with one `base`. Nothing here knows graphs or devices.

    min   Σ (cost_k + λ launches_k) u_k
    (1)   Σ_{k writes g} u_k ≥ 1                                      every result g
    (2)   Σ_{q writes j} u_q ≥ u_k                                    every k with several outputs, every j it reads
    (2')  Σ_{q writes j} u_q ≥ Σ_{k writes only t, reads j} u_k       every (j, t), for the others
    (3)   Σ_{k writes only t} u_k ≤ 1                                 every t
    (4)   Σ_{k computes p} u_k ≥ 1                                    every unavoidable p
    (4')  Σ_{k computes p} u_k ≥ y_w,  Σ_{ways w of b} y_w ≥ 1        every p that way w needs, every unavoidable b
    (5)   Σ_{genuine q writes j} u_q ≥ u_x                            every conversion x of j
    (6)   Σ_{q writes into X, reads none of X} u_q ≥ u_k              lazily, against cyclic choices

Source: Korch (arXiv 2406.09465), section 5, for (1) and (2); the others close its gap or make it exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from weft.errors import InvalidGraphError
from weft.kernels.plan import SolverReport
from weft.orchestrate.heuristic import heuristic_plan
from weft.orchestrate.instance import Instance, execute, trim

_Vector = npt.NDArray[np.float64]
Forbidden = tuple[Sequence[int], int]
"""A plan, and by how many of its kernels another must do without."""
TIE_US = 1e-7
"""Added to the cost per position, so that equal plans have one winner."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Chosen options in an order in which they can run."""

    chosen: tuple[int, ...]
    """Positions in `Instance.options`."""
    report: SolverReport

    @property
    def cost_us(self) -> float:
        """Objective: sum of prices."""
        return self.report.objective_us


def presolve(instance: Instance, *, dominated: bool = False) -> list[int]:
    """Options that some optimal plan may need: producible, writing something new, and dominated by no other.

    One option dominates another if it reads no more, writes no less and costs no more; `dominated` keeps those.
    """
    options = instance.options
    have = set(instance.given)
    usable: set[int] = set()
    waiting = set(range(len(options)))
    while True:
        ready = {k for k in waiting if options[k].reads <= have}
        if not ready:
            break
        for k in ready:
            have |= options[k].writes
        usable |= ready
        waiting -= ready
    kept: list[int] = []
    writers: dict[int, list[int]] = {}
    for k in sorted(usable, key=lambda k: (instance.price(k), k)):
        option = options[k]
        wanted = option.writes - instance.given
        if not wanted or option.writes <= option.reads:
            continue  # writes nothing new
        if dominated:
            kept.append(k)
            continue
        first = min(wanted)
        # a cheaper option that was kept and covers this one; genuine ones must not yield to conversions, see (5)
        if any(
            options[q].reads <= option.reads
            and wanted <= options[q].writes
            and (option.conversion or not options[q].conversion)
            for q in writers.get(first, ())
        ):
            continue
        kept.append(k)
        for v in option.writes:
            writers.setdefault(v, []).append(k)
    return sorted(kept)


@dataclass(slots=True)
class _Rows:
    """Constraints Σ a_k u_k ≥ bound, gathered sparsely."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def copy(self) -> _Rows:
        return _Rows(list(self.rows), list(self.columns), list(self.values), list(self.bounds))

    def matrix(self, width: int) -> sparse.csr_array:
        return sparse.csr_array((self.values, (self.rows, self.columns)), shape=(len(self.bounds), width))

    def add(self, terms: dict[int, float], bound: float) -> None:
        self.rows.extend([len(self.bounds)] * len(terms))
        self.columns.extend(terms)
        self.values.extend(terms.values())
        self.bounds.append(bound)


def _build(instance: Instance, kept: Sequence[int]) -> _Rows:
    options = instance.options
    rows = _Rows()
    writers: dict[int, list[int]] = {}
    genuine: dict[int, list[int]] = {}
    alone: dict[int, list[int]] = {}
    covers: dict[int, list[int]] = {}
    for x, k in enumerate(kept):
        option = options[k]
        for v in option.writes:
            writers.setdefault(v, []).append(x)
            if not option.conversion:
                genuine.setdefault(v, []).append(x)
        if len(option.writes) == 1:
            alone.setdefault(next(iter(option.writes)), []).append(x)
        for p in option.computes:
            covers.setdefault(p, []).append(x)
    for g in sorted(instance.results - instance.given):
        rows.add(dict.fromkeys(writers.get(g, ()), 1.0), 1.0)  # (1)
    joint: dict[tuple[int, int], list[int]] = {}
    for x, k in enumerate(kept):
        option = options[k]
        for j in sorted(option.reads - instance.given):
            if option.conversion:
                _demand(rows, genuine.get(j, ()), [x])  # (5)
            elif len(option.writes) == 1:
                joint.setdefault((j, next(iter(option.writes))), []).append(x)
            else:
                _demand(rows, writers.get(j, ()), [x])  # (2)
    for (j, _), readers in sorted(joint.items()):
        _demand(rows, writers.get(j, ()), readers)  # (2')
    for _, same in sorted(alone.items()):
        if len(same) > 1:
            rows.add(dict.fromkeys(same, -1.0), -1.0)  # (3)
    for p in sorted(instance.unavoidable):
        if p in covers:
            rows.add(dict.fromkeys(covers[p], 1.0), 1.0)  # (4)
    _add_ways(instance, len(kept), covers, rows)
    return rows


def _add_ways(instance: Instance, start: int, covers: Mapping[int, Sequence[int]], rows: _Rows) -> None:
    """(4'): the column `start` + i says that way i is gone; ways that need each other's bases are chained."""
    ways: dict[int, list[int]] = {}
    for x, way in enumerate(instance.ways, start):
        ways.setdefault(way.base, []).append(x)
    for base, columns in sorted(ways.items()):
        if base in instance.unavoidable:
            rows.add(dict.fromkeys(columns, 1.0), 1.0)
    for x, way in enumerate(instance.ways, start):
        for p in sorted(way.needs - instance.unavoidable):
            _demand(rows, covers.get(p, ()), [x])
            if p in ways:
                _demand(rows, ways[p], [x])


def _demand(rows: _Rows, producers: Iterable[int], readers: Iterable[int]) -> None:
    terms = dict.fromkeys(producers, 1.0)
    for x in readers:
        terms[x] = terms.get(x, 0.0) - 1.0
    rows.add(terms, 0.0)


@dataclass(slots=True)
class _Model:
    """One instance made ready: options kept, constraints, costs and the relaxed optimum."""

    instance: Instance
    kept: list[int]
    rows: _Rows
    costs: _Vector
    relaxed: float
    """Optimum of the relaxation, or 0: no plan costs less."""
    reduced: _Vector
    """Reduced cost per kept option: a plan with it costs at least `relaxed` plus this. Then zeros, one per way."""

    @staticmethod
    def of(instance: Instance) -> _Model:
        kept = presolve(instance)
        reachable = set(instance.given).union(*(instance.options[k].writes for k in kept))
        if not instance.results <= reachable:
            lost = sorted(instance.results - reachable)
            raise InvalidGraphError(problem=f"no kernel produces the values {lost}")
        rows = _build(instance, kept)
        costs = np.zeros(len(kept) + len(instance.ways))
        costs[: len(kept)] = [instance.price(k) + TIE_US * x for x, k in enumerate(kept)]
        relaxed, reduced = _relax(costs, rows, RELAX_FROM)
        reduced[len(kept) :] = 0.0
        return _Model(instance, kept, rows, costs, relaxed, reduced)


def _relax(costs: _Vector, rows: _Rows, start: int) -> tuple[float, _Vector]:
    """Optimum and reduced costs of the relaxation; zeros where it fails or there are fewer options than `start`."""
    if len(costs) < max(start, 1) or not rows.bounds:
        return 0.0, np.zeros(len(costs))
    answer = linprog(costs, A_ub=-rows.matrix(len(costs)), b_ub=-np.array(rows.bounds), bounds=(0, 1), method="highs")
    if answer.status != 0:
        return 0.0, np.zeros(len(costs))
    return float(answer.fun), np.maximum(answer.lower.marginals, 0.0)


def solve(
    instance: Instance,
    *,
    gap: float = 0.0,
    seconds: float = 30.0,
    heuristic: Sequence[int] | None = None,
) -> Solution:
    """The cheapest executable choice of options.

    `gap` is relative. The heuristic plan is computed in any case (pass one to save the work); the better of it and the
    solver's incumbent comes back.

    Raises:
        InvalidGraphError: no choice of options produces the results [W901].
    """
    model = _Model.of(instance)
    fallback = tuple(heuristic) if heuristic is not None else heuristic_plan(instance, model.kept)
    return _solve(model, fallback, (), gap, seconds)


def best_solutions(instance: Instance, count: int, *, gap: float = 0.0, seconds: float = 30.0) -> list[Solution]:
    """Up to `count` plans, best first; each differs from every better one in a tenth of its kernels, at least one.

    `seconds` is for all of them.

    Raises:
        InvalidGraphError: no choice of options produces the results [W901].
    """
    started = time.perf_counter()
    model = _Model.of(instance)
    fallback: tuple[int, ...] | None = heuristic_plan(instance, model.kept)
    found: list[Solution] = []
    while len(found) < count:
        forbidden = [(s.chosen, max(1, len(s.chosen) // 10)) for s in found]
        if fallback is not None and _is_forbidden(fallback, forbidden):
            fallback = None
        try:
            left = max(0.0, seconds - (time.perf_counter() - started))
            found.append(_solve(model, fallback, forbidden, gap, left))
        except NoFurtherPlan:
            break
    return sorted(found, key=lambda s: s.cost_us)


class NoFurtherPlan(Exception):  # noqa: N818 - an answer, not an error
    """Every plan is among those that are forbidden, or time ran out before another was found."""


GUESS = 1.03
"""Without a plan at hand, options are first left out if a plan with them costs so much more than the relaxation."""


def _solve(
    model: _Model, incumbent: tuple[int, ...] | None, forbidden: Sequence[Forbidden], gap: float, seconds: float
) -> Solution:
    """Branch and bound over the options that can be in a plan cheaper than the one at hand.

    An option whose reduced cost lifts the relaxation above a known plan is in no better plan, so it is left out:
    exact, and most options are. Where no plan is known the limit is a guess that is raised until it holds.
    """
    started = time.perf_counter()
    instance, kept = model.instance, model.kept
    positions = {k: x for x, k in enumerate(kept)}
    rows = model.rows.copy()
    for plan, distance in forbidden:
        same = [positions[k] for k in plan if k in positions]
        rows.add(dict.fromkeys(same, -1.0), float(distance - len(plan)))
    best, cuts, status, bound = incumbent, 0, "heuristic", model.relaxed
    limit = model.relaxed * GUESS if best is None else _total(instance, best)
    if best is not None and limit - model.relaxed <= gap * limit:
        status, kept = "optimal", []  # the plan at hand is within the gap
    while kept:
        left = seconds - (time.perf_counter() - started)
        if left <= 0.05:
            break
        slack = 1e-6 * max(1.0, limit) + TIE_US * len(kept)
        active = np.flatnonzero(model.relaxed + model.reduced <= limit + slack)
        answer = _milp(model.costs, rows, active, left, gap)
        if answer.status == 2 and len(active) < len(model.costs):
            if best is not None:
                status, bound = "optimal", limit  # nothing cheaper than the plan at hand exists
                break
            limit = 2.0 * limit + 1.0
            continue
        if answer.status == 2:
            if forbidden:
                break
            raise InvalidGraphError(problem="the program is infeasible although every result can be produced")
        if answer.x is None:
            break  # stopped before a first incumbent
        chosen = [kept[x] for x in active[answer.x > 0.5] if x < len(kept)]
        _, missing = execute(instance, chosen)
        if missing:
            cuts += _cut_cycle(instance, kept, chosen, missing, rows)
            continue
        plan = trim(instance, chosen)
        if _is_forbidden(plan, forbidden):
            plan = execute(instance, chosen)[0]
        status = "optimal" if answer.status == 0 else "limit"
        if best is None or _total(instance, plan) < _total(instance, best):
            best = plan
        elif answer.status != 0:
            status = "heuristic"
        exhaustive = len(active) == len(model.costs) or _total(instance, best) <= limit + slack
        if status == "optimal" and not exhaustive:
            limit = _total(instance, best)  # dearer than the guess: options left out may do better
            continue
        if answer.bound is not None:
            bound = max(bound, min(answer.bound, limit))
        break
    if best is None:
        raise NoFurtherPlan
    objective = _total(instance, best)
    relative = max(0.0, objective - bound) / objective if objective > 0 else 0.0
    report = SolverReport(
        objective_us=objective,
        bound_us=min(bound, objective),
        gap=0.0 if relative < 1e-9 else relative,
        seconds=time.perf_counter() - started,
        status=status,
        candidates=len(model.kept),
        constraints=len(rows.bounds),
        cuts=cuts,
    )
    return Solution(execute(instance, best)[0], report)


def _is_forbidden(plan: Sequence[int], forbidden: Sequence[tuple[Sequence[int], int]]) -> bool:
    chosen = set(plan)
    return any(sum(k not in chosen for k in other) < distance for other, distance in forbidden)


def _total(instance: Instance, plan: Iterable[int]) -> float:
    return sum(instance.price(k) for k in plan)


def _cut_cycle(
    instance: Instance, kept: Sequence[int], chosen: Sequence[int], missing: frozenset[int], rows: _Rows
) -> int:
    """(6): whichever kernel first writes one of the missing values cannot read one of them."""
    options = instance.options
    breakers = [x for x, k in enumerate(kept) if options[k].writes & missing and not options[k].reads & missing]
    if missing & instance.results:
        rows.add(dict.fromkeys(breakers, 1.0), 1.0)
        return 1
    positions = {k: x for x, k in enumerate(kept)}
    stuck = [positions[k] for k in chosen if options[k].reads & missing]
    for x in stuck:
        _demand(rows, breakers, [x])
    return len(stuck)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    """0 optimal, 1 stopped by a limit, 2 infeasible, other: failed."""
    x: _Vector | None
    bound: float | None


RELAX_FROM = 200
"""Options from which the relaxation pays for itself."""


def _milp(costs: _Vector, rows: _Rows, active: npt.NDArray[np.intp], seconds: float, gap: float) -> _Answer:
    """Solve over some columns; the others are 0."""
    if not len(active):
        return _Answer(2, None, None)  # something is to be produced, else there were no constraint
    result = milp(
        costs[active],
        integrality=np.ones(len(active)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.matrix(len(costs))[:, active], lb=np.array(rows.bounds)),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    bound = getattr(result, "mip_dual_bound", None)
    return _Answer(int(result.status), result.x, None if bound is None else float(bound))


def reduced_costs(instance: Instance, kept: Sequence[int]) -> dict[int, float]:
    """Per option the least growth of the relaxed optimum when a plan must use it; >= 0, 0 for those it uses.

    Options that nothing can feed, or that the relaxation fails to price, get infinity and 0 respectively.
    """
    wanted = set(kept)
    usable = [k for k in presolve(instance, dominated=True) if k in wanted]
    result = dict.fromkeys(kept, float("inf"))
    if not usable:
        return result
    costs = np.array([instance.price(k) for k in usable] + [0.0] * len(instance.ways))
    _, reduced = _relax(costs, _build(instance, usable), start=0)
    return result | {k: float(r) for k, r in zip(usable, reduced[: len(usable)], strict=True)}
