"""Decoding by a small language model: a unit continues a batch of prompts; it may be paused behind each token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.models.llama import PROMPT, VOCABULARY, Llama
from benchmarks.process_jobs.decoding import Decoder

BATCH = 8
_ON_GPU = torch.cuda.is_available()
torch.manual_seed(0)
_NETWORK = Llama(width=2048, depth=4, heads=16, hidden=5632)
_DECODER = Decoder((_NETWORK.half().cuda() if _ON_GPU else _NETWORK).eval(), BATCH)


def unit(number: int) -> Iterator[None]:
    """One token of each prompt's begin is drawn by the number; the others are the likeliest."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (BATCH,), generator=generator).to("cuda" if _ON_GPU else "cpu")
    _DECODER.begin()
    for _ in range(PROMPT - 1):
        ids = _DECODER.step(ids).argmax(-1)
        yield
    _DECODER.step(ids)
