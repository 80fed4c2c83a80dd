"""Products of 8-bit floats on tensor cores: operands of e4m3 or e5m2 in memory, sums in f32.

Hopper's warpgroup products take the bytes themselves and keep some 14 bits while they add up. `mma.sync` gets halves,
in which every 8-bit float is exact: any GPU of compute capability 8.0 has them.
Source: note on matrix products, sections 2.4 and 7; PTX ISA, fragments of mma.m16n8k16 and m16n8k32.
"""

from __future__ import annotations

from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.intrinsics.prelude import float8
from weft.ir.graph import Graph
from weft.ir.types import DType

SHORT = {DType.F8E4M3: "e4m3", DType.F8E5M2: "e5m2"}
"""Names of the instructions for them."""


def has_float8(graph: Graph) -> bool:
    """Whether a graph holds a value of 8-bit floats."""
    return any(n.type.dtype.is_float8 for n in graph.nodes)


def functions(p: Product) -> str:
    """What a kernel needs besides the prelude, if any of its values are floats of 8 bits."""
    if p.float8:
        return float8()
    held = (*(step.dtype for step in p.c.body), p.dtype)
    return float8() if any(dtype.is_float8 for dtype in held) else ""


def mma(kind: str) -> str:
    """The function that adds a product of fragments of 32 elements of the sum.

    A word of a fragment of bytes holds four neighbours, one of halves two: two of m16n8k16 that agree on which element
    stands where. `kind`: `e4m3` or `e5m2` for the left operand, then for the right one.
    """
    left, right = (f"w_halves_f8{kind[i : i + 4]}" for i in (0, 4))
    return f"""W_FN void w_mma_{kind}(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {{
  const u32 lo[4] = {{{left}(a[0]), {left}(a[1]), {left}(a[0] >> 16), {left}(a[1] >> 16)}};
  const u32 hi[4] = {{{left}(a[2]), {left}(a[3]), {left}(a[2] >> 16), {left}(a[3] >> 16)}};
  w_mma_f16(d, lo, {right}(b0), {right}(b0 >> 16));
  w_mma_f16(d, hi, {right}(b1), {right}(b1 >> 16));
}}
"""


def dot(kind: str) -> str:
    """The function that adds the product of 16 bytes of each operand."""
    left, right = (f"w_halves_f8{kind[i : i + 4]}" for i in (0, 4))
    words = "\n".join(f"  c = w_dot_word_{kind}(a.{f}, b.{f}, c);" for f in "xyzw")
    return f"""W_FN float w_dot_word_{kind}(u32 a, u32 b, float c) {{
#pragma unroll
  for (int i = 0; i < 32; i += 16) {{
    const float2 x = w_unpack_f16({left}(a >> i)), y = w_unpack_f16({right}(b >> i));
    c = fmaf(x.y, y.y, fmaf(x.x, y.x, c));
  }}
  return c;
}}
W_FN float w_dot_{kind}(uint4 a, uint4 b, float c) {{
{words}
  return c;
}}
"""
