"""Runs `weft.attention`: attention by one kernel of the framework, where the framework itself would take that kernel.

The operators behind the kernels (`aten._scaled_dot_product_*`) believe their operands: a mask of another type, a head
size or strides that a kernel was not made for lead to wrong numbers or to an illegal access, which ends the use of the
GPU for the whole process. `torch.nn.functional.scaled_dot_product_attention` asks first; so does this step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda

from weft.generate.library.execute import register

TARGET = "weft.attention"


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
    if mask is not None and mask.dtype is not q.dtype:
        raise RuntimeError(f"{backend} attention of {q.dtype} with a mask of {mask.dtype}")
    if not kernel.takes(cuda.SDPAParams(q, k, v, mask, 0.0, causal, False)):
        shapes = ", ".join(f"{tuple(x.shape)} strides {x.stride()}" for x in (q, k, v))
        raise RuntimeError(f"the framework would not take {backend} attention for {q.dtype}: {shapes}")
    return kernel.run(q, k, v, mask, causal, scale)


register(TARGET, attention)
