"""Small networks with odd channels: plans with padded tensors against plans without, and against padding by hand.

    python -m lab.gpu_padded [--only TEXT] [--dtypes f16,bf16,f32] [--seconds S] [--budget S] [--out FILE]
                                    [--steps] [--ways plain,padded,hand16,hand32,hand128]

`plain`: padded tensors are no alternatives. `padded`: they are, and the plan takes them where the measured times say
so. `hand16`, `hand32`, `hand128`: the model itself has weights (and an input) padded to so many bytes, without the
selects that keep infinities out of the lanes; compiled in the first way. Each is compared with float64 first, then
their executables are timed in turns, by events around replays of their graphs; medians. One JSON line per case.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from benchmarks.cases.padded import CASES, DTYPES, compiled
from benchmarks.gpu_networks import say_refused
from benchmarks.harness.kernel_cases import measuring
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from torch import nn
from torch.nn import functional as F

import weft
from weft.platform.cuda import platform as gpu
from weft.runtime.cuda_executable import CudaExecutable

PATIENCE_S = 60
"""A case that takes longer ends the run: a kernel hangs."""
ROUNDS, REPEATS = 15, 30


class Channels(nn.Module):
    """Zeros behind the channels of an image, or the columns of a matrix."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, self.more) if x.ndim == 4 else (0, self.more))


def by_hand(module: nn.Module, lanes: int) -> nn.Module | None:
    """The same chain of layers with zeros in its weights, to so many channels each; None for what is no chain."""

    def wide(channels: int) -> int:
        return -(-channels // lanes) * lanes

    if not isinstance(module, nn.Sequential):
        return None
    found: list[nn.Module] = []
    weighted = [x for x in module if isinstance(x, nn.Conv2d | nn.Linear)]
    for layer in module:
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            found.append(layer)
            continue
        n, k = layer.weight.shape[:2]
        wider, deeper = n if layer is weighted[-1] else wide(n), wide(k)
        if layer is weighted[0] and deeper != k:
            found.append(Channels(deeper - k))
        made = copy.deepcopy(layer)
        weight, bias = torch.zeros((wider, deeper, *layer.weight.shape[2:])), torch.zeros(wider)
        assert layer.bias is not None
        weight[:n, :k], bias[:n] = layer.weight.detach(), layer.bias.detach()
        made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
        found.append(made)
    return nn.Sequential(*found)


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the root mean square."""
    return float((got.double() - exact).abs().max() / exact.square().mean().sqrt())


def steps_of(exe: weft.Compiled) -> str:
    """The kernels of the plan: microseconds, template or generator, shapes that are read and written."""
    found = []
    for s in exe.record.steps:
        name = (
            s.schedule.split("template=")[-1].split(",")[0] if "template=" in s.schedule else s.schedule.split("(")[0]
        )
        shape = s.outputs[0].split(" ")[1]
        found.append(f"{s.cost_us:.1f} {name} {shape}")
    return "; ".join(found)


def run_case(name: str, dtype: str, ways: Sequence[str], options: weft.Options, *, steps: bool) -> dict[str, object]:
    """One network in one type."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    module, kind = make().eval(), DTYPES[dtype]
    x = torch.randn(shape).to(kind).cuda()
    chain = copy.deepcopy(module)
    module = module.to(kind).cuda()
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
    runs: dict[str, Callable[[], object]] = {}
    line: dict[str, object] = {"record": "case", "suite": "padded", "case": f"{name}/{dtype}"}
    errors: dict[str, float] = {}
    seen: set[str] = set()
    for way in ways:
        model: nn.Module | None = module
        if way.startswith("hand"):
            model = by_hand(chain, int(way.removeprefix("hand")) // kind.itemsize)
            widths = str([p.shape for p in model.parameters()]) if model else ""
            if widths in seen:
                continue
            seen.add(widths)
        if model is None:
            continue
        start, since = time.perf_counter(), time.time()
        exe = compiled(model.to(kind).cuda(), x, options, padded=way == "padded")
        say_refused(options.cache, since)
        assert isinstance(exe.executable, CudaExecutable)
        (got,) = exe.executable(x)
        errors[way] = error_of(got, exact)
        exe.executable.replay()
        runs[way] = exe.executable.replay
        line[f"{way}_s"] = round(time.perf_counter() - start, 1)
        line[f"{way}_kernels"] = len(exe.record.steps)
        line[f"{way}_refused"] = list(exe.record.rejected_kernels)
        line[f"{way}_steps"] = steps_of(exe)
        if steps:
            print(f"   {way}: {line[f'{way}_steps']}", flush=True)
    samples: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            samples[way].append(gpu.sample_us(run, REPEATS))
    us = {way: round(statistics.median(v), 2) for way, v in samples.items()}
    text = ", ".join(f"{way} {t:.2f} us (error {errors[way]:.1e})" for way, t in us.items())
    ratio = f" plain/padded x{us['plain'] / us['padded']:.3f}" if {"plain", "padded"} <= set(us) else ""
    print(f"== {name} {dtype}: {text}{ratio}", flush=True)
    return {**line, "us": us, "errors": errors}


def main() -> int:
    """Run the cases in order until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name and a colon contain one of these, by commas")
    parser.add_argument("--dtypes", default="f16")
    parser.add_argument("--ways", default="plain,padded,hand16")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--budget", type=float, default=12.0)
    parser.add_argument("--out", type=Path, help="add lines to this file; `-`: into the record")
    parser.add_argument("--steps", action="store_true")
    add_option(parser)
    given = parser.parse_args()
    record = Record(folder_of_gpu(), "padded") if str(given.out) == "-" else None
    left = Left(record, time.perf_counter() + given.seconds, only=given.left)

    def late(*_: object) -> None:
        print("a case hangs", file=sys.stderr, flush=True)
        sys.exit(3)

    signal.signal(signal.SIGALRM, late)
    wanted = [w for w in given.only.split(",") if w]
    with tempfile.TemporaryDirectory() as folder:
        options = weft.Options(device="cuda", budget_s=given.budget, cache_dir=Path(folder))
        for dtype in given.dtypes.split(","):
            for name in CASES:
                if wanted and not any(w in f"{name}:" for w in wanted):
                    continue
                if not left.begins(case=f"{name}/{dtype}"):
                    continue
                signal.alarm(PATIENCE_S)
                with measuring(record, case=f"{name}/{dtype}"):
                    line = run_case(name, dtype, given.ways.split(","), options, steps=given.steps)
                    if record is not None:
                        record.add(line)
                    elif given.out:
                        with given.out.open("a") as file:
                            file.write(json.dumps(line) + "\n")
                signal.alarm(0)
    return left.status(record is not None and record.failed)


if __name__ == "__main__":
    sys.exit(main())
