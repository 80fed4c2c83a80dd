"""Modules whose kernels hold what stands around a product or convolution: how to make them, inputs, kernels at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F


class Enlarged(nn.Module):
    """relu(conv(padded(doubled(x))))."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv, self.mode = nn.Conv2d(32, 48, 3), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return torch.relu(self.conv(F.pad(x, (1, 1, 1, 1), mode=self.mode)))


class Decoder(nn.Module):
    """relu(transposed convolution)."""

    def __init__(self, kernel: int, stride: int, padding: int = 0, extra: int = 0) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(32, 24, kernel, stride, padding, extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


class Gated(nn.Module):
    """SwiGLU or GEGLU of one matrix."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], width: int = 640) -> None:
        super().__init__()
        self.both, self.activation = nn.Linear(256, 2 * width), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.activation(gate) * value


class Heads(nn.Module):
    """A product as (image, head, row, column)."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keys(x).view(x.shape[0], x.shape[1], 8, 32).transpose(1, 2).contiguous()


class ChannelsLast(nn.Module):
    """A convolution whose result has its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 40, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.conv(x)).permute(0, 2, 3, 1).contiguous()


IMAGE, TOKENS = (2, 32, 20, 24), (2, 96, 256)
GROWN: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "upsampled, reflected": (lambda: Enlarged("reflect"), IMAGE, 1),
    "upsampled, edges": (lambda: Enlarged("replicate"), IMAGE, 1),
    "transposed 2x2/2": (lambda: Decoder(2, 2), IMAGE, 2),
    "transposed 3x3/2": (lambda: Decoder(3, 2, 1, 1), IMAGE, 5),
    "transposed 4x4/2": (lambda: Decoder(4, 2, 1), IMAGE, 2),
    "transposed 3x3/1": (lambda: Decoder(3, 1, 1), IMAGE, 1),
    "swiglu": (lambda: Gated(F.silu), TOKENS, 2),
    "geglu": (lambda: Gated(F.gelu), TOKENS, 2),
    "heads": (Heads, TOKENS, 1),
    "channels last": (ChannelsLast, IMAGE, 1),
}


def grown(name: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A module with random weights, and an input."""
    make, shape, _ = GROWN[name]
    torch.manual_seed(0)
    module = make().eval().to(device, dtype)
    return module, torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
