"""A contraction as a product of matrices: which loop dimensions are rows, and how tiles of the operands are read.

    out[z, m, n] = epilogue(sum over k of a[z, m, k] * w[z, n, k])

z runs over groups and over the batch dimensions that choose another w, m over all other loop dimensions, and k over
(kh, kw, c) with c fastest. A *chunk* is 16 bytes of an operand: the unit of asynchronous copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from weft.generate.contraction.match import Contraction, StridedLayout, match
from weft.generate.cuda.gemm.common.narrow import Narrow, narrow, narrow_floats
from weft.generate.cuda.gemm.common.normed import HALVES, PIECE, Norm, PartialStats, applies, stripped
from weft.generate.expr.integer import Int, summed
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem

CONTRACTED = frozenset({DType.F16, DType.BF16, DType.F32})
VALUES = frozenset(DType)
_LIMIT = 1 << 31

ALoad = Literal["rows", "taps", "columns", "elements"]
"""`rows`: chunks along k of one address per row; `taps`: chunks of the channels of a tap, padding as zeros;
`columns`: chunks along m; `elements`: one by one, any address."""
WLoad = Literal["packed", "nk", "kn", "elements"]
"""`packed`: constant, repacked once; `nk`: chunks along k; `kn`: chunks along n; `elements`: one by one."""


@dataclass(frozen=True, slots=True)
class Border:
    """Zero padding along one spatial dimension: padded positions [lo, lo + size) are inside."""

    lo: int
    size: int


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes are counts; steps and offsets are in elements."""

    c: Contraction
    dtype: DType
    batch: tuple[int, ...]
    """Positions of the loop dimensions that choose w."""
    rows: tuple[int, ...]
    """Positions of the other loop dimensions, slowest first."""
    a_load: ALoad
    w_load: WLoad
    borders: tuple[Border, Border] | None
    """How rows and columns of the image are padded, where that is by zeros only; None: no padding, or tables."""
    tf32: bool = False
    """f32 in memory, multiplied as TF32 by the tensor cores: operands rounded to 11 bits, sums in f32."""
    bytes: tuple[DType, DType] | None = None
    """Numbers of 8 bits in memory with sums in i32, or floats with sums in f32: their types, left and right; `dtype` is
    the left one."""
    column_sums: bool = False
    """The first output is summed over rows, too: a further output has a row of sums for each warp of a tile."""
    norm: Norm | None = None
    """What is done to the left operand on its way."""
    partial_stats: PartialStats | None = None
    """Means and spreads of pieces of the first output's rows, which are outputs, too."""
    positions: tuple[int, ...] = ()
    """Of the outputs of `c` among those of the problem; (): all of them in order."""

    @property
    def a_across(self) -> bool:
        """True for rows of f32 that are neighbours where elements of the sum are not: four are read at once."""
        return self.dtype is DType.F32 and self.a_load == "elements" and _rows_together(self.c, self.rows, 4)

    @property
    def w_across(self) -> bool:
        """The same for columns of the right operand."""
        return self.dtype is DType.F32 and self.w_load == "elements" and _columns_together(self.c, 4)

    @property
    def a_lines(self) -> bool:
        """True for rows that are neighbours in memory and stay so on the way to CUDA cores."""
        return not self.tensor and self.a_across

    @property
    def w_lines(self) -> bool:
        """The same for columns of the right operand."""
        return not self.tensor and self.w_across

    @property
    def float8(self) -> bool:
        """True for operands of 8-bit floats."""
        return self.dtype.is_float8

    @property
    def integers(self) -> bool:
        """True for operands of 8-bit integers."""
        return self.bytes is not None and not self.float8

    @property
    def changing(self) -> bool:
        """True for a convolution whose weight is no constant: its sum goes along memory, taps outside of channels."""
        graph = cast("Graph", self.c.graph)
        return not self.c.w_const and any(n.prim is Prim.CONV for n in graph.nodes)

    @property
    def tensor(self) -> bool:
        """True where tensor cores multiply."""
        return self.tf32 or self.dtype is not DType.F32

    @property
    def multiplied(self) -> str:
        """Name of the type in which operands are multiplied."""
        if self.float8:
            return "".join(t.value.removeprefix("f8") for t in self.bytes or ())
        if self.bytes is not None:
            return "".join("s8" if t is DType.I8 else "u8" for t in self.bytes)
        return "tf32" if self.tf32 else self.dtype.value

    @property
    def sum_dtype(self) -> DType:
        """Type of a sum as the problem has it."""
        return self.dtype.accumulator if self.float8 else DType.I32 if self.integers else self.dtype

    @property
    def halves(self) -> int:
        """Halves (16 bits) in an element, at least 1: tensor cores take 16 of a row at a time, whatever the type."""
        return max(1, self.dtype.itemsize // 2)

    def in_halves(self, elements: int) -> int:
        """Halves that so many elements fill."""
        return -(-elements * self.dtype.itemsize // 2)

    def in_elements(self, halves: int) -> int:
        """Elements that lie in so many halves."""
        return halves * 2 // self.dtype.itemsize

    @property
    def m(self) -> int:
        """Rows of the product."""
        return math.prod(self.c.dims[i] for i in self.rows)

    @property
    def n(self) -> int:
        """Columns of the product: output channels of a group."""
        return self.c.oc

    @property
    def k(self) -> int:
        """Length of the sum."""
        return self.c.ic * self.c.kernel[0] * self.c.kernel[1]

    @property
    def z(self) -> int:
        """Independent products: groups times batch."""
        return self.c.groups * math.prod(self.c.dims[i] for i in self.batch)

    @property
    def per_load(self) -> int:
        """Elements of a load of 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def vector(self) -> int:
        """Neighbouring results that a thread finishes where memory allows: of numbers of 8 bits as of halves."""
        return 4 if self.by_fours else 8 if self.bytes else self.per_load

    @property
    def by_fours(self) -> bool:
        """True where a thread has two pieces of four results: f32, and integers with results of 4 bytes."""
        stored = ((self.sum_dtype if slot < 0 else self.c.body[slot].dtype).itemsize for slot, _ in self.c.outputs)
        return self.halves == 2 or (self.integers and all(size == 4 for size in stored))


def product(
    problem: Problem, *, tf32: bool = False, by_channel: bool = False, changing: bool = False
) -> Product | Declined:
    """The product that a problem is, or why it is none that the templates take; `tf32`: operands of f32 are rounded.

    `by_channel`: depthwise convolutions with changing weights and transposed ones, too; `changing`: others with
    changing weights.
    """
    integers = narrow(problem)
    if integers is not None:
        return _of_bytes(integers)
    floats = narrow_floats(problem)
    if floats is not None:
        return _of_bytes(floats)
    if applies(problem.graph):
        return _normed(problem)
    c = match(problem, CONTRACTED, VALUES, heads=True, by_channel=by_channel, changing=changing)
    if isinstance(c, Declined):
        return c
    return _product(c, tf32=tf32)


def _normed(problem: Problem) -> Product | Declined:
    """A product of a normalised operand, or one that leaves partial sums."""
    taken = stripped(problem)
    if isinstance(taken, Declined):
        return taken
    c = match(taken.problem, HALVES, VALUES)
    if isinstance(c, Declined):
        return c
    p = _product(c)
    if isinstance(p, Declined):
        return p
    norm, stats = taken.norm, taken.partial_stats
    if p.z != 1 or c.kernel != (1, 1) or c.a.kind != "input":
        return Declined("a norm around several products")
    if norm is not None:
        weights = all(is_weight(c, problem.graph.inputs.index(i)) for i in norm.columns)
        places = (p.m, p.k, c.a.index) == (norm.count, norm.length, problem.graph.inputs.index(norm.source))
        if not weights or not places or p.a_load != "rows" or not _dense(c, c.a_layout, p.rows, p.k):
            return Declined("a normalised operand that is no matrix in memory, or vectors that are no weights")
        if norm.stored >= 0 and problem.graph.type_of(norm.value).size != p.m * p.k:
            return Declined("a normalised operand of other rows")
    if stats is not None:
        slot, layout = c.outputs[0]
        half = (p.sum_dtype if slot < 0 else c.body[slot].dtype) in HALVES
        if len(c.outputs) > 1 or not half or layout.channel != 1 or not _dense(c, layout, p.rows, p.n) or p.n % PIECE:
            return Declined("partial statistics of a result that is no 16-bit matrix in whole fragments")
    return replace(p, norm=norm, partial_stats=stats, positions=taken.positions)


def _dense(c: Contraction, layout: StridedLayout, rows: Sequence[int], columns: int) -> bool:
    """Whether the rows of a matrix follow each other in memory."""
    step = columns
    for i in reversed(rows):
        if c.dims[i] > 1 and layout.dims[i] != step:
            return False
        step *= c.dims[i]
    return layout.offset == 0


def _of_bytes(integers: Narrow) -> Product | Declined:
    """A product of numbers of 8 bits, in chunks of 16."""
    c = match(integers.problem, frozenset({DType.I32, DType.F32}), VALUES)
    if isinstance(c, Declined):
        return c
    if c.a.kind != "input" or c.w.kind != "input":
        return Declined("a constant of numbers of 8 bits as an operand")
    p = _product(c, (integers.types[c.a.index], integers.types[c.w.index]))
    if not isinstance(p, Declined) and "elements" in (p.a_load, p.w_load):
        side = "left" if p.a_load == "elements" else "right"
        return Declined(f"a {side} operand of 8 bits that does not lie in vectors of 16 along K")
    return p


def _product(c: Contraction, bytes_: tuple[DType, DType] | None = None, *, tf32: bool = False) -> Product | Declined:
    graph = cast("Graph", c.graph)
    if any(n.type.size >= _LIMIT for n in graph.nodes):
        return Declined("a value of 2^31 elements or more")
    dtype = bytes_[0] if bytes_ else next(n.type.dtype for n in graph.nodes if CATEGORY[n.prim] is Category.LINEAR)
    batch = tuple(i for i, step in enumerate(c.w_layout.dims) if step)
    rows = tuple(i for i in range(len(c.dims)) if i not in batch)
    if c.pack is not None and batch:
        return Declined("a convolution whose weight differs by position")
    borders = _borders(c)
    chunk = 16 // dtype.itemsize
    tf32 = tf32 and dtype is DType.F32
    return Product(c, dtype, batch, rows, _a_load(c, rows, chunk), _w_load(c, chunk), borders, tf32, bytes_)


def in_columns(p: Product) -> Product:
    """A product whose groups are the heads of its results, with all their columns side by side; any other as it is.

    Such groups read the same left operand, and right ones that lie side by side: tiles may hold several heads.
    """
    c = p.c
    w = c.w_layout
    if c.groups == 1 or c.a_layout.group or w.group != c.oc * w.channel or c.kernel != (1, 1) or c.pack is not None:
        return p
    joined = replace(c, groups=1, oc=c.groups * c.oc, heads=c.oc, w_layout=replace(w, group=0))
    return replace(p, c=joined, w_load=_w_load(joined, p.per_load))


def is_weight(c: Contraction, index: int) -> bool:
    """True where an input of the problem is constant at run time."""
    graph = cast("Graph", c.graph)
    return cast("a.InputAttrs", graph.nodes[graph.inputs[index]].attrs).is_weight


def _borders(c: Contraction) -> tuple[Border, Border] | None:
    """Zero padding that arithmetic can tell, instead of tables."""
    if c.pack is None:
        return None
    found = []
    for table in (c.pack.rows, c.pack.cols):
        inside = [x for x in table if x >= 0]
        lo = next((i for i, x in enumerate(table) if x >= 0), 0)
        if inside != list(range(len(inside))) or list(table[lo : lo + len(inside)]) != inside:
            return None
        found.append(Border(lo, len(inside)))
    return found[0], found[1]


def _aligned(chunk: int, *steps: int) -> bool:
    return all(s % chunk == 0 for s in steps)


def _steps(c: Contraction) -> tuple[int, ...]:
    """Steps of a between rows of the product and between taps."""
    if c.pack is not None:
        return (c.a_layout.dims[0], c.pack.row_step, c.pack.col_step)
    taps = (step for step, n in zip(c.a_kernel, c.kernel, strict=True) if n > 1)
    return (*(step for step, n in zip(c.a_layout.dims, c.dims, strict=True) if n > 1), *taps)


def _a_load(c: Contraction, rows: Sequence[int], chunk: int) -> ALoad:
    layout = c.a_layout
    group = layout.group if c.groups > 1 else 0
    along_k = layout.channel == 1 or c.ic == 1
    if along_k and _aligned(chunk, group, layout.offset, *_steps(c)):
        if c.pack is None and c.kernel == (1, 1):
            return "rows"
        if c.ic % chunk == 0:
            return "taps"
    return "columns" if chunk == 8 and _rows_together(c, rows, chunk) else "elements"


def _rows_together(c: Contraction, rows: Sequence[int], chunk: int) -> bool:
    """Whether every chunk of rows of a is aligned in memory, element by element of the sum."""
    layout, last = c.a_layout, rows[-1] if rows else 0
    if c.pack is not None or c.kernel != (1, 1) or not rows or c.dims[last] % chunk or layout.dims[last] != 1:
        return False
    others = [layout.dims[i] for i in range(len(c.dims)) if i != last and c.dims[i] > 1]
    return _aligned(chunk, layout.offset, layout.channel, layout.group if c.groups > 1 else 0, *others)


def _w_load(c: Contraction, chunk: int) -> WLoad:
    if c.w_const:
        return "packed"
    layout = c.w_layout
    if c.w_k == 1 and _aligned(chunk, layout.offset, layout.channel, *_outer(c)):
        return "nk"
    return "kn" if chunk == 8 and _columns_together(c, chunk) else "elements"


def _outer(c: Contraction) -> list[int]:
    """Steps of w between products."""
    found = [step for step, n in zip(c.w_layout.dims, c.dims, strict=True) if n > 1]
    return [*found, c.w_layout.group] if c.groups > 1 else found


def _columns_together(c: Contraction, chunk: int) -> bool:
    """Whether every chunk of columns of w is aligned in memory, element by element of the sum."""
    layout = c.w_layout
    return layout.channel == 1 and c.oc % chunk == 0 and _aligned(chunk, layout.offset, c.w_k, *_outer(c))


def offset_of(layout: StridedLayout, dims: Sequence[int], positions: Sequence[int], index: str) -> Int:
    """C expression of the part of a layout that `positions` of the loop make, from their joint `index`."""
    return summed(*(part * step for part, step in index_parts(dims, layout.dims, positions, index)))


def index_parts(
    dims: Sequence[int], strides: Sequence[int], positions: Sequence[int], index: str
) -> list[tuple[Int, int]]:
    """C expressions of the dimensions' own indices in their joint `index`, each with its stride; the innermost first.

    Neighbours that act as one dimension are joined, those of size 1 or stride 0 left out.
    """
    steps: list[tuple[int, int]] = []  # (size, stride)
    for i in positions:
        n, step = dims[i], strides[i]
        if n == 1:
            continue
        if steps and steps[-1][1] == step * n:
            steps[-1] = (steps[-1][0] * n, step)
        else:
            steps.append((n, step))
    found = []
    inner = 1
    for at, (n, step) in reversed(list(enumerate(steps))):
        if step:
            part = Int(index) / inner
            found.append((part if at == 0 else part % n, step))
        inner *= n
    return found


def image_steps(p: Product) -> tuple[int, int]:
    """Steps of a between padded rows and columns of the image."""
    c = p.c
    if c.pack is not None:
        return c.pack.row_step, c.pack.col_step
    rows = c.a_kernel[0] // c.dilations[0] if c.kernel[0] > 1 else c.a_layout.dims[1] // c.strides[0]
    cols = c.a_kernel[1] // c.dilations[1] if c.kernel[1] > 1 else c.a_layout.dims[2] // c.strides[1]
    return rows, cols
