"""Embedding tables updated by the kernel that sums their gradient, beside two kernels, on an NVIDIA GPU.

    python -m lab.gpu_embedding_update [--only TEXT]

Every schedule that is offered is compared with float64 first; one that is wrong is said, not timed, and makes the run
fail. Times are medians of replayed CUDA graphs. A line of JSON per table: what each schedule took and was modelled to
take, and beside it the best kernels of the gradient alone (`gradient_us`) and of the update alone (`update_us`).
Indices are drawn evenly, or `skewed`: half of them name one row.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch
from benchmarks.cases.embedding_gradient import embedding_problem, updated_problem

from lab.schedules import drawn_indices, measured
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.ir.declined import Declined

TABLES = {
    "dlrm/b2048, sgd": (2048, 100_000, 64, "sgd"),
    "dlrm/b2048, sgd, skewed": (2048, 100_000, 64, "sgd"),
    "dlrm/b2048, adam": (2048, 100_000, 64, "adam"),
    "bert_base/16x128, adam": (2048, 30522, 768, "adam"),
    "16384 indices, sgd": (16384, 32000, 1024, "sgd"),
}
"""Indices, rows, elements of a row, and the optimizer; all of f32."""
LIMIT = 2.0**-20


def main() -> int:
    """Run; 0 when every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tables whose name contains this")
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined) or not torch.cuda.is_available():
        print("lab.gpu_embedding_update: no NVRTC, or torch sees no NVIDIA GPU", file=sys.stderr)
        return 2
    facts, right = gpu_facts(None, calibrate=False), True
    for case, (count, rows, width, rule) in TABLES.items():
        if given.only not in case:
            continue
        torch.manual_seed(0)
        dy = torch.randn(count, width, device="cuda")
        index = drawn_indices(count, rows, skewed="skewed" in case)
        tables = [torch.rand(rows, width, device="cuda") for _ in range(2 if rule == "sgd" else 3)]
        scalars = [torch.rand((), device="cuda") for _ in range(3 if rule == "sgd" else 5)]
        gradient = torch.ops.aten.embedding_dense_backward(dy.double(), index, rows, -1, False)
        exact = updated(rule, gradient, [x.double() for x in tables], [x.double() for x in scalars])

        def outputs(some: Sequence[torch.Tensor] = exact) -> list[torch.Tensor]:
            return [torch.full(x.shape, math.nan, device="cuda") for x in some]

        def errors(outs: Sequence[torch.Tensor], some: Sequence[torch.Tensor] = exact) -> list[float]:
            return [float((x.double() - y).norm() / y.norm()) for x, y in zip(outs, some, strict=True)]

        limits = [LIMIT] * len(exact)
        together, alone = (updated_problem((count,), rows, width, rule=rule, apart=apart) for apart in (False, True))
        found = measured(together, facts, nvrtc, [dy, index, *tables, *scalars], outputs, errors, limits)
        update = measured(alone, facts, nvrtc, [gradient.float(), *tables, *scalars], outputs, errors, limits)
        sums = measured(
            embedding_problem((count,), rows, width), facts, nvrtc, [dy, index],
            lambda some=[gradient]: outputs(some), lambda x, some=[gradient]: errors(x, some), [LIMIT],
        )  # fmt: skip
        right &= not (found.wrong or update.wrong or sums.wrong)
        found.tell(case, {"gradient_us": sums.best_us, "update_us": update.best_us})
    return 0 if right else 1


def updated(
    rule: str, g: torch.Tensor, tables: Sequence[torch.Tensor], scalars: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What `updated_problem` gives, from the gradient."""
    weight, *moments = tables
    if rule == "sgd":
        decay, momentum, rate = scalars
        kept = momentum * moments[0] + (g + decay * weight)
        return [kept, weight - rate * kept]
    first, second, less, eps, rate = scalars
    mean = moments[0] + first * (g - moments[0])
    square = second * moments[1] + less * (g * g)
    return [mean, square, weight - rate * (mean / (square.sqrt() + eps))]


if __name__ == "__main__":
    sys.exit(main())
