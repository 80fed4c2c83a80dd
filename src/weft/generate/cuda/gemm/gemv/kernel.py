"""Products with few rows: bound by reading the weights once, so warps stream them 16 bytes per lane.

A warp owns some columns and a slice of the sum; its lanes add up chunks of both operands, then exchange. Slices meet in
shared memory in a fixed order. The first chunks of constant weights are read before the wait for predecessors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product as combinations

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue, float8, narrow
from weft.generate.cuda.gemm.common.pack import pack_tiles, packed_by
from weft.generate.cuda.gemm.common.product import Product, offset_of
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

MOST_ROWS = 8
_FOURS = 4
"""Products of bytes that one instruction adds."""


_DOT = """
W_FN float w_dot_f32(uint4 a, uint4 b, float c) {
  c = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), c);
  c = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), c);
  c = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), c);
  return fmaf(__uint_as_float(a.w), __uint_as_float(b.w), c);
}
#define W_DOT(T) \\
  W_FN float w_dot_word_##T(u32 a, u32 b, float c) { \\
    const float2 x = w_unpack_##T(a), y = w_unpack_##T(b); \\
    return fmaf(x.y, y.y, fmaf(x.x, y.x, c)); \\
  } \\
  W_FN float w_dot_##T(uint4 a, uint4 b, float c) { \\
    c = w_dot_word_##T(a.y, b.y, w_dot_word_##T(a.x, b.x, c)); \\
    return w_dot_word_##T(a.w, b.w, w_dot_word_##T(a.z, b.z, c)); \\
  }
W_DOT(f16) W_DOT(bf16)
"""


@dataclass(frozen=True, slots=True)
class GemvConfig(Parameters):
    """Parameters of the template; counts."""

    cols: int
    """Columns of a warp."""
    slices: int
    """Warps that share a sum."""
    warps: int
    """Groups of such warps in a block."""
    unroll: int
    """Chunks of a column in flight per lane."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="gemv")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.slices * self.warps


def applies(p: Product) -> Declined | None:
    """Why the template does not take a product; None where it does."""
    if p.m > MOST_ROWS:
        return Declined(f"{p.m} rows; the template for few takes {MOST_ROWS}")
    if p.a_load != "rows" or p.k % p.per_load:
        return Declined("rows that are not read in 16-byte vectors")
    if p.w_load not in ("packed", "nk"):
        return Declined("columns that are not read in 16-byte vectors")
    return None


def _in_place(p: Product) -> bool:
    """Constant weights whose columns already lie as the template reads them."""
    w = p.c.w_layout
    steps = (w.channel, w.offset, w.group if p.c.groups > 1 else 0)
    return p.c.kernel == (1, 1) and p.c.w_k == 1 and all(x % p.per_load == 0 for x in steps)


def shapes(p: Product, facts: GpuFacts, keep: int = 4) -> list[tuple[float, GemvConfig]]:
    """(modelled cycles, shape), best first."""
    ranked = [x for s in _candidates(p) if (x := (cycles(p, s, facts), s))[0] < math.inf]
    return sorted(ranked, key=lambda x: (x[0], x[1].threads))[:keep]


def _candidates(p: Product) -> Iterable[GemvConfig]:
    for cols, slices, warps, unroll in combinations((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), (2, 4, 8)):
        if not 2 <= slices * warps <= 16 or cols * unroll * (1 + p.m) > 40 or cols * p.m > 16:
            continue
        if slices > 1 and p.k < slices * unroll * p.per_load * 32:
            continue
        yield GemvConfig(cols, slices, warps, unroll)


def cycles(p: Product, s: GemvConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels: bytes at the rate that so many bytes in flight sustain, plus latencies.

    Infinite where it does not fit.
    """
    fit = costs_of(facts).gemv
    size = p.dtype.itemsize
    blocks = -(-p.n // (s.cols * s.warps)) * p.z
    resident = min(facts.threads_per_sm // s.threads, facts.registers_per_sm // (s.threads * 64))
    if not resident:
        return math.inf
    active = min(blocks, facts.sms * resident)
    flight = active * s.threads * s.cols * s.unroll * 16.0
    total = p.n * p.k * p.z * size
    rate = min(fit.streamed * facts.read_bandwidth[-1][1] / facts.clock_ghz, flight / fit.flight)
    compute = -(-blocks // facts.sms) * s.warps * s.cols * p.k / 128 * (1.0 + p.m * fit.row_slots)
    compute /= _FOURS if p.integers else 1
    rounds = -(-p.k // (32 * p.per_load * s.slices * s.unroll))
    start = gap_us(facts) * facts.clock_ghz * 1e3 + fit.latency
    return start + max(total / rate, compute) + rounds * fit.round + fit.meeting * (s.slices > 1)


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `GemvConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `GemvConfig.schedule`."""
    refused = applies(p)
    if refused is not None:
        return refused
    s = GemvConfig.of(schedule)
    c = p.c
    packed = p.w_load == "packed" and not _in_place(p)
    constant = p.w_load == "packed"
    args = epilogue.arguments(p, packed, False, False)
    kind, dot = storage(p.dtype), p.multiplied if p.bytes else p.dtype.value
    number, add = ("int", "(int)w_shfl_word((u32)acc[i][j], d)") if p.integers else ("float", "w_shfl(acc[i][j], d)")
    chunks = p.k // p.per_load
    per_lane = -(-chunks // (32 * s.slices))
    unroll = min(s.unroll, per_lane)
    batches, y, warp = p.z // c.groups, Int("role.block_y()"), Int("(t >> 5)")
    a_base = offset_of(c.a_layout, c.dims, p.batch, "b") + c.a_layout.offset
    if c.groups > 1:
        a_base += Int("g") * c.a_layout.group
    w_name = "pk" if packed else args.names[c.w]
    if packed:
        w_place = Int(f"((long long)g * {p.n} + n)") * p.k
    else:
        w_place = summed(c.w_layout.offset, Int("g") * c.w_layout.group, offset_of(c.w_layout, c.dims, p.batch, "b"))
        w_place += Int("n") * c.w_layout.channel
    row = offset_of(c.a_layout, c.dims, p.rows, "m")
    block_cols = s.cols * s.warps
    lines = [
        f"__shared__ {number} sums[{s.slices}][{p.m}][{block_cols}];",
        f"const int t = role.thread(), lane = t & 31, slice = {warp % s.slices}, group = {warp / s.slices};",
        f"const int g = {y / batches}, b = {y % batches};",
        "(void)g; (void)b;",
        f"const int n0 = {Int('role.block_x()') * block_cols};",
        f"const {kind}* const A = {f'(const {kind}*){args.names[c.a]}' + a_base};",
        f"const uint4* w[{s.cols}];",
        "#pragma unroll",
        f"for (int j = 0; j < {s.cols}; ++j) {{",
        f"int n = {'n0' + Int('group') * s.cols + 'j'}; n = n < {p.n} ? n : {p.n - 1};",
        f"w[j] = (const uint4*)({f'(const {kind}*){w_name}' + w_place}); }}",
        f"const uint4* x[{p.m}];",
        *[f"{{ const int m = {m}; (void)m; x[{m}] = (const uint4*)({'A' + row}); }}" for m in range(p.m)],
        f"{number} acc[{p.m}][{s.cols}];",
        f"uint4 h[{unroll}][{s.cols}];",
        "#pragma unroll",
        f"for (int i = 0; i < {p.m}; ++i)",
        "#pragma unroll",
        f"for (int j = 0; j < {s.cols}; ++j) acc[i][j] = {'0' if p.integers else '0.0f'};",
        "auto read = [&](int at) {",
        "#pragma unroll",
        f"for (int u = 0; u < {unroll}; ++u) {{ const int k = at + u * {32 * s.slices};",
        "#pragma unroll",
        f"for (int j = 0; j < {s.cols}; ++j) h[u][j] = k < {chunks} ? w[j][k] : make_uint4(0, 0, 0, 0); }} }};",
        "// a warp reads columns of weights 16 bytes at a time, the next ones while these are multiplied",
        "const int start = slice * 32 + lane;",
        "read(start);" if constant else "",
        *epilogue.prefetch(p, args.names, block_cols),
        "role.pdl_wait(); role.pdl_trigger();",
        "" if constant else "read(start);",
        f"for (int at = start; at < {chunks}; at += {32 * s.slices * unroll}) {{",
        "#pragma unroll",
        f"for (int u = 0; u < {unroll}; ++u) {{ const int k = at + u * {32 * s.slices}; if (k < {chunks}) {{",
        "#pragma unroll",
        f"for (int i = 0; i < {p.m}; ++i) {{ const uint4 q = x[i][k];",
        "#pragma unroll",
        f"for (int j = 0; j < {s.cols}; ++j) acc[i][j] = w_dot_{dot}(q, h[u][j], acc[i][j]); }} }} }}",
        f"read(at + {32 * s.slices * unroll});",
        "}",
        "#pragma unroll",
        f"for (int i = 0; i < {p.m}; ++i)",
        "#pragma unroll",
        f"for (int j = 0; j < {s.cols}; ++j) {{",
        "#pragma unroll",
        f"for (int d = 16; d; d >>= 1) acc[i][j] += {add};",
        f"if (lane == 0) sums[slice][i][{Int('group') * s.cols + 'j'}] = acc[i][j]; }}",
        "// epilogue: slices of the sum meet in shared memory" if s.slices > 1 else "// epilogue",
        "role.sync();",
        f"for (int e = t; e < {p.m * block_cols}; e += {s.threads}) {{",
        f"const int m = {Int('e') / block_cols}, n = {'n0' + Int('e') % block_cols};",
        f"if (n < {p.n}) {{ {number} {'sum' if p.integers else 'acc'}[1] = {{sums[0][m][n - n0]}};",
        "#pragma unroll" if s.slices > 1 else "",
        f"for (int y = 1; y < {s.slices}; ++y) {'sum' if p.integers else 'acc'}[0] += sums[y][m][n - n0];"
        if s.slices > 1
        else "",
        "float acc[1] = {__int_as_float(sum[0])};" if p.integers else "",
        *epilogue.body(p, args.names, 1),
        "} }",
    ]
    own = float8.functions(p) + (float8.dot(p.multiplied) if p.float8 else "")
    own += narrow.dot(p.multiplied) if p.integers else ""
    packings = (pack_tiles(p, 1, p.k),) if packed else ()
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(x for x in lines if x),
        parameters=args.parameters,
        grid=(-(-p.n // block_cols), p.z, 1),
        globals=_DOT + own + args.constants,
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
    )
    return packed_by(source, packings)
