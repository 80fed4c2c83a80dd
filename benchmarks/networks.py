"""The ten networks against eager, torch.compile (also with `freezing`) and ONNX Runtime: fp32, batch 1, in turns.

    python -m benchmarks.networks [NAME ...] [--budget SECONDS] [--rounds N]

Each network is compiled by Weft from its torch module and from its ONNX file; both must agree with the framework.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import weft
from benchmarks.harness.record import Record
from benchmarks.models import NETWORKS, load
from benchmarks.models.export import export
from weft.cli.peers import onnxruntime_peer
from weft.frontends.onnx import Limits
from weft.pipeline.finish import interleave

BUILD = Path(__file__).parent.parent / "build" / "models"


def onnx_file(name: str) -> Path:
    """The network's ONNX file, exported once."""
    path = BUILD / f"{name}.onnx"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        export(name, BUILD)
    return path


def run_case(name: str, record: Record, *, budget_s: float, rounds: int) -> None:
    """Compile, compare and time one network; one record."""
    module, inputs = load(name)
    path = onnx_file(name)
    options = weft.Options(budget_s=budget_s)
    start = time.perf_counter()
    from_torch = weft.compile(module, inputs, options=options, name=name)
    tuning_s = time.perf_counter() - start
    start = time.perf_counter()
    # most kernels are known from the first compilation: the database is shared
    from_onnx = weft.compile(path, inputs, options=weft.Options(budget_s=budget_s / 3))
    tuning_onnx_s = time.perf_counter() - start
    start = time.perf_counter()
    weft.compile(path, inputs, options=weft.Options(budget_s=budget_s / 3))
    warm_s = time.perf_counter() - start
    with torch.no_grad():
        checked = [next(p for p in exe.record.plans if p.name == exe.record.chosen) for exe in (from_torch, from_onnx)]
        agree = all(p.verified for p in checked)
        start = time.perf_counter()
        compiled = torch.compile(module)
        compiled(*inputs)
        inductor_s = time.perf_counter() - start
        freezing = torch.compile(copy.deepcopy(module), options={"freezing": True})
        freezing(*inputs)
        runtime = onnxruntime_peer(path, inputs, len(from_onnx.graph.outputs), Limits()).run
        assert runtime is not None
        runs: dict[str, Callable[[], object]] = {
            "weft": lambda: from_torch(*inputs),
            "weft_onnx": lambda: from_onnx(*inputs),
            "eager": lambda: module(*inputs),
            "inductor": lambda: compiled(*inputs),
            "freezing": lambda: freezing(*inputs),
            "onnxruntime": runtime,
        }
        samples = interleave(runs, rounds=rounds, seed=1, budget_s=120)
    ms = {k: round(statistics.median(v) / 1e3, 4) for k, v in samples.items()}
    peers = {k: ms[k] for k in ("eager", "inductor", "freezing", "onnxruntime")}
    best_peer = min(peers, key=lambda k: peers[k])
    r = from_torch.record
    record.add(
        {
            "record": "case",
            "suite": "networks",
            "case": f"{name}/b1/fp32",
            "device": record.head["device"],
            "weft_ms": ms["weft"],
            "weft_onnx_ms": ms["weft_onnx"],
            "peers_ms": peers,
            "speedup_eager": round(peers["eager"] / ms["weft"], 3),
            "speedup_best": round(peers[best_peer] / ms["weft"], 3),
            "best_peer": best_peer,
            "agrees": agree,
            "error": max(p.worst_error for p in checked),
            "operators": r.operators,
            "primitives": r.primitives,
            "kernels": len(r.steps),
            "kernels_onnx": len(from_onnx.record.steps),
            "plan": r.chosen,
            "tuning_s": round(tuning_s, 1),
            "tuning_onnx_s": round(tuning_onnx_s, 1),
            "warm_s": round(warm_s, 2),
            "inductor_compile_s": round(inductor_s, 1),
            "arena_bytes": r.arena_bytes,
            "live_bytes": r.live_bytes,
            "samples_ms": {k: [round(x / 1e3, 4) for x in v] for k, v in samples.items()},
        }
    )


def main() -> None:
    """Run the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--budget", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    record = Record("cpu", "networks")
    for name in given.names:
        with record.measuring(case=f"{name}/b1/fp32"):
            run_case(name, record, budget_s=given.budget, rounds=given.rounds)
    record.close()


if __name__ == "__main__":
    main()
