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
    ("kernel", "how", "left"),
    [
        (1, {}, ()), (1, {"stride": 2}, ()), (3, {"padding": 1, "stride": 2}, ()),
        (3, {"padding": 1, "groups": 4}, ()), (8, {"padding": 4}, _WEIGHT),
    ],
)  # fmt: skip
def test_convolution(kernel: int, how: dict[str, int], left: tuple[str, ...]) -> None:
    w = _random(8, 4 // how.get("groups", 1), kernel, kernel, seed=1)
    _check(lambda x, w, v: F.conv2d(x, w, v, **how), _random(2, 4, 7, 6), w, _random(8, seed=2), left=left)


def test_transposed_convolution() -> None:
    w, v = _random(4, 3, 2, 2, seed=1), _random(3, seed=2)
    _check(lambda x, w, v: F.conv_transpose2d(x, w, v, stride=2), _random(2, 4, 5, 3), w, v)


def test_pools() -> None:
    x = _random(2, 3, 8, 7)
    _check(lambda x: F.max_pool2d(x, 3, 2, 1), x, left=_MAX)
    _check(lambda x: F.max_pool2d(x, 2), x, left=_MAX)
    _check(lambda x: F.avg_pool2d(x, 3, 2, 1), x)
    _check(lambda x: F.avg_pool2d(x, (2, 3)), x)
    _check(lambda x: F.adaptive_avg_pool2d(x, (3, 7)), x)


def test_losses_and_reading_by_index() -> None:
    x, t = _random(5, 7), torch.tensor([0, 6, 3, 3, 1])
    _check(F.cross_entropy, x, t)
    _check(lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, reduction="sum"), x, t)
    _check(lambda x, t: x.gather(1, t[:, None]), x, t)
    _check(lambda x, t: x.gather(1, torch.stack([t, t], 1)), x, t, left=("aten.scatter_add.default",))
    _check(F.embedding, t, _random(7, 3), left=("aten.index_put.default",))


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
