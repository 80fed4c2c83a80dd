"""What the loops of an elementwise kernel are, without its text: vectors of threads, and what one element touches.

The model of such kernels (`pointwise`) reads them: how many neighbours a thread takes, which reads stride, and whether
a tile in shared memory applies follow from loops and addresses, not from the shapes of a problem alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.kernel import CudaText
from weft.generate.cuda.loops.lanes import Oversized, Scene, probe
from weft.generate.cuda.loops.point import MOST_LANES, parts_of
from weft.generate.cuda.loops.stages import Part, Segment
from weft.generate.cuda.loops.tile import Tiled
from weft.generate.loopnest.body import Access
from weft.generate.loopnest.index import Var, inner_coefficient
from weft.ir.graph import NodeId
from weft.kernels.candidate import Problem

SECTOR = 32
"""Bytes that memory moves at least."""


@dataclass(frozen=True, slots=True)
class LoopProfile:
    """A range of blocks with loops of its own; counts are those of one result."""

    size: int
    """Results."""
    along: int
    """Length of the loop whose neighbours a thread takes; 1: there is none."""
    narrowest: int
    """Bytes of the smallest element that lies side by side along it; 0: none does."""
    near: int
    """Bytes read and written side by side."""
    same: int
    """Reads that neighbours share."""
    apart: int
    """Reads and writes at a distance from those of the neighbour."""
    least: int
    """Bytes of these."""
    sectors: int
    """Bytes that memory moves for them where nobody else uses the rest of a sector."""
    values: int
    """Values computed; what a window does for each of its elements counts once."""
    launch: int = 0
    """Number of its launch."""
    edge: int = 0
    """Side of the tiles in shared memory that it goes through; 0: it does not."""
    tiles: int = 0
    """Their number."""

    def lanes(self, vector: int) -> int:
        """Neighbours that a thread takes at once, for memory accesses of so many bytes."""
        if not self.narrowest:
            return 1
        found = max(1, min(MOST_LANES, vector // self.narrowest))
        while found > 1 and self.along % found:
            found //= 2
        return found


class _Loops(CudaText):
    """The loops of a kernel, found as for its text."""

    def __init__(self, problem: Problem, form: Form) -> None:
        self.profiles: list[LoopProfile] = []
        self._number = 0
        super().__init__(problem, form, "k")

    def _emit(self, live: Sequence[NodeId]) -> None:
        if self.accesses.frozen:
            return
        self.profiles.clear()
        self._number = 0
        super()._emit(live)

    def _launch(self, segments: Sequence[Segment], scene: Scene) -> None:
        if segments[0].rows is not None:
            return
        for segment in segments:
            for part in parts_of(scene, segment.stages[0], self.form, "i"):
                profile = _profile(scene, part, self._number)
                if profile.size:  # a pad that cuts leaves ranges without a result
                    self.profiles.append(profile)
        self._number += 1


@lru_cache(maxsize=64)
def profiles_of(problem: Problem, *, tile: bool = False) -> tuple[LoopProfile, ...]:
    """The profiles of a problem without reductions, with the widest vectors; none where there are too many values."""
    try:
        return tuple(_Loops(problem, Form(tile=tile)).profiles)
    except Oversized:
        return ()


def _profile(scene: Scene, part: Part | Tiled, launch: int) -> LoopProfile:
    seen = probe(scene, [part.stage], [part.at])
    if isinstance(part, Tiled):
        lane, variables = part.along, (*part.outer, part.across, part.along)
    else:
        lane, variables = part.variables[-1] if part.variables else Var("none", 1), part.variables
    size = math.prod(v.size for v in variables)
    steps = [(inner_coefficient(x.address, lane) if lane.size > 1 else 1, x) for x in seen.accesses]
    sides = [x.itemsize for c, x in steps if c == 1]
    far = [(c, x) for c, x in steps if c not in (0, 1)]
    return LoopProfile(
        size=size,
        along=lane.size,
        narrowest=min(sides, default=0),
        near=sum(sides),
        same=sum(c == 0 for c, _ in steps),
        apart=len(far),
        least=sum(x.itemsize for _, x in far),
        sectors=sum(_moved(c, x) for c, x in far),
        values=seen.count,
        launch=launch,
        edge=part.edge if isinstance(part, Tiled) else 0,
        tiles=part.blocks if isinstance(part, Tiled) else 0,
    )


def _moved(step: int | None, access: Access) -> int:
    """Bytes that memory moves for one element whose neighbour lies so many elements away."""
    return SECTOR if step is None else min(SECTOR, abs(step) * access.itemsize)
