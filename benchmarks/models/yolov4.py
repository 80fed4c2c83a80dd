"""YOLOv4: CSPDarknet53 with Mish, pyramid pooling, PANet with leaky ReLU, three heads.

Source: Bochkovskiy et al., arXiv:2004.10934.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.layers import Parallel, Residual, conv_norm


def mish(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return conv_norm(inputs, outputs, kernel, stride, activation=nn.Mish())


def leaky(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return conv_norm(inputs, outputs, kernel, stride, activation=nn.LeakyReLU(0.1))


def stage(inputs: int, outputs: int, depth: int, *, first: bool = False) -> nn.Sequential:
    """Halve the size; half of the channels (all of them in the first stage) go through residual blocks."""
    half = outputs if first else outputs // 2
    inner = half // 2 if first else half
    blocks = [Residual(nn.Sequential(mish(half, inner), mish(inner, half, 3))) for _ in range(depth)]
    deep = nn.Sequential(mish(outputs, half), *blocks, mish(half, half))
    return nn.Sequential(mish(inputs, outputs, 3, 2), Parallel([deep, mish(outputs, half)]), mish(2 * half, outputs))


def three(inputs: int, half: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(leaky(inputs, half), leaky(half, outputs, 3), leaky(outputs, half))


def five(inputs: int, half: int) -> nn.Sequential:
    return nn.Sequential(three(inputs, half, 2 * half), leaky(half, 2 * half, 3), leaky(2 * half, half))


def head(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(leaky(inputs, 2 * inputs, 3), nn.Conv2d(2 * inputs, outputs, 1))


def upsample(x: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(x, scale_factor=2, mode="nearest")


class YoloV4(nn.Module):
    """Image (n, 3, h, w) -> three maps (n, 3 · (5 + classes), h/s, w/s), s = 8, 16, 32."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        outputs = 3 * (5 + classes)
        self.stem = nn.Sequential(mish(3, 32, 3), stage(32, 64, 1, first=True), stage(64, 128, 2))
        self.stage3, self.stage4, self.stage5 = stage(128, 256, 8), stage(256, 512, 8), stage(512, 1024, 4)
        pools = [nn.MaxPool2d(k, 1, k // 2) for k in (13, 9, 5)]
        self.pool = nn.Sequential(three(1024, 512, 1024), Parallel([*pools, nn.Identity()]), three(2048, 512, 1024))
        self.up5, self.lateral4, self.merge4 = leaky(512, 256), leaky(512, 256), five(512, 256)
        self.up4, self.lateral3, self.merge3 = leaky(256, 128), leaky(256, 128), five(256, 128)
        self.down3, self.out4 = leaky(128, 256, 3, 2), five(512, 256)
        self.down4, self.out5 = leaky(256, 512, 3, 2), five(1024, 512)
        self.heads = nn.ModuleList(head(channels, outputs) for channels in (128, 256, 512))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x3 = self.stage3(self.stem(x))
        x4 = self.stage4(x3)
        x5 = self.pool(self.stage5(x4))
        y4 = self.merge4(torch.cat([self.lateral4(x4), upsample(self.up5(x5))], 1))
        y3 = self.merge3(torch.cat([self.lateral3(x3), upsample(self.up4(y4))], 1))
        z4 = self.out4(torch.cat([self.down3(y3), y4], 1))
        z5 = self.out5(torch.cat([self.down4(z4), x5], 1))
        return self.heads[0](y3), self.heads[1](z4), self.heads[2](z5)


def yolov4() -> nn.Module:
    return YoloV4(classes=80)
