"""A small Mamba (selective scan) of transformers with random weights, as a function of embeddings."""

from __future__ import annotations

import torch
from torch import nn

LAYERS, WIDTH, TOKENS = 2, 256, 64


class Mamba(nn.Module):
    """Embeddings to hidden states, by the loop over tokens that transformers has where no kernel is installed."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        import transformers

        config = transformers.MambaConfig(
            hidden_size=width, num_hidden_layers=layers, vocab_size=64, use_cache=False, use_mambapy=False
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = transformers.MambaModel(config).eval()

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same shape."""
        found: torch.Tensor = self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return found


def inputs(batch: int = 1, tokens: int = TOKENS, width: int = WIDTH) -> torch.Tensor:
    """Normal embeddings, f32 on the CPU."""
    return torch.randn((batch, tokens, width), generator=torch.Generator().manual_seed(1))
