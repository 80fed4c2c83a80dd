"""Facts of whatever device a kernel is for."""

from __future__ import annotations

from weft.device.cuda.facts import GpuFacts
from weft.device.facts import CpuFacts

DeviceFacts = CpuFacts | GpuFacts
