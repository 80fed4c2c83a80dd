"""Plans of the models with and without a budget, compiled ahead, and recorded on streams that the benchmark chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import weft
from benchmarks.models import load
from weft.colocate import gpu
from weft.device.cuda.facts import GpuFacts
from weft.errors import NoPlanError, OptionError
from weft.runtime.budgeted import Budgeted, Residence, real_residence
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease
from weft.sm_budget import SmBudget

BUDGET = str(gpu.BUDGET)
"""What a plan may take of each SM, as an option."""
TRIES = 6
"""To compile under a budget: each goes on from what the one before measured."""


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


def tried(make: Callable[[], weft.Compiled]) -> weft.Compiled:
    """What is compiled, tried again where the seconds ended before each operator had a kernel."""
    for _ in range(TRIES - 1):
        try:
            return make()
        except NoPlanError:
            continue
        except OptionError as error:
            if error.details.get("option") != "budget_s":
                raise
    return make()


def compiled(model: Posed, budget: SmBudget | None, folder: Path, seconds: float) -> CudaExecutable:
    """The plan of a model; what was tuned before, with the same options and in this folder, is not tuned again.

    Where the seconds ended before each operator had a kernel, it goes on from what was measured, `TRIES` times in all.

    Raises:
        OptionError: there is no plan under the budget then [W001].
        ValueError: no plan of Weft's answers.
    """
    options = weft.Options(
        device="cuda", budget_s=seconds, cache_dir=folder, sm_budget=budget, keep_worker=False, build_jobs=0
    )
    began = time.perf_counter()
    make = partial(weft.compile, model.module, model.inputs, options=options, name=model.name)
    made = make() if budget is None else tried(make)
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


def without(*, carve_out: bool, upload: bool) -> Residence:
    """Residences that do not do what is not asked for: what the first query beside a co-runner then costs."""
    real = real_residence()
    return Residence(
        real.prefer_shared if carve_out else lambda _: None, real.upload if upload else lambda _graph, _stream: None
    )
