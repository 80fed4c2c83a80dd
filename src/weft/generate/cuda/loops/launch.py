"""One launch under construction: its text, its grid, and the shared memory that it declares."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.generate.cuda.loops.body import CudaBody
from weft.generate.loopnest.nest import Nest


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
    room: int = 0
    """Bytes of shared memory beside these, whose size the launch gives."""
    prologue: list[str] = field(default_factory=list)
    """Lines before all others: they read weights alone, and wait for nothing."""
    serial: int = 0

    def name(self, prefix: str) -> str:
        """A fresh identifier of this function."""
        self.serial += 1
        return f"{prefix}{self.serial}"
