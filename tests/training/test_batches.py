"""Steps of several batches against loops that sum their gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weft.errors import ModelRaisesError, OptionError
from weft.options import Options
from weft.training import Step, compile_step

UNTUNED = Options(budget_s=0)


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _batch(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)


def _made(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int, **how: Any) -> Step:
    given = _batch(0)
    return compile_step(model, nn.CrossEntropyLoss(), optimizer, *given, options=UNTUNED, batches=batches, **how)


def _close(one: nn.Module, other: nn.Module) -> None:
    for (name, x), y in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("batches", [2, 3])
def test_batches_of_a_step_follow_the_loop(batches: int) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, twin)]
    step = _made(model, optimizers[0], batches, clip_norm=0.3)
    assert step.plans == 2
    for k in range(3 * batches):
        rows = 4 if k == 1 else 5  # one of another shape among them
        before = model[3].weight.detach().clone()
        loss = step(*_batch(k, rows))
        found = F.cross_entropy(twin(_batch(k, rows)[0]), _batch(k, rows)[1])
        (found / batches).backward()
        torch.testing.assert_close(loss, found.detach(), rtol=1e-5, atol=1e-6)
        assert step.summed == (k + 1) % batches
        assert torch.equal(model[3].weight, before) == bool(step.summed)
        if not step.summed:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
            optimizers[1].step()
            optimizers[1].zero_grad()
        _close(model, twin)
    assert optimizers[0].state_dict()["state"][0]["step"] == 3
    assert all(p.grad is None for p in model.parameters())


def test_a_scaler_skips_the_whole_step_and_begins_again() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    step = _made(model, optimizers[0], 2, scaler=scalers[0])
    for m in (model, twin):
        m.eval()  # statistics of an infinite batch stay
    for k in range(8):
        x, t = _batch(k)
        x = x * float("inf") if k == 2 else x
        step(x, t)
        scalers[1].scale(F.cross_entropy(twin(x), t) / 2).backward()
        if k % 2:
            scalers[1].step(optimizers[1])
            scalers[1].update()
            optimizers[1].zero_grad()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        _close(model, twin)
    assert step.skipped is not None
    assert step.skipped.item() == 1


def test_sums_are_left_and_a_batch_that_raises_is_none_of_them() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    step = _made(model, optimizers[0], 2)
    step(*_batch(1))
    with pytest.raises(ModelRaisesError):
        step(torch.zeros(5, 7), _batch(1)[1])
    assert step.summed == 1
    step.forget()
    assert step.summed == 0
    twin(_batch(1)[0])  # the norm saw it
    for k in (2, 3):
        step(*_batch(k))
        (F.cross_entropy(twin(_batch(k)[0]), _batch(k)[1]) / 2).backward()
    optimizers[1].step()
    _close(model, twin)


@pytest.mark.parametrize("batches", [0, -1, 1.5, True])
def test_no_number_of_batches(batches: Any) -> None:
    model = _net()
    with pytest.raises(OptionError, match="no number of batches"):
        _made(model, torch.optim.SGD(model.parameters(), 0.1), batches)
