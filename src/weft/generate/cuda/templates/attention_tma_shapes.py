"""Parameters of the attention template for Hopper's warpgroups, and which of them to measure.

Source of the model's terms: products at the rate that warpgroup instructions reach, 16 exponentials per cycle and
multiprocessor, 128 other results; what warpgroups hide of each other is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.templates.attention_match import Attention
from weft.generate.cuda.templates.attention_tma_maps import PANEL, ROWS, panels
from weft.generate.shape import Parameters
from weft.kernels.source import Schedule

TEMPLATE = "attention_tma"


@dataclass(frozen=True, slots=True)
class Shape(Parameters):
    """Parameters of the template."""

    groups: int
    """Warpgroups that multiply, 64 rows each."""
    bn: int
    """Keys of a tile, a multiple of 16."""
    stages: int
    """Tiles of keys, and of values, in shared memory."""
    turns: bool
    """True: warpgroups issue their products one after the other, so that one computes weights while another multiplies."""
    resident: int
    """Blocks meant to be on one multiprocessor together."""
    blocks: int
    """Blocks of the grid that go on to further tiles; 0: one block per tile."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template=TEMPLATE)

    @property
    def bm(self) -> int:
        """Rows of a block."""
        return ROWS * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroups that multiply and the one that copies."""
        return 128 * (self.groups + 1)

    @property
    def at_entry(self) -> int:
        """Registers per thread that the block is launched with."""
        return min(255, 65536 // (self.threads * self.resident) // 8 * 8)

    @property
    def moved(self) -> tuple[int, int]:
        """Registers per thread of the warpgroup that copies and of those that multiply; equal: none are moved."""
        entry = self.at_entry
        if entry >= 240:
            return entry, entry
        few = 24 if self.groups * self.resident > 2 else 40
        return few, min(240, (entry * (self.groups + 1) - few) // self.groups // 8 * 8)


def padded(n: int) -> int:
    """Columns that warpgroup products read."""
    return -(-n // 16) * 16


def q_bytes(p: Attention, s: Shape) -> int:
    """Shared memory of q."""
    return s.bm * panels(p.qk) * PANEL * 2


def k_bytes(p: Attention, s: Shape) -> int:
    """Shared memory of a tile of k."""
    return s.bn * panels(p.qk) * PANEL * 2


def v_bytes(p: Attention, s: Shape) -> int:
    """Shared memory of a tile of v."""
    return s.bn * panels(p.head) * PANEL * 2


def shared_bytes(p: Attention, s: Shape) -> int:
    """Dynamic shared memory of a block: q, tiles, barriers, and the columns that are not finite."""
    return q_bytes(p, s) + s.stages * (k_bytes(p, s) + v_bytes(p, s)) + 32 * s.stages + 160


def tiles(p: Attention, s: Shape) -> int:
    """Steps over all keys."""
    return -(-p.keys // s.bn)
