"""Depthwise convolution on CUDA cores: a thread owns a few neighbouring channels of a tile of pixels.

Every input vector of the tile's field is read once and multiplied into all pixels that see it. Neighbouring threads
take neighbouring channels (channels-last) or neighbouring pixels (row-major), so reads are coalesced either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.device.cuda.facts import GpuFacts
from weft.generate.cpp.templates.match import Walk
from weft.generate.cuda.templates import epilogue
from weft.generate.cuda.templates.pack import pack_vectors
from weft.generate.cuda.templates.prelude import prelude, storage
from weft.generate.cuda.templates.product import Product, image_steps
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Launch, Schedule

_MOST_TEXT = 1200
"""Multiply-adds that one thread's text may hold where it has a choice: the compiler's time grows faster than they."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of the template; counts."""

    th: int
    tw: int
    width: int
    """Channels of a thread."""
    threads: int

    @staticmethod
    def of(schedule: Schedule) -> Shape:
        """Read back what `schedule` wrote."""
        p = dict(schedule.params)
        return Shape(**{f: p[f] for f in Shape.__dataclass_fields__})  # type: ignore[arg-type]

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        fields = {f: getattr(self, f) for f in Shape.__dataclass_fields__}
        return Schedule("cuda", tuple(sorted({**fields, "template": "depthwise"}.items())))


def normal(p: Product) -> Product | Declined:
    """The same with groups as columns, if the template takes it."""
    c = p.c
    if c.ic != 1 or c.oc != 1 or c.groups < 2:
        return Declined("not a depthwise convolution")
    if len(c.dims) != 3 or not c.w_const:
        return Declined("a depthwise convolution of merged dimensions")
    if c.pack is not None and p.borders is None:
        return Declined("a depthwise convolution behind other padding than zeros")

    def turn(w: Walk) -> Walk:
        return replace(w, group=0, channel=w.group)

    turned = replace(
        c,
        groups=1,
        oc=c.groups,
        a_walk=turn(c.a_walk),
        w_walk=turn(c.w_walk),
        outputs=tuple((slot, turn(w)) for slot, w in c.outputs),
        body=tuple(replace(s, walk=turn(s.walk)) if s.walk is not None else s for s in c.body),
    )
    return replace(p, c=turned)


def shapes(p: Product, facts: GpuFacts, keep: int = 6) -> list[tuple[float, Shape]]:
    """(modelled cycles, shape), best first; `p` comes from `normal`."""
    ranked = [(cycles(p, s, facts), s) for s in _candidates(p)]
    ranked.sort(key=lambda x: (x[0], x[1].th * x[1].tw, x[1].threads))
    seen: dict[tuple[int, int, int], int] = {}
    keyed = []
    for modelled, s in ranked:
        tile = (s.th, s.tw, s.width)
        seen[tile] = seen.get(tile, 0) + 1
        keyed.append((modelled * (1 + 0.1 * (seen[tile] - 1)), modelled, s))
    keyed.sort(key=lambda x: x[0])
    return [(modelled, s) for _, modelled, s in keyed[:keep]]


def _candidates(p: Product) -> Iterable[Shape]:
    c = p.c
    last = c.a_walk.channel == 1
    widest = epilogue.plan(p).width if last else 1
    steps = [c.a_walk.offset, c.a_walk.dims[0], *image_steps(p)]
    while widest > 1 and any(x % widest for x in steps):
        widest //= 2
    for width in dict.fromkeys((widest, max(1, widest // 2))):
        for th in (1, 2, 4):
            for tw in (1, 2, 4, 8) if last else (1, 2):
                work = th * tw * math.prod(c.kernel) * width
                if th > c.dims[1] or tw > c.dims[2] or (work > _MOST_TEXT and th * tw > 1) or th * tw * width > 64:
                    continue
                yield from (Shape(th, tw, width, threads) for threads in (64, 128, 256))


def _field(p: Product, s: Shape) -> tuple[int, int]:
    c = p.c
    return (
        (s.th - 1) * c.strides[0] + (c.kernel[0] - 1) * c.dilations[0] + 1,
        (s.tw - 1) * c.strides[1] + (c.kernel[1] - 1) * c.dilations[1] + 1,
    )


def cycles(p: Product, s: Shape, facts: GpuFacts) -> float:
    """Modelled cycles: issue slots of the busiest multiprocessor, or the latency of one thread's loads."""
    c = p.c
    tiles = c.dims[0] * -(-c.dims[1] // s.th) * -(-c.dims[2] // s.tw)
    count = tiles * (p.n // s.width)
    blocks = -(-count // s.threads)
    high, wide = _field(p, s)
    taps = math.prod(c.kernel)
    per_thread = high * wide * (4.0 + s.width) + taps * s.th * s.tw * s.width + taps * (1.0 + s.width)
    per_thread += s.th * s.tw * (20.0 + 3.0 * s.width * (1 + len(c.body)))
    busiest = -(-blocks // facts.sms) * s.threads / 128.0
    one_warp = high * 90.0 + 0.6 * per_thread + 900.0
    moved = p.dtype.itemsize * p.n * (c.dims[0] * c.dims[1] * c.dims[2]) * (1 + c.strides[0] * c.strides[1])
    return max(busiest * per_thread, one_warp, moved / (facts.bandwidth_at(moved) / facts.clock_ghz)) + 600.0


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `Shape.schedule`; `p` comes from `normal`."""
    s = Shape.of(schedule)
    c = p.c
    args = epilogue.arguments(p, True, False, False)
    kind = storage(p.dtype)
    vectors = p.n // s.width
    tall, wide = -(-c.dims[1] // s.th), -(-c.dims[2] // s.tw)
    count = c.dims[0] * tall * wide * vectors
    last = c.a_walk.channel == 1
    if last:
        place = f"cv = i % {vectors}, tx = i / {vectors} % {wide}, ty = i / {vectors * wide} % {tall}"
        place += f", img = i / {vectors * wide * tall}"
    else:
        place = f"tx = i % {wide}, ty = i / {wide} % {tall}, cv = i / {wide * tall} % {vectors}"
        place += f", img = i / {vectors * wide * tall}"
    row_step, col_step = image_steps(p)
    top, left = (p.borders[0].lo, p.borders[1].lo) if p.borders is not None else (0, 0)
    taps = math.prod(c.kernel)
    near = taps * s.width <= 80
    high, broad = _field(p, s)
    origin = (
        f"{c.a_walk.offset} + img * {c.a_walk.dims[0]} + y0 * {row_step} + x0 * {col_step} + n * {c.a_walk.channel}"
    )
    lines = [
        f'extern "C" __global__ void __launch_bounds__({s.threads}) {entry}({", ".join(args.parameters)}) {{',
        f"const int i = blockIdx.x * {s.threads} + threadIdx.x;",
        f"const int {place};",
        f"const int n = cv * {s.width}, g = 0, b = 0; (void)g; (void)b;",
        f"const {kind}* const w = (const {kind}*)pk + n * {taps};",
    ]
    if near:
        lines.append(f"float k[{taps}][{s.width}];")
        lines.append(f"if (i < {count}) {{")
        for tap in range(taps):
            lines += _vector(p, f"k[{tap}]", s.width, f"w + {tap * s.width}")
        lines.append("}")
    lines += [
        "w_wait(); w_release();",
        f"if (i >= {count}) return;",
        f"const int y0 = ty * {s.th * c.strides[0]} - {top}, x0 = tx * {s.tw * c.strides[1]} - {left};",
        f"const {kind}* const A = (const {kind}*){args.names[c.a]} + {origin};",
        f"float acc[{s.th * s.tw}][{s.width}];",
        "#pragma unroll",
        f"for (int q = 0; q < {s.th * s.tw}; ++q)",
        "#pragma unroll",
        f"for (int e = 0; e < {s.width}; ++e) acc[q][e] = 0.0f;",
    ]
    lines += _sums(p, s, high, broad, row_step, col_step, near)
    lines += _outputs(p, s, args)
    packing = pack_vectors(p, f"{entry}_pack", s.width)
    return CudaSource(
        schedule=schedule,
        text=prelude() + args.constants + "\n".join(lines) + "\n" + packing.text,
        launches=(Launch(entry, (-(-count // s.threads), 1, 1), (s.threads, 1, 1), args.pointers),),
        pack=packing.launches,
        packed_bytes=packing.bytes,
        replaces_weights=packing.replaces,
    )


def _vector(p: Product, to: str, width: int, address: str) -> list[str]:
    """Statements: `width` neighbouring elements as floats into the array `to`."""
    return ["{", *epilogue.wide_load("h_", p.dtype, width, address, to), "}"]


def _sums(p: Product, s: Shape, high: int, broad: int, row_step: int, col_step: int, near: bool) -> list[str]:
    """The unrolled sum: every vector of the field once, into all pixels that see it."""
    c = p.c
    kh, kw = c.kernel
    sh, sw = c.strides
    dh, dw = c.dilations
    lines: list[str] = []
    for y in range(high):
        rows = [(i, t) for i in range(s.th) for t in range(kh) if i * sh + t * dh == y]
        if not rows:
            continue
        inside_y = f"(u32)(y0 + {y}) < {p.borders[0].size}u" if p.borders is not None else "true"
        if s.th > 1 and p.borders is None:
            inside_y = f"y0 + {y} < {(c.dims[1] - 1) * sh + (kh - 1) * dh + 1}"
        lines.append(f"if ({inside_y}) {{")
        for x in range(broad):
            cols = [(j, t) for j in range(s.tw) for t in range(kw) if j * sw + t * dw == x]
            if not cols:
                continue
            inside_x = f"(u32)(x0 + {x}) < {p.borders[1].size}u" if p.borders is not None else ""
            if s.tw > 1 and p.borders is None:
                inside_x = f"x0 + {x} < {(c.dims[2] - 1) * sw + (kw - 1) * dw + 1}"
            lines.append(f"{{ float v[{s.width}];")
            read = _vector(p, "v", s.width, f"A + {y * row_step + x * col_step}")
            if inside_x:
                lines.append(f"if ({inside_x}) {{")
                lines += read
                zero = " ".join(f"v[{e}] = 0.0f;" for e in range(s.width))
                lines.append(f"}} else {{ {zero} }}")
            else:
                lines += read
            for i, ty in rows:
                for j, tx in cols:
                    tap = ty * kw + tx
                    if near:
                        weight = f"k[{tap}][e]"
                    else:
                        weight = "f[e]"
                        lines.append(f"{{ float f[{s.width}];")
                        lines += _vector(p, "f", s.width, f"w + {tap * s.width}")
                    lines.append("#pragma unroll")
                    lines.append(
                        f"for (int e = 0; e < {s.width}; ++e)"
                        f" acc[{i * s.tw + j}][e] = fmaf(v[e], {weight}, acc[{i * s.tw + j}][e]);"
                    )
                    if not near:
                        lines.append("}")
            lines.append("}")
        lines.append("}")
    return lines


def _outputs(p: Product, s: Shape, args: epilogue.Arguments) -> list[str]:
    """Every pixel of the tile through the epilogue."""
    c = p.c
    rows, cols = c.dims[1], c.dims[2]
    lines = [
        f"auto finish = [&](const float (&acc)[{s.width}], int m) {{",
        *epilogue.body(p, args.names, s.width),
        "};",
    ]
    for i in range(s.th):
        for j in range(s.tw):
            test = []
            if rows % s.th and i:
                test.append(f"ty * {s.th} + {i} < {rows}")
            if cols % s.tw and j:
                test.append(f"tx * {s.tw} + {j} < {cols}")
            guard = f"if ({' && '.join(test)}) " if test else ""
            lines.append(
                f"{guard}finish(acc[{i * s.tw + j}], (img * {rows} + ty * {s.th} + {i}) * {cols} + tx * {s.tw} + {j});"
            )
    lines.append("}")
    return lines
