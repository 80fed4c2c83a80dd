"""The framework's own execution: a baseline of every compilation, and the answer where no plan is left."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weft.errors import BudgetWarning
from weft.ir.graph import Graph
from weft.kernels.record import PlanRecord
from weft.pipeline import finish, summary
from weft.pipeline.job import Compilation, Decision, Job, Searched
from weft.pipeline.link import takes
from weft.pipeline.search.measure import Bench
from weft.pipeline.setting import Setting
from weft.pipeline.verdict import judged

Tensors = Sequence[torch.Tensor]
STARTS_S, START_SHARE = 5.0, 0.2
"""A framework that must be started is, with a budget of so many seconds, in this share of it."""


FIRST_RUN_S = 1.5
"""Where less of the budget is left, the framework's first run on another device is not begun: 0.4 to 3 s on an H200."""
CAPTURE_RATIO, MOST_CAPTURE = 0.8, 0.2
"""What recording the framework's own model takes of what its first run did, and of the budget at most."""
TOO_LATE = "the time was up before anything was looked for"
UNTUNED_LATE = "without a budget there was no time to make and judge one; a larger `budget_s` has it"


class LeftToFramework(Exception):  # noqa: N818 - an answer, not an error
    """A stage found that there is no plan, or no time for one: the framework's own execution answers."""

    def __init__(
        self, job: Job, lost: Sequence[str], searched: Searched | None = None, *, inputs: Tensors | None
    ) -> None:
        """What `by_framework` is called with."""
        super().__init__("; ".join(lost))
        self.job, self.lost, self.searched, self.inputs = job, lost, searched, inputs


def check_budget(job: Job, needed_s: float = 0.0) -> None:
    """Go on if there is time to tune, `needed_s` of which the next stage takes, or if only a plan may answer.

    Raises:
        LeftToFramework: there is none.
    """
    if job.stands_in and job.tunes and job.clock.passed(job.clock.end - needed_s):
        raise LeftToFramework(job, [TOO_LATE], inputs=None)


def started(job: Job) -> Job:
    """With the framework's own execution, where it must be started and there is a budget for that."""
    budget_s = job.setting.options.budget_s
    return _started(job, budget_s) if job.framework.start is not None and budget_s >= STARTS_S else job


def started_late(job: Job, plans: Sequence[object]) -> Job:
    """Where no plan is left, with the framework's own execution, if it was not asked for before."""
    framework = job.framework
    if plans or framework.run is not None or framework.start is None or job.setting.options.budget_s >= STARTS_S:
        return job
    return _started(job, STARTS_S)


def started_again(job: Job) -> Job:
    """With the framework's own execution, which is known to win."""
    return _started(job, max(job.setting.options.budget_s, STARTS_S)) if job.framework.start is not None else job


def _started(job: Job, budget_s: float) -> Job:
    assert job.framework.start is not None
    run = job.stages.run("framework", job.framework.start, START_SHARE * budget_s)
    return replace(job, framework=replace(job.framework, run=run))


def first_run(job: Job, bench: Bench | None, inputs: Tensors) -> Job:
    """What the framework's first run on another device loads, for seconds, is loaded while the worker is.

    The job for the stages that search: they leave time for `captured`.

    Raises:
        LeftToFramework: there is not enough time left for it, or none after it.
    """
    eager = job.framework.run
    if bench is not None and job.setting.platform.asynchronous and eager is not None:
        check_budget(job, 0.0 if job.framework.has_run else FIRST_RUN_S)
        job.stages.run("first run", run_once, eager, inputs, job.setting)
        check_budget(job)
    return replace(job, clock=job.clock.leaving(min(_capture_s(job), MOST_CAPTURE * job.setting.options.budget_s)))


def _capture_s(job: Job) -> float:
    """Seconds that recording the framework's own model takes, about; 0 where it was not run."""
    return CAPTURE_RATIO * job.stages.seconds("first run")


def in_time(job: Job, inputs: Tensors) -> Tensors | None:
    """The inputs, if there is time to capture the framework's own model with them."""
    clock = job.clock
    return inputs if not clock.passed(min(clock.end, clock.last - _capture_s(job))) else None


def run_once(eager: Callable[..., Tensors], inputs: Tensors, setting: Setting) -> None:
    """Run the framework's own execution once, and leave the memory to who measures."""
    with setting.platform.aside(), torch.no_grad():
        takes(eager, inputs)
    setting.platform.free_memory()


def captured(
    eager: Callable[..., Tensors] | None, inputs: Tensors, setting: Setting, *, alone: bool = False
) -> Callable[..., Tensors] | None:
    """The framework's own model as a baseline, see `Platform.capture`."""
    return None if eager is None else setting.platform.capture(eager, inputs, setting.options, alone=alone)


def captured_later(
    eager: Callable[..., Tensors] | None, graph: Graph, setting: Setting
) -> Callable[..., Tensors] | None:
    """The framework's own model, see `Platform.capture_later`."""
    types = [graph.nodes[i].type for i in graph.inputs]
    return None if eager is None else setting.platform.capture_later(eager, types, setting.options)


def by_framework(
    job: Job, lost: Sequence[str], searched: Searched | None = None, *, inputs: Tensors | None
) -> Compilation:
    """The framework's own execution, where no plan is left: there is nothing to compare it with, nor to judge it by.

    `inputs`: it is captured with them; None: there is no time for that, and its first call captures it.
    """
    searched, stages, framework = searched or Searched(), job.stages, job.framework
    verdict = searched.verdict
    if verdict is None:
        verdict = judged(searched.known, (), job.setting.options)
        if verdict.warning:
            warnings.warn(verdict.warning, BudgetWarning, stacklevel=3)
    warnings.warn(f"{NO_PLAN}: {why(lost)}", stacklevel=3)
    own = PlanRecord(framework.name, 0, 0.0, (), math.inf, verified=False, worst_error=math.inf, note=finish.ALONE)
    searched = replace(searched, plans=(), verdict=verdict)
    record = stages.run("record", summary.record, job, searched, Decision(None, framework.name, (own,)))
    with stages.timed("settle"):
        if framework.settle is not None:
            framework.settle()
        if inputs is not None:
            answer = captured(framework.run, inputs, job.setting, alone=True)
        else:
            answer = captured_later(framework.run, job.imported.graph, job.setting)
    return Compilation(job.graph, None, stages.close(record), answer)


NO_PLAN = "Weft has no plan for this model, so the framework's own execution runs it"


def why(lost: Sequence[str]) -> str:
    """Why no plan is left, in one line."""
    return "; ".join(dict.fromkeys(lost))[:1000] or "nothing that all plans need was found right in time"
