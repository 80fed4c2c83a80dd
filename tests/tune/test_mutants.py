"""Mutation check: wrong versions of three right kernels are all rejected, and the right ones are not.

A mutant that is only slower or equal in meaning is not in the lists. All versions of a kernel are functions of one
source, so that one compilation serves them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
from tests.tune.cases import problem

from weft.device.toolchain import HostCompiler, find_compiler
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import KernelSource, Schedule
from weft.tune.verify import NativeSubject, Reference, Verified, at_the_fence, build_reference, on_one_core, verify

ROWS, COLS = 37, 130


def norm_graph() -> Graph:
    """max(0, (x - mean) / sqrt(var + 1e-5) * w + b) over the last axis."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (ROWS, COLS)))
    w = b.input(TensorType(DType.F32, (COLS,)), is_weight=True)
    c = b.input(TensorType(DType.F32, (COLS,)), is_weight=True)
    count = float(COLS)
    mean = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, [1]), count)
    centred = b.apply(Prim.SUB, x, mean)
    var = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, centred, centred), [1]), count)
    y = b.apply(Prim.DIV, centred, b.add(Prim.SQRT, b.apply(Prim.ADD, var, 1e-5)))
    y = b.apply(Prim.ADD, b.apply(Prim.MUL, y, w), c)
    return b.build([b.apply(Prim.MAX, y, 0.0)])


NORM = """
  const float *x = (const float*)in[0], *w = (const float*)in[1], *c = (const float*)in[2];
  float* y = (float*)out[0];
  for (int i = 0; i < 37; ++i) {
    const float* r = x + i * 130;
    float sum = 0.0f;
    for (int j = 0; j < 130; ++j) sum += r[j];
    float mean = sum / 130.0f, square = 0.0f;
    for (int j = 0; j < 130; ++j) { float d = r[j] - mean; square += d * d; }
    float scale = 1.0f / sqrtf(square / 130.0f + 1e-5f);
    for (int j = 0; j < 130; ++j) {
      float v = (r[j] - mean) * scale * w[j] + c[j];
      y[i * 130 + j] = v != v ? v : (v > 0.0f ? v : 0.0f);
    }
  }
"""
NORM_MUTANTS = [
    ("i < 37", "i < 36"),
    ("j < 130; ++j) sum", "j < 129; ++j) sum"),
    ("j < 130; ++j) sum", "j < 131; ++j) sum"),
    ("int j = 0; j < 130; ++j) sum", "int j = 1; j < 130; ++j) sum"),
    ("float sum = 0.0f", "float sum = 1e-3f"),
    ("float sum = 0.0f;", "static float sum = 0.0f;"),
    ("sum / 130.0f", "sum / 129.0f"),
    ("square = 0.0f", "square = x[0]"),
    ("square / 130.0f", "square / 129.0f"),
    ("j < 130; ++j) { float d", "j < 128; ++j) { float d"),
    ("float d = r[j] - mean", "float d = r[j]"),
    ("square += d * d", "square += d"),
    ("square += d * d", "square = d * d"),
    ("1e-5f", "1e-4f"),
    ("1e-5f", "0.0f"),
    ("1.0f / sqrtf", "sqrtf"),
    ("1.0f / sqrtf(square / 130.0f + 1e-5f)", "float(_Float16(1.0f / sqrtf(square / 130.0f + 1e-5f)))"),
    ("(r[j] - mean) * scale", "r[j] * scale - mean"),
    ("w[j] + c[j]", "w[j] - c[j]"),
    ("w[j] + c[j]", "w[0] + c[j]"),
    ("w[j] + c[j]", "w[j] + c[j + 1]"),
    ("v != v ? v : ", ""),
    ("v > 0.0f ? v : 0.0f", "v > 0.0f ? v : -v"),
    ("v > 0.0f ? v : 0.0f", "v > 1e-3f ? v : 0.0f"),
    ("v > 0.0f ? v : 0.0f", "v"),
    ("y[i * 130 + j] = v", "if (i != 5 || j != 77) y[i * 130 + j] = v"),
    ("y[i * 130 + j] =", "y[i * 130 + j + 1] ="),
    ("y[i * 130 + j] =", "y[i * 130 + (j ^ 1)] ="),
    ("float mean = sum / 130.0f", "float mean = sum / 130.0f + y[i]"),
    ("float scale =", "((float*)c)[3] += 0.0f; ((float*)w)[3] *= 2.0f; float scale ="),
    (
        "float mean =",
        "sum = sum * 1.0001f; float mean =",
    ),
]


def conv_graph() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 5, 9, 11)))
    w = b.input(TensorType(DType.F32, (7, 5, 3, 3)), is_weight=True)
    return b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((2, 1), (1, 1), (1, 1), (1, 1)))])


CONV = """
  const float *x = (const float*)in[0], *w = (const float*)pk[0];
  float* y = (float*)out[0];
  for (int n = 0; n < 2; ++n)
    for (int o = 0; o < 7; ++o)
      for (int h = 0; h < 5; ++h)
        for (int v = 0; v < 11; ++v) {
          float sum = 0.0f;
          for (int c = 0; c < 5; ++c)
            for (int p = 0; p < 3; ++p)
              for (int q = 0; q < 3; ++q) {
                int r = h * 2 + p - 1, s = v + q - 1;
                if (r >= 0 && r < 9 && s >= 0 && s < 11)
                  sum += x[((n * 5 + c) * 9 + r) * 11 + s] * w[((o * 5 + c) * 3 + p) * 3 + q];
              }
          y[((n * 7 + o) * 5 + h) * 11 + v] = sum;
        }
"""
CONV_MUTANTS = [
    ("r >= 0 &&", "r > 0 &&"),
    ("r < 9", "r < 8"),
    ("r < 9", "r < 10"),
    ("s >= 0 &&", ""),
    ("s < 11)", "s <= 11)"),
    ("h * 2 + p - 1", "h + p - 1"),
    ("h * 2 + p - 1", "h * 2 + p"),
    ("v + q - 1", "v + (2 - q) - 1"),
    ("c < 5", "c < 4"),
    ("q < 3", "q < 2"),
    ("n < 2", "n < 1"),
    ("v < 11; ++v", "v < 10; ++v"),
    ("sum += x", "sum = x"),
    ("float sum = 0.0f", "float sum = y[((n * 7 + o) * 5 + h) * 11 + v]"),
    ("* 3 + p) * 3 + q]", "* 3 + q) * 3 + p]"),
    ("] = sum", "] = sum + 1e-5f"),
    ("] = sum", "] += sum"),
    ("* w[((o", "* float(_Float16(1.0f)) * (1.0f + 0x1p-11f) * w[((o"),
    ("sum += x[", "sum = float(_Float16(sum)) + x["),
    ("sum += x", "sum *= 0.999999f, sum += x"),
]  # fmt: skip


def softmax_graph() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (ROWS, COLS)))
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, [1])))
    return b.build([b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, [1]))])


SOFTMAX = """
  const float* x = (const float*)in[0];
  float* y = (float*)out[0];
  for (int i = 0; i < 37; ++i) {
    const float *r = x + i * 130, *of = r;
    float top = -INFINITY, sum = 0.0f;
    for (int j = 0; j < 130; ++j) top = of[j] > top || of[j] != of[j] ? of[j] : top;
    for (int j = 0; j < 130; ++j) sum += expf(r[j] - top);
    for (int j = 0; j < 130; ++j) y[i * 130 + j] = expf(r[j] - top) / sum;
  }
"""
SOFTMAX_MUTANTS = [
    ("*of = r", "*of = x"),
    ("*of = r", "*of = x + (i ? i - 1 : 0) * 130"),
    ("*of = r", "*of = x + (36 - i) * 130"),
    ("float top = -INFINITY", "float top = 0.0f"),
    ("float top = -INFINITY", "static float top = -INFINITY"),
    ("int j = 0; j < 130; ++j) top", "int j = 1; j < 130; ++j) top"),
    ("j < 130; ++j) top", "j < 129; ++j) top"),
    ("j < 130; ++j) top", "j < 128; ++j) top"),
    ("of[j] > top", "of[j] < top"),
    ("expf(r[j] - top)", "expf(r[j])"),
    ("j < 130; ++j) sum", "j < 129; ++j) sum"),
    ("/ sum", "* sum"),
]


def versions(body: str, mutants: list[tuple[str, str]], prefix: str) -> str:
    head = "(const void* const* in, void* const* out, void* ws, const void* const* pk)"
    text = ["#include <cmath>"]
    for k, (old, new) in enumerate([("", ""), *mutants]):
        assert k == 0 or old in body, old
        changed = body if k == 0 else body.replace(old, new)
        text.append(f'extern "C" void {prefix}{k}{head} {{{changed}}}')
        pack = "for (int i = 0; i < 315; ++i) ((float*)pk[0])[i] = ((const float*)in[1])[i];"
        text.append(f'extern "C" void {prefix}{k}_pack(const void* const* in, void* const* pk) {{ {pack} }}')
    return "\n".join(text)


@pytest.mark.parametrize(
    ("graph", "body", "mutants", "packed", "formats"),
    [
        (norm_graph, NORM, NORM_MUTANTS, (), (Format.ROW, Format.ROW)),
        (conv_graph, CONV, CONV_MUTANTS, (315 * 4,), (Format.ROW, Format.ROW)),
        (softmax_graph, SOFTMAX, SOFTMAX_MUTANTS, (), (Format.ROW, Format.ROW)),
    ],
    ids=["norm", "conv", "softmax"],
)
def test_every_mutant_is_rejected(
    graph: Callable[..., Any],
    body: str,
    mutants: list[tuple[str, str]],
    packed: tuple[int, ...],
    formats: tuple[Format, Format],
    tmp_path: Path,
) -> None:
    compiler = find_compiler()
    if not isinstance(compiler, HostCompiler):
        pytest.skip("no compiler")
    built = compiler.compile(versions(body, mutants, "k"), ("-O2",), cache_dir=tmp_path)
    posed = problem(graph(), *formats)
    reference = build_reference(posed, seed=0)
    survived = []
    for k, mutant in enumerate([("", ""), *mutants]):
        found = check(posed, reference, str(built.path), f"k{k}", packed)
        if k == 0:
            assert found.finding.verdict is Verdict.OK, found.finding
        elif found.finding.verdict is Verdict.OK:
            survived.append((mutant, found.finding.ratio))
    assert not survived


def check(posed: Problem, reference: Reference, path: str, entry: str, packed: tuple[int, ...]) -> Verified:
    replaced = (1,) if packed else ()
    source = KernelSource(Schedule("cpp"), "", entry, packed_bytes=packed, replaces_weights=replaced)
    subject = NativeSubject(posed, source, path)
    return verify(posed, subject, reference, {}, slow_s=60.0, clock=perf_counter_ns)


TURNED = """#include <omp.h>
extern "C" void turned(const void* const* in, void* const* out, void* ws, const void* const* pk) {
  const float* x = (const float*)in[0];
  float *y = (float*)out[0], *s = (float*)ws;
#pragma omp parallel num_threads(2)
  {
    const int tid = omp_get_thread_num(), nt = omp_get_num_threads();
    const int first = 512 * tid / nt, end = 512 * (tid + 1) / nt;
    for (int i = first; i < end; ++i) s[i] = x[i] + 1.0f;
BARRIER
    // in the open the reader is long on its way when the other has written; the other needs nothing of anybody
    if (nt == 2 && tid == 0) for (volatile int k = 0; k < 300000; ++k) {}
    for (int i = first; i < 512 * (tid + 1) / nt; ++i) y[i] = tid == 0 ? s[511 - i] : x[511 - i] + 1.0f;
  }
}
"""


def test_a_barrier_that_is_missing_is_seen_when_threads_take_turns(tmp_path: Path) -> None:
    if not isinstance(find_compiler(), HostCompiler):
        pytest.skip("no compiler")
    # as users run it: of threads that sleep while they wait, as in other tests, the second often comes before its turn
    environ = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", f"from {__name__} import turned; turned({str(tmp_path)!r})"]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert told.returncode == 0, told.stderr
    with_barrier, *without = told.stdout.split()
    assert with_barrier == Verdict.OK.name
    # alone in the open it passes, on a busy machine it may be seen at once
    assert any(verdict != Verdict.OK.name for verdict in without)


def turned(folder: str) -> None:
    """Print the verdicts of a kernel: with its barrier, then without."""
    compiler = find_compiler()
    assert isinstance(compiler, HostCompiler)
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (512,)))
    flipped = b.add(Prim.SLICE, x, attrs=a.SliceAttrs((511,), (512,), (-1,)))
    posed = problem(b.build([b.apply(Prim.ADD, flipped, 1.0)]), Format.ROW, Format.ROW)
    reference = build_reference(posed, seed=0)
    for barrier in ("#pragma omp barrier", *[""] * 12):  # a busy machine may hide at times what is missing
        text = TURNED.replace("BARRIER", barrier)
        built = compiler.compile(text, ("-O2",), cache_dir=Path(folder))
        source = KernelSource(Schedule("cpp"), text, "turned", workspace_bytes=4 * 512)
        subject = NativeSubject(posed, source, str(built.path))
        verdict = verify(posed, subject, reference, {}, slow_s=60.0, clock=perf_counter_ns).finding.verdict
        print(verdict.name)  # noqa: T201 - for the test
        if not barrier and verdict is not Verdict.OK:
            break


def test_threads_that_take_turns_are_on_one_core_and_go_back(tmp_path: Path) -> None:
    compiler = find_compiler()
    if not isinstance(compiler, HostCompiler):
        pytest.skip("no compiler")
    text = """#include <omp.h>
extern "C" int sched_getcpu(void);
extern "C" void cores(int* seen) {
#pragma omp parallel num_threads(4)
  seen[omp_get_thread_num()] = sched_getcpu();
}
"""
    built = compiler.compile(text, cache_dir=tmp_path)
    cores = ctypes.CDLL(str(built.path)).cores
    tasks = Path("/proc/self/task")
    before = {t.name: os.sched_getaffinity(int(t.name)) for t in tasks.iterdir()}
    seen = (ctypes.c_int * 4)()
    cores(seen)
    on_one_core(partial(cores, seen))
    assert set(seen) == {min(os.sched_getaffinity(0))}
    after = {t.name: os.sched_getaffinity(int(t.name)) for t in tasks.iterdir()}
    assert all(after[t] == cores for t, cores in before.items() if t in after)
    assert all(os.sched_getscheduler(int(t)) == os.SCHED_OTHER for t in after)


PEEKING = """extern "C" void peeks(const void* const* in, void* const* out, void* ws, const void* const* pk) {
  const volatile float* x = (const float*)in[0];
  float* y = (float*)out[0];
  for (int i = 0; i < 100; ++i) y[i] = x[i] + 1.0f;
  (void)x[AT];
}
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize(("at", "dies"), [("99", False), ("116", True), ("-1", True)])
def test_what_a_kernel_reads_beside_its_inputs_ends_the_process(at: str, dies: bool, tmp_path: Path) -> None:
    compiler = find_compiler()
    if not isinstance(compiler, HostCompiler):
        pytest.skip("no compiler")
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (100,)))
    posed = problem(b.build([b.apply(Prim.ADD, x, 1.0)]), Format.ROW, Format.ROW)
    reference = build_reference(posed, seed=0)
    text = PEEKING.replace("AT", at)
    built = compiler.compile(text, ("-O2",), cache_dir=tmp_path)
    subject = NativeSubject(posed, KernelSource(Schedule("cpp"), text, "peeks"), str(built.path))
    found = verify(posed, subject, reference, {}, slow_s=60.0, clock=perf_counter_ns)
    assert found.finding.verdict is Verdict.OK  # it shows in no number
    child = os.fork()
    if child == 0:  # nothing of this process is used after it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        os._exit(0 if at_the_fence(posed, subject, reference, found.outputs).verdict is Verdict.OK else 1)
    _, status = os.waitpid(child, 0)
    assert (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)) is dies
    assert dies or status == 0
