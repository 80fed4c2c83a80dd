"""Register-tiled contraction: a tile of pixels by vectors of output channels stays in registers over the whole sum.

One tile function per shape of tile. Its sum runs over kh, kw and the input channels; each step broadcasts one input
value per pixel and multiplies it with vectors of packed weights. Padding, index tables and the layout of the input are
settled when a band of input rows is packed into the thread's scratch memory; without any, the input is read directly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from weft.generate.contraction.match import Contraction, Pack, StridedLayout
from weft.generate.cpp.templates.text import Leaf, cost, epilogue, indices, leaves, pointer, prelude, statics, team
from weft.generate.parameters import Parameters
from weft.kernels.source import KernelSource, Schedule

_INLINE_COST = 6
"""Epilogues up to this many instructions are unrolled over the registers; longer ones loop over a buffer."""


FLAGS = ("-fno-tree-vectorize",)
"""All vectors are explicit: what gcc would add is only time to compile."""


@dataclass(frozen=True, slots=True)
class DirectConfig(Parameters):
    """Parameters of the direct template; counts unless said otherwise."""

    lanes: int
    threads: int
    th: int
    """Rows of a tile."""
    tw: int
    """Columns of a tile."""
    v: int
    """Vectors of output channels of a tile."""
    bh: int
    """Rows of tiles per task."""
    bw: int
    """Columns of tiles per task."""
    og: int
    """Blocks of output channels per task."""
    order: str
    """`oc`: blocks of channels outside, tiles inside; `px`: the other way round."""
    unroll: int = 4
    prefetch: int = 0
    """Distance of the prefetch of weights in bytes; 0: none."""
    dot: bool = False
    """Lanes run along the sum instead of the output channels, and `v` counts single channels: for few of them."""

    @property
    def unit(self) -> int:
        """Output channels that one step of `v` stands for."""
        return 1 if self.dot else self.lanes

    def schedule(self) -> Schedule:
        """As a schedule of the cpp generator."""
        return self.named("cpp", algorithm="direct", template="contraction")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tile finds its input: steps in floats."""

    row: int
    col: int
    kh: int
    kw: int
    k: int
    rows: int = 0
    """Rows and columns of the scratch image; 0 when the input is read directly."""
    cols: int = 0


def _layout(c: Contraction, s: DirectConfig) -> Layout:
    if c.pack is None:
        return Layout(c.a_layout.dims[-2], c.a_layout.dims[-1], c.a_kernel[0], c.a_kernel[1], c.a_layout.channel)
    sh, sw = c.strides
    dh, dw = c.dilations
    rows = (s.bh * s.th - 1) * sh + (c.kernel[0] - 1) * dh + 1
    cols = len(c.pack.cols)
    pitch = cols * c.ic
    return Layout(sh * pitch, sw * c.ic, dh * pitch, dw * c.ic, 1, rows, cols)


def _segments(c: Contraction, lay: Layout) -> tuple[int, int, int]:
    """Loops of the sum: kh, kw and a contiguous stretch, joined where the input has one step through them."""
    kh, kw, length = c.kernel[0], c.kernel[1], c.ic
    if kw == 1 or lay.kw == lay.k * c.ic:
        kw, length = 1, c.kernel[1] * c.ic
    if kw == 1 and (kh == 1 or lay.kh == lay.k * length):
        kh, length = 1, kh * length
    return kh, kw, length


def _weights_per_unit(c: Contraction, s: DirectConfig, lay: Layout) -> int:
    """Packed floats behind one step of `v`."""
    kh, kw, length = _segments(c, lay)
    return kh * kw * (-(-length // s.lanes) if s.dot else length) * s.lanes


def _dot_tile(c: Contraction, s: DirectConfig, lay: Layout, th: int, tw: int, v: int) -> str:
    """Lanes along the sum: vectors of input by vectors of weights, added up across the lanes at the end."""
    pixels = [(i, j) for i in range(th) for j in range(tw)]
    kh, kw, length = _segments(c, lay)
    lines = ["vf " + ", ".join(f"c{r}_{u} = {{}}" for r in range(len(pixels)) for u in range(v)) + ";"]
    if kh > 1:
        lines.append(f"for (i64 kh = 0; kh < {kh}; ++kh, a += {lay.kh - (kw * lay.kw if kw > 1 else 0)}) {{")
    if kw > 1:
        lines.append(f"for (i64 kw = 0; kw < {kw}; ++kw, a += {lay.kw}) {{")
    lines.append("const float* b_ = a;")

    def step(count: int) -> None:
        load = "ld" if count == s.lanes else f"ldn<{count}>"
        lines.append('asm("" : "+r"(b_));')  # else gcc carries the next pixel's vectors over in registers that it lacks
        lines.extend(f"const vf w{u} = ld(w + {u * s.lanes});" for u in range(v))
        for r, (i, j) in enumerate(pixels):
            terms = " ".join(f"c{r}_{u} += b * w{u};" for u in range(v))
            lines.append(f"{{ const vf b = {load}(b_ + {i * lay.row + j * lay.col}); {terms} }}")
        lines.append(f"w += {v * s.lanes};")

    whole, rest = divmod(length, s.lanes)
    if whole:
        lines.append(f"for (i64 k = 0; k < {whole}; ++k, b_ += {s.lanes}) {{")
        step(s.lanes)
        lines.append("}")
    if rest:
        lines.append("{")
        step(rest)
        lines.append("}")
    lines.extend("}" for n in (kh, kw) if n > 1)
    lines.append(f"alignas(64) float y[{len(pixels) * s.lanes}];")
    lines.extend(f"y[{r * s.lanes + u}] = total(c{r}_{u});" for r in range(len(pixels)) for u in range(v))
    lines.extend(finish(c, s.lanes, th, tw, 1, v, filled=True))
    return _function(c, tile_name(th, tw, v, 0), lines)


def _function(c: Contraction, name: str, lines: list[str]) -> str:
    params = "".join(f", const float* __restrict {leaf.name}" for leaf in leaves(c))
    params += "".join(f", float* __restrict o{k}" for k in range(len(c.outputs)))
    head = f"static __attribute__((noinline)) void {name}"
    return f"{head}(const float* __restrict a, const float* __restrict w{params}) {{\n" + "\n".join(lines) + "\n}\n"


def tile(c: Contraction, s: DirectConfig, lay: Layout, th: int, tw: int, v: int, tail: int) -> str:
    """One tile function; `tail` > 0: the last vector has that many channels."""
    if s.dot:
        return _dot_tile(c, s, lay, th, tw, v)
    taps = c.kernel[0] * c.kernel[1] * c.ic
    sets = max(1, min(-(-8 // (th * tw * v)), 8, taps))
    pixels = [(i, j) for i in range(th) for j in range(tw)]
    kh, kw, length = _segments(c, lay)
    lines: list[str] = []
    names = [f"c{q}_{r}_{u}" for q in range(sets) for r in range(len(pixels)) for u in range(v)]
    lines.append("vf " + ", ".join(f"{n} = {{}}" for n in names) + ";")
    if kh > 1:
        lines.append(f"for (i64 kh = 0; kh < {kh}; ++kh, a += {lay.kh - (kw * lay.kw if kw > 1 else 0)}) {{")
    if kw > 1:
        lines.append(f"for (i64 kw = 0; kw < {kw}; ++kw, a += {lay.kw}) {{")

    # Pixels that are only a few steps of the sum apart read the same values at different steps; an opaque pointer keeps
    # the compiler from holding on to them in registers that it lacks (three times slower).
    near = any(
        0 < step < 2 * max(s.unroll, sets) * lay.k for step in (lay.col if tw > 1 else 0, lay.row if th > 1 else 0)
    )

    def step(k: int, q: int) -> None:
        lines.append("{")
        if near:
            lines.append('asm("" : "+r"(b_));')
        if s.prefetch:
            ahead = [k * v * s.lanes + u * s.lanes + s.prefetch // 4 for u in range(v)]
            lines.extend(f"__builtin_prefetch(w + {at});" for at in ahead)
        lines.extend(f"const vf w{u} = ld(w + {k * v * s.lanes + u * s.lanes});" for u in range(v))
        for r, (i, j) in enumerate(pixels):
            lines.append(f"{{ const vf b = splat(b_[{i * lay.row + j * lay.col + k * lay.k}]);")
            lines.append(" ".join(f"c{q}_{r}_{u} += b * w{u};" for u in range(v)) + " }")
        lines.append("}")

    unroll = max(s.unroll, sets)
    whole = length // unroll if length > 2 * unroll else 0
    lines.append("const float* b_ = a;")
    if whole:
        lines.append(f"for (i64 k = 0; k < {whole}; ++k, b_ += {unroll * lay.k}, w += {unroll * v * s.lanes}) {{")
        for k in range(unroll):
            step(k, k % sets)
        lines.append("}")
    rest = length - whole * unroll
    for k in range(rest):
        step(k, k % sets)
    if rest:
        lines.append(f"w += {rest * v * s.lanes};")
    lines.extend("}" for n in (kh, kw) if n > 1)
    for q in range(1, sets):
        lines.extend(f"c0_{r}_{u} += c{q}_{r}_{u};" for r in range(len(pixels)) for u in range(v))
    lines.extend(finish(c, s.lanes, th, tw, v, tail))
    return _function(c, tile_name(th, tw, v, tail), lines)


def tile_name(th: int, tw: int, v: int, tail: int) -> str:
    """Name of a tile function."""
    return f"tile_{th}_{tw}_{v}" + (f"_{tail}" if tail else "")


def _at(layout: StridedLayout, i: str, j: str, lane: str) -> str:
    """Offset of a tile's element from the tile's first."""
    terms = [
        f"{x} * {n}" for x, n in ((i, layout.dims[-2]), (j, layout.dims[-1]), (lane, layout.channel)) if n and x != "0"
    ]
    return " + ".join(terms) or "0"


def finish_vector(
    c: Contraction, lanes: int, acc: str, i: str, j: str, lane: str, count: int, prefix: str, scatter: str = ""
) -> list[str]:
    """Epilogue and stores of one vector of `count` channels (all lanes, or the tail)."""

    def load(leaf: Leaf) -> str:
        layout, name = cast("StridedLayout", leaf.step.layout), leaf.name
        at = _at(layout, i, j, lane)
        if layout.channel == 0:
            return f"splat({name}[{at}])"
        if layout.channel == 1:
            return f"ld({name} + {at})" if count == lanes else f"ldn<{count}>({name} + {at})"
        return f"gather<{layout.channel}, {count}>({name} + {at})"

    lines, results = epilogue(c, acc, load, prefix)
    for k, ((_, layout), value) in enumerate(zip(c.outputs, results, strict=True)):
        if layout.channel == 1 or (c.oc == 1):
            at = f"o{k} + {_at(layout, i, j, lane)}"
            lines.append(f"st({at}, {value});" if count == lanes else f"stn<{count}>({at}, {value});")
        else:
            lines.append(f"st(y{k} + {scatter}, {value});")
    return lines


def finish(c: Contraction, lanes: int, th: int, tw: int, v: int, tail: int, *, filled: bool = False) -> list[str]:
    """Epilogue and stores of a tile whose sums are `c0_<pixel>_<vector>`, or in the buffer `y` already.

    `tail`: channels of the last vector; 0: all.
    """
    pixels = [(i, j) for i in range(th) for j in range(tw)]
    spread = [k for k, (_, layout) in enumerate(c.outputs) if layout.channel != 1 and c.oc != 1]
    counts = [lanes] * v
    if tail:
        counts[-1] = tail
    lines: list[str] = []
    if cost(c) <= _INLINE_COST and not spread and not filled:
        for u in range(v):
            for r, (i, j) in enumerate(pixels):
                body = finish_vector(c, lanes, f"c0_{r}_{u}", str(i), str(j), str(u * lanes), counts[u], "e")
                lines.append("{ " + " ".join(body) + " }")
        return lines
    if not filled:
        lines.append(f"alignas(64) float y[{len(pixels) * v * lanes}];")
        lines.extend(f"st(y + {(r * v + u) * lanes}, c0_{r}_{u});" for r in range(len(pixels)) for u in range(v))
    lines.extend(f"alignas(64) float y{k}[{len(pixels) * v * lanes}];" for k in spread)
    row = f"(i * {tw} + j) * {v * lanes}"
    loop = (f"for (i64 i = 0; i < {th}; ++i)" if th > 1 else "const i64 i = 0;") + f" for (i64 j = 0; j < {tw}; ++j) {{"
    lines.append(loop)
    full = v - 1 if tail else v
    if full:
        lines.append(f"for (i64 u = 0; u < {full * lanes}; u += {lanes}) {{ const vf x = ld(y + {row} + u);")
        lines.extend(finish_vector(c, lanes, "x", "i", "j", "u", lanes, "e", f"{row} + u"))
        lines.append("}")
    if tail:
        last = str((v - 1) * lanes)
        lines.append(f"{{ const vf x = ld(y + {row} + {last});")
        lines.extend(finish_vector(c, lanes, "x", "i", "j", last, tail, "e", f"{row} + {last}"))
        lines.append("}")
    lines.append("}")
    for k in spread:
        layout = c.outputs[k][1]
        total = (v - 1) * lanes + (tail or lanes)
        lines.append(f"for (i64 q = 0; q < {total}; ++q) for (i64 i = 0; i < {th}; ++i) for (i64 j = 0; j < {tw}; ++j)")
        lines.append(f"  o{k}[{_at(layout, 'i', 'j', 'q')}] = y{k}[{row} + q];")
    return lines


GATHER = """
template <int S, int N> INLINE vf gather(const float* p) { vf v = {}; for (int i = 0; i < N; ++i) v[i] = p[i * S]; return v; }
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class _Grid:
    """How pixels and channels are cut."""

    rows: int
    cols: int
    last_row: int
    last_col: int
    vectors: int
    blocks: int
    last_v: int
    tail: int

    @staticmethod
    def of(c: Contraction, s: DirectConfig) -> _Grid:
        rows, cols = -(-c.dims[-2] // s.th), -(-c.dims[-1] // s.tw)
        vectors = -(-c.oc // s.unit)
        blocks = -(-vectors // s.v)
        return _Grid(
            rows=rows,
            cols=cols,
            last_row=c.dims[-2] - (rows - 1) * s.th,
            last_col=c.dims[-1] - (cols - 1) * s.tw,
            vectors=vectors,
            blocks=blocks,
            last_v=vectors - (blocks - 1) * s.v,
            tail=c.oc % s.unit,
        )

    def variants(self, s: DirectConfig) -> list[tuple[int, int, int, int]]:
        """(rows, columns, vectors, tail) of every tile function that is called."""
        ths = ([s.th] if self.rows > 1 else []) + [self.last_row]
        tws = ([s.tw] if self.cols > 1 else []) + [self.last_col]
        vs = ([(s.v, 0)] if self.blocks > 1 else []) + [(self.last_v, self.tail)]
        return list(dict.fromkeys((h, w, v, t) for h in ths for w in tws for v, t in vs))


def emit(c: Contraction, schedule: Schedule, entry: str) -> KernelSource:
    """The kernel `entry` of one schedule made by `DirectConfig.schedule`."""
    s = DirectConfig.of(schedule)
    lay, grid = _layout(c, s), _Grid.of(c, s)
    constants, names = statics(c)
    taps = c.kernel[0] * c.kernel[1] * c.ic
    text = prelude(s.lanes) + GATHER + (total(s.lanes) if s.dot else "") + constants
    for th, tw, v, tail in grid.variants(s):
        text += tile(c, s, lay, th, tw, v, tail)
    image = lay.rows * lay.cols * c.ic
    image = -(-image // 64) * 64
    panel = 0 if c.w_const else taps * s.v * s.lanes
    scratch = image + -(-panel // 64) * 64
    if c.pack is not None:
        text += _pack_image(c, c.pack, lay)
    if not c.w_const:
        text += _pack_panel(c, s)
    text += _entry(c, s, lay, grid, entry, names, image, scratch)
    packed: tuple[int, ...] = ()
    replaces: tuple[int, ...] = ()
    if c.w_const:
        text += _pack_dot(c, s, lay, entry, names) if s.dot else _pack_weights(c, s, grid, entry, names)
        packed = (c.groups * grid.vectors * _weights_per_unit(c, s, lay) * 4,)
        if c.w.kind == "input":
            read = {leaf.step.source for leaf in leaves(c)} | {c.a}
            replaces = () if c.w in read else (c.w.index,)
    return KernelSource(
        schedule=schedule,
        text=text,
        entry=entry,
        flags=FLAGS,
        workspace_bytes=scratch * 4 * s.threads,
        packed_bytes=packed,
        replaces_weights=replaces,
    )


def _runs(table: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, source, length) of runs with source step 1; source -1 is a run of zeros."""
    out: list[tuple[int, int, int]] = []
    for i, x in enumerate(table):
        if out:
            first, source, length = out[-1]
            if (x == source == -1) or (source >= 0 and x == source + length):
                out[-1] = (first, source, length + 1)
                continue
        out.append((i, x, 1))
    return out


def _pack_image(c: Contraction, p: Pack, lay: Layout) -> str:
    """`pack_image(x, d, row, rows)`: rows of the padded image, channels fastest, into d."""
    ic, runs = c.ic, _runs(p.cols)
    text = indices("row_table", p.rows)
    copy = """
INLINE void copy_run(const float* __restrict x, float* __restrict d, i64 n) {
"""
    if p.channel_step == 1 and p.col_step == ic:
        copy += f"  __builtin_memcpy(d, x, n * {ic * 4});\n"
    elif p.channel_step == 1:
        copy += f"  for (i64 i = 0; i < n; ++i) __builtin_memcpy(d + i * {ic}, x + i * {p.col_step}, {ic * 4});\n"
    elif ic <= 8:
        body = " ".join(f"d[i * {ic} + {k}] = x[i * {p.col_step} + {k * p.channel_step}];" for k in range(ic))
        copy += f"  for (i64 i = 0; i < n; ++i) {{ {body} }}\n"
    else:
        copy += (
            f"  for (i64 i0 = 0; i0 < n; i0 += 16) {{ const i64 e = i0 + 16 < n ? i0 + 16 : n;\n"
            f"    for (i64 k = 0; k < {ic}; ++k) for (i64 i = i0; i < e; ++i)"
            f" d[i * {ic} + k] = x[i * {p.col_step} + k * {p.channel_step}]; }}\n"
        )
    text += copy + "}\n"
    fill: list[str] = []
    if len(runs) <= 8:
        for first, source, length in runs:
            if source < 0:
                fill.append(f"__builtin_memset(d + {first * ic}, 0, {length * ic * 4});")
            else:
                fill.append(f"copy_run(s + {source * p.col_step}, d + {first * ic}, {length});")
    else:
        text += indices("col_table", p.cols)
        fill.append(f"for (i64 i = 0; i < {len(p.cols)}; ++i) {{ const i64 q = col_table[i];")
        fill.append(f"if (q < 0) __builtin_memset(d + i * {ic}, 0, {ic * 4});")
        fill.append(f"else copy_run(s + q * {p.col_step}, d + i * {ic}, 1); }}")
    return text + (
        "static __attribute__((noinline)) void pack_image(const float* __restrict x, float* __restrict d,"
        " i64 row, i64 rows) {\n"
        f"for (i64 r = row; r < row + rows; ++r, d += {lay.cols * ic}) {{\n"
        f"const i64 h = r < {len(p.rows)} ? row_table[r] : -1;\n"
        f"if (h < 0) {{ __builtin_memset(d, 0, {lay.cols * ic * 4}); continue; }}\n"
        f"const float* const s = x + h * {p.row_step};\n" + "\n".join(fill) + "\n}\n}\n"
    )


def _pack_panel(c: Contraction, s: DirectConfig) -> str:
    """`pack_panel(b, d, width, count)`: count columns of B as rows of `width`, zeros behind them."""
    n, k = c.w_layout.channel, c.w_k
    if n == 1:
        inner = (
            f"for (i64 k = 0; k < {c.ic}; ++k) {{ i64 j = 0;"
            f" for (; j + {s.lanes} <= count; j += {s.lanes}) st(d + k * width + j, ld(b + k * {k} + j));"
            f" for (; j < count; ++j) d[k * width + j] = b[k * {k} + j];"
            f" for (; j < width; ++j) d[k * width + j] = 0; }}"
        )
    else:
        inner = (
            "for (i64 k0 = 0; k0 < KK; k0 += 16) { const i64 e = k0 + 16 < KK ? k0 + 16 : KK;"
            f" for (i64 j = 0; j < count; ++j) for (i64 k = k0; k < e; ++k) d[k * width + j] = b[k * {k} + j * {n}];"
            " for (i64 j = count; j < width; ++j) for (i64 k = k0; k < e; ++k) d[k * width + j] = 0; }"
        ).replace("KK", str(c.ic))
    return (
        "static __attribute__((noinline)) void pack_panel(const float* __restrict b, float* __restrict d,"
        f" i64 width, i64 count) {{\n{inner}\n}}\n"
    )


def _pack_weights(c: Contraction, s: DirectConfig, grid: _Grid, entry: str, names: Mapping[int, str]) -> str:
    kh, kw = c.kernel
    source = pointer(c.w, names)
    return f"""
extern "C" void {entry}_pack(const void* const* inputs, void* const* packed) {{
const float* const w = {source} + {c.w_layout.offset};
float* d = (float*)packed[0];
for (i64 g = 0; g < {c.groups}; ++g)
for (i64 o0 = 0; o0 < {grid.vectors * s.lanes}; o0 += {s.v * s.lanes}) {{
const i64 width = o0 + {s.v * s.lanes} <= {grid.vectors * s.lanes} ? {s.v * s.lanes} : {grid.vectors * s.lanes} - o0;
for (i64 h = 0; h < {kh}; ++h) for (i64 x = 0; x < {kw}; ++x) for (i64 k = 0; k < {c.ic}; ++k)
for (i64 o = o0; o < o0 + width; ++o)
*d++ = o < {c.oc} ? w[g * {c.w_layout.group} + o * {c.w_layout.channel} + h * {c.w_kernel[0]} + x * {c.w_kernel[1]} + k * {c.w_k}] : 0;
}}
}}
"""  # noqa: E501


def _pack_dot(c: Contraction, s: DirectConfig, lay: Layout, entry: str, names: Mapping[int, str]) -> str:
    kh, kw, length = _segments(c, lay)
    steps = -(-length // s.lanes)
    source = pointer(c.w, names)
    return f"""
extern "C" void {entry}_pack(const void* const* inputs, void* const* packed) {{
const float* const w = {source} + {c.w_layout.offset};
float* d = (float*)packed[0];
for (i64 g = 0; g < {c.groups}; ++g)
for (i64 o0 = 0; o0 < {c.oc}; o0 += {s.v})
for (i64 segment = 0; segment < {kh * kw}; ++segment)
for (i64 k0 = 0; k0 < {steps * s.lanes}; k0 += {s.lanes})
for (i64 o = o0; o < o0 + {s.v} && o < {c.oc}; ++o)
for (i64 k = k0; k < k0 + {s.lanes}; ++k) {{
const i64 t = segment * {length} + k, i = t % {c.ic}, x = t / {c.ic} % {c.kernel[1]}, h = t / {c.ic * c.kernel[1]};
*d++ = k < {length} ? w[g * {c.w_layout.group} + o * {c.w_layout.channel} + h * {c.w_kernel[0]} + x * {c.w_kernel[1]} + i * {c.w_k}] : 0;
}}
}}
"""  # noqa: E501


def total(lanes: int) -> str:
    """The sum of a vector's lanes, by halves."""
    text, half = "INLINE float total(vf v) {\n", lanes // 2
    while half:
        mask = ",".join(str(i ^ half) for i in range(lanes))
        text += f"v += __builtin_shuffle(v, (w_i32v){{{mask}}});\n"
        half //= 2
    return text + "return v[0];\n}\n"


def _offset(layout: StridedLayout, count: int) -> str:
    """Offset of a task's batch indices and group."""
    terms = [f"d{i} * {layout.dims[i]}" for i in range(count) if layout.dims[i]]
    if layout.group:
        terms.append(f"g * {layout.group}")
    return " + ".join(terms) or "0"


def _entry(
    c: Contraction,
    s: DirectConfig,
    lay: Layout,
    grid: _Grid,
    entry: str,
    names: Mapping[int, str],
    image: int,
    scratch: int,
) -> str:
    batch = len(c.dims) - 2
    bands, slabs, packs = -(-grid.rows // s.bh), -(-grid.cols // s.bw), -(-grid.blocks // s.og)
    tasks = bands * slabs * packs * c.groups * math.prod(c.dims[:-2])
    threads = min(s.threads, tasks)
    lines: list[str] = []
    lines.append(f"const float* const x = {pointer(c.a, names)} + {c.a_layout.offset};")
    if c.w_const:
        lines.append("const float* const w = (const float*)packed[0];")
    else:
        lines.append(f"const float* const w = {pointer(c.w, names)} + {c.w_layout.offset};")
    for leaf in leaves(c):
        source, layout = leaf.step.source, cast("StridedLayout", leaf.step.layout)
        assert source is not None
        lines.append(f"const float* const {leaf.name} = {pointer(source, names)} + {layout.offset};")
    for k, (_, layout) in enumerate(c.outputs):
        lines.append(f"float* const o{k} = (float*)outputs[{k}] + {layout.offset};")
    if threads > 1:
        lines.append(f"#pragma omp parallel {team(threads)}")
    lines.append("{")
    if scratch:
        at = "omp_get_thread_num()" if threads > 1 else "0"
        lines.append(f"float* const image = (float*)workspace + (i64){at} * {scratch};")
    if threads > 1:
        lines.append("#pragma omp for schedule(dynamic, 1)")
    lines.append(f"for (i64 t = 0; t < {tasks}; ++t) {{ i64 q = t;")
    for name, n in [("og", packs), ("bc", slabs), ("br", bands), ("g", c.groups)]:
        lines.append(f"const i64 {name} = q % {n}; q /= {n};" if n > 1 else f"const i64 {name} = 0;")
    lines.extend(f"const i64 d{i} = q % {c.dims[i]}; q /= {c.dims[i]};" for i in reversed(range(batch)))

    def bounds(name: str, index: str, step: int, total: int) -> None:
        lines.append(f"const i64 {name}0 = {index} * {step};")
        lines.append(f"const i64 {name}1 = {name}0 + {step} < {total} ? {name}0 + {step} : {total};")

    bounds("r", "br", s.bh, grid.rows)
    bounds("s", "bc", s.bw, grid.cols)
    bounds("b", "og", s.og, grid.blocks)
    if c.pack is not None:
        sh, dh = c.strides[0], c.dilations[0]
        lines.append(f"const i64 e = r1 * {s.th} < {c.dims[-2]} ? r1 * {s.th} : {c.dims[-2]};")
        lines.append(
            f"pack_image(x + {_offset(c.a_layout, batch)}, image, r0 * {s.th * sh},"
            f" (e - 1 - r0 * {s.th}) * {sh} + {(c.kernel[0] - 1) * dh + 1});"
        )
        lines.append(f"const float* const a = image - r0 * {s.th * lay.row};")
    else:
        lines.append(f"const float* const a = x + {_offset(c.a_layout, batch)};")
    block, per = s.v * s.unit, _weights_per_unit(c, s, lay)
    oc_loop = "for (i64 b = b0; b < b1; ++b) {"
    px_loop = "for (i64 r = r0; r < r1; ++r) for (i64 s = s0; s < s1; ++s) {"
    if c.w_const:
        wb = f"const float* const wb = w + g * {grid.vectors * per} + b * {s.v * per};"
    else:
        last = grid.last_v * s.lanes
        left = c.oc - (grid.blocks - 1) * block
        width = f"b + 1 < {grid.blocks} ? {block} : {last}" if grid.blocks > 1 else str(last)
        count = f"b + 1 < {grid.blocks} ? {block} : {left}" if grid.blocks > 1 else str(left)
        wb = (
            f"float* const wb = image + {image};"
            f" pack_panel(w + {_offset(c.w_layout, batch)} + b * {block * c.w_layout.channel}, wb, {width}, {count});"
        )
    if s.order == "oc" or not c.w_const:
        lines += [oc_loop, wb, px_loop]
    else:
        lines += [px_loop, oc_loop, wb]
    args = [f"a + r * {s.th * lay.row} + s * {s.tw * lay.col}", "wb"]
    layouts = [(leaf.name, cast("StridedLayout", leaf.step.layout)) for leaf in leaves(c)]
    layouts += [(f"o{k}", w) for k, (_, w) in enumerate(c.outputs)]
    for name, layout in layouts:
        tile = [f"r * {s.th * layout.dims[-2]}"] * bool(layout.dims[-2]) + [f"s * {s.tw * layout.dims[-1]}"] * bool(
            layout.dims[-1]
        )
        tile += [f"b * {block * layout.channel}"] * bool(layout.channel)
        args.append(" + ".join([name, _offset(layout, batch), *tile]))
    call = "(" + ", ".join(args) + ");"

    def choose(first: int, rest: int, count: int, index: str) -> list[tuple[str, int]]:
        if count == 1:
            return [("", rest)]
        return [(f"{index} + 1 < {count}", first), ("", rest)] if first != rest else [("", first)]

    vs: list[tuple[str, tuple[int, int]]] = [("", (grid.last_v, grid.tail))]
    if grid.blocks > 1 and (grid.last_v, grid.tail) != (s.v, 0):
        vs.insert(0, (f"b + 1 < {grid.blocks}", (s.v, 0)))
    chain: list[str] = []
    for vc, (v, tail) in vs:
        for hc, th in choose(s.th, grid.last_row, grid.rows, "r"):
            for wc, tw in choose(s.tw, grid.last_col, grid.cols, "s"):
                condition = " && ".join(x for x in (vc, hc, wc) if x)
                prefix = ("else " if chain else "") + (f"if ({condition}) " if condition else "")
                chain.append(f"{prefix}{tile_name(th, tw, v, tail)}{call}")
    lines += chain
    lines.append("} } } }")
    return (
        f'extern "C" void {entry}(const void* const* inputs, void* const* outputs, void* workspace,'
        " const void* const* packed) {\n" + "\n".join(lines) + "\n}\n"
    )
