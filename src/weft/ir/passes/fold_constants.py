"""Computing at compile time what depends on constants only.

Chains of float arithmetic are computed in float64 and rounded once, at their end. What decides something (a
comparison, a rounding, a conversion) sees the values that the network itself would have computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import CATEGORY, PREDICATES, Category, Prim
from weft.ir.reference import apply, round_to
from weft.ir.rewrite import Replacement, live_nodes, replace_nodes
from weft.ir.shapes import broadcast_shapes
from weft.ir.types import Array, TensorType
from weft.ir.work import TRANSCENDENTAL, node_flops

_DECIDES = PREDICATES | {
    Prim.CAST, Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.SIGN, Prim.MOD, Prim.FMOD, Prim.ARGMAX, Prim.ARGMIN,
}  # fmt: skip
_MAX_FLOPS = 2_000_000_000
"""About a second of NumPy; a constant that costs more is left to run time."""
_NEAR = 8
"""What is so near to an IOTA is an index predicate, such as a causal mask: better computed than loaded."""
_DEAR = TRANSCENDENTAL | {Prim.GATHER, Prim.TAKE_ALONG, Prim.MATMUL, Prim.CONV}


def _aligned(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape


@dataclass(frozen=True, slots=True)
class _Small:
    """A constant value as far as it does not repeat: broadcasting it to the node's type gives the value."""

    shape: tuple[int, ...]
    """Of the node's rank."""
    distance: int
    """Primitives between it and an IOTA, dear ones counted as several; 0 where it depends on none."""
    narrow_bytes: int = 0
    """Of a large constant that a CAST widens, its bytes before: such a value is a step on the way to a smaller one (the
    norm of a weight, say), and never stored itself. 0: of any other."""


@dataclass(slots=True)
class _Folder:
    """Which nodes are constant (by shapes alone), and their values when somebody asks."""

    graph: Graph
    max_bytes: int
    rounds_once: bool
    small: dict[NodeId, _Small] = field(default_factory=dict)
    exact: dict[NodeId, Array] = field(default_factory=dict)
    """Floats in float64, not rounded since the last decision."""
    native: dict[NodeId, Array] = field(default_factory=dict)

    def find(self) -> None:
        """Fill `small` for every constant node that may be folded."""
        for i, node in enumerate(self.graph.nodes):
            found = self._small(node)
            if found is not None:
                self.small[i] = found

    def _small(self, node: Node) -> _Small | None:
        if node.prim is Prim.CONSTANT:
            return _Small(node.type.shape, distance=0)
        if node.prim is Prim.IOTA:
            axis = cast("a.IotaAttrs", node.attrs).axis
            return _Small(tuple(n if k == axis else 1 for k, n in enumerate(node.type.shape)), distance=1)
        if CATEGORY[node.prim] in (Category.SOURCE, Category.OPAQUE) or any(i not in self.small for i in node.inputs):
            return None
        operands = [self.small[i] for i in node.inputs]
        shape, distance = self._shape(node, operands), max((x.distance for x in operands), default=0)
        if node.prim is Prim.BROADCAST:
            return _Small(shape, distance)  # free, however large
        size_bytes = TensorType(node.type.dtype, shape).nbytes
        types = [TensorType(self.graph.type_of(i).dtype, self.small[i].shape) for i in node.inputs]
        given = sum(x.narrow_bytes or t.nbytes for x, t in zip(operands, types, strict=True))
        grows = size_bytes > given and size_bytes > self.max_bytes
        if (grows and node.prim is not Prim.CAST) or node_flops(node, self.graph) > _MAX_FLOPS:
            return None
        further = distance + (1 + _NEAR * (node.prim in _DEAR) if distance else 0)
        return _Small(shape, further, given if grows else 0)

    def _shape(self, node: Node, operands: list[_Small]) -> tuple[int, ...]:
        if node.prim is Prim.BROADCAST:
            return _aligned(operands[0].shape, node.type.rank)
        if node.prim is Prim.TRANSPOSE:
            return tuple(operands[0].shape[p] for p in cast("a.TransposeAttrs", node.attrs).perm)
        if CATEGORY[node.prim] is not Category.ELEMENTWISE:
            return node.type.shape
        shape: tuple[int, ...] = ()
        for x in operands:
            shape = broadcast_shapes(shape, x.shape)
        return shape

    def value(self, i: NodeId, *, exact: bool) -> Array:
        """The value of a constant node, of the shape `small` says."""
        memo = self.exact if exact else self.native
        if i not in memo:
            memo[i] = self._compute(i, exact)
        return memo[i]

    def _compute(self, i: NodeId, exact: bool) -> Array:
        node = self.graph.nodes[i]
        if node.prim is Prim.CONSTANT:
            return self.graph.constant(i)
        small = self.small[i].shape
        decides = node.prim in _DECIDES
        xs = [self.value(j, exact=exact and not decides) for j in node.inputs]
        if node.prim is Prim.BROADCAST:
            return xs[0].reshape(small)
        keeps = CATEGORY[node.prim] is Category.ELEMENTWISE or node.prim is Prim.TRANSPOSE
        if not keeps:  # every other primitive needs its operands whole
            shapes = [self.graph.type_of(j).shape for j in node.inputs]
            xs = [np.broadcast_to(x, shape) for x, shape in zip(xs, shapes, strict=True)]
        moves = CATEGORY[node.prim] in (Category.LAYOUT, Category.VIEW)
        small_node = Node(node.prim, node.inputs, _small_attrs(node, small), TensorType(node.type.dtype, small))
        types = [self.graph.type_of(j) for j in node.inputs]
        if exact and not moves and not decides:
            wide = [x.astype(np.float64, copy=False) if t.dtype.is_float else x for x, t in zip(xs, types, strict=True)]
            return apply(small_node, wide, types, precise=True)
        # data that only move keep whatever type they are held in
        return apply(small_node, xs, types, precise=moves and any(x.dtype == np.float64 for x in xs))

    def needed(self) -> set[NodeId]:
        """What is stored: constants that the outputs, or what is computed at run time, read.

        A large constant that is read widened is widened at run time.
        """
        live = live_nodes(self.graph)
        found = set(self.graph.outputs)
        waiting = [i for i in range(len(self.graph)) if live[i] and i not in self.small]
        waiting += [i for i in found if i in self.small and self.small[i].narrow_bytes]
        seen = set(waiting)
        while waiting:
            for i in self.graph.nodes[waiting.pop()].inputs:
                found.add(i)
                if i in self.small and self.small[i].narrow_bytes and i not in seen:
                    seen.add(i)
                    waiting.append(i)
        return found

    def stays(self, i: NodeId) -> bool:
        """Already as folded as it gets: a constant, a repeated constant, or little more than a count."""
        node = self.graph.nodes[i]
        repeats = node.prim is Prim.BROADCAST and self.graph.nodes[node.inputs[0]].prim is Prim.CONSTANT
        return node.prim is Prim.CONSTANT or repeats or 0 < self.small[i].distance <= _NEAR

    def rounded(self, i: NodeId) -> Array:
        """The value that stands in the graph."""
        dtype = self.graph.type_of(i).dtype
        return round_to(self.value(i, exact=self.rounds_once), dtype)


def _narrow(graph: Graph, i: NodeId) -> NodeId:
    """The 8-bit floats that an operand of a product is widened from, which tensor cores take as they are; or `i`."""
    found = i
    while graph.nodes[found].prim in (Prim.TRANSPOSE, Prim.RESHAPE):
        found = graph.nodes[found].inputs[0]
    node = graph.nodes[found]
    return node.inputs[0] if node.prim is Prim.CAST and graph.type_of(node.inputs[0]).dtype.is_float8 else i


def _small_attrs(node: Node, small: tuple[int, ...]) -> a.Attrs:
    return a.IotaAttrs(small, node.attrs.axis, node.attrs.dtype) if isinstance(node.attrs, a.IotaAttrs) else node.attrs


def _emit(folder: _Folder, i: NodeId) -> Replacement:
    def make(b: GraphBuilder, _: Mapping[NodeId, NodeId]) -> NodeId:
        type, data = folder.graph.type_of(i), folder.rounded(i)
        if data.shape != type.shape:  # repeated: drop the leading dimensions that the broadcast brings back
            lead = next((k for k, n in enumerate(data.shape) if n != 1), len(data.shape))
            data = data.reshape(data.shape[lead:])
        return b.broadcast(b.constant(data, type.dtype), type.shape)

    return make


@dataclass(frozen=True, slots=True)
class FoldConstantsPass:
    """f(c1, c2, …) → c, where the result is small or no larger than its operands.

    Broadcasts are looked through and stand after the constant again, so that no constant is stored repeated. 8-bit
    floats that are widened for a product stay as they are.
    """

    name: ClassVar[str] = "fold-constants"
    max_bytes: int = 1 << 20
    """Larger results are folded only where they are no larger than what they are made of."""
    strict: bool = False
    """Round after every primitive, as the network would."""

    def requires(self, graph: Graph) -> Declined | None:
        """Some constant."""
        return needs_any(graph, Prim.CONSTANT, Prim.IOTA)

    def run(self, graph: Graph) -> PassResult:
        """Exact when strict; otherwise closer to the exact value than the network's own rounding."""
        folder = _Folder(graph, self.max_bytes, not self.strict)
        folder.find()
        needed = folder.needed()
        multiplied = {i for n in graph.nodes if CATEGORY[n.prim] is Category.LINEAR for i in n.inputs}
        needed = {_narrow(graph, i) if i in multiplied else i for i in needed}
        roots = [i for i, x in folder.small.items() if i in needed and not x.narrow_bytes and not folder.stays(i)]
        with np.errstate(all="ignore"):  # infinities and NaN are values like any other
            return PassResult(*replace_nodes(graph, {i: _emit(folder, i) for i in roots}))
