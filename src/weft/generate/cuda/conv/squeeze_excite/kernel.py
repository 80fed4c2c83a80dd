"""Squeeze-excite in one kernel: the CTAs of a cluster share an image, each has some of its channels.

A CTA reads its channels of all pixels once (and keeps them in shared memory where they fit), has their means, and the
other CTAs' through distributed shared memory; then its share of the hidden values, exchanged likewise; then the gates
of its own channels, by which it scales them. Weights are on their way before the wait for predecessors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import gap_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.squeeze_excite.match import VECTOR, Leaf, SqueezeExcite, Stage
from weft.generate.cuda.gemm.common.epilogue import stored_words
from weft.generate.cuda.intrinsics.prelude import load, prelude, storage
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.ctype import literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Pointer, Schedule

LANES = 8
"""Lanes that share a gate's sum."""
_TOGETHER = 4
"""Vectors of the image that a thread asks for at once."""


@dataclass(frozen=True, slots=True)
class SqueezeConfig(Parameters):
    """Parameters of the template; counts."""

    ctas: int
    """Of a cluster, which has one image."""
    threads: int
    keep: bool
    """The image's channels stay in shared memory between the mean and the scaling."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="squeeze_excite")


@dataclass(frozen=True, slots=True)
class Places:
    """Sizes of a CTA, and where its parts of shared memory stand; bytes."""

    m: SqueezeExcite
    s: SqueezeConfig

    @property
    def vectors(self) -> int:
        """Vectors of 8 channels, of all CTAs."""
        return self.m.channels // VECTOR

    @property
    def own(self) -> int:
        """Most vectors of a CTA."""
        return -(-self.vectors // self.s.ctas)

    @property
    def rows(self) -> int:
        """Most hidden values of a CTA."""
        return -(-self.m.hidden // self.s.ctas)

    @property
    def first_bytes(self) -> int:
        """Of its rows of the first weight."""
        return self.rows * self.m.channels * 2

    @property
    def second_bytes(self) -> int:
        """Of its rows of the second weight."""
        return self.own * VECTOR * self.m.hidden * 2

    def at(self) -> Mapping[str, int]:
        """Places of all parts, and the end."""
        m = self.m
        sizes = {
            "W1": self.first_bytes,
            "W2": self.second_bytes,
            "PARTS": self.s.threads * VECTOR * 4,
            "MEANS": m.channels * 4,
            "OWN": self.own * VECTOR * 4,
            "HIDDEN": m.hidden * 4,
            "MINE": self.rows * 4,
            "GATES": self.own * VECTOR * 4,
            "IMAGE": m.pixels * self.own * 16 if self.s.keep else 0,
        }
        found, end = {}, 0
        for name, size in sizes.items():
            found[name] = end
            end += -(-size // 16) * 16
        return {**found, "END": end}

    @property
    def shared(self) -> int:
        """Dynamic shared memory."""
        return self.at()["END"]


def candidates(m: SqueezeExcite, facts: GpuFacts) -> Iterable[SqueezeConfig]:
    """All that fit."""
    for ctas in (1, 2, 4, 8):
        if ctas > 1 and (facts.capability < 90 or ctas > m.channels // VECTOR or ctas > m.hidden):
            break
        for threads in (256, 512):
            for keep in (True, False):
                s = SqueezeConfig(ctas, threads, keep)
                fits = Places(m, s).shared + 1024 <= facts.shared_per_block
                if Places(m, s).own <= threads and fits:
                    yield s
                    break  # what can be kept is not read twice


def shapes(m: SqueezeExcite, facts: GpuFacts, keep: int = 4) -> list[tuple[float, SqueezeConfig]]:
    """(modelled cycles, configuration), best first."""
    ranked = [(cycles(m, s, facts), s) for s in candidates(m, facts)]
    return sorted(ranked, key=lambda x: (x[0], x[1].ctas, x[1].threads))[:keep]


def cycles(m: SqueezeExcite, s: SqueezeConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain of kernels, with constants of `conv.halo`; nothing was fitted to these kernels."""
    c = costs_of(facts).halo
    p = Places(m, s)
    room = max(s.ctas, int((c.clustered[s.ctas] if s.ctas > 1 else 1) * facts.sms) // s.ctas * s.ctas)
    resident = max(1, min(facts.shared_per_sm // (p.shared + 1024), facts.threads_per_sm // s.threads))
    busiest = -(-m.images * s.ctas // room)
    waves = -(-busiest // resident)
    active = -(-busiest // waves)
    bytes_ = m.pixels * p.own * 16
    read = max(bytes_ / c.port, bytes_ / 16 * c.chunk / 128)
    passes = read + (0 if s.keep else read) + bytes_ / c.stored
    warps = s.threads // 32
    first = -(-p.rows // warps) * (-(-p.vectors // 32) * VECTOR + c.step)
    second = -(-p.own * VECTOR * LANES // s.threads) * (-(-m.hidden // LANES) + c.step)
    sums = -(-p.own * VECTOR * LANES // s.threads) * (-(-s.threads // (p.own * LANES)) * c.product + c.step)
    inside = active * passes + sums + first + second + c.end + c.latency + (2 * c.cluster if s.ctas > 1 else 0)
    outside = m.weight_bytes / (facts.bandwidth_at(max(m.weight_bytes, 1)) / facts.clock_ghz)
    return gap_us(facts) * facts.clock_ghz * 1e3 + c.launch + max(waves * inside, outside)


class Printer:
    """Text of the stages of one kernel."""

    def __init__(self, m: SqueezeExcite, names: Mapping[int, str]) -> None:
        self.m, self.names = m, names

    def leaf(self, leaf: Leaf, channel: str) -> Value:
        """A number, or an element of the vector of image `img`."""
        at = summed(leaf.offset, Int("img") * leaf.steps[0], Int(channel) * leaf.steps[1])
        if leaf.constant >= 0:
            return Value(f"kc{leaf.constant}[{at}]", leaf.dtype)
        if leaf.index < 0:
            return Value(literal(leaf.number, leaf.dtype), leaf.dtype, constant=float(leaf.number))
        pointer = f"(const {storage(leaf.dtype)}*){self.names[leaf.index]}"
        return Value(load(leaf.dtype, str(Int(pointer) + at)), leaf.dtype)

    def stage(self, stage: Stage, given: str, channel: str, prefix: str, gate: str = "") -> tuple[list[str], str]:
        """Statements, and the name of the value at the end of a stage that begins with `given` at channel `channel`."""
        g, lines = self.m.graph, list[str]()
        values: dict[NodeId, Value] = {stage.start: Value(given, g.type_of(stage.start).dtype)}
        if gate:
            values[self.m.gate.end] = Value(gate, g.type_of(self.m.gate.end).dtype)
        for at in stage.nodes:
            node = g.nodes[at]
            if node.prim is Prim.BROADCAST:
                values[at] = values[node.inputs[0]]
                continue
            operands = []
            for j in node.inputs:
                if j not in values:
                    found = self.leaf(self.m.leaves[j], channel)
                    if found.constant is None:
                        name = f"{prefix}v{j}"
                        lines.append(f"const {found.c_type} {name} = {found.name};")
                        found = Value(name, found.dtype)
                    values[j] = found
                operands.append(values[j])
            value = Value(f"{prefix}e{at}", node.type.dtype)
            lines.append(f"const {value.c_type} {value.name} = {elementwise(node.prim, operands, node.type.dtype)[0]};")
            values[at] = value
        return lines, values[stage.end].name


def emit(m: SqueezeExcite, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `SqueezeConfig.schedule`."""
    return solo(roles(m, schedule), entry)


def roles(m: SqueezeExcite, schedule: Schedule) -> RoleSource | Declined:
    """The role of one schedule made by `SqueezeConfig.schedule`."""
    s = SqueezeConfig.of(schedule)
    p = Places(m, s)
    if p.own > s.threads or (s.ctas > 1 and s.ctas > min(p.vectors, m.hidden)):
        return Declined(f"{s.ctas} CTAs of {s.threads} threads for {m.channels} channels")
    read = sorted({m.x, *m.weights, *(x.index for x in m.leaves.values() if x.index >= 0)})
    names = {i: f"in{i}" for i in read}
    printer = Printer(m, names)
    kind = m.dtype.value
    rank, image = Int("rank"), Int("img") * (m.pixels * m.channels)
    places = p.at()
    second = Int("v0") * (VECTOR * m.hidden)
    lines = [
        "enum { " + ", ".join(f"{name} = {at}" for name, at in places.items()) + " };",
        "const u32 sb = w_shared(sm); (void)sb;",
        "const int t = role.thread(), lane = t & 31, warp = t >> 5;",
        f"const int rank = {'role.block_x()' if s.ctas > 1 else '0'}, img = role.block_y(); (void)img;",
        f"const int v0 = {rank * p.vectors / s.ctas}, own = {(rank + 1) * p.vectors / s.ctas} - v0;",
        f"const int h0 = {rank * m.hidden / s.ctas}, rows = {(rank + 1) * m.hidden / s.ctas} - h0;",
        "float* const parts = (float*)(sm + PARTS); float* const means = (float*)(sm + MEANS);",
        "float* const mine = (float*)(sm + MINE); float* const hidden = (float*)(sm + HIDDEN);",
        "float* const mean = (float*)(sm + OWN); float* const gates = (float*)(sm + GATES);",
        "// this CTA's rows of both weights",
        f"{{ const char* const w = (const char*)((const u16*){names[m.weights[0]]} + {Int('h0') * m.channels});",
        f"for (int i = t; i < rows * {p.vectors}; i += {s.threads}) w_copy16(sb + W1 + i * 16, w + i * 16); }}",
        f"{{ const char* const w = (const char*)((const u16*){names[m.weights[1]]} + {second});",
        f"for (int i = t; i < own * {m.hidden}; i += {s.threads}) w_copy16(sb + W2 + i * 16, w + i * 16); }}",
        "w_commit();",
        *_prefetch(m, s, names),
        "role.pdl_wait(); role.pdl_trigger();",
        f"const uint4* const X = (const uint4*)((const u16*){f'in{m.x}'} + {image.tight}) + v0;",
        f"uint4* const Y = (uint4*)((u16*)out0 + {image.tight}) + v0;",
        f"const int v = t % own, p0 = t / own, step = {s.threads} / own;",
        *_sum(m, s, p, printer),
        "w_arrived<0>(); role.sync();",
        *_means(m, s, p, printer),
        *_exchange(s, "mean", "means", m.channels, VECTOR),
        *_hidden(m, s, p, printer, kind),
        *_exchange(s, "mine", "hidden", m.hidden, 1),
        *_gates(m, s, printer),
        *_scale(m, s, p, printer),
        "w_together(); w_cluster_leave();" if s.ctas > 1 else "",
    ]
    parameters = [Parameter(names[i], Pointer("in", i)) for i in read] + [Parameter("out0", Pointer("out", 0), WRITTEN)]
    role = DeviceRole(
        threads=s.threads,
        body="\n".join(x for x in lines if x),
        parameters=tuple(parameters),
        grid=(s.ctas, m.images, 1),
        globals="".join(_constant(m, node) for node in sorted({x.constant for x in m.leaves.values()} - {-1})),
        shared_bytes=p.shared,
        cluster=(s.ctas, 1, 1),
    )
    return RoleSource(
        schedule=schedule, headers=(prelude(),), roles=(role,), capability=90 if s.ctas > 1 else 80
    )  # fmt: skip


def _constant(m: SqueezeExcite, node: NodeId) -> str:
    """A vector that stands in the text, widened to f32, which is exact."""
    values = np.asarray(m.graph.constant(node)).astype(np.float32).reshape(-1)
    return f"__device__ const float kc{node}[] = {{{','.join(literal(float(x), DType.F32) for x in values)}}};\n"


def _prefetch(m: SqueezeExcite, s: SqueezeConfig, names: Mapping[int, str]) -> list[str]:
    """Statements that ask for the vectors beside the products: their lines are on the way before the wait."""
    lines = []
    for x in {x.index: x for x in m.leaves.values() if x.index >= 0 and x.steps[1] == 1 and not x.steps[0]}.values():
        per, size = 128 // x.dtype.itemsize, math.prod(m.graph.type_of(m.graph.inputs[x.index]).shape)
        at = f"(const {storage(x.dtype)}*){names[x.index]} + i * {per}"
        lines.append(f"for (int i = t; i < {-(-size // per)}; i += {s.threads}) w_prefetch({at});")
    return lines


def _unpacked(kind: str, word: str, to: str) -> str:
    """Statements: a vector of memory as floats into the array `to`."""
    return " ".join(
        f"{{ const float2 h = w_unpack_{kind}({word}.{f}); {to}[{2 * i}] = h.x; {to}[{2 * i + 1}] = h.y; }}"
        for i, f in enumerate("xyzw")
    )


def _sum(m: SqueezeExcite, s: SqueezeConfig, p: Places, printer: Printer) -> list[str]:
    """Every thread adds up one vector of channels over its share of the pixels."""
    kind = m.dtype.value
    each = []
    for e in range(VECTOR):
        lines, end = printer.stage(m.before, f"f[{e}]", f"((v0 + v) * {VECTOR} + {e})", f"b{e}_")
        each += [*lines, f"acc[{e}] += {end};"]
    kept = f"((uint4*)(sm + IMAGE))[at * {p.own} + v] = q[u];" if s.keep else ""
    return [
        f"float acc[{VECTOR}] = {{}};",
        f"if (p0 < step) for (int first = p0; first < {m.pixels}; first += {_TOGETHER} * step) {{",
        f"uint4 q[{_TOGETHER}];",
        f"#pragma unroll\nfor (int u = 0; u < {_TOGETHER}; ++u) {{ const int at = first + u * step;",
        f"w_read_if(q[u], X + (long long)at * {p.vectors} + v, at < {m.pixels}); }}",
        f"#pragma unroll\nfor (int u = 0; u < {_TOGETHER}; ++u) {{ const int at = first + u * step;",
        f"if (at < {m.pixels}) {{ {kept} float f[{VECTOR}]; {_unpacked(kind, 'q[u]', 'f')}",
        *each,
        "} } }",
        f"if (p0 < step) {{\n#pragma unroll\nfor (int e = 0; e < {VECTOR}; ++e)",
        f"parts[(p0 * own + v) * {VECTOR} + e] = acc[e]; }}",
    ]


def _means(m: SqueezeExcite, s: SqueezeConfig, p: Places, printer: Printer) -> list[str]:
    """Sums of this CTA's channels, in order: neighbouring lanes have a channel, each some threads' parts."""
    count = -(-p.own * VECTOR * LANES // s.threads)
    lines, end = printer.stage(m.mean, "sum", f"(v0 * {VECTOR} + c)", "m_")
    return [
        f"for (int i = 0; i < {count}; ++i) {{ const int x = t + i * {s.threads}, c = x / {LANES}, l = x % {LANES};",
        f"float sum = 0.0f; if (c < own * {VECTOR}) for (int k = l; k < step; k += {LANES})",
        f"sum += parts[k * own * {VECTOR} + c];",
        f"#pragma unroll\nfor (int d = {LANES // 2}; d; d >>= 1) sum += w_shfl(sum, d);",
        f"if (l == 0 && c < own * {VECTOR}) {{",
        *lines,
        f"mean[c] = {end}; }} }}",
    ]


def _exchange(s: SqueezeConfig, mine: str, whole: str, size: int, unit: int) -> list[str]:
    """All CTAs' values in each: element i stands in the CTA whose share of units of neighbours it is in."""
    if s.ctas == 1:
        return [
            "role.sync();",
            f"for (int i = t; i < {size}; i += {s.threads}) {whole}[i] = {mine}[i];",
            "role.sync();",
        ]
    units, u = size // unit, Int("i") / unit
    return [
        "w_together(); w_cluster_sync();",
        f"for (int i = t; i < {size}; i += {s.threads}) {{",
        f"int of = {u * s.ctas / units}; while ((of + 1) * {units} / {s.ctas} <= {u}) ++of;",
        f"const int at = i - of * {units} / {s.ctas}{f' * {unit}' if unit > 1 else ''};",
        f"{whole}[i] = __uint_as_float(w_cluster_word((const unsigned*){mine} + at, (unsigned)of)); }}",
        "role.sync();",
    ]


def _hidden(m: SqueezeExcite, s: SqueezeConfig, p: Places, printer: Printer, kind: str) -> list[str]:
    """A warp has a hidden value."""
    lines, end = printer.stage(m.inner, "sum", "(h0 + j)", "h_")
    return [
        f"for (int j = warp; j < rows; j += {s.threads // 32}) {{ float sum = 0.0f;",
        f"for (int k = lane; k < {p.vectors}; k += 32) {{",
        f"const uint4 q = ((const uint4*)(sm + W1))[j * {p.vectors} + k];",
        f"float f[{VECTOR}]; {_unpacked(kind, 'q', 'f')}",
        f"#pragma unroll\nfor (int e = 0; e < {VECTOR}; ++e) sum = fmaf(f[e], means[k * {VECTOR} + e], sum); }}",
        "#pragma unroll\nfor (int d = 16; d; d >>= 1) sum += w_shfl(sum, d);",
        "if (lane == 0) {",
        *lines,
        f"mine[j] = {end}; }} }}",
    ]


def _gates(m: SqueezeExcite, s: SqueezeConfig, printer: Printer) -> list[str]:
    """Neighbouring lanes have a gate of this CTA's channels."""
    lines, end = printer.stage(m.gate, "sum", f"(v0 * {VECTOR} + c)", "g_")
    weight = load(m.dtype, f"(const u16*)(sm + W2) + c * {m.hidden} + k")
    return [
        f"for (int i = 0; i * {s.threads} < own * {VECTOR * LANES}; ++i) {{",
        f"const int x = t + i * {s.threads}, c = x / {LANES}, l = x % {LANES}; float sum = 0.0f;",
        f"if (c < own * {VECTOR}) for (int k = l; k < {m.hidden}; k += {LANES}) sum = fmaf({weight}, hidden[k], sum);",
        f"#pragma unroll\nfor (int d = {LANES // 2}; d; d >>= 1) sum += w_shfl(sum, d);",
        f"if (l == 0 && c < own * {VECTOR}) {{",
        *lines,
        f"gates[c] = {end}; }} }}",
        "role.sync();",
    ]


def _scale(m: SqueezeExcite, s: SqueezeConfig, p: Places, printer: Printer) -> list[str]:
    """Every thread scales the vectors that it has read."""
    kind = m.dtype.value
    source = f"((const uint4*)(sm + IMAGE))[at * {p.own} + v]" if s.keep else f"X[(long long)at * {p.vectors} + v]"
    each, ends = [], []
    for e in range(VECTOR):
        lines, end = printer.stage(m.scaled, f"f[{e}]", f"((v0 + v) * {VECTOR} + {e})", f"s{e}_", f"scale[{e}]")
        each += lines
        ends.append(end)
    words = [f"w_narrow2_{kind}({ends[i]}, {ends[i + 1]})" for i in range(0, VECTOR, 2)]
    store = stored_words(words, f"Y + (long long)at * {p.vectors} + v")
    return [
        f"float scale[{VECTOR}];",
        f"#pragma unroll\nfor (int e = 0; e < {VECTOR}; ++e) scale[e] = gates[v * {VECTOR} + e];",
        f"if (p0 < step) for (int at = p0; at < {m.pixels}; at += step) {{",
        f"const uint4 q = {source}; float f[{VECTOR}]; {_unpacked(kind, 'q', 'f')}",
        *each,
        f"{store} }}",
    ]
