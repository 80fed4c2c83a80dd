"""Memory-bound operators for `benchmarks.gpu_memory`: thirty of the ten networks and ten of about 1 GB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One operator. Tensors are f16; `last`: images lie channels-last, inputs and outputs."""

    name: str
    function: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    last: bool = False
    indices: int = 0
    """The last inputs that are indices, below this."""
    row_out: bool = False
    """The result lies channels-first although the inputs do not."""


@final
class AsModule(torch.nn.Module):
    """A function where a module is asked for."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """The function."""
        return self.function(*inputs)


def norm_pad(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.pad(F.relu(F.instance_norm(x, weight=g, bias=b)), (1, 1, 1, 1), mode="reflect")


def residual_norm_pad(x: Tensor, r: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.pad(F.instance_norm(x, weight=g, bias=b) + r, (1, 1, 1, 1), mode="reflect")


def norm_up_pad(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    y = F.interpolate(F.relu(F.instance_norm(x, weight=g, bias=b)), scale_factor=2.0, mode="nearest")
    return F.pad(y, (1, 1, 1, 1), mode="reflect")


def instance_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.instance_norm(x, weight=g, bias=b)


def group_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, g, b))


def up(tokens: Tensor, bias: Tensor, side: int, size: int) -> Tensor:
    n, _, c = tokens.shape
    image = (tokens + bias).transpose(1, 2).reshape(n, c, side, side)
    return F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)


def resize(tokens: Tensor, bias: Tensor) -> Tensor:
    return up(tokens, bias, 64, 128)


def resize_concat(a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor) -> Tensor:
    first = (a + bias).transpose(1, 2).reshape(a.shape[0], a.shape[2], 128, 128)
    return torch.cat([up(d, bias, 16, 128), up(c, bias, 32, 128), up(b, bias, 64, 128), first], 1)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x * 0.1767767, -1)


def layer_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g, b)


def residual_layer_norm(x: Tensor, r: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + r, x.shape[-1:], g, b)


def embed(words: Tensor, positions: Tensor, g: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    return F.layer_norm(words[ids] + positions, g.shape, g, b)


def gelu_tokens(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu((x + bias).flatten(2).transpose(1, 2))


def tokens_to_image(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def focus(x: Tensor) -> Tensor:
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


def spp(x: Tensor) -> Tensor:
    return torch.cat([x, *(F.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1)


def up_concat(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), y], 1)


def detect(box: Tensor, sure: Tensor, kind: Tensor) -> Tensor:
    return torch.cat([box, sure.sigmoid(), kind.sigmoid()], 1).flatten(2).transpose(1, 2).contiguous()


def two_mish(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([F.mish(x), F.mish(y)], 1)


def mean_pool(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def pool_concat(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b, F.max_pool2d(x, 3, 2)], 1)


def average_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1)


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def concat4(*xs: Tensor) -> Tensor:
    return torch.cat(list(xs), 1)


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def image_order(x: Tensor) -> Tensor:
    return F.relu(x)


def _norm(name: str, function: Callable[..., Tensor], n: int, c: int, side: int, more: int = 0) -> Case:
    image = (n, c, side, side)
    return Case(name, function, (image,) * (1 + more) + ((c,), (c,)), last=True)


NETWORK_CASES = (
    _norm("candy norm+relu+pad 32x224", norm_pad, 1, 32, 224),
    _norm("candy norm+relu+pad 64x112", norm_pad, 1, 64, 112),
    _norm("candy norm+residual+pad 128x56", residual_norm_pad, 1, 128, 56, 1),
    _norm("candy norm+relu+up+pad 128x56", norm_up_pad, 1, 128, 56),
    _norm("candy b16 norm+relu+pad 32x224", norm_pad, 16, 32, 224),
    _norm("candy b16 norm+residual+pad 128x56", residual_norm_pad, 16, 128, 56, 1),
    Case("candy norm 32x224 channels-first", instance_norm, ((1, 32, 224, 224), (32,), (32,))),
    _norm("group norm+silu 128x64", group_norm, 1, 128, 64),
    Case("segformer resize 256x64->128", resize, ((1, 4096, 256), (256,)), last=True),
    Case(
        "segformer resize+concat 1024x128",
        resize_concat,
        ((1, 16384, 256), (1, 4096, 256), (1, 1024, 256), (1, 256, 256), (256,)),
        last=True,
    ),
    Case("segformer softmax 16384x256", softmax, ((1, 1, 16384, 256),)),
    Case("segformer softmax 5x1024x256", softmax, ((1, 5, 1024, 256),)),
    Case("segformer layer norm 16384x32", layer_norm, ((1, 16384, 32), (32,), (32,))),
    Case("segformer residual+norm 1024x160", residual_layer_norm, ((1, 1024, 160), (1, 1024, 160), (160,), (160,))),
    Case("segformer b16 layer norm 262144x32", layer_norm, ((16, 16384, 32), (32,), (32,))),
    Case("segformer gelu+transpose 128x128x128", gelu_tokens, ((1, 128, 128, 128), (128, 1, 1))),
    Case("segformer transpose 16384x32", tokens_to_image, ((1, 16384, 32),)),
    Case("yolox focus 3x416", focus, ((1, 3, 416, 416),), last=True),
    Case("yolox silu 16x208", F.silu, ((1, 16, 208, 208),), last=True),
    Case("yolox spp 128x13", spp, ((1, 128, 13, 13),), last=True),
    Case("yolox up+concat 128x26", up_concat, ((1, 128, 13, 13), (1, 128, 26, 26)), last=True),
    Case("yolox head 85x52", detect, ((1, 4, 52, 52), (1, 1, 52, 52), (1, 80, 52, 52)), last=True),
    Case("yolov4 two mish 128x208", two_mish, ((1, 64, 208, 208), (1, 64, 208, 208)), last=True),
    Case("yolov4 b16 mish 64x208", F.mish, ((16, 64, 208, 208),), last=True),
    Case("inception average pool 192x35", average_pool, ((1, 192, 35, 35),), last=True),
    Case(
        "inception pool+concat 768x17",
        pool_concat,
        ((1, 288, 35, 35), (1, 384, 17, 17), (1, 96, 17, 17)),
        last=True,
    ),
    Case("inception b16 mean 2048x8", mean_pool, ((16, 2048, 8, 8),), last=True),
    Case("bert residual+norm 128x768", residual_layer_norm, ((1, 128, 768), (1, 128, 768), (768,), (768,))),
    Case("bert b16 residual+norm 2048x768", residual_layer_norm, ((16, 128, 768), (16, 128, 768), (768,), (768,))),
    Case("bert embedding+norm 128x768", embed, ((30522, 768), (128, 768), (768,), (768,), (1, 128)), indices=30522),
    Case("resnet b16 max pool 64x112", max_pool, ((16, 64, 112, 112),), last=True),
    Case("resnet b16 add+relu 256x56", add_relu, ((16, 256, 56, 56), (16, 256, 56, 56)), last=True),
)

_M = 1 << 20
LARGE_CASES = (
    Case("1 GB relu", F.relu, ((256 * _M,),)),
    Case("1 GB gelu", F.gelu, ((256 * _M,),)),
    Case("1 GB add+relu", add_relu, ((170 * _M,), (170 * _M,))),
    Case("1 GB softmax rows of 1024", softmax, ((256 * 1024, 1024),)),
    Case("1 GB layer norm rows of 4096", layer_norm, ((64 * 1024, 4096), (4096,), (4096,))),
    Case("1 GB sum of rows of 8192", row_sum, ((64 * 1024, 8192),)),
    Case("1 GB sum of columns", column_sum, ((64 * 1024, 8192),)),
    Case("1 GB transpose", transposed, ((16384, 16384),)),
    Case("1 GB channels-last to channels-first", image_order, ((64, 256, 128, 128),), last=True, row_out=True),
    _norm("1 GB instance norm 16x128x360", norm_pad, 16, 128, 360),
)
