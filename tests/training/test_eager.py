"""A step by the framework's own operators, where no plan is faster: the loop's results, all written or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.interrupts import everything, interrupt
from torch import nn

from weft.options import Options
from weft.training import Step, compile_step
from weft.training.eager import EagerStep, _is_dense

UNTUNED = Options(budget_s=0)
Make = Callable[[Any], torch.optim.Optimizer]
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def _net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=g), torch.randint(0, 3, (5,), generator=g)


def _by_framework(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> Step:
    """A step of which no plan was the faster one."""
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED, **how)
    for plan in step._plans.values():
        tensors, _ = step._tensors()
        arguments = step._arguments(plan, _batch())
        run = EagerStep(step._both, tensors, plan.form, plan.traced, plan.program, arguments, 2)
        given = [arguments[k] for k in plan.program.arguments]
        before = [x.clone() for x in given]
        found, wanted = run(*given), plan.compilation.run(*given)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True)), "it writes nothing that is given"
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)
        plan.compilation = replace(plan.compilation, plan=None, eager=run)
    return step


def _groups(model: Any, make: Any, **how: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    first = {"params": parameters[::2], "lr": 1e-2, "weight_decay": 0.0}
    found: torch.optim.Optimizer = make([first, {"params": parameters[1::2], "weight_decay": 0.1}], lr=3e-2, **how)
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda m: SGD(m.parameters(), 0.1),
        lambda m: SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3),
        lambda m: SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, maximize=True),
        lambda m: ADAM(m.parameters(), 1e-2, weight_decay=0.1),
        lambda m: ADAMW(m.parameters(), 1e-2, weight_decay=0.1),
        lambda m: ADAM(m.parameters(), 1e-2, amsgrad=True, maximize=True),
        lambda m: ADAMW(m.parameters(), torch.tensor(1e-2)),
        lambda m: _groups(m, ADAMW),
        lambda m: _groups(m, SGD, momentum=0.5),
    ],
)
def test_it_does_what_the_loop_does(make: Make) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [make(m) for m in (model, twin)]
    step = _by_framework(model, optimizers[0])
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for k in range(5):
        loss = step(*_batch(k))
        optimizers[1].zero_grad()
        wanted = nn.functional.cross_entropy(twin(_batch(k)[0]), _batch(k)[1])
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    for one, other in zip(everything(model, optimizers[0]), everything(twin, optimizers[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert step.plans == 1 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "how", [{"batches": 2}, {"clip_norm": 0.1}, {"skip_nonfinite": True}, {"autocast": torch.bfloat16}]
)
def test_other_steps(how: dict[str, Any]) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [ADAM(m.parameters(), 1e-2) for m in (model, twin)]
    if "autocast" in how:
        step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *_batch(), options=UNTUNED, **how)
        (plan,) = step._plans.values()
        run = EagerStep(
            step._both, step._tensors()[0], plan.form, plan.traced, plan.program, step._arguments(plan, _batch()), 2
        )
        plan.compilation = replace(plan.compilation, plan=None, eager=run)
    else:
        step = _by_framework(model, optimizers[0], **how)
    plain = compile_step(twin, nn.CrossEntropyLoss(), optimizers[1], *_batch(), options=UNTUNED, **how)
    for k in range(4):
        torch.testing.assert_close(step(*_batch(k)), plain(*_batch(k)), rtol=1e-2, atol=1e-2)
    rtol, atol = (1e-2, 1e-2) if "autocast" in how else (2e-5, 2e-6)
    for one, other in zip(everything(model, optimizers[0]), everything(twin, optimizers[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    if how.get("skip_nonfinite"):
        x, t = _batch()
        before = [p.clone() for p in model.parameters()]
        step(x * float("nan"), t)
        assert step.skipped == 1 and all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_channels_last_weights_are_updated_where_they_lie() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    model = model.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    x, t = torch.randn(5, 3, 8, 8), torch.randint(0, 3, (5,))
    optimizers = [SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], x, t, options=UNTUNED)
    (plan,) = step._plans.values()
    run = EagerStep(
        step._both, step._tensors()[0], plan.form, plan.traced, plan.program, step._arguments(plan, (x, t)), 2
    )
    plan.compilation = replace(plan.compilation, plan=None, eager=run)
    for _ in range(3):
        step(x, t)
        optimizers[1].zero_grad()
        nn.functional.cross_entropy(twin(x), t).backward()
        optimizers[1].step()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(everything(model, optimizers[0]), everything(twin, optimizers[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback of the collector
def test_interrupted_at_any_time_it_has_written_all_or_nothing() -> None:
    model = _net()
    optimizer = _groups(model, ADAMW)
    step = _by_framework(model, optimizer)
    met = interrupt(lambda k: step(*_batch(k)), lambda: everything(model, optimizer))
    assert met[False] > 20


def test_what_fused_kernels_take() -> None:
    x = torch.zeros(4, 6)
    assert _is_dense(x) and _is_dense(x.t()) and _is_dense(torch.zeros(())) and _is_dense(torch.zeros(0, 3))
    assert not _is_dense(x[:, ::2]) and not _is_dense(x[:1].expand(4, 6))
