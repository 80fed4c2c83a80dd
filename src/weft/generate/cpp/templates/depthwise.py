"""Depthwise convolution, channels last: one vector of channels, a tile of output pixels in registers.

Every input vector of the tile's field is loaded once and multiplied into all pixels that see it. Zero padding costs
nothing: columns outside the image are left out of the unrolled text (one function per clipping), rows are skipped.

Unrolled, a kernel of 7 x 7 takes the compiler up to two seconds. Rolled up, its rows are a loop that reads a row of the
image once for each of the tile's rows that sees it: up to a tenth slower, and compiled in a third of the time. Where
the text is long, that is what is measured first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from weft.generate.contraction.match import Contraction, StridedLayout
from weft.generate.cpp.templates.direct import FLAGS, GATHER, finish
from weft.generate.cpp.templates.text import indices, leaves, pointer, prelude, statics, team
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import KernelSource, Schedule

LONG = 4000
"""Multiply-adds in an unrolled text from which on it is measured rolled up first; 4,000 take the compiler 1.3 s."""
FEWER = 9
"""Weights of a row that stay in registers."""


@dataclass(frozen=True, slots=True)
class DepthwiseConfig(Parameters):
    """Parameters of the depthwise template; counts."""

    lanes: int
    threads: int
    th: int
    tw: int
    bh: int
    """Rows of tiles per task."""
    cg: int
    """Vectors of channels per task."""
    rolled: bool = False
    """The rows of the kernel are a loop."""

    def schedule(self) -> Schedule:
        """As a schedule of the cpp generator."""
        found = self.named("cpp", algorithm="direct", template="depthwise")
        told = tuple((name, value) for name, value in found.params if name != "rolled" or self.rolled)
        return Schedule(found.generator, told)


def normal(c: Contraction) -> Contraction | Declined:
    """The same with groups as channels, if the template takes it."""
    if c.ic != 1 or c.oc != 1 or c.groups < 2:
        return Declined("not a depthwise convolution")
    if c.a_layout.group != 1 or len(c.dims) != 3 or not c.w_const:
        return Declined("depthwise convolution of an input that is not channels-last")
    if c.pack is not None:
        for table, size in ((c.pack.rows, _size(c.pack.rows)), (c.pack.cols, _size(c.pack.cols))):
            inside = [x for x in table if x >= 0]
            first = next((i for i, x in enumerate(table) if x >= 0), 0)
            if inside != list(range(size)) or list(table[first : first + size]) != inside:
                return Declined("depthwise convolution behind other padding than zeros")
    if any(w.group != 1 for _, w in c.outputs):
        return Declined("depthwise convolution whose output is not channels-last")

    def turn(w: StridedLayout) -> StridedLayout:
        return replace(w, group=0, channel=w.group)

    return replace(
        c,
        groups=1,
        oc=c.groups,
        a_layout=turn(c.a_layout),
        w_layout=turn(c.w_layout),
        outputs=tuple((slot, turn(w)) for slot, w in c.outputs),
        body=tuple(replace(s, layout=turn(s.layout)) if s.layout is not None else s for s in c.body),
    )


def _size(table: Sequence[int]) -> int:
    return max(table) + 1


def _steps(c: Contraction) -> tuple[int, int, int, int, int, int]:
    """Source row step, source column step, rows, columns, padding above, padding on the left."""
    sh, sw = c.strides
    if c.pack is not None:
        p = c.pack
        top = next((i for i, x in enumerate(p.rows) if x >= 0), 0)
        left = next((i for i, x in enumerate(p.cols) if x >= 0), 0)
        return p.row_step, p.col_step, _size(p.rows), _size(p.cols), top, left
    rows = (c.dims[1] - 1) * sh + (c.kernel[0] - 1) * c.dilations[0] + 1
    cols = (c.dims[2] - 1) * sw + (c.kernel[1] - 1) * c.dilations[1] + 1
    row = c.a_kernel[0] // c.dilations[0] if c.kernel[0] > 1 else c.a_layout.dims[1] // sh
    col = c.a_kernel[1] // c.dilations[1] if c.kernel[1] > 1 else c.a_layout.dims[2] // sw
    return row, col, rows, cols, 0, 0


def shapes(c: Contraction, lanes: int, threads: int, keep: int = 6) -> list[tuple[float, DepthwiseConfig]]:
    """(modelled cycles, shape): tiles by loads per multiply-add, then by how evenly they cut the image."""
    rows, cols = c.dims[1], c.dims[2]
    vectors = -(-c.oc // lanes)
    limit = 24 if lanes == 16 else 10
    ranked = []
    for th in (1, 2, 3, 4):
        for tw in range(2, 15):
            if th * tw > limit or th > rows or tw > max(cols, 2):
                continue
            tw_even = math.ceil(cols / math.ceil(cols / tw))
            if tw_even != tw:
                continue
            field = ((th - 1) * c.strides[0] + c.kernel[0]) * ((tw - 1) * c.strides[1] + c.kernel[1])
            work = th * tw * c.kernel[0] * c.kernel[1]
            kept = min(c.kernel[0] * c.kernel[1], 9)
            spill = 1.0 if th * tw + kept + 1 <= (32 if lanes == 16 else 16) else 1.3
            tiles = math.ceil(rows / th) * math.ceil(cols / tw)
            per = max(work / 2, (field + c.kernel[0] * c.kernel[1]) / 2, 4.0 * c.kernel[0] * c.kernel[1] / 2)
            ranked.append((tiles * (per * spill + th * tw * 2 + 15), th, tw))
    ranked.sort()
    per_vector = vectors * c.dims[0]
    out: list[tuple[float, DepthwiseConfig]] = []
    for cycles, th, tw in ranked[: max(2, keep // 2)]:
        tall = -(-rows // th)
        for parts in (threads, 4 * threads):
            if parts <= tall:
                out.append((cycles * per_vector, DepthwiseConfig(lanes, threads, th, tw, -(-tall // parts), vectors)))
            elif vectors >= threads:
                out.append(
                    (
                        cycles * per_vector,
                        DepthwiseConfig(lanes, threads, th, tw, tall, -(-vectors // min(parts, vectors))),
                    )
                )
        if not out:
            out.append((cycles * per_vector, DepthwiseConfig(lanes, threads, th, tw, tall, vectors)))
    found = list(dict.fromkeys(out))
    if c.kernel[0] > 1 and _length(c, found[0][1]) >= LONG:
        found = [(0.99 * cycles, replace(s, rolled=True)) for cycles, s in found[:2]] + found
    return found[:keep]


def _clips(c: Contraction, s: DepthwiseConfig) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(columns, first and last of the field inside the image) of each kind of tile, and the kind of each tile."""
    _, _, _, cols, _, left = _steps(c)
    clips: list[tuple[int, int, int]] = []
    which: list[int] = []
    for i in range(-(-c.dims[2] // s.tw)):
        tw = min(s.tw, c.dims[2] - i * s.tw)
        first = i * s.tw * c.strides[1] - left
        field = (tw - 1) * c.strides[1] + (c.kernel[1] - 1) * c.dilations[1] + 1
        clip = (tw, min(max(0, -first), field), max(0, min(field, cols - first)))
        if clip not in clips:
            clips.append(clip)
        which.append(clips.index(clip))
    return clips, which


def _heights(c: Contraction, s: DepthwiseConfig) -> list[int]:
    """Rows of tiles: of all but the last, and of the last."""
    tall = -(-c.dims[1] // s.th)
    return list(dict.fromkeys(([s.th] if tall > 1 else []) + [c.dims[1] - (tall - 1) * s.th]))


def _length(c: Contraction, s: DepthwiseConfig) -> int:
    """Multiply-adds in the unrolled text."""
    tiles = sum(th * tw for th in _heights(c, s) for tw, _, _ in _clips(c, s)[0])
    return tiles * c.kernel[0] * c.kernel[1] * (2 if c.oc % s.lanes and c.oc > s.lanes else 1)


def _tile(c: Contraction, s: DepthwiseConfig, th: int, tw: int, lo: int, hi: int, tail: int) -> str:
    """Columns [lo, hi) of the tile's field are inside the image."""
    kh, kw = c.kernel
    sh, sw = c.strides
    dh, dw = c.dilations
    row_step, col_step, rows, _, _, _ = _steps(c)
    load = f"ldn<{tail}>" if tail else "ld"
    lines = ["vf " + ", ".join(f"c0_{r}_0 = {{}}" for r in range(th * tw)) + ";"]
    near = kw <= FEWER if s.rolled else kh * kw <= 9
    held = range((kw if s.rolled else kh * kw) if near else 0)
    loads = [f"const vf w{k} = ld(w + {k * s.lanes});" for k in held]

    def weight(y: int, x: int) -> str:
        return f"w{y * kw + x}" if near else f"ld(w + {(y * kw + x) * s.lanes})"

    def row(y: int, seen: Sequence[tuple[int, int]]) -> None:
        """A row of the field, for (row of results, row of weights) each."""
        lines.append(f"if ((unsigned long)(h + {y}) < {rows}ul) {{")
        for x in range(lo, hi):
            pairs = [(j, k) for j in range(tw) for k in range(kw) if j * sw + k * dw == x]
            if not pairs:
                continue
            lines.append(f"{{ const vf b = {load}(a + {y * row_step + x * col_step});")
            lines.extend(f"c0_{i * tw + j}_0 += b * {weight(p, k)};" for i, p in seen for j, k in pairs)
            lines.append("}")
        lines.append("}")

    if s.rolled:
        lines.append(f"for (i64 y = 0; y < {kh}; ++y, h += {dh}, a += {dh * row_step}, w += {kw * s.lanes}) {{")
        lines.extend(loads)
        for i in range(th):
            row(i * sh, [(i, 0)])
        lines.append("}")
    else:
        lines.extend(loads)
        for y in range((th - 1) * sh + (kh - 1) * dh + 1):
            seen = [(i, k) for i in range(th) for k in range(kh) if i * sh + k * dh == y]
            if seen:
                row(y, seen)
    lines.extend(finish(c, s.lanes, th, tw, 1, tail))
    params = "".join(f", const float* __restrict {leaf.name}" for leaf in leaves(c))
    params += "".join(f", float* __restrict o{k}" for k in range(len(c.outputs)))
    head = f"static __attribute__((noinline)) void {_name(th, tw, lo, hi, tail)}"
    return (
        f"{head}(const float* __restrict a, i64 h, const float* __restrict w{params}) {{\n" + "\n".join(lines) + "\n}\n"
    )


def _name(th: int, tw: int, lo: int, hi: int, tail: int) -> str:
    return f"tile_{th}_{tw}_{lo}_{hi}" + (f"_{tail}" if tail else "")


def emit(c: Contraction, schedule: Schedule, entry: str) -> KernelSource | Declined:
    """The kernel `entry` of one schedule made by `DepthwiseConfig.schedule`; `c` comes from `normal`."""
    s = DepthwiseConfig.of(schedule)
    row_step, col_step, _, _, top, left = _steps(c)
    sh, sw = c.strides
    tall, wide = -(-c.dims[1] // s.th), -(-c.dims[2] // s.tw)
    vectors, tail = -(-c.oc // s.lanes), c.oc % s.lanes
    heights, (clips, which) = _heights(c, s), _clips(c, s)
    if len(clips) * len(heights) * (2 if tail else 1) > 16:
        return Declined("too many ways to clip the image")
    constants, names = statics(c)
    text = prelude(s.lanes) + GATHER + constants + indices("clip", which)
    for th in heights:
        for tw, lo, hi in clips:
            if vectors > 1 or not tail:
                text += _tile(c, s, th, tw, lo, hi, 0)
            if tail:
                text += _tile(c, s, th, tw, lo, hi, tail)
    taps = c.kernel[0] * c.kernel[1]
    bands, slices = -(-tall // s.bh), -(-vectors // s.cg)
    tasks = c.dims[0] * bands * slices
    threads = min(s.threads, tasks)
    lines = [f"const float* const x = {pointer(c.a, names)} + {c.a_layout.offset};"]
    lines.append("const float* const w = (const float*)packed[0];")
    for leaf in leaves(c):
        layout = cast("StridedLayout", leaf.step.layout)
        assert leaf.step.source is not None
        lines.append(f"const float* const {leaf.name} = {pointer(leaf.step.source, names)} + {layout.offset};")
    lines.extend(f"float* const o{k} = (float*)outputs[{k}] + {w.offset};" for k, (_, w) in enumerate(c.outputs))
    if threads > 1:
        lines.append(f"#pragma omp parallel for schedule(dynamic, 1) {team(threads)}")
    lines.append(f"for (i64 t = 0; t < {tasks}; ++t) {{")
    lines.append(f"const i64 cg = t % {slices}, br = t / {slices} % {bands}, d0 = t / {slices * bands};")
    lines.append(f"const i64 r1 = (br + 1) * {s.bh} < {tall} ? (br + 1) * {s.bh} : {tall};")
    lines.append(f"const i64 v1 = (cg + 1) * {s.cg} < {vectors} ? (cg + 1) * {s.cg} : {vectors};")
    lines.append(f"for (i64 r = br * {s.bh}; r < r1; ++r) for (i64 s = 0; s < {wide}; ++s)")
    lines.append(f"for (i64 v = cg * {s.cg}; v < v1; ++v) {{")
    lines.append(f"const i64 h = r * {s.th * sh} - {top};")
    # the address of a clipped corner lies before the image; it is never read through
    lines.append(
        f"const float* const a = x + d0 * {c.a_layout.dims[0]} + h * {row_step}"
        f" + (s * {s.tw * sw} - {left}) * {col_step} + v * {s.lanes};"
    )
    args = ["a", "h", f"w + v * {taps * s.lanes}"]
    layouts = [(leaf.name, cast("StridedLayout", leaf.step.layout)) for leaf in leaves(c)]
    layouts += [(f"o{k}", w) for k, (_, w) in enumerate(c.outputs)]
    for name, w in layouts:
        terms = [(f"d0 * {w.dims[0]}", w.dims[0]), (f"r * {s.th * w.dims[1]}", w.dims[1])]
        terms += [(f"s * {s.tw * w.dims[2]}", w.dims[2]), (f"v * {s.lanes * w.channel}", w.channel)]
        args.append(" + ".join([name, *(t for t, n in terms if n)]))
    call = "(" + ", ".join(args) + ")"
    lines.append("switch (clip[s]) {")
    for i, (tw, lo, hi) in enumerate(clips):
        options = []
        for th in heights:
            full, part = f"{_name(th, tw, lo, hi, 0)}{call};", f"{_name(th, tw, lo, hi, tail)}{call};"
            body = full if not tail else part if vectors == 1 else f"if (v + 1 < {vectors}) {full} else {part}"
            options.append(body)
        one = len(options) == 1
        body = options[0] if one else f"if (r + 1 < {tall}) {{ {options[0]} }} else {{ {options[1]} }}"
        lines.append(f"{'default' if i == len(clips) - 1 else f'case {i}'}: {body} break;")
    lines.append("} } }")
    text += (
        f'extern "C" void {entry}(const void* const* inputs, void* const* outputs, void* workspace,'
        " const void* const* packed) {\n" + "\n".join(lines) + "\n}\n"
    )
    text += f"""
extern "C" void {entry}_pack(const void* const* inputs, void* const* packed) {{
const float* const w = {pointer(c.w, names)} + {c.w_layout.offset};
float* d = (float*)packed[0];
for (i64 v = 0; v < {vectors}; ++v)
for (i64 y = 0; y < {c.kernel[0]}; ++y) for (i64 x = 0; x < {c.kernel[1]}; ++x)
for (i64 o = v * {s.lanes}; o < (v + 1) * {s.lanes}; ++o)
*d++ = o < {c.oc} ? w[o * {c.w_layout.channel} + y * {c.w_kernel[0]} + x * {c.w_kernel[1]}] : 0;
}}
"""
    read = {leaf.step.source for leaf in leaves(c)} | {c.a}
    return KernelSource(
        schedule=schedule,
        text=text,
        entry=entry,
        flags=FLAGS,
        packed_bytes=(vectors * s.lanes * taps * 4,),
        replaces_weights=(c.w.index,) if c.w.kind == "input" and c.w not in read else (),
    )
