"""What one run of a plan did when: frozen data for the writer of timelines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel, copy or library call while it ran."""

    name: str
    """As the device calls it: an entry point, a library's kernel; never escaped."""
    start_us: float
    """From the first span's start."""
    duration_us: float
    lane: int = 0
    """Spans of one lane do not overlap, except where a kernel began before its predecessor ended."""
    step: int = -1
    """Position in the plan; -1: not known."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of one run, by start."""

    spans: tuple[Span, ...]
    source: str
    """`profiler`: the device's own record of a replay. `events`: steps launched one by one between events, so that
    nothing overlaps. `clock`: steps on the CPU, medians of several runs one after another."""

    @property
    def microseconds(self) -> float:
        """From the first start to the last end."""
        return max((s.start_us + s.duration_us for s in self.spans), default=0.0)
