"""Generated C++ kernels against PyTorch's own operators, group by group.

`python -m lab.cpp_groups [CASE ...] [--all-schedules]` prints one JSON line per case:
microseconds of the best schedule and of eager PyTorch (the least of interleaved rounds), and the bytes that the group
must move over that time, beside what a plain copy of as many bytes reaches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from weft.device.facts import cpu_facts
from weft.device.launch import NativeKernel, pointer_array
from weft.device.toolchain import find_compiler
from weft.generate.cpp import CppGenerator
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import KernelSource

ROW, LAST = Format.ROW, Format.LAST
Torch = Callable[..., object]


@dataclass(frozen=True)
class Case:
    graph: Graph
    inputs: tuple[Format, ...]
    outputs: tuple[Format, ...]
    eager: Torch


def f32(*shape: int) -> TensorType:
    return TensorType(DType.F32, shape)


def case(
    b: GraphBuilder, out: NodeId | list[NodeId], eager: Torch, fmt: Format = ROW, in_fmt: Format | None = None
) -> Case:
    outs = out if isinstance(out, list) else [out]
    graph = b.build(outs)

    def pick(n: NodeId, f: Format) -> Format:
        return f if graph.type_of(n).rank == 4 else ROW

    return Case(
        graph, tuple(pick(n, in_fmt or fmt) for n in graph.inputs), tuple(pick(n, fmt) for n in graph.outputs), eager
    )


def softmax(b: GraphBuilder, x: NodeId, axis: int) -> NodeId:
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, [axis])))
    return b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, [axis]))


def normalise(b: GraphBuilder, x: NodeId, axes: tuple[int, ...], w: NodeId, c: NodeId) -> NodeId:
    n = float(np.prod([b.type_of(x).shape[k] for k in axes]))
    d = b.apply(Prim.SUB, x, b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, x, axes), 1.0 / n))
    v = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), axes), 1.0 / n)
    r = b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5))
    return b.apply(Prim.ADD, b.apply(Prim.MUL, b.apply(Prim.MUL, d, r), w), c)


def bias_relu_softmax(n: int, m: int) -> Case:
    b = GraphBuilder()
    x, c = b.input(f32(n, m)), b.input(f32(1, m), is_weight=True)
    y = softmax(b, b.apply(Prim.MAX, b.apply(Prim.ADD, x, c), 0.0), 1)
    return case(b, y, lambda x, c: torch.softmax(torch.relu(x + c), 1))


def attention_softmax(h: int, n: int) -> Case:
    b = GraphBuilder()
    x, m = b.input(f32(1, h, n, n)), b.input(f32(1, 1, 1, n))
    y = softmax(b, b.apply(Prim.ADD, b.apply(Prim.MUL, x, 0.125), m), 3)
    return case(b, y, lambda x, m: torch.softmax(x * 0.125 + m, -1))


def layer_norm(n: int, m: int, *, residual: bool = False) -> Case:
    b = GraphBuilder()
    x = b.input(f32(n, m))
    outs = []
    if residual:
        x = b.apply(Prim.ADD, x, b.input(f32(n, m)))
        outs = [x]
    w, c = b.input(f32(1, m), is_weight=True), b.input(f32(1, m), is_weight=True)
    y = normalise(b, x, (1,), w, c)
    if residual:

        def eager(
            x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, c: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            s = x + r
            return s, F.layer_norm(s, (m,), w[0], c[0])

        return case(b, [*outs, y], eager)
    return case(b, y, lambda x, w, c: F.layer_norm(x, (m,), w[0], c[0]))


def instance_norm(c: int, s: int, fmt: Format, *, pad: bool = True) -> Case:
    b = GraphBuilder()
    x, w, o = (
        b.input(f32(1, c, s, s)),
        b.input(f32(1, c, 1, 1), is_weight=True),
        b.input(f32(1, c, 1, 1), is_weight=True),
    )
    y = b.apply(Prim.MAX, normalise(b, x, (2, 3), w, o), 0.0)
    if pad:
        y = b.add(Prim.PAD, y, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))

    def eager(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        y = torch.relu(F.instance_norm(x, weight=w.reshape(-1), bias=o.reshape(-1), eps=1e-5))
        return F.pad(y, (1, 1, 1, 1), mode="reflect") if pad else y

    return case(b, y, eager, fmt)


def activation(name: str, n: int) -> Case:
    b = GraphBuilder()
    x = b.input(f32(n))
    one = 1.0
    if name == "silu":
        y = b.apply(Prim.DIV, x, b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, x)), one))
        return case(b, y, F.silu)
    if name == "mish":
        sp = b.apply(Prim.LOG1P, b.apply(Prim.EXP, x))
        y = b.apply(Prim.MUL, x, b.apply(Prim.TANH, b.apply(Prim.SELECT, b.apply(Prim.GT, x, 20.0), x, sp)))
        return case(b, y, F.mish)
    t = b.apply(Prim.ADD, b.apply(Prim.ERF, b.apply(Prim.MUL, x, 0.7071067811865476)), one)
    return case(b, b.apply(Prim.MUL, b.apply(Prim.MUL, x, 0.5), t), F.gelu)


def max_pool(c: int, s: int, k: int, stride: int, fmt: Format) -> Case:
    b = GraphBuilder()
    x = b.input(f32(1, c, s, s))
    p = k // 2 if k % 2 else 0
    attrs = a.WindowAttrs((k, k), (stride, stride), (p, p), (p, p), (1, 1))
    y = b.add(Prim.WINDOW_MAX, x, attrs=attrs)
    return case(b, y, lambda x: F.max_pool2d(x, k, stride, p), fmt)


def spp(c: int, s: int, fmt: Format) -> Case:
    b = GraphBuilder()
    x = b.input(f32(1, c, s, s))
    parts = [x]
    for k in (5, 9, 13):
        attrs = a.WindowAttrs((k, k), (1, 1), (k // 2, k // 2), (k // 2, k // 2), (1, 1))
        parts.append(b.add(Prim.WINDOW_MAX, x, attrs=attrs))
    y = b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(1))
    return case(b, y, lambda x: torch.cat([x, *(F.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1), fmt)


def upsample_concat(c: int, s: int, fmt: Format) -> Case:
    b = GraphBuilder()
    x, y = b.input(f32(1, c, s, s)), b.input(f32(1, c, 2 * s, 2 * s))
    u = b.reshape(b.broadcast(b.reshape(x, (1, c, s, 1, s, 1)), (1, c, s, 2, s, 2)), (1, c, 2 * s, 2 * s))
    z = b.add(Prim.CONCAT, u, y, attrs=a.ConcatAttrs(1))
    return case(b, z, lambda x, y: torch.cat([F.interpolate(x, scale_factor=2), y], 1), fmt)


def convert(c: int, s: int, source: Format, target: Format) -> Case:
    b = GraphBuilder()
    x = b.input(f32(1, c, s, s))
    y = b.apply(Prim.MUL, x, 1.0)
    memory = torch.channels_last if target is LAST else torch.contiguous_format
    return case(b, y, lambda x: x.contiguous(memory_format=memory), target, source)


def bilinear(c: int, s: int, fmt: Format) -> Case:
    """Twice as large, corners not aligned; rows and columns are gathered with constant indices."""
    b = GraphBuilder()
    x = b.input(f32(1, c, s, s))
    at = np.clip((np.arange(2 * s) + 0.5) / 2 - 0.5, 0, None)
    i0 = np.floor(at).astype(np.int64)
    i1 = np.minimum(i0 + 1, s - 1)
    t = (at - i0).astype(np.float32)

    def lerp(x: NodeId, axis: int) -> NodeId:
        lo = b.add(Prim.GATHER, x, b.constant(i0), attrs=a.GatherAttrs(axis))
        hi = b.add(Prim.GATHER, x, b.constant(i1), attrs=a.GatherAttrs(axis))
        shape = [1, 1, 1, 1]
        shape[axis] = 2 * s
        w = b.constant(t.reshape(shape))
        return b.apply(Prim.ADD, lo, b.apply(Prim.MUL, b.apply(Prim.SUB, hi, lo), w))

    y = lerp(lerp(x, 2), 3)
    return case(b, y, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), fmt)


def global_mean(c: int, s: int, fmt: Format) -> Case:
    b = GraphBuilder()
    x = b.input(f32(1, c, s, s))
    y = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, x, (2, 3)), 1.0 / (s * s))
    return case(b, y, lambda x: x.mean((2, 3), keepdim=True), fmt)


def heads(n: int, h: int, d: int) -> Case:
    b = GraphBuilder()
    x = b.input(f32(1, n, h * d))
    y = b.apply(Prim.MUL, b.transpose(b.reshape(x, (1, n, h, d)), (0, 2, 1, 3)), 0.125)
    return case(b, y, lambda x: (x.reshape(1, n, h, d).permute(0, 2, 1, 3) * 0.125).contiguous())


def add_relu(c: int, s: int) -> Case:
    b = GraphBuilder()
    x, y = b.input(f32(1, c, s, s)), b.input(f32(1, c, s, s))
    return case(b, b.apply(Prim.MAX, b.apply(Prim.ADD, x, y), 0.0), lambda x, y: torch.relu(x + y))


CASES: dict[str, Callable[[], Case]] = {
    "bias-relu-softmax/4096x1024": lambda: bias_relu_softmax(4096, 1024),
    "attention-softmax/12x128x128": lambda: attention_softmax(12, 128),
    "layer-norm/128x768": lambda: layer_norm(128, 768),
    "residual-layer-norm/128x768": lambda: layer_norm(128, 768, residual=True),
    "layer-norm/4096x1024": lambda: layer_norm(4096, 1024),
    "instance-norm-relu-pad/row": lambda: instance_norm(32, 224, ROW),
    "instance-norm-relu-pad/last": lambda: instance_norm(32, 224, LAST),
    "instance-norm-relu/row": lambda: instance_norm(128, 56, ROW, pad=False),
    "instance-norm-relu/last": lambda: instance_norm(128, 56, LAST, pad=False),
    "silu/1e6": lambda: activation("silu", 1_000_000),
    "mish/1e6": lambda: activation("mish", 1_000_000),
    "gelu/1e6": lambda: activation("gelu", 1_000_000),
    "add-relu/64x56x56": lambda: add_relu(64, 56),
    "max-pool-2x2/row": lambda: max_pool(64, 112, 2, 2, ROW),
    "max-pool-2x2/last": lambda: max_pool(64, 112, 2, 2, LAST),
    "max-pool-3x3-s2/row": lambda: max_pool(64, 112, 3, 2, ROW),
    "max-pool-3x3-s2/last": lambda: max_pool(64, 112, 3, 2, LAST),
    "max-pool-5x5-s1/row": lambda: max_pool(128, 26, 5, 1, ROW),
    "max-pool-5x5-s1/last": lambda: max_pool(128, 26, 5, 1, LAST),
    "spp/row": lambda: spp(256, 13, ROW),
    "spp/last": lambda: spp(256, 13, LAST),
    "upsample-concat/row": lambda: upsample_concat(64, 52, ROW),
    "upsample-concat/last": lambda: upsample_concat(64, 52, LAST),
    "convert/row-last": lambda: convert(64, 112, ROW, LAST),
    "convert/last-row": lambda: convert(64, 112, LAST, ROW),
    "bilinear-2x/row": lambda: bilinear(64, 56, ROW),
    "bilinear-2x/last": lambda: bilinear(64, 56, LAST),
    "mean-hw/row": lambda: global_mean(512, 28, ROW),
    "mean-hw/last": lambda: global_mean(512, 28, LAST),
    "heads/128x12x64": lambda: heads(128, 12, 64),
    "heads/1024x12x64": lambda: heads(1024, 12, 64),
}


def least_us(runs: list[Callable[[], object]], seconds: float = 0.25) -> list[float]:
    """Least time of each over interleaved rounds: on a shared machine the median measures the neighbours."""
    for run in runs:
        run()
    start = time.perf_counter()
    for run in runs:
        run()
    once = (time.perf_counter() - start) / len(runs)
    inner = max(1, int(0.002 / max(once, 1e-7)))
    samples: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(samples[0]) < 5:
        for run, found in zip(runs, samples, strict=True):
            start = time.perf_counter()
            for _ in range(inner):
                run()
            found.append((time.perf_counter() - start) / inner * 1e6)
    return [min(s) for s in samples]


def in_format(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if fmt is LAST and x.dim() == 4 else x.contiguous()


def aligned(nbytes: int) -> torch.Tensor:
    raw = torch.empty(nbytes + 64, dtype=torch.uint8)
    return raw[(-raw.data_ptr()) % 64 :][: max(nbytes, 1)]


def run_case(name: str, c: Case, *, all_schedules: bool, threads: int, folder: Path) -> dict[str, object]:
    problem = Problem(c.graph, name, c.inputs, c.outputs)
    generator = CppGenerator()
    compiler = find_compiler()
    assert not isinstance(compiler, Declined), compiler.reason
    facts = replace(cpu_facts(folder), threads=threads)
    schedules = generator.schedules(problem, facts)
    assert not isinstance(schedules, Declined), schedules.reason
    torch.manual_seed(0)
    inputs = [
        in_format(torch.randn(c.graph.type_of(n).shape), f) for n, f in zip(c.graph.inputs, c.inputs, strict=True)
    ]
    outputs = [
        in_format(torch.empty(c.graph.type_of(n).shape), f) for n, f in zip(c.graph.outputs, c.outputs, strict=True)
    ]
    expected = c.eager(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    runs, names, compile_s = [], [], []
    keep = []
    for schedule in schedules:
        source = generator.emit(problem, schedule)
        if not isinstance(source, KernelSource):
            continue
        binary = compiler.compile(source.text, source.flags, cache_dir=folder)
        compile_s.append(binary.seconds)
        kernel = NativeKernel(binary.path, source.entry)
        workspace = aligned(source.workspace_bytes)
        ins, outs = pointer_array([x.data_ptr() for x in inputs]), pointer_array([x.data_ptr() for x in outputs])
        none = pointer_array([])
        keep.append((workspace, ins, outs, none))
        kernel(ins, outs, workspace.data_ptr(), none)
        for got, want in zip(outputs, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        runs.append(partial(kernel, ins, outs, workspace.data_ptr(), none))
        names.append(str(schedule))
    moved = sum(x.numel() * 4 for x in [*inputs, *outputs])
    source_copy, target_copy = torch.empty(moved // 8), torch.empty(moved // 8)
    times = least_us([lambda: c.eager(*inputs), lambda: target_copy.copy_(source_copy), *runs])
    best = min(range(len(runs)), key=lambda k: times[2 + k])
    record: dict[str, object] = {
        "record": "case",
        "suite": "cpp-groups",
        "case": name,
        "weft_us": round(times[2 + best], 2),
        "peers_us": {"eager": round(times[0], 2)},
        "speedup": round(times[0] / times[2 + best], 2),
        "gb_s": round(moved / times[2 + best] / 1e3, 1),
        "copy_gb_s": round(moved / times[1] / 1e3, 1),
        "schedule": names[best],
        "compile_s": round(max(compile_s), 2),
    }
    if all_schedules:
        record["all_us"] = {n: round(t, 2) for n, t in zip(names, times[2:], strict=True)}
    return record


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="substrings of case names")
    parser.add_argument("--all-schedules", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(json.dumps({"record": "environment", "torch": torch.__version__, "threads": torch.get_num_threads()}))
    with tempfile.TemporaryDirectory() as folder:
        for name, make in CASES.items():
            if not options.cases or any(part in name for part in options.cases):
                record = run_case(
                    name, make(), all_schedules=options.all_schedules, threads=options.threads, folder=Path(folder)
                )
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
