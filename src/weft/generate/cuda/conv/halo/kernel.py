"""Convolutions from a tile of the image in shared memory: every element is read once for all taps that see it.

A block owns a rectangle of output pixels and some output channels. Per block of channels it copies the field of its
pixels (padding, reflection and upsampling resolved by address) and the weights of all taps, in the order in which lanes
hold fragments of m16n8k16; then all taps are multiplied without a barrier in between. Weights and addresses do not wait
for the predecessors. Images of up to four channels multiply four taps at a time; few output channels put the columns of
the kernel beside them (`wide`) and add up shifted sums at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.generate.contraction.match import Source
from weft.generate.cuda.gemm.common import epilogue, tf32
from weft.generate.cuda.gemm.common.loaders import each, tables
from weft.generate.cuda.gemm.common.pack import FragmentOrder, pack_fragments, packed_by
from weft.generate.cuda.gemm.common.product import Product, image_steps
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

FEW = 4
"""Channels per block of images with so few: a step of the sum is four taps."""
_MOST_STEPS = 40
"""Steps that are unrolled."""
_MOST_GATHERED = 512
"""Channels of an image that is read element by element."""
_KEPT = 8
"""Pieces of the field whose addresses a thread keeps."""


@dataclass(frozen=True, slots=True)
class HaloConfig(Parameters):
    """Parameters of the template; counts."""

    th: int
    tw: int
    bn: int
    bc: int
    """Channels of a block: 4 (images of at most four) or a multiple of 16, counted in halves."""
    wm: int
    wn: int
    wk: int
    """Warps that share a sum."""
    stages: int
    """Blocks of channels in shared memory."""
    split: int
    """Thread blocks that share a sum."""
    cluster: bool
    wide: bool

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="halo")


@dataclass(frozen=True, slots=True)
class Window:
    """What the template knows of a convolution by numbers alone."""

    rows: int
    cols: int
    images: int
    groups: int
    ic: int
    oc: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    vectorized: bool
    """Eight neighbouring channels are 16 aligned bytes."""
    tables: int
    """Bytes of shared memory for tables of rows and columns."""
    halves: int = 1
    """Halves (16 bits) in an element."""
    outside: bool = False
    """Tiles may begin in front of the first row or column."""

    def field(self, th: int, tw: int) -> tuple[int, int]:
        """Rows and columns of the image that so many rows and columns of results read."""
        high = (th - 1) * self.strides[0] + (self.kernel[0] - 1) * self.dilations[0] + 1
        return high, (tw - 1) * self.strides[1] + (self.kernel[1] - 1) * self.dilations[1] + 1

    def tiles(self, th: int, tw: int) -> tuple[int, int]:
        """Rows and columns of such tiles of an image."""
        return -(-self.rows // th), -(-self.cols // tw)

    def tap(self, ky: int, kx: int, half: int, pitch: int) -> int:
        """Bytes from a pixel's place in a field to that of a tap.

        `half` columns of one remainder by the stride lie side by side, `pitch` bytes from one to the next.
        """
        x, s = kx * self.dilations[1], self.strides[1]
        return ky * self.dilations[0] * half * s * pitch + (x % s * half + x // s) * pitch


def window(p: Product) -> Window | Declined:
    """The convolution that a product is, if the template takes it."""
    c = p.c
    if not p.tensor or p.bytes:
        return Declined(f"tensor cores for {p.dtype.value}")
    if len(c.dims) != 3 or c.kernel == (1, 1) or not c.w_const or p.batch:
        return Declined("no convolution that reads a halo")
    if p.a_load != "taps" and c.ic > _MOST_GATHERED:
        return Declined("many channels that 16-byte vectors do not fit")
    return Window(
        c.dims[1], c.dims[2], c.dims[0], c.groups, c.ic, c.oc, c.kernel, c.strides, c.dilations,
        p.a_load == "taps", mma.table_bytes(p), p.halves,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that follow from a window and a shape."""

    w: Window
    s: HaloConfig

    @property
    def few(self) -> bool:
        """Steps are four taps."""
        return self.s.bc == FEW

    @property
    def across(self) -> int:
        """Columns of the image per row of the tile that have sums of their own."""
        return self.s.tw + ((self.w.kernel[1] - 1) * self.w.dilations[1] if self.s.wide else 0)

    @property
    def bm(self) -> int:
        """Rows of the block's product."""
        return -(-self.s.th * self.across // self.s.wm) * self.s.wm

    @property
    def columns(self) -> int:
        """Columns of the product per group."""
        return self.w.oc * (self.w.kernel[1] if self.s.wide else 1)

    @property
    def taps(self) -> int:
        """Taps of the product's sum."""
        return self.w.kernel[0] * (1 if self.s.wide else self.w.kernel[1])

    @property
    def steps(self) -> int:
        """Steps of 16 halves of K per block of channels."""
        if self.few:
            return -(-self.taps // (4 * self.s.wk)) * self.s.wk * self.w.halves
        return self.taps * (self.s.bc // 16)

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return -(-self.w.ic * (1 if self.few else self.w.halves) // self.s.bc)

    @property
    def field(self) -> tuple[int, int]:
        """Rows and columns of the image that a tile reads."""
        return self.w.field(self.s.th, self.s.tw)

    @property
    def half(self) -> int:
        """Columns of the field of one remainder by the stride: they lie side by side."""
        return -(-self.field[1] // self.w.strides[1])

    @property
    def pitch(self) -> int:
        """Bytes from pixel to pixel: eight neighbours lie in different banks."""
        return 8 * self.w.halves if self.few else self.s.bc * 2 + 16

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row of the field."""
        return self.half * self.w.strides[1] * self.pitch

    @property
    def a_bytes(self) -> int:
        """Shared memory of a field of one block of channels."""
        return -(-self.field[0] * self.row_bytes // 16) * 16

    @property
    def w_bytes(self) -> int:
        """Shared memory of its weights."""
        return self.steps * self.s.bn * 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.bm // self.s.wm) * (self.s.bn // self.s.wn) * self.s.wk

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles of an image."""
        return self.w.tiles(self.s.th, self.s.tw)

    @property
    def deepest(self) -> int:
        """Most blocks of channels of one thread block."""
        return -(-self.blocks // self.s.split)

    @property
    def stages_end(self) -> int:
        """Where stages or sums end in shared memory."""
        sums = self.s.wk * self.bm * (self.s.bn + mma.PAD) * 4
        return -(-max(self.s.stages * (self.a_bytes + self.w_bytes), sums) // 16) * 16

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block: stages or sums, tables, places of taps, a flag."""
        return (
            self.stages_end + -(-self.w.tables // 16) * 16 + (self.steps // self.w.halves * 16 if self.few else 0) + 16
        )

    def tap(self, ky: int, kx: int) -> int:
        """Bytes from a pixel's place in the field to that of a tap."""
        return self.w.tap(ky, kx, self.half, self.pitch)


def refuse(g: Geometry) -> Declined | None:
    """Why a shape does not fit a window; None where it does."""
    w, s = g.w, g.s
    if g.few and w.ic > FEW:
        return Declined(f"{w.ic} channels; steps of four taps take {FEW}")
    if s.wide and (w.strides[1] != 1 or w.groups != 1 or s.split != 1 or g.columns > s.bn or g.few):
        return Declined("kernel columns as output channels exclude split-K over warps")
    if not g.few and s.bc // 16 % s.wk:
        return Declined("warps that split K must divide its k-steps evenly")
    return None


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `HaloConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `HaloConfig.schedule`."""
    w = window(p)
    if isinstance(w, Declined):
        return w
    s = HaloConfig.of(schedule)
    g = Geometry(w, s)
    end = epilogue.plan(p)
    refused = refuse(g)
    if refused is not None:
        return refused
    if s.cluster and end.width % 4:
        return Declined("split-K over a cluster reduces 4 neighbouring results at a time")
    by_work = s.split > 1 and not s.cluster
    args = epilogue.arguments(p, True, by_work, by_work)
    nt, (tall, broad) = -(-g.columns // s.bn), g.tiles
    tiles = w.images * tall * broad * nt
    places, before, _ = tables(p, g.threads) if p.c.pack is not None and p.borders is None else ("", "", 0)
    core = mma.MmaConfig(g.bm, s.bn, 16, s.wm, s.wn, s.wk, s.stages, s.split, s.cluster)
    taps, taps_text = tap_table(g)
    block = Int("role.block_x()")
    lines = [
        *opening(g),
        f"const int tile = {block / nt}, n0 = {block % nt * s.bn}, g = role.block_z(), b = 0;",
        place_of_tile(g),
        *pipeline(p, g, args.names, before, taps, [] if s.wide else epilogue.prefetch(p, args.names, s.bn)),
        "float* const sums = (float*)sm;",
        mma.to_shared(core),
    ]
    if s.wide:
        lines += _finish_wide(p, g, end, args)
    else:
        y, x = "y0" + Int("r") / s.tw, "x0" + Int("r") % s.tw
        inside = [f"r < {s.th * s.tw}"] if g.bm > s.th * s.tw else []
        inside += [f"{y} < {w.rows}"] if w.rows % s.th else []
        inside += [f"{x} < {w.cols}"] if w.cols % s.tw else []
        sums_ = mma.Sums(g.bm, s.bn, s.wk, s.split, s.cluster, g.threads)
        lines += mma.finish(p, sums_, end, tiles, row=str(pixel_at(w, y, x)), inside=inside)
    order = FragmentOrder(g.columns, s.bn, s.bc, g.blocks, g.taps, g.steps, s.wide)
    packing = pack_fragments(p, order)
    role = DeviceRole(
        threads=g.threads,
        body="\n".join(x for x in lines if x),
        parameters=args.parameters,
        grid=(tiles, s.split, w.groups),
        globals=(tf32.FUNCTIONS if p.tf32 else "") + products(p.multiplied) + args.constants + places + taps_text,
        shared_bytes=g.shared,
        cluster=(1, s.split, 1) if s.cluster else (1, 1, 1),
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
        workspace_bytes=tiles * w.groups * s.split * g.bm * s.bn * 4 if by_work else 0,
        state_bytes=tiles * w.groups * 4 if by_work else 0,
        capability=90 if s.cluster else 80,
    )
    return packed_by(source, [packing])


def opening(g: Geometry) -> list[str]:
    """The role's first lines: its shared memory and the place of a thread."""
    taps = g.stages_end + -(-g.w.tables // 16) * 16
    return [
        f"enum {{ TABLES = {g.stages_end}, TAPS = {taps}, FLAG = {g.shared - 16} }};",
        "const u32 sb = w_shared(sm); (void)sb;",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
    ]


def place_of_tile(g: Geometry) -> str:
    """Declares the image and the first row and column of `tile`."""
    (tall, broad), tile = g.tiles, Int("tile")
    y0, x0 = tile / broad % tall * g.s.th, tile % broad * g.s.tw
    return f"const int img = {tile / (tall * broad)}, y0 = {y0}, x0 = {x0};"


def pixel_at(w: Window, y: Int | str, x: Int | str) -> Int:
    """C text of the row of the product that the pixel at row `y` and column `x` of image `img` is."""
    return (Int("img") * w.rows + y) * w.cols + x


def pipeline(
    p: Product, g: Geometry, names: Mapping[Source, str], before: str, taps: str, prefetch: Sequence[str]
) -> list[str]:
    """From the places `tile`, `img`, `y0`, `x0`, `n0` and `g` of a block to its sums in registers, stages free again.

    `before` and `taps` fill tables; `prefetch` asks for what the end reads.
    """
    w, s = g.w, g.s
    nt = -(-g.columns // s.bn)
    base = p.c.a_layout.offset + Int("img") * p.c.a_layout.dims[0]
    if w.groups > 1:
        base += Int("g") * p.c.a_layout.group
    i, y = Int("i"), Int("role.block_y()")
    kind = storage(p.dtype)
    refill = g.deepest > s.stages
    stage = g.a_bytes + g.w_bytes
    slot = i % s.stages * stage if refill else i * stage
    unrolled = f'_Pragma("unroll") for (int i = 0; i < {s.stages}; ++i)'
    lines = [
        "(void)g; (void)b; (void)n0;",
        f"const {kind}* const A = {f'(const {kind}*){names[p.c.a]}' + base};",
        (
            f"const char* const W = (const char*)pk + {(Int('(long long)g') * nt + Int('role.block_x()') % nt).tight}"
            f" * {g.blocks * g.w_bytes};"
        ),
        f"const int first = {y * g.blocks / s.split};",
        f"const int last = {(y + 1) * g.blocks / s.split};",
        f"auto fill_w = [&](int cb, u32 to) {{ {_fill_w(g)} }};",
        f"{unrolled} if (first + i < last) fill_w(first + i, sb + {slot} + {g.a_bytes});",
        before,
        taps,
        "role.sync();" if before else "",
        "// the halo tile: all pixels that a tile reads, once, whichever taps read them",
        _fill_a(p, g),
        sums(p, g),
        *prefetch,
        "// the image waits for the kernels before; weights, which are constants, are on their way already",
        "role.pdl_wait(); role.pdl_trigger();",
        f"{unrolled} {{ if (first + i < last) fill_a(first + i, {slot}); w_commit(); }}",
        "#pragma unroll 1\nfor (int i = 0; i < last - first; ++i) {" if g.deepest > 1 else "{ const int i = 0;",
        f"w_arrived<{s.stages - 1}>(); role.sync();",
        f"multiply({slot}, {slot} + {g.a_bytes});",
    ]
    if refill:
        lines.append(
            f"role.sync(); if (first + i + {s.stages} < last) {{"
            f" fill_w(first + i + {s.stages}, sb + {slot} + {g.a_bytes}); fill_a(first + i + {s.stages}, {slot}); }}"
        )
    if g.deepest > 1:
        lines.append("w_commit();")
    return [*lines, "}", "w_arrived<0>(); role.sync();"]


def tap_table(g: Geometry) -> tuple[str, str]:
    """Text that copies the places of taps to shared memory, and their constants; only where a step is four taps."""
    if not g.few:
        return "", ""
    kw = g.w.kernel[1]
    places = [g.tap(i // kw, i % kw) if i < g.taps else 0 for i in range(4 * g.steps // g.w.halves)]
    table = f"__device__ const int w_taps[] = {{{','.join(map(str, places))}}};\n"
    fill = f"for (int i = t; i < {len(places)}; i += {g.threads}) ((int*)(sm + TAPS))[i] = w_taps[i];"
    return fill, table


def _fill_w(g: Geometry) -> str:
    copy = each(g.w_bytes // 16, g.threads, "w_copy16(to + x * 16, from + x * 16);")
    return f"const char* const from = W + cb * {g.w_bytes}; {copy}"


def _fill_a(p: Product, g: Geometry) -> str:
    """The lambda `fill_a(cb, to)`: the field at one block of channels into the stage at offset `to`."""
    w, s = g.w, g.s
    high, broad = g.field
    per = 1 if g.few else s.bc // 8
    count = high * broad * per
    rounds = -(-count // g.threads)
    sw = w.strides[1]
    x, pix, ix = Int("x"), Int("pix"), Int("ix")
    chunk = x % per if w.vectorized else x / (high * broad)
    pixel = x / per if w.vectorized else x % (high * broad)
    column = ix if sw == 1 else ix % sw * g.half + ix / sw
    at_ = summed(Int("iy") * g.row_bytes, column * g.pitch, Int(chunk.tight) * 16)
    place = f"const int pix = {pixel}, iy = {pix / broad}, ix = {pix % broad}; {{at}} = {at_}; {pixel_source(p, g.w)}"
    kept = rounds <= _KEPT
    setup = ""
    if kept:
        setup = f"int ao[{rounds}], at[{rounds}];\n" + each(count, g.threads, place.format(at="at[i]", ao="ao[i]"))
        find = ""
        ao, at = "ao[i]", "at[i]"
    else:
        find = "int ao, at; " + place.format(at="at", ao="ao")
        ao, at = "ao", "at"
    channel = Int("0")
    if g.blocks > 1 or per > 1:
        channel = Int("cb") * (s.bc // w.halves) + Int(chunk.tight) * (8 // w.halves)
    if w.vectorized:
        full = w.ic * w.halves % s.bc == 0
        ok = f"{ao} >= 0" + ("" if full else f" && ch < {w.ic}")
        body = (
            f"{find} const int ch = {channel}; const bool ok = {ok};"
            f" w_copy16(sb + to + {at}, (ok ? A + {ao} + ch : A), (ok ? 16u : 0u));"
        )
        return f"{setup}auto fill_a = [&](int cb, int to) {{ (void)cb; {each(count, g.threads, body)} }};"
    return f"{setup}auto fill_a = [&](int cb, int to) {{ (void)cb; {_gather(p, g, count, find, channel)} }};"


def _gather(p: Product, g: Geometry, count: int, find: str, channel: Int) -> str:
    """Statements: the field in pieces of fewer than 16 bytes, the loads of several pieces before their stores."""
    ic, layout = g.w.ic, p.c.a_layout
    width, unit = FEW if g.few else p.per_load, _unit(p, g)
    rounds = -(-count // g.threads)
    together = min(rounds, 8 if g.few else 4)
    vector = "uint2" if g.few and not p.tf32 else "uint4"
    kind = {2: "u16", 4: "u32", 8: "uint2", 16: "uint4"}[unit * p.dtype.itemsize]
    if p.tf32:
        words = [f"v[j][{k // unit}]{'' if unit == 1 else '.' + 'xyzw'[k % unit]}" for k in range(4)]
    elif unit == 1:
        words = [f"(u32)v[j][{2 * k}] | (u32)v[j][{2 * k + 1}] << 16" for k in range(width // 2)]
    elif unit == 2:
        words = [f"v[j][{k}]" for k in range(width // 2)]
    else:
        words = [f"v[j][{k // 2}].{'xy'[k % 2]}" for k in range(width // 2)]
    ao, at = ("ao", "at") if find else ("ao[i]", "at[i]")
    whole = g.blocks * g.s.bc == ic * (1 if g.few else p.halves)
    element = "ch" + Int("e") * unit
    value = "ok" if whole else f"{element} < {ic} && ok"
    read = (
        f"const int i = i0 + j, x = t + i * {g.threads}; if (i < {rounds}) {{ {find} const int ch = {channel};"
        f" const bool ok = x < {count} && {ao} >= 0; to_[j] = {at};"
        f' _Pragma("unroll") for (int e = 0; e < {-(-min(width, ic) // unit)}; ++e)'
        f" w_read_if(v[j][e], A + {ao} + {Int(element.tight) * layout.channel}, {value}); }}"
    )
    write = (
        f"const int i = i0 + j, x = t + i * {g.threads};"
        f" if (i < {rounds} && x < {count}) *({vector}*)(sm + to + to_[j]) = make_{vector}({', '.join(words)});"
    )
    return (
        f'_Pragma("unroll") for (int i0 = 0; i0 < {rounds}; i0 += {together})'
        f" {{ {kind} v[{together}][{width // unit}] = {{}}; int to_[{together}];\n"
        f'_Pragma("unroll") for (int j = 0; j < {together}; ++j) {{ {read} }}\n'
        "w_together();\n"
        f'_Pragma("unroll") for (int j = 0; j < {together}; ++j) {{ {write} }} }}'
    )


def _unit(p: Product, g: Geometry) -> int:
    """Neighbouring channels that can be read at once where sixteen bytes cannot."""
    layout = p.c.a_layout
    steps = (g.w.ic, layout.offset, layout.dims[0], *image_steps(p), layout.group if g.w.groups > 1 else 0)
    if layout.channel != 1:
        return 1
    return next(unit for unit in (4, 2, 1) if all(x % unit == 0 for x in steps))


def pixel_source(p: Product, w: Window) -> str:
    """Statement: `{ao}`, the element offset of pixel (iy, ix) of the field in its image, or -1 for a zero."""
    c = p.c
    sh, sw = c.strides
    row_step, col_step = image_steps(p)
    here = f"const int py = {Int('y0') * sh + 'iy'}, px = {Int('x0') * sw + 'ix'};"
    py, px = Int("py"), Int("px")

    def below(at: str, size: int) -> str:
        return f"(u32){at} < {size}u" if w.outside else f"{at} < {size}"

    if c.pack is None:
        most_y = (w.rows - 1) * sh + (c.kernel[0] - 1) * c.dilations[0] + 1
        most_x = (w.cols - 1) * sw + (c.kernel[1] - 1) * c.dilations[1] + 1
        inside = f"{below('py', most_y)} && {below('px', most_x)}"
        return f"{here} {{ao}} = {inside} ? {py * row_step + px * col_step} : -1;"
    if p.borders is not None:
        top, left = p.borders
        y, x = py - top.lo, px - left.lo
        return (
            f"{here} {{ao}} = (u32){y.tight} < {top.size}u && (u32){x.tight} < {left.size}u"
            f" ? {y * row_step + Int(x.tight) * col_step} : -1;"
        )
    high, broad = len(c.pack.rows), len(c.pack.cols)
    return (
        f"{here} const int oy = {below('py', high)} ? w_place[py] : -1,"
        f" ox = {below('px', broad)} ? w_place[{high} + px] : -1;"
        f" {{ao}} = (oy | ox) >= 0 ? oy + ox : -1;"
    )


def sums(p: Product, g: Geometry) -> str:
    """The warp's sums and places, and the lambda `multiply(a, w)` that adds one block of channels to them."""
    s = g.s
    mi, ni = s.wm // 16, s.wn // 16
    nm, nn = g.bm // s.wm, s.bn // s.wn
    ends = ("(lane >> 2)", "((lane >> 2) + 8)") if g.few else ("(lane & 15)",)
    m, warp = Int("m"), Int("warp")
    pixels = s.th * g.across
    places = []
    for h, row in enumerate(ends):
        clamp = f"m = m < {pixels} ? m : 0;" if g.bm > pixels else ""
        places.append(
            f"{{ int m = row0 + i * 16 + {row}; {clamp} from[i][{h}] ="
            f" {m / g.across * (g.w.strides[0] * g.row_bytes) + m % g.across * g.pitch}; }}"
        )
    return f"""const int wk = {warp / (nm * nn)}, row0 = {warp / nn % nm * s.wm}, col0 = {warp % nn * s.wn};
(void)wk;
int from[{mi}][{len(ends)}];
#pragma unroll
for (int i = 0; i < {mi}; ++i) {{ {" ".join(places)} }}
float acc[{mi}][{2 * ni}][4];
#pragma unroll
for (int i = 0; i < {mi}; ++i)
#pragma unroll
for (int j = 0; j < {2 * ni}; ++j)
#pragma unroll
for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
{_multiply(p, g)}"""


def _multiply(p: Product, g: Geometry) -> str:
    """The lambda: straight text, a step's fragments are read before the step before is multiplied."""
    s = g.s
    mi, ni = s.wm // 16, s.wn // 16
    total = g.steps // s.wk
    # many steps: one row of the kernel per turn of a loop
    turns = 1 if g.few or total <= _MOST_STEPS else g.w.kernel[0]
    inner = total // turns
    lines = ["auto multiply = [&](int a, int w) {"]
    if g.few:
        lines.append("const int* const taps = (const int*)(sm + TAPS) + wk * 4 + (lane & 3);")
    else:
        per = s.bc // 16 // s.wk
        lines.append(f"const u32 mine = sb + a + (lane >> 4) * 16 + wk * {per * 32};")
    lines.append("const uint4* const fragments = (const uint4*)(sm + w) + (col0 >> 4) * 32 + lane;")
    if turns > 1:
        step_a, step_w = g.w.dilations[0] * g.row_bytes, g.steps // turns * (s.bn // 16) * 32
        lines += [
            f"#pragma unroll 1\nfor (int turn = 0; turn < {turns}; ++turn) {{",
            f"const u32 here = mine + turn * {step_a}; const uint4* const part = fragments + turn * {step_w};",
        ]
    else:
        lines.append(f"{{ const uint4* const part = fragments;{'' if g.few else ' const u32 here = mine;'}")
    lines.append(f"u32 fa0[{mi}][4], fa1[{mi}][4]; uint4 fw0[{ni}], fw1[{ni}];")
    for u in range(inner + 1):
        if u < inner:
            lines += _fetch(g, u)
            lines += [f"w_round_tf32(fa{u % 2}[{i}]);" for i in range(mi if p.tf32 else 0)]
        if u:
            lines.append(f"w_products_{p.multiplied}(acc, fa{(u - 1) % 2}, fw{(u - 1) % 2});")
    return "\n".join([*lines, "}", "};"])


def _fetch(g: Geometry, u: int) -> list[str]:
    """Statements: the fragments of step u of a turn."""
    s = g.s
    mi, ni = s.wm // 16, s.wn // 16
    to, wk = u % 2, Int("wk")
    if g.few:
        halves = g.w.halves
        four, part = u // halves, u % halves
        lines = [f"{{ const int off = taps[{four * 4 * s.wk}]{f' + {part * 8}' if halves > 1 else ''};"]
        lines += [
            f"{{ const uint2 lo = *(const uint2*)(sm + a + from[{i}][0] + off),"
            f" hi = *(const uint2*)(sm + a + from[{i}][1] + off);"
            f" fa{to}[{i}][0] = lo.x; fa{to}[{i}][1] = hi.x; fa{to}[{i}][2] = lo.y; fa{to}[{i}][3] = hi.y; }}"
            for i in range(mi)
        ]
        if (four + 1) * 4 * s.wk > g.taps:
            zero = " ".join(f"fa{to}[{i}][{e}] = 0;" for i in range(mi) for e in range(4))
            lines.append(f"if ({four * 4 * s.wk + Int('wk') * 4 + '(lane & 3)'} >= {g.taps}) {{ {zero} }}")
        lines.append("}")
        step = (four * s.wk + wk) * halves + part
    else:
        per = s.bc // 16 // s.wk
        ky, kx = divmod(u // per, 1 if s.wide else g.w.kernel[1])
        off = g.tap(ky, kx) + u % per * 32
        lines = [f"w_matrices(fa{to}[{i}], {summed('here', f'from[{i}][0]', off)});" for i in range(mi)]
        step = (u // per * (s.bc // 16) + u % per) + wk * per
    pairs = s.bn // 16
    return lines + [f"fw{to}[{j}] = part[{step * (pairs * 32) + j * 32}];" for j in range(ni)]


def products(kind: str) -> str:
    """The function that multiplies one step's fragments of f16, bf16 or tf32."""
    mma_ = f"w_mma_{kind}"
    return f"""template <int M, int N>
W_FN void w_products_{kind}(float (&acc)[M][2 * N][4], const u32 (&a)[M][4], const uint4 (&b)[N]) {{
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) {{
      {mma_}(acc[i][2 * j], a[i], b[j].x, b[j].y);
      {mma_}(acc[i][2 * j + 1], a[i], b[j].z, b[j].w);
    }}
}}
"""


def _finish_wide(p: Product, g: Geometry, end: epilogue.Epilogue, args: epilogue.Arguments) -> list[str]:
    """Every result is the sum of its shifted columns, in order."""
    w, s = g.w, g.s
    v, pixels, x = end.width, s.th * s.tw, Int("x")
    pitch = s.bn + mma.PAD
    if end.by_row:
        where = f"const int r = {x % pixels}, q = {x / pixels * v};"
    else:
        where = f"const int r = {x / (w.oc // v)}, q = {x % (w.oc // v) * v};"
    inside = [f"y0 + ty < {w.rows}"] if w.rows % s.th else []
    inside += [f"x0 + tx < {w.cols}"] if w.cols % s.tw else []
    guard = f"if ({' && '.join(inside)}) " if inside else ""
    kx = Int("kx")
    pixel = summed(Int("y") * g.bm, Int("ty") * g.across, "tx", kx * w.dilations[1])
    at = summed("sums", pixel * pitch, kx * w.oc, "q")
    ty, tx = Int("r") / s.tw, Int("r") % s.tw
    return [
        "role.sync();",
        f"for (int x = t; x < {pixels * w.oc // v}; x += {g.threads}) {{ {where}",
        f"const int ty = {ty}, tx = {tx}, m = {pixel_at(w, 'y0' + Int('ty'), 'x0' + Int('tx'))}, n = n0 + q;",
        f"{guard}{{ float acc[{v}];",
        "#pragma unroll",
        f"for (int i = 0; i < {v}; ++i) acc[i] = 0.0f;",
        "#pragma unroll",
        f"for (int kx = 0; kx < {w.kernel[1]}; ++kx)",
        "#pragma unroll",
        f"for (int y = 0; y < {s.wk}; ++y) {{ const float* const h = {at};",
        "#pragma unroll",
        f"for (int i = 0; i < {v}; ++i) acc[i] += h[i]; }}",
        *epilogue.body(p, args.names, v),
        "} }",
    ]


def work(g: Geometry) -> tuple[int, int]:
    """Thread blocks, and instructions m16n8k16 of one of them."""
    nt = -(-g.columns // g.s.bn)
    blocks = g.w.images * math.prod(g.tiles) * nt * g.w.groups * g.s.split
    return blocks, g.bm // 16 * (g.s.bn // 8) * g.steps * g.deepest
