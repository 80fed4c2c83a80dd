"""The end of a tile in the tma template: from the sums in registers to the outputs, 8 neighbours of a row at a time."""

from __future__ import annotations

import math

from weft.generate.cuda.gemm.common import epilogue, narrow
from weft.generate.cuda.gemm.common.normed_text import joined_text
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.sink import Rounded, Sink, ToGlobal
from weft.generate.cuda.gemm.tma import store as tma_store
from weft.generate.cuda.gemm.tma.operands import Operand, Rows
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.expr.integer import Int
from weft.ir.types import DType

_OTHERS = 48
"""Registers of a thread for anything but sums and vectors that are asked for ahead."""
_NORMED = 48
"""And for 64 rows of a left operand that is normalised: two stages of it, and values of rows."""
_STEP = 4
"""And for each step of what follows the sum beyond the third."""


def _row(rows: Rows, s: TmaConfig, at: str) -> str:
    """Declares the row `m` of the product at row `at` of the tile; -1: none."""
    n2, n1, n0 = rows.sizes
    b2, b1, b0 = s.box
    if rows.linear:
        test = f"i0 + {at} < {n0}" if _clipped(rows, s) else ""
        place = f"i0 + {at}"
    else:
        r = Int(at)
        xs = (Int("i0") + r % b0, Int("i1") + r / b0 % b1, Int("i2") + r / (b0 * b1))
        head = f"const int x0 = {xs[0]}, x1 = {xs[1]}, x2 = {xs[2]};"
        tests = [f"{at} < {b0 * b1 * b2}"] if b0 * b1 * b2 < s.bm else []
        tests += [f"x{i} < {n}" for i, n, b in ((0, n0, b0), (1, n1, b1), (2, n2, b2)) if n % b]
        place, test = str((Int("x2") * n1 + "x1") * n0 + "x0"), " && ".join(tests)
        return f"{head} const int m = {f'{test} ? {place} : -1' if test else place};"
    return f"const int m = {f'{test} ? {place} : -1' if test else place};"


def finish(
    p: Product, rows: Rows, s: TmaConfig, w: Operand, width: int, to: tma_store.Stored | None = None, sharers: int = 1
) -> tuple[list[str], list[str]]:
    """From the sums in registers to the outputs: a thread has 8 of a row at a time.

    They are neighbours, or for f32 with packed weights two pieces of 4: four threads fill whole sectors at once.
    `to`: TMA stores them, see `store`. `sharers`: blocks that finish a tile, each every so many pieces.
    Statements before the products of a tile, which ask for what the first vectors need, and after them.
    """
    high, wide = s.rows // 64, -(-s.bn // 32)
    names = epilogue.arguments(p, w.map is None, False, False).names
    guard = ["m >= 0"] if _clipped(rows, s) else []
    if p.n % (s.bn * s.cluster_n):
        guard.append(f"n < {p.n}")
    if s.bn % 32:
        guard.append(f"j * 32 + (lane & 3) * 8 < {s.bn}")
    inside = f"if ({' && '.join(guard)}) " if guard else ""
    columns, ring = _ahead(p, s)
    residuals = epilogue.streamed(p, by_row=True) if ring else []
    kinds, pieces = {slot: storage(p.c.body[slot].dtype) for slot in (*residuals, *columns)}, _pieces(p, w)
    early = s.split == 1 and _rounds_early(p, w, width)
    sink: Sink = ToGlobal()
    if early:
        sink = Rounded(tuple(f"x[{i}]" for i in range(4)))
    elif to is not None:
        sink = tma_store.into_box(s)
    parts = []
    for e in range(0, 8, width):
        piece = f"[{e // 4}]" if len(pieces) > 1 else ""
        given = {slot: f"(const {kinds[slot]}*)&ahead{slot}[o % {ring}]{piece}" for slot in residuals}
        given |= {slot: f"(const {kinds[slot]}*)&column{slot}[j]{piece}" for slot in columns}
        later = "o" if p.partial_stats is not None and s.split == 1 else ""
        acc = f"(v + {e})" if e else "v"
        body = "\n".join(epilogue.body(p, names, width, acc, given=given, later=later, sink=sink))
        parts.append(f"{{ const int n = {Int('n8') + _column(p, w, e)}; {inside}{{ {body} }} }}")
    one, two = (narrow.carried(f"acc[i][{_chunk(s)} * 4 + 2 * h{x}]", integers=p.integers) for x in ("", " + 1"))
    take = [
        "float v[8];",
        f"#pragma unroll\nfor (int c = 0; c < 4; ++c) {{ v[2 * c] = {one}; v[2 * c + 1] = {two}; }}",
        # packed weights are permuted instead
        "" if w.map is None or w.interleaved else "w_quad(v, lane);",
    ]
    if early:
        take = _words(p, s, boxes=to is not None)
        parts = [tma_store.fragments(s)] if to is not None else parts
    row = "row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2)"
    if s.split > 1:
        return [], _shared_sum(p, rows, s, take, row, parts, _first(p, w))
    place = [
        f"const int h = o % 2, i = {Int('o') / 2 % high}, j = o / {2 * high}, n8 = {_first(p, w)};"
        if to is None
        else f"{tma_store.order(s)} const int n8 = {_first(p, w)};",
        f"const int r = {row}; {_row(rows, s, 'r')}",
    ]
    count = 2 * high * wide
    ask = []
    for k, at in enumerate(pieces):
        piece = f"[{k}]" if len(pieces) > 1 else ""
        reads = (
            f"ahead{slot}[o % {ring}]{piece} = *(const uint4*)({epilogue.address(p, names, slot)});"
            for slot in residuals
        )
        # what does not exist is read at the first row or column instead
        ask += [f"{{ const int m = row < 0 ? 0 : row, n = {at} < {p.n} ? {at} : 0; (void)n;", *reads, "}"]
    ask[0] = f"const int row = m; {ask[0]}"
    extent = f"[{len(pieces)}]" if len(pieces) > 1 else ""
    before = []
    if columns:
        before += ["// vectors along the columns are read before the main loop"]
        before += [f"uint4 column{slot}[{wide}]{extent};" for slot in columns]
        for k, at in enumerate(pieces):
            piece = f"[{k}]" if len(pieces) > 1 else ""
            biases = " ".join(
                f"column{c}[j]{piece} = *(const uint4*)({epilogue.address(p, names, c)});" for c in columns
            )
            before.append(
                f"#pragma unroll\nfor (int j = 0; j < {wide}; ++j) {{ const int n8 = {_first(p, w)},"
                f" n = {at} < {p.n} ? {at} : 0; {biases} }}"
            )
    if residuals:
        before += [
            "// residuals are asked for ahead, so that their latency hides behind the main loop",
            *(f"uint4 ahead{slot}[{ring}]{extent};" for slot in residuals),
            f"auto ask = [&](int o) {{ {' '.join(place)} {' '.join(ask)} }};",
            f"#pragma unroll\nfor (int o = 0; o < {ring}; ++o) ask(o);",
        ]
    step = [*take, *parts]
    if sharers > 1:
        step = [f"if (o / 2 % {sharers} == unit % {sharers}) {{", *step, "}"]
    if to is not None:
        step = tma_store.boxed(s, f"FULL - {s.staged_bytes}", to, step)
    after = [
        f"// epilogue: a thread has 8 {'columns' if not _apart(p, w) else 'of 32 columns'} of a row at a time",
        "float total[8];" if p.column_sums else "",
        f"#pragma unroll\nfor (int o = 0; o < {count}; ++o) {{",
        *place,
        f"if (o % {2 * high} == 0)\n{_CLEAR}" if p.column_sums else "",
        *step,
        *(_summed(p, rows, s) if p.column_sums else []),
        f"if (o + {ring} < {count}) ask(o + {ring});" if residuals else "",
        "}",
    ]
    if p.partial_stats is not None:
        within = "".join(f"{x} && " for x in guard)
        after = [
            f"float mean_[{count}], spread_[{count}];\n#pragma unroll",
            f"for (int o = 0; o < {count}; ++o) mean_[o] = spread_[o] = 0.0f;",
            *after,
            f"#pragma unroll\nfor (int o = 0; o < {count}; ++o) {{",
            *place,
            f"const int n = n8; {' '.join(joined_text(8, p.n, 'mean_[o]', 'spread_[o]', within))} }}",
        ]
    return before, after


def _rounds_early(p: Product, w: Operand, width: int) -> bool:
    """Whether nothing follows the sum, so that halves are rounded before lanes exchange them: a word is two of them."""
    plain = not p.c.body and not p.column_sums and p.partial_stats is None and len(p.c.outputs) == 1
    exchanged = w.map is not None and not w.interleaved
    return plain and exchanged and width == 8 and p.sum_dtype is p.dtype and p.dtype in (DType.F16, DType.BF16)


def _words(p: Product, s: TmaConfig, *, boxes: bool) -> list[str]:
    """Four words `x` of a thread: 8 neighbours of a row; on the way into boxes, the store of fragments exchanges."""
    words = [
        "u32 x[4];",
        (
            "#pragma unroll\nfor (int c = 0; c < 4; ++c)"
            f" x[c] = w_narrow2_{p.dtype.value}(acc[i][{_chunk(s)} * 4 + 2 * h], acc[i][{_chunk(s)} * 4 + 2 * h + 1]);"
        ),
    ]
    if boxes:
        return words
    return [
        *words,
        "// each of four neighbouring lanes has a word of every 8 columns; behind this, lane q has all of the q-th 8",
        "#pragma unroll\nfor (int bit = 1; bit <= 2; bit *= 2)",
        "#pragma unroll\nfor (int c = 0; c < 4; ++c) if (!(c & bit)) {",
        "const bool upper = lane & bit; const u32 got = w_shfl_word(upper ? x[c] : x[c + bit], bit);",
        "if (upper) x[c] = got; else x[c + bit] = got; }",
    ]


def _chunk(s: TmaConfig) -> str:
    """C text: which 8 columns of the tile a thread's pair `c` of step `j` is of; one of them where there are none."""
    return f"(4 * j + c < {s.bn // 8} ? 4 * j + c : 0)" if s.bn % 32 else "(4 * j + c)"


def _apart(p: Product, w: Operand) -> bool:
    """True where columns are copied in an order that gives a thread pieces of 4."""
    return p.by_fours and (w.map is None or w.interleaved)


def _first(p: Product, w: Operand) -> str:
    """The first column of a thread."""
    return f"n0 + j * 32 + (lane & 3) * {4 if _apart(p, w) else 8}"


def _column(p: Product, w: Operand, e: int) -> int:
    """Column of a thread's e-th result from its first one."""
    return e % 4 + e // 4 * 16 if _apart(p, w) else e


def _pieces(p: Product, w: Operand) -> list[str]:
    """C text of the first columns of the 16 bytes that a thread reads."""
    return ["n8", f"n8 + {_column(p, w, 4)}"] if p.by_fours else ["n8"]


def _ahead(p: Product, s: TmaConfig) -> tuple[list[int], int]:
    """Biases that are read before the products of a tile, and vectors of each residual: what registers are left for."""
    if s.split > 1:
        return [], 0
    limit = {1: 216, 2: 168, 3: 128}[s.min_ctas] if s.consumers == 1 or s.moves_registers else 168
    if s.consumers == 3:
        limit = 144 if s.moves_registers else 112
    steps = sum(step.source is None for step in p.c.body)
    sums = s.rows * s.bn // 128 + s.bn // 2 * s.two_level
    others = _OTHERS + (8 if p.column_sums else 0) + (_NORMED * (s.rows // 64) if p.norm is not None else 0)
    left = (limit - sums - others - _STEP * max(0, steps - 3)) // (8 if p.by_fours else 4)
    columns, residuals = (epilogue.streamed(p, by_row=x) for x in (False, True))
    wide = -(-s.bn // 32)
    if len(columns) * wide > left:
        columns = []
    left -= len(columns) * wide
    if not residuals:
        return columns, 0
    return columns, max(0, min(2 * (s.rows // 64) * wide, left // len(residuals)))


_CLEAR = "#pragma unroll\nfor (int e = 0; e < 8; ++e) total[e] = 0.0f;"
COLUMN_SUMS = """// Sums of 8 columns over the rows of 8 lanes: afterwards each of these lanes has one, and puts it.
W_FN void w_put_sums_of_columns(const float (&v)[8], float* to, int first, int end, int lane) {
  float a[4], b[2];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float other = lane & 16 ? v[e] : v[4 + e];
    a[e] = (lane & 16 ? v[4 + e] : v[e]) + __uint_as_float(w_shfl_word(__float_as_uint(other), 16));
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float other = lane & 8 ? a[e] : a[2 + e];
    b[e] = (lane & 8 ? a[2 + e] : a[e]) + __uint_as_float(w_shfl_word(__float_as_uint(other), 8));
  }
  const float other = lane & 4 ? b[0] : b[1];
  const float sum = (lane & 4 ? b[1] : b[0]) + __uint_as_float(w_shfl_word(__float_as_uint(other), 4));
  const int n = first + (lane >> 4) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
  if (n < end) to[n] = sum;
}
"""


def sum_rows(p: Product, s: TmaConfig) -> int:
    """Rows of the output of sums over rows."""
    return -(-p.m // s.bm) * _warps(s)


def _warps(s: TmaConfig) -> int:
    """That share the rows of a tile."""
    return 4 if s.pingpong else 4 * s.consumers


def _summed(p: Product, rows: Rows, s: TmaConfig) -> list[str]:
    """Of 32 columns of a warp's rows of a tile."""
    last, warps = 2 * (s.rows // 64) - 1, _warps(s)
    at = f"({Int('i0') / s.bm * warps + ('(warp & 3)' if s.pingpong else 'warp')})"
    return [
        f"if (o % {last + 1} == {last} && i0 < {rows.sizes[2]})",
        f"w_put_sums_of_columns(total, (float*)sums + (long long){at} * {p.n}, n8, {p.n}, lane);",
    ]


def _clipped(rows: Rows, s: TmaConfig) -> bool:
    """True where a tile can have rows that do not exist."""
    if rows.linear and s.cluster_m > 1 and rows.sizes[2] % (s.cluster_m * s.bm):
        return True
    return math.prod(s.box) < s.bm or any(n % b for n, b in zip(rows.sizes, s.box, strict=True))


def _shared_sum(
    p: Product, rows: Rows, s: TmaConfig, take: list[str], row: str, parts: list[str], first: str
) -> list[str]:
    """The blocks of the cluster put their sums into shared memory, and each finishes its share of the pieces."""
    high, wide, threads = s.rows // 64, s.bn // 32, 128 * s.consumers
    piece = f"sb + (u32)(o * {32 * threads} + t * 16)"
    eight = [f"{x}.{f}" for x in ("lo", "hi") for f in "xyzw"]
    return [
        "// split-K: sums of the CTAs of the cluster through distributed shared memory, in order",
        f"role.named_barrier(0, {threads});",
        f"#pragma unroll\nfor (int j = 0; j < {wide}; ++j)\n#pragma unroll\nfor (int i = 0; i < {high}; ++i)",
        "#pragma unroll\nfor (int h = 0; h < 2; ++h) {",
        *take,
        f"const int o = {(Int('j') * high + 'i') * 2 + 'h'};",
        f"float4* const to = (float4*)(sm + o * {32 * threads} + t * 16);",
        f"to[0] = make_float4(v[0], v[1], v[2], v[3]); to[{threads}] = make_float4(v[4], v[5], v[6], v[7]); }}",
        "w_cluster_sync();",
        f"#pragma unroll 1\nfor (int o = rank; o < {2 * high * wide}; o += {s.split}) {{",
        f"const int h = o % 2, i = {Int('o') / 2 % high}, j = o / {2 * high}; const int n8 = {first};",
        "float v[8];\n#pragma unroll\nfor (int e = 0; e < 8; ++e) v[e] = 0.0f;",
        f"#pragma unroll\nfor (int y = 0; y < {s.split}; ++y) {{",
        f"const float4 lo = w_read_cluster({piece}, y), hi = w_read_cluster({piece} + {16 * threads}, y);",
        " ".join(narrow.added(f"v[{i}]", x, integers=p.integers) for i, x in enumerate(eight)) + " }",
        f"const int r = {row}; {_row(rows, s, 'r')}",
        *parts,
        "}",
        "w_cluster_sync();",
    ]
