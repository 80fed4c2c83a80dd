"""Layers that several of the networks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

IntPair = int | tuple[int, int]


def same_padding(kernel: IntPair) -> IntPair:
    """Padding that keeps the size of an odd kernel's result at stride 1."""
    return kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: IntPair = 1,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: nn.Module | None = None,
    padding: IntPair | None = None,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Convolution without bias, batch norm and perhaps an activation."""
    padding = same_padding(kernel) if padding is None else padding
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs, eps=eps)
    return nn.Sequential(conv, norm) if activation is None else nn.Sequential(conv, norm, activation)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.main(x)


class Parallel(nn.Module):
    """Branches side by side, joined along the channels."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, positions, heads · width) -> (batch, heads, positions, width)."""
    batch, positions, width = x.shape
    return x.reshape(batch, positions, heads, width // heads).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / √width) v over (batch, heads, positions, width), joined to (batch, positions, heads · width)."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(f(x), self.heads) for f in (self.query, self.key, self.value))
        return self.output(attend(q, k, v))
