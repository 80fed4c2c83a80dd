"""Backward graphs as they are traced: what is taken, and what is left to the framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frontends.torch.support import evaluate
from torch.fx.experimental.proxy_tensor import make_fx

from weft.frontends.torch import decompositions, import_fx_program


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _check(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor, left: tuple[str, ...] = ()) -> None:
    """Gradients of every float among the inputs, as eager has them; `left`: what the framework runs."""

    def backward(dy: torch.Tensor, *given: torch.Tensor) -> Any:
        own = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
        return torch.autograd.grad(forward(*own), [x for x in own if x.requires_grad], dy)

    dy = _random(*forward(*inputs).shape, seed=9)
    wanted = backward(dy, *inputs)
    gm = make_fx(backward, decomposition_table=decompositions(), tracing_mode="fake")(dy, *inputs)
    program = import_fx_program(gm, (dy, *inputs))
    assert tuple(sorted(u.op for u in program.imported.opaque)) == left
    found = evaluate(program.imported.graph, [[dy, *inputs][k] for k in program.arguments])
    for result, want in zip(program.results, wanted, strict=True):
        torch.testing.assert_close(found[result.value], want, rtol=1e-9, atol=1e-10)


_WEIGHT = ("aten.convolution_backward.default",)
_MAX = ("aten.max_pool2d_with_indices.default",)


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        (1, {}), (1, {"stride": 2}), (3, {"padding": 1, "stride": 2}), (3, {"padding": 1, "groups": 4}),
        (8, {"padding": 4}),
    ],
)  # fmt: skip
def test_convolution(kernel: int, how: dict[str, int]) -> None:
    w = _random(8, 4 // how.get("groups", 1), kernel, kernel, seed=1)
    _check(lambda x, w, v: F.conv2d(x, w, v, **how), _random(2, 4, 7, 6), w, _random(8, seed=2))


def test_a_convolution_of_many_taps() -> None:
    x, w = _random(1, 8, 9, 7), _random(2, 8, 8, 7, seed=1)
    _check(F.conv2d, x, w, left=_WEIGHT)


def test_transposed_convolution() -> None:
    w, v = _random(4, 3, 2, 2, seed=1), _random(3, seed=2)
    _check(lambda x, w, v: F.conv_transpose2d(x, w, v, stride=2), _random(2, 4, 5, 3), w, v)


def test_pools() -> None:
    x = _random(2, 3, 8, 7)
    _check(lambda x: F.max_pool2d(x, 3, 2, 1), x)
    _check(lambda x: F.max_pool2d(x, 2), x)
    _check(lambda x: F.max_pool2d(x[0], (2, 3), 1, 1, ceil_mode=True)[None], x)
    _check(lambda x: F.max_pool2d(x, 2, 2, 1, 2, ceil_mode=True), x)
    _check(lambda x: F.max_pool3d(x, 2, (1, 2, 2), 1), x)
    _check(lambda x: F.max_pool2d(x, 6, 1), x, left=_MAX)
    _check(lambda x: F.avg_pool2d(x, 3, 2, 1), x)
    _check(lambda x: F.avg_pool2d(x, (2, 3)), x)
    _check(lambda x: F.adaptive_avg_pool2d(x, (3, 7)), x)


def test_losses_and_reading_by_index() -> None:
    x, t = _random(5, 7), torch.tensor([0, 6, 3, 3, 1])
    _check(F.cross_entropy, x, t)
    _check(lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, reduction="sum"), x, t)
    _check(lambda x, t: x.gather(1, t[:, None]), x, t)
    _check(lambda x, t: x.gather(1, torch.stack([t, t], 1)), x, t)
    _check(lambda x, t: x.gather(0, t[:4, None].clamp(max=4).expand(4, 3)), x, t)
    _check(lambda x, t: x[t.clamp(max=4)], x, t)
    _check(lambda x, t: x[:, t - 1], x, t)
    _check(lambda x, t: x[t.clamp(max=4), t], x, t)
    _check(lambda x, t: x.reshape(5, 7, 1)[t[:2, None].clamp(max=4), :, t[2:] * 0], x, t)
    _check(lambda x, t: x.index_select(1, t), x, t)
    wide, many = _random(70, 2), torch.arange(65)
    _check(lambda x, t: x.index_select(0, t), wide, many, left=("aten.index_put.default",))
    _check(lambda x, t: x.gather(0, t[:, None]), wide, many, left=("aten.scatter_add.default",))


def test_embedding() -> None:
    t, w = torch.tensor([[0, 6, 3], [3, 1, 3]]), _random(7, 3)
    _check(F.embedding, t, w)
    for pad in (3, -4):
        _check(lambda t, w, pad=pad: F.embedding(t, w, padding_idx=pad), t, w)
    framework = ("aten.embedding_dense_backward.default",)
    _check(lambda t, w: F.embedding(t, w, scale_grad_by_freq=True), t, w, left=framework)
    _check(lambda t, w: F.embedding(t, w, padding_idx=3), torch.arange(65) % 9, _random(70, 2), left=framework)


def test_writing_over_the_whole_memory() -> None:
    given = torch.zeros(6), _random(2, 3)
    for how, left in (((2, 3), (3, 1)), ()), (((2, 3), (1, 2)), ("aten.as_strided_scatter.default",)):
        gm = make_fx(lambda x, s: torch.as_strided_scatter(x, s, *how), tracing_mode="fake")(*given)  # noqa: B023
        program = import_fx_program(gm, given)
        assert tuple(u.op for u in program.imported.opaque) == left
        if not left:
            found = evaluate(program.imported.graph, [given[k] for k in program.arguments])
            torch.testing.assert_close(found[0], torch.as_strided_scatter(*given, *how))


def test_slices() -> None:
    x = _random(4, 9, 3)
    _check(lambda x: x[1:, ::2], x)
    _check(lambda x: x[:, 1:8:3, 2], x)
    _check(lambda x: x[::5], x)
    _check(lambda x: x[1].unbind(0)[4], x)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_upsampling(mode: str) -> None:
    x = _random(2, 3, 4, 5)
    for how in ({"scale_factor": 2}, {"size": (7, 8)}, {"scale_factor": (1.5, 2.0)}):
        _check(lambda x, how=how: F.interpolate(x, mode=mode, **how), x)
    if mode == "bilinear":
        _check(lambda x: F.interpolate(x, size=(7, 9), mode=mode, align_corners=True), x)
        _check(lambda x: F.interpolate(x, size=(3, 2), mode=mode, antialias=True), x)
        _check(lambda x: F.interpolate(x[:, :, 0], size=9, mode="linear"), x)
        _check(lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"), x)
    if mode == "nearest":
        _check(lambda x: F.interpolate(x[:, :, 0], size=9), x)
        _check(lambda x: F.interpolate(x[None], scale_factor=2), x)


@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid", "tanh", "relu", "elu", "hardswish", "mish", "softplus"])
def test_activations(name: str) -> None:
    function: Any = getattr(F, name, None) or getattr(torch, name)
    _check(function, _random(4, 6))


def test_norms_and_attention() -> None:
    x, g, v = _random(2, 4, 6), _random(6, seed=1), _random(6, seed=2)
    _check(lambda x, g, v: F.layer_norm(x, (6,), g, v), x, g, v)
    _check(lambda x, g, v: F.group_norm(x, 2, g[:4], v[:4]), x, g, v)
    _check(lambda x: F.softmax(x, 1), x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        q, k, w = (_random(2, 2, 5, 4, seed=n) for n in range(3))
        _check(F.scaled_dot_product_attention, q, k, w)
