"""Scales and shifts per channel move into the weights of the convolution or product before them.

This is how a batch norm in inference vanishes. It re-associates, so `strict` leaves it out.
Source: Jacob et al., arXiv:1712.05877, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, digests_of
from weft.ir.large import InStrips, in_strips
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import Prim
from weft.ir.reference import round_to
from weft.ir.rewrite import Replacement, live_nodes, replace_nodes
from weft.ir.types import FLOAT8, Array, DType

_F64 = npt.NDArray[np.float64]
_GREATEST = {
    DType.F64: float(np.finfo(np.float64).max),
    DType.F32: float(np.finfo(np.float32).max),
    DType.F16: 65504.0,
    DType.BF16: 2.0**127 * (2 - 2.0**-7),
    **{dtype: f.greatest for dtype, f in FLOAT8.items()},
}
_LEAST_NORMAL = {
    DType.F64: 2.0**-1022,
    DType.F32: 2.0**-126,
    DType.F16: 2.0**-14,
    DType.BF16: 2.0**-126,
    **{dtype: 2.0**f.least for dtype, f in FLOAT8.items()},
}
_AFFINE = frozenset({Prim.MUL, Prim.DIV, Prim.ADD, Prim.SUB})


@dataclass(slots=True)
class _Chain:
    """top = linear(x, w) · scale + shift, channel by channel; the scale and shift may be of a wider type (`wide`)."""

    linear: NodeId
    wide: DType
    scale: _F64
    shift: _F64
    members: tuple[NodeId, ...]
    rounds: bool = False
    """Everybody who reads the result rounds it to the linear primitive's own type first."""
    num_scales: int = 0
    num_shifts: int = 0


@dataclass(slots=True)
class _Finder:
    graph: Graph
    users: tuple[tuple[NodeId, ...], ...] = field(init=False)
    outputs: frozenset[NodeId] = field(init=False)

    def __post_init__(self) -> None:
        live = live_nodes(self.graph)
        self.users = tuple(tuple(u for u in users if live[u]) for users in self.graph.users())
        self.outputs = frozenset(self.graph.outputs)

    def chain(self, top: NodeId) -> _Chain | None:
        """The longest chain of affine primitives that ends in `top`, if it starts with a linear one."""
        steps: list[tuple[NodeId, NodeId]] = []
        casts: list[NodeId] = []
        at = top
        while self.graph.nodes[at].prim in _AFFINE or self._widens(at):
            above = at
            if self._widens(at):
                casts.append(at)
                at = self.graph.nodes[at].inputs[0]
            else:
                step = self._step(at)
                if step is None:
                    return None
                steps.append((at, step[1]))
                at = step[0]
            if self.users[at] != (above,) or at in self.outputs:
                return None  # somebody else reads what would change
        channels = self._num_channels(at)
        if channels is None:
            return None
        members = (*(node for node, _ in steps), *casts)
        wide = self.graph.type_of(top).dtype
        chain = _Chain(at, wide, np.ones(channels), np.zeros(channels), members, self._rounds(top, at))
        for node, constant in reversed(steps):
            values = self._per_channel(constant, at)
            if values is None or not _extend(chain, self.graph.nodes[node].prim, values):
                return None
        return chain

    def _widens(self, node: NodeId) -> bool:
        """Whether a node casts a 16-bit float to f32: a batch norm of 16-bit values computes in f32."""
        n = self.graph.nodes[node]
        if n.prim is not Prim.CAST or n.type.dtype is not DType.F32:
            return False
        return self.graph.type_of(n.inputs[0]).dtype in (DType.F16, DType.BF16)

    def _rounds(self, top: NodeId, linear: NodeId) -> bool:
        narrow = self.graph.type_of(linear).dtype
        readers = [self.graph.nodes[u] for u in self.users[top]]
        return top not in self.outputs and all(n.prim is Prim.CAST and n.type.dtype is narrow for n in readers)

    def _step(self, node: NodeId) -> tuple[NodeId, NodeId] | None:
        """(operand that varies, operand that is constant)."""
        x, y = self.graph.nodes[node].inputs
        if self._constant(y) is not None:
            return x, y
        commutes = self.graph.nodes[node].prim in (Prim.MUL, Prim.ADD)
        return (y, x) if commutes and self._constant(x) is not None else None

    def _constant(self, node: NodeId) -> Array | None:
        n = self.graph.nodes[node]
        source = n.inputs[0] if n.prim is Prim.BROADCAST else node
        return self.graph.constant(source) if self.graph.nodes[source].prim is Prim.CONSTANT else None

    def _num_channels(self, node: NodeId) -> int | None:
        n = self.graph.nodes[node]
        if n.prim not in (Prim.CONV, Prim.MATMUL) or not n.type.dtype.is_float:
            return None
        weight = self.graph.nodes[n.inputs[1]]
        is_folded = weight.prim is Prim.CONSTANT and weight.type.size > 0
        return n.type.shape[_channel_axis(n.prim)] if is_folded else None

    def _per_channel(self, constant: NodeId, linear: NodeId) -> _F64 | None:
        """The constant as one value per channel; None where it varies along anything else."""
        n, data = self.graph.nodes[linear], self._constant(constant)
        if data is None:
            return None
        axis = _channel_axis(n.prim) % n.type.rank
        shape = (1,) * (n.type.rank - data.ndim) + data.shape
        if any(size != 1 for k, size in enumerate(shape) if k != axis):
            return None
        values = cast("_F64", data.astype(np.float64).reshape(-1))
        return np.broadcast_to(values, (n.type.shape[axis],))


def _channel_axis(prim: Prim) -> int:
    return 1 if prim is Prim.CONV else -1


def _extend(chain: _Chain, prim: Prim, values: _F64) -> bool:
    """Add one primitive to the end of a chain; False where the result cannot be held."""
    with np.errstate(all="ignore"):
        if prim in (Prim.MUL, Prim.DIV):
            factor = values if prim is Prim.MUL else 1 / values
            chain.scale, chain.shift = chain.scale * factor, chain.shift * factor
            chain.num_scales += 1
        else:
            chain.shift = chain.shift + values if prim is Prim.ADD else chain.shift - values
            chain.num_shifts += 1
    return bool(np.all(np.isfinite(chain.scale)) and np.all(np.isfinite(chain.shift)))


_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Scaling:
    """A weight times factors that can be held; not computed yet."""

    weight: Array
    factor: _F64
    """Broadcasts to the weight."""
    dtype: DType
    shape: tuple[int, ...]
    """Of the result."""


def scaling_of(weight: Array, scale: _F64, dtype: DType, conv: a.ConvAttrs | None) -> Scaling | Declined:
    """What makes the weight of a linear primitive whose results are scaled channel by channel.

    Shapes: scale (channels,); weight (o, c/groups, *k), transposed (c, o/groups, *k), or (…, k, n) with `conv` None.
    """
    axes: tuple[int, ...] = (weight.ndim - 1,)
    grouped, factor = weight, scale.reshape((1,) * (weight.ndim - 1) + scale.shape)
    if conv is not None and not conv.transposed:
        axes, factor = (0,), scale.reshape(-1, *[1] * (weight.ndim - 1))
    elif conv is not None:  # (groups, c/groups, o/groups, *k)
        grouped, axes = weight.reshape(conv.groups, -1, *weight.shape[1:]), (0, 2)
        factor = scale.reshape(conv.groups, 1, -1, *[1] * (weight.ndim - 2))
    others = tuple(k for k in range(grouped.ndim) if k not in axes)
    size = _magnitudes(grouped, others)
    with np.errstate(all="ignore"):
        greatest = size * np.abs(factor)
    if not np.all(greatest <= _GREATEST[dtype]):
        return Declined(f"a scaled weight is not finite in {dtype.value}")
    if np.any((greatest < _LEAST_NORMAL[dtype]) & (size > 0) & (factor != 0)):
        return Declined(f"scaled weights lose bits: too small for {dtype.value}")
    return Scaling(grouped, factor, dtype, weight.shape)


def _magnitudes(weight: Array, axes: tuple[int, ...]) -> _F64:
    """Greatest magnitudes along some axes, which stay with size 1; not finite where a weight is not.

    By the bits without the sign, whose order is that of magnitudes: NumPy compares 16-bit floats one by one.
    """
    if weight.dtype not in (np.float16, np.float32) or not weight.size:
        numbers = cast("npt.NDArray[np.float64]", weight)
        most, least = numbers.max(axes, keepdims=True), numbers.min(axes, keepdims=True)
        return cast("_F64", np.maximum(most, -least).astype(np.float64))
    if weight.dtype == np.float16:
        found = (weight.view(np.uint16) & np.uint16(0x7FFF)).max(axes, keepdims=True).view(np.float16)
    else:
        found = (weight.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axes, keepdims=True).view(np.float32)
    return cast("_F64", found.astype(np.float64))


def scaled(scalings: Sequence[Scaling]) -> list[Array]:
    """The scaled weights: products in float64, rounded once; all of them side by side."""
    results: list[Array] = [np.empty(s.weight.shape, s.dtype.numpy) for s in scalings]
    in_strips([_strips(s, out) for s, out in zip(scalings, results, strict=True)])
    return [out.reshape(s.shape) for s, out in zip(scalings, results, strict=True)]


def _strips(s: Scaling, out: Array) -> InStrips:
    rows = max(1, _BLOCK // math.prod(s.weight.shape[1:]))  # the whole wide product would leave the caches

    def scale(first: int, end: int) -> None:
        for start in range(first, end, rows):
            here = slice(start, min(start + rows, end))
            part = s.factor[here] if len(s.factor) > 1 else s.factor
            out[here] = round_to(np.multiply(s.weight[here], part, dtype=np.float64), s.dtype)

    return InStrips(len(s.weight), out.nbytes, scale)


@dataclass(frozen=True, slots=True)
class _Fold:
    """A chain that will go, and how its weight is scaled."""

    chain: _Chain
    scaling: Scaling | None
    """None: the weight stays as it is."""


def _emit(graph: Graph, chain: _Chain, weight: Array, digest: str) -> Replacement:
    n = graph.nodes[chain.linear]

    def make(b: GraphBuilder, mapped: Mapping[NodeId, NodeId]) -> NodeId:
        w = b.constant(weight, n.type.dtype, digest=digest)
        with b.within(n.origin):
            y = b.add(n.prim, mapped[n.inputs[0]], w, attrs=n.attrs)
        dtype = n.type.dtype if chain.rounds else chain.wide
        if dtype is not n.type.dtype:
            y = b.cast(y, dtype)
        if chain.num_shifts and np.any(chain.shift):
            shift: Array = round_to(chain.shift, dtype)
            if n.prim is Prim.CONV:
                shift = shift.reshape(-1, *[1] * (n.type.rank - 2))
            y = b.add(Prim.ADD, y, b.broadcast(b.constant(shift, dtype), n.type.shape))
        return y if dtype is chain.wide else b.cast(y, chain.wide)

    return make


def _fold(graph: Graph, chain: _Chain) -> _Fold | None:
    if chain.num_scales == 0 and chain.num_shifts < 2:
        return None  # a bias by itself is where it should be
    n = graph.nodes[chain.linear]
    scaling: Scaling | Declined | None = None
    if chain.num_scales:
        conv = n.attrs if isinstance(n.attrs, a.ConvAttrs) else None
        scaling = scaling_of(graph.constant(n.inputs[1]), chain.scale, n.type.dtype, conv)
    if isinstance(scaling, Declined):
        return None
    with np.errstate(over="ignore"):
        if not np.all(np.isfinite(round_to(chain.shift, n.type.dtype).astype(np.float64))):
            return None  # the shift overflows the element type
    return _Fold(chain, scaling)


def _replacements(graph: Graph, folds: Mapping[NodeId, _Fold]) -> dict[NodeId, Replacement]:
    """What stands for the top of every chain; the weights of all are computed and hashed together."""
    given = [graph.nodes[f.chain.linear] for f in folds.values()]
    products = iter(scaled([f.scaling for f in folds.values() if f.scaling is not None]))
    weights = [
        graph.constant(n.inputs[1]) if f.scaling is None else next(products)
        for f, n in zip(folds.values(), given, strict=True)
    ]
    digests = digests_of([(n.type.dtype, w) for n, w in zip(given, weights, strict=True)])
    return {
        top: _emit(graph, f.chain, weight, digest)
        for (top, f), weight, digest in zip(folds.items(), weights, digests, strict=True)
    }


@dataclass(frozen=True, slots=True)
class FoldScalesPass:
    """linear(x, w)·s + t → linear(x, w·s) + t for s and t per output channel and w constant.

    The scale and shift may be in f32 behind a cast of a 16-bit result; what is left of the shift then stays in f32
    unless the sum is rounded back anyway.
    Conditions: nobody else reads what lies between; the scaled weights are finite and lose no bits.
    """

    name: ClassVar[str] = "fold-scales"

    def requires(self, graph: Graph) -> Declined | None:
        """Some convolution or product of matrices."""
        return needs_any(graph, Prim.CONV, Prim.MATMUL)

    def run(self, graph: Graph) -> PassResult:
        """Re-associates: exact to a few roundings."""
        finder = _Finder(graph)
        live = live_nodes(graph)
        inside: set[NodeId] = set()
        found: dict[NodeId, _Fold] = {}
        for top in reversed(range(len(graph))):
            if top in inside or not live[top] or graph.nodes[top].prim not in _AFFINE:
                continue  # part of a longer chain, dead, or no end of one
            chain = finder.chain(top)
            fold = None if chain is None else _fold(graph, chain)
            if fold is not None:
                found[top] = fold
                inside.update(fold.chain.members)
        return PassResult(*replace_nodes(graph, _replacements(graph, found)))
