from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.runtime.plans import executable, library_plan

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.plan import Plan
from weft.runtime.executable import Executable, InputError, Linked, to_torch
from weft.runtime.memory import ALIGNMENT


def chain(length: int = 6) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (64, 64)))
    y = x
    for k in range(length):
        y = b.apply(Prim.TANH, b.apply(Prim.MUL, y, 1.0 + k))
    return b.build([y])


def test_values_share_the_arena() -> None:
    exe = executable(chain())
    assert exe.memory.arena_bytes == exe.memory.live_bytes
    assert exe.memory.live_bytes <= 3 * 64 * 64 * 4


def test_outputs_are_fresh_and_repeatable() -> None:
    exe = executable(chain())
    x = torch.randn(64, 64)
    first = exe(x)[0]
    kept = first.clone()
    second = exe(torch.randn(64, 64))[0]
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    assert torch.equal(exe(x)[0], kept)


def test_inputs_are_not_modified_and_may_be_strided() -> None:
    exe = executable(chain(2))
    base = torch.randn(64, 128)
    x = base[:, ::2]
    kept = base.clone()
    got = exe(x)[0]
    assert torch.equal(base, kept)
    assert torch.equal(got, exe(x.contiguous())[0])


@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_linked_in_inference_mode_may_be_called_outside(offset: int) -> None:
    with torch.inference_mode():
        exe = executable(chain(2))
    x = torch.randn(64, 65)[:, offset : offset + 64]
    assert torch.equal(exe(x)[0], executable(chain(2))(x)[0])


def test_results_that_no_kernel_makes_ignore_the_default_device() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4,)))
    exe = executable(b.build([b.iota((4, 3), 1, DType.I64), b.apply(Prim.NEG, x)]))
    with torch.device("meta"):
        line, negated = exe(torch.ones(4, device="cpu"))
    assert line.tolist() == [[0, 1, 2]] * 4
    assert negated.tolist() == [-1.0] * 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "takes 1 tensors, 0 were given"),
        ([torch.zeros(64, 63)], "expected 64x64xf32"),
        ([torch.zeros(64, 64, dtype=torch.float64)], "float64"),
        ([torch.zeros(64, 64, device="meta")], "expected a CPU tensor"),
    ],
)
def test_wrong_tensors_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        executable(chain(1))(*tensors)
    assert caught.value.code == "W011"


def test_a_plan_in_the_wrong_order_is_our_bug() -> None:
    graph = chain(2)
    plan = library_plan(graph)
    with pytest.raises(InvalidGraphError, match="before it is written"):
        Executable(Linked(graph, Plan("bad", plan.steps[::-1]), {}, None))


def test_a_plan_that_misses_an_output_is_our_bug() -> None:
    graph = chain(1)
    plan = library_plan(graph)
    with pytest.raises(InvalidGraphError, match="no step writes output"):
        Executable(Linked(graph, Plan("bad", plan.steps[:-1]), {}, None))


def test_calls_from_several_threads_do_not_mix() -> None:
    exe = executable(chain())
    inputs = [torch.randn(64, 64) for _ in range(8)]
    want = [exe(x)[0] for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        wrong.extend(k for _ in range(20) if not torch.equal(exe(inputs[k])[0], want[k]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_zero_sized_tensors() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (0, 4)))
    exe = executable(b.build([b.apply(Prim.ADD, x, 1.0), b.reduce(Prim.REDUCE_SUM, x, (0,))]))
    empty, total = exe(torch.zeros(0, 4))
    assert empty.shape == (0, 4)
    assert total.tolist() == [[0.0] * 4]


def test_every_step_is_timed_in_its_place() -> None:
    exe = executable(chain())
    x = torch.randn(64, 64)
    before = exe(x)[0]
    times = exe.time_steps(x, rounds=3)
    assert len(times) == len(exe.plan.steps)
    assert all(t > 0 for t in times)
    assert torch.equal(exe(x)[0], before)
    with pytest.raises(InputError, match="takes 1 tensors"):
        exe.time_steps(rounds=1)


@pytest.mark.parametrize("offset", [0, 4])
def test_a_constant_is_copied_only_where_its_place_in_memory_matters(offset: int) -> None:
    raw = np.zeros(4096 + 2 * ALIGNMENT, np.uint8)
    at = -raw.ctypes.data % ALIGNMENT + offset
    data = raw[at : at + 4096].view(np.float32)
    data[:] = np.arange(1024)
    aligned, shared = to_torch(data, DType.F32), to_torch(data, DType.F32, aligned=False)
    assert aligned.data_ptr() % ALIGNMENT == 0
    assert shared.data_ptr() == data.ctypes.data
    assert (aligned.data_ptr() == data.ctypes.data) == (offset == 0)
    assert torch.equal(aligned, torch.arange(1024.0)) and torch.equal(shared, aligned)
