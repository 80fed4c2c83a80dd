"""Attention as a training step calls it beside the framework's FlashAttention-2, on an NVIDIA GPU.

    python -m lab.gpu_called_attention [--only TEXT]

Q, K and V are slices of one tensor, as a product gives them. Every schedule that is offered is compared with float64
first, its result and its logarithms; one that is wrong is said, not timed, and makes the run fail. Times are medians of
replayed CUDA graphs. A line of JSON per size: what each schedule took and was modelled to take, and the framework's
call, of the slices and of copies of them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch
from benchmarks.cases.called_attention import called_attention_problem
from benchmarks.harness.gpu_time import median_us

from lab.schedules import LAUNCHES, ROUNDS, measured
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.library import trained_attention
from weft.ir.declined import Declined

SIZES = {
    "vit_b16/b64": (64, 197, 12, 64, False),
    "bert_base/16x128": (16, 128, 12, 64, False),
    "bert_base/8x512": (8, 512, 12, 64, False),
    "gpt2/8x512": (8, 512, 12, 64, True),
    "gpt, 2048 positions": (2, 2048, 12, 64, True),
    "wide heads": (8, 512, 16, 128, False),
    "wide heads, causal": (8, 512, 16, 128, True),
}
"""Rows, positions, heads, elements of a head, causal."""


def main() -> int:
    """Run; 0 when every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sizes whose name contains this")
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined) or not torch.cuda.is_available():
        print("lab.gpu_called_attention: no NVRTC, or torch sees no NVIDIA GPU", file=sys.stderr)
        return 2
    facts, right = gpu_facts(None, calibrate=False), True
    for case, (rows, positions, heads, width, causal) in SIZES.items():
        if given.only not in case:
            continue
        torch.manual_seed(0)
        shape, scale = (rows, positions, heads, width), width**-0.5
        together = torch.randn((rows, positions, 3 * heads * width), device="cuda").bfloat16()
        views = [x.unflatten(-1, (heads, width)) for x in together.chunk(3, -1)]
        problem = called_attention_problem(*shape, causal=causal, scale=scale, packed=True)
        exact = trained_attention.attention(*(x.double() for x in views), causal, scale)

        def outputs(shape: tuple[int, int, int, int] = shape) -> list[torch.Tensor]:
            out = torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)
            return [out, torch.full((shape[0], shape[2], shape[1]), math.nan, device="cuda")]

        def errors(outs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor] = exact) -> list[float]:
            out, sums = (x.double() - y for x, y in zip(outs, exact, strict=True))
            return [float(out.norm() / exact[0].norm()), float(sums.abs().max() / exact[1].abs().max())]

        found = measured(problem, facts, nvrtc, [together], outputs, errors, (2.0**-8, 2.0**-18))
        right &= not found.wrong

        def flash(copies: bool, views: list[torch.Tensor] = views, causal: bool = causal, scale: float = scale) -> None:
            q, k, v = (x.contiguous() for x in views) if copies else views
            trained_attention.attention(q, k, v, causal, scale)

        copied, alone = (median_us(lambda c=c: flash(c), launches=LAUNCHES, rounds=ROUNDS) for c in (True, False))  # type: ignore[misc]
        found.tell(case, {"flash_us": round(alone, 2), "with_copies_us": round(copied, 2)})
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
