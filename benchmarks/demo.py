"""`make demo`: Candy (fast neural style, 224 x 224) from its ONNX file to a verified executable, beside its peers."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import weft
from benchmarks.models import load
from benchmarks.networks import onnx_file
from weft.api import flat
from weft.cli.peers import onnxruntime_peer
from weft.cli.show import Screen, microseconds, summary
from weft.frontends.onnx import Limits
from weft.ir.types import DType
from weft.pipeline.finish import interleave
from weft.tune.tolerance import gate_b

BUDGET_S = 150.0
REPORT = Path("build") / "candy.html"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, compare, report."""
    argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__).parse_args(arguments)
    warnings.simplefilter("ignore")
    screen = Screen("text")
    console = Console(highlight=False)
    start = time.perf_counter()
    path = onnx_file("candy")
    console.print(f"[bold]weft compile {path.name}[/bold] (at most {BUDGET_S:.0f} s of tuning)")
    module, inputs = load("candy")
    compiled = weft.compile(path, inputs, options=weft.Options(budget_s=BUDGET_S), say=screen.progress)
    screen.done()
    summary(screen, compiled.record)
    REPORT.parent.mkdir(exist_ok=True)
    compiled.report(REPORT)
    console.print(f"\nreport: {REPORT}\n\ncomparing with torch eager, torch.compile and ONNX Runtime ...")
    with torch.no_grad():
        want = flat(module(*inputs))
        check = gate_b(DType.F32, got=flat(compiled(*inputs))[0].numpy(), want=want[0].numpy())
        inductor = torch.compile(module)
        inductor(*inputs)
        runtime = onnxruntime_peer(path, inputs, len(want), Limits()).run
        assert runtime is not None
        samples = interleave(
            {
                "weft": lambda: compiled(*inputs),
                "torch eager": lambda: module(*inputs),
                "torch.compile": lambda: inductor(*inputs),
                "ONNX Runtime": runtime,
            },
            rounds=15,
            seed=1,
            budget_s=60,
        )
    median = {k: statistics.median(v) for k, v in samples.items()}
    rows = [[k, microseconds(v), f"{v / median['weft']:.2f}"] for k, v in median.items()]
    screen.table(f"interleaved, {torch.get_num_threads()} threads, fp32, batch 1", ["", "median", "× weft"], rows)
    agrees = "agrees with" if check.ok else "DIFFERS from"
    console.print(f"\noutput {agrees} the framework within the tolerance table (largest difference {check.worst:.1e})")
    console.print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
