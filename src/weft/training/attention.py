"""Attention of a training step, as it is traced: products in the operands' type, the softmax between them in f32.

torch's own parts (`SDPBackend.MATH`) multiply 16-bit operands as f32, which no tensor core does, and scale both before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@final
class AttentionInParts(TorchFunctionMode):
    """`scaled_dot_product_attention` by its parts, whose gradients are then the parts' own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = attention if func is functional.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


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
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
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
    # a row without anything left is 0
    weights = wide.softmax(-1) if attn_mask is None else torch.ops.aten._safe_softmax.default(wide, -1)
    return torch.matmul(functional.dropout(weights, dropout_p).to(scores.dtype), value)
