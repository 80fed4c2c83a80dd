"""No step runs in the caller's process that has not run in a worker, verified, as the plan will run it.

What was measured has. Library calls that nobody measured may stand in a plan where nothing else is there; before the
plan is linked, each is verified in the worker without being timed, or replaced by another call of its problem. Plans of
which a step could not be verified in time, or was refused, are dropped; where none is left but the library plan, one
more is made of nothing but what was verified. Without a budget there is no worker: then only calls in forms that a
test of the tables covers may stand in a plan (`weft.generate.library.covered`). That also holds where a budget was too
short to verify them: a larger budget gives no less than none, and what was measured is not lost for such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from weft.device.any import DeviceFacts
from weft.errors import InvalidGraphError
from weft.generate.library.covered import is_covered
from weft.generate.registry import generators
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.source import LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.pipeline import choose
from weft.pipeline.problems import Problems
from weft.pipeline.search.kernels import Order, write
from weft.pipeline.search.prices import Known
from weft.tune.tuner import ProblemTrial

Verify = Callable[[Sequence[ProblemTrial]], Iterator[Measurement]]
"""Verifies kernels in a worker; those that there was no time for have no outcome."""
Remake = Callable[[], Sequence[Plan]]
"""Makes plans anew from what is known by then."""
AGAIN = 2
"""How often plans are made anew, where each of them had a step of which every call was refused."""
TRIAL_S, BYTES_PER_S, PRIOR_S = 0.01, 100e6, 0.2
"""What verifying a call takes, about: so many seconds, and one for so many bytes of its inputs and outputs. It counts
for so many seconds of looking, and what was seen counts more and more."""
MORE, GROUP_SHARE = 1.25, 0.25
"""A plan is begun to be verified with so much more time than it is expected to take, and so much of the time for
measuring, because what is measured is taken in groups."""
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
    again: Remake,
    of_verified: Remake,
    out_of_time: Callable[[], bool],
    *,
    has_baseline: bool,
    lost: list[str],
    covered: Callable[[Step], bool] = lambda step: False,
) -> list[Plan]:
    """The plans whose steps are all verified, here or before; `known` learns what was found.

    Where there are none for want of time but the library plan, those of which what is not verified is `covered`; all of
    it may be of the library plan alone, as others are chosen by what was measured.

    Args:
        plans: some of their steps may be library calls that nobody measured.
        problems: what their steps solve.
        known: what was measured.
        verify: asks a worker.
        again: makes plans anew.
        of_verified: makes plans of kernels alone that were verified, if there are such plans.
        out_of_time: whether to stop.
        has_baseline: whether there is something else than the library plan to compare with; then that is verified only
            where no other plan is left.
        lost: is told why plans were dropped.
        covered: whether a call may stand where nobody verified it.
    """
    left = _settled(plans, problems, known, verify, out_of_time, has_baseline=has_baseline)
    for _ in range(AGAIN):
        if out_of_time() or not all(_is_dead(p, known) for p in left):
            break
        left = _settled(again(), problems, known, verify, out_of_time, has_baseline=has_baseline)
    if not any(is_verified(p, known) for p in left if p.name != "library"):
        left += of_verified()
    for plan in left:
        missing = [s for s in plan.steps if not known.is_right(s.problem_key, s.kernel.schedule)]
        if missing:
            refused = sum((s.problem_key, s.kernel.schedule) in known.refused for s in missing)
            said = f"{refused} were refused" if refused else "there was no time to verify them"
            lost.append(f"{len(missing)} of {len(plan.steps)} kernels of the plan {plan.name} are not verified: {said}")
    found = [p for p in left if is_verified(p, known)]
    if any(p.name != "library" for p in found):
        return found
    unverified = [p for p in left if p not in found and (p.name == "library" or _is_verified_in_part(p, known))]
    standing = [p for p in unverified if all(_stands(s, known, covered) for s in p.steps)]
    return [p for p in left if p in found or p in standing]


def _is_verified_in_part(plan: Plan, known: Known) -> bool:
    return any(known.is_right(s.problem_key, s.kernel.schedule) for s in plan.steps)


def stands_unverified(
    step: Step, *, problems: Problems, suspects: Collection[tuple[str, Schedule]], device: str
) -> bool:
    """Whether a step may be taken as it may without a budget: not if a worker was lost with it (`suspects`)."""
    task, call = problems.tasks[step.problem_key], step.kernel
    if not isinstance(call, LibraryCall) or (step.problem_key, call.schedule) in suspects:
        return False
    return is_covered(task.problem, call, device)


def _stands(step: Step, known: Known, covered: Callable[[Step], bool]) -> bool:
    """Whether a step is verified, or nothing speaks against it and its form is covered."""
    key = step.problem_key, step.kernel.schedule
    if known.is_right(*key):
        return True
    return key not in known.refused and not known.is_odd(*key) and covered(step)


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
        for plan in sorted(others if spared else left, key=lambda p: _work(_unknown(p, known), problems)):
            if _is_dead(plan, known):
                continue
            unknown = sorted(_unknown(plan, known).items(), key=lambda x: work_bytes(problems.tasks[x[0]].problem))
            asked = {key: trial(step, problems, known) for key, step in unknown}
            if asked:
                break
        if not asked:
            break
        answers = 0
        for found in verify(list(asked.values())):
            answers += 1
            known.heard(found, finite=asked[found.problem_key].finite)
        if answers < len(asked):
            break  # there was no time, or there is no worker
    return [_swapped(p, problems, known) for p in left]


@final
class CallsAhead:
    """Trials of a library plan's calls, the smallest first, for when the worker waits for kernels that are compiled.

    So a whole plan that is right is there early, and all that is measured can only improve on it. What may not stand in
    a plan unverified comes before anything else is measured when it would else come too late (`is_due`, `due`).
    """

    def __init__(
        self,
        alternatives: Alternatives,
        problems: Problems,
        known: Known,
        facts: DeviceFacts,
        options: Options,
        worked_s: Callable[[], float] = lambda: 0.0,
        covered: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        """`worked_s`: seconds that the worker has worked so far. `covered`: see `qualify`."""
        self._alternatives, self._problems, self._known = alternatives, problems, known
        self._facts, self._options, self._covered = facts, options, covered
        self._left: list[Step] | None = None
        """The smallest last; None: there is no plan yet."""
        self._uncovered: frozenset[str] = frozenset()
        """Problems of its steps that may not stand unverified."""
        self._asked: dict[tuple[str, Schedule], Step] = {}
        self._measured: set[str] = set()
        self._worked_s, self._heard_s = worked_s, 0.0
        self._took_s = self._should_s = 0.0
        """What was verified so far took, and was expected to take."""

    def is_due(self, left_s: float, window_s: float) -> bool:
        """Whether `due` must begin now, of the seconds of measuring of which so many are left."""
        open_ = ({s.problem_key for s in self._planned()} & self._uncovered) - self._measured
        needed_s = sum(self._expected_s(key) for key in open_) * (self._took_s + PRIOR_S) / (self._should_s + PRIOR_S)
        return bool(open_) and left_s <= MORE * needed_s + GROUP_SHARE * window_s

    def _expected_s(self, problem_key: str) -> float:
        return TRIAL_S + work_bytes(self._problems.tasks[problem_key].problem) / BYTES_PER_S

    def __iter__(self) -> Iterator[ProblemTrial]:
        return self

    def __next__(self) -> ProblemTrial:
        if (found := self._next()) is None:
            raise StopIteration
        return found

    def due(self) -> Iterator[ProblemTrial]:
        """Those that may not stand unverified."""
        while (found := self._next(due=True)) is not None:
            yield found

    def _next(self, *, due: bool = False) -> ProblemTrial | None:
        left = self._planned()
        passed: list[Step] = []
        found: ProblemTrial | None = None
        while left and found is None:
            step = left.pop()
            if step.problem_key in self._measured or self._known.is_right(step.problem_key, step.kernel.schedule):
                continue
            if due and step.problem_key not in self._uncovered:
                passed.append(step)
                continue
            self._asked[step.problem_key, step.kernel.schedule] = step
            found = trial(step, self._problems, self._known)
        left += reversed(passed)
        return found

    def _planned(self) -> list[Step]:
        if self._left is None:
            self._left = self._plan()
            # once: this is asked for each problem that is measured
            self._uncovered = frozenset(s.problem_key for s in self._left if not self._covered(s))
        return self._left

    def leave(self, problem_key: str) -> None:
        """This problem's kernels are about to be measured."""
        self._measured.add(problem_key)
        self._asked = {key: step for key, step in self._asked.items() if key[0] != problem_key}

    def takes(self, found: Measurement) -> bool:
        """Whether an outcome is one of these calls'; then it is learned."""
        if self._left is None:
            return False  # none was asked for
        key = found.problem_key, found.schedule
        step = self._asked.pop(key, None)
        used_s, self._heard_s = self._worked_s() - self._heard_s, self._worked_s()
        if step is None:
            late = found.verdict is Verdict.OK and not found.samples_us
            if late:  # asked for before its problem's kernels were
                self._known.heard(found, finite=False)
            return late
        self._took_s += used_s
        self._should_s += self._expected_s(step.problem_key)
        was_odd = self._known.is_odd(*key)
        self._known.heard(found, finite=was_odd)
        if not was_odd and self._known.is_odd(*key):
            self._left.append(step)  # on finite inputs
        return True

    def _plan(self) -> list[Step]:
        makers = generators(library=True, generated=False)
        ranked = []
        for task in self._problems.tasks.values():
            if task.essential:  # who measures it has its calls written with generated kernels
                made = write(Order(task), makers, self._facts, self._options).pairs
                if made:
                    ranked.append(choose.Ranked(task, made, (1.0,) * len(made), measured=False, rejected=0))
        options = replace(self._options, budget_s=0.0, memory_limit_bytes=0)
        try:
            plan = choose.library_plan(self._alternatives.graph, ranked, self._alternatives, options, self._facts)
        except InvalidGraphError:
            return []
        steps = {s.problem_key: s for s in plan.steps}
        return sorted(steps.values(), key=lambda s: -work_bytes(self._problems.tasks[s.problem_key].problem))


def _unknown(plan: Plan, known: Known) -> dict[str, Step]:
    """A step for each problem whose call nobody has verified or refused."""
    found: dict[str, Step] = {}
    for step in plan.steps:
        key = step.problem_key, step.kernel.schedule
        if not known.is_right(*key) and key not in known.refused:
            found.setdefault(step.problem_key, step)
    return found


def work_bytes(problem: Problem) -> int:
    """Bytes of a problem's inputs and outputs, which its verification is about in proportion to."""
    graph = problem.graph
    return sum(graph.type_of(i).nbytes for i in (*graph.inputs, *graph.outputs))


def _work(unknown: Mapping[str, Step], problems: Problems) -> int:
    return sum(work_bytes(problems.tasks[key].problem) for key in unknown)


def trial(step: Step, problems: Problems, known: Known) -> ProblemTrial:
    """A step's call, to be verified; one that was found odd on finite inputs."""
    odd = known.is_odd(step.problem_key, step.kernel.schedule)
    task = problems.tasks[step.problem_key]
    kernels = [(step.kernel.schedule, step.kernel, None)]
    tables = problems.tables(task, step.kernel)
    return ProblemTrial(task.problem, kernels, timed=False, finite=odd, tables=tables)


def _swapped(plan: Plan, problems: Problems, known: Known) -> Plan:
    """With the best call of its problem for every step that was refused, is odd, or is not verified where that is."""
    steps = []
    for step in plan.steps:
        key = step.problem_key, step.kernel.schedule
        if not known.is_right(*key):
            calls = choose.stand_ins(problems.tasks[step.problem_key], known)
            better = calls and known.is_right(step.problem_key, calls[0][0])
            if calls and (better or key in known.refused or known.is_odd(*key)):
                step = replace(step, kernel=calls[0][1], measured=False, runner_up=None, runner_up_us=0.0)
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def _is_dead(plan: Plan, known: Known) -> bool:
    """Whether some step was refused, and so was every other call of its problem."""
    return any((s.problem_key, s.kernel.schedule) in known.refused for s in plan.steps)
