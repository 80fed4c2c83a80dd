"""What a training step is: a model and its loss, the tensors that it reads, and all that decides its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.training.updates import Rule

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tensors:
    """What a step reads besides its inputs, and may write."""

    trained: Named
    """Parameters that are differentiated and updated, each once, by their first names."""
    fixed: Named
    """Buffers, and parameters that stay as they are."""


@dataclass(frozen=True)
class Scaling:
    """How a `torch.amp.GradScaler` changes its scale."""

    growth: float
    backoff: float
    interval: int


Order = tuple[int, ...]
"""Dimensions of a dense tensor from the outermost in memory on; empty: as they are.

A step takes its parameters, their state, their sums and its inputs with their dimensions in this order, so that a plan
reads and writes them where they lie, channels last too.
"""


def order_of(x: torch.Tensor) -> Order:
    """In which a dense tensor lies in memory; empty where it is row-major, or not dense."""
    if x.dim() < 2 or x.is_contiguous():
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda k: (-strides[k], k)))
    return order if x.permute(order).is_contiguous() else ()


def laid(x: torch.Tensor, order: Order) -> torch.Tensor:
    """With its dimensions in that order: a view."""
    return x.permute(order) if order else x


def unlaid(x: torch.Tensor, order: Order) -> torch.Tensor:
    """Of what `laid` gives, the tensor that it was."""
    return x.permute([order.index(k) for k in range(len(order))]) if order else x


@dataclass(frozen=True)
class Form:
    """What the graph of a step depends on, besides model and shapes."""

    rules: tuple[Rule, ...]
    """One per group of parameters."""
    groups: tuple[int, ...]
    """Of each trained parameter."""
    counters: tuple[int, ...]
    """Of each trained parameter: which number of steps is its own; -1: its rule has none."""
    clip_norm: float = 0.0
    skips: bool = False
    scaling: Scaling | None = None
    autocast: torch.dtype | None = None
    batches: int = 1
    """Whose gradients, each divided by it, are summed before parameters are updated."""
    last: bool = True
    """Whether it is the last of these batches; else gradients are added to sums and nothing is updated."""
    orders: tuple[Order, ...] = ()
    """Of each trained parameter, and of each input; empty: all are row-major."""

    def order(self, position: int) -> Order:
        """Of a trained parameter, or behind them of an input."""
        return self.orders[position] if self.orders else ()


class Both(torch.nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: torch.nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.training = model.training

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The loss of all but the last input, which is the target."""
        return self.loss(self.model(*inputs[:-1]), inputs[-1])


def called(both: Both, state: Named, inputs: Sequence[torch.Tensor], form: Form) -> Any:
    """What the loss gives with the tensors of `state`, which tied ones share, under the form's autocast."""
    with contextlib.ExitStack() as stack:
        if form.autocast is not None:
            stack.enter_context(torch.autocast(inputs[0].device.type, form.autocast, cache_enabled=False))
        return torch.func.functional_call(both, dict(state), tuple(inputs), tie_weights=True)
