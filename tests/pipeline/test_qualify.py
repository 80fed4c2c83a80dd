"""No step runs here that has not run in a worker: what is verified before plans are linked, and what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.orchestrate.graphs import residual_net
from tests.slow import few

import weft
from weft.device.facts import CpuFacts
from weft.errors import ArtifactError, DeviceError, NoPlanError, NoWorkerError
from weft.generate.registry import generators
from weft.ir.graph import Graph
from weft.ir.types import DType
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.source import Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline import choose, finish, qualify, recall
from weft.pipeline import link as linking
from weft.pipeline import plans as planning
from weft.pipeline.deadline import Deadline, OutOfTime
from weft.pipeline.problems import Problems, collect
from weft.pipeline.search import measure as measuring
from weft.pipeline.search.emission import Emission
from weft.pipeline.search.kernels import Depth, Order, write
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import Setting
from weft.platform.cpu import Cpu
from weft.tune.tuner import ProblemTrial, Tuner

FACTS = CpuFacts()
Key = tuple[str, Schedule]


@pytest.fixture
def posed() -> tuple[Alternatives, Problems]:
    alternatives = find_alternatives(residual_net(1))
    graph = alternatives.graph
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, FACTS)
    return alternatives, problems


def knows(posed: tuple[Alternatives, Problems], measured: dict[Key, Measurement] | None = None, **more: Any) -> Known:
    """With all calls of what no plan can do without."""
    known = Known(measured or {}, **more)
    makers = generators(library=True, generated=False)
    for key, task in posed[1].tasks.items():
        if task.essential:
            known.wrote(key, write(Order(task, Depth.ALL), makers, FACTS, Options()))
    return known


class Worker:
    """Verifies: refuses what it is told to, and answers so many trials."""

    def __init__(self, refuses: Sequence[Key] = (), answers: float = 1e9, odd: Sequence[Key] = ()) -> None:
        self.refuses, self.left, self.odd = set(refuses), answers, set(odd)
        self.asked: list[ProblemTrial] = []

    def __call__(self, trials: Sequence[ProblemTrial]) -> Iterator[Measurement]:
        for trial in trials:
            if self.left <= 0:
                return
            self.left -= 1
            self.asked.append(trial)
            ((schedule, _, _),) = trial.kernels
            key = trial.problem.key, schedule
            odd = key in self.odd and not trial.finite
            yield Measurement(*key, Verdict.WRONG if key in self.refuses else Verdict.NAN_CLASS if odd else Verdict.OK)


def planned(posed: tuple[Alternatives, Problems], known: Known) -> list[Plan]:
    alternatives, problems = posed
    offers = choose.offers(choose.rank(problems, known, library_only=False))
    library = choose.rank(problems, known, library_only=True)
    return [
        replace(choose.plain_plan("solution-1", alternatives.graph, offers, alternatives, Options())),
        choose.library_plan(alternatives.graph, library, alternatives, Options(), FACTS),
    ]


def run(
    posed: tuple[Alternatives, Problems],
    known: Known,
    worker: Worker,
    *,
    has_baseline: bool = True,
    covered: Callable[[Step], bool] = lambda step: False,
) -> tuple[list[Plan], list[str]]:
    lost: list[str] = []
    setting = Setting(Options(budget_s=9.0), Cpu(FACTS))
    of_verified = partial(planning.plans_of_verified, *posed, known, setting, Deadline.of(9.0))
    found = qualify.qualify(
        planned(posed, known), posed[1], known, worker, lambda: planned(posed, known), of_verified, lambda: False,
        has_baseline=has_baseline, lost=lost, covered=covered,
    )  # fmt: skip
    return found, lost


def test_every_step_that_nobody_measured_is_verified(posed: tuple[Alternatives, Problems]) -> None:
    known, worker = knows(posed), Worker()
    plans, lost = run(posed, known, worker, has_baseline=False)
    assert [p.name for p in plans] == ["solution-1", "library"] and not lost
    assert all(known.is_right(s.problem_key, s.kernel.schedule) for p in plans for s in p.steps)
    asked = [(t.problem.key, t.kernels[0][0]) for t in worker.asked]
    assert set(asked) == {(s.problem_key, s.kernel.schedule) for p in plans for s in p.steps}
    assert len(asked) == len(set(asked)), "once each"
    assert not any(t.timed or t.finite for t in worker.asked)


def test_what_was_measured_is_not_asked_again(posed: tuple[Alternatives, Problems]) -> None:
    keys = [(s.problem_key, s.kernel.schedule) for p in planned(posed, knows(posed)) for s in p.steps]
    known = knows(posed, {k: Measurement(*k, Verdict.OK, (1.0,)) for k in keys})
    worker = Worker()
    plans, _ = run(posed, known, worker)
    assert [p.name for p in plans] == ["solution-1", "library"] and not worker.asked


def test_the_library_plan_is_spared_where_there_is_a_baseline_and_a_plan(posed: tuple[Alternatives, Problems]) -> None:
    known = knows(posed)
    solution, _ = planned(posed, known)
    known.right = {(s.problem_key, s.kernel.schedule) for s in solution.steps}
    worker = Worker()
    plans, lost = run(posed, known, worker)
    assert [p.name for p in plans] in (["solution-1"], ["solution-1", "library"]) and not worker.asked
    lost_plans = 2 - len(plans)
    assert len(lost) == lost_plans


def test_a_refused_call_is_replaced_by_another_of_its_problem(posed: tuple[Alternatives, Problems]) -> None:
    known = knows(posed)
    solution, _ = planned(posed, known)
    step = next(s for s in solution.steps if len(known.pairs(s.problem_key)) > 1)
    key = step.problem_key, step.kernel.schedule
    plans, lost = run(posed, known, Worker([key]), has_baseline=False)
    assert not lost and known.refused == {key}
    (other,) = {s.kernel.schedule for s in plans[0].steps if s.problem_key == step.problem_key}
    assert other != step.kernel.schedule and known.is_right(step.problem_key, other)


def test_where_every_call_is_refused_plans_are_made_without_the_problem(posed: tuple[Alternatives, Problems]) -> None:
    solution, _ = planned(posed, knows(posed))
    step = next(s for s in solution.steps if s.kind.value == "origin")
    kernels = knows(posed).pairs(step.problem_key)
    known = knows(posed)
    plans, _ = run(posed, known, Worker([(step.problem_key, s) for s, _ in kernels]))
    assert plans and all(s.problem_key != step.problem_key for p in plans for s in p.steps)


def calls_of(posed: tuple[Alternatives, Problems], kinds: set[str]) -> set[Key]:
    known, tasks = knows(posed), posed[1].tasks
    keys = [key for key, task in tasks.items() if {c.kind.value for c, _ in task.uses} & kinds]
    return {(key, schedule) for key in keys for schedule, _ in known.pairs(key)}


def test_a_plan_with_a_step_that_there_was_no_time_for_is_answered_by_one_of_what_was_verified(
    posed: tuple[Alternatives, Problems],
) -> None:
    """One step of many must not lose all that was measured."""
    known = knows(posed, right=calls_of(posed, {"single", "convert"}) - calls_of(posed, {"origin"}))
    assert any(s.kind.value == "origin" for p in planned(posed, known) for s in p.steps)
    plans, lost = run(posed, known, Worker(answers=0), has_baseline=False)
    assert [p.name for p in plans] == ["verified"] and len(lost) == 2
    assert qualify.is_verified(plans[0], known) and not any(s.kind.value == "origin" for s in plans[0].steps)


def test_without_enough_that_was_verified_there_is_no_such_plan(posed: tuple[Alternatives, Problems]) -> None:
    right = calls_of(posed, {"single", "convert"}) - calls_of(posed, {"origin"})
    products = {t.problem.key for t in posed[1].tasks.values() if t.sort == "product alone"}
    known = knows(posed, right={key for key in right if key[0] not in products})
    plans, lost = run(posed, known, Worker(answers=0), has_baseline=False)
    assert plans == [] and len(lost) == 2


def test_a_step_is_replaced_by_a_call_of_its_problem_that_was_verified(posed: tuple[Alternatives, Problems]) -> None:
    """Before it is asked for: time may end meanwhile."""
    known = knows(posed)
    solution, _ = planned(posed, known)
    step = next(s for s in solution.steps if len(known.pairs(s.problem_key)) > 1)
    known.right = {(s.problem_key, s.kernel.schedule) for s in solution.steps} - {
        (step.problem_key, step.kernel.schedule)
    }
    other = next(s for s, _ in known.pairs(step.problem_key) if s != step.kernel.schedule)
    known.right.add((step.problem_key, other))
    (found,) = qualify._settled([solution], posed[1], known, Worker(answers=0), lambda: True, has_baseline=True)
    assert qualify.is_verified(found, known)
    assert {s.kernel.schedule for s in found.steps if s.problem_key == step.problem_key} == {other}


def test_the_plan_that_needs_least_is_verified_first_and_its_smallest_calls_before_others(
    posed: tuple[Alternatives, Problems],
) -> None:
    worker = Worker()
    run(posed, knows(posed), worker, has_baseline=False)
    wanted = [{s.problem_key for s in p.steps} for p in planned(posed, knows(posed))]
    sizes = [qualify.work_bytes(t.problem) for t in worker.asked]
    totals = [sum(qualify.work_bytes(posed[1].tasks[k].problem) for k in keys) for keys in wanted]
    first = wanted[totals.index(min(totals))]
    assert {t.problem.key for t in worker.asked[: len(first)]} == first
    assert sizes[: len(first)] == sorted(sizes[: len(first)])


def test_a_call_that_turns_out_odd_is_verified_on_finite_inputs(posed: tuple[Alternatives, Problems]) -> None:
    """Not refused: then nothing of the network is left but its single primitives."""
    step = planned(posed, knows(posed))[0].steps[0]
    calls = [(step.problem_key, s) for s, _ in knows(posed).pairs(step.problem_key)]
    known, worker = knows(posed), Worker(odd=calls)
    plans, lost = run(posed, known, worker, has_baseline=False)
    assert [p.name for p in plans] == ["solution-1", "library"] and not lost and not known.refused
    asked = [t.finite for t in worker.asked if t.problem.key == step.problem_key]
    assert asked == [False] * len(calls) + [True], "first every other call of the problem"


def ahead_of(posed: tuple[Alternatives, Problems], known: Known) -> qualify.CallsAhead:
    return qualify.CallsAhead(*posed, known, FACTS, Options())


def test_a_whole_library_plan_is_verified_while_kernels_are_compiled(posed: tuple[Alternatives, Problems]) -> None:
    known = Known()
    ahead = ahead_of(posed, known)
    sizes = []
    for trial in ahead:
        sizes.append(qualify.work_bytes(trial.problem))
        assert not trial.timed
        assert ahead.takes(Measurement(trial.problem.key, trial.kernels[0][0], Verdict.OK))
    assert sizes == sorted(sizes) and len(sizes) == len(known.right) > 3
    assert not known.kernels, "generators are asked for these later"
    setting = Setting(Options(budget_s=9.0), Cpu(FACTS))
    planning._library_calls(posed[1], known, setting)
    (plan,) = planning.plans_of_verified(*posed, known, setting, Deadline.of(9.0))
    assert qualify.is_verified(plan, known)


def test_what_is_about_to_be_measured_is_not_verified_ahead(posed: tuple[Alternatives, Problems]) -> None:
    every = [t.problem.key for t in ahead_of(posed, knows(posed))]
    known = knows(posed)
    ahead = ahead_of(posed, known)
    first = next(ahead)
    ahead.leave(every[1])
    ahead.leave(first.problem.key)
    call = first.problem.key, first.kernels[0][0]
    assert not ahead.takes(Measurement(*call, Verdict.OK, (1.0,))), "it was timed"
    assert ahead.takes(Measurement(*call, Verdict.OK)) and known.right == {call}, "an answer on its way is no time"
    assert not ahead.takes(Measurement(*call, Verdict.WRONG)) and not known.refused
    assert [t.problem.key for t in ahead] == every[2:]


def test_a_plan_is_verified_before_it_is_too_late(posed: tuple[Alternatives, Problems]) -> None:
    """By what was seen of the worker: the slower it is, the earlier."""
    worked = [0.0]
    ahead = qualify.CallsAhead(*posed, knows(posed), FACTS, Options(), lambda: worked[0])
    assert not ahead.is_due(30.0, 40.0) and ahead.is_due(10.0, 40.0), "the time of a group is always left"
    for seconds in (20.0, 60.0):
        trial = next(ahead)
        worked[0] += seconds
        assert ahead.takes(Measurement(trial.problem.key, trial.kernels[0][0], Verdict.OK))
    assert ahead.is_due(30.0, 40.0)
    for trial in ahead:
        assert ahead.takes(Measurement(trial.problem.key, trial.kernels[0][0], Verdict.OK))
    assert not ahead.is_due(1.0, 40.0), "nothing is left"


def test_what_may_stand_unverified_is_not_due(posed: tuple[Alternatives, Problems]) -> None:
    """The others are, and those that may are verified where the worker waits, as before."""
    library = planned(posed, knows(posed))[1]
    odd = {s.problem_key for s in library.steps[::2]}
    known = knows(posed)
    ahead = qualify.CallsAhead(*posed, known, FACTS, Options(), covered=lambda step: step.problem_key not in odd)
    assert ahead.is_due(1.0, 40.0)
    due = list(ahead.due())
    assert {t.problem.key for t in due} == odd
    for trial in due:
        assert ahead.takes(Measurement(trial.problem.key, trial.kernels[0][0], Verdict.OK))
    assert not ahead.is_due(1.0, 40.0)
    rest = list(ahead)
    assert {t.problem.key for t in rest} == {s.problem_key for s in library.steps} - odd
    sizes = [qualify.work_bytes(t.problem) for t in rest]
    assert sizes == sorted(sizes)


def test_an_odd_call_is_verified_ahead_on_finite_inputs(posed: tuple[Alternatives, Problems]) -> None:
    known = knows(posed)
    ahead = ahead_of(posed, known)
    first = next(ahead)
    key = first.problem.key, first.kernels[0][0]
    assert ahead.takes(Measurement(*key, Verdict.NAN_CLASS))
    again = next(ahead)
    assert (again.problem.key, again.kernels[0][0]) == key and again.finite
    assert ahead.takes(Measurement(*key, Verdict.OK)) and known.right == {key} and not known.refused


@pytest.mark.parametrize("answers", [0, 2])
def test_plans_that_there_is_no_time_for_are_dropped(answers: int, posed: tuple[Alternatives, Problems]) -> None:
    known, worker = knows(posed), Worker(answers=answers)
    plans, lost = run(posed, known, worker)
    assert plans == [] and len(worker.asked) == answers == len(known.right)
    assert len(lost) == 2
    assert "kernels of the plan solution-1 are not verified: there was no time to verify them" in lost[0]


def test_a_call_that_is_only_odd_is_verified_on_finite_inputs(posed: tuple[Alternatives, Problems]) -> None:
    """Where nothing else is right: oneDNN's convolutions multiply infinite weights with padding."""
    step = planned(posed, knows(posed))[0].steps[0]
    kernels = knows(posed).pairs(step.problem_key)
    known = knows(
        posed, {(step.problem_key, s): Measurement(step.problem_key, s, Verdict.NAN_CLASS) for s, _ in kernels}
    )
    worker = Worker()
    plans, _ = run(posed, known, worker, has_baseline=False)
    assert plans
    assert {t.problem.key for t in worker.asked if t.finite} == {step.problem_key}


@pytest.mark.parametrize("answers", [0, 2])
def test_plans_that_there_was_no_time_for_stand_where_their_calls_would_without_a_budget(
    answers: int, posed: tuple[Alternatives, Problems]
) -> None:
    """Of covered calls, and of none that something speaks against."""
    library = planned(posed, knows(posed))[1]
    known, lost = knows(posed), list[str]()
    plans = run(posed, known, Worker(answers=answers), covered=lambda step: True)[0]
    names = ["solution-1", "library"] if answers else ["library"]
    assert [p.name for p in plans] == names and len(known.right) == answers, "of others a part is verified"
    key = library.steps[0].problem_key, library.steps[0].kernel.schedule
    assert run(posed, knows(posed), Worker(answers=0), covered=lambda step: step.problem_key != key[0])[0] == []
    every = {(key[0], s) for s, _ in knows(posed).pairs(key[0])}
    for known in (knows(posed, refused=every), knows(posed, odd=every)):
        plans, lost = run(posed, known, Worker(answers=0), covered=lambda step: True)
        assert all(s.problem_key != key[0] for p in plans for s in p.steps) and lost


class Sick:
    """In place of a tuner whose worker cannot be started."""

    gave_up = ""
    suspects: frozenset[Key] = frozenset()

    def measure(self, trials: object, **_: object) -> Iterator[Measurement]:
        raise NoWorkerError(problem="the measuring worker does not start: exit status 1")
        yield  # type: ignore[unreachable]


def test_without_a_worker_nothing_is_right(posed: tuple[Alternatives, Problems]) -> None:
    alternatives, problems = posed
    options = Options(budget_s=30.0)
    setting = Setting(options, Cpu(FACTS))
    emission = Emission(generators(), FACTS, options, count=0)
    bench = measuring.Bench(cast("Tuner", Sick()), emission)
    clock = Deadline.of(30.0)
    known = measuring.Measuring(bench, alternatives, problems, setting, clock, lambda stage, line: None).run()
    assert known.failed == "the measuring worker does not start: exit status 1"
    lost: list[str] = []
    plans = planning.select_plans(alternatives, problems, known, setting, lost)
    clock = Deadline.of(30.0)
    others = [p for p in plans if p.name != "library"]
    found = planning.qualified(bench, others, problems, known, lambda: others, list, clock, True, lost)
    assert found == [] and known.failed in lost
    (library,) = planning.qualified(bench, plans, problems, known, lambda: plans, list, clock, True, lost)
    assert library.name == "library" and not known.right, "as without a budget"
    late = Deadline(0.0, 30.0, lambda: 29.0)
    assert planning.qualified(bench, plans, problems, known, lambda: plans, list, late, True, lost) == []


class Block(torch.nn.Module):
    """Of everything a little, of which little is measured in no time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.line = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.conv(x)).mean((2, 3))
        result: torch.Tensor = torch.softmax(self.line(y), -1)
        return result


@pytest.mark.filterwarnings("ignore:Weft has no plan for this model")
@pytest.mark.parametrize("budget_s", few([60.0, 1.5], 1))
def test_nothing_is_linked_that_no_worker_has_verified_but_covered_calls_for_want_of_time(
    budget_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole pipeline, with time for everything and for next to nothing."""
    right: set[Key] = set()
    linked: list[tuple[str, Key]] = []
    covered: dict[Key, bool] = {}
    measure, link, stands = Tuner.measure, linking.link, qualify.stands_unverified

    def listening(self: Tuner, trials: object, **given: object) -> Iterator[Measurement]:
        for found in measure(self, trials, **given):  # type: ignore[arg-type]
            if found.verdict is Verdict.OK:
                right.add((found.problem_key, found.schedule))
            yield found

    def watched(graph: Graph, plan: Plan, setting: Setting, left_s: float = 60.0) -> object:
        linked.extend((plan.name, (s.problem_key, s.kernel.schedule)) for s in plan.steps)
        return link(graph, plan, setting, left_s)

    def standing(step: Step, **given: Any) -> bool:
        key = step.problem_key, step.kernel.schedule
        covered[key] = stands(step, **given)
        return covered[key]

    monkeypatch.setattr(Tuner, "measure", listening)
    monkeypatch.setattr(linking, "link", watched)
    monkeypatch.setattr(qualify, "stands_unverified", standing)
    chance = torch.Generator().manual_seed(1)
    model, x = Block().eval(), torch.randn(2, 3, 8, 8, generator=chance)
    options = weft.Options(budget_s=budget_s, cache_dir=tmp_path, keep_per_problem=1)
    compiled = weft.compile(model, x, options=options)
    unverified = {name for name, key in linked if key not in right}
    assert budget_s < 50 or not unverified
    assert all(covered[key] for name, key in linked if key not in right)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    if budget_s > 50:
        assert linked
        again = weft.compile(model, x, options=replace(options, budget_s=61.0))
        assert again.record.measured == 0, "verdicts are remembered"


FAULTS = [
    RuntimeError("refused"),
    TypeError("no tensor"),
    DeviceError(problem="cannot be launched"),
    MemoryError("none"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: type(x).__name__)
def test_a_plan_that_raises_here_is_dropped(fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> object:
        raise fault

    monkeypatch.setattr(linking, "link", refusing)
    setting = Setting(Options(cache_dir=tmp_path), Cpu(FACTS))
    lost: list[str] = []
    graph, plan, x = residual_net(1), Plan("bad", ()), torch.ones(3)
    with pytest.warns(UserWarning, match="leaves out the plan bad"):
        (left,) = linking.link_all(graph, [plan], setting, [x], lambda x: [x], lost)
    assert left.executable is None and "the plan bad does not run" in lost[0]


def test_a_plan_that_ends_the_use_of_the_gpu_is_reported_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the process can use it any more: trying further would blame whoever comes next."""

    def killing(*_: object) -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(linking, "link", killing)
    monkeypatch.setattr(Cpu, "is_sound", lambda self: False)
    setting = Setting(Options(cache_dir=tmp_path), Cpu(FACTS))
    plans = [Plan("bad", ()), Plan("next", ())]
    with pytest.raises(
        DeviceError, match=r"the plan bad ended this process's use of the GPU: .*access was enc.* \[W301"
    ):
        linking.link_all(residual_net(1), plans, setting, [torch.ones(3)], None, [])


@pytest.mark.parametrize("sound", [True, False])
def test_a_plan_that_raises_while_it_is_judged(sound: bool) -> None:
    def raising() -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    one = torch.ones(3)
    expected = finish.Expected([one.double().numpy()], [one.numpy()])
    bad = finish.Contender("solution-1", raising, 1, 1.0, baseline=False, executable=None)
    good = finish.Contender("eager", lambda: [one], 0, 0.0, baseline=True, executable=None)
    if not sound:
        with pytest.raises(DeviceError, match="solution-1 ended this process's use of the GPU"):
            finish.decide([bad, good], expected, DType.F32, seed=0, budget_s=0.1, lives=lambda: False)
        return
    chosen, records = finish.decide([bad, good], expected, DType.F32, seed=0, budget_s=0.1)
    assert chosen is good
    assert not records[0].verified and "does not run: CUDA error" in records[0].note


def test_with_a_limit_on_memory_and_no_plan_the_limit_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "is_covered", lambda problem, call, device: False)
    options = Options(budget_s=0, cache_dir=tmp_path, memory_limit_bytes=1 << 24)
    with pytest.raises(NoPlanError, match=r"no plan is left for this model: .*no kernel.* \[W303\]"):
        weft.compile(Block().eval(), torch.ones(2, 3, 8, 8), options=options)


@pytest.mark.parametrize("sound", [True, False])
def test_a_remembered_plan_that_raises_is_made_anew(
    sound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object) -> object:
        raise RuntimeError("CUDA error: out of resources\nmore")

    monkeypatch.setattr(linking, "link", raising)
    monkeypatch.setattr(Cpu, "is_sound", lambda self: sound)
    setting = Setting(Options(cache_dir=tmp_path), Cpu(FACTS))
    if sound:
        with pytest.warns(UserWarning, match=r"tunes anew, .* does not run: CUDA error: out of resources$"):
            assert recall.link_stored(residual_net(1), Plan("old", ()), setting) is None
        return
    with pytest.raises(DeviceError, match="chosen before ended this process's use of the GPU"):
        recall.link_stored(residual_net(1), Plan("old", ()), setting)


def test_without_a_budget_only_covered_calls_stand_in_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block().eval(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    options = weft.Options(budget_s=0, cache_dir=tmp_path)
    monkeypatch.setattr(planning, "is_covered", lambda problem, call, device: False)
    with pytest.warns(UserWarning, match="has no plan for this model"):
        compiled = weft.compile(model, x, options=options)
    with pytest.raises(ArtifactError):
        compiled.save(tmp_path / "m.weft")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    monkeypatch.undo()
    assert weft.compile(model, x, options=options).executable.kernels > 0


@pytest.mark.parametrize("quick", [True, False])
def test_a_framework_that_does_not_end_in_time_answers_unless_a_plan_was_faster(
    quick: bool, posed: tuple[Alternatives, Problems], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the one plan that was there, unjudged, would."""
    plan = planned(posed, knows(posed))[1]
    graph = posed[0].graph
    inputs = [torch.zeros(graph.type_of(i).shape) for i in graph.inputs]
    setting = Setting(Options(budget_s=9.0), Cpu(FACTS))
    clock = [0.0]
    monkeypatch.setattr("weft.pipeline.link.time.perf_counter", lambda: clock[0])

    def bounded(_: Setting, run: Callable[..., Any], __: Deadline) -> Callable[..., Any]:
        def watched(*given: torch.Tensor) -> Any:
            clock[0] += 0.5 if run is eager else 0.25 if quick else 1.0
            if run is eager:
                raise OutOfTime
            return run(*given)

        return watched

    monkeypatch.setattr(Setting, "bounded", bounded)

    def eager(*given: torch.Tensor) -> Any:
        raise AssertionError(given)

    found = linking.link_all(graph, [plan], setting, inputs, eager, [])
    assert [c.name for c in found] == (["library"] if quick else ["library", "eager"])
    assert found[-1].first_s == (0.25 if quick else 0.5)
