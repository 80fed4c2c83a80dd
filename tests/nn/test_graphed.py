"""Recorded training steps: on a stand-in for CUDA graphs they do what the steps do, on a host they are the steps."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.nn import emulation, recording
from tests.typed import narrow
from torch import nn

from weft.nn import FusedMLP, GraphedStep, graphed

Loss = Callable[..., torch.Tensor]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[recording.Graph]:
    recording.install(monkeypatch)
    return recording.graphs


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    return [tuple(torch.randn(rows, n, generator=generator) for n in (5, 3)) for _ in range(count)]  # type: ignore[misc]


def loss_of(net: nn.Module) -> Loss:
    return lambda x, wanted: (net(x).float() - wanted).square().mean()


def optimizer_of(net: nn.Module, rate: float | torch.Tensor = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)


class Descent(torch.optim.Optimizer):
    """With a rate that is a tensor."""

    def __init__(self, net: nn.Module, rate: torch.Tensor) -> None:
        super().__init__(net.parameters(), {"lr": rate})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def trained(net: nn.Module, given: list[tuple[torch.Tensor, torch.Tensor]], **options: Any) -> list[torch.Tensor]:
    """Losses of a loop without recording."""
    optimizer = optimizer_of(net, **options)
    losses = []
    for x, wanted in given:
        optimizer.zero_grad()
        loss = loss_of(net)(x, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    grads = [(a.grad, b.grad) for a, b in pairs]
    return all(torch.equal(a, b) for a, b in pairs) and all(
        a is not None and b is not None and torch.equal(a, b) for a, b in grads
    )


def test_a_replay_is_a_step(graphs: list[recording.Graph]) -> None:
    net, plain = network(), network()
    step = GraphedStep(loss_of(net), optimizer_of(net), warmup=2)
    given = [*batches(4), *batches(4, 7), *batches(1)]
    wanted = trained(plain, given)
    recorded = []
    for (x, y), loss in zip(given, wanted, strict=True):
        assert torch.equal(step(x, y), loss)
        recorded.append(step.recorded)
    assert same(net, plain)
    assert recorded == [False, False, True, True, False, False, True, True, True]
    assert [g.replays for g in graphs] == [3, 2]


def test_inputs_stay_where_they_are_read(graphs: list[recording.Graph]) -> None:
    net, plain = network(), network()
    step = GraphedStep(loss_of(net), optimizer_of(net), warmup=1)
    with pytest.raises(ValueError, match="there is none yet"):
        step()
    given = batches(4)
    for x, y in given[:2]:
        step(x, y)
    places = [t.data_ptr() for t in step.inputs]
    for to, x in zip(step.inputs, given[2], strict=True):
        to.copy_(x)
    step()
    step(*given[3])
    trained(plain, given)
    assert same(net, plain) and [t.data_ptr() for t in step.inputs] == places


def test_a_rate_that_is_a_tensor_may_change_and_one_that_is_a_number_may_not(graphs: list[recording.Graph]) -> None:
    net, plain = network(), network()
    given = batches(6)
    rate = torch.tensor(0.05)
    step = GraphedStep(loss_of(net), Descent(net, rate), warmup=1)
    other = torch.optim.SGD(plain.parameters(), lr=1.0)
    for number, (x, y) in enumerate(given):
        rate.fill_(0.05 / (1 + number))
        step(x, y)
        other.param_groups[0]["lr"] = 0.05 / (1 + number)
        other.zero_grad()
        loss_of(plain)(x, y).backward()
        other.step()
    assert graphs[0].replays == 5
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    fixed = optimizer_of(net, 0.1)
    step = GraphedStep(loss_of(net), fixed, warmup=1)
    step(*given[0])
    step(*given[1])
    before = [p.clone() for p in net.parameters()]
    fixed.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match=r"lr of group 0 was 0\.1 when the step was recorded and is 0\.01 now"):
        step(*given[2])
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    fixed.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(ValueError, match="lr of group 0 is another tensor"):
        step(*given[2])


def test_the_value_of_a_rate_on_the_host_is_part_of_a_recording(
    graphs: list[recording.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, given, rate = network(), batches(3), torch.tensor(0.25)
    step = GraphedStep(loss_of(net), Descent(net, rate), warmup=1)
    monkeypatch.setattr(graphed, "on_gpu", lambda x: x.dim() > 0)
    step(*given[0])
    step(*given[1])
    rate.fill_(0.125)
    with pytest.raises(ValueError, match=r"lr of group 0 was 0\.25 when the step was recorded and is 0\.125 now"):
        step(*given[2])


def test_what_lies_elsewhere_is_an_error(graphs: list[recording.Graph]) -> None:
    net, given = network(), batches(3)
    optimizer = optimizer_of(net)
    step = GraphedStep(loss_of(net), optimizer, warmup=1)
    step(*given[0])
    step(*given[1])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match="the optimizer's state was replaced"):
        step(*given[2])
    step = GraphedStep(loss_of(net), optimizer, warmup=1)
    step(*given[0])
    step(*given[1])
    net.get_parameter("0.weight").data = net.get_parameter("0.weight").data.clone()
    with pytest.raises(ValueError, match="parameters lie elsewhere"):
        step(*given[2])
    with pytest.raises(ValueError, match="an input requires gradients"):
        step(given[0][0].requires_grad_(), given[0][1])


def recorded(net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> GraphedStep:
    """A step that was."""
    step = GraphedStep(loss_of(net), optimizer, warmup=1, **options)
    for batch in batches(2):
        step(*batch)
    assert step.recorded
    return step


def unchanged(net: nn.Module, step: GraphedStep, message: str) -> None:
    """The next step is refused and changes nothing."""
    before = [p.clone() for p in net.parameters()]
    for batch in (batches(1)[0], ()):
        with pytest.raises(ValueError, match=message):
            step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_state_that_was_replaced_is_an_error(graphs: list[recording.Graph]) -> None:
    net = network()
    optimizer = optimizer_of(net)
    step = recorded(net, optimizer)
    state = optimizer.state[net.get_parameter("2.bias")]
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    unchanged(net, step, "the optimizer's state was replaced")
    step = recorded(net, optimizer)
    optimizer.state.clear()
    unchanged(net, step, "the optimizer's state was replaced")
    step = recorded(net, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # the same tensors
    step(*batches(1)[0])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    unchanged(net, step, "the optimizer's state was replaced")


def test_parameters_that_come_later_are_trained_or_an_error(graphs: list[recording.Graph]) -> None:
    net, plain = network(), network()
    given = batches(4)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.05, momentum=0.9)
    step = GraphedStep(loss_of(net), optimizer, warmup=1)
    optimizer.add_param_group({"params": list(net[2].parameters())})
    for batch in given:
        step(*batch)
    trained(plain, given)
    assert step.recorded and same(net, plain)
    more = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [more]})
    unchanged(net, step, "the optimizer has other groups")
    optimizer.param_groups.pop()
    step(*given[0])
    optimizer.param_groups[0]["params"].append(more)
    unchanged(net, step, "the optimizer has other parameters")


def test_parameters_that_are_frozen_later_are_an_error(graphs: list[recording.Graph]) -> None:
    net = network()
    step = recorded(net, optimizer_of(net))
    net[0].requires_grad_(False)
    unchanged(net, step, "whether parameters require gradients is another")
    net[0].requires_grad_(True)
    step(*batches(1)[0])


def test_groups_that_cannot_be_recorded_are_refused_when_they_come_later(graphs: list[recording.Graph]) -> None:
    net = network()
    optimizer = optimizer_of(net)
    step = GraphedStep(loss_of(net), optimizer, warmup=1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "capturable": False})
    step(*batches(1)[0])
    with pytest.raises(ValueError, match="group 1 of SGD cannot be recorded"):
        step(*batches(1)[0])


class Counting(torch.optim.SGD):
    """Steps are counted on the host, and the rate falls with them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.data.sub_(p.grad, alpha=group["lr"] / count)


def test_an_optimizer_that_counts_on_the_host_is_refused(graphs: list[recording.Graph]) -> None:
    net = network()
    step = GraphedStep(loss_of(net), Counting(net.parameters(), lr=0.1), warmup=1)
    step(*batches(1)[0])
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match="Counting keeps its 'count' on the host"):
        step(*batches(1)[0])
    assert not step.recorded and all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_numbers_of_a_scaler_are_part_of_a_recording(graphs: list[recording.Graph]) -> None:
    net = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    step = recorded(net, optimizer, scaler=scaler)
    scaler.update(512.0)
    step(*batches(1)[0])
    scaler.set_growth_factor(4.0)
    unchanged(net, step, r"the scaler's growth factor was 2\.0 when the step was recorded")


@pytest.mark.slow
def test_an_average_that_replays_make_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of parameters: torch says nothing of what a replay writes to them."""
    emulation.install(monkeypatch)
    recording.install(monkeypatch)
    net = FusedMLP(network().half())
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda mean, new, count: mean + 0.5 * (new - mean))
    average.requires_grad_(False)

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            average.module.get_parameter("0.weight").lerp_(net.get_parameter("0.weight"), 0.5)
        return loss_of(net)(x, wanted)

    step = GraphedStep(loss, optimizer_of(net, 0.5), warmup=1)
    seen = []
    for x, wanted in [(x.half(), y) for x, y in batches(5)]:
        step(x, wanted)
        with torch.no_grad():
            found, modules = average(x), nn.Sequential(*copy.deepcopy(narrow(FusedMLP, average.module)))(x)
        torch.testing.assert_close(found, modules, rtol=5e-3, atol=2e-3)
        seen.append(average.module.get_parameter("0.weight").clone())
    assert step.recorded and all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert narrow(FusedMLP, average.module).why_not(batches(1)[0][0].half()) is None


def test_a_step_that_waits_for_the_device_is_not_recorded(graphs: list[recording.Graph]) -> None:
    net, given = network(), batches(2)
    step = GraphedStep(lambda x, y: loss_of(net)(x, y) * float(x.sum().item() > -1e9), optimizer_of(net), warmup=1)
    step(*given[0])
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing") as caught:
        step(*given[1])
    assert any("must not wait for the device" in note for note in caught.value.__notes__)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_optimizers_that_cannot_be_recorded_are_refused(graphs: list[recording.Graph]) -> None:
    net = network()
    with pytest.raises(ValueError, match="group 0 of Adam cannot be recorded: make the optimizer with capturable=True"):
        GraphedStep(loss_of(net), torch.optim.Adam(net.parameters()))
    with pytest.raises(ValueError, match="warmup=0"):
        GraphedStep(loss_of(net), optimizer_of(net), warmup=0)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="SGD waits for the device under a gradient scaler: make it with fused=True"):
        GraphedStep(loss_of(net), optimizer_of(net), scaler=scaler)
    GraphedStep(loss_of(net), optimizer_of(net), scaler=torch.amp.GradScaler("cpu", enabled=False))


def test_few_shapes_are_recorded(graphs: list[recording.Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "KEPT_GRAPHS", 1)
    net, plain = network(), network()
    given = [b for _ in range(3) for rows in (4, 6) for b in batches(1, rows)]
    step = GraphedStep(loss_of(net), optimizer_of(net), warmup=1)
    recorded = [step(*b) is not None and step.recorded for b in given]
    trained(plain, given)
    assert same(net, plain) and len(graphs) == 1
    assert recorded == [False, False, True, False, True, False]


@pytest.mark.parametrize("scaled", [False, True])
def test_on_a_host_it_is_the_step(scaled: bool) -> None:
    net, plain, given = network(), network(), batches(6)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    step = GraphedStep(loss_of(net), optimizer, scaler=scaler, warmup=1)
    other = torch.optim.Adam(plain.parameters(), lr=0.01, fused=True)
    for x, y in given:
        loss = step(x, y)
        other.zero_grad()
        wanted = loss_of(plain)(x, y)
        wanted.backward()
        other.step()
        torch.testing.assert_close(loss, wanted.detach())
    assert not step.recorded and step.inputs == ()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_network_in_kernels_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation.install(monkeypatch)
    recording.install(monkeypatch)
    net = FusedMLP(network().half())
    plain = copy.deepcopy(nn.Sequential(*net)).float()
    given = [(x.half(), y) for x, y in batches(5)]
    step = GraphedStep(loss_of(net), optimizer_of(net), warmup=1)
    losses = [step(x, y).clone() for x, y in given]
    assert net.why_not(given[0][0]) is None and recording.graphs[0].replays == 4
    assert len(emulation.launched) > 5
    wanted = trained(plain, [(x.float(), y) for x, y in given])
    for a, b in zip(losses, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-3)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=4e-3)
    recorded = step(*given[0]).clone()
    with torch.no_grad():
        again = net(given[0][0])
    assert torch.isfinite(recorded) and torch.isfinite(again).all()


@pytest.mark.slow
def test_a_loss_of_slopes_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation.install(monkeypatch)
    recording.install(monkeypatch)
    base = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1)).half()
    net, plain = FusedMLP(copy.deepcopy(base)), copy.deepcopy(base).float()

    def loss_for(of: nn.Module, dtype: torch.dtype) -> Loss:
        def loss(at: torch.Tensor) -> torch.Tensor:
            at = at.detach().to(dtype).requires_grad_()
            value = of(at).float()
            (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
            return (value - 0.3).abs().mean() + 0.05 * (slope.float().norm(dim=1) - 1).square().mean()

        return loss

    step = GraphedStep(loss_for(net, torch.float16), torch.optim.SGD(net.parameters(), lr=0.05), warmup=2)
    other = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(4):
        at = torch.randn(12, 3)
        found = step(at).clone()
        other.zero_grad()
        wanted = loss_for(plain, torch.float32)(at)
        wanted.backward()
        other.step()
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-2, atol=1e-3)
    assert step.recorded
