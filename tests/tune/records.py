"""Measurements and environments for tests of the database."""

from __future__ import annotations

from weft.device.facts import CpuFacts
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.tune.keys import Environment, describe_environment
from weft.tune.timing import TimingPolicy

KERNEL = "5" * 64


def environment(seed: int = 0, **changes: object) -> Environment:
    facts = CpuFacts(**changes)  # type: ignore[arg-type]
    return describe_environment(facts, None, threads=1, seed=seed, policy=TimingPolicy())


def measurement(n: int, schedule: int = 0, verdict: Verdict = Verdict.OK) -> Measurement:
    samples = tuple(10.0 + n + k / 7 for k in range(5)) if verdict is Verdict.OK else ()
    params = (("tile", (schedule, 8)), ("vector", True), ("x", 0.5))
    return Measurement(f"problem {n} 'ünïcode'", Schedule("cpp", params), verdict, samples, "", 0.25, 0.5, 3.0, KERNEL)
