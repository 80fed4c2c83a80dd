"""Runs `weft.attention`: attention by one kernel of the framework, where the framework itself would take that kernel.

The operators behind the kernels (`aten._scaled_dot_product_*`) believe their operands: a mask of another type, a head
size or strides that a kernel was not made for lead to wrong numbers or to an illegal access, which ends the use of the
GPU for the whole process. `torch.nn.functional.scaled_dot_product_attention` asks first; so does this step.

Nobody asks about addresses. The kernels load 16 bytes at a time; the memory-efficient one holds an address in bytes
against that number of elements, so that it takes one of f32 at 12 bytes behind a multiple of 16, and looks at no
stride between batches; the others look at neither. Nor do they of a mask, which the framework pads only for its
strides. A misaligned access ends the use of the GPU, too. Here, and where a plan calls the framework's own attention,
such operands are copied first (`readable`): a model may make that copy itself, and its graph does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda

from weft.generate.library.execute import instead_of, register

TARGET = "weft.attention"
COMPOSED = "aten.scaled_dot_product_attention.default"
"""The framework's own choice among its kernels."""
LOADED_BYTES = 16
"""What the kernels load at a time."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One kernel of the framework."""

    takes: Callable[[Any], bool]
    """The framework's own question, of `torch.backends.cuda.SDPAParams`."""
    run: Callable[..., torch.Tensor]
    """(q, k, v, mask, causal, scale) -> result."""


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None, causal: bool, scale: float | None
) -> torch.Tensor:
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    result: torch.Tensor = found[0]
    return result


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
    result: torch.Tensor = operator(q, k, v, mask, False, 0.0, causal, scale=scale)[0]
    return result


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    result: torch.Tensor = operator(q, k, v, mask, False, 0.0, causal, False, scale=scale)[0]
    return result


BACKENDS: Mapping[str, Backend] = {
    "flash": Backend(cuda.can_use_flash_attention, _flash),
    "efficient": Backend(cuda.can_use_efficient_attention, _efficient),
    "cudnn": Backend(cuda.can_use_cudnn_attention, _cudnn),
}


def attention(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """q (B, H, L, E), k and v (B, H, S, E), mask of the queries' type, added to the scores; gives (B, H, L, E).

    Raises:
        RuntimeError: the framework would not take this kernel for these operands.
    """
    kernel = BACKENDS[backend]
    q, k, v = readable(q), readable(k), readable(v)
    if mask is not None and mask.dtype is not q.dtype:
        raise RuntimeError(f"{backend} attention of {q.dtype} with a mask of {mask.dtype}")
    mask = None if mask is None else readable(mask, is_mask=True)
    if not kernel.takes(cuda.SDPAParams(q, k, v, mask, 0.0, causal, False)):
        shapes = ", ".join(f"{tuple(x.shape)} strides {x.stride()}" for x in (q, k, v))
        raise RuntimeError(f"the framework would not take {backend} attention for {q.dtype}: {shapes}")
    return kernel.run(q, k, v, mask, causal, scale)


def composed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, of operands that any of its kernels can read."""
    if q.is_cuda:
        q, k, v = readable(q), readable(k), readable(v)
        mask = None if mask is None else readable(mask, is_mask=True)
    operator = torch.ops.aten.scaled_dot_product_attention.default
    found: torch.Tensor = operator(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
    return found


def readable(x: torch.Tensor, *, is_mask: bool = False) -> torch.Tensor:
    """x, or a copy of it where rows that are loaded `LOADED_BYTES` at a time do not begin at multiples of that.

    Queries, keys and values in rows of other lengths, or with gaps, are not loaded so: the framework pads them or takes
    no such kernel. A mask in rows of any length is, where its strides are multiples: only for these it is padded.
    """
    size = x.element_size()
    if not x.ndim or not x.numel() or x.stride(-1) != 1:
        return x
    whole = x.shape[-1] * size % LOADED_BYTES == 0
    if not whole and not is_mask:
        return x
    between = (s * size for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1 and whole)
    if x.data_ptr() % LOADED_BYTES == 0 and all(s % LOADED_BYTES == 0 for s in between):
        return x
    once = x[tuple(slice(1) if s == 0 else slice(None) for s in x.stride())]  # what is broadcast stays so
    return once.clone(memory_format=torch.contiguous_format).expand(x.shape)


register(TARGET, attention)
instead_of(COMPOSED, composed)
