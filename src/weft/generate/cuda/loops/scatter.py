"""Results that are stored from where they are computed: an element goes to all that pads and resizes show of it.

A norm whose result is padded by reflection or enlarged by the nearest element is usually computed per element of the
result, and reads again what its sums have read already, from another coord. With `Form.outward` the loops are those of
what is padded: what the sums have read waits in registers, is normalised once, and is stored once for each row and
column of the result that shows it. Which these are is found by each block from the maps themselves (reflections,
indices in memory), before it waits for the kernel before it, so that any indices are right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from weft.generate.loopnest.body import Coord
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

OUT = "out0"
AXES = (2, 3)
LONGEST = 1 << 11
"""Rows or columns of a result: a block keeps two numbers of two bytes for each."""
FEW, MANY = 4, 8
"""Places of one element along an axis that a block keeps; elements with more of them look through all."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its length inside and in the result, and the map from the result inwards as C text of `o`."""

    inner: int
    outer: int
    text: str

    @property
    def most(self) -> int:
        """Places that are kept of an element."""
        return FEW if self.outer <= 3 * self.inner else MANY

    def kind(self) -> str:
        """Type of the table in shared memory."""
        return f"w_shown<{self.inner}, {self.outer}, {self.most}>"


@dataclass(frozen=True, slots=True)
class Scatter:
    """What is computed, and how the one result shows it."""

    source: NodeId
    axes: tuple[Axis, Axis]
    strides: tuple[int, ...]
    """Of the result, in elements."""

    def inner(self, graph: Graph) -> Graph:
        """The graph without the maps."""
        return replace(graph, outputs=(self.source,))

    def at(self, coord: Coord) -> str:
        """Arguments of a store for an element: rows and columns that show it, and their distances."""
        (row, column), (down, right) = (coord[k].text() for k in AXES), (self.strides[k] for k in AXES)
        return f"shown2, {row}, shown3, {column}, {down}u, {right}u"

    def shared(self) -> list[str]:
        """Declarations of the tables."""
        return [f"W_SHARED {axis.kind()} shown{k};" for k, axis in zip(AXES, self.axes, strict=True)]

    def prologue(self, threads: int) -> list[str]:
        """Lines that fill the tables, by all threads of a block."""
        lines = [f"w_show_none<{threads}>(role, shown{k});" for k in AXES] + ["role.sync();"]
        for k, axis in zip(AXES, self.axes, strict=True):
            lines += [
                f"for (w_signed o = (w_signed)role.thread(); o < {axis.outer}; o += {threads})",
                f"  w_show_at(shown{k}, (unsigned)o, (unsigned)({axis.text}));",
            ]
        return [*lines, "role.sync();"]


@cache
def scatter_header() -> str:
    """Text of weft_cuda_scatter.h."""
    return Path(__file__).with_name("weft_cuda_scatter.h").read_text()


def scatter(problem: Problem) -> Scatter | None:
    """What the form applies to: an image that lies channels-last, a computed one with maps of rows and columns."""
    graph = problem.graph
    if len(graph.outputs) != 1 or problem.output_formats[0] is not Format.LAST:
        return None
    node = graph.outputs[0]
    t = graph.type_of(node)
    if t.rank != len(AXES) + 2 or t.size == 0 or t.size >= 1 << 31 or max(t.shape[2:]) > LONGEST:
        return None
    texts = ["o", "o"]
    while (found := _step(graph, node, texts)) is not None:
        node = found
    if node == graph.outputs[0] or CATEGORY[graph.nodes[node].prim] is not Category.ELEMENTWISE:
        return None
    inner = graph.type_of(node).shape
    axes = [Axis(inner[k], t.shape[k], text) for k, text in zip(AXES, texts, strict=True)]
    return Scatter(node, (axes[0], axes[1]), Format.LAST.strides(t.shape))


def _step(graph: Graph, node: NodeId, texts: list[str]) -> NodeId | None:
    """One map further inwards; adds it to the texts."""
    record = graph.nodes[node]
    if record.prim is Prim.PAD:
        pad = cast("a.PadAttrs", record.attrs)
        if pad.mode == "constant" or any(pad.lo[:2]) or any(pad.hi[:2]):
            return None
        function = "w_reflect" if pad.mode == "reflect" else "w_clamp"
        for k, (axis, text) in enumerate(zip(AXES, texts, strict=True)):
            if pad.lo[axis] or pad.hi[axis]:
                texts[k] = f"{function}({text} - {pad.lo[axis]}, {graph.type_of(record.inputs[0]).shape[axis]})"
        return record.inputs[0]
    if record.prim is Prim.GATHER:
        axis = cast("a.GatherAttrs", record.attrs).axis
        source, indices = record.inputs
        attrs = graph.nodes[indices].attrs
        if axis not in AXES or not (isinstance(attrs, a.InputAttrs) and attrs.is_weight):
            return None
        if graph.type_of(indices).rank != 1:
            return None
        k = AXES.index(axis)
        name, size = f"in{graph.inputs.index(indices)}", graph.type_of(source).shape[axis]
        texts[k] = f"w_clamp_index((w_i64)w_ld({name} + ({texts[k]})), {size})"
        return source
    return None
