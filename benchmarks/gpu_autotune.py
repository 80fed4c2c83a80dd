"""torch.compile in mode max-autotune beside eager, both in CUDA graphs: the slow peer, in runs of its own.

    python -m benchmarks.gpu_autotune [NAME ...] [--batch 1,16] [--dtype f16] [--seconds 560]

Eager's graph is timed in the same interleaved rounds, and is the yardstick: `benchmarks.gpu_networks` times it beside
Weft. Cases already on record are passed over, and no case is begun after `--seconds`, so that the command can be given
again until nothing is left.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings

import torch

from benchmarks.gpu_networks import error_of, peer, posed, record_of
from benchmarks.models import NETWORKS
from benchmarks.record import Record
from weft.pipeline import gpu
from weft.pipeline.finish import interleave


def run_case(name: str, batch: int, dtype: str, record: Record, rounds: int) -> None:
    """Compile and time one network; one record."""
    module, inputs, exact = posed(name, batch, dtype)
    images = all(x.ndim == 4 for x in inputs)
    runs, compile_s, errors = {}, {}, {}
    for who, last in (("eager", False), *([("eager", True)] if images else []), ("autotune", images)):
        label = f"{who}_last" if last else who
        captured, compile_s[label], _, _ = peer(who, module, inputs, channels_last=last)
        errors[label] = error_of(captured.replay(), exact)
        runs[label] = captured.replay
    samples = interleave(runs, rounds=rounds, seed=1, budget_s=60, sample=gpu.sample_us)
    ms = {k: round(statistics.median(v) / 1e3, 5) for k, v in samples.items()}
    record.add(
        {
            "record": "case", "suite": "autotune", "case": f"{name}/b{batch}/{dtype}", "peers_ms": ms, "errors": errors,
            "peer_compile_s": {k: round(v, 1) for k, v in compile_s.items()},
            "samples_ms": {k: [round(x / 1e3, 5) for x in v] for k, v in samples.items()},
        }
    )  # fmt: skip
    torch.compiler.reset()


def main() -> None:
    """Run the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--dtype", default="f16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=560.0)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_autotune: torch sees no NVIDIA GPU")
    warnings.simplefilter("ignore")
    began = time.monotonic()
    record = record_of("autotune")
    wanted = [
        f"{name}/b{batch}/{dtype}"
        for batch in given.batch.split(",")
        for dtype in given.dtype.split(",")
        for name in given.names
    ]
    known = record.known()
    record.keep(())
    for case in wanted:
        if case in known:
            continue
        if time.monotonic() - began > given.seconds:
            print(f"{case}: no time left", file=sys.stderr)
            continue
        name, batch, dtype = case.split("/")
        try:
            run_case(name, int(batch.removeprefix("b")), dtype, record, given.rounds)
        except RuntimeError as error:
            print(f"{case}: failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
