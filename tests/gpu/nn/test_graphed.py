"""`GraphedStep` on a real GPU: recorded training ends where the same training called step by step ends."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.typed import narrow
from torch import nn

from weft.nn import FusedMLP, GraphedStep, Sine

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
LIMIT_S = 300


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), Sine(3.0), nn.Linear(64, 64), Sine(3.0), nn.Linear(64, 2)]
    return nn.Sequential(*layers).cuda()


def batches(count: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(rows)
    found = [torch.rand(rows, 4, generator=generator, device="cuda") for _ in range(count)]
    return [(x, torch.stack([(3 * x[:, 0]).sin(), x[:, 1] * x[:, 2]], 1)) for x in found]


def trained(net: nn.Module, *, graphed: bool, scaled: bool, steps: int = 60) -> tuple[list[float], bool]:
    """(losses, whether steps were recorded); the last batch of every ten is a smaller one."""
    rate = torch.tensor(2e-3, device="cuda")
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=True, capturable=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled, init_scale=2.0**20)

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16 if scaled else torch.bfloat16):
            y = net(x)
        return (y.float() - wanted).square().mean()

    step = GraphedStep(loss, optimizer, scaler=scaler if scaled else None)
    losses, recorded = [], False
    large, small = batches(steps, 3000), batches(steps, 500)
    for number in range(steps):
        rate.fill_(2e-3 * (1 - number / steps))
        x, wanted = (small if number % 10 == 9 else large)[number]
        if graphed:
            losses.append(float(step(x, wanted)))
            recorded = step.recorded
            continue
        optimizer.zero_grad()
        value = loss(x, wanted)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(value.detach()))
    return losses, recorded


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_recorded_training_is_training(fused: bool, scaled: bool) -> None:
    make = FusedMLP if fused else (lambda net: net)
    called, _ = trained(make(network()), graphed=False, scaled=scaled)
    found, recorded = trained(make(network()), graphed=True, scaled=scaled)
    assert recorded and called[-1] < 0.5 * called[0]
    for a, b in zip(called, found, strict=True):
        assert a == pytest.approx(b, rel=2e-2, abs=1e-5)


def test_called_and_recorded_steps_share_a_module() -> None:
    net = FusedMLP(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return (net(x).float() - wanted).square().mean()

    step = GraphedStep(loss, optimizer, warmup=2)
    (x, wanted), *_ = batches(1, 2000)
    plain = copy.deepcopy(nn.Sequential(*net))
    for _ in range(8):
        step(x, wanted)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            own = net(x[:700])
            modules = nn.Sequential(*net)(x[:700])
        assert float((own - modules).norm()) < 0.02 * float(modules.norm())
    assert step.recorded
    assert all(not torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_a_step_that_waits_says_so() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    step = GraphedStep(lambda x, y: (net(x) - y).square().mean() * float(x.sum()), optimizer, warmup=1)
    (x, wanted), *_ = batches(1, 64)
    step(x, wanted)
    with pytest.raises(RuntimeError) as caught:
        step(x, wanted)
    assert any("must not wait for the device" in note for note in caught.value.__notes__)


def test_an_average_that_replays_make_is_read() -> None:
    """Of a module that nobody trains, whose parameters a replay changes without new versions."""
    net = FusedMLP(network())
    average = torch.optim.swa_utils.AveragedModel(net).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=5e-2)
    kept = list(zip(average.module.parameters(), net.parameters(), strict=True))

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mean, new in kept:
                mean.lerp_(new, 0.5)
        with torch.autocast("cuda", torch.bfloat16):
            return (net(x).float() - wanted).square().mean()

    step = GraphedStep(loss, optimizer, warmup=2)
    (x, wanted), *_ = batches(1, 2000)
    for _ in range(8):
        step(x, wanted)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            own, modules = average(x), nn.Sequential(*narrow(FusedMLP, average.module))(x)
        assert float((own - modules).norm()) < 0.02 * float(modules.norm())
    assert step.recorded


def test_a_state_that_was_replaced_is_an_error() -> None:
    net = FusedMLP(network())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True, capturable=True)

    def loss(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return (net(x).float() - wanted).square().mean()

    step = GraphedStep(loss, optimizer, warmup=2)
    (x, wanted), *_ = batches(1, 2000)
    for _ in range(4):
        step(x, wanted)
    assert step.recorded
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match="the optimizer's state was replaced"):
        step(x, wanted)
    again = GraphedStep(loss, optimizer, warmup=2)
    losses = [float(again(x, wanted)) for _ in range(20)]
    assert again.recorded and losses[-1] < losses[0]


def test_memory_is_kept_from_other_streams() -> None:
    """What a module holds is let go while another stream still uses it: the same results as of one stream."""
    (x, dy), *_ = batches(1, 60_000)
    reference = FusedMLP(network())

    def gradients(net: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            y = net(x)
        return list(torch.autograd.grad(y, list(net.parameters()), dy.to(y.dtype)))

    wanted = gradients(reference)
    side = torch.cuda.Stream()
    for _ in range(5):
        net = FusedMLP(nn.Sequential(*reference))
        gradients(net)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            found = gradients(net)
            del net
        torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")  # takes what is free
        rubbish = [torch.full((n,), 255, dtype=torch.uint8, device="cuda") for n in (1 << 12, 1 << 16, 1 << 20) * 20]
        side.synchronize()
        assert rubbish and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
