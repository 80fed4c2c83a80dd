"""Gradients of attention on tensor cores, all of a head in the shared memory of a CTA.

Q, K, V and the gradient of the result arrive by asynchronous copies, once. Warps take tiles of 16 keys, then of 16 rows
of Q, in turns. For a tile of keys a warp goes over all rows: the exponentials Pᵀ, times the gradient they add to
dV, and dSᵀ = Pᵀ ∘ (V dOᵀ - δ), times Q that adds to dK; for a tile of rows over all keys, for dQ. What is exchanged
between warps are the sums δ = rowsum(dO ∘ O) alone. Seven products instead of five: so none of them waits for another
warp, there are no atomics, and every sum has one order. P and dS are rounded to the operands' type for the products.

Sources: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023), equations of
the backward pass; note on matrix products, section 5 (fragments).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import memory_us
from weft.device.cuda.facts import GpuFacts
from weft.generate.contraction.values import View
from weft.generate.cuda.attention.gradient.match import HEADS, AttentionGradient
from weft.generate.cuda.attention.kernel import EXP2
from weft.generate.cuda.attention.load import each
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.ctype import literal
from weft.generate.expr.integer import Int, summed
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Pointer, Schedule

TILE = 16
WARP = 32
LOG2_E = math.log2(math.e)
MOST_WARPS = {64: 12, 128: 8}
"""Of a multiprocessor, by the elements of a head: each of its four parts has registers for a quarter of them."""
LEAST_WARPS = 3
_MOST_CTAS = 4


@dataclass(frozen=True, slots=True)
class GradientConfig(Parameters):
    """Parameters of the template; counts."""

    warps: int
    """Of a CTA."""
    ctas: int
    """Of a multiprocessor: registers are shared out among so many."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="attention_gradient")

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return WARP * self.warps


def tiles(m: AttentionGradient) -> tuple[int, int]:
    """Tiles of rows, and of keys."""
    return -(-m.positions // TILE), -(-m.keys // TILE)


def shared_bytes(m: AttentionGradient) -> int:
    """Rows of Q and its gradient, K and V, and two numbers of each row."""
    rows, keys = tiles(m)
    return 2 * (rows + keys) * TILE * m.width * m.dtype.itemsize + 2 * rows * TILE * 4


def shapes(m: AttentionGradient, facts: GpuFacts) -> list[tuple[float, GradientConfig]]:
    """(modelled cycles, shape), the most promising first."""
    return sorted(((cycles(m, s, facts), s) for s in _candidates(m, facts)), key=lambda x: (x[0], x[1].warps))


def _candidates(m: AttentionGradient, facts: GpuFacts) -> Iterable[GradientConfig]:
    (rows, keys), shared = tiles(m), shared_bytes(m)
    for ctas in range(1, _MOST_CTAS + 1):
        if shared > facts.shared_per_block or ctas * (shared + facts.shared_reserved) > facts.shared_per_sm:
            continue
        most = MOST_WARPS[m.width] // ctas
        if most >= min(LEAST_WARPS, rows + keys):
            turns = -(-(rows + keys) // most)
            yield GradientConfig(-(-(rows + keys) // turns), ctas)


def cycles(m: AttentionGradient, s: GradientConfig, facts: GpuFacts) -> float:
    """Modelled cycles in a chain: pairs of tiles of the busiest multiprocessor, and memory that no CTA hides."""
    fit = costs_of(facts).attention
    (rows, keys), heads = tiles(m), m.rows * m.heads
    pairs = rows * keys / (2 if m.causal else 1)
    turns = -(-(rows + keys) // s.warps)
    idle = turns * s.warps / (rows + keys)
    computing = -(-heads // facts.sms) * pairs * idle * fit.gradient_pair * m.width / HEADS[0]
    moved = 4 * (m.positions + m.keys) * heads * m.width * m.dtype.itemsize
    return computing + memory_us(facts, moved, 0) * facts.clock_ghz * 1e3 / s.ctas + fit.gradient_end


def emit(m: AttentionGradient, schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel of one schedule made by `GradientConfig.schedule`."""
    return solo(roles(m, schedule), entry)


def roles(m: AttentionGradient, schedule: Schedule) -> RoleSource | Declined:
    """The role of one schedule made by `GradientConfig.schedule`."""
    s = GradientConfig.of(schedule)
    role = DeviceRole(
        threads=s.threads,
        body="\n".join([*_loaded(m, s), *_tasks(m, s)]),
        parameters=(
            *(Parameter(f"in{i}", Pointer("in", i)) for i in sorted({i for i, _ in m.operands})),
            *(Parameter(f"out{k}", Pointer("out", k), WRITTEN) for k in sorted({x.output for x in m.results})),
        ),
        grid=(m.rows * m.heads, 1, 1),
        min_ctas_per_sm=s.ctas,
        shared_bytes=shared_bytes(m),
    )
    return RoleSource(schedule, (prelude(), EXP2, _functions()), (role,), capability=80)


@cache
def _functions() -> str:
    return Path(__file__).with_name("weft_cuda_attention_gradient.h").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Lain:
    """Rows of heads in memory, in pairs of elements."""

    array: str
    first: str
    """Where the head's first row begins."""
    pitch: int
    """From row to row."""


def _lain(m: AttentionGradient, array: str, view: View) -> _Lain:
    return _Lain(array, f"first{list(_starts(m)).index((view.strides, view.offset))}", view.strides[1] // 2)


def _starts(m: AttentionGradient) -> Mapping[tuple[tuple[int, ...], int], str]:
    """By strides and offset, where the head's first row begins: C text, in pairs of elements."""
    views = [*(view for _, view in m.operands[:-1]), *(x.view for x in m.results)]
    return {
        (x.strides, x.offset): str(
            summed(Int("(long long)z") * (x.strides[0] // 2), Int("head") * (x.strides[2] // 2), x.offset // 2)
        )
        for x in views
    }


def _loaded(m: AttentionGradient, s: GradientConfig) -> list[str]:
    """All operands into shared memory, and two numbers of each row: its logarithm, to the base 2, and δ."""
    rows, keys = (n * TILE for n in tiles(m))
    gradient, query, key, value, result = (_lain(m, f"in{i}", view) for i, view in m.operands[:-1])
    sums = f"in{m.operands[-1][0]}"
    chunks, bytes_of = m.width // 8, m.width * m.dtype.itemsize
    flag = _flag(m)
    turns = -(-rows * chunks // s.threads)

    def place(x: _Lain) -> str:
        return f"(const u32*){x.array} + (in ? {x.first} + (long long)row * {x.pitch} + 4 * c : 0)"

    def copied(x: _Lain, at: str, count: int, exist: int) -> list[str]:
        return [
            f"for (int i = t; i < {count * chunks}; i += {s.threads}) {{",
            f"const int row = i / {chunks}, c = i % {chunks};",
            f"const bool in = row < {exist};",
            f"w_copy16(w_rows<{m.width}>::at({at}, row, c), {place(x)}, in ? 16u : 0u);",
            "}",
        ]

    log = f"((const float*){sums})[(z * {m.heads} + head) * {m.positions} + i] * {literal(LOG2_E, DType.F32)}"
    held = f"*(const uint4*)(sm + (w_rows<{m.width}>::at(g_at, row, c) - q_at))"
    return [
        "const int t = role.thread(), lane = t % 32, warp = t / 32;",
        f"const int z = role.block_x() / {m.heads}, head = role.block_x() % {m.heads};",
        *(f"const long long first{i} = {at};  // pairs of elements" for i, at in enumerate(_starts(m).values())),
        "const u32 q_at = w_shared(sm);",
        f"const u32 g_at = q_at + {rows * bytes_of}u, k_at = g_at + {rows * bytes_of}u;",
        f"const u32 v_at = k_at + {keys * bytes_of}u;",
        f"float* const logs = (float*)(sm + {2 * (rows + keys) * bytes_of});",
        f"float* const deltas = logs + {rows};",
        "role.pdl_wait(); role.pdl_trigger();",
        *copied(query, "q_at", rows, m.positions),
        *copied(gradient, "g_at", rows, m.positions),
        *copied(key, "k_at", keys, m.keys),
        *copied(value, "v_at", keys, m.keys),
        "w_commit();",
        f"uint4 results[{turns}];",
        f"{each('u', turns)} {{",
        f"const int i = t + u * {s.threads}, row = i / {chunks}, c = i % {chunks};",
        f"const bool in = row < {m.positions};",
        f"w_read_if(results[u], {place(result)}, in);",
        "}",
        f"for (int i = t; i < {rows}; i += {s.threads})",
        f"logs[i] = i < {m.positions} ? {log} : {literal(math.inf, DType.F32)};",
        "w_arrived<0>();",
        f"{each('u', turns)} {{",
        f"const int i = t + u * {s.threads}, row = i / {chunks}, c = i % {chunks};",
        "float delta = 0.0f;",
        f"if (i < {rows * chunks}) delta = w_dot8<{flag}>(results[u], {held});",
        *(f"delta += w_shfl(delta, {1 << k});" for k in range(chunks.bit_length() - 1)),
        f"if (c == 0 && i < {rows * chunks}) deltas[row] = delta;",
        "}",
        "role.sync();",
    ]


def _tasks(m: AttentionGradient, s: GradientConfig) -> list[str]:
    """Tiles of keys, then tiles of rows, by the warps in turns."""
    rows, keys = tiles(m)
    return [
        f"#pragma unroll 1\nfor (int task = warp; task < {rows + keys}; task += {s.warps}) {{",
        f"if (task < {keys}) {{",
        *_of_keys(m, rows),
        "} else {",
        *_of_rows(m, keys),
        "}\n}",
    ]


def _flag(m: AttentionGradient) -> str:
    """Whether operands are bf16, as a template argument."""
    return str(m.dtype is DType.BF16).lower()


def _arguments(m: AttentionGradient) -> tuple[str, str, str]:
    """Template arguments, the factor of scores in exponents to the base 2, and that of gradients."""
    return f"{m.width}, {_flag(m)}", literal(m.scale * LOG2_E, DType.F32), literal(m.scale, DType.F32)


def _of_keys(m: AttentionGradient, rows: int) -> list[str]:
    if not {1, 2} & {x.result for x in m.results}:
        return []
    of, exponent, scale = _arguments(m)
    seen = ["if (row0 + (lane >> 2) + 8 * h > at) x = 0.0f;"] if m.causal else []
    return [
        f"const int row0 = task * {TILE};",
        f"u32 k[{m.width // 16}][4], v[{m.width // 16}][4];",
        f"w_left<{m.width}>(k, k_at, row0, lane); w_left<{m.width}>(v, v_at, row0, lane);",
        f"float dk[{m.width // 8}][4] = {{}}, dv[{m.width // 8}][4] = {{}};",
        f"#pragma unroll 1\nfor (int i = {'task' if m.causal else '0'}; i < {rows}; ++i) {{",
        "float s[2][4] = {}, p[2][4] = {};",
        f"w_scores<{of}>(s, k, q_at, i * {TILE}, lane); w_scores<{of}>(p, v, g_at, i * {TILE}, lane);",
        f"{each('n', 2)}\n{each('e', 2)} {{",
        f"const int at = i * {TILE} + 8 * n + 2 * (lane & 3) + e;",
        "const float log = logs[at], delta = deltas[at];",
        f"{each('h', 2)} {{",
        f"float x = w_exp2(fmaf(s[n][2 * h + e], {exponent}, -log));",
        *seen,
        "s[n][2 * h + e] = x; p[n][2 * h + e] = x * (p[n][2 * h + e] - delta);",
        "}\n}",
        "u32 a[4];",
        f"w_as_left<{_flag(m)}>(a, s); w_weighted<{of}>(dv, a, g_at, i * {TILE}, lane);",
        f"w_as_left<{_flag(m)}>(a, p); w_weighted<{of}>(dk, a, q_at, i * {TILE}, lane);",
        "}",
        *_put(m, 1, "dk", m.keys, scale),
        *_put(m, 2, "dv", m.keys, "1.0f"),
    ]


def _of_rows(m: AttentionGradient, keys: int) -> list[str]:
    if 0 not in {x.result for x in m.results}:
        return []
    of, exponent, scale = _arguments(m)
    seen = [f"at < {m.keys}"] if m.keys % TILE else []
    seen += ["at <= row0 + (lane >> 2) + 8 * h"] if m.causal else []
    last = f"{keys}" if not m.causal else f"task - {keys} + 1"
    return [
        f"const int row0 = (task - {keys}) * {TILE};",
        f"u32 q[{m.width // 16}][4], g[{m.width // 16}][4];",
        f"w_left<{m.width}>(q, q_at, row0, lane); w_left<{m.width}>(g, g_at, row0, lane);",
        f"float dq[{m.width // 8}][4] = {{}};",
        "float log[2], delta[2];",
        f"{each('h', 2)} {{",
        "log[h] = logs[row0 + (lane >> 2) + 8 * h]; delta[h] = deltas[row0 + (lane >> 2) + 8 * h];",
        "}",
        f"#pragma unroll 1\nfor (int j = 0; j < {last}; ++j) {{",
        "float s[2][4] = {}, p[2][4] = {};",
        f"w_scores<{of}>(s, q, k_at, j * {TILE}, lane); w_scores<{of}>(p, g, v_at, j * {TILE}, lane);",
        f"{each('n', 2)}\n{each('e', 2)} {{",
        f"const int at = j * {TILE} + 8 * n + 2 * (lane & 3) + e;" if seen else "",
        f"{each('h', 2)} {{",
        f"const float x = w_exp2(fmaf(s[n][2 * h + e], {exponent}, -log[h])) * (p[n][2 * h + e] - delta[h]);",
        f"p[n][2 * h + e] = {' && '.join(seen)} ? x : 0.0f;" if seen else "p[n][2 * h + e] = x;",
        "}\n}",
        "u32 a[4];",
        f"w_as_left<{_flag(m)}>(a, p); w_weighted<{of}>(dq, a, k_at, j * {TILE}, lane);",
        "}",
        *_put(m, 0, "dq", m.positions, scale),
    ]


def _put(m: AttentionGradient, which: int, name: str, count: int, by: str) -> list[str]:
    """One gradient's tile into every output that is it."""
    of = _arguments(m)[0]
    found = [_lain(m, f"out{x.output}", x.view) for x in m.results if x.result == which]
    return [
        f"w_put_rows<{of}>((u32*){x.array} + {x.first}, {name}, row0, {count}, {x.pitch}, {by}, lane);" for x in found
    ]
