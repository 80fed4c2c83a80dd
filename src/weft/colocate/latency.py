"""Latencies of a run: a histogram beside the raw times, quantiles with intervals, and what makes a run void.

The histogram follows HdrHistogram (Tene): buckets of powers of two, each of 2048 or 1024 equal parts, so that a value
is known to three significant digits from 1 us to 60 s. Its unit is the nanosecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, final

import numpy as np
import numpy.typing as npt

from weft.errors import ArtifactError
from weft.kernels.codec import Json
from weft.kernels.policy_run import Quantile, Summary

Times = npt.NDArray[np.int64]
LEAST_NS = 1_000
"""1 us: what is shorter counts as this."""
MOST_NS = 60_000_000_000
"""60 s: what is longer counts as this, and is told (`over`)."""
MOST_SEND_DELAY_NS = 20_000
"""Of the sender, p99: above, a run is void."""
QUANTILES = (0.5, 0.95, 0.99, 0.999)
_HALF_BITS = 10
_HALF = 1 << _HALF_BITS
"""Parts of a bucket but the first, which has twice as many: 1/1024 is below three digits' half unit."""
_FIRST = 2 * _HALF
_RESAMPLES = 400
_CHUNK = 1 << 22


def _slot(values: Times) -> Times:
    """Counter of each value."""
    shift = np.maximum(np.frexp(values.astype(np.float64))[1].astype(np.int64) - (_HALF_BITS + 1), 0)
    return np.asarray(shift * _HALF + (values >> shift), dtype=np.int64)


_SLOTS = int(_slot(np.array([MOST_NS], dtype=np.int64))[0]) + 1


@final
class Histogram:
    """Counts of values in nanoseconds, to three significant digits. Any number of values takes the same memory."""

    def __init__(self) -> None:
        self._counts = np.zeros(_SLOTS, dtype=np.int64)
        self.over = 0
        """Values that were longer than `MOST_NS`."""

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, values: Times) -> None:
        """Count values.

        Raises:
            ValueError: a negative one.
        """
        if not len(values):
            return
        if values.min() < 0:
            raise ValueError("a negative latency")
        self.over += int((values > MOST_NS).sum())
        self._counts += np.bincount(_slot(np.clip(values, LEAST_NS, MOST_NS)), minlength=_SLOTS)

    def merge(self, other: Histogram) -> None:
        """Take over all that another one counted."""
        self._counts += other._counts
        self.over += other.over

    def quantile(self, q: float) -> float:
        """The middle of the counter that the value of this rank stands in, in nanoseconds; NaN of nothing.

        Raises:
            ValueError: no fraction.
        """
        _check_fraction(q)
        total = len(self)
        if not total:
            return math.nan
        rank = max(1, math.ceil(q * total))
        return self._middle(int(np.searchsorted(np.cumsum(self._counts), rank)))

    def cdf(self) -> tuple[tuple[float, float], ...]:
        """Value in nanoseconds and share of all up to it, of each counter that is not empty."""
        total = len(self)
        at = np.nonzero(self._counts)[0]
        shares = np.cumsum(self._counts[at]) / max(total, 1)
        return tuple((self._middle(int(i)), float(s)) for i, s in zip(at, shares, strict=True))

    @staticmethod
    def _middle(slot: int) -> float:
        shift = max(slot // _HALF - 1, 0)
        low = (slot - shift * _HALF) << shift
        return low + ((1 << shift) - 1) / 2

    def to_json(self) -> Json:
        """The counters that are not empty, and where they stand."""
        at = np.nonzero(self._counts)[0]
        return {"format": 1, "over": self.over, "counts": [[int(i), int(self._counts[i])] for i in at]}

    @staticmethod
    def from_json(data: Json) -> Histogram:
        """Inverse of `to_json`.

        Raises:
            ArtifactError: no such value [W401].
        """
        found = Histogram()
        try:
            record = cast("Mapping[str, Json]", data)
            if record["format"] != 1:
                raise ValueError
            for pair in cast("Sequence[Sequence[int]]", record["counts"]):
                at, count = pair
                if not (type(at) is int and type(count) is int and 0 <= at < _SLOTS and 0 < count < 1 << 62):
                    raise ValueError
                found._counts[at] += count
            over = record["over"]
            if not (type(over) is int and 0 <= over <= len(found)):
                raise ValueError
            found.over = over
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ArtifactError(problem="malformed histogram", remedy="measure again") from None
        return found


def interval(
    values: Times, q: float, *, seed: int, confidence: float = 0.95, resamples: int = _RESAMPLES, block: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of a quantile, of blocks of neighbours: those that waited for each other belong together.

    Args:
        values: in order of arrival.
        q: the quantile, 0 to 1.
        seed: of the draws.
        confidence: of the interval.
        resamples: series that are drawn.
        block: neighbours that are drawn as one; 0: the root of their number.

    Raises:
        ValueError: no fraction, or a block longer than the series.
    """
    _check_fraction(q)
    _check_fraction(confidence)
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    length = block or max(1, math.isqrt(n))
    if not 1 <= length <= n:
        raise ValueError(f"blocks of {length} of {n} values")
    rng = np.random.default_rng(seed)
    blocks = -(-n // length)
    at_once = max(1, _CHUNK // (blocks * length))
    found: list[npt.NDArray[np.float64]] = []
    offsets = np.arange(length)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        begins = rng.integers(0, n - length + 1, (rows, blocks, 1))
        drawn = values[(begins + offsets).reshape(rows, -1)[:, :n]]
        found.append(np.quantile(drawn, q, axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(found), (tail, 1 - tail))
    return float(low), float(high)


@final
@dataclass(slots=True)
class Latencies:
    """What was measured of the queries of one model in one run: raw times, in order of arrival, and their histogram."""

    scheduled_ns: Times
    done_ns: Times
    sent_ns: Times | None = None
    """When each was sent in fact; None: simulated, at its instant."""
    warm_up: int = 0
    """First queries that do not count."""
    histogram: Histogram = field(init=False)

    def __post_init__(self) -> None:
        if self.scheduled_ns.shape != self.done_ns.shape or (
            self.sent_ns is not None and self.sent_ns.shape != self.done_ns.shape
        ):
            raise ValueError("other numbers of queries that were scheduled, sent and done")
        if not 0 <= self.warm_up <= len(self.done_ns):
            raise ValueError(f"a warm-up of {self.warm_up} of {len(self.done_ns)} queries")
        self.histogram = Histogram()
        self.histogram.add(self.raw_ns)

    @property
    def raw_ns(self) -> Times:
        """Completion less *scheduled* arrival of each query that counts."""
        return (self.done_ns - self.scheduled_ns)[self.warm_up :]

    @property
    def send_delay_ns(self) -> float:
        """p99 of how much later than scheduled queries were sent; 0 if simulated."""
        if self.sent_ns is None or len(self.sent_ns) == self.warm_up:
            return 0.0
        return float(np.quantile((self.sent_ns - self.scheduled_ns)[self.warm_up :], 0.99))

    @property
    def void(self) -> str:
        """Why the run counts for nothing; empty: it does."""
        delay = self.send_delay_ns
        if delay > MOST_SEND_DELAY_NS:
            return f"send delay p99 {delay / 1e3:.1f} us is over {MOST_SEND_DELAY_NS / 1e3:.0f} us"
        if self.sent_ns is not None and bool((self.sent_ns < self.scheduled_ns).any()):
            return "queries were sent before they were scheduled"
        return "" if len(self.raw_ns) else "no query counts"

    def violations(self, target_ns: int) -> int:
        """Queries that took longer than the target."""
        return int((self.raw_ns > target_ns).sum())

    def summary(self, target_ns: int, *, seed: int, resamples: int = _RESAMPLES) -> Summary:
        """What a table and a report say of it."""
        raw = self.raw_ns
        found = []
        for q in QUANTILES if len(raw) else ():
            low, high = interval(raw, q, seed=seed, resamples=resamples)
            found.append(Quantile(q, float(np.quantile(raw, q)) / 1e3, low / 1e3, high / 1e3))
        return Summary(
            queries=len(raw), quantiles=tuple(found), mean_us=float(raw.mean()) / 1e3 if len(raw) else math.nan,
            violations=self.violations(target_ns), send_delay_us=self.send_delay_ns / 1e3, void=self.void,
        )  # fmt: skip


def over_exclusive(p99_us: float, arrivals: str, exclusive_p99_us: float, exclusive_arrivals: str) -> float:
    """p99 over that of the model alone on the same arrivals.

    Raises:
        ValueError: the arrivals were others: the two cannot be compared.
    """
    if arrivals != exclusive_arrivals:
        raise ValueError(f"arrivals {arrivals} are compared with {exclusive_arrivals}")
    return p99_us / exclusive_p99_us


def be_throughput(work_s: float, span_s: float) -> float:
    """Seconds of best-effort work, as it takes alone on the whole GPU, in a second.

    Raises:
        ValueError: a run without a length.
    """
    if not span_s > 0:
        raise ValueError(f"a run of {span_s} s")
    return work_s / span_s


def system_throughput(queries: int, solo_s: float, work_s: float, span_s: float) -> float:
    """Weighted speedup: both jobs' work in their own solo time, in a second. 1 is a GPU shared in time without a loss.

    Raises:
        ValueError: a run without a length.
    """
    return be_throughput(queries * solo_s + work_s, span_s)


def _check_fraction(q: float) -> None:
    if not 0 < q <= 1:
        raise ValueError(f"{q} is no fraction")
