"""What is on offer after measuring: library calls that nothing speaks against stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.orchestrate.graphs import residual_net

from weft.device.facts import CpuFacts
from weft.generate.library.algorithm import TARGET
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CallStep, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline import choose
from weft.pipeline.problems import collect, make_kernels

FACTS = CpuFacts()


@pytest.mark.parametrize(("verdict", "stays"), [(Verdict.SLOW, True), (Verdict.WRONG, False), (Verdict.CRASH, False)])
def test_the_library_plan_takes_calls_that_were_only_slow(verdict: Verdict, stays: bool) -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    makers = generators(library=True, generated=False)
    measured = {}
    for entry in problems.entries.values():
        if entry.essential:
            for schedule, _ in make_kernels(entry, problems, makers, FACTS, Options()):
                measured[entry.problem.key, schedule] = Measurement(entry.problem.key, schedule, verdict)
    calls = choose.rank(problems, measured, library_only=True)
    assert bool(calls) == stays
    if stays:
        plan = choose.library_plan(graph, calls, alternatives, Options())
        assert plan.name == "library"
        assert all(not s.measured for s in plan.steps)


def test_what_nobody_measured_is_the_frameworks_own_call() -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    entry = next(e for e in problems.entries.values() if e.essential)
    call = LibraryCall(Schedule("library"), (), (), ())
    recorded = replace(call, schedule=Schedule("library", (("form", "lt"),)), run=(CallStep(TARGET, ()),))
    entry.kernels = [(k.schedule, k) for k in (recorded, call)]
    (ranked,) = choose.rank(problems, {}, library_only=True)
    assert [k for _, k in ranked.kernels] == [call, recorded]
    times = [((entry.problem.key, k.schedule), us) for k, us in ((recorded, 1.0), (call, 2.0))]
    measured = {key: Measurement(*key, Verdict.OK, (us,)) for key, us in times}
    (ranked,) = choose.rank(problems, measured, library_only=True)
    assert [k for _, k in ranked.kernels] == [recorded, call], "measured ones go by their time"
