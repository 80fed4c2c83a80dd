"""Kinds of devices by name and by facts; those that there are stand in `weft.device.kinds`."""

from __future__ import annotations

from weft.device.any import DeviceFacts
from weft.device.kinds import kind_of, kind_with, part
from weft.platform.policy import SearchPolicy
from weft.platform.protocol import Platform


def platform_of(device: str) -> type[Platform]:
    """The kind of a device by its name, with or without a number."""
    found: type[Platform] = part(kind_of(device).platform)
    return found


def policy_for(facts: DeviceFacts) -> SearchPolicy:
    """How searches for a device with such facts spend their budget."""
    found: type[Platform] = part(kind_with(facts).platform)
    return found.policy_with(facts)
