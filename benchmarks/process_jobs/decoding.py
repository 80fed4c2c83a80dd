"""A decoder of `benchmarks.models.llama` token by token: keys and values of the tokens before are kept.

The same weights and the same numbers as the network that reads a whole prompt: `Decoder` is held against it by a test.
"""

from __future__ import annotations

from typing import final

import torch
from torch.nn import functional

from benchmarks.models.llama import PROMPT, Layer, Llama


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


@final
class Decoder:
    """Of a batch of sequences, all at the same position."""

    def __init__(self, network: Llama, batch: int) -> None:
        self.network, self.batch, self.position = network, batch, 0
        weight = network.words.weight
        self._layers = [layer for layer in network.layers if isinstance(layer, Layer)]
        heads = self._layers[0].attention.heads
        shape = (len(self._layers), 2, batch, heads, PROMPT, weight.shape[1] // heads)
        self._kept = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        """Keys and values of each layer."""

    def begin(self) -> None:
        """New sequences."""
        self.position = 0

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Tokens (batch,) at the next position -> what comes behind them (batch, vocabulary).

        Raises:
            ValueError: behind the last position.
        """
        if self.position >= PROMPT:
            raise ValueError(f"position {self.position} of {PROMPT}")
        x = self.network.words(ids)
        for layer, kept in zip(self._layers, self._kept, strict=True):
            x = x + self._attention(layer, kept, layer.norm1(x))
            y = layer.norm2(x)
            x = x + layer.down(functional.silu(layer.gate(y)) * layer.up(y))
        self.position += 1
        found: torch.Tensor = self.network.head(self.network.norm(x))
        return found

    def _attention(self, layer: Layer, kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        own, at = layer.attention, self.position
        q, k, v = (f(x).unflatten(-1, (own.heads, -1)) for f in (own.query, own.key, own.value))
        cosine, sine = own.cosine[at], own.sine[at]
        kept[0, :, :, at], kept[1, :, :, at] = _turned(k, cosine, sine), v
        keys, values = kept[0, :, :, : at + 1], kept[1, :, :, : at + 1]
        scores = torch.einsum("bhd,bhtd->bht", _turned(q, cosine, sine), keys) * q.shape[-1] ** -0.5
        found = torch.einsum("bht,bhtd->bhd", scores.softmax(-1), values)
        result: torch.Tensor = own.output(found.flatten(1))
        return result
