"""Depthwise convolution, what follows it, and the 1x1 convolution of that, in one kernel.

A block computes some pixels of some channels of the depthwise convolution into shared memory, rounded as if they were
stored, and multiplies them by its slice of the 1x1 weights, which were copied before the wait for predecessors. Blocks
that share pixels are a cluster along the channels: none computes what another does, and their sums meet at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.contraction.match import Source, StridedLayout
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.separable.match import Separable
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.loaders import each
from weft.generate.cuda.gemm.common.pack import FragmentOrder, Packing, pack_fragments, pack_vectors, packed_by
from weft.generate.cuda.gemm.common.product import image_steps
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.intrinsics.prelude import prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Pointer, Schedule

_HELD = 12
"""Vectors of the image that a thread asks for at once."""


@dataclass(frozen=True, slots=True)
class SeparableConfig(Parameters):
    """Parameters of the template; counts."""

    bm: int
    """Pixels of a block."""
    bn: int
    bc: int
    """Channels of a block: a multiple of 16."""
    wm: int
    wn: int
    wk: int
    """Warps that share a sum."""
    split: int
    """Blocks that share a sum."""
    cluster: bool

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="separable")


def _geometry(p: Separable, s: SeparableConfig) -> halo.Geometry:
    """The second product as a convolution of one tap on a row of pixels."""
    w = halo.Window(1, p.second.m, 1, 1, p.second.k, p.second.n, (1, 1), (1, 1), (1, 1), True, 0)
    return halo.Geometry(w, halo.HaloConfig(1, s.bm, s.bn, s.bc, s.wm, s.wn, s.wk, 1, s.split, s.cluster, False))


def shared_bytes(p: Separable, s: SeparableConfig) -> int:
    """Dynamic shared memory of a block: as of one stage, and the depthwise weights."""
    return _geometry(p, s).shared + _vector_bytes(p, s)


def _vector_bytes(p: Separable, s: SeparableConfig) -> int:
    return math.prod(p.first.c.kernel) * s.bc * 2


def emit(p: Separable, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `SeparableConfig.schedule`."""
    return solo(roles(p, schedule), entry)


def roles(p: Separable, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `SeparableConfig.schedule`."""
    s = SeparableConfig.of(schedule)
    g = _geometry(p, s)
    one, two = p.first, p.second
    end = epilogue.plan(two)
    if s.cluster and end.width % 4:
        return Declined("split-K over a cluster reduces 4 neighbouring results at a time")
    if s.bc // 16 % s.wk or g.blocks != s.split:
        return Declined("warps that split K must divide its k-steps evenly")
    by_work = s.split > 1 and not s.cluster
    (names1, names2), constants, parameters = arguments(p, by_work)
    nt = -(-two.n // s.bn)
    tiles = -(-two.m // s.bm) * nt
    vectors = _vector_bytes(p, s)
    shared = shared_bytes(p, s)
    taps = math.prod(one.c.kernel)
    own, cta = min(vectors, one.n * taps * 2), Int("role.block_x()")
    lines = [
        f"enum {{ VECTORS = {g.stages_end}, FLAG = {shared - 16} }};",
        "const u32 sb = w_shared(sm);",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
        f"const int m0 = {cta / nt * s.bm}, n0 = {cta % nt * s.bn}, g = 0, b = 0;",
        "(void)g; (void)b; (void)n0;",
        f"const int cb = role.block_y(), c0 = cb * {s.bc};",
        f"{{ const char* const from = (const char*)pk + {(cta % nt * g.blocks + '(u32)cb').tight} * {g.w_bytes};",
        each(g.w_bytes // 16, g.threads, f"w_copy16(sb + {g.a_bytes} + x * 16, from + x * 16);") + " }",
        f"{{ const char* const from = (const char*)pv + cb * {vectors};",
        each(own // 16, g.threads, _vector_copy(p, s)) + " }",
        "w_commit();",
        halo.sums(two, g),
        *epilogue.prefetch(one, names1, s.bc, "c0"),
        *epilogue.prefetch(two, names2, s.bn),
        "role.pdl_wait(); role.pdl_trigger();",
        "w_arrived<0>(); role.sync();",
        "// the depthwise convolution, rounded, into shared memory: the left operand of the product",
        _depthwise(p, s, g, names1),
        "role.sync();",
        f"multiply(0, {g.a_bytes});",
        "role.sync();",
        "float* const sums = (float*)sm;",
        mma.to_shared(mma.MmaConfig(g.bm, s.bn, 16, s.wm, s.wn, s.wk, 1, s.split, s.cluster)),
    ]
    inside = [f"r < {s.bm}"] if g.bm > s.bm else []
    inside += [f"m < {two.m}"] if two.m % s.bm else []
    block = mma.Sums(g.bm, s.bn, s.wk, s.split, s.cluster, g.threads)
    lines += mma.finish(two, block, end, tiles, inside=inside, names=names2)
    order = FragmentOrder(two.n, s.bn, s.bc, g.blocks, 1, g.steps, False)
    packings = (
        placed(pack_fragments(two, order), p.second_inputs, 0),
        placed(pack_vectors(one, 8, "vectors"), p.first_inputs, 1),
    )
    role = DeviceRole(
        threads=g.threads,
        body="\n".join(x for x in lines if x),
        parameters=parameters,
        grid=(tiles, s.split, 1),
        globals=halo.products(one.multiplied) + constants,
        shared_bytes=shared,
        cluster=(1, s.split, 1) if s.cluster else (1, 1, 1),
    )
    source = RoleSource(
        schedule=schedule,
        headers=(prelude(),),
        roles=(role,),
        workspace_bytes=tiles * s.split * g.bm * s.bn * 4 if by_work else 0,
        state_bytes=tiles * 4 if by_work else 0,
        capability=90 if s.cluster else 80,
    )
    return packed_by(source, packings)


def _vector_copy(p: Separable, s: SeparableConfig) -> str:
    """Statement: chunk x of the block's depthwise weights, of which the last block has fewer."""
    left = p.first.n * math.prod(p.first.c.kernel) * 2
    copy = "w_copy16(sb + VECTORS + x * 16, from + x * 16);"
    return copy if p.first.n % s.bc == 0 else f"if (cb * {_vector_bytes(p, s)} + x * 16 < {left}) {copy}"


def arguments(
    p: Separable, by_work: bool
) -> tuple[tuple[dict[Source, str], dict[Source, str]], str, tuple[Parameter, ...]]:
    """Names of what each product reads, text of constants, parameters of the role."""
    one, two = p.first.c, p.second.c
    reads1 = [one.a, *(x.source for _, x in epilogue.leaves(one) if x.source is not None)]
    reads2 = [x.source for _, x in epilogue.leaves(two) if x.source is not None]
    inputs = (p.first_inputs, p.second_inputs)
    wanted: dict[int, None] = {}
    names: tuple[dict[Source, str], dict[Source, str]] = ({}, {})
    constants = ""
    for k, (c, reads) in enumerate(((one, reads1), (two, reads2))):
        for x in dict.fromkeys(reads):
            if x.kind == "input":
                names[k][x] = f"in{inputs[k][x.index]}"
                wanted[inputs[k][x.index]] = None
            else:
                names[k][x] = f"k{'ab'[k]}{x.index}"
                constants += epilogue.constant_array(c, x.index, f"k{'ab'[k]}")
    parameters = [Parameter(f"in{i}", Pointer("in", i)) for i in wanted]
    parameters += [Parameter("pk", Pointer("packed", 0)), Parameter("pv", Pointer("packed", 1))]
    parameters += [Parameter(f"out{k}", Pointer("out", k), WRITTEN) for k in range(len(two.outputs))]
    if by_work:
        parameters += [Parameter(name, Pointer(name, 0), WRITTEN) for name in ("work", "state")]
    return names, constants, tuple(parameters)


def placed(packing: Packing, inputs: tuple[int, ...], number: int) -> Packing:
    """A packing of one of the two, with the whole problem's inputs and its own buffer."""

    def moved(x: Parameter) -> Parameter:
        at = x.argument
        if not isinstance(at, Pointer):
            return x
        own = Pointer("packed", number) if at.kind == "packed" else Pointer(at.kind, inputs[at.index])
        return replace(x, argument=own)

    role = replace(packing.role, parameters=tuple(moved(x) for x in packing.role.parameters))
    return replace(packing, role=role, replaces=tuple(inputs[i] for i in packing.replaces))


def _depthwise(p: Separable, s: SeparableConfig, g: halo.Geometry, names: Mapping[Source, str]) -> str:
    """Statements: the block's pixels and channels of the first product, rounded, into shared memory."""
    one = p.first
    c = one.c
    kind = storage(one.dtype)
    per = s.bc // 8
    row_step, col_step = image_steps(one)
    top, left = (one.borders[0], one.borders[1]) if one.borders is not None else (None, None)
    rows, cols = c.dims[1], c.dims[2]
    to_shared = StridedLayout((0,) * len(c.dims), 0, 1, 0)
    stored = replace(one, c=replace(c, outputs=tuple((slot, to_shared) for slot, _ in c.outputs)))
    start = (
        f"const int r = {Int('x') / per}, n = {'c0' + Int('x') % per * 8}, m = m0 + r;"
        f" u16* const out0 = (u16*)(sm + r * {g.pitch}) - c0;"
    )
    ok = [f"m < {one.m}"] if one.m % s.bm else []
    ok += [f"n < {one.n}"] if one.n % s.bc else []
    m = Int("m")
    place = summed(c.a_layout.offset, Int("img") * c.a_layout.dims[0], Int("y0") * row_step, Int("x0") * col_step, "n")
    lines = [
        start,
        f"const bool live = {' && '.join(ok) or 'true'};",
        f"const int img = {m / (rows * cols)};",
        f"const int y0 = {m / cols % rows * c.strides[0] - (top.lo if top else 0)};",
        f"const int x0 = {m % cols * c.strides[1] - (left.lo if left else 0)};",
        f"const int place = {place};",
        f"const {kind}* const A = (const {kind}*){names[c.a]} + place;",
        f"const uint4* const k = (const uint4*)(sm + VECTORS) + {Int('x') % per * math.prod(c.kernel)};",
        "float acc[8];",
        '_Pragma("unroll") for (int e = 0; e < 8; ++e) acc[e] = 0.0f;',
    ]
    taps = [(ky, kx) for ky in range(c.kernel[0]) for kx in range(c.kernel[1])]
    unpack = f"w_unpack_{one.dtype.value}"
    for first in range(0, len(taps), _HELD):
        part = taps[first : first + _HELD]
        lines.append("{")
        for ky, kx in part:
            y, x = ky * c.dilations[0], kx * c.dilations[1]
            test = "live"
            if top and left:
                down, across = (Int("y0") + y).tight, (Int("x0") + x).tight
                test += f" && (u32){down} < {top.size}u && (u32){across} < {left.size}u"
            at = Int("A") + (y * row_step + x * col_step)
            lines.append(f"uint4 h{ky}_{kx}; w_read_if(h{ky}_{kx}, {at}, {test});")
        lines.append("w_together();")
        for ky, kx in part:
            lines.append(f"{{ const uint4 f = k[{ky * c.kernel[1] + kx}];")
            for i, field in enumerate("xyzw"):
                lines += [
                    f"{{ const float2 h = {unpack}(h{ky}_{kx}.{field}), w = {unpack}(f.{field});",
                    f"acc[{2 * i}] = fmaf(h.x, w.x, acc[{2 * i}]);",
                    f"acc[{2 * i + 1}] = fmaf(h.y, w.y, acc[{2 * i + 1}]); }}",
                ]
            lines.append("}")
        lines.append("}")
    lines += ["if (live) {", *epilogue.body(stored, names, 8, prefix="d")]
    lines.append("} else *(uint4*)(out0 + n) = make_uint4(0, 0, 0, 0);" if ok else "}")
    count = s.bm * per
    return f"for (int x = t; x < {count}; x += {g.threads}) {{\n" + "\n".join(lines) + "\n}"


def shapes(p: Separable, facts: GpuFacts, keep: int = 3) -> list[tuple[float, SeparableConfig]]:
    """(modelled cycles, shape), best first."""
    ranked = [(cycles(p, s, facts), s) for s in _candidates(p, facts)]
    ranked = sorted((x for x in ranked if x[0] < math.inf), key=lambda x: (x[0], x[1].wk, x[1].bm))
    seen: dict[tuple[int, int], int] = {}
    keyed = []
    for modelled, s in ranked[:100]:
        tile = (s.bm, s.split)
        keyed.append((modelled * (1 + 0.1 * seen.get(tile, 0)), modelled, s))
        seen[tile] = seen.get(tile, 0) + 1
    keyed.sort(key=lambda x: x[0])
    return [(modelled, s) for _, modelled, s in keyed[:keep]]


def _candidates(p: Separable, facts: GpuFacts) -> Iterable[SeparableConfig]:
    n, k, m = p.second.n, p.second.k, p.second.m
    together = facts.capability >= 90 and epilogue.plan(p.second).width % 4 == 0
    whole = -(-n // 16) * 16
    widths = sorted({w for w in (16, 32, 64, 96, 128, 192, 256, whole) if w <= min(whole, 256)})
    for split in (1, 2, 4, 8):
        bc = -(-k // (16 * split)) * 16
        if -(-k // bc) != split or (split > 1 and not together):
            continue
        for bm in (16, 32, 64):
            if bm >= 2 * m and bm > 16:
                continue
            for bn in widths:
                if -(-n // bn) > 4:
                    continue
                for wm in (16, 32):
                    for wn in (16, 32, 64):
                        for wk in (1, 2, 4):
                            s = SeparableConfig(bm, bn, bc, wm, wn, wk, split, split > 1)
                            warps = bm // wm * (bn // wn) * wk
                            fits = bm % wm == 0 and bn % wn == 0 and bc // 16 % wk == 0
                            if fits and 4 <= warps <= 8 and wm * wn <= 2048:
                                yield s


def cycles(p: Separable, s: SeparableConfig, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel; infinite where it does not fit."""
    g = _geometry(p, s)
    shared = shared_bytes(p, s) + 1024
    if shared > facts.shared_per_block:
        return math.inf
    resident = min(facts.shared_per_sm // shared, facts.registers_per_sm // (128 * g.threads))
    if not resident:
        return math.inf
    blocks, products = halo.work(g)
    busiest = -(-blocks // facts.sms)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    c = costs_of(facts).separable
    taps = math.prod(p.first.c.kernel)
    items = -(-s.bm * s.bc // (8 * g.threads))
    issue = taps * c.tap_slots + c.vector_slots + c.step_slots * len(p.first.c.body)
    spatial = items * max(active * g.threads / 128 * issue, c.latency * -(-taps // _HELD) + issue)
    warps = g.threads // 32
    steps = g.steps // s.wk
    mi, ni = s.wm // 16, s.wn // 16
    tensor = active * max(products * c.tensor / min(1.0, active * warps / 4), warps * steps * (mi + ni) * c.fragment)
    multiply = max(tensor, steps * max(c.step, mi * ni * c.product))
    traffic = active * (g.w_bytes * c.shared_weights + s.bm * s.bc * 2.0 * math.prod(p.first.c.strides)) / c.port
    tile = s.bm * s.bn
    end = c.end + active * (tile * s.wk / 16 + tile / 16 * (1 + len(epilogue.leaves(p.second.c))) / s.split)
    end += (c.meeting + tile / 16) if s.split > 1 else 0.0
    end += c.alone if 2 * shared > facts.shared_per_sm else 0.0
    return waves * (max(spatial, traffic) + multiply + end) + c.launch
