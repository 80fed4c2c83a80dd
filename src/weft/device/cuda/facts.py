"""What a GPU is and can do: driver attributes, micro-benchmarks, or a shipped profile; every number says which.

Source: performance notes, section 6 (device record) and 7 (attributes by number, calibration).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal

Provenance = Literal["measured", "attribute", "default"]
Table = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU as the generators, the estimate and the tuner see it. Defaults are those of an H200 SXM."""

    name: str = "NVIDIA H200"
    capability: int = 90
    """Compute capability: major * 10 + minor."""
    sms: int = 132
    clock_ghz: float = 1.755
    """Clock under load."""
    max_clock_ghz: float = 1.98
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    registers_per_sm: int = 65536
    shared_per_sm: int = 233472
    shared_per_block: int = 232448
    """Largest dynamic shared memory of a block that opts in."""
    l2_bytes: int = 62914560
    memory_bytes: int = 150754820096
    bandwidth: Table = ((1 << 16, 60.0), (1 << 20, 800.0), (1 << 24, 3500.0), (1 << 30, 4200.0))
    """(bytes read plus written, GB/s) of one copy kernel inside a graph, sizes ascending."""
    peak_bandwidth: float = 4916.7
    """GB/s that the memory interface cannot exceed; 0: unknown."""
    l2_bandwidth: float = 6650.0
    """GB/s from the L2 cache."""
    launch_us: float = 1.0
    """Gap between two dependent kernels in a graph."""
    dependent_launch_us: float = 0.55
    """The same with programmatic dependent launch."""
    flops: tuple[tuple[str, float], ...] = (
        ("f64", 33.5e12),
        ("f32", 66.9e12),
        ("tf32", 494.7e12),
        ("f16", 989.4e12),
        ("bf16", 989.4e12),
        ("f8", 1978.9e12),
        ("i8", 1978.9e12),
    )
    """FLOP/s by operand type, dense: tensor cores, except f64 and f32. Upper bounds."""
    achieved_flops: tuple[tuple[str, float], ...] = (
        ("f32", 50e12),
        ("tf32", 400e12),
        ("f16", 780e12),
        ("bf16", 790e12),
    )
    """What a large library product reached."""
    provenance: tuple[tuple[str, Provenance], ...] = ()
    """Per field; a field that is not listed is a default."""

    def source_of(self, field: str) -> Provenance:
        """Where a field's value comes from."""
        return dict(self.provenance).get(field, "default")

    @property
    def arch(self) -> str:
        """Target of code for exactly this GPU."""
        return f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"

    def bandwidth_at(self, size_bytes: int) -> float:
        """GB/s of moving so many bytes: the table, interpolated on a logarithmic axis."""
        sizes = [s for s, _ in self.bandwidth]
        at = bisect.bisect_left(sizes, size_bytes)
        if at == 0:
            return self.bandwidth[0][1]
        if at == len(sizes):
            return self.bandwidth[-1][1]
        (s0, b0), (s1, b1) = self.bandwidth[at - 1], self.bandwidth[at]
        return b0 + (b1 - b0) * math.log(size_bytes / s0) / math.log(s1 / s0)
