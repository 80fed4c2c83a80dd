"""Every distinct convolution of the ten networks in f16: Weft's kernels against cuDNN through torch, on an NVIDIA GPU.

    python -m benchmarks.gpu_conv [NAME ...] [--batch 1,16] [--first K] [--more K] [--seconds S] [--only TEXT]
                                  [--no-peers] [--dry] [--keep] [--part K/N]

Weft: the best of the first K schedules, with bias and activation in the kernel. cuDNN: channels-last, alone (`conv`)
and with bias and activation (`chain`): the best of torch's calls, with cuDNN's own search for the fastest algorithm,
and of the first engines of its heuristic through its C interface (`engine_us`, alone and with what follows: bias and
ReLU are part of its graph, other activations an eager operator behind it). A time is the median over replays of a CUDA
graph of launches that read copies of the weights in turn, after the L2 cache was emptied. `--dry` writes and compiles
the kernels without a GPU. `--keep` writes the record too, in which a case that is measured again takes the place of the
old one. `--part` measures every Nth convolution from the Kth on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.left import MORE, Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from benchmarks.models import NETWORKS
from weft.device.cuda.cudnn import ConvAddresses, Convolution, find_cudnn
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import templates
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.gemm.common.product import Product, product
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule

LAUNCHES = 20
ROUNDS = 7
EARLY = -1
"""Rank of the first schedule's kernel, changed so that successors may start before it waits: for comparison."""
PART = 12
"""Convolutions that are compiled at once, while the former ones are timed."""
ROTATED_BYTES = 160 << 20
FLUSHED_BYTES = 128 << 20
ENGINES = 8
"""Of cuDNN's heuristic."""
WORKSPACE = 64 << 20
TOLERANCE = 4e-3
"""Of the root mean square: f16 rounds to 5e-4."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "leaky": lambda y: F.leaky_relu(y, 0.1),
}
_NAMES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Mish: "mish", nn.LeakyReLU: "leaky"}


class Conv(NamedTuple):
    """A convolution with what follows it; sizes are counts."""

    n: int
    ic: int
    h: int
    w: int
    oc: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    dilations: tuple[int, int]
    groups: int
    bias: bool
    activation: str

    def __str__(self) -> str:
        size = "x".join(map(str, self.kernel))
        groups = f" groups {self.groups}" if self.groups > 1 else ""
        return f"{self.ic}x{self.h}x{self.w} -> {self.oc} {size}/{self.strides[0]}{groups} {self.activation}"


class Pair(NamedTuple):
    """A depthwise convolution and the 1x1 convolution of its result, in one kernel."""

    first: Conv
    second: Conv

    def __str__(self) -> str:
        return f"{self.first} + {self.second.oc} 1x1 {self.second.activation}"


Work = Conv | Pair


def convolutions(name: str, batch: int) -> dict[Work, int]:
    """Convolutions of a network, and pairs of a depthwise one and a 1x1, with how often each occurs."""
    network = NETWORKS[name]
    with torch.device("meta"):
        module = network.build().eval()
    ran: list[tuple[nn.Module, tuple[int, ...]]] = []

    def note(mod: nn.Module, given: tuple[torch.Tensor, ...], _: object) -> None:
        ran.append((mod, tuple(given[0].shape) if given else ()))

    for leaf in module.modules():
        if not list(leaf.children()):
            leaf.register_forward_hook(note)
    with torch.no_grad():
        module(*(x.to("meta") for x in network.inputs(batch, 0)))
    found: dict[Work, int] = {}
    before: tuple[int, Conv] | None = None
    for i, (mod, shape) in enumerate(ran):
        if not isinstance(mod, nn.Conv2d):
            continue
        after = [x for x, _ in ran[i + 1 : i + 3]]
        normed = bool(after) and isinstance(after[0], nn.BatchNorm2d)
        act = after[1] if normed and len(after) > 1 else after[0] if after else None
        assert isinstance(mod.padding, tuple)
        images, channels, high, wide = shape
        conv = Conv(
            images,
            channels,
            high,
            wide,
            mod.out_channels,
            (mod.kernel_size[0], mod.kernel_size[1]),
            (mod.stride[0], mod.stride[1]),
            (int(mod.padding[0]), int(mod.padding[1])),
            (mod.dilation[0], mod.dilation[1]),
            mod.groups,
            normed or mod.bias is not None,
            _NAMES.get(type(act), "none"),
        )
        found[conv] = found.get(conv, 0) + 1
        if before is not None and ran[before[0]][0] is not mod and _is_pair(before[1], conv):
            pair = Pair(before[1], conv)
            found[pair] = found.get(pair, 0) + 1
        before = (i, conv)
    return found


def _is_pair(one: Conv, two: Conv) -> bool:
    """True where the second reads what the first writes, as far as sizes tell: layers run in order."""
    sides = zip((one.h, one.w), one.pads, one.kernel, one.strides, strict=True)
    size = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in sides)
    reads = (one.oc, *size) == (two.ic, two.h, two.w)
    return reads and one.groups == one.ic == one.oc and two.kernel == two.strides == (1, 1) and two.groups == 1


def problem_of(work: Work) -> Problem:
    """The convolution, bias and activation as a problem of the generator, channels last; a pair likewise."""
    b = GraphBuilder()
    parts = work if isinstance(work, Pair) else (work,)
    c = parts[0]
    y = b.input(TensorType(DType.F16, (c.n, c.ic, c.h, c.w)))
    formats = [Format.LAST]
    for part in parts:
        y = _layer(b, y, part, formats)
    graph = b.build([y])
    return Problem(graph, f"{graph} {work}", tuple(formats), (Format.LAST,))


def _layer(b: GraphBuilder, x: NodeId, c: Conv, formats: list[Format]) -> NodeId:
    w = b.input(TensorType(DType.F16, (c.oc, c.ic // c.groups, *c.kernel)), is_weight=True)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs(c.strides, c.pads, c.pads, c.dilations, c.groups))
    formats.append(Format.ROW)
    if c.bias:
        bias = b.input(TensorType(DType.F16, (c.oc,)), is_weight=True)
        y = b.apply(Prim.ADD, y, b.reshape(bias, (c.oc, 1, 1)))
        formats.append(Format.ROW)
    return _activated(b, y, c.activation)


def _activated(b: GraphBuilder, y: NodeId, name: str) -> NodeId:
    if name == "none":
        return y
    if name == "relu":
        return b.apply(Prim.MAX, y, 0.0)
    x = b.cast(y, DType.F32)
    if name == "silu":
        x = b.apply(Prim.DIV, x, b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, x)), 1.0))
    elif name == "hardswish":
        gate = b.apply(Prim.MIN, b.apply(Prim.MAX, b.apply(Prim.ADD, x, 3.0), 0.0), 6.0)
        x = b.apply(Prim.DIV, b.apply(Prim.MUL, x, gate), 6.0)
    elif name == "mish":
        e = b.apply(Prim.EXP, b.apply(Prim.MIN, x, 20.0))
        n = b.apply(Prim.MUL, e, b.apply(Prim.ADD, e, 2.0))
        x = b.apply(Prim.MUL, x, b.apply(Prim.DIV, n, b.apply(Prim.ADD, n, 2.0)))
    else:
        x = b.apply(Prim.MAX, x, b.apply(Prim.MUL, x, 0.1))
    return b.cast(x, DType.F16)


@dataclass(frozen=True, slots=True)
class Written:
    """A kernel of one convolution or pair."""

    conv: Work
    problem: Problem
    rank: int
    schedule: Schedule
    source: CudaSource


def hastened(source: CudaSource) -> CudaSource:
    """The same kernel, which lets its successors start before it waits itself."""
    return replace(source, text=source.text.replace("w_wait(); w_release();", "w_release(); w_wait();"))


def write(c: Work, facts: GpuFacts, first: int, more: int) -> list[Written] | str:
    """The first schedules of a convolution and further ones of the halo template; or why there is none."""
    problem = problem_of(c)
    found = templates.schedules(problem, facts)
    if isinstance(found, Declined):
        return found.reason
    wanted = list(found[:first])
    p = product(problem)
    if more and isinstance(p, Product):
        wanted += [s.schedule() for _, s in halo_choose.shapes(p, facts, keep=more) if s.schedule() not in wanted]
    kernels = []
    for rank, schedule in enumerate(wanted):
        source = templates.emit(problem, schedule)
        if isinstance(source, CudaSource):
            kernels.append(Written(c, problem, rank, schedule, source))
    return kernels or "no kernel"


class Bench:
    """Times functions and kernels on the current GPU."""

    def __init__(self) -> None:
        self.flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
        self.cudnn = find_cudnn()

    def median_us(self, launches: Sequence[Callable[[], object]]) -> float:
        """Microseconds per launch of a graph of all of them."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launches[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        torch.cuda.synchronize()
        samples = []
        for _ in range(ROUNDS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flushed.add_(1)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / len(launches))
        return statistics.median(samples)


Layer = tuple[Conv, torch.Tensor, torch.Tensor | None]


@dataclass(slots=True)
class Data:
    """Random operands of one convolution or pair on the device."""

    x: torch.Tensor
    layers: list[Layer]
    exact: torch.Tensor

    @staticmethod
    def of(work: Work) -> Data:
        """Normal data; weights scaled so that results stay near 1."""
        generator = torch.Generator(device="cuda").manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)

        parts = work if isinstance(work, Pair) else (work,)
        first = parts[0]
        x = normal(first.n, first.ic, first.h, first.w).half().contiguous(memory_format=torch.channels_last)
        layers: list[Layer] = []
        y = x.double()
        for c in parts:
            scale = (c.ic // c.groups * math.prod(c.kernel)) ** -0.5
            w = (normal(c.oc, c.ic // c.groups, *c.kernel) * scale).half()
            bias = normal(c.oc).half() if c.bias else None
            layers.append((c, w, bias))
            with torch.backends.cudnn.flags(enabled=False):  # it would try each of its slow algorithms of float64
                y = F.conv2d(y, w.double(), None, c.strides, c.pads, c.dilations, c.groups)
            y = ACTIVATIONS[c.activation](y if bias is None else y + bias.double()[:, None, None])
        return Data(x, layers, y.float())

    @property
    def weight_bytes(self) -> int:
        """Of all layers."""
        return sum(w.nbytes for _, w, _ in self.layers)

    def copies(self, bytes_: int) -> int:
        """Copies of so many bytes of weights."""
        return max(1, min(LAUNCHES, ROTATED_BYTES // max(bytes_, 1)))


def time_peer(bench: Bench, data: Data) -> tuple[float, float]:
    """Microseconds of cuDNN alone, and with eager bias and activation."""
    count = data.copies(data.weight_bytes)
    weights = [
        [w.contiguous(memory_format=torch.channels_last).clone() for _, w, _ in data.layers] for _ in range(count)
    ]

    def alone(i: int) -> torch.Tensor:
        y = data.x
        for (c, _, _), w in zip(data.layers, weights[i % count], strict=True):
            y = F.conv2d(y, w, None, c.strides, c.pads, c.dilations, c.groups)
        return y

    def chain(i: int) -> torch.Tensor:
        y = data.x
        for (c, _, bias), w in zip(data.layers, weights[i % count], strict=True):
            y = ACTIVATIONS[c.activation](F.conv2d(y, w, bias, c.strides, c.pads, c.dilations, c.groups))
        return y

    def fused(i: int) -> torch.Tensor:
        y = data.x
        for (c, _, bias), w in zip(data.layers, weights[i % count], strict=True):
            y = torch.cudnn_convolution_relu(y, w, bias, c.strides, c.pads, c.dilations, c.groups)
        return y

    ways = [alone, chain]
    if all(c.activation == "relu" for c, _, _ in data.layers):
        ways.append(fused)
    for way in ways:
        way(0)
    times = [
        bench.median_us([lambda i=i, f=f: f(i) for i in range(LAUNCHES)])  # type: ignore[misc]
        for f in ways
    ]
    return times[0], min(times[1:])


def time_engines(bench: Bench, data: Data) -> tuple[float, float]:
    """Microseconds of the best of cuDNN's engines, alone and with what follows; infinite where there is none."""
    if len(data.layers) > 1 or isinstance(bench.cudnn, Declined):
        return math.inf, math.inf
    ((c, w, bias),) = data.layers
    count = data.copies(data.weight_bytes)
    weights = [w.contiguous(memory_format=torch.channels_last).clone() for _ in range(count)]
    out = torch.empty_like(data.exact, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    room = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    plain = Convolution(
        tuple(data.x.shape), data.x.stride(), tuple(w.shape), weights[0].stride(), out.stride(), "f16",
        (_two(c.pads), _two(c.pads)), _two(c.strides), _two(c.dilations),
    )  # fmt: skip
    relu = c.activation == "relu"
    best = []
    for asked in (plain, replace(plain, bias=bias is not None, activation="relu" if relu else "")):
        behind = None if asked is plain or relu or c.activation == "none" else ACTIVATIONS[c.activation]
        times = [math.inf]
        for found in bench.cudnn.algorithms(asked, ENGINES, workspace=WORKSPACE):
            given = bias.data_ptr() if bias is not None else 0
            ready = [
                found.bind(ConvAddresses(data.x.data_ptr(), v.data_ptr(), out.data_ptr(), given, 0, room.data_ptr()))
                for v in weights
            ]

            def launch(i: int, ready: list[Callable[[int], None]] = ready, behind: Behind = behind) -> None:
                ready[i % count](torch.cuda.current_stream().cuda_stream)
                if behind is not None:
                    behind(out)

            times.append(bench.median_us([lambda i=i, f=launch: f(i) for i in range(LAUNCHES)]))  # type: ignore[misc]
        best.append(min(times))
    return best[0], best[1]


Behind = Callable[[torch.Tensor], torch.Tensor] | None


def _two(values: Sequence[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def time_kernel(bench: Bench, k: Written, cubin: CompiledCubin, data: Data) -> tuple[float, float]:
    """Microseconds of a kernel, and its error over the root mean square of the result."""
    s = k.source
    bound = BoundCuda(s, cubin.path)
    inputs = [data.x, *(v.contiguous() for _, w, bias in data.layers for v in (w, bias) if v is not None)]
    addresses = [x.data_ptr() for x in inputs]
    stream = torch.cuda.current_stream().cuda_stream
    count = data.copies(sum(s.packed_bytes) or data.weight_bytes)
    packed = [[torch.empty(n, dtype=torch.uint8, device="cuda") for n in s.packed_bytes] for _ in range(count)]
    for buffers in packed:
        bound.pack([0, *addresses[1:]], [x.data_ptr() for x in buffers], stream)
    out = torch.zeros_like(data.exact, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    work = torch.empty(max(s.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    state = torch.zeros(max(s.state_bytes, 1), dtype=torch.uint8, device="cuda")
    ready = [
        bound.prepare(
            Addresses(addresses, [out.data_ptr()], [x.data_ptr() for x in b], work.data_ptr(), state.data_ptr())
        )
        for b in packed
    ]
    ready[0](stream)
    torch.cuda.synchronize()
    wrong = float((out.float() - data.exact).square().mean().sqrt() / (data.exact.square().mean().sqrt() + 1e-30))
    if not wrong <= TOLERANCE:
        return math.inf, wrong
    launches = [
        lambda i=i: ready[i % count](torch.cuda.current_stream().cuda_stream)  # type: ignore[misc]
        for i in range(LAUNCHES)
    ]
    return bench.median_us(launches), wrong


def cost(work: Work) -> tuple[int, int]:
    """Order of work: fields first, then depthwise and pairs, then products; small before large."""
    c = work.first if isinstance(work, Pair) else work
    kind = 0 if c.groups == 1 and c.kernel != (1, 1) else 1 if c.groups > 1 else 2
    return kind, c.h * c.w * c.ic * c.oc // c.groups


def say(line: dict[str, object]) -> None:
    """One record."""
    print(json.dumps(line), flush=True)


def run_one(bench: Bench, c: Work, kernels: list[tuple[Written, CompiledCubin]], *, peers: bool) -> dict[str, object]:
    """Time one convolution."""
    data = Data.of(c)
    tried: list[dict[str, object]] = []
    best, best_us = None, math.inf
    for k, cubin in kernels:
        us, wrong = time_kernel(bench, k, cubin, data)
        note: dict[str, object] = {
            "rank": k.rank,
            "us": round(us, 2) if us < math.inf else None,
            "schedule": str(k.schedule),
        }
        tried.append(note if us < math.inf else {**note, "error": wrong})
        if us < best_us and k.rank != EARLY:
            best, best_us = k, us
    conv_us, chain_us = time_peer(bench, data) if peers else (math.nan, math.nan)
    engines = time_engines(bench, data) if peers else (math.inf, math.inf)
    conv_us, chain_us = min(conv_us, engines[0]), min(chain_us, engines[1])
    line: dict[str, object] = {"record": "conv", "case": str(c), "batch": len(data.x), "tried": tried}
    if best is not None:
        line |= {"us": round(best_us, 2), "rank": best.rank, "schedule": str(best.schedule)}
        if peers:
            line |= {"conv_us": round(conv_us, 2), "chain_us": round(chain_us, 2)}
            line |= {"engine_us": [round(x, 2) if x < math.inf else None for x in engines]}
            line |= {"ratio_conv": round(conv_us / best_us, 3), "ratio_chain": round(chain_us / best_us, 3)}
    return line


def compiled(nvrtc: Nvrtc, arch: str, kernels: list[Written]) -> list[tuple[Written, CompiledCubin]]:
    """Kernels that the compiler takes, without spills."""
    results = nvrtc.compile_many([CompileJob(k.source.text, arch, k.source.flags) for k in kernels])
    found = []
    for k, result in zip(kernels, results, strict=True):
        if not isinstance(result, CompiledCubin):
            say({"record": "refused", "case": str(k.conv), "schedule": str(k.schedule), "why": str(result)[:300]})
        elif any(_local(result, x.entry) for x in k.source.launches) or result.warnings:
            say({"record": "spills", "case": str(k.conv), "schedule": str(k.schedule), "why": result.warnings[:2]})
        else:
            found.append((k, result))
    return found


def _local(compiled: CompiledCubin, entry: str) -> int:
    """Bytes of local memory."""
    own = compiled.of(entry)
    return own.spill_stores + own.stack_bytes


def table(networks: dict[str, dict[Work, int]], lines: dict[Work, dict[str, object]]) -> None:
    """A short table per network: each convolution, then geometric means and sums over the network."""
    for name, convs in networks.items():
        done = [(c, n, lines[c]) for c, n in convs.items() if "ratio_chain" in lines.get(c, {})]
        if not done:
            continue
        print(f"== {name}: {len(done)} of {len(convs)} distinct convolutions")
        print(f"{'':58}{'times':>6}{'weft':>8}{'conv':>8}{'chain':>8}{'ratio':>7}  rank template")
        for c, n, x in sorted(done, key=lambda d: -float(str(d[2]["us"])) * d[1]):
            template = str(x["schedule"]).partition("template=")[2].split(",")[0].rstrip(")")
            shown = f"{x['us']:8}{x['conv_us']:8}{x['chain_us']:8}{x['ratio_chain']:7}"
            print(f"{str(c)[:58]:58}{n:6}{shown}  {x['rank']:4} {template}")
        done = [d for d in done if isinstance(d[0], Conv)]  # pairs are made of others
        ratios = {k: [float(str(x[k])) for _, _, x in done] for k in ("ratio_conv", "ratio_chain")}
        geo = {k: statistics.geometric_mean(v) for k, v in ratios.items()}
        sums = {k: sum(n * float(str(x[k])) for _, n, x in done) for k in ("us", "conv_us", "chain_us")}
        print(
            f"   geometric mean over cuDNN {geo['ratio_conv']:.3f}, with its eager chain {geo['ratio_chain']:.3f};"
            f" sums {sums['us']:.1f} us, {sums['conv_us']:.1f} us, {sums['chain_us']:.1f} us",
            flush=True,
        )


def main() -> int:
    """Run; 0 when every convolution had a right kernel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(NETWORKS), help="networks (all)")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--first", type=int, default=4, help="schedules of each convolution (4)")
    parser.add_argument("--more", type=int, default=0, help="further schedules of the halo template (0)")
    parser.add_argument("--seconds", type=float, default=90.0, help="when to stop (90)")
    parser.add_argument("--only", default="", help="convolutions whose description holds this text")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--dry", action="store_true", help="no GPU: write, compile for sm_90a, show the model")
    parser.add_argument("--keep", action="store_true", help="write the record")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth convolution from the Kth on (1/1)")
    parser.add_argument("--missing", action="store_true", help="with --keep: only what the record does not have")
    add_option(parser)
    args = parser.parse_args()
    record = Record(folder_of_gpu(), "convolutions", key=("case", "batch")) if args.keep else None
    batches = [int(x) for x in args.batch.split(",")]
    end = time.perf_counter()
    bad, late = False, list[str]()
    for batch in batches:
        end += args.seconds / len(batches)
        left = Left(record, end, only=args.left)
        bad |= run_batch(batch, record, args, left) != 0
        bad |= left.status() == 1
        late += left.late
    return MORE if args.left and late else int(bad)


def row_of(line: Mapping[str, object], networks: Mapping[str, int]) -> dict[str, object]:
    """A measured convolution, and how often each network has it."""
    kept = {k: v for k, v in line.items() if k not in ("record", "tried")}
    return {"record": "case", "suite": "convolutions", **kept, "networks": dict(networks)}


def run_batch(batch: int, record: Record | None, args: argparse.Namespace, left: Left) -> int:
    """All convolutions at one batch size that are left, in time; 0 when every one had a right kernel."""
    end = left.end
    networks = {name: convolutions(name, batch) for name in args.names}
    distinct = sorted({c for found in networks.values() for c in found if args.only in str(c)}, key=cost)
    part, parts_of = (int(x) for x in args.part.split("/"))
    distinct = distinct[part - 1 :: parts_of]
    if args.missing and record is not None:
        there = {(x["case"], x["batch"]) for x in record.cases if "failed" not in x}
        distinct = [c for c in distinct if (str(c), batch) not in there and isinstance(c, Conv)]
    if args.left:  # pairs have no row
        distinct = [c for c in distinct if isinstance(c, Conv) and not left.known(case=str(c), batch=batch)]
    if args.left and not distinct:
        return 0
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 2
    facts = GpuFacts() if args.dry else gpu_facts(None, calibrate=False)
    arch = "sm_90a" if args.dry else facts.arch
    bench = None
    if not args.dry:
        torch.backends.cudnn.benchmark = True
        torch.zeros(1, device="cuda")
        bench = Bench()

    def prepared(part: Sequence[Work]) -> dict[Work, list[tuple[Written, CompiledCubin]]]:
        if time.perf_counter() > end:
            return {}
        found = {c: write(c, facts, args.first, args.more) for c in part}
        for kernels in found.values():
            if not isinstance(kernels, str):
                kernels.append(replace(kernels[0], rank=EARLY, source=hastened(kernels[0].source)))
        for c, kernels in found.items():
            if isinstance(kernels, str):
                say({"record": "declined", "case": str(c), "why": kernels})
        ready = compiled(
            nvrtc, arch, [k for kernels in found.values() if not isinstance(kernels, str) for k in kernels]
        )
        return {c: [x for x in ready if x[0].conv == c] for c in part}

    lines: dict[Work, dict[str, object]] = {}
    bad, tried = 0, set[Work]()
    parts = [distinct[i : i + PART] for i in range(0, len(distinct), PART)]
    with torch.inference_mode(), ThreadPoolExecutor(1) as ahead:
        for ready in ahead.map(prepared, parts):
            for c, kernels in ready.items():
                bad += not kernels
                tried |= set() if kernels and time.perf_counter() > end else {c}
                if not kernels and record is not None and isinstance(c, Conv):
                    record.fail("no kernel compiles", case=str(c), batch=batch)
                if bench is None:
                    say({"record": "dry", "case": str(c), "kernels": [str(k.schedule) for k, _ in kernels]})
                    continue
                if not kernels or c not in tried:
                    continue
                try:
                    lines[c] = run_one(bench, c, kernels, peers=not args.no_peers)
                except (WeftError, RuntimeError) as error:
                    bad += 1
                    say({"record": "failed", "case": str(c), "why": f"{type(error).__name__}: {error}"[:500]})
                    if record is not None and isinstance(c, Conv):
                        record.fail(f"{type(error).__name__}: {error}", case=str(c), batch=batch)
                    if not _sound():
                        table(networks, lines)
                        print("the device is lost", flush=True)
                        return 1
                    continue
                bad += any(x.get("error") is not None for x in _tried(lines[c]))
                say(lines[c])
                if record is not None and isinstance(c, Conv) and "ratio_chain" in lines[c]:
                    record.add(row_of(lines[c], {name: found[c] for name, found in networks.items() if c in found}))
                elif record is not None and isinstance(c, Conv):
                    record.fail("no right kernel, or no peer", case=str(c), batch=batch)
    for c in distinct:
        if c not in tried:
            left.put_off(f"{c}, batch {batch}")
    table(networks, lines)
    print(f"{len(lines)} of {len(distinct)} convolutions timed, {bad} with faults, batch {batch}", flush=True)
    return 1 if bad else 0


def _tried(line: dict[str, object]) -> list[dict[str, object]]:
    found = line["tried"]
    assert isinstance(found, list)
    return found


def _sound() -> bool:
    """False once the context is lost."""
    try:
        torch.cuda.synchronize()
        return bool((torch.zeros(4, device="cuda") + 1).sum().item() == 4)
    except RuntimeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
