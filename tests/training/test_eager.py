"""A step by the framework's own operators, where no plan is faster: the loop's results, all written or none."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.interrupts import everything, interrupt
from torch import nn

from weft.generate.library.deterministic import deterministic
from weft.options import Options
from weft.runtime.in_place import Baking, InPlace, Placed, Placing
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


def _by_framework(model: nn.Module, optimizer: torch.optim.Optimizer, *, bakes: bool | None = None, **how: Any) -> Step:
    """A step of which no plan was the faster one; `bakes`: as on a GPU."""
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED, **how)
    for plan in step._plans.values():
        tensors, _ = step._tensors()
        arguments = step._arguments(plan, _batch())
        run = EagerStep(step._both, tensors, plan.form, plan.traced, plan.program, arguments, 2, bakes=bakes)
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


@pytest.mark.parametrize("bakes", [False, True])
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
def test_it_does_what_the_loop_does(make: Make, bakes: bool) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [make(m) for m in (model, twin)]
    step = _by_framework(model, optimizers[0], bakes=bakes)
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


@pytest.mark.parametrize("bakes", [False, True])
@pytest.mark.parametrize(
    "how", [{"batches": 2}, {"clip_norm": 0.1}, {"skip_nonfinite": True}, {"autocast": torch.bfloat16}]
)
def test_other_steps(how: dict[str, Any], bakes: bool) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [ADAM(m.parameters(), 1e-2) for m in (model, twin)]
    if "autocast" in how:
        step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *_batch(), options=UNTUNED, **how)
        (plan,) = step._plans.values()
        arguments = step._arguments(plan, _batch())
        run = EagerStep(step._both, step._tensors()[0], plan.form, plan.traced, plan.program, arguments, 2, bakes=bakes)
        plan.compilation = replace(plan.compilation, plan=None, eager=run)
    else:
        step = _by_framework(model, optimizers[0], bakes=bakes, **how)
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


def test_gradients_stay_until_the_next_step_has_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loop's do: else free memory at the heap's end goes back to the system, and is mapped anew each step."""
    model = _net()
    step = _by_framework(model, _groups(model, ADAMW))
    grad, alive = torch.autograd.grad, list[weakref.ref[torch.Tensor]]()

    def watched(*given: Any, **more: Any) -> Any:
        assert not any(x() is not None for x in alive), "there is no room for two"
        found = grad(*given, **more)
        alive[:] = map(weakref.ref, found)
        return found

    monkeypatch.setattr(torch.autograd, "grad", watched)
    for k in range(3):
        step(*_batch(k))
        assert len(alive) == len(list(model.parameters())) and all(x() is not None for x in alive)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback of the collector
def test_interrupted_at_any_time_it_has_written_all_or_nothing() -> None:
    model = _net()
    optimizer = _groups(model, ADAMW)
    step = _by_framework(model, optimizer)
    met = interrupt(lambda k: step(*_batch(k)), lambda: everything(model, optimizer))
    assert met[False] > 20


def test_a_call_that_nobody_waits_for_any_more_changes_no_other() -> None:
    """A baseline that takes too long is left at work in its thread: it has put its own weights into the module."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            if not torch.compiler.is_compiling():
                time.sleep(0.02)
            return self.last(y.tanh())

    torch.manual_seed(0)
    model = Slow()
    batch = torch.randn(5, 6), torch.randint(0, 3, (5,))
    step = compile_step(model, nn.CrossEntropyLoss(), SGD(model.parameters(), 0.1), *batch, options=UNTUNED)
    (plan,) = step._plans.values()
    arguments = step._arguments(plan, batch)
    run = EagerStep(step._both, step._tensors()[0], plan.form, plan.traced, plan.program, arguments, 2, bakes=False)
    given = [arguments[k] for k in plan.program.arguments]
    others = [x * 2 if x.requires_grad else x for x in given]
    wanted = [run(*given), run(*others)]
    for _ in range(5):
        found: list[list[torch.Tensor]] = []
        left = threading.Thread(target=lambda: found.append(run(*others)))  # noqa: B023 - joined below
        left.start()
        mine = run(*given)
        left.join()
        for got, want in zip((mine, found[0]), wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_what_fused_kernels_take() -> None:
    x = torch.zeros(4, 6)
    assert _is_dense(x) and _is_dense(x.t()) and _is_dense(torch.zeros(())) and _is_dense(torch.zeros(0, 3))
    assert not _is_dense(x[:, ::2]) and not _is_dense(x[:1].expand(4, 6))


# as on a GPU: the learning rate is a tensor, what else is set are numbers that a recorded graph holds


class _Noting:
    """A step of the framework's; what it made to write in place is noted."""

    def __init__(self, run: EagerStep) -> None:
        self.run = run
        self.made: list[str] = []

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.run(*tensors)

    @property
    def in_place(self) -> InPlace:
        own = self.run.in_place
        assert isinstance(own, Baking)

        def held(values: Mapping[int, torch.Tensor]) -> InPlace:
            self.made.append("held")
            return own.held(values)

        def read(bound: Mapping[int, torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]) -> Any:
            self.made.append("read")
            return own.read(bound, written)

        return Baking(own.inputs, held, read)


def _noted(step: Step) -> _Noting:
    (plan,) = step._plans.values()
    assert isinstance(plan.compilation.eager, EagerStep)
    noting = _Noting(plan.compilation.eager)
    plan.compilation = replace(plan.compilation, eager=noting)
    return noting


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(_batch(seed)[0]), _batch(seed)[1]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda m: ADAMW(m.parameters(), 1e-2, weight_decay=0.1), "weight_decay", (0.2, 0.4)),
        (lambda m: ADAM(m.parameters(), 1e-2), "betas", ((0.8, 0.99), (0.7, 0.9))),
        (lambda m: SGD(m.parameters(), 0.1, momentum=0.9), "momentum", (0.5, 0.3)),
    ],
)
def test_what_is_held_is_made_anew_where_it_changed_and_a_learning_rate_is_not(
    make: Make, name: str, values: tuple[Any, Any]
) -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [make(m) for m in (model, twin)]
    step = _by_framework(model, optimizers[0], bakes=True)
    noting = _noted(step)
    for k in range(8):
        for optimizer in optimizers:
            if k in (2, 3, 6):
                optimizer.param_groups[0]["lr"] *= 0.5
            if k in (4, 6):
                optimizer.param_groups[0][name] = values[k == 6]
        step(*_batch(k))
        _trained(twin, optimizers[1], k)
        assert noting.made == ["held"] * (1 + (k >= 4) + (k >= 6))
    for one, other in zip(everything(model, optimizers[0]), everything(twin, optimizers[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_settings_that_change_all_the_time_are_read() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [ADAMW(m.parameters(), 1e-2, weight_decay=0.1) for m in (model, twin)]
    step = _by_framework(model, optimizers[0], bakes=True)
    noting = _noted(step)
    for k in range(12):
        for optimizer in optimizers:
            optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * k, 0.99)
        step(*_batch(k))
        _trained(twin, optimizers[1], k)
    assert noting.made == ["held"] * 5 + ["read"] and step.plans == 1
    for one, other in zip(everything(model, optimizers[0]), everything(twin, optimizers[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("bakes", [False, True])
def test_without_fused_kernels_nothing_is_held(bakes: bool) -> None:
    model = _net()
    step = _by_framework(model, ADAM(model.parameters(), 1e-2), bakes=bakes, clip_norm=0.5 if bakes else 0.0)
    (plan,) = step._plans.values()
    run: object = plan.compilation.eager
    assert isinstance(run, Placing)
    assert not isinstance(run.in_place, Baking)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: SGD(m.parameters(), 0.125, momentum=0.9, weight_decay=1e-3, nesterov=True),
        lambda m: ADAM(m.parameters(), 2.0**-7, weight_decay=0.1, amsgrad=True),
        lambda m: _groups(m, ADAMW),
    ],
)
def test_a_rate_that_is_a_tensor_gives_the_same_bits(make: Make) -> None:
    model = _net()
    optimizer = make(model)
    for group in optimizer.param_groups:
        group["lr"] = 2.0**-6  # the same in f32
    step = _by_framework(model, optimizer)
    (plan,) = step._plans.values()
    arguments = step._arguments(plan, _batch())
    given = [arguments[k] for k in plan.program.arguments]
    found = [
        EagerStep(
            step._both, step._tensors()[0], plan.form, plan.traced, plan.program, arguments, 2, bakes=bakes
        )(*given)
        for bakes in (False, True)
    ]  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_what_is_recorded_holds_numbers_and_reads_rates() -> None:
    model = _net()
    optimizer = SGD(model.parameters(), 0.125, momentum=0.5)
    step = _by_framework(model, optimizer, bakes=True)
    (plan,) = step._plans.values()
    run = plan.compilation.eager
    assert isinstance(run, EagerStep)
    given = [step._arguments(plan, _batch())[k].clone() for k in plan.program.arguments]
    making = run.in_place
    assert isinstance(making, Baking)
    (place,) = making.inputs
    other = [x.clone() for x in given]
    other[place][0, 0], other[place][0, 2] = 0.25, 0.0  # rate, momentum
    wanted = [x.clone() for x in given]
    wanted[place][0, 0] = 0.25
    forms = [making.held({place: given[place]})({}, []), making({}, [])]
    assert all(isinstance(form, Placed) for form in forms)
    for form, expected in zip(forms, (wanted, other), strict=True):
        assert isinstance(form, Placed)
        for x, y in zip(form.dry(*other), run(*expected), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_f64_is_as_exact_as_a_loop_though_rates_of_fused_kernels_are_f32() -> None:
    model = _net().double()
    twin = copy.deepcopy(model)
    optimizers = [ADAMW(m.parameters(), 0.1) for m in (model, twin)]
    batches = [(_batch(k)[0].double(), _batch(k)[1]) for k in range(3)]
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *batches[0], options=UNTUNED)
    (plan,) = step._plans.values()
    arguments = step._arguments(plan, batches[0])
    run = EagerStep(
        step._both, step._tensors()[0], plan.form, plan.traced, plan.program, arguments, 2, bakes=True
    )  # fmt: skip
    plan.compilation = replace(plan.compilation, plan=None, eager=run)
    for x, t in batches:
        step(x, t)
        optimizers[1].zero_grad()
        nn.functional.cross_entropy(twin(x), t).backward()
        optimizers[1].step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bakes", [False, True])
def test_state_that_lies_otherwise_than_its_weight(bakes: bool) -> None:
    model = _net()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    weight = model[0].weight
    _trained(model, optimizer, 0)
    kept = optimizer.state[weight]["momentum_buffer"]
    twin, other = copy.deepcopy((model, optimizer))
    optimizer.state[weight]["momentum_buffer"] = kept.t().contiguous().t()
    step = _by_framework(model, optimizer, bakes=bakes)
    for k in range(3):
        step(*_batch(k))
        _trained(twin, other, k)
    for one, two in zip(everything(model, optimizer), everything(twin, other), strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


def test_deterministic_operators_are_for_the_time_of_a_step() -> None:
    memory: Any = torch.utils.deterministic

    def now() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            memory.fill_uninitialized_memory,
        )

    before, workspace = now(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    benchmark = torch.backends.cudnn.benchmark
    with contextlib.suppress(KeyError), warnings.catch_warnings(action="error"), deterministic(warn_only=True):
        assert now() == (True, True, False) and torch.backends.cudnn.benchmark == benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (workspace or ":4096:8")
        warnings.warn("has no deterministic form", stacklevel=1)
        raise KeyError
    assert now() == before and os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace

    seen: list[tuple[bool, bool, bool]] = []

    class Loss(nn.CrossEntropyLoss):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            seen.append(now())
            return super().forward(x, t)

    model = _net()
    step = compile_step(model, Loss(), SGD(model.parameters(), 0.1), *_batch(), options=UNTUNED)
    (plan,) = step._plans.values()
    arguments = step._arguments(plan, _batch())
    for bakes in (True, False):
        run = EagerStep(
            step._both, step._tensors()[0], plan.form, plan.traced, plan.program, arguments, 2, bakes=bakes
        )  # fmt: skip
        seen.clear()
        run(*(arguments[k] for k in plan.program.arguments))
        assert seen == [(True, False, False) if bakes else before] and now() == before


def test_an_operator_without_a_deterministic_form_is_run_as_it_is() -> None:
    asked: list[bool] = []

    class Loss(nn.CrossEntropyLoss):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            asked.append(torch.is_deterministic_algorithms_warn_only_enabled())
            if torch.are_deterministic_algorithms_enabled() and not asked[-1]:
                raise RuntimeError("put_ does not have a deterministic implementation")
            return super().forward(x, t)

    model = _net()
    step = compile_step(model, Loss(), SGD(model.parameters(), 0.1), *_batch(), options=UNTUNED)
    (plan,) = step._plans.values()
    given = step._arguments(plan, _batch())
    run = EagerStep(step._both, step._tensors()[0], plan.form, plan.traced, plan.program, given, 2, bakes=True)
    asked.clear()
    for _ in range(2):
        run(*(given[k] for k in plan.program.arguments))
    assert asked == [False, True, True], "an error is met once"


def test_a_module_that_cannot_be_copied_is_run_as_its_graph(caplog: pytest.LogCaptureFixture) -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("there is one")

    torch.manual_seed(0)
    model = Single(6, 3)
    with caplog.at_level(logging.DEBUG, "weft"):
        step = compile_step(model, nn.CrossEntropyLoss(), SGD(model.parameters(), 0.1), *_batch(), options=UNTUNED)
    assert "is not copied" in caplog.text and "there is one" in caplog.text
    before = model.weight.detach().clone()
    assert step(*_batch()).isfinite() and not torch.equal(model.weight, before)
