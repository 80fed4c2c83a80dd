"""Depthwise convolution on CUDA cores: a thread owns a few neighbouring channels of a tile of pixels.

Every input vector of the tile's field is read once and multiplied into all pixels that see it. Neighbouring threads
take neighbouring channels (channels-last) or neighbouring pixels (row-major), so reads are coalesced either way.

Transposed ones (the gradient of a convolution's input) are taken as sums over what each pixel sees, so that nothing is
multiplied by the zeros between the pixels of a strided one. Weights that change from call to call are read as they lie,
behind the wait for predecessors: a thread's are neighbours, all taps of a channel and then the next channel.
Of a transposed one nothing outside the image is multiplied, be a weight infinite: there is no padding with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.costmodel.constants import Depthwise
from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.contraction.match import StridedLayout
from weft.generate.cuda.conv.depthwise.window import Window, fits, window
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.pack import pack_vectors, packed_by
from weft.generate.cuda.gemm.common.product import Product, image_steps
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.intrinsics.vectors import kind_of, unpacked
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.work import TRANSCENDENTAL
from weft.kernels.source import CudaSource, Schedule

_MOST_TEXT = 1200
"""Multiply-adds that one thread's text may hold where it has a choice: the compiler's time grows faster than they."""
_HELD = 64
"""Words of the field that a thread asks for at once."""
_MOST_SUMS, _MOST_CHANGING = 32, 64
"""Sums of a thread: of networks that are run, and of what is trained, whose batches are larger."""
_MOST_REGISTERS, _OTHER_REGISTERS = 200, 40
"""Of a thread whose sums, weights and parts of the field are counted; and what it needs beside these."""


@dataclass(frozen=True, slots=True)
class DepthwiseConfig(Parameters):
    """Parameters of the template; counts."""

    th: int
    tw: int
    width: int
    """Channels of a thread."""
    threads: int

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="depthwise")


def normal(p: Product) -> Product | Declined:
    """The same with groups as columns, if the template takes it."""
    c = p.c
    if c.ic != 1 or c.oc != 1 or c.groups < 2:
        return Declined("not a depthwise convolution")
    if len(c.dims) != 3:
        return Declined("a depthwise convolution of merged dimensions")
    if not c.w_const and (c.w_layout.channel, *c.w_kernel) != (math.prod(c.kernel), c.kernel[1], 1):
        return Declined("a depthwise convolution whose changing weight does not lie densely")
    if not c.w_const and c.w_layout.offset:
        return Declined("a depthwise convolution whose changing weight is a part of something")
    if c.pack is not None and p.borders is None:
        return Declined("a depthwise convolution behind other padding than zeros")

    def turn(w: StridedLayout) -> StridedLayout:
        return replace(w, group=0, channel=w.group)

    turned = replace(
        c,
        groups=1,
        oc=c.groups,
        a_layout=turn(c.a_layout),
        w_layout=turn(c.w_layout),
        outputs=tuple((slot, turn(w)) for slot, w in c.outputs),
        body=tuple(replace(s, layout=turn(s.layout)) if s.layout is not None else s for s in c.body),
    )
    return replace(p, c=turned)


def shapes(p: Product, facts: GpuFacts, keep: int = 6) -> list[tuple[float, DepthwiseConfig]]:
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
    # the best of either width first: which is faster depends on how much of the latency others hide
    other = next((x for x in keyed if x[2].width != keyed[0][2].width), None)
    if other is not None:
        keyed = [keyed[0], other, *(x for x in keyed[1:] if x is not other)]
    return [(modelled, s) for _, modelled, s in keyed[:keep]]


def _candidates(p: Product) -> Iterable[DepthwiseConfig]:
    c = p.c
    last = c.a_layout.channel == 1
    widest = epilogue.plan(p).width if last else 1
    steps = [c.a_layout.offset, c.a_layout.dims[0], *image_steps(p)]
    while widest > 1 and any(x % widest for x in steps):
        widest //= 2
    training = _in_training(p)
    while training and widest > 1 and not _near(p, DepthwiseConfig(1, 1, widest, 64)):
        widest //= 2
    most = _MOST_CHANGING if training else _MOST_SUMS
    for width in dict.fromkeys((widest, max(1, widest // 2))):
        for th in _tiles(p, 0, 8 if training else 4):
            for tw in _tiles(p, 1, 8 if last else 2):
                work = th * tw * math.prod(c.kernel) * width
                if (work > _MOST_TEXT and th * tw > 1) or th * tw * width > most:
                    continue
                if training and _registers(p, th, tw, width) > _MOST_REGISTERS and th * tw > 1:
                    continue
                yield from (DepthwiseConfig(th, tw, width, threads) for threads in (64, 128, 256))


def _tiles(p: Product, axis: int, most: int) -> list[int]:
    """Rows or columns that a thread may have: whole steps of the stride of a transposed one."""
    step = p.c.spread.strides[axis] if p.c.spread is not None else 1
    return [x * step for x in (1, 2, 4, 8) if x == 1 or x * step <= min(most, p.c.dims[1 + axis])]


def _registers(p: Product, th: int, tw: int, width: int) -> int:
    """About: the compiler keeps weights as they are read."""
    words = max(1, width * p.dtype.itemsize // 4)
    field = min(_HELD, window(p, 0, th).count * window(p, 1, tw).count * words)
    return field + math.prod(p.c.kernel) * words + th * tw * width + _OTHER_REGISTERS


def _in_training(p: Product) -> bool:
    """Whether the weight changes, or it is the gradient of a convolution's input."""
    return not p.c.w_const or p.c.spread is not None


def _near(p: Product, s: DepthwiseConfig) -> bool:
    """True when a thread keeps its weights, read before the wait for predecessors."""
    return math.prod(p.c.kernel) * max(1, s.width * p.dtype.itemsize // 4) <= _HELD


def cycles(p: Product, s: DepthwiseConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels: the largest of five costs, and what it does not hide of the others."""
    fit = costs_of(facts).depthwise
    c = p.c
    pixels, taps = math.prod(c.dims), math.prod(c.kernel)
    count = c.dims[0] * -(-c.dims[1] // s.th) * -(-c.dims[2] // s.tw) * (p.n // s.width)
    blocks = -(-count // s.threads)
    busiest = -(-blocks // facts.sms)
    high, wide = window(p, 0, s.th).count, window(p, 1, s.tw).count
    results = s.th * s.tw * s.width
    registers = (high * wide * s.width + taps * max(2, s.width)) // 2 + results + 32
    resident = min(facts.threads_per_sm // s.threads, facts.registers_per_sm // (min(registers, 255) * s.threads))
    apart = math.prod(c.spread.strides) if c.spread is not None else 1
    way, slots = _results(p, s, fit)
    one = results * way + high * wide * (fit.vector + fit.field * s.width) + taps * (fit.vector + fit.weight * s.width)
    each = (
        results * (slots + fit.tap_slots * taps / apart)
        + fit.vector_slots * high * wide
        + fit.weight_slots * taps
        + fit.thread_slots
    )
    stored = sum((p.sum_dtype if slot < 0 else c.body[slot].dtype).itemsize for slot, _ in c.outputs)
    moved = p.n * pixels * (stored + p.dtype.itemsize * math.prod(c.strides) / apart)
    turned = c.a_layout.channel != 1 and c.outputs[0][1].channel == 1
    shares = (
        -(-busiest // max(1, resident)) * one,
        blocks / facts.sms * s.threads / 128 * each,
        max(moved / (facts.l2_bandwidth / facts.clock_ghz), fit.across * p.n * pixels / facts.sms if turned else 0.0),
        p.dtype.itemsize * count * s.width * high * wide / facts.sms / fit.port_bytes,
        busiest * fit.block,
    )
    shown = min(1.0, fit.shown + fit.in_step / busiest)
    return gap_us(facts) * facts.clock_ghz * 1e3 + (1 - shown) * max(shares) + shown * sum(shares)


def _results(p: Product, s: DepthwiseConfig, fit: Depthwise) -> tuple[float, float]:
    """Cycles of a thread, and issue slots, for what follows the sum of one result."""
    prims = [step.prim for step in p.c.body if step.source is None and step.prim is not Prim.CAST]
    special = sum(x in TRANSCENDENTAL for x in prims)
    plain = sum(CATEGORY[x] is Category.ELEMENTWISE for x in prims) - special
    clipped, divided, others = epilogue.exact(p.c)
    way = fit.result + fit.step * plain + fit.special * special + fit.clipped * clipped + fit.exact * (divided + others)
    way += fit.operand * len(epilogue.leaves(p.c)) / s.width
    return way, fit.result_slots + fit.step_slots * plain + fit.special_slots * special + fit.clipped_slots * clipped


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `DepthwiseConfig.schedule`; `p` comes from `normal`."""
    return solo(roles(p, schedule), entry)


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `DepthwiseConfig.schedule`; `p` comes from `normal`."""
    s = DepthwiseConfig.of(schedule)
    c = p.c
    args = epilogue.arguments(p, c.w_const, False, False)
    kind = storage(p.dtype)
    vectors = p.n // s.width
    tall, wide = -(-c.dims[1] // s.th), -(-c.dims[2] // s.tw)
    count = c.dims[0] * tall * wide * vectors
    last, i = c.a_layout.channel == 1, Int("i")
    if last:
        place = f"cv = {i % vectors}, tx = {i / vectors % wide}, ty = {i / (vectors * wide) % tall}"
    else:
        place = f"tx = {i % wide}, ty = {i / wide % tall}, cv = {i / (wide * tall) % vectors}"
    place += f", img = {i / (vectors * wide * tall)}"
    row_step, col_step = image_steps(p)
    rows, cols = window(p, 0, s.th), window(p, 1, s.tw)
    taps, weight = math.prod(c.kernel), "pk" if c.w_const else args.names[c.w]
    near = _near(p, s)
    if not near and s.width > 1 and not c.w_const:
        return Declined("changing weights of several channels that a thread does not keep")
    if not fits(p, 0, s.th) or not fits(p, 1, s.tw):
        return Declined("a tile that is no whole steps of the stride")
    image = c.a_layout.offset + Int("img") * c.a_layout.dims[0]
    origin = summed(image, Int("y0") * row_step, Int("x0") * col_step, Int("n") * c.a_layout.channel)
    lines = [
        f"const int i = role.block_x() * {s.threads} + role.thread();",
        f"const int {place};",
        f"const int n = {Int('cv') * s.width}, g = 0, b = 0; (void)g; (void)b;",
        f"const {kind}* const w = {f'(const {kind}*){weight}' + Int('n') * taps};",
    ]
    vector = kind_of(p.dtype, s.width)
    weights = [f"{vector} k{tap}; w_read_if(k{tap}, {Int('w') + tap * s.width}, i < {count});" for tap in range(taps)]
    wait = "role.pdl_wait(); role.pdl_trigger();"
    lines += [] if not near else [*weights, wait] if c.w_const else [wait, *weights]
    lines += [
        *([] if near else [wait]),
        f"const bool live = i < {count};",
        f"const int y0 = {Int('ty') * rows.step - rows.before}, x0 = {Int('tx') * cols.step - cols.before};",
        f"const {kind}* const A = {f'(const {kind}*){args.names[c.a]}' + origin};",
        f"float acc[{s.th * s.tw}][{s.width}];",
        "#pragma unroll",
        f"for (int q = 0; q < {s.th * s.tw}; ++q)",
        "#pragma unroll",
        f"for (int e = 0; e < {s.width}; ++e) acc[q][e] = 0.0f;",
    ]
    lines += _sums(p, s, rows, cols, near)
    lines += _outputs(p, s, args)
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(lines),
        parameters=args.parameters,
        grid=(-(-count // s.threads), 1, 1),
        globals=args.constants,
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
    )
    return packed_by(source, [pack_vectors(p, s.width)]) if c.w_const else source


def _sums(p: Product, s: DepthwiseConfig, field_rows: Window, field_cols: Window, near: bool) -> list[str]:
    """The unrolled sum: every vector of the field once, into all pixels that see it.

    Vectors of several rows are asked for before the first of them is used: none waits for another.
    """
    row_step, col_step = image_steps(p)
    rows = [y for y, taps in enumerate(field_rows.taps) if taps]
    cols = [x for x, taps in enumerate(field_cols.taps) if taps]
    words = max(1, s.width * p.dtype.itemsize // 4)
    together = max(1, _HELD // (len(cols) * words))
    kind = kind_of(p.dtype, s.width)
    lines = [f"const bool in_x{x} = {_inside(p, s, 1, x, field_cols)};" for x in cols]
    for start in range(0, len(rows), together):
        part = rows[start : start + together]
        lines.append("{")
        for y in part:
            lines.append(f"const bool in_y{y} = {_inside(p, s, 0, y, field_rows)};")
            for x in cols:
                at = Int("A") + (y * row_step + x * col_step)
                lines.append(f"{kind} h{y}_{x}; w_read_if(h{y}_{x}, {at}, live && in_y{y} && in_x{x});")
        lines.append("w_together();")
        for y in part:
            for x in cols:
                lines += [f"if (in_y{y} && in_x{x})"] if p.c.spread is not None else []
                lines += [f"{{ float v[{s.width}];", *unpacked(p.dtype, s.width, f"h{y}_{x}", "v")]
                for i, ty in field_rows.taps[y]:
                    for j, tx in field_cols.taps[x]:
                        lines += _multiply(p, s, i * s.tw + j, ty * p.c.kernel[1] + tx, near)
                lines.append("}")
        lines.append("}")
    return lines


def _inside(p: Product, s: DepthwiseConfig, axis: int, at: int, field: Window) -> str:
    """Condition: row or column `at` of the field is one of the image."""
    c = p.c
    place = Int("yx"[axis] + "0") + at
    if _in_training(p) and field.always(at, -(-c.dims[1 + axis] // (s.th, s.tw)[axis])):
        return "true"
    if field.size:
        return f"(u32){place.tight} < {field.size}u"
    if (s.th, s.tw)[axis] == 1:
        return "true"
    size = (c.dims[1 + axis] - 1) * c.strides[axis] + (c.kernel[axis] - 1) * c.dilations[axis] + 1
    return f"{place} < {size}"


def _multiply(p: Product, s: DepthwiseConfig, pixel: int, tap: int, near: bool) -> list[str]:
    """Statements: `v` times the weights of a tap, added to a pixel's sums."""
    kind = kind_of(p.dtype, s.width)
    read = [] if near else [f"{kind} k{tap}; w_read_if(k{tap}, {Int('w') + tap * s.width}, live);"]
    return [
        f"{{ float f[{s.width}];",
        *read,
        *(unpacked(p.dtype, s.width, f"k{tap}", "f") if p.c.w_const or s.width == 1 else _picked(p, tap, s)),
        "#pragma unroll",
        f"for (int e = 0; e < {s.width}; ++e) acc[{pixel}][e] = fmaf(v[e], f[e], acc[{pixel}][e]);",
        "}",
    ]


def _picked(p: Product, tap: int, s: DepthwiseConfig) -> list[str]:
    """Statements: the weights of a tap as floats into `f`, out of vectors with all taps of a channel side by side."""
    lines, taps, per = [], math.prod(p.c.kernel), 4 // p.dtype.itemsize
    for e in range(s.width):
        vector, within = divmod(e * taps + tap, s.width)
        word, half = divmod(within, per)
        name = f"k{vector}" if s.width == per else f"k{vector}.{'xyzw'[word]}"
        value = f"w_unpack_{p.dtype.value}({name}).{'xy'[half]}" if per == 2 else f"__uint_as_float({name})"
        lines.append(f"f[{e}] = {value};")
    return lines


def _outputs(p: Product, s: DepthwiseConfig, args: epilogue.Arguments) -> list[str]:
    """Every pixel of the tile through the epilogue."""
    c = p.c
    rows, cols = c.dims[1], c.dims[2]
    lines = [
        f"auto finish = [&](const float (&acc)[{s.width}], int m) {{",
        *epilogue.body(p, args.names, s.width),
        "};",
        "if (!live) return;",
    ]
    for i in range(s.th):
        for j in range(s.tw):
            test = []
            y, x = Int("ty") * s.th + i, Int("tx") * s.tw + j
            if rows % s.th and i:
                test.append(f"{y} < {rows}")
            if cols % s.tw and j:
                test.append(f"{x} < {cols}")
            guard = f"if ({' && '.join(test)}) " if test else ""
            lines.append(f"{guard}finish(acc[{i * s.tw + j}], {(Int('img') * rows + y) * cols + x});")
    return lines
