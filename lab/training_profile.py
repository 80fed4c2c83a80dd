"""What a training step runs on a GPU, kernel by kernel, as the profiler of the framework sees it in graphs, too.

    python -m lab.training_profile CASE [--who weft,eager] [--budget S] [--steps N]

Microseconds a step and launches of each kernel, the longest first; the time in kernels, and from the first to the last.
A plan that the tuning database has for that budget is taken from it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from benchmarks.cases.training import CASES
from benchmarks.harness.training_steps import Placed, by_peer, by_weft
from torch.profiler import ProfilerActivity, profile

LONGEST, NAME = 45, 90


def main() -> None:
    """Profile each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--who", default="weft")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    for who in given.who.split(","):
        placed = Placed(CASES[given.case], "cuda", small=False, fused=who != "weft")
        step, told = by_weft(placed, given.budget, warm=False) if who == "weft" else by_peer(placed, who)
        batch = placed.batch(0)
        for _ in range(3):
            step(*batch)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(given.steps):
                step(*batch)
            torch.cuda.synchronize()
        events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[attr-defined]
        times: dict[str, list[float]] = defaultdict(list)
        for e in events:
            times[e.name[:NAME]].append(e.time_range.elapsed_us())
        span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        total = sum(map(sum, times.values()))
        print(who, {k: v for k, v in told.items() if k in ("plan", "kernels", "kernels_us", "tuning_s", "plans")})
        print(f"{total / given.steps:.0f} us in kernels of {span / given.steps:.0f} us a step")
        for name, us in sorted(times.items(), key=lambda x: -sum(x[1]))[:LONGEST]:
            print(f"{sum(us) / given.steps:9.1f} {len(us) / given.steps:7.1f}  {name}")


if __name__ == "__main__":
    main()
