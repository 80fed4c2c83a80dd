"""3x3 convolution with stride 1 by minimal filtering: Y = A'[(G g G') . (B' d B)]A, summed over the input channels.

F(2x2) needs 16 products per 4 results, F(4x4) 36 per 16, against 9 per result. Tiles are transformed into the thread's
scratch memory, multiplied position by position as small matrix products, and transformed back into the epilogue.

Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308; the points of
F(4x4) are 0, 5/8, -5/8, 3/2, -3/2 and infinity, which keep the rounding error under twice that of a sequential sum
(the usual 0, 1, -1, 2, -2 give four times); weights are transformed in double precision.

Infinities and NaNs would spread over a whole tile, and large values overflow earlier than by the definition. Every
result that must not be finite is not finite here either, so a tile with such a result is computed again, directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import cast

from weft.generate.contraction.match import Contraction, StridedLayout
from weft.generate.cpp.templates import direct
from weft.generate.cpp.templates.text import cost, indices, leaves, pointer, prelude, statics, team
from weft.generate.expr.ctype import literal
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import KernelSource, Schedule

Matrix = tuple[tuple[Fraction, ...], ...]
_POINTS = {2: ("0", "1", "-1"), 4: ("0", "5/8", "-5/8", "3/2", "-3/2")}


@dataclass(frozen=True, slots=True)
class WinogradConfig(Parameters):
    """Parameters of the Winograd template; counts."""

    lanes: int
    threads: int
    m: int
    """Output pixels per side of a tile: 2 or 4."""
    tiles: int
    """Tiles per task, a multiple of `r`."""
    r: int
    """Tiles and vectors of channels of the register block."""
    v: int
    og: int
    """Blocks of output channels per task."""

    def schedule(self) -> Schedule:
        """As a schedule of the cpp generator."""
        return self.named("cpp", algorithm=f"winograd{self.m}", template="winograd")


@cache
def matrices(m: int) -> tuple[Matrix, Matrix, Matrix]:
    """A' (m x n), G (n x 3) and B' (n x n) with n = m + 2, by Toom and Cook."""
    points = [Fraction(p) for p in _POINTS[m]]
    n = m + 2

    def expand(roots: list[Fraction]) -> list[Fraction]:
        poly = [Fraction(1)]
        for root in roots:
            poly = [a - root * b for a, b in zip([Fraction(0), *poly], [*poly, Fraction(0)], strict=True)]
        return poly + [Fraction(0)] * (n - len(poly))

    at = [[p**i for p in points] + [Fraction(int(i == m - 1))] for i in range(m)]
    g, bt = [], []
    for p in points:
        others = [q for q in points if q != p]
        f = math.prod((p - q for q in others), start=Fraction(1))
        # the factor is shared out so that no power of two is lost and the input transform has small numbers
        g.append([p**k / f for k in range(3)])
        bt.append(expand(others))
    g.append([Fraction(0), Fraction(0), Fraction(1)])
    bt.append(expand(points))
    return tuple(map(tuple, at)), tuple(map(tuple, g)), tuple(map(tuple, bt))


def _sum(terms: list[tuple[Fraction, str]]) -> str:
    """c0*x0 + c1*x1 + ..., cheapest first."""
    text = ""
    for c, x in sorted((t for t in terms if t[0]), key=lambda t: (t[0] != 1, t[0] < 0)):
        size = x if abs(c) == 1 else f"{x} * {literal(float(abs(c)), DType.F32)}"
        text += (f" - {size}" if c < 0 else f" + {size}") if text else (f"-{size}" if c < 0 else size)
    return text or "vf{}"


def apply_matrix(matrix: Matrix, xs: list[str], ys: list[str], prefix: str) -> list[str]:
    """Statements for y = matrix x; rows or columns that differ in signs only share their halves."""
    rows, cols = len(matrix), len(xs)
    lines: list[str] = []

    def alike(p: tuple[Fraction, ...], q: tuple[Fraction, ...]) -> bool:
        return p != q and all(abs(a) == abs(b) for a, b in zip(p, q, strict=True))

    done: set[int] = set()
    columns = [tuple(matrix[r][c] for r in range(rows)) for c in range(cols)]
    pairs = {a: b for a in range(cols) for b in range(a + 1, cols) if alike(columns[a], columns[b])}
    if pairs:  # x_a + x_b and x_a - x_b
        for a, b in pairs.items():
            lines.append(f"const vf {prefix}s{a} = {xs[a]} + {xs[b]}, {prefix}d{a} = {xs[a]} - {xs[b]};")
        for r in range(rows):
            terms = [(matrix[r][c], xs[c]) for c in range(cols) if c not in pairs and c not in pairs.values()]
            terms += [
                (matrix[r][a], f"{prefix}{'s' if matrix[r][a] == matrix[r][b] else 'd'}{a}") for a, b in pairs.items()
            ]
            lines.append(f"const vf {ys[r]} = {_sum(terms)};")
        return lines
    for r in range(rows):
        if r in done:
            continue
        twin = next((q for q in range(r + 1, rows) if q not in done and alike(matrix[r], matrix[q])), None)
        if twin is None:
            lines.append(f"const vf {ys[r]} = {_sum(list(zip(matrix[r], xs, strict=True)))};")
            continue
        done.add(twin)
        even = [(a, x) for a, b, x in zip(matrix[r], matrix[twin], xs, strict=True) if a == b]
        odd = [(a, x) for a, b, x in zip(matrix[r], matrix[twin], xs, strict=True) if a != b]
        lines.append(f"const vf {prefix}e{r} = {_sum(even)}, {prefix}o{r} = {_sum(odd)};")
        lines.append(f"const vf {ys[r]} = {prefix}e{r} + {prefix}o{r}, {ys[twin]} = {prefix}e{r} - {prefix}o{r};")
    return lines


def applies(c: Contraction, lanes: int) -> Declined | None:
    """Why the template does not take a problem; None if it does."""
    if c.kernel != (3, 3) or c.strides != (1, 1) or c.dilations != (1, 1) or c.groups != 1:
        return Declined("not a 3x3 convolution with stride 1")
    if c.ic % lanes or c.oc % lanes or not c.w_const or len(c.dims) != 3:
        return Declined("channels are no multiple of the vector")
    step = c.pack.channel_step if c.pack is not None else c.a_layout.channel
    if step != 1 or any(w.channel != 1 for _, w in c.outputs):
        return Declined("input or output that is not channels-last")
    return None


def cycles(c: Contraction, s: WinogradConfig) -> float:
    """Modelled cycles of one thread, if it did everything, times the imbalance over the threads."""
    n = s.m + 2
    per_image = math.ceil(c.dims[1] / s.m) * math.ceil(c.dims[2] / s.m)
    tiles = c.dims[0] * per_image
    blocks = c.oc // s.lanes // s.v
    tasks, parts = math.ceil(tiles / s.tiles), math.ceil(blocks / s.og)
    padded = math.ceil(min(tiles, s.tiles) / s.r) * s.r * tasks if tasks > 1 else math.ceil(tiles / s.r) * s.r
    step = max(s.r * s.v / 2, (s.r + s.v) / 2, s.v * 2.5)
    product = n * n * (padded / s.r) * blocks * (c.ic * step + s.r * s.v + 20)
    u_bytes = n * n * c.ic * c.oc * 4
    local = (u_bytes / parts + n * n * s.tiles * (c.ic + c.oc / parts) * 4) < 900e3
    if not local:
        product = max(product, tasks * u_bytes / (12.0 if u_bytes < 20e6 else 7.0))
    near = 1.0 if n * n * s.tiles * (c.ic + c.oc / parts) * 4 < 800e3 else 1.6
    forward = parts * tiles * (c.ic / s.lanes) * n * n * (3.2 if s.m == 4 else 2.5) * near
    back = tiles * (c.oc / s.lanes) * (n * n * 2.2 * near + s.m * s.m * (3 + cost(c) * 0.5))
    jobs = tasks * parts
    skew = math.ceil(jobs / s.threads) * s.threads / jobs
    return (product + forward + back) * skew / s.threads


def shapes(c: Contraction, lanes: int, threads: int) -> list[tuple[float, WinogradConfig]]:
    """(modelled cycles, shape), best first, at most a few per size of tile."""
    out: list[tuple[float, WinogradConfig]] = []
    vectors = c.oc // lanes
    for m in (4, 2):
        # Below this many channels F(4x4) is less accurate than twice the error of a sequential sum.
        if m == 4 and c.ic < 64:
            continue
        tiles = c.dims[0] * math.ceil(c.dims[1] / m) * math.ceil(c.dims[2] / m)
        found: list[tuple[float, WinogradConfig]] = []
        grid = [
            (14, 2),
            (13, 2),
            (12, 2),
            (10, 2),
            (8, 3),
            (9, 3),
            (7, 3),
            (6, 4),
            (7, 2),
            (4, 4),
            (8, 2),
            (5, 5),
            (14, 1),
            (4, 1),
        ]
        if lanes != 16:
            grid = [(6, 2), (5, 2), (4, 2), (4, 3), (3, 3), (12, 1)]
        for r, v in grid:
            if vectors % v or r > max(tiles, 4):
                continue
            blocks = vectors // v
            for k in (1, 2, 3, 4, 6, 8):
                if r * k > tiles + r - 1 or r * k > 96:
                    continue
                for parts in (1, 2, 4, 8):
                    if parts > blocks:
                        continue
                    s = WinogradConfig(lanes, threads, m, r * k, r, v, math.ceil(blocks / parts))
                    found.append((cycles(c, s), s))
        found.sort(key=lambda x: x[0])
        out += found[:3]
    return sorted(out, key=lambda x: x[0])


def _tables(c: Contraction, m: int) -> tuple[list[int], list[int]]:
    """Offsets of the source rows and columns that tiles read; -1: zeros."""
    tall, wide = math.ceil(c.dims[1] / m) * m + 2, math.ceil(c.dims[2] / m) * m + 2
    if c.pack is None:
        rows, cols = list(range(c.dims[1] + 2)), list(range(c.dims[2] + 2))
        row_step, col_step = c.a_kernel
    else:
        p = c.pack
        rows, cols, row_step, col_step = list(p.rows), list(p.cols), p.row_step, p.col_step
    rows, cols = rows[:tall], cols[:wide]
    rows += [-1] * (tall - len(rows))
    cols += [-1] * (wide - len(cols))
    return [x * row_step if x >= 0 else -1 for x in rows], [x * col_step if x >= 0 else -1 for x in cols]


def emit(c: Contraction, schedule: Schedule, entry: str) -> KernelSource | Declined:
    """The kernel `entry` of one schedule made by `WinogradConfig.schedule`."""
    s = WinogradConfig.of(schedule)
    reason = applies(c, s.lanes)
    if reason is not None:
        return reason
    at, g, bt = matrices(s.m)
    n, lanes = s.m + 2, s.lanes
    ty, tx = math.ceil(c.dims[1] / s.m), math.ceil(c.dims[2] / s.m)
    tiles = c.dims[0] * ty * tx
    blocks = c.oc // lanes // s.v
    width = s.og * s.v * lanes
    # one line between positions: else they fall into the same cache set
    v_pos, m_pos = s.tiles * c.ic + lanes, s.tiles * width + lanes
    rows, cols = _tables(c, s.m)
    constants, names = statics(c)
    text = prelude(lanes) + direct.GATHER + constants + indices("row_at", rows) + indices("col_at", cols)
    text += direct.total(lanes) + f"alignas(64) static const float zeros[{c.ic}] = {{}};\n"
    # the matrix product, as the direct template's tile with plain stores
    inner = Contraction(
        dims=(1, s.tiles), groups=1, oc=width, ic=c.ic, kernel=(1, 1), strides=(1, 1), dilations=(1, 1), a=c.a,
        a_layout=StridedLayout((0, c.ic), 0, 1), a_kernel=(0, 0), pack=None, w=c.w, w_layout=StridedLayout((0, 0)),
        w_kernel=(0, 0), w_k=0,
        w_const=True, body=(), outputs=((-1, StridedLayout((0, width), 0, 1)),), graph=c.graph,
    )  # fmt: skip
    shape = direct.DirectConfig(lanes, s.threads, 1, s.r, s.v, 1, 1, 1, "oc")
    text += direct.tile(inner, shape, direct.Layout(0, c.ic, 0, 0, 1), 1, s.r, s.v, 0)
    # forward: one tile, all channels
    grid = [(i, j) for i in range(n) for j in range(n)]
    lines = [f"const float* const p{i}_{j} = (r[{i}] | q[{j}]) < 0 ? zeros : x + r[{i}] + q[{j}];" for i, j in grid]
    lines.append(f"for (i64 c = 0; c < {c.ic}; c += {lanes}) {{")
    for j in range(n):
        lines.extend(f"const vf d{i}_{j} = ld(p{i}_{j} + c);" for i in range(n))
        lines.extend(apply_matrix(bt, [f"d{i}_{j}" for i in range(n)], [f"t{i}_{j}" for i in range(n)], f"a{j}"))
    for i in range(n):
        lines.extend(apply_matrix(bt, [f"t{i}_{j}" for j in range(n)], [f"u{i}_{j}" for j in range(n)], f"b{i}"))
        lines.extend(f"st(V + {(i * n + j) * v_pos} + c, u{i}_{j});" for j in range(n))
    text += (
        "static __attribute__((noinline)) void forward(const float* __restrict x, const int* __restrict r,"
        " const int* __restrict q, float* __restrict V) {\n" + "\n".join(lines) + "\n}\n}\n"
    )
    # back: one tile, all channels of the task
    leaf_params = "".join(f", const float* __restrict {leaf.name}" for leaf in leaves(c))
    out_params = "".join(f", float* __restrict o{k}" for k in range(len(c.outputs)))
    lines = [f"for (i64 u = 0; u < count; u += {lanes}) {{", f"alignas(64) float y[{s.m * s.m * lanes}];"]
    for j in range(n):
        lines.extend(f"const vf d{i}_{j} = ld(M + {(i * n + j) * m_pos} + u);" for i in range(n))
        lines.extend(apply_matrix(at, [f"d{i}_{j}" for i in range(n)], [f"t{i}_{j}" for i in range(s.m)], f"a{j}"))
    for i in range(s.m):
        lines.extend(apply_matrix(at, [f"t{i}_{j}" for j in range(n)], [f"u{i}_{j}" for j in range(s.m)], f"b{i}"))
        lines.extend(f"st(y + {(i * s.m + j) * lanes}, u{i}_{j});" for j in range(s.m))
    results = [f"u{i}_{j}" for i in range(s.m) for j in range(s.m)]
    lines.append(f"vf bad = {results[0]} * 0.0f; " + " ".join(f"bad += {u} * 0.0f;" for u in results[1:]))
    lines.append("const float test = total(bad);")
    lines.append(f"if (test != test) repair(x, r, q, direct + u * {9 * c.ic}, rows, cols, y);")
    lines.append("for (i64 i = 0; i < rows; ++i) for (i64 j = 0; j < cols; ++j) {")
    lines.append(f"const vf z = ld(y + (i * {s.m} + j) * {lanes});")
    lines.extend(direct.finish_vector(c, lanes, "z", "i", "j", "u", lanes, "e"))
    text += f"""
static __attribute__((noinline, cold)) void repair(const float* x, const int* r, const int* q, const float* w, i64 rows,
i64 cols, float* y) {{
for (i64 i = 0; i < rows; ++i) for (i64 j = 0; j < cols; ++j) {{
vf sum = {{}};
for (i64 t = 0; t < 9; ++t) {{
const int h = r[i + t / 3], k = q[j + t % 3];
const float* const p = (h | k) < 0 ? zeros : x + h + k;
for (i64 c = 0; c < {c.ic}; ++c) sum += splat(p[c]) * ld(w + (t * {c.ic} + c) * {lanes});
}}
st(y + (i * {s.m} + j) * {lanes}, sum);
}}
}}
"""
    text += (
        "static __attribute__((noinline)) void back(const float* __restrict M, i64 count, i64 rows, i64 cols,"
        " const float* x, const int* r, const int* q, const float* direct"
        f"{leaf_params}{out_params}) {{\n" + "\n".join(lines) + "\n}\n}\n}\n"
    )
    tasks, parts = math.ceil(tiles / s.tiles), math.ceil(blocks / s.og)
    scratch = -(-(n * n * (v_pos + m_pos)) // 64) * 64
    threads = min(s.threads, tasks * parts)
    body = [f"const float* const x = {pointer(c.a, names)} + {c.a_layout.offset};"]
    body.append("const float* const w = (const float*)packed[0];")
    for leaf in leaves(c):
        assert leaf.step.source is not None
        assert leaf.step.layout is not None
        body.append(f"const float* const {leaf.name} = {pointer(leaf.step.source, names)} + {leaf.step.layout.offset};")
    body.extend(
        f"float* const o{k} = (float*)outputs[{k}] + {layout.offset};" for k, (_, layout) in enumerate(c.outputs)
    )
    if threads > 1:
        body.append(f"#pragma omp parallel for schedule(dynamic, 1) {team(threads)}")
    number = "omp_get_thread_num()" if threads > 1 else "0"
    layouts = [(leaf.name, cast("StridedLayout", leaf.step.layout)) for leaf in leaves(c)]
    layouts += [(f"o{k}", layout) for k, (_, layout) in enumerate(c.outputs)]
    args = [
        f"{name} + d * {k.dims[0]} + ty * {s.m * k.dims[1]} + tx * {s.m * k.dims[2]} + b0 * {s.v * lanes * k.channel}"
        for name, k in layouts
    ]
    origin = [
        f"x + d * {c.a_layout.dims[0]}",
        f"row_at + ty * {s.m}",
        f"col_at + tx * {s.m}",
        f"(const float*)packed[1] + b0 * {s.v * lanes * 9 * c.ic}",
    ]
    body.append(f"""for (i64 t = 0; t < {tasks * parts}; ++t) {{
float* const V = (float*)workspace + (i64){number} * {scratch};
float* const M = V + {n * n * v_pos};
const i64 t0 = t / {parts} * {s.tiles}, b0 = t % {parts} * {s.og};
const i64 b1 = b0 + {s.og} < {blocks} ? b0 + {s.og} : {blocks};
const i64 count = t0 + {s.tiles} < {tiles} ? {s.tiles} : {tiles} - t0;
for (i64 i = 0; i < count; ++i) {{
const i64 p = t0 + i, d = p / {ty * tx}, ty = p / {tx} % {ty}, tx = p % {tx};
forward(x + d * {c.a_layout.dims[0]}, row_at + ty * {s.m}, col_at + tx * {s.m}, V + i * {c.ic});
}}
for (i64 pos = 0; pos < {n * n}; ++pos)
for (i64 b = b0; b < b1; ++b)
for (i64 r = 0; r < count; r += {s.r})
{direct.tile_name(1, s.r, s.v, 0)}(V + pos * {v_pos} + r * {c.ic}, w + (pos * {blocks} + b) * {c.ic * s.v * lanes},
M + pos * {m_pos} + r * {width} + (b - b0) * {s.v * lanes});
for (i64 i = 0; i < count; ++i) {{
const i64 p = t0 + i, d = p / {ty * tx}, ty = p / {tx} % {ty}, tx = p % {tx};
const i64 rows = {c.dims[1]} - ty * {s.m} < {s.m} ? {c.dims[1]} - ty * {s.m} : {s.m};
const i64 cols = {c.dims[2]} - tx * {s.m} < {s.m} ? {c.dims[2]} - tx * {s.m} : {s.m};
back({", ".join([f"M + i * {width}", f"(b1 - b0) * {s.v * lanes}", "rows", "cols", *origin, *args])});
}}
}}""")
    text += (
        f'extern "C" void {entry}(const void* const* inputs, void* const* outputs, void* workspace,'
        " const void* const* packed) {\n" + "\n".join(body) + "\n}\n"
    )
    flat = ",".join(repr(float(x)) for row in g for x in row)
    text += f"""
extern "C" void {entry}_pack(const void* const* inputs, void* const* packed) {{
static const double G[{n}][3] = {{{flat}}};
const float* const w = {pointer(c.w, names)} + {c.w_layout.offset};
float* const d = (float*)packed[0];
float* const e = (float*)packed[1];
for (i64 o = 0; o < {c.oc}; ++o) for (i64 k = 0; k < {c.ic}; ++k) {{
double t[{n}][3];
const float* const q = w + o * {c.w_layout.channel} + k * {c.w_k};
for (i64 i = 0; i < {n}; ++i) for (i64 x = 0; x < 3; ++x)
t[i][x] = G[i][0] * q[x * {c.w_kernel[1]}] + G[i][1] * q[{c.w_kernel[0]} + x * {c.w_kernel[1]}]
+ G[i][2] * q[{2 * c.w_kernel[0]} + x * {c.w_kernel[1]}];
for (i64 i = 0; i < 9; ++i)
e[((o / {lanes} * 9 + i) * {c.ic} + k) * {lanes} + o % {lanes}] = q[i / 3 * {c.w_kernel[0]} + i % 3 * {c.w_kernel[1]}];
const i64 at = (o / {s.v * lanes} * {c.ic} + k) * {s.v * lanes} + o % {s.v * lanes};
for (i64 i = 0; i < {n}; ++i) for (i64 j = 0; j < {n}; ++j)
d[(i * {n} + j) * {c.ic * c.oc} + at] = (float)(G[j][0] * t[i][0] + G[j][1] * t[i][1] + G[j][2] * t[i][2]);
}}
}}
"""
    read = {leaf.step.source for leaf in leaves(c)} | {c.a}
    return KernelSource(
        schedule=schedule,
        text=text,
        entry=entry,
        flags=direct.FLAGS,
        workspace_bytes=scratch * 4 * s.threads,
        packed_bytes=(n * n * c.ic * c.oc * 4, 9 * c.ic * c.oc * 4),
        replaces_weights=(c.w.index,) if c.w.kind == "input" and c.w not in read else (),
    )
