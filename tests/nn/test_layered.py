"""Wide networks through `FusedMLP`'s engine, on a host whose device is the emulation of kernels."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.nn.emulation import TRUSTING, Compiler, Worker, install, judge, launched
from tests.nn.emulation import made as kernels_made
from tests.slow import few
from tests.typed import noting
from torch import nn

from weft.device.cuda.facts import profile
from weft.generate.cuda.training import Activation, Network
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.nn import FusedMLP, FusedNetwork, fused_mlp, kernels, layered
from weft.nn.autograd import fused
from weft.nn.layers import Layers, layers_of


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    every = layered.candidates
    monkeypatch.setattr(layered, "TRIED", 12)
    # one of each product, with sums of columns where a template has them
    monkeypatch.setattr(layered, "candidates", lambda *a: sorted(every(*a), key=lambda x: -x[1])[:1])


def _run(net: nn.Sequential, dtype: torch.dtype, given: torch.dtype, *, masters: bool) -> fused_mlp._Run:
    layers = layers_of(list(net))
    assert isinstance(layers, Layers)
    wide = DType.F32 if masters else None
    types = kernels.DTYPES
    network = Network(layers.widths, layers.acts, layers.biases, types[dtype], types[given], wide)
    made = kernels_made(network)
    return fused_mlp._Run(made, layers, dtype)


def _gradients(y: torch.Tensor, x: torch.Tensor, net: nn.Module, dy: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, [x, *net.parameters()], dy.to(y.dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "act", "masters"),
    few(
        [((3, 40, 24), nn.ReLU(), True), ((24, 16, 37, 5), nn.SiLU(), False), ((300, 112, 8), nn.Tanh(), True)],
        1,
        unpack=True,
    ),
)
def test_gradients_of_wide_layers(
    emulated: None, monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], act: nn.Module, masters: bool
) -> None:
    if max(widths) < 300:
        monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    torch.manual_seed(1)
    modules: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        modules += [nn.Linear(a, b), act]
    net = nn.Sequential(*modules)
    dtype = torch.float16
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.to(dtype))
    net = net if masters else net.to(dtype)
    x = torch.randn(13, widths[0]).to(dtype).to(torch.float32 if masters else dtype).requires_grad_()
    dy = torch.randn(13, widths[-1]).to(dtype)
    run = _run(net, dtype, x.dtype, masters=masters)
    assert run.kernels.training_refused(13) is None
    y, found = torch.empty(0), list[torch.Tensor]()
    for _ in range(2):
        y = fused(run, x, list(net.parameters()))
        found = _gradients(y, x, net, dy)
    assert run.kernels.training_refused(13) is None
    layers = run.kernels.by_layers()
    assert layers is not None
    assert any(x.sum_rows for x in layers._chosen.values() if isinstance(x, layered.Chosen))
    assert y.dtype is dtype and all(g.dtype is p.dtype for g, p in zip(found, [x, *net.parameters()], strict=True))
    double = copy.deepcopy(net).double()
    point = x.detach().double().requires_grad_()
    wanted = _gradients(double(point), point, double, dy)
    torch.testing.assert_close(y.detach().double(), double(point).detach(), rtol=2e-2, atol=4e-3)
    for got, right in zip(found, wanted, strict=True):
        assert float((got.double() - right).norm()) < 4e-3 * float(right.norm()) + 1e-6
    alone = torch.autograd.grad(fused(run, x, list(net.parameters())), x, dy)[0]
    assert torch.equal(alone, found[0])
    (slope,) = torch.autograd.grad(fused(run, x, list(net.parameters())), x, dy, create_graph=True)
    assert torch.equal(slope, found[0])
    second = torch.autograd.grad(slope.float().square().sum(), net.get_parameter("0.weight"))[0]
    (again,) = torch.autograd.grad(double(point), point, dy.double(), create_graph=True)
    wanted_second = torch.autograd.grad(again.square().sum(), double.get_parameter("0.weight"))[0]
    assert float((second.double() - wanted_second).norm()) < 2e-2 * float(wanted_second.norm()) + 1e-6


@pytest.mark.parametrize("masters", few([False, True], 1))
def test_every_kernel_of_a_step_by_layers_passes_the_gate(
    emulated: None, monkeypatch: pytest.MonkeyPatch, masters: bool
) -> None:
    """Products, with sums of columns where one leaves them, and what stands beside them, under poison and guards."""
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    worker = Worker()
    own = judge(worker)
    found: list[object] = []
    judged = own.judged

    def judging(trials: Any) -> Any:
        won = judged(trials)
        found.extend(won)
        return won

    monkeypatch.setattr(own, "judged", judging)
    wide = DType.F32 if masters else None
    acts = (Activation("silu"), Activation("relu"), Activation("tanh"))
    net = Network((5, 16, 11, 3), acts, (True, False, True), DType.F16, DType.F32 if masters else DType.F16, wide)
    layers = kernels_made(net, own).by_layers()
    assert layers is not None
    x = torch.randn(9, 5).to(torch.float32 if masters else torch.float16)
    parameters = [torch.randn(p.shape).to(torch.float32 if masters else torch.float16) for p in net.slices()]
    addresses, memory = [p.data_ptr() for p in parameters], layered.Memory()
    forward = layers.forward(x, addresses, memory, 1)
    assert not isinstance(forward, Declined), forward
    sums = torch.empty(net.elements, dtype=torch.float32)
    dx, dy = torch.empty_like(x), torch.randn(9, 3).half()
    assert layers.backward(dy, x, forward[1], addresses, memory, 1, dx, sums, DType.F32) is None
    assert len(found) >= 12 and not any(isinstance(x, Declined) for x in found)
    said = {str(m["problem"]["key"]).splitlines()[0] for m in worker.messages if m["op"] == "trial"}  # type: ignore[call-overload,index]
    assert said >= {"image of weights", "values side by side", "end of a backward pass", "gradients of biases"}


@pytest.mark.slow
@pytest.mark.parametrize("part", few(["_pack", "_columns", "_ending"], 1))
def test_a_kernel_beside_products_that_fails_in_the_worker_is_not_launched(
    emulated: None, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    net = Network((8, 16, 3), (Activation("relu"), Activation()), (True, True), DType.F16, DType.F16)
    layers = kernels_made(net, judge(Worker(**{part: "dies"}))).by_layers()
    assert layers is not None
    x = torch.randn(9, 8).half()
    parameters = [torch.randn(p.shape).half() for p in net.slices()]
    addresses, memory = [p.data_ptr() for p in parameters], layered.Memory()
    beside: list[str] = []
    launch = layered.Beside.launch
    monkeypatch.setattr(layered.Beside, "launch", noting(lambda self, e, *a: beside.append(e.name), launch))

    def step() -> object:
        forward = layers.forward(x, addresses, memory, 1)
        if isinstance(forward, Declined):
            return forward
        sums, dy = torch.empty(net.elements).half(), torch.randn(9, 3).half()
        return layers.backward(dy, x, forward[1], addresses, memory, 1, None, sums, DType.F16)

    with pytest.warns(UserWarning, match="no kernel for what stands beside the products of 9 rows was found right"):
        refused = step()
    assert isinstance(refused, Declined) and "poisoned" in refused.reason
    assert not any(e.endswith(part) for e in beside) or (part == "_pack" and not beside)


class Joined(nn.Module):
    """Two inputs, values side by side, one that two layers read and one that is added, at odd widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(11, 24), nn.Linear(24, 24)
        self.third, self.fourth = nn.Linear(24 + 11, 19), nn.Linear(19 + 5 + 24, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = torch.tanh(self.first(x))
        two = torch.relu(self.second(one) + one)
        three = self.third(torch.cat([two, x], -1))
        four = nn.functional.silu(self.fourth(torch.cat([three, y, one], -1)))
        result: torch.Tensor = torch.sigmoid(self.last(four))
        return result


class Residual(nn.Module):
    """Values that are added behind activations, to the last layer too; columns of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16 + 6, 16)
        self.fourth = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x[..., :16]
        one = torch.relu(self.first(given)) + given
        two = nn.functional.gelu(self.second(one)) + one
        three = torch.sigmoid(self.third(torch.cat([two, x[..., 16:]], -1))) + two
        result: torch.Tensor = torch.tanh(self.fourth(three)) + three
        return result


class Linearly(nn.Module):
    """A value without activation that is read and added by one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(9, 13), nn.Linear(13, 8), nn.Linear(8 + 9, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.sin(self.first(x))
        two = self.second(one)
        result: torch.Tensor = self.third(torch.cat([x, two], -1)) + two
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "widths"), few([(Residual, (22,)), (Joined, (11, 5)), (Linearly, (9,))], 1, unpack=True)
)
@pytest.mark.parametrize("inputs", few([True, False], 1))
def test_gradients_of_skips_by_layers(
    emulated: None, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], widths: tuple[int, ...], inputs: bool
) -> None:
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    monkeypatch.setattr(torch, "empty_like", lambda x, **o: torch.full_like(x, torch.nan, **o))  # as memory may be
    torch.manual_seed(2)
    module = kind().half()
    net = FusedNetwork(module)
    points = [torch.randn(37, n).half().requires_grad_(inputs) for n in widths]
    assert net.why_not(*points) is None and net.why_no_fused_backward(*points) is None
    leaves = [*(points if inputs else []), *module.parameters()]
    dy = torch.randn_like(module(*points))
    ran: list[str] = []
    plain = layered.Chosen.run
    monkeypatch.setattr(layered.Chosen, "run", noting(lambda *a: ran.append(""), plain))
    y, found = torch.empty(0), tuple[torch.Tensor, ...]()
    for _ in range(2):
        y = net(*points)
        found = torch.autograd.grad(y, leaves, dy)
    assert net.why_no_fused_backward(*points) is None
    assert len(ran) > 2 * 3 * len(list(module.children())) - 3
    double = copy.deepcopy(module).double()
    exact = [p.detach().double().requires_grad_(inputs) for p in points]
    truth = double(*exact)
    wanted = torch.autograd.grad(truth, [*(exact if inputs else []), *double.parameters()], dy.double())
    torch.testing.assert_close(y.detach().double(), truth.detach(), rtol=1e-2, atol=4e-3)
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b).norm()) < 4e-3 * float(b.norm()) + 1e-6


@pytest.mark.slow
def test_wrong_gradients_and_slow_passes_are_refused(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half()
    x = torch.randn(9, 16).half().requires_grad_()
    run = _run(net, torch.float16, torch.float16, masters=False)
    monkeypatch.setattr(fused_mlp, "contest", lambda ways: [2.0, 1.0])
    fused(run, x, list(net.parameters())).sum().backward()
    refused = run.kernels.training_refused(9)
    assert refused is not None and "faster one by one for 9 rows" in refused.reason
    assert run.kernels.training_refused(10) is None
    other = _run(net, torch.float16, torch.float16, masters=False)
    monkeypatch.setattr(layered.ByLayers, "_weights", lambda self, *a: a[-1].fill_(7.0))
    with pytest.warns(UserWarning, match="no kernel for a step by layers of 9 rows was found right: integers, output"):
        fused(other, x, list(net.parameters())).sum().backward()
    refused = other.kernels.training_refused(9)
    assert refused is not None and "found right" in refused.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "best"),
    few([((1.0, 3.0, 2.0), "layers"), ((2.0, 3.0, 1.0), "chain"), ((2.0, 1.0, 3.0), "torch")], 1, unpack=True),
)
def test_the_fastest_way_to_train_is_taken(
    emulated: None, monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], best: str
) -> None:
    monkeypatch.setattr(kernels, "CONTESTED", 16)
    monkeypatch.setattr(fused_mlp, "CONTESTED_ROWS", 8)
    net = FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    plain = copy.deepcopy(nn.Sequential(*net))
    contests: list[int] = []

    def contest(ways: list[Callable[[], object]]) -> list[float]:
        contests.append(0)
        for way in ways:
            way()
        return list(times)

    monkeypatch.setattr(fused_mlp, "contest", contest)
    x = torch.randn(9, 16).half()
    wanted = torch.autograd.grad(plain(x).float().square().sum(), list(plain.parameters()))
    products: list[str] = []
    run = layered.Chosen.run
    for step in range(3):
        found = torch.autograd.grad(net(x).float().square().sum(), list(net.parameters()))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        if not step:  # what comes after the contest
            monkeypatch.setattr(layered.Chosen, "run", noting(lambda *a: products.append(""), run))
            launched.clear()
    assert len(contests) == 1
    assert bool(products) == (best == "layers")
    assert any(e.endswith("_chain") for e in launched) == (best == "chain")
    reason = net.why_no_fused_backward(x)
    assert reason is None if best != "torch" else reason is not None and "faster one by one for 9 rows" in reason
    with torch.no_grad():
        assert net.why_not(x) is None
    assert net.why_no_fused_backward(x[:8]) is None
    products.clear()
    monkeypatch.setattr(fused_mlp, "CONTESTED_ROWS", 9)
    net(x[:8]).sum().backward()  # too few to be measured: by one kernel
    assert not products and launched[-1].endswith("_finish")


@pytest.mark.slow
def test_a_kernel_that_is_sure_to_lose_is_not_compiled(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def sure(width: int, rows: int, facts: Any = None) -> bool:
        acts = (*(Activation("relu"),) * 3, Activation())
        net = Network((width,) * 5, acts, (True,) * 4, DType.BF16, DType.F32, DType.F32)
        found = kernels.Kernels(net, facts or profile("h200"), Compiler(), TRUSTING)  # type: ignore[arg-type]
        return found.surely_by_layers(rows)

    # measured: 1852 us against 1151, 1354 against 895, 439 against 583, 118 against 76 from graphs
    assert [sure(256, 1 << 18), sure(192, 1 << 18), sure(128, 1 << 18), sure(256, 1 << 12)] == [True, *[False] * 3]
    assert not sure(256, 1 << 18, replace(profile("h200"), peak_bandwidth=0.0))
    monkeypatch.setattr(kernels, "CONTESTED", 16)
    monkeypatch.setattr(fused_mlp, "CONTESTED_ROWS", 8)
    monkeypatch.setattr(kernels.Kernels, "surely_by_layers", lambda *a: True)
    built: list[str] = []
    monkeypatch.setattr(kernels.Kernels, "_built", lambda *a: built.append(""))
    monkeypatch.setattr(fused_mlp, "contest", lambda ways: [2.0, 3.0])  # by layers, and by torch
    net = FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    net(torch.randn(9, 16).half()).sum().backward()
    (run,) = net._images._runs.values()
    assert isinstance(run, fused_mlp._Run)
    assert not built and run.kernels.ways == {(9, False, True): True}
    assert run.kernels.times == {(9, False, True): (2.0, float("inf"), 3.0)}


def test_layers_that_are_wrong_lose_the_contest(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CONTESTED", 16)
    monkeypatch.setattr(fused_mlp, "CONTESTED_ROWS", 8)
    net = FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    monkeypatch.setattr(layered.ByLayers, "_weights", lambda self, *a: a[-1].fill_(7.0))
    x = torch.randn(9, 16).half()
    plain = nn.Sequential(*copy.deepcopy(net))
    wanted = torch.autograd.grad(plain(x).float().square().sum(), list(plain.parameters()))
    with pytest.warns(UserWarning, match="no kernel for a step by layers of 9 rows"):
        found = torch.autograd.grad(net(x).float().square().sum(), list(net.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert any(e.endswith("_chain") for e in launched) and net.why_no_fused_backward(x) is None


def test_layers_are_taken_where_no_kernel_of_all_layers_is_right(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CONTESTED", 16)
    monkeypatch.setattr(kernels.Kernels, "_built", lambda *a: Declined("wrong"))
    net = FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    net(torch.randn(9, 16).half()).sum().backward()  # few rows: by the kernel that is found to be wrong
    (run,) = net._images._runs.values()
    assert isinstance(run, fused_mlp._Run) and run.kernels.chain_refused(9) is not None
    plain = nn.Sequential(*copy.deepcopy(net))
    x = torch.randn(9, 16).half()
    wanted = torch.autograd.grad(plain(x).float().square().sum(), list(plain.parameters()))
    products: list[str] = []
    before = layered.Chosen.run
    monkeypatch.setattr(layered.Chosen, "run", noting(lambda *a: products.append(""), before))
    found = torch.autograd.grad(net(x).float().square().sum(), list(net.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert products and net.why_no_fused_backward(x) is None


def test_no_contest_is_begun_while_a_graph_is_captured(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CONTESTED", 16)
    monkeypatch.setattr(fused_mlp, "CONTESTED_ROWS", 8)
    net = FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    run = net._run(torch.zeros(9, 16).half(), net._known(), trains=True)
    assert isinstance(run, fused_mlp._Run) and run.kernels.in_contest
    x = torch.randn(9, 16).half()
    with torch.no_grad():
        wanted = net(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launched.clear()
    assert torch.equal(net(x), wanted)
    assert launched and not run.kernels.ways


def test_what_is_not_trained_by_layers_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def kernels_of(widths: tuple[int, ...], capability: int = 90) -> kernels.Kernels:
        acts = (Activation("relu"), Activation())
        net = Network(widths, acts, (True, True), DType.BF16, DType.BF16)
        facts = profile("h200") if capability == 90 else profile("a100")
        return kernels.Kernels(net, facts, Compiler(), TRUSTING)  # type: ignore[arg-type]

    assert kernels_of((64, 64, 64)).by_layers() is None
    assert kernels_of((64, 512, 128)).by_layers() is not None
    wide, long = (kernels_of(w).training_refused(8) for w in ((64, 600, 64), (5000, 300, 8)))
    assert wide is not None and "600 columns" in wide.reason
    assert long is not None and "5000 columns" in long.reason
    many = kernels_of((64, 512, 128)).training_refused(1 << 23)
    assert many is not None and "too many to be trained at once" in many.reason


def test_what_captures_and_full_memory_are_answered(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half()
    x = torch.randn(9, 16).half()
    run = _run(net, torch.float16, torch.float16, masters=False)
    layers = run.kernels.by_layers()
    assert layers is not None
    addresses = run.reads(list(net.parameters()))
    assert not isinstance(layers.forward(x, addresses, layered.Memory(), 1), Declined)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not isinstance(layers.forward(x, addresses, layered.Memory(), 1), Declined)
    for chosen in layers._chosen.values():
        if isinstance(chosen, layered.Chosen):
            chosen.bound.source = replace(chosen.bound.source, state_bytes=16)
    refused = layers.forward(x, addresses, layered.Memory(), 1)  # of another module, whose states are not there yet
    assert isinstance(refused, Declined) and "while a CUDA graph is captured" in refused.reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    layers.judge = judge(Worker(**{"": "memory"}))
    with pytest.warns(UserWarning, match="the framework's own operations are used"):
        refused = layers.forward(x[:8], addresses, layered.Memory(), 1)
    assert isinstance(refused, Declined)
    assert "no kernel for a product of layer 0 was found right: oom: RuntimeError: CUDA out of memory" in refused.reason


def test_why_gradients_are_not_fused_says_what_was_found(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    monkeypatch.setattr(fused_mlp, "kernels_of", lambda net, device: kernels_made(net))
    module = fused_mlp.FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    x: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float16, shape=(9, 16), dim=lambda: 2, numel=lambda: 144,
        get_device=lambda: torch.device("cpu"), requires_grad=False, is_nested=False,
    )  # fmt: skip
    assert module.why_no_fused_backward(x) is None
    run = module._run(x, module._known(), trains=True)
    assert isinstance(run, fused_mlp._Run)
    layers = run.kernels.by_layers()
    assert layers is not None
    layers.refuse(9, Declined("torch is faster"))
    assert module.why_no_fused_backward(x) == "torch is faster"
    with torch.no_grad():
        assert module.why_no_fused_backward(x) == "torch is faster"
        assert module.why_not(x) is None


def test_rows_whose_refusal_was_forgotten_are_judged_again(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gradients that were seen to be wrong would be used once enough other numbers of rows had come."""
    monkeypatch.setattr(layered, "_KEPT_PRODUCTS", 2)
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    monkeypatch.setattr(fused_mlp, "kernels_of", lambda net, device: kernels_made(net))
    module = fused_mlp.FusedMLP(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half())
    run = module._images.run(module._layers(), torch.float16, torch.float16, None, 0)  # type: ignore[arg-type]
    assert isinstance(run, fused_mlp._Run)
    layers = run.kernels.by_layers()
    assert layers is not None

    def unknown(rows: int) -> bool:
        return layers.unknown(rows, inputs=True, parameters=True, dtype=DType.F32)

    assert layers.refused(9) is layers.refused(8) is None
    assert unknown(9) and unknown(8) and not unknown(9)
    layers.refuse(9, Declined("gradients by layers that are not those of torch"))
    for rows in (10, 11):
        assert layers.refused(rows) is None
    assert layers.refused(9) is None
    assert unknown(9) and not unknown(8)


def test_states_go_with_their_kernels_unless_a_graph_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    source = SimpleNamespace(state_bytes=16)
    memory = layered.Memory()

    def kernel() -> layered.Chosen:
        return layered.Chosen(SimpleNamespace(source=source), 1.0)  # type: ignore[arg-type]

    one, other = kernel(), kernel()
    assert memory.state(one) == memory.state(one) != memory.state(other)
    assert len(memory._states) == 2
    del one
    assert len(memory._states) == 1
    capturing = True
    assert memory.state(other) == memory.state(other)
    del other
    assert len(memory._states) == 1


def test_threads_with_two_modules_of_one_network_take_turns(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gradient", lambda *a: Declined("as if they were wide"))
    net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half()
    first = _run(net, torch.float16, torch.float16, masters=False)
    runs = [first, fused_mlp._Run(first.kernels, first.layers, torch.float16)]
    x = torch.randn(9, 16).half().requires_grad_()
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(net(x).sum(), [x, *parameters])
    failures: list[Any]
    inside, most, failures = 0, 0, []
    plain = layered.Chosen.run

    def counted(self: layered.Chosen, *arguments: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        plain(self, *arguments)
        inside -= 1

    monkeypatch.setattr(layered.Chosen, "run", counted)

    def work(run: fused_mlp._Run) -> None:
        for _ in range(3):
            found = torch.autograd.grad(fused(run, x, parameters).sum(), [x, *parameters])
            failures.extend(1 for a, b in zip(found, wanted, strict=True) if not torch.allclose(a, b, 2e-2, 2e-2))

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and most == 1
