"""Constant weights in the order in which the tma template's copies take them: one contiguous piece per stage."""

from __future__ import annotations

from weft.generate.cuda.gemm.common import tf32
from weft.generate.cuda.gemm.common.pack import Packing, packing, swizzle
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.tma.operands import STEP, blocks_of_channels, stages_of_sum
from weft.generate.cuda.intrinsics.prelude import storage
from weft.generate.expr.integer import Int, integer, summed


def packed_columns(p: Product, bn: int) -> int:
    """Columns of a group, whole tiles."""
    return -(-p.n // bn) * bn


def pack_panels(p: Product, bn: int, panel: int, *, halo: bool = False) -> Packing:
    """[group][column tile][stage][panel][column][swizzled k]; every tap begins a panel, what does not exist is zero.

    Panels run over blocks of channels within taps, or with `halo` over taps within blocks of channels.

    Columns of a group of 32 are permuted so that a thread of the product finds 8 neighbours in its registers: register
    pair c of lane q is column 8 c + 2 q of the instruction and holds column 8 q + 2 c of the tensor. By fours it finds
    twice 4, 16 apart: 16 (c / 2) + 4 q + 2 (c % 2).
    """
    c, kind = p.c, storage(p.dtype)
    chunks, per, row = panel // 8, STEP // panel, p.in_elements(panel)
    blocks, stages, tiles = blocks_of_channels(p, panel), stages_of_sum(p, panel), packed_columns(p, bn) // bn
    total = c.groups * tiles * bn * stages * p.in_elements(STEP)
    taps = c.kernel[0] * c.kernel[1]
    w = c.w_layout
    i, q, tile, tap = Int("i"), Int("q"), Int("tile"), Int("tap")
    block, tap_of = (q / taps, q % taps) if halo else (q % blocks, q / blocks)
    at: list[Int | int] = [w.offset, Int("g") * w.group, Int("n") * w.channel]
    at += [tap / c.kernel[1] * c.w_kernel[0], tap % c.kernel[1] * c.w_kernel[1], Int("c") * c.w_k]
    wide = "row % 8 / 2 * 8 + row / 8 % 4 * 2"
    column = wide if not p.by_fours else "row / 16 % 2 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2"
    real = f"q < {taps * blocks}"

    def body(weight: str) -> str:
        return f"""  const u32 i = role.block_x() * 256u + role.thread();
  if (i >= {total}u) return;
  // rows are columns of the weights: permuted so that a thread's fragments are neighbours, swizzled as TMA would
  const int e = i % {p.per_load}, place = {i / p.per_load % chunks}, row = {i / row % bn};
  const int q = {i / (row * bn) % (stages * per)}, tile = {i / (row * bn * stages * per)};
  const int nt = {tile % tiles}, g = {tile / tiles};
  const int c = {block * row + integer(swizzle("row", "place", chunks)) * p.per_load + "e"}, tap = {tap_of};
  const int n = nt * {bn} + row / 32 * 32 + {column} + row % 2;
  {kind} v = 0;
  if ({real} && c < {c.ic} && n < {p.n})
    v = ((const {kind}*){weight})[{summed(*at)}];
  (({kind}*)pk)[i] = {tf32.rounded("v", tf32=p.tf32)};"""

    return packing(p, total, body)
