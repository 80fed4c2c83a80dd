"""Memory-bound operators on an NVIDIA GPU: Weft's kernels against eager, torch.compile and the law of a plain copy.

    python -m benchmarks.gpu_memory [TEXT ...] [--dry] [--seconds 95] [--schedules 6] [--peers eager,inductor]

Forty operators in f16 (`benchmarks.cases.memory`). Everybody's time is that of one of many launches in a CUDA graph
over one set of buffers, as the copies were timed from which `GpuFacts.bandwidth` comes: the gap is part of it, and what
fits into the L2 cache stays there; `cold_us` is Weft's best kernel on copies that exceed the L2 cache. Bytes are those
of inputs and results, each once. Rows end where the time is up; a case that fails is said and passed over. `--dry`
exports, writes and compiles the kernels without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.cases.memory import LARGE_CASES, NETWORK_CASES, AsModule, Case
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.errors import WeftError
from weft.frontends.torch import import_exported
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.graph import mask_of
from weft.ir.passes import clean_up
from weft.ir.prims import CATEGORY, FREE, Category
from weft.kernels.candidate import Candidate, Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule
from weft.orchestrate.extract import extract
from weft.orchestrate.stored import is_leaf, stored_root

CASES = (*NETWORK_CASES, *LARGE_CASES)
WINDOW_US = 150.0
"""Length of one sample at least."""
MOST_LAUNCHES = 40
ROUNDS = 7
TOLERANCE = 4e-3
"""Root mean square of the error, relative to that of the result computed in f32."""
PEERS_S = 8.0
"""A case has no peers where less time is left."""
PEER_WORKERS = 4


@dataclass(frozen=True)
class Prepared:
    """What the workers made of a case."""

    problem: Problem
    inputs: tuple[object, ...]
    """Per input of the problem: a position among the case's tensors, or the data of a constant."""
    kernels: tuple[tuple[CudaSource, str], ...]
    """Sources and their cubins."""
    spills: int
    seconds: float
    registers: Mapping[str, int] = field(default_factory=dict)
    """Of the last launch of each kernel, by its entry."""


More = Callable[[Problem, GpuFacts], Iterable[Schedule]]
"""Schedules beside those of the generator's rules."""


def problem_of(case: Case) -> tuple[Problem, tuple[object, ...]]:
    """The whole operator as one problem, as the pipeline would cut it."""
    with torch.no_grad():
        program = torch.export.export(AsModule(case.function), tuple(sample(case)))
    graph = clean_up(import_exported(program).graph, strict=False).graph
    outputs = tuple(dict.fromkeys(stored_root(graph, o) for o in graph.outputs))
    live, stack = set(outputs), list(outputs)
    while stack:
        node = stack.pop()
        fresh = set() if is_leaf(graph, node) else set(graph.nodes[node].inputs) - live
        live |= fresh
        stack += fresh
    leaves = tuple(sorted(n for n in live if is_leaf(graph, n)))
    members = mask_of(
        n for n in live if not is_leaf(graph, n) and graph.nodes[n].prim not in FREE
        and CATEGORY[graph.nodes[n].prim] is not Category.SOURCE
    )  # fmt: skip
    last, row = Format.LAST, Format.ROW
    ins = [last if case.last and graph.type_of(n).rank == 4 else row for n in leaves]
    outs = [last if case.last and not case.row_out and graph.type_of(n).rank == 4 else row for n in outputs]
    found = extract(graph, Candidate(members, leaves, outputs), ins, outs)
    given: list[object] = []
    for n in found.inputs:
        position = graph.inputs.index(n) if n in graph.inputs else -1
        given.append(position if position >= 0 else graph.constant(n))
    return found.problem, tuple(given)


def prepare(case: Case, facts: GpuFacts, count: int, cache: str, more: More | None = None) -> Prepared | str:
    """Export, write and compile; a text says what failed.

    The first `count` schedules; with `more` those of it too, and of all these only kernels that differ and keep their
    registers.
    """
    start = time.perf_counter()
    try:
        problem, given = problem_of(case)
        generator, nvrtc = CudaGenerator(), find_nvrtc()
        schedules = generator.schedules(problem, facts)
        if isinstance(schedules, Declined) or isinstance(nvrtc, Declined):
            return f"declined: {schedules if isinstance(schedules, Declined) else nvrtc}"
        kernels, texts, registers, spills = [], set[str](), {}, 0
        for schedule in dict.fromkeys([*list(schedules)[:count], *(more(problem, facts) if more else ())]):
            source = generator.emit(problem, schedule)
            if more and (not isinstance(source, CudaSource) or source.text.replace(source.entry, "") in texts):
                continue
            assert isinstance(source, CudaSource), source
            texts.add(source.text.replace(source.entry, ""))
            done = nvrtc.compile(source.text, arch=facts.arch, flags=source.flags, cache_dir=Path(cache))
            if more and sum(used.spill_stores for _, used in done.resources):
                continue
            spills += sum(used.spill_stores + used.spill_loads for _, used in done.resources)
            kernels.append((source, str(done.path)))
            registers[source.entry] = done.resources[-1][1].registers
        return Prepared(problem, given, tuple(kernels), spills, time.perf_counter() - start, registers)
    except Exception as error:  # one case must not stop the others
        return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def sample(case: Case, device: str = "cpu") -> list[torch.Tensor]:
    """Inputs: normal numbers and indices; weights of norms count as inputs. On the CPU memory nobody has touched."""
    found = []
    for k, shape in enumerate(case.shapes):
        if case.indices and k == len(case.shapes) - 1:
            found.append(torch.randint(case.indices, shape, device=device))
            continue
        order = torch.channels_last if case.last and len(shape) == 4 else torch.contiguous_format
        x = torch.empty(shape, dtype=torch.float16, device=device, memory_format=order)
        found.append(x if device == "cpu" else x.normal_())
    return found


def moved_bytes(case: Case, problem: Problem) -> int:
    """Inputs and results, each once; of a table that is indexed what is picked."""
    graph = problem.graph
    written = sum(graph.type_of(n).nbytes for n in graph.outputs)
    read = [graph.type_of(n).nbytes for n in graph.inputs]
    return written + sum(min(x, written) if case.indices else x for x in read)


# on the GPU


def timed(run: Callable[[], None], launches: int) -> Callable[[], float]:
    """Record so many launches; what it returns replays them and gives microseconds per launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(launches):
            run()

    def once() -> float:
        graph.replay()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / launches

    return once


def medians(samplers: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of interleaved samples."""
    rng, names = random.Random(1), list(samplers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in rng.sample(names, len(names)):
            samples[name].append(samplers[name]())
    return {name: statistics.median(v) for name, v in samples.items()}


class Bench:
    """Cases on this process's GPU."""

    def __init__(self, facts: GpuFacts) -> None:
        self.facts = facts

    def launches(self, moved: int) -> int:
        """Launches of one graph."""
        expected = moved / self.facts.bandwidth_at(max(moved, 1 << 16)) / 1e3 + 1.0
        return max(2, min(MOST_LAUNCHES, math.ceil(WINDOW_US / expected)))

    def tensors(self, made: Prepared, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of the problem."""
        return [given[x] if isinstance(x, int) else torch.from_numpy(np.array(x)).cuda() for x in made.inputs]

    def ours(self, case: Case, made: Prepared) -> tuple[dict[str, object], Callable[[], float], int]:
        """Verify and time every schedule; the record, the best one's sampler and its launches."""
        given = sample(case, "cuda")
        tensors = self.tensors(made, given)
        with torch.no_grad():
            wide = [x.float() if x.is_floating_point() else x for x in given]
            exact = case.function(*wide)
        del wide
        moved = moved_bytes(case, made.problem)
        launches = self.launches(moved)
        samplers: dict[str, Callable[[], float]] = {}
        kernels: dict[str, Kernel] = {}
        wrong = []
        for source, cubin in made.kernels:
            label = short(source)
            try:
                kernel = Kernel(made, source, cubin, [tensors])
                error = kernel.error(exact)
                if not error < TOLERANCE:
                    wrong.append(f"{label}: error {error:.2g}")
                    continue
                kernels[label] = kernel
                samplers[label] = timed(kernel.run, launches)
            except (WeftError, RuntimeError) as failure:
                wrong.append(f"{label}: {str(failure).splitlines()[0][:200]}")
        del exact
        if not samplers:
            raise RuntimeError(f"no kernel is right: {wrong}")
        times = medians(samplers, ROUNDS)
        best = min(times, key=lambda k: times[k])
        us = times[best]
        law = self.facts.bandwidth_at(moved, read_only=_reads_only(made.problem))
        law_us = moved / law / 1e3
        record: dict[str, object] = {
            "record": "case",
            "suite": "memory-bound",
            "case": case.name,
            "weft_us": round(us, 3),
            "bytes": moved,
            "gb_s": round(moved / us / 1e3, 1),
            "law_us": round(law_us, 3),
            "share": round(law_us / us, 3),
            "schedule": best,
            "kernels": len(next(s for s, _ in made.kernels if short(s) == best).launches),
            "rank": list(samplers).index(best),
            "schedules_us": {k: round(v, 3) for k, v in times.items()},
            "wrong": wrong,
            "spills": made.spills,
        }
        if moved < 2 * self.facts.l2_bytes:
            copies = min(launches, -(-2 * self.facts.l2_bytes // moved) + 1, 24)
            sets = [tensors, *([x.clone() for x in tensors] for _ in range(copies - 1))]
            source, cubin = next((s, c) for s, c in made.kernels if short(s) == best)
            cold = Kernel(made, source, cubin, sets)
            record["cold_us"] = round(medians({"cold": timed(cold.run, max(copies, launches))}, 5)["cold"], 3)
        return record, samplers[best], launches


class Kernel:
    """One source bound to several sets of tensors, which its launches take in turn."""

    def __init__(self, made: Prepared, source: CudaSource, cubin: str, sets: list[list[torch.Tensor]]) -> None:
        from weft.generate.bind import Addresses, BoundCuda

        graph = made.problem.graph
        self.types = [graph.type_of(n) for n in graph.outputs]
        self.formats = made.problem.output_formats
        self.outputs = [
            [torch.full((max(t.nbytes, 1),), 0xFF, dtype=torch.uint8, device="cuda") for t in self.types] for _ in sets
        ]
        self.work = torch.full((max(source.workspace_bytes, 1),), 0xFF, dtype=torch.uint8, device="cuda")
        self.state = torch.zeros(max(source.state_bytes, 1), dtype=torch.uint8, device="cuda")
        self.sets, self.bound, self.turn = sets, BoundCuda(source, cubin), 0
        self.prepared = [
            self.bound.prepare(
                Addresses(
                    [x.data_ptr() for x in tensors],
                    [x.data_ptr() for x in outs],
                    work=self.work.data_ptr(),
                    state=self.state.data_ptr(),
                )
            )
            for tensors, outs in zip(sets, self.outputs, strict=True)
        ]

    def run(self) -> None:
        """One launch of the next set on the current stream."""
        self.prepared[self.turn % len(self.prepared)](torch.cuda.current_stream().cuda_stream)
        self.turn += 1

    def error(self, exact: torch.Tensor) -> float:
        """Relative error of the first set's result."""
        self.turn = 0
        for _ in range(2):
            self.run()
            self.turn = 0
        torch.cuda.synchronize()
        t, fmt = self.types[0], self.formats[0]
        got = self.outputs[0][0].view(torch.float16)[: t.size]
        if fmt is Format.LAST:
            n, c, *rest = t.shape
            got = got.view(n, *rest, c).movedim(-1, 1)
        else:
            got = got.view(t.shape)
        exact = exact.reshape(t.shape)
        difference = (got.float() - exact).square_().mean().sqrt()
        return float(difference / (exact.square().mean().sqrt() + 1e-30))


def _reads_only(problem: Problem) -> bool:
    graph = problem.graph
    written = sum(graph.type_of(n).nbytes for n in graph.outputs)
    return written * 8 < sum(graph.type_of(n).nbytes for n in graph.inputs)


def short(source: CudaSource) -> str:
    """The parameters of a schedule that differ from the usual."""
    usual = {"cluster": 1, "columns": 0, "fuse": True, "items": 1, "keep": True, "per_row": 0, "spread": 0,
             "tile": False, "vector": 16}  # fmt: skip
    return ",".join(f"{k}={v}" for k, v in source.schedule.params if usual.get(k) != v)


def peer(case: Case, name: str) -> Callable[[], None]:
    """The operator by the framework, eager or compiled."""
    given = sample(case, "cuda")
    function: Callable[..., object] = case.function
    if name == "inductor":
        torch.compiler.reset()
        function = torch.compile(case.function)

    def run() -> None:
        function(*given)

    return run


def warm_peers(part: int, of: int, names: Sequence[str]) -> None:
    """Fill torch.compile's cache on disk for every `of`-th case; runs in processes of its own."""
    for case in [c for c in CASES if not names or c.name in names][part::of]:
        try:
            with torch.no_grad():
                peer(case, "inductor")()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:  # measured later, or not
            print(f"{case.name}: torch.compile failed: {error}", file=sys.stderr)


def start_workers(cases: Sequence[Case], cache: str) -> list[subprocess.Popen[bytes]]:
    """Processes that compile the peers while this one compiles the kernels."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    os.environ.update({k: environment[k] for k in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")})
    names = json.dumps([c.name for c in cases])
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_memory", "--warm-peers", f"{k}/{PEER_WORKERS}", names],
            env=environment,
        )
        for k in range(PEER_WORKERS)
    ]


def main() -> None:
    """Prepare in parallel, measure one after another, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", help="cases whose name holds one of these; all by default")
    parser.add_argument("--dry", action="store_true", help="no GPU: export, write and compile")
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--schedules", type=int, default=6)
    parser.add_argument("--peers", default="eager,inductor")
    parser.add_argument("--warm-peers", default="", help=argparse.SUPPRESS)
    add_option(parser)
    given = parser.parse_args()
    if given.warm_peers:
        part, _, of = given.warm_peers.partition("/")
        warm_peers(int(part), int(of), json.loads(given.texts[0]))
        return
    start = time.perf_counter()
    cases = [c for c in CASES if not given.texts or any(t in c.name for t in given.texts)]
    with tempfile.TemporaryDirectory(prefix="weft-memory-") as cache:
        wants_inductor = "inductor" in given.peers and not given.dry
        workers = start_workers(cases, cache) if wants_inductor else []
        try:
            made = prepare_all(cases, given.schedules, cache)
            print(f"prepared after {time.perf_counter() - start:.1f} s", flush=True)
            if given.dry:
                report_dry(cases, made)
                return
            while any(w.poll() is None for w in workers) and time.perf_counter() - start < given.seconds * 0.5:
                time.sleep(0.2)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        print(f"peers compiled after {time.perf_counter() - start:.1f} s", flush=True)
        measure(cases, made, given, start)


def prepare_all(cases: Sequence[Case], count: int, cache: str) -> list[Prepared | str]:
    """All cases on all cores; by fork, before this process touches the GPU."""
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        max(1, min(cores - 1, 14)), context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures: list[Future[Prepared | str]] = [pool.submit(prepare, c, GpuFacts(), count, cache) for c in cases]
        found: list[Prepared | str] = []
        for future in futures:
            try:
                found.append(future.result(timeout=300))
            except Exception as error:  # a worker that died takes its case with it
                found.append(f"{type(error).__name__}: {error}")
    return found


def report_dry(cases: Sequence[Case], made: Sequence[Prepared | str]) -> None:
    """What was written and compiled."""
    failed = 0
    for case, one in zip(cases, made, strict=True):
        if isinstance(one, str):
            failed += 1
            print(f"{case.name}: {one}")
            continue
        grids = [f"{short(s)} {[(x.grid[0], x.block[0]) for x in s.launches]}" for s, _ in one.kernels]
        print(
            f"{case.name}: {moved_bytes(case, one.problem) / 1e6:.2f} MB, {one.spills} B of spills, {one.seconds:.1f} s"
        )
        print("".join(f"    {text}\n" for text in grids), end="")
    print(f"{len(cases) - failed} of {len(cases)} cases compiled")


def measure(cases: Sequence[Case], made: Sequence[Prepared | str], given: argparse.Namespace, start: float) -> None:
    """Ours first, case by case, then the peers for as long as there is time."""
    torch.cuda.init()
    torch.empty(1, device="cuda")
    facts = gpu_facts(None)
    print(f"facts after {time.perf_counter() - start:.1f} s", flush=True)
    bench = Bench(facts)
    out = Record(folder_of_gpu(), "memory-bound")
    end = start + given.seconds - (PEERS_S if given.left else 0.0)
    left = Left(out, end if given.left else math.inf, only=given.left)
    records: list[dict[str, object]] = []
    for case, one in zip(cases, made, strict=True):
        if not left.begins(case=case.name):
            continue
        with out.measuring(case=case.name):
            if isinstance(one, str):
                raise RuntimeError(one)  # noqa: TRY004 - the text of an error of a worker
            record, _, launches = bench.ours(case, one)
            peers: dict[str, float] = {}
            for name in given.peers.split(","):
                left = given.seconds - (time.perf_counter() - start)
                if left < (2.0 if name == "eager" else 8.0):
                    record["why"] = "time was up"
                    continue
                try:
                    sampler = timed(peer(case, name), launches)
                    peers[name] = round(medians({name: sampler}, 5)[name], 3)
                except Exception as error:  # a peer that fails is said
                    record[f"{name}_failed"] = str(error).splitlines()[0][:200]
            record["peers_us"] = peers
            if peers:
                record["speedup"] = round(min(peers.values()) / float(str(record["weft_us"])), 3)
            records.append(record)
            out.add(record)
        torch.cuda.empty_cache()
    table(records)
    print(f"{time.perf_counter() - start:.1f} s in all")
    left.close()


def table(records: Sequence[dict[str, object]]) -> None:
    """One line per case."""
    if not records:
        return
    print(f"\n{'case':40s} {'MB':>8s} {'us':>8s} {'cold':>8s} {'GB/s':>7s} {'share':>6s} {'eager':>8s} {'inductor':>8s}"
          f" {'x':>5s} n rank schedule")  # fmt: skip
    for r in records:
        peers = r["peers_us"]
        assert isinstance(peers, dict)
        print(
            f"{r['case']!s:40s} {float(str(r['bytes'])) / 1e6:8.2f} {r['weft_us']!s:>8s} {r.get('cold_us', '')!s:>8s}"
            f" {r['gb_s']!s:>7s} {r['share']!s:>6s} {peers.get('eager', '')!s:>8s} {peers.get('inductor', '')!s:>8s}"
            f" {r.get('speedup', '')!s:>5s} {r['kernels']} {r['rank']!s:>4s} {r['schedule']}"
        )
    shares = [float(str(r["share"])) for r in records]
    speedups = [float(str(r["speedup"])) for r in records if "speedup" in r]
    print(f"share of the law: median {statistics.median(shares):.3f}, least {min(shares):.3f}")
    if speedups:
        print(f"geometric mean over the better peer: {math.exp(sum(map(math.log, speedups)) / len(speedups)):.3f}")


if __name__ == "__main__":
    main()
