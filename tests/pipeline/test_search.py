"""The search with invented times: what it asks for, in which order, and when it ends. Nothing is compiled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from tests.orchestrate.graphs import residual_net

from weft.device.any import DeviceFacts
from weft.device.facts import CpuFacts
from weft.generate.library.algorithm import TARGET
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CallStep, KernelSource, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import FIRST, LIBRARY_NEAR, Entry, Problems, collect, make_kernels
from weft.pipeline.search.loop import Inline, Learning, search
from weft.pipeline.search.prices import Known
from weft.platform.policy import SearchPolicy

TABLE = ((1 << 16, 300.0), (1 << 29, 40.0))
FACTS = CpuFacts(threads=2, frequency_ghz=3.0, peak_flops_f32=3.84e11, bandwidth=TABLE, read_bandwidth=TABLE)
OPTIONS = Options()
BATCH = 6


@pytest.fixture
def posed() -> tuple[Alternatives, Problems]:
    alternatives = find_alternatives(residual_net(2))
    candidates = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    return alternatives, collect(alternatives.graph, candidates, alternatives, FACTS)


class Machine:
    """Measures by a hash of what is measured; remembers what it was asked."""

    def __init__(self, problems: Problems, refuses: Callable[[int], bool] = lambda position: False) -> None:
        self.problems = problems
        self.refuses = refuses
        self.asked: list[tuple[str, Schedule]] = []
        self.batches: list[int] = []
        self.makers = generators(library=True, generated=True)
        self.facts: DeviceFacts = FACTS

    def __call__(self, batches: Iterator[Sequence[Entry]]) -> Iterator[Measurement]:
        for entries in batches:
            self.batches.append(len(entries))
            for entry in entries:
                yield from self.measured(entry)

    def measured(self, entry: Entry) -> Iterator[Measurement]:
        make_kernels(entry, self.problems, self.makers, self.facts, OPTIONS)
        for position, (schedule, _) in enumerate(entry.asked):
            key = (entry.problem.key, schedule)
            if key in self.asked:
                continue
            self.asked.append(key)
            share = hashlib.sha256(str(key).encode()).digest()[0] / 256
            verdict = Verdict.WRONG if self.refuses(position) else Verdict.OK
            yield Measurement(*key, verdict, (entry.estimate_us * (0.5 + share),))


def run(posed: tuple[Alternatives, Problems], machine: Machine, rounds: int = 1000, *, spent: float = 0.0) -> Known:
    alternatives, problems = posed
    left = iter(range(rounds))
    return search(
        alternatives.graph,
        problems,
        alternatives,
        machine,
        OPTIONS,
        out_of_time=lambda: next(left, None) is None,
        spent=lambda: spent,
        say=lambda line: None,
        policy=SearchPolicy(batch=BATCH, late=0.8, last=0.5),
        solver=Inline(),
    )


def test_it_ends_with_the_best_plan_measured(posed: tuple[Alternatives, Problems]) -> None:
    machine = Machine(posed[1])
    known = run(posed, machine)
    assert known.complete
    assert len(known.best_us) < len(posed[1].entries), "hopeless problems are never measured"
    assert len(machine.asked) == len(set(machine.asked)) == len(known.measurements)


def test_the_first_kernels_go_first_and_the_others_where_it_matters(posed: tuple[Alternatives, Problems]) -> None:
    run(posed, Machine(posed[1]))
    entries = [e for e in posed[1].entries.values() if e.kernels]
    many = [e for e in entries if e.more or len(e.kernels or ()) > e.first]
    assert all(e.first <= 2 * FIRST for e in entries)
    assert any(e.widened and len(e.kernels or ()) > e.first for e in many)
    assert any(e.more and not e.widened for e in many), "the others are not even made"
    assert not any(e.more and e.widened for e in many)


def test_a_search_cut_short_has_measured_what_saves_most(posed: tuple[Alternatives, Problems]) -> None:
    whole = Machine(posed[1])
    run(posed, whole)
    alternatives, _ = posed
    again = collect(
        alternatives.graph,
        enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates,
        alternatives,
        FACTS,
    )
    known = run((alternatives, again), Machine(again), rounds=2)
    assert not known.complete
    assert 1 <= len(known.best_us) <= BATCH
    first = [key for key, _ in whole.asked]
    assert set(known.best_us) == set(first[: len(known.measurements)])


def test_last_plans_are_made_of_what_is_known_and_of_library_calls(posed: tuple[Alternatives, Problems]) -> None:
    problems = posed[1]
    machine = Machine(problems)
    run(posed, machine, rounds=8, spent=1.0)
    assert machine.asked
    first = [problems.entries[key] for key in dict.fromkeys(key for key, _ in machine.asked)][: machine.batches[0]]
    assert all(e.essential for e in first), "a group that nobody measured cannot be in a last plan"
    prices = [Learning(weight=math.inf).price(e) * len(e.uses) for e in first]
    assert prices[0] == max(prices), "the dearest goes first"
    group = next(e for e in problems.entries.values() if not e.essential)
    assert math.isinf(Learning(weight=math.inf).price(group)) and math.isfinite(Learning().price(group))


def test_without_time_nothing_is_asked(posed: tuple[Alternatives, Problems]) -> None:
    machine = Machine(posed[1])
    assert not run(posed, machine, rounds=0).complete
    assert machine.asked == []


def test_where_the_first_are_refused_the_others_get_their_chance(posed: tuple[Alternatives, Problems]) -> None:
    machine = Machine(posed[1], refuses=lambda position: position == 0)
    known = run(posed, machine)
    assert known.complete
    refused = {k for (k, _), m in known.measurements.items() if m.verdict is Verdict.WRONG}
    assert refused & {k for k, t in known.best_us.items() if t < float("inf")}


LIBRARY = LibraryCall(Schedule("library"), (), (), ())
BY_ALGORITHM = replace(LIBRARY, schedule=Schedule("library", (("form", "lt"),)), run=(CallStep(TARGET, ()),))
OWN = KernelSource(Schedule("cpp"), "", "k")


@pytest.mark.parametrize(
    ("library_us", "own_us", "near"),
    [(1.0, 2.0, True), (2.0, 2.0 / LIBRARY_NEAR, True), (2.0, 1.0, False), (None, 1.0, False), (None, None, True)],
)
def test_further_algorithms_are_tried_where_a_library_comes_near(
    posed: tuple[Alternatives, Problems], library_us: float | None, own_us: float | None, near: bool
) -> None:
    entry = next(iter(posed[1].entries.values()))
    entry.kernels = [(k.schedule, k) for k in (LIBRARY, OWN, BY_ALGORITHM)]
    entry.first = 2
    known = Known()
    for kernel, us in ((LIBRARY, library_us), (OWN, own_us)):
        verdict = Verdict.OK if us else Verdict.WRONG
        m = Measurement(entry.problem.key, kernel.schedule, verdict, (us or 1.0,))
        known.measurements[m.problem_key, m.schedule] = m
    known.learn(entry)
    assert known.library_near(entry) is near
    entry.library_near, entry.widened = near, True
    assert [k for _, k in entry.asked] == [LIBRARY, OWN, BY_ALGORITHM][: 3 if near else 2]
    entry.widened = False
    assert len(entry.asked) == 2
