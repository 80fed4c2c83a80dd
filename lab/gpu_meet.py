"""Norms of few long rows on an NVIDIA GPU: forms whose blocks meet through memory, and what a meeting costs.

    python -m lab.gpu_meet [TEXT ...] [--seconds 80] [--dry]

For the norms of `benchmarks.cases.memory`: the best forms of the rules, these with results that are stored from where
they are computed, then threads, columns and blocks to a row of meeting blocks, likewise. Of the first of the meeting
blocks also kernels that leave something out, whose results are not looked at: `no-wait` takes what lies in the state as
it is, `no-leave` also leaves it there. Times as in `benchmarks.gpu_memory`: of one of many launches in a graph. A line
per case and form is printed, the fastest first; nothing is recorded. `--dry` writes and compiles without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.cases.memory import Case
from benchmarks.gpu_memory import (
    CASES,
    TOLERANCE,
    Bench,
    Kernel,
    Prepared,
    medians,
    moved_bytes,
    sample,
    short,
    timed,
)
from benchmarks.gpu_memory import prepare as prepare_kernels

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.errors import WeftError
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.scatter import scatter
from weft.generate.cuda.loops.split import long_reductions
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule

RULES = 5
SHARES = (64 << 10, 32 << 10, 128 << 10)
"""Bytes of a block where there is more than enough for all."""
ROOMS = (96 << 10, 66 << 10, 48 << 10)
"""Bytes of a block that waits in shared memory."""
LEFT_OUT = {
    "no-wait": (
        ("#define W_PATIENCE 64", "#define W_PATIENCE 1"),
        ("    if (missing != GROUP) w_least", "    if (0) w_least"),
    ),
    "no-leave": (
        ("      w_leave<", "      if (0) w_leave<"),
        ("THREADS - 32 ? w_count(departed, GROUP)", "THREADS ? 1u"),
    ),
}


@dataclass(frozen=True)
class Made:
    """Kernels of one case; those of `broken` only for their time."""

    prepared: Prepared
    broken: tuple[tuple[str, CudaSource, str], ...]

    def label(self, source: CudaSource) -> str:
        """What tells a kernel from the others."""
        last = source.launches[-1]
        return f"{short(source)} blocks={last.grid[0]} registers={self.prepared.registers[source.entry]}"


def forms_of(problem: Problem, facts: GpuFacts) -> list[Form]:
    """Of meeting blocks: what the threads of a block own, and how many blocks share it."""
    graph = problem.graph
    long = long_reductions(graph)[0]
    operand, rows = graph.type_of(graph.nodes[long].inputs[0]), graph.type_of(long).size
    stored = operand.size * 2
    beside = any(f.name == "LAST" for f in problem.input_formats)
    run = operand.rank > 4
    found = []
    large = stored > facts.sms << 16
    for threads, share in itertools.product((256, 128), ROOMS if large and beside and not run else ()):
        blocks = math.ceil(operand.shape[-1] * operand.shape[-2] / (share // 64))
        found.append(Form(threads, columns=4, single_pass=True, cross_cta=max(2, blocks), smem_stash=True))
    for threads in (256, 128, 512):
        for columns in ((4, 8) if run else (4, 2)) if beside else (0,):
            every = 1 if not beside else columns * (1 if run else 8)
            groups = max(1, rows // every)
            for blocks in (max(2, round(stored / s / groups)) for s in (SHARES if large else [stored // facts.sms])):
                if every <= 32 and blocks <= facts.sms and blocks * every * 8 <= 1 << 16:
                    per_row = 0 if beside else threads
                    found.append(Form(threads, columns=columns, per_row=per_row, single_pass=True, cross_cta=blocks))
    return found


def outwards(problem: Problem, facts: GpuFacts, most: int) -> list[Schedule]:
    """Forms that store from where they compute, where a problem has pads or resizes; then all others."""
    forms = forms_of(problem, facts)[:most]
    if scatter(problem) is None:
        return [form.schedule() for form in forms]
    schedules = CudaGenerator().schedules(problem, facts)
    ruled = [] if isinstance(schedules, Declined) else [Form.of(s) for s in schedules[:RULES]]
    return [replace(form, scatter=True).schedule() for form in [*ruled, *forms]]


def prepare(case: Case, cache: str, most: int) -> Made | str:
    """Kernels of rules and of so many forms, and what is left out of one; a text says what failed."""
    facts = GpuFacts()
    made = prepare_kernels(case, facts, RULES, cache, lambda p, f: outwards(p, f, most))
    nvrtc = find_nvrtc()
    if isinstance(made, str):
        return made
    if isinstance(nvrtc, Declined):
        return nvrtc.reason
    broken = []
    whole = next((s for s, _ in made.kernels if "w_meet<" in s.text), None)
    text = "" if whole is None else whole.text
    try:
        for name, changes in LEFT_OUT.items():
            if whole is None:
                break
            for old, new in changes:
                assert old in text, old
                text = text.replace(old, new)
            compiled = nvrtc.compile(text, arch=facts.arch, flags=whole.flags, cache_dir=Path(cache))
            broken.append((name, replace(whole, text=text), str(compiled.path)))
    except (AssertionError, WeftError) as error:  # one case must not stop the others
        return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
    return Made(made, tuple(broken))


def measure(case: Case, made: Made, bench: Bench) -> None:
    """Verify and time every kernel; prints them."""
    given = sample(case, "cuda")
    one = made.prepared
    tensors = bench.tensors(one, given)
    with torch.no_grad():
        exact = case.function(*(x.float() if x.is_floating_point() else x for x in given))
    moved = moved_bytes(case, one.problem)
    launches = bench.launches(moved)
    samplers: dict[str, Callable[[], float]] = {}
    alive = []  # graphs do not hold what their kernels work on
    for source, cubin in one.kernels:
        label = made.label(source)
        try:
            alive.append(kernel := Kernel(one, source, cubin, [tensors]))
            error = kernel.error(exact)
            if not error < TOLERANCE:
                print(f"WRONG {case.name} {label}: error {error:.2g}", flush=True)
                continue
            samplers[label] = timed(kernel.run, launches)
        except (WeftError, RuntimeError) as failure:
            print(f"FAILED {case.name} {label}: {str(failure).splitlines()[0][:200]}", flush=True)
    del exact
    for name, source, cubin in made.broken:
        alive.append(Kernel(one, source, cubin, [tensors]))
        samplers[f"{short(source)} {name}"] = timed(alive[-1].run, launches)
    times = medians(samplers, 5)
    law = moved / bench.facts.bandwidth_at(moved) / 1e3
    print(f"{case.name}: {moved / 1e6:.2f} MB, a copy takes {law:.2f} us")
    for label, us in sorted(times.items(), key=lambda x: x[1]):
        print(f"  {us:8.3f} {law / us:5.2f} {label}", flush=True)


def main() -> None:
    """Prepare in parallel, measure one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", help="cases whose name holds one of these; all norms by default")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--forms", type=int, default=14)
    given = parser.parse_args()
    start = time.perf_counter()
    texts: Sequence[str] = given.texts or ["candy", "group norm", "instance norm"]
    cases = [c for c in CASES if any(t in c.name for t in texts)]
    with tempfile.TemporaryDirectory(prefix="weft-meet-") as cache:
        workers = max(1, min(len(os.sched_getaffinity(0)) - 1, len(cases)))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            found = list(pool.map(prepare, cases, [cache] * len(cases), [given.forms] * len(cases)))
        print(f"prepared after {time.perf_counter() - start:.1f} s", flush=True)
        bench = None if given.dry else Bench(gpu_facts(None))
        for case, made in sorted(zip(cases, found, strict=True), key=lambda x: -math.prod(x[0].shapes[0])):
            if isinstance(made, str):
                print(f"FAILED {case.name}: {made}")
            elif bench is None:
                for source, _ in made.prepared.kernels:
                    print(f"{case.name}: {made.label(source)} {source.state_bytes} B")
            elif time.perf_counter() - start < given.seconds:
                measure(case, made, bench)
                torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.1f} s in all")


if __name__ == "__main__":
    main()
