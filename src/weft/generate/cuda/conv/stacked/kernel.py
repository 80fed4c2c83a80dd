"""A convolution, what is elementwise on it, and the 1x1 convolution of that, in one kernel.

A block owns a rectangle of pixels. It computes all channels of the first convolution there as the halo template does,
finishes and rounds them as if they were stored, keeps them in shared memory, and multiplies them by the 1x1 weights,
some output channels after the other. Nothing is computed twice; the weights of both are read by every block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.contraction.match import Source
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.halo.kernel import FEW
from weft.generate.cuda.conv.pooled.kernel import into_tile
from weft.generate.cuda.conv.separable.kernel import arguments, placed
from weft.generate.cuda.conv.separable.match import Separable
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.loaders import each, tables
from weft.generate.cuda.gemm.common.pack import FragmentOrder, pack_fragments, packed_by
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule

_RING = 2
"""Parts of the second weights in shared memory, where they do not all fit."""


@dataclass(frozen=True, slots=True)
class StackedConfig(Parameters):
    """Parameters of the template; counts."""

    th: int
    """Rows of pixels of a block."""
    tw: int
    bc: int
    """Channels of a block of the first sum; see `halo.HaloConfig`."""
    wm: int
    wn: int
    stages: int
    bn: int
    """Output channels of a part of the second product."""
    vm: int
    """Rows of a warp in the second product; it has as many warps."""
    vn: int
    ring: int
    """Parts of the second weights in shared memory."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="stacked")


@dataclass(frozen=True)
class Geometry(halo.Geometry):
    """The first convolution's tile, with what the second product needs behind it."""

    second: halo.Geometry
    ring: int

    @staticmethod
    def of(p: Separable, w: halo.Window, s: StackedConfig) -> Geometry:
        """The sizes of a shape; `w` is the first convolution's window."""
        pixels, k = s.th * s.tw, p.second.k
        row = halo.Window(1, pixels, 1, 1, k, p.second.n, (1, 1), (1, 1), (1, 1), True, 0)
        second = halo.Geometry(row, halo.HaloConfig(1, pixels, s.bn, k, s.vm, s.vn, 1, 1, 1, False, False))
        first = halo.HaloConfig(s.th, s.tw, p.first.n, s.bc, s.wm, s.wn, 1, s.stages, 1, False, False)
        return Geometry(w, first, second, s.ring)

    @property
    def parts(self) -> int:
        """Parts of the second product's columns."""
        return -(-self.second.w.oc // self.second.s.bn)

    @property
    def tile_bytes(self) -> int:
        """Shared memory of the results between the convolutions."""
        return max(self.bm, self.second.bm) * self.second.pitch

    @property
    def weights(self) -> int:
        """Where the second weights lie in shared memory: behind stages, and behind results and sums."""
        sums = self.second.bm * (self.second.s.bn + mma.PAD) * 4
        return -(-max(self.s.stages * (self.a_bytes + self.w_bytes), self.tile_bytes + sums) // 16) * 16

    @property
    def stages_end(self) -> int:
        """Where all that ends."""
        return self.weights + self.ring * self.second.w_bytes


def refuse(p: Separable, g: Geometry) -> Declined | None:
    """Why a shape does not fit; None where it does."""
    refused = halo.refuse(g)
    if refused is not None:
        return refused
    if g.ring != min(g.parts, g.ring) or (g.ring < min(g.parts, _RING)):
        return Declined("weights of the second product in a ring of two, or all")
    if p.first.n % g.s.wn or g.second.s.bn % g.second.s.wn:
        return Declined("warps that divide the columns")
    if g.threads != g.second.threads:
        return Declined("two products of as many warps")
    return None


def emit(p: Separable, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `StackedConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Separable, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `StackedConfig.schedule`."""
    one, two = p.first, p.second
    w = halo.window(one)
    if isinstance(w, Declined):
        return w
    g = Geometry.of(p, w, StackedConfig.of(schedule))
    refused = refuse(p, g)
    if refused is not None:
        return refused
    s, v = g.s, g.second
    (names1, names2), constants, parameters = arguments(p, False)
    tall, broad = g.tiles
    tiles = w.images * tall * broad
    places, before, _ = tables(one, g.threads) if one.c.pack is not None and one.borders is None else ("", "", 0)
    taps, taps_text = halo.tap_table(g)
    copy = each(v.w_bytes // 16, g.threads, "w_copy16(to + x * 16, from + x * 16);")
    overhangs = (w.rows % s.th > 0, w.cols % s.tw > 0)
    y, x, part = "y0" + Int("r") / s.tw, "x0" + Int("r") % s.tw, Int("part")
    inside = [f"r < {s.th * s.tw}"] if v.bm > s.th * s.tw else []
    inside += [f"{y} < {w.rows}"] if overhangs[0] else []
    inside += [f"{x} < {w.cols}"] if overhangs[1] else []
    block = mma.Sums(v.bm, v.s.bn, 1, 1, False, g.threads)
    end = epilogue.plan(two)
    lines = [
        *halo.opening(g),
        "const int tile = role.block_x(), n0 = 0, g = 0, b = 0;",
        halo.place_of_tile(g),
        f"auto fill_second = [&](int part) {{ const u32 to = {summed('sb', g.weights, part % g.ring * v.w_bytes)};",
        f"const char* const from = (const char*)pv + part * {v.w_bytes}; {copy} }};",
        f"for (int part = 0; part < {g.ring}; ++part) fill_second(part);",
        *halo.pipeline(one, g, names1, before, taps, _prefetch(p, names1, names2)),
        # the results of the first convolution are the left operand of the second product
        *into_tile(one, one.dtype, g, names1, v.pitch // 2, overhangs),
        f"#pragma unroll 1\nfor (int part = 0; part < {g.parts}; ++part) {{ const int n0 = part * {v.s.bn};"
        if g.parts > 1
        else "{ const int part = 0;",
        halo.sums(two, v),
        f"w_arrived<{g.ring - 1}>(); role.sync();" if g.parts > g.ring else "",
        f"multiply(0, {g.weights + part % g.ring * v.w_bytes});",
        f"float* const sums = (float*)(sm + {g.tile_bytes});",
        mma.to_shared(mma.MmaConfig(v.bm, v.s.bn, 16, v.s.wm, v.s.wn, 1, 1, 1, False)),
        *mma.finish(two, block, end, tiles, row=str(halo.pixel_at(w, y, x)), inside=inside, names=names2),
        "role.sync();" if g.parts > 1 else "",
        f"if (part + {g.ring} < {g.parts}) fill_second(part + {g.ring}); w_commit();" if g.parts > g.ring else "",
        "}",
    ]
    order1 = FragmentOrder(one.n, s.bn, s.bc, g.blocks, g.taps, g.steps, False)
    order2 = FragmentOrder(two.n, v.s.bn, v.s.bc, 1, 1, v.steps, False)
    packings = (
        placed(pack_fragments(one, order1), p.first_inputs, 0),
        placed(pack_fragments(two, order2, "second"), p.second_inputs, 1),
    )
    role = DeviceRole(
        threads=g.threads,
        body="\n".join(x for x in lines if x),
        parameters=parameters,
        grid=(tiles, 1, 1),
        globals=halo.products(one.multiplied) + constants + places + taps_text,
        shared_bytes=g.shared,
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
    )
    return packed_by(source, packings)


def _prefetch(p: Separable, *names: Mapping[Source, str]) -> list[str]:
    """Statements that ask for the constant vectors of both ends."""
    return [x for q, n in zip((p.first, p.second), names, strict=True) for x in epilogue.prefetch(q, n, q.n)]


def shapes(p: Separable, facts: GpuFacts, keep: int = 4) -> list[tuple[float, StackedConfig]] | Declined:
    """(modelled cycles, shape), best first; declined where nothing fits."""
    w = halo.window(p.first)
    if isinstance(w, Declined):
        return w
    if facts.capability < 80:
        return Declined(f"compute capability {facts.capability / 10}; the templates need 8.0")
    blocks = max((w.images * -(-w.rows // th) * -(-w.cols // tw) for th, tw in _tiles(w)), default=0)
    if blocks < costs_of(facts).stacked.filled * facts.sms:
        return Declined(f"{blocks} tiles of all channels; two kernels keep more multiprocessors busy")
    ranked = [(cycles(p, s, facts), s) for s in _candidates(p, w, facts)]
    ranked = sorted((x for x in ranked if x[0] < math.inf), key=lambda x: (x[0], x[1].bn, x[1].stages))
    if not ranked:
        return Declined("no tile of all channels between the convolutions fits a CTA")
    seen: dict[int, int] = {}
    keyed = []
    for modelled, s in ranked[:200]:
        again = seen.get(s.th * s.tw, 0)
        seen[s.th * s.tw] = again + 1
        keyed.append((modelled * (1 + 0.1 * again), modelled, s))
    keyed.sort(key=lambda x: x[0])
    return [(modelled, s) for _, modelled, s in keyed[:keep]]


def cycles(p: Separable, s: StackedConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels: the first convolution, and the second product's parts behind it."""
    fit = costs_of(facts).stacked
    w = halo.window(p.first)
    if isinstance(w, Declined):
        return math.inf
    g = Geometry.of(p, w, s)
    first = halo_choose.cycles(g, facts, halo_choose.end_of(p.first))
    v = g.second
    busiest = -(-halo.work(g)[0] // facts.sms)
    used = fit.few_warps if g.threads <= 128 else 1.0
    tensor = busiest * v.bm // 16 * (v.s.bn // 8) * v.steps * fit.tensor / used
    warps, mi, ni = g.threads // 32, v.s.wm // 16, v.s.wn // 16
    fragments = busiest * warps * v.steps * (mi + ni) * 512.0 / fit.fragments
    result_bytes = 2.0 * (1 + len(epilogue.leaves(p.second.c))) + fit.result_bytes
    stored = busiest * s.th * s.tw * min(s.bn, p.second.n) * result_bytes
    weights = busiest * v.w_bytes / fit.port if g.parts > g.ring else 0.0
    return fit.measured * (first + g.parts * (fit.start + max(tensor, fragments, weights) + stored / fit.stored))


def _tiles(w: halo.Window) -> list[tuple[int, int]]:
    """For each number of rows of the product, the rectangle that reads the least of the image."""
    best: dict[int, tuple[float, tuple[int, int]]] = {}
    for th in halo_choose.sides(w.rows, 16):
        for tw in halo_choose.sides(w.cols, 32):
            g = halo.Geometry(w, halo.HaloConfig(th, tw, 16, FEW if w.ic <= FEW else 16, 16, 16, 1, 1, 1, False, False))
            if not 16 <= g.bm <= 256 or th * tw < 0.7 * g.bm:
                continue
            score = math.prod(g.tiles) * (math.prod(g.field) + 0.5 * g.bm)
            if g.bm not in best or score < best[g.bm][0]:
                best[g.bm] = (score, (th, tw))
    return [tile for _, tile in best.values()]


def _depths(w: halo.Window) -> list[int]:
    if w.ic <= FEW:
        return [FEW]
    sixteens = -(-w.ic // 16)
    found = {-(-sixteens // k) * 16 for k in range(1, sixteens + 1)}
    return sorted(x for x in found if x <= 128)


def _candidates(p: Separable, w: halo.Window, facts: GpuFacts) -> Iterable[StackedConfig]:
    whole = -(-p.second.n // 16) * 16
    widths = sorted({n for n in (32, 64, 128, 256) if n <= whole and -(-whole // n) * n <= 1.25 * whole} or {whole})
    for th, tw in _tiles(w):
        for bc in _depths(w):
            for wm in (16, 32, 64):
                for wn in (16, 32, 64):
                    if p.first.n % wn or wm * wn > 2048:
                        continue
                    for bn in widths:
                        base = StackedConfig(th, tw, bc, wm, wn, 1, bn, wm, wn, 1)
                        yield from _second(p, w, base, facts)


def _second(p: Separable, w: halo.Window, s: StackedConfig, facts: GpuFacts) -> Iterable[StackedConfig]:
    """Stages, and warps of the second product of one tile."""
    g = Geometry.of(p, w, s)
    most = 384 if s.wm * s.wn >= 1024 else 512  # more would spill
    if not 64 <= g.threads <= most or g.bm - s.wm >= s.th * s.tw:
        return
    stages = min(g.deepest, (facts.shared_per_block - w.tables - 2048) // (g.a_bytes + g.w_bytes), 4)
    for vm in (16, 32, 64):
        for vn in (16, 32, 64):
            warps = -(-s.th * s.tw // vm) * (s.bn // vn)
            if s.bn % vn or vm * vn > 2048 or 32 * warps != g.threads:
                continue
            for ring in sorted({g.parts, min(g.parts, _RING)}):
                for deep in sorted({stages, min(stages, 2)}):
                    if deep >= (min(g.deepest, 2) if w.vectorized else g.deepest):
                        found = StackedConfig(s.th, s.tw, s.bc, s.wm, s.wn, deep, s.bn, vm, vn, ring)
                        fits = Geometry.of(p, w, found)
                        if fits.shared <= facts.shared_per_block and refuse(p, fits) is None:
                            yield found
