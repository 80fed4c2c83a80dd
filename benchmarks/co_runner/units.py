"""Best-effort work that keeps one unit of a multiprocessor busy, as a role of any block size and length.

Work is counted in turns of threads, so that blocks of other sizes do the same work where they do as many of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.foreign import manifest as manifests
from weft.generate.cuda.foreign.read import ForeignRole
from weft.generate.cuda.foreign.read import read as foreign
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.persistent import persistent
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource
from weft.kernels.source import CudaSource

FOLDER = Path(__file__).parent
USUAL = ("ffma", "exponentials", "streaming", "histogram")
KINDS = (*USUAL, "dense")
"""The last are multiply-adds, too, so dense that they leave a model's warps next to nothing to issue in."""
TURNS = {"ffma": 512, "dense": 128, "exponentials": 128, "streaming": 16, "histogram": 16}
"""Of a block of 256 threads that takes some 10 µs with an SM to itself, by arithmetic."""
CELLS = 4096
"""Of `ran`, in which blocks count themselves by their number modulo this."""
FULL_THREADS = 256
"""Of blocks by which the whole GPU is filled."""
SHORT = 3
"""Blocks of the stream of lowest priority do a third of the turns."""
ROLE_THREADS = 128
"""Of blocks that run in roles: a warpgroup."""
ROLE = 4
"""They do a quarter of the turns of a co-runner's block: a role may run two further ones when it is told to stop."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Blocks of one kind of work."""

    kind: str
    threads: int
    turns: int
    stamped: bool = False
    """Whether the latest time at which a warp ended is kept: 64 bits in nanoseconds, behind the cells of `ran`."""

    @property
    def work(self) -> int:
        """Turns of threads of one block."""
        return self.threads * self.turns

    def role(self) -> ForeignRole:
        """One block as a role.

        Raises:
            ValueError: the kernel cannot be a role.
        """
        defined = {"THREADS": str(self.threads), "REPEATS": str(self.turns)}
        if self.stamped:
            defined["STAMPED"] = "1"
        changes: dict[str, object] = {"block": [self.threads, 1, 1], "define": defined}
        found = foreign(manifests.read(FOLDER / f"{self.kind}.toml", changes=changes), "w_f0")
        if isinstance(found, Declined):
            raise ValueError(f"{self.kind}: {found.reason}")  # noqa: TRY004 - it is the file
        return found


def unit_of(kind: str, threads: int, batch: int, *, short: bool = False) -> Unit:
    """Blocks beside a model of that batch: four times as long beside a batch of 16 as beside one of 1.

    Raises:
        ValueError: no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no work {kind!r}: there are {', '.join(KINDS)}")
    turns = TURNS[kind] * (4 if batch >= 16 else 1)
    return Unit(kind, threads, max(1, TURNS[kind] // SHORT) if short else turns)


def role_unit(kind: str, batch: int) -> Unit:
    """Blocks that run in roles of fused kernels, and tell when they ended.

    Raises:
        ValueError: no such kind.
    """
    whole = unit_of(kind, ROLE_THREADS, batch)
    return replace(whole, turns=max(1, whole.turns // ROLE), stamped=True)


def co_runner(unit: Unit, ctas: int, facts: GpuFacts) -> FusedSource:
    """The persistent kernel of so many CTAs, which stays until it is told to stop.

    Raises:
        ValueError: it cannot be made.
    """
    made = persistent([unit.role().source], ctas=ctas, threads=unit.threads, stays=True, facts=facts)
    if isinstance(made, Declined):
        raise ValueError(f"{unit}: {made.reason}")  # noqa: TRY004 - it is the work
    return made


def plain(unit: Unit, blocks: int) -> CudaSource:
    """The kernel by itself, with so many blocks."""
    made = solo(unit.role().source, "be")
    return replace(made, launches=tuple(replace(x, grid=(blocks, 1, 1)) for x in made.launches))
