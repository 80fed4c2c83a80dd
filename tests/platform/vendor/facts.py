"""What `device` has of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class XpuFacts:
    """One device; nothing of it was measured."""

    name: str = "a stand-in"
    lanes: int = 16
    bandwidth: float = 100.0
    """GB/s."""

    def source_of(self, field: str) -> str:
        """See `DeviceFacts`."""
        return "default"
