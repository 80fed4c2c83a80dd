"""What a call of a compiled small network takes beside its kernels, on a CPU: `python -m benchmarks.call_overhead`.

Four layers of 32 at batch 1 (8 operators), one thread; each plan that needs no measurement is called. Yardsticks: ONNX
Runtime's `session.run` on a bound feed, and the module itself. Best of 15 rounds of 2,000 calls.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import weft
from weft.frontends.onnx import export_onnx
from weft.frontends.torch import import_exported
from weft.pipeline import untuned

ROUNDS, CALLS = 15, 2000


def network() -> nn.Module:
    """Linear and ReLU, three times, then Linear and Softmax."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
        return nn.Sequential(*middle, nn.Linear(32, 8), nn.Softmax(-1)).eval()


def best_us(run: Callable[[], object]) -> float:
    """Microseconds of one call, of the best round."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per way."""
    argparse.ArgumentParser(prog="python -m benchmarks.call_overhead", description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    x, module = torch.randn(1, 16, generator=torch.Generator().manual_seed(1)), network()
    imported = import_exported(torch.export.export(module, (x,)))
    with tempfile.TemporaryDirectory() as folder:
        options = weft.Options(budget_s=0, threads=1, cache_dir=Path(folder))
        compiled = weft.compile(module, (x,), options=options)
        print(f"compiled ({compiled.record.chosen}): {best_us(lambda: compiled(x)):.2f} us")
        for way, plan in untuned.build(imported, options, list(untuned.WAYS)).executables.items():
            print(f"{way}: {plan.kernels} kernels, {best_us(partial(plan, x)):.2f} us a call")
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(export_onnx(imported.graph), chosen, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    print(f"onnxruntime: {best_us(lambda: session.run(None, feed)):.2f} us")
    with torch.no_grad():
        print(f"eager: {best_us(lambda: module(x)):.2f} us")


if __name__ == "__main__":
    main()
