"""Operands of the tma template: tensor maps, and the copies that fill one stage.

A stage holds 64 elements of the sum of every row of both tiles, as panels of 64, 32 or 16: rows of 128, 64 or 32 bytes,
swizzled. The rows of the left tile are a box of up to three dimensions, so that a tile of a convolution is a box of
pixels, and padding is what TMA fills in for what lies outside of the tensor.
Source: CUDA driver API, cuTensorMapEncodeTiled; note on matrix products, sections 2.3 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.generate.contraction.match import StridedLayout
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.expr.integer import Int
from weft.ir.declined import Declined
from weft.kernels.source import Pointer, TensorMap

STEP = 64
"""Of the sum in one stage. Along the sum, stages and panels are counted in words of 16 bits, as elements of two or four
bytes fill the same rows of shared memory."""
_RANK = 5
_BOX = 256
_TRAVERSAL = 8
INTERLEAVED = 32
"""Columns that four lanes hold as 8 neighbours each."""

Three = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a tensor map: size, step in elements, extent of a box, the coordinate's C text."""

    size: int
    step: int
    box: int
    at: str
    stride: int = 1
    """Of the elements that a box takes."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand that a tensor map describes, or packed weights."""

    map: TensorMap | None
    load: str
    """Statements: k-block `kb` to the shared address `to`, arriving at the barrier `bar`."""
    mn_major: bool = False
    """True: the sum is not the dimension whose elements are neighbours."""
    bytes: int = 0
    """Shared memory of a field."""
    copied: int = 0
    """Of them what copies fill."""
    interleaved: bool = False
    """A map whose columns come in the order of packed ones."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the product as up to three dimensions, slowest first, and the steps of the left operand."""

    sizes: Three
    steps: Three
    image: bool
    """Pixels of a convolution that reads neighbours."""

    @property
    def linear(self) -> bool:
        """One dimension."""
        return self.sizes[0] == self.sizes[1] == 1

    def tiles(self, box: Three) -> Three:
        """Boxes along each dimension."""
        a, b, c = (-(-n // size) for n, size in zip(self.sizes, box, strict=True))
        return a, b, c


class Share(NamedTuple):
    """Multicast of an operand: each CTA of a cluster loads a slice of it into several."""

    parts: int
    """How many."""
    rank: str
    """C text: the slice that a CTA loads."""
    mask: str
    """C text: the CTA mask of the multicast."""


def merged(sizes: Sequence[int], steps: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int]]:
    """(size, step) of some dimensions, slowest first; neighbours that act as one are joined."""
    found: list[tuple[int, int]] = []
    for i in positions:
        n, step = sizes[i], steps[i]
        if n == 1:
            continue
        if found and found[-1][1] == step * n:
            found[-1] = (found[-1][0] * n, step)
        else:
            found.append((n, step))
    return found


def joined(layout: StridedLayout, dims: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(size, step, size of all faster ones) of dimensions, slowest first; neighbours that act as one are joined."""
    found = merged(dims, layout.dims, positions)
    inner = [math.prod(n for n, _ in found[i + 1 :]) for i in range(len(found))]
    return [(n, step, faster) for (n, step), faster in zip(found, inner, strict=True)]


def rows_of(p: Product) -> Rows | Declined:
    """How the left operand's rows lie in memory."""
    c = p.c
    if not p.tensor or c.a.kind != "input":
        return Declined("the tma template takes inputs of 16 or 8 bits, or f32 as TF32")
    if p.float8 and c.kernel != (1, 1):
        return Declined("a convolution of 8-bit floats")
    if p.a_load not in ("rows", "taps", "columns") or p.w_load == "elements":
        return Declined("an operand that 16-byte vectors do not fit (strides or offsets)")
    if c.pack is not None and p.borders is None:
        return Declined("padding by other values than zeros, which TMA does not fill in")
    if c.pack is not None or (c.kernel != (1, 1) and c.a_kernel[1]):
        if len(c.dims) != 3 or p.batch or (c.a_layout.channel != 1 and c.ic > 1):
            return Declined("an image that is not channels-last")
        return Rows((c.dims[0], c.dims[1], c.dims[2]), (0, 0, 0), True)
    dims = joined(c.a_layout, c.dims, p.rows)
    if len(dims) > 3 or any(step <= 0 for _, step, _ in dims):
        return Declined("rows that no TMA box describes")
    if p.a_load == "columns" and (len(dims) != 1 or dims[0][1] != 1):
        return Declined("columns that no TMA box describes")
    fill = [(1, 0, 1)] * (3 - len(dims)) + dims
    return Rows((fill[0][0], fill[1][0], fill[2][0]), (fill[0][1], fill[1][1], fill[2][1]), False)


def blocks_of_channels(p: Product, panel: int) -> int:
    """Panels of one tap."""
    return -(-p.in_halves(p.c.ic) // panel)


def stages_of_sum(p: Product, panel: int) -> int:
    """Stages that the whole sum takes."""
    return -(-p.c.kernel[0] * p.c.kernel[1] * blocks_of_channels(p, panel) * panel // STEP)


def left(p: Product, rows: Rows, bm: int, panel: int, box: Three, *, share: Share | None = None) -> Operand | Declined:
    """The left operand's map; coordinates of a tile are `i2`, `i1`, `i0`, group and batch `g` and `b`."""
    c = p.c
    if p.a_load == "columns":
        dims = [
            Dim(p.m + c.a_layout.offset, 1, STEP, str(Int("i0") + c.a_layout.offset)),
            Dim(c.ic, c.a_layout.channel, STEP, f"kb * {STEP}"),
            *outer(p, c.a_layout, c.a_layout.group),
        ]
        return _mn_major(p, c.a.index, dims, bm, share=share)
    if share and (not rows.linear or rows.sizes[2] == 1):
        return Declined("rows of several dimensions, which multicast cannot slice")
    wide = p.in_elements(panel)
    first = Dim(c.ic + c.a_layout.offset, 1, wide, "c")
    if rows.image:
        dims = [first, *_image(p, box)]
    else:
        dims = [first]
        if c.kernel != (1, 1):
            dims.append(Dim(c.kernel[0], c.a_kernel[0], 1, "tap"))
        for i in (2, 1, 0):
            if rows.sizes[i] > 1 or box[i] > 1:  # of a single row too a whole box is copied, as the barriers count
                step = rows.steps[i] or -(-first.size // STEP) * STEP
                dims.append(Dim(rows.sizes[i], step, box[i], f"i{i_name(i)}"))
        dims += outer(p, c.a_layout, c.a_layout.group)
    if math.prod(d.box // d.stride for d in dims[1:]) != math.prod(box):
        return Declined("a TMA box of other rows than its mbarrier expects")
    part = bm
    if share:
        part = bm // share.parts
        dims = [replace(d, box=part, at=f"i0 + {share.rank} * {part}") if d.at == "i0" else d for d in dims]
    map_ = box_map(p, Pointer("in", c.a.index), dims, 2 * panel)
    if isinstance(map_, Declined):
        return map_
    blocks = blocks_of_channels(p, panel)
    used = c.kernel[0] * c.kernel[1] * blocks
    per = STEP // panel
    lines = []
    for i in range(per):
        at = Int("q")
        channel = str(at % blocks * wide + c.a_layout.offset)
        if used % per:
            channel = f"q < {used} ? {channel} : {first.size}"
        kh, kw = Int("tap") / c.kernel[1], Int("tap") % c.kernel[1]
        taps = f"const int tap = {at / blocks}, kh = {kh}, kw = {kw}; (void)kh; (void)kw;"
        lines.append(
            f"{{ const int q = {Int('kb') * per + i}; (void)q; {taps if c.kernel != (1, 1) else ''}"
            f" const int c = {channel};"
            f" {_copy('ma', i * bm * panel * 2, dims, share, part * panel * 2)} }}"
        )
    return Operand(map_, " ".join(lines))


def halo_size(p: Product, box: Three) -> tuple[int, int]:
    """Rows and columns of pixels that a box of results reads."""
    (kh, kw), (dh, dw) = p.c.kernel, p.c.dilations
    return box[1] + (kh - 1) * dh, box[2] + (kw - 1) * dw


def halo_tile(p: Product, rows: Rows, box: Three, panel: int) -> Operand | Declined:
    """All pixels that a tile reads, of a panel of channels `cb`: a row of shared memory each, whatever tap reads it.

    8 rows of shared memory are one unit of a warpgroup product, so a tile is 8 pixels wide.
    """
    if not rows.image or p.c.kernel == (1, 1) or p.c.strides != (1, 1) or box[2] != 8 or (box[0] > 1 and box[1] % 8):
        return Declined("halo tiles are for convolutions of stride 1, in tiles of 8 columns")
    high, wide = halo_size(p, box)
    channels = p.in_elements(panel)
    first = Dim(p.c.ic + p.c.a_layout.offset, 1, channels, str(Int("cb") * channels + p.c.a_layout.offset))
    image = _image(p, box)
    ats = [str(Int("i0") - _lows(p)[1]), str(Int("i1") - _lows(p)[0])]
    sized = [replace(d, box=n, at=at) for d, n, at in zip(image, (wide, high), ats, strict=False)]
    dims = [first, *sized, *image[2:]]
    map_ = box_map(p, Pointer("in", p.c.a.index), dims, 2 * panel)
    if isinstance(map_, Declined):
        return map_
    copied = box[0] * high * wide * 2 * panel
    return Operand(map_, _copy("ma", 0, dims), bytes=-(-copied // 1024) * 1024, copied=copied)


def i_name(position: int) -> int:
    """Suffix of the coordinate of one of three dimensions, the fastest being 0."""
    return 2 - position


def _lows(p: Product) -> tuple[int, int]:
    """Zeros above and left of the image."""
    return (p.borders[0].lo, p.borders[1].lo) if p.borders is not None else (0, 0)


def _image(p: Product, box: Three) -> list[Dim]:
    c = p.c
    (sh, sw), (dh, dw) = c.strides, c.dilations
    (kh, kw), (images, high, wide) = c.kernel, c.dims
    if c.pack is not None and p.borders is not None:
        sizes = (p.borders[0].size, p.borders[1].size)
        steps = (c.pack.row_step, c.pack.col_step)
    else:
        sizes = ((high - 1) * sh + (kh - 1) * dh + 1, (wide - 1) * sw + (kw - 1) * dw + 1)
        steps = (c.a_kernel[0] // dh, c.a_kernel[1] // dw)
    lows, (i0, i1, ky, kx) = _lows(p), map(Int, ("i0", "i1", "kh", "kw"))
    row = steps[0] if steps[0] > 0 else sizes[1] * steps[1]
    dims = [
        Dim(sizes[1], steps[1], box[2] * sw, str(i0 * sw + kx * dw - lows[1]), sw),
        Dim(sizes[0], row, box[1] * sh, str(i1 * sh + ky * dh - lows[0]), sh),
    ]
    if images > 1 or box[0] > 1:
        dims.append(Dim(images, c.a_layout.dims[0] or sizes[0] * row, box[0], "i2"))
    if c.groups > 1:
        dims.append(Dim(c.groups, c.a_layout.group, 1, "g"))
    return dims


def right(
    p: Product,
    bn: int,
    panel: int,
    step: int = STEP,
    *,
    share: Share | None = None,
    interleaved: bool = False,
    halo: bool = False,
) -> Operand | Declined:
    """The right operand, whose columns start at `n0`; k-blocks of `step` words. `interleaved`: see `TmaConfig`.

    `halo`: taps are inside of blocks of channels.
    """
    c, layout = p.c, p.c.w_layout
    if p.changing and c.kernel != (1, 1) and (p.w_load != "nk" or p.in_halves(c.ic) % panel):
        return Declined("taps of a weight that is no constant, of channels that are no whole panels")
    if interleaved:
        return _interleaved(p, bn, panel, step, share, halo=halo)
    if p.w_load == "packed":
        size = bn * step
        from_ = f"pk_tile + (long long)kb * {p.in_elements(size)}"
        if share:
            part, elements = 2 * size // share.parts, p.in_elements(size) // share.parts
            to, at = f"to + {share.rank} * {part}", f"{from_} + {share.rank} * {elements}"
            return Operand(None, f"w_bulk_shared({to}, {at}, {part}u, bar, {share.mask});")
        return Operand(None, f"w_bulk(to, {from_}, {2 * size}u, bar);")
    if (c.kernel != (1, 1) and not p.changing) or c.w.kind != "input":
        return Declined("weights of several taps that are computed")
    pointer = Pointer("in", c.w.index)
    if p.w_load == "kn":
        if bn % STEP or panel != STEP:
            return Declined("an MN-major operand in tiles that are no multiple of 64 columns")
        dims = [
            Dim(p.n + layout.offset, 1, STEP, str(Int("n0") + layout.offset)),
            Dim(c.ic, c.w_k, STEP, f"kb * {STEP}"),
            *outer(p, layout, layout.group),
        ]
        return _mn_major(p, pointer.index, dims, bn, "mw", share=share)
    wide, part = p.in_elements(panel), bn // (share.parts if share else 1)
    if part % 8:
        return Declined("multicast slices that are no multiple of 8 columns")
    columns = Dim(p.n, layout.channel, part, f"n0 + {share.rank} * {part}" if share else "n0")
    dims = [Dim(_sum(p) + layout.offset, 1, wide, "c"), columns, *outer(p, layout, layout.group)]
    map_ = box_map(p, pointer, dims, 2 * panel)
    if isinstance(map_, Declined):
        return map_
    lines = [
        f"{{ {at} {_copy('mw', i * bn * panel * 2, dims, share, part * panel * 2)} }}"
        for i, at in enumerate(_along(p, panel, step, halo=halo))
    ]
    return Operand(map_, " ".join(lines))


def _sum(p: Product) -> int:
    """Elements of a column of the right operand that follow each other in memory."""
    return p.k if p.changing else p.c.ic


def _along(p: Product, panel: int, step: int, *, halo: bool) -> list[str]:
    """Where in a column each panel of a stage begins: `c`."""
    wide, offset, per = p.in_elements(panel), p.c.w_layout.offset, step // panel
    if not halo:
        return [f"const int c = {Int('kb') * p.in_elements(STEP) + (i * wide + offset)};" for i in range(per)]
    taps, q = p.c.kernel[0] * p.c.kernel[1], Int("q")
    at = q % taps * p.c.ic + q / taps * wide + offset
    return [f"const int q = {Int('kb') * per + i}, c = {at};" for i in range(per)]


def _interleaved(p: Product, bn: int, panel: int, step: int, share: Share | None, *, halo: bool) -> Operand | Declined:
    """Row 8 c + 2 q + i of 32 in shared memory is column 8 q + 2 c + i: dimensions i, q, c, from the fastest.

    By fours, row 16 d + 8 c + 2 q + i is column 16 d + 4 q + 2 c + i, as of packed ones.
    """
    layout = p.c.w_layout
    count = share.parts if share else 1
    whole = INTERLEAVED * count
    rank = Int(share.rank) if share else Int("0")
    if p.w_load != "nk" or panel != STEP or p.n % INTERLEAVED or bn % whole or outer(p, layout, layout.group):
        return Declined("columns that cannot be interleaved: a K-major operand, one matrix of a multiple of 32 columns")
    column = layout.channel
    first = [Dim(_sum(p) + layout.offset, 1, p.in_elements(panel), "c"), Dim(2, column, 2, "0")]
    if not p.by_fours:
        first += [Dim(4, 8 * column, 4, "0"), Dim(4, 2 * column, 4, "0")]
        dims = [
            *first,
            Dim(
                p.n // INTERLEAVED,
                INTERLEAVED * column,
                bn // whole,
                str(Int("n0") / INTERLEAVED + rank * (bn // whole)),
            ),
        ]
    else:
        first += [Dim(4, 4 * column, 4, "0"), Dim(2, 2 * column, 2, "0")]
        half = INTERLEAVED // 2
        at = str(Int("n0") / half + rank * (bn // count // half))
        dims = [*first, Dim(p.n // half, half * column, bn // count // half, at)]
    map_ = box_map(p, Pointer("in", p.c.w.index), dims, 2 * panel)
    if isinstance(map_, Declined):
        return map_
    part = bn // count * panel * 2
    lines = [
        f"{{ {at} {_copy('mw', i * bn * panel * 2, dims, share, part)} }}"
        for i, at in enumerate(_along(p, panel, step, halo=halo))
    ]
    return Operand(map_, " ".join(lines), interleaved=True)


def _mn_major(
    p: Product, index: int, dims: list[Dim], rows: int, name: str = "ma", *, share: Share | None = None
) -> Operand | Declined:
    """An operand along whose rows memory runs: panels of 64 rows, of which a part is one of the sum."""
    part = STEP
    if share:
        part = STEP // share.parts
        dims = [dims[0], replace(dims[1], box=part, at=f"{dims[1].at} + {share.rank} * {part}"), *dims[2:]]
    map_ = box_map(p, Pointer("in", index), dims, 2 * STEP)
    if isinstance(map_, Declined):
        return map_
    panel = 2 * STEP * STEP
    first = Int(dims[0].at)
    lines = [
        _copy(name, i * panel, [Dim(0, 0, 0, str(first + i * STEP)), *dims[1:]], share, part * STEP * 2)
        for i in range(rows // STEP)
    ]
    return Operand(map_, " ".join(lines), mn_major=True)


def outer(p: Product, layout: StridedLayout, group: int) -> list[Dim]:
    """Groups and batch dimensions, as far as they move the operand."""
    c = p.c
    found = [Dim(c.groups, group, 1, "g")] if c.groups > 1 and group else []
    for n, step, faster in reversed(joined(layout, c.dims, p.batch)):
        if step:
            found.append(Dim(n, step, 1, str(Int("b") / faster % n)))
    return found


def box_map(p: Product, base: Pointer, dims: list[Dim], swizzle: int) -> TensorMap | Declined:
    """The map, if there can be one. Source: CUDA driver API, cuTensorMapEncodeTiled."""
    size = p.dtype.itemsize
    if len(dims) < 2:
        least = max(8, p.per_load)
        dims.append(Dim(1, -(-dims[0].size // least) * least, 1, "0"))
    if len(dims) > _RANK:
        return Declined(f"an operand of {len(dims)} dimensions; tensor maps have {_RANK}")
    if any(not 1 <= d.box <= _BOX or d.stride > _TRAVERSAL for d in dims):
        return Declined("a TMA box over the limits of tensor maps (256 elements, strides of 8)")
    strides = tuple(d.step * size for d in dims[1:])
    if any(s <= 0 or s % 16 or s >= 1 << 40 for s in strides):
        return Declined("strides that are no multiples of 16 bytes")
    return TensorMap(
        base,
        "u8" if p.bytes else p.multiplied,
        tuple(d.size for d in dims),
        strides,
        tuple(d.box for d in dims),
        tuple(d.stride for d in dims),
        swizzle,
    )


def _copy(name: str, offset: int, dims: Sequence[Dim], share: Share | None = None, part: int = 0) -> str:
    """Statement: a box to `offset` bytes behind `to`. `part`: bytes of the slice of a multicast."""
    at, to = ", ".join(d.at for d in dims), Int("to") + offset
    if share is None:
        return f"w_tma(&{name}, {to}, bar, {at});"
    return f"w_tma_shared(&{name}, {to + Int(share.rank) * part}, bar, {share.mask}, {at});"
