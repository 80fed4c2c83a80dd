"""Gradient of an embedding table on CUDA cores: one kernel that sorts the indices, one that sums rows by them.

The place of an index among all is the number of those that are less, or equal and before it: each is compared with
all, whose keys lie in shared memory, and nothing is exchanged. So equal indices stay in their order. In the second
kernel some lanes have a row of the table each. They find its first index by bisection, add up the rows of the gradient
that its indices name, and write; a row without any is written as zeros, so that nothing is filled before. Where one row
has many indices (padding, a frequent word) all threads of its CTA take a part of them each, and the parts are added in
order. There are no atomics, and every sum has one order.

What belongs to no row, as indices of padding do, is sorted behind all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weft.costmodel.roofline import gap_us, memory_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.embedding_gradient.match import EmbeddingGradient
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.intrinsics.vectors import kind_of, packed, unpacked
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.integer import Int
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Pointer, Schedule

WARP, THREADS = 32, 256
CHUNK = 16
"""Bytes of neighbouring elements that a lane takes at most."""
MOST_SUMS = 24
"""Of a thread."""
MANY = 64
"""Indices of a row beyond which all threads of its CTA share them."""
_ASKED = 8
"""Vectors that a lane asks for at once."""
_PARTS = THREADS // WARP
"""Of the keys, with each of which a warp compares the same 32 indices."""
_STEP_CYCLES, _ROW_CYCLES = 14.0, 900.0
"""Of four comparisons of a warp; of finding a row and its first gradient."""


@dataclass(frozen=True, slots=True)
class EmbeddingConfig(Parameters):
    """Parameters of the template; counts."""

    lanes: int
    """Threads that have a row of the table together: a power of two, a warp at most."""
    width: int
    """Neighbouring elements that a lane reads at a time."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="embedding_gradient")

    @property
    def rows(self) -> int:
        """Of the table, in a CTA."""
        return THREADS // self.lanes


def vectors(m: EmbeddingGradient, s: EmbeddingConfig) -> int:
    """Of a lane at a time."""
    return min(-(-m.width // (s.lanes * s.width)), MOST_SUMS // s.width)


def _keys(m: EmbeddingGradient) -> int:
    """Room for keys: whole warps of indices."""
    return -(-m.count // WARP) * WARP


def shapes(m: EmbeddingGradient, facts: GpuFacts) -> list[tuple[float, EmbeddingConfig]]:
    """(modelled cycles, shape), the most promising first."""
    return sorted(((cycles(m, s, facts), s) for s in _candidates(m)), key=lambda x: (x[0], -x[1].lanes))


def _candidates(m: EmbeddingGradient) -> Iterable[EmbeddingConfig]:
    width = CHUNK // m.dtype.itemsize
    while m.width % width:
        width //= 2
    across = min(WARP, 1 << (m.width // width - 1).bit_length())
    for lanes in dict.fromkeys((across, max(1, across // 2), max(1, across // 4))):
        yield EmbeddingConfig(lanes, width)


def cycles(m: EmbeddingGradient, s: EmbeddingConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain: both kernels' begins, all comparisons, memory or the latency of rows."""
    clocks = facts.clock_ghz * 1e3
    warps = -(-m.count // WARP) * _PARTS
    compared = -(-warps // (4 * facts.sms)) * _keys(m) / _PARTS / 4 * _STEP_CYCLES / 4
    resident = facts.sms * (facts.threads_per_sm // THREADS) * s.rows
    turns = -(-m.width // (s.lanes * s.width * vectors(m, s)))
    found = -(-m.rows // resident) * _ROW_CYCLES * turns
    row = m.width * m.dtype.itemsize
    moved = memory_us(facts, m.count * row, m.rows * row) * clocks
    return 2 * gap_us(facts) * clocks + compared + max(found, moved)


def emit(m: EmbeddingGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernels of one schedule made by `EmbeddingConfig.schedule`."""
    return solo(roles(m, schedule), entry)


def roles(m: EmbeddingGradient, schedule: Schedule) -> RoleSource | Declined:
    """Their roles."""
    s = EmbeddingConfig.of(schedule)
    if m.width % s.width or not 0 < s.width * m.dtype.itemsize <= CHUNK or s.lanes not in (1, 2, 4, 8, 16, 32):
        return Declined(f"rows of {m.width} elements by {s.lanes} lanes in vectors of {s.width}")
    return RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(_sorted(m), _summed(m, s)),
        workspace_bytes=8 * m.count,
    )


def _sorted(m: EmbeddingGradient) -> DeviceRole:
    """The indices' numbers by ascending row, behind them the rows."""
    room, nowhere = _keys(m), m.rows
    each = room // _PARTS
    none = f" || x == {m.padding}" if m.padding >= 0 else ""
    less = [f"before += k.{e} < own + (u32)({Int('j') + n} < i);" for n, e in enumerate("xyzw")]
    lines = [
        "const int t = role.thread(), lane = t % 32, part = t / 32;",
        "u32* const keys = (u32*)sm;",
        f"u32* const counts = keys + {room};",
        "role.pdl_wait(); role.pdl_trigger();",
        f"for (int j = t; j < {room}; j += {THREADS}) {{",
        f"const long long x = j < {m.count} ? ((const long long*)in{m.index})[j] : 0;",
        f"keys[j] = j >= {m.count} ? 0xffffffffu : x < 0 || x >= {m.rows}{none} ? {nowhere}u : (u32)x;",
        "}",
        "role.sync();",
        f"const int i = {Int('role.block_x()') * WARP + 'lane'};",
        "const u32 own = keys[i];",
        "u32 before = 0;",
        "#pragma unroll 4",
        f"for (int j = part * {each}; j < (part + 1) * {each}; j += 4) {{",
        "const uint4 k = *(const uint4*)(keys + j);",
        *less,
        "}",
        "counts[t] = before;",
        "role.sync();",
        f"if (t < {WARP} && i < {m.count}) {{",
        f"for (int p = 1; p < {_PARTS}; ++p) before += counts[t + p * {WARP}];",
        "((u32*)work)[before] = (u32)i;",
        f"((u32*)work)[before + {m.count}] = own;",
        "}",
    ]
    return DeviceRole(
        threads=THREADS,
        body="\n".join(lines),
        parameters=(
            Parameter(f"in{m.index}", Pointer("in", m.index)),
            Parameter("work", Pointer("work", 0), WRITTEN),
        ),
        grid=(room // WARP, 1, 1),
        shared_bytes=4 * (room + THREADS),
    )


def _summed(m: EmbeddingGradient, s: EmbeddingConfig) -> DeviceRole:
    """Rows of the table, each the sum of what its indices name."""
    sums = vectors(m, s) * s.width
    kind = kind_of(m.dtype, s.width)
    lines = [
        "const int t = role.thread();",
        f"const int lane = {Int('t') % s.lanes}, own = {Int('t') / s.lanes};",
        "const u32* const order = (const u32*)work;",
        f"const u32* const rows = order + {m.count};",
        f"const {kind}* const G = (const {kind}*)in{m.dy};",
        f"int* const firsts = (int*)sm; int* const ends = firsts + {s.rows};",
        f"float* const parts = (float*)(ends + {s.rows});",
        f"const int row = {Int('role.block_x()') * s.rows + 'own'};",
        "role.pdl_wait(); role.pdl_trigger();",
        "int first = 0;",
        *_bisected(m, "first", "(u32)row"),
        "int end = first;",
        f"if (row < {m.rows} && first < {m.count} && rows[first] == (u32)row) {{",
        "end = 0;",
        *_bisected(m, "end", "(u32)row + 1u"),
        "}",
        "if (lane == 0) { firsts[own] = first; ends[own] = end; }",
        f"if (row < {m.rows} && end - first <= {MANY}) {{",
        *_turns(m, s),
        *_added(m, s, "first", "end"),
        *_written(m, s, "row"),
        "}",
        "}",
        "role.sync();",
        "#pragma unroll 1",
        f"for (int r = 0; r < {s.rows}; ++r) {{",
        "const int begin = firsts[r], stop = ends[r];",
        f"if (stop - begin <= {MANY}) continue;",
        f"const int each = (stop - begin + {s.rows - 1}) / {s.rows};",
        "const int from = begin + own * each, until = from + each < stop ? from + each : stop;",
        *_turns(m, s),
        *_added(m, s, "from", "until"),
        "#pragma unroll",
        f"for (int q = 0; q < {sums}; ++q) parts[{Int('t') * sums + 'q'}] = acc[q];",
        "role.sync();",
        "if (own == 0) {",
        "#pragma unroll 1",
        f"for (int p = 1; p < {s.rows}; ++p)",
        "#pragma unroll",
        f"for (int q = 0; q < {sums}; ++q) acc[q] += parts[{(Int('p') * s.lanes + 't') * sums + 'q'}];",
        *_written(m, s, f"({Int('role.block_x()') * s.rows + 'r'})"),
        "}",
        "role.sync();",
        "}",
        "}",
    ]
    return DeviceRole(
        threads=THREADS,
        body="\n".join(lines),
        parameters=(
            Parameter(f"in{m.dy}", Pointer("in", m.dy)),
            Parameter("work", Pointer("work", 0)),
            Parameter("out0", Pointer("out", 0), WRITTEN),
        ),
        grid=(-(-m.rows // s.rows), 1, 1),
        shared_bytes=8 * s.rows + 4 * THREADS * sums,
        name="summed",
    )


def _bisected(m: EmbeddingGradient, name: str, key: str) -> list[str]:
    """How many of the sorted rows are less than a key."""
    top = 1 << math.floor(math.log2(m.count))
    return [
        "#pragma unroll",
        f"for (int step = {top}; step > 0; step /= 2)",
        f"if ({name} + step <= {m.count} && rows[{name} + step - 1] < {key}) {name} += step;",
    ]


def _turns(m: EmbeddingGradient, s: EmbeddingConfig) -> list[str]:
    """The loop over a row's vectors, `vectors` of a lane at a time, the same number of times for all threads."""
    step = s.lanes * vectors(m, s)
    return [
        "#pragma unroll 1",
        f"for (int base = 0; base < {m.width // s.width}; base += {step}) {{",
        "const int at = base + lane;",
    ]


def _has(m: EmbeddingGradient, s: EmbeddingConfig) -> str:
    """Whether the lane's vector `v` exists, behind `&&`; nothing where all do."""
    across = m.width // s.width
    return "" if across % (s.lanes * vectors(m, s)) == 0 else f" && {Int('v') * s.lanes + 'at'} < {across}"


def _added(m: EmbeddingGradient, s: EmbeddingConfig, begin: str, end: str) -> list[str]:
    """The gradients of some indices, one after another; those of several are asked for before the first is added."""
    kind, count = kind_of(m.dtype, s.width), vectors(m, s)
    many = max(1, _ASKED // count)
    each = [f"#pragma unroll\nfor (int v = 0; v < {count}; ++v)"]
    return [
        f"float acc[{count * s.width}] = {{}};",
        "#pragma unroll 1",
        f"for (int k = {begin}; k < {end}; k += {many}) {{",
        f"{kind} x[{many}][{count}];",
        "#pragma unroll",
        f"for (int n = 0; n < {many}; ++n) {{",
        f"const bool there = k + n < {end};",
        f"const {kind}* const g = G + (long long)(there ? order[k + n] : 0u) * {m.width // s.width} + at;",
        *each,
        f"w_read_if(x[n][v], g + {Int('v') * s.lanes}, there{_has(m, s)});",
        "}",
        "#pragma unroll",
        f"for (int n = 0; n < {many}; ++n) {{",
        f"if (k + n < {end}) {{",
        *each,
        "{",
        f"float f[{s.width}];",
        *unpacked(m.dtype, s.width, "x[n][v]", "f"),
        "#pragma unroll",
        f"for (int e = 0; e < {s.width}; ++e) acc[{Int('v') * s.width + 'e'}] += f[e];",
        "}",
        "}",
        "}",
        "}",
    ]


def _written(m: EmbeddingGradient, s: EmbeddingConfig, row: str) -> list[str]:
    """The lane's sums into a row of the table."""
    kind, across = kind_of(m.dtype, s.width), m.width // s.width
    has = _has(m, s)
    return [
        f"{kind}* const to = ({kind}*)out0 + (long long){row} * {across} + at;",
        "#pragma unroll",
        f"for (int v = 0; v < {vectors(m, s)}; ++v) {{",
        f"const float* const f = acc + {Int('v') * s.width};",
        f"{f'if ({has[4:]}) ' if has else ''}to[{Int('v') * s.lanes}] = {packed(m.dtype, s.width, 'f', 0)};",
        "}",
    ]
