"""Convolution and its transpose."""

from __future__ import annotations

from collections.abc import Sequence

from weft.fission.rule import ABSENT, per_channel
from weft.ir.attrs import ConvAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def conv(
    b: GraphBuilder,
    x: NodeId,
    w: NodeId,
    bias: NodeId = ABSENT,
    *,
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
) -> NodeId | Declined:
    """conv(x, w, bias) → conv(x, w) + bias.

    Shapes: x (N, C, *S) or (C, *S), w (O, C/groups, *K), bias (O,); one to three spatial dimensions.
    Conditions: one number type, pads ≥ 0.
    Source: `aten.convolution`; ONNX Conv.
    """
    attrs = ConvAttrs(tuple(strides), tuple(pads_lo), tuple(pads_hi), tuple(dilations), groups)
    return _conv(b, x, w, bias, attrs)


def conv_transpose(
    b: GraphBuilder,
    x: NodeId,
    w: NodeId,
    bias: NodeId = ABSENT,
    *,
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    output_padding: Sequence[int] = (),
) -> NodeId | Declined:
    """conv_transpose(x, w, bias) → transposed conv(x, w) + bias.

    Shapes: x (N, C, *S) or (C, *S), w (C, O/groups, *K), bias (O,); one to three spatial dimensions.
    Conditions: one number type, pads_lo ≥ 0. A negative pads_hi lengthens the output, as output padding does.
    Source: `aten.convolution` with transposed = True; ONNX ConvTranspose.
    """
    extra = tuple(output_padding) or (0,) * len(strides)
    if len(extra) != len(pads_hi):
        return Declined(f"{len(extra)} output paddings for {len(pads_hi)} pads")
    extra = tuple(e + max(-hi, 0) for e, hi in zip(extra, pads_hi, strict=True))
    hi = tuple(max(p, 0) for p in pads_hi)
    return _conv(b, x, w, bias, ConvAttrs(tuple(strides), tuple(pads_lo), hi, tuple(dilations), groups, True, extra))


def _conv(b: GraphBuilder, x: NodeId, w: NodeId, bias: NodeId, attrs: ConvAttrs) -> NodeId | Declined:
    s, t = b.type_of(x), b.type_of(w)
    spatial = len(attrs.strides)
    if not 1 <= spatial <= 3 or t.rank != spatial + 2 or s.rank not in (spatial + 1, spatial + 2):
        return Declined(f"convolution of {s} with {t} over {spatial} dimensions")
    if s.dtype is not t.dtype or s.dtype is DType.BOOL:
        return Declined(f"convolution of {s} with {t}")
    if not len(attrs.pads_lo) == len(attrs.pads_hi) == len(attrs.dilations) == spatial:
        return Declined("strides, pads and dilations of different lengths")
    if min(attrs.pads_lo + attrs.pads_hi + attrs.output_padding) < 0:
        return Declined("convolution with a negative pad")
    batched = s.rank == spatial + 2
    y = b.add(Prim.CONV, x if batched else b.reshape(x, (1, *s.shape)), w, attrs=attrs)
    if bias != ABSENT:
        y = b.apply(Prim.ADD, y, b.broadcast(per_channel(b, bias, spatial + 2), b.type_of(y).shape))
    return y if batched else b.reshape(y, b.type_of(y).shape[1:])
