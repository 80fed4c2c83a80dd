"""Hopper's warpgroup products inside the skeleton of the mma template: what differs is how a k-block is multiplied.

Tiles are in shared memory as the mma template fills them (rows of 128 bytes, swizzled), all threads copy, and products
run asynchronously: that of the last k-block is still under way while the next one is issued.
Source: note on matrix products, sections 2.3 to 2.5 (descriptors, fragments).
"""

from __future__ import annotations

from weft.generate.cuda.intrinsics.wgmma import wgmma
from weft.generate.expr.integer import Int
from weft.ir.types import DType


def instruction(dtype: DType, columns: int) -> str:
    """The function that multiplies 64 rows by 16 of the sum by `columns`; tests bring their own."""
    kind = dtype.value
    return wgmma(f"w_wgmma_{kind}", columns, f"{kind}.{kind}", mn_major=(False, False))


def fragments(dtype: DType, bn: int, wm: int, wn: int) -> str:
    """The warpgroup's sums, and the lambda `multiply(a, w, add)` that issues one k-block of 64."""
    across, group = bn // wn, Int("(warp >> 2)")
    return f"""const int wk = 0, row0 = {group / across * wm}, col0 = {group % across * wn};
(void)wk;
float acc[{wm // 64}][{wn // 2}];
#pragma unroll
for (int i = 0; i < {wm // 64}; ++i)
#pragma unroll
for (int j = 0; j < {wn // 2}; ++j) acc[i][j] = 0.0f;
auto multiply = [&](u32 a, u32 w, int add) {{
w_group_begin();
#pragma unroll
for (int i = 0; i < {wm // 64}; ++i)
#pragma unroll
for (int q = 0; q < 4; ++q)
w_wgmma_{dtype.value}(acc[i], w_descriptor(a + (u32)((row0 + i * 64) * 128 + q * 32)),
  w_descriptor(w + (u32)(col0 * 128 + q * 32)), add | q);
w_group_commit();
}};"""


def to_shared(wm: int, wn: int, row: int) -> str:
    """The warpgroup's sums into the tile in shared memory, `row` floats from row to row."""
    return (
        f"#pragma unroll\nfor (int i = 0; i < {wm // 64}; ++i)\n"
        f"#pragma unroll\nfor (int j = 0; j < {wn // 8}; ++j) {{\n"
        f"float* const at = sums + (row0 + i * 64 + (warp & 3) * 16 + (lane >> 2)) * {row}"
        " + col0 + j * 8 + (lane & 3) * 2;\n"
        "*(float2*)at = make_float2(acc[i][4 * j], acc[i][4 * j + 1]);\n"
        f"*(float2*)(at + {8 * row}) = make_float2(acc[i][4 * j + 2], acc[i][4 * j + 3]);\n}}"
    )
