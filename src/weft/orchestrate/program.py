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

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidGraphError, OptionError, WeftError
from weft.kernels.plan import SolverReport
from weft.orchestrate.constraints import Rows, build_rows, demand
from weft.orchestrate.heuristic import heuristic_plan, improved
from weft.orchestrate.instance import Instance, Option, execute, out_of_reach, trim, waiting_of
from weft.orchestrate.memory import fits, limit_memory, peak_bytes
from weft.orchestrate.partition import Part, parts_of
from weft.orchestrate.windows import improved_by_windows

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


def presolve(instance: Instance) -> list[int]:
    """Options that some optimal plan may need: producible, writing something new, and dominated by no other.

    One option dominates another if it reads no more, writes no less and costs no more.
    """
    options = instance.options
    have = set(instance.given)
    missing, readers = waiting_of(instance, range(len(options)))
    usable = [k for k, count in missing.items() if not count]
    for k in usable:  # grows meanwhile
        for v in options[k].writes - have:
            have.add(v)
            for q in readers.get(v, ()):
                missing[q] -= 1
                if not missing[q]:
                    usable.append(q)
    kept: list[int] = []
    writers: dict[int, list[int]] = {}
    for k in sorted(sorted(usable), key=[instance.price(k) for k in range(len(options))].__getitem__):
        option = options[k]
        wanted = option.writes - instance.given
        if not wanted or option.writes <= option.reads:
            continue  # writes nothing new
        reads = option.reads
        # a cheaper option that was kept and covers this one; genuine ones must not yield to conversions, see (5)
        for q in writers.get(min(wanted), ()):
            cheaper = options[q]
            if (
                cheaper.reads <= reads
                and wanted <= cheaper.writes
                and (option.conversion or not cheaper.conversion)
                and (not instance.memory_limit or _no_larger(cheaper, option))
            ):
                break
        else:
            kept.append(k)
            for v in option.writes:
                writers.setdefault(v, []).append(k)
    return sorted(kept)


def _no_larger(cheaper: Option, option: Option) -> bool:
    return cheaper.writes <= option.writes and cheaper.workspace <= option.workspace


@dataclass(slots=True)
class _Model:
    """One instance made ready: options kept, constraints, costs and the relaxed optimum."""

    instance: Instance
    kept: list[int]
    rows: Rows
    costs: _Vector
    relaxed: float
    """Optimum of the relaxation, or 0: no plan costs less."""
    reduced: _Vector
    """Reduced cost per kept option: a plan with it costs at least `relaxed` plus this. Then zeros, one per way."""
    kernels: float
    """Kernels of the relaxed optimum."""

    @staticmethod
    def of(instance: Instance) -> _Model:
        kept = presolve(instance)
        reachable = set(instance.given).union(*(instance.options[k].writes for k in kept))
        if not instance.results <= reachable:
            raise InvalidGraphError(problem=f"no kernel produces the values {list(out_of_reach(instance))}")
        rows = build_rows(instance, kept)
        costs = np.zeros(len(kept) + len(instance.ways))
        costs[: len(kept)] = [instance.price(k) + TIE_US * x for x, k in enumerate(kept)]
        relaxed, reduced, shares = _relax(costs, rows, RELAX_FROM)
        reduced[len(kept) :] = 0.0
        return _Model(instance, kept, rows, costs, relaxed, reduced, float(shares[: len(kept)].sum()))

    @property
    def step(self) -> float:
        """By how much the first core's options may lift the relaxation, in microseconds."""
        return CORE * self.relaxed / max(1.0, self.kernels)


def _relax(costs: _Vector, rows: Rows, start: int) -> tuple[float, _Vector, _Vector]:
    """Optimum, reduced costs and solution of the relaxation; zeros where it fails or `start` is above the options."""
    nothing = np.zeros(len(costs))
    if len(costs) < max(start, 1) or not rows.bounds:
        return 0.0, nothing, nothing
    from scipy.optimize import linprog  # here, because a plan that is recalled needs no solver

    answer = linprog(costs, A_ub=-rows.matrix(len(costs)), b_ub=-np.array(rows.bounds), bounds=(0, 1), method="highs")
    if answer.status != 0:
        return 0.0, nothing, nothing
    return float(answer.fun), np.maximum(answer.lower.marginals, 0.0), answer.x


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
    started = time.perf_counter()
    model = _Model.of(instance)
    fallback = tuple(heuristic) if heuristic is not None else _plan_at_hand(model, gap, seconds)
    return _first(model, fallback, gap, max(0.0, seconds - (time.perf_counter() - started)))


PARTS_FROM = 12_000
"""Options from which a plan is made by parts before the whole is solved."""
PART = 400
"""Options of a part, at least."""
PARTS_SHARE = 0.3
"""Of the time, for a plan by parts where the whole took too long."""


def _plan_at_hand(model: _Model, gap: float, seconds: float) -> tuple[int, ...]:
    """The heuristic plan, for very large instances improved part by part."""
    plan = heuristic_plan(model.instance, model.kept)
    if len(model.kept) < PARTS_FROM:
        return plan
    return plan_by_parts(model.instance, model.kept, plan, gap=gap, seconds=PARTS_SHARE * seconds)


def _first(
    model: _Model, fallback: tuple[int, ...] | None, gap: float, seconds: float, *, core: bool = False
) -> Solution:
    """The best plan; where the whole is not solved in time, the incumbent improved part by part."""
    started = time.perf_counter()
    found = _solve(model, fallback, (), gap, (1 - PARTS_SHARE) * seconds, core=core)
    left = seconds - (time.perf_counter() - started)
    if found.report.status == "optimal" or left <= 0:
        return found
    plan = plan_by_parts(model.instance, model.kept, found.chosen, gap=gap, seconds=left)
    cost = _total(model.instance, plan)
    if cost >= found.cost_us:
        return found
    report = replace(
        found.report,
        objective_us=cost,
        gap=max(0.0, cost - found.report.bound_us) / cost,
        seconds=time.perf_counter() - started,
        status="parts",
    )
    return Solution(execute(model.instance, plan)[0], report)


def plan_by_parts(
    instance: Instance, kept: Sequence[int], plan: Sequence[int], *, gap: float = 0.0, seconds: float = 30.0
) -> tuple[int, ...]:
    """A plan, cut where few values are alive, with each part solved by itself; never dearer than the given one.

    Twice: the second time the cuts of the first stand inside a part. Equal parts are solved once. What time does not
    reach stays as it was.
    """
    started = time.perf_counter()
    best = tuple(plan)
    for first, share in ((PART, 0.6), (PART // 2, 1.0)):
        left = share * seconds - (time.perf_counter() - started)
        found = _solve_parts(instance, parts_of(instance, kept, best, PART, first), gap, left)
        if fits(instance, found) and _total(instance, found) < _total(instance, best):
            best = found
    return best


def _solve_parts(instance: Instance, parts: Sequence[Part], gap: float, seconds: float) -> tuple[int, ...]:
    started = time.perf_counter()
    solved: dict[tuple[object, ...], tuple[int, ...]] = {}
    chosen: list[int] = []
    for done, part in enumerate(parts):
        best = solved.get(part.signature)
        if best is None:
            left = seconds - (time.perf_counter() - started)
            share = 2 * left / (len(parts) - done)
            best = part.plan
            if left > 0:
                best = _solve(_Model.of(part.instance), part.plan, (), gap, min(share, left)).chosen
            solved[part.signature] = best
        chosen += [part.options[k] for k in best]
    return trim(instance, chosen)


WINDOW_S, WINDOW_GAP = 0.5, 1e-3
"""What the solver may take for one window, and leave open there."""


def plan_by_windows(
    instance: Instance, *, seconds: float, start: Sequence[int] = (), begin: float = 0.0
) -> tuple[Solution, float]:
    """A plan without the relaxation of the whole, and where to begin the next time; nothing says how good it is.

    Half of the seconds are for windows at least, however long it takes to have a plan to begin with. `start` is a plan
    to do better than, or what is left of one. For programs of so many options that the relaxation alone takes seconds:
    of ViT-B/16's training step (19,000 options) the plan of `best_solutions` cost 19,156 us after 15 s, the same as the
    heuristic one, and this one 18,081 after 4 s, 17,934 after 15.

    Raises:
        InvalidGraphError: no choice of options produces the results [W901].
    """
    started = time.perf_counter()
    kept = presolve(instance)
    plan, missing = execute(instance, start)
    if missing:
        plan = execute(instance, (*heuristic_plan(instance, kept), *start))[0]
    plan = improved(instance, kept, trim(instance, plan))

    def solved(part: Part, left: float) -> tuple[int, ...]:
        return _solve(_Model.of(part.instance), part.plan, (), WINDOW_GAP, min(left, WINDOW_S)).chosen

    left = max(seconds / 2, seconds - (time.perf_counter() - started))
    plan, came_to = improved_by_windows(instance, kept, plan, solved, seconds=left, begin=begin)
    report = SolverReport(
        objective_us=_total(instance, plan),
        bound_us=0.0,
        gap=1.0,
        seconds=time.perf_counter() - started,
        status="windows",
        candidates=len(kept),
        constraints=0,
        cuts=0,
    )
    return Solution(execute(instance, plan)[0], report), came_to


CORE = 0.01
"""A core holds the options that lift the relaxation by at most this share of a kernel's average price."""
CORE_GROWTH = 10.0
"""By so much the lift grows where the core has no plan within the gap."""


def _plan_of_core(model: _Model) -> tuple[int, ...]:
    """The cheaper of two heuristic plans: over a core, where local choices are seldom misled, and over all options.

    Of a GPT-2's training step, at estimates, the core's took 10168 us, or 11080 where the relaxation had another of its
    optima, that over all options 8443.
    """
    whole = heuristic_plan(model.instance, model.kept)
    lift = model.step
    while True:
        chosen = [k for k, r in zip(model.kept, model.reduced, strict=False) if r <= lift]
        try:
            return min(heuristic_plan(model.instance, chosen), whole, key=lambda plan: _total(model.instance, plan))
        except InvalidGraphError:
            if len(chosen) == len(model.kept):
                raise
        lift *= CORE_GROWTH  # too few to produce the results


def best_solutions(
    instance: Instance,
    count: int,
    *,
    gap: float = 0.0,
    seconds: float = 30.0,
    core: bool = False,
    start: Sequence[int] = (),
) -> list[Solution]:
    """Up to `count` plans, best first; each differs from every better one in a tenth of its kernels, at least one.

    `seconds` is for all of them, once the program is written down and its relaxation solved. With `core` options that
    lift the relaxation least are solved for by themselves, then more of them, until a plan is within the gap: as exact,
    and faster where many options are nearly equal. (Not with a limit on memory.) `start` is a plan to do better than.

    Raises:
        InvalidGraphError: no choice of options produces the results [W901].
    """
    model = _Model.of(instance)
    started = time.perf_counter()

    def left() -> float:
        return max(0.0, seconds - (time.perf_counter() - started))

    core = core and model.relaxed > 0 and not instance.memory_limit
    at_hand: tuple[int, ...] | None = None
    if start and not execute(instance, start)[1]:
        at_hand = tuple(start)
    if core:
        try:
            found = [_first(model, at_hand, gap, left(), core=True)]
        except NoFurtherPlan:  # stopped before a first incumbent
            at_hand = _plan_of_core(model)
            found = [_solve(model, at_hand, (), gap, 0.0)]
        found = [_locally_best(model, found[0], ())]
    else:
        at_hand = _plan_at_hand(model, gap, seconds) if at_hand is None else at_hand
        found = [_first(model, at_hand, gap, left())]
    while len(found) < count:
        forbidden = [(s.chosen, max(1, len(s.chosen) // 10)) for s in found]
        fallback = None if at_hand is None or _is_forbidden(at_hand, forbidden) else at_hand
        try:
            another = _solve(model, fallback, forbidden, gap, left(), core=core)
        except NoFurtherPlan:
            break
        found.append(_locally_best(model, another, forbidden) if core else another)
    return sorted(found, key=lambda s: s.cost_us)


def _locally_best(model: _Model, found: Solution, forbidden: Sequence[Forbidden]) -> Solution:
    """A plan that no change of one option makes cheaper, in the time that this takes: 0.5 s for 27,000 options.

    What a gap leaves open is a share of the whole, and all small kernels together may be less than that.
    """
    plan = improved(model.instance, model.kept, found.chosen)
    cost = _total(model.instance, plan)
    if cost >= found.cost_us or _is_forbidden(plan, forbidden):
        return found
    left = max(0.0, cost - found.report.bound_us) / cost if cost > 0 else 0.0
    report = replace(found.report, objective_us=cost, bound_us=min(cost, found.report.bound_us), gap=left)
    return Solution(execute(model.instance, plan)[0], report)


class NoFurtherPlan(Exception):  # noqa: N818 - an answer, not an error
    """Every plan is among those that are forbidden, or time ran out before another was found."""


GUESS = 1.03
"""Without a plan at hand, options are first left out if a plan with them costs so much more than the relaxation."""


def _solve(
    model: _Model,
    incumbent: tuple[int, ...] | None,
    forbidden: Sequence[Forbidden],
    gap: float,
    seconds: float,
    *,
    core: bool = False,
) -> Solution:
    """Branch and bound over the options that can be in a plan cheaper than the one at hand.

    An option whose reduced cost lifts the relaxation above a known plan is in no better plan, so it is left out:
    exact, and most options are. Where no plan is known the limit is a guess that is raised until it holds. With `core`
    the limit starts low, so that few options remain, and rises until the plan found is within the gap.
    """
    started = time.perf_counter()
    instance, kept = model.instance, model.kept
    positions = {k: x for x, k in enumerate(kept)}
    rows, costs = model.rows.copy(), model.costs
    for plan, distance in forbidden:
        same = [positions[k] for k in plan if k in positions]
        rows.add(dict.fromkeys(same, -1.0), float(distance - len(plan)))
    best = incumbent if incumbent is not None and fits(instance, incumbent) else None
    cuts, status, bound = 0, "heuristic", model.relaxed
    limit = model.relaxed * GUESS if best is None else _total(instance, best)
    lift = model.step if core else math.inf
    if best is not None and limit - model.relaxed <= gap * limit:
        status, kept = "optimal", []  # the plan at hand is within the gap
    while kept:
        left = seconds - (time.perf_counter() - started)
        if left <= 0.05:
            break
        slack = 1e-6 * max(1.0, limit) + TIE_US * len(kept)
        narrow = model.relaxed + lift < limit
        active = np.flatnonzero(model.relaxed + model.reduced <= min(limit, model.relaxed + lift) + slack)
        everything = len(active) == len(model.costs)
        columns = np.concatenate((active, np.arange(len(model.costs), len(costs))))
        answer = _milp(costs, rows, columns, len(active), left / 2 if narrow else left, gap)
        if answer.status == 2 and narrow:
            lift *= CORE_GROWTH
            continue
        if answer.status == 2 and not everything:
            if best is not None:
                status, bound = "optimal", limit  # nothing cheaper than the plan at hand exists
                break
            limit = 2.0 * limit + 1.0
            continue
        if answer.status == 2:
            if best is not None or forbidden:
                break
            raise _infeasible(instance)
        if answer.x is None:
            break  # stopped before a first incumbent
        chosen = [kept[x] for x in columns[answer.x > 0.5] if x < len(kept)]
        order, missing = execute(instance, chosen)
        if missing:
            cuts += _cut_cycle(instance, kept, chosen, missing, rows)
            continue
        plan = trim(instance, chosen)
        if _is_forbidden(plan, forbidden) or not fits(instance, plan):
            plan = order
        if not fits(instance, plan):
            cuts += 1
            if len(costs) == len(model.costs):
                costs = np.concatenate((costs, np.zeros(limit_memory(instance, kept, rows, len(costs)) - len(costs))))
            else:  # it runs in another order than the constraints think
                rows.add(dict.fromkeys((positions[k] for k in chosen), -1.0), 1.0 - len(chosen))
            continue
        status = "optimal" if answer.status == 0 else "limit"
        if best is None or _total(instance, plan) < _total(instance, best):
            best = plan
        elif answer.status != 0:
            status = "heuristic"
        if narrow and not everything:
            limit = _total(instance, best)
            if limit - model.relaxed <= gap * limit:
                status = "optimal"
                break
            status = "limit"
            lift *= CORE_GROWTH
            continue
        exhaustive = everything or _total(instance, best) <= limit + slack
        if status == "optimal" and not exhaustive:
            limit = _total(instance, best)  # dearer than the guess: options left out may do better
            continue
        if answer.bound is not None:
            bound = max(bound, min(answer.bound, limit))
        break
    if best is None and instance.memory_limit and not forbidden:
        raise _infeasible(instance)
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


def _infeasible(instance: Instance) -> WeftError:
    if not instance.memory_limit:
        return InvalidGraphError(problem="the program is infeasible although every result can be produced")
    quick = heuristic_plan(instance, presolve(instance))
    problem = (
        f"no plan was found whose values take {instance.memory_limit} bytes at once; "
        f"the plan that is found without a limit takes {peak_bytes(instance, quick)}"
    )
    return OptionError(option="memory_limit_bytes", problem=problem)


def _is_forbidden(plan: Sequence[int], forbidden: Sequence[tuple[Sequence[int], int]]) -> bool:
    chosen = set(plan)
    return any(sum(k not in chosen for k in other) < distance for other, distance in forbidden)


def _total(instance: Instance, plan: Iterable[int]) -> float:
    return sum(instance.price(k) for k in plan)


def _cut_cycle(
    instance: Instance, kept: Sequence[int], chosen: Sequence[int], missing: frozenset[int], rows: Rows
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
        demand(rows, breakers, [x])
    return len(stuck)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    """0 optimal, 1 stopped by a limit, 2 infeasible, other: failed."""
    x: _Vector | None
    bound: float | None


RELAX_FROM = 200
"""Options from which the relaxation pays for itself."""


def _milp(
    costs: _Vector, rows: Rows, active: npt.NDArray[np.intp], integers: int, seconds: float, gap: float
) -> _Answer:
    """Solve over some columns, of which the first `integers` are 0 or 1 and the rest between; the others are 0."""
    if not len(active):
        return _Answer(2, None, None)  # something is to be produced, else there were no constraint
    from scipy.optimize import Bounds, LinearConstraint, milp

    result = milp(
        costs[active],
        integrality=np.arange(len(active)) < integers,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows.matrix(len(costs))[:, active], lb=np.array(rows.bounds)),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    bound = getattr(result, "mip_dual_bound", None)
    return _Answer(int(result.status), result.x, None if bound is None else float(bound))
