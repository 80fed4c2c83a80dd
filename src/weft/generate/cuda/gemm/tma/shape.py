"""Parameters of the tma template and what follows from them by numbers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.tma.operands import STEP, Rows, Share, Three
from weft.generate.expr.integer import Int
from weft.generate.parameters import Parameters
from weft.kernels.source import Schedule

_OFF = ("stream_k", "interleaved", "coop_fixup", "register_split")
_DEFAULTS = (
    ("multicast", 0), ("raster_group", 8), ("overfetch", 0), ("two_level", 0), ("store", 0),
    *((name, False) for name in _OFF),
)  # fmt: skip
_MANY_SUMS = {2: 112, 3: 64}
"""Registers of sums per thread from which on registers are moved to consumers, by their number."""
CLUSTER_SHAPES: Mapping[int, tuple[int, int]] = {
    0: (1, 1), 1: (2, 1), 2: (1, 2), 3: (2, 2), 4: (4, 1), 5: (1, 4), 6: (4, 2), 7: (2, 4), 8: (8, 1),
}  # fmt: skip
"""CTAs of a cluster along M and N that share operands by TMA multicast, by `TmaConfig.multicast`."""


STORED_ROWS = 16
"""Rows of a box of results: a warp's of 64."""
MOST_SHARES = 30
"""CTAs that may share a tile, roughly: each lane of a warp waits for one."""
MOST_TWO_LEVEL = 192
"""Registers of accumulators per thread with two levels of them."""


def two_level_registers(rows: int, columns: int, sets: int) -> int:
    """Registers of a thread for a warpgroup's sums, and so many sets of those of 64 of its rows in one stage."""
    return (rows + 64 * sets) * columns // 128


@dataclass(frozen=True, slots=True)
class TmaConfig(Parameters):
    """Parameters of the template; rows and columns in elements, the sum in words of 16 bits."""

    bm: int
    bn: int
    panel: int
    """Of the sum in a row of shared memory."""
    stages: int
    consumers: int
    """Consumer warpgroups."""
    pingpong: bool
    """Ping-pong consumers: each warpgroup has a tile of its own, and the epilogue of one overlaps the main loop of the
    other; else cooperative ones, which share the rows of a tile."""
    split: int
    """Blocks of a cluster that share the sum of a tile."""
    box: Three
    """Images, rows and columns of pixels of a tile; (1, 1, bm) where rows are one dimension."""
    persistent_ctas: int
    """CTAs of a persistent grid, which go on to further tiles; 0: one CTA per tile."""
    min_ctas: int
    """CTAs per multiprocessor, of the launch bounds."""
    halo_stages: int = 0
    """Stages of halo tiles: all pixels that a tile of a convolution reads, loaded once for all taps, whose products
    begin at different rows of it. 0: every tap is loaded."""
    taps_per_stage: int = 1
    """Taps whose weights are one stage, where there are halo tiles: 1, or a row of the kernel."""
    multicast: int = 0
    """Cluster multicast, a number of `CLUSTER_SHAPES`: each CTA of a cluster loads a slice of the operand that CTAs
    along M (B) or along N (A) share, into all of them. 0: none."""
    raster_group: int = 8
    """Raster order: rows of tiles, or of clusters, of a group whose columns are gone through before the next group, so
    that CTAs that run at a time share operands in the L2 cache."""
    stream_k: bool = False
    """Stream-K: the k-tiles of the tiles that do not fill the grid are divided evenly among all CTAs; of a tile that
    several CTAs share, the last one does the fix-up, with the partial sums that the others leave in the workspace."""
    two_level: int = 0
    """Two-level accumulation of 8-bit floats: 1: the tensor cores' sums, which are short of bits, are promoted to f32
    accumulators after each stage; 2: while the next are made, in other registers. 0: one level."""

    overfetch: int = 0
    """Columns that are loaded beside those of the tile (MN-major operands): panels are loaded whole."""

    interleaved: bool = False
    """Columns of a right operand that is no constant are loaded interleaved, in the order in which a thread's registers
    hold 8 neighbours, as packed ones are; else lanes exchange them in the epilogue."""

    store: int = 0
    """Columns of the boxes, 32 or 64, of TMA stores; 0: threads store results."""

    coop_fixup: bool = False
    """Cooperative fix-up: where the shares of stream-K end with their tiles, each CTA of a tile reduces and finishes a
    part of it; else the last CTA does all of that."""

    register_split: bool = False
    """Registers move from the producer to two or three consumer warpgroups whatever their sums take: beside a
    best-effort role each thread has fewer at launch."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator; the newest parameters are told where they differ from their defaults."""
        named = self.named("cuda", template="tma")
        return Schedule(named.generator, tuple(x for x in named.params if x not in _DEFAULTS))

    @property
    def threads(self) -> int:
        """Threads of a CTA: consumer warpgroups and the producer warp.

        That warp is in a warpgroup of its own where registers move from it to the others.
        """
        return 128 * self.consumers + (128 if self.moves_registers else 32)

    @property
    def moves_registers(self) -> bool:
        """True: the sums of two or three warpgroups are more than the warps of a scheduler have registers for.

        Or it is asked for.
        """
        if self.register_split and self.consumers in _MANY_SUMS:
            return True
        return (self.rows + 64 * self.two_level) * self.bn >= 128 * _MANY_SUMS.get(self.consumers, MOST_TWO_LEVEL + 1)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.multicast_ctas if self.multicast else self.split

    @property
    def cluster_m(self) -> int:
        """CTAs of a cluster along M: they share the right operand (B)."""
        return CLUSTER_SHAPES[self.multicast][0]

    @property
    def cluster_n(self) -> int:
        """CTAs of a cluster along N: they share the left operand (A)."""
        return CLUSTER_SHAPES[self.multicast][1]

    @property
    def multicast_ctas(self) -> int:
        """CTAs of a cluster that share operands by multicast."""
        return self.cluster_m * self.cluster_n

    @property
    def rank_m(self) -> str:
        """C text: the rank of a CTA along M of its cluster."""
        return "rank" if self.cluster_n == 1 else f"(rank / {self.cluster_n})" if self.cluster_m > 1 else "0"

    @property
    def rank_n(self) -> str:
        """C text: the rank of a CTA along N of its cluster."""
        return "rank" if self.cluster_m == 1 else f"(rank % {self.cluster_n})" if self.cluster_n > 1 else "0"

    @property
    def peer(self) -> str:
        """C text: what lane `lane` of a warp adds to its rank, bit by bit, for a CTA that shares an operand."""
        return (
            "lane"
            if self.multicast_ctas == 4
            else f"(lane < {self.cluster_n} ? lane : (lane - {self.cluster_n - 1}) * {self.cluster_n})"
        )

    @property
    def left_share(self) -> Share | None:
        """Multicast of the left operand; None: every CTA loads it for itself."""
        if self.cluster_n == 1:
            return None
        mask = str((1 << self.cluster_n) - 1) + (f" << {self.rank_m} * {self.cluster_n}" if self.cluster_m > 1 else "")
        return Share(self.cluster_n, self.rank_n, mask)

    @property
    def right_share(self) -> Share | None:
        """Multicast of the right operand; None: every CTA loads it for itself."""
        if self.cluster_m == 1:
            return None
        mask = str(sum(1 << i * self.cluster_n for i in range(self.cluster_m)))
        return Share(self.cluster_m, self.rank_m, mask + (f" << {self.rank_n}" if self.cluster_n > 1 else ""))

    @property
    def rows(self) -> int:
        """Rows of a warpgroup's tile."""
        return self.bm if self.pingpong else self.bm // self.consumers

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return ((0 if self.halo_stages else self.bm) + self.bn + self.overfetch) * self.step * 2

    @property
    def step(self) -> int:
        """Of the sum in one stage."""
        return self.panel * self.taps_per_stage if self.halo_stages else STEP

    def shared_bytes(self, halo_tile: int = 0) -> int:
        """Dynamic shared memory: halo tiles of so many bytes, stages and barriers."""
        return self.halo_stages * (halo_tile + 16) + self.stages * (self.stage_bytes + 16) + 16 + self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        """Shared memory of results on their way: two boxes of 16 rows for each warp."""
        return 4 * self.consumers * 2 * STORED_ROWS * self.store * 2


def tiles_of(p: Product, rows: Rows, s: TmaConfig) -> tuple[Three, int]:
    """Boxes of rows along each dimension, and tiles of columns."""
    return rows.tiles(s.box), -(-p.n // s.bn)


def clusters_of(p: Product, rows: Rows, s: TmaConfig) -> tuple[int, int]:
    """Rows and columns of what a cluster takes at a time: tiles, or as many as it has CTAs that share operands."""
    counts, columns = tiles_of(p, rows, s)
    high = math.prod(counts)
    return -(-high // s.cluster_m), -(-columns // s.cluster_n)


@dataclass(frozen=True, slots=True)
class StreamK:
    """How stream-K divides the k-tiles of tiles; a unit is a CTA, or a cluster that shares operands by multicast."""

    tiles: int
    """Tiles, or as many as a cluster takes at a time."""
    units: int
    """Of the grid."""
    k_tiles: int
    """K-tiles of a whole tile."""

    @property
    def sharers(self) -> int:
        """Units of each tile, where all are shares that end with their tiles; else 0."""
        return self.units // self.tiles if self.units % self.tiles == 0 else 0

    @property
    def shared(self) -> int:
        """Tiles that are divided, the first ones: what does not fill the grid, and one more for each unit."""
        left = self.tiles % self.units
        return left + self.units if self.tiles > self.units and left else left

    def range_of(self, unit: str) -> str:
        """C text: the first shared k-tile of a unit, counted over all tiles."""
        return str(Int(unit) * (self.shared * self.k_tiles) / self.units)


def stream_k_of(p: Product, rows: Rows, s: TmaConfig, k_tiles: int) -> StreamK:
    """The division of a stream-K configuration."""
    return StreamK(math.prod(clusters_of(p, rows, s)) * p.z, max(1, s.persistent_ctas // s.multicast_ctas), k_tiles)
