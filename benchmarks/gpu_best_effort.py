"""Best-effort kernels of our own, each by itself on the whole GPU: verified, then timed.

    python -m benchmarks.gpu_best_effort [--only TEXT,...] [--small] [--rounds 15] [--seconds 480] [--out -] [--dry]

A job runs once over poisoned results and is compared with its NumPy reference: all of them, or a sample of rows where
there are many. Then the graph of each stage, and that of the job where it has several, is replayed: two replays that
do not count, then `--rounds`; medians. A graph holds as many launches as last a few milliseconds. After that the job
runs again from the same inputs, and must leave the same bits. The row of a job or stage says what was estimated, too
(`benchmarks/best_effort/README.md`). `--small` runs the sizes of the tests (for compute-sanitizer), `--dry` compiles
for an H200 without a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy as np

from benchmarks.best_effort.jobs import (
    Array,
    Job,
    Operation,
    Stage,
    difference,
    drawn,
    expected,
    load,
    names,
    sampled,
    word,
)
from benchmarks.best_effort.references import OPERATIONS
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.device.cuda.driver import Bound, Module, primary_context
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, find_nvrtc
from weft.device.cuda.streams import Stream, device_memory, read_back, write
from weft.ir.declined import Declined

SUITE = "best-effort"
DRY = "sm_90a"
GRAPH_US = 4000.0
"""What a graph of launches lasts, about."""
MOST_LAUNCHES = 200


class Machine(Protocol):
    """Where a job is: its buffers and its launches."""

    def put(self, name: str, contents: Array) -> None:
        """Fill a buffer."""

    def get(self, name: str) -> Array:
        """What a buffer holds."""

    def run(self) -> None:
        """All stages once; what fails is raised here."""

    def time_us(self, stages: Sequence[int], rounds: int) -> list[float]:
        """Microseconds of these stages, one sample per round."""

    def resources(self, stage: int) -> Mapping[str, int]:
        """Registers, shared bytes and blocks of a multiprocessor of a stage."""


@final
class Gpu:
    """A job on the GPU of the current context."""

    def __init__(self, job: Job, nvrtc: Nvrtc, arch: str, before: Mapping[str, Array], held: ExitStack) -> None:
        """Compile, load, allocate; `held` frees.

        Raises:
            ToolchainError: a kernel is refused.
            DeviceError: the GPU has too little memory, or fails.
        """
        self._like = dict(before)
        self._address = {name: held.enter_context(device_memory(x.nbytes)) for name, x in before.items()}
        self._stream = Stream()
        held.callback(self._stream.close)
        self._bounds: list[Bound] = []
        self._resources: list[dict[str, int]] = []
        for stage in job.stages:
            cubin = nvrtc.compile(stage.text, arch=arch)
            module = Module(cubin.path)
            held.callback(module.unload)
            self._constants(module, stage)
            told = stage.manifest
            function = module.function(told.entry)
            words = [word(p) if p.kind == "scalar" else self._address[p.buffer] for p in told.parameters]
            shared = told.dynamic_shared_bytes
            self._bounds.append(function.bind(told.grid, told.block, words, shared_bytes=shared))
            fits = function.occupancy(told.block, shared)
            self._resources.append({**resources(cubin, stage), "blocks_per_sm": fits})

    @staticmethod
    def _constants(module: Module, stage: Stage) -> None:
        for c in stage.manifest.constants:
            address, size = module.variable(c.name)
            data = drawn(c).tobytes()
            if size != len(data):
                raise ValueError(
                    f"{stage.manifest.path}: constant {c.name} has {len(data)} bytes; {size} in the source"
                )
            write(address, data)

    def put(self, name: str, contents: Array) -> None:
        """Fill a buffer."""
        write(self._address[name], contents.tobytes())

    def get(self, name: str) -> Array:
        """What a buffer holds."""
        like = self._like[name]
        return np.frombuffer(read_back(self._address[name], like.nbytes), like.dtype).reshape(like.shape)

    def run(self) -> None:
        """All stages once."""
        for bound in self._bounds:
            bound.launch(self._stream.handle)
        self._stream.synchronise()

    def time_us(self, stages: Sequence[int], rounds: int) -> list[float]:
        """Microseconds of these stages, one sample per round; two rounds more come first."""

        def once(stream: int) -> None:
            for stage in stages:
                self._bounds[stage].launch(stream)

        self._stream.time_us(once)
        launches = max(1, min(MOST_LAUNCHES, math.ceil(GRAPH_US / max(1.0, self._stream.time_us(once)))))

        def several(stream: int) -> None:
            for _ in range(launches):
                once(stream)

        with self._stream.graph(several) as graph:
            samples = [self._stream.time_us(graph) / launches for _ in range(rounds + 2)]
        return samples[2:]

    def resources(self, stage: int) -> Mapping[str, int]:
        """Registers, shared bytes, blocks of a multiprocessor."""
        return self._resources[stage]


def resources(cubin: CompiledCubin, stage: Stage) -> dict[str, int]:
    """What a thread and a block of a stage take."""
    own = cubin.of(stage.manifest.entry)
    return {"registers": own.registers, "shared_bytes": own.shared_bytes + stage.manifest.dynamic_shared_bytes}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run of a job left, against its reference."""

    compared: int
    """Numbers."""
    wrong: str
    """The first difference; empty: none."""


def verdict(
    job: Job, operation: Operation, before: Mapping[str, Array], after: Callable[[str], Array], *, seed: int = 0
) -> Verdict:
    """Compare a sample of rows of every result (`jobs.sampled`), and those that come whole."""
    rows = sampled(operation, before, seed=seed)
    compared = 0
    for name, want in expected(job, operation, rows, before).items():
        axis = operation.axes.get(name)
        got = after(name) if axis is None else np.take(after(name), rows, axis)
        compared += want.size
        if found := difference(got, want, job.rtol):
            return Verdict(compared, f"{name}: {found}")
    return Verdict(compared, "")


def measured(job: Job, operation: Operation, machine: Machine, before: Mapping[str, Array], rounds: int) -> list[Row]:
    """Rows of a job: one for each stage where it has several, one for the whole.

    Raises:
        ValueError: it is wrong, or another run of it gives other bits.
    """
    for name, contents in before.items():
        machine.put(name, contents)
    machine.run()
    first = {name: machine.get(name).copy() for name in job.written}
    found = verdict(job, operation, before, first.__getitem__)
    if found.wrong:
        raise ValueError(f"wrong result: {found.wrong}")
    groups = [(k,) for k in range(len(job.stages))] if len(job.stages) > 1 else []
    rows = [
        row(job, stages, machine, machine.time_us(stages, rounds), found.compared)
        for stages in [*groups, tuple(range(len(job.stages)))]
    ]
    for name in job.written:
        machine.put(name, before[name])
    machine.run()
    for name, bits in first.items():
        if not np.array_equal(machine.get(name).view(np.uint8), bits.view(np.uint8)):
            raise ValueError(f"{name}: another run leaves other bits")
    return rows


def row(job: Job, stages: Sequence[int], machine: Machine, samples: Sequence[float], compared: int) -> Row:
    """What was seen of these stages of a job."""
    whole = len(stages) == len(job.stages)
    told = [job.stages[k] for k in stages]
    launches: list[Row] = [
        {
            "entry": stage.manifest.entry,
            "grid": list(stage.manifest.grid),
            "block": list(stage.manifest.block),
            **machine.resources(k),
        }
        for k, stage in zip(stages, told, strict=True)
    ]
    return {
        "record": "case",
        "suite": SUITE,
        "case": job.name if whole else f"{job.name}/{told[0].name}",
        "us": round(statistics.median(samples), 2),
        "least_us": round(min(samples), 2),
        "most_us": round(max(samples), 2),
        "rounds": len(samples),
        "estimate_us": sum(float(s.about["estimate_us"]) for s in told),
        "limited_by": max(told, key=lambda s: float(s.about["estimate_us"])).about["limited_by"],
        "compared": compared,
        "rtol": job.rtol,
        "launches": launches,
    }


def chosen(only: str) -> list[str]:
    """Jobs whose name holds one of these texts.

    Raises:
        ValueError: a text that no name holds.
    """
    texts = [t for t in only.split(",") if t]
    for text in texts:
        if not any(text in name for name in names()):
            raise ValueError(f"no job's name holds {text!r}; there are {', '.join(names())}")
    return [n for n in names() if not texts or any(t in n for t in texts)]


def _dry(jobs: Sequence[Job], nvrtc: Nvrtc) -> None:
    for job in jobs:
        for stage in job.stages:
            print(job.name, stage.name, resources(nvrtc.compile(stage.text, arch=DRY), stage), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and record; the exit status is 1 where a job is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name holds one of these texts, by commas")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests; nothing is recorded")
    parser.add_argument("--rounds", type=int, default=15, help="replays that count")
    parser.add_argument("--seconds", type=float, default=480.0, help="no job is begun after so many")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help=f"no GPU: compile for {DRY}")
    add_option(parser)
    given = parser.parse_args(arguments)
    end = time.perf_counter() + given.seconds
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: at least one replay has to count")
    try:
        jobs = [load(name, small=given.small) for name in chosen(given.only)]
    except ValueError as error:
        parser.error(str(error))
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_best_effort: {nvrtc.reason}")
    if given.dry:
        _dry(jobs, nvrtc)
        return
    with primary_context(), ExitStack() as ends:
        arch = gpu_facts(None, calibrate=False).arch
        record = None
        if given.out and not given.small:
            path = None if str(given.out) == "-" else given.out
            record = Record(folder_of_gpu(), SUITE, path=path)
        left = Left(record, end, only=given.left)
        ends.callback(left.close)
        for job in jobs:
            if not left.begins(case=job.name):
                continue
            before = job.buffers()

            def measure(job: Job = job, before: Mapping[str, Array] = before) -> list[Row]:
                with ExitStack() as held:
                    machine = Gpu(job, nvrtc, arch, before, held)
                    return measured(job, OPERATIONS[job.name], machine, before, given.rounds)

            if record is None:
                for line in measure():
                    print(line, flush=True)
                continue
            with record.measuring(case=job.name):
                for line in measure():
                    record.add(line)


if __name__ == "__main__":
    main()
