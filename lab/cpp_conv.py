"""Convolutions of well-known networks: our templates beside oneDNN (through PyTorch) and ONNX Runtime.

    python -m lab.cpp_conv [--threads 2] [--seconds 0.3] [--keep 4] [--only resnet50] [--json out.json]

Batch 1, fp32, a fused bias and rectifier in all three. Each row gives the least time of many runs, all candidates in
turn, so that a busy machine hits them alike. `share` is of the measured multiply-add peak and may pass 1 for Winograd.
ONNX Runtime reorders its operands inside a session; where input and output have one shape the time is that of one more
convolution in a chain of them, otherwise it includes the reordering.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weft.device.facts import CpuFacts, cpu_facts
from weft.device.launch import NativeKernel, pointer_array
from weft.device.toolchain import HostCompiler, find_compiler
from weft.generate.cpp import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import KernelSource


@dataclass(frozen=True)
class Conv:
    """One convolution: square kernel; `c` and `oc` are channels, `h` the side of the input."""

    c: int
    h: int
    oc: int
    k: int
    s: int = 1
    p: int = -1
    g: int = 1

    @property
    def pad(self) -> int:
        return self.k // 2 if self.p < 0 else self.p

    @property
    def out(self) -> int:
        return (self.h + 2 * self.pad - self.k) // self.s + 1

    @property
    def flops(self) -> int:
        return 2 * self.out**2 * self.oc * self.c // self.g * self.k**2

    def __str__(self) -> str:
        return f"{self.c}x{self.h} -> {self.oc}, {self.k}x{self.k}/{self.s}" + (f" g{self.g}" if self.g > 1 else "")


def _dw(c: int, h: int, k: int = 3, s: int = 1) -> Conv:
    return Conv(c, h, c, k, s, -1, c)


NETWORKS: dict[str, tuple[Conv, ...]] = {
    "resnet50": (
        Conv(3, 224, 64, 7, 2), Conv(64, 56, 64, 1), Conv(64, 56, 64, 3), Conv(64, 56, 256, 1), Conv(256, 56, 64, 1),
        Conv(256, 56, 128, 1), Conv(128, 56, 128, 3, 2), Conv(256, 56, 512, 1, 2), Conv(128, 28, 512, 1),
        Conv(512, 28, 128, 1), Conv(128, 28, 128, 3), Conv(512, 28, 256, 1), Conv(256, 28, 256, 3, 2),
        Conv(512, 28, 1024, 1, 2), Conv(256, 14, 1024, 1), Conv(1024, 14, 256, 1), Conv(256, 14, 256, 3),
        Conv(1024, 14, 512, 1), Conv(512, 14, 512, 3, 2), Conv(1024, 14, 2048, 1, 2), Conv(512, 7, 2048, 1),
        Conv(2048, 7, 512, 1), Conv(512, 7, 512, 3),
    ),
    "vgg16": (
        Conv(3, 224, 64, 3), Conv(64, 224, 64, 3), Conv(64, 112, 128, 3), Conv(128, 112, 128, 3),
        Conv(128, 56, 256, 3), Conv(256, 56, 256, 3), Conv(256, 28, 512, 3), Conv(512, 28, 512, 3),
        Conv(512, 14, 512, 3),
    ),
    "candy": (
        Conv(3, 232, 32, 9, 1, 0), Conv(32, 226, 64, 3, 2, 0), Conv(64, 114, 128, 3, 2, 0), Conv(128, 58, 128, 3, 1, 0),
        Conv(128, 114, 64, 3, 1, 0), Conv(64, 226, 32, 3, 1, 0), Conv(32, 232, 3, 9, 1, 0),
    ),
    "yolox-nano": (
        Conv(12, 208, 16, 3), _dw(16, 208, 3, 2), Conv(16, 104, 32, 1), Conv(32, 104, 16, 1), Conv(16, 104, 16, 1),
        _dw(16, 104), Conv(32, 104, 32, 1), _dw(32, 104, 3, 2), Conv(32, 52, 64, 1), Conv(64, 52, 32, 1), _dw(32, 52),
        Conv(64, 52, 64, 1), _dw(64, 52, 3, 2), Conv(64, 26, 128, 1), Conv(128, 26, 64, 1), _dw(64, 26),
        _dw(128, 26, 3, 2), Conv(128, 13, 256, 1), Conv(256, 13, 128, 1), _dw(128, 13), Conv(512, 13, 256, 1),
        Conv(64, 52, 80, 1),
    ),
    "efficientvit": (
        Conv(3, 224, 8, 3, 2), _dw(8, 112), Conv(8, 112, 8, 1), Conv(8, 112, 32, 1), _dw(32, 112, 3, 2),
        Conv(32, 56, 16, 1), Conv(16, 56, 64, 1), _dw(64, 56, 3, 2), Conv(64, 28, 32, 1), Conv(32, 28, 128, 1),
        _dw(128, 28, 3, 2), Conv(128, 14, 64, 1), Conv(64, 14, 192, 1), _dw(192, 14, 5), Conv(64, 14, 256, 1),
        _dw(256, 14), Conv(256, 14, 64, 1), Conv(128, 7, 384, 1), _dw(384, 7, 5), Conv(128, 7, 512, 1),
        Conv(512, 7, 128, 1),
    ),
    "inception": (
        Conv(3, 299, 32, 3, 2, 0), Conv(32, 149, 32, 3, 1, 0), Conv(32, 147, 64, 3), Conv(64, 73, 80, 1),
        Conv(80, 73, 192, 3, 1, 0), Conv(192, 35, 64, 1), Conv(48, 35, 64, 5), Conv(64, 35, 96, 3), Conv(96, 35, 96, 3),
        Conv(288, 35, 384, 3, 2, 0), Conv(768, 17, 192, 1), Conv(1280, 8, 320, 1), Conv(384, 8, 384, 3),
        Conv(448, 8, 384, 3),
    ),
}  # fmt: skip


def _aligned(count: int) -> np.ndarray:
    raw = np.zeros(count * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 4].view(np.float32)


def problem_of(conv: Conv) -> Problem:
    """Convolution, bias, rectifier; channels-last but for an image of three channels."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, conv.c, conv.h, conv.h)))
    w = b.input(TensorType(DType.F32, (conv.oc, conv.c // conv.g, conv.k, conv.k)), is_weight=True)
    bias = b.input(TensorType(DType.F32, (conv.oc,)), is_weight=True)
    pads = (conv.pad, conv.pad)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((conv.s, conv.s), pads, pads, (1, 1), conv.g))
    y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.reshape(bias, (conv.oc, 1, 1))), 0.0)
    first = Format.ROW if conv.c == 3 else Format.LAST
    last = Format.ROW if conv.oc == 3 else Format.LAST
    return Problem(b.build([y]), str(conv), (first, Format.ROW, Format.ROW), (last,))


class Ours:
    """A linked kernel with its buffers."""

    def __init__(self, compiler: HostCompiler, cache: Path, source: KernelSource, arrays: list[np.ndarray], size: int):
        compiled = compiler.compile(source.text, source.flags, cache_dir=cache)
        self.kernel = NativeKernel(compiled.path, source.entry)
        self.buffers = [_aligned(x.size) for x in arrays]
        for buffer, x in zip(self.buffers, arrays, strict=True):
            buffer[:] = x.reshape(-1)
        self.packed = [_aligned(n // 4) for n in source.packed_bytes]
        self.work, self.out = _aligned(source.workspace_bytes // 4 + 16), _aligned(size)
        self.pointers = [pointer_array([x.ctypes.data for x in xs]) for xs in (self.buffers, [self.out], self.packed)]
        if self.packed:
            self.kernel.pack(self.pointers[0], self.pointers[2])

    def __call__(self) -> None:
        self.kernel(self.pointers[0], self.pointers[1], self.work.ctypes.data, self.pointers[2])


def onednn(conv: Conv, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> list[Callable[[], object]]:
    """Prepacked weights with a fused rectifier, and plain channels-last calls."""
    import torch

    xt = torch.tensor(x).contiguous(memory_format=torch.channels_last)
    wt, bt = torch.tensor(w), torch.tensor(bias)
    two = [[conv.pad] * 2, [conv.s] * 2, [1, 1]]
    packed = torch.ops.mkldnn._reorder_convolution_weight(wt, *two, conv.g, list(x.shape))
    plain = wt.contiguous(memory_format=torch.channels_last)

    def pointwise() -> object:
        return torch.ops.mkldnn._convolution_pointwise(xt, packed, bt, *two, conv.g, "relu", [], "")

    def functional() -> object:
        return torch.relu_(torch.nn.functional.conv2d(xt, plain, bt, conv.s, conv.pad, 1, conv.g))

    return [pointwise, functional]


def ort(conv: Conv, w: np.ndarray, bias: np.ndarray, x: np.ndarray, threads: int, count: int) -> Callable[[], object]:
    """A session with `count` equal convolutions in a row."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = []
    for i in range(count):
        nodes.append(
            helper.make_node(
                "Conv", [f"x{i}", "w", "b"], [f"y{i}"], strides=[conv.s] * 2, pads=[conv.pad] * 4, group=conv.g
            )
        )
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"x{i + 1}"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info(f"x{count}", TensorProto.FLOAT, [1, conv.oc, conv.out, conv.out])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(bias, "b")],
    )
    return in_session(graph, {"x0": x}, threads)


def in_session(graph: Any, given: Mapping[str, np.ndarray], threads: int, opset: int = 17) -> Callable[[], object]:
    """A call of ONNX Runtime on an ONNX graph."""
    import onnx
    import onnxruntime
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 9
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(given))


def least(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Least time of each, all of them in turn, seconds."""
    best = [float("inf")] * len(runs)
    for f in runs:
        f()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for i, f in enumerate(runs):
            for _ in range(3):
                start = time.perf_counter()
                f()
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def row(
    conv: Conv, facts: CpuFacts, compiler: HostCompiler, cache: Path, seconds: float, keep: int, peak: float
) -> dict[str, object]:
    """Measure one convolution."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, conv.c, conv.h, conv.h)).astype(np.float32)
    w = (rng.standard_normal((conv.oc, conv.c // conv.g, conv.k, conv.k)) / conv.k).astype(np.float32)
    bias = rng.standard_normal(conv.oc).astype(np.float32)
    problem = problem_of(conv)
    found = templates.schedules(problem, facts)
    if isinstance(found, Declined):
        return {"conv": str(conv), "declined": found.reason}
    memory = x if problem.input_formats[0] is Format.ROW else np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    ours = []
    for schedule in found[:keep]:
        source = templates.emit(problem, schedule)
        assert isinstance(source, KernelSource), source
        ours.append(Ours(compiler, cache, source, [memory, w, bias], conv.oc * conv.out**2))
    chain = conv.c == conv.oc and conv.out == conv.h
    sessions = [ort(conv, w, bias, x, facts.threads, n) for n in ((1, 3) if chain else (1,))]
    times = least([*ours, *onednn(conv, x, w, bias), *sessions], seconds)
    mine, theirs, runtime = times[: len(ours)], times[len(ours) : len(ours) + 2], times[len(ours) + 2 :]
    ort_time = max((runtime[1] - runtime[0]) / 2, 1e-9) if chain else runtime[0]
    best = min(mine)
    return {
        "conv": str(conv),
        "us": best * 1e6,
        "first_us": mine[0] * 1e6,
        "gflops": conv.flops / best / 1e9,
        "share": conv.flops / best / peak,
        "onednn_us": min(theirs) * 1e6,
        "ort_us": ort_time * 1e6,
        "to_onednn": min(theirs) / best,
        "to_ort": ort_time / best,
        "schedule": str(found[mine.index(best)]),
    }


_PEAK = """
typedef float vf __attribute__((vector_size(BYTES)));
extern "C" void peak(const void* const*, void* const* outputs, void*, const void* const*) {
#pragma omp parallel num_threads(THREADS)
  {
    vf DECLARE;
    const vf x = (vf){} + 0.999f;
    for (long k = 0; k < 400000; ++k) { STEPS }
    const vf sum = SUM;
    if (sum[0] == 12345.0f) *(float*)outputs[0] = sum[0];
  }
}
"""


def peak_flops(compiler: HostCompiler, threads: int) -> float:
    """Multiply-add peak in FLOP/s: twenty independent chains per thread, the best of many short runs."""
    best = 0.0
    names = [f"a{i}" for i in range(20)]
    for lanes in (8, 16):
        text = _PEAK.replace("BYTES", str(lanes * 4)).replace("THREADS", str(threads))
        text = text.replace("DECLARE", ", ".join(f"{n} = (vf){{}} + {i}.0f" for i, n in enumerate(names)))
        text = text.replace("STEPS", " ".join(f'{n} = {n} * x + x; asm volatile("" : "+v"({n}));' for n in names))
        text = text.replace("SUM", " + ".join(names))
        kernel, out = NativeKernel(compiler.compile(text).path, "peak"), _aligned(16)
        none, outs = pointer_array([]), pointer_array([out.ctypes.data])
        (seconds,) = least([partial(kernel, none, outs, 0, none)], 1.0)
        best = max(best, 400000 * 20 * lanes * 2 * threads / seconds)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.3, help="per candidate")
    parser.add_argument("--keep", type=int, default=4, help="schedules of ours per convolution")
    parser.add_argument("--only", default="", help="a network, or several with commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    compiler = find_compiler()
    if isinstance(compiler, Declined):
        raise SystemExit(compiler.reason)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        facts = cpu_facts(Path(folder))
        if args.threads:
            facts = replace(facts, threads=args.threads)
        torch.set_num_threads(facts.threads)
        peak = max(peak_flops(compiler, facts.threads), 1.0)
        bits = facts.simd_bytes * 8
        print(f"{facts.name}: {facts.threads} threads, {bits}-bit, peak {peak / 1e9:.0f} GFLOP/s")
        columns = [
            ("us", 9),
            ("GFLOP/s", 9),
            ("share", 7),
            ("1st/best", 9),
            ("oneDNN", 9),
            ("ORT", 9),
            ("x oneDNN", 10),
        ]
        head = f"{'convolution':34}" + "".join(f"{name:>{width}}" for name, width in columns) + "  x ORT"
        for name in args.only.split(",") if args.only else NETWORKS:
            print(f"\n{name}\n{head}")
            for conv in NETWORKS[name]:
                r = row(conv, facts, compiler, Path(folder), args.seconds, args.keep, peak)
                rows.append({"network": name, **r})
                if "declined" in r:
                    print(f"{conv!s:34} declined: {r['declined']}")
                    continue
                n = {k: float(v) for k, v in r.items() if isinstance(v, float)}
                print(
                    f"{conv!s:34}{n['us']:9.1f}{n['gflops']:9.0f}{n['share']:7.2f}{n['first_us'] / n['us']:9.2f}"
                    f"{n['onednn_us']:9.1f}{n['ort_us']:9.1f}{n['to_onednn']:10.2f}{n['to_ort']:7.2f}"
                    f"  {str(r['schedule']).split('algorithm=')[1].split(',')[0]}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
