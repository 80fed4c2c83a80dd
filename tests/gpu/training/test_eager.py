"""Steps by the framework's own operators on a real GPU: recorded in place, as a loop with fused optimizers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.training.alike import two_runs
from torch import nn

import weft
from weft.platform.cuda.captured import Captured, capture
from weft.runtime.in_place import Baking
from weft.training import Step
from weft.training.eager import EagerStep

pytestmark = pytest.mark.gpu


LIMIT_S = 240
Make = Callable[[Any], torch.optim.Optimizer]
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    ).cuda()  # fmt: skip


def _batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, 16, 16, generator=g).cuda(), torch.randint(0, 5, (8,), generator=g).cuda()


def _by_framework(model: nn.Module, optimizer: torch.optim.Optimizer, cache: Path, **how: Any) -> Step:
    """A step of which no plan was the faster one."""
    options = weft.Options(budget_s=0, device="cuda", cache_dir=cache)
    step = weft.compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=options, **how)
    for plan in step._plans.values():
        tensors, _ = step._tensors()
        arguments = step._arguments(plan, _batch())
        eager = EagerStep(step._both, tensors, plan.form, plan.traced, plan.program, arguments, 2)
        given = [arguments[k] for k in plan.program.arguments]
        before = [x.clone() for x in given]
        run = capture(eager, given, options)
        assert isinstance(run, Captured), run
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True)), "it writes nothing that is given"
        plan.compilation = replace(plan.compilation, plan=None, eager=run)
    return step


def _looped(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.backends.cudnn.flags(benchmark=False, deterministic=True, allow_tf32=False):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
    optimizer.step()
    return loss.detach()


def _close(one: nn.Module, other: nn.Module) -> None:
    for (name, x), y in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: SGD(m.parameters(), 0.05, momentum=0.9, weight_decay=1e-2, fused=True),
        lambda m: SGD(m.parameters(), 0.05, weight_decay=1e-2, fused=True),
        lambda m: ADAMW(m.parameters(), 1e-3, weight_decay=0.1, fused=True),
        lambda m: ADAM(m.parameters(), 1e-3, weight_decay=0.1, amsgrad=True, fused=True),
        lambda m: ADAMW(m.parameters(), torch.tensor(1e-3, device="cuda"), weight_decay=0.1, fused=True),
    ],
)
def test_it_does_what_a_loop_with_a_fused_optimizer_does(tmp_path: Path, make: Make) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [make(m) for m in (model, twin)]
    step = _by_framework(model, optimizers[0], tmp_path)
    runs: list[object] = []
    for k in range(9):
        for optimizer in optimizers:
            group = optimizer.param_groups[0]
            if k == 3:
                group["lr"] = group["lr"] * 0.25
            if k == 6:
                group["weight_decay"] = 0.5
        found, wanted = step(*_batch(k)), _looped(twin, optimizers[1], *_batch(k))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        runs.append(step.compilation.run)
    assert all(isinstance(run, Captured) and run._form is not None for run in runs)
    assert all(run is runs[0] for run in runs[:6]), "another learning rate is read where it is"
    assert runs[6] is not runs[0] and all(run is runs[6] for run in runs[6:]), "another decay is recorded"
    assert step.plans == 1 and all(p.grad is None for p in model.parameters())
    _close(model, twin)


@pytest.mark.parametrize("make", [lambda m: SGD(m.parameters(), 0.05, momentum=0.9), lambda m: ADAMW(m.parameters())])
def test_recording_writes_nothing(tmp_path: Path, make: Make) -> None:
    model = _net()
    step = _by_framework(model, make(model), tmp_path)
    (plan,) = step._plans.values()
    run = step.compilation.run
    assert isinstance(run, Captured)
    making = run.in_place
    assert isinstance(making, Baking)
    arguments = step._arguments(plan, _batch())
    given = [arguments[k] for k in plan.program.arguments]
    wanted = [x.clone() for x in run(*given)]
    before = [x.detach().clone() for x in arguments]
    targets, sources = step._writes(plan, arguments)
    own = {*range(len(plan.trained) + len(plan.fixed)), *plan.traced.written}
    bound = {n: arguments[k] for n, k in enumerate(plan.program.arguments) if k in own}
    values = {n: given[n] for n in making.inputs}
    placed = making.held(values)(bound, list(zip(sources, targets, strict=True)))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True)), "nothing is written before a call"
    with torch.no_grad():
        placed(*given)
    for k, target in zip(sources, targets, strict=True):
        torch.testing.assert_close(target, wanted[k], rtol=1e-5, atol=1e-6)
    assert not torch.equal(model[0].weight, before[0])


def test_settings_that_change_at_each_step(tmp_path: Path) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [ADAMW(m.parameters(), 1e-3, fused=True) for m in (model, twin)]
    step = _by_framework(model, optimizers[0], tmp_path)
    runs: list[object] = []
    for k in range(10):
        for optimizer in optimizers:
            optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * k, 0.99)
        torch.testing.assert_close(step(*_batch(k)), _looped(twin, optimizers[1], *_batch(k)), rtol=1e-3, atol=1e-4)
        runs.append(step.compilation.run)
    assert runs[-1] is runs[-2], "a graph that reads them is recorded once"
    _close(model, twin)


@pytest.mark.parametrize("how", [{"clip_norm": 0.5}, {"skip_nonfinite": True}, {"batches": 2}])
def test_steps_without_fused_kernels(tmp_path: Path, how: dict[str, Any]) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, twin)]
    step = _by_framework(model, optimizers[0], tmp_path, **how)
    options = weft.Options(budget_s=0, device="cuda", cache_dir=tmp_path)
    plain = weft.compile_step(twin, nn.CrossEntropyLoss(), optimizers[1], *_batch(), options=options, **how)
    for k in range(4):
        torch.testing.assert_close(step(*_batch(k)), plain(*_batch(k)), rtol=1e-3, atol=1e-4)
    assert isinstance(step.compilation.run, Captured)
    _close(model, twin)


def test_a_step_waits_for_nothing_and_keeps_no_memory(tmp_path: Path) -> None:
    model = _net()
    step = _by_framework(model, ADAMW(model.parameters(), 1e-3), tmp_path)
    batch = _batch()
    step(*batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with warnings.catch_warnings(action="ignore"):  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 1024


def test_two_runs_have_the_same_bits_and_torch_is_not_heard(tmp_path: Path) -> None:
    model = _net()
    optimizer = ADAMW(model.parameters(), 1e-3)
    step = _by_framework(model, optimizer, tmp_path, autocast=torch.bfloat16)
    with warnings.catch_warnings(action="error"):
        step(*_batch())  # records it
    assert not torch.are_deterministic_algorithms_enabled()
    first = {name: x.clone() for name, x in model.state_dict().items()}
    found = two_runs(model, optimizer, step, _batch, first)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
