"""What one library call makes and others read is not copied on a GPU: on a stand-in for torch.cuda."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, install
from tests.runtime.plans import library_plan

from weft.generate.library.execute import Held
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.plan import Plan
from weft.kernels.source import CallStep, LibraryCall
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
