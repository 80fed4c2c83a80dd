"""What a compilation did and why: frozen data for the command line, the report and the saved plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from weft.kernels.dataclass_json import LEFT_OUT


class Tuning(Enum):
    """How far the search for the best plan came."""

    COMPLETE = "complete"
    """More time would change nothing: no plan is better even if what nobody measured is as fast as it may be."""
    MEASURED = "measured"
    """The budget ended; every kernel of the best plan was measured, others that might be better were not."""
    CUT_SHORT = "cut short"
    """The budget ended before all kernels of the best plan were measured: it hangs on guesses."""
    UNTUNED = "untuned"
    """Nothing was measured."""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of the pipeline."""

    name: str
    seconds: float
    detail: str
    """One line: what came out."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """One plan that was timed end to end."""

    name: str
    """`solution-1`, `library`, `heuristic`, `eager`, ..."""
    kernels: int
    predicted_us: float
    """Sum of its kernels' own times; 0 where there is none (eager)."""
    samples_us: tuple[float, ...]
    """End-to-end times in interleaved rounds."""
    median_us: float
    verified: bool
    worst_error: float
    """Largest absolute difference from the reference."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A fusion that was open to a chosen kernel, and why it was not taken."""

    what: str
    """The primitives that would have been added, or the kernels that would have been merged."""
    cost_us: float
    """Measured time of the larger kernel; infinite if none was accepted."""
    parts_us: float
    """Time of the chosen kernels that it would replace."""
    reason: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One kernel of the chosen plan."""

    position: int
    schedule: str
    kind: str
    primitives: tuple[str, ...]
    nodes: tuple[int, ...]
    """Members as nodes of the graph in `CompileRecord.graph`."""
    operators: tuple[str, ...]
    """Source operators that its primitives come from, as the model names them: data, to be escaped."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """`%12 1x64x56x56xf32 last`."""
    cost_us: float
    bound_us: float
    predicted_us: float
    """Estimate of the model before measuring; 0 if there was none."""
    in_place_us: float
    """Median inside the whole plan; 0 if not measured."""
    runner_up: str
    runner_up_us: float
    alternatives: int
    """Schedules that were measured for this problem."""
    rejected: int
    neighbours: tuple[Neighbour, ...]
    source: str
    """Generated text, or the library call as text."""
    measured: bool = True
    """False: `cost_us` is a guess, made unattractive; nobody measured this kernel."""
    sm_share: str = field(default="", metadata=LEFT_OUT)
    """Under a budget of an SM: what its launches take of one, `2 CTAs: registers 50 %, shared 31 %, threads 25 %`."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One primitive, for drawing."""

    id: int
    prim: str
    type: str
    inputs: tuple[int, ...]
    operator: str
    location: str
    steps: tuple[int, ...]
    """Chosen kernels that compute it."""


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """Everything the report shows. No live object, no device."""

    model: str
    device: str
    environment: tuple[tuple[str, str], ...]
    operators: int
    primitives: int
    """Non-free primitives after the clean-ups."""
    primitives_before: int
    stages: tuple[StageRecord, ...]
    candidates_raw: int
    candidates: int
    capped: bool
    rejected_candidates: tuple[tuple[str, int], ...]
    problems: int
    """Distinct problems after the canonical key."""
    pruned: int
    measured: int
    """Kernels measured in this compilation."""
    reused: int
    """Kernels whose measurement came from the database."""
    rejected_kernels: tuple[tuple[str, int], ...]
    """Verdict, count."""
    opaque: tuple[tuple[str, str, int], ...]
    """Operator, reason, count."""
    notes: tuple[str, ...]
    solver_seconds: float
    solver_gap: float
    solver_status: str
    objective_us: float
    plans: tuple[PlanRecord, ...]
    chosen: str
    steps: tuple[StepRecord, ...]
    graph: tuple[NodeRecord, ...]
    arena_bytes: int
    live_bytes: int
    weight_bytes: int
    seconds: float
    tuning: str = "complete"
    """See `Tuning`."""
    unmeasured: int = 0
    """Distinct problems of the best plan that nobody measured."""
    wanted: int = 0
    """Distinct problems of the best plan."""

    @property
    def is_tuned(self) -> bool:
        """Whether the best plan is made of measurements alone, as far as measuring goes."""
        return self.tuning in (Tuning.COMPLETE.value, Tuning.MEASURED.value)

    @property
    def verdict(self) -> str:
        """How far the search came, in one sentence."""
        open_ = f"{self.unmeasured} of the {self.wanted} problems of the best plan were not measured"
        return {
            Tuning.COMPLETE.value: "more time would change nothing: no plan is better by what was measured or may be",
            Tuning.MEASURED.value: "the budget ended: the best plan is measured throughout, others were not",
            Tuning.CUT_SHORT.value: f"cut short: {open_}, so it hangs on guesses; compiling again goes on from here",
            Tuning.UNTUNED.value: f"untuned: nothing was measured, {open_}",
        }.get(self.tuning, self.tuning)

    @property
    def optimality(self) -> str:
        """What the solver's gap is worth, in a few words."""
        if not self.is_tuned:
            return "over guesses, which says nothing of the plan"
        return f"gap {100 * self.solver_gap:.2f} %" + ("" if self.tuning == "complete" else " among what was measured")

    @property
    def sm_budget(self) -> str:
        """What the plan may take of an SM, as text; empty: all of it."""
        return dict(self.environment).get("sm_budget", "")

    @property
    def median_us(self) -> float:
        """End-to-end time of the chosen plan."""
        return next((p.median_us for p in self.plans if p.name == self.chosen), 0.0)
