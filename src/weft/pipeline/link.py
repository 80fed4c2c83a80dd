"""From plans to what can be called: kernels compiled, weights packed, run once on the example inputs."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts
from weft.device.toolchain import HostCompiler
from weft.errors import DeviceError, ToolchainError
from weft.ir.graph import Graph
from weft.kernels.plan import Plan
from weft.kernels.source import KernelSource
from weft.pipeline import collector, finish
from weft.pipeline.deadline import FOREVER, Deadline, OutOfTime
from weft.pipeline.setting import Setting
from weft.runtime.any import AnyExecutable
from weft.runtime.executable import Executable, Linked
from weft.runtime.lanes import order_of
from weft.runtime.values import survey as survey_values

Tensors = Sequence[torch.Tensor]
LINK_SHARE = 0.5
"""Of the time that is left when plans are linked: what that may take."""
SAVED_S = 0.1
"""Without a budget a plan that cannot be judged in time is made all the same, to be saved, if its weights are packed in
so many seconds."""
ALONE_US = 2000.0
"""On a CPU, plans that are predicted to take at most so long are also timed on one thread."""
BRANCHES = (2, 4)
"""Chains of kernels that may run side by side on a GPU; which is best is measured."""


def link(graph: Graph, plan: Plan, setting: Setting, left_s: float = math.inf) -> AnyExecutable:
    """Compile (or find) the plan's kernels, in the seconds that are left, and make it runnable."""
    if isinstance(setting.facts, GpuFacts):
        from weft.pipeline import gpu

        nvrtc = None if isinstance(setting.compiler, HostCompiler) else setting.compiler
        return gpu.link(
            graph, plan, setting.facts, nvrtc, setting.options, setting.environment, setting.lease, left_s=left_s
        )
    compiler = setting.compiler if isinstance(setting.compiler, HostCompiler) else None
    objects: dict[str, Path] = {}
    for step in plan.steps:
        if isinstance(step.kernel, KernelSource) and step.kernel.sha256 not in objects:
            if compiler is None:
                raise ToolchainError(tool="none", status=-1, log="a plan with generated kernels needs a compiler")
            kernel = step.kernel
            limit_s = min(setting.options.compile_timeout_s, left_s)
            made = compiler.compile(kernel.text, kernel.flags, cache_dir=setting.options.cache, timeout_s=limit_s)
            objects[kernel.sha256] = made.path
    linked = Linked(graph, plan, objects, compiler, setting.options.cache, setting.facts.threads, setting.environment)
    return Executable(linked)


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

    When its share of the time is up, or what the longest of those before took would pass it, only what an answer needs
    still is: some plan, if it is the library's and there is no framework.

    Raises:
        DeviceError: a plan took the GPU's context with it, which nothing in this process can use any more [W301].
    """
    if setting.on_gpu:
        # garbage that is found while weights are placed would leave room for them in the middle of larger segments
        gc.collect()
    contenders: list[finish.Contender] = []
    end, longest_s = clock.at_last(LINK_SHARE), 0.0
    tunes = setting.options.budget_s > 0
    answers = tunes and eager is not None  # without a budget there shall be a plan that can be saved
    seen: set[tuple[object, ...]] = set()
    variants = branched(graph, plans) if setting.on_gpu else alone(plans, setting.facts) if tunes else plans
    for plan in variants:  # on one thread only where that is timed
        identity = (plan.branches, plan.threads, *((s.kernel, s.inputs, s.outputs) for s in plan.steps))
        if identity in seen:
            continue
        seen.add(identity)
        if clock.clock() + longest_s >= end and (contenders or answers or plan.name != "library"):
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
                took_s = 0.0 if setting.on_gpu else time.perf_counter() - first  # there it is recorded
            longest_s = max(longest_s, clock.clock() - began)
        except OutOfTime:
            lost.append(f"the plan {plan.name} did not end in time")
            continue
        except finish.FAULTS as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            if not setting.is_sound():
                problem = f"the plan {plan.name} ended this process's use of the GPU: {said}"
                raise DeviceError(problem=problem) from error
            lost.append(f"the plan {plan.name} does not run: {said}")
            warnings.warn(f"Weft leaves out the plan {plan.name}, which does not run: {said}", stacklevel=2)
            continue
        contenders.append(
            finish.Contender(
                plan.name,
                # a replay runs on what the first run above has put in place
                executable.replay if setting.on_gpu and tunes else (lambda e=executable: e(*inputs)),  # type: ignore[misc,union-attr]
                executable.kernels,
                plan.predicted_us if all(s.measured for s in plan.steps) else 0.0,
                plan.name == "library",
                executable,
                first_s=took_s,
            )
        )
    if eager is not None:
        first = time.perf_counter()
        if not tunes or takes(setting.bounded(eager, clock), inputs) or not contenders:
            run, free = (lambda: eager(*inputs)), not setting.options.memory_limit_bytes
            took_s = 0.0 if setting.on_gpu else time.perf_counter() - first
            contenders.append(finish.Contender(framework, run, 0, 0.0, True, None, eligible=free, first_s=took_s))
    return contenders


def takes(eager: Callable[..., Tensors], inputs: Tensors) -> bool:
    """False where only the framework refuses: drawn indices outside of what they index, a view of other strides.

    Or where it did not end in time.
    """
    try:
        eager(*inputs)
    except (IndexError, RuntimeError, OutOfTime):
        return False
    return True


def branched(graph: Graph, plans: Sequence[Plan]) -> list[Plan]:
    """The plans, and the solutions also with kernels side by side, in as many chains as that makes sense for."""
    found = list(plans)
    for plan in (p for p in plans if p.name.startswith("solution")):
        values, widths = survey_values(graph, plan), set()
        for most in BRANCHES:
            width = order_of(plan, values, most).width
            if width > 1 and width not in widths:
                widths.add(width)
                found.append(replace(plan, name=f"{plan.name}/{width}", branches=most))
    return found


def alone(plans: Sequence[Plan], facts: DeviceFacts) -> list[Plan]:
    """The plans, and those of small networks also on one thread: waking a team may take longer than they do.

    On a machine where others run it takes much longer: the team waits for a thread that does not run.
    """
    found = list(plans)
    if isinstance(facts, GpuFacts) or facts.threads <= 1:
        return found
    small = [p for p in plans if p.predicted_us <= ALONE_US]
    return [*found, *(replace(p, name=f"{p.name}/1 thread", threads=1) for p in small)]


def judged_in_time(graph: Graph, clock: Deadline, run_s: float = 0.0) -> bool:
    """Without a budget: is there time to link a plan and to judge it, or does linking it take next to none?

    A run takes about `run_s` seconds; a plan is judged where there is time for two.
    """
    packed_s = finish.weight_bytes(graph) / finish.PACKED_BYTES
    return packed_s <= SAVED_S or clock.clock() + packed_s + 2 * run_s < clock.last
