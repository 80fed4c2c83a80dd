"""A step as one graph that reads and writes the model's own tensors, on the stand-in for torch.cuda."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, install
from torch import nn

from weft.options import Options
from weft.platform.cpu import Cpu
from weft.runtime.cuda_executable import CudaExecutable
from weft.training import Step, compile_step

UNTUNED = Options(budget_s=0)
GPU = {"gpu": "NVIDIA H200", "capability": "90"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Steps are compiled as on a CPU, and what was made runs as on a GPU."""
    made, fake = Step._made, install(monkeypatch)

    def moved(self: Step, given: Any, *, last: bool) -> Any:
        with monkeypatch.context() as m:
            m.setattr(torch.cuda, "is_available", lambda: False)
            plan = made(self, given, last=last)
        linked = replace(plan.compilation.executable.linked, facts=dict(GPU))
        run = CudaExecutable(linked, device=torch.device("cpu"))
        plan.compilation = replace(plan.compilation, plan=run, eager=None)
        return plan

    monkeypatch.setattr(Step, "_made", moved)
    return fake


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=g), torch.randint(0, 3, (5,), generator=g)


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    found = nn.functional.cross_entropy(model(batch[0]), batch[1])
    found.backward()
    optimizer.step()
    return found.detach()


def _made(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> Step:
    return compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED, **how)


def _close(one: nn.Module, other: nn.Module) -> None:
    for (name, x), y in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6, msg=name)


def test_memory_is_given_back_before_a_plan_writes_in_place(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and again where tensors have moved: with what only cycles hold."""
    freed: list[tuple[bool, bool]] = []
    model = _net()
    step = _made(model, torch.optim.SGD(model.parameters(), 0.1))

    def free_memory(*, garbage: bool = False) -> None:
        freed.append((garbage, step.compilation.plan is step.compilation.eager is None))

    monkeypatch.setattr(Cpu, "free_memory", staticmethod(free_memory))
    for _ in range(2):
        step(*_batch())
    assert freed == [(True, True)], "the plan before is gone"
    model[0].weight.data = model[0].weight.data.clone()
    step(*_batch())
    assert freed == [(True, True)] * 2


def test_one_graph_a_step(cuda: FakeCuda) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, twin)]
    step = _made(model, optimizers[0])
    plain = step.compilation.executable
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for k in range(5):
        torch.testing.assert_close(step(*_batch(k)), _eager(twin, optimizers[1], *_batch(k)), rtol=1e-5, atol=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    _close(model, twin)
    run = step.compilation.run
    assert isinstance(run, CudaExecutable) and run is not plain and step.compilation.plan is None
    assert cuda.graphs[-1].replays == 5 and step.plans == 1
    assert optimizers[0].state_dict()["state"][3]["step"] == 5


def test_what_moved_is_read_where_it_is(cuda: FakeCuda) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    step = _made(model, optimizers[0])
    for k in range(2):
        step(*_batch(k))
        _eager(twin, optimizers[1], *_batch(k))
    run = step.compilation.run
    for m in (model, twin):
        m[0].weight.data = m[0].weight.data.clone() * 0.5
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for k in range(2):
        step(*_batch(k))
        _eager(twin, optimizers[1], *_batch(k))
    assert step.compilation.run is not run and step.plans == 1
    _close(model, twin)


def test_a_skipped_step_waits_for_nothing(cuda: FakeCuda) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = _made(model, optimizer, skip_nonfinite=True)
    step(*_batch())
    before = [p.clone() for p in model.parameters()]
    x, t = _batch()
    x[1, 2] = float("inf")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch.Tensor, "item", _forbidden)
        m.setattr(torch.Tensor, "__bool__", _forbidden)
        m.setattr(torch.Tensor, "__float__", _forbidden)
        step(x, t)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert step.skipped is not None and step.skipped.item() == 1
    assert optimizer.state[model[0].weight]["step"] == 1


def _forbidden(*_: object) -> Any:
    raise AssertionError("the host waits for the device")


def test_several_batches_in_place(cuda: FakeCuda) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (model, twin)]
    step = _made(model, optimizers[0], batches=2)
    for k in range(6):
        step(*_batch(k))
        (nn.functional.cross_entropy(twin(_batch(k)[0]), _batch(k)[1]) / 2).backward()
        if k % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    _close(model, twin)
    assert step.plans == 2


def test_without_room_for_the_graph_nothing_is_written_and_the_next_call_compiles_again(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = _made(model, optimizer)
    before = {n: x.clone() for n, x in model.state_dict().items()}

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as m:
        m.setattr(CudaExecutable, "in_place", property(lambda self: full))
        with pytest.raises(torch.OutOfMemoryError):
            step(*_batch())
    assert step.plans == 0
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert step(*_batch()).isfinite()
    assert step.plans == 1 and not torch.equal(model[0].weight, before["0.weight"])
