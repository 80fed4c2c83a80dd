"""Padding: constant, mirrored, repeated edge, and wrapped around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

from weft.fission.rule import shape_of
from weft.ir.attrs import GatherAttrs, PadAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim

_MODES = ("constant", "reflect", "edge", "wrap")


def pad(
    b: GraphBuilder, x: NodeId, *, lo: Sequence[int], hi: Sequence[int], mode: str = "constant", value: float = 0.0
) -> NodeId | Declined:
    """pad(x) → pad(slice(x)); wrap, and a mirror wider than the axis → gather(x) by a constant table per axis.

    Shapes: n becomes lo + n + hi; a negative extent cuts, before anything is added.
    Conditions: mode is constant, reflect (the edge is not repeated), edge or wrap; only constant pads an empty axis.
    Source: `aten.constant_pad_nd`, `aten.reflection_pad2d`, `aten.replication_pad2d`; ONNX Pad.
    """
    shape = shape_of(b, x)
    if mode not in _MODES or not len(lo) == len(hi) == len(shape):
        return Declined(f"pad of {b.type_of(x)} by {tuple(lo)}, {tuple(hi)}, mode {mode!r}")
    starts = tuple(max(-p, 0) for p in lo)
    sizes = tuple(n - s - max(-p, 0) for n, s, p in zip(shape, starts, hi, strict=True))
    if min(sizes, default=0) < 0:
        return Declined(f"pad of {b.type_of(x)} by {tuple(lo)}, {tuple(hi)} cuts more than there is")
    x = b.slice(x, tuple(s if n else 0 for s, n in zip(starts, sizes, strict=True)), sizes, (1,) * len(shape))
    before, after = (tuple(max(p, 0) for p in side) for side in (lo, hi))
    if not any(before + after):
        return x
    pairs = list(zip(sizes, before, after, strict=True))
    if mode != "constant" and any(n == 0 and (p or q) for n, p, q in pairs):
        return Declined(f"{mode} pad of an empty axis")
    if mode == "wrap" or (mode == "reflect" and any(max(p, q) >= max(n, 1) for n, p, q in pairs)):
        how = cast("Literal['wrap', 'reflect']", mode)
        for k, (n, p, q) in enumerate(pairs):
            if p or q:
                index = np.pad(np.arange(n, dtype=np.int64), (p, q), mode=how)
                x = b.add(Prim.GATHER, x, b.constant(index), attrs=GatherAttrs(k))
        return x
    kind = cast("Literal['constant', 'reflect', 'edge']", mode)
    return b.add(Prim.PAD, x, attrs=PadAttrs(before, after, kind, float(value) if mode == "constant" else 0.0))
