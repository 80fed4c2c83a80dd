"""What a library call makes and other steps read is not copied on a GPU: on a stand-in for torch.cuda."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, install
from tests.runtime.plans import library_plan

from weft.device.cuda.tensor_map import encode_tensor_map
from weft.generate import bind
from weft.generate.library.execute import Held
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.plan import Plan
from weft.kernels.source import CallStep, CudaSource, Launch, LibraryCall, Pointer, Schedule
from weft.runtime.cuda_executable import ALIGNMENT, CudaExecutable
from weft.runtime.executable import Linked

FACTS = {"gpu": "NVIDIA H200", "capability": "90"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def chain() -> Graph:
    """Three steps: of the first two nobody but the next reads the result."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (8, 16)))
    return b.build([b.apply(Prim.ABS, b.apply(Prim.TANH, b.apply(Prim.EXP, x)))])


def functional(graph: Graph, **changes: int) -> Plan:
    """Every step gives its result as a tensor of the framework's."""
    plan = library_plan(graph)
    steps = []
    for step in plan.steps:
        kernel = step.kernel
        assert isinstance(kernel, LibraryCall)
        run = tuple(CallStep(s.target.replace(".out", ".default"), s.args, s.kwargs, s.result) for s in kernel.run)
        steps.append(replace(step, kernel=LibraryCall(kernel.schedule, kernel.prepare, run, kernel.outputs)))
    return replace(plan, steps=tuple(steps), **changes)  # type: ignore[arg-type]


def executable(graph: Graph, plan: Plan) -> CudaExecutable:
    return CudaExecutable(Linked(graph, plan, {}, None, None, 0, FACTS), device=torch.device("cpu"))


def test_what_calls_alone_read_takes_no_memory_of_the_plan(cuda: FakeCuda) -> None:
    graph = chain()
    exe, copied = executable(graph, functional(graph)), executable(graph, library_plan(graph))
    assert len(exe._held) == 2 and not copied._held
    assert exe._arena.numel() < copied._arena.numel()
    assert exe.memory.live_bytes == copied.memory.live_bytes, "memory is told as it is, whoever owns it"
    for seed in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(exe(x)[0], x.exp().tanh().abs())


def test_it_is_given_back_after_its_last_reader(cuda: FakeCuda) -> None:
    graph = chain()
    exe = executable(graph, functional(graph))
    alive: list[int] = []

    def before(_: int) -> None:
        alive.append(sum(h._tensor is not None for h in exe._held.values()))

    exe.run_steps(before, torch.ones(8, 16))
    assert alive == [0, 1, 1, 0]


def test_what_a_step_stored_can_be_looked_at(cuda: FakeCuda) -> None:
    graph = chain()
    plan = functional(graph)
    exe = executable(graph, plan)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
    seen: list[torch.Tensor] = []

    def before(number: int) -> None:
        if number:
            seen.extend(exe.stored(key).clone() for key in plan.steps[number - 1].outputs)

    exe.run_steps(before, x)
    for got, want in zip(seen, (x.exp(), x.exp().tanh(), x.exp().tanh().abs()), strict=True):
        torch.testing.assert_close(got, want)


def test_results_of_a_plan_have_places_of_their_own(cuda: FakeCuda) -> None:
    b = GraphBuilder()
    y = b.apply(Prim.EXP, b.input(TensorType(DType.F32, (8, 16))))
    graph = b.build([y, b.apply(Prim.TANH, y)])
    assert not executable(graph, functional(graph))._held


def test_nothing_is_held_where_several_lanes_share_memory(cuda: FakeCuda) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (8, 16)))
    graph = b.build([b.apply(Prim.TANH, b.apply(p, x)) for p in (Prim.EXP, Prim.ABS)])
    exe = executable(graph, functional(graph, branches=2))
    assert exe.order.width == 2 and not exe._held
    assert len(executable(graph, functional(graph))._held) == 2


def test_a_view_in_the_plans_memory_is_copied(cuda: FakeCuda) -> None:
    """Its operand's memory is given to others while the view is still read."""
    b = GraphBuilder()
    y = b.apply(Prim.EXP, b.input(TensorType(DType.F32, (8, 16))))
    cut = b.add(Prim.SLICE, y, attrs=a.SliceAttrs((0, 0), (4, 16), (1, 1)))
    graph = b.build([b.apply(Prim.TANH, b.apply(Prim.ABS, cut)), b.apply(Prim.NEG, y)])
    exe = executable(graph, library_plan(graph))
    assert len(exe._held) == 1
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(7))
    got = exe(x)
    torch.testing.assert_close(got[0], x.exp()[:4].abs().tanh())
    torch.testing.assert_close(got[1], -x.exp())


class Negates:
    """A driver whose only kernel writes -x of 128 numbers, at once, wherever its arguments point."""

    def __init__(self) -> None:
        self.bound: list[tuple[int, ...]] = []
        self.at: tuple[int, ...] = ()

    def load(self, path: Path) -> Negates:
        return self

    def function(self, entry: str) -> Negates:
        return self

    def prepare(self, shared_bytes: int, cluster: tuple[int, int, int]) -> None:
        pass

    def bind(self, grid: object, block: object, arguments: tuple[int, ...], **_: object) -> Negates:
        self.bound.append(arguments)
        self.at = arguments
        return self

    def launch(self, stream: int) -> None:
        x, y = (np.ctypeslib.as_array((ctypes.c_float * 128).from_address(at)) for at in self.at)
        y[:] = -x


def negated(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[CudaExecutable, Negates]:
    """exp by a call, its negative by a kernel, tanh by a call."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (8, 16)))
    graph, driver = b.build([b.apply(Prim.TANH, b.apply(Prim.NEG, b.apply(Prim.EXP, x)))]), Negates()
    launch = Launch("negate", (1, 1, 1), (32, 1, 1), (Pointer("in", 0), Pointer("out", 0)))
    source = CudaSource(Schedule("cuda"), "text", (launch,))
    plan = functional(graph)
    steps = (plan.steps[0], replace(plan.steps[1], kernel=source), plan.steps[2])
    monkeypatch.setattr(bind, "real_driver", lambda: bind.CudaDriver(cast("Any", driver.load), encode_tensor_map))
    linked = Linked(graph, replace(plan, steps=steps), {source.sha256: Path("one.cubin")}, None, None, 0, FACTS)
    return CudaExecutable(linked, device=torch.device("cpu"), **cast("Any", changes)), driver


def test_a_generated_kernel_reads_it_where_it_lies(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    exe, driver = negated(cuda, monkeypatch)
    (place,) = exe._held.values()
    made: list[tuple[int, int]] = []

    def before(number: int) -> None:
        if number == 1:
            made.append((place.read().data_ptr(), len(driver.bound)))
        if number == 2:
            assert place._tensor is None, "given back after the kernel"
            assert driver.at[0] == made[-1][0]

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(9))
    for _ in range(3):
        exe.run_steps(before, x)
    cuda.capturing = True
    torch.testing.assert_close(exe(x)[0], (-x.exp()).tanh())
    inputs = [at[0] for at in driver.bound]
    assert all(a != b for a, b in itertools.pairwise(inputs)), "bound anew only where it lies elsewhere"


def test_a_kernel_that_is_launched_in_another_way_is_told_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bind.Addresses] = []

    def rebind(kernel: bind.BoundCuda, at: bind.Addresses, dependent: bool) -> bind.Prepared:
        told.append(at)
        return lambda stream: None

    exe, _ = negated(cuda, monkeypatch, rebound={1: rebind})
    assert not exe._held and len(told) == 1 and all(told[0].inputs)


def held(shape: tuple[int, ...], strides: tuple[int, ...]) -> Held:
    return Held(shape, strides, torch.float32, ALIGNMENT)


def aligned(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    room = torch.arange(count + ALIGNMENT, dtype=torch.float32)
    first = -room.data_ptr() % ALIGNMENT // 4
    return room[first : first + count].view(shape)


def test_a_result_is_kept_where_it_lies_as_its_readers_were_verified() -> None:
    x = aligned(4, 6)
    place = held((2, 2, 6), (12, 6, 1))
    place.write(x, [])
    assert place.read().data_ptr() == x.data_ptr() and place.read().stride() == (12, 6, 1)


@pytest.mark.parametrize("case", ["turned", "repeated", "misplaced", "operand's"])
def test_else_it_is_copied(case: str) -> None:
    x = aligned(6, 6)
    result = {
        "turned": x.t(),
        "repeated": x[:1].expand(6, 6),
        "misplaced": aligned(7, 6).flatten()[1:37].view(6, 6),
        "operand's": x.view(36).view(6, 6),
    }[case]
    place = held((6, 6), (6, 1))
    place.write(result, [x] if case == "operand's" else [])
    got = place.read()
    assert got.data_ptr() != result.data_ptr() and got.stride() == (6, 1)
    assert torch.equal(got, result)


def test_another_type_is_converted_as_it_was_into_the_plans_memory() -> None:
    place = held((4,), (1,))
    place.write(torch.tensor([1, 2, 3, 4]), [])
    assert place.read().dtype is torch.float32 and place.read().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_nothing_is_read_after_its_last_reader() -> None:
    place = held((4,), (1,))
    place.write(aligned(4), [])
    place.drop()
    with pytest.raises(RuntimeError, match="after its last reader"):
        place.read()
