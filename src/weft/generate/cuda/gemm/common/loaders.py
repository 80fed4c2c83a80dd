"""Loading of operand tiles into shared memory: for each way of reading, what a thread keeps and how it fills a stage.

A loader is text: `setup` runs once, `begin(kb)` issues the copies of k-block `kb` into the shared address `to` and
`end` stores what went through registers. Rows of a tile hold one k-block of one row (or, for `columns` and `kn`, all
rows of the tile at one k), their chunks swizzled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from weft.generate.contraction.match import Source
from weft.generate.cuda.gemm.common.pack import chunk_at
from weft.generate.cuda.gemm.common.product import Product, offset_of
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.expr.integer import Int, summed
from weft.ir.graph import Graph

_X, _T, _K, _M, _N, _G, _KB = map(Int, ("x", "t", "k", "m", "n", "g", "kb"))
_TABLE_K = 4096
"""Sums up to this length read the places of their elements from a table in constant memory."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a block's tile in elements, and its threads."""

    bm: int
    bn: int
    bk: int
    threads: int


@dataclass(frozen=True, slots=True)
class Loader:
    """Text of one operand's loads."""

    globals: str = ""
    before: str = ""
    """Before the wait for predecessors: touches constants only."""
    setup: str = ""
    begin: str = ""
    end: str = ""
    table_bytes: int = 0
    """Shared memory for index tables, at `sm + TABLES`."""


def each(count: int, threads: int, body: str) -> str:
    """`body` for every i-th piece `x = t + i * threads` below `count`."""
    rounds = -(-count // threads)
    guard = f"if (x < {count}) " if count % threads else ""
    loop = f'_Pragma("unroll")\nfor (int i = 0; i < {rounds}; ++i)'
    return f"{loop} {{ const int x = t + i * {threads}; {guard}{{ {body} }} }}"


def _chunk(chunks: int) -> str:
    """C text of the shared address of chunk `t % chunks` of row `x / chunks`: rows are swizzled against conflicts."""
    return f"to + {chunk_at(_X / chunks, _T % chunks, chunks)}"


def _copy(to: str, source: str, bytes_: str) -> str:
    """One chunk; `bytes_` is text: `16` needs no masking."""
    return f"w_copy16({to}, {source});" if bytes_ == "16" else f"w_copy16({to}, {source}, {bytes_});"


def _base(p: Product) -> Int:
    """Offset of a for the block's group and batch."""
    layout = p.c.a_layout
    place = offset_of(layout, p.c.dims, p.batch, "b")
    if p.c.groups > 1:
        place += _G * layout.group
    return place + layout.offset


def _rows_of(p: Product, index: str) -> Int:
    """Offset of row `index` of a."""
    return _base(p) + offset_of(p.c.a_layout, p.c.dims, p.rows, index)


def _tail(p: Product, tile: Tile) -> str:
    """Bytes of the chunk at k that exist."""
    if p.k % tile.bk == 0:
        return "16"
    if p.k % p.per_load == 0:
        return f"(k < {p.k} ? 16u : 0u)"
    size = p.dtype.itemsize
    return f"(k + {p.per_load} <= {p.k} ? 16u : k < {p.k} ? (u32)({p.k} - k) * {size}u : 0u)"


def load_a(p: Product, tile: Tile) -> Loader:
    """The loader of the left operand; `A` points at the first element of the operand."""
    return {"rows": _rows, "taps": _taps, "columns": _columns, "elements": _elements}[p.a_load](p, tile)


def _rows(p: Product, tile: Tile) -> Loader:
    chunks = tile.bk // p.per_load
    count = tile.bm * chunks
    rounds = -(-count // tile.threads)
    full = p.m % tile.bm == 0
    offset = _rows_of(p, "m")
    setup = f"int ao[{rounds}];\n" + each(
        count,
        tile.threads,
        f"const int m = m0 + {_X / chunks}; ao[i] = {offset if full else f'm < {p.m} ? {offset} : -1'};",
    )
    bytes_ = _tail(p, tile)
    source = "A + ao[i] + k"
    if not full or bytes_ != "16":
        ok = [] if full else ["ao[i] >= 0"]
        if bytes_ != "16":
            ok.append("n16 != 0")
        source = f"({' && '.join(ok)} ? A + ao[i] + k : A)"
        size = "n16" if full else f"(ao[i] >= 0 ? {'n16' if bytes_ != '16' else '16u'} : 0u)"
    else:
        size = "16"
    head = f"const int k = {_KB * tile.bk + _T % chunks * p.per_load};"
    if bytes_ != "16":
        head += f" const u32 n16 = {bytes_};"
    to = _chunk(chunks)
    return Loader(setup=setup, begin=head + each(count, tile.threads, _copy(to, source, size)))


def _pixel(p: Product) -> str:
    """Declares image, row and column of output pixel m."""
    _, rows, cols = p.c.dims
    return f"const int img = {_M / (rows * cols)}, py = {_M / cols % rows}, px = {_M % cols};"


def _taps(p: Product, tile: Tile) -> Loader:
    c = p.c
    chunks = tile.bk // p.per_load
    count = tile.bm * chunks
    rounds = -(-count // tile.threads)
    kw, (ky, kx, py, px) = c.kernel[1], map(Int, ("ky", "kx", "py", "px"))
    step_y, step_x = c.dilations
    to = _chunk(chunks)
    head = (
        f"const int k = {_KB * tile.bk + _T % chunks * p.per_load}, tap = {_K / c.ic}, ch = {_K % c.ic},"
        f" ky = {Int('tap') / kw}, kx = {Int('tap') % kw};"
    )
    tail = "" if p.k % tile.bk == 0 else f" && k < {p.k}"
    if c.pack is None:
        # no padding: every tap of a pixel is inside
        setup = f"int ao[{rounds}];\n" + each(
            count,
            tile.threads,
            f"const int m = m0 + {_X / chunks}; ao[i] = m < {p.m} ? {_rows_of(p, 'm')} : -1;",
        )
        head += f" const int dk = {summed(ky * c.a_kernel[0], kx * c.a_kernel[1], 'ch')};"
        body = f"const bool ok = ao[i] >= 0{tail}; " + _copy(to, "(ok ? A + ao[i] + dk : A)", "(ok ? 16u : 0u)")
        return Loader(setup=setup, begin=head + each(count, tile.threads, body))
    pack = c.pack
    sh, sw = c.strides
    image = _base(p) + Int("img") * c.a_layout.dims[0]
    if p.borders is not None:
        top, left = p.borders
        setup = f"int ao[{rounds}], ay[{rounds}], ax[{rounds}];\n" + each(
            count,
            tile.threads,
            f"const int m = m0 + {_X / chunks}; {_pixel(p)} ay[i] = m < {p.m} ? {py * sh - top.lo} : -(1 << 20);"
            f" ax[i] = {px * sw - left.lo};"
            f" ao[i] = {summed(image, Int('ay[i]') * pack.row_step, Int('ax[i]') * pack.col_step)};",
        )
        dk = summed(Int("dy") * pack.row_step, Int("dx") * pack.col_step, "ch")
        head += f" const int dy = {ky * step_y}, dx = {kx * step_x}, dk = {dk};"
        body = f"const bool ok = (u32)(ay[i] + dy) < {top.size}u && (u32)(ax[i] + dx) < {left.size}u{tail}; " + _copy(
            to, "(ok ? A + ao[i] + dk : A)", "(ok ? 16u : 0u)"
        )
        return Loader(setup=setup, begin=head + each(count, tile.threads, body))
    places, before, size = tables(p, tile.threads)
    setup = f"int ao[{rounds}], ay[{rounds}], ax[{rounds}];\n" + each(
        count,
        tile.threads,
        f"const int m = m0 + {_X / chunks}; {_pixel(p)} ao[i] = m < {p.m} ? {image} : -1;"
        f" ay[i] = m < {p.m} ? {py * sh} : 0; ax[i] = {px * sw + len(pack.rows)};",
    )
    head += f" const int dy = {ky * step_y}, dx = {kx * step_x};"
    if tail:
        head += f" const bool in = k < {p.k};"
    body = (
        f"const int oy = {'in ? ' if tail else ''}w_place[ay[i] + dy]{' : -1' if tail else ''},"
        f" ox = {'in ? ' if tail else ''}w_place[ax[i] + dx]{' : -1' if tail else ''};"
        " const bool ok = ao[i] >= 0 && (oy | ox) >= 0; "
        + _copy(to, "(ok ? A + ao[i] + oy + ox + ch : A)", "(ok ? 16u : 0u)")
    )
    return Loader(places, before, setup, head + each(count, tile.threads, body), "", size)


def tables(p: Product, threads: int) -> tuple[str, str, int]:
    """Places of padded rows and columns: constants, text that copies them to shared memory, bytes there."""
    pack = p.c.pack
    assert pack is not None
    places = [r * pack.row_step if r >= 0 else -1 for r in pack.rows]
    places += [x * pack.col_step if x >= 0 else -1 for x in pack.cols]
    text = f"__device__ const int w_places[] = {{{','.join(map(str, places))}}};\n"
    before = (
        "int* const w_place = (int*)(sm + TABLES);\n"
        f"for (int i = t; i < {len(places)}; i += {threads}) w_place[i] = w_places[i];\n"
    )
    return text, before, 4 * len(places)


def _columns(p: Product, tile: Tile) -> Loader:
    layout = p.c.a_layout
    chunks = tile.bm // p.per_load
    count = tile.bk * chunks
    full = p.m % tile.bm == 0
    setup = (
        f"const int am = {'m0' + _T % chunks * p.per_load};\nint ao; {{ const int m = am; ao = {_rows_of(p, 'm')}; }}\n"
    )
    ok = ([] if full else [f"am < {p.m}"]) + ([] if p.k % tile.bk == 0 else [f"k < {p.k}"])
    to = _chunk(chunks)
    place = f"A + ao + {_K * layout.channel}"
    body = f"const int k = {_KB * tile.bk + _X / chunks}; "
    if ok:
        body += f"const bool ok = {' && '.join(ok)}; " + _copy(to, f"(ok ? {place} : A)", "(ok ? 16u : 0u)")
    else:
        body += _copy(to, place, "16")
    return Loader(setup=setup, begin=each(count, tile.threads, body))


def _gather(kind: str, chunk: int, name: str, value: str) -> str:
    """Statements: `chunk` elements, the e-th by the expression `value`, into the register vector `name[i]`."""
    if kind == "float":
        pack = f"{name}[i] = make_uint4({', '.join(f'__float_as_uint(v[{e}])' for e in range(4))});"
    else:
        words = ", ".join(f"(u32)v[{2 * j}] | (u32)v[{2 * j + 1}] << 16" for j in range(4))
        pack = f"{name}[i] = make_uint4({words});"
    return f'{kind} v[{chunk}]; _Pragma("unroll") for (int e = 0; e < {chunk}; ++e) {{ {value} }} {pack}'


def _words(name: str) -> str:
    """`w_read8`, by a name of its own for each operand."""
    return f"""// 8 elements of 16 bits at any address, zeros from the n-th on; `more`: there is an element behind them
W_FN uint4 w_read8_{name}(const u16* p, int n, bool more) {{
  const bool half = ((size_t)p & 2) != 0;
  if (n >= 8 && (more || !half)) {{
    const u32* const q = (const u32*)((size_t)p & ~(size_t)3);
    const u32 a = q[0], b = q[1], c = q[2], d = q[3];
    if (!half) return make_uint4(a, b, c, d);
    const u32 e = q[4];
    return make_uint4(a >> 16 | b << 16, b >> 16 | c << 16, c >> 16 | d << 16, d >> 16 | e << 16);
  }}
  u32 v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = i < n ? p[i] : 0;
  return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}}
"""


def _size(p: Product, of: Source) -> int:
    """Elements of an input of the problem."""
    graph = cast("Graph", p.c.graph)
    return graph.nodes[graph.inputs[of.index]].type.size


def _in_words(p: Product, of: Source) -> bool:
    """Whether an operand is read by words of two elements."""
    return p.dtype.itemsize == 2 and of.kind == "input"


def _runs(p: Product, tile: Tile, rows: int, name: str, setup: str, place: str, valid: str, size: int) -> Loader:
    """Rows whose elements are neighbours along the sum at odd addresses: words of two elements, shifted.

    `place`: where the row of `x / CHUNKS` begins; `valid`: whether there is one; `size`: elements of the operand.
    """
    chunks = tile.bk // p.per_load
    count = rows * chunks
    to = _chunk(chunks)
    operand, register = ("A", "ra") if name == "a" else ("W", "rw")
    body = (
        f"const int at = {place} + k; {register}[i] = {valid}"
        f" ? w_read8_{name}({operand} + at, {p.k} - k, at + 8 < {size}) : make_uint4(0, 0, 0, 0);"
    )
    head = f"const int k = {_KB * tile.bk + _T % chunks * p.per_load};"
    return Loader(
        globals=_words(name),
        setup=setup + f"uint4 {register}[{-(-count // tile.threads)}];\n",
        begin=head + each(count, tile.threads, body),
        end=each(count, tile.threads, f"w_store16({to}, {register}[i]);"),
    )


def _across(lines: int, bk: int, threads: int, name: str, place: str, inside: str, first: str) -> Loader:
    """f32 whose neighbours are `lines` of the tile: four of them at four elements of the sum, turned in registers.

    `place` and `inside` are C text of the address and existence of four lines from `at` on at element `k`; the tile's
    begin at `first`. Threads take two neighbouring pieces of a line and four of the sum: reads fill sectors, and writes
    different banks.
    """
    chunks = bk // 4
    count = lines // 4 * chunks
    rounds = -(-count // threads)
    where = f"const int l4 = (x & 1) + x / {2 * chunks} * 2, k4 = {_X / 2 % chunks};"
    read = (
        f'{where} const int at = {first} + l4 * 4; _Pragma("unroll") for (int e = 0; e < 4; ++e)'
        f" {{ const int k = kb * {bk} + k4 * 4 + e; w_read_if({name}[i][e], {place}, {inside}); }}"
    )
    turned = (
        f"w_store16(to + {chunk_at(Int('l4') * 4 + j, 'k4', chunks)}, make_uint4("
        + ", ".join(f"{name}[i][{e}].{f}" for e in range(4))
        + "));"
        for j, f in enumerate("xyzw")
    )
    return Loader(
        setup=f"uint4 {name}[{rounds}][4];\n",
        begin=each(count, threads, read),
        end=each(count, threads, f"{where} {' '.join(turned)}"),
    )


def _lines(count: int, tile: Tile, name: str, place: str, step: int, inside: str, first: str) -> Loader:
    """The same for CUDA cores, which take lines as they lie: for each element of the sum, `count` of them side by side.

    `place` and `inside` are C text of the address and existence of four lines from `at` on at element 0 of the sum;
    `step` leads to the next element. The address of a thread's first piece is kept, and others lie at known distances.
    """
    chunks = count // 4
    pieces = tile.bk * chunks
    operand = "A" if name == "a" else "W"
    ok = "" if not inside else f"const bool ok = {inside}; "
    assert tile.threads % chunks == 0, "a thread's pieces lie in the same lines"
    setup = (
        f"const int {name}_at = {first} + t % {chunks} * 4;\n"
        f"const float* {name}_first; {{ const int at = {name}_at; {name}_first = {place} + {_T / chunks * step}; }}\n"
    )
    if ok:
        ok = f"const int at = {name}_at, k = kb * {tile.bk} + x / {chunks}; (void)at; (void)k; {ok}"
    head = f"const float* const from = {name}_first + kb * {tile.bk * step};"
    body = ok + _piece(f"from + i * {tile.threads // chunks * step}", operand, bool(ok))
    return Loader(setup=setup, begin=head + each(pieces, tile.threads, body))


def _piece(place: str, operand: str, masked: bool) -> str:
    """Statement: the copy of piece `x` of a tile in the order of memory; zeros where it is not `ok`."""
    if masked:
        return _copy("to + x * 16", f"(ok ? {place} : {operand})", "(ok ? 16u : 0u)")
    return _copy("to + x * 16", place, "16")


def _inside(at: str, lines: int, tile_lines: int, p: Product, tile: Tile) -> str:
    """C text that a piece exists; "" where all do."""
    tests = [f"{at} < {lines}"] if lines % tile_lines else []
    return " && ".join([*tests, f"k < {p.k}"] if p.k % tile.bk else tests)


def _elements(p: Product, tile: Tile) -> Loader:
    c = p.c
    if p.a_lines:
        start = str("A" + _rows_of(p, "at"))
        return _lines(tile.bm, tile, "a", start, c.a_layout.channel, _inside("at", p.m, tile.bm, p, tile), "m0")
    if p.a_across:
        place = str("A" + _rows_of(p, "at") + _K * c.a_layout.channel)
        return _across(tile.bm, tile.bk, tile.threads, "ra", place, f"at < {p.m} && k < {p.k}", "m0")
    if c.pack is None and c.kernel == (1, 1) and c.a_layout.channel == 1 and _in_words(p, c.a):
        chunks = tile.bk // p.per_load
        state = f"const int m = m0 + {_X / chunks}; ao[i] = m < {p.m} ? {_rows_of(p, 'm')} : -1;"
        rounds = -(-tile.bm * chunks // tile.threads)
        setup = f"int ao[{rounds}];\n" + each(tile.bm * chunks, tile.threads, state)
        return _runs(p, tile, tile.bm, "a", setup, "ao[i]", "ao[i] >= 0", _size(p, c.a))
    kind = storage(p.dtype)
    chunks = tile.bk // p.per_load
    count = tile.bm * chunks
    rounds = -(-count // tile.threads)
    to = f"to + {chunk_at(_X % tile.bm, _X / tile.bm, chunks)}"
    end = each(count, tile.threads, f"w_store16({to}, ra[i]);")
    decl = f"uint4 ra[{rounds}];\n"
    step_y, step_x = c.dilations
    text, before, size = "", "", 0
    image, py, px = _base(p) + Int("img") * c.a_layout.dims[0], Int("py"), Int("px")
    if c.pack is None:
        state, fields = f"ao[i] = m < {p.m} ? {_rows_of(p, 'm')} : -1;", "ao"
        dk = [c.a_kernel[0], c.a_kernel[1], c.a_layout.channel]
        test, place = "ao[i] >= 0", "ao[i] + d.x"
    elif p.borders is not None:
        top, left = p.borders
        state = (
            f"{_pixel(p)} ay[i] = m < {p.m} ? {py * c.strides[0] - top.lo} : -(1 << 20);"
            f" ax[i] = {px * c.strides[1] - left.lo};"
            f" ao[i] = {summed(image, Int('ay[i]') * c.pack.row_step, Int('ax[i]') * c.pack.col_step)};"
        )
        fields = "ao ay ax"
        dk = [step_y * c.pack.row_step, step_x * c.pack.col_step, c.a_layout.channel]
        test = f"(u32)(ay[i] + (d.y >> 16)) < {top.size}u && (u32)(ax[i] + (d.y & 65535)) < {left.size}u"
        place = "ao[i] + d.x"
    else:
        text, before, size = tables(p, tile.threads)
        state = (
            f"{_pixel(p)} ao[i] = m < {p.m} ? {image} : -1;"
            f" ay[i] = m < {p.m} ? {py * c.strides[0]} : 0; ax[i] = {px * c.strides[1] + len(c.pack.rows)};"
        )
        fields = "ao ay ax"
        dk = [0, 0, c.a_layout.channel]
        test = "ao[i] >= 0 && (w_place[ay[i] + (d.y >> 16)] | w_place[ax[i] + (d.y & 65535)]) >= 0"
        place = "ao[i] + w_place[ay[i] + (d.y >> 16)] + w_place[ax[i] + (d.y & 65535)] + d.x"
    fetch, more = _k_places(p, dk)
    setup = (
        "int "
        + ", ".join(f"{f}[{rounds}]" for f in fields.split())
        + ";\n"
        + each(count, tile.threads, f"const int m = m0 + {_X % tile.bm}; {state}")
        + decl
    )
    tail = "" if p.k % tile.bk == 0 else f"if (k < {p.k}) "
    value = f"const int k = k0 + e; v[e] = 0; {tail}{{ {fetch} if ({test}) v[e] = A[{place}]; }}"
    body = f"const int k0 = {_KB * tile.bk + _X / tile.bm * p.per_load}; " + _gather(kind, p.per_load, "ra", value)
    return Loader(text + more, before, setup, each(count, tile.threads, body), end, size)


def _k_places(p: Product, steps: list[int]) -> tuple[str, str]:
    """Text that declares `int2 d`: offset of element k of the sum, and its tap as dy << 16 | dx; text of its table."""
    c = p.c
    kw = c.kernel[1]
    if p.k <= _TABLE_K and p.k > 1:
        pairs = []
        for k in range(p.k):
            ch, tap = k % c.ic, k // c.ic
            ky, kx = tap // kw, tap % kw
            place = ky * steps[0] + kx * steps[1] + ch * steps[2]
            pairs.append(f"{place},{(ky * c.dilations[0]) << 16 | (kx * c.dilations[1])}")
        table = f"__device__ __constant__ const int w_sum[] = {{{','.join(pairs)}}};\n"
        return "const int2 d = make_int2(w_sum[2 * k], w_sum[2 * k + 1]);", table
    of_tap, y, x = Int("tap"), Int("ky"), Int("kx")
    text = (
        f"const int tap = {_K / c.ic}, ky = {of_tap / kw}, kx = {of_tap % kw};"
        f" const int2 d = make_int2({summed(y * steps[0], x * steps[1], _K % c.ic * steps[2])},"
        f" ({y * c.dilations[0]}) << 16 | ({x * c.dilations[1]}));"
    )
    return text, ""


def load_w(p: Product, tile: Tile) -> Loader:
    """The loader of the right operand; `W` points at its first element (`packed`: at the block's tiles)."""
    c = p.c
    layout = c.w_layout
    chunks = tile.bk // p.per_load
    if p.w_load == "packed":
        count = tile.bn * chunks
        step = tile.bn * tile.bk
        begin = f"const char* const from = (const char*)(W + {_KB * step});" + each(
            count, tile.threads, _copy("to + x * 16", "from + x * 16", "16")
        )
        return Loader(begin=begin)
    offset = summed(layout.offset, _G * layout.group, offset_of(layout, c.dims, p.batch, "b"))
    base = "W" + offset
    full_n = p.n % tile.bn == 0
    if p.w_load == "nk":
        count = tile.bn * chunks
        to = _chunk(chunks)
        bytes_ = _tail(p, tile)
        head = f"const int k = {_KB * tile.bk + _T % chunks * p.per_load};"
        if bytes_ != "16":
            head += f" const u32 n16 = {bytes_};"
        place = str(base + _N * layout.channel + "k")
        body = f"const int n = n0 + {_X / chunks}; "
        if full_n and bytes_ == "16":
            body += _copy(to, place, "16")
        else:
            ok = ([] if full_n else [f"n < {p.n}"]) + ([] if bytes_ == "16" else ["n16 != 0"])
            size = "16u" if bytes_ == "16" else "n16"
            body += f"const bool ok = {' && '.join(ok)}; " + _copy(to, f"(ok ? {place} : W)", f"(ok ? {size} : 0u)")
        return Loader(begin=head + each(count, tile.threads, body))
    if p.w_load == "kn":
        chunks = tile.bn // p.per_load
        count = tile.bk * chunks
        to = _chunk(chunks)
        place = str(base + "n" + _K * c.w_k)
        body = f"const int k = {_KB * tile.bk + _X / chunks}, n = {'n0' + _T % chunks * p.per_load}; "
        ok = ([] if full_n else [f"n < {p.n}"]) + ([] if p.k % tile.bk == 0 else [f"k < {p.k}"])
        if ok:
            body += f"const bool ok = {' && '.join(ok)}; " + _copy(to, f"(ok ? {place} : W)", "(ok ? 16u : 0u)")
        else:
            body += _copy(to, place, "16")
        return Loader(begin=each(count, tile.threads, body))
    if c.kernel == (1, 1) and c.w_k == 1 and _in_words(p, c.w):
        row = "n0" + _X / chunks
        place = str(offset + row * layout.channel)
        return _runs(p, tile, tile.bn, "w", "", place, f"{row} < {p.n}", _size(p, c.w))
    if p.w_lines:
        return _lines(tile.bn, tile, "w", f"{base + 'at'}", c.w_k, _inside("at", p.n, tile.bn, p, tile), "n0")
    if p.w_across:
        place = str(base + "at" + _K * c.w_k)
        return _across(tile.bn, tile.bk, tile.threads, "rw", place, f"at < {p.n} && k < {p.k}", "n0")
    kind = storage(p.dtype)
    count = tile.bn * chunks
    rounds = -(-count // tile.threads)
    to = f"to + {chunk_at(_X % tile.bn, _X / tile.bn, chunks)}"
    at = offset + _N * layout.channel + _K * c.w_k
    value = f"const int k = k0 + e; v[e] = n < {p.n} && k < {p.k} ? W[{at}] : 0;"
    body = f"const int k0 = {_KB * tile.bk + _X / tile.bn * p.per_load}, n = n0 + {_X % tile.bn}; " + _gather(
        kind, p.per_load, "rw", value
    )
    return Loader(
        setup=f"uint4 rw[{rounds}];\n",
        begin=each(count, tile.threads, body),
        end=each(count, tile.threads, f"w_store16({to}, rw[i]);"),
    )
