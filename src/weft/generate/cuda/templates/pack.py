"""Repacking of constant weights, once at link time: tiles in the order in which a kernel copies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.generate.cuda.templates import epilogue, tf32
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
  (({kind}*)pk)[i] = {tf32.rounded("v", tf32=p.tf32)};
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
    return packing(p, packed_elements(p, bn, bk), entry, lambda w, x: pack_kernel(p, entry, w, x, bn, bk))


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

    return packing(p, p.n * taps, entry, kernel)


@dataclass(frozen=True, slots=True)
class FragmentOrder:
    """How a convolution's sum is walked: blocks of `bc` channels, in each a number of steps of 16."""

    columns: int
    bn: int
    bc: int
    """In words of 16 bits. 4: a step is four taps of up to four channels; else a step is 16 words of a tap."""
    blocks: int
    taps: int
    steps: int
    wide: bool
    """Columns are (kx, output channel), taps are rows of the kernel."""


def pack_fragments(p: Product, entry: str, order: FragmentOrder) -> Packing:
    """Repacking into [group][column tile][channel block][step][16 columns][lane][16 bytes].

    Those are fragments of m16n8k16, or m16n8k8 of TF32, as lanes hold them, two neighbouring tiles of 8 columns side by
    side. In TF32 four taps of four channels take two steps.
    """
    c, kind, o = p.c, storage(p.dtype), order
    tiles, v = -(-o.columns // o.bn), p.chunk
    row = 2 * v * o.bn
    total = c.groups * tiles * o.blocks * o.steps * row
    per = o.bc // 16
    if p.tf32 and o.bc == 4:
        place = "tap = step / 2 * 4 + q, ch = step % 2 * 2 + high"
    elif p.tf32:
        place = f"tap = step / {per}, ch = cb * {o.bc // 2} + step % {per} * 8 + high * 4 + q"
    elif o.bc == 4:
        place = "tap = step * 4 + q, ch = high * 2 + (e & 1)"
    else:
        place = f"tap = step / {per}, ch = cb * {o.bc} + step % {per} * 16 + high * 8 + 2 * q + (e & 1)"
    if o.wide:
        split = f"o = n % {c.oc}, ky = tap, kx = n / {c.oc}"
    else:
        split = f"o = n, ky = tap / {c.kernel[1]}, kx = tap % {c.kernel[1]}"
    w = c.w_walk

    def kernel(weight: str, parameter: str) -> str:
        return f"""
extern "C" __global__ void {entry}({parameter}{", " if parameter else ""}void* __restrict__ pk) {{
  const u32 i = blockIdx.x * 256u + threadIdx.x;
  if (i >= {total}u) return;
  const int e = i % {v}, lane = i / {v} % 32, pair = i / {32 * v} % {o.bn // 16}, step = i / {row} % {o.steps};
  const int rest = i / {row * o.steps}, cb = rest % {o.blocks}, nt = rest / {o.blocks} % {tiles};
  const int g = rest / {o.blocks * tiles}, q = lane & 3, high = {"e & 1" if p.tf32 else "e >> 1 & 1"};
  const int n = nt * {o.bn} + pair * 16 + (e >> {1 if p.tf32 else 2}) * 8 + (lane >> 2);
  const int {place};
  const int {split};
  {kind} v = 0;
  if (n < {o.columns} && tap < {o.taps} && ch < {c.ic})
    v = ((const {kind}*){weight})[{w.offset} + g * {w.group} + o * {w.channel} + ky * {c.w_kernel[0]}
                                  + kx * {c.w_kernel[1]} + ch * {c.w_k}];
  (({kind}*)pk)[i] = {tf32.rounded("v", tf32=p.tf32)};
}}
"""

    return packing(p, total, entry, kernel)


def packing(p: Product, total: int, entry: str, kernel: Callable[[str, str], str]) -> Packing:
    """What repacks a weight by `kernel` (the text, from the weight's name and parameter) into `total` elements."""
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
