"""Products and convolutions on tensor cores (mma.sync), or on CUDA cores for f32: one skeleton.

A block owns a tile of the product, or a slice of its sum. Copies run `stages - 1` k-blocks ahead; one barrier per
k-block. The sums of the warps meet in shared memory (in a fixed order where several warps or blocks share one sum), and
every thread finishes a few neighbouring results of a row. Source: note on matrix products, sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.generate.contraction.match import Source
from weft.generate.cuda.gemm.common import epilogue, float8, loaders, narrow, tf32
from weft.generate.cuda.gemm.common.normed import PIECE
from weft.generate.cuda.gemm.common.normed_text import (
    FEW,
    STORE_IF,
    column_bytes,
    columns_text,
    element_text,
    padded_length,
    rows_text,
)
from weft.generate.cuda.gemm.common.pack import chunk_at, pack_tiles, packed_by
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import wgmma
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import PDL, DeviceRole, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Schedule

MOST_STEP = 64
"""Elements of the sum in the longest k-block of halves."""
PAD = 8
"""Floats behind each row of the sums in shared memory, against bank conflicts."""


@dataclass(frozen=True, slots=True)
class MmaConfig(Parameters):
    """Parameters of the template; sizes in elements."""

    bm: int
    bn: int
    bk: int
    wm: int
    """Rows of a warp's tile."""
    wn: int
    wk: int
    """Warps that share the sum of a tile."""
    stages: int
    split: int
    """Blocks that share the sum of a tile."""
    cluster: bool
    """True: they are a cluster and add up through distributed shared memory; False: through the workspace."""
    group: bool = False
    """True: `wm` by `wn` is the tile of four warps and their warpgroup product (sm_90a)."""

    def schedule(self, template: str) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template=template)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.bm // self.wm * (self.bn // self.wn) * self.wk * (4 if self.group else 1)

    @property
    def ahead(self) -> int:
        """K-blocks that copies run ahead: a stage is free once all warps are through with it."""
        return self.stages - (2 if self.group else 1)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def pipeline_bytes(self, size: int) -> int:
        """Shared memory of all stages."""
        return self.stages * (self.bm + self.bn) * self.bk * size

    @property
    def sums_bytes(self) -> int:
        """Shared memory in which the warps' sums meet."""
        return self.wk * self.bm * (self.bn + PAD) * 4


def shared_bytes(p: Product, s: MmaConfig) -> int:
    """Dynamic shared memory of a block."""
    return shared_of(s, p.dtype.itemsize, table_bytes(p))


def table_bytes(p: Product) -> int:
    """Of them for tables of rows and columns."""
    if p.norm is not None:
        return column_bytes(p.norm, MOST_STEP)
    return 0 if p.c.pack is None or p.borders is not None else 4 * (len(p.c.pack.rows) + len(p.c.pack.cols))


def shared_of(s: MmaConfig, size: int, tables: int) -> int:
    """The same for elements of `size` bytes, by numbers alone."""
    return _round(max(s.pipeline_bytes(size), s.sums_bytes), 16) + _round(tables, 16) + 16


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `MmaConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `MmaConfig.schedule`."""
    s = MmaConfig.of(schedule)
    end = epilogue.plan(p)
    if s.cluster and end.width % 4:
        return Declined("split-K over a cluster reduces 4 neighbouring results at a time")
    if s.group and (p.a_load == "columns" or p.w_load == "kn"):
        return Declined("wgmma of operands that are not K-major")
    if p.float8 and s.group:
        return Declined("wgmma of 8-bit floats is in the tma template")
    if p.integers and s.group:
        return Declined("wgmma of integers is in the tma template")
    if s.group and p.dtype is DType.F32:
        return Declined("wgmma of f32: nothing rounds to TF32 on the way to shared memory")
    if p.partial_stats is not None and not whole_pieces(s, end.width):
        return Declined("partial statistics of fragments that neighbouring lanes do not hold")
    tensor = p.tensor
    packed = p.w_load == "packed"
    mt, nt, kt = -(-p.m // s.bm), -(-p.n // s.bn), -(-p.k // s.bk)
    by_work = s.split > 1 and not s.cluster
    args = epilogue.arguments(p, packed, by_work, by_work)
    tile = loaders.Tile(s.bm, s.bn, s.bk, s.threads)
    left, right = loaders.load_a(p, tile), loaders.load_w(p, tile)
    fix = normed_rows(p, s, args.names) if p.norm is not None else None
    size = p.dtype.itemsize
    a_bytes, b_bytes = s.bm * s.bk * size, s.bn * s.bk * size
    stage = a_bytes + b_bytes
    tables = _round(max(s.pipeline_bytes(size), s.sums_bytes), 16)
    shared = shared_bytes(p, s)
    kind = storage(p.dtype)
    names = args.names
    weight = "pk" if packed else names[p.c.w]
    w_start = f" + ({Int('(long long)g') * nt + 'tn'}) * {kt * s.bn * s.bk}" if packed else ""
    batches, x, y, z = p.z // p.c.groups, Int("role.block_x()"), Int("role.block_y()"), Int("role.block_z()")
    # An only column of tiles is counted, too, where there are batches: of a constant, which the text's functions do not
    # capture, NVVM makes other sums of a batch's offsets.
    column = f"role.block_x() % {nt}" if p.z > 1 else x % nt
    lines = [
        f"enum {{ TABLES = {tables}, FLAG = {shared - 16} }};",
        "const u32 sb = w_shared(sm);",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
        f"const int tn = {column}, m0 = {x / nt * s.bm}, n0 = {Int('tn') * s.bn};",
        f"const int g = {z / batches}, b = {z % batches};",
        "(void)g; (void)b; (void)n0; (void)lane;",
        f"const {kind}* const A = (const {kind}*){names[p.c.a]};",
        f"const {kind}* const W = (const {kind}*){weight}{w_start};",
        f"const int first = {y * kt / s.split}, last = {(y + 1) * kt / s.split};",
        fix.before if fix else left.before,
        left.setup,
        fix.setup if fix else "",
        right.setup,
        f"auto fill_a = [&](int kb, u32 to) {{ {left.begin} }};",
        f"auto fill_w = [&](int kb, u32 to) {{ {right.begin} }};",
        f"auto store_a = [&](u32 to) {{ {left.end} (void)to; }};",
        f"auto store_w = [&](u32 to) {{ {right.end} (void)to; }};",
        _fragments(p, s, tensor),
    ]
    ahead = s.ahead
    slot = _slot(s, "i", stage)
    if packed:
        # constants do not wait for the predecessors
        lines.append(f"for (int i = 0; i < {ahead}; ++i) if (first + i < last) fill_w(first + i, {slot} + {a_bytes});")
    if left.before or fix:
        lines.append("role.sync();")
    lines += epilogue.prefetch(p, names, s.bn)
    lines += [PDL, "role.pdl_wait(); role.pdl_trigger();"]
    fill_w = "" if packed else f"fill_w(first + i, {slot} + {a_bytes}); store_w({slot} + {a_bytes});"
    lines.append(
        f"for (int i = 0; i < {ahead}; ++i) {{ if (first + i < last) {{ {fill_w}"
        f" fill_a(first + i, {slot}); store_a({slot}); }} w_commit(); }}"
    )
    lines += fix.after if fix else []
    lines += _loop_normed(s, a_bytes, stage) if fix else _loop(s, a_bytes, stage, slot)
    lines += [
        "// sums go through shared memory, so that neighbouring threads finish neighbouring columns",
        "float* const sums = (float*)sm;",
        wgmma.to_shared(s.wm, s.wn, s.bn + PAD) if s.group else to_shared(s) if tensor else cores_to_shared(p, s),
    ]
    lines += finish(p, Sums(s.bm, s.bn, s.wk, s.split, s.cluster, s.threads, p.integers), end, mt * nt)
    own = wgmma.instruction(p.dtype, s.wn) if s.group else tf32.FUNCTIONS if p.tf32 else ""
    own += narrow.functions(p.multiplied) + narrow.SUMS if p.integers else ""
    own += FEW if p.partial_stats is not None else ""
    own += STORE_IF if p.norm is not None and p.norm.stored >= 0 else ""
    own += float8.functions(p) + (float8.mma(p.multiplied) if p.float8 else "")
    packings = (pack_tiles(p, s.bn, s.bk),) if packed else ()
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(x for x in lines if x),
        parameters=args.parameters,
        grid=(mt * nt, s.split, p.z),
        globals=own + args.constants + left.globals + right.globals,
        shared_bytes=shared,
        cluster=(1, s.split, 1) if s.cluster else (1, 1, 1),
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
        workspace_bytes=mt * nt * p.z * s.split * s.bm * s.bn * 4 if by_work else 0,
        state_bytes=mt * nt * p.z * 4 if by_work else 0,
        capability=90 if s.cluster or s.group else 80,
        exact_arch=s.group,
    )
    return packed_by(source, packings)


def _loop(s: MmaConfig, a_bytes: int, stage: int, slot: str) -> list[str]:
    """The sum over k-blocks; one barrier each."""
    begin = ["// multistage pipeline: copies run ahead of products, one barrier for each k-tile"]
    begin += ["#pragma unroll 1"] if s.group else []
    begin += ["for (int i = 0; i < last - first; ++i) {", f"w_arrived<{s.ahead - 1}>();"]
    if s.group:
        # the product before the last one is complete in every warpgroup behind the barrier: its stage is free
        begin.append("w_async_fence(); w_group_wait<1>();")
    begin += [
        "role.sync();",
        f"const u32 here = {slot}, to = sb + (u32)((i + {s.ahead}) % {s.stages} * {stage});",
        f"const bool more = first + i + {s.ahead} < last;",
    ]
    fill = [
        f"if (more) {{ fill_w(first + i + {s.ahead}, to + {a_bytes}); fill_a(first + i + {s.ahead}, to); }}",
        "w_commit();",
    ]
    product = [f"multiply(here, here + {a_bytes}{', i' if s.group else ''});"]
    end = [f"if (more) {{ store_a(to); store_w(to + {a_bytes}); }}", "}"]
    last = ["w_group_wait<0>();"] if s.group else []
    body = product + fill if s.group else fill + product
    return [*begin, *body, *end, *last, "w_arrived<0>(); role.sync();"]


def whole_pieces(s: MmaConfig, width: int) -> bool:
    """Whether neighbouring lanes finish a piece of a row, and all of them at once."""
    count = s.bm * s.bn // max(1, width)
    if s.cluster and width == 8 and s.bm * s.bn < 8 * s.split * s.threads:
        count *= 2
    share = s.split if s.cluster else 1
    return width in (4, 8) and s.bn % PIECE == 0 and count % (32 * share) == 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """Text of a left operand that is normalised in shared memory, each chunk by the thread that has copied it."""

    before: str
    setup: str
    after: list[str]


def normed_rows(p: Product, s: MmaConfig, names: Mapping[Source, str]) -> Fixed:
    """Values of rows in registers, vectors along the sum in shared memory, and the lambda `fix(kb, to)`."""
    norm = p.norm
    assert norm is not None
    chunks, kind = s.bk // p.per_load, p.dtype.value
    count = s.bm * chunks
    rounds, padded = -(-count // s.threads), padded_length(norm, MOST_STEP)
    before = "\n".join(columns_text(norm, names, "TABLES", padded, s.threads))
    values = [f"row{j}_[i]" for j in range(len(norm.rows))]
    setup = "".join(f"float row{j}_[{rounds}];\n" for j in range(len(norm.rows)))
    row = f"(m0 + (t + i * {s.threads}) / {chunks} < {p.m} ? m0 + (t + i * {s.threads}) / {chunks} : {p.m - 1})"
    after = [f"#pragma unroll\nfor (int i = 0; i < {rounds}; ++i)"]
    after += rows_text(norm, names, row, chunks, f"(t % {chunks})", values)
    lines = []
    for j in range(len(norm.columns)):
        lines.append(f"float c{j}_[8];")
        for h in (0, 4):
            fields = " ".join(f"c{j}_[{h + e}] = h_.{f};" for e, f in enumerate("xyzw"))
            at = "(float*)(sm + TABLES)" + summed(j * padded + h, "k")
            lines.append(f"{{ const float4 h_ = *(const float4*)({at}); {fields} }}")
    inner = [
        f"const u32 at = to + {chunk_at(Int('x') / chunks, Int('t') % chunks, chunks)};",
        "uint4* const here_ = (uint4*)(sm + (at - sb)); uint4 w_ = *here_;",
    ]
    for word in range(4):
        field = "xyzw"[word]
        text = [f"{{ const float2 h_ = w_unpack_{kind}(w_.{field});"]
        ends = []
        for half in range(2):
            own = [f"c{j}_[{2 * word + half}]" for j in range(len(norm.columns))]
            steps, end = element_text(norm, f"h_.{'xy'[half]}", values, own, f"e{half}_")
            text += steps
            ends.append(end)
        inner += [*text, f"w_.{field} = w_narrow2_{kind}({ends[0]}, {ends[1]}); }}"]
    if p.k % s.bk:
        inner.append(f"if (k >= {p.k}) w_ = make_uint4(0, 0, 0, 0);")
    inner.append("*here_ = w_;")
    if norm.stored >= 0:
        inside = [f"m < {p.m}"] if p.m % s.bm else []
        inside += [f"k < {p.k}"] if p.k % s.bk else []
        inner.append(
            f"const int m = m0 + x / {chunks}; w_store_if((u16*)normed + (long long)m * {p.k} + k, w_,"
            f" {' && '.join(['tn == 0', *inside])});"
        )
    body = "\n".join(inner)
    head = f"const int k = kb * {s.bk} + t % {chunks} * 8;\n" + "\n".join(lines)
    setup += f"auto fix = [&](int kb, u32 to) {{ {head}\n{loaders.each(count, s.threads, body)} }};\n"
    return Fixed(before, setup, after)


def _slot(s: MmaConfig, i: str, stage: int) -> str:
    """C text of the shared address of k-block `i`."""
    return f"sb + (u32)(({i} % {s.stages}) * {stage})"


def _loop_normed(s: MmaConfig, a_bytes: int, stage: int) -> list[str]:
    """As `_loop`: while a k-block is multiplied, the left operand of the next one is normalised where it lies."""
    fill = [
        f"if (more) {{ fill_w(first + i + {s.ahead}, to + {a_bytes}); fill_a(first + i + {s.ahead}, to); }}",
        "w_commit();",
    ]
    return [
        f"w_arrived<{s.ahead - 1}>();",
        f"{{ const int i = 0; fix(first, {_slot(s, 'i', stage)}); }}",
        *(["#pragma unroll 1"] if s.group else []),
        "for (int i = 0; i < last - first; ++i) {",
        "w_async_fence(); w_group_wait<1>();" if s.group else "",
        "role.sync();",
        f"const u32 here = {_slot(s, 'i', stage)}, to = sb + (u32)((i + {s.ahead}) % {s.stages} * {stage});",
        f"const bool more = first + i + {s.ahead} < last;",
        *([] if s.group else fill),
        f"multiply(here, here + {a_bytes}{', i' if s.group else ''});",
        *(fill if s.group else []),
        f"if (more) store_w(to + {a_bytes});",
        f"w_arrived<{s.ahead - 1}>();",
        f"if (first + i + 1 < last) fix(first + i + 1, {_slot(s, '(i + 1)', stage)});",
        "}",
        *(["w_group_wait<0>();"] if s.group else []),
        "w_arrived<0>(); role.sync();",
    ]


def _fragments(p: Product, s: MmaConfig, tensor: bool) -> str:
    """The warp's sums, and the lambda `multiply(a, w)` that adds one k-block to them."""
    if s.group:
        return wgmma.fragments(p.dtype, s.bn, s.wm, s.wn)
    nm, nn, warp = s.bm // s.wm, s.bn // s.wn, Int("warp")
    place = (
        f"const int wk = {warp / (nm * nn)}, row0 = {warp / nn % nm * s.wm}, col0 = {warp % nn * s.wn};\n(void)wk;\n"
    )
    return place + (_tensor_cores(p, s) if tensor else _cuda_cores(p, s))


def _tensor_cores(p: Product, s: MmaConfig) -> str:
    mi, ni = s.wm // 16, s.wn // 16
    chunks = s.bk // p.per_load
    steps = s.bk // (2 * p.per_load) // s.wk
    if p.a_load == "columns":
        row = "kk * 16 + (lane & 7) + ((lane >> 4) << 3)"
        chunk = "(row0 >> 3) + i * 2 + ((lane >> 3) & 1)"
        a = f"w_matrices_transposed(fa[i], a + {chunk_at(row, chunk, s.bm // 8)});"
    else:
        row = "row0 + i * 16 + (lane & 15)"
        a = f"w_matrices(fa[i], a + {chunk_at(row, 'kk * 2 + (lane >> 4)', chunks)});"
    if p.w_load == "kn":
        row = "kk * 16 + (lane & 15)"
        chunk = "(col0 >> 3) + j * 2 + (lane >> 4)"
        w = f"w_matrices_transposed(fw[j], w + {chunk_at(row, chunk, s.bn // 8)});"
    else:
        row = "col0 + j * 16 + (lane & 7) + ((lane >> 4) << 3)"
        chunk = "kk * 2 + ((lane >> 3) & 1)"
        w = f"w_matrices(fw[j], w + {chunk_at(row, chunk, chunks)});"
    if p.tf32:
        a = f"{{ {a} w_round_tf32(fa[i]); }}"
        if p.w_load != "packed":
            w = f"{{ {w} w_round_tf32(fw[j]); }}"
    mma = f"w_mma_{p.multiplied}"
    return f"""float acc[{mi}][{2 * ni}][4];
#pragma unroll
for (int i = 0; i < {mi}; ++i)
#pragma unroll
for (int j = 0; j < {2 * ni}; ++j)
#pragma unroll
for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
auto multiply = [&](u32 a, u32 w) {{
#pragma unroll
for (int q = 0; q < {steps}; ++q) {{
const int kk = {Int("wk") * steps + "q"};
u32 fa[{mi}][4], fw[{ni}][4];
#pragma unroll
for (int i = 0; i < {mi}; ++i) {a}
#pragma unroll
for (int j = 0; j < {ni}; ++j) {w}
#pragma unroll
for (int i = 0; i < {mi}; ++i)
#pragma unroll
for (int j = 0; j < {ni}; ++j) {{
{mma}(acc[i][2 * j], fa[i], fw[j][0], fw[j][1]);
{mma}(acc[i][2 * j + 1], fa[i], fw[j][2], fw[j][3]);
}}
}}
}};"""


def _cuda_cores(p: Product, s: MmaConfig) -> str:
    """A warp reads 4 rows and 8 columns at once, a chunk of 4 along the sum of each.

    Chunks lie within rows as `swizzle` says. What of their places depends on the thread is computed once: rows 4 apart
    differ in the highest bit of the place, and all else is known when this text is written. Rows or columns that are
    neighbours in memory are so here, too: four of a thread's are read at once, for one element of the sum.
    """
    tm, tn = s.wm // 4, s.wn // 8
    chunks = s.bk // 4
    steps, half, line = chunks // s.wk, chunks // 2, 16 * chunks
    own = f"({Int('wk') * steps + 'q'})" if s.wk > 1 else "q"
    # every row of 4 or column of 8 has its own place, or every two have one
    of_x, of_y = ("(lane >> 3)", "(lane & 7)") if chunks == 8 else ("(lane >> 3 >> 1)", "((lane & 7) >> 1)")
    kept = steps if s.wk > 1 else half
    high = f"(u32)(({(Int('q') / half).tight} ^ (i & 1)) * {16 * half})"
    x_at = "at_x[i & 1][q]" if s.wk > 1 else f"at_x[0][{Int('q') % half}] + {high}"
    sides = 2 if s.wk > 1 else 1
    far = f" ^ {Int('h') * half}" if sides > 1 else ""
    if p.a_lines:
        x, x_of = f"float x[4][{tm}];", "x[{e}][i]"
        x_place = _line_place("x", "row0 + (lane >> 3) * 4", s.bm, steps, s.wk)
        x_read = _line_reads("x", "fa", s.bm, tm, 16, 4)
    else:
        x, x_of = f"float4 x[{tm}];", "x[i].{part}"
        x_place = f"""u32 at_x[{sides}][{kept}];
#pragma unroll
for (int h = 0; h < {sides}; ++h)
#pragma unroll
for (int q = 0; q < {kept}; ++q)
at_x[h][q] = (u32)((row0 + (lane >> 3)) * {line} + ({own} ^ {of_x}{far}) * 16);"""
        x_read = f"""#pragma unroll
for (int i = 0; i < {tm}; ++i) x[i] = *(const float4*)(fa + {x_at} + {4 * line} * i);"""
    if p.w_lines:
        v = _columns_at_once(s)
        y, y_of = f"float y[4][{tn}];", "y[{e}][j]"
        y_place = _line_place("y", f"col0 + (lane & 7) * {v}", s.bn, steps, s.wk)
        y_read = _line_reads("y", "fw", s.bn, tn, 8 * v, v)
    else:
        y, y_of = f"float4 y[{tn}];", "y[j].{part}"
        y_place = f"""u32 at_y[{steps}];
#pragma unroll
for (int q = 0; q < {steps}; ++q)
at_y[q] = (u32)((col0 + (lane & 7)) * {line} + ({own} ^ {of_y}) * 16);"""
        y_read = f"""#pragma unroll
for (int j = 0; j < {tn}; ++j) y[j] = *(const float4*)(fw + at_y[q] + {8 * line} * j);"""
    sums = "\n".join(
        f"#pragma unroll\nfor (int i = 0; i < {tm}; ++i)\n#pragma unroll\nfor (int j = 0; j < {tn}; ++j) acc[i][j] ="
        f" fmaf({x_of.format(e=e, part=part)}, {y_of.format(e=e, part=part)}, acc[i][j]);"
        for e, part in enumerate("xyzw")
    )
    return f"""float acc[{tm}][{tn}];
#pragma unroll
for (int i = 0; i < {tm}; ++i)
#pragma unroll
for (int j = 0; j < {tn}; ++j) acc[i][j] = 0.0f;
{x_place}
{y_place}
auto multiply = [&](u32 a, u32 w) {{
const unsigned char* const fa = sm + (a - sb);
const unsigned char* const fw = sm + (w - sb);
#pragma unroll
for (int q = 0; q < {steps}; ++q) {{
{x} {y}
{y_read}
{x_read}
{sums}
}}
}};"""


def _line_place(name: str, first: str, lines: int, steps: int, wk: int) -> str:
    """Text: where a thread's first lines are, for the first element of the sum that its warp takes."""
    own = Int("wk") * (16 * steps * lines) if wk > 1 else 0
    return f"const u32 at_{name} = (u32)({Int(first) * 4 + own});"


def _line_reads(name: str, tile: str, lines: int, count: int, period: int, v: int) -> str:
    """Text: a thread's `count` lines, `v` neighbours of every `period`, for four elements of the sum."""
    fields = " ".join(f"{name}[e][{v * Int('i') + n}] = r.{f};" for n, f in enumerate("xyzw"[:v]))
    return f"""#pragma unroll
for (int e = 0; e < 4; ++e)
#pragma unroll
for (int i = 0; i < {count // v}; ++i) {{
const float{v} r = *(const float{v}*)({tile} + at_{name} + (q * 4 + e) * {4 * lines} + i * {4 * period});
{fields} }}"""


def _columns_at_once(s: MmaConfig) -> int:
    """Neighbouring columns that a thread of the CUDA cores' products reads at once."""
    return min(4, s.wn // 8)


def cores_to_shared(p: Product, s: MmaConfig) -> str:
    """`to_shared` for sums that CUDA cores have made."""
    pitch, v = s.bn + PAD, _columns_at_once(s)
    row = "i / 4 * 16 + (lane >> 3) * 4 + i % 4" if p.a_lines else "i * 4 + (lane >> 3)"
    begin = (
        f"float* const mine = sums + wk * {s.bm * pitch};\n"
        f"#pragma unroll\nfor (int i = 0; i < {s.wm // 4}; ++i)\n#pragma unroll\n"
    )
    if not p.w_lines:
        return begin + (
            f"for (int j = 0; j < {s.wn // 8}; ++j)"
            f" mine[(row0 + {row}) * {pitch} + col0 + j * 8 + (lane & 7)] = acc[i][j];"
        )
    values = ", ".join(f"acc[i][{Int('j') * v + n}]" for n in range(v))
    return begin + (
        f"for (int j = 0; j < {s.wn // 8 // v}; ++j) *(float{v}*)(mine + (row0 + {row}) * {pitch}"
        f" + col0 + (j * 8 + (lane & 7)) * {v}) = make_float{v}({values});"
    )


def to_shared(s: MmaConfig) -> str:
    """The warp's sums into its own copy of the tile in shared memory."""
    row = s.bn + PAD
    to = f"float* const mine = sums + wk * {s.bm * row};\n"
    return to + (
        f"#pragma unroll\nfor (int i = 0; i < {s.wm // 16}; ++i)\n"
        f"#pragma unroll\nfor (int j = 0; j < {s.wn // 8}; ++j) {{\n"
        f"float* const at = mine + (row0 + i * 16 + (lane >> 2)) * {row} + col0 + j * 8 + (lane & 3) * 2;\n"
        "*(float2*)at = make_float2(acc[i][j][0], acc[i][j][1]);\n"
        f"*(float2*)(at + {8 * row}) = make_float2(acc[i][j][2], acc[i][j][3]);\n}}"
    )


@dataclass(frozen=True, slots=True)
class Sums:
    """A block whose sums meet in shared memory, `wk` copies of `bm` rows by `bn` columns; see `MmaConfig`."""

    bm: int
    bn: int
    wk: int
    split: int
    cluster: bool
    threads: int
    integers: bool = False
    """True: they are bits of integers."""

    def added(self, to: str, x: str) -> str:
        """Statement: a part of a sum to another."""
        return narrow.added(to, x, integers=self.integers)


def finish(
    p: Product,
    s: Sums,
    end: epilogue.Epilogue,
    tiles: int,
    *,
    row: str = "m0 + r",
    inside: Sequence[str] | None = None,
    names: Mapping[Source, str] | None = None,
) -> list[str]:
    """From the sums in shared memory to the outputs.

    `row` is the expression of the product's row in the block's r-th one, `inside` says which of them exist (None: those
    below the number of rows). `names` are those of what is read, if they are not those of the product alone.
    """
    v = end.width
    if s.cluster and v == 8 and s.bm * s.bn < 8 * s.split * s.threads:
        v = 4  # more threads of each block take part
    pitch = s.bn + PAD
    count, x = s.bm * s.bn // v, Int("x")
    where = (
        f"const int r = {x % s.bm}, q = {x / s.bm * v};"
        if end.by_row
        else f"const int r = {x / (s.bn // v)}, q = {x % (s.bn // v) * v};"
    )
    where += f" const int m = {row}, n = n0 + q;"
    test = list(inside) if inside is not None else [f"m < {p.m}"] if p.m % s.bm else []
    if p.n % s.bn:
        test.append(f"n < {p.n}")
    guard = f"if ({' && '.join(test)}) " if test else ""
    names = names or epilogue.arguments(p, p.w_load == "packed", False, False).names
    done = "\n".join(epilogue.body(p, names, v))
    if s.cluster:
        per = -(-count // s.split)
        if count % s.split:
            guard = guard[:-2] + f" && x < {count}) " if guard else f"if (x < {count}) "
        return [
            *fold_warps(s, pitch),
            "// split-K over a cluster: each CTA finishes its share of the tile, in order",
            "w_cluster_sync();",
            f"for (int i = t; i < {per}; i += {s.threads}) {{ const int x = i + (int)role.block_y() * {per}; {where}",
            f"{guard}{{ float acc[{v}];",
            sum_cluster(s, v, pitch),
            done,
            "} }",
            "w_cluster_leave();",
        ]
    own = sum_warps(s, v, pitch)
    if s.split == 1:
        return [
            "role.sync();",
            f"for (int x = t; x < {count}; x += {s.threads}) {{ {where}",
            f"{guard}{{ float acc[{v}];\n{own}",
            done,
            "} }",
        ]
    tile = f"({Int('(long long)role.block_z()') * tiles + 'role.block_x()'})"
    kind = {4: "float4", 8: "float4"}.get(v, "float")
    per = 4 if v % 4 == 0 else 1
    parts = f"(({kind}*)work + {tile} * {s.split * s.bm * s.bn // per})"
    stores = []
    for i in range(v // per):
        value = (
            f"make_float4(acc[{4 * i}], acc[{4 * i + 1}], acc[{4 * i + 2}], acc[{4 * i + 3}])"
            if per == 4
            else f"acc[{i}]"
        )
        stores.append(f"part[{summed(Int('role.block_y()') * (s.bm * s.bn // per), i * count, 'x')}] = {value};")
    adds = []
    for i in range(v // per):
        fields = (
            [(f"acc[{4 * i + j}]", f"h[{i}].{f}") for j, f in enumerate("xyzw")]
            if per == 4
            else [(f"acc[{i}]", f"h[{i}]")]
        )
        adds += [s.added(to, of) for to, of in fields]
    reads = " ".join(
        f"h[{i}] = w_read_partial(part + {summed(Int('y') * (s.bm * s.bn // per), i * count, 'x')});"
        for i in range(v // per)
    )
    return [
        "// split-K: partial sums in memory; the last CTA of a tile to arrive adds them in order",
        "role.sync();",
        f"{kind}* const part = {parts};",
        f"for (int x = t; x < {count}; x += {s.threads}) {{ float acc[{v}]; {where} (void)m; (void)n;",
        own,
        *stores,
        "}",
        "w_fence(); role.sync();",
        f"if (t == 0) *(int*)(sm + FLAG) = w_last_arrival((u32*)state + {tile}, {s.split}u);",
        "role.sync();",
        "if (!*(int*)(sm + FLAG)) return;",
        f"for (int x = t; x < {count}; x += {s.threads}) {{ {where}",
        f"{guard}{{ float acc[{v}];",
        "#pragma unroll",
        f"for (int i = 0; i < {v}; ++i) acc[i] = 0.0f;",
        "#pragma unroll",
        f"for (int y = 0; y < {s.split}; ++y) {{ {kind} h[{v // per}]; {reads} {' '.join(adds)} }}",
        done,
        "} }",
    ]


def sum_warps(s: Sums, v: int, row: int) -> str:
    """`acc` from the copies of the warps along k, in order."""
    return "\n".join(
        [
            "#pragma unroll",
            f"for (int i = 0; i < {v}; ++i) {{ acc[i] = sums[r * {row} + q + i];",
            "#pragma unroll" if s.wk > 1 else "",
            f"for (int y = 1; y < {s.wk}; ++y) {s.added('acc[i]', f'sums[(y * {s.bm} + r) * {row} + q + i]')}"
            if s.wk > 1
            else "",
            "}",
        ]
    )


def fold_warps(s: Sums, row: int) -> list[str]:
    """The copies of the warps along k into the first one, in order: other blocks read only that."""
    if s.wk == 1:
        return []
    adds = " ".join(s.added(f"a.{f}", f"h.{f}") for f in "xyzw")
    return [
        "role.sync();",
        f"for (int i = t; i < {s.bm * s.bn // 4}; i += {s.threads}) {{",
        f"float4* const at = (float4*)(sums + i / {s.bn // 4} * {row} + i % {s.bn // 4} * 4);",
        "float4 a = *at;",
        "#pragma unroll",
        f"for (int y = 1; y < {s.wk}; ++y) {{ const float4 h = at[y * {s.bm * row // 4}]; {adds} }}",
        "*at = a; }",
    ]


def sum_cluster(s: Sums, v: int, row: int) -> str:
    """`acc` from the tiles of all blocks of the cluster, in order."""
    adds = [s.added(f"acc[{4 * Int('i') + j}]", f"h.{f}") for j, f in enumerate("xyzw")]
    return (
        f"\n#pragma unroll\nfor (int i = 0; i < {v}; ++i) acc[i] = 0.0f;\n"
        f"#pragma unroll\nfor (int rank = 0; rank < {s.split}; ++rank)\n"
        f"#pragma unroll\nfor (int i = 0; i < {v // 4}; ++i) {{\n"
        f"const float4 h = w_read_cluster(sb + (u32)((r * {row} + q + 4 * i) * 4), (u32)rank);\n"
        f"{' '.join(adds)} }}"
    )
