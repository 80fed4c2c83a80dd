"""The cost model of `weft.costmodel.tiles` for shapes of the product templates; it ranks, and measuring decides."""

from __future__ import annotations

from weft.costmodel.tiles import Sizes, TileCost
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma.kernel import MmaConfig, shared_of, table_bytes
from weft.ir.prims import CATEGORY, Category
from weft.ir.work import TRANSCENDENTAL

__all__ = ["Sizes", "ctas_per_sm", "cycles", "registers", "sizes_of", "tile_cost"]


def sizes_of(p: Product) -> Sizes:
    """What the model knows of a product with its epilogue."""
    body = p.c.body
    prims = [s.prim for s in body]
    stored = sum((p.sum_dtype if slot < 0 else body[slot].dtype).itemsize for slot, _ in p.c.outputs)
    return Sizes(
        p.dtype,
        p.m,
        p.n,
        p.k,
        p.z,
        "columns" if p.a_lines else p.a_load,
        "kn" if p.w_lines else p.w_load,
        table_bytes(p),
        epilogue.plan(p).width,
        len(epilogue.leaves(p.c)),
        sum(CATEGORY[x] is Category.ELEMENTWISE for x in prims),
        sum(x in TRANSCENDENTAL for x in prims),
        stored,
        p.tf32,
    )


def registers(s: MmaConfig, *, tensor: bool = True) -> int:
    """Rough number of registers per thread: its sums, its part of a step of both operands, and others."""
    if s.group:
        return s.wm * s.wn // 128 + 56
    if not tensor:
        return s.wm * s.wn // 32 + (s.wm // 4 + s.wn // 8) * 4 + 32
    return s.wm * s.wn // 32 + (s.wm + s.wn) // 16 * 4 + 44


def ctas_per_sm(p: Sizes, s: MmaConfig, facts: GpuFacts) -> int:
    """CTAs that fit on one multiprocessor."""
    shared = shared_of(s, p.dtype.itemsize, p.tables) + 1024
    if shared > facts.shared_per_block:
        return 0
    by_registers = facts.registers_per_sm // (min(255, -(-registers(s, tensor=p.tensor) // 8) * 8) * s.threads)
    return min(facts.shared_per_sm // shared, by_registers, facts.threads_per_sm // s.threads, facts.blocks_per_sm)


def tile_cost(p: Sizes, s: MmaConfig, facts: GpuFacts) -> TileCost:
    """The model of a tile configuration, whatever its split-K."""
    return TileCost(p, s, facts, ctas_per_sm(p, s, facts))


def cycles(p: Sizes, s: MmaConfig, facts: GpuFacts) -> float:
    """Modelled cycles of the whole kernel in a chain of kernels; infinite where it does not fit."""
    return tile_cost(p, s, facts).cycles(s.split, s.cluster)
