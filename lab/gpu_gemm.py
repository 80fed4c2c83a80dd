"""Products and convolutions of large batches: Weft's templates against cuBLAS and cuDNN through torch.

    python -m lab.gpu_gemm [GROUP ...] [--kernels K] [--seconds S] [--only TEXT] [--dry]

A case is a product with what follows it in a network. Every schedule of the tma template (`tma`) is measured,
and the best-ranked one of each other template; of f32, with products in TF32 or not, the best three. Without groups,
those of 16 bits are run. `library` is torch's product or convolution (its own search for the
fastest algorithm) with bias, `chain` that and what follows it as eager operators. A time is the median over replays of
a CUDA graph of equal launches, the data warm in the L2 cache as far as it fits. Each group runs in a process of its own
with a time limit, so that a kernel that does not end costs one group. `--dry` writes and compiles the kernels without a
GPU and prints how the model ranks them. Standard output gets JSON lines, then a table; the record is written with
`--record` alone, group by group.

Products alone against cuBLASLt: `benchmarks.gpu_gemm_lt`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import RESULTS, environment, exchange, folder_of_gpu, lines_of
from torch.nn import functional as F

from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule

ROUNDS = 5
LAUNCH_FLOPS = 2e11
"""A graph holds launches of so many operations in all, 2 to 20 of them."""
TOLERANCE = {"f16": 4e-3, "bf16": 4e-3, "tf32": 8e-4, "f32": 5e-6}
"""Error over the root mean square of the result; f16 rounds to 5e-4, bf16 to 4e-3; the operands of TF32 err by 3e-4
together, by twice that if they were cut off."""
DTYPES = {
    "f16": (DType.F16, torch.float16),
    "bf16": (DType.BF16, torch.bfloat16),
    "tf32": (DType.F32, torch.float32),
    "f32": (DType.F32, torch.float32),
}
EXACT = ("tf32", "f32")
"""Types whose results are compared with f64."""
OTHERS = 3
"""Kernels of a template for them."""


@dataclass(frozen=True)
class Case:
    """`left` and `right` of a product, or an image (n, c, h, w) and a weight (k, c, r, s) of a convolution."""

    name: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    convolution: bool = False
    stride: int = 1
    weight: bool = True
    layout: str = "nt"
    """Of a product: `n` or `t` for each operand, `t` for one whose last two dimensions are exchanged in memory."""
    after: str = ""
    """Words: `bias`, `relu`, `gelu`, `residual`."""
    dtype: str = "f16"

    @property
    def pad(self) -> int:
        """Half the kernel."""
        return self.right[2] // 2

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        if not self.convolution:
            return (*self.left[:-1], self.right[-1])
        h, w = (-(-x // self.stride) for x in self.left[2:])
        return (self.left[0], self.right[0], h, w)

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * math.prod(self.result) * (math.prod(self.right[1:]) if self.convolution else self.left[-1])


def linear(name: str, m: int, n: int, k: int, after: str = "bias", **given: object) -> Case:
    """A product with a constant right operand."""
    return replace(Case(name, (m, k), (k, n), after=after), **given)  # type: ignore[arg-type]


def conv(n: int, c: int, h: int, k: int, size: int, stride: int = 1, after: str = "bias relu") -> Case:
    """A convolution that keeps the image's size, divided by the stride."""
    name = f"{c}x{h}x{h} -> {k} {size}x{size}/{stride}{' + x' if 'residual' in after else ''}"
    return Case(name, (n, c, h, h), (k, c, size, size), True, stride, after=after)


GROUPS: dict[str, tuple[Case, ...]] = {
    "squares": (
        *(linear(f"{n}^3", n, n, n, "") for n in (1024, 2048, 4096, 8192)),
        linear("4096^3 bf16", 4096, 4096, 4096, "", dtype="bf16"),
        *(
            Case(f"2048^3 {x}", (2048, 2048), (2048, 2048), weight=False, layout=x, after="")
            for x in ("nt", "nn", "tn", "tt")
        ),
    ),
    "transformers": (
        linear("bert qkv", 2048, 768, 768),
        linear("bert ffn up", 2048, 3072, 768, "bias gelu"),
        linear("bert ffn down", 2048, 768, 3072, "bias residual"),
        linear("vit out", 3152, 768, 768, "bias residual"),
        linear("vit ffn up", 3152, 3072, 768, "bias gelu"),
        linear("vit ffn down", 3152, 768, 3072, "bias residual"),
        Case("bert scores", (192, 128, 64), (192, 64, 128), weight=False),
        Case("bert values", (192, 128, 128), (192, 128, 64), weight=False, layout="nn"),
    ),
    "resnet50": (
        conv(16, 64, 56, 64, 3),
        conv(16, 128, 28, 128, 3),
        conv(16, 128, 56, 128, 3, 2),
        conv(16, 256, 14, 256, 3),
        conv(16, 512, 7, 512, 3),
        conv(16, 64, 56, 256, 1, after="bias residual relu"),
        conv(16, 256, 56, 64, 1),
        conv(16, 512, 28, 128, 1),
        conv(16, 1024, 14, 256, 1),
        conv(16, 512, 7, 2048, 1, after="bias residual relu"),
    ),
    "vgg16 yolov4": (
        conv(16, 64, 224, 64, 3),
        conv(16, 128, 112, 128, 3),
        conv(16, 256, 56, 256, 3),
        conv(16, 512, 28, 512, 3),
        conv(16, 512, 14, 512, 3),
        conv(16, 32, 208, 64, 3, 2),
        conv(16, 128, 52, 128, 3, after="bias relu residual"),
        conv(16, 512, 13, 1024, 3),
        conv(16, 1024, 13, 512, 1),
    ),
}
SIXTEEN = tuple(GROUPS)
_SINGLE: dict[str, tuple[Case, ...]] = {
    "squares": (
        *(linear(f"{n}^3", n, n, n, "") for n in (512, 1024, 2048, 4096, 8192)),
        linear("1000^3", 1000, 1000, 1000, ""),
        linear("968x1376x2616", 968, 1376, 2616, ""),
        linear("512x512x8192", 512, 512, 8192, ""),
        linear("999x513x257", 999, 513, 257),
        *(
            Case(f"1024^3 {x}", (1024, 1024), (1024, 1024), weight=False, layout=x, after="")
            for x in ("nt", "nn", "tn", "tt")
        ),
    ),
    "transformers": (
        *(linear(f"bert qkv {n}", 128 * n, 768, 768) for n in (1, 16)),
        *(linear(f"bert ffn up {n}", 128 * n, 3072, 768, "bias gelu") for n in (1, 16)),
        *(linear(f"bert ffn down {n}", 128 * n, 768, 3072, "bias residual") for n in (1, 16)),
        linear("vit ffn up 1", 197, 3072, 768, "bias gelu"),
        Case("bert scores", (192, 128, 64), (192, 64, 128), weight=False),
        Case("bert values", (192, 128, 128), (192, 128, 64), weight=False, layout="nn"),
    ),
    "convolutions": (
        *(conv(n, 64, 56, 64, 3) for n in (1, 16)),
        *(conv(n, 128, 28, 128, 3) for n in (1, 16)),
        *(conv(n, 128, 56, 128, 3, 2) for n in (1, 16)),
        *(conv(n, 256, 14, 256, 3) for n in (1, 16)),
        *(conv(n, 512, 7, 512, 3) for n in (1, 16)),
        *(conv(n, 64, 56, 256, 1, after="bias residual relu") for n in (1, 16)),
        *(conv(n, 1024, 14, 256, 1) for n in (1, 16)),
        *(conv(n, 3, 224, 64, 7, 2) for n in (1, 16)),
        conv(1, 24, 52, 24, 3),
        conv(16, 64, 224, 64, 3),
    ),
}
GROUPS |= {f"{t} {name}": tuple(replace(c, dtype=t) for c in cs) for t in EXACT for name, cs in _SINGLE.items()}


def problem_of(c: Case) -> Problem:
    """The product and what follows it as a problem of the generator; images have their channels last."""
    b, dtype = GraphBuilder(), DTYPES[c.dtype][0]

    def operand(shape: tuple[int, ...], turned: bool, weight: bool = False) -> NodeId:
        stored = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        x = b.input(TensorType(dtype, stored), is_weight=weight)
        rank = len(shape)
        return b.transpose(x, (*range(rank - 2), rank - 1, rank - 2)) if turned else x

    last = Format.LAST if c.convolution else Format.ROW
    formats = [last, Format.ROW]
    if c.convolution:
        x, w = operand(c.left, False), operand(c.right, False, True)
        pads = (c.pad, c.pad)
        y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((c.stride, c.stride), pads, pads, (1, 1), 1))
    else:
        x, w = operand(c.left, c.layout[0] == "t"), operand(c.right, c.layout[1] == "t", c.weight)
        y = b.add(Prim.MATMUL, x, w)
    for word in c.after.split():
        if word == "bias":
            size = c.result[1] if c.convolution else c.result[-1]
            bias = b.input(TensorType(dtype, (size,)), is_weight=True)
            y = b.apply(Prim.ADD, y, b.reshape(bias, (size, 1, 1)) if c.convolution else bias)
            formats.append(Format.ROW)
        elif word == "residual":
            y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, c.result)))
            formats.append(last)
        elif word == "relu":
            y = b.apply(Prim.MAX, y, 0.0)
        else:
            e = b.apply(Prim.ERF, b.apply(Prim.MUL, y, math.sqrt(0.5)))
            y = b.apply(Prim.MUL, b.apply(Prim.MUL, y, 0.5), b.apply(Prim.ADD, e, 1.0))
    graph = b.build([y])
    return Problem(graph, f"{graph} {c}", tuple(formats), (last,))


@dataclass(frozen=True, slots=True)
class Written:
    """A kernel of a case, and the model's guess in microseconds."""

    schedule: Schedule
    source: CudaSource
    modelled_us: float


def write(c: Case, facts: GpuFacts, kernels: int) -> list[Written]:
    """Kernels of the template `tma` by rank, then the best-ranked one of each other template."""
    problem, facts = problem_of(c), replace(facts, tf32=c.dtype == "tf32")
    p = product(problem, tf32=facts.tf32)
    assert isinstance(p, Product), p
    wanted = [(s.schedule(), x / facts.clock_ghz / 1e3) for x, s in tma_choose.shapes(p, facts, kernels)]
    found = templates.schedules(problem, facts)
    seen: dict[str, int] = {}
    for schedule in () if isinstance(found, Declined) else found:
        template = str(schedule.param("template"))
        seen[template] = seen.get(template, 0) + 1
        if template != "tma" and seen[template] <= (OTHERS if c.dtype in EXACT else 1):
            wanted.append((schedule, predicted_us(problem, schedule, facts) or math.nan))
    made = [(s, us, templates.emit(problem, s)) for s, us in wanted]
    return [Written(s, source, us) for s, us, source in made if isinstance(source, CudaSource)]


def compiled(cases: list[Case], facts: GpuFacts, nvrtc: Nvrtc, kernels: int, cache: Path | None) -> dict[str, object]:
    """Cubins or errors by the hash of their source, made on all cores."""
    sources = {w.source.sha256: w.source for c in cases for w in write(c, facts, kernels)}
    jobs = [CompileJob(s.text, facts.arch, s.flags) for s in sources.values()]
    return dict(zip(sources, nvrtc.compile_many(jobs, cache_dir=cache), strict=True))


class Bench:
    """Operands of one case on the GPU, and times of what is made of them."""

    def __init__(self, c: Case) -> None:
        self.case = c
        generator = torch.Generator(device="cuda").manual_seed(7)
        kind = DTYPES[c.dtype][1]
        self.wide = torch.float64 if c.dtype in EXACT else torch.float32
        scale = (c.flops / 2.0 / math.prod(c.result)) ** -0.5

        def normal(shape: tuple[int, ...], by: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device="cuda") * by).to(kind)

        def stored(shape: tuple[int, ...], turned: bool, by: float = 1.0) -> torch.Tensor:
            return normal((*shape[:-2], shape[-1], shape[-2]), by).mT if turned else normal(shape, by)

        last = torch.channels_last if c.convolution else torch.contiguous_format
        if c.convolution:
            self.x = normal(c.left).contiguous(memory_format=last)
            self.w = normal(c.right, scale)
            self.lib_w = self.w.contiguous(memory_format=last)
        else:
            self.x = stored(c.left, c.layout[0] == "t")
            self.w = self.lib_w = stored(c.right, c.layout[1] == "t", scale)
        size = c.result[1] if c.convolution else c.result[-1]
        words = c.after.split()
        self.bias = normal((size,)) if "bias" in words else None
        self.residual = normal(c.result).contiguous(memory_format=last) if "residual" in words else None
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            self.exact = self.follow(self.base(wide=True), wide=True)

    def base(self, *, wide: bool = False) -> torch.Tensor:
        """The product with bias as torch does it; `wide` in f32, or f64 where that is the type itself."""
        c = self.case
        x, w, bias = (
            (self.x.to(self.wide), self.w.to(self.wide), None if self.bias is None else self.bias.to(self.wide))
            if wide
            else (self.x, self.lib_w, self.bias)
        )
        if c.convolution:
            return F.conv2d(x, w, bias, c.stride, c.pad)
        if x.dim() == 2:
            return F.linear(x, w.mT, bias)
        return torch.bmm(x, w) if bias is None else torch.baddbmm(bias, x, w)

    def follow(self, y: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """What comes after the bias."""
        for word in self.case.after.split():
            if word == "relu":
                y = F.relu(y)
            elif word == "gelu":
                y = F.gelu(y)
            elif word == "residual" and self.residual is not None:
                y = y + (self.residual.to(self.wide) if wide else self.residual)
        return y

    def median_us(self, run: Callable[[], object]) -> float:
        """Microseconds per call, in a graph of several."""
        count = int(max(2, min(20, LAUNCH_FLOPS / self.case.flops)))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                run()
        graph.replay()
        torch.cuda.synchronize()
        samples = []
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(float(start.elapsed_time(end)) * 1e3 / count)
        return statistics.median(samples)

    def ours(self, source: CudaSource, cubin: CompiledCubin) -> tuple[float, float]:
        """(microseconds, error over the root mean square) of one kernel."""
        c = self.case
        problem_inputs = [self.x if c.convolution or c.layout[0] == "n" else self.x.mT]
        problem_inputs.append(self.w if c.convolution or c.layout[1] == "n" else self.w.mT)
        for word in c.after.split():
            if word == "bias" and self.bias is not None:
                problem_inputs.append(self.bias)
            elif word == "residual" and self.residual is not None:
                problem_inputs.append(self.residual)
        last = torch.channels_last if c.convolution else torch.contiguous_format
        out = torch.full(c.result, math.nan, dtype=self.x.dtype, device="cuda").contiguous(memory_format=last)
        packed = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in source.packed_bytes]
        work = torch.empty(max(1, source.workspace_bytes), dtype=torch.uint8, device="cuda")
        state = torch.zeros(max(1, source.state_bytes), dtype=torch.uint8, device="cuda")
        bound = BoundCuda(source, cubin.path)
        ins = [x.data_ptr() for x in problem_inputs]
        places = [x.data_ptr() for x in packed]
        bound.pack(ins, places, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        launch = bound.prepare(Addresses(ins, [out.data_ptr()], places, work.data_ptr(), state.data_ptr()))
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        return self.median_us(lambda: launch(torch.cuda.current_stream().cuda_stream)), self.wrong(out)

    def wrong(self, out: torch.Tensor) -> float:
        """Error over the root mean square of the result."""
        return float((out.to(self.wide) - self.exact).square().mean().sqrt() / self.exact.square().mean().sqrt())


def measure(c: Case, facts: GpuFacts, cubins: dict[str, object], kernels: int) -> None:
    """One case: JSON lines of the library and of every kernel."""
    bench = Bench(c)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = c.dtype == "tf32"
    say = {"case": c.name, "dtype": c.dtype, "gflop": round(c.flops / 1e9, 2)}
    library = bench.median_us(bench.base)
    chain = bench.median_us(lambda: bench.follow(bench.base())) if set(c.after.split()) - {"bias"} else library
    line = {**say, "who": "library", "us": round(library, 2), "chain_us": round(chain, 2)}
    print(json.dumps({**line, "error_rms": float(f"{bench.wrong(bench.follow(bench.base())):.2e}")}), flush=True)
    for w in write(c, facts, kernels):
        line = {**say, "who": str(w.schedule.param("template")), "schedule": str(w.schedule)}
        cubin = cubins[w.source.sha256]
        if not isinstance(cubin, CompiledCubin):
            print(json.dumps({**line, "error": str(cubin)[:300]}), flush=True)
            continue
        try:
            us, wrong = bench.ours(w.source, cubin)
        except (WeftError, RuntimeError) as error:
            print(json.dumps({**line, "error": str(error)[:300]}), flush=True)
            raise  # an error of a kernel ends the context of this process
        line |= {"us": round(us, 2), "tflops": round(c.flops / us / 1e6, 1), "error_rms": float(f"{wrong:.2e}")}
        line |= {
            "right": wrong <= TOLERANCE[c.dtype],
            "ratio": round(library / us, 3),
            "chain_ratio": round(chain / us, 3),
        }
        if not math.isnan(w.modelled_us):
            line["modelled_us"] = round(w.modelled_us, 2)
        print(json.dumps(line), flush=True)


def chosen(given: argparse.Namespace, group: str) -> list[Case]:
    """Cases of a group that the command line asks for."""
    return [c for c in GROUPS[group] if given.only in c.name]


def child(given: argparse.Namespace, group: str) -> None:
    """One group in this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = True
    torch.zeros(1, device="cuda")
    facts, nvrtc = gpu_facts(None, calibrate=False), find_nvrtc()
    assert isinstance(nvrtc, Nvrtc), nvrtc
    cases = chosen(given, group)
    cubins = compiled(cases, facts, nvrtc, given.kernels, Path(given.cache))
    for c in cases:
        measure(c, facts, cubins, given.kernels)


def dry(given: argparse.Namespace) -> None:
    """Writes, compiles and ranks without a GPU."""
    facts, nvrtc = GpuFacts(), find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(f"the kernels cannot be compiled here: {nvrtc.reason}")
    for group in given.groups:
        for c in chosen(given, group):
            cubins = compiled([c], facts, nvrtc, given.kernels, None)
            for w in write(c, facts, given.kernels):
                cubin = cubins[w.source.sha256]
                line = {"case": c.name, "schedule": str(w.schedule), "modelled_us": round(w.modelled_us, 1)}
                if isinstance(cubin, CompiledCubin):
                    own = cubin.of(w.source.entry)
                    line |= {"registers": own.registers, "spilled": own.spill_stores, "warnings": len(cubin.warnings)}
                else:
                    line["error"] = str(cubin)[:300]
                print(json.dumps(line), flush=True)


def table(lines: list[dict[str, object]]) -> None:
    """Library, best kernel of each template, and their ratio."""
    cases: dict[tuple[object, object], dict[str, dict[str, object]]] = {}
    for x in lines:
        best = cases.setdefault((x["case"], x["dtype"]), {})
        who = str(x["who"])
        known = best.get(who)
        if "us" in x and (who == "library" or x.get("right")) and (known is None or x["us"] < known["us"]):  # type: ignore[operator]
            best[who] = x
    print(f"{'case':34} {'library':>9} {'chain':>9} {'ours':>9} {'TFLOP/s':>8} {'ratio':>6} {'chain':>6}  others")
    ratios = []
    for (name, dtype), best in cases.items():
        if "library" not in best:
            continue
        library = best.pop("library")
        first = (
            best.get("tma")
            if dtype not in EXACT
            else min(best.values(), key=lambda x: float(str(x["us"])), default=None)
        )
        ours = first
        others = ", ".join(f"{who} {x['us']}" for who, x in best.items())
        shown = (
            f"{ours['us']:9.2f} {ours['tflops']:8.1f} {ours['ratio']:6.2f} {ours['chain_ratio']:6.2f}"
            if ours
            else f"{'none':>9} {'':8} {'':6} {'':6}"
        )
        if ours:
            ratios.append(float(ours["ratio"]))  # type: ignore[arg-type]
        label = f"{name} {dtype}" if dtype != "f16" else str(name)
        print(f"{label:34} {library['us']:9.2f} {library['chain_us']:9.2f} {shown}  {others}")
    wrong = [x for x in lines if x.get("right") is False or "error" in x]
    if ratios:
        print(f"geometric mean of library / ours over {len(ratios)} cases: {np.exp(np.mean(np.log(ratios))):.3f}")
    for x in wrong:
        print("WRONG", x["case"], x.get("schedule"), x.get("error_rms", x.get("error")))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--kernels", type=int, default=4, help="schedules of the template tma per case")
    parser.add_argument("--seconds", type=float, default=24.0, help="time limit of a group")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--dry", action="store_true", help="no GPU: write, compile and rank")
    parser.add_argument("--record", action="store_true", help="put what was measured into the record")
    parser.add_argument("--until", type=float, default=math.inf, help="no group is begun after so many seconds")
    add_option(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.groups = given.groups or list(SIXTEEN)
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if given.dry:
        dry(given)
        return
    if given.child:
        child(given, given.groups[0])
        return
    lines: list[dict[str, object]] = []
    head = environment("python -m lab.gpu_gemm " + " ".join(sys.argv[1:])) if given.record else {}
    path = RESULTS / folder_of_gpu() / "products.jsonl" if given.record else Path()
    left, bad = Left(None, time.perf_counter() + given.until, only=given.left), False
    with tempfile.TemporaryDirectory(prefix="weft-gemm-") as cache:
        for group in given.groups:
            cases = {(c.name, c.dtype) for c in chosen(given, group)}
            if (given.left and known(path, head, cases)) or left.over(group):
                continue
            options = ["--child", "--cache", cache, "--kernels", str(given.kernels), "--only", given.only]
            command = [sys.executable, "-m", "lab.gpu_gemm", group, *options]
            start = time.perf_counter()
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=given.seconds, check=False)
                text, why = done.stdout, f"status {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired as error:
                text, why = (error.stdout or b"").decode(), f"no end after {given.seconds} s"
            found = [json.loads(raw) for raw in text.splitlines() if raw.startswith("{")]
            for line in found:
                print(json.dumps(line), flush=True)
            print(f"group {group}: {time.perf_counter() - start:.1f} s {why}", flush=True)
            bad |= bool(why)
            if given.record:
                rows = [{"record": "case", "suite": "products", **x} for x in found]
                unseen = cases - {(str(x["case"]), str(x["dtype"])) for x in found}
                rows += [{"record": "case", "suite": "products", "case": c, "dtype": t, "who": "library",
                          "failed": why or "it gave no row"} for c, t in sorted(unseen)]  # fmt: skip
                exchange(path, head, rows, ("case", "dtype"))
            lines += found
    table(lines)
    if given.left:
        sys.exit(left.status(bad))


def known(path: Path, head: Mapping[str, object], cases: set[tuple[str, str]]) -> bool:
    """Whether the record has rows of all these cases of these sources."""
    there = {(str(x["case"]), str(x["dtype"])) for x in lines_of(path) if x.get("src") == head["src"] and "dtype" in x}
    return cases <= there


if __name__ == "__main__":
    main()
