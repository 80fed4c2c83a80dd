"""Runs generated CUDA kernels on the host: their text behind `emulator.h`, between guard zones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests import compiled
from tests.generate.cpp.run_kernels import _Zone, difference, from_memory, to_memory

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.intrinsics.prelude import float8, machine_header, runtime_header
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.ir.types import Array
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule

FACTS = GpuFacts()
_ALONE = ("role.sync(", "w_shfl(", "w_cluster", "role.any(", "w_moments<", "w_meet<")


@dataclass(frozen=True)
class Trial:
    """One kernel of one problem with its inputs."""

    problem: Problem
    source: CudaSource
    inputs: list[Array]


def trial(problem: Problem, schedule: Schedule, inputs: list[Array]) -> Trial:
    """The kernel of one schedule."""
    source = CudaGenerator().emit(problem, schedule)
    assert isinstance(source, CudaSource), source.reason
    return Trial(problem, source, inputs)


def trials(problem: Problem, inputs: list[Array], facts: GpuFacts = FACTS) -> list[Trial]:
    """Every schedule of a problem."""
    schedules = CudaGenerator().schedules(problem, facts)
    assert not isinstance(schedules, Declined), schedules.reason
    return [trial(problem, s, inputs) for s in schedules]


def build(batch: Sequence[Trial]) -> ctypes.CDLL:
    """One shared object with a function `run_<entry>` per launch."""
    header = runtime_header().rstrip()
    head = "\n".join([Path(__file__).with_name("emulator.h").read_text(), header, float8()])
    texts = []
    for number, source in enumerate(dict.fromkeys(t.source for t in batch)):
        machine, rest = source.text.split(header)
        assert machine.endswith(machine_header().rstrip() + "\n"), "only narrow indices are emulated"
        rest = rest.replace(float8().rstrip(), "")
        texts.append(f"namespace n{number} {{{rest}}}")
        waits = str(any(word in rest for word in _ALONE)).lower()
        texts += [
            f'extern "C" void run_{launch.entry}(void* const* a, unsigned g, unsigned b, unsigned c, unsigned t) '
            f"{{ emulate(n{number}::{launch.entry}, a, g, b, c, {waits}, t); }}"
            for launch in source.launches
        ]
    return compiled.library("\n".join(texts), "-std=c++20", "-O0", "-ffp-contract=off", "-pthread", head=head)


def run(one: Trial, library: ctypes.CDLL, *, together: bool = True) -> list[Array]:
    """Outputs; fails when anything else was written. `together`: blocks that meet run at once, as one may expect."""
    graph, problem, source = one.problem.graph, one.problem, one.source
    ins = [
        _Zone(graph.type_of(n).nbytes, 0xA5, to_memory(x, graph.type_of(n), f))
        for n, x, f in zip(graph.inputs, one.inputs, problem.input_formats, strict=True)
    ]
    outs = [_Zone(graph.type_of(n).nbytes, 0x5B) for n in graph.outputs]
    work = _Zone(source.workspace_bytes, 0xFF)
    state = _Zone(source.state_bytes, 0x3C, np.zeros(source.state_bytes, np.uint8))
    zones = {"in": ins, "out": outs}

    def address(pointer: Pointer) -> int:
        if pointer.kind in zones:
            return zones[pointer.kind][pointer.index].address
        return (work if pointer.kind == "work" else state).address + pointer.index

    for launch in source.launches:
        gang = launch.grid[0] if together and "w_meet<" in source.text else launch.cluster[0]
        _launch(launch, [address(p) for p in launch.arguments if isinstance(p, Pointer)], library, gang)
    for k, zone in enumerate(ins):
        assert (zone.raw == zone.before).all(), f"input {k} was modified"
    work.check_guards("workspace")
    assert (state.raw == state.before).all(), "the state is not as it was"
    for k, zone in enumerate(outs):
        zone.check_guards(f"output {k}")
    return [
        from_memory(z.data.copy(), graph.type_of(n), f)
        for z, n, f in zip(outs, graph.outputs, problem.output_formats, strict=True)
    ]


def _launch(launch: Launch, addresses: list[int], library: ctypes.CDLL, gang: int) -> None:
    assert launch.grid[0] > 0 and launch.block[0] % 32 == 0 and launch.block[0] <= 1024
    assert launch.grid[0] % launch.cluster[0] == 0
    function = getattr(library, f"run_{launch.entry}")
    sizes = (launch.grid[0], launch.block[0], launch.cluster[0], gang)
    function((ctypes.c_void_p * max(len(addresses), 1))(*addresses), *sizes)


def check(batch: Sequence[Trial]) -> None:
    """Build, run and compare with the float64 reference; names every trial that fails."""
    library = build(batch)
    failures = []
    wanted: dict[int, list[Array]] = {}
    for one in batch:
        if id(one.problem) not in wanted:
            with np.errstate(all="ignore"):
                wanted[id(one.problem)] = evaluate(one.problem.graph, one.inputs, precise=True)
        got = run(one, library)
        for k, (x, y) in enumerate(zip(got, wanted[id(one.problem)], strict=True)):
            dtype = one.problem.graph.type_of(one.problem.graph.outputs[k]).dtype
            if found := difference(np.asarray(x), np.asarray(y), dtype):
                failures.append(f"{one.problem.key} {one.source.schedule} output {k}: {found}")
    assert not failures, "\n".join(failures)
