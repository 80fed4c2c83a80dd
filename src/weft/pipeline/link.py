"""From plans to what can be called: kernels compiled, weights packed, run once on the example inputs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

from weft.errors import DeviceError
from weft.ir.graph import Graph
from weft.kernels.plan import Plan
from weft.pipeline import collector, finish
from weft.pipeline.deadline import FOREVER, Deadline, OutOfTime
from weft.pipeline.setting import Setting
from weft.runtime.any import AnyExecutable

Tensors = Sequence[torch.Tensor]
LINK_SHARE = 0.5
"""Of the time that is left when plans are linked: what that may take."""
DECIDED_RUNS = 8.0
"""Runs that judging and timing a plan take about: no further plan is linked where those before would lack the time."""
SAVED_S = 0.1
"""Without a budget a plan that cannot be judged in time is made all the same, to be saved, if its weights are packed in
so many seconds."""


def link(graph: Graph, plan: Plan, setting: Setting, left_s: float = math.inf) -> AnyExecutable:
    """Compile (or find) the plan's kernels, in the seconds that are left, and make it runnable."""
    return setting.platform.link(graph, plan, setting.options, left_s=left_s)


def link_all(
    graph: Graph,
    plans: Sequence[Plan],
    setting: Setting,
    inputs: Tensors,
    eager: Callable[..., Tensors] | None,
    lost: list[str],
    framework: str = "eager",
    clock: Deadline = FOREVER,
) -> list[finish.Contender]:
    """Every plan as something that can be run on the example inputs; equal plans once. `lost` is told of the others.

    When its share of the time is up, or what the longest of those before took would pass it, or leave too little to
    decide between them, only what an answer needs still is: some plan, if it is the library's and there is no
    framework.

    Raises:
        DeviceError: a plan took the GPU's context with it, which nothing in this process can use any more [W301].
    """
    platform = setting.platform
    # garbage that is found while weights are placed would leave room for them in the middle of larger segments
    platform.free_memory(garbage=True)
    contenders: list[finish.Contender] = []
    end, longest_s = clock.at_last(LINK_SHARE), 0.0
    tunes = setting.options.budget_s > 0
    answers = tunes and eager is not None  # without a budget there shall be a plan that can be saved
    seen: set[tuple[object, ...]] = set()
    for plan in platform.variants(graph, plans, timed=tunes):
        identity = (plan.branches, plan.threads, *((s.kernel, s.inputs, s.outputs) for s in plan.steps))
        if identity in seen:
            continue
        seen.add(identity)
        # of those before, this one, and the framework's own
        decided_s = DECIDED_RUNS * max((c.first_s for c in contenders), default=0.0) * (len(contenders) + 2)
        late = clock.clock() + longest_s >= min(end, clock.last - decided_s)
        if late and (contenders or answers or plan.name != "library"):
            lost.append(f"there was no time for the plan {plan.name}")
            continue
        began = clock.clock()
        took_s = 0.0
        try:
            with collector.put_off():
                executable = link(graph, plan, setting, clock.seconds_to(clock.last))
            executable.check_indices = False  # until it is given out
            if tunes:  # else it is run where it is judged, and time is short
                first = time.perf_counter()
                setting.bounded(executable, clock)(*inputs)
                took_s = 0.0 if platform.asynchronous else time.perf_counter() - first  # there it is recorded
            longest_s = max(longest_s, clock.clock() - began)
        except OutOfTime:
            lost.append(f"the plan {plan.name} did not end in time")
            continue
        except finish.FAULTS as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            if not platform.is_sound():
                problem = f"the plan {plan.name} ended this process's use of the GPU: {said}"
                raise DeviceError(problem=problem) from error
            lost.append(f"the plan {plan.name} does not run: {said}")
            warnings.warn(f"Weft leaves out the plan {plan.name}, which does not run: {said}", stacklevel=2)
            continue
        contenders.append(
            finish.Contender(
                plan.name,
                platform.again(executable, inputs) if tunes else partial(executable, *inputs),
                executable.kernels,
                plan.predicted_us if all(s.measured for s in plan.steps) else 0.0,
                plan.name == "library",
                executable,
                first_s=took_s,
            )
        )
    if eager is not None:
        first = time.perf_counter()
        try:
            stands = not tunes or takes(setting.bounded(eager, clock), inputs) or not contenders
        except OutOfTime:  # it is slower than a plan that ran in less, or else nobody knows
            ran_s = min((c.first_s for c in contenders), default=math.inf)
            stands = ran_s > time.perf_counter() - first
        if stands:
            run, free = (lambda: eager(*inputs)), not setting.options.bounds_plans
            took_s = 0.0 if platform.asynchronous else time.perf_counter() - first
            contenders.append(finish.Contender(framework, run, 0, 0.0, True, None, eligible=free, first_s=took_s))
    return contenders


def takes(eager: Callable[..., Tensors], inputs: Tensors) -> bool:
    """False where only the framework refuses: drawn indices outside of what they index, a view of other strides.

    Raises:
        OutOfTime: it did not end in time.
    """
    try:
        eager(*inputs)
    except (IndexError, RuntimeError):
        return False
    return True


def judged_in_time(graph: Graph, clock: Deadline, run_s: float = 0.0) -> bool:
    """Without a budget: is there time to link a plan and to judge it, or does linking it take next to none?

    A run takes about `run_s` seconds; a plan is judged where there is time for two.
    """
    packed_s = finish.weight_bytes(graph) / finish.PACKED_BYTES
    return packed_s <= SAVED_S or clock.clock() + packed_s + 2 * run_s < clock.last
