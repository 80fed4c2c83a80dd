"""The gradients of attention beside the framework's FlashAttention-2, in its deterministic form, on an NVIDIA GPU.

    python -m lab.gpu_attention_gradient [--only TEXT]

Every schedule that is offered is compared with float64 first; one that is wrong is said, not timed, and makes the run
fail. Times are medians of replayed CUDA graphs. A line of JSON per size: what each schedule took and was modelled to
take, and the framework's call with the copies that a plan makes of its results.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch
from benchmarks.cases.attention_gradient import gradient_problem
from benchmarks.harness.gpu_time import median_us

from lab.schedules import LAUNCHES, ROUNDS, measured
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.library import trained_attention
from weft.ir.declined import Declined

SIZES = {
    "vit_b16/b64": (64, 197, 12, 64, False),
    "bert_base/16x128": (16, 128, 12, 64, False),
    "deit_small/b64": (64, 198, 6, 64, False),
    "gpt, 256 positions": (16, 256, 12, 64, True),
    "gpt, 128 positions": (32, 128, 12, 64, True),
    "384 positions": (16, 384, 12, 64, False),
    "wide heads": (32, 128, 8, 128, False),
}
"""Rows, positions, heads, elements of a head, causal."""


def main() -> int:
    """Run; 0 when every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sizes whose name contains this")
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined) or not torch.cuda.is_available():
        print("lab.gpu_attention_gradient: no NVRTC, or torch sees no NVIDIA GPU", file=sys.stderr)
        return 2
    facts, right = gpu_facts(None, calibrate=False), True
    for case, (*sizes, causal) in SIZES.items():
        if given.only not in case:
            continue
        torch.manual_seed(0)
        shape = tuple(sizes)
        q, k, v, gradient = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
        scale = sizes[-1] ** -0.5
        problem = gradient_problem(*sizes, causal=causal, scale=scale)
        result, sums = trained_attention.attention(q, k, v, causal, scale)
        tensors = [gradient, q, k, v, result, sums]
        exact = trained_attention.attention_backward(*(x.double() for x in tensors), causal, scale)

        def outputs(shape: tuple[int, ...] = shape) -> list[torch.Tensor]:
            return [torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

        def errors(outs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor] = exact) -> list[float]:
            return [float((x.double() - y).norm() / y.norm()) for x, y in zip(outs, exact, strict=True)]

        found = measured(problem, facts, nvrtc, tensors, outputs, errors, (2.0**-8,) * 3)
        right &= not found.wrong
        into = [torch.empty_like(q) for _ in range(3)]

        def theirs(tensors: list[torch.Tensor] = tensors, causal: bool = causal, scale: float = scale) -> None:
            for x, y in zip(into, trained_attention.attention_backward(*tensors, causal, scale), strict=True):  # noqa: B023
                x.copy_(y)

        flash = median_us(theirs, launches=LAUNCHES, rounds=ROUNDS)
        found.tell(case, {"flash_us": round(flash, 2), "over_flash": round(flash / found.best_us, 3)})
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
