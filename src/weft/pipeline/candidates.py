"""Kernels that a plan may be made of, found and cut out as distinct problems within their shares of the time."""

from __future__ import annotations

import math

from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.enumerate import Enumeration, enumerate_candidates
from weft.pipeline.framework import UNTUNED_LATE, LeftToFramework
from weft.pipeline.job import Job, Tensors
from weft.pipeline.problems import Problems, collect

ENUMERATE_SHARE, ENUMERATE_MOST, EXTRACT_SHARE = 0.15, 0.22, 0.2
"""Of the time that is left when a stage begins: when it hurries; what it may take before it ends with what it has."""
UNTUNED_SHARE = 0.35
"""Without a budget, of the time that is left: what cutting the model's operators out may take before it is given up."""
FEW_CANDIDATES = 500
"""So many are always cut out (0.1 s), so that there is a plan which can be saved."""


def enumerated(job: Job, alternatives: Alternatives) -> tuple[Enumeration, bool]:
    """Candidates, and whether there was time for all."""
    stages, setting = job.stages, job.setting
    enough, end = (job.clock.until(job.clock.within(x)) for x in (ENUMERATE_SHARE, ENUMERATE_MOST))
    limits = setting.platform.limits(setting.options, setting.platform.facts)
    found = stages.run("enumerate", enumerate_candidates, job.graph, limits, alternatives, hurry=enough, stop=end)
    stages.note(f"{found.raw} sets, {found.unique} distinct, {len(found.candidates)} candidates")
    return found, not enough.fired


def extracted(job: Job, alternatives: Alternatives, found: Enumeration, inputs: Tensors) -> tuple[Problems, bool]:
    """Distinct problems, and whether there was time for all.

    Raises:
        LeftToFramework: without a budget there was no time for any plan; it is captured with the inputs.
    """
    stages, setting, clock = job.stages, job.setting, job.clock
    most = math.inf if setting.options.memory_limit_bytes else setting.platform.policy.uses_at_once
    cut = clock.until(clock.within(EXTRACT_SHARE))
    hurried = job.stands_in and not job.tunes and len(found.candidates) > FEW_CANDIDATES
    given_up = clock.until(clock.at_last(UNTUNED_SHARE) if hurried else math.inf)
    problems = stages.run(
        "extract", collect, job.graph, found.candidates, alternatives, setting.platform.facts,
        most_at_once=most, stop=cut, give_up=given_up,
    )  # fmt: skip
    if hurried and given_up.fired:
        raise LeftToFramework(job, [UNTUNED_LATE], inputs=inputs)
    left_out = " before the first plan" if problems.rest is not None else ""
    stages.note(f"{len(problems.tasks)} distinct problems{left_out}")
    return problems, not cut.fired
