"""A small Mamba against its framework, interleaved; on a GPU eager and torch.compile stand in CUDA graphs.

    python -m lab.mamba [--device cuda] [--dtype f16] [--layers 2] [--width 256] [--tokens 64] [--batch 1]
                        [--budget S] [--rounds N] [--without eager,inductor] [--steps]

The loop over tokens that transformers runs without kernels of its own is what every contender gets. Each is compared
with float64 first. One JSON line: medians in milliseconds, largest errors over the root mean square, the seconds that
each took to compile, kernels and primitives of the plan, how many scans it holds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.cases.mamba import LAYERS, TOKENS, WIDTH, Mamba, inputs

import weft

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
REPEATS = 30
"""Replays of a CUDA graph between two events."""
WARM = 3


def recorded(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """A call as a CUDA graph, and where its result lies."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    return graph.replay, result


def sample_ms(run: Callable[[], object], device: str) -> float:
    """Of one run: on a GPU the mean of some replays, between events."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(REPEATS):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / REPEATS


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the root mean square."""
    return float((got.cpu().double() - exact).abs().max() / exact.square().mean().sqrt())


def main() -> int:
    """Compile, check, and time in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", default="", help="contenders to leave out, by commas")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    device, dtype = given.device, DTYPES[given.dtype or ("f16" if given.device == "cuda" else "f32")]
    module = Mamba(given.layers, given.width)
    x = inputs(given.batch, given.tokens, given.width)
    runs: dict[str, Callable[[], object]] = {}
    results: dict[str, torch.Tensor] = {}
    seconds: dict[str, float] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exact = copy.deepcopy(module).double()(x.double())
        model, given_x = module.to(dtype).to(device), x.to(dtype).to(device)
        start = time.perf_counter()
        options = weft.Options(device=device, budget_s=given.budget, cache_dir=Path(folder))
        exe = weft.compile(model, (given_x,), options=options)
        seconds["weft"] = time.perf_counter() - start
        contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"weft": exe}
        if "eager" not in given.without:
            contenders["eager"] = model
        if "inductor" not in given.without:
            start = time.perf_counter()
            inductor = torch.compile(copy.deepcopy(model))
            inductor(given_x)
            seconds["inductor"] = time.perf_counter() - start
            contenders["inductor"] = inductor
        for name, call in contenders.items():
            if device == "cuda" and name == "weft" and exe.executable is not None:
                results[name] = call(given_x)
                runs[name] = exe.executable.replay  # type: ignore[attr-defined]
            elif device == "cuda":
                runs[name], results[name] = recorded(lambda call=call: call(given_x))  # type: ignore[misc]
            else:
                results[name] = call(given_x)
                runs[name] = lambda call=call: call(given_x)  # type: ignore[misc]
        errors = {name: error_of(y, exact) for name, y in results.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.rounds):
            for name, run in runs.items():
                samples[name].append(sample_ms(run, device))
    if given.steps:
        for step in exe.record.steps:
            print(f"{step.cost_us:8.1f} us  {step.schedule[:60]:60} {' '.join(step.primitives)}", flush=True)
    ms = {name: round(statistics.median(v), 4) for name, v in samples.items()}
    line = {
        "record": "case",
        "suite": "mamba",
        "case": f"mamba/{given.layers}x{given.width}/t{given.tokens}/b{given.batch}/{str(dtype).rpartition('.')[2]}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "ms": ms,
        "least_ms": {name: round(min(v), 4) for name, v in samples.items()},
        "errors": errors,
        "compile_s": {name: round(s, 1) for name, s in seconds.items()},
        "chosen": exe.record.chosen,
        "kernels": len(exe.record.steps),
        "primitives": exe.record.primitives,
        "scans": sum(n.prim == "scan" for n in exe.record.graph),
    }
    print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
