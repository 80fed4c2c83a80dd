"""Resident memory of processes under long use, and whether it is flat.

It is where the line through its second half rises by less than `FLAT_SHARE` of what the process takes, in an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness.record import Row

FLAT_SHARE = 0.05


def resident(pid: int) -> float:
    """MiB of a process; 0: there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith("VmRSS:")), 0.0)


@dataclass
class Memory:
    """Of one process."""

    pid: int
    at: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def sample(self, now: float) -> None:
        """`now`: seconds."""
        self.at.append(now)
        self.mib.append(resident(self.pid))

    def row(self) -> Row:
        """See `rise`."""
        return rise(self.at, self.mib)


def rise(at: Sequence[float], mib: Sequence[float]) -> Row:
    """Least squares through the second half; `at`: seconds."""
    half = len(at) // 2
    if len(at) - half < 3:
        return {"samples": len(at)}
    slope = float(np.polyfit(np.asarray(at[half:]) / 3600, mib[half:], 1)[0])
    share = slope / float(np.median(mib[half:]))
    return {"samples": len(at), "first_mib": round(mib[0], 1), "half_mib": round(mib[half], 1),
            "last_mib": round(mib[-1], 1), "most_mib": round(max(mib), 1), "mib_an_hour": round(slope, 2),
            "flat": share < FLAT_SHARE}  # fmt: skip
