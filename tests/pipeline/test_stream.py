"""The search on a GPU with invented times: batches overlap, and what is learned changes the next. Nothing is run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from tests.orchestrate.graphs import residual_net
from tests.pipeline.test_search import OPTIONS, Machine

from weft.device.cuda.facts import profile
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import LibraryCall
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import FIRST_ON_GPU, LIBRARY_FROM_US, Entry, Problems, collect
from weft.pipeline.stream import LATE_PRICE, PRICES, Learning, stream

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
        batch=6,
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
