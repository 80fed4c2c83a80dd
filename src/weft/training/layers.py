"""Layers that a training step traces by their parts: attention is products of operands as they are, a softmax in f32.

On a GPU long ones are a call (`generate.library.trained_attention`).

torch's own parts (`SDPBackend.MATH`) multiply 16-bit operands as f32, which no tensor core does, and scale both before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from weft.generate.library import trained_attention, trained_recurrent


@final
class LayersInParts(TorchFunctionMode):
    """Attention by its parts, whose gradients are then the parts' own; recurrent layers as calls, or without cuDNN.

    The framework calls that for them even where tensors have no memory.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:  # in which no mode is asked
            return _with_own_attention(func)(*args, **(kwargs or {}))
        if (name := getattr(func, "__name__", "")) in trained_recurrent.MODES:
            if (called := _recurrent(name, *args, **(kwargs or {}))) is not None:
                return called
            with torch.backends.cudnn.flags(enabled=False):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _has_cudnn(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def _recurrent(
    name: str,
    x: torch.Tensor,
    states: Any,
    weights: Any,
    has_biases: Any,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[torch.Tensor, ...] | None:
    """A layer as one call, as `torch.lstm` and the like have it; None: it is none on a GPU, or one that is packed.

    Nor are those with dropout between layers or projections. Under autocast it is in f16, whatever that is to: eager's
    is.
    """
    if not isinstance(weights, list | tuple) or not isinstance(has_biases, bool) or not _has_cudnn(x):
        return None  # of a packed sequence the second argument is not the states
    hidden, cell = states if name == "lstm" else (states, None)
    apart = len(weights) == layers * (1 + bidirectional) * (4 if has_biases else 2)
    if not apart or x.dim() != 3 or (dropout and train) or hidden.shape[-1] != weights[1].shape[-1]:
        return None
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:  # which it leaves
        x, hidden, *weights = (t.to(torch.float16) for t in (x, hidden, *weights))
        cell = None if cell is None else cell.to(torch.float16)
    x = x.transpose(0, 1) if batch_first else x
    how = trained_recurrent.MODES[name], layers, bidirectional
    y, last, last_cell, _, _ = trained_recurrent.recurrent(x, list(weights), hidden, cell, *how)
    y = y.transpose(0, 1) if batch_first else y
    return (y, last) if cell is None else (y, last, last_cell)


def _with_own_attention(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the framework that finds ours by the name of its attention."""
    assert isinstance(func, FunctionType)
    names = {**func.__globals__, "scaled_dot_product_attention": attention}
    found = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    found.__kwdefaults__ = func.__kwdefaults__
    return found


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale · query keyᵀ + mask) value.

    Shapes: query (*B, H, L, E), key (*B, H, S, E), value (*B, H, S, F), or with `enable_gqa` fewer heads of the latter
    two; a mask broadcasts to (*B, H, L, S), and keeps where it is true, or is added. Scores and probabilities are
    rounded to 16 bits beside a product of that type, their softmax is in f32.
    Source: `torch.nn.functional.scaled_dot_product_attention`, which leaves a mask beside `is_causal` to its kernels.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: an attn_mask must not be set where is_causal=True")
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(shared, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    kind, before = query.dtype, 1.0
    if torch.is_autocast_enabled(query.device.type) and query.dtype is not torch.float64:  # which it leaves
        kind = torch.get_autocast_dtype(query.device.type)
    if attn_mask is None and dropout_p == 0:
        given = [x.to(kind) for x in (query, key, value)]
        if _in_one_call(given, is_causal=is_causal):
            q, k, v = (x.transpose(1, 2) for x in given)
            found: torch.Tensor = trained_attention.attention(q, k, v, is_causal, float(scale))[0]
            return found.transpose(1, 2)
    if kind is torch.float16 and 0 < abs(scale) < 1:
        # scores may pass 65504 before they are scaled; a power of two is exact
        before = 2.0 ** math.frexp(scale)[1]
    scores = torch.matmul(query * before if before != 1 else query, key.transpose(-2, -1))
    wide = (scores.float() if scores.dtype.itemsize == 2 else scores) * (scale / before)
    if is_causal:
        keep = torch.ones(wide.shape[-2:], dtype=torch.bool, device=wide.device).tril()
        wide = wide.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        wide = wide.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else wide + attn_mask
    weights = _Softmax.apply(wide, scores.dtype, attn_mask is not None)  # type: ignore[no-untyped-call]
    return torch.matmul(functional.dropout(weights, dropout_p), value)


CALLED_FROM = 128
"""Positions of query and key from which kernels of attention are called: below, the products cost next to nothing."""


def _in_one_call(given: Sequence[torch.Tensor], *, is_causal: bool) -> bool:
    """Whether attention is left to kernels of its own, which keep nothing of the size of the scores."""
    q, k, v = given
    if not trained_attention.is_taken(q, k, v) or (is_causal and q.shape[2] != k.shape[2]):
        return False
    return min(q.shape[2], k.shape[2]) >= CALLED_FROM


@final
class _Softmax(torch.autograd.Function):
    """Softmax of the last dimension, rounded to the type of the products; its gradient reads what was rounded.

    So a step keeps 16 bits of each probability: torch keeps those and 32.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: torch.dtype, safe: bool) -> torch.Tensor:
        # a row without anything left is 0
        y = torch.ops.aten._safe_softmax.default(x, -1) if safe else x.softmax(-1)
        y = y.to(kind)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (y,) = ctx.saved_tensors
        y, gradient = (x.float() if x.dtype.itemsize == 2 else x for x in (y, gradient))
        product = y * gradient
        return product - y * product.sum(-1, keepdim=True), None, None
