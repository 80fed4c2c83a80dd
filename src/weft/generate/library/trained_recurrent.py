"""Recurrent layers of a training step as one call of cuDNN, and their gradients as another.

As in eager, where two runs may differ in their last bits: cuDNN adds up weights' gradients in no fixed order.

Unrolled, a layer is a product and some elementwise kernels for each position, and three times as many in the backward
pass: graphs of tens of thousands of primitives, which are slower than cuDNN's kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

NAMES = frozenset({"recurrent", "recurrent_backward"})
"""Operators in the namespace `weft`."""
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of layers."""
Sizes = tuple[int, int]


def _called(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    mode: int,
    layers: int,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """Results of the layer, its states, what cuDNN keeps for the backward pass, and all weights in one piece."""
    each = len(weights) // (layers * (1 + bidirectional))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that weights lie apart: they change with every step
        return torch._cudnn_rnn(
            x, list(weights), each, None, hidden, cell, mode, hidden.shape[-1], 0, layers, False, 0.0, True,
            bidirectional, [], None,
        )  # fmt: skip


@lru_cache(maxsize=64)
def _sizes(
    x: tuple[int, ...], weights: tuple[tuple[int, ...], ...], hidden: tuple[int, ...], dtype: torch.dtype,
    device: torch.device, mode: int, layers: int, bidirectional: bool,
) -> Sizes:  # fmt: skip
    """Elements of the last two results, which only cuDNN knows: the layer is run once."""
    with _disable_current_modes(), torch.no_grad():
        made = [torch.zeros(s, dtype=dtype, device=device) for s in (x, hidden, *weights)]
        cell = made[1] if mode == MODES["lstm"] else None
        found = _called(made[0], made[2:], made[1], cell, mode, layers, bidirectional)
        return found[3].numel(), found[4].numel()


@torch.library.custom_op("weft::recurrent", mutates_args=())
def recurrent(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    mode: int,
    layers: int,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A recurrent layer without dropout or projections, on a GPU with cuDNN.

    Shapes: as `torch.nn.RNNBase` has them with positions first, weights in its order; `cell` is that of an LSTM. Gives
    the results, both last states (an empty second one without a cell), and for the backward pass bytes and the weights
    in one piece.
    """
    x, hidden, cell = x.contiguous(), hidden.contiguous(), None if cell is None else cell.contiguous()
    y, last, last_cell, kept, packed = _called(x, weights, hidden, cell, mode, layers, bidirectional)
    last_cell = x.new_empty(0) if cell is None else last_cell.contiguous()
    return y.contiguous(), last.contiguous(), last_cell, kept, packed


@torch.library.custom_op("weft::recurrent_backward", mutates_args=())
def recurrent_backward(
    gradient: torch.Tensor,
    of_last: torch.Tensor,
    of_cell: torch.Tensor | None,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    y: torch.Tensor,
    kept: torch.Tensor,
    packed: torch.Tensor,
    mode: int,
    layers: int,
    bidirectional: bool,
) -> list[torch.Tensor]:
    """Gradients of the input, of both states (without a cell of the first twice), and of each weight."""
    each = len(weights) // (layers * (1 + bidirectional))
    found = torch.ops.aten._cudnn_rnn_backward.default(
        x.contiguous(), list(weights), each, packed, hidden.contiguous(), None if cell is None else cell.contiguous(),
        y, gradient.contiguous(), of_last.contiguous(), None if of_cell is None else of_cell.contiguous(), mode,
        hidden.shape[-1], 0, layers, False, 0.0, True, bidirectional, [], None, kept.clone(),
        [True, True, cell is not None, True],
    )  # fmt: skip
    of_hidden = found[1].contiguous()
    second = of_hidden.clone() if cell is None else found[2].contiguous()
    return [
        found[0].contiguous(),
        of_hidden,
        second,
        *(w.clone(memory_format=torch.contiguous_format) for w in found[3]),
    ]


@recurrent.register_fake
def _(
    x: torch.Tensor, weights: Sequence[torch.Tensor], hidden: torch.Tensor, cell: torch.Tensor | None, *how: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _mode, _layers, bidirectional = how
    shapes = tuple(tuple(w.shape) for w in weights)
    kept, packed = _sizes(tuple(x.shape), shapes, tuple(hidden.shape), x.dtype, x.device, *how)
    y = x.new_empty((*x.shape[:-1], hidden.shape[-1] * (1 + bidirectional)))
    last_cell = x.new_empty((0,) if cell is None else cell.shape)
    return y, x.new_empty(hidden.shape), last_cell, x.new_empty(kept, dtype=torch.uint8), x.new_empty(packed)


@recurrent_backward.register_fake
def _(
    _gradient: torch.Tensor,
    _of_last: torch.Tensor,
    _of_cell: torch.Tensor | None,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    *_rest: object,
) -> list[torch.Tensor]:
    like = [x, hidden, hidden, *weights]
    return [w.new_empty(w.shape) for w in like]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, hidden, cell, *ctx.how = inputs
    y, _, _, kept, packed = output
    ctx.count = len(weights)
    ctx.save_for_backward(x, hidden, cell, y, kept, packed, *weights)


def _differentiated(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    x, hidden, cell, y, kept, packed, *weights = ctx.saved_tensors
    of_cell = None if cell is None else gradients[2]
    found = torch.ops.weft.recurrent_backward.default(
        gradients[0], gradients[1], of_cell, x, weights, hidden, cell, y, kept, packed, *ctx.how
    )
    of_cell = None if cell is None else found[2]
    return (found[0], list(found[3:]), found[1], of_cell, *(None for _ in ctx.how))


recurrent.register_autograd(_differentiated, setup_context=_keep)
