"""The pipeline: one flat function, one line per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from weft.frontends.imported import Imported
from weft.ir.graph import Graph
from weft.ir.passes import clean_up
from weft.options import Options
from weft.pipeline import answer, collector, finish, preflight, summary, warm
from weft.pipeline.candidates import enumerated, extracted
from weft.pipeline.deadline import Deadline
from weft.pipeline.framework import LeftToFramework, by_framework, check_budget, first_run, started
from weft.pipeline.job import Compilation, Framework, Job, Searched, Start
from weft.pipeline.plans import qualified_plans, selected_plans
from weft.pipeline.recall import recalled
from weft.pipeline.search.measure import measured, opened
from weft.pipeline.setting import survey
from weft.pipeline.stages import Say, Stages, silent
from weft.pipeline.verdict import judged
from weft.platform.table import platform_of

Tensors = Sequence[torch.Tensor]
CLEAN_UP_RATIO = 4.0
"""Cleaning a graph up takes at most about so many times as long as its import did: both look at all weights."""
CLEAN_UP_NODE_S, CLEAN_UP_BYTE_S = 6e-4, 1e-8
"""And so long for a node and for a byte of weights (0.15 ms and 6.5 ns, measured on two cores), whatever the first
import of a process, which loads modules, took."""


def clean_up_s(graph: Graph, import_s: float) -> float:
    """What cleaning a graph up takes at most, about, in seconds, if its import took so long."""
    by_size = CLEAN_UP_NODE_S * len(graph.nodes) + CLEAN_UP_BYTE_S * sum(x.nbytes for x in graph.constants.values())
    return min(CLEAN_UP_RATIO * import_s, by_size)


def compile_imported(
    imported: Imported,
    options: Options,
    *,
    example_inputs: Tensors | None = None,
    eager: Callable[..., Tensors] | None = None,
    settle: Callable[[], None] | None = None,
    start: Start | None = None,
    framework: str = "eager",
    has_run: bool = False,
    model: str = "model",
    say: Say = silent,
    stages: Stages | None = None,
    clock: Deadline | None = None,
    replaces: Mapping[int, int] = MappingProxyType({}),
) -> Compilation:
    """Primitives -> the fastest verified executable: one line per stage.

    `clock` began to run before the model was taken in; None: it does now. Every stage keeps to it, and the framework's
    own execution answers where one finds that there is no time for a plan. `stages` has those that were before, and
    says what comes; None: `say` does.

    `eager` runs the framework's own model on the example inputs; it is timed as a baseline. `settle` is called when it
    has won: from then on it must not depend on what others hold.

    `start` makes `eager` where that takes time, and is asked only where no plan is remembered, or where it had won.
    `framework` names it in the record; `has_run`: it ran before, in this process.

    `replaces`: by position, outputs that callers have written into the memory of an input (`in_place` of what runs). On
    a CPU they are when plans and the framework are timed, too.

    Raises:
        OptionError: no plan keeps to a limit on memory or to a budget of an SM [W001].
    """
    stages, clock = stages or Stages(options, say), clock or Deadline.of(options.budget_s)
    stages.run("preflight", preflight.check, imported.graph, options, platform_of(options.device).room_bytes(options))
    setting = stages.run("survey", survey, options)
    own = Framework(framework, eager, settle, start, has_run)
    job = Job.of(imported, example_inputs, own, model, setting, stages, clock, replaces)
    try:
        check_budget(job, clean_up_s(job.graph, stages.seconds("import")))
        with collector.put_off():
            cleaned = stages.run("clean up", clean_up, job.graph, strict=options.strict).graph
            alternatives = stages.run(
                "alternatives", job.setting.platform.find_alternatives, cleaned, strict=options.strict
            )
            job = replace(job, cleaned=cleaned, graph=alternatives.graph)
            key = warm.plan_key(job.graph, options, setting.platform.environment)
            stored = stages.run("recall", warm.recall, options.cache, key, options.budget_s)
        if (before := recalled(job, stored)) is not None:
            finish.tell_difference(before.record)
            return before
        job = started(job)
        check_budget(job)
        inputs = job.inputs()
        with opened(job.setting, clock, stages) as bench:
            searching = first_run(job, bench, inputs)
            found, all_found = enumerated(searching, alternatives)
            problems, all_cut = extracted(searching, alternatives, found, inputs)
            check_budget(job)
            known, problems = measured(searching, bench, alternatives, problems, whole=all_found and all_cut)
            plans, lost = selected_plans(searching, alternatives, problems, known)
            verdict = judged(known, plans, options)
            plans = qualified_plans(searching, bench, plans, alternatives, problems, known, lost)
        searched = Searched(found, problems, known, plans, verdict)
        job = answer.check_plans(job, searched, inputs, lost)
        decision = answer.decide(job, searched, alternatives, inputs, lost)
        record = stages.run("record", summary.record, job, searched, decision)
        finish.tell_difference(record)
        answer.remembered(job, key, record, searched, decision)
        won = answer.settled(job, decision, inputs)
        return Compilation(job.graph, decision.executable, stages.close(record), won)
    except LeftToFramework as left:
        return by_framework(left.job, left.lost, left.searched, inputs=left.inputs)
