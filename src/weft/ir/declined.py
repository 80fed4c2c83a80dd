"""A reason why something does not apply: a value that is counted and shown, not an exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Declined:
    """A rule, generator or pass does not apply."""

    reason: str
