"""Attention of a training step as one call, and its gradients as another: nothing of the size of the scores is kept.

On a GPU these are the framework's FlashAttention-2 kernels, the gradients by their deterministic form. Elsewhere, and
in types that have no such kernels, both are written out.

Sources: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), for the
backward pass; `torch.ops.aten._scaled_dot_product_flash_attention`.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from weft.generate.library.deterministic import deterministic

QUERY = {"attention": 0, "attention_backward": 1}
"""Operators in the namespace `weft`: which argument is the query; the key follows it."""
NAMES = frozenset(QUERY)
LARGEST_HEAD = 128
"""Elements of a head up to which the kernels have a deterministic backward pass on every GPU from sm_80."""
_FLAGS = threading.Lock()
"""Whether sums have one order is a setting of the whole process."""


def is_taken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether kernels exist for operands (rows, heads, positions, elements of a head) of one 16-bit type on a GPU."""
    width = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and key.shape == value.shape
        and key.shape[-1] == width
        and width % 8 == 0
        and width <= LARGEST_HEAD
    )


def _heads_first(*given: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in given]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """(rows, heads, positions of q, those of k), in f32 at least."""
    q, k = (x.float() if x.dtype.itemsize == 2 else x for x in (q, k))
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    return scores


@torch.library.custom_op("weft::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · query keyᵀ) value, and the logarithms of the softmax's sums.

    Shapes: query (rows, positions, heads, elements), key and value alike with positions of their own; gives query's
    shape, and (rows, heads, positions) in f32, or f64 for operands in it. `causal`: positions as many, and none sees
    one behind it.
    """
    q, k, v = _heads_first(query, key, value)
    if is_taken(q, k, v):
        with _FLAGS, deterministic(warn_only=False):
            found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
        return found[0].transpose(1, 2).contiguous(), found[1].contiguous()
    scores = _scores(q, k, causal, scale)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.unsqueeze(-1)).exp()
    return torch.matmul(weights.to(v.dtype), v).transpose(1, 2).contiguous(), sums


@torch.library.custom_op("weft::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, of that of `out`; see `attention`, whose results are `out` and `sums`."""
    g, q, k, v, o = _heads_first(gradient, query, key, value, out)
    if is_taken(q, k, v):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        with _FLAGS, deterministic(warn_only=False):
            found = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
                g, q, k, v, o, sums, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
            )
        a, b, c = (x.transpose(1, 2).contiguous() for x in found[:3])
        return a, b, c
    weights = (_scores(q, k, causal, scale) - sums.unsqueeze(-1)).exp()
    wide = [x.float() if x.dtype.itemsize == 2 else x for x in (g, q, k, v, o)]
    g, q, k, v, o = wide
    inner = weights * (torch.matmul(g, v.transpose(-2, -1)) - (g * o).sum(-1, keepdim=True))
    if query.dtype.itemsize == 2:  # operands of products, as on tensor cores
        weights, inner = weights.to(query.dtype).float(), inner.to(query.dtype).float()
    found = (
        torch.matmul(inner, k) * scale,
        torch.matmul(inner.transpose(-2, -1), q) * scale,
        torch.matmul(weights.transpose(-2, -1), g),
    )
    a, b, c = (
        x.to(like.dtype).transpose(1, 2).contiguous() for x, like in zip(found, (query, key, value), strict=True)
    )
    return a, b, c


@attention.register_fake
def _(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *_rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    rows, positions, heads, _width = query.shape
    kind = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = (*query.shape[:-1], value.shape[-1])
    return query.new_empty(shape), query.new_empty((rows, heads, positions), dtype=kind)


@attention_backward.register_fake
def _(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c = (x.new_empty(x.shape) for x in (query, key, value))
    return a, b, c


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiated(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    found = torch.ops.weft.attention_backward.default(gradient.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.scale)
    return (*found, None, None)


attention.register_autograd(_differentiated, setup_context=_keep)
