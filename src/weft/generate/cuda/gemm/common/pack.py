"""Repacking of constant weights, once at link time: tiles in the order in which a kernel copies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.generate.cuda.gemm.common import epilogue, tf32
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.integer import Int, integer, summed
from weft.kernels.source import Pointer


def swizzle(row: Int | str, chunk: Int | str, chunks: int) -> str:
    """Place of a 16-byte chunk within a row of `chunks` of them, such that eight rows hit different banks.

    Source: note on matrix products, section 5 (128-, 64- and 32-byte rows).
    """
    shift, mask = {8: (0, 7), 4: (1, 3), 2: (2, 1)}.get(chunks, (0, 7))
    of = integer(row).tight
    moved = f"({of} & {mask})" if shift == 0 else f"({of} >> {shift} & {mask})"
    return f"({integer(chunk).tight} ^ {moved})"


def chunk_at(row: Int | str, chunk: Int | str, chunks: int) -> str:
    """Bytes from the first row of a swizzled tile to a chunk, where rows have `chunks` of them."""
    return f"({integer(row) * chunks + swizzle(row, chunk, chunks)}) * 16"


def packed_elements(p: Product, bn: int, bk: int) -> int:
    """Elements of the repacked weights: tiles are whole, the rest is zeros."""
    return p.c.groups * -(-p.n // bn) * bn * -(-p.k // bk) * bk


def pack_body(p: Product, weight: str, bn: int, bk: int) -> str:
    """Statements that fill [group][column tile][k tile][column][swizzled k]; one thread per element."""
    c, kind = p.c, storage(p.dtype)
    total = packed_elements(p, bn, bk)
    chunks = bk // p.per_load
    taps = c.kernel[1]
    w = c.w_layout
    kts, nts = -(-p.k // bk), -(-p.n // bn)
    i, tile, tap = Int("i"), Int("tile"), Int("tap")
    at: list[Int | int] = [w.offset, Int("g") * w.group, Int("n") * w.channel]
    at += [Int("kh") * c.w_kernel[0], Int("kw") * c.w_kernel[1], Int("c") * c.w_k]
    return f"""  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= {total}u) return;
  // which element of which swizzled tile this thread fills
  const int e = i % {p.per_load}, place = {i / p.per_load % chunks}, row = {i / bk % bn};
  const int tile = i / {bk * bn}, kt = {tile % kts}, nt = {tile / kts % nts};
  const int g = {tile / (kts * nts)};
  const int k = kt * {bk} + {swizzle("row", "place", chunks)} * {p.per_load} + e, n = {Int("nt") * bn + "row"};
  const int c = {Int("k") % c.ic}, tap = {Int("k") / c.ic}, kh = {tap / taps}, kw = {tap % taps};
  {kind} v = 0;
  if (k < {p.k} && n < {p.n})
    v = ((const {kind}*){weight})[{summed(*at)}];
  (({kind}*)pk)[i] = {tf32.rounded("v", tf32=p.tf32)};"""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a source says about its repacked weights, and the role that repacks them."""

    role: DeviceRole
    bytes: tuple[int, ...]
    replaces: tuple[int, ...]


def pack_tiles(p: Product, bn: int, bk: int) -> Packing:
    """Repacking into tiles of bn columns by bk of the sum."""
    return packing(p, packed_elements(p, bn, bk), lambda weight: pack_body(p, weight, bn, bk))


def pack_vectors(p: Product, width: int, name: str = "pack") -> Packing:
    """Repacking of a depthwise convolution's weights into [channels / width][tap][width]."""
    c, kind = p.c, storage(p.dtype)
    taps = c.kernel[0] * c.kernel[1]

    i, tap = Int("i"), Int("tap")
    at: list[Int | int] = [c.w_layout.offset, Int("n") * c.w_layout.channel]
    at += [tap / c.kernel[1] * c.w_kernel[0], tap % c.kernel[1] * c.w_kernel[1]]

    def body(weight: str) -> str:
        return f"""  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= {p.n * taps}u) return;
  const int tap = {i / width % taps}, n = {i / (width * taps) * width + i % width};
  (({kind}*)pk)[i] = ((const {kind}*){weight})[{summed(*at)}];"""

    return packing(p, p.n * taps, body, name)


@dataclass(frozen=True, slots=True)
class FragmentOrder:
    """The order of a convolution's K: blocks of `bc` channels, in each a number of steps of 16."""

    columns: int
    bn: int
    bc: int
    """In halves. 4: a step is four taps of up to four channels; else a step is 16 halves of a tap."""
    blocks: int
    taps: int
    steps: int
    wide: bool
    """Columns are (kx, output channel), taps are rows of the kernel."""


def pack_fragments(p: Product, order: FragmentOrder, name: str = "pack") -> Packing:
    """Repacking into [group][column tile][channel block][step][16 columns][lane][16 bytes].

    Those are fragments of m16n8k16, or m16n8k8 of TF32, as lanes hold them, two neighbouring tiles of 8 columns side by
    side. In TF32 four taps of four channels take two steps.
    """
    c, kind, o = p.c, storage(p.dtype), order
    tiles, v = -(-o.columns // o.bn), p.per_load
    row = 2 * v * o.bn
    total = c.groups * tiles * o.blocks * o.steps * row
    per = o.bc // 16
    step, cb = Int("step"), Int("cb")
    if p.tf32 and o.bc == 4:
        place = "tap = step / 2 * 4 + q, ch = step % 2 * 2 + high"
    elif p.tf32:
        place = f"tap = {step / per}, ch = {cb * (o.bc // 2) + step % per * 8} + high * 4 + q"
    elif o.bc == 4:
        place = "tap = step * 4 + q, ch = high * 2 + (e & 1)"
    else:
        place = f"tap = {step / per}, ch = {cb * o.bc + step % per * 16} + high * 8 + 2 * q + (e & 1)"
    if o.wide:
        split = f"o = {Int('n') % c.oc}, ky = tap, kx = {Int('n') / c.oc}"
    else:
        split = f"o = n, ky = {Int('tap') / c.kernel[1]}, kx = {Int('tap') % c.kernel[1]}"
    w = c.w_layout
    at: list[Int | int] = [w.offset, Int("g") * w.group, Int("o") * w.channel]
    at += [Int("ky") * c.w_kernel[0], Int("kx") * c.w_kernel[1], Int("ch") * c.w_k]
    i, rest = Int("i"), Int("rest")

    def body(weight: str) -> str:
        return f"""  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= {total}u) return;
  // lane and element of a fragment, as mma.sync holds them
  const int e = i % {v}, lane = i / {v} % 32, pair = {i / (32 * v) % (o.bn // 16)}, step = {i / row % o.steps};
  const int rest = {i / (row * o.steps)}, cb = {rest % o.blocks}, nt = {rest / o.blocks % tiles};
  const int g = {rest / (o.blocks * tiles)}, q = lane & 3, high = {"e & 1" if p.tf32 else "e >> 1 & 1"};
  const int n = nt * {o.bn} + pair * 16 + (e >> {1 if p.tf32 else 2}) * 8 + (lane >> 2);
  const int {place};
  const int {split};
  {kind} v = 0;
  if (n < {o.columns} && tap < {o.taps} && ch < {c.ic})
    v = ((const {kind}*){weight})[{summed(*at)}];
  (({kind}*)pk)[i] = {tf32.rounded("v", tf32=p.tf32)};"""

    return packing(p, total, body, name)


def packing(p: Product, total: int, body: Callable[[str], str], name: str = "pack") -> Packing:
    """What repacks a weight into `total` elements by the statements `body` makes of the weight's name."""
    source = p.c.w
    given = source.kind == "input"
    parameters = (Parameter("w", Pointer("in", source.index)),) if given else ()
    role = DeviceRole(
        threads=256,
        body=body("w" if given else f"kw{source.index}"),
        parameters=(*parameters, Parameter("pk", Pointer("packed", 0), WRITTEN)),
        grid=(-(-total // 256), 1, 1),
        globals="" if given else epilogue.constant_array(p.c, source.index, "kw"),
        name=name,
        bounded=False,
        pdl=False,
    )
    read = {step.source for _, step in epilogue.leaves(p.c)} | {p.c.a}
    replaces = (source.index,) if given and source not in read else ()
    return Packing(role, (total * p.dtype.itemsize,), replaces)


def packed_by(source: RoleSource, packings: Sequence[Packing]) -> RoleSource:
    """The source with weights that are repacked, each by its packing into the buffer of its number."""
    return replace(
        source,
        pack=tuple(x.role for x in packings),
        packed_bytes=tuple(n for x in packings for n in x.bytes),
        replaces_weights=tuple(n for x in packings for n in x.replaces),
    )
