"""Is a budget kept? Ten networks, several budgets, an idle and a busy machine; every compilation in a fresh process.

    python -m benchmarks.budget [NAME ...] [--device cpu|cuda] [--budgets 5,15,40] [--loads idle,load]
                                [--lanes N] [--part K/N] [--only CASE,CASE]

Each case is compiled by a process of its own with an empty cache. Its clock is that of `weft.compile` alone, Python's
imports excluded (torch.export takes seconds for its own); without a budget (`--budgets 0`) the time of torch.export is
excluded, too. A budget is kept if the compilation takes at most a tenth of it, or two seconds, more (without one: three
seconds in all). Then the result is compared with the framework's and, on an idle machine, timed beside it. A process
that does not end is killed: that budget is not kept.

The load is one busy process for each core, and on a GPU one that keeps a stream of products running. With `--lanes` so
many cases run side by side, on cores and, with several GPUs, on a GPU of their own. What is not run now is carried
over from the record, so that the whole can be measured in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

import weft
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from benchmarks.models import NETWORKS, load
from weft.api import flat
from weft.kernels.record import CompileRecord
from weft.pipeline.finish import Sample, interleave
from weft.platform.cpu import host_sample

LOADS = ("idle", "load")
AROUND_S = 240.0
"""For what a process does besides compiling, on a busy machine: imports, the network's weights, comparing, timing."""
MARKER = "case: "
SPIN = "while True: pass"
"""What a busy process runs."""


@dataclass(frozen=True)
class Case:
    """One compilation."""

    network: str
    budget_s: float
    load: str

    @property
    def name(self) -> str:
        """How the record calls it."""
        return f"{self.network}/{self.budget_s:g}s/{self.load}"

    @property
    def limit_s(self) -> float:
        """What the compilation may take."""
        return self.budget_s + max(0.1 * self.budget_s, 2.0) if self.budget_s > 0 else 3.0


@dataclass(frozen=True)
class Lane:
    """Where cases run one after another: some cores, and a GPU."""

    cores: tuple[int, ...]
    gpu: int | None
    """None: whichever the environment says."""

    def command(self, *rest: str) -> list[str]:
        """A command on these cores."""
        pinned = shutil.which("taskset")
        return [pinned, "-c", ",".join(map(str, self.cores)), *rest] if pinned else list(rest)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of its processes."""
        chosen = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}
        return {**os.environ, **chosen, "OMP_NUM_THREADS": str(len(self.cores))}


def lanes_of(count: int, device: str) -> list[Lane]:
    """The machine in so many parts."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // count)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return [
        Lane(tuple(cores[k * each : (k + 1) * each]) or tuple(cores), k % gpus if gpus > 1 else None)
        for k in range(count)
    ]


def cases_of(given: argparse.Namespace) -> list[Case]:
    """The cases that this call measures."""
    budgets = [float(x) for x in given.budgets.split(",")]
    every = [Case(*x) for x in itertools.product(given.names, budgets, given.loads.split(","))]
    if given.only:
        wanted = set(given.only.split(","))
        every = [c for c in every if c.name in wanted]
    part, _, parts = given.part.partition("/")
    return every[int(part) - 1 :: int(parts)]


@contextlib.contextmanager
def busy(lane: Lane, device: str) -> Iterator[None]:
    """A busy process for each core of a lane, and on a GPU a stream of products, while the block runs."""
    commands = [lane.command(sys.executable, "-c", SPIN) for _ in lane.cores]
    if device == "cuda":
        commands.append([sys.executable, "-m", "benchmarks.budget", "--burn"])
    processes = [subprocess.Popen(c, env=lane.environ, stdout=subprocess.DEVNULL) for c in commands]
    try:
        if device == "cuda":
            time.sleep(10.0)  # until the products run
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def burn() -> None:
    """Keep the GPU busy until the process is killed."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    while True:
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize()


def compiled_in(case: Case, device: str) -> dict[str, object]:
    """Compile in this process, with an empty cache; what is to be said of it."""
    for name in ("torch.export._trace", "weft.frontends.torch", "scipy.optimize"):
        importlib.import_module(name)  # Python's imports are not what is measured
    make = weft.compile  # the name is resolved at its first use, which imports
    module, given = load(case.network)
    dtype = torch.float16 if device == "cuda" else torch.float32
    module = module.to(device, dtype)
    inputs = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in given]
    with tempfile.TemporaryDirectory(prefix="weft-budget-") as cache, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options = weft.Options(budget_s=case.budget_s, device=device, cache_dir=Path(cache))
        began = time.perf_counter()
        compiled = make(module, inputs, options=options, name=case.network)
        inside_s = time.perf_counter() - began
        record = compiled.record
        sample: Sample = host_sample
        if device == "cuda":
            from weft.platform.cuda.platform import sample_us as sample
        about = _about(case, record, inside_s, [str(w.message) for w in said])
        _tell(about)  # so much is known, whatever takes too long from here on
        with torch.no_grad():
            mine, theirs = flat(compiled(*inputs)), flat(module(*inputs))
            off = max(
                float((a - b).abs().max() / b.abs().max().clamp_min(1e-9)) for a, b in zip(mine, theirs, strict=True)
            )
            if case.load != "idle":  # beside others times are worth nothing
                return {**about, "largest_error": off}
            runs = {"weft": lambda: compiled(*inputs), "eager": lambda: module(*inputs)}
            samples = interleave(runs, rounds=7, seed=1, budget_s=5.0, sample=sample)
    ms = {k: round(statistics.median(v) / 1e3, 4) for k, v in samples.items()}
    return {
        **about,
        "largest_error": off,
        "weft_ms": ms["weft"],
        "peers_ms": {"eager": ms["eager"]},
        "speedup_eager": round(ms["eager"] / ms["weft"], 3),
    }


def _tell(found: dict[str, object]) -> None:
    print(MARKER + json.dumps(found), flush=True)


def _about(case: Case, record: CompileRecord, inside_s: float, said: Sequence[str]) -> dict[str, object]:
    """What is to be said of a compilation when it has ended."""
    stages_s = {s.name: s.seconds for s in record.stages}
    taken_s = inside_s - (stages_s["export"] if case.budget_s <= 0 else 0.0)
    return {
        "inside_s": round(inside_s, 3),
        "stages_s": {name: round(seconds, 3) for name, seconds in stages_s.items()},
        "over_s": round(taken_s - case.budget_s, 3),
        "kept": taken_s <= case.limit_s,
        "plan": record.chosen,
        "tuning": record.tuning,
        "unmeasured": record.unmeasured,
        "wanted": record.wanted,
        "measured_kernels": record.measured,
        "warnings": [text.splitlines()[0][:300] for text in said if "Weft" in text],
    }


def measured(case: Case, lane: Lane, device: str) -> dict[str, object]:
    """One case by a process of its own, which is killed if it does not end."""
    command = lane.command(
        sys.executable, "-m", "benchmarks.budget", "--child", json.dumps(vars(case)), "--device", device
    )
    limit_s = case.limit_s * 2 + AROUND_S
    with busy(lane, device) if case.load == "load" else contextlib.nullcontext():
        try:
            done = subprocess.run(
                command, env=lane.environ, capture_output=True, text=True, timeout=limit_s, check=False
            )
            said, error = done.stdout, f"exit status {done.returncode}: {' '.join(done.stderr[-600:].split())}"
        except subprocess.TimeoutExpired as late:
            given = cast("bytes | str", late.stdout or b"")
            said = given if isinstance(given, str) else given.decode(errors="replace")
            error = f"did not end in {limit_s:.0f} s"
            done = None
    told: list[dict[str, object]] = [
        json.loads(x.removeprefix(MARKER)) for x in said.splitlines() if x.startswith(MARKER)
    ]
    if not told:
        return {"kept": False, "error": error}
    if done is None or done.returncode:  # after it had compiled, with more or less of the budget
        return {**told[-1], "kept": bool(told[-1]["kept"]) and done is None, "error": error}
    return told[-1]


def run_all(cases: Sequence[Case], lanes: Sequence[Lane], device: str, record: Record, left: Left) -> None:
    """Every case that is left, in time, on the next lane that is free; a record as soon as it is there."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    lock = threading.Lock()
    head = record.lines[0]

    def work(lane: Lane) -> None:
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            if not left.begins(case=case.name):
                continue
            found = measured(case, lane, device)
            about = {"record": "case", "suite": "budget", "case": case.name, "device": head["device"]}
            facts = {"commit": head["commit"], "budget_s": case.budget_s, "load": case.load, "cores": len(lane.cores)}
            with lock:
                record.add({**about, **facts, **found})

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summary(lines: Sequence[dict[str, object]]) -> dict[str, object]:
    """The line that closes the record."""
    cases = [x for x in lines if x.get("record") == "case"]
    kept = sum(bool(x.get("kept")) for x in cases)
    over = [float(str(x["over_s"])) for x in cases if "over_s" in x]
    where: dict[str, list[bool]] = {}
    for x in cases:
        where.setdefault(f"{x.get('device', 'unknown')} {x.get('load', 'idle')}", []).append(bool(x.get("kept")))
    return {
        "record": "summary",
        "suite": "budget",
        "total": len(cases),
        "kept": kept,
        "worst_over_s": max(over, default=0.0),
        "by_machine": "; ".join(f"{name}: {sum(found)} of {len(found)}" for name, found in sorted(where.items())),
    }


def main() -> None:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budgets", default="5,15,40")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after so many")
    add_option(parser)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--burn", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.burn:
        burn()
    if given.child:
        _tell(compiled_in(Case(**json.loads(given.child)), given.device))
        return
    cases = cases_of(given)
    record = Record("cpu" if given.device == "cpu" else folder_of_gpu(), "budget")
    left = Left(record, time.perf_counter() + given.seconds, only=given.left)
    run_all(cases, lanes_of(given.lanes, given.device), given.device, record, left)
    record.add(summary(record.lines))
    left.close()


if __name__ == "__main__":
    main()
