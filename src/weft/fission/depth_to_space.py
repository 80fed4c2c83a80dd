"""Rearrangements between channels and pixels: all are reshape, transpose, reshape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from weft.fission.pad import pad
from weft.fission.rule import axis_of, shape_of, table
from weft.ir.attrs import ConvAttrs, GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def depth_to_space(b: GraphBuilder, x: NodeId, *, block: int, mode: str = "DCR") -> NodeId | Declined:
    """depth_to_space(x) → reshape(transpose(reshape(x))).

    Shapes: x (N, C·b², H, W) gives (N, C, H·b, W·b). DCR takes the block from the slow part of the channel, CRD from
    the fast part.
    Conditions: b² divides the channels.
    Source: ONNX DepthToSpace.
    """
    shape = shape_of(b, x)
    if len(shape) != 4 or block < 1 or shape[1] % (block * block) or mode not in ("DCR", "CRD"):
        return Declined(f"depth_to_space of {b.type_of(x)} by {block}, mode {mode!r}")
    n, c, h, w = shape[0], shape[1] // (block * block), shape[2], shape[3]
    if mode == "DCR":
        y = b.transpose(b.reshape(x, (n, block, block, c, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        y = b.transpose(b.reshape(x, (n, c, block, block, h, w)), (0, 1, 4, 2, 5, 3))
    return b.reshape(y, (n, c, h * block, w * block))


def space_to_depth(b: GraphBuilder, x: NodeId, *, block: int, mode: str = "DCR") -> NodeId | Declined:
    """space_to_depth(x) → reshape(transpose(reshape(x))).

    Shapes: x (N, C, H·b, W·b) gives (N, C·b², H, W); the inverse of depth_to_space in the same mode.
    Conditions: b divides H and W.
    Source: ONNX SpaceToDepth (DCR); `aten.pixel_unshuffle` (CRD).
    """
    shape = shape_of(b, x)
    if len(shape) != 4 or block < 1 or shape[2] % block or shape[3] % block or mode not in ("DCR", "CRD"):
        return Declined(f"space_to_depth of {b.type_of(x)} by {block}, mode {mode!r}")
    n, c, h, w = shape[0], shape[1], shape[2] // block, shape[3] // block
    apart = b.reshape(x, (n, c, h, block, w, block))
    y = b.transpose(apart, (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return b.reshape(y, (n, c * block * block, h, w))


def pixel_shuffle(b: GraphBuilder, x: NodeId, *, factor: int) -> NodeId | Declined:
    """pixel_shuffle(x) → depth_to_space in mode CRD.

    Shapes: x (*B, C·r², H, W) gives (*B, C, H·r, W·r).
    Conditions: r² divides the channels.
    Source: arXiv:1609.05158; `torch.nn.functional.pixel_shuffle`.
    """
    return _any_batch(b, x, factor, depth_to_space)


def pixel_unshuffle(b: GraphBuilder, x: NodeId, *, factor: int) -> NodeId | Declined:
    """pixel_unshuffle(x) → space_to_depth in mode CRD.

    Shapes: x (*B, C, H·r, W·r) gives (*B, C·r², H, W).
    Conditions: r divides H and W.
    Source: `torch.nn.functional.pixel_unshuffle`.
    """
    return _any_batch(b, x, factor, space_to_depth)


def _any_batch(b: GraphBuilder, x: NodeId, factor: int, rule: Callable[..., NodeId | Declined]) -> NodeId | Declined:
    shape = shape_of(b, x)
    if len(shape) < 3:
        return Declined(f"pixel shuffle of {b.type_of(x)}")
    y = rule(b, b.reshape(x, (math.prod(shape[:-3]), *shape[-3:])), block=factor, mode="CRD")
    return y if isinstance(y, Declined) else b.reshape(y, (*shape[:-3], *shape_of(b, y)[1:]))


def channel_shuffle(b: GraphBuilder, x: NodeId, *, groups: int) -> NodeId | Declined:
    """channel_shuffle(x) → reshape(transpose(reshape(x))): channels (G, C/G) become (C/G, G).

    Shapes: x (N, C, *S), unchanged.
    Conditions: G divides C.
    Source: arXiv:1707.01083; `torch.nn.functional.channel_shuffle`.
    """
    shape = shape_of(b, x)
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        return Declined(f"channel_shuffle of {b.type_of(x)} in {groups} groups")
    apart = b.reshape(x, (shape[0], groups, shape[1] // groups, *shape[2:]))
    return b.reshape(b.transpose(apart, (0, 2, 1, *range(3, len(shape) + 1))), shape)


def unfold(
    b: GraphBuilder,
    x: NodeId,
    *,
    kernel: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    strides: Sequence[int],
) -> NodeId | Declined:
    """unfold(x) → reshape(transpose(gather(gather(pad(x))))): the patches of an image as columns.

    Shapes: x (N, C, H, W) or (C, H, W) gives (N, C·kh·kw, L).
    Conditions: two spatial dimensions; at least one patch.
    Source: `aten.im2col`.
    """
    shape = shape_of(b, x)
    if len(shape) == 3:
        y = unfold(b, b.reshape(x, (1, *shape)), kernel=kernel, dilations=dilations, pads=pads, strides=strides)
        return y if isinstance(y, Declined) else b.reshape(y, shape_of(b, y)[1:])
    if len(shape) != 4 or {len(kernel), len(dilations), len(pads), len(strides)} != {2}:
        return Declined(f"unfold of {b.type_of(x)}")
    if min(*kernel, *dilations, *strides) < 1:
        return Declined(f"unfold of {b.type_of(x)} with a size below 1")
    sizes = (0, 0, *pads)
    padded = pad(b, x, lo=sizes, hi=sizes)
    if isinstance(padded, Declined):
        return padded
    y = padded
    for k in (0, 1):
        axis = 2 + 2 * k
        reach = (kernel[k] - 1) * dilations[k] + 1
        count = (shape_of(b, padded)[2 + k] - reach) // strides[k] + 1
        if count < 1:
            return Declined(f"unfold of {b.type_of(x)} with kernel {tuple(kernel)}")
        at = np.arange(kernel[k])[:, None] * dilations[k] + np.arange(count)[None, :] * strides[k]
        y = b.add(Prim.GATHER, y, b.constant(at.astype(np.int64)), attrs=GatherAttrs(axis))
    _, _, kh, oh, kw, ow = shape_of(b, y)
    y = b.transpose(y, (0, 1, 2, 4, 3, 5))
    return b.reshape(y, (shape[0], shape[1] * kh * kw, oh * ow))


def unfold_axis(b: GraphBuilder, x: NodeId, *, axis: int, size: int, step: int) -> NodeId | Declined:
    """unfold_axis(x) → transpose(gather(x)): the windows of one axis, the window last.

    Shapes: x (…, n, …) gives (…, (n − size)/step + 1, …, size).
    Conditions: size ≤ n.
    Source: `torch.Tensor.unfold`.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined) or not shape or not 1 <= size <= shape[k] or step < 1:
        return Declined(f"unfold_axis of {b.type_of(x)} along {axis} in windows of {size} by {step}")
    at = np.arange((shape[k] - size) // step + 1)[:, None] * step + np.arange(size)[None, :]
    y = b.add(Prim.GATHER, x, b.constant(at.astype(np.int64)), attrs=GatherAttrs(k))
    rank = len(shape) + 1
    return b.transpose(y, (*(i for i in range(rank) if i != k + 1), k + 1))


def fold(
    b: GraphBuilder,
    x: NodeId,
    *,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilations: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    strides: Sequence[int],
) -> NodeId | Declined:
    """fold(x) → transposed conv(reshape(x)) with one weight of 1 per channel: overlapping patches are added.

    Shapes: x (N, C·∏k, L) gives (N, C, *output_size).
    Conditions: floats or integers; one to three spatial dimensions; the patches fill the output.
    Source: `aten.col2im`; ONNX Col2Im.
    """
    shape, n = shape_of(b, x), len(kernel)
    taps = math.prod(kernel)
    if {len(output_size), len(dilations), len(pads_lo), len(pads_hi), len(strides)} != {n}:
        return Declined(f"fold of {b.type_of(x)} with attributes of different lengths")
    if min((*kernel, *dilations, *strides), default=0) < 1:
        return Declined(f"fold of {b.type_of(x)} with a size below 1")
    if len(shape) != 3 or not 1 <= n <= 3 or shape[1] % taps or 0 in shape:
        return Declined(f"fold of {b.type_of(x)} with kernel {tuple(kernel)}")
    counts = tuple(
        (o + lo + hi - (k - 1) * d - 1) // s + 1
        for o, k, d, lo, hi, s in zip(output_size, kernel, dilations, pads_lo, pads_hi, strides, strict=True)
    )
    if math.prod(counts) != shape[2]:
        return Declined(f"fold of {b.type_of(x)}: {counts} patches do not match")
    natural = tuple(
        (m - 1) * s - lo - hi + (k - 1) * d + 1
        for m, s, lo, hi, k, d in zip(counts, strides, pads_lo, pads_hi, kernel, dilations, strict=True)
    )
    extra = tuple(o - m for o, m in zip(output_size, natural, strict=True))
    channels = shape[1] // taps
    weight = np.tile(np.eye(taps).reshape(taps, 1, *kernel), (channels, *(1,) * (n + 1)))
    attrs = ConvAttrs(tuple(strides), tuple(pads_lo), tuple(pads_hi), tuple(dilations), channels, True, extra)
    image = b.reshape(x, (shape[0], shape[1], *counts))
    return b.add(Prim.CONV, image, table(b, weight, b.type_of(x).dtype), attrs=attrs)
