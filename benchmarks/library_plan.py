"""The library plan, which stands in when nothing was tuned, against the framework's own execution.

    python -m benchmarks.library_plan [NAME ...] [--gpu] [--rounds N]

The ten networks: f32 at batch 1 on the CPU, candy at batch 16 too; f16 at batch 1 and 16 on a GPU (--gpu), where both
are recorded into CUDA graphs. Nothing is tuned. Both run in interleaved rounds of one process; the summary holds the
geometric mean of the ratios, which is to be at most 1.1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from benchmarks.models import NETWORKS, load
from weft.frontends.torch import import_exported
from weft.options import Options
from weft.pipeline.finish import interleave
from weft.pipeline.untuned import build
from weft.platform.cpu import host_sample
from weft.platform.cuda import captured
from weft.platform.cuda import platform as gpu
from weft.runtime.cuda_executable import CudaExecutable

LIMIT = 1.1
"""Of the geometric mean of the ratios."""
LARGE_ON_CPU = ("candy",)
"""Timed at batch 16 on the CPU, too."""


def flat(result: object) -> list[torch.Tensor]:
    """The tensors of what a network gives."""
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [x for value in values for x in flat(value)]  # type: ignore[attr-defined]


def case_of(name: str, batch: int, *, on_gpu: bool) -> str:
    """What a row calls it."""
    return f"{name}/b{batch}/{'f16' if on_gpu else 'fp32'}"


def run_case(name: str, batch: int, record: Record, *, on_gpu: bool, rounds: int) -> None:
    """One network: its row."""
    module, given = load(name, batch)
    inputs: Sequence[torch.Tensor] = given
    if on_gpu:
        module = module.half().cuda()
        inputs = [x.half().cuda() if x.is_floating_point() else x.cuda() for x in given]
    options = Options(device="cuda" if on_gpu else "cpu", budget_s=0)
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs))
        imported = import_exported(program, device=options.device)
        plan = build(imported, options, ("library",)).executables["library"]
        want = flat(module(*inputs))
        got = plan(*inputs)
        error = max(float((g.double() - w.double()).abs().max()) for g, w in zip(got, want, strict=True))
        eager: Callable[[], object] = lambda: module(*inputs)  # noqa: E731
        weft: Callable[[], object] = lambda: plan(*inputs)  # noqa: E731
        if isinstance(plan, CudaExecutable):
            eager, weft = captured.Captured(lambda *x: flat(module(*x)), list(inputs)).replay, plan.replay
        runs = {"weft": weft, "eager": eager}
        samples = interleave(runs, rounds=rounds, seed=1, budget_s=60, sample=gpu.sample_us if on_gpu else host_sample)
    ms = {k: statistics.median(v) / 1e3 for k, v in samples.items()}
    record.add(
        {
            "record": "case",
            "suite": "library-plan",
            "case": case_of(name, batch, on_gpu=on_gpu),
            "weft_ms": round(ms["weft"], 4),
            "peers_ms": {"eager": round(ms["eager"], 4)},
            "error": error,
            "kernels": plan.kernels,
        }
    )


def main() -> None:
    """Run the cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after so many")
    add_option(parser)
    given = parser.parse_args()
    record = Record(folder_of_gpu() if given.gpu else "cpu", "library-plan")
    left = Left(record, time.perf_counter() + given.seconds, only=given.left)
    for name in given.names:
        for batch in (1, 16) if given.gpu or name in LARGE_ON_CPU else (1,):
            if left.begins(case=(case := case_of(name, batch, on_gpu=given.gpu))):
                with record.measuring(case=case):
                    run_case(name, batch, record, on_gpu=given.gpu, rounds=given.rounds)
    record.add(summary(record.cases))
    left.close()


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Of the newest rows of all cases; a case that failed is not within the limit."""
    ratios = [x["weft_ms"] / x["peers_ms"]["eager"] for x in rows if "failed" not in x]
    return {
        "record": "summary",
        "suite": "library-plan",
        "total": len(rows),
        "kept": sum(r <= LIMIT for r in ratios),
        "geometric_mean": round(math.exp(statistics.fmean(map(math.log, ratios))), 4) if ratios else 0.0,
        "worst": round(max(ratios, default=0.0), 4),
        "limit": LIMIT,
    }


if __name__ == "__main__":
    main()
