"""Generated CUDA kernels under compute-sanitizer: memcheck and racecheck over a hundred and more, one launch each.

    python -m tools.sanitize [--tools memcheck,racecheck] [--seconds 480] [--only LABEL...]

Each tool runs this program with `--launch`: kernels are written, compiled, bound and launched as an executable does it,
in buffers of exactly their size, without a framework. The last launch is a planted fault that the tool must find;
otherwise its silence would mean nothing. The exit status is 1 for a finding and 2 where a tool does not run here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from benchmarks.cases.attention_gradient import gradient_problem
from benchmarks.cases.called_attention import called_attention_problem
from benchmarks.cases.embedding_gradient import embedding_problem, updated_problem

from tools.sanitize_fused import fused
from tools.sanitize_products import Case, products
from tools.sanitize_training import Training, contents, layered, run, trainings
from weft.device.cuda.driver import Module, primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompileJob, Nvrtc, find_nvrtc
from weft.device.cuda.streams import Stream, device_memory, fill, write
from weft.errors import ToolchainError
from weft.fission import apply
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.forms import Form
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId, OriginParam
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType, to_bits
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck")
PLANTED = "planted fault"
PLANTED_ENTRY = "planted"
PLANTED_TEXT = """
extern "C" __global__ void planted(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = (float)threadIdx.x;
  x[threadIdx.x] = s[63 - threadIdx.x];  // no barrier between
  if (threadIdx.x == 0) x[64 + 4096] = s[1];  // far beyond the end
}
"""
ROW, LAST = Format.ROW, Format.LAST
F16, F32 = DType.F16, DType.F32


def problem(b: GraphBuilder, y: NodeId, ins: Sequence[Format], out: Format) -> Problem:
    """With its text as its key."""
    graph = b.build([y])
    return Problem(graph, f"{graph} {[f.value for f in ins]} {out.value}", tuple(ins), (out,))


def pointwise() -> Problem:
    """relu(x + y) of a size that no vector divides; y is broadcast."""
    b = GraphBuilder()
    x, y = b.input(TensorType(F16, (7, 333))), b.input(TensorType(F16, (333,)))
    return problem(b, b.apply(Prim.MAX, b.apply(Prim.ADD, x, y), 0.0), (ROW, ROW), ROW)


def transposed() -> Problem:
    """Axes turned through shared memory."""
    b = GraphBuilder()
    return problem(b, b.transpose(b.input(TensorType(F32, (3, 70, 90))), (2, 0, 1)), (ROW,), ROW)


def softmax(rows: int, length: int) -> Problem:
    """Over the last axis."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (rows, length)))
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, [1])))
    return problem(b, b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, [1])), (ROW,), ROW)


def norm(rows: int, length: int, *, columns: bool = False) -> Problem:
    """Mean and variance of rows; `columns`: the elements of a row lie apart in memory."""
    b = GraphBuilder()
    x = b.input(TensorType(F32, (1, rows, length, 1) if columns else (rows, length)))
    axis = [2] if columns else [1]
    d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, axis), float(length)))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), axis), float(length))
    form = LAST if columns else ROW
    return problem(b, b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5))), (form,), form)


def pool() -> Problem:
    """The largest of 3 x 3 in steps of two, with a border."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (2, 40, 23, 31)))
    attrs = a.WindowAttrs((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
    return problem(b, b.add(Prim.WINDOW_MAX, x, attrs=attrs), (LAST,), LAST)


def embedding() -> Problem:
    """Rows of a table by index."""
    b = GraphBuilder()
    table, index = b.input(TensorType(F16, (50, 72))), b.input(TensorType(DType.I64, (37,)))
    return problem(b, b.add(Prim.GATHER, table, index, attrs=a.GatherAttrs(0)), (ROW, ROW), ROW)


def product(m: int, n: int, k: int, dtype: DType = F16) -> Problem:
    """relu(x @ transposed weight + bias)."""
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, (m, k))), b.input(TensorType(dtype, (n, k)), is_weight=True)
    y = b.add(Prim.MATMUL, x, b.transpose(w, (1, 0)))
    y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, (n,)), is_weight=True))
    return problem(b, b.apply(Prim.MAX, y, 0.0), (ROW, ROW, ROW), ROW)


def convolution(
    channels: int, size: int, out: int, kernel: int, *, groups: int = 1, dtype: DType = F16, changing: bool = False
) -> Problem:
    """relu(convolution + bias), channels last; `changing`: with a weight that is no constant, which lies so, too."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (1, channels, size, size)))
    w = b.input(TensorType(dtype, (out, channels // groups, kernel, kernel)), is_weight=not changing)
    border = (kernel // 2, kernel // 2)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), border, border, (1, 1), groups))
    bias = b.input(TensorType(dtype, (out,)), is_weight=True)
    y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.reshape(bias, (out, 1, 1))), 0.0)
    return problem(b, y, (LAST, LAST if changing else ROW, ROW), LAST)


def depthwise_gradient(channels: int, size: int, kernel: int) -> Problem:
    """Gradient of a depthwise convolution's weight, as a plan cuts the operator out of a training step."""
    b = GraphBuilder()
    dy, x = (b.input(TensorType(F16, (2, channels, size, size))) for _ in range(2))
    border = (kernel // 2, kernel // 2)
    params: dict[str, OriginParam] = {"kernel": (kernel, kernel), "strides": (1, 1), "pads": border}
    params |= {"dilations": (1, 1), "groups": channels, "transposed": False}
    made = apply(b, "conv_weight_gradient", [dy, x], params)
    assert not isinstance(made, Declined), made.reason
    graph = b.build(made)
    (whole,) = (c for c in enumerate_candidates(graph).candidates if c.kind is Kind.ORIGIN)
    return extract(graph, whole, (LAST, LAST), (ROW,)).problem


def cases(facts: GpuFacts) -> Mapping[str, Case]:
    """Problems by label; without a schedule the generator's own first ones are launched."""
    return {
        "pointwise": (pointwise(), None),
        "transposed": (transposed(), Form(tile=True, threads=64).schedule()),
        "softmax": (softmax(33, 100), None),
        "softmax, long": (softmax(5, 5001), None),
        "norm, cluster": (norm(3, 4100), Form(threads=128, per_row=128, cluster=4).schedule()),
        "norm, spread": (norm(3, 4100), Form(threads=64, fuse=False, spread=18).schedule()),
        "norm, columns": (norm(20, 77, columns=True), Form(threads=128, columns=2).schedule()),
        "pool": (pool(), None),
        "embedding": (embedding(), None),
        "product": (product(128, 256, 192), None),
        "product, ragged": (product(130, 72, 264), None),
        "product, few rows": (product(3, 200, 512), None),
        "product, f32": (product(65, 72, 40, F32), None),
        "convolution 3x3": (convolution(64, 14, 96, 3), None),
        "convolution 1x1": (convolution(96, 9, 200, 1), None),
        "convolution, changing weight": (convolution(64, 14, 96, 3, changing=True), None),
        "convolution, f32": (convolution(3, 20, 24, 3, dtype=F32), None),
        "depthwise": (convolution(48, 15, 48, 5, groups=48), None),
        "depthwise, weight's gradient": (depthwise_gradient(48, 15, 3), None),
        "attention, called": (called_attention_problem(2, 37, 3, 64, dtype=F16, packed=True), None),
        "attention, called, causal": (called_attention_problem(2, 150, 2, 128, causal=True, packed=True), None),
        "attention's gradients": (gradient_problem(2, 37, 3, 64, dtype=F16, causal=True), None),
        "attention's gradients, packed": (gradient_problem(2, 37, 3, 64, packed=True, joined=True), None),
        "embedding's gradient": (embedding_problem((7, 19), 33, 40, padding=3), None),
        "embedding's gradient, many of a row": (embedding_problem((300,), 3, 72, dtype=F16), None),
        "embedding's update": (updated_problem((7, 19), 33, 40, padding=3), None),
        "embedding's update, many of a row": (updated_problem((300,), 3, 72, rule="adam", dtype=F16), None),
        **products(),
        **fused(),
        **layered(facts),
    }


def unlike(schedules: Sequence[Schedule], most: int) -> list[Schedule]:
    """The first schedule of each kind of kernel: by template, and by what changes how its blocks work together."""
    found: dict[object, Schedule] = {}
    for schedule in schedules:
        given = dict(schedule.params)
        parts = [str(given.get(k, 1)) not in ("0", "1", "False") for k in ("split", "cluster", "spread", "per_row")]
        found.setdefault((given.get("template"), given.get("tile"), *parts), schedule)
    return list(found.values())[:most]


def sources(facts: GpuFacts, only: Sequence[str] = (), most: int = 4) -> Iterator[tuple[str, Problem, CudaSource]]:
    """Label, problem and kernel of everything that is launched; SystemExit where nothing is written for a case.

    `only`: labels begin with one of these.
    """
    maker = CudaGenerator()
    for label, (made, given) in cases(facts).items():
        if only and not label.startswith(tuple(only)):
            continue
        if isinstance(given, CudaSource):
            yield label, made, given
            continue
        chosen = [given] if given else maker.schedules(made, facts)
        if isinstance(chosen, Declined):
            sys.exit(f"tools.sanitize: {label}: {chosen.reason}")
        kernels = [k for s in unlike(chosen, most) if isinstance(k := maker.emit(made, s), CudaSource)]
        if not kernels:
            sys.exit(f"tools.sanitize: {label}: no kernel")
        for number, kernel in enumerate(kernels):
            yield f"{label} {number}" if number else label, made, kernel


def values(t: TensorType, chance: np.random.Generator) -> bytes:
    """Random content; integers are small enough to be indices."""
    if t.dtype.is_emulated:
        return to_bits(chance.normal(size=t.shape).astype(np.float32), t.dtype).tobytes()
    if t.dtype.is_float:
        return chance.normal(size=t.shape).astype(t.dtype.numpy).tobytes()
    return chance.integers(0, 30, size=t.shape).astype(t.dtype.numpy).tobytes()


def launch(made: Problem, source: CudaSource, path: Path, stream: Stream) -> None:
    """Pack and run once through the real binding, every buffer of exactly its size."""
    graph, chance = made.graph, np.random.default_rng(0)
    with contextlib.ExitStack() as scope:

        def room(size: int) -> int:
            return scope.enter_context(device_memory(max(size, 1)))

        inputs = []
        for node in graph.inputs:
            data = values(graph.type_of(node), chance)
            inputs.append(room(len(data)))
            write(inputs[-1], data)
        outputs = [room(graph.type_of(n).nbytes) for n in graph.outputs]
        packed = [room(n) for n in source.packed_bytes]
        work = room(source.workspace_bytes) if source.workspace_bytes else 0
        state = room(source.state_bytes) if source.state_bytes else 0
        if state:
            fill(state, 0, source.state_bytes)
        bound = BoundCuda(source, path)
        bound.pack(inputs, packed, stream.handle)
        bound.prepare(Addresses(inputs, outputs, packed, work, state))(stream.handle)
        stream.synchronise()


def train(case: Training, path: Path, stream: Stream) -> None:
    """Launch all steps of a case, every buffer of exactly its size."""
    module = Module(path)
    with contextlib.ExitStack() as scope:
        addresses = {}
        for name, t in case.buffers.items():
            data = contents(t, values)
            addresses[name] = scope.enter_context(device_memory(len(data)))
            write(addresses[name], data)
        run(case, addresses, module.function, stream.handle)
        stream.synchronise()


def compiled(nvrtc: Nvrtc, jobs: Sequence[CompileJob]) -> list[Path]:
    """Cubins of all jobs, made at once.

    Raises:
        ToolchainError: a text is refused.
    """
    found = []
    for result in nvrtc.compile_many(jobs):
        if isinstance(result, ToolchainError):
            raise result
        found.append(result.path)
    return found


def launch_all(report: Path, only: Sequence[str] = ()) -> None:
    """What a tool watches: every kernel once, then the planted fault; `report` says what was launched."""
    nvrtc = find_nvrtc()
    if not isinstance(nvrtc, Nvrtc):
        sys.exit(f"tools.sanitize: no NVRTC ({nvrtc.reason})")
    done: dict[str, list[str]] = {}
    with primary_context():
        facts = gpu_facts(None, calibrate=False)
        stream = Stream()
        found = list(sources(facts, only))
        trained = {n: x for n, x in trainings(facts).items() if not only or n.startswith(tuple(only))}
        jobs = [CompileJob(s.text, facts.arch, s.flags, s.max_registers) for _, _, s in found]
        jobs += [CompileJob(x.text, facts.arch) for x in trained.values()]
        cubins = iter(compiled(nvrtc, jobs))
        for label, made, source in found:
            launch(made, source, next(cubins), stream)
            done[label] = sorted({x.entry for x in (*source.launches, *source.pack)})
            report.write_text(json.dumps(done))
        for label, case in trained.items():
            train(case, next(cubins), stream)
            done[label] = case.entries
            report.write_text(json.dumps(done))
        done[PLANTED] = [PLANTED_ENTRY]
        report.write_text(json.dumps(done))
        planted = Module(nvrtc.compile(PLANTED_TEXT, arch=facts.arch).path).function(PLANTED_ENTRY)
        with device_memory(256) as x:
            planted.launch((1, 1, 1), (64, 1, 1), [x], stream=stream.handle)
            stream.synchronise()  # the tool may turn the fault into an error here, after which nothing runs


def reports(log: str, entries: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """What a tool reports, by label; what names no known kernel is under `(no kernel)`."""
    owner = {entry: label for label, names in entries.items() for entry in names}
    found: dict[str, list[str]] = {}
    blocks: list[list[str]] = []
    for text in log.splitlines():
        body = text.removeprefix("========= ")
        if body == text:
            continue  # not the tool's own line
        if body[:1].isspace() and blocks:
            blocks[-1].append(body)
        else:
            blocks.append([body])
    for block in blocks:
        if not re.match(r"(Invalid|Error|Warning|Barrier|Race|Misaligned|Address|Unaligned|Potential)", block[0]):
            continue
        text = " ".join(block)
        labels = {owner[w] for w in re.findall(r"[A-Za-z_]\w*", text) if w in owner}
        for label in labels or {"(no kernel)"}:
            found.setdefault(label, []).append(text)
    return found


def findings(log: str, entries: Mapping[str, Sequence[str]]) -> Counter[str]:
    """Reports of a tool by label; those that name no known kernel count under `(no kernel)`."""
    return Counter({label: len(texts) for label, texts in reports(log, entries).items()})


def watch(
    tool: str, program: str, seconds: float, only: Sequence[str] = ()
) -> tuple[dict[str, list[str]], Counter[str], str]:
    """What was launched under a tool, its findings, and why it did not run to the end (empty: it did)."""
    with tempfile.TemporaryDirectory(prefix="weft-sanitize-") as folder:
        report, log = Path(folder) / "launched.json", Path(folder) / "log.txt"
        command = [program, "--tool", tool, "--log-file", str(log), "--print-limit", "1000", sys.executable, "-m",
                   "tools.sanitize", "--launch", str(report), "--only", *only]  # fmt: skip
        said, why = Path(folder) / "said.txt", ""
        with said.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, start_new_session=True
            )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            why = f"not done after {seconds:g} s"
            os.killpg(process.pid, signal.SIGKILL)  # the tool's own child too
            process.wait()
        launched: dict[str, list[str]] = json.loads(report.read_text()) if report.exists() else {}
        text = log.read_text(errors="replace") if log.exists() else ""
        if PLANTED not in launched and not why:
            why = " ".join((text + said.read_text(errors="replace")).split())[-600:] or "it says nothing"
        return launched, findings(text, launched), why


def main() -> None:
    """Run the tools and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=480.0, help="for each tool")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose labels begin so")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.launch is not None:
        launch_all(given.launch, given.only)
        return
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        print("tools.sanitize: compute-sanitizer is not installed (it comes with the CUDA toolkit)", file=sys.stderr)
        sys.exit(2)
    names = [t for t in given.tools.split(",") if t]
    results = {tool: watch(tool, program, given.seconds, given.only) for tool in names}
    status = print_table(results)
    sys.exit(status)


def print_table(results: Mapping[str, tuple[Mapping[str, Sequence[str]], Counter[str], str]]) -> int:
    """One row per kernel, one column per tool; gives the exit status."""
    labels = list(dict.fromkeys(label for launched, found, _ in results.values() for label in [*launched, *found]))
    width = max(map(len, [*labels, "kernel"]))
    print("  ".join(["kernel".ljust(width), *(tool.rjust(10) for tool in results)]))
    status = 0
    for label in labels:
        row = []
        for launched, found, _ in results.values():
            count = found.get(label, 0)
            planted = label == PLANTED
            good = (count > 0) if planted else (count == 0)
            text = ("found" if planted else "clean") if good else ("NOT FOUND" if planted else f"{count} found")
            row.append(text if label in launched or count else "not run")
            status = max(status, 0 if good and (label in launched) else 1)
        print("  ".join([label.ljust(width), *(cell.rjust(10) for cell in row)]))
    for tool, (_, _, why) in results.items():
        if why:
            print(f"{tool} did not run to the end: {why}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    main()
