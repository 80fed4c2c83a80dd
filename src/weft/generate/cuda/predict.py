"""What the models that rank schedules say about one of them: microseconds in a chain of kernels."""

from __future__ import annotations

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.loops import pointwise
from weft.generate.cuda.loops.forms import Form
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule


def predicted_us(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    """Time of a kernel of the `cuda` generator, the gap before it included; None where no model ranks it (any more).

    Only the order within a problem is what the models are made for.
    """
    if schedule.generator != "cuda":
        return None
    loops = "template" not in dict(schedule.params)
    try:
        cycles = _loops(problem, schedule, facts) if loops else _cycles(problem, schedule, facts)
    except KeyError:
        return None  # a parameter came later than the schedule
    return None if cycles is None else cycles / facts.clock_ghz / 1e3


def _loops(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    """Elementwise kernels; reductions have rules, no model."""
    if any(CATEGORY[n.prim] in (Category.REDUCE, Category.LINEAR) for n in problem.graph.nodes):
        return None
    return pointwise.cycles(pointwise.work_of(problem), Form.of(schedule), facts)


def _cycles(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    template = templates.template_of(schedule)
    if isinstance(template, Declined):
        return None
    form = templates.matched(template.pattern, problem, tf32=schedule.param("template") in template.tf32)
    return None if isinstance(form, Declined) else template.cost(form, schedule, facts)


def forget() -> None:
    """Ask anew what was asked about the latest problems."""
    templates.forget()
