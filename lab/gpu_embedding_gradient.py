"""Gradients of embedding tables beside the framework's call, on an NVIDIA GPU.

    python -m lab.gpu_embedding_gradient [--only TEXT]

Every schedule that is offered is compared with float64 first; one that is wrong is said, not timed, and makes the run
fail. Times are medians of replayed CUDA graphs. A line of JSON per table: what each schedule took and was modelled to
take, and the framework's call, which makes its result itself. Indices are drawn evenly, or `skewed`: half of them name
one row.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch
from benchmarks.cases.embedding_gradient import embedding_problem
from benchmarks.harness.gpu_time import median_us

from lab.schedules import LAUNCHES, ROUNDS, drawn_indices, measured
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.ir.declined import Declined
from weft.ir.types import DType

TABLES = {
    "gpt2/8x512": (4096, 50257, 768, DType.F32),
    "gpt2/8x512, skewed": (4096, 50257, 768, DType.F32),
    "bert_base/16x128": (2048, 30522, 768, DType.F32),
    "bert_base/8x512": (4096, 30522, 768, DType.F32),
    "dlrm/b2048": (2048, 100_000, 64, DType.F32),
    "dlrm/b2048, skewed": (2048, 100_000, 64, DType.F32),
    "16384 indices": (16384, 32000, 1024, DType.BF16),
}
"""Indices, rows, elements of a row, their type."""


def main() -> int:
    """Run; 0 when every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tables whose name contains this")
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined) or not torch.cuda.is_available():
        print("lab.gpu_embedding_gradient: no NVRTC, or torch sees no NVIDIA GPU", file=sys.stderr)
        return 2
    facts, right = gpu_facts(None, calibrate=False), True
    for case, (count, rows, width, dtype) in TABLES.items():
        if given.only not in case:
            continue
        torch.manual_seed(0)
        kind = torch.float32 if dtype is DType.F32 else torch.bfloat16
        dy = torch.randn(count, width, device="cuda").to(kind)
        index = drawn_indices(count, rows, skewed="skewed" in case)
        backward = torch.ops.aten.embedding_dense_backward
        exact = backward(dy.double(), index, rows, -1, False)

        def outputs(shape: tuple[int, int] = (rows, width), kind: torch.dtype = kind) -> list[torch.Tensor]:
            return [torch.full(shape, math.nan, device="cuda", dtype=kind)]

        def errors(outs: Sequence[torch.Tensor], exact: torch.Tensor = exact) -> list[float]:
            return [float((outs[0].double() - exact).norm() / exact.norm())]

        limit = 2.0**-20 if dtype is DType.F32 else 2.0**-8
        found = measured(
            embedding_problem((count,), rows, width, dtype=dtype), facts, nvrtc, [dy, index], outputs, errors, [limit]
        )
        right &= not found.wrong

        def theirs(dy: torch.Tensor = dy, index: torch.Tensor = index, rows: int = rows) -> None:
            backward(dy, index, rows, -1, False)  # noqa: B023

        library = median_us(theirs, launches=LAUNCHES, rounds=ROUNDS)
        found.tell(case, {"aten_us": round(library, 2), "over_aten": round(library / found.best_us, 3)})
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
