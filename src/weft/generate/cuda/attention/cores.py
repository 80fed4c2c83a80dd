"""The two products of attention in f32 on CUDA cores, with the scores where tensor cores would leave them.

A thread has rows g and g + 8 of sixteen and columns 2q and 2q + 1 of every eight scores (g = lane / 4, q = lane % 4):
softmax is the same text for both. Weights go through shared memory, a warp's own; of the result a thread has columns 4q
to 4q + 3 of every sixteen.
"""

from __future__ import annotations

from weft.generate.cuda.attention.load import Operand, each
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.shapes import WEIGHTS_PAD, AttentionConfig, padded
from weft.generate.expr.integer import Int


def products(p: Attention, s: AttentionConfig, q: Operand, k: Operand) -> list[str]:
    """s = q kᵀ of this warp's rows and keys."""
    dots = " ".join(f"s[a][j][2 * h + e] = fmaf(x[a][h].{f}, y[e].{f}, s[a][j][2 * h + e]);" for f in "xyzw")
    row = "row0 + a * 16 + (lane >> 2) + h * 8"
    key = "key0 + j * 8 + (lane & 3) * 2 + e"
    return [
        f"{each('a', s.mi)}\n{each('j', s.nb // 8)}\n{each('e', 4)} s[a][j][e] = 0.0f;",
        f"#pragma unroll 2\nfor (int kk = 0; kk < {padded(p.qk) // 4}; ++kk) {{ float4 x[{s.mi}][2];",
        f"{each('a', s.mi)}\n{each('h', 2)} x[a][h] = *(const float4*)(sm + ({row}) * {q.pitch} + kk * 16);",
        f"{each('j', s.nb // 8)} {{ float4 y[2];",
        f"{each('e', 2)} y[e] = *(const float4*)(sm + (here - sb) + ({key}) * {k.pitch} + kk * 16);",
        f"{each('a', s.mi)}\n{each('h', 2)}\n{each('e', 2)} {{ {dots} }}",
        "}\n}",
    ]


def weighted(p: Attention, s: AttentionConfig, at: int, k: Operand, v: Operand) -> list[str]:
    """o += exponentials times v."""
    pitch = s.nb + WEIGHTS_PAD
    rows = "(a * 16 + (lane >> 2) + h * 8)"
    add = " ".join(
        f"{to} = fmaf(w, y.{f}, {to});"
        for to, f in ((f"o[a][{2 * Int('j') + i // 2}][{2 * Int('h') + i % 2}]", f) for i, f in enumerate("xyzw"))
    )
    field = "n == 0 ? x[a][h].x : n == 1 ? x[a][h].y : n == 2 ? x[a][h].z : x[a][h].w"
    return [
        f"float* const mine = (float*)(sm + {at}) + warp * {16 * s.mi * pitch};",
        f"{each('a', s.mi)}\n{each('h', 2)}\n{each('j', s.nb // 8)}",
        f"*(float2*)(mine + {rows} * {pitch} + j * 8 + (lane & 3) * 2) =",
        "make_float2(s[a][j][2 * h], s[a][j][2 * h + 1]);",
        "__syncwarp();",
        f"#pragma unroll 1\nfor (int q = 0; q < {s.nb // 4}; ++q) {{ float4 x[{s.mi}][2];",
        f"{each('a', s.mi)}\n{each('h', 2)} x[a][h] = *(const float4*)(mine + {rows} * {pitch} + q * 4);",
        f"{each('n', 4)}\n{each('j', padded(p.head) // 16)} {{",
        f"const unsigned char* const from = sm + (here - sb) + {k.bytes} + (key0 + q * 4 + n) * {v.pitch};",
        "const float4 y = *(const float4*)(from + j * 64 + (lane & 3) * 16);",
        f"{each('a', s.mi)}\n{each('h', 2)} {{ const float w = {field}; {add} }}",
        "}\n}",
        "__syncwarp();",
    ]
