"""Products and convolutions on Hopper: TMA fills stages, warpgroups multiply them, registers are stored.

Warp-specialised: one producer warp issues TMA, all others are consumer warpgroups (wgmma). Cooperative consumers share
the rows of a tile; with ping-pong consumers the epilogue of one warpgroup overlaps the main loop of the other. CTAs are
persistent while copies run ahead. Split-K is over the CTAs of a cluster, which add up through distributed shared memory
in order.
Source: note on matrix products, sections 2 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

from weft.generate.cuda.gemm.common import epilogue, float8, narrow, tf32
from weft.generate.cuda.gemm.common.normed_text import FEW
from weft.generate.cuda.gemm.common.pack import packed_by
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.tma import normed as fixed
from weft.generate.cuda.gemm.tma import store as tma_store
from weft.generate.cuda.gemm.tma import two_level
from weft.generate.cuda.gemm.tma.align import Aligned, aligned, copies
from weft.generate.cuda.gemm.tma.end import COLUMN_SUMS, finish
from weft.generate.cuda.gemm.tma.operands import (
    STEP,
    Operand,
    Rows,
    blocks_of_channels,
    halo_size,
    halo_tile,
    left,
    right,
    rows_of,
    stages_of_sum,
)
from weft.generate.cuda.gemm.tma.pack import pack_panels
from weft.generate.cuda.gemm.tma.ring import pipeline_state
from weft.generate.cuda.gemm.tma.shape import (
    MOST_SHARES,
    MOST_TWO_LEVEL,
    StreamK,
    TmaConfig,
    clusters_of,
    stream_k_of,
    tiles_of,
    two_level_registers,
)
from weft.generate.cuda.intrinsics.prelude import multicast_header, prelude, storage, tma_header
from weft.generate.cuda.intrinsics.ring import PHASES, Ring, initialised, prefetched, prologue
from weft.generate.cuda.intrinsics.wgmma import wgmma
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import PDL, DeviceRole, Parameter, RegisterSplit, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

_BLOCK, _BLOCKS = Int("role.block_x()"), Int("role.blocks_x()")
_MODE = {64: 1, 32: 2, 16: 3}
"""Swizzle of an operand by its panel, as descriptors have it."""
_MOVED = {2: RegisterSplit(40, 232), 3: RegisterSplit(32, 160)}
"""Register split of producer and consumers (setmaxnreg), by consumer warpgroups."""


@cache
def fixup_header() -> str:
    """The functions of the fix-up: partial sums and flags between CTAs."""
    return (Path(__file__).parent / "weft_cuda_fixup.h").read_text(encoding="utf-8")


def instruction(kind: str, columns: int, *, mn_major_a: bool, mn_major_b: bool) -> str:
    """The function that multiplies 64 rows by 32 bytes of the sum by `columns`; tests bring their own.

    `kind`: f16, bf16, or tf32, two of e4m3 and e5m2 and two of s8 and u8, whose operands are K-major.
    """
    if kind[:2] in narrow.SHORT.values():
        return narrow.instruction(kind, columns)
    if kind == "tf32":
        return wgmma(f"w_product_{kind}_00", columns, "tf32.tf32", k=8)
    if kind[:4] in float8.SHORT.values():
        return wgmma(f"w_product_{kind}_00", columns, f"{kind[:4]}.{kind[4:]}", k=32)
    majors = (mn_major_a, mn_major_b)
    name = f"w_product_{kind}_{int(mn_major_a)}{int(mn_major_b)}"
    return wgmma(name, columns, f"{kind}.{kind}", mn_major=majors)


def emit(p: Product, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `TmaConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Product, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `TmaConfig.schedule`."""
    s = TmaConfig.of(schedule)
    moved = aligned(p)
    p = moved.product if isinstance(moved, Aligned) else p
    rows = rows_of(p)
    if isinstance(rows, Declined):
        return rows
    if s.stages < 2 or s.halo_stages == 1:
        return Declined("a single stage, or a single halo tile: loads must run ahead of products")
    if s.taps_per_stage not in (1, p.c.kernel[1]):
        return Declined("a stage of weights that is neither a tap nor a row of the kernel")
    if s.two_level and (not p.float8 or s.pingpong or two_level_registers(s.rows, s.bn, s.two_level) > MOST_TWO_LEVEL):
        return Declined(
            "two-level accumulation is for 8-bit floats, cooperative consumers, and tiles that leave registers for it"
        )
    wrong = _no_multicast(p, rows, s) or _no_stream_k(p, rows, s)
    if wrong is not None:
        return wrong
    to = tma_store.stored(p, rows, s) if s.store else None
    if isinstance(to, Declined):
        return to
    a = halo_tile(p, rows, s.box, s.panel) if s.halo_stages else left(p, rows, s.bm, s.panel, s.box, share=s.left_share)
    if s.bn % 32 and (p.w_load != "nk" or s.interleaved or s.split > 1 or p.column_sums or s.bn % 16):
        return Declined(
            "columns of a tile that are no multiple of 32, which interleaving, split-K and column sums need"
        )
    if s.overfetch and p.w_load != "kn":
        return Declined("over-fetch of a K-major operand, whose panels have no columns beside the tile's")
    halo = s.halo_stages > 0
    w = right(p, s.bn + s.overfetch, s.panel, s.step, share=s.right_share, interleaved=s.interleaved, halo=halo)
    if isinstance(a, Declined):
        return a
    if isinstance(w, Declined):
        return w
    before = _workspace(p, rows, s)
    if isinstance(moved, Aligned):
        a, w = moved.operand(a, moved.left, before), moved.operand(w, moved.right, before)
    end = epilogue.plan(p, p.vector)
    wrong = fixed.declined(p, rows, s, end.width)
    if wrong is not None:
        return wrong
    if p.column_sums and (s.split > 1 or s.stream_k or not rows.linear or p.z > 1 or end.width != 8):
        return Declined("sums of columns: of whole tiles of one matrix, 8 neighbours at a time")
    if end.by_row:
        return Declined("outputs that are not channels-last")
    packed = w.map is None
    args = epilogue.arguments(p, packed, s.stream_k, s.stream_k)
    maps = [Parameter(name, o.map) for name, o in (("ma", a), ("mw", w)) if o.map is not None]
    maps += [Parameter("my", to.map)] if to is not None else []
    units = math.prod(clusters_of(p, rows, s)) * p.z
    grid = (
        s.persistent_ctas // s.multicast_ctas
        if s.stream_k
        else min(s.persistent_ctas // s.multicast_ctas or units, units)
    ) * s.cluster
    own = 4 if s.pingpong else 4 * s.consumers
    readers = own * (s.cluster_m + s.cluster_n - 1)
    ring = s.stages * s.stage_bytes + s.staged_bytes
    places = f", FIELD = {a.bytes}, THERE = TURN + 16, READ = THERE + {8 * s.halo_stages}" if s.halo_stages else ""
    barriers = [initialised(readers, Ring(s.stages)), *([initialised(own, _halo_ring(s))] if s.halo_stages else [])]
    lines = [
        (
            f"enum {{ STAGE = {s.stage_bytes}, RING = {s.halo_stages * a.bytes}, FULL = RING + {ring},"
            f" EMPTY = FULL + {8 * s.stages}, TURN = EMPTY + {8 * s.stages}{places}{fixed.place(p, s)} }};"
        ),
        "const u32 sb = w_shared(sm);",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
        "// full barriers count TMA's bytes, empty ones the consumer warps that have read a stage",
        prologue(*barriers, "w_bar_init(sb + TURN, 4); w_bar_init(sb + TURN + 8, 4);"),
        "role.sync();",
        f"w_cluster_sync();\nconst u32 rank = role.block_x() % {s.multicast_ctas};" if s.multicast else "",
        _range(p, rows, s),
        f"if (warp >= {4 * s.consumers}) {{",
        "// producer warp: one thread keeps the ring of stages full by TMA",
        *_copies(p, rows, s, a, w),
        "} else {",
        f"// consumer warpgroup{'s' if s.consumers > 1 else ''}: wgmma from shared memory, sums in registers",
        *_products(p, rows, s, a, w, end.width, to),
        "}",
    ]
    headers = [prelude(), tma_header()]
    headers += [
        text()
        for text, wanted in (
            (multicast_header, s.multicast),
            (fixup_header, s.stream_k),
            (tma_store.header, to is not None),
        )
        if wanted
    ]
    functions = (
        (tf32.FUNCTIONS if p.tf32 else "")
        + float8.functions(p)
        + (narrow.SUMS if p.integers else "")
        + (COLUMN_SUMS if p.column_sums else "")
    )
    functions += FEW if p.partial_stats is not None else ""
    if p.norm is not None:
        functions += fixed.instruction(p.multiplied, s.bn, mn_major_b=w.mn_major)
    else:
        functions += instruction(p.multiplied, s.bn, mn_major_a=a.mn_major, mn_major_b=w.mn_major)
    packings = (pack_panels(p, s.bn, s.panel, halo=halo),) if packed else ()
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(x for x in lines if x),
        parameters=(*maps, *args.parameters),
        grid=(grid, 1, 1),
        globals=functions + args.constants,
        min_ctas_per_sm=s.min_ctas,
        shared_bytes=s.shared_bytes(a.bytes) + fixed.bytes_of(p),
        named_barriers=fixed.barriers(p, s) or int(s.split > 1),
        registers=_MOVED[s.consumers] if s.moves_registers else None,
        cluster=(s.cluster, 1, 1),
        co_resident=stream_k_of(p, rows, s, _k_tiles(p, s)).sharers * s.multicast_ctas if s.coop_fixup else 1,
        idle_threads=96 if s.moves_registers else 0,
    )
    copying = (copies(p, moved.matrices, before),) if isinstance(moved, Aligned) else ()
    source = RoleSource(
        schedule=schedule,
        headers=tuple(headers),
        roles=(role, *copying),
        order=(1, 0) if copying else (),
        workspace_bytes=before + (moved.bytes if isinstance(moved, Aligned) else 0),
        state_bytes=_state(p, rows, s, grid),
        capability=90,
        exact_arch=True,
    )
    return packed_by(source, packings)


def _halo_ring(s: TmaConfig) -> Ring:
    """The ring of halo tiles."""
    return Ring(s.halo_stages, "sb + THERE", "sb + READ")


def _workspace(p: Product, rows: Rows, s: TmaConfig) -> int:
    """Bytes for partial sums of stream-K."""
    if not s.stream_k:
        return 0
    return stream_k_of(p, rows, s, _k_tiles(p, s)).units * s.cluster * s.bm * s.bn * 4


def _state(p: Product, rows: Rows, s: TmaConfig, grid: int) -> int:
    """Bytes of flags: one for each warp, and for each CTA that reads what it leaves."""
    if not s.stream_k:
        return 0
    return grid * 4 * s.consumers * 4 * (stream_k_of(p, rows, s, _k_tiles(p, s)).sharers if s.coop_fixup else 1)


def _no_multicast(p: Product, rows: Rows, s: TmaConfig) -> Declined | None:
    """Why CTAs of a cluster cannot share operands by multicast."""
    counts, columns = tiles_of(p, rows, s)
    if not s.multicast:
        return None
    if s.split > 1 or s.min_ctas > 1 or (s.cluster_n > 1 and s.halo_stages):
        return Declined(
            "cluster multicast excludes split-K, several CTAs per multiprocessor, and 1xN clusters of halo tiles"
        )
    if not rows.linear and math.prod(counts) % s.cluster_m:
        return Declined("boxes of pixels that the cluster does not divide evenly along M")
    if p.w_load == "packed" and columns % s.cluster_n:
        return Declined("tiles of packed columns that the cluster does not divide evenly along N")
    return None


def _no_stream_k(p: Product, rows: Rows, s: TmaConfig) -> Declined | None:
    """Why this cannot be a stream-K kernel."""
    if not s.stream_k:
        return Declined("a cooperative fix-up without stream-K") if s.coop_fixup else None
    if s.split > 1 or s.min_ctas > 1 or s.pingpong or s.halo_stages or not s.persistent_ctas:
        return Declined(
            "stream-K needs a persistent grid, cooperative consumers, one CTA per multiprocessor; no split-K, no halo"
        )
    e = stream_k_of(p, rows, s, _k_tiles(p, s))
    if s.coop_fixup and (
        s.bn % 32 or not 2 <= e.sharers <= s.rows // 64 * s.bn // 32 or s.store or p.partial_stats or p.column_sums
    ):
        return Declined("a cooperative fix-up needs equal shares of every tile, each of whole fragments of 64x32")
    if e.units > MOST_SHARES * e.shared:
        return Declined(f"stream-K with more than {MOST_SHARES} CTAs per tile, or tiles that fill the grid")
    if not e.units <= e.shared * e.k_tiles < 1 << 31 or e.shared * e.k_tiles * e.units >= 1 << 31:
        return Declined("stream-K with fewer k-tiles than CTAs, or tiles that fill the grid")
    return None


def _k_tiles(p: Product, s: TmaConfig) -> int:
    """K-tiles of the whole sum: a stage of the pipeline each."""
    if s.halo_stages:
        return _rounds(p, s) * blocks_of_channels(p, s.panel)
    return stages_of_sum(p, s.panel)


def _rounds(p: Product, s: TmaConfig) -> int:
    """Stages that go through all taps of a halo tile; 1 without."""
    return math.prod(p.c.kernel) // s.taps_per_stage if s.halo_stages else 1


def _range(p: Product, rows: Rows, s: TmaConfig) -> str:
    """Declares the k-tiles of this CTA and its rank in the cluster."""
    kt = _k_tiles(p, s)
    if s.stream_k:
        e = stream_k_of(p, rows, s, kt)
        unit = _BLOCK / s.multicast_ctas
        return f"const int unit = {unit}, lowest = {e.range_of('unit')}, highest = {e.range_of('unit + 1')};"
    if s.split == 1:
        return f"const int first = 0, last = {kt};"
    taps = _rounds(p, s)  # a field is read whole
    rank = Int("rank")
    first, last = (x * (kt // taps) / s.split * taps for x in (rank, rank + 1))
    return f"const int rank = role.block_x() % {s.split};\nconst int first = {first}, last = {last};"


def _tile(p: Product, rows: Rows, s: TmaConfig) -> str:
    """Declares where `tile` begins: group, batch, column, and the coordinates of its box of rows."""
    counts, _ = tiles_of(p, rows, s)
    (mt, nt), batches = clusters_of(p, rows, s), p.z // p.c.groups
    tile, r, tm, tn, z = map(Int, ("tile", "r", "tm", "tn", "z"))
    n0 = (tn * s.cluster_n + f"(int){s.rank_n}" if s.cluster_n > 1 else tn) * s.bn
    if nt == 1 or mt == 1:
        place = f"const int tm = {r / nt}, tn = {r % nt};"
    else:
        n = s.raster_group
        high = str(n) if mt % n == 0 else f"({mt} - band * {n} < {n} ? {mt} % {n} : {n})"
        place = (
            f"\n// raster order: columns of {n} tiles, so that operands stay in the L2 cache\n"
            f"const int band = {r / (n * nt)}, in = {r % (n * nt)}, high = {high},"
            f" tm = {Int('band') * n} + in % high, tn = in / high;"
        )
    b2, b1, b0 = s.box
    if s.cluster_m > 1:
        place += f" const int mine = {tm * s.cluster_m} + (int){s.rank_m};"
        tm = Int("mine")
    i0 = tm % counts[2] * b0 if not (s.cluster_m > 1 and rows.linear) else tm * b0
    i2 = "0" if s.cluster_m > 1 and rows.linear else tm / (counts[2] * counts[1]) * b2
    return (
        f"const int z = {tile / (mt * nt)}, r = {tile % (mt * nt)}; {place}"
        f" const int g = {z / batches}, b = {z % batches}, n0 = {n0};"
        f" const int i0 = {i0}, i1 = {tm / counts[2] % counts[1] * b1}, i2 = {i2};"
        " (void)g; (void)b; (void)n0; (void)i0; (void)i1; (void)i2;"
    )


def _loop(p: Product, rows: Rows, s: TmaConfig, begin: str, step: str) -> str:
    tiles = math.prod(clusters_of(p, rows, s)) * p.z
    if s.stream_k:
        e = stream_k_of(p, rows, s, _k_tiles(p, s))
        kt = e.k_tiles
        # from the highest k-tile down, so that what a CTA leaves to the next one is there when that comes to it
        return (
            f"int upto = highest, next = {e.shared} + unit;\n#pragma unroll 1\nfor (;;) {{ int tile, first, last;"
            f" if (upto > lowest) {{ tile = (upto - 1) / {kt}; first = lowest > tile * {kt} ? lowest - tile * {kt} : 0;"
            f" last = upto - tile * {kt}; upto = tile * {kt} + first; }}"
            f" else if (next < {tiles}) {{ tile = next; next += {e.units}; first = 0; last = {kt}; }} else break;"
            f" {_tile(p, rows, s)}"
        )
    if s.split > 1:
        return f"{{ const int tile = {_BLOCK / s.split}; {_tile(p, rows, s)}"
    return f"#pragma unroll 1\nfor (int tile = {begin}; tile < {tiles}; tile += {step}) {{ {_tile(p, rows, s)}"


def _copies(p: Product, rows: Rows, s: TmaConfig, a: Operand, w: Operand) -> list[str]:
    """The producer warp. Constant weights do not wait for the predecessors."""
    packed = w.map is None
    kt, nt = stages_of_sum(p, s.panel), -(-p.n // s.bn)
    kind = storage(p.dtype)
    box = math.prod(s.box) if not a.mn_major else s.bm
    bytes_ = ((0 if s.halo_stages else box) + s.bn + s.overfetch) * s.step * 2
    tn = Int("tn") * s.cluster_n + s.rank_n if s.cluster_n > 1 else Int("tn")
    tile_at = (
        f"const {kind}* const pk_tile = (const {kind}*)pk"
        f" + ({Int('(long long)g') * nt + tn}) * {kt * s.bn * p.in_elements(STEP)};"
        if packed
        else ""
    )
    a_bytes = 0 if s.halo_stages else s.bm * STEP * 2
    state = pipeline_state(s)
    one = f"if (t == {128 * s.consumers}) {{"
    lines = ["// register split: what the producer gives back, consumers take"] if s.moves_registers else []
    lines += ["role.dealloc_registers();"] if s.moves_registers else []
    maps = ("ma", *(() if packed else ("mw",)), *(("my",) if s.store else ()))
    lines.append(f"{one} {prefetched(*maps)}")
    early = "0u"
    if packed and not s.stream_k:
        early = f"(last - first < {s.stages} ? (u32)(last - first) : {s.stages}u)"
        lines += [
            "// weights are constants: a first round of stages, before what earlier kernels wrote is waited for",
            f"const int tile = {_BLOCK / s.cluster}; {_tile(p, rows, s)} {tile_at}",
            (
                f"for (u32 i = 0; i < {early}; ++i) {{ const u32 bar = {state.ring.filled_at('i')};"
                f" const u32 to = {summed('sb', 'RING', Int('i') * 'STAGE', a_bytes)};"
                f" const int kb = first + (int)i;"
                f" w_bar_expect(bar, {bytes_}u); {w.load} }}"
            ),
        ]
    lines += [
        "}",
        PDL,
        "__syncwarp(); role.pdl_wait(); role.pdl_trigger();",
        f"{one} u32 it = 0{', cell = 0' if s.halo_stages else ''};",
        _loop(
            p,
            rows,
            s,
            *(str(x / s.multicast_ctas) for x in (_BLOCK, _BLOCKS)),
        ),
        tile_at,
        PHASES,
        f"{state.before}#pragma unroll 1\nfor ({state.head}) {{ const int kb = st; (void)kb;",
        _load_halo(p, s, a) if s.halo_stages else "",
        f"const u32 {state.slot}bar = {state.ring.filled_at()};",
        f"if (it >= {early}) {{" if packed and not s.stream_k else "{",
        f"{state.ring.await_read('slot', f'{state.parity} ^ 1')} w_bar_expect(bar, {bytes_}u);",
        f"const u32 to = {summed('sb', 'RING', Int('slot') * 'STAGE', a_bytes)}; {w.load} }}",
        "}" if s.halo_stages else f"const u32 to = sb + slot * STAGE; {a.load} }}",
        "} }",
        "// as often as consumers: see the sums of split-K" if s.split > 1 else "",
        "__syncwarp(); w_cluster_sync(); w_cluster_sync();" if s.split > 1 else "",
        "// no CTA leaves while another one may still write into its shared memory" if s.multicast else "",
        "__syncwarp(); w_cluster_sync();" if s.multicast else "",
    ]
    return lines


def _load_halo(p: Product, s: TmaConfig, a: Operand) -> str:
    """Before the first tap of a block of channels."""
    taps, ring = _rounds(p, s), _halo_ring(s)
    free = ring.await_read("slot", f"{ring.parity('cell')} ^ 1")
    return (
        f"if (st % {taps} == 0) {{ const u32 slot = {ring.slot('cell')}, bar = {ring.filled_at()};"
        f" const u32 to = sb + slot * FIELD; const int cb = {Int('st') / taps};"
        f" {free} w_bar_expect(bar, {a.copied}u);"
        f" {a.load} ++cell; }}"
    )


def _descriptor(at: str, step: str, o: Operand, rows: int, panel: int) -> str:
    """An operand's 32 bytes of the sum number `step` (0 to 3) of a stage."""
    if o.mn_major:
        return f"w_operand_at({at} + {step} * 2048, {2 * STEP * STEP}, 1024, 1)"
    per, q = panel // 16, Int(step)
    offset = q * 32 if per == 4 else q / per * (rows * panel * 2) + q % per * 32
    return f"w_operand_at({at} + (u32)({offset}), 16, {16 * panel}, {_MODE[panel]})"


def _in_halo(p: Product, s: TmaConfig) -> str:
    """64 pixels of a tap: 8 neighbours of a row lie together, the next row of the tile is the next row of the field."""
    c, (_, tall, _) = p.c, s.box
    high, wide = halo_size(p, s.box)
    dy, dx = c.dilations
    line, tap = Int("((row0 + i * 64) / 8)"), Int("tap")
    start = line * wide if s.box[0] == 1 else (line / tall * high + line % tall) * wide
    if s.taps_per_stage == 1:
        place = start + tap / c.kernel[1] * (dy * wide) + tap % c.kernel[1] * dx
    else:
        place = start + tap * (dy * wide) + Int("u") * dx
    row = 2 * s.panel
    return f"w_operand_at(there + (u32)(({place}) * {row} + q * 32), 16, {row * wide}, {_MODE[s.panel]})"


def _fix_up(p: Product, rows: Rows, s: TmaConfig, end: list[str]) -> list[str]:
    """A tile's last CTA adds what the CTAs before it have left, and has the epilogue; the others leave their sums."""
    e = stream_k_of(p, rows, s, _k_tiles(p, s))
    high, warps, threads = s.rows // 64, 4 * s.consumers, 128 * s.consumers
    each = f"#pragma unroll\nfor (int i = 0; i < {high}; ++i)\n#pragma unroll\nfor (int c = 0; c < {s.bn // 8}; ++c)"
    place = f"[(i * {s.bn // 8} + c) * {threads}]"
    left = ", ".join(narrow.carried(f"acc[i][4 * c{x}]", integers=p.integers) for x in ("", " + 1", " + 2", " + 3"))
    kind, part = ("int", "__float_as_int(part.{})") if p.integers else ("float", "part.{}")
    adds = " ".join(f"d[{x}] += {part.format(f)};" for x, f in enumerate("xyzw"))
    flags = warps * (e.sharers if s.coop_fixup else 1)

    def mine(unit: str) -> str:
        block = f"({Int(unit) * s.multicast_ctas} + (int)rank)" if s.multicast else unit
        return (
            f"float4* const sums = (float4*)work + {block} * {s.bm * s.bn // 4} + t;"
            f" unsigned* const flag = (unsigned*)state + {Int(block) * flags} + warp;"
        )

    if s.coop_fixup:
        read = f"const float4 part = w_read_partial(sums + (i * {s.bn // 8} + c) * {threads});"
        add = f"{{ {read} {kind}* const d = acc[i] + 4 * c; {adds} }}"
        return [*_cooperative_fix_up(s, e, mine, f"sums{place} = make_float4({left});", add), *end]
    return [
        "// stream-K fix-up: the CTA that ends a tile adds what those before it have left of it, the nearest first",
        f"if (last < {e.k_tiles}) {{ {mine('unit')}\n{each}",
        f"sums{place} = make_float4({left});",
        "__syncwarp(); if (lane == 0) w_raise(flag);",
        "} else {",
        # each lane waits for one of them, then all are read one after another, the nearest first
        "if (first > 0) { const int after = unit - lane;",
        f"if (after > 0 && {e.range_of('after')} > tile * {e.k_tiles})",
        f"{{ {mine('(after - 1)')} (void)sums; w_await(flag); }}\n__syncwarp();",
        f"#pragma unroll 1\nfor (int other = unit - 1;; --other) {{ {mine('other')} (void)flag;\n{each} {{",
        f"const float4 part = w_read_partial(sums + (i * {s.bn // 8} + c) * {threads});",
        f"{kind}* const d = acc[i] + 4 * c; {adds} }}",
        f"if ({e.range_of('other')} <= tile * {e.k_tiles}) break; }} }}",
        *end,
        "}",
    ]


def _cooperative_fix_up(s: TmaConfig, e: StreamK, mine: Callable[[str], str], put: str, add: str) -> list[str]:
    """Each CTA of a tile leaves its sums of what others finish, and adds those of what it finishes, in order.

    Fragments are 64 rows by 32 columns, dealt round robin. CTAs of a tile are neighbours in the grid: all but one tile
    are whole at any time, so that waiting ends as long as a few multiprocessors are free (`Launch.co_resident`).
    """
    high, count, warps = s.rows // 64, s.rows // 64 * (s.bn // 32), 4 * s.consumers

    def pieces(of: int) -> str:
        unroll = "#pragma unroll\nfor (int"
        loops = f"{unroll} v = {of}; v < {count}; v += {e.sharers})\n{unroll} q = 0; q < 4; ++q)"
        return f"{loops} {{ const int i = {Int('v') % high}, c = {Int('v') / high} * 4 + q;"

    lines = [
        "// cooperative fix-up: each CTA of a tile finishes a share of its fragments, and leaves its sums of the others"
    ]
    lines += [f"const int share = unit % {e.sharers};", f"{{ {mine('unit')}"]
    lines += [f"if (share != {of}) {{\n{pieces(of)} {put} }} }}" for of in range(e.sharers)]
    lines += [
        f"__syncwarp(); if (lane < {e.sharers} && lane != share) w_raise(flag + {Int('lane') * warps}); }}",
        (
            f"if (lane < {e.sharers} && lane != share) {{ {mine('(unit - share + lane)')} (void)sums;"
            f" w_await(flag + {Int('share') * warps}); }}\n__syncwarp();"
        ),
    ]
    for of in range(e.sharers):
        lines.append(f"if (share == {of}) {{")
        for other in (x % e.sharers for x in range(of + 1, of + e.sharers)):
            lines.append(f"{{ {mine(f'(unit + {other - of})')} (void)flag;\n{pieces(of)} {add} }} }}")
        lines.append("}")
    return lines


def _two_level_stages(s: TmaConfig, product: str, free: str) -> list[str]:
    """The main loop of a tile with two-level accumulation."""
    ring = Ring(s.stages)
    if s.two_level == 2:
        return [
            "// two-level accumulation: one k-tile is added in f32 while tensor cores sum the next one",
            two_level.clear(s),
            *two_level.promoted_overlapped(s, product, free),
        ]
    return [
        "// two-level accumulation: tensor cores sum one k-tile of 8-bit floats, f32 additions the k-tiles",
        two_level.clear(s),
        "#pragma unroll 1\nfor (int st = first; st < last; ++st, ++it) {",
        f"const u32 slot = {ring.slot()}, at = sb + RING + slot * STAGE;",
        ring.await_filled("slot", ring.parity()),
        *two_level.promoted(s, product, free),
        "}",
    ]


def _products(
    p: Product, rows: Rows, s: TmaConfig, a: Operand, w: Operand, width: int, to: tma_store.Stored | None
) -> list[str]:
    """The consumer warpgroups."""
    high = s.rows // 64
    row0 = "0" if s.pingpong or s.consumers == 1 else f"(warp >> 2) * {s.rows}"
    a_at = f"at + (u32)((row0 + i * 64) * {128 if a.mn_major else 2 * s.panel})"
    taps, f = _rounds(p, s), s.halo_stages
    before = 2 if taps == 1 else 1  # with one stage for a field, the counter is beyond it already
    w_at = f"at + (u32)(u * {s.bn * s.panel * 2})" if f else f"at + {s.bm * STEP * 2}"
    per_tile = Int("(u32)(last - first)") / taps
    kind = f"{p.multiplied}_{int(a.mn_major)}{int(w.mn_major)}"
    begin, step, skip, mine, other = _BLOCK / s.multicast_ctas, _BLOCKS / s.multicast_ctas, "", "", ""
    if s.pingpong:
        begin, step = begin + Int("(warp >> 2)") * step, step * 2 if s.multicast else 2 * step
        skip = "it += last - first;" + (f" cell += {per_tile};" if f else "")
        # nobody waits for a stage before all that were filled earlier have been seen: a parity tells two phases apart
        mine = (
            "// ping-pong: the warpgroups' main loops take turns, the epilogue of one overlaps that of the other\n"
            "{ const u32 before = warp < 4 ? turn : turn + 1; ++turn;"
            " if (before) w_bar_wait(sb + TURN + 8 * (warp >> 2), (before - 1) & 1); }"
        )
        other = "if (lane == 0) w_bar_arrive(sb + TURN + 8 * (1 - (warp >> 2)));"
    state, halo = pipeline_state(s), _halo_ring(s)
    of_a = _in_halo(p, s) if f else _descriptor(a_at, "q", a, s.bm, s.panel)
    of_w = _descriptor(w_at, "q", w, s.bn, s.panel)
    tiles = f"panels whose rows are {2 * s.panel} bytes, swizzled as TMA has written them"
    issue = [
        f"// both operands by descriptors: {tiles}",
        "w_group_begin();",
        f"#pragma unroll\nfor (int i = 0; i < {high}; ++i)",
        f"#pragma unroll\nfor (int u = 0; u < {s.taps_per_stage}; ++u)" if f else "",
        f"#pragma unroll\nfor (int q = 0; q < {s.step // s.taps_per_stage // 16}; ++q)",
        f"w_product_{kind}(acc[i], {of_a},",
        f"  {of_w}, (st - first) | {'u | ' if f else ''}q);",
        "w_group_commit();",
        "// the product before this one is complete: its stage is free",
        "w_group_wait<1>();",
        state.release(state.last, unless_first=True),
        f"if (st > first && tap == 0 && lane == 0) w_bar_arrive({halo.read_at(halo.slot(Int('cell') - before))});"
        if f
        else "",
    ]
    stages = [
        PHASES,
        f"{state.before}#pragma unroll 1\nfor ({state.head}) {{",
        f"const u32 {state.slot}at = sb + RING + slot * STAGE;",
        (
            f"const int tap = {Int('st') % taps};"
            f" if (tap == 0) {halo.await_filled(halo.slot('cell'), halo.parity('cell'))}"
            f" const u32 there = sb + cell % {f} * FIELD; if (tap == {taps - 1}) ++cell;"
            if f
            else ""
        ),
        state.ring.await_filled("slot", state.parity),
        *issue,
        "}",
    ]
    if p.norm is not None:
        stages = fixed.stages(p, s, state, of_w, mn_major=w.mn_major)
    freed = state.release("slot")
    sharers = stream_k_of(p, rows, s, _k_tiles(p, s)).sharers if s.coop_fixup else 1
    first, end = finish(p, rows, s, w, width, to, sharers)
    if s.stream_k:
        end = _fix_up(p, rows, s, end)
    return [
        "role.alloc_registers();" if s.moves_registers else "",
        *fixed.vectors(p, s),
        PDL,
        "role.pdl_wait(); role.pdl_trigger();",
        f"const int row0 = {row0}; (void)row0;",
        f"{'int' if p.integers else 'float'} acc[{high}][{s.bn // 2}];",
        f"u32 it = {'(warp >> 2) * (u32)(last - first), turn = 0' if skip else '0'};",
        f"u32 cell = {f'(warp >> 2) * ({per_tile})' if skip else '0'};" if f else "",
        "u32 put = 0;" if to is not None else "",
        _loop(p, rows, s, str(begin), str(step)),
        *first,
        *fixed.values(p, rows, s),
        mine,
        *(_two_level_stages(s, f"w_product_{kind}(part, {of_a}, {of_w}, q);", freed) if s.two_level else stages),
        other,
        "" if s.two_level else f"w_group_wait<0>(); {state.release(state.last)}",
        halo.release(halo.slot(Int("cell") - 1)) if f else "",
        skip,
        *end,
        "}",
        fixed.left_over(p, s),
        "if (lane == 0) w_stores_done();\n__syncwarp();" if to is not None else "",
        "w_cluster_sync();" if s.multicast else "",
    ]
