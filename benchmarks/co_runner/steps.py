"""Which steps of a plan grow beside a co-runner that does nothing, and what of its presence does it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.co_runner.beside import Served, alone
from benchmarks.co_runner.machine import LIMIT_S, Gpu, timed, wait
from benchmarks.co_runner.plans import recorded
from benchmarks.co_runner.rows import Way, quantile
from benchmarks.co_runner.units import unit_of
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.budget import share
from weft.device.cuda.cubin import usage
from weft.device.cuda.driver import Module, encode_tensor_map
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.cuda.resident import prefer_shared
from weft.generate.bind import CudaDriver
from weft.kernels.colocation import left_beside
from weft.kernels.source import CudaSource
from weft.runtime.budgeted import Budgeted
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease
from weft.sm_budget import SmBudget

PASSES = 15
NAPS = Way("co-runner", 0, duty=0)
"""Of `duty` 0: it looks at the throttle between naps, and draws nothing."""
SPINS = r"""
template <bool NAPS> __device__ void spin(volatile unsigned* stop, float* out) {
  float a[8];
  for (int j = 0; j < 8; ++j) a[j] = threadIdx.x + j;
  while (*stop == 0) {
    if (NAPS) __nanosleep(2000);
    else
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 8; ++j) a[j] = a[j] * 0.999f + 0.5f;
  }
  float s = 0;
  for (int j = 0; j < 8; ++j) s += a[j];
  out[threadIdx.x] = s;
}
extern "C" __global__ void __launch_bounds__(256) spins(volatile unsigned* stop, float* out) { spin<false>(stop, out); }
extern "C" __global__ void __launch_bounds__(256) naps(volatile unsigned* stop, float* out) { spin<true>(stop, out); }
"""


@dataclass(frozen=True, slots=True)
class Guest:
    """Something that stays on the GPU and does no work that counts."""

    name: str
    entry: str
    """`draws`: the co-runner that is measured, of duty 0; else one of `SPINS`."""
    threads: int
    ctas: int = 0
    """0: one on each SM."""
    carve_out: bool = True
    high: bool = False
    """On a stream of the highest priority."""


GUESTS = (
    *(Guest(f"draws{n}", "draws", n) for n in (64, 128, 256)),
    *(Guest(f"{entry}{n}", entry, n) for entry in ("spins", "naps") for n in (32, 128, 256)),
    Guest("naps256 on one SM", "naps", 256, 1),
    Guest("naps256 on 33 SMs", "naps", 256, 33),
    Guest("naps128, default carve-out", "naps", 128, carve_out=False),
    Guest("naps128, highest priority", "naps", 128, high=True),
)


def independent(facts: GpuFacts) -> Budgeted:
    """Loads kernels that wait until the one before has ended: no programmatic dependent launch."""

    def load(path: Path) -> Any:
        module = Module(path)
        found = module.function

        def function(entry: str) -> Any:
            made = found(entry)
            bind = made.bind
            setattr(made, "bind", lambda *given, **named: bind(*given, **{**named, "dependent": False}))  # noqa: B010
            return made

        setattr(module, "function", function)  # noqa: B010
        return module

    return Budgeted(facts, driver=CudaDriver(load, encode_tensor_map))


class Stays:
    """A guest on the GPU while the block runs."""

    def __init__(self, gpu: Gpu, module: Module, guest: Guest, batch: int) -> None:
        self._gpu, self._guest = gpu, guest
        self._stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._out = torch.zeros(256, device="cuda")
        self._stream = gpu.stream(gpu.greatest) if guest.high else gpu.low
        if guest.entry == "draws":
            self._work = gpu.co_runner(unit_of("ffma", guest.threads, batch), gpu.facts.sms)
            return
        function = module.function(guest.entry)
        prefer_shared(function, 100 if guest.carve_out else -1)
        ctas = guest.ctas or gpu.facts.sms
        given = [self._stop.data_ptr(), self._out.data_ptr()]
        self._launch = function.bind((ctas, 1, 1), (guest.threads, 1, 1), given)

    def __enter__(self) -> None:
        if self._guest.entry == "draws":
            self._ended = self._gpu.begin(self._work, NAPS)
            return
        torch.cuda.synchronize()
        self._launch.launch(self._stream.cuda_stream)
        self._ended = timed()
        self._ended.record(self._stream)
        time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        if self._guest.entry == "draws":
            self._gpu.stop()
        else:
            api = driver_api()
            on = api.CUstream(self._gpu.copies.cuda_stream)
            call(api.cuStreamWriteValue32, on, self._stop.data_ptr(), 1, 0)
        wait(self._ended, LIMIT_S)
        torch.cuda.synchronize()


def step_us(gpu: Gpu, executable: CudaExecutable) -> list[float]:
    """Median microseconds of each step by itself, an event between it and the next."""
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    api, found = driver_api(), []
    for _ in range(PASSES + 1):
        gate.zero_()
        events = [timed() for _ in range(len(executable.plan.steps) + 1)]
        with torch.cuda.stream(gpu.high):
            call(api.cuStreamWaitValue32, api.CUstream(gpu.high.cuda_stream), gate.data_ptr(), 1, 0)
            executable.run_steps(lambda number, events=events: events[number].record(gpu.high))  # type: ignore[misc]
        gate.fill_(1)
        wait(events[-1])
        found.append([float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(events)])
    return [statistics.median(x) for x in zip(*found[1:], strict=True)]


def residents(executable: CudaExecutable, facts: GpuFacts, takes: Sequence[SmBudget]) -> Iterator[dict[str, Any]]:
    """Of each step: its launches, what a CTA takes, how many are resident on a whole SM and beside each."""
    whole = facts.whole
    every = SmBudget(whole.registers_per_sm, whole.shared_per_sm, whole.threads_per_sm, whole.blocks_per_sm)
    for number, step in enumerate(executable.plan.steps):
        source = step.kernel
        if not isinstance(source, CudaSource):
            continue
        taken = usage(Path(executable.linked.objects[source.sha256]).read_bytes())
        for launch in source.launches:
            left = [left_beside(every, x) for x in takes]
            there = [whole, *(whole.within(x) for x in left if isinstance(x, SmBudget))]
            cta = share(launch, taken[launch.entry], whole).of_a_cta
            many = replace_grid(launch)
            yield {
                "step": number, "entry": launch.entry, "schedule": str(source.schedule), "grid": list(launch.grid),
                "block": list(launch.block), "cluster": list(launch.cluster), "dependent": launch.dependent,
                "co_resident": launch.co_resident, "registers": taken[launch.entry].registers, "cta": str(cta),
                "resident": [share(many, taken[launch.entry], f).resident for f in there],
            }  # fmt: skip


def replace_grid(launch: Any) -> Any:
    """The launch with so many CTAs that all that find room are resident."""
    return replace(launch, grid=(1 << 20, 1, 1), cluster=(1, 1, 1))


def diagnose(
    gpu: Gpu,
    nvrtc: Nvrtc,
    found: CudaExecutable,
    inputs: Sequence[torch.Tensor],
    budget: SmBudget,
    batch: int,
    held: ExitStack,
) -> Iterator[dict[str, Any]]:
    """Whole plans with and without PDL beside each guest, then each step by itself beside some."""
    module = Module(nvrtc.compile(SPINS, arch=gpu.facts.arch).path)
    held.callback(module.unload)
    facts = gpu.facts.within(budget)
    plain = recorded(found, [gpu.high], gpu.facts, budget)
    apart = CudaExecutable(
        found.linked, device=found.device, lease=Lease(found.device, [gpu.high]), budgeted=independent(facts)
    )
    served = {"dependent": Served(plain, gpu.high, inputs), "independent": Served(apart, gpu.high, inputs)}
    base = {k: quantile(alone(s, 200).us, 0.5) for k, s in served.items()}
    yield {"way": "presence", "guest": "none", **{f"{k}_us": round(v, 2) for k, v in base.items()},
           "lanes": plain.order.width, "steps": len(plain.plan.steps)}  # fmt: skip
    for guest in GUESTS:
        stays = Stays(gpu, module, guest, batch)
        row: dict[str, Any] = {"way": "presence", "guest": guest.name}
        with stays:
            try:
                for k, s in served.items():
                    middle = quantile(alone(s, 100).us, 0.5)
                    row |= {f"{k}_us": round(middle, 2), f"{k}_ratio": round(middle / base[k], 3)}
            except TimeoutError as error:
                row["failed"] = str(error)
        yield row
    times: Mapping[str, list[float]] = {"none": step_us(gpu, plain)}
    columns = dict(times)
    for guest in (*GUESTS[:3], GUESTS[8], GUESTS[9]):
        with Stays(gpu, module, guest, batch):
            columns[guest.name] = step_us(gpu, plain)
    takes = [gpu.co_runner(unit_of("ffma", n, batch), gpu.facts.sms).takes for n in (64, 128, 256)]
    for about in residents(plain, gpu.facts, takes):
        number = about["step"]
        yield {"way": "step", **about, "us": {k: round(v[number], 2) for k, v in columns.items()}}
    yield {"way": "step", "step": "sum", "us": {k: round(sum(v), 1) for k, v in columns.items()}}
