"""Which shapes of the mma template to measure: `cost` ranks them, and measuring decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.mma.cost import Sizes, sizes_of, tile_cost
from weft.generate.cuda.gemm.mma.kernel import MmaConfig

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@cache
def _blocks(size: int, tensor: bool) -> tuple[MmaConfig, ...]:
    """Tiles, warps and stages that make sense for some product of elements of so many bytes."""
    found = []
    for bm in (16, 32, 64, 128):
        for bn in (16, 32, 64, 128, 256):
            for wm in (16, 32, 64):
                for wn in (16, 32, 64):
                    for wk in (1, 2, 4):
                        if bm % wm or bn % wn:
                            continue
                        warps = bm // wm * (bn // wn) * wk
                        if not 2 <= warps <= 8:
                            continue
                        if not tensor and (wm > 32 or wm * wn > 2048) and (wm, wn, wk) != (64, 64, 1):
                            continue  # more sums than a thread has registers for, or in a shape that reads more
                        if max(wm, wn) > 2 * min(wm, wn) and min(bm, bn) >= 2 * min(wm, wn):
                            continue  # a squarer warp tile reads less
                        if wm * wn > 2048 and warps > 4 and tensor and bm * bn < 128 * 128:
                            continue
                        found += [
                            MmaConfig(bm, bn, bk, wm, wn, wk, stages, 1, False)
                            for bk in (64 // size, 128 // size)
                            for stages in (3, 4, 5)
                            if bk * size // 32 // wk >= 1
                        ]
    return tuple(found)


@cache
def _groups() -> tuple[MmaConfig, ...]:
    """The same for warpgroup products."""
    tiles = [(64, n, 64, n) for n in (16, 32, 64, 96, 128, 192)] + [(64, 256, 64, 128)]
    tiles += [(128, n, 64, n) for n in (16, 32, 64, 96, 128, 192, 256)] + [(128, 256, 128, 128)]
    tiles += [(256, 32, 64, 32), (256, 64, 64, 64), (256, 96, 128, 96), (256, 128, 128, 128), (256, 128, 64, 128)]
    return tuple(MmaConfig(bm, bn, 64, wm, wn, 1, n, 1, False, True) for bm, bn, wm, wn in tiles for n in (4, 5, 6))


def shapes(p: Product, facts: GpuFacts, keep: int = 10) -> list[tuple[float, MmaConfig]]:
    """(modelled cycles, shape), best first (alike shapes later than their number says); one of each kind at least."""
    cluster = epilogue.plan(p).width % 4 == 0 and facts.capability >= 90
    return list(_ranked(sizes_of(p), cluster, facts, keep))


def every(p: Product, facts: GpuFacts) -> list[tuple[float, MmaConfig]]:
    """(modelled cycles, shape) of everything that fits, in no order."""
    sizes = sizes_of(p)
    cluster = epilogue.plan(p).width % 4 == 0 and facts.capability >= 90
    return _modelled(sizes, cluster, facts)


def _modelled(p: Sizes, cluster: bool, facts: GpuFacts) -> list[tuple[float, MmaConfig]]:
    found: list[tuple[float, MmaConfig]] = []
    for base in _fitting(p, facts):
        model = tile_cost(p, base, facts)
        if model.ctas_per_sm:
            found += [(model.cycles(s.split, s.cluster), s) for s in _split(p, base, cluster)]
    return found


@lru_cache(maxsize=1024)
def _ranked(p: Sizes, cluster: bool, facts: GpuFacts, keep: int) -> tuple[tuple[float, MmaConfig], ...]:
    """`shapes` of all products of these sizes: a network has the same one before many epilogues."""
    ranked = _modelled(p, cluster, facts)
    ranked.sort(key=lambda x: (x[0], -x[1].stages, x[1].threads))
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for modelled, s in ranked[:400]:
        tile = (s.bm, s.bn, s.split, int(s.group))
        alike = seen.get(tile, 0)
        seen[tile] = alike + 1
        keyed.append((modelled * (1 + 0.15 * alike), modelled, s))
    keyed.sort(key=lambda x: x[0])
    kept = [(modelled, s) for _, modelled, s in keyed[:keep]]
    for group in (True, False):  # one of each kind at least: they are what the model knows least about each other
        if all(s.group != group for _, s in kept):
            kept += [x for x in ranked if x[1].group == group][:1]
    return tuple(kept)


def _fitting(p: Sizes, facts: GpuFacts) -> Iterable[MmaConfig]:
    """Blocks whose tile is not mostly outside the product."""
    group = facts.capability == 90 and p.dtype.itemsize == 2 and p.a_load != "columns" and p.w_load != "kn"
    for s in (*_blocks(p.dtype.itemsize, p.tensor), *(_groups() if group else ())):
        if (s.bm > (64 if s.group else 16) and s.bm >= 2 * p.m) or (s.bn > 16 and s.bn >= 2 * p.n):
            continue
        if s.bk >= 2 * p.k and s.bk > 64 // p.dtype.itemsize and not s.group:
            continue
        if p.a_load == "columns" and s.bm < 16:
            continue
        if not p.tensor and s.wm * s.wn > 2048 and p.a_load not in ("rows", "columns"):
            continue  # addresses want registers too
        yield s


def _split(p: Sizes, s: MmaConfig, cluster: bool) -> Iterable[MmaConfig]:
    kt = -(-p.k // s.bk)
    blocks = -(-p.m // s.bm) * -(-p.n // s.bn) * p.z
    for alone, together in _variants(s):
        if alone.split > 1 and (kt < 2 * alone.split or blocks * alone.split > 600):
            break
        yield alone
        if together is not None and cluster:
            yield together


@cache
def _variants(s: MmaConfig) -> tuple[tuple[MmaConfig, MmaConfig | None], ...]:
    """A shape with each split, and that as a cluster."""
    return tuple((replace(s, split=n), replace(s, split=n, cluster=True) if n in (2, 4, 8) else None) for n in _SPLITS)
