"""Blocks of the ten networks: primitives agree with eager, tightly in float64, and nothing falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frontends.torch.support import check
from torch import nn


class Attention(nn.Module):
    def __init__(self, causal: bool = False, mask: Any = None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.causal, self.mask = causal, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, s, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).reshape(n, s, 32))


class LinearAttention(nn.Module):
    """EfficientViT's: relu features, no softmax, one product with a column of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(n, 2, 24, h * w).chunk(3, dim=2)
        q, k = F.relu(q), F.relu(k)
        v = F.pad(v, (0, 0, 0, 1), value=1.0)
        out = (v @ k.transpose(-1, -2)) @ q
        out = out[:, :, :-1] / (out[:, :, -1:] + 1e-6)
        return self.proj(out.reshape(n, c, h, w)) + x


class Focus(nn.Module):
    """YOLOX's stem."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(12, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2])
        return self.conv(torch.cat(parts, dim=1))


class Cross(nn.Module):
    """YOLOv4's stage: split, mish, concatenation, spatial pyramid, nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Mish())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.split(self.conv(x), [3, 5], dim=1)
        pyramid = [F.max_pool2d(b, k, 1, k // 2) for k in (5, 9)]
        return F.interpolate(torch.cat([a, *pyramid], dim=1), scale_factor=2.0, mode="nearest")


class Embedding(nn.Module):
    """BERT's and GPT's input."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(50, 16), nn.Embedding(12, 16), nn.LayerNorm(16, eps=1e-12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))[None]
        return self.norm(x)


class Overlap(nn.Module):
    """SegFormer's patches, reduced attention input and depthwise feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.LayerNorm(16)
        self.depth, self.reduce = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        n, c, h, w = x.shape
        t = self.norm(x.flatten(2).transpose(1, 2))
        d = F.gelu(self.depth(t.transpose(1, 2).view(n, c, h, w)))
        return F.interpolate(self.reduce(d), size=(h, w), mode="bilinear", align_corners=False)


def conv_block(*tail: Any, bias: bool = False) -> Any:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=bias), nn.BatchNorm2d(8), *tail)


IMAGE = (2, 3, 16, 20)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (lambda: conv_block(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 1)), IMAGE),
    "vgg head": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d((7, 7)), nn.Flatten(), nn.Linear(147, 9), nn.ReLU(), nn.Softmax(1)),
        IMAGE,
    ),
    "inception": (
        lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 6, (1, 7), padding=(0, 3)), nn.AdaptiveAvgPool2d(1)),
        IMAGE,
    ),
    "candy": (
        lambda: nn.Sequential(nn.ReflectionPad2d(4), nn.Conv2d(3, 8, 9), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
                      nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.Conv2d(8, 3, 3)),
        (1, 3, 12, 10),
    ),
    "efficientvit": (LinearAttention, (2, 16, 6, 5)),
    "mbconv": (lambda: conv_block(nn.Hardswish(), nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.Hardsigmoid()), IMAGE),
    "yolox": (Focus, IMAGE),
    "yolov4": (Cross, (2, 8, 12, 12)),
    "segformer": (Overlap, (1, 3, 32, 40)),
    "attention": (Attention, (2, 5, 32)),
    "causal": (lambda: Attention(causal=True), (2, 5, 32)),
    "masked": (lambda: Attention(mask=torch.ones(5, 5).tril().bool()), (2, 5, 32)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12), nn.GELU("tanh"), nn.LayerNorm(12)),
        (3, 12),
    ),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 4, 3)), (2, 8, 6, 6)),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(12), nn.Linear(12, 3)), (2, 5, 12)),
    "decoder": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 4, 2, 1), nn.LeakyReLU(0.1), nn.PixelShuffle(1)),
        (1, 3, 5, 6),
    ),
    "corners": (lambda: nn.Upsample(size=(7, 11), mode="bilinear", align_corners=True), (1, 3, 5, 7)),
    "uneven nearest": (lambda: nn.Upsample(size=(7, 11)), (1, 3, 5, 8)),
    "activations": (
        lambda: nn.Sequential(
            nn.ELU(), nn.SELU(), nn.CELU(0.7), nn.Softplus(), nn.PReLU(), nn.ReLU6(), nn.Hardtanh(-2, 3),
            nn.LogSigmoid(), nn.Softmin(-1), nn.Tanh(), nn.Threshold(0.1, -1.0),
        ),
        (4, 9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    x = torch.randn(shape, dtype=dtype)
    imported = check(make().to(dtype), x, dtype=dtype)
    assert imported.operators > 0
    assert imported.notes == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", ["resnet", "mlp", "activations", "group norm"])
def test_sixteen_bit_block(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    limits = {"resnet": torch.bfloat16}.get(name, dtype)
    check(make().to(dtype), torch.randn(shape).to(dtype), dtype=limits)


def test_embedding() -> None:
    torch.manual_seed(0)
    check(Embedding().double(), torch.randint(0, 50, (2, 12)), dtype=torch.float64)


def test_grouped_heads() -> None:
    q, k, v = torch.randn(2, 8, 5, 4).double(), torch.randn(2, 2, 5, 4).double(), torch.randn(2, 2, 5, 4).double()
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v, dtype=torch.float64)
