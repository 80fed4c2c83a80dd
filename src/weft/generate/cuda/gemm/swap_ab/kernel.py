"""Products with few rows on Hopper, transposed: columns of the weights fill the 64 rows of a warpgroup product.

The rows of the product, 8 or a few more, are its columns. Such products are bound by reading the weights once. A block
has 64 columns for each warpgroup, and one warp copies panels of both operands through a ring; several blocks fit on a
multiprocessor. Constant weights are on their way before the wait for predecessors. A sum may be divided among the
blocks of a cluster, which add up in order. At the end sums go through shared memory, transposed, and a thread finishes
8 neighbours of a row. Source: note on matrix products, sections 2, 7 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.generate.contraction.match import Source
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.pack import packed_by
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.tma.kernel import instruction
from weft.generate.cuda.gemm.tma.operands import STEP, Operand, Share, left, right, rows_of, stages_of_sum
from weft.generate.cuda.gemm.tma.pack import pack_panels
from weft.generate.cuda.gemm.tma.shape import CLUSTER_SHAPES
from weft.generate.cuda.intrinsics.prelude import multicast_header, prelude, storage, tma_header
from weft.generate.cuda.intrinsics.ring import PHASES, Ring, initialised, prefetched, prologue
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import PDL, DeviceRole, Parameter, RoleSource
from weft.generate.expr.integer import Int
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Schedule

MOST_ROWS = 256
"""Columns of a warpgroup product."""
_GROUP = 64
"""Columns of a warpgroup product's left operand."""
_PAD = 4
"""Elements that a row of sums is longer than the tile, for the sake of shared memory's banks."""


@dataclass(frozen=True, slots=True)
class SwapAbConfig(Parameters):
    """Parameters of the template; rows and columns in elements."""

    bm: int
    """Rows of a tile, a multiple of 8."""
    bn: int
    """Columns, 64 for each warpgroup."""
    stages: int
    split: int
    """Split-K: CTAs of a cluster that share the K of a tile."""
    multicast: int = 0
    """Cluster multicast, as in the tma template, but CTAs load whole boxes alternately, so that rows of a tile need not
    be divided."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator; clusters are told where there are some."""
        named = self.named("cuda", template="swap_ab")
        return Schedule(named.generator, tuple(x for x in named.params if x != ("multicast", 0)))

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        cluster_m, cluster_n = CLUSTER_SHAPES[self.multicast]
        return cluster_m * cluster_n if self.multicast else self.split

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.bn // _GROUP

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups, and the warp that copies."""
        return 128 * self.consumers + 32

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.bm + self.bn) * STEP * 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages and barriers."""
        return self.stages * (self.stage_bytes + 16)


def applies(p: Product) -> Declined | None:
    """Why the template does not take a product; None where it does."""
    if p.dtype not in (DType.F16, DType.BF16):
        return Declined("swap-AB takes 16-bit types")
    if p.c.kernel != (1, 1) or p.column_sums or p.norm is not None or p.partial_stats is not None:
        return Declined("swap-AB takes neither convolutions with windows, nor column sums, nor norms")
    if p.a_load != "rows" or p.w_load not in ("packed", "nk", "kn"):
        return Declined("operands that are not loaded in 16-byte vectors along rows")
    rows = rows_of(p)
    if isinstance(rows, Declined):
        return rows
    if not rows.linear or epilogue.plan(p).by_row:
        return Declined("rows of several dimensions, or outputs that are not channels-last")
    return None


def operands(p: Product, s: SwapAbConfig) -> tuple[Operand, Operand] | Declined:
    """The left operand and the right one, as they are copied."""
    rows = rows_of(p)
    if isinstance(rows, Declined):
        return rows
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    of_a = Share(1, "0", f"{(1 << cluster_n) - 1} << down * {cluster_n}") if cluster_n > 1 else None
    of_w = Share(1, "0", f"{sum(1 << i * cluster_n for i in range(cluster_m))} << aside") if cluster_m > 1 else None
    a, w = left(p, rows, s.bm, STEP, (1, 1, s.bm), share=of_a), right(p, s.bn, STEP, share=of_w)
    if isinstance(a, Declined):
        return a
    return w if isinstance(w, Declined) else (a, w)


def refused(p: Product, s: SwapAbConfig) -> Declined | None:
    """Why a product has no kernel of this shape."""
    kt = stages_of_sum(p, STEP)
    if s.bm % 8 or not 8 <= s.bm <= MOST_ROWS or s.bn % _GROUP or s.stages < 2:
        return Declined("swap-AB needs tiles of rows by eights, columns by 64, two stages or more")
    if s.bm * (s.bn + _PAD) * 4 > s.stages * s.stage_bytes:
        return Declined("partial sums that do not fit into the shared memory of the stages")
    if kt < s.split or (s.multicast and s.split > 1):
        return Declined("split-K with more CTAs than k-tiles, or beside cluster multicast")
    if p.w_load == "packed" and -(-p.n // s.bn) % CLUSTER_SHAPES[s.multicast][1]:
        return Declined("tiles of packed columns that the cluster does not divide evenly along N")
    return None


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `SwapAbConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `SwapAbConfig.schedule`."""
    s = SwapAbConfig.of(schedule)
    found = applies(p) or refused(p, s) or operands(p, s)
    if isinstance(found, Declined):
        return found
    a, w = found
    packed = w.map is None
    args = epilogue.arguments(p, packed, False, False)
    maps = [Parameter(name, o.map) for name, o in (("ma", a), ("mw", w)) if o.map is not None]
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    mt, nt, kt = -(-p.m // (s.bm * cluster_m)), -(-p.n // (s.bn * cluster_n)), stages_of_sum(p, STEP)
    batches = p.z // p.c.groups
    barriers = s.shared_bytes - 16 * s.stages
    lines = [
        f"enum {{ STAGE = {s.stage_bytes}, FULL = {barriers}, EMPTY = FULL + {8 * s.stages} }};",
        "const u32 sb = w_shared(sm);",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
        *_places(s, mt, nt, kt),
        f"const int g = {Int('z') / batches}, b = {Int('z') % batches}; (void)g; (void)b;",
        _tile_of_weights(p, s, nt * cluster_n) if packed else "",
        prologue(initialised(4 * s.consumers * (cluster_m + cluster_n - 1), Ring(s.stages))),
        "role.sync();",
        "w_cluster_sync();" if s.multicast else "",
        f"if (warp >= {4 * s.consumers}) {{",
        *_copies(s, a, w),
        "} else {",
        "// swap-AB: the 64 rows of wgmma are columns of the result, so that few rows of it fill an instruction",
        *epilogue.prefetch(p, args.names, s.bn),
        PDL,
        "role.pdl_wait(); role.pdl_trigger();",
        *_beside(p, s, args.names),
        *_products(p, s, w),
        *_end(p, s, w, args.names),
        "}",
    ]
    packings = (pack_panels(p, s.bn, STEP),) if packed else ()
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(x for x in lines if x),
        parameters=(*maps, *args.parameters),
        grid=(mt * nt * p.z * s.cluster, 1, 1),
        globals=instruction(p.multiplied, s.bm, mn_major_a=w.mn_major, mn_major_b=False) + args.constants,
        min_ctas_per_sm=1,
        shared_bytes=s.shared_bytes,
        named_barriers=1,
        cluster=(s.cluster, 1, 1),
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(), tma_header(), *((multicast_header(),) if s.multicast else ())),
        roles=(role,),
        capability=90,
        exact_arch=True,
    )
    return packed_by(source, packings)


def _places(s: SwapAbConfig, mt: int, nt: int, kt: int) -> list[str]:
    """Declares which steps of the sum of which tile a block has; tiles of the same columns are neighbours."""
    block, tile, rank = Int("role.block_x()"), Int("tile"), Int("rank")
    z, tn, tm = tile / (mt * nt), tile % (mt * nt) / mt, tile % mt
    if not s.multicast:
        first, last = (x * kt / s.split for x in (rank, rank + 1))
        return [
            f"const int rank = {block % s.split}, tile = {block / s.split};",
            f"const int first = {first}, last = {last};",
            f"const int z = {z}, tn = {tn}, n0 = tn * {s.bn}, i0 = {tm * s.bm};",
        ]
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    together = Int("together")
    return [
        f"const int rank = 0, together = {block % s.cluster}, tile = {block / s.cluster};",
        f"const int down = {together / cluster_n}, aside = {together % cluster_n}, first = 0, last = {kt};",
        (
            f"const int z = {z}, tn = {tn * cluster_n + 'aside'}, n0 = tn * {s.bn},"
            f" i0 = {(tm * cluster_m + 'down') * s.bm};"
        ),
    ]


def _tile_of_weights(p: Product, s: SwapAbConfig, nt: int) -> str:
    kind, size = storage(p.dtype), stages_of_sum(p, STEP) * s.bn * STEP
    return f"const {kind}* const pk_tile = (const {kind}*)pk + ({Int('(long long)g') * nt + 'tn'}) * {size};"


def _strided(stages: int) -> str:
    """Head of a loop over stages that counts slots and their parity."""
    again = Ring(stages).counted()
    return f"#pragma unroll 1\nfor (u32 it = 0, slot = 0, lap = 0; it < (u32)(last - first); ++it, {again}) {{"


def _copies(s: SwapAbConfig, a: Operand, w: Operand) -> list[str]:
    """The warp that copies."""
    packed = w.map is None
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    one = f"if (t == {128 * s.consumers}) {{"
    # the CTAs of a cluster take turns in loading what they share
    load_a = f"if (it % {cluster_n} == aside) {{ {a.load} }}" if cluster_n > 1 else a.load
    load_w = f"if (it % {cluster_m} == down) {{ {w.load} }}" if cluster_m > 1 else w.load
    early = f"(last - first < {s.stages} ? (u32)(last - first) : {s.stages}u)" if packed and cluster_m == 1 else "0u"
    lines = ["// producer warp: one thread keeps the ring of stages full by TMA"]
    ring = Ring(s.stages)
    lines += [f"{one} {prefetched('ma', *(() if packed else ('mw',)))}"]
    if packed and cluster_m == 1:
        lines += [
            "// weights are constants: a first round of stages, before what earlier kernels wrote is waited for",
            f"for (u32 i = 0; i < {early}; ++i) {{ const int kb = first + (int)i; const u32 to = sb + i * STAGE;",
            f"const u32 bar = {ring.filled_at('i')}; w_bar_expect(bar, {s.stage_bytes}u); {w.load} }}",
        ]
    lines += [
        "}",
        PDL,
        "__syncwarp(); role.pdl_wait(); role.pdl_trigger();",
        f"{one}\n{_strided(s.stages)}",
        f"const int kb = first + (int)it; const u32 bar = {ring.filled_at()}, at = sb + slot * STAGE;",
        f"if (it >= {early}) {{" if packed and cluster_m == 1 else "{",
        f"{ring.await_read('slot', 'lap ^ 1')} w_bar_expect(bar, {s.stage_bytes}u);",
        f"const u32 to = at; {load_w} }}",
        f"const u32 to = at + {s.bn * STEP * 2}; {load_a} }} }}",
        "__syncwarp(); w_cluster_sync(); w_cluster_sync();" if s.split > 1 else "",
        "__syncwarp(); w_cluster_sync();" if s.multicast else "",
    ]
    return lines


def _products(p: Product, s: SwapAbConfig, w: Operand) -> list[str]:
    """The warpgroups that multiply 64 columns each."""
    of_w = f"at + (u32)(warp >> 2) * {_GROUP * STEP * 2}" if s.consumers > 1 else "at"
    if w.mn_major:
        of_w = f"w_operand_at({of_w} + q * 2048, {2 * STEP * STEP}, 1024, 1)"
    else:
        of_w = f"w_operand_at({of_w} + q * 32, 16, 1024, 1)"
    of_a = f"w_operand_at(at + {s.bn * STEP * 2} + q * 32, 16, 1024, 1)"
    return [
        PHASES,
        f"float acc[{s.bm // 2}];",
        _strided(s.stages),
        "const u32 at = sb + slot * STAGE;",
        Ring(s.stages).await_filled("slot", "lap"),
        "w_group_begin();\n#pragma unroll\nfor (u32 q = 0; q < 4; ++q)",
        f"w_product_{p.multiplied}_{int(w.mn_major)}0(acc, {of_w}, {of_a}, it | q);",
        "w_group_commit(); w_group_wait<1>();",
        "// the products before these are complete: their stage is free",
        f"if (it > 0 && {_given(s, f'slot == 0 ? {s.stages - 1} : slot - 1')}",
        "}",
        "w_group_wait<0>();",
    ]


def _given(s: SwapAbConfig, slot: str) -> str:
    """Which lanes give a stage back, and how: to every block that copies into this one, or for which it copies."""
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    at = Ring(s.stages).read_at(f"({slot})")
    if not s.multicast:
        return f"lane == 0) w_bar_arrive({at});"
    n = cluster_n
    who = f"lane < {n} ? down * {n} + lane : (lane - {n} + (lane - {n} >= down)) * {n} + aside"
    return f"lane < {cluster_m + cluster_n - 1}) w_bar_arrive_at({at}, {who});"


def _vectors(p: Product, s: SwapAbConfig) -> int:
    """Of 8 neighbours, of a tile."""
    return min(p.m, s.bm) * s.bn // 8


def _early(p: Product, s: SwapAbConfig) -> list[int]:
    """Slots of operands that are read beside the products, where a thread finishes one vector at most."""
    if _vectors(p, s) > s.split * 128 * s.consumers:
        return []
    return [slot for by_row in (False, True) for slot in epilogue.streamed(p, by_row=by_row)]


def _beside(p: Product, s: SwapAbConfig, names: Mapping[Source, str]) -> list[str]:
    """Reads what the end adds to a thread's vector, on its way while the products are made."""
    slots = _early(p, s)
    if not slots:
        return []
    reads = (f"given{slot} = *(const uint4*)({epilogue.address(p, names, slot)});" for slot in slots)
    return [
        f"uint4 {', '.join(f'given{slot}' for slot in slots)};",
        f"{{ const int o = rank * {128 * s.consumers} + t, m_ = i0 + o / {s.bn // 8}, n_ = n0 + o % {s.bn // 8} * 8;",
        # what does not exist is read at the first row or column instead
        f"const int m = m_ < {p.m} ? m_ : 0, n = n_ < {p.n} ? n_ : 0; (void)m; (void)n; {' '.join(reads)} }}",
    ]


def _end(p: Product, s: SwapAbConfig, w: Operand, names: Mapping[Source, str]) -> list[str]:
    """Sums change their order in shared memory; each block of a cluster finishes its share of the vectors."""
    width, threads, pitch = epilogue.plan(p).width, 128 * s.consumers, s.bn + _PAD
    row = "(warp >> 2) * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * h"
    # packed columns are permuted for threads that hold 8 neighbours: this undoes it
    column = row if w.map is not None else "r / 32 * 32 + r % 8 / 2 * 8 + r / 8 % 4 * 2 + r % 2"
    at = f"row * {pitch} + c * 8"
    if s.split > 1:
        read = f"w_read_cluster(sb + (u32)({at} + e) * 4, y)"
    else:
        read = f"*(const float4*)((const float*)sm + {at} + e)"
    vectors = _vectors(p, s)
    given = {slot: f"(const {storage(p.c.body[slot].dtype)}*)&given{slot}" for slot in _early(p, s)}
    cluster_m, cluster_n = CLUSTER_SHAPES[s.multicast]
    guard = [f"m < {p.m}"] if p.m % (s.bm * cluster_m) and (p.m > s.bm or cluster_m > 1) else []
    guard += [f"n < {p.n}"] if p.n % (s.bn * cluster_n) else []
    inside = f"if ({' && '.join(guard)}) " if guard else ""
    parts = []
    for e in range(0, 8, width):
        body = "\n".join(epilogue.body(p, names, width, f"(v + {e})" if e else "v", given=given))
        parts.append(f"{{ const int n = {Int('n0') + Int('c') * 8 + e}; {inside}{{ {body} }} }}")
    return [
        "// the accumulators are transposed through the shared memory of the stages"
        + ("; split-K: each CTA of the cluster sums its share, in order" if s.split > 1 else ""),
        f"role.named_barrier(0, {threads});",
        f"#pragma unroll\nfor (int h = 0; h < 2; ++h) {{ const int r = {row}; const int n = {column};",
        f"#pragma unroll\nfor (int c = 0; c < {s.bm // 8}; ++c)\n#pragma unroll\nfor (int e = 0; e < 2; ++e)",
        f"((float*)sm)[(8 * c + 2 * (lane & 3) + e) * {pitch} + n] = acc[4 * c + 2 * h + e]; }}",
        "w_cluster_sync();" if s.split > 1 else f"role.named_barrier(0, {threads});",
        f"#pragma unroll 1\nfor (int o = rank * {threads} + t; o < {vectors}; o += {s.split * threads}) {{",
        f"const int row = o / {s.bn // 8}, c = o % {s.bn // 8}, m = i0 + row;",
        "float v[8];",
        f"#pragma unroll\nfor (int y = 0; y < {s.split}; ++y)\n#pragma unroll\nfor (int e = 0; e < 8; e += 4) {{",
        f"const float4 x = {read}; const bool more = y > 0;",
        "v[e] = more ? v[e] + x.x : x.x; v[e + 1] = more ? v[e + 1] + x.y : x.y;",
        "v[e + 2] = more ? v[e + 2] + x.z : x.z; v[e + 3] = more ? v[e + 3] + x.w : x.w; }",
        *parts,
        "}",
        "__syncwarp(); w_cluster_sync();" if s.split > 1 or s.multicast else "",
    ]
