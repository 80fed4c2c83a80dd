"""Repacking of constant weights, once at link time: tiles in the order in which a kernel copies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.generate.cuda.templates import epilogue
from weft.generate.cuda.templates.prelude import storage
from weft.generate.cuda.templates.product import Product
from weft.kernels.source import Launch, Pointer


def swizzle(row: str, chunk: str, chunks: int) -> str:
    """Place of a 16-byte chunk within a row of `chunks` of them, such that eight rows hit different banks.

    Source: note on matrix products, section 5 (128-, 64- and 32-byte rows).
    """
    shift, mask = {8: (0, 7), 4: (1, 3), 2: (2, 1)}.get(chunks, (0, 7))
    moved = f"(({row}) & {mask})" if shift == 0 else f"((({row}) >> {shift}) & {mask})"
    return f"(({chunk}) ^ {moved})"


def packed_elements(p: Product, bn: int, bk: int) -> int:
    """Elements of the repacked weights: tiles are whole, the rest is zeros."""
    return p.c.groups * -(-p.n // bn) * bn * -(-p.k // bk) * bk


def pack_kernel(p: Product, entry: str, weight: str, parameter: str, bn: int, bk: int) -> str:
    """A kernel that fills [group][column tile][k tile][column][swizzled k]; one thread per element."""
    c, kind = p.c, storage(p.dtype)
    total = packed_elements(p, bn, bk)
    chunks = bk // p.chunk
    taps = c.kernel[1]
    w = c.w_walk
    return f"""
extern "C" __global__ void {entry}({parameter}{", " if parameter else ""}void* __restrict__ pk) {{
  const u32 i = blockIdx.x * 256u + threadIdx.x;
  if (i >= {total}u) return;
  const int e = i % {p.chunk}, place = i / {p.chunk} % {chunks}, row = i / {bk} % {bn};
  const int tile = i / {bk * bn}, kt = tile % {-(-p.k // bk)}, nt = tile / {-(-p.k // bk)} % {-(-p.n // bn)};
  const int g = tile / {-(-p.k // bk) * -(-p.n // bn)};
  const int k = kt * {bk} + {swizzle("row", "place", chunks)} * {p.chunk} + e, n = nt * {bn} + row;
  const int c = k % {c.ic}, tap = k / {c.ic}, kh = tap / {taps}, kw = tap % {taps};
  {kind} v = 0;
  if (k < {p.k} && n < {p.n})
    v = ((const {kind}*){weight})[{w.offset} + g * {w.group} + n * {w.channel} + kh * {c.w_kernel[0]}
                                  + kw * {c.w_kernel[1]} + c * {c.w_k}];
  (({kind}*)pk)[i] = v;
}}
"""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a source says about its repacked weights, and the text that repacks them."""

    text: str
    launches: tuple[Launch, ...]
    bytes: tuple[int, ...]
    replaces: tuple[int, ...]


def pack_launch(p: Product, entry: str, bn: int, bk: int) -> Packing:
    """Repacking into tiles of bn columns by bk of the sum."""
    return _packing(p, packed_elements(p, bn, bk), entry, lambda w, x: pack_kernel(p, entry, w, x, bn, bk))


def pack_vectors(p: Product, entry: str, width: int) -> Packing:
    """Repacking of a depthwise convolution's weights into [channels / width][tap][width]."""
    c, kind = p.c, storage(p.dtype)
    taps = c.kernel[0] * c.kernel[1]

    def kernel(weight: str, parameter: str) -> str:
        return f"""
extern "C" __global__ void {entry}({parameter}{", " if parameter else ""}void* __restrict__ pk) {{
  const u32 i = blockIdx.x * 256u + threadIdx.x;
  if (i >= {p.n * taps}u) return;
  const int tap = i / {width} % {taps}, n = i / {width * taps} * {width} + i % {width};
  (({kind}*)pk)[i] = ((const {kind}*){weight})[{c.w_walk.offset} + n * {c.w_walk.channel}
      + tap / {c.kernel[1]} * {c.w_kernel[0]} + tap % {c.kernel[1]} * {c.w_kernel[1]}];
}}
"""

    return _packing(p, p.n * taps, entry, kernel)


def _packing(p: Product, total: int, entry: str, kernel: Callable[[str, str], str]) -> Packing:
    source = p.c.w
    if source.kind == "input":
        text = kernel("w", "const void* __restrict__ w")
        pointers: tuple[Pointer, ...] = (Pointer("in", source.index), Pointer("packed", 0))
    else:
        text = epilogue.constant_array(p.c, source.index, "kw") + kernel(f"kw{source.index}", "")
        pointers = (Pointer("packed", 0),)
    read = {step.source for _, step in epilogue.leaves(p.c)} | {p.c.a}
    replaces = (source.index,) if source.kind == "input" and source not in read else ()
    launch = Launch(entry, (-(-total // 256), 1, 1), (256, 1, 1), pointers, dependent=False)
    return Packing(text, (launch,), (total * p.dtype.itemsize,), replaces)
