"""Products and convolutions on Hopper: the copy engine fills stages, warpgroups multiply them, registers are stored.

One warp issues the copies, all others are warpgroups that multiply. They share a tile of rows, or take turns at whole
tiles so that the end of one hides behind the products of the other. Blocks go on to further tiles while copies run
ahead. Where a sum is split, the blocks of a cluster add up through distributed shared memory, in order.
Source: note on matrix products, sections 2 and 11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.generate.cuda.templates import epilogue
from weft.generate.cuda.templates.prelude import prelude, storage
from weft.generate.cuda.templates.product import Product
from weft.generate.cuda.templates.tma_operands import (
    STEP,
    Operand,
    Rows,
    Three,
    blocks_of_channels,
    field,
    field_size,
    left,
    right,
    rows_of,
    stages_of_sum,
)
from weft.generate.cuda.templates.tma_pack import pack_panels
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Launch, Schedule

_BAND = 8
"""Tiles of rows that are under way together, so that they share columns in the L2 cache."""

_MODE = {64: 1, 32: 2, 16: 3}
"""Swizzle of an operand by its panel, as descriptors have it."""
_OTHERS = 48
"""Registers of a thread for anything but sums and vectors that are asked for ahead."""
_MANY_SUMS = 112
"""Registers of sums per thread from which on registers are moved."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of the template; sizes in elements."""

    bm: int
    bn: int
    panel: int
    """Elements of the sum in a row of shared memory."""
    stages: int
    groups: int
    """Warpgroups that multiply."""
    turns: bool
    """True: each takes whole tiles in turn; False: they share the rows of a tile."""
    split: int
    """Blocks of a cluster that share the sum of a tile."""
    box: Three
    """Images, rows and columns of pixels of a tile; (1, 1, bm) where rows are one dimension."""
    blocks: int
    """Blocks of the grid that go on to further tiles; 0: one block per tile."""
    resident: int
    """Blocks meant to be on one multiprocessor together."""
    fields: int = 0
    """Buffers of fields: all pixels that a tile of a convolution reads, once for all taps, whose products begin at
    different rows of it. 0: every tap is copied."""

    @staticmethod
    def of(schedule: Schedule) -> Shape:
        """Read back what `schedule` wrote."""
        p = dict(schedule.params)
        return Shape(**{f: p[f] for f in Shape.__dataclass_fields__})  # type: ignore[arg-type]

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        fields = {f: getattr(self, f) for f in Shape.__dataclass_fields__}
        return Schedule("cuda", tuple(sorted({**fields, "template": "tma"}.items())))

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply and the warp that copies.

        That warp is in a warpgroup of its own where registers move from it to the others.
        """
        return 128 * self.groups + (128 if self.moves_registers else 32)

    @property
    def moves_registers(self) -> bool:
        """True: the sums of two warpgroups are more than three warps of a scheduler have registers for."""
        return self.groups == 2 and self.rows * self.bn >= 128 * _MANY_SUMS

    @property
    def rows(self) -> int:
        """Rows of a warpgroup's tile."""
        return self.bm if self.turns else self.bm // self.groups

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of 16-bit elements."""
        return ((0 if self.fields else self.bm) + self.bn) * self.step * 2

    @property
    def step(self) -> int:
        """Elements of the sum in one stage."""
        return self.panel if self.fields else STEP

    def shared_bytes(self, field: int = 0) -> int:
        """Dynamic shared memory: fields of so many bytes, stages and barriers."""
        return self.fields * (field + 16) + self.stages * (self.stage_bytes + 16) + 16


def tiles_of(p: Product, rows: Rows, s: Shape) -> tuple[Three, int]:
    """Boxes of rows along each dimension, and tiles of columns."""
    return rows.tiles(s.box), -(-p.n // s.bn)


@cache
def header() -> str:
    """The functions that this template needs besides the prelude."""
    return (Path(__file__).parent / "weft_cuda_tma.h").read_text(encoding="utf-8")


def instruction(dtype: DType, columns: int, *, turned_a: bool, turned_b: bool) -> str:
    """The function that multiplies 64 rows by 16 of the sum by `columns`; tests bring their own."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind = dtype.value
    return f"""#ifndef W_EMULATED
W_FN void w_product_{kind}_{int(turned_a)}{int(turned_b)}(float (&d)[{count}], u64 a, u64 b, int add) {{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{registers}}},"
    " %{count}, %{count + 1}, p, 1, 1, {int(turned_a)}, {int(turned_b)}; }}"
    : {operands} : "l"(a), "l"(b), "r"(add));
#endif
}}
#endif
"""


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `Shape.schedule`."""
    s = Shape.of(schedule)
    rows = rows_of(p)
    if isinstance(rows, Declined):
        return rows
    if s.stages < 2 or s.fields == 1:
        return Declined("one buffer: the next copy must be there before the last is given back")
    a = field(p, rows, s.box, s.panel) if s.fields else left(p, rows, s.bm, s.panel, s.box)
    w = right(p, s.bn, s.panel, s.step)
    if isinstance(a, Declined):
        return a
    if isinstance(w, Declined):
        return w
    end = epilogue.plan(p)
    if end.by_row:
        return Declined("outputs whose channels lie apart")
    packed = w.map is None
    args = epilogue.arguments(p, packed, False, False)
    maps = [(name, o.map) for name, o in (("ma", a), ("mw", w)) if o.map is not None]
    parameters = [f"const __grid_constant__ w_map {name}" for name, _ in maps]
    counts, columns = tiles_of(p, rows, s)
    tiles = math.prod(counts) * columns * p.z
    grid = min(s.blocks or tiles, tiles) * s.split
    readers = 4 if s.turns else 4 * s.groups
    lines = [
        (
            f'extern "C" __global__ void __launch_bounds__({s.threads}, {s.resident}) {entry}'
            f"({', '.join([*parameters, *args.parameters])}) {{"
        ),
        "W_DYNAMIC(sm);",
        (
            f"enum {{ STAGE = {s.stage_bytes}, RING = {s.fields * a.bytes}, FULL = RING + {s.stages * s.stage_bytes},"
            f" EMPTY = FULL + {8 * s.stages}, TURN = EMPTY + {8 * s.stages}, FIELD = {a.bytes}, THERE = TURN + 16,"
            f" READ = THERE + {8 * s.fields} }};"
        ),
        "const u32 sb = w_shared(sm);",
        "const int t = threadIdx.x, lane = t & 31, warp = t >> 5;",
        (
            f"if (t == 0) {{ for (int i = 0; i < {s.stages}; ++i) {{ w_bar_init(sb + FULL + 8 * i, 1);"
            f" w_bar_init(sb + EMPTY + 8 * i, {readers}); }}"
            f" for (int i = 0; i < {s.fields}; ++i) {{ w_bar_init(sb + THERE + 8 * i, 1);"
            f" w_bar_init(sb + READ + 8 * i, {readers}); }}"
            " w_bar_init(sb + TURN, 4); w_bar_init(sb + TURN + 8, 4); w_bar_ready(); }"
        ),
        "__syncthreads();",
        _range(p, s),
        f"if (warp >= {4 * s.groups}) {{",
        *_copies(p, rows, s, a, w),
        "} else {",
        *_products(p, rows, s, a, w, end.width),
        "} }",
    ]
    own = instruction(p.dtype, s.bn, turned_a=a.turned, turned_b=w.turned)
    text = prelude() + header() + own + args.constants + "\n".join(x for x in lines if x) + "\n"
    packing = pack_panels(p, f"{entry}_pack", s.bn, s.panel) if packed else None
    launch = Launch(
        entry,
        (grid, 1, 1),
        (s.threads, 1, 1),
        (*(m for _, m in maps), *args.pointers),
        s.shared_bytes(a.bytes),
        (s.split, 1, 1),
    )
    return CudaSource(
        schedule=schedule,
        text=text + (packing.text if packing else ""),
        launches=(launch,),
        pack=packing.launches if packing else (),
        packed_bytes=packing.bytes if packing else (),
        replaces_weights=packing.replaces if packing else (),
        capability=90,
        exact_arch=True,
    )


def _steps(p: Product, s: Shape) -> int:
    """Stages that the whole sum takes."""
    if s.fields:
        return math.prod(p.c.kernel) * blocks_of_channels(p, s.panel)
    return stages_of_sum(p, s.panel)


def _range(p: Product, s: Shape) -> str:
    """Declares the steps of the sum of this block and its place in the cluster."""
    kt = _steps(p, s)
    if s.split == 1:
        return f"const int first = 0, last = {kt};"
    taps = math.prod(p.c.kernel) if s.fields else 1  # a field is read whole
    times = f" * {taps}" if taps > 1 else ""
    return (
        f"const int rank = blockIdx.x % {s.split};\n"
        f"const int first = rank * {kt // taps} / {s.split}{times},"
        f" last = (rank + 1) * {kt // taps} / {s.split}{times};"
    )


def _block_of(p: Product, s: Shape, step: str) -> str:
    """C text of the k-block of a step: fields go through all taps of a block of channels first."""
    if not s.fields:
        return step
    taps, blocks = math.prod(p.c.kernel), blocks_of_channels(p, s.panel)
    return f"({step}) % {taps} * {blocks} + ({step}) / {taps}"


def _tile(p: Product, rows: Rows, s: Shape) -> str:
    """Declares where `tile` begins: group, batch, column, and the coordinates of its box of rows."""
    counts, nt = tiles_of(p, rows, s)
    mt, batches = math.prod(counts), p.z // p.c.groups
    if nt == 1 or mt == 1:
        place = f"const int tm = r / {nt}, tn = r % {nt};"
    else:
        high = str(_BAND) if mt % _BAND == 0 else f"({mt} - band * {_BAND} < {_BAND} ? {mt} % {_BAND} : {_BAND})"
        place = (
            f"const int band = r / {_BAND * nt}, in = r % {_BAND * nt}, high = {high},"
            f" tm = band * {_BAND} + in % high, tn = in / high;"
        )
    b2, b1, b0 = s.box
    return (
        f"const int z = tile / {mt * nt}, r = tile % {mt * nt}; {place}"
        f" const int g = z / {batches}, b = z % {batches}, n0 = tn * {s.bn};"
        f" const int i0 = tm % {counts[2]} * {b0}, i1 = tm / {counts[2]} % {counts[1]} * {b1},"
        f" i2 = tm / {counts[2] * counts[1]} * {b2};"
        " (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;"
    )


def _loop(p: Product, rows: Rows, s: Shape, begin: str, step: str) -> str:
    counts, nt = tiles_of(p, rows, s)
    tiles = math.prod(counts) * nt * p.z
    if s.split > 1:
        return f"{{ const int tile = blockIdx.x / {s.split}; {_tile(p, rows, s)}"
    return f"#pragma unroll 1\nfor (int tile = {begin}; tile < {tiles}; tile += {step}) {{ {_tile(p, rows, s)}"


def _copies(p: Product, rows: Rows, s: Shape, a: Operand, w: Operand) -> list[str]:
    """The warp that copies. Constant weights do not wait for the predecessors."""
    packed = w.map is None
    kt, nt = stages_of_sum(p, s.panel), -(-p.n // s.bn)
    kind = storage(p.dtype)
    box = math.prod(s.box) if not a.turned else s.bm
    bytes_ = ((0 if s.fields else box) + s.bn) * s.step * 2
    tile_at = (
        f"const {kind}* const pk_tile = (const {kind}*)pk + ((long long)g * {nt} + tn) * {kt * s.bn * STEP};"
        if packed
        else ""
    )
    a_bytes = 0 if s.fields else s.bm * STEP * 2
    one = f"if (t == {128 * s.groups}) {{"
    lines = ["w_fewer_registers<40>();"] if s.moves_registers else []
    lines.append(f"{one} w_map_prefetch(&ma);" + ("" if packed else " w_map_prefetch(&mw);"))
    early = "0u"
    if packed:
        early = f"(last - first < {s.stages} ? (u32)(last - first) : {s.stages}u)"
        start = f"blockIdx.x / {s.split}" if s.split > 1 else "blockIdx.x"
        lines += [
            f"const int tile = {start}; {_tile(p, rows, s)} {tile_at}",
            (
                f"for (u32 i = 0; i < {early}; ++i) {{ const u32 bar = sb + FULL + 8 * i;"
                f" const u32 to = sb + RING + i * STAGE + {a_bytes};"
                f" const int kb = {_block_of(p, s, 'first + (int)i')};"
                f" w_bar_expect(bar, {bytes_}u); {w.load} }}"
            ),
        ]
    lines += [
        "}",
        "__syncwarp(); w_wait(); w_release();",
        f"{one} u32 it = 0{', cell = 0' if s.fields else ''};",
        _loop(p, rows, s, "blockIdx.x", "gridDim.x"),
        tile_at,
        f"#pragma unroll 1\nfor (int st = first; st < last; ++st, ++it) {{ const int kb = {_block_of(p, s, 'st')};",
        _copy_field(p, s, a) if s.fields else "",
        f"const u32 slot = it % {s.stages}, bar = sb + FULL + 8 * slot;",
        f"if (it >= {early}) {{" if packed else "{",
        f"w_bar_wait(sb + EMPTY + 8 * slot, it / {s.stages} & 1 ^ 1); w_bar_expect(bar, {bytes_}u);",
        f"const u32 to = sb + RING + slot * STAGE + {a_bytes}; {w.load} }}",
        "}" if s.fields else f"const u32 to = sb + slot * STAGE; {a.load} }}",
        "} }",
        "__syncwarp(); w_cluster_sync(); w_cluster_sync();" if s.split > 1 else "",
    ]
    return lines


def _copy_field(p: Product, s: Shape, a: Operand) -> str:
    """Before the first tap of a block of channels."""
    taps = math.prod(p.c.kernel)
    return (
        f"if (st % {taps} == 0) {{ const u32 slot = cell % {s.fields}, bar = sb + THERE + 8 * slot;"
        f" const u32 to = sb + slot * FIELD; const int cb = st / {taps};"
        f" w_bar_wait(sb + READ + 8 * slot, cell / {s.fields} & 1 ^ 1); w_bar_expect(bar, {a.copied}u);"
        f" {a.load} ++cell; }}"
    )


def _descriptor(at: str, step: str, o: Operand, rows: int, panel: int) -> str:
    """An operand's 16 elements of the sum number `step` (0 to 3) of a stage."""
    if o.turned:
        return f"w_operand_at({at} + {step} * 2048, {2 * STEP * STEP}, 1024, 1)"
    per = panel // 16
    offset = f"{step} * 32" if per == 4 else f"{step} / {per} * {rows * panel * 2} + {step} % {per} * 32"
    return f"w_operand_at({at} + (u32)({offset}), 16, {16 * panel}, {_MODE[panel]})"


def _in_field(p: Product, s: Shape) -> str:
    """64 pixels of a tap: 8 neighbours of a row lie together, the next row of the tile is the next row of the field."""
    c, (_, tall, _) = p.c, s.box
    high, wide = field_size(p, s.box)
    dy, dx = c.dilations
    line = "(row0 + i * 64) / 8"
    start = f"({line}) * {wide}" if s.box[0] == 1 else f"(({line}) / {tall} * {high} + ({line}) % {tall}) * {wide}"
    place = f"{start} + tap / {c.kernel[1]} * {dy * wide} + tap % {c.kernel[1]} * {dx}"
    row = 2 * s.panel
    return f"w_operand_at(there + (u32)(({place}) * {row} + q * 32), 16, {row * wide}, {_MODE[s.panel]})"


def _products(p: Product, rows: Rows, s: Shape, a: Operand, w: Operand, width: int) -> list[str]:
    """The warpgroups that multiply."""
    high = s.rows // 64
    row0 = "0" if s.turns or s.groups == 1 else f"(warp >> 2) * {s.rows}"
    a_at = f"at + (u32)((row0 + i * 64) * {128 if a.turned else 2 * s.panel})"
    taps, f = math.prod(p.c.kernel), s.fields
    per_tile = f"(u32)(last - first) / {taps}"
    kind = f"{p.dtype.value}_{int(a.turned)}{int(w.turned)}"
    begin, step, skip, mine, other = "blockIdx.x", "gridDim.x", "", "", ""
    if s.turns:
        begin, step = "blockIdx.x + (warp >> 2) * gridDim.x", "2 * gridDim.x"
        skip = "it += last - first;" + (f" cell += {per_tile};" if f else "")
        # nobody waits for a stage before all that were filled earlier have been seen: a parity tells two phases apart
        mine = (
            "{ const u32 before = warp < 4 ? turn : turn + 1; ++turn;"
            " if (before) w_bar_wait(sb + TURN + 8 * (warp >> 2), (before - 1) & 1); }"
        )
        other = "if (lane == 0) w_bar_arrive(sb + TURN + 8 * (1 - (warp >> 2)));"
    ahead, end = _finish(p, rows, s, w, width)
    return [
        "w_more_registers<232>();" if s.moves_registers else "",
        "w_wait(); w_release();",
        f"const int row0 = {row0}; (void)row0;",
        f"float acc[{high}][{s.bn // 2}];",
        f"u32 it = {'(warp >> 2) * (u32)(last - first), turn = 0' if skip else '0'};",
        f"u32 cell = {f'(warp >> 2) * ({per_tile})' if skip else '0'};" if f else "",
        _loop(p, rows, s, begin, step),
        *ahead,
        mine,
        "#pragma unroll 1\nfor (int st = first; st < last; ++st, ++it) {",
        f"const u32 slot = it % {s.stages}, at = sb + RING + slot * STAGE;",
        (
            f"const int tap = st % {taps}; if (tap == 0) w_bar_wait(sb + THERE + 8 * (cell % {f}), cell / {f} & 1);"
            f" const u32 there = sb + cell % {f} * FIELD; if (tap == {taps - 1}) ++cell;"
            if f
            else ""
        ),
        f"w_bar_wait(sb + FULL + 8 * slot, it / {s.stages} & 1);",
        "w_group_begin();",
        f"#pragma unroll\nfor (int i = 0; i < {high}; ++i)\n#pragma unroll\nfor (int q = 0; q < {s.step // 16}; ++q)",
        f"w_product_{kind}(acc[i], {_in_field(p, s) if f else _descriptor(a_at, 'q', a, s.bm, s.panel)},",
        f"  {_descriptor('at' if f else f'at + {s.bm * STEP * 2}', 'q', w, s.bn, s.panel)}, (st - first) | q);",
        "w_group_commit();",
        # the product before this one is complete: its stage is free
        "w_group_wait<1>();",
        f"if (st > first && lane == 0) w_bar_arrive(sb + EMPTY + 8 * ((it - 1) % {s.stages}));",
        f"if (st > first && tap == 0 && lane == 0) w_bar_arrive(sb + READ + 8 * ((cell - 1) % {f}));" if f else "",
        "}",
        other,
        f"w_group_wait<0>(); if (lane == 0) w_bar_arrive(sb + EMPTY + 8 * ((it - 1) % {s.stages}));",
        f"if (lane == 0) w_bar_arrive(sb + READ + 8 * ((cell - 1) % {f}));" if f else "",
        skip,
        *end,
        "}",
    ]


def _row(rows: Rows, s: Shape, at: str) -> str:
    """Declares the row `m` of the product at row `at` of the tile; -1: none."""
    n2, n1, n0 = rows.sizes
    b2, b1, b0 = s.box
    if rows.linear:
        test = f"i0 + {at} < {n0}" if n0 % b0 else ""
        place = f"i0 + {at}"
    else:
        head = f"const int x0 = i0 + ({at}) % {b0}, x1 = i1 + ({at}) / {b0} % {b1}, x2 = i2 + ({at}) / {b0 * b1};"
        tests = [f"({at}) < {b0 * b1 * b2}"] if b0 * b1 * b2 < s.bm else []
        tests += [f"x{i} < {n}" for i, n, b in ((0, n0, b0), (1, n1, b1), (2, n2, b2)) if n % b]
        place, test = f"(x2 * {n1} + x1) * {n0} + x0", " && ".join(tests)
        return f"{head} const int m = {f'{test} ? {place} : -1' if test else place};"
    return f"const int m = {f'{test} ? {place} : -1' if test else place};"


def _finish(p: Product, rows: Rows, s: Shape, w: Operand, width: int) -> tuple[list[str], list[str]]:
    """From the sums in registers to the outputs: a thread has 8 neighbours of a row at a time.

    Statements before the products of a tile, which ask for what the first vectors need, and after them.
    """
    high, wide = s.rows // 64, s.bn // 32
    names = epilogue.arguments(p, w.map is None, False, False).names
    guard = ["m >= 0"] if _clipped(rows, s) else []
    if p.n % s.bn:
        guard.append(f"n < {p.n}")
    inside = f"if ({' && '.join(guard)}) " if guard else ""
    ring = 0 if s.split > 1 else _ring(p, s)
    given = {slot: f"(const u16*)&ahead{slot}[o % {ring}]" for slot in epilogue.streamed(p)} if ring else {}
    parts = []
    for e in range(0, 8, width):
        body = "\n".join(epilogue.body(p, names, width, f"(v + {e})" if e else "v", given=given))
        parts.append(f"{{ const int n = n8 + {e}; {inside}{{ {body} }} }}")
    take = [
        "float v[8];",
        (
            "#pragma unroll\nfor (int c = 0; c < 4; ++c) {"
            " v[2 * c] = acc[i][(4 * j + c) * 4 + 2 * h]; v[2 * c + 1] = acc[i][(4 * j + c) * 4 + 2 * h + 1]; }"
        ),
        # packed weights are permuted instead
        "" if w.map is None else "w_quad(v, lane);",
    ]
    row = "row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2)"
    if s.split > 1:
        return [], _shared_sum(rows, s, take, row, parts)
    place = [
        f"const int h = o % 2, i = o / 2 % {high}, j = o / {2 * high}, n8 = n0 + j * 32 + (lane & 3) * 8;",
        f"const int r = {row}; {_row(rows, s, 'r')}",
    ]
    count = 2 * high * wide
    ask = [
        # what does not exist is read at the first row or column instead
        f"const int row = m; {{ const int m = row < 0 ? 0 : row, n = n8 < {p.n} ? n8 : 0; (void)n;",
        *(f"ahead{slot}[o % {ring}] = *(const uint4*)({epilogue.address(p, names, slot)});" for slot in given),
        "}",
    ]
    before = [
        *(f"uint4 ahead{slot}[{ring}];" for slot in given),
        f"auto ask = [&](int o) {{ {' '.join(place)} {' '.join(ask)} }};",
        f"#pragma unroll\nfor (int o = 0; o < {ring}; ++o) ask(o);",
    ]
    after = [
        f"#pragma unroll\nfor (int o = 0; o < {count}; ++o) {{",
        *place,
        *take,
        *parts,
        f"if (o + {ring} < {count}) ask(o + {ring});" if given else "",
        "}",
    ]
    return (before if given else []), after


def _ring(p: Product, s: Shape) -> int:
    """Vectors of each operand that are asked for ahead: as many as registers are left; 0: none."""
    slots = len(epilogue.streamed(p))
    if not slots:
        return 0
    limit = {1: 232, 2: 168, 3: 128}[s.resident] if s.groups == 1 or s.moves_registers else 168
    left = (limit - s.rows * s.bn // 128 - _OTHERS) // (4 * slots)
    return max(0, min(2 * (s.rows // 64) * (s.bn // 32), left))


def _clipped(rows: Rows, s: Shape) -> bool:
    """True where a tile can have rows that do not exist."""
    return math.prod(s.box) < s.bm or any(n % b for n, b in zip(rows.sizes, s.box, strict=True))


def _shared_sum(rows: Rows, s: Shape, take: list[str], row: str, parts: list[str]) -> list[str]:
    """The blocks of the cluster put their sums into shared memory, and each finishes its share of the pieces."""
    high, wide, threads = s.rows // 64, s.bn // 32, 128 * s.groups
    piece = f"sb + (u32)(o * {32 * threads} + t * 16)"
    return [
        f"w_meet_some(1, {threads});",
        f"#pragma unroll\nfor (int j = 0; j < {wide}; ++j)\n#pragma unroll\nfor (int i = 0; i < {high}; ++i)",
        "#pragma unroll\nfor (int h = 0; h < 2; ++h) {",
        *take,
        f"const int o = (j * {high} + i) * 2 + h;",
        f"float4* const to = (float4*)(sm + o * {32 * threads} + t * 16);",
        f"to[0] = make_float4(v[0], v[1], v[2], v[3]); to[{threads}] = make_float4(v[4], v[5], v[6], v[7]); }}",
        "w_cluster_sync();",
        f"#pragma unroll 1\nfor (int o = rank; o < {2 * high * wide}; o += {s.split}) {{",
        f"const int h = o % 2, i = o / 2 % {high}, j = o / {2 * high}; const int n8 = n0 + j * 32 + (lane & 3) * 8;",
        "float v[8];\n#pragma unroll\nfor (int e = 0; e < 8; ++e) v[e] = 0.0f;",
        f"#pragma unroll\nfor (int y = 0; y < {s.split}; ++y) {{",
        f"const float4 lo = w_read_cluster({piece}, y), hi = w_read_cluster({piece} + {16 * threads}, y);",
        (
            "v[0] += lo.x; v[1] += lo.y; v[2] += lo.z; v[3] += lo.w;"
            " v[4] += hi.x; v[5] += hi.y; v[6] += hi.z; v[7] += hi.w; }"
        ),
        f"const int r = {row}; {_row(rows, s, 'r')}",
        *parts,
        "}",
        "w_cluster_sync();",
    ]
