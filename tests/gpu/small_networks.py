"""Two small networks that have what the large ones are made of, what their outputs must be, and networks of nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from tests.typed import some
from torch import nn

import weft
from weft.frontends.torch.dtypes import FROM_TORCH
from weft.pipeline.finish import as_array, as_good
from weft.tune.tolerance import gate_b


class Cnn(nn.Module):
    """Stem, depthwise and pointwise convolutions with batch norms, a residual, pooling, a norm, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.BatchNorm2d(32), nn.Hardswish())
        self.pointwise = nn.Conv2d(32, 32, 1)
        self.pool = nn.MaxPool2d(2)
        self.wide = nn.Conv2d(32, 64, 3, 1, 1)
        self.norm = nn.InstanceNorm2d(64, affine=True)
        self.classify = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.pointwise(self.depthwise(x))
        x = torch.relu(self.norm(self.wide(self.pool(x))))
        return self.classify(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.before(x)).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.join(found.transpose(1, 2).reshape(n, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Two blocks of attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x))


NETWORKS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "cnn": (Cnn, (4, 3, 96, 96)),
    "transformer": (Transformer, (4, 128, 64)),
}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A network on the GPU, compiled."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    exe: weft.Compiled
    options: weft.Options


def network(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The network with fixed random weights, and an input."""
    torch.manual_seed(seed)
    kind, shape = NETWORKS[name]
    module = kind().eval()
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                some(layer.running_mean).normal_(0, 0.2)
                some(layer.running_var).uniform_(0.5, 2.0)
    return module.to(dtype).cuda(), (torch.randn(shape).to(dtype).cuda(),)


def exact(module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The network in float64, on the same weights and inputs."""
    with torch.no_grad():
        found: torch.Tensor = copy.deepcopy(module).double()(*(x.double() for x in inputs))
    return found


def check(got: torch.Tensor, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Within the tolerance table: of float64, or of how far the framework's own arithmetic is from it."""
    kind = FROM_TORCH[got.dtype]
    mine, truth = as_array(got), as_array(exact(module, inputs))
    found = gate_b(kind, got=mine, want=truth)
    if found.ok:
        return
    saved = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.no_grad():
            plain = as_array(module(*inputs))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = saved
    assert as_good(kind, mine, plain, truth), found


def _layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(m for k, n in pairwise(widths) for m in (nn.Linear(k, n), nn.ReLU())))


def _words() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


def _images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), _layers(392, 4))


EMPTY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "no rows": (lambda: _layers(24, 64, 64, 3), (0, 24)),
    "no columns": (lambda: _layers(0, 64, 3), (4, 0)),
    "nothing in between": (lambda: _layers(24, 32, 0, 8), (4, 24)),
    "no sentences": (_words, (0, 16, 64)),
    "no words": (_words, (2, 0, 64)),
    "no images": (_images, (0, 3, 16, 16)),
}
"""Networks in which some value has no elements, and the shape of their input."""
