"""What is on offer after measuring: library calls that nothing speaks against stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from weft.pipeline.plans import select_plans
from weft.pipeline.problems import collect, make_kernels
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.platform.cpu import Cpu

FACTS = CpuFacts()


@pytest.mark.parametrize(
    ("verdict", "stays"),
    [(Verdict.SLOW, True), (Verdict.NAN_CLASS, True), (Verdict.WRONG, False), (Verdict.CRASH, False)],
)
def test_the_library_plan_takes_calls_that_were_only_slow_or_odd(verdict: Verdict, stays: bool) -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    makers = generators(library=True, generated=False)
    measured = {}
    for entry in problems.entries.values():
        if entry.essential:
            for schedule, _ in make_kernels(entry, problems, makers, FACTS, Options()):
                measured[entry.problem.key, schedule] = Measurement(entry.problem.key, schedule, verdict)
    calls = choose.rank(problems, Known(measured), library_only=True)
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
    (ranked,) = choose.rank(problems, Known(), library_only=True)
    assert [k for _, k in ranked.kernels] == [call, recorded]
    times = [((entry.problem.key, k.schedule), us) for k, us in ((recorded, 1.0), (call, 2.0))]
    measured = {key: Measurement(*key, Verdict.OK, (us,)) for key, us in times}
    (ranked,) = choose.rank(problems, Known(measured), library_only=True)
    assert [k for _, k in ranked.kernels] == [recorded, call], "measured ones go by their time"


def test_an_odd_call_never_stands_beside_one_that_nothing_speaks_against() -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    entry = next(e for e in problems.entries.values() if e.essential)
    odd, fresh = (LibraryCall(Schedule("library", (("form", x),)), (), (), ()) for x in ("a", "b"))
    entry.kernels = [(k.schedule, k) for k in (odd, fresh)]
    key = (entry.problem.key, odd.schedule)
    (ranked,) = choose.rank(problems, Known({key: Measurement(*key, Verdict.NAN_CLASS)}), library_only=True)
    assert [k for _, k in ranked.kernels] == [fresh]


def test_without_a_right_operator_of_the_framework_there_is_no_library_plan(tmp_path: Path) -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    measured = {}
    for entry in problems.entries.values():
        kernels = make_kernels(entry, problems, generators(library=True, generated=True), FACTS, Options())
        for schedule, kernel in kernels:
            wrong = isinstance(kernel, LibraryCall) and entry.essential
            verdict = Verdict.WRONG if wrong else Verdict.OK
            measured[entry.problem.key, schedule] = Measurement(entry.problem.key, schedule, verdict, (1.0,) * 6)
    options = Options(cache_dir=tmp_path)
    known = Known(measured, {}, complete=True)
    setting = Setting(options, Cpu(FACTS))
    plans = select_plans(alternatives, problems, known, setting)
    assert plans
    assert "library" not in [p.name for p in plans]
