"""Fast neural style transfer, the network behind the "candy" model of the ONNX zoo.

Source: Johnson et al., arXiv:1603.08155, with instance norm (arXiv:1607.08022) and nearest upsampling.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.layers import Residual


def padded_conv(inputs: int, outputs: int, kernel: int, stride: int = 1, *, upsample: int = 1) -> nn.Sequential:
    """Reflection pads the border, where zeros would show as a frame."""
    layers: list[nn.Module] = [nn.Upsample(scale_factor=upsample, mode="nearest")] if upsample > 1 else []
    return nn.Sequential(*layers, nn.ReflectionPad2d(kernel // 2), nn.Conv2d(inputs, outputs, kernel, stride))


def conv_block(inputs: int, outputs: int, kernel: int, stride: int = 1, *, upsample: int = 1) -> nn.Sequential:
    conv = padded_conv(inputs, outputs, kernel, stride, upsample=upsample)
    return nn.Sequential(conv, nn.InstanceNorm2d(outputs, affine=True), nn.ReLU())


def residual_block(channels: int) -> Residual:
    second = nn.Sequential(padded_conv(channels, channels, 3), nn.InstanceNorm2d(channels, affine=True))
    return Residual(nn.Sequential(conv_block(channels, channels, 3), second))


def candy() -> nn.Module:
    """Image (n, 3, h, w) -> image of the same size; h and w are multiples of 4."""
    return nn.Sequential(
        conv_block(3, 32, 9),
        conv_block(32, 64, 3, 2),
        conv_block(64, 128, 3, 2),
        *(residual_block(128) for _ in range(5)),
        conv_block(128, 64, 3, upsample=2),
        conv_block(64, 32, 3, upsample=2),
        padded_conv(32, 3, 9),
    )
