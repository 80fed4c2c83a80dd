"""ViT-B/16.

Source: Dosovitskiy et al., arXiv:2010.11929.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.layers import Residual, SelfAttention


def layer(width: int, heads: int) -> nn.Sequential:
    """Attention and feed-forward, each normalised before."""
    feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(
        Residual(nn.Sequential(nn.LayerNorm(width, eps=1e-6), SelfAttention(width, heads))),
        Residual(nn.Sequential(nn.LayerNorm(width, eps=1e-6), feed_forward)),
    )


class VisionTransformer(nn.Module):
    """Image (n, 3, size, size) -> logits (n, classes)."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.5 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classify = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.classify(self.norm(self.layers(x))[:, 0])


def vit_b16() -> nn.Module:
    return VisionTransformer(size=224, patch=16, width=768, depth=12, heads=12, classes=1000)
