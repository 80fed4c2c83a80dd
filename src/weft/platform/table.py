"""The kinds of devices there are. A new one is a line here and a folder beside."""

from __future__ import annotations

from collections.abc import Mapping

from weft.device.any import DeviceFacts
from weft.device.cuda.record import GpuFacts
from weft.device.facts import CpuFacts
from weft.platform.cpu import Cpu
from weft.platform.cuda.platform import Cuda
from weft.platform.policy import SearchPolicy
from weft.platform.protocol import Platform

PLATFORMS: Mapping[str, type[Platform]] = {"cpu": Cpu, "cuda": Cuda}
"""By what `Options.device` begins with."""
_OF_FACTS: Mapping[type[DeviceFacts], type[Platform]] = {CpuFacts: Cpu, GpuFacts: Cuda}


def platform_of(device: str) -> type[Platform]:
    """The kind of a device by its name, with or without a number."""
    return PLATFORMS[device.partition(":")[0]]


def policy_for(facts: DeviceFacts) -> SearchPolicy:
    """How searches for a device with such facts spend their budget."""
    return _OF_FACTS[type(facts)].policy
