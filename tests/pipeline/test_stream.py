"""The search on a GPU with invented times: batches overlap, and what is learned changes the next. Nothing is run."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from tests.orchestrate.graphs import residual_net
from tests.pipeline.test_search import OPTIONS, Machine

from weft import pipeline
from weft.device.cuda.facts import profile
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import LibraryCall
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.emission import Emission
from weft.pipeline.problems import FIRST_ON_GPU, LIBRARY_FROM_US, Entry, Problems, collect
from weft.pipeline.stream import LATE_PRICE, PRICES, Learning, Pace, stream
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
    known = stream(
        alternatives.graph,
        problems,
        alternatives,
        machine,
        OPTIONS,
        out_of_time=lambda: next(left, None) is None,
        spent=lambda: 0.5,
        say=lambda line: None,
        pace=Pace(batch=6, late=0.8),
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
        assert entry.first - calls <= FIRST_ON_GPU
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


class OneAhead:
    """In place of the tuner: takes trials one ahead of those whose results it gives."""

    def __init__(self) -> None:
        self.trials: list[ProblemTrial] = []

    def measure(self, trials: Iterator[ProblemTrial], **_: object) -> Iterator[Measurement]:
        waiting: ProblemTrial | None = None
        for trial in itertools.chain(trials, [None]):
            for schedule, _kernel, _binary in waiting.kernels if waiting is not None else ():
                yield Measurement(waiting.problem.key, schedule, Verdict.OK, (1.0 + len(waiting.problem.graph) / 99,))
            if trial is not None:
                self.trials.append(trial)
            waiting = trial


def test_the_pipeline_measures_what_is_asked(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, problems = posed
    options = Options(device="cuda", budget_s=60.0)
    tuner = OneAhead()
    setting = pipeline.Setting(options, FACTS, None, {}, torch.device("cuda", 0))
    emission = Emission(generators(device="cuda"), FACTS, options, count=0)
    bench = pipeline.Bench(cast("Tuner", tuner), emission)
    lines: list[str] = []
    deadline = time.monotonic() + 60.0
    known = pipeline.measure(bench, alternatives, problems, setting, deadline, lambda stage, line: lines.append(line))
    assert known.complete
    assert [line for line in lines if line.startswith("batch 1: ")]
    kernels = [(t.problem.key, s) for t in tuner.trials for s, _, _ in t.kernels]
    assert len(kernels) == len(set(kernels)) == len(known.measurements)
    plans = pipeline.select_plans(alternatives, problems, known, setting)
    assert plans[0].name == "solution-1"
    assert all(step.measured for step in plans[0].steps)
    assert plans[-1].name == "library"
