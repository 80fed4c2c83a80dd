"""Pairs of a product or convolution (LC) and a best-effort job (BE): fused in one CTA, verified, timed beside peers.

    python -m benchmarks.gpu_pairs [--lc vgg16/conv3x3-64-224,4096x4096x4096,...] [--be mriq,sgemm,...] [--hosts 6]
        [--rounds 9] [--seconds 540] [--limit 60] [--cache DIR] [--database DIR] [--again] [--out FILE|-] [--dry]

LC is a kernel of a network at batch 16 (`benchmarks.cases.colocate_lc`), or C = A · Bᵀ in bf16 given as MxNxK.
Several of its configurations are timed alone, and the peers are given the fastest. Of a configuration of several
launches (rows of an operand that begin at odd addresses are copied first) the longest has best-effort roles beside it,
and all its launches take part in every form that is compared and timed. Fused kernels of several
configurations and shapes are compiled, compared with the kernels alone (`weft.tune.cuda_pair`: nothing drawn,
stopped, all drawn) and searched by successive halving (`weft.tune.pairs.study`): all for a moment, the best also in
the form that draws in time, then one of three in few rounds beside the peers, and the best three in all rounds: for
as many launches of LC as run the whole job, medians of interleaved rounds of LC alone, BE alone, the peers, and the
fused launches with what is left of the job behind them. Peers: one after the other; two streams of different
priority; two parts of the GPU (green contexts), of the best of some sizes. Those are compared once more for several
splits of the job. `ratio` is the best peer over fused: a pair below 1 is declined. All of it is kept in the tuning
database (`weft pairs` lists it), and what that knows of the same texts, GPU and driver is not measured again
(`--again`: it is). Pairs of one LC kernel run in a process that may die: the pair's row then says so, counts as not
kept (ratio 1.0), and the next process goes on behind it. `--dry` compiles the fused kernels for an H200, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast, final

import numpy as np
import torch

from benchmarks.best_effort import jobs
from benchmarks.cases.colocate_lc import LcKernel, drawn, hosts, lc_kernel, lc_names, lc_source
from benchmarks.co_runner.machine import Meter
from benchmarks.co_runner.rows import clocks
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.modules import Modules
from benchmarks.harness.record import ENDED, Record, Row, folder_of_gpu, tries_of
from benchmarks.pairs_matrix import row_of
from weft.colocate.pair_machine import ThreeStreams, forked
from weft.device.cuda import streams
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.device.cuda.partition import Part, partitioned
from weft.device.cuda.streams import Stream, device_memory, read_back, write
from weft.errors import DeviceError, ToolchainError
from weft.gemm.search import feasible
from weft.gemm.spec import Gemm
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.bind_fused import BoundFused, among
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.foreign.read import ForeignRole
from weft.generate.cuda.foreign.read import read as foreign
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.tma.kernel import roles
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import control_bytes, fuse, judge, lc_role, of_launch, shapes, shared_of, stages_of
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import RoleSource
from weft.generate.cuda.space import kind
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.colocation import BYTES, FusedSource, FusionShape
from weft.kernels.pairs import PairKey, PairRecord, PairSummary
from weft.kernels.source import CudaSource, Schedule
from weft.options import Options
from weft.tune.cuda_pair import (
    SPLITS,
    Memory,
    Pair,
    PairTimes,
    Side,
    Wanted,
    alone,
    forms,
    launches_for,
    many,
    measure,
    rate,
    verify,
    verify_drain,
)
from weft.tune.halving import added_work
from weft.tune.pairs import Arm, cubin_digest, keep, known, refused, study, timed
from weft.tune.store import Database

SUITE = "colocate-pairs"
GUARD = bytes(range(1, 256)) + b"\x00"
"""Behind every buffer."""
POISON = 0xA5
"""Every byte of a result before LC runs."""
PARTS = (64, 96, 112, 120)
"""Multiprocessors of LC in the peer of two parts."""
FINALISTS = 3
"""Fused kernels that are measured to the end; and of those timed for a moment, of which a form that draws in time is
tried."""
SHARE = 3
"""A step of the search keeps one of so many."""
FEW_ACCUMULATORS = 64
"""Registers of a thread for sums, beside which further warps find room."""
DRAWING_REGISTERS = 8
"""Of a thread, that a role takes besides those of its job's kernel by itself, at least."""
LEAST_THREADS = 96
"""Of a best-effort role: smaller ones never won on an H200."""
MOMENT_US = 400.0
"""How long the launches of such a moment last, about."""
METERED_US = 150_000.0
"""How long each form runs while clock and power are read, about."""
PEER_TIMES = 5
"""Rounds in which the sizes of two parts are compared."""


NOT_KEPT: Row = {"kept": False, "ratio": 1.0}
"""Of a pair that could not be measured: it is not fused."""


@dataclass(frozen=True, slots=True)
class Lc:
    """A latency-critical kernel, as roles of several configurations."""

    name: str
    problem: Problem
    sources: tuple[RoleSource, ...]
    inputs: tuple[bytes, ...]
    outputs: tuple[int, ...]
    """Bytes of each."""
    weights: tuple[bool, ...]
    """Of each input, whether a packing launch reads it."""
    others: tuple[CudaSource, ...] = ()
    """Kernels that cannot be roles, in clusters for instance: the peers may run them."""
    whole: Mapping[Schedule, tuple[RoleSource, int]] = field(default_factory=dict)
    """Of configurations of several launches: all of them, and the number of the one that is in `sources`."""

    def launches(self, number: int) -> tuple[RoleSource, int]:
        """All launches of a configuration, and the number of that which has best-effort roles beside it."""
        source = self.sources[number]
        return self.whole.get(source.schedule, (source, 0))


def lc_of(text: str, facts: GpuFacts, most: int, shared_bytes: int, *, contents: bool = True) -> Lc:
    """A kernel by name, or a product by its sizes, in up to `most` configurations that leave so much shared memory.

    Without `contents` nothing is drawn for its inputs.

    Raises:
        ValueError: neither.
    """
    if text in lc_names():
        kernel = lc_kernel(text, facts)
        every = [s for s in hosts(kernel, facts, 6 * most, shared_bytes=shared_bytes) if _one_wave(s, facts)]
        sources = [x for source in mixed(every, most) for x in (source, *_with_split(kernel, source))]
        inputs = tuple(drawn(b, seed) for seed, b in enumerate(kernel.inputs)) if contents else ()
        return Lc(
            text,
            kernel.problem,
            tuple(sources),
            inputs,
            tuple(b.nbytes for b in kernel.outputs),
            tuple(b.is_weight for b in kernel.inputs),
            tuple(fastest(kernel, sources)),
        )
    g = gemm_of(text)
    generator = torch.Generator().manual_seed(1)
    sizes = ((g.m, g.k), (g.n, g.k)) if contents else ()
    operands = [torch.randn(s, generator=generator).bfloat16().view(torch.int16).numpy().tobytes() for s in sizes]
    whole: dict[Schedule, tuple[RoleSource, int]] = {}
    configurations = mixed(list(_products(g, facts, 6 * most, shared_bytes, whole)), most)
    return Lc(text, g.problem(), tuple(configurations), tuple(operands), (2 * g.m * g.n,), (False, False), whole=whole)


def longest(source: RoleSource) -> int:
    """The launch that has most room for best-effort blocks: what copies operands or adds sums up has no tiles."""
    return max(range(len(source.launched)), key=lambda k: source.launched[k].shared_bytes)


def fastest(kernel: LcKernel, hosts: Sequence[RoleSource]) -> Iterator[CudaSource]:
    """The fastest of the kernel's generated ones that were measured, where it is none of the hosts."""
    best = next((t.schedule for t in kernel.timed if t.schedule.generator == "cuda"), None)
    if best is not None and best not in [s.schedule for s in hosts]:
        made = CudaGenerator().emit(kernel.problem, best)
        if isinstance(made, CudaSource):
            yield made


def gemm_of(text: str) -> Gemm:
    """`MxNxK` in bf16. Raises ValueError: it is no three sizes."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(x.isascii() and x.isdigit() and int(x) for x in sizes):
        raise ValueError(f"{text!r} is not of the form 4096x4096x4096, nor one of {', '.join(lc_names())}")
    m, n, k = map(int, sizes)
    return Gemm(m=m, n=n, k=k, layout="nt", dtype=DType.BF16)


def _one_wave(source: RoleSource, facts: GpuFacts) -> bool:
    """Whether its CTAs all run at once: otherwise each waits for the last best-effort block of the one before it."""
    x, y, z = source.roles[0].grid
    return x * y * z <= facts.sms


def mixed(every: Sequence[RoleSource], most: int) -> list[RoleSource]:
    """The first third of so many are the fastest by the model, the others those that also leave registers."""
    first = list(every[: -(-most // 3)])
    return first + [s for s in every if s not in first and accumulators(s) <= FEW_ACCUMULATORS][: most - len(first)]


def _with_split(kernel: LcKernel, source: RoleSource) -> Iterator[RoleSource]:
    """The same where registers move to its consumers, if they do not yet: then a best-effort role costs them fewer."""
    schedule = source.schedule
    if dict(schedule.params).get("template") == "tma":
        config = TmaConfig.of(schedule)
        split = replace(config, register_split=True)
        if split.moves_registers != config.moves_registers:
            made = lc_source(kernel, split.schedule())
            if isinstance(made, RoleSource):
                yield made


def accumulators(source: RoleSource) -> float:
    """Registers of a thread that hold sums of its tile."""
    assert source.schedule is not None  # a kernel of ours
    p = dict(source.schedule.params)
    groups = 1 if p.get("pingpong") else int(str(p.get("consumers") or p.get("warpgroups") or 2))
    return int(str(p["bm"])) * int(str(p["bn"])) / (128 * groups)


def _products(
    g: Gemm, facts: GpuFacts, most: int, shared_bytes: int, whole: dict[Schedule, tuple[RoleSource, int]]
) -> Iterator[RoleSource]:
    """The best configuration by the model of each kind of tile; of several launches the longest, noted in `whole`."""
    problem = g.problem()
    found = product(problem)
    if not isinstance(found, Product):
        raise ValueError(f"{g.name}: {found.reason}")  # noqa: TRY004 - it is the product
    kinds: set[object] = set()
    for _, schedule in feasible(g, problem, facts):
        if len(kinds) == most:
            return
        if dict(schedule.params).get("template") != "tma" or kind(schedule) in kinds:
            continue
        every = roles(found, schedule)
        if isinstance(every, Declined) or every.pack:
            continue
        number = longest(every)
        source = of_launch(every, number)
        if isinstance(role := lc_role(source), Declined):
            continue
        if role.shared_bytes + shared_bytes <= facts.shared_per_block and _one_wave(source, facts):
            kinds.add(kind(schedule))
            if len(every.launched) > 1:
                whole[schedule] = every, number
            yield source if len(every.launched) > 1 else every


@final
class Gpu(ThreeStreams):
    """The GPU of the current context, as `weft.tune.cuda_pair.Machine`. Memory is that of torch."""

    def __init__(self, held: ExitStack) -> None:
        super().__init__(held)
        self._of: dict[int, torch.Tensor] = {}

    def place(self, contents: Sequence[jobs.Array | int]) -> tuple[tuple[int, ...], tuple[Memory, ...]]:
        """Addresses and memory of buffers, each with a guard behind it; a number: so many bytes of poison."""
        addresses, memory = [], []
        for data in contents:
            size = data if isinstance(data, int) else data.nbytes
            tensor = torch.empty(size + len(GUARD), dtype=torch.uint8, device="cuda")
            if isinstance(data, int):
                tensor.fill_(POISON)
            else:
                tensor[:size].copy_(torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
            tensor[size:].copy_(torch.frombuffer(bytearray(GUARD), dtype=torch.uint8))
            self._of[tensor.data_ptr()] = tensor
            addresses.append(tensor.data_ptr())
            memory.append(Memory(tensor.data_ptr(), tensor.numel(), tensor.clone()))
        torch.cuda.synchronize()
        return tuple(addresses), tuple(memory)

    def forget(self, addresses: Sequence[int]) -> None:
        """Give buffers back."""
        for a in addresses:
            del self._of[a]

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        write(address, data)

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        return read_back(address, size)

    def keep(self, memory: Memory) -> object:
        """A copy on the device."""
        return self._of[memory.address].clone()

    def restore(self, memory: Memory, kept: object) -> None:
        """Copy back on the device."""
        self._of[memory.address].copy_(cast("torch.Tensor", kept))

    def differs(self, memory: Memory, kept: object) -> int:
        """Compared on the device."""
        now, then = self._of[memory.address], cast("torch.Tensor", kept)
        return -1 if torch.equal(now, then) else int((now != then).nonzero()[0])

    def run(self, work: Sequence[Prepared]) -> None:
        """One after the other, until all have ended."""
        torch.cuda.current_stream().synchronize()
        super().run(work)

    def samples_us(self, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
        """Graphs in interleaved rounds, two of which do not count: each round has them in a random order of its own."""
        torch.cuda.current_stream().synchronize()
        return super().samples_us(works, rounds)


class Loader:
    """Compiles, loads each cubin once, and knows its modules."""

    def __init__(self, nvrtc: Nvrtc, arch: str, held: ExitStack, cache: Path | None = None) -> None:
        self.nvrtc, self.arch, self._cache = nvrtc, arch, cache
        self._modules = Modules(held)
        self._compiled: dict[tuple[str, tuple[str, ...]], CompiledCubin | ToolchainError] = {}
        self.driver = self._modules.driver

    def compile_all(self, texts: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        """On all cores; what fails is raised when it is asked for."""
        missing = list(dict.fromkeys(x for x in texts if x not in self._compiled))
        found = self.nvrtc.compile_many(
            [CompileJob(text, self.arch, flags) for text, flags in missing], cache_dir=self._cache
        )
        self._compiled.update(zip(missing, found, strict=True))

    def compiled(self, text: str, flags: Sequence[str] = ()) -> CompiledCubin:
        """The cubin of a text. Raises ToolchainError: it is none."""
        key = (text, tuple(flags))
        if key not in self._compiled:
            self.compile_all([key])
        found = self._compiled[key]
        if isinstance(found, ToolchainError):
            raise found
        return found

    def fill(self, cubin: CompiledCubin, prefix: Sequence[str], roles: Sequence[ForeignRole]) -> None:
        """The `__constant__` variables of foreign kernels, which stand in these namespaces."""
        module = self._modules.load(cubin.path)
        for k, role in enumerate(roles):
            outer = [p.format(k) for p in prefix]
            data = {c.name: c for c in role.manifest.constants}
            for symbol in role.symbols:
                namespace, name = symbol.split("::")
                address, _ = module.variable(mangled([*outer, namespace, name]))
                write(address, jobs.drawn(data[name]).tobytes())


def mangled(names: Sequence[str]) -> str:
    """A variable in namespaces, as the Itanium C++ ABI spells it."""
    return f"_ZN{''.join(f'{len(n)}{n}' for n in names)}E"


@dataclass(frozen=True, slots=True)
class Job:
    """A best-effort job as roles."""

    name: str
    stages: tuple[ForeignRole, ...]
    job: jobs.Job

    @property
    def sources(self) -> list[RoleSource]:
        """One for each stage."""
        return [s.source for s in self.stages]

    @property
    def exact(self) -> bool:
        """Whether its results have one value, bit by bit."""
        return all(s.manifest.exact for s in self.job.stages)

    @property
    def shared_bytes(self) -> int:
        """What one role takes of a CTA's shared memory, with what the assembly takes."""
        found = stages_of(self.sources)
        assert not isinstance(found, Declined)  # `job_of` has read them
        return shared_of(found)[0] + control_bytes(4, 2)

    def addresses(self, at: dict[str, int]) -> list[Addresses]:
        """Of each stage, given those of the job's buffers."""
        found = []
        for stage in self.stages:
            of = [(p.kind, at[p.buffer]) for p in stage.manifest.parameters if p.kind != "scalar"]
            found.append(Addresses([a for k, a in of if k == "input"], [a for k, a in of if k != "input"]))
        return found


def job_of(name: str, *, small: bool = False) -> Job:
    """A job of `benchmarks/best_effort` whose kernels are read as foreign files.

    Raises:
        ValueError: there is none, or a kernel of it cannot be a role.
    """
    found = jobs.load(name, small=small)
    stages = []
    for k, stage in enumerate(found.stages):
        role = foreign(stage.manifest, f"w_f{k}")
        if isinstance(role, Declined):
            raise ValueError(f"{name}: {role.reason}")  # noqa: TRY004 - it is the file
        stages.append(role)
    read = Job(name, tuple(stages), found)
    if isinstance(wrong := stages_of(read.sources), Declined):
        raise ValueError(f"{name}: {wrong.reason}")  # noqa: TRY004 - it is the file
    return read


def contents_of(job: Job, cache: Path | None) -> dict[str, jobs.Array]:
    """The job's buffers before it runs; kept in the folder, since drawing some of them takes seconds."""
    if cache is None:
        return dict(job.job.buffers())
    path = cache / "buffers" / f"{job.name}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, allow_pickle=False, **job.job.buffers())
        partial.replace(path)
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fused kernel of a pair."""

    lc: int
    """Position among the configurations."""
    shape: FusionShape
    made: FusedSource


def candidates(lc: Lc, numbers: Sequence[int], job: Job, facts: GpuFacts, registers: int = 40) -> list[Candidate]:
    """Fused kernels of some configurations: few and many best-effort threads, with the registers that the job wants."""
    found = []
    for number in numbers:
        source = lc.sources[number]
        role = source.roles[0]
        fills = role.grid[0] < facts.sms and math.prod(role.cluster) == 1
        for shape in varied(shapes(source, job.sources, facts), registers, fills=fills):
            made = fuse(source, job.sources, shape, facts=facts)
            if isinstance(made, FusedSource):
                found.append(Candidate(number, shape, made))
    return found


def united(every: Sequence[Lc]) -> tuple[Lc, list[list[int]]]:
    """One kernel with the configurations of all, each once; and the positions of those of each."""
    sources = list({s.schedule: s for lc in every for s in lc.sources}.values())
    at = {s.schedule: k for k, s in enumerate(sources)}
    whole = {schedule: found for lc in every for schedule, found in lc.whole.items()}
    return replace(every[0], sources=tuple(sources), whole=whole), [
        [at[s.schedule] for s in lc.sources] for lc in every
    ]


def varied(every: Sequence[FusionShape], registers: int, *, fills: bool) -> list[FusionShape]:
    """Of all shapes of a configuration one for each place, number of threads and, where they move, of registers.

    `fills`: those that fill the grid; without: those that do not. The idle warps as one role; `registers` of a thread
    and those that a role takes to draw, or a step more.
    """
    kinds: dict[object, FusionShape] = {}
    there = sorted({s.registers.best_effort for s in every if s.registers})
    enough = [r for r in there if r >= registers + DRAWING_REGISTERS][:2] or there[-1:]
    for s in every:
        if s.fill_grid != fills or (s.place == "idle" and s.replicas > 1) or s.threads < LEAST_THREADS:
            continue
        if s.registers is None or s.registers.best_effort in enough:
            kinds.setdefault((s.place, s.threads * s.replicas, s.registers and s.registers.best_effort), s)
    return list(kinds.values())


def registers_of(loader: Loader, job: Job) -> int:
    """The most registers of a thread that a kernel of the job has by itself."""
    made = [solo(source, f"be{k}") for k, source in enumerate(job.sources)]
    loader.compile_all([(m.text, m.flags) for m in made])
    return max(loader.compiled(m.text, m.flags).of(m.launches[0].entry).registers for m in made)


def refusal(loader: Loader, lc: RoleSource, one: Candidate, facts: GpuFacts) -> str:
    """Why a fused kernel does not run, from its compilation and that of LC alone in its bounds; empty: it may."""
    try:
        found = loader.compiled(one.made.text, one.made.flags).of(one.made.entry)
        spills: int | None = 0
        if found.spill_stores + found.spill_loads:
            bare = fuse(lc, (), one.shape, facts=facts)
            if isinstance(bare, Declined):
                return bare.reason
            own = loader.compiled(bare.text, bare.flags).of(bare.entry)
            spills = own.spill_stores + own.spill_loads
    except ToolchainError as error:
        return str(error).splitlines()[0][:200]
    declined = judge(one.made, found, facts, spills)
    return "" if declined is None else declined.reason


@final
class Bench:
    """An LC kernel on the GPU, with its configurations timed alone."""

    def __init__(
        self,
        lc: Lc,
        facts: GpuFacts,
        loader: Loader,
        rounds: int,
        held: ExitStack,
        cache: Path | None = None,
        database: Database | None = None,
    ) -> None:
        """`cache`: folder of buffers; `database`: where pairs are kept and read back, None: nowhere."""
        self.lc, self.facts, self.loader, self.rounds, self._held = lc, facts, loader, rounds, held
        self.cache = cache
        self.database = held.enter_context(Database.open(None)) if database is None else database
        self._parts: list[tuple[str, Stream, Stream]] | None = None
        self.gpu, self.meter = Gpu(held), Meter(str(torch.cuda.get_device_properties(0).uuid))
        self.counter, self.fresh = (held.enter_context(device_memory(BYTES)) for _ in range(2))
        given = [np.frombuffer(bytearray(x), np.uint8) for x in lc.inputs]
        self.addresses, self.memory = self.gpu.place([*given, *lc.outputs])
        made = [*(solo(lc.launches(k)[0], "lc") for k in range(len(lc.sources))), *lc.others]
        self.loader.compile_all([(m.text, m.flags) for m in made])
        self.at: list[Addresses] = []
        self.alone: list[Prepared] = []
        self._bound: list[BoundCuda] = []
        for source in made:
            bound = BoundCuda(source, self.loader.compiled(source.text, source.flags).path, driver=self.loader.driver)
            inputs, outputs = self.addresses[: len(lc.inputs)], self.addresses[len(lc.inputs) :]
            packed = [held.enter_context(device_memory(max(16, n))) for n in source.packed_bytes]
            work, state = (held.enter_context(device_memory(max(16, n)))
                           for n in (source.workspace_bytes, source.state_bytes))  # fmt: skip
            streams.fill(state, 0, max(16, source.state_bytes))
            weights = [a if w else 0 for a, w in zip(inputs, lc.weights, strict=True)]
            self.gpu.run([lambda stream, b=bound, w=weights, p=packed: b.pack(w, p, stream)])  # type: ignore[misc]
            self.at.append(Addresses(inputs, outputs, packed, work, state))
            self.alone.append(bound.prepare(self.at[-1]))
            self._bound.append(bound)
        samples = self.gpu.samples_us([many([p], 8) for p in self.alone], rounds)
        self.times = [statistics.median(x) / 8 for x in samples]
        self.best = min(range(len(self.times)), key=self.times.__getitem__)

    def rows(self, job: Job, numbers: Sequence[int]) -> Iterator[Row]:
        """Rows of a pair: of fused kernels that are measured now, then of the pair itself."""
        with ExitStack() as held:
            search = Search(self, job, held)
            every = candidates(self.lc, numbers, job, self.facts, registers_of(self.loader, job))
            search.study(every, 1)
            yield from search.told()
            best = search.ranked(every)[:FINALISTS]
            timed = [c for one in best if (c := self._in_time(one, job)) is not None]
            found = search.study([*every, *timed], max(2, self.rounds))
            yield from search.told()
            yield search.row(found)

    def _metered(self, times: PairTimes, pair: Pair) -> Row:
        """Clock of the SMs (MHz) and power (W) while LC, the job and the fused launches run, each by itself."""
        us = {"lc": times.lc_us, "be": times.be_us, "fused": times.inside_us}
        found: dict[str, dict[str, float]] = {}
        for name, work in forms(self.gpu, pair, times.launches).items():
            with self.meter.sampling() as seen:
                self.gpu.samples_us([work], math.ceil(METERED_US / us[name]))
            found[name] = clocks(seen)
        return {key: {name: x[key] for name, x in found.items()} for key in ("sm_clock_mhz", "watts")}

    def _job(self, job: Job, held: ExitStack) -> tuple[Side, float, Prepared, list[Addresses], int]:
        """The job by itself, its time, its persistent form, addresses, and the most registers of a thread."""
        buffers = contents_of(job, self.cache)
        addresses, memory = self.gpu.place(list(buffers.values()))
        held.callback(self.gpu.forget, addresses)
        at = job.addresses(dict(zip(buffers, addresses, strict=True)))
        work: list[Prepared] = []
        for k, (source, where) in enumerate(zip(job.sources, at, strict=True)):
            original = solo(source, f"be{k}")
            cubin = self.loader.compiled(original.text, original.flags)
            self.loader.fill(cubin, (), [job.stages[k]])
            work.append(BoundCuda(original, cubin.path, driver=self.loader.driver).prepare(where))
        co_runner = persistent(job.sources, ctas=8 * self.facts.sms, facts=self.facts)
        if isinstance(co_runner, Declined):
            raise ValueError(f"{job.name}: {co_runner.reason}")  # noqa: TRY004 - it is the job
        cubin = self.loader.compiled(co_runner.text, co_runner.flags)
        self.loader.fill(cubin, ("w_be{}",), job.stages)
        bound = BoundFused(co_runner, cubin.path, driver=self.loader.driver)
        drain = bound.prepare([Addresses(()), *at], self.counter)
        us = statistics.median(self.gpu.samples_us([many(work)], self.rounds)[0])
        return Side(tuple(work), memory), us, drain, at, registers_of(self.loader, job)

    def wrongs(self, job: Job, numbers: Sequence[int], splits: Sequence[int]) -> Iterator[tuple[Candidate, str]]:
        """What is wrong with each fused kernel that runs, compared at so many splits; empty: nothing."""
        with ExitStack() as held:
            side, _, drain, at, registers = self._job(job, held)
            every = candidates(self.lc, numbers, job, self.facts, registers)
            every += [timed for c in every if (timed := self._in_time(c, job)) is not None]
            self.loader.compile_all([(c.made.text, c.made.flags) for c in every])
            wanted: dict[int, Wanted | str] = {}
            for one in every:
                if not refusal(self.loader, self.lc.sources[one.lc], one, self.facts):
                    yield one, self._wrong(one, self._pair(one, job, side, drain, at), wanted, splits)

    def _pair(self, one: Candidate, job: Job, side: Side, drain: Prepared, at: Sequence[Addresses]) -> Pair:
        fused = self._fused(one, job, at)
        lc_side = Side((self.alone[one.lc],), self.memory)
        return Pair(lc_side, side, fused, drain, self.counter, self.fresh, one.made.stages, job.exact)

    def _wrong(self, one: Candidate, pair: Pair, wanted: dict[int, Wanted | str], splits: Sequence[int]) -> str:
        """What is wrong with a fused kernel; `wanted`: results of the LC configurations that were run by themselves."""
        if one.lc not in wanted:
            wanted[one.lc] = alone(self.gpu, pair)
            first = wanted[one.lc]
            if isinstance(first, Wanted) and len(wanted) == 1:
                wanted[one.lc] = verify_drain(self.gpu, pair, first) or first
        want = wanted[one.lc]
        return want if isinstance(want, str) else verify(self.gpu, pair, want, splits)

    def _in_time(self, one: Candidate, job: Job) -> Candidate | None:
        """The same kernel, but it draws no block that would end behind LC."""
        shape = replace(one.shape, in_time=True)
        made = fuse(self.lc.sources[one.lc], job.sources, shape, facts=self.facts)
        return Candidate(one.lc, shape, made) if isinstance(made, FusedSource) else None

    def _fused(self, one: Candidate, job: Job, at: Sequence[Addresses]) -> Prepared:
        cubin = self.loader.compiled(one.made.text, one.made.flags)
        self.loader.fill(cubin, ("w_be{}",), job.stages)
        bound = BoundFused(one.made, cubin.path, driver=self.loader.driver)
        return self.in_order(one.lc, bound.prepare([self.at[one.lc], *at], self.counter))

    def in_order(self, number: int, fused: Prepared) -> Prepared:
        """A fused kernel with the other launches of its configuration before and behind it, where it has some."""
        every, launch = self.lc.launches(number)
        if len(every.launched) == 1:
            return fused
        return among(self._bound[number], launch, fused, self.at[number])

    def _partitions(self) -> Iterator[tuple[str, Stream, Stream]]:
        for sms in PARTS:
            parts = self._held.enter_context(partitioned(sms))
            if not isinstance(parts, Declined):
                yield f"parts:{sms}", _stream(parts.first, self._held), _stream(parts.rest, self._held)

    def _split(self, be: Side) -> Callable[[int], dict[str, Callable[[int], None]]] | None:
        """The peer of two parts, for a number of LC launches; None where this GPU has none."""
        if self._parts is None:
            self._parts = list(self._partitions())
        sides = self._parts

        def peers(n: int) -> dict[str, Callable[[int], None]]:
            works: dict[str, Callable[[int], None]] = {
                name: lambda stream, a=first, b=rest: forked(((a, [self.alone[self.best]] * n), (b, be.alone)), stream)  # type: ignore[misc]
                for name, first, rest in sides
            }
            if not works:
                return {}
            times = self.gpu.samples_us(list(works.values()), PEER_TIMES)
            name = min(zip(times, works, strict=True), key=lambda x: statistics.median(x[0]))[1]
            return {name: works[name]}

        return peers


@final
class Search:
    """Fused kernels of a pair, searched by successive halving: moments, then runs beside the peers. See `study`."""

    def __init__(self, bench: Bench, job: Job, held: ExitStack) -> None:
        self.bench, self.job, self._held = bench, job, held
        self.case = f"{bench.lc.name}/{job.name}"
        self.be_us = math.nan
        self.wrong = ""
        """What is wrong with a kernel that was right in its first comparison."""
        self._on_gpu: tuple[Side, Prepared, list[Addresses]] | None = None
        self._of: dict[PairKey, Candidate] = {}
        self._pairs: dict[PairKey, Pair] = {}
        self._times: dict[PairKey, PairTimes] = {}
        self._wanted: dict[int, Wanted | str] = {}
        self._told: list[Row] = []

    def arm(self, one: Candidate) -> Arm:
        """A candidate as what may be measured."""
        b = self.bench
        names, source = (b.lc.name, self.job.name), b.lc.sources[one.lc]
        made = row_of(names, b.lc.problem, source, self.job.sources, one.made, None, b.facts, b.loader.nvrtc)
        self._of[made.key] = one
        return Arm(made, one.made)

    def study(self, every: Sequence[Candidate], rounds: int) -> PairSummary | None:
        """Search them to so many rounds; what is known is not measured, nor compiled."""
        arms = [self.arm(c) for c in every]
        there = {r.key for r in known(self.bench.database)}
        new = [a.source for a in arms if a.record.key not in there]
        self.bench.loader.compile_all([(x.text, x.flags) for x in new])
        return study(
            self.bench.database, arms, self._measured, rounds=1, most_rounds=rounds, least=FINALISTS, share=SHARE
        )

    def ranked(self, every: Sequence[Candidate]) -> list[Candidate]:
        """Those that are right, by the work of both in the time of a launch."""
        there = {r.key: r for r in known(self.bench.database)}
        found = [(added_work(r), k) for k, c in enumerate(every) if not (r := there[self.arm(c).record.key]).declined]
        return [every[k] for _, k in sorted(found, key=lambda x: (-x[0], x[1]))]

    def told(self) -> list[Row]:
        """Rows of the kernels that were measured since it was asked last."""
        found, self._told = self._told, []
        return found

    def _measured(self, arm: Arm, rounds: int) -> PairRecord:
        b, key = self.bench, arm.record.key
        one = self._of[key]
        source = b.lc.sources[one.lc]
        row: Row = {"record": "shape", "case": self.case, "lc_schedule": str(source.schedule),
                    "shape": asdict(one.shape), "rounds": rounds}  # fmt: skip
        self._told.append(row)
        if key not in self._pairs:
            if reason := refusal(b.loader, source, one, b.facts):
                row["declined"] = reason
                return refused(arm.record, reason)
            if self._on_gpu is None:
                side, self.be_us, drain, at, _ = b._job(self.job, self._held)
                self._on_gpu = side, drain, at
            pair = b._pair(one, self.job, *self._on_gpu)
            if wrong := b._wrong(one, pair, self._wanted, ()):
                row["wrong"] = wrong
                return refused(arm.record, wrong)
            self._pairs[key] = pair
        path = b.loader.compiled(one.made.text, one.made.flags).path
        record = replace(arm.record, cubin=cubin_digest(path), lc_us=b.times[b.best], be_us=self.be_us)
        if rounds < 2:
            return self._moment(record, self._pairs[key], row)
        return self._beside_peers(record, one, self._pairs[key], row, rounds)

    def _moment(self, record: PairRecord, pair: Pair, row: Row) -> PairRecord:
        """From a few launches; over one after the other, without a run of the peers."""
        b = self.bench
        n = max(1, min(64, round(MOMENT_US / record.lc_us)))
        found = rate(b.gpu, pair, n, 3)
        if found.blocks * n >= pair.total and n > 1:  # the job was over before
            n = max(1, n // 8)
            found = rate(b.gpu, pair, n, 3)
        gained = record.be_us * found.blocks / pair.total / record.lc_us
        lost = found.inside_us / record.lc_us - 1.0
        told = replace(record, rounds=1, launches=n, fraction=gained, slowdown=lost, started=time.time())
        told = replace(told, ratio=added_work(told))
        row |= {"guess": round(told.ratio, 4), "inside_us": round(found.inside_us, 2), "blocks": round(found.blocks, 1)}
        return told

    def _beside_peers(self, record: PairRecord, one: Candidate, pair: Pair, row: Row, rounds: int) -> PairRecord:
        b = self.bench
        assert self._on_gpu is not None  # it has the pair
        n = launches_for(pair.total, max(rate(b.gpu, pair, 4, 3).blocks, 0.01))
        split = b._split(self._on_gpu[0])
        peers = replace(pair, lc=Side((b.alone[b.best],), b.memory))
        times = measure(b.gpu, peers, n, rounds, split and split(n))
        wrong = "" if times.drained else f"the job had not run whole after {n} launches and what was left"
        if not wrong and rounds >= b.rounds:
            wrong = b._wrong(one, pair, self._wanted, SPLITS)
        if wrong:
            row["wrong"] = self.wrong = wrong
            return refused(record, wrong)
        self._times[record.key] = times
        row |= {"measured_ratio": round(times.ratio, 4), "launches": n}
        return timed(record, times, pair.total, times.peers, rounds)

    def _metered(self, key: PairKey) -> Row:
        """Clock and power, of what was measured now."""
        there = key in self._times
        return self.bench._metered(self._times[key], self._pairs[key]) if there else {"known": True}

    def row(self, found: PairSummary | None) -> Row:
        """Of the pair: the best kernel that was timed beside its peers."""
        b = self.bench
        best = None if found is None else found.best
        be_us = best.be_us if best is not None else self.be_us
        base: Row = {"record": "case", "suite": SUITE, "case": self.case, "lc_us": round(b.times[b.best], 2)}
        base |= {"be_us": round(be_us, 2)} if math.isfinite(be_us) else {}
        if self.wrong:
            base["wrong"] = self.wrong
        if best is None or not best.shape:
            note = "no shape fits" if found is None else "no shape runs, or none was right"
            return {**base, "kept": False, "ratio": 1.0, "note": note}
        one, n = self._of[best.key], best.launches
        kept = best.ratio > 1.0 and not self.wrong
        return {
            **base,
            "kept": kept,
            "ratio": round(best.ratio, 4) if kept else 1.0,
            "measured_ratio": round(best.ratio, 4),
            "lc_schedule": str(best.schedule),
            "shape": asdict(best.shape),
            "launches": n,
            "fraction": round(best.be_us / (n * best.lc_us), 3),
            "slowdown": round(best.slowdown, 4),
            "idle_slowdown": round(best.idle, 4),
            "inside": round(best.fraction * n * best.lc_us / best.be_us, 4),
            "peers_us": {k: round(v, 1) for k, v in best.peers},
            "fused_us": round(best.best_peer[1] / best.ratio, 1),
            "blocks": sum(one.made.stages),
            **self._metered(best.key),
        }


def _stream(part: Part, held: ExitStack) -> Stream:
    found = Stream(part.stream())
    held.callback(found.close)
    return found


def inside(lc_text: str, names: Sequence[str], chosen: argparse.Namespace) -> Iterator[Row]:
    """Rows of the pairs of one LC kernel."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise DeviceError(problem=nvrtc.reason)
    work = [job_of(name) for name in names]
    with primary_context(), ExitStack() as held:
        facts = gpu_facts(None, calibrate=False)
        every = [lc_of(lc_text, facts, chosen.hosts, job.shared_bytes, contents=k == 0) for k, job in enumerate(work)]
        lc, numbers = united(every)
        kept = held.enter_context(Database.open(chosen.database))
        asked = held.enter_context(Database.open(None)) if chosen.again else kept
        loader = Loader(nvrtc, facts.arch, held, chosen.cache)
        bench = Bench(lc, facts, loader, chosen.rounds, held, chosen.cache, asked)
        for job, own in zip(work, numbers, strict=True):
            yield {"record": "begun", "case": f"{lc_text}/{job.name}"}
            yield from bench.rows(job, own)
            if chosen.again:
                keep(kept, known(asked))


def dry(products: Sequence[str], names: Sequence[str], most: int, cache: Path | None) -> int:
    """Compile fused kernels for an H200, and print what the assembler says; the number of pairs without any."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_pairs: {nvrtc.reason}")
    facts, bad = profile("h200"), 0
    with ExitStack() as held:
        loader = Loader(nvrtc, "sm_90a", held, cache)
        for text in products:
            for name in names:
                job = job_of(name)
                lc = lc_of(text, facts, most, job.shared_bytes, contents=False)
                every = candidates(lc, range(len(lc.sources)), job, facts, registers_of(loader, job))
                loader.compile_all([(c.made.text, c.made.flags) for c in every])
                good = 0
                for one in every:
                    reason = refusal(loader, lc.sources[one.lc], one, facts)
                    own = "" if reason else loader.compiled(one.made.text, one.made.flags).of(one.made.entry)
                    s = one.shape
                    place = f"{s.place} x {s.replicas} of {s.threads}, {one.made.threads} threads"
                    print(f"{text}/{name}: {lc.sources[one.lc].schedule}\n  {place}: {reason or own}", flush=True)
                    good += not reason
                bad += not good
                if not every:
                    print(f"{text}/{name}: no shape", flush=True)
    return bad


class Child:
    """The pairs of one LC kernel in a process of its own, which may die or hang."""

    def __init__(self, lc: str, names: Sequence[str], arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_pairs", "--lc", lc, "--be", ",".join(names)]
        self._process = subprocess.Popen(
            [*command, *arguments, "--inside"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._said: list[str] = []
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._listen)]
        for t in self._threads:
            t.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self._said += self._process.stderr.readlines()

    def rows(self, limit_s: float) -> Iterator[Row]:
        """As they come.

        Raises:
            TimeoutError: none for so long.
            RuntimeError: the process failed.
        """
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                raise TimeoutError(f"no word for {limit_s:.0f} s") from None
            if line is None:
                break
            if line.startswith("{"):
                yield json.loads(line)
        if self._process.wait():
            self._threads[1].join()
            print("".join(self._said), file=sys.stderr, flush=True)
            said = [x.strip() for x in self._said if x.strip() and not x[0].isspace() and not x.startswith("Traceback")]
            last = said[-1][:300] if said else "no word"
            raise RuntimeError(f"its process ended with {self._process.returncode}: {last}")

    def end(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.wait()
        for t in self._threads:
            t.join()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def pairs(lc: str, names: Sequence[str], arguments: Sequence[str], limit_s: float, end: float) -> Iterator[Row]:
    """Rows of all pairs of an LC kernel; a pair whose process fails has a row that says so."""
    left = list(names)
    while left:
        if time.perf_counter() > end:
            yield {"record": "late", "case": f"{lc}/{', '.join(left)}"}
            return
        child = Child(lc, left, arguments)
        try:
            for row in child.rows(limit_s):
                if row["record"] == "case":
                    left.remove(str(row["case"]).rpartition("/")[2])
                yield row
                if row["record"] == "case" and time.perf_counter() > end:
                    break
            else:
                if left:
                    raise RuntimeError("its process ended before its pairs did")
        except (TimeoutError, RuntimeError) as error:
            yield {"record": "case", "case": f"{lc}/{left.pop(0)}", "failed": str(error), **NOT_KEPT}
        finally:
            child.end()


def recorded(record: Record, rows: Iterator[Row]) -> Iterator[Row]:
    """Keep the rows of pairs. From when a pair is begun its row says that it did not end, until it does.

    So one whose process died, or with whom this one was killed, has a row: not kept, at a ratio of 1. Whoever
    interrupts the run leaves the row as it was.
    """
    begun, before = "", None
    try:
        for row in rows:
            if row["record"] == "begun":
                begun, before = str(row["case"]), record.before().get(str(row["case"]))
                record.fail(ENDED, case=begun, **NOT_KEPT, tries=tries_of(before, record.head) + 1)
            elif "failed" in row:
                begun = ""
                record.fail(str(row["failed"]), case=row["case"], **NOT_KEPT)
            elif row["record"] == "case":
                begun = ""
                record.add(row)
            yield row
    except BaseException:
        if begun and before is not None:
            record.add(before)
        elif begun:
            record.forget(begun)
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and record; the exit status is 1 where a pair fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lc", default=",".join(lc_names()), help="kernels by name or products MxNxK, by commas")
    parser.add_argument("--be", default=",".join(jobs.names()), help="jobs of benchmarks/best_effort, by commas")
    parser.add_argument("--hosts", type=int, default=6, help="configurations of LC")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=540.0, help="no pair is begun after so many")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds without a word of a pair")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--cache", type=Path, help="folder in which cubins are kept; `--dry` fills it beforehand")
    where = "folder of the tuning database; as other commands by default"
    parser.add_argument("--database", type=Path, default=Options.from_environment(os.environ).cache, help=where)
    parser.add_argument("--again", action="store_true", help="measure what the database knows, too")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90a")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    add_option(parser)
    chosen = parser.parse_args(arguments)
    kernels, names = chosen.lc.split(","), chosen.be.split(",")
    end = time.perf_counter() + chosen.seconds
    try:
        for text in kernels:
            if text not in lc_names():
                gemm_of(text)
        if unknown := set(names) - set(jobs.names()):
            raise ValueError(f"no job {sorted(unknown)[0]!r}; there are {', '.join(jobs.names())}")
        if min(chosen.rounds, chosen.hosts) < 1:
            raise ValueError("--rounds and --hosts: at least 1")
    except ValueError as error:
        parser.error(str(error))
    if chosen.dry:
        sys.exit(1 if dry(kernels, names, chosen.hosts, chosen.cache) else 0)
    if chosen.inside:
        for row in inside(kernels[0], names, chosen):
            print(json.dumps(row), flush=True)
        return
    own = ["--hosts", str(chosen.hosts), "--rounds", str(chosen.rounds)]
    own += ["--cache", str(chosen.cache)] if chosen.cache else []
    own += ["--database", str(chosen.database)] if chosen.database else []
    own += ["--again"] if chosen.again else []
    path = None if chosen.out is None or str(chosen.out) == "-" else chosen.out
    failed = False
    with ExitStack() as ends:
        record = Record(folder_of_gpu(), SUITE, path=path) if chosen.out else None
        left = Left(record, end, only=chosen.left)
        if record is not None:
            ends.callback(left.close)
        for text in kernels:
            rows = pairs(text, [x for x in names if not left.known(case=f"{text}/{x}")], own, chosen.limit, end)
            for row in rows if record is None else recorded(record, rows):
                print(json.dumps(row), flush=True)
                failed |= "failed" in row
                if row["record"] == "late":
                    left.put_off(str(row["case"]))
    sys.exit(left.status(failed))


if __name__ == "__main__":
    main()
