"""Gradient of a depthwise convolution's weight on CUDA cores: one kernel of partial sums, one that adds them up.

A thread owns a few neighbouring channels and has a sum of each for every tap of some rows of the window. It goes over
strips of results in a row: a vector of the image is read once for each row of the window and multiplied with all
results of the strip that see it. Neighbouring threads take neighbouring channels, and behind these the next strip.
Threads of a CTA with the same channels add up in order through shared memory, CTAs through memory and a second kernel:
there are no atomics, and the order of all sums is that of the schedule.

What lies outside the image is read as zeros, as the primitives have it. Results behind the end of a row, which only
fill a strip, are not multiplied: an infinity of the image would make NaN of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us, memory_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.depthwise_wgrad.match import WeightGradient
from weft.generate.cuda.intrinsics.prelude import prelude, storage, store
from weft.generate.cuda.intrinsics.vectors import kind_of, unpacked
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Pointer, Schedule

CHUNK = 16
"""Bytes of neighbouring channels that a thread takes at most."""
WARP = 32
MOST_SUMS = 72
"""Of a thread: nine taps of eight channels."""
MOST_REGISTERS, OTHER_REGISTERS = 216, 32
"""Of a thread whose sums, results and parts of the field are counted; and what it needs beside these."""
_HELD = 64
"""Words of the field that a thread asks for at once."""
_SHARED = 24 * 1024
"""Bytes in which threads of a CTA meet."""
_STRIPS = (1, 2, 4, 7, 8)
_THREADS = (128, 256)
_ADDING = 16
"""Warps of the second kernel's CTAs: each adds every 16th partial sum."""


@dataclass(frozen=True, slots=True)
class WgradConfig(Parameters):
    """Parameters of the template; counts."""

    width: int
    """Channels of a thread."""
    tw: int
    """Results of a strip."""
    lines: int
    """Rows of the window of a thread."""
    vectors: int
    """Groups of `width` channels of a CTA."""
    slots: int
    """Strips that a CTA has at a time."""
    splits: int
    """CTAs that share channels and rows of the window: each has a part of the strips."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="depthwise_wgrad")

    @property
    def threads(self) -> int:
        """Of a CTA, whole warps: some of the last may have nothing to do."""
        return -(-self.vectors * self.slots // WARP) * WARP


@dataclass(frozen=True, slots=True)
class _Work:
    """What follows from sizes and a configuration."""

    wide: int
    """Strips of a row of results."""
    strips: int
    """Of all images."""
    across: int
    """CTAs side by side along the channels."""
    down: int
    """CTAs that share the rows of the window."""
    steps: int
    """Of a thread, one strip each."""
    columns: tuple[tuple[tuple[int, int], ...], ...]
    """By column of the image that a strip reads: (result of the strip, column of the window)."""

    @property
    def used(self) -> int:
        """Columns that are read."""
        return sum(map(bool, self.columns))


def _work(m: WeightGradient, s: WgradConfig) -> _Work:
    wide = -(-m.results[1] // s.tw)
    strips = m.images * m.results[0] * wide
    stride, dilation, taps = m.strides[1], m.dilations[1], m.kernel[1]
    pairs = [(j * stride + k * dilation, j, k) for j in range(s.tw) for k in range(taps)]
    columns = tuple(
        tuple((j, k) for place, j, k in pairs if place == at) for at in range(max(p for p, _, _ in pairs) + 1)
    )
    return _Work(
        wide=wide,
        strips=strips,
        across=-(-m.channels // s.width // s.vectors),
        down=-(-m.kernel[0] // s.lines),
        steps=-(-strips // (s.splits * s.slots)),
        columns=columns,
    )


def _words(m: WeightGradient, s: WgradConfig) -> int:
    return max(1, s.width * m.dtype.itemsize // 4)


def _registers(m: WeightGradient, s: WgradConfig, w: _Work) -> int:
    """About."""
    field = min(_HELD, (s.tw + s.lines * w.used) * _words(m, s))
    return s.lines * m.kernel[1] * s.width + s.tw * s.width + field + OTHER_REGISTERS


def _resident(m: WeightGradient, s: WgradConfig, w: _Work, facts: GpuFacts) -> int:
    """CTAs of a multiprocessor."""
    registers = min(_registers(m, s, w), 255) * s.threads
    return max(1, min(facts.threads_per_sm // s.threads, facts.registers_per_sm // registers))


def shapes(m: WeightGradient, facts: GpuFacts, keep: int = 5) -> list[tuple[float, WgradConfig]]:
    """(modelled cycles, shape), of each width and strip the best: that of each width, best first, then the others.

    Which width is fastest depends on how much of the latency others hide.
    """
    ranked = sorted(((cycles(m, s, facts), s) for s in _candidates(m, facts)), key=lambda x: (x[0], x[1].threads))
    best: dict[tuple[int, int], tuple[float, WgradConfig]] = {}
    for modelled, s in ranked:
        best.setdefault((s.width, s.tw), (modelled, s))
    found = list(best.values())
    first = [next(x for x in found if x[1].width == width) for width in dict.fromkeys(s.width for _, s in found)]
    return [*first, *(x for x in found if x not in first)][:keep]


def _candidates(m: WeightGradient, facts: GpuFacts) -> Iterable[WgradConfig]:
    widest = CHUNK // m.dtype.itemsize
    while m.channels % widest:
        widest //= 2
    for width in dict.fromkeys((widest, max(1, widest // 2), max(1, widest // 4))):
        lines = min(m.kernel[0], MOST_SUMS // (m.kernel[1] * width))
        if not lines and width > 1:
            continue
        lines = -(-m.kernel[0] // -(-m.kernel[0] // max(1, lines)))  # alike for all CTAs that share the window
        for tw in (x for x in _STRIPS if x <= max(1, m.results[1])):
            for threads in _THREADS:
                groups = m.channels // width
                vectors = -(-groups // -(-groups // (threads // 4)))
                one = WgradConfig(width, tw, lines, vectors, threads // vectors, 1)
                w = _work(m, one)
                if _registers(m, one, w) > MOST_REGISTERS and (tw, width) != (1, 1):
                    continue
                most = -(-w.strips // one.slots)
                splits = facts.sms * _resident(m, one, w, facts) // (w.across * w.down)
                yield WgradConfig(width, tw, lines, vectors, one.slots, max(1, min(splits, most)))


def cycles(m: WeightGradient, s: WgradConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain: the largest of five costs, what it does not hide, and the second kernel."""
    fit = costs_of(facts).depthwise
    w = _work(m, s)
    ctas = w.across * w.down * s.splits
    steps = ctas * w.steps * s.threads
    loads = s.tw + s.lines * w.used
    each = fit.vector_slots * loads + fit.tap_slots * s.tw * s.lines * m.kernel[1] * s.width
    one = w.steps * loads * (fit.vector + fit.field * s.width)
    busiest = -(-ctas // facts.sms)
    clocks = facts.clock_ghz * 1e3
    shares = (
        -(-busiest // _resident(m, s, w, facts)) * one,
        steps * each / facts.sms / 128,
        memory_us(facts, m.read_bytes * w.down, 0) * clocks,
        steps * loads * s.width * m.dtype.itemsize / facts.sms / fit.port_bytes,
        busiest * fit.block,
    )
    added = s.splits * m.taps * m.channels
    second = -(-added // (WARP * _ADDING * facts.sms)) * fit.vector + fit.block
    shown = min(1.0, fit.shown)
    return 2 * gap_us(facts) * clocks + (1 - shown) * max(shares) + shown * sum(shares) + second


def emit(m: WeightGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernels of one schedule made by `WgradConfig.schedule`."""
    return solo(roles(m, schedule), entry)


def roles(m: WeightGradient, schedule: Schedule) -> RoleSource | Declined:
    """Their roles."""
    s = WgradConfig.of(schedule)
    if m.channels % s.width:
        return Declined(f"{m.channels} channels in vectors of {s.width}")
    partial = s.splits * m.taps * m.channels
    return RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(_partial(m, s), _added(m, s)),
        workspace_bytes=4 * partial,
    )


def _partial(m: WeightGradient, s: WgradConfig) -> DeviceRole:
    w = _work(m, s)
    kind = storage(m.dtype)
    c = m.channels
    thread, block, i = Int("t"), Int("role.block_x()"), Int("i")
    high, broad = m.image
    rest = w.across * s.splits
    top = Int("y") * m.strides[0] - m.pads[0]
    if w.down > 1:
        top += Int("line") * m.dilations[0]
    left = Int("tx") * (s.tw * m.strides[1]) - m.pads[1]
    result = (Int("row") * m.results[1] + Int("tx") * s.tw) * c + "n"
    seen = summed(Int("img") * (high * broad * c), Int("y0") * (broad * c), Int("x0") * c, "n")
    lines = [
        f"const int t = role.thread(), cv = {thread % s.vectors}, slot = {thread / s.vectors};",
        f"const int part = {block % s.splits}, side = {block / s.splits % w.across};",
        *([f"const int line = {block / rest * s.lines};"] if w.down > 1 else []),
        f"const int n = {(Int('side') * s.vectors + 'cv') * s.width};",
        f"const bool mine = slot < {s.slots} && n < {c};",
        f"float acc[{s.lines * m.kernel[1]}][{s.width}];",
        "#pragma unroll",
        f"for (int q = 0; q < {s.lines * m.kernel[1]}; ++q)",
        "#pragma unroll",
        f"for (int e = 0; e < {s.width}; ++e) acc[q][e] = 0.0f;",
        "role.pdl_wait(); role.pdl_trigger();",
        "#pragma unroll 1",
        f"for (int step = 0; step < {w.steps}; ++step) {{",
        f"const int i = {(Int('part') * w.steps + 'step') * s.slots + 'slot'};",
        f"const bool live = mine && i < {w.strips};",
        f"const int tx = {i % w.wide}, row = {i / w.wide};",
        f"const int y = {Int('row') % m.results[0]}, img = {Int('row') / m.results[0]};",
        f"const int y0 = {top}, x0 = {left};",
        f"const {kind}* const G = (const {kind}*)in{m.dy} + {result};",
        f"const {kind}* const X = (const {kind}*)in{m.x} + {seen};",
        *_strip(m, s, w),
        "}",
        *_met(m, s, w),
    ]
    return DeviceRole(
        threads=s.threads,
        body="\n".join(lines),
        parameters=(
            *(Parameter(f"in{k}", Pointer("in", k)) for k in sorted({m.dy, m.x})),
            Parameter("work", Pointer("work", 0), WRITTEN),
        ),
        grid=(w.across * w.down * s.splits, 1, 1),
        shared_bytes=4 * _together(m, s) * s.slots * s.vectors * s.width,
    )


def _strip(m: WeightGradient, s: WgradConfig, w: _Work) -> list[str]:
    """One strip's results times what they see: rows of the image are asked for before the first of them is used."""
    kind, c, words = kind_of(m.dtype, s.width), m.channels, _words(m, s)
    cols = [x for x, pairs in enumerate(w.columns) if pairs]
    ends = bool(m.results[1] % s.tw)
    lines = [f"const bool has{j} = {Int('tx') * s.tw + j} < {m.results[1]};" for j in range(s.tw) if ends]
    lines += [f"const bool in_x{x} = (u32){(Int('x0') + x).tight} < {m.image[1]}u;" for x in cols]
    lines += [
        f"{kind} g{j}; w_read_if(g{j}, {Int('G') + j * c}, live{f' && has{j}' if ends else ''});" for j in range(s.tw)
    ]
    lines.append(f"float g[{s.tw}][{s.width}];")
    first = max(1, (_HELD - s.tw * words) // (len(cols) * words))
    rows = list(range(s.lines))
    parts, others = [rows[:first]], max(1, _HELD // (len(cols) * words))
    parts += [rows[at : at + others] for at in range(first, s.lines, others)]
    for part in parts:
        lines.append("{")
        for r in part:
            inside = f"(u32){(Int('y0') + r * m.dilations[0]).tight} < {m.image[0]}u"
            own = f" && line + {r} < {m.kernel[0]}" if m.kernel[0] % s.lines and r else ""
            lines.append(f"const bool in_y{r} = {inside}{own};")
            for x in cols:
                at = Int("X") + (r * m.dilations[0] * m.image[1] + x) * c
                lines.append(f"{kind} h{r}_{x}; w_read_if(h{r}_{x}, {at}, live && in_y{r} && in_x{x});")
        lines.append("w_together();")
        if part[0] == 0:
            for j in range(s.tw):
                lines += unpacked(m.dtype, s.width, f"g{j}", f"g[{j}]")
        for r in part:
            for x in cols:
                lines += [f"{{ float v[{s.width}];", *unpacked(m.dtype, s.width, f"h{r}_{x}", "v")]
                for j, k in w.columns[x]:
                    sums = f"acc[{r * m.kernel[1] + k}][e]"
                    lines += [
                        *([f"if (has{j})"] if ends else []),
                        "#pragma unroll",
                        f"for (int e = 0; e < {s.width}; ++e) {sums} = fmaf(v[e], g[{j}][e], {sums});",
                    ]
                lines.append("}")
        lines.append("}")
    return lines


def _together(m: WeightGradient, s: WgradConfig) -> int:
    """Taps whose sums meet at a time."""
    return min(s.lines * m.kernel[1], max(1, _SHARED // (4 * s.slots * s.vectors * s.width)))


def _met(m: WeightGradient, s: WgradConfig, w: _Work) -> list[str]:
    """The sums of all strips of a CTA, in order, into memory: [part][tap][channel]."""
    across = s.vectors * s.width
    count, per, v = s.lines * m.kernel[1], _together(m, s), Int("v")
    tap_of = Int("q") + Int("line") * m.kernel[1] if w.down > 1 else Int("q")
    place = (Int("part") * m.taps + "tap") * m.channels + "channel"
    lines = ["float* const met = (float*)sm;"]
    for first in range(0, count, per):
        here = range(first, min(count, first + per))
        lines.append("if (mine) {")
        for q, tap in enumerate(here):
            own = (Int("slot") + q * s.slots) * across + Int("cv") * s.width
            lines.append(f'_Pragma("unroll") for (int e = 0; e < {s.width}; ++e) met[{own + "e"}] = acc[{tap}][e];')
        lines += [
            "}",
            "role.sync();",
            f"for (int v = t; v < {len(here) * across}; v += {s.threads}) {{",
            f"const int q = {v / across}, at = {v % across}, tap = {tap_of + first};",
            f"const int channel = {Int('side') * across + 'at'};",
            "float total = 0.0f;",
            f"for (int k = 0; k < {s.slots}; ++k) total += met[{(Int('q') * s.slots + 'k') * across + 'at'}];",
            f"if (channel < {m.channels} && tap < {m.taps}) ((float*)work)[{place}] = total;",
            "}",
            "role.sync();",
        ]
    return lines


def _added(m: WeightGradient, s: WgradConfig) -> DeviceRole:
    """The partial sums of all CTAs, in order."""
    count, q = m.taps * m.channels, Int("q")
    at = Int("k") * count + "q"
    lines = [
        "float* const met = (float*)sm;",
        f"const int t = role.thread(), q = {Int('role.block_x()') * WARP + Int('t') % WARP}, p = {Int('t') / WARP};",
        "role.pdl_wait(); role.pdl_trigger();",
        "float total = 0.0f;",
        f"if (q < {count}) {{",
        "#pragma unroll 8",
        f"for (int k = p; k < {s.splits}; k += {_ADDING}) total += w_read_partial({Int('(const float*)work') + at});",
        "}",
        "met[t] = total;",
        "role.sync();",
        f"if (t >= {WARP} || q >= {count}) return;",
        "total = 0.0f;",
        f"for (int k = 0; k < {_ADDING}; ++k) total += met[k * {WARP} + t];",
        f"const int tap = {q / m.channels}, n = {q % m.channels};",
        store(m.dtype, f"({storage(m.dtype)}*)out0 + {Int('n') * m.taps + 'tap'}", "total"),
    ]
    return DeviceRole(
        threads=_ADDING * WARP,
        body="\n".join(lines),
        parameters=(
            Parameter("work", Pointer("work", 0)),
            Parameter("out0", Pointer("out", 0), WRITTEN),
        ),
        grid=(-(-count // WARP), 1, 1),
        shared_bytes=4 * _ADDING * WARP,
        name="added",
    )
