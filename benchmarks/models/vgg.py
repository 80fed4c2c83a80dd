"""VGG-16: thirteen convolutions and three products, no normalisation.

Source: Simonyan and Zisserman, arXiv:1409.1556, configuration D.
"""

from __future__ import annotations

from torch import nn


def vgg16() -> nn.Module:
    """Image (n, 3, 224, 224) -> logits (n, 1000)."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    classifier = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *classifier)
