"""Small networks with odd channels, compiled with padded tensors among the alternatives or without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.orchestrate.alternatives import find_alternatives

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class Residual(nn.Module):
    """3x3 convolutions and sums, all of one width."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, width, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.classify = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        for first, second in zip(self.first, self.second, strict=True):
            x = torch.relu(x + second(torch.relu(first(x))))
        found: torch.Tensor = self.classify(x.mean((2, 3)))
        return found


class Words(nn.Module):
    """Norms, a residual and layers of a transformer whose width is no multiple of 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.before(x))))
        found: torch.Tensor = self.out(self.behind(x))
        return found


class Focus(nn.Module):
    """Four pixels beside each other as channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., i::2, j::2] for j in (0, 1) for i in (0, 1)], 1)


def layers(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between."""
    found: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        found += [nn.Linear(k, n), act()]
    return nn.Sequential(*found[:-1])


def convolutions(*widths: int, kernel: int = 3, stride: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Convolutions with an activation behind each."""
    found: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        found += [nn.Conv2d(k, n, kernel, stride, kernel // 2), act()]
    return nn.Sequential(*found)


def stem(width: int, kernel: int = 3, stride: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A first convolution, and one that leaves little to write."""
    return nn.Sequential(nn.Conv2d(3, width, kernel, stride, kernel // 2), act(), nn.Conv2d(width, 8, 1))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers 1003": (lambda: layers(1000, 1003, 1003, 1001, act=nn.GELU), (4096, 1000)),
    "residual 35": (lambda: Residual(35, 3), (8, 16, 56, 56)),
    "head 255": (lambda: convolutions(128, 255, 128, act=nn.SiLU), (8, 128, 40, 40)),
    "neck 3": (lambda: convolutions(64, 3, 64), (4, 64, 128, 128)),
    "chain 35": (lambda: convolutions(64, 35, 35, 35, 64), (8, 64, 56, 56)),
    "layers 100": (lambda: layers(128, 100, 100, 100, 64), (65536, 128)),
    "layers 255 35": (lambda: layers(512, 255, 35, 512), (8192, 512)),
    "words 300": (lambda: Words(300), (8192, 300)),
    "input 1001": (lambda: layers(1001, 512), (4096, 1001)),
    "focus yolox": (lambda: nn.Sequential(Focus(), *convolutions(12, 16, act=nn.SiLU)), (16, 3, 416, 416)),
    "stem vgg": (lambda: stem(64), (16, 3, 224, 224)),
    "stem yolov4": (lambda: stem(32, act=nn.Mish), (16, 3, 416, 416)),
    "stem resnet": (lambda: stem(64, kernel=7, stride=2), (16, 3, 224, 224)),
    "patches vit": (lambda: nn.Sequential(nn.Conv2d(3, 768, 16, 16), nn.Conv2d(768, 8, 1)), (16, 3, 224, 224)),
    "residual 35 b1": (lambda: Residual(35, 3), (1, 16, 56, 56)),
    "focus yolox b1": (lambda: nn.Sequential(Focus(), *convolutions(12, 16, act=nn.SiLU)), (1, 3, 416, 416)),
}


def compiled(module: nn.Module, x: torch.Tensor, options: weft.Options, *, padded: bool) -> weft.Compiled:
    """Compiled with padded tensors among the alternatives, or without."""
    with mock.patch("weft.platform.cuda.platform.find_alternatives", partial(_found, allowed=padded)):
        return weft.compile(module, (x,), options=options)


def _found(graph: object, *, strict: bool, on_gpu: bool, allowed: bool) -> object:
    return find_alternatives(graph, strict=strict, on_gpu=on_gpu and allowed)  # type: ignore[arg-type]
