"""A budget bounds the whole of a compilation, whatever is slow or hangs, and what was not measured is called so."""

from __future__ import annotations

import gc
import importlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.faults.fake import FakeTransport
from tests.orchestrate.graphs import residual_net
from tests.slow import few
from torch import nn

import weft
from weft import api
from weft.api import Compiled
from weft.device.facts import CpuFacts
from weft.device.toolchain import HostCompiler
from weft.errors import ArtifactError, BudgetWarning
from weft.frontends.imported import Imported
from weft.generate.registry import generators
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.record import StageRecord, Tuning
from weft.kernels.source import LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.select import heuristic
from weft.pipeline import answer, candidates, choose, finish, reference, repro, warm
from weft.pipeline import compile as compiling
from weft.pipeline import link as linking
from weft.pipeline import plans as planning
from weft.pipeline.deadline import Deadline, OutOfTime
from weft.pipeline.finish import NOT_JUDGED, Contender, Expected
from weft.pipeline.framework import CAPTURE_RATIO, MOST_CAPTURE, TOO_LATE, LeftToFramework, first_run
from weft.pipeline.framework import in_time as captures_in_time
from weft.pipeline.job import Framework, Job
from weft.pipeline.problems import collect
from weft.pipeline.search.kernels import Order, write
from weft.pipeline.search.loop import Standing
from weft.pipeline.search.measure import Bench, search_line
from weft.pipeline.search.prices import Known
from weft.pipeline.setting import survey
from weft.pipeline.stages import Stages, silent
from weft.pipeline.verdict import judged
from weft.platform.cpu import Cpu
from weft.report import render
from weft.runtime.any import AnyExecutable
from weft.tune import kept
from weft.tune.messages import Message
from weft.tune.site import HostSite
from weft.tune.transport import Fault, WorkerFault
from weft.tune.tuner import Progress

BUDGET_S = 2.0
BUSY_S = 20.0
"""Beyond the budget, for what Python does on a machine with much other work. What hangs here does so for a minute."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(32, 32, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(x @ self.weight) * 0.5 + x, dim=-1)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Nor is the first search for garbage among all that was imported: a quarter of a second of a core."""
    importlib.import_module("scipy.optimize")
    gc.collect()


@pytest.fixture(autouse=True)
def _warm(x: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What Python imports at the first compilation of a process is not what these tests are about."""
    weft.compile(Net().eval(), x, options=Options(budget_s=0, cache_dir=tmp_path_factory.mktemp("warm")))


class NeverReady:
    """A worker that starts and never says a word."""

    def __init__(self) -> None:
        self.killed = 0

    def start(self) -> None:
        pass

    def send(self, message: Message, timeout_s: float) -> None:
        pass

    def receive(self, timeout_s: float) -> Message:
        time.sleep(timeout_s)
        raise WorkerFault(Fault.HANG, "no answer in time")

    def running(self) -> int:
        return -1

    def kill(self) -> None:
        self.killed += 1


class HangsAtWork(NeverReady):
    """A worker that greets, and answers no trial."""

    def __init__(self) -> None:
        super().__init__()
        self.operation = ""

    def send(self, message: Message, timeout_s: float) -> None:
        self.operation = str(message["op"])

    def receive(self, timeout_s: float) -> Message:
        if self.operation == "trial":
            return super().receive(timeout_s)
        return {"event": "canary", "problem": ""} if self.operation == "canary" else {"event": "ready"}


class Hang:
    """Whoever calls it waits until the test is over."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    def __call__(self, *_: object, **__: object) -> object:
        self.calls += 1
        self.release.wait(60)
        raise RuntimeError("released")


@pytest.fixture
def hang() -> object:
    found = Hang()
    yield found
    found.release.set()


def worker(monkeypatch: pytest.MonkeyPatch, transport: object) -> None:
    monkeypatch.setattr(HostSite, "transport", lambda _: transport)
    monkeypatch.setattr(kept, "PRELOAD_BUDGET_S", 0.0)  # no other loads beside it


def in_time(x: torch.Tensor, cache: Path, *, budget_s: float = BUDGET_S) -> tuple[Compiled, list[str]]:
    """A compilation that waited for nothing and is right, and what it warned of."""
    net = Net().eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.monotonic()
        compiled = weft.compile(net, x, options=Options(budget_s=budget_s, cache_dir=cache, keep_per_problem=1))
        seconds = time.monotonic() - began
    assert seconds < budget_s + BUSY_S
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    return compiled, [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]


# --- what hangs or is slow ---


def test_a_worker_that_never_starts(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NeverReady()
    worker(monkeypatch, transport)
    monkeypatch.setenv("WEFT_CXX", "none")  # else the time may be up before anything is built for it
    compiled, said = in_time(x, tmp_path, budget_s=9.0)
    assert compiled.record.tuning == Tuning.UNTUNED.value and compiled.record.measured == 0
    (warning,) = said
    assert "no measuring process was ready in time" in warning and transport.killed >= 1
    assert f"{compiled.record.unmeasured} of the {compiled.record.wanted} problems" in warning


def test_a_worker_that_hangs(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, HangsAtWork())
    compiled, said = in_time(x, tmp_path)
    assert compiled.record.tuning == Tuning.UNTUNED.value and len(said) == 1
    stages = {s.name for s in compiled.record.stages}
    assert "qualify" in stages and not {"reference", "link", "time"} & stages, "nothing is left to judge"
    assert not compiled.record.rejected_kernels or "hang" not in dict(compiled.record.rejected_kernels)


def test_a_compiler_that_hangs(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang) -> None:
    worker(monkeypatch, FakeTransport({}))
    monkeypatch.setattr(HostCompiler, "compile", hang)
    compiled, said = in_time(x, tmp_path)
    assert hang.calls > 0 and not compiled.record.is_tuned and len(said) == 1


def test_a_solver_that_hangs(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang) -> None:
    worker(monkeypatch, FakeTransport({}))
    monkeypatch.setenv("WEFT_CXX", "none")  # calls alone, so that something is measured at once
    monkeypatch.setattr(planning, "select_plans", hang)
    compiled, _ = in_time(x, tmp_path)
    assert hang.calls == 1 and compiled.record.measured > 0
    assert {p.name.partition("/")[0] for p in compiled.record.plans} <= {"library", "eager"}


class SlowToExport(Net):
    """Whose tracing takes a minute."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1200 if torch.compiler.is_exporting() else 0):
            time.sleep(0.05)
            SlowToExport.steps += 1
            x = x * 1.0
        return super().forward(x)


def test_an_export_that_takes_longer_than_the_budget_is_given_up(x: torch.Tensor, tmp_path: Path) -> None:
    net = SlowToExport().eval()
    options = Options(budget_s=BUDGET_S, cache_dir=tmp_path, keep_worker=False)
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = weft.compile(net, x, options=options)
    seconds = time.monotonic() - began
    assert seconds < BUDGET_S + BUSY_S and 0 < SlowToExport.steps < 1200
    said = [str(w.message) for w in caught]
    assert any("too short" in text for text in said) and any(TOO_LATE in text for text in said)
    assert "export" in {s.name for s in compiled.record.stages} and compiled.record.chosen == "eager"
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=0)
    with pytest.raises(ArtifactError, match="no plan of this model is left"):
        compiled.save(tmp_path / "m.weft")
    assert all(isinstance(p, nn.Parameter) for p in net.parameters()), "the module has its own weights"


@pytest.mark.filterwarnings("ignore:Weft")
def test_a_clean_up_that_would_end_with_the_budget_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other work that of VGG-16, whose weights are 550 MB, took 4.6 s of a budget of 5."""
    stages = Stages(Options(budget_s=5.0, cache_dir=tmp_path))
    stages.records.append(StageRecord("import", 0.4, ""))
    monkeypatch.setattr(compiling, "CLEAN_UP_NODE_S", 1.0)  # as if it had many
    made = compiling.compile_imported(
        Imported(residual_net(1), operators=1), stages.options, eager=lambda *x: x, stages=stages,
        clock=Deadline(0.0, 5.0, lambda: 4.0),
    )  # fmt: skip
    assert made.plan is None and "clean up" not in {s.name for s in made.record.stages}


def test_modules_that_the_first_import_loads_are_no_sign_of_a_long_clean_up() -> None:
    graph = residual_net(1)
    size = sum(x.nbytes for x in graph.constants.values())
    found = compiling.clean_up_s(graph, 1.6)
    assert found < 0.2 and found == pytest.approx(6e-4 * len(graph.nodes) + 1e-8 * size)
    assert compiling.clean_up_s(graph, 1e-3) == pytest.approx(4e-3)


@pytest.mark.filterwarnings("ignore:Weft")
def test_nothing_is_selected_after_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work, candidates that were cut out one second after its end led to a plan three seconds after it."""
    worker(monkeypatch, NeverReady())
    now = [0.0]

    def late(*given: object, **named: object) -> object:
        now[0] = 5.1
        return collect(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(candidates, "collect", late)
    options = Options(budget_s=5.0, cache_dir=tmp_path, keep_worker=False)
    made = compiling.compile_imported(
        Imported(residual_net(1), operators=1), options, eager=lambda *x: x, clock=Deadline(0.0, 5.0, lambda: now[0])
    )
    names = {s.name for s in made.record.stages}
    assert made.plan is None and "extract" in names and not {"measure", "select", "qualify"} & names


def test_where_the_framework_must_not_answer_an_export_is_waited_for(x: torch.Tensor, tmp_path: Path) -> None:
    net = Net().eval()
    form = api._Form(net, "net")
    for options in (Options(memory_limit_bytes=1 << 30), Options(check_indices=True), Options(budget_s=0)):
        source = api._TorchModel(None, net, True, options, "net", silent, None, None, form, None)
        assert source._check(Deadline(-1e9, options.budget_s)) is None
    source = api._TorchModel(None, net, True, Options(), "net", silent, None, None, form, None)
    clock = Deadline(0.0, 20.0, lambda: 17.0)
    for reserved_s, is_over in ((0.0, False), (2.5, False), (3.5, True)):
        check = source._check(clock, reserved_s)
        assert check is not None
        if is_over:
            with pytest.raises(OutOfTime):
                check()
        else:
            check()


@pytest.mark.parametrize("budget_s", [0.0, 9.0])
def test_a_reference_that_is_slow(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    """Between two primitives it is seen that the time is up; the framework's own result is judged by then."""
    worker(monkeypatch, FakeTransport({}))
    monkeypatch.setenv("WEFT_CXX", "none")  # calls alone, so that there are plans to judge
    real, calls = reference.primitive_by_primitive, []

    def slow(*args: object, check: Callable[[], None], **named: object) -> object:
        def slowly() -> None:
            time.sleep(0.4)
            check()

        calls.append(args)
        return real(*args, check=slowly, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "primitive_by_primitive", slow)
    compiled, _ = in_time(x, tmp_path, budget_s=budget_s)
    notes = {p.name: p.note for p in compiled.record.plans}
    assert calls and all(reference.OWN in note or note == NOT_JUDGED for note in notes.values())


def test_a_plan_that_hangs(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang) -> None:
    worker(monkeypatch, FakeTransport({}))
    monkeypatch.setenv("WEFT_CXX", "none")  # calls alone, so that plans are measured at once
    real = linking.link

    class Executable:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def __call__(self, *inputs: torch.Tensor) -> object:
            return hang(*inputs)

    monkeypatch.setattr(linking, "link", lambda *args: Executable(real(*args)))
    compiled, _ = in_time(x, tmp_path, budget_s=9.0)  # else there may be no time to verify it
    assert compiled.record.chosen == "eager" and hang.calls >= 1


def test_stages_that_take_their_time_leave_the_rest_out(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage is told when to stop, and that moment lies before the end of the budget."""
    worker(monkeypatch, NeverReady())
    seen: dict[str, float] = {}
    clock = Deadline.of(BUDGET_S)
    for name in ("enumerate_candidates", "collect"):
        real = getattr(candidates, name)

        def watched(*args: object, name: str = name, real: Callable[..., object] = real, **named: object) -> object:
            seen[name] = named.get("hurry", named["stop"])._moment  # type: ignore[attr-defined]
            return real(*args, **named)

        monkeypatch.setattr(candidates, name, watched)
    in_time(x, tmp_path)
    assert clock.began < seen["enumerate_candidates"] < seen["collect"] < clock.end + BUSY_S


def test_without_a_budget_only_what_is_needed_is_done(x: torch.Tensor, tmp_path: Path) -> None:
    compiled, said = in_time(x, tmp_path, budget_s=0.0)
    record = compiled.record
    assert said == [], "nobody asked for measurements"
    assert [p.name for p in record.plans] == ["library", "eager"] and record.tuning == Tuning.UNTUNED.value
    assert all(not p.samples_us for p in record.plans), "nothing is timed"
    assert record.candidates_raw == 0, "no group is looked for"
    assert all(not s.measured for s in record.steps)


class SlowToCopy(Net):
    """As a module with gigabytes of weights."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        time.sleep(1.5 * BUDGET_S)
        return Net()


def test_taking_the_model_in_is_taken_off_the_budget(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a copy of the module has taken all of it, nothing more is begun."""
    transport = FakeTransport({})
    worker(monkeypatch, transport)
    monkeypatch.setenv("WEFT_CXX", "none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = weft.compile(SlowToCopy().eval(), x, options=Options(budget_s=BUDGET_S, cache_dir=tmp_path)).record
    assert record.measured == 0 and record.tuning == Tuning.UNTUNED.value and record.chosen == "eager"
    assert not {"open", "enumerate", "measure", "reference", "time"} & {s.name for s in record.stages}
    assert next(s.seconds for s in record.stages if s.name == "copy") >= BUDGET_S


@pytest.mark.parametrize("budget_s", [0.0, BUDGET_S])
def test_whatever_takes_time_is_a_stage(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    worker(monkeypatch, NeverReady())
    around = {"export": torch.export, "remember": warm, "settle": api._Eager, "close": NeverReady}
    within = {"export": "export", "remember": "remember", "settle": "settle", "close": "kill"}
    for stage, owner in around.items():
        real = getattr(owner, within[stage])

        def slow(*args: object, real: Callable[..., object] = real, **named: object) -> object:
            time.sleep(0.25)
            return real(*args, **named)

        monkeypatch.setattr(owner, within[stage], slow)
    record = in_time(x, tmp_path, budget_s=budget_s)[0].record
    taken = {s.name: s.seconds for s in record.stages}
    slowed = {"export", "settle" if record.chosen == "eager" else "remember", *(["close"] if budget_s else [])}
    assert slowed <= {name for name, seconds in taken.items() if seconds >= 0.25}
    assert record.seconds == pytest.approx(sum(taken.values()))


def test_without_a_budget_a_slow_model_is_not_run_once_more(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the reference took says whether there is time to judge a plan; there is one all the same, to be saved."""
    real, judged_ = reference.outputs_in_time, []

    def slow(*args: object, **named: object) -> object:
        time.sleep(1.5)
        return real(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "outputs_in_time", slow)
    monkeypatch.setattr(finish, "verify", lambda *args: judged_.append(args))
    compiled, _ = in_time(x, tmp_path, budget_s=0.0)
    assert judged_ == [] and compiled.record.chosen == "eager"
    assert compiled.executable.plan.name == "library"


# --- what is said of it ---


def test_a_plan_of_guesses_is_not_remembered_as_tuned(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command on an idle machine tunes."""
    with monkeypatch.context() as busy:
        worker(busy, NeverReady())
        first, _ = in_time(x, tmp_path)
    assert first.record.tuning == Tuning.UNTUNED.value
    worker(monkeypatch, HangsAtWork())
    again, said = in_time(x, tmp_path)
    assert "measure" in [s.name for s in again.record.stages] and said


def test_guesses_are_not_shown_as_measurements(x: torch.Tensor, tmp_path: Path) -> None:
    record = in_time(x, tmp_path, budget_s=0.0)[0].record
    page = render(record)
    assert "untuned: nothing was measured" in page and "which says nothing of the plan" in page
    assert "gap 0.00 %" not in page and '"measured":false' in page.replace(" ", "")
    assert all(p.predicted_us == 0.0 for p in record.plans), "a sum of guesses is no prediction"
    assert not any("no better plan" in n.reason for s in record.steps for n in s.neighbours)


def steps(*measured: bool) -> Plan:
    call = LibraryCall(Schedule("library"), (), (), ())
    return Plan(
        "solution-1",
        tuple(Step(call, (), (), (k,), Kind.SINGLE, str(k), 1.0, m, None, 0.0) for k, m in enumerate(measured)),
    )


@pytest.mark.parametrize(
    ("measured", "complete", "best", "tuning", "again"),
    [
        ((True, True), True, 2, Tuning.COMPLETE, False),
        ((True, True), False, 2, Tuning.MEASURED, False),
        ((True, False), False, 1, Tuning.CUT_SHORT, True),
        ((False, False), False, 0, Tuning.UNTUNED, True),
    ],
)
def test_verdicts(measured: Sequence[bool], complete: bool, best: int, tuning: Tuning, again: bool) -> None:
    timed = Measurement("k", Schedule("library"), Verdict.OK, (1.0,))
    known = Known({(str(k), timed.schedule): timed for k in range(best)}, complete=complete)
    found = judged(known, [steps(*measured)], Options(budget_s=7))
    assert (found.tuning, found.again, found.unmeasured) == (tuning, again, sum(not m for m in measured))
    assert bool(found.warning) == again
    if again:
        assert f"{found.unmeasured} of the 2 problems" in found.warning and "7 s" in found.warning


def test_progress_says_how_far_it_is() -> None:
    progress = Progress(3, 9, 2, {}, 0, 1.0, 0.0)
    standing = Standing(measured=2, open=5, plan_us=2500.0)
    assert search_line(progress, standing, 31.4).startswith(
        "2 of about 7 problems, 31 s left, best plan about 2.5 ms, with"
    )
    standing = replace(standing, whole_us=2000.0)
    assert "best plan so far 2 ms; 9 kernels measured, 2 known" in search_line(progress, standing, 3.0)


# --- whole plans against a bound ---


def contender(name: str, seconds: float, calls: list[str], clock: list[float], *, baseline: bool = False) -> Contender:
    def run() -> list[torch.Tensor]:
        calls.append(name)
        clock[0] += seconds
        return [torch.ones(2)]

    return Contender(name, run, 1, 1.0, baseline, None)


@pytest.mark.parametrize("left_s", [0.5, 3.0, 8.0, 30.0, 400.0])
def test_timing_keeps_to_a_bound(left_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run takes: at most a run or two more than there was time for."""
    calls: list[str] = []
    clock = [0.0]
    monkeypatch.setattr("weft.pipeline.finish.time.perf_counter", lambda: clock[0])
    runs = [contender(f"solution-{k}", 1.0, calls, clock) for k in range(5)] + [
        contender("eager", 1.0, calls, clock, baseline=True)
    ]
    ones = [np.ones(2, np.float32)]

    def sample(run: Callable[[], object], repeats: int) -> float:
        before = clock[0]
        for _ in range(repeats):
            run()
        return (clock[0] - before) / repeats * 1e6

    chosen, records = finish.decide(
        runs, Expected(ones, ones), DType.F32, seed=0, budget_s=20.0, sample=sample, left_s=lambda: left_s - clock[0]
    )
    assert clock[0] <= left_s + 3.0
    judged_ = [r.name for r in records if r.note != NOT_JUDGED]
    assert not judged_ or judged_[0] == "solution-0", "the best plan is the first to be judged"
    if left_s < 20:
        assert chosen.name == "eager", "a plan that was not timed beside it does not replace it"


@pytest.mark.parametrize("left_s", [2.5, 4.5, 5.5, 6.5, 7.5, 30.0])
def test_a_library_plan_that_was_not_timed_beside_the_framework_is_not_taken(
    left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far judging and timing came; a faster one that was is."""

    class Poisoned:
        def poison(self, byte: int) -> None:
            del byte

    calls: list[str] = []
    clock = [0.0]
    monkeypatch.setattr("weft.pipeline.finish.time.perf_counter", lambda: clock[0])
    plan = contender("library", 1.0, calls, clock, baseline=True)
    library = replace(plan, executable=cast("AnyExecutable", Poisoned()))
    eager = contender("eager", 1.5, calls, clock, baseline=True)

    def sample(run: Callable[[], object], repeats: int) -> float:
        before = clock[0]
        for _ in range(repeats):
            run()
        return (clock[0] - before) / repeats * 1e6

    ones = [np.ones(2, np.float32)]
    chosen, records = finish.decide(
        [library, eager], Expected(ones, ones), DType.F32, seed=0, sample=sample, left_s=lambda: left_s - clock[0]
    )
    timed = {r.name for r in records if r.samples_us}
    assert chosen.name == ("library" if timed == {"library", "eager"} else "eager")
    assert left_s < 30 or timed == {"library", "eager"}


def test_what_a_run_took_before_tells_whether_there_is_time_for_one() -> None:
    """Also for the first: nothing is run that would not end."""
    calls: list[str] = []
    clock = [0.0]
    plan = replace(contender("solution-1", 1.0, calls, clock), first_s=1.0)
    eager = replace(contender("eager", 0.4, calls, clock, baseline=True), first_s=0.4)
    ones = [np.ones(2, np.float32)]
    chosen, records = finish.decide(
        [plan, eager], Expected(ones, ones), DType.F32, seed=0, left_s=lambda: 1.5 - clock[0]
    )
    assert chosen is eager and calls == [] and {r.note for r in records} == {NOT_JUDGED}
    assert finish.interleave({"eager": eager.run}, rounds=9, seed=0, budget_s=9.0, left_s=lambda: 0.0)["eager"] == []
    assert calls == []


@pytest.mark.parametrize("slow_s", few([0.1, 4.0, 9.0], 1))
def test_plans_that_would_not_be_linked_in_time_are_left_out(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """Half of ten seconds is there for it, and the first plan tells what the next would take."""
    made = weft.compile(Net().eval(), x, options=Options(budget_s=0, cache_dir=tmp_path)).executable
    now = [100.0]

    def link(*_: object) -> object:
        now[0] += slow_s
        return made

    monkeypatch.setattr(linking, "link", link)
    setting = survey(Options(budget_s=600.0, cache_dir=tmp_path))
    plans = [replace(made.plan, name=f"solution-{k}", threads=k) for k in range(1, 6)]
    lost: list[str] = []
    clock = Deadline(now[0] - 11.2, 20.0, lambda: now[0])
    assert clock.last - now[0] == pytest.approx(10.0)
    found = linking.link_all(made.graph, plans, setting, [x], lambda *_: [x], lost, clock=clock)
    assert [c.name for c in found] == [p.name for p in plans[: {0.1: 5, 4.0: 1, 9.0: 1}[slow_s]]] + ["eager"]
    assert len(lost) == len(plans) - (len(found) - 1)
    assert now[0] - 100.0 <= max(slow_s, 5.0)


def test_what_comes_after_measuring_is_foreseen() -> None:
    """Packing the weights of some plans, and some thirty runs, up to a share of the budget."""
    assert finish.reserve_s(40.0) == 6.0
    assert finish.reserve_s(40.0, run_us=0.3e6) == finish.judged_s(40.0, 0.3e6, 0) == 9.0
    assert finish.reserve_s(40.0, run_us=0.2e6, weight_bytes=2 * 10**9) == 12.0
    assert finish.reserve_s(40.0, run_us=1e6) == finish.judged_s(40.0, 1e6, 0) == 16.0
    assert finish.reserve_s(5.0, weight_bytes=10**11) == 2.0
    assert finish.reserve_s(40.0, run_us=1e4) == 6.0 and finish.judged_s(40.0, 1e4, 0) == pytest.approx(0.3)


def test_no_plan_is_linked_that_would_take_the_time_to_decide_between_those_before(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linking takes nothing here; runs of half a second do, and eight of each contender would."""
    made = weft.compile(Net().eval(), x, options=Options(budget_s=0, cache_dir=tmp_path)).executable
    now = [100.0]

    class Slow:
        check_indices, kernels = True, 1

        def __call__(self, *_: torch.Tensor) -> list[torch.Tensor]:
            now[0] += 0.5
            return [x]

    monkeypatch.setattr(linking, "link", lambda *_: Slow())
    monkeypatch.setattr("weft.pipeline.link.time.perf_counter", lambda: now[0])
    setting = survey(Options(budget_s=600.0, cache_dir=tmp_path))
    plans = [replace(made.plan, name=f"solution-{k}", threads=k) for k in range(1, 6)]
    for left_s, count in ((60.0, 5), (15.0, 2), (8.0, 1)):
        clock = Deadline(now[0] + left_s - Deadline(0.0, 600.0).last, 600.0, lambda: now[0])
        assert clock.last - now[0] == pytest.approx(left_s)
        lost: list[str] = []
        found = linking.link_all(made.graph, plans, setting, [x], lambda *_: [x], lost, clock=clock)
        assert len(found) == count + 1 and len(lost) == len(plans) - count, left_s


def test_with_nothing_to_judge_by_the_framework_answers() -> None:
    calls: list[str] = []
    clock = [0.0]
    plan, eager = contender("solution-1", 0.0, calls, clock), contender("eager", 0.0, calls, clock, baseline=True)
    chosen, records = finish.decide([plan, eager], None, DType.F32, seed=0)
    assert chosen is eager and calls == [] and {r.note for r in records} == {NOT_JUDGED}


def test_where_the_operators_do_not_run_one_by_one_the_framework_answers(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("rnn: hx is not contiguous")

    worker(monkeypatch, FakeTransport({}))
    monkeypatch.setattr(reference, "primitive_by_primitive", fails)
    net = Net().eval()
    with pytest.warns(UserWarning, match="one by one, do not run: rnn: hx is not contiguous"):
        compiled = weft.compile(net, x, options=Options(budget_s=25.0, cache_dir=tmp_path, keep_per_problem=1))
    assert compiled.record.chosen == "eager"
    torch.testing.assert_close(compiled(x), net(x))
    run = Options(budget_s=25.0, cache_dir=tmp_path, keep_per_problem=1, memory_limit_bytes=1 << 40)
    with pytest.raises(RuntimeError, match="rnn: hx"):
        weft.compile(net, x, options=run)


def test_the_library_plan_needs_no_solver_without_a_budget(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> object:
        raise AssertionError("a solver was asked")

    monkeypatch.setattr(choose, "_solve", never)
    assert in_time(x, tmp_path, budget_s=0.0)[0].executable.plan.name == "library"


# --- without a budget: nothing is paid for that cannot be judged ---


def test_a_plan_that_only_float64_can_decide_is_not_bisected(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        own = Net().eval()(x).numpy()
    far = own * (1 + 1e-2 * np.random.default_rng(0).standard_normal(own.shape).astype(np.float32))
    monkeypatch.setattr(reference, "outputs_in_time", lambda *_, **__: Expected([far], [far], reference.OWN))
    blamed: list[object] = []

    def blame(*args: object, **_: object) -> str:
        blamed.append(args)
        return "blamed"

    monkeypatch.setattr(repro, "blame", blame)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = weft.compile(Net().eval(), x, options=Options(budget_s=0, cache_dir=tmp_path))
    library = next(p for p in compiled.record.plans if p.name == "library")
    assert compiled.record.chosen == "eager" and blamed == [] and not library.verified
    assert library.note.startswith(finish.UNDECIDED)
    assert not any("refuses" in str(w.message) or "float64 evaluation" in str(w.message) for w in caught)


def test_operators_that_are_not_cut_out_in_time_are_left_to_the_framework(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "UNTUNED_SHARE", 0.0)  # the time for it is up at once
    small = weft.compile(Net().eval(), x, options=Options(budget_s=0, cache_dir=tmp_path / "small"))
    assert small.executable.plan.steps, "a few are cut out all the same"
    monkeypatch.setattr(candidates, "FEW_CANDIDATES", 0)
    compiled, said = in_time(x, tmp_path, budget_s=0.0)
    stages = {s.name for s in compiled.record.stages}
    assert compiled.record.chosen == "eager" and said == [] and "extract" in stages
    assert not {"select", "reference", "link", "time", "remember"} & stages
    with pytest.raises(ArtifactError, match="no plan of this model is left"):
        _ = compiled.executable
    limited = Options(budget_s=0, cache_dir=tmp_path, memory_limit_bytes=1 << 30)  # there only a plan will do
    assert weft.compile(Net().eval(), x, options=limited).executable.plan.steps


@pytest.mark.parametrize("reference_s", [0.0, 1.0])
def test_a_plan_whose_weights_take_too_long_to_pack_is_not_linked(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_s: float
) -> None:
    monkeypatch.setattr(answer, "judged_in_time", lambda graph, clock, run_s: reference_s > 0 and not run_s)
    linked: list[object] = []
    monkeypatch.setattr(linking, "link", lambda *args: linked.append(args))
    compiled, said = in_time(x, tmp_path, budget_s=0.0)
    assert compiled.record.chosen == "eager" and said == [] and linked == []
    assert ("reference" in {s.name for s in compiled.record.stages}) == (reference_s > 0)
    assert [p.note for p in compiled.record.plans] == [finish.ALONE]


def test_whether_a_plan_can_be_judged_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    read = b.input(TensorType(DType.F32, (4, 1000)))
    graph = b.build([b.add(Prim.MATMUL, read, b.constant(np.ones((1000, 1000), np.float32)))])  # 4 MB
    now = [0.0]
    clock = Deadline(0.0, 0.0, lambda: now[0])
    monkeypatch.setattr(finish, "PACKED_BYTES", 4e6)  # a second for its weights
    assert linking.judged_in_time(graph, clock) and linking.judged_in_time(graph, clock, 0.6)
    assert not linking.judged_in_time(graph, clock, 0.8)
    now[0] = 1.5
    assert not linking.judged_in_time(graph, clock)
    monkeypatch.setattr(finish, "PACKED_BYTES", 4e9)  # next to no time: it is made to be saved
    assert linking.judged_in_time(graph, clock, 9.0)


@pytest.mark.parametrize(("stops", "starts"), [(False, 3), (True, 1)])
def test_orders_of_images_are_tried_while_there_is_time(
    stops: bool, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alternatives = find_alternatives(residual_net(1))
    graph, facts, options = alternatives.graph, CpuFacts(), Options(budget_s=0)
    problems = collect(graph, enumerate_candidates(graph, alternatives=alternatives).candidates, alternatives, facts)
    known = Known()
    for key, task in problems.tasks.items():
        known.wrote(key, write(Order(task), generators(library=True, generated=False), facts, options))
    tried = []

    def counted(*args: Any, **named: Any) -> tuple[int, ...]:
        tried.append(0)
        return heuristic(*args, **named)

    monkeypatch.setattr(choose, "heuristic", counted)
    calls = choose.rank(problems, known, library_only=True)
    plan = choose.library_plan(graph, calls, alternatives, options, facts, stop=lambda: stops)
    assert len(tried) == starts and plan.steps


# --- a framework whose first run on another device takes seconds


def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, spent_s: float, takes_s: float) -> tuple[Job, Bench]:
    """A job of ten seconds of which some are spent, on a device where the framework's first run takes so many."""
    now = [0.0]

    def slow(*_: object) -> list[torch.Tensor]:
        now[0] += takes_s
        return []

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Cpu, "asynchronous", True)
    options = Options(budget_s=10, cache_dir=tmp_path)
    clock, stages = Deadline(0.0, 10.0, lambda: now[0]), Stages(options, silent)
    framework = Framework("eager", slow, None, None)
    job = Job.of(Imported(residual_net(1), operators=1), None, framework, "model", survey(options), stages, clock)
    now[0] = spent_s
    return job, cast("Bench", object())


def test_a_search_leaves_time_to_capture_the_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, bench = starting(tmp_path, monkeypatch, spent_s=1.0, takes_s=2.0)
    searching = first_run(job, bench, [])
    assert searching.clock.end == pytest.approx(10.0 - CAPTURE_RATIO * 2.0) and job.clock.end == 10.0
    assert captures_in_time(job, []) == []


def test_a_slow_capture_takes_no_more_than_its_share_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, bench = starting(tmp_path, monkeypatch, spent_s=1.0, takes_s=8.0)
    searching = first_run(job, bench, [])
    assert searching.clock.end == pytest.approx((1 - MOST_CAPTURE) * 10.0)
    assert captures_in_time(job, []) is None, "of the 3.2 s left, the capture would take 6.4"


@pytest.mark.parametrize(("spent_s", "takes_s", "runs"), [(9.0, 0.5, False), (6.0, 5.0, True)])
def test_without_time_for_the_first_run_or_after_it_the_framework_answers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent_s: float, takes_s: float, runs: bool
) -> None:
    job, bench = starting(tmp_path, monkeypatch, spent_s=spent_s, takes_s=takes_s)
    with pytest.raises(LeftToFramework) as left:
        first_run(job, bench, [])
    assert left.value.inputs is None and left.value.lost == [TOO_LATE]
    assert (job.stages.seconds("first run") > 0) == runs


def test_a_framework_that_ran_before_is_run_first_in_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in parts all is loaded when the first part is compiled, and a part may have one second."""
    job, bench = starting(tmp_path, monkeypatch, spent_s=9.0, takes_s=0.1)
    ran = replace(job, framework=replace(job.framework, has_run=True))
    assert first_run(ran, bench, []).clock.end == pytest.approx(10.0 - CAPTURE_RATIO * 0.1)
    assert job.stages.seconds("first run") > 0
    job, bench = starting(tmp_path, monkeypatch, spent_s=9.0, takes_s=1.5)
    ran = replace(job, framework=replace(job.framework, has_run=True))
    with pytest.raises(LeftToFramework):  # it took all that was left
        first_run(ran, bench, [])


def test_without_a_worker_or_a_device_of_its_own_nothing_is_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, bench = starting(tmp_path, monkeypatch, spent_s=9.5, takes_s=2.0)
    assert first_run(job, None, []).clock == job.clock
    monkeypatch.setattr(Cpu, "asynchronous", False)
    assert first_run(job, bench, []).clock == job.clock and not job.stages.records
