"""No step runs in the caller's process that has not run in a worker, verified, as the plan will run it.

What was measured has. Library calls that nobody measured may stand in a plan where nothing else is there; before the
plan is linked, each is verified in the worker without being timed, or replaced by another call of its problem. Plans of
which a step could not be verified in time, or was refused, are dropped. Without a budget there is no worker: then only
calls in forms that a test of the tables covers may stand in a plan (`weft.generate.library.covered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.pipeline import choose
from weft.pipeline.problems import Problems
from weft.pipeline.search import Known
from weft.tune.tuner import ProblemTrial

Verify = Callable[[Sequence[ProblemTrial]], Iterator[Measurement]]
"""Verifies kernels in a worker; those that there was no time for have no outcome."""
AGAIN = 2
"""How often plans are made anew, where each of them had a step of which every call was refused."""
SHARE = 0.7
"""Of the time that is left when plans are there, for verifying their steps; the rest is for whole plans."""
LEAST_S = 0.5
"""So many seconds at least."""


def is_verified(plan: Plan, known: Known) -> bool:
    """Whether every step has run in a worker and was found right there."""
    return all(known.is_right(s.problem_key, s.kernel.schedule) for s in plan.steps)


def qualify(
    plans: Sequence[Plan],
    problems: Problems,
    known: Known,
    verify: Verify,
    again: Callable[[], Sequence[Plan]],
    out_of_time: Callable[[], bool],
    *,
    has_baseline: bool,
    lost: list[str],
) -> list[Plan]:
    """The plans whose steps are all verified, here or before; `known` learns what was found.

    Args:
        plans: some of their steps may be library calls that nobody measured.
        problems: what their steps solve.
        known: what was measured.
        verify: asks a worker.
        again: makes plans anew from what is known by then.
        out_of_time: whether to stop.
        has_baseline: whether there is something else than the library plan to compare with; then that is verified only
            where no other plan is left.
        lost: is told why plans were dropped.
    """
    left = _settled(plans, problems, known, verify, out_of_time, has_baseline=has_baseline)
    for _ in range(AGAIN):
        if out_of_time() or not all(_is_dead(p, known) for p in left):
            break
        left = _settled(again(), problems, known, verify, out_of_time, has_baseline=has_baseline)
    for plan in left:
        missing = [s for s in plan.steps if not known.is_right(s.problem_key, s.kernel.schedule)]
        if missing:
            refused = sum((s.problem_key, s.kernel.schedule) in known.refused for s in missing)
            said = f"{refused} were refused" if refused else "there was no time to verify them"
            lost.append(f"{len(missing)} of {len(plan.steps)} kernels of the plan {plan.name} are not verified: {said}")
    return [p for p in left if is_verified(p, known)]


def _settled(
    plans: Sequence[Plan],
    problems: Problems,
    known: Known,
    verify: Verify,
    out_of_time: Callable[[], bool],
    *,
    has_baseline: bool,
) -> list[Plan]:
    """The plans when each problem has a call that is right, or none, or time is over."""
    left = list(plans)
    while not out_of_time():
        left = [_swapped(p, problems, known) for p in left]
        others = [p for p in left if p.name != "library"]
        spared = has_baseline and any(is_verified(p, known) for p in others)
        asked: dict[str, ProblemTrial] = {}
        # one plan after another, first the one that lacks least: time may end, and one whole plan is an answer
        for plan in sorted(others if spared else left, key=lambda p: len(_unknown(p, known))):
            if _is_dead(plan, known):
                continue
            asked = {s.problem_key: _trial(s, problems, known) for s in _unknown(plan, known).values()}
            if asked:
                break
        if not asked:
            break
        answers = 0
        for found in verify(list(asked.values())):
            answers += 1
            right = found.verdict is Verdict.OK
            (known.right if right else known.refused).add((found.problem_key, found.schedule))
        if answers < len(asked):
            break  # there was no time, or there is no worker
    return [_swapped(p, problems, known) for p in left]


def _unknown(plan: Plan, known: Known) -> dict[str, Step]:
    """A step for each problem whose call nobody has verified or refused."""
    found: dict[str, Step] = {}
    for step in plan.steps:
        key = step.problem_key, step.kernel.schedule
        if not known.is_right(*key) and key not in known.refused:
            found.setdefault(step.problem_key, step)
    return found


def _trial(step: Step, problems: Problems, known: Known) -> ProblemTrial:
    found = known.measurements.get((step.problem_key, step.kernel.schedule))
    odd = found is not None and found.verdict is Verdict.NAN_CLASS
    problem = problems.entries[step.problem_key].problem
    return ProblemTrial(problem, [(step.kernel.schedule, step.kernel, None)], timed=False, finite=odd)


def _swapped(plan: Plan, problems: Problems, known: Known) -> Plan:
    """With the next call of its problem for every step that was refused."""
    steps = []
    for step in plan.steps:
        if (step.problem_key, step.kernel.schedule) in known.refused:
            calls = choose.stand_ins(problems.entries[step.problem_key], known)
            if calls:
                step = replace(step, kernel=calls[0][1], measured=False, runner_up=None, runner_up_us=0.0)
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def _is_dead(plan: Plan, known: Known) -> bool:
    """Whether some step was refused, and so was every other call of its problem."""
    return any((s.problem_key, s.kernel.schedule) in known.refused for s in plan.steps)
