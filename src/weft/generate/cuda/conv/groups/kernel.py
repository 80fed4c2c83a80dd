"""Convolutions in groups of few channels on tensor cores (mma.sync): several groups to a CTA.

A CTA owns a rectangle of output pixels and some neighbouring groups. It copies the field of its pixels once, all
channels of its groups side by side, and the weights in k-blocks of taps, in the order in which lanes hold fragments of
m16n8k16. K of a group is (tap, channel), channel fastest, in chunks of 8 channels: the two chunks of a step may be of
two taps, as every lane of ldmatrix has an address of its own, so that only the end of a k-block is filled up (24
channels and 9 taps: 14 steps, not 18). Columns are counted in eights: 24 are 24. Groups of 4 channels multiply four
taps in a step. No value of one group meets weights of another, so infinities stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.generate.contraction.match import StridedLayout
from weft.generate.cuda.conv.halo.kernel import Window, pixel_at, pixel_source
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.loaders import each, tables
from weft.generate.cuda.gemm.common.pack import Packing, packed_by, packing
from weft.generate.cuda.gemm.common.product import Product, image_steps
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

CHUNK = 8
"""Channels of a copy of 16 bytes, and of half a step."""
FEW = 4
"""Channels of a group of which a step is four taps."""
WIDEST = 128
"""Channels of a group: wider ones fill the tiles of products."""
MOST_STEPS = 96
"""Steps of a k-block, which are unrolled."""
_KEPT = 8
"""Pieces of the field whose addresses a thread keeps."""


@dataclass(frozen=True, slots=True)
class GroupConfig(Parameters):
    """Parameters of the template; counts."""

    th: int
    tw: int
    """Rows and columns of output pixels of a CTA."""
    gs: int
    """Groups of a CTA."""
    wm: int
    """Pixels of a warp."""
    wn: int
    """Output channels of a warp, all of one group."""
    wk: int
    """Warps that split K."""
    taps: int
    """Of a k-block of weights: all, those of a row of the kernel, or a divisor of its columns where it has one row."""
    stages: int
    """K-blocks of weights in shared memory."""
    split: int
    """CTAs that split K."""
    cluster: bool

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="group_conv")


def window(p: Product) -> Window | Declined:
    """The grouped convolution that a product is, if the template takes it."""
    c = p.c
    if p.dtype.itemsize != 2 or p.bytes is not None:
        return Declined(f"groups by mma.sync of {p.dtype.value}")
    if c.groups < 2:
        return Declined("no convolution in groups")
    if len(c.dims) != 3 or c.kernel == (1, 1) or not c.w_const or p.batch:
        return Declined("no convolution of a window with constant weights")
    if c.ic % CHUNK and c.ic != FEW:
        return Declined(f"groups of {c.ic} channels; steps take {FEW} or a multiple of {CHUNK}")
    if c.ic > WIDEST or c.oc > WIDEST or c.oc % 2:
        return Declined(f"groups of {c.ic} and {c.oc} channels; at most {WIDEST}, an even number of results")
    steps = (c.a_layout.offset, c.a_layout.dims[0], *image_steps(p))
    if c.a_layout.channel != 1 or any(x % CHUNK for x in steps) or c.groups * c.ic % CHUNK:
        return Declined("an image whose channels do not lie side by side in aligned vectors")
    return Window(
        c.dims[1], c.dims[2], c.dims[0], c.groups, c.ic, c.oc, c.kernel, c.strides, c.dilations, True,
        mma.table_bytes(p),
    )  # fmt: skip


def joined(p: Product) -> Product:
    """The same with all groups' results as columns side by side: what follows the sums knows no groups."""
    c = p.c

    def turn(w: StridedLayout) -> StridedLayout:
        return replace(w, group=0)

    return replace(
        p,
        c=replace(
            c,
            groups=1,
            oc=c.groups * c.oc,
            a_layout=turn(c.a_layout),
            w_layout=turn(c.w_layout),
            outputs=tuple((slot, turn(w)) for slot, w in c.outputs),
            body=tuple(replace(s, layout=turn(s.layout)) if s.layout is not None else s for s in c.body),
        ),
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that follow from a window and a configuration."""

    w: Window
    s: GroupConfig

    @property
    def few(self) -> bool:
        """Steps are four taps."""
        return self.w.ic == FEW

    @property
    def bm(self) -> int:
        """Rows of the sums."""
        return -(-self.s.th * self.s.tw // self.s.wm) * self.s.wm

    @property
    def bn(self) -> int:
        """Columns of the sums: output channels of all groups of the CTA."""
        return self.s.gs * self.w.oc

    @property
    def eights(self) -> int:
        """Tiles of eight output channels of a group."""
        return -(-self.w.oc // 8)

    @property
    def chunks(self) -> int:
        """Chunks of channels of a tap; 0 where a step is four taps."""
        return self.w.ic // CHUNK

    @property
    def steps(self) -> int:
        """Steps of 16 of K in a k-block."""
        return -(-self.s.taps // 4) if self.few else -(-self.s.taps * self.chunks // 2)

    @property
    def odd(self) -> bool:
        """The last step of a k-block has one chunk alone."""
        return self.s.taps * self.chunks % 2 == 1

    @property
    def blocks(self) -> int:
        """K-blocks of all taps."""
        return math.prod(self.w.kernel) // self.s.taps

    @property
    def deepest(self) -> int:
        """Most k-blocks of a CTA."""
        return -(-self.blocks // self.s.split)

    @property
    def gblocks(self) -> int:
        """CTAs along the groups."""
        return -(-self.w.groups // self.s.gs)

    @property
    def field(self) -> tuple[int, int]:
        """Rows and columns of the image that a CTA reads."""
        return self.w.field(self.s.th, self.s.tw)

    @property
    def pieces(self) -> int:
        """Chunks of a pixel: all groups' channels."""
        return self.s.gs * self.w.ic // CHUNK

    @property
    def half(self) -> int:
        """Columns of the field of one remainder by the stride: they lie side by side."""
        return -(-self.field[1] // self.w.strides[1])

    @property
    def pitch(self) -> int:
        """Bytes from pixel to pixel: an odd number of chunks, so that eight neighbours lie in different banks."""
        return (self.pieces | 1) * 16

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row of the field."""
        return self.half * self.w.strides[1] * self.pitch

    @property
    def a_bytes(self) -> int:
        """Shared memory of the field."""
        return self.field[0] * self.row_bytes

    @property
    def w_bytes(self) -> int:
        """Shared memory of a k-block of weights: fragments of 8 bytes a lane."""
        return self.s.gs * self.steps * self.eights * 256

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.bm // self.s.wm) * self.s.gs * (self.eights * 8 // self.s.wn) * self.s.wk

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles of an image."""
        return self.w.tiles(self.s.th, self.s.tw)

    @property
    def stages_end(self) -> int:
        """Where field and weights, or the sums in their place, end in shared memory."""
        return max(self.a_bytes + self.s.stages * self.w_bytes, self.s.wk * self.bm * (self.bn + mma.PAD) * 4)

    @property
    def taps_at(self) -> int:
        """Where the places of taps stand, where a step is four of them."""
        return self.stages_end + -(-self.w.tables // 16) * 16

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a CTA: field and weights or sums, tables, places of taps, zeros, a flag."""
        return self.taps_at + (16 * self.steps if self.few else 0) + 32

    @property
    def ctas(self) -> int:
        """CTAs of the kernel."""
        return self.w.images * math.prod(self.tiles) * self.gblocks * self.s.split

    @property
    def block_bytes(self) -> int:
        """Bytes from a tap's place in the field to that of the same tap of the next k-block."""
        w = self.w
        if self.blocks == 1:
            return 0
        if w.kernel[0] > 1:
            return w.dilations[0] * self.row_bytes
        return self.s.taps * w.dilations[1] // w.strides[1] * self.pitch

    def tap(self, at: int) -> int:
        """Bytes from a pixel's place in the field to that of a tap of a k-block."""
        return self.w.tap(*divmod(at, self.w.kernel[1]), self.half, self.pitch)


def refuse(g: Geometry) -> Declined | None:
    """Why a configuration does not fit a window; None where it does."""
    w, s = g.w, g.s
    across = w.kernel[1]
    whole = s.taps == math.prod(w.kernel)
    row = w.kernel[0] > 1 and s.taps == across
    part = w.kernel[0] == 1 and across % s.taps == 0 and s.taps * w.dilations[1] % w.strides[1] == 0
    if not (whole or row or part):
        return Declined(f"k-blocks of {s.taps} of {w.kernel[0]} x {across} taps")
    if s.gs * w.ic % CHUNK or s.gs > w.groups:
        return Declined(f"{s.gs} groups of {w.ic} channels are no whole vectors of {w.groups} groups")
    if s.wn % 8 or g.eights * 8 % s.wn or s.wm % 16:
        return Declined("warp tiles of pixels in 16s that divide a group's channels in 8s")
    if s.wk > g.steps or g.steps > MOST_STEPS:
        return Declined(f"{g.steps} steps of a k-block for {s.wk} warps; at most {MOST_STEPS}")
    if s.split > g.blocks:
        return Declined(f"split-K of {g.blocks} k-blocks over {s.split} CTAs")
    if s.stages < min(g.deepest, 3):
        return Declined(f"a ring of {s.stages} stages; copies run ahead in three")
    return None


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `GroupConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def ending(p: Product, g: Geometry) -> epilogue.Epilogue:
    """How results become outputs, in vectors that lie within a CTA's channels; `p` comes from `joined`."""
    end = epilogue.plan(p)
    return replace(end, width=math.gcd(end.width, g.bn))


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `GroupConfig.schedule`."""
    w = window(p)
    if isinstance(w, Declined):
        return w
    s = GroupConfig.of(schedule)
    g = Geometry(w, s)
    refused = refuse(g)
    if refused is not None:
        return refused
    whole = joined(p)
    end = ending(whole, g)
    if s.cluster and end.width % 4:
        return Declined("split-K over a cluster reduces 4 neighbouring results at a time")
    by_work = s.split > 1 and not s.cluster
    args = epilogue.arguments(whole, True, by_work, by_work)
    tall, broad = g.tiles
    tiles = w.images * tall * broad
    places, before, _ = tables(p, g.threads) if p.c.pack is not None and p.borders is None else ("", "", 0)
    x, y = Int("role.block_x()"), Int("role.block_y()")
    top, left = x / broad % tall * s.th, x % broad * s.tw
    kind = storage(p.dtype)
    image = p.c.a_layout.offset + Int("img") * p.c.a_layout.dims[0] + Int("role.block_z()") * (s.gs * w.ic)
    lines = [
        f"enum {{ TABLES = {g.stages_end}, TAPS = {g.taps_at}, ZERO = {g.shared - 32}, FLAG = {g.shared - 16} }};",
        "const u32 sb = w_shared(sm); (void)sb;",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
        f"const int img = {x / (tall * broad)}, y0 = {top}, x0 = {left};",
        f"const int n0 = {Int('role.block_z()') * g.bn}, g = 0, b = 0; (void)g; (void)b;",
        f"const {kind}* const A = {f'(const {kind}*){args.names[p.c.a]}' + image};",
        f"const char* const W = (const char*)pk + {(Int('(long long)role.block_z()') * (g.blocks * g.w_bytes))};",
        f"const int first = {y * g.blocks / s.split}, last = {(y + 1) * g.blocks / s.split};",
        f"auto fill_w = [&](int kb, u32 to) {{ {_fill_w(g)} }};",
        _stages(s.stages, f"if (first + i < last) fill_w(first + i, {_slot(g, 'i')});"),
        before,
        *_places_of_taps(g),
        "role.sync();" if before else "",
        "// the halo tile of all groups of the CTA: every pixel once, whichever taps read it",
        *_fill_a(p, g),
        *_multiply(p, g),
        *epilogue.prefetch(whole, args.names, g.bn),
        "// the image waits for the kernels before; weights, which are constants, are on their way already",
        "role.pdl_wait(); role.pdl_trigger();",
        "fill_a();",
        *_loop(g),
        "float* const sums = (float*)sm;",
        *_to_shared(g),
    ]
    r = Int("r")
    py, px = "y0" + r / s.tw, "x0" + r % s.tw
    inside = [f"r < {s.th * s.tw}"] if g.bm > s.th * s.tw else []
    inside += [f"{py} < {w.rows}"] if w.rows % s.th else []
    inside += [f"{px} < {w.cols}"] if w.cols % s.tw else []
    sums = mma.Sums(g.bm, g.bn, s.wk, s.split, s.cluster, g.threads)
    lines += mma.finish(whole, sums, end, tiles, row=str(pixel_at(w, py, px)), inside=inside, names=args.names)
    role = DeviceRole(
        threads=g.threads,
        body="\n".join(x for x in lines if x),
        parameters=args.parameters,
        grid=(tiles, s.split, g.gblocks),
        globals=args.constants + places + _tap_constants(g),
        shared_bytes=g.shared,
        cluster=(1, s.split, 1) if s.cluster else (1, 1, 1),
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
        workspace_bytes=tiles * g.gblocks * s.split * g.bm * g.bn * 4 if by_work else 0,
        state_bytes=tiles * g.gblocks * 4 if by_work else 0,
        capability=90 if s.cluster else 80,
    )
    return packed_by(source, [pack_groups(p, g)])


def _slot(g: Geometry, i: str) -> str:
    """C text of the shared address of the stage of k-block `i` of the CTA."""
    at = Int(i) % g.s.stages if g.deepest > g.s.stages else Int(i)
    return str("sb" + (at if g.s.stages > 1 else Int("0")) * g.w_bytes + g.a_bytes)


def _stages(stages: int, body: str) -> str:
    return f'_Pragma("unroll") for (int i = 0; i < {stages}; ++i) {{ {body} }}'


def _fill_w(g: Geometry) -> str:
    copy = each(g.w_bytes // 16, g.threads, "w_copy16(to + x * 16, from + x * 16);")
    return f"const char* const from = W + {Int('kb') * g.w_bytes}; {copy}"


def _fill_a(p: Product, g: Geometry) -> list[str]:
    """The lambda `fill_a()`: the field into shared memory, padding as zeros; addresses are found before it."""
    w, s = g.w, g.s
    high, broad = g.field
    count = high * broad * g.pieces
    rounds = -(-count // g.threads)
    x, pix, ix, sw = Int("x"), Int("pix"), Int("ix"), w.strides[1]
    column = ix if sw == 1 else ix % sw * g.half + ix / sw
    piece = x % g.pieces
    at_ = summed(Int("iy") * g.row_bytes, column * g.pitch, Int(piece.tight) * 16)
    ragged = w.groups % s.gs != 0
    left = f" if ({Int('role.block_z()') * g.pieces + Int(piece.tight)} >= {w.groups * w.ic // CHUNK}) {{ao}} = -1;"
    place = (
        f"const int pix = {x / g.pieces}, iy = {pix / broad}, ix = {pix % broad}; {{at}} = {at_};"
        f" {pixel_source(p, w)}{left if ragged else ''}"
    )
    copy = (
        f"w_copy16(sb + {{at}}, ({{ao}} >= 0 ? A + {{ao}} + {Int(piece.tight) * CHUNK} : A), ({{ao}} >= 0 ? 16u : 0u));"
    )
    if rounds > _KEPT:
        body = f"int ao, at; {place.format(at='at', ao='ao')} {copy.format(at='at', ao='ao')}"
        return [f"auto fill_a = [&]() {{ {each(count, g.threads, body)} }};"]
    return [
        f"int ao[{rounds}], at[{rounds}];",
        each(count, g.threads, place.format(at="at[i]", ao="ao[i]")),
        f"auto fill_a = [&]() {{ {each(count, g.threads, copy.format(at='at[i]', ao='ao[i]'))} }};",
    ]


def _places_of_taps(g: Geometry) -> list[str]:
    """Statements that write what does not change into shared memory: places of taps, or zeros for half a step."""
    if g.few:
        return [f"for (int i = t; i < {4 * g.steps}; i += {g.threads}) ((int*)(sm + TAPS))[i] = w_taps[i];"]
    return ["if (t == 0) *(uint4*)(sm + ZERO) = make_uint4(0, 0, 0, 0);"] if g.odd else []


def _tap_constants(g: Geometry) -> str:
    if not g.few:
        return ""
    places = [g.tap(i) if i < g.s.taps else 0 for i in range(4 * g.steps)]
    return f"__device__ const int w_taps[] = {{{','.join(map(str, places))}}};\n"


def _loop(g: Geometry) -> list[str]:
    """From the copies of the field to the warps' sums, with all of shared memory free again."""
    s = g.s
    if g.deepest <= s.stages:
        head = "{ const int i = 0;" if g.deepest == 1 else "for (int i = 0; i < last - first; ++i) {"
        multiply = f"multiply({_block(g)}, {_slot(g, 'i')});"
        return ["w_commit();", "w_arrived<0>(); role.sync();", head, multiply, "}", "role.sync();"]
    ahead = s.stages - 1
    return [
        _stages(s.stages, "w_commit();"),
        "// multistage pipeline: weights run ahead of products, one barrier for each k-block",
        "#pragma unroll 1\nfor (int i = 0; i < last - first; ++i) {",
        f"w_arrived<{s.stages - 2}>(); role.sync();",
        f"if (i > 0 && first + i + {ahead} < last) fill_w(first + i + {ahead}, {_slot(g, f'(i + {ahead})')});",
        "w_commit();",
        f"multiply({_block(g)}, {_slot(g, 'i')});",
        "}",
        "w_arrived<0>(); role.sync();",
    ]


def _block(g: Geometry) -> str:
    """C text of the bytes that all taps of k-block `first + i` lie further on in the field than those of the first."""
    return str(Int("(first + i)") * g.block_bytes) if g.block_bytes else "0"


def _multiply(p: Product, g: Geometry) -> list[str]:
    """The warp's sums and places, and the lambda `multiply(far, w)` that adds one k-block to them."""
    w, s = g.w, g.s
    mi, nj = s.wm // 16, s.wn // 8
    nm, nn = g.bm // s.wm, g.eights * 8 // s.wn
    warp, m = Int("warp"), Int("m")
    pixels = s.th * s.tw
    # lanes of ldmatrix: rows by the lower four bits, the second chunk of a step by the fifth
    ends = ("(lane >> 2)", "((lane >> 2) + 8)") if g.few else ("(lane & 15)",)
    clamp = f"m = m < {pixels} ? m : 0;" if g.bm > pixels else ""
    own = Int("group") * (2 * w.ic)
    lines = [
        f"const int wk = {warp / (nm * nn * s.gs)}, group = {warp / (nm * nn) % s.gs};",
        f"const int row0 = {warp / nn % nm * s.wm}, eight0 = {warp % nn * nj}; (void)wk; (void)group;",
        f"u32 from[{mi}][{len(ends)}];",
        f"#pragma unroll\nfor (int i = 0; i < {mi}; ++i) {{",
    ]
    for h, row in enumerate(ends):
        place = m / s.tw * (w.strides[0] * g.row_bytes) + m % s.tw * g.pitch + own
        if not g.few:
            place += "(lane >> 4) * 16"
        lines.append(f"{{ int m = row0 + i * 16 + {row}; {clamp} from[i][{h}] = (u32)({place}); }}")
    lines += [
        "}",
        f"float acc[{mi}][{nj}][4];",
        f"#pragma unroll\nfor (int i = 0; i < {mi}; ++i)\n#pragma unroll\nfor (int j = 0; j < {nj}; ++j)",
        "#pragma unroll\nfor (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;",
        "auto multiply = [&](int far, u32 w) {",
    ]
    share = [(k * g.steps // s.wk, (k + 1) * g.steps // s.wk) for k in range(s.wk)]
    start = summed((Int("group") * g.steps) * (g.eights * 32), Int("eight0") * 32, "lane")
    lines.append(f"const uint2* const fragments = (const uint2*)(sm + (w - sb)) + {start.tight};")
    if g.few:
        lines.append("const int* const taps = (const int*)(sm + TAPS) + (lane & 3);")
    else:
        lines.append(f"const u32 here = sb + far;{' const bool high = lane >= 16; (void)high;' if _selects(g) else ''}")
    for k, (begin, stop) in enumerate(share):
        lines.append(f"{'' if k == 0 else 'else '}{f'if (wk == {k}) ' if k + 1 < s.wk else ''}{{" if s.wk > 1 else "{")
        lines.append(f"u32 fa0[{mi}][4], fa1[{mi}][4]; uint2 fw0[{nj}], fw1[{nj}];")
        for u in range(begin, stop + 1):
            if u < stop:
                lines += _fetch(g, u, (u - begin) % 2)
            if u > begin:
                lines.append(_products(p, g, (u - 1 - begin) % 2))
        lines.append("}")
    return [*lines, "};"]


def _selects(g: Geometry) -> bool:
    """Whether some step's two chunks do not follow each other in the field."""
    return g.odd or g.chunks % 2 == 1


def _fetch(g: Geometry, u: int, to: int) -> list[str]:
    """Statements: the fragments of step u of a k-block; those of a step before are multiplied meanwhile."""
    s = g.s
    mi, nj = s.wm // 16, s.wn // 8
    if g.few:
        lines = [f"{{ const int off = far + taps[{4 * u}];"]
        lines += [
            f"{{ const uint2 lo = *(const uint2*)(sm + from[{i}][0] + off),"
            f" hi = *(const uint2*)(sm + from[{i}][1] + off);"
            f" fa{to}[{i}][0] = lo.x; fa{to}[{i}][1] = hi.x; fa{to}[{i}][2] = lo.y; fa{to}[{i}][3] = hi.y; }}"
            for i in range(mi)
        ]
        if 4 * u + 4 > s.taps:
            zero = " ".join(f"fa{to}[{i}][{e}] = 0;" for i in range(mi) for e in range(4))
            lines.append(f"if ({4 * u} + (lane & 3) >= {s.taps}) {{ {zero} }}")
        lines.append("}")
    else:
        lo, hi = (_chunk_at(g, 2 * u + h) for h in range(2))
        assert lo is not None, "a step begins with a chunk of the k-block"
        if hi is None:
            lines = [f"w_matrices(fa{to}[{i}], high ? sb + ZERO : here + from[{i}][0] + {lo});" for i in range(mi)]
        elif hi == lo + 16:
            lines = [f"w_matrices(fa{to}[{i}], {summed('here', f'from[{i}][0]', lo)});" for i in range(mi)]
        else:
            lines = [f"{{ const u32 off = here + (high ? {hi - 16}u : {lo}u);"]
            lines += [f"w_matrices(fa{to}[{i}], from[{i}][0] + off);" for i in range(mi)]
            lines.append("}")
    return lines + [f"fw{to}[{j}] = fragments[{(u * g.eights + j) * 32}];" for j in range(nj)]


def _chunk_at(g: Geometry, q: int) -> int | None:
    """Bytes from a pixel's place to chunk q of a k-block; None behind the last."""
    tap, chunk = divmod(q, g.chunks)
    return None if tap >= g.s.taps else g.tap(tap) + 16 * chunk


def _products(p: Product, g: Geometry, of: int) -> str:
    mi, nj = g.s.wm // 16, g.s.wn // 8
    return (
        f"#pragma unroll\nfor (int i = 0; i < {mi}; ++i)\n#pragma unroll\nfor (int j = 0; j < {nj}; ++j)"
        f" w_mma_{p.multiplied}(acc[i][j], fa{of}[i], fw{of}[j].x, fw{of}[j].y);"
    )


def _to_shared(g: Geometry) -> Sequence[str]:
    """The warp's sums into its own copy of the tile in shared memory; columns beyond a group's last are none."""
    w, s = g.w, g.s
    pitch = g.bn + mma.PAD
    channel = Int("eight0") * 8 + "j * 8" + "(lane & 3) * 2"
    guard = f"if ({channel} < {w.oc}) " if w.oc % 8 else ""
    return [
        f"float* const mine = {summed('sums', Int('wk') * (g.bm * pitch), Int('group') * w.oc)};",
        f"#pragma unroll\nfor (int i = 0; i < {s.wm // 16}; ++i)",
        f"#pragma unroll\nfor (int j = 0; j < {s.wn // 8}; ++j) {guard}{{",
        f"float* const at = mine + (row0 + i * 16 + (lane >> 2)) * {pitch} + {channel};",
        "*(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);",
        f"*(float2*)(at + {8 * pitch}) = make_float2(acc[i][j][2], acc[i][j][3]);",
        "}",
    ]


def pack_groups(p: Product, g: Geometry) -> Packing:
    """Repacking into [CTA along the groups][k-block][group][step][8 columns][lane][8 bytes], missing groups as zeros.

    Those are the two words of m16n8k16 that a lane holds of eight columns.
    """
    c, kind, w, s = p.c, storage(p.dtype), g.w, g.s
    row = 128 * g.eights
    block = s.gs * g.steps * row
    total = g.gblocks * g.blocks * block
    i, q, n, tap = Int("i"), Int("q"), Int("n"), Int("tap")
    if g.few:
        inner = "local = step * 4 + q, ch = (e >> 1) * 2 + (e & 1)"
    else:
        inner = (
            f"chunk = step * 2 + (e >> 1), local = {Int('chunk') / g.chunks},"
            f" ch = {Int('chunk') % g.chunks * CHUNK + q * 2} + (e & 1)"
        )
    layout = c.w_layout
    at: list[Int | int] = [layout.offset, Int("group") * layout.group, n * layout.channel]
    at += [tap / w.kernel[1] * c.w_kernel[0], tap % w.kernel[1] * c.w_kernel[1], Int("ch") * c.w_k]

    def body(weight: str) -> str:
        return f"""  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= {total}u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % 4, lane = {i / 4 % 32}, q = lane & 3, n = {i / 128 % g.eights * 8} + (lane >> 2);
  const int step = {i / row % g.steps}, rest = {i / block};
  const int group = {Int("rest") / g.blocks * s.gs + i / (row * g.steps) % s.gs}, kb = {Int("rest") % g.blocks};
  const int {inner};
  const int tap = {Int("kb") * s.taps} + local;
  {kind} v = 0;
  if (group < {w.groups} && n < {w.oc} && local < {s.taps})
    v = ((const {kind}*){weight})[{summed(*at)}];
  (({kind}*)pk)[i] = v;"""

    return packing(p, total, body)
