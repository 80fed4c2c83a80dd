"""EfficientViT-B1, classification: convolutions, and ReLU linear attention over two scales.

Source: Cai et al., arXiv:2205.14756.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.layers import Residual, conv_norm

HEAD_WIDTH = 16


def separable_conv(inputs: int, outputs: int) -> nn.Sequential:
    depthwise = conv_norm(inputs, inputs, 3, groups=inputs, activation=nn.Hardswish())
    return nn.Sequential(depthwise, conv_norm(inputs, outputs))


def inverted_bottleneck(inputs: int, outputs: int, stride: int = 1, *, norm_everywhere: bool) -> nn.Sequential:
    """Expand by 4, filter each channel, project. The later stages normalise the projection only."""
    wide = 4 * inputs
    if norm_everywhere:
        expand = conv_norm(inputs, wide, activation=nn.Hardswish())
        depthwise = conv_norm(wide, wide, 3, stride, groups=wide, activation=nn.Hardswish())
    else:
        expand = nn.Sequential(nn.Conv2d(inputs, wide, 1), nn.Hardswish())
        depthwise = nn.Sequential(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.Hardswish())
    return nn.Sequential(expand, depthwise, conv_norm(wide, outputs))


class LinearAttention(nn.Module):
    """Attention with the kernel ReLU(q)·ReLU(k), linear in the number of positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        heads = channels // HEAD_WIDTH
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        # the second scale: nearby tokens gathered by a 5 x 5 depthwise convolution, mixed within each head
        self.aggregate = nn.Sequential(
            nn.Conv2d(3 * channels, 3 * channels, 5, padding=2, groups=3 * channels, bias=False),
            nn.Conv2d(3 * channels, 3 * channels, 1, groups=3 * heads, bias=False),
        )
        self.project = conv_norm(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        qkv = self.qkv(x)
        both = torch.cat([qkv, self.aggregate(qkv)], 1).reshape(batch, -1, 3 * HEAD_WIDTH, height * width)
        q, k, v = both.split(HEAD_WIDTH, 2)
        if x.dtype in (torch.float16, torch.bfloat16):  # the sums below leave the range of 16 bits
            q, k, v = q.float(), k.float(), v.float()
        q, k = torch.relu(q), torch.relu(k)
        # a row of ones below v makes the same product give the denominator
        v = functional.pad(v, (0, 0, 0, 1), value=1.0)
        out = (v @ k.transpose(-1, -2)) @ q
        out = (out[:, :, :-1] / (out[:, :, -1:] + 1e-15)).to(x.dtype)
        return self.project(out.reshape(batch, -1, height, width))


def attention_block(channels: int) -> nn.Sequential:
    local = inverted_bottleneck(channels, channels, norm_everywhere=False)
    return nn.Sequential(Residual(LinearAttention(channels)), Residual(local))


class EfficientViT(nn.Module):
    """Image (n, 3, h, w) -> logits (n, classes); h and w are multiples of 32."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], head: tuple[int, int], classes: int) -> None:
        super().__init__()
        stem = [Residual(separable_conv(widths[0], widths[0])) for _ in range(depths[0])]
        layers: list[nn.Module] = [conv_norm(3, widths[0], 3, 2, activation=nn.Hardswish()), *stem]
        for k in (1, 2):
            layers.append(inverted_bottleneck(widths[k - 1], widths[k], 2, norm_everywhere=True))
            deeper = range(depths[k] - 1)
            layers.extend(Residual(inverted_bottleneck(widths[k], widths[k], norm_everywhere=True)) for _ in deeper)
        for k in (3, 4):
            layers.append(inverted_bottleneck(widths[k - 1], widths[k], 2, norm_everywhere=False))
            layers.extend(attention_block(widths[k]) for _ in range(depths[k]))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            conv_norm(widths[-1], head[0], activation=nn.Hardswish()),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(head[0], head[1], bias=False),
            nn.LayerNorm(head[1]),
            nn.Hardswish(),
            nn.Linear(head[1], classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def efficientvit_b1() -> nn.Module:
    return EfficientViT((16, 32, 64, 128, 256), (1, 2, 3, 3, 4), (1536, 1600), 1000)
