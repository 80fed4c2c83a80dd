"""BERT-base without the pooler.

Source: Devlin et al., arXiv:1810.04805.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.layers import SelfAttention

VOCABULARY = 30_522


class Layer(nn.Module):
    """Attention and feed-forward, each normalised after its residual sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


class Bert(nn.Module):
    """Token ids (n, positions) -> (n, positions, width); one sentence, nothing masked."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(512, width)
        self.sentences = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.positions(where) + self.sentences(torch.zeros_like(ids))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def bert_base() -> nn.Module:
    return Bert(width=768, depth=12, heads=12)
