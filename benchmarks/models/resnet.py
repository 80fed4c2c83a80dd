"""ResNet-50, with the stride on the 3 x 3 convolution.

Source: He et al., arXiv:1512.03385.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.layers import conv_norm


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            conv_norm(inputs, width, activation=nn.ReLU()),
            conv_norm(width, width, 3, stride, activation=nn.ReLU()),
            conv_norm(width, outputs),
        )
        self.shortcut = nn.Identity() if inputs == outputs else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """Image (n, 3, h, w) -> logits (n, 1000)."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2, activation=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for k, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if k > 0 and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
