"""What was measured of one kernel: enough to redo the decision without the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weft.kernels.source import Schedule


class Verdict(Enum):
    """The closed set of outcomes of a trial; all but OK are rejections."""

    OK = "ok"
    COMPILE = "compile"
    RESOURCE = "resource"
    UNWRITTEN = "unwritten"
    WRONG = "wrong"
    NAN_CLASS = "nan_class"
    GUARD = "guard"
    INPUT_MODIFIED = "input_modified"
    UNSTABLE = "unstable"
    CRASH = "crash"
    HANG = "hang"
    OOM = "oom"
    IMPOSSIBLE = "impossible"
    SLOW = "slow"
    PRECISION = "precision"
    POISONED = "poisoned"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trial of one schedule of one problem."""

    problem_key: str
    schedule: Schedule
    verdict: Verdict
    samples_us: tuple[float, ...] = ()
    """Microseconds per launch, one entry per round, in order."""
    error: str = ""
    """Why it was rejected (capped)."""
    rmse: float = 0.0
    """Largest ratio of error to limit over outputs and input sets; at most 1 for OK."""
    compile_s: float = 0.0
    bound_us: float = 0.0
    """Lower bound of the roofline at measuring time; 0 if unknown."""
    kernel: str = ""
    """SHA-256 of what ran: `weft.kernels.codec.kernel_sha256`."""
    code: str = ""
    """SHA-256 of the same with machine code for text (`weft.kernels.codec.code_sha256`); empty: not known."""

    @property
    def median_us(self) -> float:
        """Median of the samples; infinite without any."""
        if not self.samples_us or self.verdict is not Verdict.OK:
            return float("inf")
        ordered = sorted(self.samples_us)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
