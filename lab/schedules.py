"""Every schedule of a problem on an NVIDIA GPU: compared with float64, then timed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from benchmarks.harness.gpu_time import median_us

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

LAUNCHES, ROUNDS = 20, 7


def drawn_indices(count: int, rows: int, *, skewed: bool) -> torch.Tensor:
    """(count,) of i64 below `rows`, on the GPU: drawn evenly, or half of them name one row."""
    index = torch.randint(rows, (count,), device="cuda")
    if skewed:
        index[torch.randperm(count, device="cuda")[: count // 2]] = 7
    return index


@dataclass
class Found:
    """By schedule: microseconds measured of those that are right, modelled of all; what is wrong."""

    us: dict[str, float] = field(default_factory=dict)
    modelled: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def best_us(self) -> float:
        """NaN where none was right."""
        return min(self.us.values(), default=math.nan)

    def tell(self, case: str, others: Mapping[str, float]) -> None:
        """Print a line of JSON; `others`: what stands beside it."""
        line = {"best_us": self.best_us, **others, "us": self.us, "modelled": self.modelled, "wrong": self.wrong}
        print(json.dumps({"record": "case", "case": case, **line}), flush=True)


def measured(
    problem: Problem,
    facts: GpuFacts,
    nvrtc: Nvrtc,
    inputs: Sequence[torch.Tensor],
    outputs: Callable[[], Sequence[torch.Tensor]],
    errors: Callable[[Sequence[torch.Tensor]], Sequence[float]],
    limits: Sequence[float],
) -> Found:
    """Medians of replayed CUDA graphs. `outputs` makes what is written, `errors` of that are within the `limits`."""
    found, generator = Found(), CudaGenerator()
    schedules = generator.schedules(problem, facts)
    for s in [] if isinstance(schedules, Declined) else schedules:
        source = generator.emit(problem, s)
        assert isinstance(source, CudaSource), source
        (cubin,) = nvrtc.compile_many([CompileJob(source.text, facts.arch, source.flags)])
        assert isinstance(cubin, CompiledCubin), cubin
        outs = outputs()
        room = torch.empty(max(source.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        addresses = Addresses([x.data_ptr() for x in inputs], [x.data_ptr() for x in outs], [], room.data_ptr(), 0)
        bound = BoundCuda(source, cubin.path).prepare(addresses)
        took = median_us(lambda b=bound: b(torch.cuda.current_stream().cuda_stream), launches=LAUNCHES, rounds=ROUNDS)  # type: ignore[misc]
        off = list(errors(outs))
        found.modelled[str(s)] = round(predicted_us(problem, s, facts) or 0.0, 1)
        if all(x <= limit for x, limit in zip(off, limits, strict=True)):
            found.us[str(s)] = round(took, 2)
        else:
            found.wrong.append(f"{s}: errors {off}")
    return found
