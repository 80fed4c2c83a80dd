"""A convolution, what is elementwise on it, a window's maximum or sum, and what is elementwise on that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.separable.match import above, part
from weft.generate.cuda.gemm.common.product import Product, product
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem


@dataclass(frozen=True, slots=True)
class Pool:
    """A window over rows and columns of the convolution's result; counts."""

    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    """In front of the first row and column: such places are in no maximum and no sum."""
    dilations: tuple[int, int]
    rows: int
    cols: int
    """Rows and columns of windows."""
    greatest: bool
    """Maxima; else sums."""

    def reach(self, tile: int, axis: int) -> int:
        """Rows or columns of the convolution's result that so many windows see."""
        return (tile - 1) * self.strides[axis] + (self.kernel[axis] - 1) * self.dilations[axis] + 1

    @property
    def padded(self) -> bool:
        """Whether windows begin in front of the image."""
        return any(self.pads)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Both are problems of their own."""

    first: Product
    """Ends in the value that the convolution's own kernel would store."""
    second: Product
    """What follows the window, as the end of a product whose sums are the window's results."""
    window: halo.Window
    pool: Pool
    between: DType
    """Type of the value that the window reads."""
    first_inputs: tuple[int, ...]
    """Per input of the first problem its position in the whole."""
    second_inputs: tuple[int, ...]
    """The same for the second; -1 for the operands of its product, which nobody reads."""


def pooled(problem: Problem, *, tf32: bool = False) -> Pooled | Declined:
    """The convolution and the window that a problem is, or why the template does not take it.

    `tf32`: operands of f32 are rounded.
    """
    g = problem.graph
    windows = [i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.WINDOW]
    linear = [i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.LINEAR]
    if len(windows) != 1 or len(linear) != 1 or g.nodes[linear[0]].prim is not Prim.CONV:
        return Declined("not one convolution and one window")
    at, conv = windows[0], linear[0]
    attrs = cast("a.WindowAttrs", g.nodes[at].attrs)
    if len(attrs.kernel) != 2 or g.type_of(at).rank != 4:
        return Declined("a window over other dimensions than rows and columns of images")
    between = _between(g, at)
    if conv not in above(g, (between,), stop=None):
        return Declined("a window that does not follow the convolution")
    inside = {*above(g, (between,), stop=None), at, g.nodes[at].inputs[0]}
    if between in g.outputs or any(between in n.inputs for i, n in enumerate(g.nodes) if i not in inside):
        return Declined("a value between convolution and window that others read")
    one, first_inputs = part(problem, (between,), None)
    two, second_inputs = part(problem, g.outputs, at, as_product=True)
    p1, p2 = product(one, tf32=tf32), product(two)
    if isinstance(p1, Declined):
        return p1
    if isinstance(p2, Declined):
        return p2
    w = halo.window(p1)
    if isinstance(w, Declined):
        return w
    rows, cols = g.type_of(at).shape[2:]
    pool = Pool(
        _two(attrs.kernel), _two(attrs.strides), _two(attrs.pads_lo), _two(attrs.dilations), rows, cols,
        g.nodes[at].prim is Prim.WINDOW_MAX,
    )  # fmt: skip
    found = Pooled(p1, p2, replace(w, outside=pool.padded), pool, g.type_of(between).dtype, first_inputs, second_inputs)
    return _refuse(found) or found


def _two(x: tuple[int, ...]) -> tuple[int, int]:
    return x[0], x[1]


def _between(g: Graph, window: NodeId) -> NodeId:
    """What the convolution's own kernel would store: in front of a cast that only widens."""
    node = g.nodes[window].inputs[0]
    if g.nodes[node].prim is Prim.CAST:
        narrow = g.type_of(g.nodes[node].inputs[0]).dtype
        if narrow in (DType.F16, DType.BF16) and g.type_of(node).dtype is DType.F32:
            return g.nodes[node].inputs[0]
    return node


def _refuse(p: Pooled) -> Declined | None:
    if p.window.groups > 1:
        return Declined("a convolution in groups in front of a window")
    if p.between not in (DType.F16, DType.BF16, DType.F32) or not p.second.sum_dtype.is_float:
        return Declined(f"a window over {p.between.value}")
    if p.first.c.a.kind != "input" or p.first.c.w.kind != "input":
        return Declined("operands that are constants of the text")
    if p.second.n != p.first.n:
        return Declined("a window that changes channels")
    return None
