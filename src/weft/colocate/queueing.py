"""One server, first come, first served: Lindley's recursion over given times, and the load up to which a target holds.

Times are whole nanoseconds, so that a simulation can be compared with it bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.errors import UserError

Times = npt.NDArray[np.int64]
COUNT = 1_000_000
"""Arrivals of a search for the peak load."""
BATCHES = 10
"""Independent parts of them, whose peaks say how sure it is."""
_T_95 = 2.262
"""Student's t, 97.5 % with `BATCHES` - 1 degrees of freedom."""
_STEPS = 40
_SURE = 1e-4
"""Width of a bisection that is done, as a fraction of the service rate."""


class TargetError(UserError):
    """A latency target that cannot be kept."""

    code = "W017"
    template = "target: {problem}"
    todo = "{remedy}"


def lindley(arrivals_ns: Times, service_ns: Times) -> Times:
    """When each query has ended, by W' = max(0, W + S - A); exact. O(n), without a loop in Python.

    With C the cumulative service, the end of query n is C[n] + max over k <= n of (a[k] - C[k - 1]).

    Raises:
        ValueError: other numbers of arrivals and services, a negative service, or arrivals out of order.
    """
    if arrivals_ns.shape != service_ns.shape or arrivals_ns.ndim != 1:
        raise ValueError(f"{arrivals_ns.shape} arrivals with {service_ns.shape} service times")
    if len(service_ns) and service_ns.min() < 0:
        raise ValueError("a negative service time")
    if len(arrivals_ns) > 1 and np.diff(arrivals_ns).min() < 0:
        raise ValueError("arrivals out of order")
    served = np.cumsum(service_ns)
    return served + np.maximum.accumulate(arrivals_ns - (served - service_ns))


def latencies(arrivals_ns: Times, service_ns: Times) -> Times:
    """From the scheduled arrival to the end of each query, alone on its server."""
    return lindley(arrivals_ns, service_ns) - arrivals_ns


def waits(arrivals_ns: Times, service_ns: Times) -> Times:
    """From the scheduled arrival to the begin of service."""
    return latencies(arrivals_ns, service_ns) - service_ns


def md1_mean_wait(load: float, service: float) -> float:
    """Mean wait with Poisson arrivals and a constant service time (Pollaczek and Khinchine), in its unit.

    Raises:
        ValueError: a load outside of [0, 1).
    """
    if not 0 <= load < 1:
        raise ValueError(f"a load of {load} has no stationary wait")
    return load * service / (2 * (1 - load))


def batch_mean(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], batches: int = 50) -> tuple[float, float]:
    """Mean and its standard error by means of consecutive batches: neighbours in a queue depend on each other.

    Raises:
        ValueError: fewer than two values to a batch.
    """
    size = len(values) // batches
    if batches < 2 or size < 2:
        raise ValueError(f"{len(values)} values in {batches} batches")
    means = values[: size * batches].reshape(batches, size).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / math.sqrt(batches))


@dataclass(frozen=True, slots=True)
class PeakLoad:
    """The highest Poisson rate at which a model alone keeps its target."""

    rate_hz: float
    low_hz: float
    """95 % interval, by independent parts of the arrivals."""
    high_hz: float
    load: float
    """The same as a fraction of the service rate 1/T."""
    target_ns: int
    quantile: float
    seed: int


def peak_load(samples_ns: Times, target_ns: int, *, seed: int, count: int = COUNT, quantile: float = 0.99) -> PeakLoad:
    """By bisection over Lindley's recursion with recorded solo times, drawn with replacement.

    All rates see the same draws, scaled: waits then grow with the rate query by query, so there is one answer.

    Raises:
        TargetError: the target is below the model's own service times [W017].
        ValueError: no samples, or fewer arrivals than a quantile of each part needs.
    """
    if not len(samples_ns) or samples_ns.min() <= 0:
        raise ValueError("service times are above 0, and there is at least one")
    if count < BATCHES * 100 / (1 - quantile):
        raise ValueError(f"{count} arrivals are too few for the quantile {quantile} of {BATCHES} parts")
    own = float(np.quantile(samples_ns, quantile))
    if own > target_ns:
        raise TargetError(
            problem=f"{target_ns / 1e6:g} ms, where the model alone takes {own / 1e6:g} ms in "
            f"{quantile:.0%} of its queries without any wait",
            remedy="give a longer target",
        )
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, count)
    service = rng.choice(samples_ns, count)
    mean = float(samples_ns.mean())
    found = _peak(gaps, service, mean, target_ns, quantile)
    size = count // BATCHES
    parts = np.array(
        [
            _peak(gaps[i * size : (i + 1) * size], service[i * size : (i + 1) * size], mean, target_ns, quantile)
            for i in range(BATCHES)
        ]
    )
    half = _T_95 * float(parts.std(ddof=1)) / math.sqrt(BATCHES)
    rate = 1e9 / mean
    return PeakLoad(
        found * rate, max(0.0, found - half) * rate, (found + half) * rate, found, target_ns, quantile, seed
    )


def _peak(gaps: npt.NDArray[np.float64], service: Times, mean: float, target_ns: int, quantile: float) -> float:
    """The highest load that keeps the target, up to 1: above that the queue grows without end."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        load = (low + high) / 2
        arrivals = np.rint(np.cumsum(gaps) * (mean / load)).astype(np.int64)
        kept = np.quantile(latencies(arrivals, service), quantile) <= target_ns
        low, high = (load, high) if kept else (low, load)
        if high - low < _SURE:
            break
    return low
