"""Channels padded to whole vectors of 16 bytes: a form of a tensor that kernels write and products read.

Channels (of an image, or of the rows of a matrix) that are no multiple of 8 halves or 4 floats begin at odd addresses:
no copy of 16 bytes finds them, no vector stores them. The padded form has zeros behind them. A contraction with a
constant weight writes it with columns of zeros behind its weight, and reads it with rows of zeros; what is elementwise
keeps it; a copy (`PAD`, or whatever kernel that is fused with) makes it of other values, and a slice gives back the
plain form to whom wants that. Which form a tensor has in a plan is decided by the program, at measured prices.

The lanes are zeros whatever the others hold: where a contraction reads them, a select has put zeros there, as a zero
weight would turn an infinity into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import Array, DType
from weft.ir.work import node_flops
from weft.orchestrate.alternatives.union import Maker

CHUNK = 16
"""Bytes that one instruction copies."""
TYPES = frozenset({DType.F16, DType.BF16, DType.F32})
LEAST_ROWS = 64
"""Rows of a product, or pixels, below which its left operand is nothing beside its weight."""
LEAST_FLOPS = 1 << 22
"""Of a contraction that reads padded channels."""
WORTH_A_COPY = 1 << 30
"""Of those in front of which a kernel of its own must pad what the caller gives."""
FEW = 4
"""Channels of given images that kernels of overlapping windows read as they are, four taps at a time."""
MOST_WASTE = 3.0
"""Padded channels over channels."""
MOST_NODES = 4096
"""Of padded forms; a graph with more has none."""
_SPATIAL = frozenset({Prim.WINDOW_MAX, Prim.WINDOW_SUM})
_REDUCED = frozenset({Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN})
_CARRIED = frozenset({Prim.RESHAPE, Prim.TRANSPOSE, Prim.SLICE, Prim.PAD, Prim.GATHER, Prim.CONCAT}) | _SPATIAL
"""What moves lanes and leaves zeros in them zeros: the select stands in front of these."""


class _Form(NamedTuple):
    """A node's value with `wide` channels along `axis`."""

    node: NodeId
    axis: int
    wide: int


def pad_channels(m: Maker) -> None:
    """conv(x, W) -> conv(pad(x), pad(W)) and the same for x @ W, where pad(x) is written by the kernel that makes x.

    Conditions: f16, bf16 or f32; constant W; one group; channels that are no whole vectors of 16 bytes. Graph inputs
    and results keep their form: a copy of an input is offered where the contraction is large, a slice for results.
    """
    readers = {i: form for i in range(len(m.graph)) if (form := _wanted(m, i)) is not None}
    if m.room and any(_large(m, i) for i in readers):
        _Padding(m, readers).run()


def padded_width(channels: int, dtype: DType) -> int:
    """Channels rounded up to whole vectors."""
    lanes = CHUNK // dtype.itemsize
    return -(-channels // lanes) * lanes


def padded_copy(m: Maker, node: NodeId, axis: int, wide: int) -> NodeId:
    """A value with zeros behind it along one axis."""
    shape = m.b.type_of(node).shape
    hi = tuple(wide - n if i == axis else 0 for i, n in enumerate(shape))
    return m.b.add(Prim.PAD, node, attrs=a.PadAttrs((0,) * len(shape), hi))


def _contraction(m: Maker, i: NodeId) -> bool:
    """Whether a node is a product or convolution, over all channels, with a constant weight."""
    node = m.graph.nodes[i]
    if node.prim not in (Prim.MATMUL, Prim.CONV) or node.type.dtype not in TYPES or not node.type.size:
        return False
    weight = m.graph.nodes[node.inputs[1]]
    if weight.prim is not Prim.CONSTANT or not weight.type.size:
        return False
    if isinstance(node.attrs, a.ConvAttrs):
        return node.attrs.groups == 1 and not node.attrs.transposed
    return weight.type.rank == 2 and node.type.rank >= 2


def _wanted(m: Maker, i: NodeId) -> _Form | None:
    """The padded form that a node would read in place of its left operand; None where that needs none."""
    if not _contraction(m, i):
        return None
    node = m.graph.nodes[i]
    x = m.graph.type_of(node.inputs[0])
    axis = 1 if node.prim is Prim.CONV else x.rank - 1
    channels, wide = x.shape[axis], padded_width(x.shape[axis], x.dtype)
    if channels == 1 or wide == channels or wide > MOST_WASTE * channels:
        return None
    return _Form(node.inputs[0], axis, wide)


def _large(m: Maker, i: NodeId) -> bool:
    """Whether a contraction is one that may gain by another form of its left operand."""
    node = m.graph.nodes[i]
    x = m.graph.type_of(node.inputs[0])
    rows = x.size // (x.shape[1] if node.prim is Prim.CONV else x.shape[-1])
    return rows >= LEAST_ROWS and node_flops(node, m.graph) >= LEAST_FLOPS


@dataclass(slots=True)
class _Padding:
    """All padded forms of a graph: first which, then the nodes."""

    m: Maker
    readers: dict[NodeId, _Form]
    """Contractions, and the form of their left operand."""
    direct: dict[_Form, bool] = field(default_factory=dict)
    """Whether some contraction writes it."""
    emitted: dict[_Form, NodeId] = field(default_factory=dict)
    clean: set[_Form] = field(default_factory=set)
    """Forms whose lanes are to be zeros."""

    def run(self) -> None:
        """Look, decide, build."""
        reached = self._reached(self.readers.values())
        if len(reached) > MOST_NODES:
            return
        for form in sorted(reached):  # operands stand in front of their readers
            needs = self._needs(form)
            source = self._written(form)
            self.direct[form] = source or (needs is not None and any(self.direct[x] for x in needs))
        self.readers = self._worth()
        kept = self._reached(self.readers.values(), built=True)
        self._mark_clean(kept)
        for form in sorted(kept):
            self.emitted[form] = self._emit(form)
        self._offer()

    def _worth(self) -> dict[NodeId, _Form]:
        """The readers that may gain: large ones, and small ones of what is made of the same forms anyway."""
        every = self.readers
        kept = {
            i: form for i, form in every.items() if _large(self.m, i) and (self.direct[form] or self._copied(i, form))
        }
        made = {form for form in self._reached(kept.values(), built=True) if self.direct[form]}
        for i, form in every.items():  # in the order of the graph: behind what they read
            if i not in kept and self.direct[form]:
                behind = self._reached([form], built=True)
                if not made.isdisjoint(behind):
                    kept[i] = form
                    made.update(x for x in behind if self.direct[x])
        return dict(sorted(kept.items()))

    def _copied(self, i: NodeId, form: _Form) -> bool:
        """Whether a contraction is worth a copy: a kernel in front of it may make that, or the contraction is large."""
        graph = self.m.graph
        node, at = graph.nodes[i], form.node
        while graph.nodes[at].prim in _CARRIED | {Prim.BROADCAST} and len(graph.nodes[at].inputs) == 1:
            at = graph.nodes[at].inputs[0]
        if graph.nodes[at].prim is not Prim.INPUT:
            return True
        if isinstance(node.attrs, a.ConvAttrs):
            kernel, channels = graph.type_of(node.inputs[1]).shape[2:], graph.type_of(form.node).shape[1]
            overlap = any(k > s for k, s in zip(kernel, node.attrs.strides, strict=True))
            if channels <= FEW and overlap:
                return False
        return node_flops(node, graph) >= WORTH_A_COPY

    def _reached(self, roots: Iterable[_Form], *, built: bool = False) -> set[_Form]:
        """Forms that others are made of; with `built` only those that are not copies."""
        found = set(roots)
        waiting = list(found)
        while waiting and len(found) <= MOST_NODES:
            form = waiting.pop()
            if built and not (self.direct[form] or self._still(form)):
                continue
            for operand in self._needs(form) or ():
                if operand not in found:
                    found.add(operand)
                    waiting.append(operand)
        return found

    # Which forms

    def _written(self, form: _Form) -> bool:
        """Whether a contraction writes its results in this form."""
        node = self.m.graph.nodes[form.node]
        return _contraction(self.m, form.node) and form.axis == (1 if node.prim is Prim.CONV else node.type.rank - 1)

    def _needs(self, form: _Form) -> tuple[_Form, ...] | None:
        """Forms of operands of which this form is made; None where a copy alone makes it."""
        graph = self.m.graph
        node, axis = graph.nodes[form.node], form.axis
        inputs = tuple(dict.fromkeys(node.inputs))

        def on(*operands: NodeId, axis: int = axis) -> tuple[_Form, ...]:
            return tuple(_Form(x, axis, form.wide) for x in operands)

        if self._written(form):
            own = self.readers.get(form.node)
            return () if own is None else (own,)
        if CATEGORY[node.prim] is Category.ELEMENTWISE:
            return on(*inputs)
        match node.prim:
            case Prim.CONSTANT | Prim.IOTA:
                return ()
            case Prim.BROADCAST:
                source = graph.type_of(inputs[0]).shape
                at = axis - (node.type.rank - len(source))
                return () if at < 0 or source[at] == 1 else on(inputs[0], axis=at)
            case Prim.RESHAPE:
                at = self._same_axis(form)
                return None if at < 0 else on(inputs[0], axis=at)
            case Prim.TRANSPOSE:
                return on(inputs[0], axis=cast("a.TransposeAttrs", node.attrs).perm[axis])
            case Prim.CONCAT:
                return None if cast("a.ConcatAttrs", node.attrs).axis == axis else on(*inputs)
            case Prim.CONV:
                return on(inputs[0]) if self._by_channel(form) else None
            case _:
                return on(inputs[0]) if self._leaves_alone(form) else None

    def _same_axis(self, form: _Form) -> int:
        """The operand's axis that a reshape leaves as it is; -1 if there is none."""
        node = self.m.graph.nodes[form.node]
        source = self.m.graph.type_of(node.inputs[0]).shape
        before = math.prod(node.type.shape[: form.axis])
        size = node.type.shape[form.axis]
        return next((k for k, n in enumerate(source) if n == size and math.prod(source[:k]) == before), -1)

    def _by_channel(self, form: _Form) -> bool:
        node = self.m.graph.nodes[form.node]
        c = cast("a.ConvAttrs", node.attrs)
        weight = self.m.graph.nodes[node.inputs[1]]
        channels = node.type.shape[1]
        same = c.groups == channels == self.m.graph.type_of(node.inputs[0]).shape[1]
        return form.axis == 1 and same and not c.transposed and weight.prim is Prim.CONSTANT

    def _leaves_alone(self, form: _Form) -> bool:
        """Whether a node treats every channel alike and by itself, and keeps their number."""
        node, axis = self.m.graph.nodes[form.node], form.axis
        match node.attrs:
            case a.SliceAttrs() as s:
                size = self.m.graph.type_of(node.inputs[0]).shape[axis]
                return (s.starts[axis], s.sizes[axis], s.steps[axis]) == (0, size, 1)
            case a.PadAttrs() as p:
                return not (p.lo[axis] or p.hi[axis]) and (p.mode != "constant" or p.value == 0)
            case a.GatherAttrs() as g:
                return node.prim is Prim.GATHER and g.axis != axis and self.m.graph.type_of(node.inputs[1]).rank == 1
            case a.WindowAttrs() as w:
                return node.prim in _SPATIAL and axis < node.type.rank - len(w.kernel)
            case a.ReduceAttrs() as r:
                return node.prim in _REDUCED and axis not in r.axes
            case _:
                return False

    def _mark_clean(self, kept: set[_Form]) -> None:
        """Which forms end with a select: those that a contraction reads, or what carries their lanes there."""
        wanted = set(self.readers.values())
        for form in sorted(kept, reverse=True):
            if form not in wanted or self._zeros(form):
                continue
            if self.direct[form] and self._carries(form.node):
                wanted.update(self._needs(form) or ())
            else:
                self.clean.add(form)

    def _zeros(self, form: _Form) -> bool:
        """Whether there are zeros in the lanes of a form that no contraction makes: in copies, and behind constants.

        What is repeated along the channels is in the lanes, too.
        """
        if self.direct[form]:
            return False
        if not self._still(form) or self.m.graph.nodes[form.node].prim is Prim.CONSTANT:
            return True
        needs = self._needs(form) or ()
        return bool(needs) and all(self._zeros(x) for x in needs)

    def _carries(self, i: NodeId) -> bool:
        """Whether a node leaves zeros zeros; the largest number of a window without any is minus infinity."""
        node = self.m.graph.nodes[i]
        if node.prim is not Prim.WINDOW_MAX:
            return node.prim in _CARRIED
        w = cast("a.WindowAttrs", node.attrs)
        spatial = zip(
            self.m.graph.type_of(node.inputs[0]).shape[-len(w.kernel) :], node.type.shape[-len(w.kernel) :],
            w.kernel, w.strides, w.pads_lo, w.dilations, strict=True,
        )  # fmt: skip
        return all(
            any(0 <= o * stride - lo + k * dilation < size for k in range(taps))
            for size, results, taps, stride, lo, dilation in spatial
            for o in range(results)
        )

    # Nodes

    def _emit(self, form: _Form) -> NodeId:
        raw = self._raw(form) if self.direct[form] or self._still(form) else padded_copy(self.m, *form)
        return self._cleaned(raw, form) if form in self.clean else raw

    def _still(self, form: _Form) -> bool:
        """Constants, views of them, and what is repeated: widened as they stand, without a copy."""
        node = self.m.graph.nodes[form.node]
        if node.prim is Prim.RESHAPE:
            needs = self._needs(form)
            return needs is not None and all(self._still(x) for x in needs)
        return node.prim in (Prim.CONSTANT, Prim.IOTA, Prim.BROADCAST)

    def _cleaned(self, raw: NodeId, form: _Form) -> NodeId:
        b = self.m.b
        type = b.type_of(raw)
        channels = self.m.graph.type_of(form.node).shape[form.axis]
        lanes = b.constant((np.arange(form.wide) < channels).reshape(-1, *(1,) * (type.rank - 1 - form.axis)))
        zero = b.broadcast(b.scalar(0.0, type.dtype), type.shape)
        return b.add(Prim.SELECT, b.broadcast(lanes, type.shape), raw, zero)

    def _raw(self, form: _Form) -> NodeId:
        graph, b = self.m.graph, self.m.b
        node = graph.nodes[form.node]
        shape = tuple(form.wide if i == form.axis else n for i, n in enumerate(node.type.shape))
        operands = [self.emitted.get(x, x.node) for x in self._operands(form)]
        if self._written(form):
            return self._contracted(form.node, form.wide)
        match node.prim:
            case Prim.CONSTANT:
                return b.constant(_widened(graph.constant(form.node), form.axis, form.wide), node.type.dtype)
            case Prim.IOTA:
                return b.iota(shape, cast("a.IotaAttrs", node.attrs).axis, node.type.dtype)
            case Prim.BROADCAST:
                return b.broadcast(operands[0], shape)
            case Prim.RESHAPE:
                return b.reshape(operands[0], shape)
            case Prim.SLICE:
                s = cast("a.SliceAttrs", node.attrs)
                return b.slice(operands[0], s.starts, shape, s.steps)
            case Prim.CONV:
                weight = _widened(graph.constant(node.inputs[1]), 0, form.wide)
                attrs = replace(cast("a.ConvAttrs", node.attrs), groups=form.wide)
                return b.add(Prim.CONV, operands[0], b.constant(weight, node.type.dtype), attrs=attrs)
            case _:
                return b.add(node.prim, *operands, attrs=node.attrs)

    def _operands(self, form: _Form) -> list[_Form]:
        """All operands in order, those that are read as they are with a width of 0."""
        found = {x.node: x for x in self._needs(form) or ()}
        return [found.get(x, _Form(x, 0, 0)) for x in self.m.graph.nodes[form.node].inputs]

    def _contracted(self, i: NodeId, columns: int = 0) -> NodeId:
        """A contraction that reads the padded form if it is one of the readers, with so many columns (0: its own)."""
        b, node = self.m.b, self.m.graph.nodes[i]
        conv = node.prim is Prim.CONV
        x, weight = node.inputs[0], self.m.graph.constant(node.inputs[1])
        form = self.readers.get(i)
        if form is not None:
            x, weight = self.emitted[form], _widened(weight, 1 if conv else 0, form.wide)
        if columns:
            weight = _widened(weight, 0 if conv else 1, columns)
        return b.add(node.prim, x, b.constant(weight, node.type.dtype), attrs=node.attrs)

    # What they stand for

    def _offer(self) -> None:
        """Results in the plain form: of contractions that read the padded one, or slices, whichever comes first."""
        graph, m = self.m.graph, self.m
        forms: dict[NodeId, _Form] = {}
        for form in self.emitted:
            if self.direct[form] and form.node not in forms:
                forms[form.node] = form
        seen: set[NodeId] = set()
        waiting = [*graph.outputs, *self._plainly_read()]
        while waiting:
            v = waiting.pop()
            if v in seen:
                continue
            seen.add(v)
            node = graph.nodes[v]
            if v in forms and CATEGORY[node.prim] not in (Category.VIEW, Category.BROADCAST):
                m.stands_for(self._plain(forms[v]), v, alone=True)
                continue
            if v in self.readers:
                m.stands_for(self._contracted(v), v, alone=self.direct[self.readers[v]])
                if self.direct[self.readers[v]]:
                    continue
            waiting.extend(node.inputs)

    def _plainly_read(self) -> list[NodeId]:
        """Values that padded forms are made of as they are."""
        found: list[NodeId] = []
        for form in self.emitted:
            if self.direct[form] or self._still(form):
                padded = {x.node for x in self._needs(form) or ()}
                found.extend(x for x in self.m.graph.nodes[form.node].inputs if x not in padded)
            else:
                found.append(form.node)
        return found

    def _plain(self, form: _Form) -> NodeId:
        shape = self.m.graph.type_of(form.node).shape
        return self.m.b.slice(self.emitted[form], (0,) * len(shape), shape, (1,) * len(shape))


def _widened(data: Array, axis: int, wide: int) -> Array:
    """Zeros behind an array along one axis, which may be wide enough."""
    if data.shape[axis] == wide:
        return data
    hi = [(0, wide - n if i == axis else 0) for i, n in enumerate(data.shape)]
    return np.pad(data, hi)
