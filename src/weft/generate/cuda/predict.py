"""What the models that rank schedules say about one of them: microseconds in a chain of kernels."""

from __future__ import annotations

from functools import lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import pointwise
from weft.generate.cuda.choose import turns_axes
from weft.generate.cuda.forms import Form
from weft.generate.cuda.templates import cost, depthwise, gemv
from weft.generate.cuda.templates.mma import Shape
from weft.generate.cuda.templates.product import Product, product
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

TEMPLATES = frozenset({"mma", "wgmma", "simt", "gemv", "depthwise"})
"""Those whose schedules a model ranks."""


def predicted_us(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    """Time of a kernel of the `cuda` generator, the gap before it included; None where no model ranks it (any more).

    Only the order within a problem is what the models are made for.
    """
    template = str(dict(schedule.params).get("template", ""))
    if schedule.generator != "cuda" or template not in TEMPLATES | {""}:
        return None
    if not template:
        return _pointwise_us(problem, schedule, facts)
    p = _product(problem)
    if isinstance(p, Declined):
        return None
    try:
        return _cycles(p, template, schedule, facts) / facts.clock_ghz / 1e3
    except KeyError:
        return None  # a parameter came later than the schedule


def _pointwise_us(problem: Problem, schedule: Schedule, facts: GpuFacts) -> float | None:
    if any(CATEGORY[n.prim] in (Category.REDUCE, Category.LINEAR) for n in problem.graph.nodes):
        return None
    work, turns = pointwise.work_of(problem), turns_axes(problem)
    return pointwise.cycles(work, Form.of(schedule), turns, facts) / facts.clock_ghz / 1e3


@lru_cache(maxsize=8)
def _product(problem: Problem) -> Product | Declined:
    return product(problem)


def _cycles(p: Product, template: str, schedule: Schedule, facts: GpuFacts) -> float:
    if template == "gemv":
        return gemv.cycles(p, gemv.Shape.of(schedule), facts)
    if template == "depthwise":
        by_channel = depthwise.normal(p)
        if isinstance(by_channel, Declined):
            raise ValueError(f"{schedule} is of another problem: {by_channel.reason}")
        return depthwise.cycles(by_channel, depthwise.Shape.of(schedule), facts)
    return cost.cycles(cost.sizes_of(p), Shape.of(schedule), facts)
