"""The first query beside a co-runner, with and without what is done before it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from benchmarks.co_runner.machine import CoRunner, Gpu, wait
from benchmarks.co_runner.plans import recorded, without
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.facts import GpuFacts
from weft.runtime.cuda_executable import CudaExecutable
from weft.sm_budget import SmBudget

QUERIES = 4
"""Of a trial: the first, and those behind it."""
BLOCKED_S = 0.3
"""After which a query that has not ended waits for the co-runner's end."""
WARM = 20


@dataclass(frozen=True, slots=True)
class Steps:
    """What is done before the first query; kernels are loaded and run once by the recording of every plan."""

    carve_out: bool = True
    upload: bool = True
    warm: bool = False
    """The graph was launched so many times before the co-runner began."""


STEPS: Mapping[str, Steps] = MappingProxyType(
    {
        "all": Steps(),
        "no-upload": Steps(upload=False),
        "no-carve-out": Steps(carve_out=False),
        "none": Steps(carve_out=False, upload=False),
        "warm": Steps(warm=True),
    }
)


@dataclass(frozen=True, slots=True)
class First:
    """One trial, in microseconds."""

    us: tuple[float, ...]
    """Of each query, from when the stream could begin: the host had put all of them on it before."""
    host_us: float
    """Of the first one of a second trial, from the host's call on an idle stream to its end."""
    blocked: bool
    """The first query did not end before the co-runner was stopped."""


def trial(
    gpu: Gpu, found: CudaExecutable, facts: GpuFacts, budget: SmBudget, steps: Steps, work: CoRunner | None
) -> First:
    """The first queries of a plan that was just recorded, beside a co-runner or (None) beside nothing."""
    residence = without(carve_out=steps.carve_out, upload=steps.upload)
    stream = gpu.stream(gpu.greatest)
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    us: list[tuple[float, ...]] = []
    host_us, blocked = 0.0, False
    for gated in (True, False):
        executable = recorded(found, [stream], facts, budget, residence)
        with torch.cuda.stream(stream):
            for _ in range(WARM if steps.warm else 0):
                executable.replay()
        torch.cuda.synchronize()
        ended = gpu.begin(work) if work is not None else None
        gate.zero_()
        with torch.cuda.stream(stream):
            if gated:
                api = driver_api()
                call(api.cuStreamWaitValue32, api.CUstream(stream.cuda_stream), gate.data_ptr(), 1, 0)
            began = time.perf_counter()
            mine = [torch.cuda.Event(enable_timing=True) for _ in range(QUERIES + 1)]  # type: ignore[no-untyped-call]
            mine[0].record(stream)
            for k in range(QUERIES if gated else 1):
                executable.replay()
                mine[k + 1].record(stream)
        gate.fill_(1)
        last = mine[QUERIES if gated else 1]
        try:
            wait(last, BLOCKED_S)
        except TimeoutError:
            blocked = True
        if not gated:
            host_us = (time.perf_counter() - began) * 1e6
        gpu.stop()
        if ended is not None:
            gpu.ended(ended)
        wait(last)
        torch.cuda.synchronize()
        if gated:
            us.append(tuple(float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(mine)))
        del executable
        gc.collect()  # before its stream is closed
    return First(us[0], host_us, blocked)
