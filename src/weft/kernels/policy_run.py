"""What a run under a scheduling policy came to, measured or simulated: the figures of tables and reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from weft.kernels.dataclass_json import LEFT_OUT


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of latencies, with its 95 % interval."""

    q: float
    us: float
    low_us: float
    high_us: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies of a run."""

    queries: int
    quantiles: tuple[Quantile, ...]
    mean_us: float
    violations: int
    """Queries that took longer than the target."""
    send_delay_us: float
    """p99."""
    void: str = ""
    """Why the run counts for nothing; empty: it does."""

    def quantile_us(self, q: float) -> float:
        """Of this fraction; NaN: it was not taken."""
        return next((x.us for x in self.quantiles if x.q == q), math.nan)


@dataclass(frozen=True, slots=True)
class VariantShare:
    """How much of the queries ran by a plan variant."""

    number: int
    name: str
    queries: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Plan variants in one window of time: what the controller allowed, and what ran."""

    begin_s: float
    mean: float
    """Mean number of the variants that ran; NaN: no query ended in this window."""
    cap: int
    """The highest that was allowed; -1: the policy has no such limit."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy on one series of arrivals."""

    policy: str
    note: str
    """What it is: `our implementation of ...`; empty: nothing need be said."""
    model: str
    job: str
    """Empty: none."""
    simulated: bool
    load: float
    load_of: str
    """What the load is a fraction of: `service rate`, `peak load` or `trace`."""
    rate_hz: float
    arrivals: str
    """The process, for people."""
    arrivals_digest: str
    seed: int
    target_us: float
    latency: Summary
    over_exclusive: float
    """p99 over that of `exclusive` on the same arrivals, of the same models; NaN: there was none."""
    be_throughput: float
    """Solo-equivalent seconds of best-effort work in a second."""
    system_throughput: float
    span_s: float
    variants: tuple[VariantShare, ...] = ()
    cdf: tuple[tuple[float, float], ...] = ()
    """Microseconds and share of the queries."""
    chosen: tuple[Chosen, ...] = ()
    decision_us: float | None = None
    """What a decision took, p99; None: simulated."""
    off_lindley_us: float | None = None
    """Of `exclusive`: p99 of the difference to a single queue with the same service times; None: simulated."""

    refused: int = field(default=0, metadata=LEFT_OUT)
    """Queries that were refused as they came: they would have missed the target, and no latency counts them."""

    among: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Further models of the same run: each has figures of its own, and what the job got is the same in all."""

    @property
    def p99_us(self) -> float:
        """Of the latencies."""
        return self.latency.quantile_us(0.99)

    @property
    def kept(self) -> bool:
        """Whether the target held at p99, in a run that counts."""
        return not self.latency.void and self.p99_us <= self.target_us


@dataclass(frozen=True, slots=True)
class Refused:
    """A policy that could not take part."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several policies on the same arrivals, and runs over loads where there are some."""

    gpu: str
    record: str
    """Digest of the recorded samples; empty: measured."""
    runs: tuple[PolicyRun, ...]
    refused: tuple[Refused, ...] = ()
    over_load: tuple[PolicyRun, ...] = ()
    """The same policies at other loads."""
