"""`FusedMLP` as a whole on a host that stands in for a GPU: kernels run by emulation, in calls of every kind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.nn import emulation
from tests.slow import few
from torch import nn

from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.nn import FusedMLP, fused_mlp, kernels
from weft.nn.layers import Layers

ROWS = 37


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With autocast to bfloat16."""
    emulation.install(monkeypatch)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def network(act: nn.Module | None = None) -> FusedMLP:
    torch.manual_seed(0)
    act = act or nn.ReLU()
    net = nn.Sequential(nn.Linear(5, 24), act, nn.Linear(24, 16, bias=False), act, nn.Linear(16, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.bfloat16())
    return FusedMLP(net)


def inputs(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, generator=generator).bfloat16().float()
    return x, torch.randn(rows, 3, generator=generator).bfloat16()


def exact(net: FusedMLP, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Result, gradient of x, gradients of the parameters, in float64."""
    double = nn.Sequential(*copy.deepcopy(nn.Sequential(*net)).double())
    point = x.detach().double().requires_grad_()
    y = double(point)
    return [y.detach(), *torch.autograd.grad(y, [point, *double.parameters()], dy.double())]


def near(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    assert found is not None
    return float((found.detach().double() - wanted).norm()) <= 2e-2 * float(wanted.norm()) + 1e-6


def step(net: FusedMLP, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor | None]:
    net.zero_grad()
    x = x.detach().requires_grad_()
    y = net(x)
    y.backward(dy)
    return [y, x.grad, *(p.grad for p in net.parameters())]


def launches() -> list[str]:
    """What was launched since, by its part; a forward kernel is `run`."""
    found = [e.rsplit("_", 1)[1] if "_" in e else "run" for e in emulation.launched]
    emulation.launched.clear()
    return found


@pytest.mark.parametrize("act", few([nn.ReLU(), nn.SiLU()], 1), ids=repr)
def test_steps_are_right_and_launch_six_kernels_at_most(act: nn.Module) -> None:
    net = network(act)
    x, dy = inputs()
    assert net.why_not(x) is None and net.why_no_fused_backward(x) is None
    for rows in (ROWS, 8, ROWS):
        x, dy = inputs(rows)
        wanted = exact(net, x, dy)
        assert all(near(a, b) for a, b in zip(step(net, x, dy), wanted, strict=True))
        launches()
        assert all(near(a, b) for a, b in zip(step(net, x, dy), wanted, strict=True))
        assert launches() == ["pack", "run", "pack", "chain", "sums", "finish"]


def test_what_a_silent_optimizer_writes_is_read() -> None:
    net, (x, dy) = network(), inputs()
    for factor in (2.0, -1.0, 0.5):
        versions = [p._version for p in net.parameters()]
        for p in net.parameters():
            p.data.mul_(factor)
        assert [p._version for p in net.parameters()] == versions
        assert all(near(a, b) for a, b in zip(step(net, x, dy), exact(net, x, dy), strict=True))


def test_parameters_that_lie_elsewhere_are_read_there() -> None:
    net, (x, dy) = network(), inputs()
    step(net, x, dy)
    for p in net.parameters():
        p.data = p.data.clone() * 2
    assert all(near(a, b) for a, b in zip(step(net, x, dy), exact(net, x, dy), strict=True))
    wanted = exact(net, x, dy)
    net.zero_grad()
    y = net(x)
    old = [p.data for p in net.parameters()]
    for p in net.parameters():
        p.data = p.data.clone()
    for t in old:
        t.fill_(float("nan"))
    y.backward(dy)
    assert all(near(p.grad, g) for p, g in zip(net.parameters(), wanted[2:], strict=True))
    turned = net.get_parameter("4.weight").detach().t().contiguous().t()
    net.get_parameter("4.weight").data = turned
    assert all(near(a, b) for a, b in zip(step(net, x, dy), exact(net, x, dy), strict=True))


def test_backward_passes_take_the_parameters_of_their_forward_pass() -> None:
    net, (x, dy) = network(), inputs()
    step(net, x, dy)
    first, wanted = [net.get_parameter("0.weight"), net.get_parameter("0.bias")], exact(net, x, dy)
    one = net(x)
    net[0] = nn.Linear(5, 24)
    with torch.no_grad():
        for p in net[0].parameters():
            p.copy_(p.bfloat16())
    other = exact(net, x, dy)
    two = net(x)
    found = torch.autograd.grad(one, first, dy)
    assert near(found[0], wanted[2]) and near(found[1], wanted[3])
    assert near(two, other[0])
    assert all(near(a, b) for a, b in zip(torch.autograd.grad(two, list(net.parameters()), dy), other[2:], strict=True))


def test_parameters_that_nobody_trains_are_read_when_they_change() -> None:
    net, (x, dy) = network().requires_grad_(requires_grad=False), inputs()
    assert near(net(x), exact(net.requires_grad_(), x, dy)[0])
    net.requires_grad_(requires_grad=False)
    net(x)
    launches()
    net(x)
    assert launches() == ["run"]
    net.get_parameter("0.bias").add_(1)
    found = net(x)
    assert launches() == ["pack", "run"]
    net.get_parameter("0.bias").data.add_(1)
    assert torch.equal(net(x), found)
    net.refresh()
    assert not torch.equal(net(x), found)


@pytest.mark.slow
def test_what_a_call_was_judged_by_is_looked_at_every_time() -> None:
    net, (x, dy) = network(), inputs()
    assert near(net(x), exact(net, x, dy)[0])
    for act in (nn.LeakyReLU(0.1), nn.ReLU()):
        net[1] = act
        assert near(net(x), exact(net, x, dy)[0])
    net[1] = nn.LeakyReLU(0.1)
    net[1].negative_slope = 0.5  # type: ignore[assignment]
    assert near(net(x), exact(net, x, dy)[0])
    launches()
    seen: list[int] = []
    handle = net[2].register_forward_hook(lambda *a: seen.append(1))
    launches()
    net(x)
    assert seen == [1] and not launches()
    handle.remove()
    net(x)
    assert "run" in launches()
    torch.set_autocast_enabled("cuda", False)
    assert net(x).dtype is torch.float32 and not launches()
    torch.set_autocast_enabled("cuda", True)
    assert net(x).dtype is torch.bfloat16 and launches()
    with torch.no_grad():
        assert net(x).grad_fn is None
    assert net(x).grad_fn is not None
    net.half()
    assert net(x).dtype is torch.bfloat16
    assert net.double()(x.double()).dtype is torch.float64


def test_shapes_and_memory_of_inputs() -> None:
    net, (x, dy) = network(), inputs(8)
    wanted = exact(net, x, dy)[0]
    assert near(net(x.view(2, 4, 5)).view(8, 3), wanted) and net(x.view(2, 4, 5)).shape == (2, 4, 3)
    across = x.t().contiguous().t()
    assert near(net(across), wanted) and near(net(x), wanted) and near(net(across), wanted)
    room = torch.zeros(8 * 5 + 1)
    room[1:] = x.view(-1)
    assert near(net(room[1:].view(8, 5)), wanted)
    assert net.why_not(x[:, :4]) is not None and net.why_not(x[:0]) == "0 rows"
    assert net(x[:0]).shape == (0, 3)


@pytest.mark.slow
def test_threads_take_turns() -> None:
    failures: list[Any]
    net, failures = network(), []
    cases = {rows: (inputs(rows), exact(net, *inputs(rows))) for rows in (8, ROWS)}
    for (x, dy), _ in cases.values():
        step(net, x, dy)

    def work(rows: int) -> None:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        (x, dy), wanted = cases[rows]
        for _ in range(3):
            leaf = x.detach().requires_grad_()
            y = net(leaf)
            found = [y, *torch.autograd.grad(y, [leaf, *net.parameters()], dy)]
            failures.extend(rows for a, b in zip(found, wanted, strict=True) if not near(a, b))

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (*cases, *cases)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_rows_in_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (x, dy) = network(), inputs()
    whole = step(net, x, dy)
    (run,) = [r for r in net._images._runs.values() if isinstance(r, fused_mlp._Run)]
    (call,) = run._backs.values()
    monkeypatch.setattr(kernels, "KEPT_BYTES", 1)
    run.kernels._backwards.clear()
    run._backs.clear()
    again = step(net, x, dy)
    (parts,) = run._backs.values()
    # three parts of 16 rows, each its chain and its sums, which the last adds up
    assert len(call._launches) == 3 and len(parts._launches) == 7 and parts.scratch_bytes < call.scratch_bytes
    for a, b in zip(again, whole, strict=True):
        assert a is not None and b is not None
        assert near(a, b.detach().double())


def test_calls_that_are_kept_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_mlp, "KEPT_CALLS", 1)
    net = network()
    for rows in (8, ROWS, 8):
        x, dy = inputs(rows)
        assert all(near(a, b) for a, b in zip(step(net, x, dy), exact(net, x, dy), strict=True))
    (run,) = [r for r in net._images._runs.values() if isinstance(r, fused_mlp._Run)]
    assert len(net._images.calls) == len(run._calls) == len(run._backs) == 1


def test_what_is_refused_later_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation.install(monkeypatch, emulation.judge(emulation.Worker(_finish="half")))
    net, (x, dy) = network(), inputs()
    net(x)
    wanted = exact(net, x, dy)
    with pytest.warns(UserWarning, match="Weft: no kernel for gradients of 37 rows was found right: unwritten"):
        found = step(net, x, dy)
    assert all(near(a, b) for a, b in zip(found, wanted, strict=True))
    why = net.why_no_fused_backward(x)
    assert why is not None and why.startswith("no kernel for gradients of 37 rows was found right: unwritten: ")
    launches()
    assert all(near(a, b) for a, b in zip(step(net, x, dy), wanted, strict=True))
    assert not launches()


def test_the_stand_in_has_the_network() -> None:
    known = network()._known()
    assert not isinstance(known, Declined) and isinstance(known.layers, Layers)
    assert known.layers.widths == (5, 24, 16, 3) and DType.BF16 in kernels.DTYPES.values()
