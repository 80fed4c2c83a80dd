"""Records of samples for tests: invented, and small."""

from __future__ import annotations

from weft.kernels.samples import (
    FORMAT,
    JobSamples,
    ModelSamples,
    ModeSamples,
    SampleRecord,
    Source,
    Spread,
    StepSamples,
)

NOISY = ((0.0, 95.0), (0.5, 100.0), (0.99, 104.0), (1.0, 106.0))


def spread(*quantiles: tuple[float, float]) -> Spread:
    return Spread(quantiles or NOISY, 0)


def constant(us: float) -> Spread:
    return Spread(((0.5, us),), 0)


def samples(solo: Spread | None = None, *, launch_us: float = 5.0, stop_us: float = 10.0) -> SampleRecord:
    """A model `net` of 100 us with a job `work`, in every way but MPS; a model `other`, of 60 us, that is alone."""
    lc = solo or spread()
    mid = lc.at(0.5)
    modes = (
        ModeSamples("net", "work", "streams", "streams", lc.times(4.0), 0.8, 1.0, 1980),
        ModeSamples("net", "work", "priority", "priority", lc.times(2.0), 0.6, 1.0, 1980),
        ModeSamples("net", "work", "green16", "partition", lc.times(1.05), 0.10, 0.11, 1980),
        ModeSamples("net", "work", "green36", "partition", lc.times(1.12), 0.25, 0.26, 1980),
        ModeSamples("net", "work", "co-runner 64", "co-runner", lc.times(1.10), 0.30, 0.35, 1980),
        ModeSamples("net", "work", "co-runner 256", "co-runner", lc.times(1.60), 0.20, 0.85, 1980),
    )
    steps = (
        StepSamples("net", "work", "a", 3, mid / 10, 0.20, 0.50, 0.05, True, 0),
        StepSamples("net", "work", "b", 1, mid / 5, 0.40, 0.60, 0.10, True, 0),
        StepSamples("net", "work", "c", 1, mid / 5, 0.90, 0.50, 0.10, False, 0),
    )
    return SampleRecord(
        FORMAT, "invented", "1.0", (ModelSamples("net", lc, 40, 1980), ModelSamples("other", lc.times(0.6), 20, 1980)),
        (JobSamples("work", 300.0, 2.0, Spread(((0.5, stop_us),), 0), 0), JobSamples("still", 300.0, 2.0, None, 0)),
        modes, steps, Spread(((0.5, launch_us),), 0), (Source("invented.jsonl", "none", "0"),),
    )  # fmt: skip
