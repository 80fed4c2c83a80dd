"""`FusedMLP` without a GPU: it is the module that it wraps, says why, and is differentiable as often as that is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from weft.ir.declined import Declined
from weft.nn import FusedMLP, Sine, fused_mlp
from weft.nn.autograd import by_composite, fused
from weft.nn.fused_mlp import _Run, _type_of_products
from weft.nn.layers import Layers, layers_of

ACTIVATIONS: list[nn.Module] = [
    nn.Identity(), nn.ReLU(), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.GELU(),
    nn.GELU("tanh"), nn.Softplus(2.0, 15.0), Sine(3.0),
]  # fmt: skip


def small(act: nn.Module, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, bias=bias), act, nn.Linear(5, 4), act, nn.Linear(4, 2, bias=bias))


class ByTorch:
    """An engine of torch's operations in float64, which notes what was asked for."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.asked: list[tuple[bool, ...]] = []

    def forward(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return self.composite(x, parameters)

    def keep(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y = self.forward(x, parameters)
        return y, [x + 1, y]

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        needs: Sequence[bool],
        kept: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        assert torch.equal(kept[0], x + 1) and kept[1].shape == dy.shape
        self.asked.append(tuple(needs))
        return by_composite(self, dy, x, parameters, needs)

    def composite(self, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.layers.composite(x, parameters, torch.float64)


def test_a_drop_in() -> None:
    plain = nn.Sequential()
    plain.add_module("first", nn.Linear(3, 8))
    plain.add_module("act", nn.ReLU())
    plain.add_module("last", nn.Linear(8, 1))
    plain.eval()
    net = FusedMLP(plain)
    assert (
        list(net.state_dict()) == list(plain.state_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    )
    assert all(a is b for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    assert not net.training and isinstance(net, nn.Sequential)
    x = torch.randn(2, 7, 3)
    assert torch.equal(net(x), plain(x))
    other = FusedMLP(copy.deepcopy(plain).requires_grad_(False))
    other.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()}, strict=True)
    assert not torch.equal(other(x), net(x))
    copied = copy.deepcopy(net)
    assert torch.equal(copied(x), net(x)) and copied[0].weight is not net[0].weight
    net.double()
    assert net(x.double()).dtype is torch.float64


def test_only_a_sequence_is_wrapped() -> None:
    with pytest.raises(TypeError, match="not a Linear"):
        FusedMLP(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_part_of_it_is_one_too() -> None:
    net = FusedMLP(small(nn.ReLU()))
    part = net[:3]
    assert isinstance(part, FusedMLP) and part[0] is net[0] and len(part) == 3
    x = torch.randn(4, 3)
    assert torch.equal(net[3:](part(x)), net(x))


def test_torch_compile_sees_the_modules() -> None:
    net = FusedMLP(small(nn.SiLU()))
    x = torch.randn(4, 3)
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))
    assert len(seen) == 1


def test_why_not_says_the_device() -> None:
    assert FusedMLP(small(nn.ReLU())).why_not(torch.randn(4, 3)) == "the input is on cpu; kernels are for CUDA devices"


class _Own(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("Expected a number")


class Snake(nn.Module):
    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.frequency * x) ** 2 / self.frequency


def test_an_expression_of_the_users_is_an_activation() -> None:
    net = FusedMLP(nn.Sequential(nn.Linear(3, 4), Snake(2.0), nn.Dropout(0.5), nn.Linear(4, 2), nn.Hardswish()).eval())

    def layers() -> Layers:
        known = net._known()
        assert not isinstance(known, Declined), known.reason
        return known.layers

    first = layers()
    assert [act.kind for act in first.acts] == ["formula", "formula"]
    assert layers() is first
    net[1].frequency = 3.0  # type: ignore[assignment]
    assert layers().acts[0] != first.acts[0] and layers().acts[1] == first.acts[1]
    x = torch.randn(7, 3, dtype=torch.float64)
    net.double()
    torch.testing.assert_close(layers().composite(x, list(net.parameters()), torch.float64), net(x))
    net.train()
    known = net._known()
    assert isinstance(known, Declined) and "random numbers" in known.reason


class _InPlace(nn.Module):
    """Zeros stay zeros, and it gives back what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: [nn.Linear(3, 4)], "fewer than two"),
        (lambda: [nn.Linear(3, 4), nn.Linear(5, 4)], "5 columns behind one of 4"),
        (lambda: [nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 4)], "in front of the first"),
        (lambda: [nn.Linear(3, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 4)], "Tanh behind another"),
        (lambda: [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)], "BatchNorm1d is no layer"),
        (lambda: [nn.Linear(3, 4), _Own(), nn.Linear(4, 4)], "Expected a number"),
        (lambda: [nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 4)], "random numbers"),
        (lambda: [nn.Linear(3, 4), _InPlace(), nn.Linear(4, 4)], "changes its argument in place"),
        (lambda: [nn.Linear(3, 4), Sine(float("inf")), nn.Linear(4, 4)], "a number that is none"),
        (
            lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 4)],
            "ParametrizedLinear is no layer",
        ),
    ],
)
def test_what_the_kernels_do_not_know_is_said(make: Callable[[], list[nn.Module]], part: str) -> None:
    found = layers_of(make())
    assert isinstance(found, Declined)
    assert part in found.reason


def test_types_that_the_kernels_do_not_know_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    net = FusedMLP(small(nn.ReLU()))

    def why(x: torch.Tensor) -> object:
        found = _type_of_products(x.dtype, {p.dtype for p in net.parameters()})
        return found.reason if isinstance(found, Declined) else found

    x = torch.randn(4, 3)
    assert "float32 outside of autocast" in str(why(x))
    assert "parameters of torch.float32" in str(why(x.half()))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert why(x) is torch.bfloat16 and why(x.half()) is torch.bfloat16
    assert "float64 under autocast" in str(why(x.double()))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
    assert "autocast to torch.float32" in str(why(x))


def test_nested_tensors_go_through_the_modules() -> None:
    net = FusedMLP(small(nn.ReLU()))
    rows = [torch.randn(4, 3), torch.randn(2, 3)]
    for layout in (torch.jagged, torch.strided):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = net(torch.nested.nested_tensor(rows, layout=layout))
        for y, x in zip(found.unbind(), rows, strict=True):
            torch.testing.assert_close(y, net(x))


def test_hooks_of_a_layer_are_not_passed_over() -> None:
    net = FusedMLP(small(nn.ReLU()))
    net[2].register_forward_hook(lambda *a: None)
    found = net._layers()
    assert isinstance(found, Declined) and found.reason == "module 2 has hooks"


def test_a_layer_that_stands_twice_is_twice_in_the_network() -> None:
    shared = nn.Linear(4, 4)
    net = FusedMLP(nn.Sequential(shared, nn.ReLU(), shared))
    known = net._known()
    assert not isinstance(known, Declined)
    assert [p is q for p, q in zip(known.parameters, [shared.weight, shared.bias] * 2, strict=True)] == [True] * 4
    assert torch.equal(net(torch.ones(1, 4)), shared(torch.relu(shared(torch.ones(1, 4)))))


@pytest.mark.parametrize("act", ACTIVATIONS, ids=repr)
def test_the_composite_is_the_module(act: nn.Module) -> None:
    net = small(act, bias=False).double()
    layers = layers_of(list(net))
    assert isinstance(layers, Layers)
    x = torch.randn(6, 3, dtype=torch.float64)
    assert torch.equal(layers.composite(x, list(net.parameters()), torch.float64), net(x))


def test_gradients_of_the_fallback() -> None:
    net = FusedMLP(small(nn.Tanh()).double())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, (x,))
    assert torch.autograd.gradgradcheck(net, (x,))


def test_first_and_second_gradients_of_the_function() -> None:
    net = small(nn.SiLU()).double()
    layers = layers_of(list(net))
    assert isinstance(layers, Layers)
    engine = ByTorch(layers)
    inputs = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True), *net.parameters()]

    def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return fused(engine, x, parameters)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_only_gradients_that_are_needed_are_asked_for() -> None:
    net = small(nn.ReLU()).double()
    layers = layers_of(list(net))
    assert isinstance(layers, Layers)
    engine = ByTorch(layers)
    fused(engine, torch.randn(4, 3, dtype=torch.float64), list(net.parameters())).sum().backward()
    net.requires_grad_(requires_grad=False)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    fused(engine, x, list(net.parameters())).sum().backward()
    assert engine.asked == [(False, *(True,) * 6), (True, *(False,) * 6)]


def test_a_slope_alone_needs_no_gradients_of_parameters() -> None:
    net = small(nn.SiLU()).double()
    layers = layers_of(list(net))
    assert isinstance(layers, Layers)
    engine, parameters = ByTorch(layers), list(net.parameters())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for asked in ([x], [parameters[2]], [x, parameters[0]]):
        wanted = torch.autograd.grad(net(x * 2).sum(), asked)
        found = torch.autograd.grad(fused(engine, x * 2, parameters).sum(), asked)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert engine.asked == [
        (True, *(False,) * 6),
        (False, *(True,) * 6),
        (True, *(True,) * 6),
    ]


def test_a_loss_of_gradients_has_gradients() -> None:
    net = small(Sine(2.0)).double()
    layers = layers_of(list(net))
    assert isinstance(layers, Layers)
    x = torch.randn(16, 3, dtype=torch.float64)
    found = []
    for run in (net, lambda p: fused(ByTorch(layers), p, list(net.parameters()))):
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(point).sum(), point, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean()
        # the last bias does not enter into a slope
        found.append(torch.autograd.grad(loss, list(net.parameters())[:-1]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_what_changes_in_a_module_is_seen() -> None:
    net = FusedMLP(nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 2)))

    def layers() -> Layers:
        known = net._known()
        assert not isinstance(known, Declined)
        return known.layers

    first = layers()
    assert layers() is first and first.acts[0].numbers == (0.1,)
    net[1].negative_slope = 0.3  # type: ignore[assignment]
    assert layers().acts[0].numbers == (0.3,)
    net[1] = nn.Tanh()
    assert layers().acts[0].kind == "tanh"
    net[2].weight = nn.Parameter(torch.zeros(2, 4))
    known = net._known()
    assert not isinstance(known, Declined) and known.parameters[2] is net[2].weight
    net[0].register_forward_hook(lambda *a: None)
    assert isinstance(net._known(), Declined)


def test_parameters_are_found_by_name_and_have_the_sizes_of_their_layer() -> None:
    net = FusedMLP(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    prune.remove(prune.l1_unstructured(net[0], "weight", 0.5), "weight")
    assert list(net[0]._parameters) == ["bias", "weight"]
    known = net._known()
    assert not isinstance(known, Declined) and known.parameters[0] is net[0].weight
    net[2].weight = nn.Parameter(torch.zeros(1, 4))
    assert isinstance(net._known(), Declined)
    net[2].weight = nn.Parameter(torch.zeros(2, 4))
    assert not isinstance(net._known(), Declined)
    net[2].bias = None  # type: ignore[assignment]
    known = net._known()
    assert not isinstance(known, Declined) and known.layers.biases == (True, False) and len(known.parameters) == 3
    parametrize.register_parametrization(net[2], "weight", nn.Identity())
    assert isinstance(net._known(), Declined)
    replica = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for layer in replica[0], replica[2]:
        weight, bias = layer._parameters.pop("weight"), layer._parameters.pop("bias")
        layer.__dict__.update(weight=weight, bias=bias)
    assert isinstance(FusedMLP(replica)._known(), Declined)


class _Kernels:
    """What `_Run.reads` asks of its kernels."""

    class net:
        masters = None


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> _Run:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused_mlp, "stream", lambda: 7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    layers = layers_of(list(small(nn.ReLU())))
    assert isinstance(layers, Layers)
    return _Run(_Kernels(), layers, torch.float32)  # type: ignore[arg-type]


def test_parameters_in_training_are_read_every_time_others_when_their_version_changes(reader: _Run) -> None:
    parameters = [torch.ones(3, 2), torch.ones(2)]

    def changed() -> bool:
        before = reader._stamp
        addresses = reader.reads(parameters)
        assert addresses == [p.data_ptr() for p in parameters]
        return reader._stamp != before

    assert changed() and not changed()
    parameters[0].mul_(2)
    assert changed() and not changed()
    reader.clear()
    assert changed() and not changed()
    parameters[1] = torch.ones(2)
    assert changed() and not changed()
    parameters[1].requires_grad_()
    # an optimizer in one kernel leaves the version as it is
    assert changed() and changed()
    parameters[1].requires_grad_(False)
    assert changed() and not changed()


def test_parameters_of_other_types_and_views_are_copied(reader: _Run) -> None:
    parameters = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.float64)]
    addresses = reader.reads(parameters)
    assert all(a != p.data_ptr() for a, p in zip(addresses, parameters, strict=True))
    assert [c.dtype for c in reader._copies] == [torch.float32] * 2
    assert torch.equal(reader._copies[0], parameters[0]) and reader._copies[0].is_contiguous()
