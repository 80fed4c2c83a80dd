"""Contracts of co-location: what a kernel takes of a multiprocessor, how roles share a CTA, what a fused kernel is.

LC is the latency-critical role, a kernel of a model; BE the best-effort role, whose blocks run in what LC leaves idle.
A BE job is a cycle of stages, each a grid of independent blocks (its *virtual grid*), drawn from a work counter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.ir.declined import Declined
from weft.kernels.source import CudaArgument
from weft.sm_budget import NAMES, SmBudget

Place = Literal["extra", "idle"]
"""Where BE threads come from: `extra` warps behind LC's, or the `idle` warps of LC's producer warpgroup."""

JOB = -1
"""Number of whom a parameter belongs to that is the work counter."""
_MOST_BLOCKS = 1 << 31
"""Blocks are counted modulo 2^32, and compared by the sign of their difference."""


def left_beside(there: SmBudget, other: SmBudget) -> SmBudget | Declined:
    """What is left of a budget beside another, all numbers given; or which resource is short."""
    pairs = {field: (getattr(there, field), getattr(other, field)) for field in NAMES.values()}
    short = [f"{wanted} {field} of {has}" for field, (has, wanted) in pairs.items() if wanted > has]
    if short:
        return Declined("over the budget of a multiprocessor: " + ", ".join(short))
    return SmBudget(**{field: has - wanted for field, (has, wanted) in pairs.items()})


@dataclass(frozen=True, slots=True)
class RoleRegisters:
    """Registers of a thread of each role once warpgroups have taken their parts (setmaxnreg)."""

    producer: int
    consumer: int
    best_effort: int
    """Of BE warpgroups; those in the idle warps of the producer warpgroup have the producer's."""


@dataclass(frozen=True, slots=True)
class FusionShape:
    """How BE threads stand in the CTAs of an LC kernel."""

    place: Place
    threads: int
    """Of one BE role: whole warps; whole warpgroups where registers are moved."""
    barrier: int
    """First named barrier of BE; those below are LC's."""
    shared_offset: int
    """Where BE's shared memory begins in the CTA's dynamic one; LC's lies below."""
    replicas: int = 1
    """BE roles in one CTA, each of which draws blocks of its own."""
    registers: RoleRegisters | None = None
    """None: all threads keep those of the launch."""
    min_ctas_per_sm: int = 0
    """Second launch bound of the fused kernel; 0: not told."""
    fill_grid: bool = False
    """The grid has a CTA for every multiprocessor, those behind LC's with BE roles alone; and BE roles go on until LC
    has ended in all CTAs, not in their own. For LC grids of one wave."""
    in_time: bool = False
    """A BE role draws a block only if it would end before LC does, by the clocks that both took in launches before."""


@dataclass(frozen=True, slots=True)
class FusedRole:
    """A role's place in a fused kernel."""

    first_thread: int
    threads: int
    barriers: tuple[int, ...]
    shared_offset: int
    shared_bytes: int
    registers: int
    """Of a thread, at most: those of the launch, or what its warpgroup asks for. Of LC those of consumers."""


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A parameter of a fused kernel, and whose it is."""

    role: int
    """0: LC's, or of a persistent kernel itself; k: that of BE source k - 1; `JOB`: the work counter."""
    name: str
    """As the role's own text calls it."""
    type: str
    argument: CudaArgument | None
    """As in the role's own launch: positions are among that role's inputs and outputs."""


@dataclass(frozen=True, slots=True)
class FusedSource:
    """An LC role and the BE roles in its CTAs, as one translation unit with one entry.

    Weights are packed by LC's own kernel, whose buffers (repacked weights, workspace, state) this one takes as they
    are.
    """

    text: str
    entry: str
    grid: tuple[int, int, int]
    threads: int
    """Of a CTA."""
    shared_bytes: int
    """Dynamic shared memory."""
    dependent: bool
    """As in `Launch`: LC's threads wait for the kernels before; BE's never do."""
    parameters: tuple[FusedParameter, ...]
    lc: FusedRole
    be: tuple[FusedRole, ...]
    """One per replica."""
    stages: tuple[int, ...]
    """Blocks of each stage of the job."""
    shape: FusionShape | None
    """None for a persistent kernel, which has no LC role."""
    registers_asked: int
    """Registers of a CTA that warpgroups ask for; the launch must give as many, or they wait forever. 0: none move."""
    co_resident: int = 1
    """As in `Launch`: neighbouring CTAs of LC that spin on each other; fewer of the fused ones fit at once."""
    capability: int = 80
    exact_arch: bool = False
    flags: tuple[str, ...] = ()
    cluster: tuple[int, int, int] = (1, 1, 1)
    """As in `Launch`: those of LC."""

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads by dimension."""
        return (self.threads, 1, 1)


@dataclass(frozen=True, slots=True)
class WorkCounter:
    """What the counter in device memory holds: `BYTES` bytes, aligned to 16. Numbers of blocks are modulo 2^32.

    Stages follow each other in a cycle; blocks are numbered through all of them. Whoever runs the job writes `limit`,
    `stop` and the throttle at any time (4 bytes each), the rest only while no role draws.
    """

    end: int = 0
    """Blocks below it may be drawn: granted up to `limit`, and never beyond `open`."""
    ticket: int = 0
    """The next block to draw. May stand above `end` by draws in vain."""
    limit: int = 0
    """Blocks that may be drawn, counted from the job's begin. Only raised while roles run; `stop` ends them."""
    open: int = 0
    """End of the open stage: the next one opens when `finished` has come to it."""
    stage: int = 0
    """Position of the open stage in the cycle."""
    finished: int = 0
    """Blocks that ran to their end, with all that they wrote."""
    stop: int = 0
    """Not 0: no further block is drawn."""
    duty: int = 256
    """Throttle of persistent kernels: 256ths of the time in which a CTA begins blocks."""
    sms: int = 0
    """The same: CTAs work on multiprocessors with numbers below it (%smid); 0: on all."""
    ctas: int = 0
    """The same: CTAs with numbers below it work; 0: all."""
    begun: int = 0
    """BE roles that have begun in fused kernels that fill their grid, since the counter began (64 bits): tells which
    launch a role belongs to."""
    lc_ended: int = 0
    """CTAs of such kernels whose LC role has ended."""
    lc_clocks: int = 0
    """Clocks from the begin of a CTA to the end of its LC role, of the CTA that ended last; 0: not known. Written by
    kernels that draw in time."""
    be_clocks: int = 0
    """The same of a block of a BE role, of the longer ones."""
    period: int = 0
    """Throttle of persistent kernels: nanoseconds of the GPU's own time of which all CTAs work in the same `duty`
    256ths, the first ones; 0: each CTA rests behind each of its blocks, by its own clock."""

    @staticmethod
    def start(stages: Sequence[int], limit: int) -> WorkCounter:
        """At the begin of a job with so many blocks to each stage, of which `limit` may be drawn.

        Raises:
            ValueError: a negative number of blocks, or 2^31 and more.
        """
        if any(not 0 <= n < _MOST_BLOCKS for n in (*stages, limit)):
            raise ValueError(f"stages of {list(stages)} blocks with a limit of {limit}: 0 to 2^31 - 1 are possible")
        first = next((i for i, n in enumerate(stages) if n), 0)
        return WorkCounter(limit=limit, open=stages[first] if stages else 0, stage=first)

    @staticmethod
    def offset(name: str) -> int:
        """Bytes from the counter's begin to one of its words, as it lies in device memory."""
        before = WorkCounter.__slots__.index(name)
        return struct.calcsize(_ORDER + _FORMATS[:before])

    def pack(self) -> bytes:
        """As it lies in device memory."""
        most = {"I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}
        words = zip(_FORMATS, self.__slots__, strict=True)
        return struct.pack(_LAYOUT, *(getattr(self, name) & most[form] for form, name in words))

    @staticmethod
    def unpack(data: bytes) -> WorkCounter:
        """Read back; ValueError for another number of bytes than `BYTES`."""
        if len(data) != BYTES:
            raise ValueError(f"{len(data)} bytes of a work counter, which has {BYTES}")
        return WorkCounter(*struct.unpack(_LAYOUT, data))


_ORDER = "<"
_FORMATS = "IIIIIIIIIIQIIII"
"""Of each word, in order."""
_LAYOUT = _ORDER + _FORMATS
BYTES = struct.calcsize(_LAYOUT)
"""Of a work counter in device memory."""
