"""Contracts of scheduling two jobs on one GPU: jobs, duration models, plan variants, situations and decisions.

LC is the latency-critical model, whose queries have deadlines; BE the best-effort job. A *plan variant* is one way to
run a whole query: for each step of LC's plan an assignment of what shares the GPU with it. Variant 0 is the plan by
itself. Instants are nanoseconds from the begin of a run, durations microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Sharing = Literal["none", "role", "co-runner", "partition", "streams", "priority", "mps"]
"""What runs beside a step: nothing; BE roles in its CTAs; a persistent co-runner; BE on other SMs; BE kernels on a
stream of the same or a lower priority; another process by MPS. A plan variant of one assignment has its name, too."""
SHARINGS: tuple[str, ...] = get_args(Sharing)
Prefers = Literal["tensor", "compute", "memory", "latency", "neutral"]
"""The unit that a job takes over half of, bandwidth first; `latency`: under half of all."""
PREFERS: tuple[str, ...] = get_args(Prefers)
JobKind = Literal["kernels", "network", "process"]
KINDS: tuple[str, ...] = get_args(JobKind)
NEVER = 1 << 62
"""An instant that does not come."""
OFF = -1
"""Form of a job that does not run."""


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _finite(*values: float) -> bool:
    return all(math.isfinite(v) and v >= 0 for v in values)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A best-effort job, as a `job.toml` describes it. Paths are relative to that file."""

    name: str
    kind: JobKind
    stages: tuple[str, ...] = ()
    """`kernels`: the kernel.toml of each stage, in order."""
    model: str = ""
    """`network`: an ONNX file, compiled for batch inference."""
    inputs: str = ""
    """`network`: the folder of inputs, one .npz an inference, in order of names."""
    outputs: str = ""
    """`network`: the folder of results; empty: they are dropped."""
    file: str = ""
    """`process`: a Python file."""
    function: str = ""
    """`process`: what in it does a unit of work."""
    segment_us: float = 0.0
    """`process`: how long the longest part that cannot be paused may take alone; 0: any time."""
    save_s: float = 0.0
    """`process`: seconds of work after which its state is saved."""
    hang_s: float = 0.0
    """`process`: seconds after which a part that does not end is killed."""
    passes: int = 0
    """Times through all stages or inputs, or units of a `process`; 0: without end."""
    memory_bytes: int = 0
    """Most device memory; 0: what LC leaves."""
    prefers: Prefers = "neutral"
    progress: str = ""
    """The file that progress is saved to and resumed from; empty: it is not."""

    def __post_init__(self) -> None:
        _need(self.kind in KINDS and self.prefers in PREFERS, "a kind of job or unit that there is not")
        _need(bool(self.name) and self.passes >= 0 and self.memory_bytes >= 0, "a job's name, passes or memory")
        _need(_finite(self.segment_us, self.save_s, self.hang_s), "times of a process")
        own = {"kernels": self.stages, "network": self.model and self.inputs, "process": self.file and self.function}
        _need(bool(own[self.kind]), f"a job of {self.kind} without any")


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job has come, exactly: what comes next is known from it alone."""

    job: str
    """Digest of the job's description: progress is of no other one."""
    passes: int
    """That are done."""
    stage: int
    """Stage or input of the pass under way."""
    blocks: int
    """Blocks of that stage that have ended; all before the first that has not."""

    def __post_init__(self) -> None:
        _need(bool(self.job) and min(self.passes, self.stage, self.blocks) >= 0, "negative progress")


@dataclass(frozen=True, slots=True)
class SoloModel:
    """Time of a kernel of n blocks alone: base + wave * n / resident, or with whole waves, whichever fits better."""

    base_us: float
    wave_us: float
    resident: int
    """Blocks that the GPU holds at a time."""
    whole_waves: bool
    error_q95: float
    """95 % of the relative errors of the fit are below it."""

    def __post_init__(self) -> None:
        _need(self.resident >= 1 and _finite(self.wave_us, self.error_q95) and math.isfinite(self.base_us), "a model")

    def us(self, blocks: float) -> float:
        """Predicted time."""
        waves = blocks / self.resident
        return self.base_us + self.wave_us * (math.ceil(waves) if self.whole_waves else waves)


@dataclass(frozen=True, slots=True)
class PairModel:
    """Time of a fused kernel that does BE work f, in LC's time alone: two lines, which meet where both end together."""

    base_us: float
    """With nothing to draw."""
    under: float
    """Microseconds to a unit of f, up to `ratio`."""
    over: float
    """The same behind it."""
    ratio: float
    error_q95: float

    def __post_init__(self) -> None:
        _need(_finite(self.base_us, self.ratio, self.error_q95), "a model")
        _need(math.isfinite(self.under) and math.isfinite(self.over), "a slope")

    def us(self, fraction: float) -> float:
        """Predicted time of a launch."""
        return self.base_us + self.under * min(fraction, self.ratio) + self.over * max(fraction - self.ratio, 0.0)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What shares the GPU with one step of LC's plan."""

    step: str
    sharing: Sharing
    detail: str
    """Which kernel, co-runner or partition; empty for none."""
    cost_us: float
    """Time that the step loses, all its launches."""
    be_us: float
    """BE work done meanwhile, in its time alone."""

    def __post_init__(self) -> None:
        _need(self.sharing in SHARINGS and math.isfinite(self.cost_us) and _finite(self.be_us), "an assignment")


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan variant (an operating point) of one LC model beside one BE job."""

    number: int
    """In the order of a front: more work and more time. 0: the plan by itself."""
    name: str
    sharing: Sharing
    lc_us: float
    """Median of a query."""
    lc_q99_us: float
    be_us: float = 0.0
    """BE work during a query, in its time alone on the whole GPU."""
    idle_rate: float = 1.0
    """BE work in a second in which no query runs, in the form that it has beside this variant."""
    resident: bool = False
    """BE need not be stopped before a query of this variant."""
    measured: bool = True
    """As a whole; otherwise the sum of its steps' measurements."""
    steps: tuple[Assignment, ...] = ()

    def __post_init__(self) -> None:
        _need(self.number >= 0 and self.sharing in SHARINGS and _finite(self.be_us, self.idle_rate), "a variant")
        _need(0 < self.lc_us < math.inf and self.lc_us <= self.lc_q99_us < math.inf, "times of a variant")

    @property
    def margin_us(self) -> float:
        """q99 over the median."""
        return self.lc_q99_us - self.lc_us


@dataclass(frozen=True, slots=True)
class Query:
    """One request of an LC model."""

    model: str
    number: int
    """In the order of arrival, over all models."""
    scheduled_ns: int
    deadline_ns: int
    inputs: int = 1


@dataclass(frozen=True, slots=True)
class Running:
    """A query that was launched and has not ended."""

    query: Query
    variant: int
    launched_ns: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A query that has ended since the last decision."""

    query: Query
    variant: int
    begin_ns: int
    """When the GPU began with it."""
    done_ns: int
    clock_mhz: int
    stops: bool = False
    """A job that had been told to stop still ran when it was launched: its time is not that of its variant."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a job stands."""

    form: int
    """Variant in whose form it runs where no query does; 0: on the whole GPU, and stopped first; `OFF`: not at all."""
    busy_until_ns: int
    """End of BE kernels that cannot be stopped; in the past: none runs."""
    blocks: int
    """That have ended."""
    is_done: bool
    """Its last block was drawn."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What was seen in the last window of time, for controllers."""

    at_ns: int = 0
    """End of that window."""
    arrivals: int = 0
    length_ns: int = 0
    variation: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals."""
    p99_ns: int = 0
    """Of the queries that ended in it; 0: none did. Of several models each latency is scaled by its own target to the
    shortest of all."""
    violations: int = 0
    """Queries that missed their deadline, since the begin of the run."""

    @property
    def rate_hz(self) -> float:
        """Arrivals in a second."""
        return self.arrivals * 1e9 / self.length_ns if self.length_ns else 0.0


@dataclass(slots=True)
class Situation:
    """All that a policy may know. A view: valid until the decision is made, and not to be changed by a policy."""

    now_ns: int
    running: Sequence[Running]
    """In the order of their launches: at most two."""
    waiting: Sequence[Query]
    """In the order of arrival; not to be kept or changed."""
    job: Cursor
    recent: Recent
    last_done_ns: int = 0
    """When the last query has ended: the next one began no earlier."""
    finished: Sequence[Finished] = ()
    """Since the last decision."""


CoRunner = Literal["on", "off", "keep"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done now."""

    launch: tuple[tuple[Query, int], ...] = ()
    """Queries, each by the number of a variant, in order."""
    co_runner: CoRunner = "keep"
    """BE where no query runs: it begins, or is stopped. A query whose variant is not resident stops it by itself."""
    form: int = 0
    """As in `Cursor`, with `on`."""
    kernels_us: float = 0.0
    """BE kernels of so much time alone that are put in front of whatever is launched later; nothing stops them."""
    wake_ns: int = NEVER
    """Decide again then, if nothing happens before."""


KEEP = Decision()
"""Nothing is done."""
