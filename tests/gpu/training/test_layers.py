"""Calls that a training step makes for attention and recurrent layers, by themselves and in steps, on a real GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.training.alike import two_runs
from torch import nn
from torch.nn import functional

import weft
from weft.generate.library import trained_attention
from weft.training import layers

pytestmark = pytest.mark.gpu
LIMIT_S = 240


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to("cuda", dtype) for s in shapes]


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want.double()).norm() / want.double().norm()).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 128, 3, 64), (4, 197, 12, 64), (1, 1024, 2, 128), (2, 300, 5, 40)])
def test_attention_is_as_exact_as_eagers_and_has_one_order(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    q, k, v, g = drawn(*[shape] * 4, dtype=dtype)
    how = causal, shape[-1] ** -0.5
    assert trained_attention.is_taken(*(x.transpose(1, 2) for x in (q, k, v)))

    def mine() -> tuple[torch.Tensor, ...]:
        out, sums = trained_attention.attention(q, k, v, *how)
        return out, *trained_attention.attention_backward(g, q, k, v, out, sums, *how)

    def eager(kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        given = [x.to(kind).requires_grad_() for x in (q, k, v)]
        a, b, c = (x.transpose(1, 2) for x in given)
        out = functional.scaled_dot_product_attention(a, b, c, is_causal=causal).transpose(1, 2)
        return out, *torch.autograd.grad(out, given, g.to(kind))

    found, exact, own = mine(), eager(torch.float64), eager(dtype)
    for got, want, theirs in zip(found, exact, own, strict=True):
        assert got.is_contiguous() and off(got, want) <= 1.2 * off(theirs, want)
    assert all(torch.equal(x, y) for _ in range(10) for x, y in zip(mine(), found, strict=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("how", [{}, {"bidirectional": True, "num_layers": 2, "batch_first": True}, {"bias": False}])
def test_recurrent_layers_are_the_frameworks(kind: type[nn.RNNBase], how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(24, 32, **how).cuda()  # type: ignore[arg-type]
    (x,) = drawn((7, 5, 24), dtype=torch.float32)
    x.requires_grad_()
    found = []
    for mode in (layers.LayersInParts(), torch.no_grad()):
        with mode if isinstance(mode, layers.LayersInParts) else torch.enable_grad():
            y, states = layer(x)
        last = states[1] if isinstance(states, tuple) else states
        found.append([y, last, *torch.autograd.grad(y.square().sum() + last.sum(), [x, *layer.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Spoken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(24, 32, 2, bidirectional=True, batch_first=True), nn.Linear(64, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.layer(x.relu())[0].mean(1))
        return y


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True), nn.Linear(64, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.layer(x).mean(1))
        return y


def batch(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    (x,) = drawn(shape, dtype=torch.float32, seed=seed)
    return x, torch.randint(7, shape[:1], generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "shape", "called"), [(Spoken, (16, 30, 24), "weft.recurrent"), (Seen, (8, 160, 64), "weft.attention")]
)
def test_a_step_calls_them_and_is_eagers(
    make: type[nn.Module], shape: tuple[int, ...], called: str, autocast: torch.dtype | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, twin = make().cuda(), make().cuda()
    twin.load_state_dict(model.state_dict())  # a copy's recurrent weights would lie apart
    loss = nn.CrossEntropyLoss()
    mine, theirs = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, twin))
    options = weft.Options(budget_s=20.0, device="cuda", cache_dir=tmp_path)
    step = weft.compile_step(model, loss, mine, *batch(shape, 0), options=options, autocast=autocast)
    names = {op for op, _, _ in step.record.opaque}
    taken = called == "weft.recurrent" or autocast is not None  # kernels of attention have 16 bits
    assert ({f"{called}.default", f"{called}_backward.default"} <= names) is taken
    assert not step.record.chosen.startswith("eager"), step.record.plans
    first = {name: x.clone() for name, x in model.state_dict().items()}
    for k in range(6):
        x, target = batch(shape, k)
        theirs.zero_grad()
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            want = loss(twin(x), target)
        want.backward()
        theirs.step()
        limit = 2e-2 if autocast else 1e-3
        torch.testing.assert_close(step(x, target), want.detach(), rtol=limit, atol=limit)
    if called == "weft.attention":
        found = two_runs(model, mine, step, lambda k: batch(shape, k), first)
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
