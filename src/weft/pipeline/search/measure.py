"""Building, verifying and timing what an optimal plan may need, as long as the budget allows."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from weft.errors import NoWorkerError
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement
from weft.kernels.source import Schedule
from weft.orchestrate.alternatives import Alternatives
from weft.pipeline import finish, qualify
from weft.pipeline.deadline import Deadline
from weft.pipeline.job import Job
from weft.pipeline.problems import Entry, Problems, make_kernels
from weft.pipeline.search.emission import Emission
from weft.pipeline.search.loop import Inline, Learning, search
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.pipeline.stages import Say, Stages
from weft.tune.store import Database
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
                Tuner(options, platform.facts, database, compiler=platform.compiler, keep=options.keep_worker)
            )
            tuner.start_early()
            emission = open_.enter_context(contextlib.closing(Emission(makers, platform.facts, options)))
        if platform.policy.overlaps:
            # read from the disk meanwhile, where the caller has not: the first plan needs it
            threading.Thread(target=importlib.import_module, args=("scipy.optimize",), daemon=True).start()
        yield Bench(tuner, emission, clock.ready_by, platform.kind)
        with stages.timed("close"):
            open_.close()


def measured(job: Job, bench: Bench | None, alternatives: Alternatives, problems: Problems) -> Known:
    """The stage: what is known when the search ends, and a line about it."""
    known = job.stages.run("measure", measure, bench, alternatives, problems, job.setting, job.clock, job.stages.say)
    clocks = bench.tuner.sm_clocks_mhz if bench is not None else []
    waits = waited(known, bench.tuner) if bench is not None else ""
    about = f"{len(known.measurements)} kernels of {len(known.best_us)} problems measured"
    job.stages.note(f"{about}{at_clocks(clocks)}{waits}")
    return known


def measure(
    bench: Bench | None, alternatives: Alternatives, problems: Problems, setting: Setting, clock: Deadline, say: Say
) -> Known:
    """Build, verify and time what an optimal plan may need (see `search`), as long as the budget allows."""
    options, policy = setting.options, setting.platform.policy
    if bench is None:
        return _unmeasured(problems, setting)
    lookups = 0
    asked_s = measured_s = 0.0
    done: set[tuple[str, Schedule]] = set()
    began = clock.clock()
    reserved_s = finish.reserve_s(options.budget_s, problems.run_us, finish.weight_bytes(alternatives.graph))
    deadline = max(began, clock.end - reserved_s)
    grace_s = min(GRACE_S, GRACE_SHARE * reserved_s)
    learned = Learning()
    ahead = qualify.CallsAhead(
        alternatives, problems, learned, setting.platform.facts, options, lambda: bench.tuner.seconds["run"]
    )

    failed: list[str] = []

    def out_of_time() -> bool:
        return bool(failed) or clock.passed(deadline) or bool(bench.tuner.gave_up)

    def left_s() -> float:
        return clock.seconds_to(deadline + grace_s)

    def spent() -> float:
        return (clock.clock() - began) / max(deadline - began, 1e-3)

    def listen(progress: Progress) -> None:
        nonlocal lookups
        lookups = progress.lookups
        say("measure", search_line(progress, learned, clock.seconds_to(deadline)))

    def measure_batches(batches: Iterator[Sequence[Entry]]) -> Iterator[Measurement]:
        nonlocal measured_s

        def asked() -> Iterator[Sequence[Entry]]:
            nonlocal asked_s
            for batch in batches:
                asked_s = asked_s or clock.clock() - began
                yield batch

        def trials() -> Iterator[ProblemTrial | None]:
            setting.platform.enter_thread()  # the tuner takes these in a thread of its own
            for entry in bench.emission.made(problems, asked(), out_of_time):
                if entry is None:
                    yield None
                    continue
                kernels = [(s, k, None) for s, k in entry.asked if (entry.problem.key, s) not in done]
                if kernels and policy.calls_in_time and ahead.is_due(clock.seconds_to(deadline), deadline - began):
                    yield from ahead
                if kernels:
                    ahead.leave(entry.problem.key)
                for given, same in problems.by_tables(entry, kernels):
                    yield ProblemTrial(entry.problem, same, entry.bound_us, given=given)

        try:
            for found in bench.tuner.measure(
                trials(),
                progress=listen,
                deadline=deadline,
                ready_by=bench.ready_by,
                grace_s=grace_s,
                meanwhile=ahead,
            ):
                if ahead.takes(found):
                    continue  # it was not timed
                done.add((found.problem_key, found.schedule))
                measured_s = measured_s or clock.clock() - began
                yield found
        except NoWorkerError as error:
            failed.append(str(error.details["problem"]))

    known = search(
        alternatives.graph,
        problems,
        alternatives,
        measure_batches,
        options,
        out_of_time=out_of_time,
        spent=spent,
        say=partial(say, "measure"),
        policy=policy,
        solver=None if policy.overlaps else Inline(),
        left_s=left_s,
        known=learned,
    )
    known.reused, known.asked_s, known.measured_s = lookups, asked_s, measured_s
    known.failed = failed[0] if failed else bench.tuner.gave_up
    return known


def _unmeasured(problems: Problems, setting: Setting) -> Known:
    makers = generators(library=True, generated=False, device=setting.platform.kind)
    for entry in problems.entries.values():
        if entry.called:
            make_kernels(entry, problems, makers, setting.platform.facts, setting.options)
    return Known()


def progress_line(progress: Progress) -> str:
    """One line for people: a calm counter."""
    refused = ", ".join(f"{n} {v.value}" for v, n in sorted(progress.rejected.items(), key=lambda x: -x[1]))
    line = f"{progress.kernels} kernels measured, {progress.lookups} known"
    line += f", {progress.again} measured once more as their text has changed" * (progress.again > 0)
    return line + (f", rejected: {refused}" if refused else "")


def search_line(progress: Progress, known: Learning, left_s: float) -> str:
    """How many problems are expected, the best plan so far and the time that is left, before the counter."""
    done = len(known.best_us)
    line = f"{done} of about {done + known.open} problems, {left_s:.0f} s left, "
    if known.whole_us:
        line += f"best plan so far {known.whole_us / 1e3:.3g} ms; "
    elif known.plan_us:
        line += f"best plan about {known.plan_us / 1e3:.3g} ms, with guesses; "
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
