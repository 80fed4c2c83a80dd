"""Networks as they are trained: attention through the framework's function, heads and losses of training, no dropout.

Each has a small form with the same layers, for a processor. Sources: ResNet (arXiv:1512.03385), MobileNetV2
(arXiv:1801.04381), ViT (arXiv:2010.11929), BERT (arXiv:1810.04805), GPT-2 (Radford et al., 2019), U-Net
(arXiv:1505.04597) with the group norms of diffusion models (arXiv:2006.11239), DLRM (arXiv:1906.00091), Deep Speech 2
(arXiv:1512.02595) with LSTMs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.layers import conv_norm, split_heads
from benchmarks.models.resnet import Bottleneck, resnet50


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself, query, key and value of one product."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(y, self.heads) for y in self.inner(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.outer(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, normalised before (`first`) or after their residual sums."""

    def __init__(self, width: int, heads: int, *, first: bool, causal: bool = False, tanh: bool = False) -> None:
        super().__init__()
        self.first = first
        self.attention = Attention(width, heads, causal=causal)
        activation = nn.GELU(approximate="tanh" if tanh else "none")
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


class LanguageModel(nn.Module):
    """Token ids (n, positions) -> (n, positions, words), the last product with the table of words."""

    def __init__(self, words: int, positions: int, width: int, depth: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.causal = causal
        if not causal:
            self.sentences = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        blocks = (Block(width, heads, first=causal, causal=causal, tanh=causal) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Identity() if causal else nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = None if causal else nn.Parameter(torch.zeros(words))
        for table in self.modules():
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        if not self.causal:
            x = self.norm(x + self.sentences(torch.zeros_like(ids)))
        x = self.blocks(x)
        x = self.norm(x) if self.causal else self.head(x)
        return functional.linear(x, self.words.weight, self.bias)


class VisionTransformer(nn.Module):
    """Image (n, 3, size, size) -> logits (n, classes)."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, first=True) for _ in range(depth)))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1).to(x.dtype), x], 1) + self.positions
        return self.classify(self.norm(self.blocks(x))[:, 0])


class Inverted(nn.Module):
    """MobileNetV2's block: wider, depthwise, narrow again; added to its input where that has its shape."""

    def __init__(self, inputs: int, outputs: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = inputs * factor
        first = [conv_norm(inputs, wide, activation=nn.ReLU6())] if factor > 1 else []
        middle = conv_norm(wide, wide, 3, stride, groups=wide, activation=nn.ReLU6())
        self.main = nn.Sequential(*first, middle, conv_norm(wide, outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.main(x) if self.adds else self.main(x)


def mobilenet_v2(*, small: bool = False) -> nn.Module:
    """Image (n, 3, h, w) -> logits (n, 1000), small 10."""
    rows: Sequence[tuple[int, int, int, int]] = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    )  # fmt: skip
    inputs, last, classes = (8, 32, 10) if small else (32, 1280, 1000)
    layers: list[nn.Module] = [conv_norm(3, inputs, 3, 2, activation=nn.ReLU6())]
    for factor, outputs, depth, stride in ((2, 8, 2, 2), (2, 16, 1, 1)) if small else rows:
        for k in range(depth):
            layers.append(Inverted(inputs, outputs, stride if k == 0 else 1, factor))
            inputs = outputs
    layers.append(conv_norm(inputs, last, activation=nn.ReLU6()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))


def resnet(*, small: bool = False) -> nn.Module:
    """ResNet-50; small: two of its blocks, 10 classes."""
    if not small:
        return resnet50()
    return nn.Sequential(
        conv_norm(3, 8, 7, 2, activation=nn.ReLU()), nn.MaxPool2d(3, 2, 1), Bottleneck(8, 8, 1), Bottleneck(32, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Grouped(nn.Module):
    """Two convolutions of 3 x 3, each behind a group norm and SiLU, added to the input."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.GroupNorm(groups, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(groups, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1),
        )  # fmt: skip
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.main(x)


class UNet(nn.Module):
    """Image (n, 3, h, w) -> (n, 3, h, w); each level has half the pixels of the one before."""

    def __init__(self, widths: Sequence[int], groups: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(Grouped(a, a, groups) for a, _ in pairs)
        self.halve = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.middle = Grouped(widths[-1], widths[-1], groups)
        self.narrow = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in pairs)
        self.up = nn.ModuleList(Grouped(2 * a, a, groups) for a, _ in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        kept = []
        for block, halve in zip(self.down, self.halve, strict=True):
            x = block(x)
            kept.append(x)
            x = halve(x)
        x = self.middle(x)
        for block, narrow in zip(reversed(self.up), reversed(self.narrow), strict=True):  # type: ignore[arg-type]
            x = narrow(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = block(torch.cat([kept.pop(), x], 1))
        return self.last(x)


class Recommender(nn.Module):
    """Numbers (n, 13) and one id for each table (n, tables) -> a logit (n, 1)."""

    def __init__(self, tables: int, rows: int, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _layers([13, *hidden, width])
        count = tables + 1
        first, second = torch.tril_indices(count, count, -1).unbind()
        self.register_buffer("pairs", first * count + second)
        self.top = _layers([width + len(first), *hidden])
        self.logit = nn.Linear(hidden[-1], 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(numbers)
        rows = torch.stack([x, *(table(ids[:, k]).to(x.dtype) for k, table in enumerate(self.tables))], 1)
        products = (rows @ rows.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, torch.Tensor)
        return self.logit(self.top(torch.cat([x, products.index_select(1, self.pairs)], 1)))


def _layers(widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())))


class Speech(nn.Module):
    """Spectrum (n, 1, 161, frames) -> logits of letters (n, frames / 2, 29)."""

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), (2, 2), (20, 5), bias=False), nn.BatchNorm2d(channels), nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (21, 11), (2, 1), (10, 5), bias=False), nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.over = nn.LSTM(41 * channels, width, depth, batch_first=True, bidirectional=True)
        self.letters = nn.Linear(2 * width, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.letters(self.over(self.image(x).permute(0, 3, 1, 2).flatten(2))[0])
