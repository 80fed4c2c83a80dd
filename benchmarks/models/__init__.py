"""The benchmark networks, by our own definitions and with random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.models.bert import VOCABULARY, bert_base
from benchmarks.models.candy import candy
from benchmarks.models.efficientvit import efficientvit_b1
from benchmarks.models.inception import inception_v3
from benchmarks.models.llama import VOCABULARY as LLAMA_VOCABULARY
from benchmarks.models.llama import llama_4
from benchmarks.models.resnet import resnet50
from benchmarks.models.segformer import segformer_b0
from benchmarks.models.vgg import vgg16
from benchmarks.models.vit import vit_b16
from benchmarks.models.weights import randomise, settle_batch_norms
from benchmarks.models.yolov4 import yolov4
from benchmarks.models.yolox import yolox_nano

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Network:
    """One network at the size at which it is usually measured."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input, without the batch dimension."""
    num_parameters: int
    """As published (without auxiliary heads and poolers that inference does not run)."""
    vocabulary: int = 0
    """The input are int64 ids below this number; 0: float32 numbers."""

    def inputs(self, batch: int, seed: int) -> Tensors:
        """Random inputs (batch, *shape)."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, *self.shape)
        if self.vocabulary:
            return (torch.randint(self.vocabulary, shape, generator=generator),)
        return (torch.randn(shape, generator=generator),)


NETWORKS: Mapping[str, Network] = {
    "candy": Network(candy, (3, 224, 224), 1_679_235),
    "efficientvit_b1": Network(efficientvit_b1, (3, 224, 224), 9_100_000),
    "yolox_nano": Network(yolox_nano, (3, 416, 416), 910_000),
    "yolov4": Network(yolov4, (3, 416, 416), 64_400_000),
    "segformer_b0": Network(segformer_b0, (3, 512, 512), 3_700_000),
    "vgg16": Network(vgg16, (3, 224, 224), 138_357_544),
    "resnet50": Network(resnet50, (3, 224, 224), 25_557_032),
    "inception_v3": Network(inception_v3, (3, 299, 299), 23_834_568),
    "bert_base": Network(bert_base, (128,), 108_891_648, vocabulary=VOCABULARY),
    "vit_b16": Network(vit_b16, (3, 224, 224), 86_567_656),
}

FURTHER: Mapping[str, Network] = {
    "llama_4": Network(llama_4, (128,), 336_611_328, vocabulary=LLAMA_VOCABULARY),
}
"""Those that run beside others, and are in no other table."""


def load(name: str, batch: int = 1, seed: int = 0) -> tuple[nn.Module, Tensors]:
    """A network in evaluation mode and inputs for it; the weights depend on the seed, not on the batch.

    Raises:
        KeyError: no such network.
    """
    network = NETWORKS[name] if name in NETWORKS else FURTHER[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = network.build().eval().requires_grad_(False)
        randomise(module)
        # the first of them is the example that callers get
        settle_batch_norms(module, network.inputs(2, seed))
    return module, network.inputs(batch, seed)
