"""SegFormer-B0: a pyramid of attention with reduced keys, and a decoder of linear layers.

Source: Xie et al., arXiv:2105.15203.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.layers import attend, conv_norm, split_heads


def to_sequence(x: torch.Tensor) -> torch.Tensor:
    """(n, c, h, w) -> (n, h · w, c)."""
    return x.flatten(2).transpose(1, 2)


def to_image(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(n, h · w, c) -> (n, c, h, w)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], height, width)


class Attention(nn.Module):
    """Every position attends to a map that is smaller by `reduction` in both directions."""

    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.reduce = nn.Conv2d(width, width, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(width) if reduction > 1 else None
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        source = x
        if self.reduce is not None and self.norm is not None:
            source = self.norm(to_sequence(self.reduce(to_image(x, height, width))))
        q = split_heads(self.query(x), self.heads)
        k, v = (split_heads(f(source), self.heads) for f in (self.key, self.value))
        return self.output(attend(q, k, v))


class MixedFeedForward(nn.Module):
    """The depthwise convolution tells where a position lies; there is no positional embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.depthwise = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        x = to_sequence(self.depthwise(to_image(self.expand(x), height, width)))
        return self.project(functional.gelu(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, reduction)
        self.feed_forward = MixedFeedForward(width)

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), height, width)
        return x + self.feed_forward(self.norm2(x), height, width)


class Stage(nn.Module):
    """Overlapping patches, then blocks."""

    def __init__(self, inputs: int, width: int, patch: int, stride: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(inputs, width, patch, stride, patch // 2)
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, reduction) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        height, width = x.shape[2:]
        x = self.norm_in(to_sequence(x))
        for block in self.blocks:
            x = block(x, height, width)
        return to_image(self.norm_out(x), height, width)


class SegFormer(nn.Module):
    """Image (n, 3, h, w) -> logits (n, classes, h/4, w/4)."""

    def __init__(self, widths: tuple[int, ...], decoder: int, classes: int) -> None:
        super().__init__()
        heads, reductions, patches = (1, 2, 5, 8), (8, 4, 2, 1), (7, 3, 3, 3)
        shapes = zip((3, *widths[:-1]), widths, patches, (4, 2, 2, 2), heads, reductions, strict=True)
        self.stages = nn.ModuleList(Stage(*shape) for shape in shapes)
        self.projections = nn.ModuleList(nn.Linear(width, decoder) for width in widths)
        self.fuse = conv_norm(4 * decoder, decoder, activation=nn.ReLU())
        self.classify = nn.Conv2d(decoder, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        size = levels[0].shape[2:]
        projected = []
        for level, projection in zip(levels, self.projections, strict=True):
            image = to_image(projection(to_sequence(level)), *level.shape[2:])
            projected.append(functional.interpolate(image, size=size, mode="bilinear", align_corners=False))
        return self.classify(self.fuse(torch.cat(projected[::-1], 1)))


def segformer_b0() -> nn.Module:
    return SegFormer((32, 64, 160, 256), decoder=256, classes=150)
