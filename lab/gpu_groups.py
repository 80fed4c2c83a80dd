"""Convolutions in groups: the template of groups, the other templates and cuDNN; then RegNetY-1.6GF, on an NVIDIA GPU.

    python -m lab.gpu_groups [--only TEXT] [--batch 1,16] [--keep K] [--layer-seconds S] [--seconds S] [--budget S]
                             [--networks NAME,...] [--dry]

The layers are those of timm's regnety_016 and resnext50_32x4d with bias and ReLU, and the positional convolution of
wav2vec2 (768 channels, 16 groups, a window of 128), in f16, channels last. Every kernel is compared with float64 first;
one that is wrong is said, not timed, and makes the run fail. Times are those of `benchmarks.gpu_conv`: cold L2 cache,
weights in turn. cuDNN: the best of torch's calls, channels last, with its own search. A line of JSON per layer: the
best of each template with its schedule, and what the template's own were modelled to take beside what they took.

Squeeze-excite of regnety_016 and efficientnet_b0 likewise: the one kernel in every schedule that is offered, beside
eager torch (mean, two convolutions, sigmoid, product; channels last) in a CUDA graph, with a warm L2 cache.

Networks come from timm (which has to be installed), with random weights: Weft after `--budget` seconds of search beside
eager and torch.compile in CUDA graphs, as `benchmarks.gpu_networks` has them. `--dry`: no GPU; kernels are compiled for
sm_90a. The default takes at most 150 s: layers until `--layer-seconds`, then the networks that can begin in time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from benchmarks.gpu_conv import TOLERANCE, Bench, Conv, Data, Written, compiled, problem_of, time_kernel, time_peer
from benchmarks.harness.gpu_time import Kernel, median_us
from benchmarks.harness.record import Record
from torch.nn import functional as F

from benchmarks import gpu_networks, models
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.conv.groups import choose
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

OWN = "group_conv"


def _layer(n: int, channels: int, side: int, groups: int, stride: int) -> Conv:
    return Conv(n, channels, side, side, channels, (3, 3), (stride, stride), (1, 1), (1, 1), groups, True, "relu")


def layers(n: int) -> dict[str, Conv]:
    """By name, for n images, or seconds of audio."""
    regnet = (
        (48, 112, 2), (48, 56, 1), (120, 56, 2), (120, 28, 1),
        (336, 28, 2), (336, 14, 1), (888, 14, 2), (888, 7, 1),
    )  # fmt: skip
    resnext = ((128, 56, 1), (256, 56, 2), (256, 28, 1), (512, 28, 2), (512, 14, 1), (1024, 14, 2), (1024, 7, 1))
    found = {f"regnety_016 {c}x{s}/{d}": _layer(n, c, s, c // 24, d) for c, s, d in regnet}
    found |= {f"resnext50_32x4d {c}x{s}/{d}": _layer(n, c, s, 32, d) for c, s, d in resnext}
    window = Conv(n, 768, 1, 49, 768, (1, 128), (1, 1), (0, 64), (1, 1), 16, True, "none")
    return {**found, "wav2vec2 positions 768x49": window}


def write(c: Conv, facts: GpuFacts, keep: int) -> list[Written]:
    """What a search would measure, and the best of the template of groups by its model."""
    problem = problem_of(c)
    found = templates.schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    p = product(problem)
    assert isinstance(p, Product)
    wanted = dict.fromkeys([*found, *(s.schedule() for _, s in choose.shapes(p, facts, keep))])
    kernels = []
    for rank, schedule in enumerate(wanted):
        source = templates.emit(problem, schedule)
        if isinstance(source, CudaSource):
            kernels.append(Written(c, problem, rank, schedule, source))
    return kernels


def run_layer(
    bench: Bench, name: str, kernels: list[tuple[Written, CompiledCubin]], facts: GpuFacts
) -> tuple[dict[str, object], bool]:
    """A line for one layer; whether every kernel was right."""
    c = kernels[0][0].conv
    assert isinstance(c, Conv)
    data = Data.of(c)
    best: dict[str, tuple[float, str]] = {}
    wrong: list[str] = []
    own: list[tuple[float | None, float, str]] = []
    for k, cubin in kernels:
        us, error = time_kernel(bench, k, cubin, data)
        if us == math.inf:
            wrong.append(f"{k.schedule}: error {error:.2e}")
            continue
        template = str(k.schedule.param("template"))
        if template == OWN:
            own.append((predicted_us(k.problem, k.schedule, facts), us, str(k.schedule)))
        if us < best.get(template, (math.inf, ""))[0]:
            best[template] = (us, str(k.schedule))
    alone, chain = time_peer(bench, data)
    mine = best.get(OWN, (math.nan, ""))[0]
    others = min((us for t, (us, _) in best.items() if t != OWN), default=math.nan)
    line: dict[str, object] = {
        "record": "case", "suite": "groups", "case": f"{name} b{c.n}",
        "us": {t: round(us, 2) for t, (us, _) in sorted(best.items())}, "cudnn_us": round(chain, 2),
        "cudnn_alone_us": round(alone, 2), "over_cudnn": round(chain / mine, 3), "over_others": round(others / mine, 3),
        "schedules": {t: s for t, (_, s) in best.items()}, "wrong": wrong,
        "modelled": [[round(x or 0.0, 2), round(us, 2), s] for x, us, s in sorted(own, key=lambda x: x[1])],
    }  # fmt: skip
    return line, not wrong


def run_layers(nvrtc: Nvrtc, facts: GpuFacts, arch: str, given: argparse.Namespace, end: float) -> bool:
    """All layers until the time is over; whether all kernels were right."""
    right = True
    ratios: list[tuple[float, float]] = []
    bench = None if given.dry else Bench()
    wanted = [(n, c) for b in given.batch.split(",") for n, c in layers(int(b)).items() if given.only in n]
    for at in range(0, len(wanted), 6):
        if time.perf_counter() > end:
            print(f"not begun in time: {len(wanted) - at} layers", flush=True)
            break
        part = wanted[at : at + 6]
        ready = compiled(nvrtc, arch, [k for _, c in part for k in write(c, facts, given.keep)])
        for name, c in part:
            kernels = [x for x in ready if x[0].conv == c]
            if bench is None:
                print(f"{name} b{c.n}: {len(kernels)} kernels, {_modelled(kernels, facts)}", flush=True)
                continue
            line, good = run_layer(bench, name, kernels, facts)
            right &= good
            print(json.dumps(line), flush=True)
            ratios.append((float(str(line["over_cudnn"])), float(str(line["over_others"]))))
    known = [x for x in ratios if not any(map(math.isnan, x))]
    if known:
        cudnn, others = (statistics.geometric_mean(x) for x in zip(*known, strict=True))
        print(f"== {len(known)} layers: over cuDNN x{cudnn:.3f}, over the other templates x{others:.3f}", flush=True)
    return right


SQUEEZED = (
    ("regnety_016", 48, 56, 8), ("regnety_016", 120, 28, 30), ("regnety_016", 336, 14, 84),
    ("regnety_016", 888, 7, 222), ("efficientnet_b0", 672, 14, 28), ("efficientnet_b0", 1152, 7, 48),
)  # fmt: skip
"""Network, channels, side of the image, hidden values."""


def squeezed(n: int, channels: int, side: int, hidden: int) -> Problem:
    """x * sigmoid(W2 relu(W1 mean(x) + b1) + b2), channels last."""
    b, kind = GraphBuilder(), DType.F16
    x = b.input(TensorType(kind, (n, channels, side, side)))
    mean = b.add(Prim.REDUCE_SUM, b.cast(x, DType.F32), attrs=a.ReduceAttrs((2, 3)))
    y = b.cast(b.apply(Prim.MUL, mean, 1 / side**2), kind)
    attrs = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
    for at, (out, into) in enumerate(((hidden, channels), (channels, hidden))):
        y = b.add(Prim.CONV, y, b.input(TensorType(kind, (out, into, 1, 1)), is_weight=True), attrs=attrs)
        y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(kind, (out,)), is_weight=True), (1, out, 1, 1)))
        y = y if at else b.apply(Prim.MAX, y, 0.0)
    e = b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, b.cast(y, DType.F32))), 1.0)
    graph = b.build([b.apply(Prim.MUL, x, b.cast(b.apply(Prim.DIV, 1.0, e), kind))])
    return Problem(graph, f"{graph}", (Format.LAST, *(Format.ROW,) * 4), (Format.LAST,))


def run_squeezed(nvrtc: Nvrtc, facts: GpuFacts, arch: str, given: argparse.Namespace, end: float) -> bool:
    """Squeeze-excite; whether all kernels were right."""
    right = True
    for n in map(int, given.batch.split(",")):
        for name, channels, side, hidden in SQUEEZED:
            case = f"{name} squeeze-excite {channels}x{side} by {hidden} b{n}"
            if given.only not in case:
                continue
            if time.perf_counter() > end:
                print(f"not begun in time: {case}", flush=True)
                continue
            problem = squeezed(n, channels, side, hidden)
            found = templates.schedules(problem, facts)
            made = [] if isinstance(found, Declined) else [templates.emit(problem, s) for s in found]
            sources = [x for x in made if isinstance(x, CudaSource)]
            cubins = nvrtc.compile_many([CompileJob(x.text, arch, x.flags) for x in sources])
            modelled = {str(x.schedule): predicted_us(problem, x.schedule, facts) for x in sources}
            if given.dry:
                print(f"{case}: {modelled} us (modelled)", flush=True)
                continue
            torch.manual_seed(0)
            shapes = [problem.graph.type_of(i).shape for i in problem.graph.inputs]
            x, w1, b1, w2, b2 = (
                (torch.randn(s, device="cuda") * (s[1] ** -0.5 if at in (1, 3) else 1.0)).half()
                for at, s in enumerate(shapes)
            )
            x = x.contiguous(memory_format=torch.channels_last)

            def eager(x, w1, b1, w2, b2):
                y = F.conv2d(F.relu(F.conv2d(x.mean((2, 3), keepdim=True), w1, b1)), w2, b2)
                return x * torch.sigmoid(y)

            with torch.backends.cudnn.flags(enabled=False):
                exact = eager(*(v.double() for v in (x, w1, b1, w2, b2)))
            us: dict[str, float] = {}
            wrong: list[str] = []
            for source, cubin in zip(sources, cubins, strict=True):
                out = torch.full_like(x, math.nan)
                took = math.nan
                if isinstance(cubin, CompiledCubin):
                    took = Kernel(source, cubin.path).time([x, w1, b1, w2, b2], out, launches=20, rounds=7)
                error = float((out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
                if error <= TOLERANCE:
                    us[str(source.schedule)] = round(took, 2)
                else:
                    wrong.append(f"{source.schedule}: error {error:.2e}")
            peer = median_us(lambda v=(x, w1, b1, w2, b2), f=eager: f(*v), launches=20, rounds=7)
            best = min(us.values(), default=math.nan)
            line = {
                "record": "case", "suite": "squeeze-excite", "case": case, "us": us, "eager_us": round(peer, 2),
                "over_eager": round(peer / best, 3), "modelled_us": modelled, "wrong": wrong,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            right &= not wrong
    return right


def _modelled(kernels: list[tuple[Written, CompiledCubin]], facts: GpuFacts) -> str:
    least: dict[str, float] = {}
    for k, _ in kernels:
        us, name = predicted_us(k.problem, k.schedule, facts), str(k.schedule.param("template"))
        least[name] = min(least.get(name, math.inf), us or math.inf)
    return ", ".join(f"{name} {us:.2f} us" for name, us in sorted(least.items())) + " (modelled)"


def run_networks(given: argparse.Namespace, end: float) -> None:
    """Weft beside eager and torch.compile, batch 1, f16; a row each."""
    try:
        import timm
    except ImportError:
        print("no networks: timm is not installed (pip install timm)", file=sys.stderr)
        return
    asked = argparse.Namespace(
        budget=given.budget, rounds=15, peers="eager,inductor", layouts="last", trace=None, repeat=200, library=False,
        cold_only=True, verbose=given.verbose,
    )  # fmt: skip
    for name in given.networks.split(","):
        if time.perf_counter() + given.budget > end:
            print(f"not begun in time: {name}", flush=True)
            continue
        module = timm.create_model(name)
        count = sum(x.numel() for x in module.parameters())
        vars(models)["FURTHER"] = {**models.FURTHER, name: models.Network(lambda m=module: m, (3, 224, 224), count)}
        with tempfile.TemporaryDirectory() as folder:
            record = Record("gpu", "groups", path=Path(folder) / "networks.jsonl")
            with record.measuring(case=f"{name}/b1/f16"):
                gpu_networks.run_case(name, 1, "f16", record, asked)


def main() -> int:
    """Run; 0 when every kernel was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layers whose name contains this; no network then")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--keep", type=int, default=6, help="configurations of the template of groups (6)")
    parser.add_argument("--layer-seconds", type=float, default=45.0)
    parser.add_argument("--seconds", type=float, default=95.0, help="no network whose search ends later begins (95)")
    parser.add_argument("--budget", type=float, default=30.0, help="of a network's search, seconds (30)")
    parser.add_argument("--networks", default="regnety_016")
    parser.add_argument("--verbose", type=int, default=12, help="kernels of each plan that are shown (12)")
    parser.add_argument("--dry", action="store_true", help="no GPU: write, compile for sm_90a, show the model")
    given = parser.parse_args()
    start = time.perf_counter()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 2
    if not given.dry and not torch.cuda.is_available():
        print("lab.gpu_groups: torch sees no NVIDIA GPU; --dry compiles without one", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    facts = profile("h200") if given.dry else gpu_facts(None, calibrate=False)
    arch = "sm_90a" if given.dry else facts.arch
    if not given.dry:
        torch.zeros(1, device="cuda")
        torch.backends.cudnn.benchmark = True
    with torch.inference_mode():
        right = run_layers(nvrtc, facts, arch, given, start + given.layer_seconds)
        right &= run_squeezed(nvrtc, facts, arch, given, start + given.layer_seconds + 15)
    if given.networks and not given.only and not given.dry:
        run_networks(given, start + given.seconds)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
