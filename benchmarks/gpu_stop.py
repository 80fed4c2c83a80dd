"""Stop latency: from when `stop` is raised until the last best-effort block has ended.

    python -m benchmarks.gpu_stop [--what role|co-runner] [--only ffma,b1,...] [--trials 10000] [--seconds 300]
        [--cache DIR] [--out FILE|-]
    python -m benchmarks.gpu_stop --plans DIR --beside resnet50/b1 [--budget 20] ...
    python -m benchmarks.gpu_stop --dry [--cache DIR]

**Roles** (`benchmarks/co_runner/role_stops.py`): a chain of launches of a fused kernel is under way when the host has
`stop` written. LC goes on to the end of the chain; the latency ends with the last block. LC's results are compared with
those alone. A kernel cannot raise it: where fused CTAs fill all SMs, it would wait for one of them to end.

**Co-runners**: in a trial the kernel is launched, works for 20 to 120 µs, and is told to stop: by the host (a write of
the stream, which needs no SM) or by the first node of a graph (a kernel of one thread), both put on a stream beforehand
that waits for a word of the host's memory. An event lies before what raises `stop`, another behind the kernel. With
`--beside` a plan's queries run back to back meanwhile (`DIR` as for `benchmarks.gpu_corunner`).

The work counter goes on from trial to trial: after each all blocks that were drawn must have ended, and at the end
every block must have counted itself once. Blocks are as long as those beside a batch of 1 and of 16
(`benchmarks/co_runner/units.py`).
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from benchmarks.co_runner.beside import AHEAD_QUERIES, Served
from benchmarks.co_runner.machine import GRID, LIMIT_S, MOST_BLOCKS, CoRunner, Gpu, timed
from benchmarks.co_runner.plans import BUDGET, compiled, posed, recorded
from benchmarks.co_runner.role_stops import LCS, RoleCase, RoleStopper, RoleTrials, compile_all
from benchmarks.co_runner.rows import BATCHES, MODELS, exact, lost_or_doubled, quantile, wanted
from benchmarks.co_runner.units import USUAL, co_runner, unit_of
from benchmarks.gpu_corunner import budget_of, known
from benchmarks.gpu_pairs import Loader
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.colocate.gpu import LANES
from weft.device.cuda import streams
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.driver import Bound, Module, primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.resident import prefer_shared
from weft.device.cuda.streams import Stream
from weft.ir.declined import Declined
from weft.kernels.colocation import BYTES, WorkCounter
from weft.sm_budget import SmBudget

SUITE = "colocate-stop"
THREADS = (64, 128, 256)
RAISERS = ("host", "graph")
WORKS_US = (20.0, 120.0)
"""For how long a trial works before it is told to stop: from, to."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
RAISE = 'extern "C" __global__ void raise_stop(unsigned* stop) { *(volatile unsigned*)stop = 1u; }\n'


@dataclass(frozen=True, slots=True)
class Case:
    """What is started and stopped."""

    kind: str
    batch: int
    threads: int
    raiser: str

    def __str__(self) -> str:
        return f"{self.kind}/b{self.batch}/{self.threads}/{self.raiser}"


def cases(only: Sequence[str]) -> list[Case]:
    """All whose name holds one of the texts; none: all."""
    every = [Case(k, b, n, r) for k in USUAL for b in BATCHES for n in THREADS for r in RAISERS]
    return [c for c in every if wanted(str(c), only)]


def role_cases(only: Sequence[str]) -> list[RoleCase]:
    """All of roles whose name holds one of the texts; none: all."""
    every = [RoleCase(k, b, lc) for k in USUAL for b in BATCHES for lc in LCS[b]]
    return [c for c in every if wanted(str(c), only)]


@dataclass(frozen=True, slots=True)
class Trials:
    """Latencies in microseconds, and what the counter said at the end."""

    us: list[float]
    """By events: from before what raises `stop` to the end of the kernel."""
    host_us: list[float]
    """By the host's clock: from its write to when it saw the end."""
    finished: int
    block_us: float
    """Of a block of a CTA in these trials, draws and naps included."""


def row_of(case: str, found: Trials) -> Row:
    """p50, p99 and the distribution."""
    return {
        "record": "case", "suite": SUITE, "case": case, "trials": len(found.us),
        "p50_us": round(quantile(found.us, 0.5), 2), "p99_us": round(quantile(found.us, 0.99), 2),
        "quantiles_us": {f"{q:g}": round(quantile(found.us, q), 2) for q in QUANTILES},
        "host_p50_us": round(quantile(found.host_us, 0.5), 2), "host_p99_us": round(quantile(found.host_us, 0.99), 2),
        "blocks": found.finished, "block_us": round(found.block_us, 2), "lost_or_doubled": 0,
    }  # fmt: skip


def role_row_of(case: str, found: RoleTrials, told: dict[str, object]) -> Row:
    """The same of roles; what was measured, and by how much a latency may be too long."""
    trials = Trials(found.us, found.host_us, found.finished, found.worked_us / max(1, found.finished))
    more = {"missed": found.missed, "clock_us": round(quantile(found.clock_us, 0.99), 2)}
    return {**row_of(case, trials), "what": "role", **more, **told}


@final
class Stopper:
    """Starts and stops co-runners."""

    def __init__(self, gpu: Gpu, nvrtc: Nvrtc, held: ExitStack, served: Served | None = None) -> None:
        self.gpu, self.served = gpu, served
        self._asked: list[torch.cuda.Event] = []
        """Ends of queries that may still run."""
        self._raiser = gpu.stream(gpu.greatest)
        self._gate = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._said = self._gate.numpy()
        module = Module(nvrtc.compile(RAISE, arch=gpu.facts.arch).path)
        held.callback(module.unload)
        function = module.function("raise_stop")
        prefer_shared(function)
        self._stop = gpu.counter.data_ptr() + WorkCounter.offset("stop")
        kernel: Bound = function.bind((1, 1, 1), (1, 1, 1), [self._stop])
        graphs = Stream(self._raiser.cuda_stream)
        held.callback(graphs.close)
        self._graph = held.enter_context(graphs.graph(kernel.launch))

    def _write(self, value: int, stream: torch.cuda.Stream) -> None:
        api = driver_api()
        call(api.cuStreamWriteValue32, api.CUstream(stream.cuda_stream), self._stop, value, 0)

    def _ask(self) -> None:
        """Keep queries on their stream."""
        if self.served is None:
            return
        self._asked = [x for x in self._asked if not x.query()]
        while len(self._asked) < AHEAD_QUERIES:
            self.served.query()
            self._asked.append(timed())
            self._asked[-1].record(self.served.stream)

    def _raised(self, by: str) -> Callable[[], None]:
        if by == "graph":
            return lambda: self._graph(self._raiser.cuda_stream)
        return lambda: self._write(1, self._raiser)

    def run(self, work: CoRunner, by: str, trials: int, end: float) -> Trials:
        """So many starts and stops, or as many as there is time for.

        Raises:
            TimeoutError: a co-runner does not stop.
            ValueError: a block was lost or ran twice.
        """
        gpu, api, chance = self.gpu, driver_api(), random.Random(1)
        raised = self._raised(by)
        counter = replace(WorkCounter.start([GRID], MOST_BLOCKS), stop=1)
        streams.write(gpu.counter.data_ptr(), counter.pack())
        gpu.ran.zero_()
        torch.cuda.synchronize()
        us: list[float] = []
        host_us: list[float] = []
        ran_us = 0.0
        first, last, begun = timed(), timed(), timed()
        gc.disable()
        try:
            for number in range(1, trials + 1):
                if time.perf_counter() > end and us:
                    break
                self._said[0] = 0
                call(api.cuStreamWaitValue32, api.CUstream(self._raiser.cuda_stream), self._gate.data_ptr(), 1, 0)
                first.record(self._raiser)
                raised()
                self._write(0, gpu.low)
                begun.record(gpu.low)
                work.launch(gpu.low.cuda_stream)
                last.record(gpu.low)
                self._ask()
                until = time.perf_counter() + chance.uniform(*WORKS_US) / 1e6
                while time.perf_counter() < until:
                    pass
                said = time.perf_counter()
                self._said[0] = 1
                while not last.query():
                    if time.perf_counter() > said + LIMIT_S:
                        raise TimeoutError(f"trial {number}: it has not stopped after {LIMIT_S:g} s")
                host_us.append((time.perf_counter() - said) * 1e6)
                us.append(float(first.elapsed_time(last)) * 1e3)
                ran_us += float(begun.elapsed_time(last)) * 1e3
                after = WorkCounter.unpack(streams.read_back(gpu.counter.data_ptr(), BYTES))
                if wrong := exact(counter, after):
                    raise ValueError(f"trial {number}: {wrong}")
                counter = after
        finally:
            gc.enable()
            self._said[0] = 1
            self._write(1, gpu.copies)
            torch.cuda.synchronize()
        if wrong := lost_or_doubled(gpu.ran.tolist(), counter.finished):
            raise ValueError(wrong)
        if self.served is not None:
            self.served.right()
        return Trials(us, host_us, counter.finished, ran_us * work.ctas / max(1, counter.finished))


def dry(asked: Sequence[Case], roles: Sequence[RoleCase], cache: Path | None) -> None:
    """Compile all for an H200."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_stop: {nvrtc.reason}")
    print("raise_stop", nvrtc.compile(RAISE, arch="sm_90a").of("raise_stop"))
    for unit in dict.fromkeys(unit_of(c.kind, c.threads, c.batch) for c in asked):
        source = co_runner(unit, GpuFacts().sms, GpuFacts())
        print(unit, nvrtc.compile(source.text, arch="sm_90a", flags=source.flags).of(source.entry), flush=True)
    with ExitStack() as held:
        for case, found in compile_all(Loader(nvrtc, "sm_90a", held, cache), roles, profile("h200")).items():
            print(case, found, flush=True)


def served_by(gpu: Gpu, chosen: argparse.Namespace, budget: SmBudget) -> Served | None:
    """The plan whose queries run meanwhile."""
    if not chosen.beside:
        return None
    name, _, batch = chosen.beside.partition("/b")
    model = posed(name, int(batch))
    found = compiled(model, budget, chosen.plans, chosen.budget)
    lanes = [gpu.high, *(gpu.stream(gpu.greatest) for _ in range(LANES - 1))]
    return Served(recorded(found, lanes, gpu.facts, budget), gpu.high, model.inputs)


def measure(
    chosen: argparse.Namespace, asked: Sequence[Case], roles: Sequence[RoleCase], record: Record | None, turns: Left
) -> None:
    """All cases that have no row yet."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_stop: {nvrtc.reason}")
    torch.zeros(1, device="cuda")
    with primary_context(), ExitStack() as held:
        gpu = Gpu(gpu_facts(None, calibrate=False), nvrtc, held)

        def row(name: str, found: Callable[[], Row]) -> None:
            """Measured, unless it is known or there is no time."""
            if not chosen.again and known(record, name):
                return
            if not turns.begins(case=name):
                return
            if record is None:
                print(found(), flush=True)
            else:
                with record.measuring(case=name):
                    record.add(found())

        if left := [c for c in roles if chosen.again or not known(record, str(c))]:
            stop_roles(gpu, held, chosen, left, row, turns.until)
        if asked:
            stop_co_runners(gpu, held, chosen, asked, row, turns.until)


Measured = Callable[[str, Callable[[], Row]], None]
"""Takes the name of a case, and what measures it."""


def stop_roles(
    gpu: Gpu, held: ExitStack, chosen: argparse.Namespace, asked: Sequence[RoleCase], row: Measured, end: float
) -> None:
    """All cases of roles."""
    stopper = RoleStopper(gpu, held, chosen.cache)
    stopper.prepare(asked)
    for case in asked:
        row(str(case), lambda c=case: role_row_of(str(c), *stopper.run(c, chosen.trials, end)))  # type: ignore[misc]


def stop_co_runners(
    gpu: Gpu, held: ExitStack, chosen: argparse.Namespace, asked: Sequence[Case], row: Measured, end: float
) -> None:
    """All cases of co-runners."""
    served = [served_by(gpu, chosen, budget_of(chosen.sm_budget))]
    held.callback(gc.collect)
    held.callback(served.clear)
    stopper = Stopper(gpu, gpu.nvrtc, held, served[0])
    for case in asked:
        name = f"{case}/{chosen.beside.replace('/', '-')}" if chosen.beside else str(case)

        def one(case: Case = case, name: str = name) -> Row:
            work = gpu.co_runner(unit_of(case.kind, case.threads, case.batch), gpu.facts.sms)
            return row_of(name, stopper.run(work, case.raiser, chosen.trials, end))

        row(name, one)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and record; the exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("role", "co-runner", "both"), default="both", help="what is told to stop")
    parser.add_argument("--only", default="", help="cases, or parts of them between slashes, by commas")
    parser.add_argument("--trials", type=int, default=10_000, help="starts and stops of a case")
    parser.add_argument("--again", action="store_true", help="cases that have a row of this commit, too")
    parser.add_argument("--beside", default="", metavar="MODEL/bN", help="a plan whose queries run meanwhile")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="where it was compiled")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning of a plan, as it was prepared")
    parser.add_argument("--sm-budget", default=BUDGET, help="what a plan may take of each SM")
    parser.add_argument("--seconds", type=float, default=300.0, help="no case is begun after so many")
    parser.add_argument("--cache", type=Path, help="folder of the fused kernels' cubins; `--dry` fills it beforehand")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90a")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    only = [x for x in chosen.only.split(",") if x]
    asked = cases(only) if chosen.what != "role" else []
    roles = role_cases(only) if chosen.what != "co-runner" and not chosen.beside else []
    if not asked and not roles:
        parser.error(f"--only {chosen.only}: no case is named so")
    if chosen.trials < 1:
        parser.error("--trials: at least 1")
    if chosen.beside:
        if chosen.beside not in {f"{m}/b{b}" for m in MODELS for b in BATCHES}:
            parser.error(f"--beside {chosen.beside}: a model and a batch such as resnet50/b1")
        if chosen.plans is None:
            parser.error("--beside needs --plans")
    try:
        budget_of(chosen.sm_budget)
    except ValueError as error:
        parser.error(str(error))
    if chosen.dry:
        dry(asked, roles, chosen.cache)
        return
    end = time.perf_counter() + chosen.seconds
    with ExitStack() as ends:
        record = None
        if chosen.out:
            record = Record(folder_of_gpu(), SUITE, path=None if str(chosen.out) == "-" else chosen.out)
        left = Left(record, end, only=chosen.left)
        ends.callback(left.close)
        measure(chosen, asked, roles, record, left)


if __name__ == "__main__":
    main()
