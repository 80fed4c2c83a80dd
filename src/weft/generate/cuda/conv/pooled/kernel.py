"""Convolution, what is elementwise on it, and a maximum or average of windows of that, in one kernel.

A block owns a rectangle of windows of some channels. It computes the results that they see as the halo template does
(neighbours whose windows overlap compute the border twice), keeps them in shared memory, and stores one value per
window. Results are rounded as if they were stored, before they are compared or added. With `early` they are finished in
registers and lie in shared memory in their own type; else the sums lie there, of warps or blocks that share them too,
and each window finishes those that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.generate.contraction.match import Source, StridedLayout
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.pooled.match import Pool, Pooled
from weft.generate.cuda.conv.separable.kernel import placed
from weft.generate.cuda.gemm.common import epilogue, tf32
from weft.generate.cuda.gemm.common.loaders import tables
from weft.generate.cuda.gemm.common.pack import FragmentOrder, pack_fragments, packed_by
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.integer import Int
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Pointer, Schedule

_UNROLLED = 4
"""Places of a window that are written one after the other; of larger windows those of a row are."""


@dataclass(frozen=True, slots=True)
class PooledConfig(Parameters):
    """Parameters of the template; counts."""

    ph: int
    """Rows of windows of a block."""
    pw: int
    bn: int
    bc: int
    """Channels of a block of the sum; see `halo.HaloConfig`."""
    wm: int
    wn: int
    wk: int
    """Warps that share a sum."""
    stages: int
    split: int
    """Blocks that share a sum: a cluster."""
    early: bool
    """Results are finished in registers."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="pooled")


@dataclass(frozen=True)
class Geometry(halo.Geometry):
    """Sizes of a block: those of the convolution's tile that its windows see."""

    pool: Pool
    shape: PooledConfig
    item: int
    """Bytes of a result between convolution and window."""

    @staticmethod
    def of(p: Pooled, s: PooledConfig) -> Geometry:
        """The sizes of a shape."""
        tile = halo.HaloConfig(
            p.pool.reach(s.ph, 0), p.pool.reach(s.pw, 1), s.bn, s.bc, s.wm, s.wn, s.wk, s.stages, s.split,
            s.split > 1, False,
        )  # fmt: skip
        return Geometry(p.window, tile, p.pool, s, p.between.itemsize)

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles of windows."""
        return -(-self.pool.rows // self.shape.ph), -(-self.pool.cols // self.shape.pw)

    @property
    def stages_end(self) -> int:
        """Where stages, sums or results end in shared memory."""
        held = self.s.wk * self.bm * (self.s.bn + mma.PAD) * (self.item if self.shape.early else 4)
        return -(-max(self.s.stages * (self.a_bytes + self.w_bytes), held) // 16) * 16

    @property
    def repeated(self) -> float:
        """Results that all blocks compute, over those of the convolution."""
        return math.prod(self.tiles) * self.s.th * self.s.tw / (self.w.rows * self.w.cols)

    def overhangs(self, axis: int) -> bool:
        """Whether a tile begins in front of the image or ends behind it."""
        last = (self.tiles[axis] - 1) * (self.shape.ph, self.shape.pw)[axis] * self.pool.strides[axis]
        side, size = (self.s.th, self.s.tw)[axis], (self.w.rows, self.w.cols)[axis]
        return self.pool.pads[axis] > 0 or last + side > size

    def leaves(self, axis: int) -> bool:
        """Whether a window sees places outside the image."""
        windows, size = (self.pool.rows, self.pool.cols)[axis], (self.w.rows, self.w.cols)[axis]
        return self.pool.pads[axis] > 0 or self.pool.reach(windows, axis) > size


def emit(p: Pooled, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `PooledConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Pooled, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `PooledConfig.schedule`."""
    s = PooledConfig.of(schedule)
    g = Geometry.of(p, s)
    one, two = p.first, p.second
    end = epilogue.plan(two)
    refused = halo.refuse(g)
    if refused is not None:
        return refused
    if s.split > 1 and end.width % 4:
        return Declined("split-K over a cluster reduces 4 neighbouring results at a time")
    if s.early and (s.wk > 1 or s.split > 1):
        return Declined("an epilogue in registers excludes split-K over warps or CTAs")
    (names1, names2), constants, parameters = _arguments(p)
    nt, (tall, broad) = -(-g.columns // s.bn), g.tiles
    tiles = g.w.images * tall * broad * nt
    places, before, _ = tables(one, g.threads) if one.c.pack is not None and one.borders is None else ("", "", 0)
    taps, taps_text = halo.tap_table(g)
    prefetch = [*epilogue.prefetch(one, names1, s.bn), *epilogue.prefetch(two, names2, s.bn)]
    (sy, sx), (top, left) = p.pool.strides, p.pool.pads
    tile, block = Int("tile"), Int("role.block_x()")
    windows = f"wy0 = {tile / broad % tall * s.ph}, wx0 = {tile % broad * s.pw}"
    lines = [
        *halo.opening(g),
        f"const int tile = {block / nt}, n0 = {block % nt * s.bn}, g = role.block_z(), b = 0;",
        f"const int img = {tile / (tall * broad)}, {windows};",
        f"const int y0 = {Int('wy0') * sy - top}, x0 = {Int('wx0') * sx - left};",
        *halo.pipeline(one, g, names1, before, taps, prefetch),
        *(_finish_early(p, g, names1) if s.early else _keep_sums(g)),
        *_windows(p, g, end, names1, names2),
    ]
    order = FragmentOrder(g.columns, s.bn, s.bc, g.blocks, g.taps, g.steps, False)
    packing = placed(pack_fragments(one, order), p.first_inputs, 0)
    own = (tf32.FUNCTIONS if one.tf32 else "") + halo.products(one.multiplied)
    role = DeviceRole(
        threads=g.threads,
        body="\n".join(x for x in lines if x),
        parameters=parameters,
        grid=(tiles, s.split, 1),
        globals=own + constants + places + taps_text,
        shared_bytes=g.shared,
        cluster=(1, s.split, 1),
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
        capability=90 if s.split > 1 else 80,
    )
    return packed_by(source, [packing])


def _arguments(p: Pooled) -> tuple[tuple[dict[Source, str], dict[Source, str]], str, tuple[Parameter, ...]]:
    """Names of what each part reads, text of constants, parameters of the role."""
    wanted: dict[int, None] = {}
    names: tuple[dict[Source, str], dict[Source, str]] = ({}, {})
    constants = ""
    for k, (part, inputs) in enumerate(((p.first, p.first_inputs), (p.second, p.second_inputs))):
        reads = [x.source for _, x in epilogue.leaves(part.c) if x.source is not None]
        for x in dict.fromkeys([*([] if k else [part.c.a]), *reads]):
            if x.kind == "input":
                names[k][x] = f"in{inputs[x.index]}"
                wanted[inputs[x.index]] = None
            else:
                names[k][x] = f"k{'ab'[k]}{x.index}"
                constants += epilogue.constant_array(part.c, x.index, f"k{'ab'[k]}")
    parameters = [*(Parameter(f"in{i}", Pointer("in", i)) for i in wanted), Parameter("pk", Pointer("packed", 0))]
    parameters += [Parameter(f"out{k}", Pointer("out", k), WRITTEN) for k in range(len(p.second.c.outputs))]
    return names, constants, tuple(parameters)


def finish(one: Product, names: Mapping[Source, str], width: int, acc: str) -> list[str]:
    """Statements: `width` neighbouring sums of a product, finished, to `out0`."""
    here = StridedLayout((0,) * len(one.c.dims))
    c = replace(one.c, outputs=tuple((slot, here) for slot, _ in one.c.outputs))
    return epilogue.body(replace(one, c=c), names, width, acc=acc, prefix="d")


def into_tile(
    one: Product, to: DType, g: halo.Geometry, names: Mapping[Source, str], pitch: int, overhangs: Sequence[bool]
) -> list[str]:
    """Statements: a warp's sums of a convolution, finished and rounded, to `results` in shared memory.

    `pitch`: elements from pixel to pixel of the tile; `overhangs`: whether rows and columns of it may lie outside the
    image, where operands are not read.
    """
    s, w = g.s, g.w
    kind, width = storage(to), 2 if one.n % 2 == 0 else 1
    inside = [f"n < {one.n}"] if one.n % s.bn else []
    moving = (x.layout for _, x in epilogue.leaves(one.c) if x.layout is not None)
    if any(any(layout.dims) for layout in moving):
        inside += [f"r < {s.th * s.tw}"] if g.bm > s.th * s.tw else []
        inside += [f"(u32)cy < {w.rows}u"] if overhangs[0] else []
        inside += [f"(u32)cx < {w.cols}u"] if overhangs[1] else []
    guard = f"if ({' && '.join(inside)}) " if inside else ""
    lines = [
        f"{kind}* const results = ({kind}*)sm;",
        '_Pragma("unroll")',
        f"for (int j = 0; j < {s.wn // 8}; ++j) {{",
        f'_Pragma("unroll")\nfor (int i = 0; i < {s.wm // 8}; ++i) {{',
        "const int r = row0 + i * 8 + (lane >> 2);",
        f"const int cy = {'y0' + Int('r') / s.tw}, cx = {'x0' + Int('r') % s.tw};",
        f"const int m = {halo.pixel_at(w, 'cy', 'cx')}; (void)m;",
    ]
    for part in range(0, 2, width):
        at = Int("col0") + Int("j") * 8 + Int("(lane & 3)") * 2 + part
        values = ", ".join(f"acc[i / 2][j][{Int('i') % 2 * 2 + (part + e)}]" for e in range(width))
        lines += [
            f"{{ const int q = {at}, n = n0 + q; (void)n;",
            f"{guard}{{ {kind}* const out0 = results + r * {pitch} + q;",
            f"const float own[{width}] = {{{values}}};",
            *finish(one, names, width, "own"),
            "} }",
        ]
    return ["// the convolution's results, rounded, in shared memory", *lines, "} }", "role.sync();"]


def _finish_early(p: Pooled, g: Geometry, names: Mapping[Source, str]) -> list[str]:
    return into_tile(p.first, p.between, g, names, g.s.bn + mma.PAD, (g.overhangs(0), g.overhangs(1)))


def _keep_sums(g: Geometry) -> list[str]:
    """Statements: all sums into shared memory."""
    s = g.s
    lines = ["float* const sums = (float*)sm;"]
    lines.append(mma.to_shared(mma.MmaConfig(g.bm, s.bn, 16, s.wm, s.wn, s.wk, s.stages, s.split, s.cluster)))
    if s.cluster:
        return [*lines, *mma.fold_warps(_sums(g), s.bn + mma.PAD), "w_cluster_sync();"]
    return [*lines, "role.sync();"]


def _sums(g: Geometry) -> mma.Sums:
    return mma.Sums(g.bm, g.s.bn, g.s.wk, g.s.split, g.s.cluster, g.threads)


def _windows(
    p: Pooled, g: Geometry, end: epilogue.Epilogue, names1: Mapping[Source, str], names2: Mapping[Source, str]
) -> list[str]:
    """Statements: each window's maximum or sum, what follows it, and its store."""
    s, pool, v = g.s, g.pool, end.width
    own = g.shape.ph * g.shape.pw
    count = own * s.bn // v
    x, o = Int("x"), Int("o")
    where = f"o = {x % own}, q = {x / own * v}" if end.by_row else f"o = {x / (s.bn // v)}, q = {x % (s.bn // v) * v}"
    wy, wx = o / g.shape.pw, o % g.shape.pw
    turn = f"for (int x = t; x < {count}; x += {g.threads}) {{"
    inside = []
    if s.cluster:
        per = -(-count // s.split)
        turn = f"for (int i = t; i < {per}; i += {g.threads}) {{ const int x = i + (int)role.block_y() * {per};"
        inside += [f"x < {count}"] if count % s.split else []
    inside += [f"wy < {pool.rows}"] if pool.rows % g.shape.ph else []
    inside += [f"wx < {pool.cols}"] if pool.cols % g.shape.pw else []
    inside += [f"n < {p.second.n}"] if p.second.n % s.bn else []
    guard = f"if ({' && '.join(inside)}) " if inside else ""
    least = "__int_as_float((int)0xff800000)" if pool.greatest else "0.0f"
    (kh, kw), (sy, sx), (dy, dx) = pool.kernel, pool.strides, pool.dilations
    whole = "#pragma unroll" if kh * kw <= _UNROLLED else "#pragma unroll 1"
    sees = ["(u32)cy < {rows}u"] if g.leaves(0) else []
    sees += ["(u32)cx < {cols}u"] if g.leaves(1) else []
    seen = f"if ({' && '.join(sees).format(rows=g.w.rows, cols=g.w.cols)}) " if sees else ""
    lines = [
        "// each window from the tile of results; a result stands in several windows, and is computed once",
        f"{turn} const int {where}, wy = {'wy0' + wy}, wx = {'wx0' + wx}, n = n0 + q; (void)n;",
        f"{guard}{{ float best[{v}];",
        f"#pragma unroll\nfor (int e = 0; e < {v}; ++e) best[e] = {least};",
        f"{whole}\nfor (int ky = 0; ky < {kh}; ++ky)",
        f"#pragma unroll\nfor (int kx = 0; kx < {kw}; ++kx) {{",
        f"const int ty = {wy * sy + Int('ky') * dy}, tx = {wx * sx + Int('kx') * dx};",
        f"const int cy = y0 + ty, cx = x0 + tx, r = {Int('ty') * s.tw + 'tx'}; (void)cy; (void)cx;",
        f"{seen}{{ float found[{v}];",
        *(_read_early(p, g, v) if g.shape.early else _finish_late(p, g, names1, v)),
        f"#pragma unroll\nfor (int e = 0; e < {v}; ++e)",
        f"best[e] = {'w_max_f32(best[e], found[e])' if pool.greatest else 'best[e] + found[e]'};",
        "} }",
        f"const int m = {(Int('img') * pool.rows + 'wy') * pool.cols + 'wx'}; (void)m;",
        *epilogue.body(p.second, names2, v, acc="best"),
        "} }",
    ]
    return [*lines, "w_cluster_leave();"] if s.cluster else lines


def _read_early(p: Pooled, g: Geometry, width: int) -> list[str]:
    """Statements: `found`, finished results of the tile."""
    return epilogue.wide_load("hw", p.between, width, f"results + r * {g.s.bn + mma.PAD} + q", "found")


def _finish_late(p: Pooled, g: Geometry, names: Mapping[Source, str], width: int) -> list[str]:
    """Statements: `found`, results finished from the sums in shared memory and rounded."""
    kind, pitch = storage(p.between), g.s.bn + mma.PAD
    sums = _sums(g)
    return [
        f"__align__(16) {kind} out0[{width}];",
        f"{{ float acc[{width}];",
        mma.sum_cluster(sums, width, pitch) if g.s.cluster else mma.sum_warps(sums, width, pitch),
        f"const int m = {halo.pixel_at(g.w, 'cy', 'cx')}; (void)m;",
        *finish(p.first, names, width, "acc"),
        "}",
        *epilogue.wide_load("hw", p.between, width, "out0", "found"),
    ]
