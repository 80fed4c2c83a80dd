"""Fully connected networks: Weft's kernel against eager layers, cuBLASLt and torch.compile, on an NVIDIA GPU.

    python -m benchmarks.gpu_mlp [--only TEXT] [--first K] [--seconds S] [--dtype T] [--autotune K] [--again] [--dry]
                                 [--tiny-cuda-nn FILE]

Every network maps width to width in each of its layers, with a bias and an activation behind each, the last included.
Weft: the fastest of the first K schedules that the tuner is offered. Peers: eager layers, for ReLU one cuBLASLt call
per layer with bias and activation inside (`library`), torch.compile in its default mode, and in mode
max-autotune-no-cudagraphs for the first `--autotune` of its cases; in f16 tiny-cuda-nn, if `--tiny-cuda-nn` names what
was built of it (`benchmarks/peers/tiny_cuda_nn`): its fused kernels, ahead of time and by its JIT, and its CUTLASS
layers, none of which has a bias. All are recorded into a CUDA graph. torch.compile's
kernels are compiled before anything is timed, by processes of their own that fill its cache on disk; the slow mode also
makes its choices there, by the least of many timings, beside other processes.

A time is the median over replays of a graph of launches on the same data. The floor is the largest of input and output
at 4.8 TB/s, products at 989 TFLOP/s, and exponentials (one for each value of SiLU, GELU, tanh, sigmoid) at 16 per clock
and multiprocessor. Rows under 60 % of it say why, from the clock behind the run, a launch of nothing, and what each
resource does. Data that stay in the L2 cache are marked `hot`. What is faster than products and memory allow fails the
run. Errors are norms of the error over the norm of the result, against float64 on the first 4096 rows.

Cases on record at this commit with all their peers are passed over (not with `--again`); none is begun after
`--seconds`. `--dry` writes and compiles the kernels without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from benchmarks.cases.mlp import (
    AUTOTUNED,
    CASES,
    COMPILED,
    TORCH,
    Case,
    Ran,
    busy,
    network,
    problem_of,
    why,
)
from benchmarks.harness.gpu_time import Kernel, median_us
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import DIRTY, Record, folder_of_gpu
from benchmarks.peers import tiny_cuda_nn
from weft.device.cuda.driver import Function, Module
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource

ROUNDS = 7
CHECKED = 4096
"""Rows that are compared."""
SUMS_IN_F16 = 2e-2
"""Of an error of tiny-cuda-nn's, whose fused kernels sum in f16: a row says how large each is."""
NAMES = ("eager", "library", "compile", "autotune", *tiny_cuda_nn.KINDS)
MODES = {"compile": None, "autotune": "max-autotune-no-cudagraphs"}
PATIENCE_S, JIT_PATIENCE_S = 40.0, 180.0
"""For a case; and where tiny-cuda-nn's JIT compiles, which took more than the former on an H200's host."""
SPIN_NS = 60_000
PROBES = f"""
extern "C" __global__ void nothing() {{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}}
__device__ long long now() {{ long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }}
extern "C" __global__ void speed(long long* out) {{
  const long long ns = now(), clocks = clock64();
  while (now() - ns < {SPIN_NS}) {{}}
  out[1] = clock64() - clocks; out[0] = now() - ns;
}}
"""
"""A kernel that does nothing, and one that counts clocks for a while."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One compiled schedule."""

    kernel: Kernel
    registers: int

    @property
    def brief(self) -> str:
        """For people."""
        p = dict(self.kernel.source.schedule.params)
        if p["template"] == "mlp_pair":
            return f"pair s{p['stages']}"
        what = "group" if p["group"] else "warp"
        if p["template"] == "mlp_wide":
            return f"{what} w{p['warps']} s{p['stages']} c{p['columns']}"
        overlap = " pingpong" * bool(p["pingpong"]) + " early" * bool(p["early"])
        overlap += " keep" * bool(p["keep"]) + f" flow {p['flow']}/{p['pace']}" * bool(p["flow"])
        overlap += " near" * bool(p["near"])
        return f"{what} t{p['tiles']} w{p['warps']} x{p['min_ctas']} s{p['stages']}/{p['fixed']}{overlap}"

    def ran(self, c: Case, us: float, clock_ghz: float, launch_us: float) -> Ran:
        """What its time is judged by."""
        p = cast("dict[str, int]", dict(self.kernel.source.schedule.params))
        if self.kernel.source.schedule.param("template") == "mlp_pair":  # two multiprocessors share 64 rows
            return Ran(us, clock_ghz, launch_us, True, 32, 1, self.registers, c.width**2 * c.depth)
        group, warps = bool(p["group"]), p["warps"]
        min_ctas, tiles = p.get("min_ctas", 1), p.get("tiles", 1)
        streamed = 0
        if p["stages"]:
            streamed = 2 * c.width**2 * (c.depth - p.get("fixed", 0))
        at_once = min_ctas * (warps // 4 if group else warps)
        rows = (64 if group else 16) * tiles
        return Ran(us, clock_ghz, launch_us, group, rows, at_once, self.registers, streamed)


class Probes:
    """The clock of the multiprocessors, and the time of a launch of nothing."""

    def __init__(self, nvrtc: Nvrtc, arch: str) -> None:
        compiled = nvrtc.compile_many([CompileJob(PROBES, arch)])[0]
        if not isinstance(compiled, CompiledCubin):
            raise compiled
        self._module = Module(compiled.path)
        self._speed: Function = self._module.function("speed")
        self._out = torch.zeros(2, dtype=torch.int64, device="cuda")
        nothing = self._module.function("nothing")

        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            nothing.launch((1, 1, 1), (32, 1, 1), (), dependent=True, stream=stream)

        self.launch_us = median_us(launch, launches=20, rounds=ROUNDS)

    def start(self) -> None:
        """Count clocks behind what is under way."""
        stream = torch.cuda.current_stream().cuda_stream
        self._speed.launch((1, 1, 1), (1, 1, 1), (self._out.data_ptr(),), stream=stream)

    @property
    def ghz(self) -> float:
        """What the last start counted."""
        torch.cuda.synchronize()
        ns, clocks = self._out.tolist()
        return float(clocks / max(ns, 1))


def launches_for(expected_us: float) -> int:
    """Of one graph: about four milliseconds, 2 to 20."""
    return max(2, min(20, int(4000 / max(expected_us, 1.0))))


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error over the norm of the result; infinite where something is not finite."""
    found = float((got[: len(exact)].double() - exact).norm() / exact.norm())
    return found if math.isfinite(found) else math.inf


def by_library(net: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """One call per layer with bias and ReLU inside."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in net:
            if isinstance(layer, nn.Linear):
                x = torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=False)
        return x

    return run


def by_compiler(net: nn.Sequential, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch.compile in one of `MODES`."""
    torch.compiler.reset()
    return cast("Callable[[torch.Tensor], torch.Tensor]", torch.compile(net, dynamic=False, mode=MODES[way]))


def peers(
    c: Case, net: nn.Sequential, x: torch.Tensor, asked: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """(microseconds, failures)."""
    times: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name in asked:
        try:
            way = net if name == "eager" else by_library(net) if name == "library" else by_compiler(net, name)

            def call(way: Callable[[torch.Tensor], torch.Tensor] = way) -> torch.Tensor:
                return way(x)

            times[name] = median_us(call, launches=launches_for(8 * c.floor_us), rounds=ROUNDS)
        except Exception as error:  # a peer that does not take the case is said, and the rest is measured
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0][:90]
            torch.cuda.synchronize()
    return times, failures


def by_tiny_cuda_nn(
    c: Case, net: nn.Sequential, x: torch.Tensor, library: tiny_cuda_nn.Library
) -> tuple[dict[str, float], dict[str, str], dict[str, float]]:
    """The same for tiny-cuda-nn, with the network's weights and no biases, and the errors of its results."""
    times: dict[str, float] = {}
    failures: dict[str, str] = {}
    errors: dict[str, float] = {}
    plain = copy.deepcopy(net)
    for layer in plain:
        if isinstance(layer, nn.Linear):
            layer.register_parameter("bias", None)
    weights = torch.stack([m.weight.detach() for m in plain if isinstance(m, nn.Linear)])
    exact = plain.double()(x[:CHECKED].double())
    for name, (_, jit) in tiny_cuda_nn.KINDS.items():
        began = time.perf_counter()
        try:
            run = library.network(name, c.act, weights)
            given = x.t().contiguous() if jit else x
            out = torch.full_like(given, math.nan)
            errors[name] = float(f"{error_of(run(given, out).t() if jit else run(given, out), exact):.3g}")
            if errors[name] > SUMS_IN_F16:
                failures[name] = f"wrong: an error of {errors[name]}"
                continue
            times[name] = median_us(partial(run, given, out), launches=launches_for(8 * c.floor_us), rounds=ROUNDS)
        except Exception as error:  # as above
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0][:90]
            torch.cuda.synchronize()
        print(f"{c.name}: {name} took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return times, failures, errors


def measured(
    c: Case,
    dtype: DType,
    tried: Sequence[Candidate],
    asked: Sequence[str],
    probes: Probes,
    library: tiny_cuda_nn.Library | None = None,
) -> dict[str, object]:
    """One case on the GPU."""
    net = network(c, dtype)
    x = torch.randn(c.rows, c.width, device="cuda", dtype=TORCH[dtype])
    layers = [m for m in net if isinstance(m, nn.Linear)]
    inputs = [x, *(t for m in layers for t in (m.weight.detach().t().contiguous(), m.bias.detach()))]
    peer_errors: dict[str, float] = {}
    with torch.no_grad():
        found, failures = peers(c, net, x, [name for name in asked if name not in tiny_cuda_nn.KINDS])
        if library is not None and not tiny_cuda_nn.KINDS.keys().isdisjoint(asked):
            more, why_not, peer_errors = by_tiny_cuda_nn(c, net, x, library)
            found.update(more)
            failures.update(why_not)
        own = net(x[:CHECKED])
        exact = net.double()(x[:CHECKED].double())
    eager_error = error_of(own, exact)
    times, errors, clocks = [], [], []
    out = torch.empty_like(x)
    for candidate in tried:
        out.fill_(math.nan)
        us = candidate.kernel.time(
            inputs, out, launches=launches_for(2 * c.floor_us), rounds=ROUNDS, behind=probes.start
        )
        clocks.append(probes.ghz)
        error = error_of(out, exact) if bool(torch.isfinite(out).all()) else math.inf
        errors.append(error)
        times.append(us if error <= 1.5 * eager_error + 1e-4 else math.inf)
        if times[-1] == math.inf:
            print(f"WRONG: {c.name}: {candidate.kernel.source.schedule} error {error:.2g}", file=sys.stderr)
    us = min(times, default=math.inf)
    if us == math.inf:
        raise RuntimeError("no kernel gives the right result")
    at = times.index(us)
    best = min(found, key=lambda k: found[k]) if found else ""
    if us < c.bound_us:
        print(f"FASTER THAN ITS BOUND: {c.name}", file=sys.stderr)
    ran = tried[at].ran(c, us, clocks[at], probes.launch_us)
    return {
        "weft_us": round(us, 3), "tflops": round(c.flops / us / 1e6, 1),
        "floors_us": {k: round(v, 3) for k, v in c.floors_us.items()}, "share": round(c.floor_us / us, 3),
        "why": why(c, ran), "hot": c.hot, "possible": us >= c.bound_us,
        "peers_us": {k: round(v, 3) for k, v in found.items()}, "best_peer": best,
        "ratio": round(found[best] / us, 3) if best else None, "failures": failures,
        "error": float(f"{errors[at]:.3g}"), "eager_error": float(f"{eager_error:.3g}"),
        **({"peer_errors": peer_errors} if peer_errors else {}),
        "clock_ghz": round(clocks[at], 3), "launch_us": round(probes.launch_us, 2),
        "busy": {k: round(v, 3) for k, v in busy(c, ran).items()}, "registers": tried[at].registers, "rank": at,
        "schedule": tried[at].brief,
        "tried": [f"{t:.2f} {k.brief}" for t, k in zip(times, tried, strict=True)],
    }  # fmt: skip


# torch.compile in processes of its own


def wanted_peers(c: Case, dtype: DType, slow: Sequence[Case], *, has_tiny_cuda_nn: bool = False) -> list[str]:
    """Of a case; torch.compile's speak for bf16, tiny-cuda-nn has f16."""
    compiled = [k for k, cases in (("compile", COMPILED), ("autotune", slow)) if c in cases and dtype is DType.BF16]
    fused = tiny_cuda_nn.KINDS if has_tiny_cuda_nn and c.act in tiny_cuda_nn.ACTIVATIONS and dtype is DType.F16 else ()
    return ["eager", *(["library"] if c.act == "relu" else []), *compiled, *fused]


def flag(cache: str, c: Case, way: str) -> Path:
    """A file that says that a case is compiled."""
    return Path(cache) / f"{c.log_rows}-{c.width}-{c.depth}-{c.act}-{way}"


def warm(jobs: Sequence[tuple[Case, str]], cache: str, dtype: DType) -> None:
    """Fill torch.compile's cache on disk."""
    for c, way in jobs:
        try:
            net = network(c, dtype)
            x = torch.randn(c.rows, c.width, device="cuda", dtype=TORCH[dtype])
            with torch.no_grad():
                by_compiler(net, way)(x)
            torch.cuda.synchronize()
        except Exception:  # the process that measures meets it again, and says it
            torch.cuda.empty_cache()
        flag(cache, c, way).touch()


class Workers:
    """Processes that compile for torch.compile while this one compiles Weft's kernels."""

    def __init__(self, jobs: Sequence[tuple[Case, str]], cache: str, dtype: DType) -> None:
        cores = len(os.sched_getaffinity(0))
        os.environ.update(
            TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor", TRITON_CACHE_DIR=f"{cache}/triton",
            TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1",
        )  # fmt: skip
        jobs = sorted(jobs, key=lambda j: j[1])  # autotune takes longest, and begins first
        count = min(max(1, cores - 2), len(jobs))
        shares = [[([c.log_rows, c.width, c.depth, c.act], way) for c, way in jobs[k::count]] for k in range(count)]
        command = [sys.executable, "-m", "benchmarks.gpu_mlp", "--dtype", dtype.value, "--cache", cache, "--warm"]
        self._running = [
            subprocess.Popen([*command, json.dumps(share)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for share in shares
        ]

    @property
    def busy(self) -> bool:
        """Whether one still runs."""
        return any(w.poll() is None for w in self._running)

    def stop(self) -> None:
        """End those that still run."""
        for w in self._running:
            if w.poll() is None:
                w.kill()
            w.wait()


def compiled(
    cases: Sequence[Case], dtype: DType, facts: GpuFacts, nvrtc: Nvrtc, first: int
) -> dict[Case, list[Candidate]]:
    """The first schedules of every case; what spills or warns is said."""
    jobs: list[tuple[Case, CudaSource]] = []
    for c in cases:
        problem = problem_of(c, dtype)
        schedules = templates.schedules(problem, facts)
        if isinstance(schedules, Declined):
            print(f"{c.name}: {schedules.reason}", file=sys.stderr)
            continue
        made = [templates.emit(problem, s) for s in schedules[:first]]
        jobs += [(c, s) for s in made if isinstance(s, CudaSource)]
    results = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for _, s in jobs])
    found: dict[Case, list[Candidate]] = {}
    for (c, source), result in zip(jobs, results, strict=True):
        if not isinstance(result, CompiledCubin):
            print(f"{c.name}: {source.schedule}: {result}", file=sys.stderr)
            continue
        used = result.of(source.launches[0].entry)
        if used.spill_stores or result.warnings:
            note = f"spills {used.spill_stores} B {' '.join(result.warnings)[:120]}"
            print(f"{c.name}: {source.schedule} {note}", file=sys.stderr)
        found.setdefault(c, []).append(Candidate(Kernel(source, str(result.path)), used.registers))
    return found


def table(rows: Sequence[dict[str, object]]) -> str:
    """What was measured, and the geometric means over the best peer."""
    head = f"{'case':34} {'weft us':>9} {'TFLOP/s':>8} {'share':>6} {'GHz':>5}"
    lines = [f"{head} {' '.join(f'{n:>9}' for n in NAMES)}   ratio of best, schedule"]
    ratios: dict[int, list[float]] = {}
    for row in rows:
        found = cast("dict[str, float]", row["peers_us"])
        cells = " ".join(f"{found[n]:9.2f}" if n in found else f"{'-':>9}" for n in NAMES)
        ratio = cast("float | None", row["ratio"])
        if ratio:
            ratios.setdefault(cast("int", row["width"]), []).append(ratio)
        own = f"{row['weft_us']:9.2f} {row['tflops']:8.1f} {row['share']:6.2f} {row['clock_ghz']:5.2f}"
        end = f"{ratio:7.2f} of {row['best_peer']}" if ratio else "      -"
        lines.append(f"{row['case']:34} {own} {cells} {end}, {row['schedule']}")
        if row["why"]:
            lines.append(f"      {row['why']}")
    for width, found_ratios in sorted(ratios.items()):
        mean = math.exp(statistics.fmean(map(math.log, found_ratios)))
        lines.append(
            f"width {width}: geometric mean {mean:.2f} over {len(found_ratios)}, least {min(found_ratios):.2f}"
        )
    return "\n".join(lines)


def named(c: Case, dtype: DType) -> str:
    """A case on record."""
    return c.name if dtype is DType.BF16 else f"{c.name} {dtype.value}"


def missing(
    record: Record,
    cases: Sequence[Case],
    dtype: DType,
    slow: Sequence[Case],
    commit: object,
    *,
    has_tiny_cuda_nn: bool = False,
) -> list[Case]:
    """Those not on record at this commit with all their peers."""
    old = record.before()

    def done(c: Case) -> bool:
        line = old.get(named(c, dtype), {})
        if line.get("commit") != commit or str(commit).endswith(DIRTY) or "failed" in line:
            return False
        have = {**cast("dict[str, float]", line["peers_us"]), **cast("dict[str, str]", line["failures"])}
        return all(who in have for who in wanted_peers(c, dtype, slow, has_tiny_cuda_nn=has_tiny_cuda_nn))

    return [c for c in cases if not done(c)]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--first", type=int, default=8, help="schedules of each problem (8)")
    parser.add_argument("--seconds", type=float, default=85.0, help="no case is begun after so many (85)")
    parser.add_argument("--dtype", default="bf16", choices=[d.value for d in TORCH])
    parser.add_argument("--autotune", type=int, default=8, help="cases of torch.compile's slow mode (8)")
    parser.add_argument("--again", action="store_true", help="also what is on record at this commit")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    parser.add_argument("--tiny-cuda-nn", type=Path, metavar="FILE", help="libweft_tcnn.so, for --dtype f16")
    add_option(parser)
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny_cuda_nn and given.dtype != "f16":
        parser.error("--tiny-cuda-nn wants --dtype f16")
    return given


def main() -> int:
    """Compile all, then measure; returns the exit status."""
    given = parsed()
    started = time.perf_counter()
    dtype = DType(given.dtype)
    if given.warm:
        warm([(Case(*c), way) for c, way in json.loads(given.warm)], given.cache, dtype)
        return 0
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 2
    cases = [c for c in CASES if given.only in c.name]
    if given.dry:
        for c, found in compiled(cases, dtype, GpuFacts(), nvrtc, given.first).items():
            print(f"{c.name:34} floor {c.floor_us:8.2f} us {[k.brief for k in found]}")
        return 0
    if not torch.cuda.is_available():
        print("benchmarks.gpu_mlp: torch sees no NVIDIA GPU; --dry needs none", file=sys.stderr)
        return 2
    try:
        library = tiny_cuda_nn.Library(given.tiny_cuda_nn) if given.tiny_cuda_nn else None
    except OSError as error:
        print(f"benchmarks.gpu_mlp: --tiny-cuda-nn: {error}", file=sys.stderr)
        return 2
    torch.zeros(1, device="cuda")  # the context that modules are loaded into
    facts = gpu_facts(None, calibrate=False)
    record = Record(folder_of_gpu(), "mlp")
    slow = AUTOTUNED[: given.autotune]
    left = Left(record, started + given.seconds, only=given.left, good=lambda row: bool(row.get("possible")))
    if given.left:
        cases = [c for c in cases if not left.known(case=named(c, dtype))]
    elif not given.again:
        commit = record.head["commit"]
        cases = missing(record, cases, dtype, slow, commit, has_tiny_cuda_nn=library is not None)
    rows = []
    with tempfile.TemporaryDirectory(prefix="weft-mlp-", ignore_cleanup_errors=True) as cache:
        jobs = [(c, way) for c in cases for way in wanted_peers(c, dtype, slow) if way in MODES]
        workers = Workers(jobs, cache, dtype)
        try:
            kernels = compiled(cases, dtype, facts, nvrtc, given.first)
            print(f"kernels compiled after {time.perf_counter() - started:.1f} s", file=sys.stderr)
            while workers.busy and time.perf_counter() - started < 0.6 * given.seconds:
                time.sleep(0.2)
        finally:
            waits = given.left and workers.busy
            workers.stop()
        ready = [(c, way) for c, way in jobs if flag(cache, c, way).exists()]
        after = time.perf_counter() - started
        print(f"{len(ready)} of {len(jobs)} for torch.compile compiled after {after:.1f} s", file=sys.stderr)
        torch.zeros(1, device="cuda")  # makes the primary context current
        probes = Probes(nvrtc, facts.arch)
        for c in cases:
            if not left.begins(case=named(c, dtype)):
                continue
            every = wanted_peers(c, dtype, slow, has_tiny_cuda_nn=library is not None)
            asked = [w for w in every if w not in MODES or (c, w) in ready]
            if waits and asked != every:
                left.put_off(f"{named(c, dtype)}, whose peers still compile")
                continue
            patience = PATIENCE_S if library is None else JIT_PATIENCE_S
            watch = threading.Timer(patience, lambda what=c.name: (print("HANGS:", what, flush=True), os._exit(3)))
            watch.daemon = True
            watch.start()
            name = named(c, dtype)
            head = {"record": "case", "suite": "mlp", "case": name, "rows": c.rows, "width": c.width, "depth": c.depth,
                    "act": c.act, "dtype": dtype.value}  # fmt: skip
            with record.measuring(case=name):
                try:
                    rows.append({**head, **measured(c, dtype, kernels.get(c, []), asked, probes, library)})
                finally:
                    watch.cancel()
                record.add(rows[-1])
            torch.cuda.empty_cache()
    print(table(rows))
    print(f"{time.perf_counter() - started:.1f} s in all")
    return left.status(record.failed or not all(r["possible"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
