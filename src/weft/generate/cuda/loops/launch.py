"""One launch under construction: its text, its grid, its shared memory; and what it asks of the source around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from weft.generate.cuda.loops.body import Accesses, CudaBody
from weft.generate.cuda.loops.forms import Form
from weft.generate.loopnest.body import Coord
from weft.generate.loopnest.nest import Nest
from weft.ir.graph import NodeId
from weft.ir.types import DType


class Source(Protocol):
    """What the emission of one launch asks of the source that it is part of (`kernel.CudaText`)."""

    @property
    def form(self) -> Form:
        """What the schedule decides."""

    @property
    def approximate(self) -> bool:
        """Whether the last bits of f32 are lost anyway."""

    @property
    def accesses(self) -> Accesses:
        """Memory accesses, `frozen` in the second pass."""

    @property
    def carried(self) -> dict[str, dict[int, set[tuple[NodeId, Coord]]]]:
        """Per launch and stage the values that the first pass asked for; that pass adds to it."""

    def allocate(self, count: int, dtype: DType) -> str:
        """Name of an array in the workspace."""

    def counters(self, count: int) -> str:
        """Name of an array of counters, zero between calls."""


@dataclass(slots=True)
class Draft:
    """A kernel function whose parameters are not known yet."""

    suffix: str
    """What the entry's name ends in."""
    threads: int
    nest: Nest
    body: CudaBody
    blocks: int = 0
    cluster: int = 1
    shared: list[str] = field(default_factory=list)
    """Declarations of shared arrays."""
    smem_stash: int = 0
    """Bytes of shared memory beside these, whose size the launch gives."""
    prologue: list[str] = field(default_factory=list)
    """Lines before all others: they read weights alone, and wait for nothing."""
    serial: int = 0

    def name(self, prefix: str) -> str:
        """A fresh identifier of this function."""
        self.serial += 1
        return f"{prefix}{self.serial}"
