"""Which tensors hold the memory that a compiled training step keeps: segments with room left, and what lies in them.

    python -m lab.gpu_training_memory gpt2/8x512 [--budget 30]

A JSON line for each segment of the framework's that has more than 8 MB free or belongs to a graph: its size, what is
free, and the size of each block in use with the functions that asked for it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from benchmarks.cases.training import CASES
from benchmarks.gpu_training import memory_bytes, memory_of
from benchmarks.harness.training_steps import Placed, by_weft

LEAST = 8 << 20
"""Bytes free in a segment that is shown."""
FRAMES = 6
"""Functions of a block that are shown."""


def asked_by(block: Mapping[str, Any]) -> str:
    """The innermost functions, those of Python and those of the framework's that name no template."""
    names = [
        f"{frame['filename'].rpartition('/')[2]}:{frame['line']}:{frame['name']}"
        for frame in block.get("frames", [])
        if frame["filename"].endswith(".py")
    ]
    return " < ".join(names[:FRAMES])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, run some steps, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--budget", type=float, default=30.0)
    given = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.cuda.memory._record_memory_history(context="all", stacks="python")
    placed = Placed(CASES[given.case], "cuda", small=False, fused=False)
    step, row = by_weft(placed, given.budget, warm=False)
    batch = placed.batch(0)
    step(*batch)
    most = memory_bytes(step, batch)
    seen: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        free, pool = segment["total_size"] - segment["allocated_size"], tuple(segment["segment_pool_id"])
        if free < LEAST and pool == (0, 0):
            continue
        blocks = [b for b in segment["blocks"] if b["state"] != "inactive"]
        for b in blocks:
            seen[f"{pool} {b['size'] / 1e6:.2f} MB {b['state']} {asked_by(b)}"] += 1
        print(json.dumps({
            "pool": pool, "stream": segment["stream"], "mb": round(segment["total_size"] / 1e6, 2),
            "free_mb": round(free / 1e6, 2), "blocks": len(blocks),
            "held": [(round(b["size"] / 1e6, 3), asked_by(b)) for b in blocks[:8]],
        }))  # fmt: skip
    for what, count in seen.most_common():
        print(count, what)
    found = {"case": given.case, "memory_bytes": most, **memory_of(), "plan": row["plan"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
