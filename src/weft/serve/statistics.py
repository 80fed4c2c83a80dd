"""What a model has answered, and how long it took: counts, sums and a histogram."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, final

Outcome = Literal["success", "failed", "rejected", "expired", "cancelled"]
OUTCOMES: tuple[Outcome, ...] = ("success", "failed", "rejected", "expired", "cancelled")
BOUNDS_S = tuple(m * 10.0**e for e in range(-4, 2) for m in (1.0, 2.0, 5.0))
"""Of the histogram of latencies: 100 us to 50 s."""
DEVIATIONS = 3.0
"""Mean ones, over what batches take on average."""


@dataclass(slots=True)
class Span:
    """How often, and how long in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """That many times, each so long."""
        self.count += count
        self.seconds += seconds * count


@dataclass(slots=True)
class Snapshot:
    """At one moment."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    queue: Span = field(default_factory=Span)
    pack: Span = field(default_factory=Span)
    compute: Span = field(default_factory=Span)
    split: Span = field(default_factory=Span)
    answered: Span = field(default_factory=Span)
    failed: Span = field(default_factory=Span)
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Queries by the bound that they are below; the last: above all."""
    batches: dict[int, tuple[Span, Span, Span]] = field(default_factory=dict)
    """By rows: packing, computing, splitting."""
    rows: int = 0
    restarts: int = 0
    replayed: int = 0
    last_ms: int = 0
    """When a query was last answered, in milliseconds since 1970."""

    def copied(self) -> Snapshot:
        """One that nobody changes."""

        def span(s: Span) -> Span:
            return Span(s.count, s.seconds)

        batches = {n: (span(a), span(b), span(c)) for n, (a, b, c) in self.batches.items()}
        return Snapshot(
            Counter(self.outcomes), span(self.queue), span(self.pack), span(self.compute), span(self.split),
            span(self.answered), span(self.failed), list(self.latencies), batches, self.rows, self.restarts,
            self.replayed, self.last_ms,
        )  # fmt: skip


@final
class Statistics:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot()
        self._pace_s = self._spread_s = 0.0
        """From one batch's end to the next one's, while batches wait: averages of it, and of how far it is off. The
        newest counts a tenth."""

    def snapshot(self) -> Snapshot:
        """As it is now."""
        with self._lock:
            return self._now.copied()

    def counted(self, outcome: Outcome, seconds: float = 0.0) -> None:
        """A query has its answer, so long after it came."""
        with self._lock:
            self._now.outcomes[outcome] += 1
            if outcome == "success":
                self._now.answered.add(seconds)
                self._now.latencies[bisect.bisect_left(BOUNDS_S, seconds)] += 1
                self._now.last_ms = time.time_ns() // 1_000_000
            elif outcome == "failed":
                self._now.failed.add(seconds)

    def batch(self, queued_s: list[float], rows: int, pack_s: float, compute_s: float, split_s: float) -> None:
        """A batch was run."""
        with self._lock:
            now = self._now
            for seconds in queued_s:
                now.queue.add(seconds)
            spans = now.batches.setdefault(rows, (Span(), Span(), Span()))
            for span, whole, seconds in zip(
                spans, (now.pack, now.compute, now.split), (pack_s, compute_s, split_s), strict=True
            ):
                span.add(seconds)
                whole.add(seconds, len(queued_s))
            now.rows += rows

    def paced(self, seconds: float) -> None:
        """A batch ended so long after the one before it, or after it was made where that was later."""
        with self._lock:
            first = self._pace_s == 0
            off = 0.0 if first else abs(seconds - self._pace_s)
            self._pace_s = seconds if first else 0.9 * self._pace_s + 0.1 * seconds
            self._spread_s = 0.9 * self._spread_s + 0.1 * off

    def takes_s(self, batches: int) -> float:
        """How long so many batches will take, seldom longer: deviations of independent times add up by squares."""
        with self._lock:
            return batches * self._pace_s + DEVIATIONS * math.sqrt(batches) * self._spread_s

    def restarted(self) -> None:
        """The worker was started again."""
        with self._lock:
            self._now.restarts += 1

    def replayed(self, queries: int) -> None:
        """So many queries are run once more."""
        with self._lock:
            self._now.replayed += queries
