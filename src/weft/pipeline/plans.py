"""Plans of what was measured: the best ones, the heuristic one, that of the library; and which of them may run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from weft.errors import InvalidGraphError, NoWorkerError, OptionError
from weft.generate.library.covered import is_covered
from weft.generate.protocol import Generator
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan
from weft.kernels.source import LibraryCall
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.pipeline import choose, finish, qualify
from weft.pipeline.deadline import Deadline, OutOfTime, call_with_timeout
from weft.pipeline.job import Job
from weft.pipeline.problems import Problems, Task
from weft.pipeline.search.kernels import Depth, Kernels, Order, write
from weft.pipeline.search.measure import Bench
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.tune.tuner import ProblemTrial

SELECT_SHARE = 0.35
"""Of the time that is left when plans are made: what that may take."""
SOLVES = 6
"""Programs that are solved at the end, at most: the time is shared among them, and some is for writing them down."""
VERIFIED_SHARE = 0.3
"""Of the time that is left, for the solver of the plan of what was verified alone."""
UNVERIFIED_BY = 0.9
"""The share of the budget after which no plan that was not verified is begun to be judged."""
_REASONS = 4
"""Of those why no plan keeps to a budget of an SM, so many are told."""
QUALIFY_GRACE_S = 0.3
"""How long an answer is waited for when the time of verifying what was not measured is up."""


def selected_plans(
    job: Job, alternatives: Alternatives, problems: Problems, known: Known
) -> tuple[list[Plan], list[str]]:
    """The stage: plans of what was measured, the best first; and why others were lost, as far as that is known.

    Raises:
        OptionError: no plan was found within the limit on memory [W001].
    """
    lost = [known.failed] if known.failed else []
    plans = job.stages.run("select", select_in_time, alternatives, problems, known, job.setting, lost, job.clock)
    return plans, lost


def select_in_time(
    alternatives: Alternatives, problems: Problems, known: Known, setting: Setting, lost: list[str], clock: Deadline
) -> list[Plan]:
    """`select_plans`; the library plan alone, made without a solver, where that takes too long or nothing has a price.

    Raises:
        OptionError: no plan was found within the limit on memory [W001].
    """
    _library_calls(problems, known, setting)
    options = setting.options
    if options.memory_limit_bytes or (options.budget_s > 0 and known.measurements):
        limit_s = clock.seconds_to(clock.at_last(SELECT_SHARE))
        share_s = max(0.1, limit_s / SOLVES)
        bounded = replace(setting, options=replace(options, solver_s=min(options.solver_s, share_s)))
        with contextlib.suppress(OutOfTime):
            selected = partial(select_plans, alternatives, problems, known, bounded, lost)
            return call_with_timeout(limit_s, selected, setting.platform.thread)
    calls = choose.rank(problems, known, library_only=True, stands=_stands(setting))
    hurry = clock.until(clock.at_last(SELECT_SHARE))
    unsolved, facts = replace(options, budget_s=0.0), setting.platform.facts
    try:
        return [choose.library_plan(alternatives.graph, calls, alternatives, unsolved, facts, stop=hurry)]
    except InvalidGraphError as error:  # an operator of the framework was found wrong
        lost.append(str(error.details["problem"]))
        return []


def select_plans(
    alternatives: Alternatives, problems: Problems, known: Known, setting: Setting, lost: list[str] | None = None
) -> list[Plan]:
    """The best three plans over what was measured, the heuristic one, and the library plan that always exists.

    With a limit on memory only those that keep to it. `lost` is told why there are none.

    Raises:
        OptionError: none of the first was found within it [W001].
    """
    _library_calls(problems, known, setting)
    stands = _stands(setting)
    ranked = choose.rank(problems, known, library_only=False, stands=stands)
    try:
        found = choose.plans(alternatives.graph, choose.offers(ranked), alternatives, setting.options)
    except InvalidGraphError as error:  # every kernel of something that no plan can do without was refused
        found = []
        if lost is not None:
            lost.append(str(error.details["problem"]))
    for count, name in enumerate(choose.TRANSFORMED, 1):
        used = {dict(s.kernel.schedule.params).get("algorithm") for p in found for s in p.steps}
        if name in used:
            plain = choose.rank(problems, known, library_only=False, avoid=choose.TRANSFORMED[:count], stands=stands)
            offers = choose.offers(plain)
            with contextlib.suppress(OptionError, InvalidGraphError):  # over the limit on memory, or nothing is left
                found.append(
                    choose.plain_plan(f"without-{name}", alternatives.graph, offers, alternatives, setting.options)
                )
    if setting.options.allow_library or setting.options.budget_s <= 0:
        calls = choose.rank(problems, known, library_only=True, stands=stands)
        # over the limit on memory, or an operator of the framework was found wrong: then there is no such plan
        with contextlib.suppress(OptionError, InvalidGraphError):
            facts = setting.platform.facts
            found.append(choose.library_plan(alternatives.graph, calls, alternatives, setting.options, facts))
    return found


def _stands(setting: Setting) -> Callable[[Task, LibraryCall], bool] | None:
    """Without a budget: which calls may stand though nobody will measure them; None: see `choose.rank`."""
    return partial(_is_covered, device=setting.platform.kind) if setting.options.budget_s <= 0 else None


def _is_covered(task: Task, call: LibraryCall, *, device: str) -> bool:
    return is_covered(task.problem, call, device)


def _library_calls(problems: Problems, known: Known, setting: Setting) -> None:
    """Make the calls that no plan can do without, where that was not done; each is made once."""
    makers = generators(library=True, generated=False, device=setting.platform.kind)
    for key, task in problems.tasks.items():
        if task.called and key not in known.kernels:
            known.wrote(key, write(Order(task), makers, setting.platform.facts, setting.options))
    if not setting.options.allow_library:
        _stand_in(problems, known, makers, setting)


def _stand_in(problems: Problems, known: Known, makers: Sequence[Generator], setting: Setting) -> None:
    """Library calls, unmeasured, for what no plan can do without and no generated kernel was found right for."""
    right = {key for (key, _), m in known.measurements.items() if m.verdict is Verdict.OK}
    for key, task in problems.tasks.items():
        if task.essential and key not in right:
            calls = write(Order(task, Depth.ALL), makers, setting.platform.facts, setting.options).pairs
            had = known.kernels.get(key, Kernels(()))
            known.wrote(key, replace(had, pairs=(*had.pairs, *(pair for pair in calls if pair not in had.pairs))))


def over_budget(options: Options, known: Known, lost: Sequence[str]) -> OptionError:
    """What to raise where no plan keeps to a budget of an SM: what was declined and refused, the most often first.

    The option at fault is `budget_s` where the search ended before it knew.
    """
    if options.budget_s <= 0:
        problem = "budget_s is 0, the cache has no plan of this model that keeps to it, and calls may not stand in one"
        return OptionError(option="sm_budget", problem=f"{problem}: give it seconds to tune in")
    counts = Counter(why for kernels in known.kernels.values() for why in kernels.declined)
    counts.update(m.error for m in known.measurements.values() if "sm_budget" in m.error)
    reasons = [f"{n} times: {why}" for why, n in counts.most_common(_REASONS)]
    said = "; ".join(dict.fromkeys([*lost, *reasons]))[:1000]
    if not known.complete and (known.measurements or not said):
        within = f"a kernel that was measured and keeps to {options.sm_budget}"
        ended = f"{options.budget_s:g} s ended before each operator had {within}"
        return OptionError(
            option="budget_s", problem=f"{ended}; compiling it again goes on from what was. {said}".rstrip()
        )
    return OptionError(option="sm_budget", problem=f"no plan of this model keeps to {options.sm_budget}: {said}")


def qualified_plans(
    job: Job,
    bench: Bench | None,
    plans: list[Plan],
    alternatives: Alternatives,
    problems: Problems,
    known: Known,
    lost: list[str],
) -> list[Plan]:
    """The stage: plans that may run, with the job's checks; without a worker those that were made, see `_stands`."""
    if bench is None:
        return [replace(p, checks=job.checks) for p in plans]
    setting, clock = job.setting, job.clock
    again = partial(select_in_time, alternatives, problems, known, setting, lost, clock)
    of_verified = partial(plans_of_verified, alternatives, problems, known, setting, clock)
    has_baseline = job.framework.run is not None
    judged_s = finish.judged_s(setting.options.budget_s, problems.run_us, finish.weight_bytes(alternatives.graph))
    found = job.stages.run(
        "qualify", qualified, bench, plans, problems, known, again, of_verified, clock, has_baseline, lost, judged_s
    )
    job.stages.note(f"{len(known.right)} calls verified without being timed, {len(known.refused)} refused")
    return [replace(p, checks=job.checks) for p in found]


def qualified(
    bench: Bench,
    plans: Sequence[Plan],
    problems: Problems,
    known: Known,
    again: qualify.Remake,
    of_verified: qualify.Remake,
    clock: Deadline,
    has_baseline: bool,
    lost: list[str],
    judged_s: float = 0.0,
) -> list[Plan]:
    """The plans whose steps a worker has verified, see `qualify`; `judged_s` of the time are left for the plans."""
    least_s = 0.0 if has_baseline else qualify.LEAST_S  # without one there is no other answer
    until = max(clock.clock() + least_s, min(clock.within(qualify.SHARE), clock.end - judged_s))

    def verify(trials: Sequence[ProblemTrial]) -> Iterator[Measurement]:
        try:
            yield from bench.tuner.measure(trials, deadline=until, grace_s=QUALIFY_GRACE_S)
        except NoWorkerError as error:
            known.failed = str(error.details["problem"])
            lost.append(known.failed)

    return qualify.qualify(
        plans,
        problems,
        known,
        verify,
        again,
        of_verified,
        lambda: clock.passed(until),
        has_baseline=has_baseline,
        lost=lost,
        covered=lambda step: clock.spent <= UNVERIFIED_BY and bench.stands_unverified(step, problems),
    )


def plans_of_verified(
    alternatives: Alternatives, problems: Problems, known: Known, setting: Setting, clock: Deadline
) -> list[Plan]:
    """The best plan of nothing but what was verified, if there is one."""

    def stands(task: Task, call: LibraryCall) -> bool:
        return known.is_right(task.problem.key, call.schedule)

    options = replace(setting.options, solver_s=min(setting.options.solver_s, max(0.1, VERIFIED_SHARE * clock.left_s)))
    offers = choose.offers(choose.rank(problems, known, library_only=False, stands=stands))
    try:
        return [choose.plain_plan("verified", alternatives.graph, offers, alternatives, options)]
    except (OptionError, InvalidGraphError):
        return []
