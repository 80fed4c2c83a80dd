"""Attention as a training step is traced: values and gradients beside torch's own, and which operators are left."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.generate.library import trained_recurrent
from weft.training import layers
from weft.training.layers import LayersInParts, attention

Tensors = tuple[torch.Tensor, ...]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)


MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
MASK[2] = False  # a row without anything
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "kept": {"attn_mask": MASK},
    "kept by head": {"attn_mask": MASK.expand(2, 1, 5, 7)},
    "added": {"attn_mask": torch.where(MASK, 0.5, -torch.inf).double()},
    "scaled": {"scale": 0.3},
    "negative": {"scale": -2.0},
    "shared": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    heads = 2 if name == "shared" else 4
    q, k, v = drawn((2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 6))
    weight = drawn((2, 4, 5, 6), seed=2)[0].detach()
    found = []
    for call in (attention, functional.scaled_dot_product_attention):
        y = call(q, k, v, **CALLS[name])
        found.append((y, *torch.autograd.grad((y * weight).sum(), (q, k, v))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_an_added_mask_has_a_gradient() -> None:
    q, k, v, mask = drawn((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6), (5, 7))
    mine, theirs = (
        torch.autograd.grad(call(q, k, v, attn_mask=mask).square().sum(), mask)[0]
        for call in (attention, functional.scaled_dot_product_attention)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_values_and_gradients_are_near_the_exact_ones(dtype: torch.dtype, causal: bool, autocast: bool) -> None:
    exact = [x.detach().requires_grad_() for x in drawn((2, 3, 64, 32), (2, 3, 64, 32), (2, 3, 64, 32), dtype=dtype)]
    exact = [x.double().detach().requires_grad_() for x in exact]
    kind = torch.float32 if autocast else dtype
    q, k, v = (x.detach().to(kind).requires_grad_() for x in exact)
    with torch.autocast("cpu", dtype) if autocast else nullcontext():
        y = attention(q, k, v, is_causal=causal)
    assert y.dtype is dtype
    want = functional.scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=causal)
    weight = drawn((2, 3, 64, 32), seed=3)[0].detach().to(dtype)
    mine = (y, *torch.autograd.grad((y * weight).sum(), (q, k, v)))
    theirs = (want, *torch.autograd.grad((want * weight.double()).sum(), exact))
    limit = 8 * torch.finfo(dtype).eps
    for got, right in zip(mine, theirs, strict=True):
        assert (got.double() - right).norm() <= limit * right.norm()


def test_autocast_leaves_f64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_in_one_call", lambda given, *, is_causal: given[0].dtype is not torch.float64)
    q, k, v = (x.detach() for x in drawn((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k, v)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, k, v))


def test_scores_of_f16_are_scaled_before_they_pass_its_range() -> None:
    q, k, v = (x.detach() for x in drawn((1, 1, 4, 64), (1, 1, 4, 64), (1, 1, 4, 8), dtype=torch.float16))
    found = attention(60 * q, 60 * k, v)  # up to some 100,000 before they are scaled
    assert found.isfinite().all()
    want = functional.scaled_dot_product_attention(60 * q.double(), 60 * k.double(), v.double())
    assert (found.double() - want).norm() <= 0.02 * want.norm()


def test_dropout_leaves_as_much_as_it_should_and_scales_it() -> None:
    q, k = (x.detach() for x in drawn((1, 8, 64, 8), (1, 8, 64, 8)))
    torch.manual_seed(0)
    kept = attention(q, k, torch.eye(64).double().expand(1, 8, 64, 64), dropout_p=0.25)
    share = (kept != 0).double().mean()
    assert 0.73 < share < 0.77
    plain = attention(q, k, torch.eye(64).double().expand(1, 8, 64, 64))
    torch.testing.assert_close(kept[kept != 0], plain[kept != 0] / 0.75)


def test_a_mask_beside_causal_is_refused() -> None:
    q, k, v = drawn((1, 1, 5, 8), (1, 1, 7, 8), (1, 1, 7, 8))
    with pytest.raises(RuntimeError, match="is_causal=True"):
        attention(q, k, v, attn_mask=MASK, is_causal=True)


def test_only_attention_is_taken_apart() -> None:
    q, k, v = (x.detach() for x in drawn((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)))
    with LayersInParts():
        assert torch.equal(functional.relu(q), q.clamp_min(0))
        mine = functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(mine, attention(q, k, v))


class Seen(TorchFunctionMode):
    """Which functions are called while cuDNN is on."""

    def __init__(self) -> None:
        super().__init__()
        self.with_cudnn: dict[str, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.with_cudnn[getattr(func, "__name__", "")] = torch.backends.cudnn.enabled
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_called_without_cudnn(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(3, 4), torch.randn(5, 2, 3)  # type: ignore[arg-type, call-arg]
    with Seen() as seen, LayersInParts():
        found = layer(x)[0].relu()
    assert not seen.with_cudnn[layer.mode.lower()] and seen.with_cudnn["relu"]
    assert torch.equal(found, layer(x)[0].relu())


class Tokens(nn.Module):
    """One head of torch's own module, which calls attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(11, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        keep = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        y: torch.Tensor = self.out(self.attention(x, x, x, attn_mask=keep, is_causal=True, need_weights=False)[0])
        return y.transpose(1, 2)


CALLED = "weft.attention.default", "weft.attention_backward.default"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("called", [False, True])
def test_a_step_with_attention_is_eagers(
    autocast: torch.dtype | None, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if called:  # as on a GPU
        monkeypatch.setattr(layers, "_in_one_call", lambda given, *, is_causal: True)
    torch.manual_seed(0)
    mine, theirs = Tokens(), Tokens()
    theirs.load_state_dict(mine.state_dict())
    ids, target = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    loss = nn.CrossEntropyLoss()
    step = weft.compile_step(
        mine, loss, torch.optim.SGD(mine.parameters(), 0.1), ids, target,
        options=weft.Options(budget_s=0, device="cpu"), autocast=autocast,
    )  # fmt: skip
    assert {op for op, _, _ in step.record.opaque}.issuperset(CALLED) is called
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(3):
        got = step(ids, target)
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            want = loss(theirs(ids), target)
        want.backward()
        optimizer.step()
        torch.testing.assert_close(got, want.detach(), rtol=2e-2 if autocast else 1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("positions", "called"),
    [((128, 128), True), ((128, 200), True), ((127, 128), False), ((512, 64), False)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_long_attention_is_a_call_on_a_gpu(positions: tuple[int, int], called: bool, causal: bool) -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 3, n, 64, dtype=torch.bfloat16, device="cuda") for n in positions)
        found = layers._in_one_call([q, k, k], is_causal=causal)
    assert found is (called and not (causal and positions[0] != positions[1]))


def made(kind: type[nn.RNNBase], **how: Any) -> nn.RNNBase:
    return kind(3, 4, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_recurrent_layer_on_a_gpu_is_one_call(
    kind: type[nn.RNNBase], autocast: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results and gradients have the shapes and types that the framework's have; nothing is computed."""
    monkeypatch.setattr(trained_recurrent, "_sizes", lambda *_: (10, 20))
    monkeypatch.setattr(layers, "_has_cudnn", lambda x: True)
    with FakeTensorMode() as mode:
        layer = made(kind, num_layers=2, bidirectional=True, batch_first=True, bias=bias)
        x = torch.empty(5, 7, 3, requires_grad=True)
        seen = Operators()
        with LayersInParts(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), seen:
            y, states = layer(x)
        y.float().sum().backward()
    del mode
    assert "weft.recurrent.default" in seen.names
    assert (tuple(y.shape), y.dtype) == ((5, 7, 8), torch.float16 if autocast else torch.float32)
    for state in states if kind is nn.LSTM else (states,):
        assert (tuple(state.shape), state.dtype) == ((4, 5, 4), y.dtype)
    for w in (x, *layer.parameters()):
        assert w.grad is not None and w.grad.shape == w.shape and w.grad.dtype is torch.float32


class Operators(TorchDispatchMode):
    """Names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", [{"dropout": 0.5, "num_layers": 2}, {"proj_size": 2}])
def test_other_recurrent_layers_are_none(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_has_cudnn", lambda x: True)
    with FakeTensorMode():
        layer = made(nn.LSTM, **how)
        x = torch.empty(5, 7, 3)
        states = tuple(torch.empty(how.get("num_layers", 1), 7, n) for n in (how.get("proj_size", 4), 4))
        given: tuple[Any, ...] = (layer._flat_weights, True, layer.num_layers, layer.dropout, True, False, False)
        assert layers._recurrent("lstm", x, states, *given) is None
        packed: tuple[Any, ...] = (states, layer._flat_weights, True, layer.num_layers, 0.0, True, False)
        assert layers._recurrent("lstm", x, torch.empty(5), *packed) is None
        assert layers._recurrent("lstm", x[0], states, *given) is None
    monkeypatch.undo()
    layer = made(nn.LSTM)
    states = torch.zeros(1, 7, 4), torch.zeros(1, 7, 4)
    assert (
        layers._recurrent("lstm", torch.zeros(5, 7, 3), states, layer._flat_weights, True, 1, 0.0, True, False) is None
    )


@torch.library.custom_op("weft_tests::never", mutates_args=())
def never(x: torch.Tensor) -> torch.Tensor:
    """Doubles, and must not be run."""
    raise AssertionError("it is run")


@never.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


never.register_autograd(lambda ctx, gradient: 2 * gradient)


class Never(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.weft_tests.never(self.layer(x))
        return y


def test_a_step_is_traced_without_being_run() -> None:
    """torch runs what it has traced once more, of tensors with memory: a step's time, and its memory."""
    model = Never()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(weft.WeftError, match="ATen does not know"):
        weft.compile_step(model, nn.MSELoss(), optimizer, x, target, options=weft.Options(budget_s=0, device="cpu"))
