"""The problems that a benchmark network poses to the generator: what `weft.compile` would ask, without measuring."""

from __future__ import annotations

import torch
from benchmarks.models import load

from weft.device.cuda.facts import GpuFacts
from weft.frontends.torch import import_exported
from weft.ir.passes import clean_up
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Problem
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.legality import EnumerationLimits
from weft.pipeline.problems import collect


def group_problems(name: str, batch: int, dtype: torch.dtype = torch.float16) -> list[Problem]:
    """Distinct problems without contraction and framework operators, of one network in one type."""
    module, inputs = load(name, batch)
    cast = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        program = torch.export.export(module.eval().to(dtype), tuple(cast))
    graph = clean_up(import_exported(program).graph, strict=False).graph
    alternatives = find_alternatives(graph, strict=False)
    found = enumerate_candidates(alternatives.graph, EnumerationLimits(), alternatives)
    problems = collect(alternatives.graph, found.candidates, alternatives, GpuFacts())
    excluded = (Category.LINEAR, Category.OPAQUE)
    return [
        e.problem
        for e in problems.entries.values()
        if not any(CATEGORY[n.prim] in excluded for n in e.problem.graph.nodes)
    ]
