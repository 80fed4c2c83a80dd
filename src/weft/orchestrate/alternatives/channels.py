"""Products over channels move to where they cost least: behind a concatenation, in front of a resize, into a weight.

A 1x1 convolution (or x @ W) mixes channels alike at every position. Whatever treats every channel alike and mixes
positions linearly commutes with it: gathers, slices and zero padding along other axes, transposes, factors that are
equal for all channels, sums. So W·concat(x₁, x₂) = W₁x₁ + W₂x₂ (A11), W·resize(x) = resize(W·x) (A12) and
W·(P·x + b) = (W·P)·x + W·b (A5, with constants).

Source: the identities are linear algebra; that a decode head gains most is our own count of its operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.reference import round_to
from weft.ir.work import node_flops
from weft.orchestrate.alternatives.union import FLOATS, Maker

_Numbers = npt.NDArray[np.floating[npt.NBitBase]]
WORTH = 0.9
"""An alternative is offered if it needs at most this share of the operations that it replaces."""
DEPTH = 64
"""Primitives between the product and where it may go."""
LARGEST_CONSTANT = 1 << 22
"""Elements of a constant that is multiplied in advance."""
_NOWHERE = math.inf
_SUMS = frozenset({Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.NEG})
_MOVES = frozenset({Prim.CONCAT, Prim.TRANSPOSE, Prim.RESHAPE, Prim.BROADCAST, Prim.GATHER, Prim.SLICE, Prim.PAD})
_PASSED = _SUMS | _MOVES | {Prim.MATMUL, Prim.CONV}


@dataclass(frozen=True, slots=True)
class _At:
    """Channels lo … hi - 1 of the product's operand, found along `axis` of a node."""

    node: NodeId
    axis: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class _Step:
    """How a product passes a node: where it goes on to, and what the node itself costs afterwards."""

    operands: tuple[_At, ...]
    flops: float
    reads: tuple[NodeId, ...] = ()
    """Old nodes that it reads as they are."""


def mix_channels_elsewhere(m: Maker) -> None:
    """conv₁ₓ₁(f(x₁, x₂, …), W) → f(conv₁ₓ₁(x₁, W₁), conv₁ₓ₁(x₂, W₂), …) for linear f; the same for x @ W.

    Conditions: f32 or f64; W constant and finite, so are weights multiplied in advance; f treats all channels alike, or
    concatenates them; no padding, stride or groups in the product itself. What others read of f is not saved.
    """
    nodes = m.graph.nodes
    for i, node in enumerate(nodes):
        if node.prim in (Prim.MATMUL, Prim.CONV) and nodes[node.inputs[0]].prim in _PASSED and m.room:
            weight = _weight(m, i)
            if weight is not None:
                _try(m, i, weight)


def _weight(m: Maker, i: NodeId) -> _Numbers | None:
    """The matrix (out, in) of a product over channels alone; None for any other node."""
    node = m.graph.nodes[i]
    if node.type.dtype not in FLOATS or not node.type.size:
        return None
    if m.graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT:
        return None
    weight = cast("_Numbers", m.graph.constant(node.inputs[1]))
    if isinstance(node.attrs, a.ConvAttrs):
        c = node.attrs
        plain = not c.transposed and c.groups == 1 and max(c.strides) == 1 and not any(c.pads_lo + c.pads_hi)
        if not plain or math.prod(weight.shape[2:]) != 1:
            return None
        weight = weight.reshape(weight.shape[:2])
    elif weight.ndim == 2:
        weight = weight.T
    else:
        return None
    return weight if weight.size else None


def _try(m: Maker, i: NodeId, weight: _Numbers) -> None:
    node = m.graph.nodes[i]
    source = m.graph.type_of(node.inputs[0])
    axis = 1 if node.prim is Prim.CONV else source.rank - 1
    start = _At(node.inputs[0], axis, 0, weight.shape[1])
    freed = _freed(m, i)
    limit = WORTH * sum(node_flops(m.graph.nodes[v], m.graph) for v in freed)
    blocked: set[_At] = set()
    while True:
        moved = _Moved(m, weight, freed, blocked)
        moved.cost(start)
        if moved.total(start) > limit or not np.isfinite(weight).all():
            return
        if moved.fold(start):
            m.stands_for(moved.emit(start), i)
            return


def _freed(m: Maker, root: NodeId) -> frozenset[NodeId]:
    """Nodes that nobody needs once `root` is computed otherwise, itself included."""
    graph = m.graph
    readers: dict[NodeId, int] = {}
    found: set[NodeId] = set()
    waiting = [root]
    while waiting:
        v = waiting.pop()
        found.add(v)
        for operand in dict.fromkeys(graph.nodes[v].inputs):
            readers[operand] = readers.get(operand, len(m.users[operand])) - 1
            if not readers[operand] and operand not in graph.outputs:
                waiting.append(operand)
    return frozenset(found)


@dataclass(slots=True)
class _Moved:
    """One product on its way: costs first, then what is to be built, then the nodes."""

    m: Maker
    weight: _Numbers
    """(out, in)"""
    freed: frozenset[NodeId]
    """What the original alone needs; the rest of the graph costs nothing, as it is there anyway."""
    blocked: set[_At]
    """Where weights or constants multiplied in advance overflow."""
    costs: dict[_At, float] = field(default_factory=dict)
    steps: dict[_At, _Step | None] = field(default_factory=dict)
    own: dict[NodeId, float] = field(default_factory=dict)
    emitted: dict[_At, NodeId] = field(default_factory=dict)
    folded: dict[_At, _Numbers] = field(default_factory=dict)

    def cost(self, at: _At, depth: int = 0) -> float:
        """Least operations of and below, those of shared nodes divided among their readers; settles the step taken."""
        if at in self.costs:
            return self.costs[at]
        here = self._product_flops(at) + self._own(at.node)
        step = self._step(at) if depth < DEPTH else None
        through = _NOWHERE
        if step is not None:
            through = step.flops + sum(self._own(v) / max(1, len(self.m.users[v])) for v in step.reads)
            for operand in step.operands:
                through += self.cost(operand, depth + 1) / max(1, len(self.m.users[operand.node]))
        self.steps[at] = step if through < here else None
        self.costs[at] = min(here, through)
        return self.costs[at]

    def _own(self, node: NodeId) -> float:
        """Operations of a node as it is, and of what it alone needs."""
        waiting = [node]
        while waiting:
            v = waiting[-1]
            if v not in self.freed:
                self.own[v] = 0.0
            missing = [x for x in self.m.graph.nodes[v].inputs if x not in self.own] if v not in self.own else []
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if v not in self.own:
                n = self.m.graph.nodes[v]
                below = sum(self.own[x] / max(1, len(self.m.users[x])) for x in dict.fromkeys(n.inputs))
                self.own[v] = node_flops(n, self.m.graph) + below
        return self.own[node]

    def total(self, start: _At) -> float:
        """Operations of all that would be built, and of the old nodes that it would read and nobody else."""
        graph = self.m.graph
        flops = 0.0
        kept: set[NodeId] = set()
        waiting: list[NodeId] = []
        for at in self._reached(start):
            step = self.steps[at]
            flops += self._product_flops(at) if step is None else step.flops
            waiting.extend((at.node,) if step is None else step.reads)
        while waiting:
            v = waiting.pop()
            if v in self.freed and v not in kept:
                kept.add(v)
                flops += node_flops(graph.nodes[v], graph)
                waiting.extend(graph.nodes[v].inputs)
        return flops

    def _reached(self, start: _At) -> list[_At]:
        found = {start: None}
        waiting = [start]
        while waiting:
            step = self.steps[waiting.pop()]
            for operand in step.operands if step is not None else ():
                if operand not in found:
                    found[operand] = None
                    waiting.append(operand)
        return list(found)

    # Costs

    @property
    def _outs(self) -> int:
        return len(self.weight)

    def _product_flops(self, at: _At) -> float:
        type = self.m.graph.type_of(at.node)
        possible = at.axis == type.rank - 1 or (at.axis == 1 and 3 <= type.rank <= 5)
        return 2.0 * type.size * self._outs if possible else _NOWHERE

    def _size(self, at: _At) -> float:
        """Elements of a node with the product's channels in place of its own."""
        return self.m.graph.type_of(at.node).size / (at.hi - at.lo) * self._outs

    def _step(self, at: _At) -> _Step | None:
        graph = self.m.graph
        node = graph.nodes[at.node]
        if node.type.dtype not in FLOATS:
            return None
        if at in self.blocked:
            return None
        if self._constant_shape(at) is not None:
            return _Step((), 0.0)
        if self._is_contraction(at):
            return _Step((), node_flops(node, graph) / (at.hi - at.lo) * self._outs, node.inputs[:1])
        operands = self._operands(at)
        if operands is None:
            return None
        flops = self._size(at) if node.prim in _SUMS else 0.0
        if node.prim is Prim.CONCAT and cast("a.ConcatAttrs", node.attrs).axis == at.axis:
            flops = self._size(at) * (len(operands) - 1)
        passed = {operand.node for operand in operands}
        return _Step(operands, flops, tuple(x for x in node.inputs if x not in passed))

    def _is_contraction(self, at: _At) -> bool:
        """True for a product with a constant whose results are these channels."""
        node = self.m.graph.nodes[at.node]
        if node.prim not in (Prim.MATMUL, Prim.CONV):
            return False
        weight = self.m.graph.nodes[node.inputs[1]]
        if weight.prim is not Prim.CONSTANT or weight.type.size > LARGEST_CONSTANT:
            return False
        if isinstance(node.attrs, a.ConvAttrs):
            return at.axis == 1 and node.attrs.groups == 1 and not node.attrs.transposed
        return weight.type.rank == 2 and at.axis == node.type.rank - 1

    def _operands(self, at: _At) -> tuple[_At, ...] | None:
        """Where the product goes on to behind a node that it commutes with; None if it does not."""
        graph, axis = self.m.graph, at.axis
        node = graph.nodes[at.node]
        x = node.inputs[0] if node.inputs else -1

        def on(operand: NodeId, axis: int = axis) -> _At:
            return _At(operand, axis, at.lo, at.hi)

        match node.prim:
            case Prim.ADD | Prim.SUB:
                return tuple(dict.fromkeys((on(x), on(node.inputs[1]))))
            case Prim.NEG:
                return (on(x),)
            case Prim.MUL | Prim.DIV:
                other = node.inputs[1]
                if x == other:
                    return None
                if self._same_for_all(other, axis):
                    return (on(x),)
                return (on(other),) if node.prim is Prim.MUL and self._same_for_all(x, axis) else None
            case Prim.CONCAT:
                return self._parts(at)
            case Prim.TRANSPOSE:
                return (on(x, cast("a.TransposeAttrs", node.attrs).perm[axis]),)
            case Prim.RESHAPE | Prim.BROADCAST:
                source = self._same_axis(at.node, axis)
                return None if source < 0 else (on(x, source),)
            case Prim.GATHER | Prim.SLICE | Prim.PAD:
                return (on(x),) if self._leaves_alone(at.node, axis) else None
            case _:
                return None

    def _parts(self, at: _At) -> tuple[_At, ...]:
        node = self.m.graph.nodes[at.node]
        if cast("a.ConcatAttrs", node.attrs).axis != at.axis:
            return tuple(dict.fromkeys(_At(x, at.axis, at.lo, at.hi) for x in node.inputs))
        found, lo = [], at.lo
        for x in node.inputs:
            hi = lo + self.m.graph.type_of(x).shape[at.axis]
            found.append(_At(x, at.axis, lo, hi))
            lo = hi
        return tuple(part for part in found if part.lo < part.hi)

    def _same_for_all(self, node: NodeId, axis: int) -> bool:
        """True for a factor that does not vary along an axis, as its broadcast says."""
        n = self.m.graph.nodes[node]
        if n.prim is not Prim.BROADCAST:
            return False
        shape = self.m.graph.type_of(n.inputs[0]).shape
        at = axis - (n.type.rank - len(shape))
        return at < 0 or shape[at] == 1

    def _same_axis(self, node: NodeId, axis: int) -> int:
        """The operand's axis that is `axis` of a reshape or broadcast; -1 if there is none."""
        n = self.m.graph.nodes[node]
        source = self.m.graph.type_of(n.inputs[0]).shape
        if n.prim is Prim.BROADCAST:
            at = axis - (n.type.rank - len(source))
            return at if at >= 0 and source[at] == n.type.shape[axis] else -1
        before = math.prod(n.type.shape[:axis])
        same = (k for k, c in enumerate(source) if c == n.type.shape[axis] and math.prod(source[:k]) == before)
        return next(same, -1)

    def _leaves_alone(self, node: NodeId, axis: int) -> bool:
        """True if a gather, slice or padding moves whole vectors of channels, or zeros."""
        n = self.m.graph.nodes[node]
        if isinstance(n.attrs, a.GatherAttrs):
            return n.attrs.axis != axis and self.m.graph.type_of(n.inputs[1]).rank == 1
        if isinstance(n.attrs, a.SliceAttrs):
            size = self.m.graph.type_of(n.inputs[0]).shape[axis]
            return (n.attrs.starts[axis], n.attrs.sizes[axis], n.attrs.steps[axis]) == (0, size, 1)
        pad = cast("a.PadAttrs", n.attrs)
        return not (pad.lo[axis] or pad.hi[axis]) and (pad.mode != "constant" or pad.value == 0)

    # Constants

    def fold(self, start: _At) -> bool:
        """Multiply weights and constants in advance; False, and blocked, where the result is not finite."""
        for at in self._reached(start):
            step = self.steps[at]
            if step is not None and not step.operands:
                self.folded[at] = self._fold(at)
                if not np.isfinite(self.folded[at]).all():
                    self.blocked.add(at)
        return self.blocked.isdisjoint(self.folded)

    def _constant_shape(self, at: _At) -> tuple[NodeId, tuple[int, ...]] | None:
        """A constant behind broadcasts, and its shape aligned to the node's; None if it is none, or too large."""
        graph = self.m.graph
        chain, shape = at.node, graph.type_of(at.node).shape
        while graph.nodes[chain].prim is Prim.BROADCAST:
            chain = graph.nodes[chain].inputs[0]
            source = graph.type_of(chain).shape
            shape = (1,) * (len(shape) - len(source)) + source
        while graph.nodes[chain].prim is Prim.RESHAPE:
            chain = graph.nodes[chain].inputs[0]
        if graph.nodes[chain].prim is not Prim.CONSTANT or math.prod(shape) > LARGEST_CONSTANT:
            return None
        return chain, shape

    def _fold(self, at: _At) -> _Numbers:
        """The weight or constant that the product makes of one."""
        node = self.m.graph.nodes[at.node]
        part = self.weight[:, at.lo : at.hi].astype(np.float64)
        constant = self._constant_shape(at)
        with np.errstate(all="ignore"):
            if constant is not None:
                chain, shape = constant
                values = self.m.graph.constant(chain).astype(np.float64).reshape(shape)
                if shape[at.axis] == 1:
                    part = part.sum(1, keepdims=True)
                found = np.moveaxis(np.tensordot(part, values, (1, at.axis)), 0, at.axis)
            else:
                weight = self.m.graph.constant(node.inputs[1]).astype(np.float64)
                found = np.tensordot(part, weight, (1, 0)) if node.prim is Prim.CONV else weight @ part.T
            return cast("_Numbers", round_to(np.ascontiguousarray(found), node.type.dtype))

    # Nodes

    def emit(self, at: _At) -> NodeId:
        """Build the product of the channels at a node."""
        if at not in self.emitted:
            self.emitted[at] = self._product(at) if self.steps[at] is None else self._through(at)
        return self.emitted[at]

    def _product(self, at: _At) -> NodeId:
        b, type = self.m.b, self.m.graph.type_of(at.node)
        part = np.ascontiguousarray(self.weight[:, at.lo : at.hi])
        if at.axis == type.rank - 1:
            rows = b.reshape(at.node, (type.size // type.shape[-1], type.shape[-1]))
            product = b.add(Prim.MATMUL, rows, b.constant(np.ascontiguousarray(part.T), type.dtype))
            return b.reshape(product, (*type.shape[:-1], self._outs))
        spatial = type.rank - 2
        weight = b.constant(part.reshape(*part.shape, *(1,) * spatial), type.dtype)
        once, never = (1,) * spatial, (0,) * spatial
        return b.add(Prim.CONV, at.node, weight, attrs=a.ConvAttrs(once, never, never, once))

    def _through(self, at: _At) -> NodeId:
        graph, b = self.m.graph, self.m.b
        node = graph.nodes[at.node]
        shape = tuple(self._outs if k == at.axis else n for k, n in enumerate(node.type.shape))
        if at in self.folded:
            constant = b.constant(self.folded[at], node.type.dtype)
            if not self._is_contraction(at):
                return b.broadcast(constant, shape)
            return b.add(node.prim, node.inputs[0], constant, attrs=node.attrs)
        step = cast("_Step", self.steps[at])
        parts = {operand.node: self.emit(operand) for operand in step.operands}
        match node.prim:
            case Prim.CONCAT if cast("a.ConcatAttrs", node.attrs).axis == at.axis:
                emitted = [self.emit(operand) for operand in step.operands]
                total = emitted[0]
                for part in emitted[1:]:
                    total = b.add(Prim.ADD, total, part)
                return total
            case Prim.MUL | Prim.DIV:
                operands = [
                    parts[x] if x in parts else b.broadcast(graph.nodes[x].inputs[0], shape) for x in node.inputs
                ]
                return b.add(node.prim, *operands)
            case Prim.RESHAPE:
                return b.reshape(parts[node.inputs[0]], shape)
            case Prim.BROADCAST:
                return b.broadcast(parts[node.inputs[0]], shape)
            case Prim.SLICE:
                s = cast("a.SliceAttrs", node.attrs)
                return b.slice(parts[node.inputs[0]], s.starts, shape, s.steps)
            case _:
                return b.add(node.prim, *(parts.get(x, x) for x in node.inputs), attrs=node.attrs)
