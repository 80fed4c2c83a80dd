"""A decoder of four layers of the LLaMA kind, as it reads a prompt: RMS norms, rotary positions, gated feed-forward.

Source: Touvron et al., arXiv:2302.13971; positions: Su et al., arXiv:2104.09864. Sizes are those of a model of 1.1
billion parameters with 22 layers (arXiv:2401.02385), but keys and values of every head of 128.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.layers import split_heads

VOCABULARY = 32_000
PROMPT = 128
"""Tokens."""


def rotations(positions: int, width: int, base: float = 10_000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine (positions, width) of the angles by which halves of a head are turned."""
    steps = base ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(positions).float(), steps)
    return torch.cat([angles, angles], 1).cos(), torch.cat([angles, angles], 1).sin()


class Attention(nn.Module):
    """Every token to itself and those before."""

    cosine: torch.Tensor
    sine: torch.Tensor
    later: torch.Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        cosine, sine = rotations(PROMPT, width // heads)
        self.register_buffer("cosine", cosine)
        self.register_buffer("sine", sine)
        self.register_buffer("later", torch.full((PROMPT, PROMPT), -1e4).triu(1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-second, first], -1) * self.sine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(f(x), self.heads) for f in (self.query, self.key, self.value))
        scores = self._turned(q) @ self._turned(k).transpose(-2, -1) * q.shape[-1] ** -0.5 + self.later
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token ids (n, 128) -> what comes next (n, vocabulary)."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(Layer(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.words(ids)))[:, -1])


def llama_4() -> nn.Module:
    return Llama(width=2048, depth=4, heads=16, hidden=5632)
