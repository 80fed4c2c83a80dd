"""Plans of the models with and without a budget, compiled ahead, and recorded on streams that the benchmark chooses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import weft
from benchmarks.models import load
from weft.device.cuda.budget import first_over_budget
from weft.device.cuda.cubin import usage
from weft.device.cuda.facts import GpuFacts
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource
from weft.runtime.budgeted import Budgeted, Residence, real_residence
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease
from weft.sm_budget import SmBudget

BUDGET = "registers=57344,shared=220KiB,threads=1792,ctas=31"
"""What a plan leaves a co-runner of 256 threads with 32 registers each."""
LANES = 4
"""Streams of a priority, or of a part of the GPU, that a plan is recorded on."""


@dataclass(frozen=True, slots=True)
class Posed:
    """A model on the GPU in f16, and inputs of a batch."""

    name: str
    batch: int
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]


def posed(name: str, batch: int) -> Posed:
    """See `benchmarks.models.load`."""
    module, inputs = load(name, batch)
    given = tuple(x.half().cuda() if x.is_floating_point() else x.cuda() for x in inputs)
    return Posed(name, batch, module.half().cuda(), given)


def compiled(model: Posed, budget: SmBudget | None, folder: Path, seconds: float) -> CudaExecutable:
    """The plan of a model; what was tuned before, with the same options and in this folder, is not tuned again.

    Raises:
        ValueError: no plan of Weft's answers.
    """
    options = weft.Options(
        device="cuda", budget_s=seconds, cache_dir=folder, sm_budget=budget, keep_worker=False, build_jobs=0
    )
    began = time.perf_counter()
    made = weft.compile(model.module, model.inputs, options=options, name=model.name)
    found = made.executable
    if not isinstance(found, CudaExecutable):
        raise ValueError(f"{model.name}: no plan for a GPU")  # noqa: TRY004 - it is the answer
    record = made.record
    said = f"{record.chosen}, {len(record.steps)} steps, {record.plans[0].median_us if record.plans else 0:.1f} us"
    under = f"under {budget}" if budget is not None else "without a budget"
    print(f"{model.name}/b{model.batch} {under}: {said}, {time.perf_counter() - began:.1f} s", flush=True)
    return found


def recorded(
    found: CudaExecutable,
    streams: Sequence[torch.cuda.Stream],
    facts: GpuFacts,
    budget: SmBudget | None,
    residence: Residence | None = None,
) -> CudaExecutable:
    """The same plan with memory of its own, its graph recorded on these streams. `residence`: in place of the real."""
    budgeted = None if budget is None else Budgeted(facts.within(budget), residence=residence)
    return CudaExecutable(found.linked, device=found.device, lease=Lease(found.device, streams), budgeted=budgeted)


def fits(found: CudaExecutable, facts: GpuFacts, sms: int) -> Declined | None:
    """Why a plan cannot run on so many multiprocessors: CTAs that spin on each other may find no room; None: it can."""
    part = replace(facts.whole.within(SmBudget(registers=facts.whole.registers_per_sm)), sms=sms)
    for step in found.plan.steps:
        source = step.kernel
        if not isinstance(source, CudaSource):
            return Declined(
                f"{step.kernel.schedule} is a call, of which nobody knows how many multiprocessors it needs"
            )
        taken = usage(Path(found.linked.objects[source.sha256]).read_bytes())
        if (why := first_over_budget(source.launches, taken, part)) is not None:
            return why
    return None


def without(*, carve_out: bool, upload: bool) -> Residence:
    """Residences that do not do what is not asked for: what the first query beside a co-runner then costs."""
    real = real_residence()
    return Residence(
        real.prefer_shared if carve_out else lambda _: None, real.upload if upload else lambda _graph, _stream: None
    )
