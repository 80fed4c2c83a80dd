"""What is trained: networks, batches that are drawn by number, losses and optimizers; each large and small."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.trained import LanguageModel, Recommender, Speech, UNet, VisionTransformer, mobilenet_v2, resnet

Tensors = tuple[torch.Tensor, ...]
Draw = Callable[[bool, torch.Generator], Tensors]
WORDS = {"bert_base": 30_522, "gpt2": 50_257}
SMALL_WORDS = 96
"""Of small language models; more than an embedding's rule takes."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One network and its batch."""

    build: Callable[[bool], nn.Module]
    """Of whether it is small."""
    draw: Callable[[bool, torch.Generator], Tensors]
    """Inputs and the target behind them."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    adam: bool
    """AdamW; else SGD with momentum."""
    images: bool = False
    """Channels lie last, where weights and inputs have four dimensions."""

    def optimizer(
        self, parameters: Iterable[torch.nn.Parameter], *, fused: bool, capturable: bool
    ) -> torch.optim.Optimizer:
        """`fused`: in kernels over all parameters. `capturable`: it can be recorded into a graph."""
        if self.adam:
            return torch.optim.AdamW(parameters, 1e-4, weight_decay=0.01, fused=fused, capturable=capturable)
        return torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=1e-4, fused=fused)

    def batch(self, number: int, *, small: bool) -> Tensors:
        """The same whenever it is drawn."""
        return self.draw(small, torch.Generator().manual_seed(number))


def classes(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the last dimension."""
    return functional.cross_entropy(found.flatten(0, -2).float(), target.flatten())


def squares(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean of squared differences."""
    return functional.mse_loss(found.float(), target)


def clicks(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy of logits."""
    return functional.binary_cross_entropy_with_logits(found.float(), target)


def _photographs(count: int) -> Draw:
    def draw(small: bool, g: torch.Generator) -> Tensors:
        rows, size, kinds = (4, 32, 10) if small else (count, 224, 1000)
        return torch.randn(rows, 3, size, size, generator=g), torch.randint(kinds, (rows,), generator=g)

    return draw


def _sentences(count: int, length: int, words: int) -> Draw:
    def draw(small: bool, g: torch.Generator) -> Tensors:
        shape, below = ((2, 8), SMALL_WORDS) if small else ((count, length), words)
        return tuple(torch.randint(below, shape, generator=g) for _ in range(2))

    return draw


def _noise(count: int, size: int) -> Draw:
    def draw(small: bool, g: torch.Generator) -> Tensors:
        shape = (2, 3, 16, 16) if small else (count, 3, size, size)
        return torch.randn(shape, generator=g), torch.randn(shape, generator=g)

    return draw


def _visits(count: int, most: int) -> Draw:
    def draw(small: bool, g: torch.Generator) -> Tensors:
        rows, tables, ids = (16, 3, 70) if small else (count, 26, most)
        found = torch.randn(rows, 13, generator=g), torch.randint(ids, (rows, tables), generator=g)
        return (*found, torch.randint(2, (rows, 1), generator=g).float())

    return draw


def _spoken(count: int, length: int) -> Draw:
    def draw(small: bool, g: torch.Generator) -> Tensors:
        rows, frames = (2, 8) if small else (count, length)
        return torch.randn(rows, 1, 161, frames, generator=g), torch.randint(29, (rows, frames // 2), generator=g)

    return draw


def _language(name: str) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        positions, causal = (1024, True) if name == "gpt2" else (512, False)
        if small:
            return LanguageModel(SMALL_WORDS, 8, 16, 1, 2, causal=causal)
        return LanguageModel(WORDS[name], positions, 768, 12, 12, causal=causal)

    return build


def _vit(small: bool) -> nn.Module:
    return VisionTransformer(32, 16, 16, 1, 2, 10) if small else VisionTransformer(224, 16, 768, 12, 12, 1000)


def _unet(small: bool) -> nn.Module:
    return UNet((8, 16), 4) if small else UNet((64, 128, 256, 512), 32)


def _dlrm(ids: int) -> Callable[[bool], nn.Module]:
    return lambda small: Recommender(3, 70, 8, (16,)) if small else Recommender(26, ids, 64, (512, 256))


def _speech(channels: int, width: int, depth: int) -> Callable[[bool], nn.Module]:
    return lambda small: Speech(2, 8, 1) if small else Speech(channels, width, depth)


def _resnet(count: int) -> Trained:
    return Trained(lambda small: resnet(small=small), _photographs(count), classes, False, True)


def _mobilenet(count: int) -> Trained:
    return Trained(lambda small: mobilenet_v2(small=small), _photographs(count), classes, False, True)


def _words(name: str, count: int, length: int) -> Trained:
    return Trained(_language(name), _sentences(count, length, WORDS[name]), classes, True)


CASES: dict[str, Trained] = {
    **{f"resnet50/b{n}": _resnet(n) for n in (64, 256)},
    "mobilenet_v2/b128": _mobilenet(128),
    "vit_b16/b64": Trained(_vit, _photographs(64), classes, True, True),
    **{f"bert_base/{n}x{length}": _words("bert_base", n, length) for n, length in ((16, 128), (8, 512))},
    "gpt2/8x512": _words("gpt2", 8, 512),
    "unet/16x256x256": Trained(_unet, _noise(16, 256), squares, True, True),
    "dlrm/b2048": Trained(_dlrm(100_000), _visits(2048, 100_000), clicks, False),
    "speech/b32": Trained(_speech(32, 512, 3), _spoken(32, 200), classes, False),
}
"""By name and batch: of a GPU."""
HOST_CASES: dict[str, Trained] = {
    "resnet50/b4": _resnet(4),
    "mobilenet_v2/b8": _mobilenet(8),
    "vit_b16/b2": Trained(_vit, _photographs(2), classes, True, True),
    "bert_base/2x128": _words("bert_base", 2, 128),
    "gpt2/1x256": _words("gpt2", 1, 256),
    "unet/1x128x128": Trained(_unet, _noise(1, 128), squares, True, True),
    "dlrm/b2048": Trained(_dlrm(10_000), _visits(2048, 10_000), clicks, False),
    "speech/b4": Trained(_speech(16, 256, 1), _spoken(4, 64), classes, False),
}
"""Of a processor: the same networks, with batches that two cores take a second for; tables and speech are smaller."""
