"""The search on a GPU with invented times: batches overlap, and what is learned changes the next. Nothing is run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
import torch
from tests.orchestrate.graphs import residual_net
from tests.pipeline.test_search import OPTIONS, Machine

from weft.device.cuda.facts import profile
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import LibraryCall
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline import plans as planning
from weft.pipeline.deadline import Deadline
from weft.pipeline.problems import LIBRARY_FROM_US, Entry, Problems, collect
from weft.pipeline.search import measure as measuring
from weft.pipeline.search.emission import Emission
from weft.pipeline.search.loop import LATE_PRICE, PRICES, Learning, search
from weft.pipeline.setting import Setting
from weft.platform.cuda.platform import Cuda
from weft.platform.policy import SearchPolicy
from weft.tune.tuner import ProblemTrial, Tuner

FACTS = profile("h200")


@pytest.fixture
def posed() -> tuple[Alternatives, Problems]:
    alternatives = find_alternatives(residual_net(1))
    candidates = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    return alternatives, collect(alternatives.graph, candidates, alternatives, FACTS)


class Gpu(Machine):
    """Takes one batch ahead, as the tuner does."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(problems)
        self.makers = generators(device="cuda")
        self.facts = FACTS
        self.late: list[str] = []
        """Problems asked for while they were on their way."""

    def __call__(self, batches: Iterator[Sequence[Entry]]) -> Iterator[Measurement]:
        waiting: Sequence[Entry] = ()
        for entries in itertools.chain(batches, [()]):
            self.batches.append(len(entries))
            self.late += [e.problem.key for e in entries if e in waiting]
            for entry in waiting:
                yield from self.measured(entry)
            waiting = entries


def run(posed: tuple[Alternatives, Problems], machine: Machine, *, rounds: int = 10_000) -> Learning:
    alternatives, problems = posed
    left = iter(range(rounds))
    known = search(
        alternatives.graph,
        problems,
        alternatives,
        machine,
        OPTIONS,
        out_of_time=lambda: next(left, None) is None,
        spent=lambda: 0.5,
        say=lambda line: None,
        policy=SearchPolicy(batch=6, late=0.8),
    )
    assert isinstance(known, Learning)
    return known


def test_it_ends_with_the_best_plan_measured(posed: tuple[Alternatives, Problems]) -> None:
    machine = Gpu(posed[1])
    known = run(posed, machine)
    assert known.complete
    assert machine.late == []
    assert max(machine.batches) <= 6
    assert len(known.best_us) < len(posed[1].entries), "hopeless problems are never measured"
    assert len(machine.asked) == len(set(machine.asked)) == len(known.measurements)
    widened = [e for e in posed[1].entries.values() if e.widened]
    assert widened and all(e.problem.key in known.best_us for e in widened)


def test_cut_short_it_keeps_what_was_measured(posed: tuple[Alternatives, Problems]) -> None:
    machine = Gpu(posed[1])
    known = run(posed, machine, rounds=3)
    assert not known.complete
    assert known.best_us and set(known.best_us) == {key for key, _ in machine.asked}


def test_without_time_nothing_is_asked(posed: tuple[Alternatives, Problems]) -> None:
    machine = Gpu(posed[1])
    assert not run(posed, machine, rounds=0).complete
    assert machine.asked == []


def test_first_kernels_are_few_and_the_library_is_tried_where_it_may_win(
    posed: tuple[Alternatives, Problems],
) -> None:
    machine = Gpu(posed[1])
    for entry in posed[1].entries.values():
        list(machine.measured(entry))
        calls = sum(isinstance(kernel, LibraryCall) for _, kernel in entry.asked)
        assert entry.first - calls <= Cuda.policy.first
        if entry.first > calls:
            assert calls == 0 or (calls == 1 and entry.estimate_us >= LIBRARY_FROM_US)


def test_predictions_follow_family_then_sort_then_the_estimate(
    posed: tuple[Alternatives, Problems],
) -> None:
    entries = list(posed[1].entries.values())
    known = Learning()
    product = next(e for e in entries if e.sort == "product" and e.estimate_us > e.bound_us)
    others = [e for e in entries if e.sort == "product" and e.family != product.family]
    assert known.price(product) == pytest.approx(PRICES[0] * product.estimate_us)
    machine = Gpu(posed[1])
    for entry in others:
        list(machine.measured(entry))
        times = [(s, 3.0 * entry.estimate_us) for s, _ in entry.asked]
        known.measurements.update(
            ((entry.problem.key, s), Measurement(entry.problem.key, s, Verdict.OK, (t,))) for s, t in times
        )
        known.take(entry)
    price = known.price(product) / product.estimate_us
    assert PRICES[0] < price < 3.0 * PRICES[0]
    assert price > math.sqrt(3.0) * PRICES[0] or len(others) < 4
    known.weight = LATE_PRICE
    assert known.price(product) == pytest.approx(LATE_PRICE / PRICES[0] * price * product.estimate_us)
    known.coming = frozenset({product.problem.key})
    assert known.price(product) == pytest.approx(price * product.estimate_us), "what is on its way stays in the plan"


class OneAhead:
    """In place of the tuner: takes trials in a thread of its own, one ahead of those whose results it gives."""

    gave_up = ""

    def __init__(self) -> None:
        self.trials: list[ProblemTrial] = []

    def measure(self, trials: Iterator[ProblemTrial | None], **_: object) -> Iterator[Measurement]:
        with ThreadPoolExecutor(1) as thread:
            trial = next(trials, None)
            while trial is not None:
                self.trials.append(trial)
                coming = thread.submit(next, trials, None)
                for schedule, _kernel, _binary in trial.kernels:
                    us = 1.0 + len(trial.problem.graph) / 99
                    yield Measurement(trial.problem.key, schedule, Verdict.OK, (us,))
                trial = coming.result()


def test_the_pipeline_measures_what_is_asked(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, problems = posed
    options = Options(device="cuda", budget_s=600.0)
    tuner = OneAhead()
    setting = Setting(options, Cuda(FACTS))
    emission = Emission(generators(device="cuda"), FACTS, options, count=0)
    bench = measuring.Bench(cast("Tuner", tuner), emission)
    lines: list[str] = []
    clock = Deadline.of(600.0)
    known = measuring.measure(bench, alternatives, problems, setting, clock, lambda stage, line: lines.append(line))
    assert known.complete
    assert [line for line in lines if line.startswith("batch 1: ")]
    kernels = [(t.problem.key, s) for t in tuner.trials for s, _, _ in t.kernels]
    assert len(kernels) == len(set(kernels)) == len(known.measurements)
    plans = planning.select_plans(alternatives, problems, known, setting)
    assert plans[0].name == "solution-1"
    assert all(step.measured for step in plans[0].steps)
    assert plans[-1].name == "library"


@pytest.mark.parametrize(("index", "named"), [(0, []), (1, [torch.device("cuda", 1)])])
def test_libraries_are_asked_for_the_gpu_that_runs_them(
    index: int, named: list[torch.device], posed: tuple[Alternatives, Problems], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's current GPU is the first, whatever its parent's is."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    options = Options(device=f"cuda:{index}", budget_s=600.0)
    setting = Setting(options, Cuda(FACTS, device=torch.device("cuda", index)))
    bench = measuring.Bench(cast("Tuner", OneAhead()), Emission(generators(device="cuda"), FACTS, options, count=0))
    measuring.measure(bench, *posed, setting, Deadline.of(600.0), lambda stage, line: None)
    assert set(current) == set(named)


def hurried(posed: tuple[Alternatives, Problems], machine: Gpu, budget_s: float) -> tuple[Learning, list[list[int]]]:
    """A search that may take so many seconds; kernels asked for of each problem of each batch."""
    alternatives, problems = posed
    asked: list[list[int]] = []

    def measure(batches: Iterator[Sequence[Entry]]) -> Iterator[Measurement]:
        for batch in batches:
            asked.append([])
            for entry in batch:
                found = list(machine.measured(entry))
                asked[-1].append(len(found))
                yield from found

    known = search(
        alternatives.graph,
        problems,
        alternatives,
        measure,
        replace(OPTIONS, budget_s=budget_s),
        out_of_time=lambda: False,
        spent=lambda: 0.0,
        say=lambda line: None,
        policy=SearchPolicy(batch=100, late=0.8, overlaps=True),
    )
    assert isinstance(known, Learning)
    return known, asked


def test_in_a_hurry_one_kernel_of_everything_in_the_plan_goes_first(posed: tuple[Alternatives, Problems]) -> None:
    machine = Gpu(posed[1])
    known, asked = hurried(posed, machine, budget_s=0.5)
    assert len(asked[0]) > 2 and set(asked[0]) == {1}
    assert known.complete and any(sum(batch) > len(batch) for batch in asked[1:]), "others follow"
    assert len(machine.asked) == len(set(machine.asked)) == len(known.measurements)
    assert not any(e.hurried for e in posed[1].entries.values() if e.widened)


def test_with_time_the_first_few_kernels_go_together(posed: tuple[Alternatives, Problems]) -> None:
    _, asked = hurried(posed, Gpu(posed[1]), budget_s=1e4)
    assert max(asked[0]) >= Cuda.policy.first


def test_a_problem_whose_one_kernel_is_wrong_gets_the_next_ones(posed: tuple[Alternatives, Problems]) -> None:
    class Wrong(Gpu):
        def measured(self, entry: Entry) -> Iterator[Measurement]:
            for found in super().measured(entry):
                first = entry.asked[0][0] == found.schedule and len(entry.kernels or ()) > 1
                yield replace(found, verdict=Verdict.WRONG) if first else found

    known, _ = hurried(posed, Wrong(posed[1]), budget_s=0.5)
    assert known.complete
    tried = [e for e in posed[1].entries.values() if e.problem.key in known.best_us and len(e.kernels or ()) > 1]
    assert tried and all(math.isfinite(known.best_us[e.problem.key]) for e in tried)


def test_what_is_left_out_at_first_is_taken_in(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, whole = posed
    found = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    first = collect(alternatives.graph, found, alternatives, FACTS, most_at_once=10)
    assert first.rest is not None and len(first.entries) < len(whole.entries)
    known, _ = hurried((alternatives, first), Gpu(first), budget_s=1e4)
    assert known.complete and first.rest is None
    assert first.entries.keys() == whole.entries.keys()
    for key, entry in first.entries.items():
        same = whole.entries[key]
        assert (entry.estimate_us, entry.bound_us, entry.policy) == (same.estimate_us, same.bound_us, same.policy)
        assert len(entry.uses) == len(same.uses)
        assert {(c.members, i, o) for c, i, o in entry.formats} == {(c.members, i, o) for c, i, o in same.formats}


def test_what_is_left_out_is_given_up_when_time_is_over(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, _ = posed
    found = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    first = collect(alternatives.graph, found, alternatives, FACTS, most_at_once=10)
    assert first.rest is not None
    few = iter([False, False])
    assert len(first.rest(lambda: next(few, True)).entries) <= 2
    assert first.rest is not None, "nothing is taken in by collecting"
