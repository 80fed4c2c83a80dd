"""The kinds of devices: what the pipeline asks of them, and nothing else."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, FakeStream, install
from tests.runtime.plans import library_plan

from weft.costmodel.profile import costs_of, instead
from weft.device import kinds
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.facts import CpuFacts
from weft.errors import OptionError, ToolchainError
from weft.frontends.imported import Imported
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import CudaSource, KernelSource, Schedule
from weft.options import Options
from weft.pipeline.compile import compile_imported
from weft.platform import table
from weft.platform.cpu import Cpu
from weft.platform.cuda import captured as captured_module
from weft.platform.cuda import captured_later
from weft.platform.cuda import platform as gpu
from weft.platform.cuda.captured import capture
from weft.platform.cuda.captured_later import CapturedLater
from weft.platform.cuda.platform import Cuda
from weft.platform.protocol import Platform
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease
from weft.sm_budget import SmBudget

HERE = torch.device("cpu")
"""Where the stand-in for a GPU computes."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def two_products() -> Graph:
    """Products that need nothing of each other, and their sum."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (4, 8))), b.input(TensorType(DType.F32, (8, 8)))
    left, right = b.add(Prim.MATMUL, x, w), b.add(Prim.MATMUL, b.apply(Prim.TANH, x), w)
    return b.build([b.add(Prim.ADD, left, right)])


def inputs(seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=chance), torch.randn(8, 8, generator=chance)]


def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w + torch.tanh(x) @ w


def platform(lease: Lease | None = None) -> Cuda:
    return Cuda(profile("h200"), None, {"gpu": "a stand-in", "capability": "90"}, HERE, lease)


# --- the table


def test_a_kind_is_found_by_its_name_and_by_its_facts() -> None:
    assert {name: table.platform_of(name).kind for name in kinds.KINDS} == {"cpu": "cpu", "cuda": "cuda"}
    assert table.platform_of("cuda:3") is table.platform_of("cuda") is Cuda and table.platform_of("cpu") is Cpu
    assert table.policy_for(CpuFacts()) is Cpu.policy


def test_a_policy_has_the_costs_of_the_device() -> None:
    costs = costs_of(profile("h200"))
    other = replace(costs, library=replace(costs.library, unmeasured_us=3.0, near=2.0))
    found = table.policy_for(profile("h200"))
    assert 0 < found.unmeasured_call_us < 100 and 1 < found.library_near < 2
    with instead(other):
        again = table.policy_for(profile("h200"))
    assert again == replace(found, unmeasured_call_us=3.0, library_near=2.0) != found
    assert replace(found, unmeasured_call_us=0.0, library_near=math.inf) == Cuda.policy


def test_what_only_gpus_take_is_looked_for_there() -> None:
    """The number of multiprocessors is known after a survey."""
    options = Options(max_members=3, max_candidates=17)
    here, there = Cpu.limits(options, CpuFacts()), Cuda.limits(options, profile("h200"))
    assert (here.attention, here.multiprocessors, here.unions, here.library_calls) == (False, 0, False, False)
    assert (there.attention, there.multiprocessors, there.library_calls) == (True, profile("h200").sms, True)
    assert there.unions and not there.changing_weights and here.changing_weights
    same = replace(there, attention=False, multiprocessors=0, unions=False, library_calls=False, changing_weights=True)
    assert same == here
    assert (here.max_members, here.max_candidates) == (3, 17)
    assert Cuda.limits(options).multiprocessors == 0


def test_channels_are_padded_for_gpus_alone() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (4096, 1001)))
    first = b.constant(torch.ones(1001, 999, dtype=torch.float16).numpy())
    second = b.constant(torch.ones(999, 1001, dtype=torch.float16).numpy())
    graph = b.build([b.add(Prim.MATMUL, b.apply(Prim.TANH, b.add(Prim.MATMUL, x, first)), second)])
    assert len(Cuda.find_alternatives(graph).graph) > len(Cpu.find_alternatives(graph).graph)
    assert len(Cuda.find_alternatives(graph, strict=True).graph) == len(graph)


# --- a GPU, with a stand-in for what torch says of it


def test_streams_are_shared_within_a_compilation_alone(cuda: FakeCuda) -> None:
    found = platform()
    first, second = found.lending(), found.lending()
    assert found.lease is None and first.lease is not None and first.lease is not second.lease
    graph, plan, given = two_products(), library_plan(two_products()), inputs(1)
    for lent in (first, first, second):
        executable = lent.link(graph, plan, Options())
        torch.testing.assert_close(executable(*given)[0], expected(*given))
    assert len(cuda.streams) == 2, "one for each compilation"


def test_what_is_done_aside_waits_for_the_caller_and_is_waited_for(cuda: FakeCuda) -> None:
    theirs = cuda.current
    with platform().aside():
        assert cuda.current is theirs, "nothing is lent"
    seen: list[FakeStream] = []

    def failing() -> None:
        with platform().lending().aside():
            seen.append(cuda.current)
            assert cuda.current.waited_for == ["default"] and theirs.waited_for == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert cuda.current is theirs and seen[0] is not theirs and theirs.waited_for == [seen[0].name]


@pytest.mark.parametrize(
    ("platform", "named"),
    [
        (Cuda(GpuFacts(), device=torch.device("cuda", 0)), []),
        (Cuda(GpuFacts(), device=torch.device("cuda", 2)), [torch.device("cuda", 2)]),
        (Cpu(CpuFacts()), []),
    ],
    ids=["cuda:0", "cuda:2", "cpu"],
)
def test_a_thread_begins_on_the_first_gpu(
    platform: Platform, named: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    before: list[list[torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    thread = platform.thread(lambda: before.append(list(current)), "weft-test")
    assert thread.daemon and thread.name == "weft-test"
    thread.start()
    thread.join()
    assert before == [named], "before anything runs there"


@pytest.mark.parametrize("alone", [False, True])
def test_the_frameworks_own_model_is_recorded_beside_plans_or_alone(
    alone: bool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = platform().lending()
    leases: list[Lease | None] = []
    real = capture

    def noting(model: object, given: object, options: Options, lease: Lease | None) -> object:
        leases.append(lease)
        return real(model, given, options, lease)  # type: ignore[arg-type]

    def model(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        out = expected(*given)
        if cuda.recording is not None:
            cuda.recording.add(lambda: out.copy_(expected(*given)), cuda.current)
        return [out]

    monkeypatch.setattr(gpu, "capture", noting)
    recorded = lent.capture(model, inputs(1), Options(), alone=alone)
    torch.testing.assert_close(recorded(*inputs(2))[0], expected(*inputs(2)))
    assert len(cuda.graphs) == 1 and cuda.graphs[0].replays == 1
    assert leases[0] is not None and (leases[0] is lent.lease) == (not alone)
    monkeypatch.setattr(gpu, "capture", lambda *_: Declined("it waits for the host"))
    assert lent.capture(model, inputs(1), Options(), alone=alone) is model
    assert Cpu(CpuFacts()).capture(model, inputs(1), Options(), alone=alone) is model


class Refusing:
    """What records, of a model that waits for the host."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("recorded_ms", "own_ms", "replays"), [(1.0, 2.0, 1), (2.0, 1.0, 0)])
def test_a_model_that_was_not_recorded_in_time_is_by_its_first_call(
    recorded_ms: float, own_ms: float, replays: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[torch.Tensor]] = []

    def model(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        calls.append(given)
        out = expected(*given)
        if cuda.recording is not None:
            cuda.recording.add(lambda: out.copy_(expected(*given)), cuda.current)
        return [out]

    times, lease = iter([recorded_ms, own_ms]), Lease(HERE)
    monkeypatch.setattr(CapturedLater, "_sampled_us", lambda *_: next(times))
    monkeypatch.setattr(captured_later, "capture", lambda model, given, options: capture(model, given, options, lease))
    types = [TensorType(DType.F32, (4, 8)), TensorType(DType.F32, (8, 8))]
    run = platform().capture_later(model, types, Options())
    assert not calls, "nothing runs before it is called"
    with pytest.raises(RuntimeError, match="shapes"):
        run(torch.zeros(4, 3), torch.zeros(8, 8))
    assert not cuda.graphs, "a call that the model refuses records nothing"
    torch.testing.assert_close(run(*inputs(2))[0], expected(*inputs(2)))
    assert len(cuda.graphs) == 1 and cuda.graphs[0].replays == 0
    count = len(calls)
    torch.testing.assert_close(run(*inputs(3))[0], expected(*inputs(3)))
    assert cuda.graphs[0].replays == replays and len(calls) == count + 1 - replays, "the faster one answers"
    assert Cpu(CpuFacts()).capture_later(model, types, Options()) is model


def test_a_model_that_cannot_be_recorded_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(captured_later, "capture", lambda *_: Declined("it waits for the host"))
    monkeypatch.setattr(captured_later, "device_of", lambda _: HERE)
    types = [TensorType(DType.F32, (4, 8)), TensorType(DType.F32, (8, 8))]
    run = platform().capture_later(lambda *x: [expected(*x)], types, Options())
    for seed in (1, 2):
        torch.testing.assert_close(run(*inputs(seed))[0], expected(*inputs(seed)))
    assert isinstance(run, CapturedLater)
    monkeypatch.setattr(captured_module, "Captured", Refusing)
    monkeypatch.setattr(captured_later, "Lease", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    held = torch.zeros(4, 8)
    found = run.in_place({}, [(0, held)])(*inputs(3))
    assert torch.equal(held, found[0]) and torch.equal(held, expected(*inputs(3)))


def test_memory_is_given_back_after_what_only_cycles_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("garbage"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    Cuda.free_memory()
    Cuda.free_memory(garbage=True)
    Cpu.free_memory(garbage=True)
    assert done == ["cache", "garbage", "cache"]


def test_solutions_are_also_tried_with_kernels_side_by_side() -> None:
    graph = two_products()
    plan = library_plan(graph)
    given = [replace(plan, name=name) for name in ("solution-1", "solution-2", "heuristic")]
    found = platform().variants(graph, given, timed=False)
    first = [("solution-1", 1), ("solution-1/2", 2)]
    assert [(p.name, p.branches) for p in found] == [*first, ("solution-2", 1), ("heuristic", 1), ("solution-2/2", 2)]
    assert [p.name for p in platform().variants(graph, given[2:], timed=False)] == ["heuristic"]
    verified = [given[2], replace(plan, name="verified")]
    assert [p.name for p in platform().variants(graph, verified, timed=True)] == ["heuristic", "verified", "verified/2"]


@pytest.mark.parametrize(
    ("found", "kernel", "missing"),
    [
        (platform(), CudaSource(Schedule("cuda", ()), "", ()), "needs NVRTC"),
        (Cpu(CpuFacts()), KernelSource(Schedule("cpp", ()), "", "", 0), "needs a compiler"),
    ],
    ids=["cuda", "cpu"],
)
def test_generated_kernels_need_a_compiler(found: Platform, kernel: CudaSource | KernelSource, missing: str) -> None:
    graph = two_products()
    plan = library_plan(graph)
    generated = replace(plan, steps=(replace(plan.steps[0], kernel=kernel), *plan.steps[1:]))
    with pytest.raises(ToolchainError) as caught:
        found.link(graph, generated, Options())
    assert missing in caught.value.log


def test_steps_are_timed_where_a_plan_is_no_single_graph(cuda: FakeCuda) -> None:
    graph = two_products()
    plan = library_plan(graph)
    host = Cpu(CpuFacts())
    executable = host.link(graph, plan, Options())
    for plan_us in (0.0, 1e9):  # of the second there is time for one run
        times = host.step_times(executable, inputs(1), plan_us=plan_us)
        assert len(times) == len(plan.steps) > 1 and all(0 < x < 1e6 for x in times)
    gpu_ = platform()
    assert gpu_.step_times(gpu_.link(graph, plan, Options()), inputs(1), plan_us=1.0) == ()


def test_a_gpu_is_compiled_for_from_its_survey_to_the_answer(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages, and those of a plan that is remembered; the stand-in computes on the CPU."""
    monkeypatch.setattr(Cuda, "survey", lambda options, calibrate_s: platform())
    monkeypatch.setattr(Cuda, "room_bytes", lambda options: 1 << 40)
    monkeypatch.setattr("weft.generate.library.lt_call.library", lambda: Declined("none here"))
    freed: list[bool] = []
    monkeypatch.setattr(Cuda, "free_memory", staticmethod(lambda *, garbage=False: freed.append(garbage)))
    options = Options(device="cuda", budget_s=0.0, cache_dir=tmp_path)
    given = Imported(two_products(), 4)

    def eager(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = expected(*tensors)
        if cuda.recording is not None:
            cuda.recording.add(lambda: out.copy_(expected(*tensors)), cuda.current)
        return [out]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = compile_imported(given, options, example_inputs=inputs(1), eager=eager)
        again = compile_imported(given, options, example_inputs=inputs(1), eager=eager)
    for found in (made, again):
        assert isinstance(found.plan, CudaExecutable) and found.record.device == "a stand-in"
        torch.testing.assert_close(found.run(*inputs(2))[0], expected(*inputs(2)))
        assert next(p for p in found.record.plans if p.name == "library").verified
    assert [s.name for s in again.record.stages] == [
        "preflight", "survey", "clean up", "alternatives", "recall", "link"
    ]  # fmt: skip
    assert freed == [True, True, False], "before plans are linked, when one is chosen, and when one was recalled"


def test_without_time_to_tune_no_plan_keeps_to_a_budget_of_an_sm(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls would be all of it, and the framework's own execution is only compared with."""
    asked: list[Options] = []

    def survey(options: Options, *, calibrate_s: float) -> Cuda:
        asked.append(options)
        return replace(platform(), facts=gpu.within(profile("h200"), options))

    monkeypatch.setattr(Cuda, "survey", survey)
    monkeypatch.setattr(Cuda, "room_bytes", lambda options: 1 << 40)
    options = Options(device="cuda", budget_s=0.0, cache_dir=tmp_path, sm_budget=SmBudget(threads=1024))
    with pytest.raises(OptionError, match=r"'sm_budget': budget_s is 0.*calls may not stand.*W001"):
        compile_imported(
            Imported(two_products(), 4), options, example_inputs=inputs(1), eager=lambda *x: [expected(*x)]
        )
    assert asked == [options] and not Cuda.limits(options).library_calls
    assert not cuda.graphs, "nothing ran"


# --- another kind


class Elsewhere:
    """In place of a CPU: notes what is asked of it. It knows nothing that the protocol does not say."""

    kind, policy, asynchronous, judges_in_float64 = Cpu.kind, Cpu.policy, Cpu.asynchronous, Cpu.judges_in_float64
    asked: list[str] = []

    def __init__(self, inner: Cpu) -> None:
        self._inner = inner
        self.facts, self.compiler, self.environment = inner.facts, inner.compiler, inner.environment
        self.device = inner.device

    @classmethod
    def survey(cls, options: Options, *, calibrate_s: float) -> Elsewhere:
        cls.asked.append("survey")
        return cls(Cpu.survey(options, calibrate_s=calibrate_s))

    @classmethod
    def room_bytes(cls, options: Options) -> int:
        cls.asked.append("room_bytes")
        return Cpu.room_bytes(options)

    find_alternatives, limits, device_of = Cpu.find_alternatives, Cpu.limits, Cpu.device_of
    policy_with = Cpu.policy_with
    free_memory = Cpu.free_memory

    def lending(self) -> Elsewhere:
        self.asked.append("lending")
        return self

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.asked.append("aside")
        yield

    def __getattr__(self, name: str) -> object:
        assert name in vars(Platform), f"the protocol has no {name}"
        self.asked.append(name)
        return getattr(self._inner, name)


def test_another_kind_is_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(kinds.KINDS["cpu"], platform=f"{__name__}:Elsewhere")
    monkeypatch.setattr(kinds, "KINDS", {**kinds.KINDS, "cpu": elsewhere})
    Elsewhere.asked.clear()
    given = Imported(two_products(), 4)
    made = compile_imported(given, Options(budget_s=0.0, cache_dir=tmp_path), example_inputs=inputs(1))
    torch.testing.assert_close(made.run(*inputs(2))[0], expected(*inputs(2)))
    order = list(dict.fromkeys(Elsewhere.asked))
    assert order == ["room_bytes", "survey", "lending", "aside", "variants", "link", "sample_us", "is_sound"]
