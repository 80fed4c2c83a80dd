"""Builds many generated kernels as one shared object and runs them between guard zones."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.device.facts import CpuFacts
from weft.device.launch import NativeKernel, pointer_array
from weft.device.toolchain import find_compiler
from weft.generate.cpp import CppGenerator
from weft.generate.cpp.kernel import runtime_header
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType, TensorType, from_bits, to_bits
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import KernelSource
from weft.tune.tolerance import TOLERANCES

FACTS = CpuFacts(simd_bytes=64, threads=2)
GUARD = 256
_SCRATCH = tempfile.TemporaryDirectory(prefix="weft-test-")


@dataclass(frozen=True)
class Trial:
    """One kernel of one problem with its inputs."""

    problem: Problem
    source: KernelSource
    inputs: list[Array]


def trials(problem: Problem, inputs: list[Array], facts: CpuFacts = FACTS) -> list[Trial]:
    """Every schedule of a problem."""
    generator = CppGenerator()
    schedules = generator.schedules(problem, facts)
    assert not isinstance(schedules, Declined), schedules.reason
    found = []
    for schedule in schedules:
        source = generator.emit(problem, schedule)
        assert isinstance(source, KernelSource), source.reason
        found.append(Trial(problem, source, inputs))
    return found


def build(batch: Sequence[Trial]) -> dict[str, NativeKernel]:
    """Kernels by entry; one compiler run per number of lanes, each kernel in a namespace of its own."""
    compiler = find_compiler()
    assert not isinstance(compiler, Declined), compiler.reason
    header = runtime_header().rstrip()
    groups: dict[str, dict[str, str]] = {}
    for trial in batch:
        lanes, rest = trial.source.text.split(header)
        groups.setdefault(lanes, {})[trial.source.entry] = rest
    kernels: dict[Any, Any] = {}
    for lanes, texts in groups.items():
        spaces = [f"namespace n{k} {{\n{text}\n}}" for k, text in enumerate(texts.values())]
        text = "\n".join([lanes + header, *spaces])
        found = compiler.compile(text, cache_dir=Path(_SCRATCH.name), timeout_s=300)
        kernels |= {entry: NativeKernel(found.path, entry) for entry in texts}
    return kernels


def to_memory(x: Array, type: TensorType, fmt: Format) -> np.ndarray:
    """Bytes of a value as a kernel sees them."""
    x = np.asarray(x)
    if type.dtype.is_emulated:
        x = to_bits(x, type.dtype).reshape(type.shape)
    return np.ascontiguousarray(np.transpose(x, fmt.order(type.rank))).reshape(-1).view(np.uint8)


def from_memory(data: np.ndarray, type: TensorType, fmt: Format) -> Array:
    """Inverse of `to_memory`."""
    order = fmt.order(type.rank)
    stored = {DType.BF16: np.uint16, DType.F8E4M3: np.uint8, DType.F8E5M2: np.uint8}.get(type.dtype, type.dtype.numpy)
    x = np.transpose(data.view(stored).reshape([type.shape[k] for k in order]), np.argsort(order) if order else ())
    if type.dtype.is_emulated:
        x = from_bits(np.ascontiguousarray(x), type.dtype).reshape(type.shape)
    return x


class _Zone:
    """Aligned memory between guards."""

    def __init__(self, size: int, fill: int, data: np.ndarray | None = None) -> None:
        self.fill = fill
        self.raw = np.full(size + 2 * GUARD + 64, fill, np.uint8)
        self.start = GUARD + (-(self.raw.ctypes.data + GUARD)) % 64
        self.size = size
        if data is not None:
            self.data[:] = data
        self.before = self.raw.copy()

    @property
    def data(self) -> np.ndarray:
        return self.raw[self.start : self.start + self.size]

    @property
    def address(self) -> int:
        return int(self.raw.ctypes.data + self.start)

    def check_guards(self, what: str) -> None:
        assert (self.raw[: self.start] == self.fill).all(), f"wrote before {what}"
        assert (self.raw[self.start + self.size :] == self.fill).all(), f"wrote behind {what}"


def run(trial: Trial, kernel: NativeKernel) -> list[Array]:
    """Outputs; fails when anything else was written."""
    graph, problem = trial.problem.graph, trial.problem
    ins = [
        _Zone(graph.type_of(n).nbytes, 0xA5, to_memory(x, graph.type_of(n), f))
        for n, x, f in zip(graph.inputs, trial.inputs, problem.input_formats, strict=True)
    ]
    outs = [_Zone(graph.type_of(n).nbytes, 0x5B) for n in graph.outputs]
    workspace = _Zone(trial.source.workspace_bytes, 0xFF)
    pointers = [pointer_array([z.address for z in zones]) for zones in (ins, outs, [])]
    kernel(pointers[0], pointers[1], workspace.address, pointers[2])
    for k, zone in enumerate(ins):
        assert (zone.raw == zone.before).all(), f"input {k} was modified"
    workspace.check_guards("workspace")
    for k, zone in enumerate(outs):
        zone.check_guards(f"output {k}")
    return [
        from_memory(z.data.copy(), graph.type_of(n), f)
        for z, n, f in zip(outs, graph.outputs, problem.output_formats, strict=True)
    ]


def difference(got: Array, want: Array, dtype: DType) -> str:
    """Empty when equal within the table's tolerance (relative to the tensor's own scale), else where it is not."""
    assert got.shape == want.shape, f"shape {got.shape}, not {want.shape}"
    if not dtype.is_float:
        return "" if (got == want).all() else f"{int((got != want).sum())} of {got.size} differ"
    x, y = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(y)
    scale = float(np.abs(y[finite]).max()) if finite.any() else 0.0
    rtol = max(TOLERANCES[dtype].rtol, 4 * TOLERANCES[dtype].unit)
    with np.errstate(invalid="ignore"):
        close = np.abs(x - y) <= rtol * np.abs(y) + 0.1 * rtol * scale + TOLERANCES[dtype].atol * 0.1
        bad = np.where(finite, ~close, ~((x == y) | (np.isnan(x) & np.isnan(y))))
    if not bad.any():
        return ""
    first = tuple(int(k) for k in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {bad.size} differ, first at {first}: {got[first]} instead of {want[first]}"


def check(batch: Sequence[Trial]) -> None:
    """Build, run and compare with the float64 reference; names every trial that fails."""
    kernels = build(batch)
    failures = []
    wanted: dict[int, list[Array]] = {}
    for trial in batch:
        if id(trial.problem) not in wanted:
            with np.errstate(all="ignore"):
                wanted[id(trial.problem)] = evaluate(trial.problem.graph, trial.inputs, precise=True)
        got = run(trial, kernels[trial.source.entry])
        for k, (x, y) in enumerate(zip(got, wanted[id(trial.problem)], strict=True)):
            dtype = trial.problem.graph.type_of(trial.problem.graph.outputs[k]).dtype
            if problem := difference(np.asarray(x), np.asarray(y), dtype):
                failures.append(f"{trial.problem.key} {trial.source.schedule} output {k}: {problem}")
    assert not failures, "\n".join(failures)
