"""`FusedNetwork`: what a module is traced to, why others are not; a host in place of a GPU, kernels by emulation."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.nn import emulation
from tests.slow import few
from torch import nn
from torch.nn import functional as F

from weft.generate.cuda.training import Added
from weft.ir.declined import Declined
from weft.nn import FusedMLP, FusedNetwork, Sine, timing
from weft.nn.traces import Traced, traced

ROWS = 37


class Field(nn.Module):
    """A radiance field: the position again in the middle, the direction beside the features."""

    def __init__(self, width: int = 24, act: nn.Module | None = None) -> None:
        super().__init__()
        self.below = nn.ModuleList([nn.Linear(15, width), nn.Linear(width, width)])
        self.above = nn.ModuleList([nn.Linear(width + 15, width), nn.Linear(width, width)])
        self.features = nn.Linear(width, width)
        self.side, self.color = nn.Linear(width + 9, width), nn.Linear(width, 3)
        self.act = act or nn.SiLU()

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.below:
            h = self.act(layer(h))
        h = torch.cat([x, h], -1)
        for layer in self.above:
            h = self.act(layer(h))
        h = torch.cat([self.features(h), d], dim=-1)
        return torch.sigmoid(self.color(F.silu(self.side(h))))


class Columns(Field):
    """The same, of one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        a, b = torch.split(x, [15, 9], dim=-1)
        return super().forward(a, b)


class Residual(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = h + self.blocks[0](h)
        h = F.silu(self.blocks[1](h) + h)
        return self.last(h)


def parts_of(module: nn.Module, *widths: int) -> Traced:
    found = traced(module, widths, 2)
    assert isinstance(found, Traced), found.reason
    return found


def test_a_radiance_field_is_layers_with_skips() -> None:
    found = parts_of(Field(), 15, 9)
    layers = found.layers
    assert layers.widths == (15, 24, 24, 24, 24, 24, 24, 3)
    assert layers.sources == ((0,), (1,), (0, 2), (3,), (4,), (5, -1), (6,))
    assert layers.parts == ((0, 15), (16, 9)) and layers.row == 32 and not found.whole
    assert [x.kind for x in layers.acts] == ["silu"] * 4 + ["identity", "silu", "sigmoid"]


def test_columns_of_one_input_stay_where_they_are() -> None:
    found = parts_of(Columns(), 24)
    assert found.layers.parts == ((0, 15), (15, 9)) and found.layers.row == 24 and found.whole


def test_residuals_are_added_in_front_of_an_activation_or_behind() -> None:
    found = parts_of(Residual(), 5).layers
    assert found.added == (None, None, Added(1, True), None, Added(3, True), None)
    assert [x.kind for x in found.acts] == ["tanh", "tanh", "identity", "tanh", "silu", "identity"]
    assert not found.parts and found.columns == 5


def test_a_sequence_is_plain() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    assert not parts_of(net, 3).layers.sources
    assert isinstance(FusedMLP.from_module(net), FusedMLP)
    assert isinstance(FusedMLP.from_module(Field()), FusedNetwork)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


class _Changed(nn.Module):
    """Two layers, and what a function makes of their values."""

    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.same, self.drop, self.r = nn.Identity(), nn.Dropout(0.5).eval(), nn.ReLU(inplace=True)
        self.twice = Doubled()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


def before(h: torch.Tensor, f: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """h itself, once f was called with it."""
    f(h)
    return h


@pytest.mark.parametrize(
    ("f", "part"),
    [
        (lambda m, x: m.b(m.a(x)) * x, "mul, which no kernel"),
        (lambda m, x: (m.b(m.a(x)), x), "not that of one layer"),
        (lambda m, x: m.b(torch.relu(m.a(x)) + x + x), "two values are added"),
        (lambda m, x: m.b(m.a(x) if x.sum() > 0 else x), "cannot be traced"),
        (lambda m, x: m.b(m.a(x).mean(0, keepdim=True)), "mean, which no kernel"),
        (lambda m, x: m.c(torch.relu(h := m.a(x)) + m.b(h)), "read before and behind"),
        (lambda m, x: m.a(x), "fewer than two"),
        (lambda m, x: m.b(torch.cat([m.a(x)[:, :3], x[:, :3]], -1)), "an item of what is no input"),
        (lambda m, x: m.b(torch.cat([m.a(x), x], 0)), "dimension 0"),
        (lambda m, x: m.b(F.dropout(m.a(x))), "dropout, which no kernel"),
        (lambda m, x: m.b(torch.relu(torch.tanh(m.a(x)))), "behind another activation"),
        (lambda m, x: m.b(before(m.a(x), lambda h: h.relu_())), "relu_, which may change its argument"),
        (lambda m, x: m.b(before(m.a(x), m.r)), "r, which may change its argument"),
        (lambda m, x: m.b(before(m.a(x), lambda h: F.relu(h, inplace=True))), "may change its argument"),
        (lambda m, x: m.b(before(m.a(x), lambda h: F.relu(h, True))), "may change its argument"),
        (lambda m, x: m.c(before(m.a(x), lambda h: h.add_(m.b(x)))), "add_, which may change its argument"),
        (lambda m, x: m.c(before(m.a(x), lambda h: torch.tanh(m.b(x), out=h))), "may change its argument"),
        (lambda m, x: (h := m.a(x)) + m.b(torch.relu(m.drop(h))), "read before and behind"),
        (lambda m, x: (h := m.a(x)) + m.b(torch.relu(m.same(h))), "read before and behind"),
        (lambda m, x: m.c((h := m.a(x)).add_(m.b(x))) + h, "read before and behind"),
        (lambda m, x: m.b(x.add_(m.a(x))), "an addition to an input in place"),
    ],
)
def test_what_is_no_chain_says_why(f: Callable[..., torch.Tensor], part: str) -> None:
    module = _Changed(f)
    found = traced(module, (6,), 2)
    assert isinstance(found, Declined) and part in found.reason
    wrapped = FusedNetwork(module)
    assert wrapped.why_not(torch.randn(4, 6)) is not None


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: m.b(m.r(m.a(x))),
        lambda m, x: m.b(before(m.a(x), lambda h: (torch.relu(h), m.c(h), m.same(h)))),
        lambda m, x: m.c(m.a(x).add_(m.b(x)).relu_()),
        lambda m, x: m.c(m.b(m.drop(h := m.same(torch.relu(m.a(x))))) + h),
        lambda m, x: m.same(m.b(torch.relu(m.drop(m.a(x))))),
    ],
)
def test_identities_and_what_is_done_in_place_are_layers_where_nobody_sees_it(f: Callable[..., torch.Tensor]) -> None:
    module = _Changed(f)
    found = FusedNetwork(module)._trace((6,), 2)
    assert not isinstance(found, Declined), found.reason
    trace, seen = found
    x = torch.randn(9, 6)
    assert torch.allclose(trace.layers.composite(x, seen.in_order(), torch.float32), module(x), atol=1e-6)


def in_place(m: _Changed, x: torch.Tensor) -> torch.Tensor:
    """Torch's proxies take `+=` for an addition that leaves its operand as it was."""
    h = y = m.a(x)
    y += m.b(x)
    return m.c(y) + h


def into_input(m: _Changed, x: torch.Tensor) -> torch.Tensor:
    x += m.a(x)
    return m.b(x)


@pytest.mark.parametrize(
    ("f", "part"),
    [
        (in_place, "something else than the layers"),
        (into_input, "changes its inputs"),
        (lambda m, x: m.b(m.twice(m.a(x))), "changes its argument in place"),
        (lambda m, x: m.b(m.a(x) if isinstance(x, torch.fx.Proxy) else x), "something else than the layers"),
        (lambda m, x: m.b(m.a(x))[..., : 6 if isinstance(x, torch.fx.Proxy) else 5], "item of what is no input"),
        (lambda m, x: m.b(m.a(x)) if isinstance(x, torch.fx.Proxy) else m.b(m.a(x))[:, :5], "something else"),
        (lambda m, x: m.b(m.a(x)) if isinstance(x, torch.fx.Proxy) else m.b(m.a(x[:, :2])), "cannot be compared"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layers_that_are_not_the_module_are_not_used(
    f: Callable[..., torch.Tensor], part: str, dtype: torch.dtype
) -> None:
    module = _Changed(f).to(dtype)
    kept = {k: p.data_ptr() for k, p in module.named_parameters()}
    state = torch.get_rng_state()
    found = FusedNetwork(module)._trace((6,), 2)
    assert isinstance(found, Declined) and part in found.reason, found
    assert torch.equal(torch.get_rng_state(), state)
    assert {k: p.data_ptr() for k, p in module.named_parameters()} == kept


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", [("float",), ("double",), ("half",), ("bfloat16", "float")])
def test_layers_that_are_the_module_are_used(dims: int, kinds: tuple[str, ...]) -> None:
    module = Field()
    for kind, part in zip(kinds, (module, module.color), strict=False):
        getattr(part, kind)()
    found = FusedNetwork(module)._trace((15, 9), dims)
    assert not isinstance(found, Declined), found.reason


def test_comparison_waits_while_a_graph_is_captured(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = FusedNetwork(_Changed(in_place))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not isinstance(net._trace((6,), 2), Declined)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert isinstance(net._trace((6,), 2), Declined)
    nowhere = FusedNetwork(Residual().to("meta"))
    assert not isinstance(nowhere._trace((5,), 2), Declined) and not nowhere._traces[(5,), 2].compared


def test_nothing_is_traced_or_copied_for_inputs_that_are_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    net = FusedNetwork(Field())
    monkeypatch.setattr(Traced, "joined", lambda *a: pytest.fail("copied"))
    x, d = torch.randn(4, 15), torch.randn(4, 9)
    assert net.why_not(x, d) == "the input is on cpu; kernels are for CUDA devices"
    assert torch.equal(net(x, d), net._inner(x, d)) and not net._traces


def test_one_thread_traces_at_a_time() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def slow(m: _Changed, x: torch.Tensor) -> torch.Tensor:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1
        return m.b(m.a(x))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda m: traced(m, (6,), 2), [_Changed(slow) for _ in range(4)]))
    assert most == 1 and all(isinstance(x, Traced) for x in found)


def test_a_drop_in() -> None:
    plain = Field()
    net = FusedNetwork(plain)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    x, d = torch.randn(2, 7, 15), torch.randn(2, 7, 9)
    assert torch.equal(net(x, d), plain(x, d))
    assert net.why_not(x, d) == "the input is on cpu; kernels are for CUDA devices"
    for other in (copy.deepcopy(net), copy.copy(net)):
        assert torch.equal(other(x, d), net(x, d))
    assert next(copy.deepcopy(net).parameters()) is not next(net.parameters())
    net.double()
    assert net(x.double(), d.double()).dtype is torch.float64 and plain.color.weight.dtype is torch.float64
    net.eval()
    assert not plain.training and not plain.color.training
    with pytest.raises(TypeError, match="not a int"):
        FusedNetwork(3)  # type: ignore[arg-type]


class Scaled(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.blocks[1](h) + h if self.second else self.blocks[0](h))


def test_a_copy_has_the_hooks() -> None:
    net, x = FusedNetwork(nn.Sequential(nn.Linear(6, 5), nn.Tanh())).eval(), torch.randn(4, 6)
    net.register_forward_hook(lambda module, inputs, result: result + module.shift)
    net.shift = torch.ones(5)
    with torch.no_grad():
        want = net(x)
        copied = copy.deepcopy(net)
        assert torch.equal(copied(x), want)
        net.shift.zero_()
        net.get_parameter("0.weight").zero_()
        assert torch.equal(copied(x), want)
    assert copied.get_parameter("0.weight") is not net.get_parameter("0.weight")
    assert not copied.training


def test_what_is_changed_is_seen() -> None:
    net = FusedNetwork(Scaled())
    x = torch.randn(3, 5)
    both = [net._trace((5,), 2)]
    first = net(x)
    net.second = False
    both.append(net._trace((5,), 2))
    added = [f[0].layers.added for f in both if not isinstance(f, Declined)]
    assert added == [(None, None, Added(1, True), None), ()]
    assert not net._inner.second and not torch.equal(net(x), first)
    net = FusedNetwork(Residual())
    found = net._trace((5,), 2)
    assert not isinstance(found, Declined) and found[0].layers.acts[3].kind == "tanh"
    net.blocks[1][1] = Sine(2.0)
    after = net._trace((5,), 2)
    assert not isinstance(after, Declined) and after[0].layers.acts[3].kind == "sin"
    net.blocks[0].register_forward_hook(lambda *a: None)
    hooked = net._trace((5,), 2)
    assert isinstance(hooked, Declined) and "has hooks" in hooked.reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With autocast to bfloat16."""
    emulation.install(monkeypatch)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("make", few([Field, Columns, Residual], 1))
def test_forward_and_gradients_by_kernels(make: type[nn.Module], gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # what lies between the inputs in one matrix is nobody's
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, size, dtype: torch.full(size, float("nan"), dtype=dtype))
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.bfloat16())
    net = FusedNetwork(module)
    widths = {Field: (15, 9), Columns: (24,), Residual: (5,)}[make]
    inputs = [torch.randn(ROWS, n).bfloat16().float().requires_grad_() for n in widths]
    dy = torch.randn(ROWS, 3).bfloat16()
    assert net.why_not(*inputs) is None and net.why_no_fused_backward(*inputs) is None
    emulation.launched.clear()
    y = net(*inputs)
    leaves = [*inputs, *net.parameters()]
    found = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    assert any(x.endswith("_chain") for x in emulation.launched), emulation.launched
    double = copy.deepcopy(module).double()
    points = [x.detach().double().requires_grad_() for x in inputs]
    with torch.autocast("cuda", enabled=False):
        wanted_y = double(*points)
        wanted = torch.autograd.grad(wanted_y, [*points, *double.parameters()], dy.double())
    for a, b in zip([y, *found], [wanted_y.detach(), *wanted], strict=True):
        assert float((a.detach().double() - b).norm()) <= 2e-2 * float(b.norm()) + 1e-6
    assert [a.dtype for a in found] == [x.dtype for x in leaves]


def test_second_derivatives_by_torch(gpu: None) -> None:
    torch.manual_seed(0)
    net = FusedNetwork(Residual(16))
    x = torch.randn(9, 5).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).float().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((slope**2).sum(), net.first.weight)
    double = copy.deepcopy(net._inner).double()
    point = x.detach().double().requires_grad_()
    with torch.autocast("cuda", enabled=False):
        (slope,) = torch.autograd.grad(double(point).sum(), point, create_graph=True)
        (wanted,) = torch.autograd.grad((slope**2).sum(), double.first.weight)
    assert float((second.double() - wanted).norm()) <= 5e-2 * float(wanted.norm())


class Beside(nn.Module):
    """Two inputs side by side, of any columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(torch.cat([a, b], -1))))


@pytest.mark.slow
def test_inputs_of_other_columns_that_join_to_as_many_are_not_taken_for_each_other(gpu: None) -> None:
    torch.manual_seed(0)
    net = FusedNetwork(Beside())
    for widths in ((3, 5), (5, 3), (3, 5)):
        inputs = [torch.randn(ROWS, n) for n in widths]
        assert net.why_not(*inputs) is None
        with torch.no_grad():
            y, wanted = net(*inputs).float(), net._inner(*inputs)
        assert float((y - wanted).norm()) <= 2e-2 * float(wanted.norm())
    assert len(net._images.calls) == 2


def test_inputs_of_other_types_have_a_result_type_of_their_own(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedNetwork, "_end", lambda net, run, inputs: inputs[0].dtype)
    net = FusedNetwork(Beside())
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        inputs = [torch.randn(ROWS, n).to(dtype) for n in (3, 5)]
        assert net.why_not(*inputs) is None
        assert net(*inputs).dtype is dtype


def test_layers_with_other_parameters_go_through_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    net, x = FusedNetwork(module), torch.randn(5, 3)
    assert not isinstance(net._joined((x,)), Declined)
    module[2].weight = nn.Parameter(torch.zeros(1, 8))
    assert isinstance(net._joined((x,)), Declined)
