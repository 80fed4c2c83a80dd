"""Depthwise convolutions of a training step beside cuDNN, layer by layer, on an NVIDIA GPU.

    python -m lab.gpu_depthwise [--only TEXT] [--batch 128] [--keep K] [--dtype bf16] [--network mobilenet_v2] [--dry]

The convolution with a weight that changes, the gradient of its image and that of its weight, channels last. Every
schedule that is offered is compared with float64 first; one that is wrong is said, not timed, and makes the run fail.
Times are medians of replayed CUDA graphs with operands larger than the L2 cache, or in it as they are. cuDNN's are
those of `aten.convolution` and `aten.convolution_backward`. A line of JSON per layer: what each schedule took and was
modelled to take; at the end sums over the network's layers. `--dry`: no GPU; kernels are compiled for sm_90a.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter

import torch
from benchmarks.harness.gpu_time import Kernel, median_us
from torch.nn import functional as F

from weft.device.cuda.facts import gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.fission.conv_gradient import conv_data_gradient, conv_weight_gradient
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

NETWORKS = {
    "mobilenet_v2": (
        (32, 112, 3, 1, 1), (96, 112, 3, 2, 1), (144, 56, 3, 1, 1), (144, 56, 3, 2, 1), (192, 28, 3, 1, 2),
        (192, 28, 3, 2, 1), (384, 14, 3, 1, 4), (576, 14, 3, 1, 2), (576, 14, 3, 2, 1), (960, 7, 3, 1, 3),
    ),
    "efficientnet_b0": (
        (32, 112, 3, 1, 1), (96, 112, 3, 2, 1), (144, 56, 3, 1, 1), (144, 56, 5, 2, 1), (240, 28, 5, 1, 1),
        (240, 28, 3, 2, 1), (480, 14, 3, 1, 2), (480, 14, 5, 1, 1), (672, 14, 5, 1, 2), (672, 14, 5, 2, 1),
        (1152, 7, 5, 1, 3), (1152, 7, 3, 1, 1),
    ),
}  # fmt: skip
"""Channels, size, window, stride and number of the layers that are alike."""
KINDS = ("forward", "data", "weight")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
SLACK = 4.0
"""Times the rounding of a result."""


def posed(kind: str, n: int, c: int, size: int, k: int, stride: int, dtype: DType) -> Problem:
    """As a training step has it; sizes are multiples of the stride."""
    b, pad, results = GraphBuilder(), k // 2, (size - 1) // stride + 1
    image, result, weight = (n, c, size, size), (n, c, results, results), (c, 1, k, k)
    first = b.input(TensorType(dtype, image if kind == "forward" else result))
    second = b.input(TensorType(dtype, image if kind == "weight" else weight))
    two, pads, once = (stride, stride), (pad, pad), (1, 1)
    formats = (Format.LAST, Format.LAST if kind == "weight" else Format.ROW)
    if kind == "forward":
        y = b.add(Prim.CONV, first, second, attrs=a.ConvAttrs(two, pads, pads, once, c))
    elif kind == "data":
        made = conv_data_gradient(b, first, second, sizes=image[2:], strides=two, pads=pads, dilations=once, groups=c)
        assert not isinstance(made, Declined), made.reason
        y = made
    else:
        made = conv_weight_gradient(b, first, second, kernel=(k, k), strides=two, pads=pads, dilations=once, groups=c)
        assert not isinstance(made, Declined), made.reason
        params = {"dilations": once, "groups": c, "kernel": (k, k), "pads": pads, "strides": two, "transposed": False}
        graph = b.build([made])
        told = tuple(sorted(params.items()))
        return Problem(graph, f"{graph}", formats, (Format.ROW,), "conv_weight_gradient", told, (0, 1), (0, 1))
    graph = b.build([y])
    return Problem(graph, f"{graph}", formats, (Format.LAST,))


def peer(kind: str, first: torch.Tensor, second: torch.Tensor, k: int, stride: int, size: int) -> torch.Tensor:
    """What the framework computes."""
    c, pad = first.shape[1], k // 2
    if kind == "forward":
        return F.conv2d(first, second, None, stride, pad, 1, c)
    image = second if kind == "weight" else first.new_empty((first.shape[0], c, size, size))
    image = image.contiguous(memory_format=torch.channels_last)
    weight = first.new_empty((c, 1, k, k)) if kind == "weight" else second
    mask = (kind == "data", kind == "weight", False)
    found = torch.ops.aten.convolution_backward(
        first, image, weight, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], c, mask
    )
    return found[KINDS.index(kind) - 1]


def main() -> int:
    """Run; 0 when every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--keep", type=int, default=6, help="schedules of a layer (6)")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--network", default="mobilenet_v2", choices=tuple(NETWORKS))
    parser.add_argument("--dry", action="store_true", help="no GPU: write, compile for sm_90a, show the model")
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined) or not (given.dry or torch.cuda.is_available()):
        print("lab.gpu_depthwise: no NVRTC, or torch sees no NVIDIA GPU (--dry)", file=sys.stderr)
        return 2
    facts = profile("h200") if given.dry else gpu_facts(None, calibrate=False)
    arch = "sm_90a" if given.dry else facts.arch
    generator, right, totals = CudaGenerator(), True, Counter[str]()
    for c, size, k, stride, count in NETWORKS[given.network]:
        for kind in KINDS:
            case = f"{kind} {c}x{size} {k}x{k}/{stride}"
            if given.only not in case:
                continue
            problem = posed(kind, given.batch, c, size, k, stride, DType(given.dtype))
            found = generator.schedules(problem, facts)
            assert not isinstance(found, Declined), found.reason
            made = [generator.emit(problem, s) for s in list(found)[: given.keep]]
            sources = [x for x in made if isinstance(x, CudaSource)]
            cubins = nvrtc.compile_many([CompileJob(x.text, arch, x.flags) for x in sources])
            modelled = {str(x.schedule): round(predicted_us(problem, x.schedule, facts) or 0.0, 1) for x in sources}
            if given.dry:
                print(f"{case}: {modelled}", flush=True)
                continue
            line, good = measured(problem, sources, cubins, given, (kind, k, stride, size))
            right &= good
            for name in ("best_us", "cudnn_us"):
                totals[f"{kind} {name}"] += count * float(str(line[name]))  # type: ignore[assignment]
            print(json.dumps({"record": "case", "suite": "depthwise", "case": case, **line, "modelled": modelled}))
            sys.stdout.flush()
    if totals:
        print(json.dumps({"record": "summary", "us": {name: round(us, 1) for name, us in totals.items()}}))
    return 0 if right else 1


def measured(
    problem: Problem,
    sources: list[CudaSource],
    cubins: list[object],
    given: argparse.Namespace,
    asked: tuple[str, int, int, int],
) -> tuple[dict[str, object], bool]:
    """A line for one layer; whether every kernel was right."""
    kind, k, stride, size = asked
    torch.manual_seed(0)
    kinds, graph = DTYPES[given.dtype], problem.graph
    tensors = []
    for i, lies in zip(graph.inputs, problem.input_formats, strict=True):
        x = torch.randn(graph.type_of(i).shape, device="cuda").to(kinds)
        tensors.append(x.contiguous(memory_format=torch.channels_last) if lies is Format.LAST else x)
    with torch.backends.cudnn.flags(enabled=False):
        exact = peer(kind, tensors[0].double(), tensors[1].double(), k, stride, size)
    out = torch.empty(exact.shape, dtype=kinds, device="cuda")
    if problem.output_formats[0] is Format.LAST:
        out = out.contiguous(memory_format=torch.channels_last)
    us: dict[str, float] = {}
    wrong: list[str] = []
    for source, cubin in zip(sources, cubins, strict=True):
        assert isinstance(cubin, CompiledCubin), cubin
        out.fill_(math.nan)
        took = Kernel(source, cubin.path).time(tensors, out, launches=20, rounds=7)
        error = float((out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        if error <= SLACK * UNIT[given.dtype]:
            us[str(source.schedule)] = round(took, 2)
        else:
            wrong.append(f"{source.schedule}: error {error:.2e}")
    theirs = median_us(lambda: peer(kind, tensors[0], tensors[1], k, stride, size), launches=20, rounds=7)
    best = min(us.values(), default=math.nan)
    line = {"best_us": best, "cudnn_us": round(theirs, 2), "over_cudnn": round(theirs / best, 3), "us": us}
    return {**line, "wrong": wrong}, not wrong


if __name__ == "__main__":
    sys.exit(main())
