"""The trace of a loss with its gradients: the model is run once, and what it leaves out or writes is found by that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from weft.errors import ModelRaisesError, StepError
from weft.options import Options
from weft.training import compile_step

UNTUNED = Options(budget_s=0)


class _Counted(nn.Module):
    """Two convolutions, one of them only looked at, and buffers that a call writes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Conv2d(3, 4, 3)
        self.unused = nn.Conv2d(3, 4, 3)
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen[1:].add_(x.detach().mean())
        y: torch.Tensor = self.used(x) + self.unused(x).detach()
        return y.mean((2, 3)) + self.seen


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 6, 6), torch.randint(4, (2,))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), t)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("channels_last", [False, True])
def test_parameters_without_a_gradient_stay_and_written_views_are_found(channels_last: bool) -> None:
    model = _Counted()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twin = copy.deepcopy(model)
    before = model.unused.weight.detach().clone()
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, twin)]
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *_batch(), options=UNTUNED)
    for _ in range(3):
        x, t = _batch()
        torch.testing.assert_close(step(x, t), _stepped(twin, optimizers[1], x, t))
    for (name, x), y in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, msg=name)
    assert torch.equal(model.unused.weight, before)
    assert model.unused.weight not in optimizers[0].state


def test_a_model_is_run_once_for_a_plan() -> None:
    model = _Counted()
    model.unused.requires_grad_(False)
    compile_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), *_batch(), options=UNTUNED)
    assert model.calls == 1


def test_parameters_of_one_shape_may_differ_in_type_and_group() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float32)
            self.layers = nn.ParameterList(torch.randn(6, 6).to(kind) for kind in kinds)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(x @ layer.to(x.dtype))
            return x

    def groups(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(model.layers[:3])},
            {"params": [model.layers[3]], "weight_decay": 0.0},
            {"params": [model.layers[4]], "lr": 0.3, "maximize": True},
        ]

    model = Net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(groups(m), 1e-2) for m in (model, twin)]
    x, t = torch.randn(3, 6), torch.randint(6, (3,))
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], x, t, options=UNTUNED)
    step(x, t)  # once: eager rounds more of what is in bf16, and that is in everybody's next gradient
    nn.functional.cross_entropy(twin(x), t).backward()
    optimizers[1].step()
    for x, y in zip(model.layers, twin.layers, strict=True):
        rtol = 2e-2 if x.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


class _Writes(nn.Module):
    held: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("held", torch.zeros(4))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "input":
                x.add_(1)
            elif self.how == "parameter":
                self.inner.bias.add_(1)
            else:
                self.held.resize_(8)
        y: torch.Tensor = self.inner(x)
        return y


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("input", StepError, "writes into its inputs or parameters"),
        ("parameter", StepError, "writes into its inputs or parameters"),
        ("shape", ModelRaisesError, "gets another shape or memory"),
    ],
)
def test_what_a_step_may_not_write(how: str, error: type[Exception], match: str) -> None:
    model = _Writes(how)
    x = torch.ones(2, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=match):
        compile_step(
            model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), x, torch.randint(4, (2,)),
            options=UNTUNED,
        )  # fmt: skip
    assert torch.equal(x, torch.ones(2, 4))
    assert all(torch.equal(y, before[n]) for n, y in model.state_dict().items())
