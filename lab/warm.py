"""How long a compile takes whose plan is stored, by stage: `python -m lab.warm NETWORK... --device cuda`.

The first compile of each network makes the plan unless the cache has it; the next ones find it. `--fresh` also times
one in a process that has compiled nothing yet.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.models import load

import weft

Posed = tuple[torch.nn.Module, Sequence[torch.Tensor]]


def posed(name: str, device: str) -> Posed:
    """The network and its input: of 16-bit floats on a GPU."""
    module, inputs = load(name)
    if device == "cpu":
        return module, inputs
    return module.half().to(device), [(x.half() if x.is_floating_point() else x).to(device) for x in inputs]


@dataclass(frozen=True)
class Timed:
    """One compile."""

    seconds: float
    stages: dict[str, float]
    """Seconds; the first of them is what comes before the pipeline's own."""
    outputs: list[torch.Tensor]
    """Of its own executable."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.stages.items() if seconds >= 5e-4)
        return f"{self.seconds:.2f} s ({parts})"


def timed(name: str, given: Posed, options: weft.Options) -> Timed:
    """Compile once, and run what came out."""
    module, inputs = given
    start = time.perf_counter()
    compiled = weft.compile(module, inputs, options=options, name=name)
    seconds = time.perf_counter() - start
    stages = {s.name: s.seconds for s in compiled.record.stages}
    outputs = [x.cpu() for x in compiled.executable(*inputs)]
    return Timed(seconds, {"import and rest": seconds - sum(stages.values()), **stages}, outputs)


def same(x: Timed, y: Timed) -> str:
    """Whether two compiles give the same bits."""
    equal = all(torch.equal(a, b) for a, b in zip(x.outputs, y.outputs, strict=True))
    return "same outputs" if equal else "OTHER OUTPUTS"


def profile(name: str, given: Posed, options: weft.Options, lines: int) -> None:
    """Where one compile spends its time, function by function."""
    profiler = cProfile.Profile()
    profiler.runcall(timed, name, given, options)
    for order in ("cumulative", "tottime"):
        pstats.Stats(profiler).strip_dirs().sort_stats(order).print_stats(lines)


def main() -> None:
    """Best of several, and all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds for a plan that is not stored yet")
    parser.add_argument("--cache", type=Path, help="folder of the stored plans; the usual one where it is not given")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    given = parser.parse_args()
    place = {} if given.cache is None else {"cache_dir": given.cache}
    options = weft.Options(device=given.device, budget_s=given.budget, **place)
    for name in given.networks:
        case = posed(name, given.device)
        first = timed(name, case, options)
        print(f"{name} first: {first}", flush=True)
        if not given.repeat:
            continue
        found = [timed(name, case, options) for _ in range(given.repeat)]
        print(f"{name} warm: {' '.join(f'{x.seconds:.2f}' for x in found)} s, {same(first, found[-1])}")
        print(f"{name} best: {min(found, key=lambda x: x.seconds)}", flush=True)
        if given.fresh:
            command = [sys.executable, "-m", "lab.warm", name, "--repeat", "0"]
            command += ["--device", given.device, "--budget", str(given.budget)]
            subprocess.run(command + (["--cache", str(given.cache)] if given.cache else []), check=True, timeout=300)
        if given.profile:
            profile(name, case, options, given.profile)


if __name__ == "__main__":
    main()
