"""Inception v3 without the auxiliary classifier, which only trains.

Source: Szegedy et al., arXiv:1512.00567.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.layers import IntPair, Parallel, conv_norm


def conv(inputs: int, outputs: int, kernel: IntPair = 1, stride: int = 1, padding: IntPair | None = None) -> nn.Module:
    return conv_norm(inputs, outputs, kernel, stride, padding=padding, activation=nn.ReLU(), eps=1e-3)


def chain(inputs: int, *steps: tuple[int, IntPair] | tuple[int, IntPair, int]) -> nn.Sequential:
    """Convolutions in a row, each (outputs, kernel) or, for one of stride 2 without padding, (outputs, kernel, 2)."""
    layers = []
    for outputs, kernel, *stride in steps:
        layers.append(conv(inputs, outputs, kernel, 2, 0) if stride else conv(inputs, outputs, kernel))
        inputs = outputs
    return nn.Sequential(*layers)


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, outputs))


def block_a(inputs: int, pool: int) -> Parallel:
    double = chain(inputs, (64, 1), (96, 3), (96, 3))
    return Parallel([chain(inputs, (64, 1)), chain(inputs, (48, 1), (64, 5)), double, pooled(inputs, pool)])


def block_b(inputs: int) -> Parallel:
    double = chain(inputs, (64, 1), (96, 3), (96, 3, 2))
    return Parallel([chain(inputs, (384, 3, 2)), double, nn.MaxPool2d(3, 2)])


def block_c(inputs: int, inner: int) -> Parallel:
    row, column = (1, 7), (7, 1)
    single = chain(inputs, (inner, 1), (inner, row), (192, column))
    double = chain(inputs, (inner, 1), (inner, column), (inner, row), (inner, column), (192, row))
    return Parallel([chain(inputs, (192, 1)), single, double, pooled(inputs, 192)])


def block_d(inputs: int) -> Parallel:
    deep = chain(inputs, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2))
    return Parallel([chain(inputs, (192, 1), (320, 3, 2)), deep, nn.MaxPool2d(3, 2)])


def block_e(inputs: int) -> Parallel:
    def both(outputs: int) -> Parallel:
        return Parallel([conv(outputs, 384, (1, 3)), conv(outputs, 384, (3, 1))])

    single = nn.Sequential(conv(inputs, 384), both(384))
    double = nn.Sequential(chain(inputs, (448, 1), (384, 3)), both(384))
    return Parallel([conv(inputs, 320), single, double, pooled(inputs, 192)])


def inception_v3() -> nn.Module:
    """Image (n, 3, 299, 299) -> logits (n, 1000)."""
    return nn.Sequential(
        conv(3, 32, 3, 2, 0),
        conv(32, 32, 3, 1, 0),
        conv(32, 64, 3),
        nn.MaxPool2d(3, 2),
        conv(64, 80),
        conv(80, 192, 3, 1, 0),
        nn.MaxPool2d(3, 2),
        block_a(192, 32),
        block_a(256, 64),
        block_a(288, 64),
        block_b(288),
        block_c(768, 128),
        block_c(768, 160),
        block_c(768, 160),
        block_c(768, 192),
        block_d(768),
        block_e(1280),
        block_e(2048),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, 1000),
    )
