"""Products of different sizes in one launch: a flat grid over the tiles of all members, one member to a block.

A block runs the role of `gemm.mma` for the product whose tile it has, with its sizes, operands and end as they are:
members share the shape of their blocks and nothing else. Each may have its sums divided among a number of blocks of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.costmodel.tiles import grouped_cycles
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common import epilogue
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.grouped.match import Member, members
from weft.generate.cuda.gemm.mma import choose, cost
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.role import beside
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

TEMPLATES = ("grouped", "grouped_simt")
"""On tensor cores, and on CUDA cores."""
KEPT = 6
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_CLUSTERS = (2, 4, 8)
_STEPS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 1 << 20)
"""Steps of the sum that one block takes at most."""
_USUAL = ((32, 32, 16, 32), (32, 64, 32, 32), (64, 32, 32, 32), (64, 64, 32, 32), (128, 64, 64, 32), (128, 128, 64, 32))
"""Tiles, and those of their warps, that are tried beside what is best for a member alone."""


@dataclass(frozen=True, slots=True)
class GroupedConfig(Parameters):
    """Parameters of the template; as those of `mma.MmaConfig`, with a split for each member."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    wk: int
    stages: int
    splits: tuple[int, ...]
    """Per member, in the order of `match.members`."""
    cluster: int = 1
    """Blocks of a cluster, which is what shares a sum then: splits are 1 or this. 1: sums meet in the workspace."""
    group: bool = False

    def schedule(self, *, tensor: bool = True) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template=TEMPLATES[0 if tensor else 1])

    def of_member(self, number: int) -> mma.MmaConfig:
        """The shape of one member's blocks."""
        split = self.splits[number]
        shared = self.cluster > 1 and split > 1
        return mma.MmaConfig(
            self.bm, self.bn, self.bk, self.wm, self.wn, self.wk, self.stages, split, shared, self.group
        )


@lru_cache(maxsize=8)
def matched(problem: Problem, *, tf32: bool) -> tuple[Member, ...] | Declined:
    """`members`, asked once for several schedules."""
    return members(problem, tf32=tf32)


# ---- which shapes


def shapes(found: Sequence[Member], facts: GpuFacts) -> list[tuple[float, GroupedConfig]]:
    """(modelled cycles, shape), best first."""
    sizes = [cost.sizes_of(m.product) for m in found]
    clusters = [1]
    if facts.capability >= 90 and all(epilogue.plan(m.product).width % 4 == 0 for m in found):
        clusters += _CLUSTERS
    ranked: list[tuple[float, GroupedConfig]] = []
    for base in _bases(found, facts):
        costs = [cost.tile_cost(p, base, facts) for p in sizes]
        if not all(x.ctas_per_sm for x in costs):
            continue
        tried: set[tuple[int, tuple[int, ...]]] = set()
        for cluster, most in ((c, m) for c in clusters for m in _STEPS):
            splits = tuple([_split(x.k_tiles, most, cluster) for x in costs])
            own = cluster if max(splits) > 1 else 1
            if (own, splits) in tried:
                continue
            tried.add((own, splits))
            shape = GroupedConfig(
                base.bm, base.bn, base.bk, base.wm, base.wn, base.wk, base.stages, splits, own, base.group
            )
            ranked.append((grouped_cycles(costs, splits, own), shape))
    ranked.sort(key=lambda x: (x[0], x[1].stages))
    return _different(ranked)


def _different(ranked: list[tuple[float, GroupedConfig]]) -> list[tuple[float, GroupedConfig]]:
    """The best of each tile first."""
    seen: dict[tuple[int, ...], int] = {}
    keyed = []
    for cycles, s in ranked[:200]:
        tile = (s.bm, s.bn, int(s.group))
        alike = seen.get(tile, 0)
        seen[tile] = alike + 1
        keyed.append((cycles * (1 + 0.15 * alike), cycles, s))
    keyed.sort(key=lambda x: x[0])
    return [(cycles, s) for _, cycles, s in keyed[:KEPT]]


def _bases(found: Sequence[Member], facts: GpuFacts) -> list[mma.MmaConfig]:
    """Shapes that are good for a member alone, and usual ones; only those that every member takes."""
    every = [m.product for m in found]
    tensor, size = every[0].tensor, every[0].dtype.itemsize
    bases: dict[mma.MmaConfig, None] = {}
    for p in every:
        for _, s in choose.shapes(p, facts):
            bases.setdefault(replace(s, split=1, cluster=False))
    for bm, bn, wm, wn in _USUAL:
        if tensor or wm * wn <= 1024:
            for bk in (64 // size, 128 // size):
                bases.setdefault(mma.MmaConfig(bm, bn, bk, wm, wn, 1, 4, 1, False))
    return [s for s in bases if all(_takes(m, s) is None for m in every)]


def _takes(p: Product, s: mma.MmaConfig) -> Declined | None:
    """Why a product has no kernel of this shape."""
    if s.group and (p.a_load == "columns" or p.w_load == "kn" or p.dtype.itemsize != 2):
        return Declined("wgmma of operands that are not K-major")
    if not p.tensor and s.wm * s.wn > 2048 and p.a_load not in ("rows", "columns"):
        return Declined("accumulators that leave no registers for addresses")
    return None


def _split(steps: int, most: int, cluster: int) -> int:
    """Blocks to a sum, so that each takes at most so many steps, if that is possible; 1 or `cluster` where that is."""
    wanted = -(-steps // most)
    if cluster > 1:
        return cluster if wanted > 1 and steps >= 2 * cluster else 1
    return max((s for s in _SPLITS if s <= wanted and (s == 1 or steps >= 2 * s)), default=1)


def cycles(found: Sequence[Member], s: GroupedConfig, facts: GpuFacts) -> float:
    """Modelled cycles of one shape."""
    every = [cost.sizes_of(m.product) for m in found]
    costs = [cost.tile_cost(p, s.of_member(i), facts) for i, p in enumerate(every)]
    return grouped_cycles(costs, s.splits, s.cluster)


def emit(found: Sequence[Member], schedule: Schedule, entry: str) -> CudaSource | Declined:
    """The kernel `entry` of one schedule made by `GroupedConfig.schedule`."""
    s = GroupedConfig.of(schedule)
    if len(s.splits) != len(found):
        return Declined(f"{len(s.splits)} splits for {len(found)} products")
    if s.cluster > 1 and not {*s.splits} <= {1, s.cluster}:
        return Declined("split-K over other CTAs than those of one cluster")
    placed = []
    for number, member in enumerate(found):
        wrong = _takes(member.product, s.of_member(number))
        made = wrong or mma.roles(member.product, s.of_member(number).schedule("mma"))
        if isinstance(made, Declined):
            return made
        length = -(-member.product.k // s.bk) / s.splits[number]
        placed.append(beside.Member(made, member.inputs, member.outputs, length))
    return beside.side_by_side(schedule, entry, placed, s.cluster)
