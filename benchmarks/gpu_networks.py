"""The ten networks on an NVIDIA GPU against eager and torch.compile, both in CUDA graphs, interleaved in one process.

    python -m benchmarks.gpu_networks [NAME ...] [--batch 1,16] [--dtype f16,bf16,f32,tf32] [--budget SECONDS]

Every contender replays a CUDA graph on inputs that already lie in its buffers. `--all` adds torch.compile in mode
max-autotune-no-cudagraphs (recorded into a graph like the others). `--trace FOLDER` writes the timeline of one replay
of each network there, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import weft
from benchmarks.harness import noise
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from benchmarks.models import NETWORKS, load
from weft.api import flat
from weft.ir.attrs import ConstantAttrs
from weft.ir.work import node_flops
from weft.kernels.measurement import Verdict
from weft.pipeline.finish import interleave
from weft.platform.cuda import captured as capturing
from weft.platform.cuda import platform as gpu
from weft.report.timeline import chrome_trace
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.timeline import timeline
from weft.tune.store import Database

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32}
"""`tf32`: f32 whose products may be rounded, by everybody."""


def peer(
    name: str, module: torch.nn.Module, inputs: Sequence[torch.Tensor], *, channels_last: bool
) -> tuple[capturing.Captured, float, int, int]:
    """A contender of another maker in a CUDA graph; seconds to compile; with its copy of the weights, the most bytes in
    tensors, and what it keeps from the device afterwards."""
    before = taken()
    held = allocated()
    torch.cuda.reset_peak_memory_stats()
    module = copy.deepcopy(module)  # changing the layout of weights moves them, and a graph keeps their addresses
    images = channels_last and all(x.ndim == 4 for x in inputs)
    if images:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = [x.to(memory_format=torch.channels_last) for x in inputs]
    model: Callable[..., object] = module
    torch.compiler.reset()
    torch.backends.cudnn.benchmark = True  # peers may try; plans of Weft take what the heuristic names, or own kernels
    if name == "inductor":
        model = torch.compile(module)
    elif name == "autotune":
        model = torch.compile(module, mode="max-autotune-no-cudagraphs")
    start = time.perf_counter()
    with torch.no_grad():
        captured = capturing.Captured(lambda *x: flat(model(*x)), inputs)
    torch.cuda.synchronize()
    seconds, most = time.perf_counter() - start, torch.cuda.max_memory_allocated() - held
    return captured, seconds, most, taken() - before


def allocated() -> int:
    """Bytes of the tensors that are alive."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def taken() -> int:
    """Bytes that the framework keeps from the device: of tensors that are alive, of graphs, of workspaces."""
    allocated()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def runs_that_differ(replay: Callable[[], Sequence[torch.Tensor]], count: int) -> int:
    """How many of so many runs on the same inputs give other bits than the first."""
    first = [x.clone() for x in replay()]
    differ = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(count):
        bits = [(x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).any()
                for x, y in zip(replay(), first, strict=True)]  # fmt: skip
        differ += torch.stack(bits).any()
    return int(differ)


def floor_ms(exe: weft.Compiled, dtype: str) -> float:
    """Arithmetic or compulsory traffic of the whole network, whichever takes longer at the data sheet's rates."""
    graph = exe.executable.graph
    steps = exe.executable.plan.steps
    members = {m for s in steps for m in s.members}
    flops = sum(node_flops(graph.nodes[m], graph) for m in members if graph.nodes[m].prim.value in ("matmul", "conv"))
    # by their types in the graph: NumPy has no bf16
    types = {node.attrs.digest: node.type for node in graph.nodes if isinstance(node.attrs, ConstantAttrs)}
    weights = sum(t.nbytes for t in types.values())
    rate = {"f16": 989.4e12, "bf16": 989.4e12, "f32": 66.9e12, "tf32": 494.7e12}[dtype]
    return max(flops / rate, weights / 4.8e12) * 1e3


def say_refused(cache: Path | None, since: float) -> None:
    """Kernels that gave something else than asked, or did not end, since then (seconds since the epoch)."""
    harmless = (Verdict.OK, Verdict.COMPILE, Verdict.RESOURCE, Verdict.SLOW, Verdict.IMPOSSIBLE, Verdict.UNSTABLE)
    with Database.open(cache) as database:
        for record in database.records():
            m = record.measurement
            if record.started >= since and m.verdict not in harmless:
                problem = " ".join(m.problem_key.split())[:300]
                print(f"   refused: {m.verdict.value} {m.schedule} of {problem}: {m.error[:200]}", flush=True)


def posed(name: str, batch: int, dtype: str) -> tuple[torch.nn.Module, list[torch.Tensor], Sequence[torch.Tensor]]:
    """A network on the GPU, its inputs and its exact outputs in float64; TF32 is allowed where the type is that."""
    kind = DTYPES[dtype]
    module, cpu_inputs = load(name, batch)
    with torch.no_grad():
        wide = [x.cuda().double() if x.is_floating_point() else x.cuda() for x in cpu_inputs]
        exact = flat(module.double().cuda()(*wide))
    module = module.to(kind).cuda()
    inputs = [x.to(kind).cuda() if x.is_floating_point() else x.cuda() for x in cpu_inputs]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    return module, inputs, exact


def run_case(name: str, batch: int, dtype: str, record: Record, given: argparse.Namespace) -> None:
    """Compile, compare and time one network; one record."""
    module, inputs, exact = posed(name, batch, dtype)
    tf32 = dtype == "tf32"
    options = weft.Options(budget_s=given.budget, device="cuda", allow_tf32=tf32)
    before = taken()
    held = allocated()
    start = time.perf_counter()

    def say(stage: str, line: str) -> None:
        if given.verbose:
            print(f"  {time.perf_counter() - start:6.1f} {stage}: {line}", flush=True)

    exe = weft.compile(module, inputs, options=options, name=name, say=say)
    tuning_s = time.perf_counter() - start
    say_refused(options.cache, time.time() - tuning_s)
    warm_s = library_s = library_error = 0.0
    if not given.cold_only:
        again = time.perf_counter()
        weft.compile(module, inputs, options=options, name=name)
        warm_s = time.perf_counter() - again
    if given.library:
        again = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            plain = weft.Options(budget_s=0, device="cuda", cache_dir=Path(folder), allow_tf32=tf32)
            untuned = weft.compile(module, inputs, options=plain, name=name)
            library_s = time.perf_counter() - again
            library_error = error_of(flat(untuned(*inputs)), exact)
            del untuned
    for stage in exe.record.stages:
        print(f"   {stage.seconds:6.2f} s {stage.name}: {stage.detail}", flush=True)
    for p in exe.record.plans:
        times = f"{p.median_us:.1f} us, predicted {p.predicted_us:.1f}"
        print(f"   {p.name}: {times}, {p.kernels} kernels {p.note}", flush=True)
    runs: dict[str, Callable[[], object]] = {}
    executable = exe.executable
    assert isinstance(executable, CudaExecutable)
    allocated()
    torch.cuda.reset_peak_memory_stats()
    executable(*inputs)
    torch.cuda.synchronize()
    weft_peak = torch.cuda.max_memory_allocated() - held
    kept = {"weft": taken() - before}
    runs["weft"] = executable.replay
    different = runs_that_differ(executable.replay, given.repeat)
    compile_s, peaks, errors = {}, {}, {}
    errors["weft"] = error_of(executable.replay(), exact)
    for who in given.peers.split(","):
        images = all(x.ndim == 4 for x in inputs)
        for last in (False, True) if given.layouts == "both" or who == "eager" else (images,):
            label = f"{who}_last" if last else who
            try:
                captured, compile_s[label], peaks[label], kept[label] = peer(who, module, inputs, channels_last=last)
                errors[label] = error_of(captured.replay(), exact)
                runs[label] = captured.replay
            except Exception as error:  # a peer that fails is said, and the rest is measured
                print(f"{name}: {label} failed: {str(error).splitlines()[0]}", file=sys.stderr)
            if not all(x.ndim == 4 for x in inputs):
                break
    samples = interleave(noise.twice(runs), rounds=given.rounds, seed=1, budget_s=120, sample=gpu.sample_us)
    ms = {k: round(statistics.median(samples[k]) / 1e3, 5) for k in runs}
    peers = {k: v for k, v in ms.items() if k != "weft"}
    best = min(peers, key=lambda k: peers[k]) if peers else ""
    r = exe.record
    record.add(
        {
            "record": "case", "suite": record.path.stem, "case": f"{name}/b{batch}/{dtype}",
            "weft_ms": ms["weft"], "peers_ms": peers, "best_peer": best,
            "speedup_best": round(peers[best] / ms["weft"], 3) if best else 0.0,
            "noise": noise.of_rounds(samples, "weft", best or "weft").record(),
            "floor_ms": round(floor_ms(exe, dtype), 5),
            "errors": errors, "plan": r.chosen, "kernels": len(r.steps),
            "tuning_s": round(tuning_s, 1), "warm_s": round(warm_s, 2), "branches": executable.plan.branches,
            "runs": given.repeat, "runs_that_differ": different,
            **({"library_s": round(library_s, 1), "library_error": library_error} if given.library else {}),
            "peer_compile_s": {k: round(v, 1) for k, v in compile_s.items()},
            "own_bytes": weft_peak, "peer_own_bytes": peaks, "kept_bytes": kept,
            "measured": r.measured, "reused": r.reused, "rejected": list(r.rejected_kernels)[:8],
            "plans": [[p.name, round(p.median_us, 1), round(p.predicted_us, 1), p.verified, p.note] for p in r.plans],
            "samples_ms": {k: [round(x / 1e3, 5) for x in v] for k, v in samples.items()},
        }
    )  # fmt: skip
    speed = ms[best] / ms["weft"] if best else 0.0
    print(
        f"== {name} b{batch} {dtype}: {ms} x{speed:.3f} of {best}, plan {r.chosen}, {len(r.steps)} kernels", flush=True
    )
    for step in sorted(r.steps, key=lambda s: -s.cost_us)[: given.verbose]:
        what = "+".join(step.primitives)[:70]
        print(
            f"   {step.cost_us:8.2f} us {step.schedule} {what} {step.outputs}"
            f" next {step.runner_up} {step.runner_up_us:.2f}"
        )
    if given.trace:
        shown = chrome_trace(timeline(executable, inputs), title=f"{name} b{batch} {dtype}", record=r)
        given.trace.mkdir(parents=True, exist_ok=True)
        (given.trace / f"{name}-b{batch}-{dtype}.json").write_text(shown)
    torch.compiler.reset()


def error_of(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Largest relative norm of the difference over the outputs; NaN where a model's results are."""
    worst = 0.0
    for mine, want in zip(got, exact, strict=True):
        if want.is_floating_point():
            error = float((mine.double() - want).norm() / want.norm().clamp_min(1e-30))
            worst = error if math.isnan(error) else max(worst, error)
    return worst


def main() -> None:
    """Run the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--budget", type=float, default=180.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", default="eager,inductor")
    parser.add_argument("--layouts", choices=("both", "last"), default="both", help="memory formats given to compilers")
    parser.add_argument("--trace", type=Path, help="folder for a timeline of each network")
    parser.add_argument("--all", action="store_true", help="torch.compile max-autotune too")
    parser.add_argument("--repeat", type=int, default=1000, help="runs that must give the same bits")
    parser.add_argument("--library", action="store_true", help="compile without tuning too")
    parser.add_argument("--cold-only", action="store_true", help="do not compile once more from the tuning database")
    parser.add_argument("--suite", default="networks", help="name of the record; one for each commit that is compared")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after them")
    parser.add_argument("--verbose", type=int, default=0, help="show progress and so many kernels of each plan")
    add_option(parser)
    given = parser.parse_args()
    if given.all:
        given.peers += ",autotune"
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_networks: torch sees no NVIDIA GPU; `make bench` measures on the CPU")
    warnings.simplefilter("ignore")
    record = Record(folder_of_gpu(), given.suite)
    left = Left(record, time.perf_counter() + given.seconds, only=given.left)
    cases = [(n, int(b), d) for d in given.dtype.split(",") for b in given.batch.split(",") for n in given.names]
    for name, batch, dtype in cases:
        case = f"{name}/b{batch}/{dtype}"
        if left.begins(case=case):
            with record.measuring(case=case):
                run_case(name, batch, dtype, record, given)
    left.close()


if __name__ == "__main__":
    main()
