"""Building, verifying and timing what an optimal plan may need, as long as the budget allows."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import final

from weft.errors import NoWorkerError
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement
from weft.kernels.plan import Step
from weft.kernels.source import Kernel, Schedule
from weft.orchestrate.alternatives import Alternatives
from weft.pipeline import finish, qualify
from weft.pipeline.deadline import Deadline
from weft.pipeline.job import Job
from weft.pipeline.problems import Problems
from weft.pipeline.search.emission import LOOK_S, Emission
from weft.pipeline.search.kernels import Order, write
from weft.pipeline.search.loop import Inline, Search, Standing, Window
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.pipeline.stages import Say, Stages
from weft.tune.store import Database
from weft.tune.thread_pool import DaemonThreadPool
from weft.tune.tuner import GRACE_S, ProblemTrial, Progress, Tuner

GRACE_SHARE = 0.3
"""Of what is reserved for whole plans: how long an answer of the worker is waited for when measuring ends."""


@dataclass(frozen=True)
class Bench:
    """What writes, builds and measures kernels."""

    tuner: Tuner
    emission: Emission
    ready_by: float = math.inf
    """When the tuner's worker, which was started, is not waited for any longer."""
    kind: str = "cpu"
    """Of the device that kernels are measured on, see `Platform.kind`."""

    def stands_unverified(self, step: Step, problems: Problems) -> bool:
        """See `qualify.stands_unverified`."""
        return qualify.stands_unverified(step, problems=problems, suspects=self.tuner.suspects, device=self.kind)


@contextlib.contextmanager
def opened(setting: Setting, clock: Deadline, stages: Stages) -> Iterator[Bench | None]:
    """A bench with its processes loading while the caller goes on; None where nothing is to be measured.

    Nobody waits for what is still at work when the block is left.
    """
    options, platform = setting.options, setting.platform
    if options.budget_s <= 0:
        yield None
        return
    makers = generators(
        library=options.allow_library,
        generated=options.allow_generated and platform.compiler is not None,
        device=platform.kind,
    )
    with contextlib.ExitStack() as open_:
        with stages.timed("open"):
            database = open_.enter_context(Database.open(options.cache))
            tuner = open_.enter_context(
                Tuner(
                    options,
                    platform.facts,
                    database,
                    compiler=platform.compiler,
                    keep=options.keep_worker,
                    thread=platform.thread,
                )
            )
            tuner.start_early()
            emission = open_.enter_context(contextlib.closing(Emission(makers, platform.facts, options)))
        if platform.policy.overlaps:
            # read from the disk meanwhile, where the caller has not: the first plan needs it
            threading.Thread(target=importlib.import_module, args=("scipy.optimize",), daemon=True).start()
        try:
            yield Bench(tuner, emission, clock.ready_by, platform.kind)
        finally:
            with stages.timed("close"):
                open_.close()


def measured(
    job: Job, bench: Bench | None, alternatives: Alternatives, problems: Problems, *, whole: bool
) -> tuple[Known, Problems]:
    """The stage: what is known when the search ends, with all problems that it came to, and a line about it.

    `whole`: there was time to find and cut out all that there is; else more time would find more.
    """
    if bench is None:
        known = job.stages.run("measure", unmeasured, problems, job.setting)
    else:
        measuring = Measuring(bench, alternatives, problems, job.setting, job.clock, job.stages.say)
        known = job.stages.run("measure", measuring.run)
        problems = measuring.problems
    known.complete = known.complete and whole
    clocks = bench.tuner.sm_clocks_mhz if bench is not None else []
    waits = waited(known, bench.tuner) if bench is not None else ""
    about = f"{len(known.measurements)} kernels of {len(known.best_us)} problems measured"
    job.stages.note(f"{about}{at_clocks(clocks)}{waits}")
    return known, problems


@final
class Measuring:
    """One search, its orders as trials of a tuner: builds, verifies and times what an optimal plan may need.

    Threads. The tuner takes `_trials` where it makes trials: on a CPU in the thread that measures, on a GPU in that of
    its queue, a few ahead. All else is called by the thread that measures; `_window` is asked by all, and `_failing`,
    which tells them that nothing more can be measured, is an event.
    """

    def __init__(
        self, bench: Bench, alternatives: Alternatives, problems: Problems, setting: Setting, clock: Deadline, say: Say
    ) -> None:
        options, policy = setting.options, setting.platform.policy
        self._bench, self._clock, self._say = bench, clock, say
        self._began = clock.clock()
        reserved_s = finish.reserve_s(options.budget_s, problems.run_us, finish.weight_bytes(alternatives.graph))
        self._deadline = max(self._began, clock.end - reserved_s)
        self._grace_s = min(GRACE_S, GRACE_SHARE * reserved_s)
        self._failing = threading.Event()
        self._failed = ""
        self._lookups = 0
        self._asked_s = self._measured_s = 0.0
        self._window = Window(self._is_over, self._spent, self._left_s)
        self._solver: Executor = DaemonThreadPool(1, self._left_s) if policy.overlaps else Inline()
        told = partial(say, "measure")
        self._search = Search(
            alternatives.graph, problems, alternatives, options, policy, self._window, self._solver, told
        )
        facts = setting.platform.facts
        self._ahead: qualify.CallsAhead | None = None
        """Calls that are verified where the worker would wait; where it never does, there are none."""
        if policy.calls_in_time:
            self._ahead = qualify.CallsAhead(
                alternatives, problems, self._search.known, facts, options,
                worked_s=lambda: bench.tuner.seconds["run"],
                covered=lambda step: bench.stands_unverified(step, self.problems),
            )  # fmt: skip

    @property
    def problems(self) -> Problems:
        """All that the search has come to."""
        return self._search.problems

    def run(self) -> Known:
        """Search as long as the budget allows; what is known then."""
        with self._solver:
            known = self._search.run(self._pass)
        known.reused, known.asked_s, known.measured_s = self._lookups, self._asked_s, self._measured_s
        known.failed = self._failed or self._bench.tuner.gave_up
        return known

    def _pass(self) -> Iterator[Measurement]:
        """What is measured of the trials until there are none."""
        try:
            for found in self._bench.tuner.measure(
                self._trials(),
                progress=self._listen,
                deadline=self._deadline,
                ready_by=self._bench.ready_by,
                grace_s=self._grace_s,
                meanwhile=self._ahead or iter(()),
            ):
                if self._ahead is not None and self._ahead.takes(found):
                    continue  # it was not timed
                self._measured_s = self._measured_s or self._clock.clock() - self._began
                yield found
        except NoWorkerError as error:
            self._failed = str(error.details["problem"])
            self._failing.set()

    def _trials(self) -> Iterator[ProblemTrial | None]:
        """What is asked for, written; None: nothing for the moment."""
        while (batch := self._search.next_batch()) is not None:
            if not batch:
                time.sleep(LOOK_S)
                yield None
                continue
            self._asked_s = self._asked_s or self._clock.clock() - self._began
            for order, kernels in self._bench.emission.write(batch, self._is_over):
                yield from self._trials_of(order, self._search.wrote(order, kernels))

    def _trials_of(self, order: Order, kernels: Sequence[tuple[Schedule, Kernel]]) -> Iterator[ProblemTrial]:
        task = order.task
        if kernels and self._ahead is not None:
            if self._ahead.is_due(self._clock.seconds_to(self._deadline), self._deadline - self._began):
                yield from self._ahead.due()
            self._ahead.leave(task.problem.key)
        for tables, same in self._search.problems.by_tables(task, [(s, k, None) for s, k in kernels]):
            yield ProblemTrial(task.problem, same, task.bound_us, tables=tables)

    def _listen(self, progress: Progress) -> None:
        self._lookups = progress.lookups
        if self._bench.tuner.gave_up:
            self._failing.set()
        self._say("measure", search_line(progress, self._search.standing, self._clock.seconds_to(self._deadline)))

    def _is_over(self) -> bool:
        return self._failing.is_set() or self._clock.passed(self._deadline)

    def _left_s(self) -> float:
        return self._clock.seconds_to(self._deadline + self._grace_s)

    def _spent(self) -> float:
        return (self._clock.clock() - self._began) / max(self._deadline - self._began, 1e-3)


def unmeasured(problems: Problems, setting: Setting) -> Known:
    """Without a budget: the library's calls, of which nobody knows how long they take."""
    known = Known()
    makers = generators(library=True, generated=False, device=setting.platform.kind)
    for task in problems.tasks.values():
        if task.called:
            known.wrote(task.problem.key, write(Order(task), makers, setting.platform.facts, setting.options))
    return known


def progress_line(progress: Progress) -> str:
    """One line for people: a calm counter."""
    refused = ", ".join(f"{n} {v.value}" for v, n in sorted(progress.rejected.items(), key=lambda x: -x[1]))
    line = f"{progress.kernels} kernels measured, {progress.lookups} known"
    line += f", {progress.again} measured once more as their text has changed" * (progress.again > 0)
    return line + (f", rejected: {refused}" if refused else "")


def search_line(progress: Progress, standing: Standing, left_s: float) -> str:
    """How many problems are expected, the best plan so far and the time that is left, before the counter."""
    line = f"{standing.measured} of about {standing.measured + standing.open} problems, {left_s:.0f} s left, "
    if standing.whole_us:
        line += f"best plan so far {standing.whole_us / 1e3:.3g} ms; "
    elif standing.plan_us:
        line += f"best plan about {standing.plan_us / 1e3:.3g} ms, with guesses; "
    return line + progress_line(progress)


def at_clocks(clocks_mhz: Sequence[int]) -> str:
    """At which clocks of the multiprocessors kernels were timed, where the driver says so."""
    if not clocks_mhz:
        return ""
    middle = sorted(clocks_mhz)[len(clocks_mhz) // 2]
    return f" at {min(clocks_mhz)} to {max(clocks_mhz)} MHz, half of the times above {middle}"


def waited(known: Known, tuner: Tuner) -> str:
    """Where the seconds of measuring went."""
    s = tuner.seconds
    return (
        f"; asked after {known.asked_s:.1f} s, measured after {known.measured_s:.1f} s;"
        f" waited {s['build']:.1f} s for kernels, {s['worker']:.1f} s for the worker, {s['run']:.1f} s for answers"
    )
