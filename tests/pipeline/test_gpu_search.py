"""The search on a GPU with invented times: batches overlap, and what is learned changes the next. Nothing is run."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.orchestrate.graphs import residual_net
from tests.pipeline.test_search import OPTIONS, Machine, start

from weft.device.cuda.facts import profile
from weft.generate.registry import generators
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline import plans as planning
from weft.pipeline.deadline import Deadline
from weft.pipeline.problems import Problems, collect
from weft.pipeline.search import measure as measuring
from weft.pipeline.search.emission import Emission
from weft.pipeline.search.kernels import LIBRARY_FROM_US, Depth, Order, write
from weft.pipeline.search.loop import LATE_PRICE, PRICES, SPARE_SHARE, SPARES, Inline, Learning, Search, Window
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.pipeline.stages import Stages
from weft.platform.cuda.platform import Cuda
from weft.platform.policy import SearchPolicy
from weft.tune.asked import Asked
from weft.tune.thread_pool import DaemonThreadPool, daemon
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

    def __call__(self, search: Search) -> Iterator[Measurement]:
        waiting: Sequence[Order] = ()
        for orders in itertools.chain(iter(search.next_batch, None), [()]):
            self.batches.append(len(orders))
            on_their_way = {o.task.problem.key for o in waiting}
            self.late += [o.task.problem.key for o in orders if o.task.problem.key in on_their_way]
            for order in waiting:
                yield from self.measured(order, search)
            waiting = orders


def run(posed: tuple[Alternatives, Problems], machine: Machine, *, rounds: int = 10_000) -> Learning:
    left = iter(range(rounds))
    window = Window(lambda: next(left, None) is None, lambda: 0.5)
    with DaemonThreadPool(1) as solver:
        search = start(posed, SearchPolicy(batch=6, late=0.8), window, solver, OPTIONS)
        return search.run(lambda: machine(search))


def test_it_ends_with_the_best_plan_measured(posed: tuple[Alternatives, Problems]) -> None:
    machine = Gpu(posed[1])
    known = run(posed, machine)
    assert known.complete
    assert machine.late == []
    assert max(machine.batches) <= 6
    assert len(known.best_us) < len(posed[1].tasks), "hopeless problems are never measured"
    assert len(machine.asked) == len(set(machine.asked)) == len(known.measurements)
    asked = Counter(key for key, _ in machine.asked)
    widened = [key for key, kernels in known.kernels.items() if asked[key] > kernels.first]
    assert widened and all(key in known.best_us for key in widened)


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
    for task in posed[1].tasks.values():
        order = Order(task)
        kernels = write(order, generators(device="cuda"), FACTS, OPTIONS)
        calls = sum(isinstance(kernel, LibraryCall) for _, kernel in order.chosen(kernels))
        assert kernels.first - calls <= Cuda.policy.first
        if kernels.first > calls:
            assert calls == 0 or (calls == 1 and task.estimate_us >= LIBRARY_FROM_US)


def test_predictions_follow_family_then_sort_then_the_estimate(
    posed: tuple[Alternatives, Problems],
) -> None:
    tasks = list(posed[1].tasks.values())
    known = Learning()
    product = next(t for t in tasks if t.sort == "product" and t.estimate_us > t.bound_us)
    others = [t for t in tasks if t.sort == "product" and t.family != product.family]
    assert known.price(product) == pytest.approx(PRICES[0] * product.estimate_us)
    for task in others:
        kernels = write(Order(task), generators(device="cuda"), FACTS, OPTIONS)
        known.wrote(task.problem.key, kernels)
        times = [(s, 3.0 * task.estimate_us) for s, _ in Order(task).chosen(kernels)]
        known.measurements.update(
            ((task.problem.key, s), Measurement(task.problem.key, s, Verdict.OK, (t,))) for s, t in times
        )
        assert not known.learn(task)
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
    stage = measuring.Measuring(bench, alternatives, problems, setting, clock, lambda stage, line: lines.append(line))
    known = stage.run()
    assert known.complete
    assert [line for line in lines if line.startswith("batch 1: ")]
    kernels = [(t.problem.key, s) for t in tuner.trials for s, _, _ in t.kernels]
    assert len(kernels) == len(set(kernels)) == len(known.measurements)
    plans = planning.select_plans(alternatives, problems, known, setting)
    assert plans[0].name == "solution-1"
    assert all(step.measured for step in plans[0].steps)
    assert plans[-1].name == "library"


class Interrupted:
    """In place of the tuner: the user ends it while one kernel of each problem of a plan is on its way."""

    gave_up = ""

    def __init__(self) -> None:
        self.asked: list[Asked[ProblemTrial]] = []

    def measure(self, trials: Iterator[ProblemTrial | None], **_: object) -> Iterator[Measurement]:
        with Asked(trials, 100, daemon, lambda: 60.0) as asked:
            self.asked.append(asked)
            assert list(asked.take(wait=True, most=1))
            raise KeyboardInterrupt
        yield  # type: ignore[unreachable]


def test_an_interrupt_ends_a_search_that_waits_for_what_is_measured(posed: tuple[Alternatives, Problems]) -> None:
    options = Options(device="cuda", budget_s=1.0)
    tuner = Interrupted()
    emission = Emission(generators(device="cuda"), FACTS, options, count=0)
    bench = measuring.Bench(cast("Tuner", tuner), emission)
    clock = Deadline.of(600.0)
    stage = measuring.Measuring(bench, *posed, Setting(options, Cuda(FACTS)), clock, lambda stage, line: None)
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    assert not tuner.asked[0].is_at_work
    assert clock.left_s > 500.0


def test_libraries_are_asked_in_threads_of_the_platform(
    posed: tuple[Alternatives, Problems], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's current GPU is the first, whatever its parent's is: the platform's threads begin with another."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: current.append(threading.current_thread().name))
    options = Options(device="cuda:1", budget_s=600.0, build_jobs=1)
    setting = Setting(options, Cuda(FACTS, device=torch.device("cuda", 1)))
    made: dict[str, Any] = {}

    def tuner(*_: object, **given: Any) -> contextlib.AbstractContextManager[None]:
        made.update(given)
        return contextlib.nullcontext(cast("None", SimpleNamespace(start_early=lambda: None)))

    monkeypatch.setattr(measuring, "Tuner", tuner)
    monkeypatch.setattr(measuring, "Emission", lambda *_: SimpleNamespace(close=lambda: None))
    with measuring.opened(setting, Deadline.of(600.0), Stages(options)):
        pass
    taken = Asked([1], 1, made["thread"])
    assert list(taken.take(wait=True, most=2)) == [1] and current == ["weft-asked"]
    taken.close(60.0)
    known = Known()
    planning.select_in_time(*posed, known, setting, [], Deadline.of(600.0))
    assert current == ["weft-asked"], "nothing was measured: nothing is asked for in another thread"
    task = next(iter(posed[1].tasks.values()))
    m = Measurement(task.problem.key, Schedule("library"), Verdict.OK, (1.0,))
    known.measurements[m.problem_key, m.schedule] = m
    planning.select_in_time(*posed, known, setting, [], Deadline.of(600.0))
    assert current == ["weft-asked", "weft-timeout"]


def hurried(posed: tuple[Alternatives, Problems], machine: Gpu, budget_s: float) -> tuple[Search, list[list[int]]]:
    """A search that may take so many seconds; kernels asked for of each problem of each batch."""
    asked: list[list[int]] = []

    def measure() -> Iterator[Measurement]:
        for batch in iter(search.next_batch, None):
            asked.append([])
            for order in batch:
                found = list(machine.measured(order, search))
                asked[-1].append(len(found))
                yield from found

    with DaemonThreadPool(1) as solver:
        policy = SearchPolicy(batch=100, late=0.8, overlaps=True)
        options = replace(OPTIONS, budget_s=budget_s)
        search = start(posed, policy, Window(lambda: False, lambda: 0.0), solver, options)
        search.run(measure)
    return search, asked


def test_in_a_hurry_one_kernel_of_everything_in_the_plan_goes_first(posed: tuple[Alternatives, Problems]) -> None:
    machine = Gpu(posed[1])
    search, asked = hurried(posed, machine, budget_s=0.5)
    assert len(asked[0]) > 2 and set(asked[0]) == {1}
    assert search.known.complete and any(sum(batch) > len(batch) for batch in asked[1:]), "others follow"
    assert len(machine.asked) == len(set(machine.asked)) == len(search.known.measurements)


def test_with_time_the_first_few_kernels_go_together(posed: tuple[Alternatives, Problems]) -> None:
    _, asked = hurried(posed, Gpu(posed[1]), budget_s=1e4)
    assert max(asked[0]) >= Cuda.policy.first


class Wrong(Gpu):
    """The first kernel of each problem is wrong, unless it is the only one."""

    def measured(self, order: Order, search: Search) -> Iterator[Measurement]:
        key = order.task.problem.key
        for found in super().measured(order, search):
            pairs = search.known.pairs(key)
            first = pairs[0][0] == found.schedule and len(pairs) > 1
            yield replace(found, verdict=Verdict.WRONG) if first else found


def test_a_problem_whose_one_kernel_is_wrong_gets_the_next_ones(posed: tuple[Alternatives, Problems]) -> None:
    known = hurried(posed, Wrong(posed[1]), budget_s=0.5)[0].known
    assert known.complete
    tried = [key for key in posed[1].tasks if key in known.best_us and len(known.pairs(key)) > 1]
    assert tried and all(math.isfinite(known.best_us[key]) for key in tried)


def test_a_problem_is_in_a_batch_once(posed: tuple[Alternatives, Problems]) -> None:
    """One whose first kernel was wrong is wanted for want of a time, and because it was tried in a hurry."""
    machine = Gpu(posed[1])
    machine.refuses = lambda position: position == 0
    batches: list[list[str]] = []

    def measure() -> Iterator[Measurement]:
        waiting: Sequence[Order] = ()
        for batch in itertools.chain(iter(search.next_batch, None), [()]):
            batches.append([o.task.problem.key for o in batch])
            for order in waiting:
                yield from machine.measured(order, search)
            waiting = batch

    asked = itertools.count()
    window = Window(lambda: False, lambda: min(1.0, next(asked) / 60))
    search = start(posed, Cuda.policy, window, Inline(), replace(OPTIONS, budget_s=0.5))
    search.run(measure)
    assert len(batches) > 1 and all(len(keys) == len(set(keys)) for keys in batches)


class Later(Executor):
    """Makes the first plan at once, and others from when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.at_once = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.waiting.append(lambda: done.set_result(fn(*args, **kwargs)))
        if self.at_once:
            self.go_on()
        return done

    def go_on(self) -> None:
        self.at_once = True
        while self.waiting:
            self.waiting.pop(0)()


def second_plan(
    posed: tuple[Alternatives, Problems], policy: SearchPolicy
) -> tuple[Search, Later, Gpu, dict[str, Order]]:
    """A search whose first plan is measured and whose second one is being made, and what was asked for the first."""
    machine, solver = Gpu(posed[1]), Later()
    search = start(posed, policy, Window(lambda: False, lambda: 0.0), solver, replace(OPTIONS, budget_s=1e4))
    first = search.next_batch()
    assert first
    solver.at_once = False
    for order in first:
        for found in machine.measured(order, search):
            search.measured.put(found)
    return search, solver, machine, {o.task.problem.key: o for o in first}


def test_other_kernels_of_the_dearest_problems_are_measured_while_a_plan_is_made(
    posed: tuple[Alternatives, Problems],
) -> None:
    search, solver, machine, first = second_plan(posed, SearchPolicy(batch=100, late=0.8, overlaps=True))
    asked = [search.next_batch() for _ in range(SPARES)]
    assert solver.waiting, "the plan is not made yet"
    assert search.next_batch() == (), "some are on their way"
    orders = [o for batch in asked for o in batch or ()]
    assert len(orders) == SPARES == len({o.task.problem.key for o in orders})
    uses = Counter(o.task.problem.key for o in first.values() for _ in o.task.uses)
    known = search.known
    for order in orders:
        key = order.task.problem.key
        assert order.depth is Depth.ALL and key in first and first[key].depth is not Depth.ALL
        assert uses[key] * known.best_us[key] >= SPARE_SHARE * search.standing.plan_us
        assert list(machine.measured(order, search)), "it has more kernels"
    solver.go_on()
    wanted = search.next_batch() or ()
    assert not {o.task.problem.key for o in wanted} & {o.task.problem.key for o in orders}


def test_where_measuring_would_be_disturbed_nothing_is_asked_while_a_plan_is_made(
    posed: tuple[Alternatives, Problems],
) -> None:
    search, solver, _, _ = second_plan(posed, SearchPolicy(batch=100, late=0.8))
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(search.next_batch()))
    waits.start()
    while not solver.waiting:
        time.sleep(0.01)
    waits.join(0.1)
    assert waits.is_alive() and not found
    solver.go_on()
    waits.join(60)
    assert len(found) == 1


def test_what_is_left_out_at_first_is_taken_in(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, whole = posed
    found = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    first = collect(alternatives.graph, found, alternatives, FACTS, most_at_once=10)
    assert first.rest is not None and len(first.tasks) < len(whole.tasks)
    search, _ = hurried((alternatives, first), Gpu(first), budget_s=1e4)
    problems = search.problems
    assert search.known.complete and problems.rest is None
    assert problems.tasks.keys() == whole.tasks.keys()
    for key, task in problems.tasks.items():
        same = whole.tasks[key]
        assert (task.estimate_us, task.bound_us, task.policy) == (same.estimate_us, same.bound_us, same.policy)
        assert len(task.uses) == len(same.uses)
        assert {(c.members, i, o) for c, i, o in task.formats} == {(c.members, i, o) for c, i, o in same.formats}


def test_what_is_left_out_is_given_up_when_time_is_over(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, _ = posed
    found = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    first = collect(alternatives.graph, found, alternatives, FACTS, most_at_once=10)
    assert first.rest is not None
    before = dict(first.tasks)
    few = iter([False, False])
    assert len(first.rest(lambda: next(few, True)).tasks) <= 2
    assert first.tasks == before, "nothing is taken in by collecting"
