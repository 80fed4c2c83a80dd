"""Training steps in bf16 autocast on an NVIDIA GPU: Weft against eager in a CUDA graph and torch.compile.

    python -m benchmarks.gpu_training [--only WORD,WORD] [--who weft,eager,inductor,autotune] [--again WHO,WHO]
                                      [--budget S] [--limit S] [--seconds S] [--free] [--warm] [--profile]
                                      [--steps N] [--out -|FILE]
    python -m benchmarks.gpu_training --device cpu --small

A step is forward, loss, backward and optimizer (AdamW, or SGD with momentum) on a batch that lies on the device. Each
contender has a process of its own, which is ended after `--limit` seconds (540): its entry is then that it was not
compiled in time. Peers are recorded into a CUDA graph as a whole, copies of the batch into it included, with fused
optimizers; where that cannot be recorded, `graph` is false. `inductor` is torch.compile by default, `autotune` in mode
max-autotune-no-cudagraphs. Networks of images have channels last everywhere. Products of f32 are not rounded to TF32
by anybody. Peers run deterministic algorithms, as Weft does, unless `--free` lets them choose; `settings` says so.

Beside the time of a step (median of rounds, milliseconds) stand the seconds to the first step, and `memory_bytes`: the
most that the framework keeps from the device over some steps, graphs and weights included; `planned_bytes` of it are
what the plan has for values between its steps. `memory_of` says what of it is in use behind a step, what lies free in
between, and what graphs keep for themselves (results of library calls and what these work with).

Everybody begins with the same weights and says the losses of the first five batches; so does eager in f32 without
autocast. `right`: each loss is no further from that one than twice eager's in bf16, and one last digit of a bf16.
With `--steps 300` Weft and eager also train so many steps over ten batches, from each of five seeds; `trained`: whether
Weft's loss, the mean over the seeds of each one's last 30 steps, is within the range of eager's five.

Entries of a case are kept as they come: what has one is passed over, unless `--again` names it, so that the command can
be given again until nothing is left. `--device cpu --small` runs small forms of three networks, or those of `--only`,
on the processor beside eager, to see that everything works. With `--out -` rows go into the suite's record.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.training import CASES
from benchmarks.harness import own_process
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of
from benchmarks.harness.training_steps import (
    PRELOADED,
    ROUND_S,
    ROUNDS,
    SHOWN,
    SUITE,
    WARM,
    Placed,
    Step,
    by_peer,
    by_weft,
    case_row,
    kernels_seen,
    summary,
)
from weft.runtime.cuda_executable import CudaExecutable
from weft.training import Step as CompiledStep

WHO = ("weft", "eager", "inductor", "autotune")
_CONTEXT = multiprocessing.get_context("forkserver")


# --- in a process of its own


def timed(step: Step, batch: Sequence[torch.Tensor], device: str, rounds: int) -> list[float]:
    """Milliseconds of a step, a sample for each of the rounds."""

    def sample(count: int) -> float:
        if device == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                step(*batch)
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            step(*batch)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    if device == "cuda":
        sample(WARM)
    count = 1 if device == "cpu" else max(1, math.ceil(ROUND_S * 1e3 / max(sample(1), 1e-3)))
    return [sample(count) / count for _ in range(rounds)]


def memory_bytes(step: Step, batch: Sequence[torch.Tensor]) -> int:
    """The most that the framework keeps from the GPU over some steps."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        step(*batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def memory_of() -> Row:
    """What the framework keeps from the GPU now, in bytes: in use, free in between, and in pools of graphs."""
    found = {"in_use": 0, "free": 0, "graphs": 0}
    for segment in torch.cuda.memory_snapshot():
        size, used = segment["total_size"], segment["allocated_size"]
        if tuple(segment["segment_pool_id"]) == (0, 0):
            found["in_use"] += used
            found["free"] += size - used
        else:
            found["graphs"] += size
    return dict(found)


def measured(name: str, who: str, given: Mapping[str, Any]) -> Row:
    """The entry of one contender, made in this process."""
    case, device, small = CASES[name], str(given["device"]), bool(given["small"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = who != "weft"  # peers may try; plans of Weft take what the heuristic names
    if who != "weft" and not given["free"]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    began = time.perf_counter()
    placed = Placed(case, device, small=small, fused=who != "weft")
    step, row = by_weft(placed, given["budget"], warm=given["warm"]) if who == "weft" else by_peer(placed, who)
    batch = placed.batch(0)
    step(*batch)
    if device == "cuda":
        torch.cuda.synchronize()
    row["first_step_s"] = round(time.perf_counter() - began, 1)
    row["losses"] = placed.losses(step)
    samples = timed(step, batch, device, given["rounds"])
    row["ms"] = round(statistics.median(samples), 4)
    row["samples_ms"] = [round(x, 4) for x in samples]
    if device == "cuda":
        row["memory_bytes"] = memory_bytes(step, batch)
        row["memory_of"] = memory_of()
        if isinstance(step, CompiledStep) and isinstance(step.compilation.run, CudaExecutable):
            row["planned_bytes"] = step.compilation.run.memory.arena_bytes
        if given["profile"]:
            row.update(kernels_seen(step, batch))
    if given["steps"] and who in ("weft", "eager"):
        row["trained"] = placed.trained(step, given["steps"])
    if who == "eager":
        row["losses_f32"] = placed.losses(placed.loop(placed.loss, autocast=False))
    return row


# --- the record


def wanted(
    cases: Sequence[str], who: Sequence[str], again: Sequence[str], known: Mapping[str, Row], src: object = None
) -> list[tuple[str, str]]:
    """Entries to be measured now: (case, contender). `src`: entries of Weft's are those of these sources alone."""

    def left(case: str, contender: str) -> bool:
        runs = known.get(case, {}).get("runs", {})
        if contender in again or "all" in again or not isinstance(runs, dict) or contender not in runs:
            return True
        return src is not None and contender == "weft" and runs[contender].get("src") != src

    return [(c, w) for c in cases for w in who if left(c, w)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is left, and say what came of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, by commas")
    parser.add_argument("--who", default="", help=f"of {','.join(WHO)}; on a processor weft,eager")
    parser.add_argument("--again", default="", help="contenders to be measured once more, by commas, or `all`")
    parser.add_argument("--budget", type=float, default=-1.0, help="of Weft's search, in seconds (120; small 0)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that a contender may take (540)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="none is begun after so many")
    parser.add_argument("--rounds", type=int, default=0, help=f"samples of each time ({ROUNDS}; small 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small forms of the networks")
    parser.add_argument("--free", action="store_true", help="peers may take algorithms that are not deterministic")
    parser.add_argument("--profile", action="store_true", help="also what the framework's profiler sees of a step")
    parser.add_argument("--steps", type=int, default=0, help="train so many, too, and compare the losses at their end")
    parser.add_argument("--warm", action="store_true", help="compile once more from the tuning database")
    parser.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    add_option(parser)
    given = parser.parse_args(arguments)
    who = [x for x in given.who.split(",") if x] or list(WHO if given.device == "cuda" else WHO[:2])
    if unknown := set(who) - set(WHO):
        parser.error(f"--who: {', '.join(sorted(unknown))} is none of {', '.join(WHO)}")
    only = given.only or (",".join(SHOWN) if given.small else "")
    cases = [c for c in CASES if any(word in c for word in only.split(","))]
    if given.small:  # of one network all have one small form
        cases = list({c.partition("/")[0]: c for c in reversed(cases)}.values())[::-1]
    if not cases:
        parser.error(f"--only: no case has {given.only} in its name")
    settings: dict[str, Any] = {
        "device": given.device, "small": given.small, "free": given.free, "warm": given.warm,
        "profile": given.profile, "steps": given.steps,
        "rounds": given.rounds or (2 if given.small else ROUNDS),
        "limit": given.limit, "budget": given.budget if given.budget >= 0 else 0.0 if given.small else 120.0,
    }  # fmt: skip
    end = time.perf_counter() + given.seconds
    _CONTEXT.set_forkserver_preload(list(PRELOADED))
    folder = folder_of(given.device, _CONTEXT)
    if not folder:
        sys.exit("benchmarks.gpu_training: torch sees no NVIDIA GPU; `--device cpu --small` runs on the processor")
    with tempfile.TemporaryDirectory(prefix="weft-training-") as temporary:
        log = Path(temporary) / "log.txt"
        path = None if given.out == Path("-") else given.out or Path(temporary) / "record.jsonl"
        record = Record(folder, SUITE, path=path)
        again = [x for x in given.again.split(",") if x]
        src = record.head["src"]
        left = wanted(cases, who, again, record.before(), src if given.left else None)
        turns = Left(record, end, only=given.left)
        shown = {k: settings[k] for k in ("small", "free", "budget", "rounds", "limit", "steps")}
        for name, contender in left:
            if turns.over(f"{name}, {contender}"):
                continue
            known = record.before().get(name, {}).get("runs", {})
            runs: dict[str, Row] = dict(known) if isinstance(known, dict) else {}
            found = own_process.asked(_CONTEXT, measured, (name, contender, settings), settings["limit"], log)
            runs[contender] = {**found, "src": src}
            record.add(case_row(name, runs, shown))
        record.add(summary([r for r in record.cases if "runs" in r]))
    turns.close()


if __name__ == "__main__":
    main()
