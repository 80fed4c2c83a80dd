"""Slices of slices, of joined and of padded tensors; gathers that are slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import Prim
from weft.ir.rewrite import rewrite

_Inputs = tuple[NodeId, ...]


def _bounds(start: int, size: int, step: int) -> tuple[int, int]:
    """The least and the greatest index that a slice of at least one element reads."""
    last = start + (size - 1) * step
    return min(start, last), max(start, last)


def _slice(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    s, inner = cast("a.SliceAttrs", node.attrs), b.node(inputs[0])
    if 0 in s.sizes:
        return None  # an empty slice has no bounds
    if s.sizes == inner.type.shape and not any(s.starts) and all(step == 1 for step in s.steps):
        return inputs[0]
    rule = _SLICE_OF.get(inner.prim)
    return None if rule is None else rule(b, s, inner)


def _slice_of_slice(b: GraphBuilder, s: a.SliceAttrs, inner: Node) -> NodeId | None:
    t = cast("a.SliceAttrs", inner.attrs)
    starts = [first + start * step for first, start, step in zip(t.starts, s.starts, t.steps, strict=True)]
    steps = [x * y if n > 1 else 1 for x, y, n in zip(t.steps, s.steps, s.sizes, strict=True)]
    return b.slice(inner.inputs[0], starts, s.sizes, steps)


def _slice_of_concat(b: GraphBuilder, s: a.SliceAttrs, inner: Node) -> NodeId | None:
    axis = cast("a.ConcatAttrs", inner.attrs).axis
    low, high = _bounds(s.starts[axis], s.sizes[axis], s.steps[axis])
    begin = 0
    for piece in inner.inputs:
        end = begin + b.type_of(piece).shape[axis]
        if begin <= low and high < end:
            starts = [start - begin * (k == axis) for k, start in enumerate(s.starts)]
            return b.slice(piece, starts, s.sizes, s.steps)
        begin = end
    return None


def _slice_of_pad(b: GraphBuilder, s: a.SliceAttrs, inner: Node) -> NodeId | None:
    lo, shape = cast("a.PadAttrs", inner.attrs).lo, b.type_of(inner.inputs[0]).shape
    for pad, n, *piece in zip(lo, shape, s.starts, s.sizes, s.steps, strict=True):
        low, high = _bounds(*piece)
        if low < pad or high >= pad + n:
            return None
    return b.slice(inner.inputs[0], [start - pad for start, pad in zip(s.starts, lo, strict=True)], s.sizes, s.steps)


def _slice_of_broadcast(b: GraphBuilder, s: a.SliceAttrs, inner: Node) -> NodeId | None:
    source = b.type_of(inner.inputs[0]).shape
    lead = len(s.sizes) - len(source)
    pieces = zip(source, s.starts[lead:], s.sizes[lead:], s.steps[lead:], strict=True)
    cut = [(0, 1, 1) if n == 1 else tuple(piece) for n, *piece in pieces]
    starts, sizes, steps = zip(*cut, strict=True) if cut else ((), (), ())
    return b.broadcast(b.slice(inner.inputs[0], starts, sizes, steps), s.sizes)


_SLICE_OF: Mapping[Prim, Callable[[GraphBuilder, a.SliceAttrs, Node], NodeId | None]] = {
    Prim.SLICE: _slice_of_slice,
    Prim.CONCAT: _slice_of_concat,
    Prim.PAD: _slice_of_pad,
    Prim.BROADCAST: _slice_of_broadcast,
}


def _concat(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    pieces = [x for x in inputs if b.type_of(x).size > 0]
    if len(pieces) == 1:
        return pieces[0]
    # all of them empty: any one of the right size would do, but there need not be one
    return b.add(Prim.CONCAT, *pieces, attrs=node.attrs) if 0 < len(pieces) < len(inputs) else None


def _pad(_: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    p = cast("a.PadAttrs", node.attrs)
    return None if any(p.lo) or any(p.hi) else inputs[0]


def _gather(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    """Constant indices in arithmetic progression name a slice."""
    data, axis = b.type_of(inputs[0]), cast("a.GatherAttrs", node.attrs).axis
    indices = b.constant_value(inputs[1])
    if indices is None or indices.ndim > 1 or indices.size == 0:
        return None
    wanted = np.clip(indices.reshape(-1).astype(np.int64), 0, data.shape[axis] - 1)
    step = int(wanted[1] - wanted[0]) if wanted.size > 1 else 1
    if step == 0 or np.any(np.diff(wanted) != step):
        return None

    def along(value: int, others: Sequence[int]) -> list[int]:
        return [value if k == axis else other for k, other in enumerate(others)]

    ones = [1] * data.rank
    piece = b.slice(
        inputs[0], along(int(wanted[0]), [0] * data.rank), along(wanted.size, data.shape), along(step, ones)
    )
    return b.reshape(piece, node.type.shape)


_RULES: Mapping[Prim, Callable[[GraphBuilder, Node, _Inputs], NodeId | None]] = {
    Prim.SLICE: _slice,
    Prim.CONCAT: _concat,
    Prim.PAD: _pad,
    Prim.GATHER: _gather,
}


def _visit(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    rule = _RULES.get(node.prim)
    return None if rule is None else rule(b, node, inputs)


@dataclass(frozen=True, slots=True)
class ComposeSlicesPass:
    """slice(slice(x)) → slice(x); slice(concat(…, x, …)) → slice(x); slice(pad(x)) → slice(x), where it lies within x.

    Also: slice(broadcast(x)) → broadcast(slice(x)), a gather of evenly spaced constant indices → slice, a concat of one
    tensor → that tensor, a pad by nothing → its operand.
    """

    name: ClassVar[str] = "compose-slices"

    def requires(self, graph: Graph) -> Declined | None:
        """Some slice, concat, pad or gather."""
        return needs_any(graph, *_RULES)

    def run(self, graph: Graph) -> PassResult:
        """Exact."""
        return PassResult(*rewrite(graph, _visit))
