"""A plan that was chosen before: linked without a single trial (`warm` keeps them)."""

from __future__ import annotations

import warnings

from weft.errors import DeviceError
from weft.ir.graph import Graph
from weft.kernels.codec import Json
from weft.kernels.dataclass_json import from_json
from weft.kernels.plan import Plan
from weft.kernels.record import CompileRecord
from weft.pipeline import finish, link, summary
from weft.pipeline.framework import captured, started_again
from weft.pipeline.job import Compilation, Job
from weft.pipeline.setting import Setting
from weft.runtime.any import AnyExecutable


def recalled(job: Job, stored: tuple[Plan, Json] | None) -> Compilation | None:
    """The answer by a plan that was chosen before, if there is one and it still runs.

    Raises:
        DeviceError: it took the GPU's context with it [W301].
    """
    if stored is None:
        return None
    plan, old = stored
    stages, setting = job.stages, job.setting
    executable = stages.run("link", link_stored, job.graph, plan, setting)
    if executable is None:
        return None
    stages.note("a plan that was chosen before: nothing is measured")
    setting.platform.free_memory()  # weights that were packed
    record = from_json(CompileRecord, old)
    record = summary.renamed(record, job.model, job.imported, executable, tuple(stages.records))
    won = None
    if record.chosen == job.framework.name:
        framework = started_again(job).framework
        won = framework.run
        if won is not None:
            with stages.timed("settle"):
                if framework.settle is not None:
                    framework.settle()
                if job.example_inputs is not None:
                    won = captured(won, job.inputs(), setting, alone=True)
    return Compilation(executable.graph, executable, stages.close(record), won)


def link_stored(graph: Graph, plan: Plan, setting: Setting) -> AnyExecutable | None:
    """A plan that was chosen before, made runnable; None where what it names is refused here: it is tuned anew.

    Raises:
        DeviceError: it took the GPU's context with it [W301].
    """
    try:
        return link.link(graph, plan, setting)
    except finish.FAULTS as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if not setting.platform.is_sound():
            problem = f"the plan that was chosen before ended this process's use of the GPU: {said}"
            raise DeviceError(problem=problem) from error
        text = f"Weft tunes anew, the plan it remembers does not run: {said}"
        warnings.warn(text, stacklevel=2)
        return None
