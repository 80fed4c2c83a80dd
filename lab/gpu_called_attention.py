"""Attention as a training step calls it beside the framework's FlashAttention-2, on an NVIDIA GPU.

    python -m lab.gpu_called_attention [--only TEXT]

Q, K and V are slices of one tensor, as a product gives them. Every schedule that is offered is compared with float64
first, its result and its logarithms; one that is wrong is said, not timed, and makes the run fail. Times are medians of
replayed CUDA graphs. A line of JSON per size: what each schedule took and was modelled to take, and the framework's
call, of the slices and of copies of them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import torch
from benchmarks.cases.called_attention import called_attention_problem
from benchmarks.harness.gpu_time import median_us

from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.predict import predicted_us
from weft.generate.library import trained_attention
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource

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
    facts, generator, right = gpu_facts(None, calibrate=False), CudaGenerator(), True
    for case, (rows, positions, heads, width, causal) in SIZES.items():
        if given.only not in case:
            continue
        torch.manual_seed(0)
        shape, scale = (rows, positions, heads, width), width**-0.5
        together = torch.randn((rows, positions, 3 * heads * width), device="cuda").bfloat16()
        views = [x.unflatten(-1, (heads, width)) for x in together.chunk(3, -1)]
        problem = called_attention_problem(*shape, causal=causal, scale=scale, packed=True)
        exact = trained_attention.attention(*(x.double() for x in views), causal, scale)
        found = generator.schedules(problem, facts)
        us, wrong, modelled = {}, [], {}
        for s in [] if isinstance(found, Declined) else found:
            source = generator.emit(problem, s)
            assert isinstance(source, CudaSource), source
            (cubin,) = nvrtc.compile_many([CompileJob(source.text, facts.arch, source.flags)])
            assert isinstance(cubin, CompiledCubin), cubin
            out = torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)
            sums = torch.full((rows, heads, positions), math.nan, device="cuda")
            addresses = Addresses([together.data_ptr()], [out.data_ptr(), sums.data_ptr()], [], 0, 0)
            bound = BoundCuda(source, cubin.path).prepare(addresses)
            took = median_us(lambda b=bound: b(torch.cuda.current_stream().cuda_stream), launches=20, rounds=7)  # type: ignore[misc]
            error = float((out.double() - exact[0]).norm() / exact[0].norm())
            off = float((sums.double() - exact[1]).abs().max() / exact[1].abs().max())
            modelled[str(s)] = round(predicted_us(problem, s, facts) or 0.0, 1)
            if error <= 2.0**-8 and off <= 2.0**-18:
                us[str(s)] = round(took, 2)
            else:
                wrong.append(f"{s}: errors {error}, {off}")
        right &= not wrong

        def flash(copies: bool, views: list[torch.Tensor] = views, causal: bool = causal, scale: float = scale) -> None:
            q, k, v = (x.contiguous() for x in views) if copies else views
            trained_attention.attention(q, k, v, causal, scale)

        best = min(us.values(), default=math.nan)
        copied, alone = (median_us(lambda c=c: flash(c), launches=20, rounds=7) for c in (True, False))  # type: ignore[misc]
        line = {"best_us": best, "flash_us": round(alone, 2), "with_copies_us": round(copied, 2), "us": us}
        print(json.dumps({"record": "case", "case": case, **line, "modelled": modelled, "wrong": wrong}), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
