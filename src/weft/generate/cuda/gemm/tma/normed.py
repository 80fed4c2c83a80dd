"""The tma template where the left operand is normalised: fragments go through registers on their way to the products.

A warp loads the 16 rows of its warpgroup's products, 64 of the sum at a time, normalises them, and multiplies from
registers; while the products of one stage run, the next one is normalised into other registers. Values of a thread's
rows are computed once per tile, vectors along the sum lie in shared memory.
Source: note on matrix products, sections 2.4 and 8 (prologue).
"""

from __future__ import annotations

from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.normed import PIECE
from weft.generate.cuda.gemm.common.normed_text import (
    column_bytes,
    columns_text,
    element_text,
    padded_length,
    rows_text,
)
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.tma.operands import STEP, Rows
from weft.generate.cuda.gemm.tma.ring import PipelineState
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.wgmma import wgmma
from weft.generate.expr.integer import summed
from weft.ir.declined import Declined

BARRIER, FIRST = 2, 3
"""Numbers of named barriers: of all consumer warpgroups, and the first of those that order them (ping-pong)."""
WIDE = 96
"""Columns of a tile from which on warpgroups issue products in order (ping-pong): a warp waits until the tensor cores
have read its registers, and meanwhile another one normalises."""
MOST_SUMS, MOST_OF_THREE = 128, 80
"""Registers of sums of a thread that leave room for two stages of fragments: of one or two warpgroups, and of three."""


def declined(p: Product, rows: Rows, s: TmaConfig, width: int) -> Declined | None:
    """Why a shape cannot normalise its left operand, or leave partial sums of its results."""
    if p.partial_stats is not None and (width != 8 or p.halves != 1 or not rows.linear or s.store or s.bn % PIECE):
        return Declined("partial statistics need results that threads store 8 at a time")
    if p.norm is None:
        return None
    if s.panel != STEP or s.halo_stages or s.two_level or not rows.linear or p.a_load != "rows":
        return Declined("a norm in the prologue needs K-major rows in k-tiles of 64")
    if s.rows * s.bn // 128 > (MOST_OF_THREE if s.consumers == 3 else MOST_SUMS) or s.rows > 64:
        return Declined("a norm in the prologue beside more accumulators than leave registers for it")
    if p.norm.own and (p.norm.length > STEP or p.norm.length % 16):
        return Declined(
            "a norm whose mean and variance no kernel before has left, of rows that are more than one stage"
        )
    return None


def bytes_of(p: Product) -> int:
    """Shared memory of vectors along the sum."""
    return column_bytes(p.norm, STEP) + 16 if p.norm is not None else 0


def barriers(p: Product, s: TmaConfig) -> int:
    """Named barriers that a role needs for its normalised operand."""
    if p.norm is None:
        return 0
    return FIRST + s.consumers if in_order(s) else BARRIER + 1


def place(p: Product, s: TmaConfig) -> str:
    """A further constant: where the vectors lie."""
    if p.norm is None:
        return ""
    end = f"READ + {8 * s.halo_stages}" if s.halo_stages else "TURN + 16"
    return f", COLUMNS = ({end} + 15) / 16 * 16"


def instruction(kind: str, columns: int, *, mn_major_b: bool) -> str:
    """The function that multiplies 64 rows in registers by 16 of the sum by `columns`; tests bring their own."""
    name = f"w_product_{kind}_r{int(mn_major_b)}"
    return wgmma(name, columns, f"{kind}.{kind}", left_in_registers=True, mn_major=(mn_major_b,))


def vectors(p: Product, s: TmaConfig) -> list[str]:
    """Before the wait: the vectors along the sum, which are weights, to shared memory."""
    if p.norm is None:
        return []
    threads = 128 * s.consumers
    names = epilogue.arguments(p, False, False, False).names
    lines = columns_text(p.norm, names, "COLUMNS", padded_length(p.norm, STEP), threads)
    lines = [*lines, f"role.named_barrier({BARRIER}, {threads});"] if lines else []
    if in_order(s):
        lines.append(f"if (warp >= {4 * s.consumers - 4}) role.named_barrier_arrive({FIRST}, w_threads<256>());")
    return lines


def in_order(s: TmaConfig) -> bool:
    """Whether warpgroups issue the products of a stage one after the other."""
    return s.consumers > 1 and not s.pingpong and s.bn >= WIDE


def left_over(p: Product, s: TmaConfig) -> str:
    """At the end of a kernel: the arrival that no warpgroup has waited for."""
    return f"if (warp < 4) role.named_barrier({FIRST}, w_threads<256>());" if p.norm is not None and in_order(s) else ""


def _high(s: TmaConfig) -> int:
    return s.rows // 64


def values(p: Product, rows: Rows, s: TmaConfig) -> list[str]:
    """In front of a tile's products: what the thread's rows are normalised by; four lanes share a row."""
    if p.norm is None or p.norm.own:
        return []
    at = "i0 + row0 + o / 2 * 64 + (warp & 3) * 16 + o % 2 * 8 + (lane >> 2)"
    return _of_rows(p, s, f"({at} < {rows.sizes[2]} ? {at} : {rows.sizes[2] - 1})")


def _of_rows(p: Product, s: TmaConfig, row: str, words: str = "") -> list[str]:
    """What each row `o` of a thread is normalised by; `row` and `words` as for `rows_text`."""
    norm, count = p.norm, 2 * _high(s)
    assert norm is not None
    names = epilogue.arguments(p, False, False, False).names
    held = [f"row{j}_" for j in range(len(norm.rows))]
    return [
        *(f"float {name}[{count}];" for name in held),
        f"#pragma unroll\nfor (int o = 0; o < {count}; ++o)",
        *rows_text(norm, names, row, 4, "(lane & 3)", [f"{name}[o]" for name in held], words),
    ]


def _fragments(p: Product, s: TmaConfig, to: str) -> list[str]:
    """Statements: the warp's rows of the stage at `at` into the registers `to`, normalised."""
    norm = p.norm
    assert norm is not None
    kind, padded, n = p.dtype.value, padded_length(norm, STEP), len(norm.columns)
    lines = [
        f"#pragma unroll\nfor (int i = 0; i < {_high(s)}; ++i)\n#pragma unroll\nfor (int q = 0; q < 4; ++q) {{",
        "const int line = row0 + i * 64 + (warp & 3) * 16 + (lane & 15);",
        f"w_matrices({to}[i][q], at + (u32)(line * 128 + ((q * 2 + (lane >> 4)) ^ (line & 7)) * 16)); }}",
        # the rows themselves, which are all of this stage
        *(_of_rows(p, s, "0", f"{to}[o / 2][q][2 * u + o % 2]") if norm.own else []),
        "#pragma unroll\nfor (int q = 0; q < 4; ++q)\n#pragma unroll\nfor (int u = 0; u < 2; ++u) {",
        f"const int k = st * {STEP} + q * 16 + u * 8 + (lane & 3) * 2;",
        *(
            f"const float2 c{j}_ = *(const float2*)({summed('(const float*)(sm + COLUMNS)', j * padded, 'k')});"
            for j in range(n)
        ),
        f"#pragma unroll\nfor (int i = 0; i < {_high(s)}; ++i)\n#pragma unroll\nfor (int h = 0; h < 2; ++h) {{",
        f"u32& word = {to}[i][q][2 * u + h]; const float2 x_ = w_unpack_{kind}(word);",
    ]
    ends = []
    for f in "xy":
        own = [f"row{j}_[2 * i + h]" for j in range(len(norm.rows))]
        steps, end = element_text(norm, f"x_.{f}", own, [f"c{j}_.{f}" for j in range(n)], f"e{f}_")
        lines += steps
        ends.append(end)
    lines.append(f"word = w_narrow2_{kind}({ends[0]}, {ends[1]});")
    if norm.length % STEP:  # what is not there must stay zero: vectors are, but rows may be infinite
        lines.append(f"if (k >= {norm.length}) word = 0;")
    lines.append("} }")
    if norm.stored >= 0:  # in a loop of its own: no branch stands between elements on their way
        inside = " && ".join([f"m < {p.m}", *([f"k < {norm.length}"] if norm.length % STEP else [])])
        lines += [
            f"if (n0 == 0) {{\n#pragma unroll\nfor (int i = 0; i < {_high(s)}; ++i)\n#pragma unroll",
            "for (int h = 0; h < 2; ++h) {",
            "const int m = i0 + row0 + i * 64 + (warp & 3) * 16 + h * 8 + (lane >> 2);",
            f"u16* const row_ = (u16*)normed + (long long)m * {norm.length};",
            "#pragma unroll\nfor (int q = 0; q < 4; ++q)\n#pragma unroll\nfor (int u = 0; u < 2; ++u) {",
            f"const int k = st * {STEP} + q * 16 + u * 8 + (lane & 3) * 2;",
            f"if ({inside}) *(u32*)(row_ + k) = {to}[i][q][2 * u + h]; }} }} }}",
        ]
    return lines


def stages(p: Product, s: TmaConfig, state: PipelineState, of_w: str, *, mn_major: bool) -> list[str]:
    """The sum of a tile, two stages in turn: registers of one are free when the products of the other have begun."""
    high, kind, after = _high(s), f"{p.multiplied}_r{int(mn_major)}", f"((warp >> 2) + 1) % {s.consumers}"

    def stage(to: str) -> list[str]:
        return [
            "{",
            f"const u32 {state.slot}at = sb + RING + slot * STAGE;",
            state.ring.await_filled("slot", state.parity),
            *_fragments(p, s, to),
            f"role.named_barrier({FIRST} + (warp >> 2), w_threads<256>());" if in_order(s) else "",
            "w_group_begin();",
            f"#pragma unroll\nfor (int i = 0; i < {high}; ++i)\n#pragma unroll\nfor (int q = 0; q < 4; ++q) {{",
            f"w_product_{kind}(acc[i], {to}[i][q], {of_w}, (st - first) | q); }}",
            "w_group_commit();",
            f"role.named_barrier_arrive({FIRST} + {after}, w_threads<256>());" if in_order(s) else "",
            "w_group_wait<1>();",
            state.release(state.last, unless_first=True),
            "}",
        ]

    return [
        f"u32 even[{high}][4][4], odd[{high}][4][4];",
        state.before,
        f"#pragma unroll 1\nfor ({state.begin}; ;) {{",
        *stage("even"),
        f"{state.step};",
        f"if (!({state.condition})) break;",
        *stage("odd"),
        f"{state.step};",
        f"if (!({state.condition})) break;",
        "}",
    ]
