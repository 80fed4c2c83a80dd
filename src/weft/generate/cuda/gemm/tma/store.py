"""Results that leave through shared memory: every warp puts boxes of 16 rows there, and TMA stores them.

A warp has two boxes, so that one is filled while the other is read; it goes on to the next tile's products while they
are on their way, and before the end of the kernel it waits until they are in memory. What lies outside of the result is
clipped. Source: note on matrix products, section 2.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.sink import ToShared
from weft.generate.cuda.gemm.tma.operands import Dim, Rows, box_map, joined, outer, rows_of
from weft.generate.cuda.gemm.tma.shape import STORED_ROWS, TmaConfig
from weft.generate.expr.integer import Int
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import Pointer, TensorMap


@dataclass(frozen=True, slots=True)
class Stored:
    """The result's map, and how a box goes there."""

    map: TensorMap
    send: str
    """Statement: the box at the shared address `box`, whose first row and column are `row` and `column`."""


@cache
def header() -> str:
    """The functions that store boxes."""
    return (Path(__file__).parent / "weft_cuda_store.h").read_text(encoding="utf-8")


def stored(p: Product, rows: Rows, s: TmaConfig) -> Stored | Declined:
    """The map of the result; Declined where it is no matrix of halves whose rows are multiples of 16 bytes."""
    if s.store not in (32, 64) or s.bn % s.store or s.split > 1 or p.column_sums or p.partial_stats is not None:
        return Declined("TMA stores are in boxes of 32 or 64 columns, without split-K and stream-K")
    if not rows.linear or len(p.c.outputs) != 1 or p.positions or epilogue.plan(p).width != 8:
        return Declined("TMA stores need a matrix whose rows are whole 16-byte vectors")
    slot, layout = p.c.outputs[0]
    kind = p.sum_dtype if slot < 0 else p.c.body[slot].dtype
    if kind is not p.dtype or kind not in (DType.F16, DType.BF16):
        return Declined("a result of another type than the operands' 16 bits")
    found = joined(layout, p.c.dims, p.rows)
    if len(found) > 1:
        return Declined("TMA stores of rows of several dimensions")
    step = found[0][1] if found else -(-(layout.offset + p.n) // 8) * 8
    if layout.offset + p.n > step:
        return Declined("rows of the result that begin behind each other's ends")
    dims = [
        Dim(layout.offset + p.n, 1, s.store, f"column + {layout.offset}" if layout.offset else "column"),
        Dim(p.m, step, STORED_ROWS, "row"),
        *outer(p, layout, layout.group),
    ]
    map_ = box_map(p, Pointer("out", 0), dims, 2 * s.store)
    if isinstance(map_, Declined):
        return map_
    return Stored(map_, f"w_tma_store(&my, box, {', '.join(d.at for d in dims)});")


def offered(p: Product, ranked: Sequence[tuple[float, TmaConfig]], facts: GpuFacts) -> list[tuple[float, TmaConfig]]:
    """(modelled cycles, shape): the best of some shapes that may gain by boxes, with them; [] where none was seen to.

    These are plain products with short sums and large results, by ping-pong consumers.
    """
    c = costs_of(facts).tma
    if p.c.body or p.in_halves(p.k) > c.stored_words or p.m * p.n * p.z * p.dtype.itemsize < c.stored_bytes:
        return []
    rows = rows_of(p)
    for modelled, plain in ranked:
        if not plain.pingpong or plain.halo_stages or plain.store or isinstance(rows, Declined):
            continue
        s = replace(plain, store=32)
        while s.stages > 2 and s.shared_bytes() > facts.shared_per_block:
            s = replace(s, stages=s.stages - 1)
        if not isinstance(stored(p, rows, s), Declined):
            return [(modelled * c.stored, s)]
    return []


def order(s: TmaConfig) -> str:
    """Declares half, rows and columns of step `o` of the end of a tile, box by box."""
    per, high, o = s.store // 32, s.rows // 64, Int("o")
    if per == 1:
        return f"const int h = o % 2, i = {o / 2 % high}, j = {o / (2 * high)};"
    return f"const int h = o % 2, i = {o / (2 * per) % high}, j = {o / (2 * per * high) * per + o / 2 % per};"


def into_box(s: TmaConfig) -> ToShared:
    """Where 8 neighbours of a thread lie in the box."""
    chunk = "(lane >> 2)" if s.store == 64 else "(lane >> 3)"
    of = f"(o / 2 % {s.store // 32} * 4 + (lane & 3))" if s.store == 64 else "(lane & 3)"
    place = f"h * {16 * s.store} + (lane >> 2) * {2 * s.store} + (({of} ^ {chunk}) << 4)"
    return ToShared(f"sm + staged + {place}")


def fragments(s: TmaConfig) -> str:
    """Statement: the words `x` of four fragments of 8 columns into the box."""
    at = "(lane & 7)" if s.store == 64 else "(lane >> 1 & 3)"
    of = f"(o / 2 % {s.store // 32} * 4 + (lane >> 3))" if s.store == 64 else "(lane >> 3)"
    place = f"h * {16 * s.store} + (lane & 7) * {2 * s.store} + (({of} ^ {at}) << 4)"
    return f"w_matrices_store(sb + staged + {place}, x);"


def boxed(s: TmaConfig, ring: str, to: Stored, step: list[str]) -> list[str]:
    """Steps of the end of a tile between those that begin and end a box. `ring`: C text, where the stages end."""
    per = s.store // 16
    size = STORED_ROWS * s.store * 2
    return [
        f"const u32 staged = {ring} + (warp * 2 + put % 2) * {size};",
        "// through shared memory, swizzled; a warp fills one box while TMA stores the other",
        f"if (o % {per} == 0) {{ if (lane == 0) w_stores_read<1>(); __syncwarp(); }}",
        *step,
        # all lanes' stores are there before TMA reads
        f"if (o % {per} == {per - 1}) {{ w_async_fence(); __syncwarp(); ++put;",
        (
            f"if (lane == 0) {{ const u32 box = sb + staged;"
            f" const int row = i0 + row0 + i * 64 + (warp & 3) * {STORED_ROWS},"
            f" column = n0 + {Int('j') / (s.store // 32) * s.store}; {to.send} w_stores_commit(); }} }}"
        ),
    ]
