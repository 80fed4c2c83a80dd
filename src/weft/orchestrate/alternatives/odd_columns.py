"""Products of many columns, a few short of whole vectors, with weights that are computed: those of a vocabulary.

The logits of a training step, their gradient and the two products of it have rows of 50257 halves, say, which begin at
odd addresses: no copy of 16 bytes finds them, so that products copy their operands into whole lines first, and no
vector stores them. With zeros behind the weight's rows they are whole vectors. Sums and maxima over a row leave these
lanes out, products read zeros there, and a gradient's rows of them are cut off. Constant weights: see `padded`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Node, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.ir.work import node_flops
from weft.orchestrate.alternatives.padded import TYPES, padded_copy, padded_width
from weft.orchestrate.alternatives.union import Maker

LEAST_COLUMNS = 1024
"""So many that some more are no work to speak of."""
LEAST_FLOPS = 1 << 30
"""Of the product that makes the columns."""
_NEUTRAL: Mapping[Prim, float] = {Prim.REDUCE_SUM: 0.0, Prim.REDUCE_MAX: -math.inf, Prim.REDUCE_MIN: math.inf}
_TURNED = a.TransposeAttrs((1, 0))


def pad_columns(m: Maker) -> None:
    """x @ Wᵀ, what is computed of its rows, and d @ W and dᵀ @ x of what that gives, with zeros behind the rows of W.

    Conditions: 16-bit types or f32, W no constant; large products, one that reads the columns among them. Sums of a row
    may be added in another order.
    """
    for i, node in enumerate(m.graph.nodes):
        if m.room and node.prim is Prim.MATMUL and _is_odd(m, node) and _is_read(m, i):
            _Columns(m, i).offer()


def _is_odd(m: Maker, node: Node) -> bool:
    if node.type.rank != 2 or node.type.dtype not in TYPES or m.graph.type_of(node.inputs[1]).rank != 2:
        return False
    columns = node.type.shape[1]
    odd = columns >= LEAST_COLUMNS and padded_width(columns, node.type.dtype) != columns
    return odd and not _is_constant(m, node.inputs[1]) and node_flops(node, m.graph) >= LEAST_FLOPS


def _is_constant(m: Maker, i: NodeId) -> bool:
    while m.graph.nodes[i].prim in (Prim.TRANSPOSE, Prim.CAST):
        i = m.graph.nodes[i].inputs[0]
    return m.graph.nodes[i].prim is Prim.CONSTANT


def _is_read(m: Maker, i: NodeId) -> bool:
    """Whether another product has a left operand with so many rows and columns, as they are or turned."""
    shape = m.graph.type_of(i).shape
    products = (n for k, n in enumerate(m.graph.nodes) if n.prim is Prim.MATMUL and k > i)
    return any(m.graph.type_of(n.inputs[0]).shape in (shape, shape[::-1]) for n in products)


class _Columns:
    """What is made of the rows of one product, with more columns."""

    def __init__(self, m: Maker, product: NodeId) -> None:
        self.m, self.product = m, product
        node = m.graph.nodes[product]
        self.columns = node.type.shape[1]
        self.wide = padded_width(self.columns, node.type.dtype)
        x, w = node.inputs
        if m.graph.nodes[w].attrs == _TURNED:
            right = m.b.transpose(padded_copy(m, m.graph.nodes[w].inputs[0], 0, self.wide), (1, 0))
        else:
            right = padded_copy(m, w, 1, self.wide)
        self.padded: dict[NodeId, NodeId] = {product: m.b.add(Prim.MATMUL, x, right)}
        """By node: its rows with more columns."""
        self.turned: dict[NodeId, NodeId] = {}
        """Transposed rows: what they are of."""
        self.beside: dict[NodeId, NodeId] = {}
        """Operands that do not come from the product: with more columns."""

    def offer(self) -> None:
        """Follow the columns, and say what stands for values without them; plain rows for whoever wants these."""
        graph, plain = self.m.graph, set[NodeId]()
        for i in range(self.product + 1, len(graph)):
            read = [x for x in graph.nodes[i].inputs if x in self.padded or x in self.turned]
            if read and not self._follow(i):
                plain.update(self.turned.get(x, x) for x in read)
            elif not read and self._is_mask(i):
                self._elementwise(i, graph.nodes[i])
        plain.update(i for i in graph.outputs if i in self.padded)
        plain.update(self.turned[i] for i in graph.outputs if i in self.turned)
        for i in sorted(plain):
            at = i
            while graph.nodes[at].prim is Prim.RESHAPE:
                at = graph.nodes[at].inputs[0]
            self._stands(self._cut(self.padded[at], graph.type_of(at).rank - 1), at)

    def _stands(self, extra: NodeId, original: NodeId) -> None:
        self.m.stands_for(extra, original, alone=True)

    def _follow(self, i: NodeId) -> bool:
        """Whether a node that reads such rows may read those with more columns."""
        node = self.m.graph.nodes[i]
        first = node.inputs[0]
        if CATEGORY[node.prim] is Category.ELEMENTWISE:
            return self._elementwise(i, node)
        if node.prim is Prim.MATMUL:
            return self._multiplied(i, node)
        if node.prim is Prim.TRANSPOSE and node.attrs == _TURNED and first in self.padded:
            self.turned[i] = first
        elif node.prim is Prim.RESHAPE and first in self.padded and node.type.shape[-1:] == (self.columns,):
            self.padded[i] = self.m.b.reshape(self.padded[first], (*node.type.shape[:-1], self.wide))
        elif node.prim is Prim.TAKE_ALONG and first in self.padded and node.inputs[1] not in self.padded:
            if cast("a.GatherAttrs", node.attrs).axis != node.type.rank - 1:
                return False
            self._stands(self._picked(first, node), i)
        elif isinstance(node.attrs, a.ReduceAttrs) and first in self.padded:
            return self._reduced(i, node, node.attrs.axes)
        else:
            return False
        return True

    def _is_mask(self, i: NodeId) -> bool:
        """Whether a value as large as the rows is made of what varies along a row, or from row to row, alone."""
        graph, node = self.m.graph, self.m.graph.nodes[i]
        if CATEGORY[node.prim] is not Category.ELEMENTWISE or node.type.shape != graph.type_of(self.product).shape:
            return False
        return all(graph.nodes[x].prim in (Prim.IOTA, Prim.BROADCAST) for x in node.inputs)

    def _elementwise(self, i: NodeId, node: Node) -> bool:
        operands = [self._operand(x) for x in node.inputs]
        if None in operands:
            return False
        self.padded[i] = self.m.b.add(node.prim, *cast("list[NodeId]", operands), attrs=node.attrs)
        return True

    def _multiplied(self, i: NodeId, node: Node) -> bool:
        left, right = node.inputs
        if node.type.rank != 2 or right in self.padded or right in self.turned:
            return False
        if left in self.padded:
            more = padded_copy(self.m, right, 0, self.wide)
            self._stands(self.m.b.add(Prim.MATMUL, self._without_lanes(left, 0.0), more), i)
        else:
            turned = self.m.b.transpose(self._without_lanes(self.turned[left], 0.0), (1, 0))
            self._stands(self._cut(self.m.b.add(Prim.MATMUL, turned, right), 0), i)
        return True

    def _reduced(self, i: NodeId, node: Node, axes: tuple[int, ...]) -> bool:
        (x,) = node.inputs
        last = node.type.rank - 1
        if axes == (last,) and node.prim in _NEUTRAL and node.type.dtype.is_float:
            self._stands(self.m.b.reduce(node.prim, self._without_lanes(x, _NEUTRAL[node.prim]), axes), i)
            return True
        if last in axes:
            return False
        self._stands(self._cut(self.m.b.add(node.prim, self.padded[x], attrs=node.attrs), last), i)
        return True

    def _picked(self, x: NodeId, node: Node) -> NodeId:
        """An index outside is clamped to the columns that there are, as before."""
        b, index = self.m.b, node.inputs[1]
        t = b.type_of(index)
        inside = b.apply(Prim.MIN, index, b.broadcast(b.scalar(self.columns - 1, t.dtype), t.shape))
        return b.add(node.prim, self.padded[x], inside, attrs=node.attrs)

    def _without_lanes(self, i: NodeId, value: float) -> NodeId:
        """The rows with this value in the columns that are too many."""
        b, more = self.m.b, self.padded[i]
        t = b.type_of(more)
        number = b.iota(t.shape, t.rank - 1, DType.I32)
        inside = b.apply(Prim.LT, number, b.broadcast(b.scalar(self.columns, DType.I32), t.shape))
        return b.add(Prim.SELECT, inside, more, b.broadcast(b.scalar(value, t.dtype), t.shape))

    def _cut(self, more: NodeId, axis: int) -> NodeId:
        """The columns that there are."""
        shape = self.m.b.type_of(more).shape
        sizes = tuple(self.columns if k == axis else n for k, n in enumerate(shape))
        return self.m.b.slice(more, (0,) * len(shape), sizes, (1,) * len(shape))

    def _operand(self, x: NodeId) -> NodeId | None:
        """An operand of such rows with as many columns; None: nobody makes it so."""
        if x in self.padded:
            return self.padded[x]
        if x not in self.beside:
            found = self._widened(x)
            if found is None:
                return None
            self.beside[x] = found
        return self.beside[x]

    def _widened(self, x: NodeId) -> NodeId | None:
        b, node = self.m.b, self.m.graph.nodes[x]
        shape = (*node.type.shape[:-1], self.wide)
        if node.prim is Prim.IOTA:
            return b.iota(shape, cast("a.IotaAttrs", node.attrs).axis, node.type.dtype)
        if node.prim is Prim.BROADCAST:
            source = node.inputs[0]
            one = self.m.graph.type_of(source).shape[-1:] in ((), (1,))
            more = source if one else self._operand(source)
            return None if more is None else b.broadcast(more, shape)
        if node.prim is Prim.RESHAPE and self.m.graph.type_of(node.inputs[0]).shape[-1:] == (self.columns,):
            more = self._operand(node.inputs[0])
            return None if more is None else b.reshape(more, shape)
        # a vector as long as a row, a bias say
        return padded_copy(self.m, x, node.type.rank - 1, self.wide) if node.type.size == self.columns else None
