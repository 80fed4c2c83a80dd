"""The pipeline: one flat function, one line per stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weft.errors import BudgetWarning
from weft.frontends.imported import Imported
from weft.ir.passes import clean_up
from weft.options import Options
from weft.pipeline import answer, collector, preflight, warm
from weft.pipeline.candidates import enumerated, extracted
from weft.pipeline.deadline import Deadline
from weft.pipeline.framework import by_framework, captured, first_run, started, started_late
from weft.pipeline.job import Compilation, Framework, Job, Searched, Start
from weft.pipeline.link import judged_in_time
from weft.pipeline.plans import over_budget, qualified_plans, select_in_time
from weft.pipeline.recall import recalled
from weft.pipeline.search.measure import measured, opened
from weft.pipeline.setting import survey
from weft.pipeline.stages import Say, Stages, silent
from weft.pipeline.verdict import judged
from weft.platform.table import platform_of

Tensors = Sequence[torch.Tensor]
CLEAN_UP_RATIO = 4.0
"""Cleaning a graph up takes at most about so many times as long as its import did: both look at all weights."""
TOO_LATE = "the time was up before anything was looked for"
UNTUNED_LATE = "without a budget there was no time to make and judge one; a larger `budget_s` has it"


def compile_imported(
    imported: Imported,
    options: Options,
    *,
    example_inputs: Tensors | None = None,
    eager: Callable[..., Tensors] | None = None,
    settle: Callable[[], None] | None = None,
    start: Start | None = None,
    framework: str = "eager",
    model: str = "model",
    say: Say = silent,
    stages: Stages | None = None,
    clock: Deadline | None = None,
) -> Compilation:
    """Primitives -> the fastest verified executable: one line per stage.

    `clock` began to run before the model was taken in; None: it does now. Every stage keeps to it. `stages` has those
    that were before, and says what comes; None: `say` does.

    `eager` runs the framework's own model on the example inputs; it is timed as a baseline. `settle` is called when it
    has won: from then on it must not depend on what others hold.

    `start` makes `eager` where that takes time, and is asked only where no plan is remembered, or where it had won.
    `framework` names it in the record.

    Raises:
        OptionError: no plan keeps to a limit on memory or to a budget of an SM [W001].
    """
    stages, clock = stages or Stages(options, say), clock or Deadline.of(options.budget_s)
    stages.run("preflight", preflight.check, imported.graph, options, platform_of(options.device).room_bytes(options))
    setting = stages.run("survey", survey, options)
    platform = setting.platform.lending()
    setting = replace(setting, platform=platform)
    job = Job.of(imported, example_inputs, Framework(framework, eager, settle, start), model, setting, stages, clock)
    if job.stands_in and job.tunes and clock.clock() + CLEAN_UP_RATIO * stages.seconds("import") >= clock.end:
        return by_framework(job, [TOO_LATE], inputs=None)
    with collector.put_off():
        cleaned = stages.run("clean up", clean_up, job.graph, strict=options.strict).graph
        alternatives = stages.run("alternatives", platform.find_alternatives, cleaned, strict=options.strict)
        job = replace(job, cleaned=cleaned, graph=alternatives.graph)
        key = warm.plan_key(job.graph, options, platform.environment)
        stored = stages.run("recall", warm.recall, options.cache, key, options.budget_s)
    if (before := recalled(job, stored)) is not None:
        return before
    job = started(job)
    untuned = job.stands_in and not job.tunes
    if job.stands_in and job.tunes and clock.passed():
        return by_framework(job, [TOO_LATE], inputs=None)
    inputs = job.inputs()
    with opened(setting, clock, stages) as bench:
        first_run(job, bench, inputs)
        found, all_found = enumerated(job, alternatives)
        problems, all_cut = extracted(job, alternatives, found)
        if problems is None:
            return by_framework(job, [UNTUNED_LATE], inputs=inputs)
        if job.stands_in and job.tunes and clock.passed():
            return by_framework(job, [TOO_LATE], inputs=None)
        known, problems = measured(job, bench, alternatives, problems, whole=all_found and all_cut)
        lost = [known.failed] if known.failed else []
        plans = stages.run("select", select_in_time, alternatives, problems, known, setting, lost, clock)
        verdict = judged(known, plans, options)
        plans = qualified_plans(job, bench, plans, alternatives, problems, known, lost)
    if not plans and options.sm_budget is not None and not known.failed:
        raise over_budget(options, known, lost)
    searched = Searched(found, problems, known, [replace(p, checks=job.checks) for p in plans], verdict)
    if verdict.warning:
        warnings.warn(verdict.warning, BudgetWarning, stacklevel=2)
    if job.stands_in and not plans:
        return by_framework(job, lost, searched, inputs=None if clock.passed() else inputs)
    job = started_late(job, plans)
    if untuned and not judged_in_time(job.graph, clock):
        return by_framework(job, [UNTUNED_LATE], searched, inputs=inputs)
    with platform.aside():
        expected = answer.expected_outputs(job, inputs)
        if untuned and not judged_in_time(job.graph, clock, stages.seconds("reference")):
            return by_framework(job, [UNTUNED_LATE], searched, inputs=inputs)
        baseline = stages.run("baseline", captured, job.framework.run, inputs, setting)
        contenders = answer.linked(job, searched, inputs, baseline, lost)
        chosen, timed = answer.decided(job, contenders, expected, inputs)
        timed = answer.explained(job, timed, contenders, alternatives, inputs)
    executable = answer.best_plan(job, chosen, contenders, timed, lost)
    in_place_us = answer.step_times(job, executable, timed, inputs)
    record = answer.recorded(job, searched, executable, chosen, timed, in_place_us)
    answer.remembered(job, key, executable, record, searched)
    won = chosen.executable is None
    del contenders, chosen  # all plans but one
    eager = answer.settled(job, won=won, inputs=inputs)
    return Compilation(job.graph, executable, stages.close(record), eager)
