"""TF32: f32 in memory, operands rounded to 11 bits on their way to the tensor cores, sums in f32.

The tensor cores ignore the low 13 bits of an operand, so an operand that is not rounded is cut off: twice the error,
and all of it towards zero. Constant weights are rounded when they are repacked, what is loaded by TMA, and fragments
that come through registers there: to nearest, ties away from zero, as the libraries do.
"""

from __future__ import annotations

FUNCTIONS = """#ifndef W_EMULATED
W_FN u32 w_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
W_FN void w_mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
W_FN void w_round_tf32(u32 (&r)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = w_tf32(__uint_as_float(r[i]));
}
"""
"""What kernels of TF32 need besides the prelude; tests bring their own of the first two."""


def rounded(value: str, *, tf32: bool) -> str:
    """C expression of a weight as it is repacked."""
    return f"__uint_as_float(w_tf32({value}))" if tf32 else value
