"""How long this process has been running, imports included."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/self/stat")
_START = 22
"""Number of the field with the start of the process, in ticks after the system's."""


def age_s() -> float:
    """Seconds since this process began; 0.0 where the system does not say (other than Linux)."""
    try:
        # fields are counted behind the name, which may have spaces
        fields = STAT.read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START - 3]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
