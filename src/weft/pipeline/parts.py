"""A model that is compiled in parts, as one compilation."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weft.frontends.imported import Imported
from weft.kernels.record import CompileRecord, PlanRecord, Tuning
from weft.options import Options
from weft.pipeline import summary
from weft.pipeline.deadline import Deadline
from weft.pipeline.finish import LEAST_ROUNDS, ROUNDS, interleave, wins
from weft.pipeline.job import Compilation, Decision, Framework, Job, Searched
from weft.pipeline.setting import survey
from weft.pipeline.stages import Stages

NAME = "parts"
TIMED_SHARE = 0.1
"""Of the budget, for timing the parts together with what is between them beside the model's own execution."""


def joined(
    imported: Imported,
    options: Options,
    parts: Sequence[Compilation],
    answer: Callable[..., Sequence[torch.Tensor]],
    eager: Callable[..., Sequence[torch.Tensor]] | None,
    inputs: Sequence[torch.Tensor],
    *,
    model: str,
    note: str,
    stages: Stages,
    clock: Deadline,
) -> Compilation:
    """What answers calls of a model of which no plan holds the whole.

    Args:
        imported: what the model takes.
        options: of the compilation.
        parts: what was compiled of it.
        answer: runs the parts, and what is between them.
        eager: the model's own execution, which answers where it is the faster one; None: there is none.
        inputs: both are timed on them, where there is a budget for that.
        model: its name.
        note: why no plan holds it.
        stages: those that were before.
        clock: of the compilation.
    """
    setting = stages.run("survey", survey, options)
    job = Job.of(imported, inputs, Framework(NAME, answer, None, None), model, setting, stages, clock)
    samples: dict[str, list[float]] = {}
    if job.tunes and eager is not None:
        with stages.timed("time parts"):
            samples = interleave(
                {NAME: lambda: answer(*inputs), "eager": lambda: eager(*inputs)},
                rounds=ROUNDS, seed=options.seed, budget_s=TIMED_SHARE * options.budget_s,
                sample=setting.platform.sample_us, left_s=lambda: clock.last - clock.clock(),
            )  # fmt: skip
    mine, theirs = samples.get(NAME, []), samples.get("eager", [])
    measured = min(len(mine), len(theirs)) >= LEAST_ROUNDS
    beaten = job.tunes and not (measured and wins(mine, theirs))
    faster = eager if beaten else None
    verified = bool(parts) and all(p.plan is not None for p in parts)
    plans = (
        PlanRecord(
            NAME, len(parts), 0.0, tuple(mine), _median(mine), verified=verified, worst_error=math.inf, note="in parts"
        ),
        PlanRecord(
            "eager",
            0,
            0.0,
            tuple(theirs),
            _median(theirs),
            verified=False,
            worst_error=math.inf,
            note="the model itself",
        ),
    )
    chosen = NAME if faster is None else "eager"
    record = stages.run("record", summary.record, job, Searched(), Decision(None, chosen, plans))
    record = stages.close(_with_parts(record, [p.record for p in parts], note))
    return Compilation(job.graph, None, record, faster or answer, tuple(parts))


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else math.inf


def _with_parts(record: CompileRecord, parts: Sequence[CompileRecord], note: str) -> CompileRecord:
    """With what was found for the parts, together."""
    order = [x.value for x in Tuning]
    opaque: Counter[tuple[str, str]] = Counter()
    for part in parts:
        opaque.update({(op, reason): count for op, reason, count in part.opaque})
    return replace(
        record,
        operators=sum(p.operators for p in parts),
        primitives=sum(p.primitives for p in parts),
        primitives_before=sum(p.primitives_before for p in parts),
        problems=sum(p.problems for p in parts),
        measured=sum(p.measured for p in parts),
        reused=sum(p.reused for p in parts),
        opaque=tuple((op, reason, count) for (op, reason), count in opaque.most_common()),
        notes=(
            *record.notes,
            note,
            *(f"part {k + 1}: {p.chosen}, {p.operators} operators" for k, p in enumerate(parts)),
        ),
        tuning=max((p.tuning for p in parts), key=order.index, default=record.tuning),
        unmeasured=sum(p.unmeasured for p in parts),
        wanted=sum(p.wanted for p in parts),
    )
