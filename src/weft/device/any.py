"""Facts of whatever device a kernel is for."""

from __future__ import annotations

from typing import Protocol


class DeviceFacts(Protocol):
    """What is known of a device: a frozen record, whose class belongs to one kind (`weft.device.kinds`).

    Its numbers are for those who know the class: generators, estimates and sites of that kind.
    """

    @property
    def name(self) -> str:
        """As the system or the driver names it."""
        ...

    def source_of(self, field: str) -> str:
        """Where a field's value comes from: `measured`, or something that bounds nothing."""
        ...
