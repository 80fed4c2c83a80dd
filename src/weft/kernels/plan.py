"""The outcome of the selection: which kernels run, in which order, and what is known about the choice."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.graph import NodeId
from weft.kernels.candidate import Kind
from weft.kernels.formats import Format
from weft.kernels.source import Kernel, Schedule

MOST_BRANCHES, MOST_THREADS = 16, 4096
"""Of one plan."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel of a plan."""

    kernel: Kernel
    inputs: tuple[tuple[NodeId, Format], ...]
    outputs: tuple[tuple[NodeId, Format], ...]
    members: tuple[NodeId, ...]
    kind: Kind
    problem_key: str
    cost_us: float
    """Measured alone (median), or estimated when `measured` is false."""
    measured: bool = True
    runner_up: Schedule | None = None
    runner_up_us: float = 0.0


@dataclass(frozen=True, slots=True)
class SolverReport:
    """How the integer program ended."""

    objective_us: float
    bound_us: float
    gap: float
    seconds: float
    status: str
    """`optimal`, `limit` (incumbent returned), `parts` (solved part by part for want of time), `windows` (nothing is
    known of how good it is) or `heuristic`."""
    candidates: int
    constraints: int
    cuts: int
    """Lazy cuts added against cyclic choices."""


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Values of a model's indices that a plan gives out as a further output, and the bounds they must keep to."""

    output: int
    """Position among the graph's outputs; all such outputs stand behind those of the model."""
    low: int
    bound: int
    """Each value is at least `low` and less than `bound`."""
    operator: str
    """That is indexed by them, for people only: data of the model, sanitised where shown."""
    input: int = -1
    """The graph's input whose elements they are; -1: they are computed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Kernels in execution order; every graph output is written by a step or is an input or constant."""

    name: str
    """`solution-1`, `library`, `heuristic`, ..."""
    steps: tuple[Step, ...]
    solver: SolverReport | None = None
    branches: int = 1
    """On a GPU: chains of kernels that may run side by side, at most."""
    checks: tuple[IndexCheck, ...] = ()
    threads: int = 0
    """On a CPU: threads that its steps may use, at most; 0: as many as the machine gives."""

    @property
    def predicted_us(self) -> float:
        """Sum of the kernels' own times."""
        return sum(s.cost_us for s in self.steps)
