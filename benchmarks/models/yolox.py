"""YOLOX-nano: an anchor-free detector of depthwise separable convolutions.

Source: Ge et al., arXiv:2107.08430.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.layers import Parallel, Residual, conv_norm


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, groups: int = 1) -> nn.Sequential:
    return conv_norm(inputs, outputs, kernel, stride, groups=groups, activation=nn.SiLU(), eps=1e-3)


def separable(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(inputs, inputs, 3, stride, groups=inputs), conv(inputs, outputs))


def cross_stage(inputs: int, outputs: int, depth: int, *, shortcut: bool) -> nn.Sequential:
    """Half of the channels go through bottlenecks, the other half around them."""
    half = outputs // 2
    steps = [nn.Sequential(conv(half, half), separable(half, half)) for _ in range(depth)]
    deep = nn.Sequential(conv(inputs, half), *(map(Residual, steps) if shortcut else steps))
    return nn.Sequential(Parallel([deep, conv(inputs, half)]), conv(outputs, outputs))


def pyramid_pool(channels: int) -> nn.Sequential:
    half = channels // 2
    pools = [nn.MaxPool2d(k, 1, k // 2) for k in (5, 9, 13)]
    return nn.Sequential(conv(channels, half), Parallel([nn.Identity(), *pools]), conv(4 * half, channels))


class Head(nn.Module):
    """Box (4), objectness (1) and classes of each cell of one level."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = conv(inputs, width)
        self.class_branch = nn.Sequential(separable(width, width), separable(width, width))
        self.box_branch = nn.Sequential(separable(width, width), separable(width, width))
        self.classes = nn.Conv2d(width, classes, 1)
        self.box = nn.Conv2d(width, 4, 1)
        self.objectness = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        boxes = self.box_branch(x)
        parts = [self.box(boxes), self.objectness(boxes).sigmoid(), self.classes(self.class_branch(x)).sigmoid()]
        return torch.cat(parts, 1).flatten(2)


def upsample(x: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(x, scale_factor=2, mode="nearest")


class YoloX(nn.Module):
    """Image (n, 3, h, w) -> (n, cells, 5 + classes); h and w are multiples of 32."""

    def __init__(self, base: int, depth: int, classes: int) -> None:
        super().__init__()
        c2, c3, c4, c5 = (base * 2**k for k in range(1, 5))
        self.stem = conv(12, base, 3)
        self.stage2 = nn.Sequential(separable(base, c2, 2), cross_stage(c2, c2, depth, shortcut=True))
        self.stage3 = nn.Sequential(separable(c2, c3, 2), cross_stage(c3, c3, 3 * depth, shortcut=True))
        self.stage4 = nn.Sequential(separable(c3, c4, 2), cross_stage(c4, c4, 3 * depth, shortcut=True))
        self.stage5 = nn.Sequential(separable(c4, c5, 2), pyramid_pool(c5), cross_stage(c5, c5, depth, shortcut=False))
        self.lateral5 = conv(c5, c4)
        self.merge4 = cross_stage(2 * c4, c4, depth, shortcut=False)
        self.lateral4 = conv(c4, c3)
        self.merge3 = cross_stage(2 * c3, c3, depth, shortcut=False)
        self.down3 = separable(c3, c3, 2)
        self.out4 = cross_stage(2 * c3, c4, depth, shortcut=False)
        self.down4 = separable(c4, c4, 2)
        self.out5 = cross_stage(2 * c4, c5, depth, shortcut=False)
        self.heads = nn.ModuleList(Head(channels, c3, classes) for channels in (c3, c4, c5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the four pixels of each 2 x 2 cell become channels
        cells = [x[..., i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x3 = self.stage3(self.stage2(self.stem(torch.cat(cells, 1))))
        x4 = self.stage4(x3)
        top = self.lateral5(self.stage5(x4))
        middle = self.lateral4(self.merge4(torch.cat([upsample(top), x4], 1)))
        p3 = self.merge3(torch.cat([upsample(middle), x3], 1))
        p4 = self.out4(torch.cat([self.down3(p3), middle], 1))
        p5 = self.out5(torch.cat([self.down4(p4), top], 1))
        levels = [head(level) for head, level in zip(self.heads, (p3, p4, p5), strict=True)]
        return torch.cat(levels, 2).transpose(1, 2)


def yolox_nano() -> nn.Module:
    """Width 0.25, depth 0.33, 80 classes."""
    return YoloX(base=16, depth=1, classes=80)
