"""The last stages: whole plans are judged and timed, a refused one is explained, the best is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from weft.errors import BudgetWarning, NoPlanError, RefusedError
from weft.ir.types import Array
from weft.kernels.dataclass_json import to_json
from weft.kernels.record import CompileRecord, PlanRecord
from weft.orchestrate.alternatives import Alternatives
from weft.pipeline import finish, reference, warm
from weft.pipeline.finish import Contender, Expected, Other, Run
from weft.pipeline.framework import NO_PLAN, UNTUNED_LATE, LeftToFramework, captured, in_time, started_late, why
from weft.pipeline.job import Decision, Job, Searched
from weft.pipeline.link import judged_in_time, link_all
from weft.pipeline.plans import over_budget
from weft.pipeline.reference import working_dtype
from weft.runtime.any import AnyExecutable
from weft.runtime.in_place import InPlace

Tensors = Sequence[torch.Tensor]
OTHER_SHARE = 0.25
"""Of the budget that is left: what the reference of a second set of inputs is expected to take at most."""
REFERENCE_SHARE = 0.35
"""Of the time that is left until what runs is given up: what the reference may take before it ends with what it has."""
BLAME_S = 1.5
"""At least so long the steps of a plan that was refused are looked at, if that ends before all is given up."""


def expected_outputs(job: Job, inputs: Tensors) -> Expected | None:
    """What plans are judged by, see `reference.outputs_in_time`."""
    options, clock, eager = job.setting.options, job.clock, job.framework.run
    return job.stages.run(
        "reference",
        reference.outputs_in_time,
        job.imported.graph,
        inputs,
        None if eager is None else job.setting.bounded(eager, clock),
        allow_tf32=options.allow_tf32,
        stop=clock.until(clock.at_last(REFERENCE_SHARE)),
        precise=job.tunes,
    )


def other_set(job: Job, inputs: Tensors, expected: Expected | None) -> Other | None:
    """A second set of inputs and what it must lead to, where float64 tells in a share of the time that is left.

    None where it does not, or where a result is not finite: then values decide that nothing is compared.
    """
    options, clock, eager = job.setting.options, job.clock, job.framework.run
    if expected is None or expected.note or job.stages.seconds("reference") > OTHER_SHARE * clock.left_s:
        return None
    found = others(job, inputs)
    if found is None:
        return None
    try:
        wanted = reference.outputs_in_time(
            job.imported.graph,
            found,
            None if eager is None else job.setting.bounded(eager, clock),
            allow_tf32=options.allow_tf32,
            stop=clock.until(clock.within(2 * OTHER_SHARE)),
            precise=True,
        )
    except (RefusedError, RuntimeError, IndexError):  # an operator that does not take such values
        return None
    if wanted is None or wanted.note or not all(_is_finite(x) for x in (*wanted.exact, *wanted.plain)):
        return None
    return Other(found, wanted, inputs)


def _is_finite(x: Array | torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all()) if isinstance(x, torch.Tensor) else bool(np.isfinite(x).all())


def others(job: Job, inputs: Tensors) -> list[torch.Tensor] | None:
    """See `reference.other_inputs`: the values that the model was imported for stay."""
    held = {*job.imported.integers, *job.imported.held, *(g.input_index for g in job.imported.guards)}
    return reference.other_inputs(job.imported.graph, inputs, job.setting.options.seed, held)


def check_plans(job: Job, searched: Searched, inputs: Tensors, lost: Sequence[str]) -> Job:
    """Go on where there is a plan and time to judge it, or none and still no framework, which is started then.

    Raises:
        OptionError: no plan keeps to a budget of an SM [W001].
        LeftToFramework: there is a framework instead.
    """
    options, known, plans = job.setting.options, searched.known, searched.plans
    if not plans and options.sm_budget is not None and not known.failed:
        raise over_budget(options, known, lost)
    if searched.verdict is not None and searched.verdict.warning:
        warnings.warn(searched.verdict.warning, BudgetWarning, stacklevel=3)
    if job.stands_in and not plans:
        raise LeftToFramework(job, lost, searched, inputs=in_time(job, inputs))
    _check_untuned(job, searched, inputs)
    return started_late(job, plans)


def _check_untuned(job: Job, searched: Searched, inputs: Tensors, run_s: float = 0.0) -> None:
    """Without a budget: go on where there is time to judge a plan; a run takes `run_s` seconds, about.

    Raises:
        LeftToFramework: there is none.
    """
    untuned = searched.plans and job.stands_in and not job.tunes
    if untuned and not judged_in_time(job.graph, job.clock, run_s):
        raise LeftToFramework(job, [UNTUNED_LATE], searched, inputs=inputs)


def decide(job: Job, searched: Searched, alternatives: Alternatives, inputs: Tensors, lost: list[str]) -> Decision:
    """Whole plans, one line per stage: what they must give, what they can be compared with, which is right and fastest.

    Raises:
        LeftToFramework: without a budget there is no time to judge one; or the primitives, one by one, do not run.
        NoPlanError: there is nothing that may be the answer [W303].
    """
    with job.setting.platform.aside():
        try:
            expected = expected_outputs(job, inputs)
        except RuntimeError as error:  # the framework's own, of an operator that no rule takes apart
            if not job.stands_in or not job.setting.platform.is_sound():
                raise
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            fault = f"its operators, one by one, do not run: {said}"
            raise LeftToFramework(job, [fault, *lost], searched, inputs=in_time(job, inputs)) from error
        _check_untuned(job, searched, inputs, job.stages.seconds("reference"))
        baseline = job.stages.run("baseline", captured, job.framework.run, inputs, job.setting)
        contenders = linked(job, searched, inputs, baseline, lost)
        chosen, timed = decided(job, contenders, expected, inputs)
        timed = explained(job, timed, contenders, alternatives, inputs)
    executable = best_plan(job, chosen, contenders, timed, lost)
    times = step_times(job, executable, timed, inputs)
    return Decision(executable, chosen.name, timed, times, by_framework=chosen.executable is None)


def linked(
    job: Job, searched: Searched, inputs: Tensors, baseline: Callable[..., Tensors] | None, lost: list[str]
) -> list[Contender]:
    """The plans and the baseline as what can be run; `lost` is told of the others, see `link_all`.

    Raises:
        DeviceError: a plan took the GPU's context with it [W301].
        NoPlanError: there is nothing that may be the answer [W303].
    """
    contenders = job.stages.run(
        "link", link_all, job.graph, searched.plans, job.setting, inputs, baseline, lost, job.framework.name, job.clock
    )
    if not job.tunes:  # nothing was run: what its primitives took, a plan does about
        contenders = [replace(c, first_s=job.stages.seconds("reference")) for c in contenders]
    if job.replaces and not job.setting.platform.asynchronous:  # there runs are recorded, with memory of their own
        contenders = [replace(c, in_place=partial(placed, job, c, inputs)) for c in contenders]
    if not any(c.eligible for c in contenders):  # with a limit on memory, the framework's own is only compared with
        raise NoPlanError(reason=why(lost))
    return contenders


def placed(job: Job, contender: Contender, inputs: Tensors) -> Run:
    """A contender's run as callers have it: its results replace copies of the inputs, see `Job.replaces`.

    Whoever writes results elsewhere pays for memory that callers never see, of the size of a training step's weights
    and state.
    """
    runs = contender.executable if contender.executable is not None else job.framework.run
    make: InPlace | None = getattr(runs, "in_place", None)
    if make is None:
        return contender.run
    own = {k: inputs[k].clone() for k in job.replaces.values()}
    given = [own.get(k, x) for k, x in enumerate(inputs)]
    bound = {k: given[k] for k in (*job.imported.held, *own)}
    run = make(bound, [(output, own[k]) for output, k in job.replaces.items()])
    return lambda: run(*given)


def decided(
    job: Job, contenders: Sequence[Contender], expected: Expected | None, inputs: Tensors
) -> tuple[Contender, tuple[PlanRecord, ...]]:
    """The fastest verified contender, and what was found of each, see `finish.decide`."""
    clock, setting = job.clock, job.setting
    return job.stages.run(
        "time",
        finish.decide,
        contenders,
        expected,
        working_dtype(job.graph),
        seed=setting.options.seed,
        budget_s=min(20.0, max(1.0, clock.left_s)) if job.tunes else 0.0,
        sample=setting.platform.sample_us,
        lives=setting.platform.is_sound,
        left_s=lambda: clock.seconds_to(clock.last),
        other=lambda: other_set(job, inputs, expected),
    )


def explained(
    job: Job,
    timed: tuple[PlanRecord, ...],
    contenders: Sequence[Contender],
    alternatives: Alternatives,
    inputs: Tensors,
) -> tuple[PlanRecord, ...]:
    """The records of plans, the first that was refused with what is wrong with it, while there is time for that."""
    if job.clock.passed(job.clock.last):
        return timed
    return job.stages.run("blame", _blamed, job, timed, contenders, alternatives, inputs)


def _blamed(
    job: Job,
    timed: Sequence[PlanRecord],
    contenders: Sequence[Contender],
    alternatives: Alternatives,
    inputs: Tensors,
) -> tuple[PlanRecord, ...]:
    from weft.pipeline.repro import Case, blame

    setting, clock = job.setting, job.clock
    environment = setting.platform.environment
    drawn = job.example_inputs is None and not job.imported.integers
    found = list(timed)
    for k, (about, contender) in enumerate(zip(timed, contenders, strict=True)):
        executable = contender.executable
        if about.verified or not finish.is_judged(about.note) or executable is None or not setting.platform.is_sound():
            continue
        other = others(job, inputs) if about.note.startswith(finish.OTHER) else None
        given, own = (inputs, drawn) if other is None else (other, False)
        case = Case(job.imported.graph, executable.graph, executable.plan, alternatives.classes, given, own)
        seconds = min(max(clock.left_s, BLAME_S), clock.seconds_to(clock.last))
        warn = partial(warnings.warn, stacklevel=2)
        try:
            note = blame(executable, case, about.note, setting.options, environment, warn, seconds=seconds)
        except (RuntimeError, IndexError) as error:  # what was refused may also fail
            note = f"{about.note}; {type(error).__name__} while it was looked at"
        found[k] = replace(about, note=note)
        break
    return tuple(found)


def best_plan(
    job: Job, chosen: Contender, contenders: Sequence[Contender], timed: Sequence[PlanRecord], lost: list[str]
) -> AnyExecutable | None:
    """The chosen plan, or beside the framework's own execution the fastest one that is right; None: there is none."""
    # without a budget the calls of the library's plan may stand as they are, where the framework answers for it
    executable = chosen.executable or finish.fastest(contenders, timed, unjudged=not job.tunes)
    if executable is None:
        lost += [f"the plan {p.name} {p.note}" for p in timed if p.name != job.framework.name and not p.verified]
        warnings.warn(f"{NO_PLAN}: {why(lost)}", stacklevel=4)
    else:
        executable.check_indices = True
    return executable


def step_times(
    job: Job, executable: AnyExecutable | None, timed: Sequence[PlanRecord], inputs: Tensors
) -> Sequence[float]:
    """Microseconds of each step where it stands, while there is time for that, see `Platform.step_times`."""
    if executable is None or not job.tunes or job.clock.passed():
        return ()
    plan_us = next((p.median_us for p in timed if p.name == executable.plan.name), 0.0)
    return job.stages.run("time steps", job.setting.platform.step_times, executable, inputs, plan_us=plan_us)


def remembered(job: Job, key: str, record: CompileRecord, searched: Searched, decision: Decision) -> None:
    """Keep the plan for who compiles the same again; one that hangs on guesses as having had no budget."""
    if decision.executable is None:
        return
    options, plan = job.setting.options, decision.executable.plan
    assert searched.verdict is not None
    spent_s = 0.0 if searched.verdict.again else options.budget_s
    with job.stages.timed("remember"):
        kept = to_json(record)
        warm.remember(options.cache, key, plan, kept, complete=searched.known.complete, budget_s=spent_s)


def settled(job: Job, decision: Decision, inputs: Tensors) -> Callable[..., Tensors] | None:
    """The framework's own execution where it has won, independent of what others hold; the others' memory is freed.

    Nobody may hold a plan but the best one any more.
    """
    eager, setting = job.framework.run if decision.by_framework else None, job.setting
    with job.stages.timed("settle"):
        if eager is not None and job.framework.settle is not None:
            job.framework.settle()
        eager = captured(eager, inputs, setting, alone=True)
        setting.platform.free_memory(garbage=True)
    return eager
