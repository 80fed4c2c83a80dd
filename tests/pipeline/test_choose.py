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
from weft.pipeline.problems import collect
from weft.pipeline.search.kernels import Kernels, Order, write
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
    known = Known()
    for key, task in problems.tasks.items():
        if task.essential:
            known.wrote(key, write(Order(task), makers, FACTS, Options()))
            known.measurements |= {(key, s): Measurement(key, s, verdict) for s, _ in known.pairs(key)}
    calls = choose.rank(problems, known, library_only=True)
    assert bool(calls) == stays
    if stays:
        plan = choose.library_plan(graph, calls, alternatives, Options(), FACTS)
        assert plan.name == "library"
        assert all(not s.measured for s in plan.steps)


def test_what_nobody_measured_is_the_frameworks_own_call() -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    key = next(key for key, task in problems.tasks.items() if task.essential)
    call = LibraryCall(Schedule("library"), (), (), ())
    recorded = replace(call, schedule=Schedule("library", (("form", "lt"),)), run=(CallStep(TARGET, ()),))
    kernels = {key: Kernels(tuple((k.schedule, k) for k in (recorded, call)))}
    (ranked,) = choose.rank(problems, Known(kernels=kernels), library_only=True)
    assert [k for _, k in ranked.kernels] == [call, recorded]
    times = [((key, k.schedule), us) for k, us in ((recorded, 1.0), (call, 2.0))]
    measured = {both: Measurement(*both, Verdict.OK, (us,)) for both, us in times}
    (ranked,) = choose.rank(problems, Known(measured, kernels=kernels), library_only=True)
    assert [k for _, k in ranked.kernels] == [recorded, call], "measured ones go by their time"


def test_a_call_that_waits_for_the_host_stands_for_want_of_others() -> None:
    """However fast it is by itself: the steps around it would be several graphs."""
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    key = next(key for key, task in problems.tasks.items() if task.essential)
    call = LibraryCall(Schedule("library"), (), (), ())
    hosted = replace(
        call, schedule=Schedule("library", (("form", "x"),)), run=(CallStep("weft.opaque_onnx", ("{}", 0)),)
    )
    kernels = {key: Kernels(tuple((k.schedule, k) for k in (hosted, call)))}
    right = {(key, hosted.schedule)}
    (ranked,) = choose.rank(problems, Known(kernels=kernels, right=right), library_only=True)
    assert [k for _, k in ranked.kernels] == [call, hosted]

    def ranking(verdict: Verdict) -> list[object]:
        found = {(key, hosted.schedule): Measurement(key, hosted.schedule, Verdict.OK, (1.0,))}
        found[key, call.schedule] = Measurement(key, call.schedule, verdict, (2.0,))
        (ranked,) = choose.rank(problems, Known(found, kernels=kernels), library_only=True)
        return [k for _, k in ranked.kernels]

    assert ranking(Verdict.OK) == [call]
    assert ranking(Verdict.WRONG) == [hosted]


def test_an_odd_call_never_stands_beside_one_that_nothing_speaks_against() -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    key = next(key for key, task in problems.tasks.items() if task.essential)
    odd, fresh = (LibraryCall(Schedule("library", (("form", x),)), (), (), ()) for x in ("a", "b"))
    kernels = {key: Kernels(tuple((k.schedule, k) for k in (odd, fresh)))}
    measured = {(key, odd.schedule): Measurement(key, odd.schedule, Verdict.NAN_CLASS)}
    (ranked,) = choose.rank(problems, Known(measured, kernels=kernels), library_only=True)
    assert [k for _, k in ranked.kernels] == [fresh]


def test_without_a_right_operator_of_the_framework_there_is_no_library_plan(tmp_path: Path) -> None:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    known = Known(complete=True)
    for key, task in problems.tasks.items():
        known.wrote(key, write(Order(task), generators(library=True, generated=True), FACTS, Options()))
        for schedule, kernel in known.pairs(key):
            wrong = isinstance(kernel, LibraryCall) and task.essential
            verdict = Verdict.WRONG if wrong else Verdict.OK
            known.measurements[key, schedule] = Measurement(key, schedule, verdict, (1.0,) * 6)
    options = Options(cache_dir=tmp_path)
    setting = Setting(options, Cpu(FACTS))
    plans = select_plans(alternatives, problems, known, setting)
    assert plans
    assert "library" not in [p.name for p in plans]
