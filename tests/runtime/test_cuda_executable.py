"""The executable for GPUs on a stand-in for torch.cuda: policy, order of calls, capture, saved plans, steps."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, FakeStream, install
from tests.runtime.plans import library_plan
from tests.typed import noting

from weft.device.cuda.tensor_map import encode_tensor_map
from weft.errors import InvalidGraphError
from weft.generate import bind
from weft.generate.library import execute
from weft.ir.attrs import ReduceAttrs
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.formats import Format
from weft.kernels.plan import Plan
from weft.kernels.source import CallStep, CudaSource, Launch, LibraryCall, Pointer, Ref, Schedule
from weft.platform.cuda import captured as capturing
from weft.runtime import artifact, cuda_artifact, cuda_executable
from weft.runtime.cuda_executable import CudaExecutable, Rebind
from weft.runtime.executable import InputError, Linked
from weft.runtime.in_place import Baking
from weft.runtime.lanes import Order
from weft.runtime.values import Key, Values, survey

FACTS = {"gpu": "NVIDIA H200", "capability": "90"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def products() -> Graph:
    """Two products with something between them."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (4, 8))), b.input(TensorType(DType.F32, (8, 8)))
    return b.build([b.add(Prim.MATMUL, b.apply(Prim.TANH, b.add(Prim.MATMUL, x, w)), w)])


def linked(**facts: str) -> Linked:
    graph = products()
    return Linked(graph, library_plan(graph), {}, None, None, 0, {**FACTS, **facts})


def executable(**facts: str) -> CudaExecutable:
    return CudaExecutable(linked(**facts), device=torch.device("cpu"))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.randn(8, 8)


def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) @ w


def test_the_stand_in_computes(cuda: FakeCuda) -> None:
    exe = executable()
    x, w = inputs()
    torch.testing.assert_close(exe(x, w)[0], expected(x, w))
    assert len(cuda.graphs) == 1 and cuda.graphs[0].replays == 1 and len(cuda.graphs[0].launches) == 3


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("branches", [1, 2])
def test_repeated_values_are_made_anew_in_every_run(cuda: FakeCuda, branches: int, capturing: bool) -> None:
    """A value repeated behind the last step is no view of it: it was copied once, when the plan was made."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (4, 8))), b.input(TensorType(DType.F32, (8, 8)))

    def twice(node: int) -> int:
        rows = b.type_of(node).shape[0]
        return b.reshape(b.broadcast(b.reshape(node, (1, rows, 8)), (2, rows, 8)), (2 * rows, 8))

    tall = [b.add(Prim.MATMUL, x, w), b.apply(Prim.TANH, w), x]
    graph = b.build([twice(n) for n in tall])
    plan = replace(library_plan(graph), branches=branches)
    exe = CudaExecutable(Linked(graph, plan, {}, None, None, 0, dict(FACTS)), device=torch.device("cpu"))
    cuda.capturing = capturing
    for _ in range(2):
        given, weight = inputs()
        got = exe(given, weight)
        for mine, want in zip(got, (given @ weight, torch.tanh(weight), given), strict=True):
            torch.testing.assert_close(mine, want.repeat(2, 1))


@pytest.mark.parametrize(
    ("facts", "allowed"), [({"allow_tf32": "True"}, True), ({"allow_tf32": "False"}, False), ({}, False)]
)
@pytest.mark.parametrize("process", [True, False])
def test_tf32_is_what_the_plan_was_tuned_with(
    cuda: FakeCuda, facts: dict[str, str], allowed: bool, process: bool
) -> None:
    products_of_torch = torch.backends.cuda.matmul
    saved = products_of_torch.allow_tf32
    try:
        products_of_torch.allow_tf32 = process
        assert executable(**facts).allow_tf32 is allowed
        assert cuda.policies == [(allowed, True)] * 6, "cuDNN takes what its heuristic names, in every process"
        assert products_of_torch.allow_tf32 is process, "the user's own setting is back"
    finally:
        products_of_torch.allow_tf32 = saved


def lying(x: torch.Tensor, at: int = 0) -> torch.Tensor:
    """A copy that begins so many bytes behind an address where a plan may read it in place."""
    room = torch.empty(x.numel() * x.element_size() + 512, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + at
    return room[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)


def stepping() -> Graph:
    """A state that is renewed: what it gives now, and its next value."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (8, 8))), b.input(TensorType(DType.F32, (8, 8)))
    y = b.add(Prim.MATMUL, x, w)
    return b.build([b.apply(Prim.TANH, y), b.apply(Prim.SUB, w, y)])


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("branches", [1, 2])
def test_a_plan_in_place_writes_behind_its_last_step(cuda: FakeCuda, branches: int, capturing: bool, at: int) -> None:
    graph = stepping()
    plan = replace(library_plan(graph), branches=branches)
    make = CudaExecutable(Linked(graph, plan, {}, None, None, 0, dict(FACTS)), device=torch.device("cpu")).in_place
    assert make is not None
    w, copy = lying(torch.randn(8, 8), at), torch.zeros(8, 8)
    state = w.clone()
    run = make({1: w}, [(1, w), (1, copy)])
    assert torch.equal(w, state) and not copy.any(), "nothing is written before a call"
    assert isinstance(run, CudaExecutable) and (run.static_inputs[1].data_ptr() == w.data_ptr()) == (at == 0)
    cuda.capturing = capturing
    for _ in range(3):
        x = torch.randn(8, 8) / 8
        got = run(x, w)[0]
        torch.testing.assert_close(got, torch.tanh(x @ state))
        state = state - x @ state
        torch.testing.assert_close(w, state)
        assert torch.equal(copy, w)
    assert cuda.graphs[-1].replays == (0 if capturing else 3)


def test_a_plan_in_place_reads_no_other_tensor(cuda: FakeCuda) -> None:
    graph = stepping()
    linked = Linked(graph, library_plan(graph), {}, None, None, 0, dict(FACTS))
    w = lying(torch.randn(8, 8))
    run = CudaExecutable(linked, device=torch.device("cpu"), bound={1: w}, written=[(1, w)])
    state = w.clone()
    with pytest.raises(InputError, match="elsewhere"):
        run(torch.randn(8, 8), w.clone())
    assert torch.equal(w, state)
    with pytest.raises(InputError, match="expected 8x8xf32"):
        CudaExecutable(linked, device=torch.device("cpu"), bound={1: torch.zeros(3)})
    checked = replace(linked.plan, checks=cast("Any", ("one",)))
    assert CudaExecutable(linked, device=torch.device("cpu")).in_place is not None
    waits = CudaExecutable(linked, device=torch.device("cpu"))
    waits.plan = checked
    assert waits.in_place is None, "an index is looked at before anything is written"


def test_what_an_output_is_a_view_of_is_not_read_in_place(cuda: FakeCuda) -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (4, 8))), b.input(TensorType(DType.F32, (8, 8)))
    graph = b.build([b.add(Prim.MATMUL, x, w), b.reshape(w, (64,))])
    weight, first = lying(torch.randn(8, 8)), torch.empty(64)
    linked = Linked(graph, library_plan(graph), {}, None, None, 0, dict(FACTS))
    run = CudaExecutable(linked, device=torch.device("cpu"), bound={1: weight}, written=[(1, first)])
    assert run.static_inputs[1].data_ptr() != weight.data_ptr()
    run(torch.randn(4, 8), weight)
    assert torch.equal(first, weight.reshape(64))


def test_the_frameworks_own_execution_in_place(cuda: FakeCuda) -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tanh(x @ w), w - x @ w]

    w = torch.randn(8, 8)
    state = w.clone()
    run = capturing.Captured(model, [torch.randn(8, 8), w]).in_place({1: w}, [(1, w)])
    w.copy_(state)  # what is recorded is computed here, too
    cuda.capturing = True
    x = torch.randn(8, 8)
    torch.testing.assert_close(run(x, w)[0], torch.tanh(x @ state))
    torch.testing.assert_close(w, state - x @ state)
    with pytest.raises(InputError, match="elsewhere"):
        run(x, w.clone())


class Subtracting:
    """A model of the framework's that writes its state in place by itself."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.calls: list[str] = []

    def __call__(self, x: torch.Tensor, w: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append("apart")
        return [torch.tanh(x @ w), w - x @ w * factor]

    def made(self, factor: torch.Tensor | None) -> Any:
        """`factor`: what it holds; None: it is read."""

        def make(bound: Mapping[int, torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]) -> Any:
            return Written(self, bound[1], written[0][1], factor)

        return make

    @property
    def in_place(self) -> Baking:
        return Baking(frozenset({2}), lambda values: self.made(values[2].clone()), self.made(None))


@dataclass(frozen=True)
class Written:
    model: Subtracting
    bound: torch.Tensor
    target: torch.Tensor
    factor: torch.Tensor | None

    def dry(self, x: torch.Tensor, w: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
        self.model.calls.append("dry")
        return self.model(x, w, factor if self.factor is None else self.factor)

    def __call__(self, x: torch.Tensor, w: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
        found = torch.zeros(8, 8)

        def launch() -> None:
            assert w.data_ptr() == self.bound.data_ptr()
            found.copy_(torch.tanh(x @ w))
            self.target.copy_(w - x @ w * (factor if self.factor is None else self.factor))

        cuda = self.model.cuda
        self.model.calls.append("in place")
        if cuda.recording is None:
            launch()
        else:
            cuda.recording.add(launch, cuda.current)
        return [found, self.target]


@pytest.mark.parametrize("capturing_too", [False, True])
@pytest.mark.parametrize("holds", [False, True])
def test_a_model_that_writes_in_place_by_itself(cuda: FakeCuda, holds: bool, capturing_too: bool) -> None:
    model = Subtracting(cuda)
    x, w, factor = torch.randn(8, 8) / 8, torch.randn(8, 8), torch.tensor(2.0)
    making = capturing.Captured(model, [x, w, factor]).in_place
    assert isinstance(making, Baking) and making.inputs == {2}
    model.calls.clear()
    state = w.clone()
    run = (making.held({2: factor}) if holds else making)({1: w}, [(1, w)])
    assert model.calls == ["dry", "apart"] * 3 + ["in place"] and torch.equal(w, state), "recorded, and nothing written"
    cuda.capturing = capturing_too
    for k in range(3):
        x = torch.randn(8, 8) / 8
        found = run(x, w, torch.tensor(float(k)))
        torch.testing.assert_close(found[0], torch.tanh(x @ state))
        state = state - x @ state * (2.0 if holds else k)
        torch.testing.assert_close(w, state)
        assert found[1].data_ptr() == w.data_ptr()
    assert cuda.graphs[-1].replays == (0 if capturing_too else 3)


def test_tf32_survives_saving(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda_artifact, "CudaExecutable", lambda link: CudaExecutable(link, device=torch.device("cpu")))
    for allowed in (True, False):
        path = tmp_path / f"{allowed}.weft"
        artifact.save(linked(allow_tf32=str(allowed)), path, trust_dir=None)
        cuda.policies.clear()
        loaded = artifact.load(path)
        assert isinstance(loaded, CudaExecutable) and loaded.allow_tf32 is allowed
        assert {tf32 for tf32, _ in cuda.policies} == {allowed}
        x, w = inputs()
        torch.testing.assert_close(loaded(x, w)[0], expected(x, w))


def test_inside_a_capture_the_launches_join_it_by_the_same_policy(cuda: FakeCuda) -> None:
    exe = executable(allow_tf32="True")
    cuda.policies.clear()
    replays = cuda.graphs[0].replays
    cuda.capturing = True
    x, w = inputs()
    torch.testing.assert_close(exe(x, w)[0], expected(x, w))
    assert cuda.policies == [(True, True)] * 3, "cuDNN must not try algorithms while a stream is recorded"
    assert cuda.graphs[0].replays == replays
    assert not torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic


def test_a_call_on_another_stream_waits_for_the_last(cuda: FakeCuda) -> None:
    exe = executable()
    x, w = inputs()
    exe(x, w)
    other = FakeStream("other")
    with cuda.stream(other):
        exe(x, w)
        exe.replay()
    assert other.waited_for == ["default"]
    exe(x, w)
    assert cuda.current.waited_for == ["other"]
    buffers = len(cuda.kept_for) // 2
    assert buffers >= 3 and cuda.kept_for == ["default"] * buffers + ["other"] * buffers, "once for each stream"


def captured(cuda: FakeCuda, calls: list[tuple[torch.Tensor, ...]]) -> capturing.Captured:
    def model(*given: torch.Tensor) -> list[torch.Tensor]:
        calls.append(given)
        out = expected(*given)
        if cuda.recording is not None:
            cuda.recording.add(lambda: out.copy_(expected(*given)), cuda.current)
        return [out]

    return capturing.Captured(model, inputs())


def test_the_frameworks_own_model_keeps_the_same_order(cuda: FakeCuda) -> None:
    calls: list[tuple[torch.Tensor, ...]] = []
    eager = captured(cuda, calls)
    before = len(calls)
    x, w = inputs()
    first = eager(x, w)[0]
    torch.testing.assert_close(first, expected(x, w))
    other = FakeStream("other")
    with cuda.stream(other):
        assert not torch.equal(eager(*inputs())[0], first)
    assert other.waited_for == ["default"] and len(calls) == before
    torch.testing.assert_close(first, expected(x, w))  # outputs are fresh


def test_the_frameworks_own_model_inside_a_capture_and_elsewhere(cuda: FakeCuda) -> None:
    calls: list[tuple[torch.Tensor, ...]] = []
    eager = captured(cuda, calls)
    x, w = inputs()
    with pytest.raises(InputError, match="input 1: expected a tensor on cpu, got meta"):
        eager(x, w.to("meta"))
    cuda.capturing = True
    torch.testing.assert_close(eager(x, w)[0], expected(x, w))
    assert calls[-1][0] is x


def test_calls_are_recorded_without_the_callers_autocast(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[bool] = []
    launcher = execute.BoundCall.launcher

    def watched(self: execute.BoundCall, given: object, made: object) -> object:
        launch = launcher(self, given, made)  # type: ignore[arg-type]
        return noting(lambda: met.append(torch.is_autocast_enabled("cuda")), launch)

    monkeypatch.setattr(execute.BoundCall, "launcher", watched)
    torch.set_autocast_enabled("cuda", True)
    try:
        exe = executable()
        cuda.capturing = True
        exe(*inputs())
        assert torch.is_autocast_enabled("cuda"), "the caller's own is back"
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert len(met) == 9 and not any(met), "a first run, the recording, a capture of the caller's"


def test_the_frameworks_own_model_keeps_no_history_of_its_calls(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = captured(cuda, [])
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", noting(entered.append, lambda place: contextlib.nullcontext()))
    x, w = inputs()
    (found,) = eager(x.requires_grad_(), w)
    torch.testing.assert_close(found, expected(x.detach(), w))
    assert not found.requires_grad and not any(t.requires_grad for t in eager._inputs)
    assert entered == [torch.device("cpu")], "its GPU is the current one meanwhile"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(4, 8)], "the model takes 2 tensors"),
        ([torch.zeros(4, 7), torch.zeros(8, 8)], "expected 4x8xf32"),
        ([torch.zeros(4, 8), torch.zeros(8, 8, dtype=torch.float16)], "float16"),
        ([torch.zeros(4, 8), torch.zeros(8, 8, device="meta")], "expected a tensor on cpu, got meta"),
    ],
)
def test_wrong_inputs_are_named(cuda: FakeCuda, tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        executable()(*tensors)


def test_steps_one_by_one(cuda: FakeCuda) -> None:
    exe = executable()
    x, w = inputs()
    for static, given in zip(exe.static_inputs, (x, w), strict=True):
        static.copy_(given)
    seen: list[tuple[int, int]] = []
    before = len(cuda.policies)
    exe.run_steps(lambda number: seen.append((number, len(cuda.policies) - before)))
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]
    torch.testing.assert_close(exe.static_outputs[0], expected(x, w))


def with_weight() -> Graph:
    """A product with a weight, and a second one with another that is added as well."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4, 8)))
    v, w = (b.constant(np.random.default_rng(k).standard_normal((8, 8)).astype(np.float32)) for k in (1, 2))
    return b.build([b.add(Prim.MATMUL, b.add(Prim.MATMUL, x, v), w), b.apply(Prim.TANH, w)])


def test_weights_that_were_prepared_are_dropped_where_nothing_else_reads_them(cuda: FakeCuda) -> None:
    graph = with_weight()
    plan = library_plan(graph)
    turned = CallStep("aten.clone.default", (Ref("in", 1),))
    product = CallStep("aten.mm.default", (Ref("in", 0), Ref("prep", 0)))
    steps = []
    for step in plan.steps:
        kernel = step.kernel
        assert isinstance(kernel, LibraryCall)
        if graph.nodes[step.members[0]].prim is Prim.MATMUL:
            kernel = LibraryCall(kernel.schedule, (turned,), (product,), (Ref("tmp", 0),))
        steps.append(replace(step, kernel=kernel))
    linked = Linked(graph, replace(plan, steps=tuple(steps)), {}, None, None, 0, FACTS)
    exe = CudaExecutable(linked, device=torch.device("cpu"))
    kept = [node for node in exe._constants if graph.type_of(node).shape == (8, 8)]
    assert len(kept) == 1, "the one that tanh reads"
    x = torch.randn(4, 8)
    held = [n for n, node in enumerate(graph.nodes) if node.prim is Prim.CONSTANT]
    v, w = (torch.from_numpy(np.array(graph.constant(n))) for n in held)
    got = exe(x)
    torch.testing.assert_close(got[0], x @ v @ w)
    torch.testing.assert_close(got[1], torch.tanh(w))


class Loads:
    """A driver that notes which cubins are loaded and with which arguments their kernels are bound."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.bound: list[tuple[int, ...]] = []

    def load(self, path: Path) -> Loads:
        self.paths.append(path)
        return self

    def function(self, entry: str) -> Loads:
        assert entry == "double"
        return self

    def prepare(self, shared_bytes: int, cluster: tuple[int, int, int]) -> None:
        assert (shared_bytes, cluster) == (0, (1, 1, 1))

    def bind(self, grid: object, block: object, arguments: tuple[int, ...], **_: object) -> Loads:
        self.bound.append(arguments)
        return self

    def launch(self, stream: int) -> None:
        assert stream


def test_a_kernel_of_several_steps_is_loaded_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    values = [b.input(TensorType(DType.F32, (64, 64)))]
    for _ in range(3):
        values.append(b.apply(Prim.TANH, b.add(Prim.MATMUL, values[-1], values[0])))
    graph, seen = b.build(values[1:]), Loads()
    launch = Launch("double", (1, 1, 1), (32, 1, 1), (Pointer("in", 0), Pointer("out", 0)))
    source = CudaSource(Schedule("cuda"), "text", (launch,))
    other = replace(source, text="another text")
    plan = library_plan(graph)
    tanhs = [i for i, s in enumerate(plan.steps) if graph.nodes[s.members[0]].prim is Prim.TANH]
    kernels = dict(zip(tanhs, (source, other, source), strict=True))
    steps = tuple(replace(s, kernel=kernels.get(i, s.kernel)) for i, s in enumerate(plan.steps))
    objects = {source.sha256: Path("one.cubin"), other.sha256: Path("two.cubin")}
    monkeypatch.setattr(bind, "real_driver", lambda: bind.CudaDriver(cast("Any", seen.load), encode_tensor_map))
    linked = Linked(graph, replace(plan, steps=steps), objects, None, None, 0, FACTS)
    CudaExecutable(linked, device=torch.device("cpu"))
    assert seen.paths == [Path("one.cubin"), Path("two.cubin")]
    assert len(set(seen.bound)) == 3, "each step has addresses of its own"


@pytest.mark.parametrize("branches", [1, 3])
def test_a_step_is_launched_in_another_way(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, branches: int) -> None:
    """What binds it is told its kernel, its addresses and whether it may begin early; the others are as they were."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (64, 64)))
    sides = [b.apply(prim, x) for prim in (Prim.TANH, Prim.EXP)]
    graph, seen = b.build([b.add(Prim.MATMUL, *sides)]), Loads()
    launch = Launch("double", (1, 1, 1), (32, 1, 1), (Pointer("in", 0), Pointer("out", 0)))
    source = CudaSource(Schedule("cuda"), "text", (launch,))
    plan = replace(library_plan(graph), branches=branches)
    plan = replace(plan, steps=tuple(replace(s, kernel=source) for s in plan.steps))
    monkeypatch.setattr(bind, "real_driver", lambda: bind.CudaDriver(cast("Any", seen.load), encode_tensor_map))
    told: list[tuple[int, bind.BoundCuda, bind.Addresses, bool]] = []
    launched: list[int] = []

    def other(number: int) -> Rebind:
        def rebind(kernel: bind.BoundCuda, at: bind.Addresses, dependent: bool) -> bind.Prepared:
            told.append((number, kernel, at, dependent))
            return lambda stream: launched.append(number)

        return rebind

    linked = Linked(graph, plan, {source.sha256: Path("one.cubin")}, None, None, 0, FACTS)
    found = CudaExecutable(linked, device=torch.device("cpu"), rebound={1: other(1), 2: other(2)})
    assert [x[0] for x in told] == [1, 2] == launched[:2] and len(seen.bound) == 1
    assert all(kernel.source is source for _, kernel, _, _ in told)
    assert told[0][2].outputs == [told[1][2].inputs[1]], "what one writes the other reads"
    assert [x[3] for x in told] == [True, branches == 1], "one that waits for another stream begins when all has ended"
    assert found.order.width == min(branches, 2) and seen.bound[0][0] == told[0][2].inputs[0]
    found.with_graph(graph)
    assert [x[0] for x in told] == [1, 2, 1, 2]


@pytest.mark.parametrize(("most", "expected_kernels"), [(0, [3]), (1, [1, 1, 1]), (2, [2, 1]), (5, [3])])
def test_stages_of_a_few_kernels_are_a_run(cuda: FakeCuda, most: int, expected_kernels: list[int]) -> None:
    b = GraphBuilder()
    node = b.input(TensorType(DType.F32, (64, 64)))
    for _ in range(3):
        node = b.apply(Prim.TANH, node)
    graph = b.build([node])
    plan = replace(library_plan(graph), branches=1 if most == 0 else 2)
    found = CudaExecutable(
        Linked(graph, plan, {}, None, None, 0, FACTS), device=torch.device("cpu"), stage_kernels=most
    )
    assert [stage.kernels for stage in found.stages] == expected_kernels and found.order.width == 1
    x = torch.randn(64, 64)
    found.place(x)
    for stage in found.stages:
        stage.launch()
    want = x.tanh().tanh().tanh()
    assert torch.equal(found.static_outputs[0], want)
    assert torch.equal(found(x)[0], want)
    assert len(found.with_graph(graph).stages) == len(expected_kernels)
    with pytest.raises(InputError, match="takes 1 tensors"):
        found.place(x, x)
    with pytest.raises(InputError, match="expected"):
        found.place(x.double())


@pytest.mark.parametrize("lengths", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_steps_are_recorded_once_more_as_other_stages(cuda: FakeCuda, lengths: list[int]) -> None:
    b = GraphBuilder()
    node = b.input(TensorType(DType.F32, (64, 64)))
    for _ in range(3):
        node = b.apply(Prim.TANH, node)
    graph = b.build([node])
    linked = Linked(graph, library_plan(graph), {}, None, None, 0, FACTS)
    found = CudaExecutable(linked, device=torch.device("cpu"), stage_kernels=1)
    x = torch.randn(64, 64)
    graphs = found.stages_on(cast("Any", cuda.new_stream()), lengths)
    assert [len(cast("Any", g).launches) for g in graphs] == lengths
    found.place(x)
    for one, other in zip(graphs, found.stages_on(cast("Any", cuda.new_stream()), lengths), strict=True):
        assert one is not other
    for one in graphs:
        one.replay()
    assert torch.equal(found.static_outputs[0], x.tanh().tanh().tanh()), "in the same memory"
    for wrong in ([2], [2, 2], []):
        with pytest.raises(InvalidGraphError, match="are no stages of"):
            found.stages_on(cast("Any", cuda.new_stream()), wrong)
    with pytest.raises(InvalidGraphError, match="are no stages of"):
        CudaExecutable(linked, device=torch.device("cpu"), stage_kernels=2).stages_on(cast("Any", cuda.current), [3])


def test_a_result_lies_where_its_operand_lay_if_that_saves_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where steps are launched in another way, which may run them again."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (64, 64)))
    pairs = [(first, b.apply(Prim.EXP, first)) for first in (b.apply(prim, x) for prim in (Prim.TANH, Prim.NEG))]
    sums = [b.add(Prim.REDUCE_SUM, second, attrs=ReduceAttrs((0, 1))) for _, second in pairs]
    graph, given = b.build([b.apply(Prim.ADD, *sums)]), torch.randn(64, 64)
    made, place = Linked(graph, replace(library_plan(graph), branches=2), {}, None, None, 0, FACTS), torch.device("cpu")
    plain = CudaExecutable(made, device=place)
    asked: list[object] = []

    def places(*given: object) -> dict[Key, Key]:
        asked.append(given[-1])
        return {(second, Format.ROW): (first, Format.ROW) for first, second in pairs}

    monkeypatch.setattr(cuda_executable, "places_of", places)
    shared = CudaExecutable(made, device=place)
    large, small = 64 * 64 * 4, 256
    # for lanes and for the arena
    assert asked == [{(n, Format.ROW) for n in (*sums, *(node for pair in pairs for node in pair))}] * 2
    assert plain.memory.arena_bytes >= 3 * large
    assert 2 * large < shared.memory.arena_bytes <= 2 * large + 3 * small
    staged = CudaExecutable(made, device=place, stage_kernels=1)
    assert len(asked) == 2
    monkeypatch.setattr(cuda_executable, "places_of", lambda *_: {(sums[0], Format.ROW): (pairs[0][1], Format.ROW)})
    kept = CudaExecutable(made, device=place)
    assert kept.memory.arena_bytes <= plain.memory.arena_bytes, "what saves nothing is not done"
    for run in (plain, shared, staged):
        torch.testing.assert_close(run(given)[0].reshape(()), given.tanh().exp().sum() + given.neg().exp().sum())


@pytest.mark.parametrize("small", [False, True])
def test_lanes_wait_where_a_large_result_takes_the_place_of_what_another_lane_reads(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (64, 64)))
    first = b.apply(Prim.TANH, x)
    read, second = b.apply(Prim.EXP, first), b.apply(Prim.NEG, first)
    sums = [b.add(Prim.REDUCE_SUM, node, attrs=ReduceAttrs((0, 1))) for node in (read, second)]
    graph, given = b.build([b.apply(Prim.ADD, *sums)]), torch.randn(64, 64)
    steps = tuple(replace(step, cost_us=10.0) for step in library_plan(graph).steps)
    plan = Plan("", steps, branches=2)
    values = survey(graph, plan)
    reader, writer = (values.first_write[n, Format.ROW] for n in (read, second))
    made, place = Linked(graph, plan, {}, None, None, 0, FACTS), torch.device("cpu")
    assert not CudaExecutable(made, device=place).order.before[writer] >> reader & 1
    orders: list[Order] = []

    def places(graph: Graph, plan: Plan, values: Values, order: Order, within: Collection[Key]) -> dict[Key, Key]:
        orders.append(order)
        assert {(first, Format.ROW), (second, Format.ROW)} <= set(within)
        free = order.before[writer] >> reader & 1
        return {(second, Format.ROW): (first, Format.ROW)} if free else {}

    monkeypatch.setattr(cuda_executable, "places_of", places)
    if small:
        monkeypatch.setattr(cuda_executable, "LARGE", 1)
    found = CudaExecutable(made, device=place)
    assert [order.width for order in orders] == [1, 2]
    assert found.order.before[writer] >> reader & 1 == (not small)
    expected = given.tanh().exp().sum() - given.tanh().sum()
    for _ in range(5):  # in random orders, as far as they are open
        torch.testing.assert_close(found(given)[0].reshape(()), expected)
