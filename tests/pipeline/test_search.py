"""The search with invented times: what it asks for, in which order, and when it ends. Nothing is compiled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace

import pytest
from tests.orchestrate.graphs import residual_net
from tests.typed import noting

from weft.device.any import DeviceFacts
from weft.device.facts import CpuFacts
from weft.generate.library.algorithm import TARGET
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CallStep, KernelSource, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.select import select, select_by_windows
from weft.pipeline.problems import Problems, collect
from weft.pipeline.search import loop
from weft.pipeline.search.kernels import FIRST, Depth, Kernels, Order, write
from weft.pipeline.search.loop import Inline, Learning, Search, Window
from weft.pipeline.search.prices import Known, priced_offers
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

    def __call__(self, search: Search) -> Iterator[Measurement]:
        while (orders := search.next_batch()) is not None:
            self.batches.append(len(orders))
            for order in orders:
                yield from self.measured(order, search)

    def measured(self, order: Order, search: Search) -> Iterator[Measurement]:
        task = order.task
        kernels = write(order, self.makers, self.facts, OPTIONS)
        asked = search.wrote(order, kernels)
        for position, pair in enumerate(order.chosen(kernels)):
            if pair not in asked:
                continue
            key = (task.problem.key, pair[0])
            self.asked.append(key)
            share = hashlib.sha256(str(key).encode()).digest()[0] / 256
            verdict = Verdict.WRONG if self.refuses(position) else Verdict.OK
            yield Measurement(*key, verdict, (task.estimate_us * (0.5 + share),))


def start(
    posed: tuple[Alternatives, Problems], policy: SearchPolicy, window: Window, solver: Executor, options: Options
) -> Search:
    alternatives, problems = posed
    return Search(alternatives.graph, problems, alternatives, options, policy, window, solver, lambda line: None)


def run(posed: tuple[Alternatives, Problems], machine: Machine, rounds: int = 1000, *, spent: float = 0.0) -> Learning:
    left = iter(range(rounds))
    window = Window(lambda: next(left, None) is None, lambda: spent)
    search = start(posed, SearchPolicy(batch=BATCH, late=0.8, last=0.5), window, Inline(), OPTIONS)
    return search.run(lambda: machine(search))


def test_it_ends_with_the_best_plan_measured(posed: tuple[Alternatives, Problems]) -> None:
    machine = Machine(posed[1])
    known = run(posed, machine)
    assert known.complete
    assert len(known.best_us) < len(posed[1].tasks), "hopeless problems are never measured"
    assert len(machine.asked) == len(set(machine.asked)) == len(known.measurements)


def test_the_first_kernels_go_first_and_the_others_where_it_matters(posed: tuple[Alternatives, Problems]) -> None:
    machine = Machine(posed[1])
    known = run(posed, machine)
    asked = {key: [s for k, s in machine.asked if k == key] for key in known.kernels}
    assert known.kernels.keys() == {key for key, _ in machine.asked}
    assert all(k.first <= 2 * FIRST for k in known.kernels.values())
    assert any(len(asked[key]) > k.first for key, k in known.kernels.items())
    left = [key for key, k in known.kernels.items() if k.more]
    assert left, "the others are not even written"
    assert all(len(asked[key]) == known.kernels[key].first for key in left)


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
    first = [problems.tasks[key] for key in dict.fromkeys(key for key, _ in machine.asked)][: machine.batches[0]]
    assert all(t.essential for t in first), "a group that nobody measured cannot be in a last plan"
    prices = [Learning(weight=math.inf).price(t) * len(t.uses) for t in first]
    assert prices[0] == max(prices), "the dearest goes first"
    group = next(t for t in problems.tasks.values() if not t.essential)
    assert math.isinf(Learning(weight=math.inf).price(group)) and math.isfinite(Learning().price(group))


def test_plans_by_windows_ask_for_what_those_of_the_whole_do(
    posed: tuple[Alternatives, Problems], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(posed, Machine(posed[1]))
    made: list[float] = []
    monkeypatch.setattr(loop, "LARGE", 1)
    monkeypatch.setattr(loop, "select", None)
    monkeypatch.setattr(
        loop, "select_by_windows", noting(lambda *_, begin, **__: made.append(begin), select_by_windows)
    )
    known = run(posed, Machine(posed[1]))
    assert known.complete and made
    alternatives, problems = posed

    def best_us(found: Learning) -> float:
        found.weight = math.inf
        offers, _ = priced_offers(problems, found)
        return select(alternatives.graph, offers, alternatives=alternatives, plans=1)[0].cost_us

    assert best_us(known) == pytest.approx(best_us(whole), rel=5e-3)


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
NEAR = 1.15


@pytest.mark.parametrize(
    ("library_us", "own_us", "near"),
    [(1.0, 2.0, True), (2.0, 2.0 / NEAR, True), (2.0, 1.0, False), (None, 1.0, False), (None, None, True)],
)
def test_further_algorithms_are_tried_where_a_library_comes_near(
    posed: tuple[Alternatives, Problems], library_us: float | None, own_us: float | None, near: bool
) -> None:
    task = next(iter(posed[1].tasks.values()))
    task = replace(task, policy=replace(task.policy, library_near=NEAR))
    kernels = Kernels(tuple((k.schedule, k) for k in (LIBRARY, OWN, BY_ALGORITHM)), first=2)
    known = Known(kernels={task.problem.key: kernels})
    for kernel, us in ((LIBRARY, library_us), (OWN, own_us)):
        verdict = Verdict.OK if us else Verdict.WRONG
        m = Measurement(task.problem.key, kernel.schedule, verdict, (us or 1.0,))
        known.measurements[m.problem_key, m.schedule] = m
    assert known.learn(task) is (library_us is None and own_us is None), "then the others are tried"
    assert known.library_near(task) is near
    everything = Order(task, Depth.ALL, library_near=near).chosen(kernels)
    assert [k for _, k in everything] == [LIBRARY, OWN, BY_ALGORITHM][: 3 if near else 2]
    assert len(Order(task, Depth.FEW).chosen(kernels)) == 2


def test_what_is_asked_again_is_not_written_or_measured_again(posed: tuple[Alternatives, Problems]) -> None:
    machine = Machine(posed[1])
    known = run(posed, machine)
    key, kernels = next((key, k) for key, k in known.kernels.items() if not k.more and len(k.pairs) > k.first)
    order = Order(posed[1].tasks[key], Depth.ALL, before=kernels)
    assert write(order, [], FACTS, OPTIONS) is kernels


def test_who_is_left_at_work_changes_nothing_of_what_is_known(posed: tuple[Alternatives, Problems]) -> None:
    """A thread that makes trials when the time is up: its kernels come when plans are made of what is known."""
    left: list[Order] = []
    machine = Machine(posed[1])
    search = start(posed, SearchPolicy(batch=BATCH, late=0.8), Window(lambda: False, lambda: 0.0), Inline(), OPTIONS)

    def one_batch() -> Iterator[Measurement]:
        left.extend(search.next_batch() or ())
        raise KeyboardInterrupt
        yield  # type: ignore[unreachable]

    with pytest.raises(KeyboardInterrupt):
        search.run(one_batch)
    assert left and list(machine.measured(left[0], search)) == []
    assert search.known.kernels == {} and search.next_batch() is None
