"""Compiled training steps on a real GPU: one graph in place, the bits of two runs, faults, several batches."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.training.alike import two_runs
from torch import nn

import weft
from weft.platform.cuda.captured import Captured
from weft.runtime.cuda_executable import CudaExecutable
from weft.training import Step

pytestmark = pytest.mark.gpu
LIMIT_S = 240


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(),
        nn.Upsample(scale_factor=2.0), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    ).cuda()  # fmt: skip


def _batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, 16, 16, generator=g).cuda(), torch.randint(0, 5, (8,), generator=g).cuda()


def _made(model: nn.Module, optimizer: torch.optim.Optimizer, cache: Path, budget_s: float, **how: Any) -> Step:
    options = weft.Options(budget_s=budget_s, device="cuda", cache_dir=cache)
    return weft.compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=options, **how)


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("budget_s", [0.0, 20.0])
def test_a_step_is_one_graph_in_place(tmp_path: Path, budget_s: float) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, twin)]
    step = _made(model, optimizers[0], tmp_path, budget_s)
    for k in range(6):
        torch.testing.assert_close(step(*_batch(k)), _eager(twin, optimizers[1], *_batch(k)), rtol=1e-3, atol=1e-4)
    assert isinstance(step.compilation.run, CudaExecutable | Captured)
    for (name, x), y in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-4, msg=name)
    before = torch.cuda.memory_allocated()
    for k in range(20):
        step(*_batch(k))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 1024


def test_two_runs_have_the_same_bits(tmp_path: Path) -> None:
    """Of one plan: another search may choose other kernels, which round otherwise."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = _made(model, optimizer, tmp_path, 20.0, autocast=torch.bfloat16)
    assert not step.record.chosen.startswith("eager"), step.record.plans
    first = {name: x.clone() for name, x in model.state_dict().items()}
    found = two_runs(model, optimizer, step, _batch, first)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_skipped_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    step = _made(model, optimizer, tmp_path, 0.0, skip_nonfinite=True)
    step(*_batch())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x, t = _batch()
    x[0, 0, 0, 0] = float("nan")
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert step.skipped is not None
    assert step.skipped.item() == 1


def test_out_of_memory_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step = _made(model, optimizer, tmp_path, 0.0)
    before = {n: x.clone() for n, x in model.state_dict().items()}

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as m:
        for kind in (CudaExecutable, Captured):
            m.setattr(kind, "in_place", property(lambda self: full))
        with pytest.raises(torch.OutOfMemoryError):
            step(*_batch())
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert step(*_batch()).isfinite()


def test_several_batches(tmp_path: Path) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (model, twin)]
    step = _made(model, optimizers[0], tmp_path, 0.0, batches=2)
    for k in range(4):
        step(*_batch(k))
        (nn.functional.cross_entropy(twin(_batch(k)[0]), _batch(k)[1]) / 2).backward()
        if k % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    for (name, x), y in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-4, msg=name)
