"""Networks under a budget of an SM: a plan exists, and each of its kernels compiles and leaves a co-runner its room.

Nothing is measured: kernels are priced by the models. What they say of the cost, in golden texts, is a prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import goldens
from tests.generate.cuda.networks import graph_of

from weft.device.any import DeviceFacts
from weft.device.cuda.budget import first_over_budget
from weft.device.cuda.cubin import Usage, usage
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import ToolchainError
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.predict import predicted_us
from weft.generate.protocol import Generator
from weft.generate.registry import generators
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline import untuned
from weft.pipeline.problems import Problems, collect
from weft.pipeline.setting import Setting, limits_of
from weft.platform.cuda.platform import Cuda

BUDGET = "registers=49152,shared=200KiB,threads=1792"
MOST = 12
"""Schedules of a problem that are looked at."""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip("no NVRTC")
    return found


class Weighing:
    """The cuda generator's offers without those whose kernels, once compiled, are over the budget: the tuner's rule."""

    name = "cuda"

    def __init__(self, nvrtc: Nvrtc, cache: Path) -> None:
        self._nvrtc, self._cache, self._made = nvrtc, cache, CudaGenerator()
        self.declined: Counter[str] = Counter()
        """By template and reason."""
        self.without = 0
        """Problems of which no offer fits."""

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        assert isinstance(facts, GpuFacts)
        offered = self._made.schedules(problem, facts)
        if isinstance(offered, Declined) or facts.sm_budget is None:
            return offered
        for _, schedule in zip(range(MOST), offered, strict=False):
            source = self._made.emit(problem, schedule)
            if isinstance(source, Declined):
                continue
            why = first_over_budget(source.launches, taken(source, facts, self._nvrtc, self._cache), facts)
            if why is None:
                return [schedule]
            template = dict(schedule.params).get("template", "loops")
            self.declined[f"{template}: {why.reason.rpartition('sm_budget: ')[2]}"] += 1
        self.without += 1
        return Declined("no offer fits")

    def emit(self, problem: Problem, schedule: Schedule) -> CudaSource | Declined:
        return self._made.emit(problem, schedule)


def taken(source: CudaSource, facts: GpuFacts, nvrtc: Nvrtc, cache: Path) -> dict[str, Usage]:
    """What the launches of a kernel take, by the assembler's report; the cubin says the same."""
    try:
        made = nvrtc.compile(
            source.text, arch=facts.arch, flags=source.flags, max_registers=source.max_registers, cache_dir=cache
        )
    except ToolchainError as error:
        raise AssertionError(f"{source.schedule}: {error.log[-2000:]}") from error
    reported = {entry: Usage(own.registers, own.shared_bytes) for entry, own in made.resources}
    assert usage(made.path.read_bytes()) == reported
    return reported


def posed(name: str, batch: int, facts: GpuFacts, options: Options) -> tuple[Alternatives, Problems]:
    found = graph_of(name, batch)
    candidates = enumerate_candidates(found.graph, limits_of(options, facts), found).candidates
    return found, collect(found.graph, candidates, found, facts)


def predicted(plan: Plan, problems: Problems, facts: GpuFacts) -> float:
    """Microseconds of the plan alone, by the models: whole SMs, whatever the plan keeps free."""
    total = 0.0
    for step in plan.steps:
        task = problems.tasks[step.problem_key]
        modelled = predicted_us(task.problem, step.kernel.schedule, facts.whole)
        total += task.estimate_us if modelled is None else modelled
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", pytest.param("bert_base", marks=pytest.mark.whole)])
@pytest.mark.parametrize("batch", [1, pytest.param(16, marks=pytest.mark.whole)])
def test_a_network_has_a_plan_under_a_budget(
    name: str, batch: int, nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighing = Weighing(nvrtc, tmp_path)

    def asked(*, library: bool = True, generated: bool = True, device: str = "cpu") -> Sequence[Generator]:
        calls = generators(library=library, generated=False, device=device)
        return [*calls, weighing] if generated else calls

    monkeypatch.setattr(untuned, "generators", asked)
    lines = []
    costs = {}
    for budget in (None, BUDGET):
        options = Options(device="cuda", sm_budget=budget)  # type: ignore[arg-type]
        facts = profile("h200").within(options.sm_budget)
        graph, problems = posed(name, batch, facts, options)
        plan = untuned.plan_in("fused", problems, graph, Setting(options, Cuda(facts, nvrtc)))
        costs[budget] = predicted(plan, problems, facts)
        if budget is None:
            continue
        for step in plan.steps:
            assert isinstance(step.kernel, CudaSource), f"{step.kernel.schedule} is a call"
            fits = first_over_budget(step.kernel.launches, taken(step.kernel, facts, nvrtc, tmp_path), facts)
            assert fits is None, f"{step.kernel.schedule}: {fits}"
        lines = [f"{name} batch {batch} under {facts.sm_budget}: {len(plan.steps)} kernels, none of them a call"]
        without = f"predicted by the models, never measured: {costs[None]:.0f} us without the budget"
        lines.append(f"{without}, {costs[BUDGET]:.0f} us under it")
        lines.append(f"problems of which none of the first {MOST} offers fits: {weighing.without}")
        lines += [f"declined {n}  {why}" for why, n in sorted(weighing.declined.items())]
    ratio = costs[BUDGET] / costs[None]
    assert 0.5 < ratio < 1.5, f"the models predict {ratio:.2f} times the plan without a budget"
    goldens.check(f"cuda/sm_budget/{name}-{batch}.txt", "\n".join(lines) + "\n")
