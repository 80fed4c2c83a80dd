"""Problem → `Contraction`: one normal form for convolutions and matrix products with what surrounds them.

Every value has a strided layout over the loop dimensions (batch dimensions, rows, columns; then group and channel):

    out[d, g, o] = epilogue(sum over (kh, kw, k) of a[d, g, kh, kw, k] * w[d, g, o, kh, kw, k], operands[d, g, o])

BROADCAST, RESHAPE, TRANSPOSE and SLICE compose into the layouts; PAD and GATHER before a convolution become index
tables of its rows and columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from weft.generate.contraction.views import View
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

Move = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""One renaming step of a view: kind and up to three integer tuples."""
Path = tuple[Move, ...]
MAX_CONSTANT_BYTES = 64 * 1024
"""More than this belongs into memory that the plan owns."""
Slot = int
"""Position in `Contraction.body`, or -1 for the accumulator."""


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Element offset as a function of the loop indices."""

    dims: tuple[int, ...]
    group: int = 0
    channel: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from: `input` (position among the problem's inputs) or `const` (a node of the graph)."""

    kind: str
    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the epilogue (or prologue): a leaf that is read, or a primitive of earlier slots."""

    prim: Prim
    args: tuple[Slot, ...]
    attrs: a.Attrs
    dtype: DType
    source: Source | None = None
    layout: StridedLayout | None = None


@dataclass(frozen=True, slots=True)
class Pack:
    """The convolution's input, read through tables of rows and columns: -1 is the fill value, which is 0."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    row_step: int
    col_step: int
    channel_step: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A transposed convolution: element i and tap t are of result i * stride + t * dilation - pad."""

    strides: tuple[int, int]
    pads: tuple[int, int]
    sizes: tuple[int, int]
    """Rows and columns of the image."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """The normal form. Sizes are counts; `oc` and `ic` are per group."""

    dims: tuple[int, ...]
    """Loop dimensions; the last two are rows and columns of pixels."""
    groups: int
    oc: int
    ic: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    a: Source
    a_layout: StridedLayout
    """Address of a pixel's first operand; `channel` is the step of k. Row and column steps are for the output pixel."""
    a_kernel: tuple[int, int]
    """Steps of kh and kw, as long as nothing is packed."""
    pack: Pack | None
    w: Source
    w_layout: StridedLayout
    """`channel` is the step of the output channel."""
    w_kernel: tuple[int, int]
    w_k: int
    w_const: bool
    body: tuple[Step, ...]
    outputs: tuple[tuple[Slot, StridedLayout], ...]
    graph: Graph | None = field(default=None, repr=False, compare=False)
    heads: int = 0
    """Columns of a head, where those of operands lie side by side and those of results and of what is read beside them
    in heads: `group` is the step from head to head then, though there are no groups. 0: columns are one dimension."""
    spread: Spread | None = None
    """Of a transposed convolution, whose own `strides` are 1 and whose `a_layout` has the steps of the image."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * math.prod(self.dims) * self.groups * self.oc * self.ic * self.kernel[0] * self.kernel[1]


class _RefusedError(Exception):
    """Carries the reason out of the recursion; never leaves this module."""


_F32 = frozenset({DType.F32})


def match(
    problem: Problem,
    dtypes: frozenset[DType] = _F32,
    values: frozenset[DType] = _F32,
    *,
    heads: bool = False,
    by_channel: bool = False,
    changing: bool = False,
) -> Contraction | Declined:
    """The normal form of a problem with exactly one LINEAR primitive, or why there is none.

    `dtypes` are the element types of contractions that the caller takes, `values` those of operands and outputs of
    the epilogue. With `heads`, a product is taken too whose rows, columns or sum are two dimensions in memory (the
    heads of attention): the outer one becomes a loop, groups, or the kernel's rows. With `by_channel`, depthwise
    convolutions are taken whose weight is no constant, or which are transposed; with `changing`, others whose weight is
    no constant, where one step leads from each product of the sum to the next.
    """
    try:
        return _Matcher(problem, dtypes, values, by_channel=by_channel, changing=changing).run()
    except _RefusedError as refuse:
        for apart in _divisions(problem) if heads else ():
            with suppress(_RefusedError):
                return _Matcher(problem, dtypes, values, apart).run()
        return Declined(str(refuse))


@dataclass(frozen=True, slots=True)
class _Apart:
    """Inner sizes of the dimensions of a product that are two in memory."""

    rows: int
    columns: int
    sums: int


def _divisions(problem: Problem) -> Iterator[_Apart]:
    """Ways to take a product apart into sizes that occur in its graph, whole dimensions first."""
    g = problem.graph
    node = next((n for n in g.nodes if n.prim is Prim.MATMUL), None)
    if node is None or node.type.rank < 2:
        return
    sizes = sorted({size for n in g.nodes for size in n.type.shape if size > 1}, reverse=True)
    whole = (*node.type.shape[-2:], g.type_of(node.inputs[0]).shape[-1])
    rows, columns, sums = ([n, *(x for x in sizes if x < n and n % x == 0)] for n in whole)
    widths, parts = (c for c in columns if c % 8 == 0), (k for k in sums if k % 8 == 0 or k == whole[2])
    for r, c, k in itertools.product(rows, widths, parts):
        yield _Apart(r, c, k)


def apply_path(view: View, path: Path) -> View:
    """A view after renaming steps, the first of `path` first."""
    for kind, x, y, z in path:
        if kind == "broadcast":
            view = view.broadcast(x)
        elif kind == "transpose":
            view = view.transpose(x)
        elif kind == "slice":
            view = view.slice(x, y, z)
        else:
            new = view.reshape(x)
            if new is None:
                raise _RefusedError(f"no constant strides after a reshape to {x}")
            view = new
    return view


def _taken_apart(view: View, path: Path, shape: tuple[int, ...], rows: int, columns: int) -> View:
    """A view after renaming steps that lead to `shape`, its last two dimensions as (outer, inner) each."""
    wanted = (*shape[:-2], shape[-2] // rows, rows, shape[-1] // columns, columns)
    short = path
    while short and short[-1][0] == "reshape":
        short = short[:-1]
    for steps in (path, short):
        with suppress(_RefusedError):
            new = apply_path(view, steps).reshape(wanted)
            if new is not None:
                return new
    raise _RefusedError(f"no constant strides after a reshape to {wanted}")


def _move(graph: Graph, node: NodeId) -> Move | None:
    n = graph.nodes[node]
    if isinstance(n.attrs, a.BroadcastAttrs):
        return ("broadcast", n.attrs.shape, (), ())
    if isinstance(n.attrs, a.ReshapeAttrs):
        return ("reshape", n.attrs.shape, (), ())
    if isinstance(n.attrs, a.TransposeAttrs):
        return ("transpose", n.attrs.perm, (), ())
    if isinstance(n.attrs, a.SliceAttrs):
        return ("slice", n.attrs.starts, n.attrs.sizes, n.attrs.steps)
    return None


def _prepend(shape: tuple[int, ...], move: Move, path: Path) -> Path:
    """`move` of a value of `shape`, then `path`; what the two undo of each other is left out.

    Without this, a way back through a reshape that has no strides would hide that the whole is the identity.
    """
    if path and move[0] == "reshape" == path[0][0]:
        return path[1:] if path[0][1] == shape else path
    if path and move[0] == "transpose" == path[0][0]:
        perm = tuple(move[1][p] for p in path[0][1])
        return path[1:] if perm == tuple(range(len(perm))) else (("transpose", perm, (), ()), *path[1:])
    return (move, *path)


def _known(graph: Graph, at: NodeId) -> np.ndarray | None:
    """The value of a table of indices that is known before the kernel runs."""
    n = graph.nodes[at]
    if n.prim is Prim.CONSTANT:
        return np.asarray(graph.constant(at))
    if isinstance(n.attrs, a.IotaAttrs):
        along = [1] * len(n.attrs.shape)
        along[n.attrs.axis] = -1
        return np.broadcast_to(np.arange(n.attrs.shape[n.attrs.axis]).reshape(along), n.attrs.shape)
    if not isinstance(n.attrs, a.ReshapeAttrs | a.BroadcastAttrs):
        return None
    inner = _known(graph, n.inputs[0])
    if inner is None:
        return None
    shape = n.attrs.shape
    return inner.reshape(shape) if n.prim is Prim.RESHAPE else np.broadcast_to(inner, shape)


class _Matcher:
    def __init__(
        self,
        problem: Problem,
        dtypes: frozenset[DType],
        values: frozenset[DType],
        apart: _Apart | None = None,
        *,
        by_channel: bool = False,
        changing: bool = False,
    ) -> None:
        self.problem = problem
        self.by_channel = by_channel
        self.changing = changing
        self.dtypes = dtypes
        self.values = values
        self.apart = apart
        self.graph = problem.graph
        self.body: list[Step] = []
        self.memo: dict[tuple[NodeId, Path], Slot] = {}
        self.depends: frozenset[NodeId] = frozenset()
        self.linear = -1

    def run(self) -> Contraction:
        g = self.graph
        linear = [i for i, n in enumerate(g.nodes) if CATEGORY[n.prim] is Category.LINEAR]
        if len(linear) != 1:
            raise _RefusedError(f"{len(linear)} contractions; the templates take one")
        self.linear = linear[0]
        node = g.nodes[self.linear]
        if node.type.dtype not in self.dtypes:
            takes = ", ".join(sorted(d.value for d in self.dtypes))
            raise _RefusedError(f"contraction of {node.type.dtype.value}; the templates take {takes}")
        if node.type.size == 0:
            raise _RefusedError("empty result")
        inside = {self.linear}
        for i in range(self.linear + 1, len(g)):
            if any(j in inside for j in g.nodes[i].inputs):
                inside.add(i)
        self.depends = frozenset(inside)
        base = self._conv() if node.prim is Prim.CONV else self._matmul()
        outputs: list[tuple[Slot, View]] = []
        for position, out in enumerate(g.outputs):
            if out not in inside:
                raise _RefusedError("an output that does not depend on the contraction")
            path = self._path_back(out)
            slot = self._value(out, path)
            dtype = g.type_of(out).dtype
            if dtype not in self.values:
                raise _RefusedError(f"output of {dtype.value}")
            view = View.dense(g.type_of(out).shape, self.problem.output_formats[position])
            outputs.append((slot, self._place(view, path)))
        if not outputs:
            raise _RefusedError("no output")
        layouts = tuple((slot, self._strided(view, base)) for slot, view in outputs)
        body = tuple(
            replace(s, layout=self._strided(v, base)) if v is not None else s
            for s, v in zip(self.body, self.views, strict=True)
        )
        found = _merge(replace(base, body=body, outputs=layouts, graph=g))
        if sum(data.nbytes for data in constants_of(found).values()) > MAX_CONSTANT_BYTES:
            raise _RefusedError("constants that are too large for the text of a kernel")
        return found

    # ---- the epilogue

    views: list[View | None]

    def _path_back(self, out: NodeId) -> Path:
        """From the index space of an output to that of the contraction."""
        g, moves, at = self.graph, [], out
        while at != self.linear:
            n = g.nodes[at]
            before = next((j for j in n.inputs if j in self.depends), None)
            if before is None:
                raise _RefusedError("an output that does not depend on the contraction")
            if n.prim is Prim.RESHAPE:
                moves.append(("reshape", g.type_of(before).shape, (), ()))
            elif isinstance(n.attrs, a.TransposeAttrs):
                inverse = tuple(int(i) for i in np.argsort(n.attrs.perm))
                moves.append(("transpose", inverse, (), ()))
            elif CATEGORY[n.prim] is not Category.ELEMENTWISE:
                raise _RefusedError(f"{n.prim.value} after the contraction")
            at = before
        return tuple(moves)

    def _value(self, node: NodeId, path: Path) -> Slot:
        """The slot of a node's value at the contraction's index space; iterative over long chains."""
        stack: list[tuple[NodeId, Path]] = [(node, path)]
        if not hasattr(self, "views"):
            self.views = []
        while stack:
            key = stack[-1]
            if key in self.memo:
                stack.pop()
                continue
            at, p = key
            n = self.graph.nodes[at]
            if at == self.linear:
                if not apply_path(View.dense(n.type.shape), p).is_identity():
                    raise _RefusedError("the contraction is read at other positions than it is written")
                self.memo[key] = -1
            elif n.prim in (Prim.INPUT, Prim.CONSTANT):
                self._leaf(at, key)
            elif (move := _move(self.graph, at)) is not None:
                inner = (n.inputs[0], _prepend(self.graph.type_of(n.inputs[0]).shape, move, p))
                if inner not in self.memo:
                    stack.append(inner)
                    continue
                self.memo[key] = self.memo[inner]
            elif CATEGORY[n.prim] is Category.ELEMENTWISE:
                todo = [(i, p) for i in n.inputs if (i, p) not in self.memo]
                if todo:
                    stack.extend(todo)
                    continue
                self._add(key, Step(n.prim, tuple(self.memo[i, p] for i in n.inputs), n.attrs, n.type.dtype), None)
            else:
                raise _RefusedError(f"{n.prim.value} beside the contraction")
            stack.pop()
        return self.memo[node, path]

    def _leaf(self, at: NodeId, key: tuple[NodeId, Path]) -> None:
        n = self.graph.nodes[at]
        view = self._place(self._dense(at), key[1])
        single = all(size == 1 or step == 0 for size, step in zip(view.shape, view.strides, strict=True))
        if n.type.dtype not in self.values and not (n.prim is Prim.CONSTANT and single):
            raise _RefusedError(f"operand of {n.type.dtype.value}")
        self._add(key, Step(n.prim, (), n.attrs, n.type.dtype, self._source(at)), view)

    def _add(self, key: tuple[NodeId, Path], step: Step, view: View | None) -> None:
        self.body.append(step)
        self.views.append(view)
        self.memo[key] = len(self.body) - 1

    def _place(self, view: View, path: Path) -> View:
        """A view of the contraction's result; rows and columns as two dimensions each if they are taken apart."""
        if self.apart is None:
            return apply_path(view, path)
        shape = self.graph.type_of(self.linear).shape
        return _taken_apart(view, path, shape, self.apart.rows, self.apart.columns)

    def _dense(self, at: NodeId) -> View:
        n = self.graph.nodes[at]
        format = Format.ROW
        if isinstance(n.attrs, a.InputAttrs):
            format = self.problem.input_formats[n.attrs.index]
        return View.dense(n.type.shape, format)

    def _source(self, at: NodeId) -> Source:
        n = self.graph.nodes[at]
        return Source("input", n.attrs.index) if isinstance(n.attrs, a.InputAttrs) else Source("const", at)

    def _strided(self, view: View, base: Contraction) -> StridedLayout:
        """A view of the contraction's result over the loop dimensions."""
        node = self.graph.nodes[self.linear]
        shape, strides = view.shape, view.strides
        if self.apart is not None:
            return StridedLayout(strides[:-2], strides[-2], strides[-1], view.offset)
        if node.prim is Prim.MATMUL:
            rows = strides[-2]
            return StridedLayout((*strides[:-2], 0, rows), 0, strides[-1], view.offset)
        spatial = strides[2:] if len(shape) == 4 else (0, strides[2])
        channel = strides[1]
        return StridedLayout((strides[0], *spatial), channel * base.oc, channel, view.offset)

    # ---- the two contractions

    def _operand(self, at: NodeId) -> tuple[Source, View]:
        """An operand that is an input or constant seen through renamings."""
        source, dense, path = self._below(at)
        return source, apply_path(dense, path)

    def _below(self, at: NodeId) -> tuple[Source, View, Path]:
        """The input or constant below renamings, whole, and the renamings."""
        path: list[Move] = []
        while (move := _move(self.graph, at)) is not None:
            path.append(move)
            at = self.graph.nodes[at].inputs[0]
        n = self.graph.nodes[at]
        if n.prim not in (Prim.INPUT, Prim.CONSTANT):
            raise _RefusedError(f"{n.prim.value} before the contraction")
        return self._source(at), self._dense(at), tuple(reversed(path))

    def _is_weight(self, source: Source) -> bool:
        if source.kind == "const":
            return True
        return cast("a.InputAttrs", self.graph.nodes[self.graph.inputs[source.index]].attrs).is_weight

    def _matmul(self) -> Contraction:
        g = self.graph
        node = g.nodes[self.linear]
        shape = node.type.shape
        if len(shape) < 2:
            raise _RefusedError("matmul of vectors")
        a_source, dense, path = self._below(node.inputs[0])
        left = g.type_of(node.inputs[0]).shape
        apart = self.apart or _Apart(shape[-2], shape[-1], left[-1])
        w_source, wv = self._operand(node.inputs[1])
        batch = shape[:-2]
        if len(left) < 2 or len(wv.shape) < 2:
            raise _RefusedError("matmul of vectors")
        k = left[-1]
        if k == 0:
            raise _RefusedError("empty sum")
        if self.apart is None:
            v = apply_path(dense, path)
            steps = (*v.strides[:-2], 0, v.strides[-2], 0, v.strides[-1])
            av = View((*left[:-2], 1, left[-2], 1, k), steps, v.offset)
        else:
            av = _taken_apart(dense, path, left, apart.rows, apart.sums)
        av, wv = av.broadcast((*batch, *av.shape[-4:])), wv.broadcast((*batch, *wv.shape[-2:]))
        group = apart.columns * wv.strides[-1] if apart.columns < shape[-1] else 0
        return Contraction(
            dims=(*batch, shape[-2] // apart.rows, apart.rows),
            groups=shape[-1] // apart.columns,
            oc=apart.columns,
            ic=apart.sums,
            kernel=(k // apart.sums, 1),
            strides=(1, 1),
            dilations=(1, 1),
            a=a_source,
            a_layout=StridedLayout(av.strides[:-2], 0, av.strides[-1], av.offset),
            a_kernel=(av.strides[-2], 0),
            pack=None,
            w=w_source,
            w_layout=StridedLayout((*wv.strides[:-2], 0, 0), group, wv.strides[-1], wv.offset),
            w_kernel=(apart.sums * wv.strides[-2] if apart.sums < k else 0, 0),
            w_k=wv.strides[-2],
            w_const=self._is_weight(w_source) and not any(wv.strides[:-2]),
            body=(),
            outputs=(),
        )

    def _conv(self) -> Contraction:
        g = self.graph
        node = g.nodes[self.linear]
        attrs = cast("a.ConvAttrs", node.attrs)
        if len(attrs.strides) > 2:
            raise _RefusedError("3-d convolution")
        depthwise = self.by_channel and attrs.groups > 1 and attrs.groups == g.type_of(node.inputs[0]).shape[1]
        if attrs.transposed and not depthwise:
            raise _RefusedError("transposed convolution")
        w_source, wv = self._operand(node.inputs[1])
        constant = self._is_weight(w_source)
        if not constant and not depthwise and not self.changing:
            raise _RefusedError("the weight of the convolution is no constant")
        if attrs.transposed:
            return self._transposed(node, attrs, w_source, wv)
        shape = node.type.shape
        one = len(shape) == 3

        def two(x: tuple[int, ...], fill: int) -> tuple[int, int]:
            return (fill, x[0]) if one else (x[0], x[1])

        strides, dilations = two(attrs.strides, 1), two(attrs.dilations, 1)
        lo, hi = two(attrs.pads_lo, 0), two(attrs.pads_hi, 0)
        wk = two(wv.shape[2:], 1)
        ws = two(wv.strides[2:], 0)
        oc, ic, groups = shape[1] // attrs.groups, wv.shape[1], attrs.groups
        if ic == 0:
            raise _RefusedError("empty sum")
        along = (ws[1] == ic * wv.strides[1] or wk[1] == 1) and (ws[0] == wk[1] * ic * wv.strides[1] or wk[0] == 1)
        if not constant and not depthwise and (attrs.groups > 1 or not along):
            raise _RefusedError("a weight that is no constant, in groups or not channels-last")
        source, view, rows, cols = self._image(node.inputs[0], one)
        rows = np.pad(rows, (lo[0], hi[0]), constant_values=-1)
        cols = np.pad(cols, (lo[1], hi[1]), constant_values=-1)
        size = two(view.shape[2:], 1)
        step = two(view.strides[2:], 0)
        channel = view.strides[1] if view.shape[1] > 1 else 1
        plain = np.array_equal(rows, np.arange(size[0])) and np.array_equal(cols, np.arange(size[1]))
        depthwise = ic == 1 and groups > 1
        near = channel == 1 or wk == (1, 1) or ic == 1
        pack = None
        if not plain or not (near or depthwise):
            pack = Pack(tuple(map(int, rows)), tuple(map(int, cols)), step[0], step[1], channel)
        return Contraction(
            dims=(shape[0], *two(shape[2:], 1)),
            groups=groups,
            oc=oc,
            ic=ic,
            kernel=wk,
            strides=strides,
            dilations=dilations,
            a=source,
            a_layout=StridedLayout(
                (view.strides[0], step[0] * strides[0], step[1] * strides[1]), channel * ic, channel, view.offset
            ),
            a_kernel=(step[0] * dilations[0], step[1] * dilations[1]),
            pack=pack,
            w=w_source,
            w_layout=StridedLayout((0, 0, 0), wv.strides[0] * oc, wv.strides[0], wv.offset),
            w_kernel=(ws[0], ws[1]),
            w_k=wv.strides[1],
            w_const=self._is_weight(w_source),
            body=(),
            outputs=(),
        )

    def _transposed(self, node: Node, attrs: a.ConvAttrs, w_source: Source, wv: View) -> Contraction:
        """The normal form of a transposed depthwise convolution of an image that lies in memory."""
        if len(attrs.strides) != 2 or wv.shape[1] != 1 or wv.shape[2:] == (1, 1):
            raise _RefusedError("transposed convolution")
        source, view = self._operand(node.inputs[0])
        n, _, high, wide = view.shape
        image, channel, row, column = view.strides
        return Contraction(
            dims=(n, *node.type.shape[2:]),
            groups=attrs.groups,
            oc=1,
            ic=1,
            kernel=(wv.shape[2], wv.shape[3]),
            strides=(1, 1),
            dilations=(attrs.dilations[0], attrs.dilations[1]),
            a=source,
            a_layout=StridedLayout((image, row, column), channel, channel, view.offset),
            a_kernel=(row * attrs.dilations[0], column * attrs.dilations[1]),
            pack=None,
            w=w_source,
            w_layout=StridedLayout((0, 0, 0), wv.strides[0], wv.strides[0], wv.offset),
            w_kernel=(wv.strides[2], wv.strides[3]),
            w_k=wv.strides[1],
            w_const=self._is_weight(w_source),
            body=(),
            outputs=(),
            spread=Spread((attrs.strides[0], attrs.strides[1]), (attrs.pads_lo[0], attrs.pads_lo[1]), (high, wide)),
        )

    def _image(self, at: NodeId, one: bool) -> tuple[Source, View, np.ndarray, np.ndarray]:
        """The convolution's input as a view and, per row and column, the source index (-1: zero)."""
        g = self.graph
        shape = g.type_of(at).shape
        tables = [np.arange(n) for n in shape[2:]]
        while True:
            n = g.nodes[at]
            if isinstance(n.attrs, a.PadAttrs):
                tables = self._pad(n.attrs, g.type_of(n.inputs[0]).shape, tables)
            elif n.prim is Prim.GATHER:
                tables = self._gather(at, tables)
            elif isinstance(n.attrs, a.SliceAttrs) and len(n.attrs.starts) == len(tables) + 2:
                s = n.attrs
                under = g.type_of(n.inputs[0]).shape
                if s.sizes[:2] != under[:2]:
                    break
                for i, t in enumerate(tables):
                    tables[i] = np.where(t < 0, -1, s.starts[i + 2] + t * s.steps[i + 2])
            else:
                break
            at = n.inputs[0]
        source, view = self._operand(at)
        if one:
            tables = [np.zeros(1, np.int64), *tables]
        return source, view, tables[0], tables[1]

    def _pad(self, p: a.PadAttrs, shape: tuple[int, ...], tables: list[np.ndarray]) -> list[np.ndarray]:
        if any(p.lo[:2]) or any(p.hi[:2]):
            raise _RefusedError("padding of batch or channels before a convolution")
        if p.mode == "constant" and p.value != 0.0:
            raise _RefusedError("padding with another value than 0 before a convolution")
        out = []
        for i, t in enumerate(tables):
            n, lo, hi = shape[i + 2], p.lo[i + 2], p.hi[i + 2]
            if p.mode == "constant":
                inner = np.pad(np.arange(n), (lo, hi), constant_values=-1)
            else:
                inner = np.pad(np.arange(n), (lo, hi), mode=cast("str", p.mode))  # type: ignore[call-overload]
            out.append(np.where(t < 0, -1, inner[np.maximum(t, 0)]))
        return out

    def _gather(self, at: NodeId, tables: list[np.ndarray]) -> list[np.ndarray]:
        g = self.graph
        n = g.nodes[at]
        axis = cast("a.GatherAttrs", n.attrs).axis
        known = _known(g, n.inputs[1]) if g.type_of(n.inputs[1]).rank == 1 else None
        if known is None:
            raise _RefusedError("gather with computed indices before a convolution")
        if axis < 2:
            raise _RefusedError("gather of batch or channels before a convolution")
        size = g.type_of(n.inputs[0]).shape[axis]
        index = np.clip(known.astype(np.int64), 0, size - 1)
        t = tables[axis - 2]
        tables[axis - 2] = np.where(t < 0, -1, index[np.maximum(t, 0)])
        return tables


def _merge(c: Contraction) -> Contraction:
    """Join neighbouring loop dimensions that every layout crosses with one stride, and drop those of size 1."""
    if c.pack is not None or c.kernel != (1, 1):
        return c
    layouts = [c.a_layout, c.w_layout, *(w for _, w in c.outputs), *(s.layout for s in c.body if s.layout is not None)]
    dims: list[int] = []
    steps: list[list[int]] = [[] for _ in layouts]
    for i, n in enumerate(c.dims):
        if n == 1:
            continue
        if dims and all(s[-1] == w.dims[i] * n for s, w in zip(steps, layouts, strict=True)):
            dims[-1] *= n
            for s, w in zip(steps, layouts, strict=True):
                s[-1] = w.dims[i]
        else:
            dims.append(n)
            for s, w in zip(steps, layouts, strict=True):
                s.append(w.dims[i])
    lead = max(0, 2 - len(dims))
    # A single pixel dimension is the columns: rows is then 1. Batch dimensions of B must not become pixels.
    new = iter([replace(w, dims=(0,) * lead + tuple(s)) for w, s in zip(layouts, steps, strict=True)])
    sizes = (1,) * lead + tuple(dims)
    c = replace(
        c,
        dims=sizes,
        a_layout=next(new),
        w_layout=next(new),
        outputs=tuple((slot, next(new)) for slot, _ in c.outputs),
        body=tuple(replace(s, layout=next(new)) if s.layout is not None else s for s in c.body),
    )
    if any(c.w_layout.dims[-2:]):
        c = _insert_rows(c)
    return c


def _insert_rows(c: Contraction) -> Contraction:
    """Batch dimensions that choose B stand left of the two pixel dimensions; add pixel dimensions of size 1."""
    count = 1 if not c.w_layout.dims[-1] else 2

    def wide(w: StridedLayout) -> StridedLayout:
        d = w.dims
        return replace(w, dims=(*d[:-1], 0, d[-1]) if count == 1 else (*d, 0, 0))

    dims = (*c.dims[:-1], 1, c.dims[-1]) if count == 1 else (*c.dims, 1, 1)
    return replace(
        c,
        dims=dims,
        a_layout=wide(c.a_layout),
        w_layout=wide(c.w_layout),
        outputs=tuple((slot, wide(w)) for slot, w in c.outputs),
        body=tuple(replace(s, layout=wide(s.layout)) if s.layout is not None else s for s in c.body),
    )


def constants_of(c: Contraction) -> Mapping[NodeId, np.ndarray]:
    """Data of the constants that the body or the weight reads."""
    graph = cast("Graph", c.graph)
    found = {s.source.index for s in c.body if s.source is not None and s.source.kind == "const"}
    if c.w.kind == "const":
        found.add(c.w.index)
    if c.a.kind == "const":
        found.add(c.a.index)
    return {i: np.asarray(graph.constant(i)) for i in sorted(found)}
