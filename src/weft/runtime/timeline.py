"""When each kernel of a plan runs: from the profiler of the device, else from events around every step.

The profiler sees what a replay of the graph really does, overlap of dependent launches included, but not which step a
kernel belongs to. That is learnt from a second recording, in which the steps are launched one by one with a kernel of a
known name between them; kernels of equal name keep their order.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.kernels.timeline import Span, Timeline
from weft.runtime.any import AnyExecutable
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable

MARKER = "spin_kernel"
"""Name, in the profiler, of the kernel that `torch.cuda._sleep` launches."""
CLOCK_ROUNDS = 5
_CYCLES_PER_STEP = 60_000
"""About 30 us: the device waits while the host enqueues a step and its event."""


def timeline(executable: AnyExecutable, inputs: Sequence[torch.Tensor]) -> Timeline:
    """One run on these inputs.

    Raises:
        InputError: tensors that do not fit the compiled signature [W011].
    """
    executable(*inputs)
    if isinstance(executable, CudaExecutable):
        with torch.cuda.device(executable.device):
            return _profiled(executable) or _by_events(executable)
    if isinstance(executable, Executable):
        return _by_the_clock(executable.time_steps(*inputs, rounds=CLOCK_ROUNDS), step_names(executable))
    return _by_the_clock(_waited(executable, inputs), step_names(executable))


def _waited(executable: AnyExecutable, inputs: Sequence[torch.Tensor]) -> list[float]:
    """Microseconds of each step on a device that this module knows nothing of: what a step writes is waited for."""
    starts: list[int] = []

    def before(step: int) -> None:
        for key in executable.plan.steps[step - 1].outputs if step else ():
            executable.stored(key).flatten()[:1].cpu()
        starts.append(time.perf_counter_ns())

    executable.run_steps(before, *inputs)
    return [(b - a) / 1e3 for a, b in itertools.pairwise(starts)]


def step_names(executable: AnyExecutable) -> list[str]:
    """A name per step that no model chose: the schedule's generator and the primitives."""
    graph = executable.graph
    return [
        f"{s.kernel.schedule.generator}: {'+'.join(graph.nodes[m].prim.value for m in s.members)}"
        for s in executable.plan.steps
    ]


def _by_the_clock(microseconds: Iterable[float], names: Sequence[str]) -> Timeline:
    spans: list[Span] = []
    start = 0.0
    for step, (name, taken) in enumerate(zip(names, microseconds, strict=True)):
        spans.append(Span(name, start, taken, 0, step))
        start += taken
    return Timeline(tuple(spans), "clock")


def _by_events(executable: CudaExecutable) -> Timeline:
    """Each step between two events, enqueued while the device is kept busy."""
    count = len(executable.plan.steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    executable.run_steps(lambda _: None)
    torch.cuda._sleep(_CYCLES_PER_STEP * (count + 1))  # type: ignore[no-untyped-call]
    executable.run_steps(lambda number: events[number].record())
    torch.cuda.synchronize()
    at = [float(events[0].elapsed_time(e)) * 1e3 for e in events]
    names = step_names(executable)
    return Timeline(tuple(Span(names[k], at[k], at[k + 1] - at[k], 0, k) for k in range(count)), "events")


def _profiled(executable: CudaExecutable) -> Timeline | None:
    """From CUPTI through torch's profiler; None where it records nothing."""

    def marked() -> None:
        executable.run_steps(lambda _: torch.cuda._sleep(1))  # type: ignore[no-untyped-call]

    try:
        steps = _record(marked)
        replayed = _record(lambda: executable.replay() and None)
    except RuntimeError:
        return None  # another profiler holds the device, or this torch has none
    if not replayed or not any(MARKER in s.name for s in steps):
        return None
    return Timeline(assign(replayed, steps), "profiler")


def assign(replayed: Sequence[Span], marked: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of a replay with their steps, by start; `marked` has a span of `MARKER` before each step."""
    waiting: dict[str, deque[int]] = defaultdict(deque)
    step = -1
    for span in sorted(marked, key=lambda s: s.start_us):
        if MARKER in span.name:
            step += 1
        elif step >= 0:
            waiting[span.name].append(step)
    ordered = sorted(replayed, key=lambda s: s.start_us)
    first = ordered[0].start_us if ordered else 0.0
    found = []
    for span in ordered:
        left = waiting[span.name]
        place = left.popleft() if left else -1
        found.append(replace(span, start_us=span.start_us - first, step=place))
    return tuple(found)


def _record(run: Any) -> list[Span]:
    """Everything that the device did meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the profiler says of itself
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            run()
            torch.cuda.synchronize()
        events = profile.events()
    return [
        Span(str(e.name), float(e.time_range.start), float(e.time_range.end - e.time_range.start), _lane(e))
        for e in events or ()
        if str(e.device_type).endswith("CUDA") and not getattr(e, "is_user_annotation", False)
    ]


def _lane(event: Any) -> int:
    return int(getattr(event, "device_resource_id", 0) or 0)
