"""Gradient of an embedding table on CUDA cores: one kernel that sorts the indices, one that sums rows by them.

The place of an index among all is the number of those that are less, or equal and before it: each is compared with
all, whose keys lie in shared memory, and nothing is exchanged. So equal indices stay in their order. The indices in
front of each CTA of the second kernel are counted there, too. In the second kernel a CTA has some rows of the table one
behind another, and holds their indices in shared memory. Some lanes have a row each at a time: they add up the rows of
the gradient that its indices name, and write; a row without any is written as zeros, so that nothing is filled before.
Where one row has many indices (padding, a frequent word) all threads of its CTA take a part of them each, and the parts
are added in order. CTAs may have a part of the columns each. There are no atomics, and every sum has one order.

What belongs to no row, as indices of padding do, is sorted behind all rows.

Where an optimizer's update stands behind the gradient, the second kernel applies it to the sums: what lies in the place
of a vector of sums in other tables (weights, moments) is asked for before the sums are formed, a row ahead where these
are few vectors, and the results are written. A thread reads its own elements before it writes them, and needs no others
(what it has read of a row of many indices before it knows, it drops): results may lie in these tables' memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us, memory_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.embedding_gradient import epilogue
from weft.generate.cuda.embedding_gradient.match import EmbeddingGradient, Update
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
_AHEAD = 4
"""Vectors of an update's operands that a lane may have asked for beside those that it works with."""
_RESIDENT = 4
"""CTAs of a multiprocessor, by their registers."""
_PARTS = THREADS // WARP
"""Of the keys, with each of which a warp compares the same 32 indices."""
HELD = 1024
"""Indices of a CTA's rows that shared memory has room for."""
_SLOTS = 4
"""Instructions of a comparison."""


@dataclass(frozen=True, slots=True)
class EmbeddingConfig(Parameters):
    """Parameters of the template; counts."""

    lanes: int
    """Threads that have a row of the table together: a power of two, a warp at most."""
    width: int
    """Neighbouring elements that a lane reads at a time."""
    turns: int = 1
    """Rows that the same lanes have one after another."""
    parts: int = 1
    """CTAs that share the columns of a row."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="embedding_gradient")

    @property
    def together(self) -> int:
        """Rows that a CTA has at a time."""
        return THREADS // self.lanes

    @property
    def rows(self) -> int:
        """Rows that a CTA has."""
        return self.together * self.turns


def vectors(m: EmbeddingGradient, s: EmbeddingConfig) -> int:
    """Of a lane at a time; what an update reads takes registers beside the sums."""
    arrays = 1 + (len(m.update.tables) if m.update is not None else 0)
    return min(-(-_columns(m, s) // s.lanes), max(1, MOST_SUMS // arrays // s.width))


def _columns(m: EmbeddingGradient, s: EmbeddingConfig) -> int:
    """Vectors of a row that a CTA has."""
    return -(-m.width // s.width // s.parts)


def _keys(m: EmbeddingGradient) -> int:
    """Room for keys: whole warps of indices."""
    return -(-m.count // WARP) * WARP


def shapes(m: EmbeddingGradient, facts: GpuFacts) -> list[tuple[float, EmbeddingConfig]]:
    """(modelled cycles, shape), the most promising first."""
    found = dict.fromkeys(_candidates(m, facts))
    return sorted(((cycles(m, s, facts), s) for s in found), key=lambda x: (x[0], -x[1].lanes, x[1].turns))


def _candidates(m: EmbeddingGradient, facts: GpuFacts) -> Iterable[EmbeddingConfig]:
    width = CHUNK // m.itemsize
    while m.width % width:
        width //= 2
    across = min(WARP, 1 << (m.width // width - 1).bit_length())
    for lanes in dict.fromkeys((across, max(1, across // 2))):
        one = EmbeddingConfig(lanes, width)
        wave = facts.sms * _RESIDENT * one.together
        for waves in (1, 4):
            yield replace(one, turns=max(1, -(-m.rows // (wave * waves))))
    if m.width // width >= 2 * WARP:
        yield EmbeddingConfig(WARP, width, max(1, -(-m.rows // (facts.sms * THREADS // WARP))), _RESIDENT)


def cycles(m: EmbeddingGradient, s: EmbeddingConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain: both kernels' begins, all comparisons, memory or the latency of rows.

    A step of bisection and a row are a read each that is waited for; nothing of it was fitted.
    """
    clocks = facts.clock_ghz * 1e3
    warps = -(-m.count // WARP) * _PARTS
    compared = -(-warps // (4 * facts.sms)) * _keys(m) // _PARTS * _SLOTS
    waves = math.ceil(math.ceil(m.rows / s.rows) * s.parts / (facts.sms * _RESIDENT))
    turns = -(-_columns(m, s) // (s.lanes * vectors(m, s)))
    found = waves * (m.count.bit_length() + s.turns * turns) * costs_of(facts).gemv.flight
    size = m.rows * m.width
    read = m.count * m.width * m.dtype.itemsize + size * m.read_bytes
    moved = memory_us(facts, read, size * m.written_bytes) * clocks
    return 2 * gap_us(facts) * clocks + compared + max(found, moved)


def emit(m: EmbeddingGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernels of one schedule made by `EmbeddingConfig.schedule`."""
    return solo(roles(m, schedule), entry)


def roles(m: EmbeddingGradient, schedule: Schedule) -> RoleSource | Declined:
    """Their roles."""
    s = EmbeddingConfig.of(schedule)
    fits = m.width % s.width == 0 and 0 < s.width * m.itemsize <= CHUNK
    if not fits or s.lanes not in (1, 2, 4, 8, 16, 32) or s.turns < 1 or s.parts < 1:
        return Declined(f"rows of {m.width} elements by {s.lanes} lanes in vectors of {s.width}")
    return RoleSource(
        schedule=schedule,
        headers=(prelude(), _BELOW),
        roles=(_sorted(m, s), _summed(m, s)),
        workspace_bytes=8 * m.count + 4 * (_ctas(m, s) + 1),
        input_output_aliases=epilogue.aliases(m),
    )


def _ctas(m: EmbeddingGradient, s: EmbeddingConfig) -> int:
    """Of the second kernel, along the table's rows."""
    return -(-m.rows // s.rows)


def _sorted(m: EmbeddingGradient, s: EmbeddingConfig) -> DeviceRole:
    """The indices' numbers by ascending row, behind them the rows, and how many are in front of each CTA's."""
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
        f"for (int b = {Int('role.block_x()') * _PARTS + 'part'}; b <= {_ctas(m, s)}; b += {room // WARP * _PARTS}) {{",
        f"const u32 edge = (u32){Int('b') * s.rows};",
        "u32 below = 0;",
        f"for (int j = lane * 4; j < {room}; j += {4 * WARP}) {{",
        "const uint4 k = *(const uint4*)(keys + j);",
        "below += (u32)(k.x < edge) + (u32)(k.y < edge) + (u32)(k.z < edge) + (u32)(k.w < edge);",
        "}",
        "#pragma unroll",
        f"for (int o = 1; o < {WARP}; o *= 2) below += w_shfl_word(below, o);",
        f"if (lane == 0) ((u32*)work)[{Int('b') + 2 * m.count}] = below;",
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
    first, t = Int("role.block_x()") * s.rows, Int("t")
    row = f"{first + Int('turn') * s.together + 'own'}"
    edge = Int("role.block_x()") + 2 * m.count
    early = m.update is not None and vectors(m, s) * s.lanes >= _columns(m, s)  # a lane has a row's vectors at once
    ahead = early and m.update is not None and vectors(m, s) * len(m.update.tables) <= _AHEAD
    lines = [
        "const int t = role.thread();",
        f"const int lane = {t % s.lanes}, own = {t / s.lanes};",
        f"const {kind}* const G = (const {kind}*)in{m.dy};",
        "int* const ends = (int*)sm;",
        "u32* const held = (u32*)(ends + 2);  // the rows, behind them the numbers of their indices",
        f"float* const parts = (float*)(held + {2 * HELD});",
        *_columns_of(m, s),
        "role.pdl_wait(); role.pdl_trigger();",
        *(epilogue.scalars(m.update) if m.update is not None else []),
        *(_first_asked(m, s, f"{first + 'own'}") if ahead else []),
        "const u32* order = (const u32*)work;",
        f"const u32* rows = order + {m.count};",
        f"if (t < 2) ends[t] = (int)order[{edge + 't'}];",
        "role.sync();",
        "const int count = ends[1] - ends[0];",
        "order += ends[0]; rows += ends[0];",
        f"if (count <= {HELD}) {{",
        f"for (int i = t; i < count; i += {THREADS}) {{ held[i] = rows[i]; held[i + {HELD}] = order[i]; }}",
        f"rows = held; order = held + {HELD};",
        "}",
        "role.sync();",
        "#pragma unroll 1",
        f"for (int turn = 0; turn < {s.turns}; ++turn) {{",
        f"const int row = {row};",
        f"if (row >= {m.rows}) break;",
        *(_next_asked(m, s) if ahead else [_at(s), *_asked(m, s, "row")] if early else []),
        "const int first = w_below(rows, 0, count, (u32)row), end = w_below(rows, first, count, (u32)row + 1u);",
        f"if (end - first > {MANY}) continue;",
        *_turns(m, s),
        *([] if early else _asked(m, s, "row")),
        *_added(m, s, "first", "end"),
        *_written(m, s, "row"),
        "}",
        "}",
        "#pragma unroll 1",
        f"for (int first = 0; first + {MANY} < count;) {{",
        "const u32 row = rows[first];",
        "const int end = w_below(rows, first, count, row + 1u);",
        f"if (end - first <= {MANY} || row >= {m.rows}u) {{ first = end; continue; }}",
        f"const int each = (end - first + {s.together - 1}) / {s.together};",
        "const int from = first + own * each, until = from + each < end ? from + each : end;",
        *_turns(m, s),
        *_added(m, s, "from", "until"),
        "#pragma unroll",
        f"for (int q = 0; q < {sums}; ++q) parts[{t * sums + 'q'}] = acc[q];",
        "role.sync();",
        "if (own == 0) {",
        *_asked(m, s, "row"),
        "#pragma unroll 1",
        f"for (int p = 1; p < {s.together}; ++p)",
        "#pragma unroll",
        f"for (int q = 0; q < {sums}; ++q) acc[q] += parts[{(Int('p') * s.lanes + 't') * sums + 'q'}];",
        *_written(m, s, "row"),
        "}",
        "role.sync();",
        "}",
        "first = end;",
        "}",
    ]
    return DeviceRole(
        threads=THREADS,
        body="\n".join(lines),
        parameters=(
            Parameter(f"in{m.dy}", Pointer("in", m.dy)),
            Parameter("work", Pointer("work", 0)),
            *epilogue.parameters(m),
        ),
        grid=(_ctas(m, s), s.parts, 1),
        shared_bytes=8 + 8 * HELD + 4 * THREADS * sums,
        name="summed",
    )


_BELOW = """
// how many of n ascending numbers are less than a key, of which `from` are known to be
W_FN int w_below(const u32* numbers, int from, int n, u32 key) {
  while (from < n) {
    const int middle = (from + n) >> 1;
    if (numbers[middle] < key) from = middle + 1; else n = middle;
  }
  return from;
}
"""


def _columns_of(m: EmbeddingGradient, s: EmbeddingConfig) -> list[str]:
    """The first of the CTA's columns, and the one behind the last, in vectors."""
    every, own = m.width // s.width, _columns(m, s)
    if s.parts == 1:
        return []
    return [
        f"const int left = {Int('role.block_y()') * own};",
        f"const int right = left + {own} < {every} ? left + {own} : {every};",
    ]


def _turns(m: EmbeddingGradient, s: EmbeddingConfig) -> list[str]:
    """The loop over a row's vectors, `vectors` of a lane at a time, the same number of times for all threads."""
    left, right = ("0", f"{m.width // s.width}") if s.parts == 1 else ("left", "right")
    return [
        "#pragma unroll 1",
        f"for (int base = {left}; base < {right}; base += {s.lanes * vectors(m, s)}) {{",
        "const int at = base + lane;",
    ]


def _has(m: EmbeddingGradient, s: EmbeddingConfig) -> str:
    """Whether the lane's vector `v` exists, behind `&&`; nothing where all do."""
    across, step = m.width // s.width, s.lanes * vectors(m, s)
    if _columns(m, s) % step == 0 and across % _columns(m, s) == 0:
        return ""
    return f" && {Int('v') * s.lanes + 'at'} < {across if s.parts == 1 else 'right'}"


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


def _asked(m: EmbeddingGradient, s: EmbeddingConfig, row: str) -> list[str]:
    """What an update reads in the place of the lane's sums."""
    if m.update is None:
        return []
    declared = epilogue.declared(m.update, s.width, vectors(m, s), "y")
    return [*declared, *_reads(m, s, m.update, "y", row, _has(m, s)[4:] or "true")]


def _reads(m: EmbeddingGradient, s: EmbeddingConfig, u: Update, name: str, row: str, there: str) -> list[str]:
    place = f"(long long)({row}) * {m.width // s.width} + at"
    return epilogue.asked(u, s.width, vectors(m, s), name, f"{Int('v') * s.lanes}", place, there)


def _at(s: EmbeddingConfig) -> str:
    return f"const int at = {Int('0' if s.parts == 1 else 'left') + 'lane'};"


def _first_asked(m: EmbeddingGradient, s: EmbeddingConfig, row: str) -> list[str]:
    """What an update reads beside the lane's first row, before it is known which indices name it."""
    assert m.update is not None
    there = f"{row} < {m.rows}{_has(m, s)}"
    return [
        _at(s),
        *epilogue.declared(m.update, s.width, vectors(m, s), "next"),
        *_reads(m, s, m.update, "next", row, there),
    ]


def _next_asked(m: EmbeddingGradient, s: EmbeddingConfig) -> list[str]:
    """What was read for this row; for the one behind it the same is asked for."""
    assert m.update is not None
    taken = epilogue.taken(m.update, s.width, vectors(m, s), "y", "next")
    if s.turns == 1:
        return taken
    row = f"{Int('row') + s.together}"
    there = f"turn + 1 < {s.turns} && {row} < {m.rows}{_has(m, s)}"
    return [*taken, *_reads(m, s, m.update, "next", row, there)]


def _written(m: EmbeddingGradient, s: EmbeddingConfig, row: str) -> list[str]:
    """The lane's sums, or what an update makes of them and of what `_asked` read, into a row of the table."""
    kind, across = kind_of(m.dtype, s.width), m.width // s.width
    if_there = f"if ({has[4:]}) " if (has := _has(m, s)) else ""
    step = Int("v") * s.lanes
    to, each = f"(long long){row} * {across} + at", f"#pragma unroll\nfor (int v = 0; v < {vectors(m, s)}; ++v) {{"
    sums = f"const float* const f = acc + {Int('v') * s.width};"
    if m.update is None:
        store = f"{if_there}to[{step}] = {packed(m.dtype, s.width, 'f', 0)};"
        return [f"{kind}* const to = ({kind}*)out0 + {to};", each, sums, store, "}"]
    stores = epilogue.stored(m.update, s.width, f"to + {step}")
    guarded = [f"{if_there}{{", *stores, "}"] if if_there else stores
    return [f"const long long to = {to};", each, sums, *guarded, "}"]
