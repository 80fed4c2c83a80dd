"""Which loops the values of a graph have in common.

Every dimension of every value is a product of axes (outer to inner). Elementwise primitives, transposes, broadcasts
and reductions make dimensions of several values the same axis; a reshape splits axes until both sides are products of
the same ones (their common refinement). What cannot be refined, or is shifted by a slice, a pad or a window, gets axes
of its own. Axes only propose loops: the index arithmetic stays right whatever they say.
"""

from __future__ import annotations

from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim


class Axis:
    """One loop that several values may share; after `split` a product of finer ones."""

    __slots__ = ("children", "parent", "serial", "size")

    def __init__(self, size: int, serial: int) -> None:
        self.size = size
        self.serial = serial
        self.parent: Axis | None = None
        self.children: list[Axis] | None = None

    def find(self) -> Axis:
        """The axis that stands for all equal ones."""
        axis = self
        while axis.parent is not None:
            axis = axis.parent
        return axis

    def leaves(self) -> list[Axis]:
        """The finest axes of this one, outer to inner."""
        axis = self.find()
        if axis.children is None:
            return [axis]
        return [leaf for child in axis.children for leaf in child.leaves()]


_ALIGNED = (Category.ELEMENTWISE, Category.REDUCE, Category.WINDOW, Category.SCAN)
"""Categories whose operands have the result's dimensions, in order."""


class Axes:
    """Axes of all dimensions of a graph's live nodes."""

    def __init__(self, graph: Graph, live: list[NodeId]) -> None:
        self._serial = 0
        self.dims: dict[NodeId, list[list[Axis]]] = {}
        for node in live:
            self.dims[node] = [[] if n == 1 else [self._new(n)] for n in graph.type_of(node).shape]
        for node in live:
            self._relate(graph, node)

    def of(self, node: NodeId, dim: int) -> list[Axis]:
        """Finest axes of one dimension, outer to inner; none for a dimension of size 1."""
        return [leaf for axis in self.dims[node][dim] for leaf in axis.leaves()]

    def _new(self, size: int) -> Axis:
        self._serial += 1
        return Axis(size, self._serial)

    def _relate(self, graph: Graph, node: NodeId) -> None:
        record = graph.nodes[node]
        shape = record.type.shape
        for operand in record.inputs:
            inner = graph.type_of(operand).shape
            match record.prim:
                case Prim.RESHAPE:
                    if record.type.size:
                        whole = [x for d in range(len(shape)) for x in self.of(node, d)]
                        self._refine(whole, [x for d in range(len(inner)) for x in self.of(operand, d)])
                    continue
                case Prim.TRANSPOSE:
                    pairs = list(enumerate(cast("a.TransposeAttrs", record.attrs).perm))
                case Prim.BROADCAST:
                    pairs = [(d + len(shape) - len(inner), d) for d in range(len(inner))]
                case Prim.SLICE | Prim.PAD | Prim.CONCAT:
                    pairs = [(d, d) for d in range(len(shape))]
                case Prim.GATHER:
                    axis = cast("a.GatherAttrs", record.attrs).axis
                    rank = graph.type_of(record.inputs[1]).rank
                    if operand == record.inputs[0]:
                        pairs = [(d if d < axis else d + rank - 1, d) for d in range(len(inner)) if d != axis]
                    else:
                        pairs = [(axis + d, d) for d in range(rank)]
                case _ if CATEGORY[record.prim] in _ALIGNED or (record.prim is Prim.TAKE_ALONG):
                    pairs = [(d, d) for d in range(min(len(shape), len(inner)))]
                case _:
                    pairs = []
            for mine, theirs in pairs:
                if shape[mine] == inner[theirs] > 1 and not self._shifted(graph, node, mine):
                    self._refine(self.of(node, mine), self.of(operand, theirs))

    def _shifted(self, graph: Graph, node: NodeId, dim: int) -> bool:
        """True where equal sizes hide another order: a reversed slice, a window, the indexed axis."""
        record = graph.nodes[node]
        match record.attrs:
            case a.SliceAttrs(steps=steps):
                return steps[dim] != 1
            case a.WindowAttrs(kernel=kernel):
                k = dim - (record.type.rank - len(kernel))
                return k >= 0 and kernel[k] != 1
        return False

    def _refine(self, xs: list[Axis], ys: list[Axis]) -> None:
        """Split both products until they are equal from the inside out, and make the equal parts one."""
        xs, ys = xs[:], ys[:]
        while xs and ys:
            x, y = xs.pop().find(), ys.pop().find()
            if x is y:
                continue
            if x.children is not None or y.children is not None:
                xs += x.leaves()
                ys += y.leaves()
                continue
            if x.size == y.size:
                y.parent = x
            elif x.size % y.size == 0:
                xs += self._split(x, y.size)
                ys.append(y)
            elif y.size % x.size == 0:
                ys += self._split(y, x.size)
                xs.append(x)
            else:
                return

    def _split(self, axis: Axis, inner: int) -> list[Axis]:
        axis.children = [self._new(axis.size // inner), self._new(inner)]
        return axis.children
