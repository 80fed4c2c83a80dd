"""Two-level accumulation: sums of 8-bit floats are promoted to f32 after every 64 rows of a stage (128 terms).

Hopper's tensor cores keep some 14 bits while they add up. `promoted`: the sums of a stage are complete before they are
added; `promoted_overlapped`: two sets of registers, so that the next 64 rows are multiplied meanwhile.
"""

from __future__ import annotations

from weft.generate.cuda.gemm.tma.operands import STEP
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.ring import Ring


def clear(s: TmaConfig) -> str:
    """The tile's sums begin at zero."""
    per = s.bn // 2
    return f"#pragma unroll\nfor (int i = 0; i < {s.rows // 64 * per}; ++i) acc[i / {per}][i % {per}] = 0.0f;"


def promoted(s: TmaConfig, product: str, free: str) -> list[str]:
    """A stage in `slot`; `product` adds 32 bytes `q` of rows `i` to `part`, `free` gives the stage back."""
    high = s.rows // 64
    return [
        f"float part[{s.bn // 2}];",
        f"#pragma unroll\nfor (int i = 0; i < {high}; ++i) {{",
        f"w_group_begin();\n#pragma unroll\nfor (int q = 0; q < {STEP // 16}; ++q)",
        product,
        "w_group_commit(); w_group_wait<0>();",
        f"if (i == {high - 1}) {{ {free} }}",
        f"#pragma unroll\nfor (int j = 0; j < {s.bn // 2}; ++j) acc[i][j] += part[j];\n}}",
    ]


def promoted_overlapped(s: TmaConfig, product: str, free: str) -> list[str]:
    """All stages of a tile, from `first` to before `last`, the first of them number `it` of the block."""
    per, high, ring = s.bn // 2, s.rows // 64, Ring(s.stages)
    lines = [
        f"float even[{per}], odd[{per}];",
        (
            f"auto issue = [&](float (&part)[{per}], int st, int i) {{ const u32 n = it + (u32)(st - first),"
            f" slot = {ring.slot('n')}, at = sb + RING + slot * STAGE;"
        ),
        f"if (i == 0) {ring.await_filled('slot', ring.parity('n'))}",
        f"w_group_begin();\n#pragma unroll\nfor (int q = 0; q < {STEP // 16}; ++q)",
        product,
        "w_group_commit(); };",
        f"auto give = [&](int st) {{ const u32 slot = {ring.slot('it + (u32)(st - first)')}; {free} }};",
        f"auto add = [&](float (&part)[{per}], float (&sum)[{per}]) {{",
        f"#pragma unroll\nfor (int j = 0; j < {per}; ++j) w_held(part[j]);",
        f"#pragma unroll\nfor (int j = 0; j < {per}; ++j) sum[j] += part[j]; }};",
        "issue(even, first, 0); int st = first;",
    ]
    if high == 2:
        return [
            *lines,
            "#pragma unroll 1\nfor (; st + 1 < last; ++st) {",
            "issue(odd, st, 1); w_group_wait<1>(); add(even, acc[0]);",
            "issue(even, st + 1, 0); w_group_wait<1>(); give(st); add(odd, acc[1]); }",
            "issue(odd, st, 1); w_group_wait<1>(); add(even, acc[0]);",
            "w_group_wait<0>(); give(st); add(odd, acc[1]);",
            "it += (u32)(last - first);",
        ]
    return [
        *lines,
        "#pragma unroll 1\nfor (; st + 2 < last; st += 2) {",
        "issue(odd, st + 1, 0); w_group_wait<1>(); give(st); add(even, acc[0]);",
        "issue(even, st + 2, 0); w_group_wait<1>(); give(st + 1); add(odd, acc[0]); }",
        "if (st + 1 < last) {",
        "issue(odd, st + 1, 0); w_group_wait<1>(); give(st); add(even, acc[0]);",
        "w_group_wait<0>(); give(st + 1); add(odd, acc[0]);",
        "} else { w_group_wait<0>(); give(st); add(even, acc[0]); }",
        "it += (u32)(last - first);",
    ]
