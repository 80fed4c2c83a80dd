"""Fully connected networks: Weft's kernel against eager layers and torch.compile, on an NVIDIA GPU.

    python -m benchmarks.gpu_mlp [--only TEXT] [--first K] [--seconds S] [--dtype T] [--no-compile] [--dry]

Every network maps width to width in each of its layers, with a bias and an activation behind each, the last included.
Weft: the fastest of the first K schedules that the tuner is offered. Peers: eager layers, torch.compile (default mode,
asked where it says most), and, for ReLU, one library call per layer with bias and activation inside (`library`); all
are recorded into a CUDA graph. A time is the median over replays of a graph of launches on the same data. The floor is
the larger of input and output at 4.8 TB/s and the products at 989 TFLOP/s; where the data stay in the L2 cache (`hot`)
only the products bound a kernel. What is faster than its bound fails the run. Errors are norms of the error over the
norm of the result, against float64 on the first 4096 rows. `--dry` writes and compiles the kernels without a GPU.
Nothing is written but standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from benchmarks.gpu_time import Kernel, median_us
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.errors import WeftError
from weft.fission.arithmetic import tanh
from weft.fission.gelu import gelu
from weft.fission.relu import relu
from weft.fission.sigmoid import silu
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

MEMORY, TENSOR = 4.8e12, 989.4e12
"""Bytes and operations per second."""
L2_BYTES = 60 << 20
COMPILED = ((12, 4), (18, 4), (20, 4))
"""(logarithm of the rows, depth) for torch.compile, which takes seconds each."""
ROUNDS = 7
CHECKED = 4096
"""Rows that are compared."""
TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "tanh": nn.Tanh, "none": nn.Identity,
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[[GraphBuilder, NodeId], NodeId | Declined]] = {
    "relu": relu, "silu": silu, "gelu": gelu, "tanh": tanh, "none": lambda _, x: x,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One network; sizes are counts."""

    log_rows: int
    width: int
    depth: int
    act: str = "relu"

    @property
    def name(self) -> str:
        """For people."""
        return f"2^{self.log_rows} rows, {self.depth} x {self.width} {self.act}"

    @property
    def rows(self) -> int:
        """Of input and output."""
        return 1 << self.log_rows

    @property
    def flops(self) -> float:
        """Of the products."""
        return 2.0 * self.rows * self.width**2 * self.depth

    @property
    def hot(self) -> bool:
        """Whether input and output may stay in the L2 cache."""
        return 4 * self.rows * self.width <= 2 * L2_BYTES

    @property
    def floor_us(self) -> float:
        """What no kernel can beat whose data come from memory."""
        return 1e6 * max(4.0 * self.rows * self.width / MEMORY, self.flops / TENSOR)

    @property
    def bound_us(self) -> float:
        """What no kernel can beat."""
        return 1e6 * self.flops / TENSOR if self.hot else self.floor_us


CASES = (
    *(Case(r, w, d) for r in (18, 20, 12, 16, 14) for w in (64, 128, 256, 32, 16) for d in (4, 8)),
    *(Case(18, w, 4, act) for w in (128, 256) for act in ("silu", "gelu", "tanh")),
    *(Case(18, 192, 4, act) for act in ("relu", "silu", "gelu", "tanh")),
    *(Case(r, w, 4) for r in (18, 14) for w in (320, 384, 512)),
)
"""The most telling sizes first: time may run out."""


def problem_of(c: Case, dtype: DType) -> Problem:
    """The network as a problem of the generator: x, then weight (in, out) and bias of each layer."""
    b = GraphBuilder()
    h = b.input(TensorType(dtype, (c.rows, c.width)))
    for _ in range(c.depth):
        w = b.input(TensorType(dtype, (c.width, c.width)), is_weight=True)
        bias = b.input(TensorType(dtype, (c.width,)), is_weight=True)
        y = b.apply(Prim.ADD, b.add(Prim.MATMUL, h, w), bias)
        h = cast("NodeId", ACTIVATIONS[c.act](b, y))
    graph = b.build([h])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))


def network(c: Case, dtype: DType) -> nn.Sequential:
    """The same as a module, on the device."""
    torch.manual_seed(c.width + c.depth)
    layers: list[nn.Module] = []
    for _ in range(c.depth):
        layer = nn.Linear(c.width, c.width)
        nn.init.normal_(layer.weight, std=1.4 / c.width**0.5)
        nn.init.normal_(layer.bias, std=0.1)
        layers += [layer, MODULES[c.act]()]
    return nn.Sequential(*layers).to("cuda", TORCH[dtype]).eval()


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


def peers(c: Case, net: nn.Sequential, x: torch.Tensor, *, compiled: bool) -> tuple[dict[str, float], dict[str, str]]:
    """(microseconds, failures)."""
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"eager": net}
    if c.act == "relu":
        ways["library"] = by_library(net)
    if compiled:
        torch.compiler.reset()
        ways["compile"] = cast("Callable[[torch.Tensor], torch.Tensor]", torch.compile(net, dynamic=False))
    times: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, way in ways.items():

        def call(way: Callable[[torch.Tensor], torch.Tensor] = way) -> torch.Tensor:
            return way(x)

        try:
            times[name] = median_us(call, launches=launches_for(8 * c.floor_us), rounds=ROUNDS)
        except Exception as error:  # a peer that does not take the case is said, and the rest is measured
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0][:90]
            torch.cuda.synchronize()
    return times, failures


def record(c: Case, dtype: DType, kernels: Sequence[Kernel], *, compiled: bool) -> dict[str, object]:
    """One case on the GPU."""
    net = network(c, dtype)
    x = torch.randn(c.rows, c.width, device="cuda", dtype=TORCH[dtype])
    layers = [m for m in net if isinstance(m, nn.Linear)]
    inputs = [x, *(t for m in layers for t in (m.weight.detach().t().contiguous(), m.bias.detach()))]
    with torch.no_grad():
        found, failures = peers(c, net, x, compiled=compiled)
        own = net(x[:CHECKED])
        exact = net.double()(x[:CHECKED].double())
    tried = []
    errors = []
    for kernel in kernels:
        out = torch.full_like(x, math.nan)
        us = kernel.time(inputs, out, launches=launches_for(2 * c.floor_us), rounds=ROUNDS)
        error = error_of(out, exact) if bool(torch.isfinite(out).all()) else math.inf
        errors.append(error)
        tried.append(us if error <= 1.5 * error_of(own, exact) + 1e-4 else math.inf)
        if tried[-1] == math.inf:
            print(f"WRONG: {c.name}: {kernel.source.schedule} error {error:.2g}", file=sys.stderr)
    us = min(tried, default=math.inf)
    best = min(found, key=lambda k: found[k]) if found else ""
    at = tried.index(us) if us < math.inf else -1
    if us < c.bound_us:
        print(f"FASTER THAN ITS BOUND: {c.name}", file=sys.stderr)
    return {
        "record": "mlp", "rows": c.rows, "width": c.width, "depth": c.depth, "act": c.act, "dtype": dtype.value,
        "case": c.name, "weft_us": round(us, 3) if us < math.inf else None,
        "tflops": round(c.flops / us / 1e6, 1), "share": round(c.floor_us / us, 3), "hot": c.hot,
        "possible": us >= c.bound_us,
        "peers_us": {k: round(v, 3) for k, v in found.items()}, "best_peer": best,
        "ratio": round(found[best] / us, 3) if best else None, "rank": at,
        "error": float(f"{errors[at]:.3g}") if at >= 0 else None, "eager_error": float(f"{error_of(own, exact):.3g}"),
        "tried": [f"{t:.2f} {_brief(k)}" for t, k in zip(tried, kernels, strict=True)], "failures": failures,
    }  # fmt: skip


def _brief(kernel: Kernel) -> str:
    p = dict(kernel.source.schedule.params)
    if p["template"] == "mlp_wide":
        return f"{'group' if p['group'] else 'warp'} w{p['warps']} s{p['stages']} c{p['columns']}"
    return (
        f"{'group' if p['group'] else 'warp'} t{p['tiles']} w{p['warps']} x{p['resident']} s{p['stages']}/{p['fixed']}"
    )


def table(rows: Sequence[dict[str, object]]) -> str:
    """What was measured, and the geometric means over the best peer."""
    names = ("eager", "compile", "library")
    head = f"{'case':30} {'weft us':>9} {'TFLOP/s':>8} {'share':>6} {'rank':>4}"
    lines = [f"{head} {' '.join(f'{n:>9}' for n in names)}   ratio of best"]
    ratios: dict[int, list[float]] = {}
    for row in rows:
        found = cast("dict[str, float]", row["peers_us"])
        cells = " ".join(f"{found[n]:9.2f}" if n in found else f"{'-':>9}" for n in names)
        ratio = cast("float | None", row["ratio"])
        if ratio:
            ratios.setdefault(cast("int", row["width"]), []).append(ratio)
        us = f"{row['weft_us']:9.2f}" if row["weft_us"] else f"{'-':>9}"
        own = f"{us} {row['tflops']:8.1f} {row['share']:6.2f} {row['rank']:4}"
        end = f"{ratio:7.2f} of {row['best_peer']}" if ratio else "      -"
        lines.append(f"{row['case']:30} {own} {cells} {end}")
    for width, found_ratios in sorted(ratios.items()):
        mean = math.exp(statistics.fmean(map(math.log, found_ratios)))
        lines.append(
            f"width {width}: geometric mean {mean:.2f} over {len(found_ratios)}, least {min(found_ratios):.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Compile all, then measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--first", type=int, default=4, help="schedules of each problem (4)")
    parser.add_argument("--seconds", type=float, default=55.0, help="no case is begun after so many")
    parser.add_argument("--dtype", default="bf16", choices=[d.value for d in TORCH])
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    given = parser.parse_args()
    started = time.perf_counter()
    dtype = DType(given.dtype)
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 2
    facts = GpuFacts()
    if not given.dry:
        torch.zeros(1, device="cuda")
        facts = gpu_facts(None, calibrate=False)
    cases = [c for c in CASES if given.only in c.name]
    jobs: list[tuple[int, CudaSource]] = []
    for i, c in enumerate(cases):
        problem = problem_of(c, dtype)
        schedules = templates.schedules(problem, facts)
        if isinstance(schedules, Declined):
            print(f"{c.name}: {schedules.reason}", file=sys.stderr)
            continue
        made = [templates.emit(problem, s) for s in schedules[: given.first]]
        jobs += [(i, s) for s in made if isinstance(s, CudaSource)]
    results = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for _, s in jobs])
    kernels: dict[int, list[Kernel]] = {}
    for (i, source), result in zip(jobs, results, strict=True):
        if not isinstance(result, CompiledCubin):
            print(f"{cases[i].name}: {source.schedule}: {result}", file=sys.stderr)
            continue
        used = result.of(source.launches[0].entry)
        if used.spill_stores or result.warnings:
            note = f"spills {used.spill_stores} B {' '.join(result.warnings)[:120]}"
            print(f"{cases[i].name}: {source.schedule} {note}", file=sys.stderr)
        kernels.setdefault(i, []).append(Kernel(source, str(result.path)))
    print(f"{len(jobs)} kernels compiled after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if given.dry:
        for i, c in enumerate(cases):
            print(f"{c.name:30} floor {c.floor_us:8.2f} us {[_brief(k) for k in kernels.get(i, [])]}")
        return 0
    rows = []
    for i, c in enumerate(cases):
        if time.perf_counter() - started > given.seconds:
            print(f"no time left for {c.name} and what follows", file=sys.stderr)
            break
        try:
            row = record(
                c, dtype, kernels.get(i, []), compiled=(c.log_rows, c.depth) in COMPILED and not given.no_compile
            )
        except (WeftError, RuntimeError) as error:
            print(f"{c.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows))
    return 0 if all(r["possible"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
