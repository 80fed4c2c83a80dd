"""A compiled training step against the loop that it stands for."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.interrupts import everything, interrupt
from torch import nn
from torch._subclasses.fake_tensor import log as fake_tensor_log

import weft
from weft.errors import ExampleInputsError, ModelRaisesError, OptionError, StepError, UnsupportedError
from weft.options import Options
from weft.pipeline import answer, finish
from weft.pipeline.compile import compile_imported
from weft.training import Step, compile_step

UNTUNED = Options(budget_s=0)


def test_a_plan_is_timed_where_it_writes_as_callers_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the weights and of the optimizer's state, which each run reads and writes; nothing of the model's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    asked: dict[str, Any] = {}

    def watched(imported: Any, options: Options, **given: Any) -> Any:
        asked.update(given, imported=imported)
        return compile_imported(imported, options, **given)

    monkeypatch.setattr("weft.training.step.compile_imported", watched)
    x, t = torch.randn(5, 6), torch.randint(0, 3, (5,))
    made = compile_step(model, nn.CrossEntropyLoss(), optimizer, x, t, options=UNTUNED).compilation.executable
    weights = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(asked["replaces"]) >= 3 * len(weights), "weights and both moments"
    inputs = list(asked["example_inputs"])
    eager, replaces = asked["eager"], asked["replaces"]
    job: Any = SimpleNamespace(framework=SimpleNamespace(run=eager), imported=asked["imported"], replaces=replaces)
    before = [x.clone() for x in inputs]
    for run, executable in ((made, made), (eager, None)):
        contender = finish.Contender("any", partial(run, *inputs), 1, 0.0, executable is None, executable)
        apart = [x.clone() for x in contender.run()]
        placed = answer.placed(job, contender, inputs)
        first, second = ([x.clone() for x in placed()] for _ in range(2))
        for one, other in zip(first, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert not torch.equal(first[0], second[0]), "of the weights that the first left"
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    contender = finish.Contender("any", lambda: [x], 1, 0.0, True, None)
    job.framework.run = lambda *given: given
    assert answer.placed(job, contender, inputs) is contender.run, "it writes nothing in place"


Make = Callable[[Any], torch.optim.Optimizer]


def _net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(rows: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)


def _eager(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *inputs: torch.Tensor,
    clip: float = 0.0,
) -> torch.Tensor:
    optimizer.zero_grad()
    found = loss(model(*inputs[:-1]), inputs[-1])
    found.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return found.detach()


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: x.clone() for n, x in model.state_dict().items()}


def _close(one: nn.Module, other: nn.Module, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    for (name, x), y in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=name)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, eps=1e-6),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_follow_eager(name: str) -> None:
    model = _net().double()
    twin = copy.deepcopy(model)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, twin)]
    x, t = _batch()
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], x.double(), t, options=UNTUNED, clip_norm=0.5)
    for k in range(6):
        x, t = _batch(seed=k)
        wanted = _eager(twin, nn.CrossEntropyLoss(), optimizers[1], x.double(), t, clip=0.5)
        torch.testing.assert_close(step(x.double(), t), wanted, rtol=1e-11, atol=1e-12)
    _close(model, twin, rtol=1e-10, atol=1e-11)
    mine, own = (o.state_dict() for o in optimizers)
    assert mine["param_groups"] == own["param_groups"]
    assert mine["state"].keys() == own["state"].keys()
    for k, state in own["state"].items():
        assert mine["state"][k].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][k][key], value, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_two_groups_and_what_a_scheduler_changes() -> None:
    model = _net()
    twin = copy.deepcopy(model)

    def make(m: Any) -> torch.optim.Optimizer:
        groups = [{"params": m[0].parameters(), "lr": 0.05}, {"params": m[2].parameters(), "weight_decay": 0.1}]
        return torch.optim.SGD(groups, 0.1, momentum=0.9)

    optimizers = [make(m) for m in (model, twin)]
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.3], total_steps=8) for o in optimizers
    ]
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *_batch(), options=UNTUNED)
    rates = set()
    for k in range(6):
        step(*_batch(seed=k))
        _eager(twin, nn.CrossEntropyLoss(), optimizers[1], *_batch(seed=k))
        for scheduler in schedulers:
            scheduler.step()  # a warning, were the step unknown to it, is an error here
        rates.add(optimizers[0].param_groups[0]["lr"])
    assert len(rates) == 6
    assert step.plans == 1
    _close(model, twin)


def test_a_learning_rate_that_is_a_tensor_is_read_at_each_step() -> None:
    model = _net()
    rate = torch.tensor(0.0)
    step = compile_step(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), rate), *_batch(), options=UNTUNED
    )
    before = _state(model)
    step(*_batch())
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    rate.fill_(0.1)
    step(*_batch())
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert step.plans == 1


def test_compiling_changes_nothing() -> None:
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    before, random = _state(model), torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    del random


def test_frozen_tied_and_unused_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.idle, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, twin)]
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *_batch(), options=UNTUNED)
    for frozen in (False, True, False):
        for m in (model, twin):
            m.last.requires_grad_(not frozen)
        before = _state(model)
        for k in range(2):
            step(*_batch(seed=k))
            _eager(twin, nn.CrossEntropyLoss(), optimizers[1], *_batch(seed=k))
        assert torch.equal(model.last.weight, before["last.weight"]) == frozen
        assert torch.equal(model.idle.weight, before["idle.weight"])
        _close(model, twin)
    assert model.second.weight is model.first.weight
    assert step.plans == 2 or step.plans == 3


def test_batch_norm_and_another_batch() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    )
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    x, t = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 0])
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], x, t, options=UNTUNED)
    for rows in (4, 2, 4):
        step(x[:rows], t[:rows])
        _eager(twin, nn.CrossEntropyLoss(), optimizers[1], x[:rows], t[:rows])
    assert step.plans == 2
    assert model[1].num_batches_tracked == 3
    _close(model, twin, rtol=1e-4, atol=1e-5)
    model.eval()
    twin.eval()
    before = _state(model)
    step(x, t)
    _eager(twin, nn.CrossEntropyLoss(), optimizers[1], x, t)
    assert torch.equal(model[1].running_mean, before["1.running_mean"])
    _close(model, twin, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_framework", [False, True])
def test_weights_with_channels_last_are_read_and_written_where_they_lie(by_framework: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 2), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    own = copy.deepcopy(model)
    make: Make = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)  # noqa: E731
    optimizer, other = make(model.parameters()), make(own.parameters())
    g = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, 6, 6, generator=g).to(memory_format=torch.channels_last)
    batch, loss = (x, torch.randint(0, 36, (4,), generator=g)), nn.CrossEntropyLoss()
    step = compile_step(model, loss, optimizer, *batch, options=UNTUNED)
    if by_framework:
        (plan,) = step._plans.values()
        plan.compilation = dataclasses.replace(plan.compilation, plan=None)
        tensors, _ = step._tensors()
        run = step._eager(plan, tensors, step._arguments(plan, batch), len(batch))
        plan.compilation = dataclasses.replace(plan.compilation, eager=run)
    first = step(*batch)
    second = step(batch[0].contiguous(), batch[1])
    assert step(*batch) < second < first, "another layout of the batch is the same batch"
    torch.testing.assert_close(first, _eager(own, loss, other, *batch))
    for _ in range(2):
        _eager(own, loss, other, *batch)
    _close(model, own, rtol=1e-4, atol=1e-5)
    assert model[0].weight.stride() == own[0].weight.stride() == (27, 1, 9, 3)
    (plan,) = step._plans.values()
    assert all(a.is_contiguous() for a in step._arguments(plan, batch)), "nothing is copied"


def test_steps_that_are_not_finite_are_skipped() -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED, skip_nonfinite=True)
    step(*_batch())
    before, kept = _state(model), copy.deepcopy(optimizer.state_dict()["state"])
    x, t = _batch()
    x[2, 3] = float("nan")
    assert step(x, t).isnan()
    assert all(torch.equal(y, before[n]) for n, y in model.state_dict().items())
    for k, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, kept[k][name]) for name, value in state.items())
    assert step.skipped is not None
    assert step.skipped.item() == 1
    step(*_batch())
    assert step.skipped.item() == 1
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_without_skipping_nan_is_written_as_by_eager() -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED)
    x, t = _batch()
    x[2, 3] = float("nan")
    step(x, t)
    assert step.skipped is None
    assert model[0].weight.isnan().any()


def test_a_scaler_as_in_a_loop() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    step = compile_step(model, nn.CrossEntropyLoss(), optimizers[0], *_batch(), options=UNTUNED, scaler=scalers[0])
    for k in range(6):
        x, t = _batch(seed=k)
        if k == 3:
            x = x * float("inf")
        step(x, t)
        optimizers[1].zero_grad()
        scalers[1].scale(F.cross_entropy(twin(x), t)).backward()
        scalers[1].step(optimizers[1])
        scalers[1].update()
        assert scalers[0].state_dict() == scalers[1].state_dict(), k
        _close(model, twin)
    assert step.skipped is not None
    assert step.skipped.item() == 1


def test_state_is_taken_over_in_both_directions() -> None:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED)
    for k in range(3):
        step(*_batch(seed=k))
    kept = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    kept.seek(0)
    saved = torch.load(kept, weights_only=True)  # noqa: TID251 - how a checkpoint of a loop is read
    twin = _net(seed=7)
    other = torch.optim.AdamW(twin.parameters(), 1e-2)
    twin.load_state_dict(saved["model"])
    other.load_state_dict(copy.deepcopy(saved["optimizer"]))  # it keeps the tensors that it is given
    for k in range(3, 5):  # the loop goes on where the step was
        step(*_batch(seed=k))
        _eager(twin, nn.CrossEntropyLoss(), other, *_batch(seed=k))
    _close(model, twin)
    model.load_state_dict(saved["model"])  # and the step where it was itself
    optimizer.load_state_dict(saved["optimizer"])
    for k in range(3, 5):
        step(*_batch(seed=k))
    _close(model, twin)
    _eager(model, nn.CrossEntropyLoss(), optimizer, *_batch(seed=5))  # both by turns
    step(*_batch(seed=6))
    for k in (5, 6):
        _eager(twin, nn.CrossEntropyLoss(), other, *_batch(seed=k))
    _close(model, twin)


def _normed() -> tuple[Any, torch.optim.Optimizer, Any]:
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED)
    step(*_batch())
    return model, optimizer, step


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory")])
def test_a_step_that_fails_or_is_interrupted_writes_nothing(error: BaseException) -> None:
    model, optimizer, step = _normed()
    before = [x.clone() for x in everything(model, optimizer)]
    run: Any = step.compilation.run
    launches = list(run._launches)
    assert len(launches) > 20

    def failing() -> None:
        raise error

    for k in range(0, len(launches) - 1, 7):
        run._launches[k] = failing
        with pytest.raises(type(error)):
            step(*_batch())
        run._launches[k] = launches[k]
        assert all(torch.equal(x, y) for x, y in zip(everything(model, optimizer), before, strict=True))
    step(*_batch())
    assert not torch.equal(model[0].weight, before[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback of the collector
def test_interrupted_at_any_time_a_step_has_written_all_or_nothing() -> None:
    model, optimizer, step = _normed()
    met = interrupt(lambda k: step(*_batch(seed=k)), lambda: everything(model, optimizer))
    assert met[False] > 20
    step(*_batch())


def test_what_saved_the_old_weights_is_told_that_they_changed() -> None:
    model, _, step = _normed()
    waiting = model(_batch()[0]).sum()
    step(*_batch())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


def test_two_runs_have_the_same_bits() -> None:
    def run() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED)
        torch.manual_seed(4)
        for k in range(10):
            step(*_batch(seed=k))
        return _state(model)

    one, other = run(), run()
    assert all(torch.equal(x, other[n]) for n, x in one.items())


def test_dropout_has_one_mask_in_both_passes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4096))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.weight * x, 0.25)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    x, t = torch.ones(4096), torch.zeros(())
    step = compile_step(model, lambda y, t: y.sum() + t, optimizer, x, t, options=UNTUNED)
    torch.manual_seed(0)
    masks = []
    for _ in range(2):
        with torch.no_grad():
            model.weight.fill_(1.0)
        loss = step(x, t)
        moved = 1.0 - model.weight.detach()  # the gradient: 0 or 1 / (1 - p)
        kept = moved > 0
        torch.testing.assert_close(moved[kept], torch.full_like(moved[kept], 1 / 0.75))
        torch.testing.assert_close(loss, moved.sum(), rtol=1e-5, atol=0.0)
        assert abs(kept.float().mean() - 0.75) < 5 * (0.25 * 0.75 / 4096) ** 0.5
        masks.append(kept)
    assert 0.55 < (masks[0] == masks[1]).float().mean() < 0.70  # independent: 0.625


def test_autocast() -> None:
    model = _net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    loss = nn.CrossEntropyLoss()
    step = compile_step(model, loss, optimizers[0], *_batch(), options=UNTUNED, autocast=torch.bfloat16)
    for k in range(3):
        step(*_batch(seed=k))
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(twin(_batch(seed=k)[0]), _batch(seed=k)[1])
        optimizers[1].zero_grad()
        found.backward()
        optimizers[1].step()
    assert model[0].weight.dtype is torch.float32
    _close(model, twin, rtol=3e-2, atol=3e-3)


RESIZES: dict[str, dict[str, Any]] = {
    "twice as large": {"scale_factor": 2.0},
    "uneven": {"size": (7, 11)},
    "from the centres": {"size": (7, 11), "mode": "nearest-exact"},
    "bilinear": {"size": (9, 5), "mode": "bilinear"},
    "corners": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
}


@pytest.mark.parametrize("how", RESIZES.values(), ids=RESIZES)
def test_a_resize_is_traced_whole_and_its_gradient_has_rules(how: dict[str, Any]) -> None:
    """torch's own trace has a gather by positions for it, whose gradient adds up by positions: three took 33 ms."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(F.interpolate(self.first(x), **how)).mean((2, 3))

    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    batch = torch.randn(3, 2, 4, 6), torch.randint(0, 3, (3,))
    kernels = dict(torch.ops.aten.upsample_nearest2d.vec.py_kernels)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    step = compile_step(model, F.cross_entropy, optimizers[0], *batch, options=UNTUNED)
    for _ in range(3):
        torch.testing.assert_close(step(*batch), _eager(twin, F.cross_entropy, optimizers[1], *batch))
    _close(model, twin)
    assert not step.compilation.record.opaque
    assert kernels == torch.ops.aten.upsample_nearest2d.vec.py_kernels, "torch is as it was"


def test_the_facade() -> None:
    assert weft.compile_step is compile_step
    model = _net()
    step = compile_step(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), *_batch(), options=UNTUNED
    )
    assert isinstance(step, Step)
    assert step.record.plans
    assert step.compilation.graph.outputs


def _refused(
    error: type[Exception],
    match: str,
    *,
    model: nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    inputs: tuple[Any, ...] | None = None,
    **keywords: Any,
) -> None:
    model = model or _net()
    made = optimizer(model) if optimizer is not None else torch.optim.SGD(model.parameters(), 0.1)
    given = _batch() if inputs is None else inputs
    with pytest.raises(error, match=match):
        compile_step(model, loss or nn.CrossEntropyLoss(), made, *given, options=UNTUNED, **keywords)


def test_what_is_refused() -> None:
    _refused(StepError, "no rule for the optimizer RMSprop", optimizer=lambda m: torch.optim.RMSprop(m.parameters()))
    _refused(
        StepError, "dampening", optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.1)
    )
    _refused(
        StepError,
        r"a parameter of shape \(2,\) that is not the model's",
        optimizer=lambda m: torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1),
    )
    _refused(StepError, "requires a gradient", model=_net().requires_grad_(False))
    _refused(StepError, r"the loss is torch.float32 of shape \(5,\)", loss=nn.CrossEntropyLoss(reduction="none"))
    _refused(StepError, "the loss is a float", loss=lambda y, t: 1.0)
    _refused(StepError, "depends on no parameter", loss=lambda y, t: y.detach().sum())
    _refused(ModelRaisesError, "raises on the example inputs: RuntimeError", inputs=(torch.ones(5, 7), _batch()[1]))
    _refused(ExampleInputsError, "1 example inputs", inputs=_batch()[:1])
    _refused(ExampleInputsError, "argument 1 is a int", inputs=(_batch()[0], 3))
    _refused(OptionError, "autocast", autocast=torch.float64)
    _refused(OptionError, "clip_norm", clip_norm=-1.0)
    _refused(StepError, "input 0 is on meta", inputs=(_batch()[0].to("meta"), _batch()[1]))


def test_other_random_numbers_are_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x + torch.randn_like(x))

    _refused(UnsupportedError, "draws random numbers", model=Noisy())


def test_a_call_with_a_batch_that_does_not_fit_leaves_all_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(fake_tensor_log, "handle", lambda record: logged.append(record.getMessage()))
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = compile_step(model, nn.CrossEntropyLoss(), optimizer, *_batch(), options=UNTUNED)
    before = _state(model)
    with pytest.raises(ModelRaisesError, match="raises"):
        step(torch.ones(5, 7), _batch()[1])
    with pytest.raises(ExampleInputsError):
        step(_batch()[0])
    assert logged == [] and not fake_tensor_log.disabled, "torch's own log is not printed beside the error"
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    step(*_batch())
    assert step.plans == 1
