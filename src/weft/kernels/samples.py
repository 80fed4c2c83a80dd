"""Recorded samples that a simulation replays: times of queries alone and beside a job, each with where it comes from.

A `Spread` is a distribution by its quantiles, as far as they were recorded: between them values are interpolated,
beyond the outer ones held.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import ArtifactError
from weft.kernels.codec import Json
from weft.kernels.colocation import FusionShape
from weft.kernels.dataclass_json import LEFT_OUT, from_json, to_json
from weft.kernels.scheduling import KINDS, SHARINGS, JobKind, Sharing

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures come from."""

    file: str
    """A record below `benchmarks/results`."""
    case: str
    commit: str
    """That was measured."""
    note: str = ""
    """What was derived of it, and how; empty: it stands there as it is."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of microseconds."""

    quantiles: tuple[tuple[float, float], ...]
    """Fraction and microseconds, both rising."""
    source: int
    """Position in the record's `sources`."""

    def __post_init__(self) -> None:
        qs, us = [q for q, _ in self.quantiles], [t for _, t in self.quantiles]
        if not qs or any(not 0 <= q <= 1 for q in qs) or any(not 0 <= t < math.inf for t in us):
            raise ValueError("a quantile that cannot be")
        if any(b <= a for a, b in itertools.pairwise(qs)) or any(b < a for a, b in itertools.pairwise(us)):
            raise ValueError("quantiles that do not rise")

    def at(self, q: float) -> float:
        """The value of a fraction."""
        (low, us), *rest = self.quantiles
        if q <= low:
            return us
        for high, more in rest:
            if q <= high:
                return us + (more - us) * (q - low) / (high - low)
            low, us = high, more
        return us

    def times(self, factor: float) -> Spread:
        """All values so many times as long."""
        return Spread(tuple((q, us * factor) for q, us in self.quantiles), self.source)


@dataclass(frozen=True, slots=True)
class ModelSamples:
    """A model alone."""

    name: str
    solo: Spread
    kernels: int
    clock_mhz: int
    """0: not recorded."""

    def __post_init__(self) -> None:
        if not self.name or self.solo.at(0.0) <= 0 or self.kernels < 0 or self.clock_mhz < 0:
            raise ValueError("a model without a time")


@dataclass(frozen=True, slots=True)
class JobSamples:
    """A best-effort job alone on the whole GPU."""

    name: str
    kernel_us: float
    """Its longest kernel, which nothing stops if it is launched plainly."""
    block_us: float
    """GPU time to one block: the kernel's over its blocks."""
    stop: Spread | None
    """What a query takes longer that finds the job on the whole GPU, from the flag on; None: not recorded."""
    source: int
    idle_rate: float = field(default=1.0, metadata=LEFT_OUT)
    """Work in a second on the whole GPU in the form that can be stopped, over that of its kernels launched plainly."""
    kind: JobKind = field(default="kernels", metadata=LEFT_OUT)
    """What of it can be stopped, and fused."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError("a kind of job that there is not")
        if not self.name or not all(0 < x < math.inf for x in (self.kernel_us, self.block_us, self.idle_rate)):
            raise ValueError("a job without a time")


@dataclass(frozen=True, slots=True)
class ModeSamples:
    """Whole queries of a model beside a job in one way of sharing."""

    model: str
    job: str
    name: str
    sharing: Sharing
    lc: Spread
    be_rate: float
    """BE work in a second beside queries, in its time alone on the whole GPU."""
    idle_rate: float
    """The same while no query runs."""
    clock_mhz: int

    def __post_init__(self) -> None:
        if self.sharing not in SHARINGS or self.lc.at(0.0) <= 0:
            raise ValueError("a way of sharing that there is not")
        if not (0 <= self.be_rate < math.inf and 0 <= self.idle_rate < math.inf):
            raise ValueError("a rate that cannot be")


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step of a model's plan fused with a job's kernel, of one launch of it."""

    model: str
    job: str
    step: str
    count: int
    """Times that the plan launches it."""
    lc_us: float
    """One launch alone."""
    slowdown: float
    fraction: float
    idle: float
    """Slowdown with nothing to draw; NaN: not recorded."""
    pays: bool
    """It beat its best peer, and gained more than it lost."""
    source: int
    shape: FusionShape | None = field(default=None, metadata=LEFT_OUT)
    """In which it was measured, of a step by its kernel's name (`weft.colocate.plan_roles`); None: not recorded."""

    def __post_init__(self) -> None:
        numbers = (self.lc_us, self.fraction)
        if self.count < 1 or not all(0 < x < math.inf for x in numbers) or not -1 < self.slowdown < math.inf:
            raise ValueError("a step that cannot be")


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """All samples of one GPU."""

    format: int
    gpu: str
    driver: str
    models: tuple[ModelSamples, ...]
    jobs: tuple[JobSamples, ...]
    modes: tuple[ModeSamples, ...]
    steps: tuple[StepSamples, ...]
    launch: Spread
    """From the host's launch to the GPU's begin, on an idle stream."""
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}")
        for names in ([m.name for m in self.models], [j.name for j in self.jobs]):
            if len(set(names)) < len(names):
                raise ValueError("a name twice")
        models, jobs = {m.name for m in self.models}, {j.name for j in self.jobs}
        pairs = [(m.model, m.job) for m in self.modes] + [(s.model, s.job) for s in self.steps]
        if any(model not in models or job not in jobs for model, job in pairs):
            raise ValueError("samples of a model or job that the record lacks")
        used = [m.solo.source for m in self.models] + [j.source for j in self.jobs] + [s.source for s in self.steps]
        used += [m.lc.source for m in self.modes] + [self.launch.source]
        used += [j.stop.source for j in self.jobs if j.stop is not None]
        if any(not 0 <= s < len(self.sources) for s in used):
            raise ValueError("a source that is not there")

    @property
    def digest(self) -> str:
        """Names the record by all that it holds."""
        return hashlib.sha256(write(self).encode()).hexdigest()[:16]


def write(record: SampleRecord) -> str:
    """As a text, one line to an element, so that changes can be read."""
    data = to_json(record)
    assert isinstance(data, Mapping)
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(json.dumps(v) for v in value)
            parts.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{" + ",\n".join(parts) + "}\n"


def read(data: Json) -> SampleRecord:
    """Inverse of `write`, of the JSON value.

    Raises:
        ArtifactError: no such record, or figures that cannot be [W401].
    """
    try:
        return from_json(SampleRecord, data)
    except RecursionError:
        raise ArtifactError(problem="malformed SampleRecord", remedy="record the samples again") from None
