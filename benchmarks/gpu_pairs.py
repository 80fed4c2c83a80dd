"""Pairs of a product (LC) and a best-effort job (BE): fused in one CTA, verified, and timed beside serial and streams.

    python -m benchmarks.gpu_pairs [--lc 4096x4096x4096,...] [--be mriq,sgemm,...] [--fractions 0.3,1.0] [--shapes 4]
        [--rounds 9] [--seconds 540] [--limit 120] [--out FILE|-] [--dry]

LC is C = A · Bᵀ in bf16 by TMA and wgmma. Of the product's best configurations by the model all are timed alone, and
the peers are given the fastest. Of each shape of the fused kernel the bits of both results are compared with those of
the kernels alone (`weft.tune.cuda_pair.verify`), for several splits of the job. Then, for so many launches of LC that
one run of the job is a fraction of their time, medians of interleaved rounds: LC alone, BE alone, one after the other,
two streams of different priority, and the fused launches with what is left of the job behind them. `ratio` is the best
peer over fused: a pair below 1 is declined. Every pair runs in a process of its own, which may die: its row then says
so. `--dry` compiles the fused kernels for an H200, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch

from benchmarks.best_effort import jobs
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.device.cuda import streams
from weft.device.cuda.driver import Module, encode_tensor_map, primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, find_nvrtc
from weft.device.cuda.streams import Stream, device_memory, read_back, write
from weft.errors import DeviceError, ToolchainError
from weft.gemm.search import feasible
from weft.gemm.spec import Gemm
from weft.generate.bind import Addresses, BoundCuda, CudaDriver, Prepared
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda.foreign.read import ForeignRole
from weft.generate.cuda.foreign.read import read as foreign
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.tma.kernel import roles
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import fuse, judge, shapes
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.colocation import BYTES, FusedSource, FusionShape
from weft.tune.cuda_pair import Memory, Pair, Side, launches_for, measure, verify

SUITE = "colocate-pairs"
PRODUCTS = ("4096x4096x4096", "2048x1024x4096", "3152x3072x768", "2048x3072x768", "8192x512x4608")
GUARD = bytes(range(1, 256)) + b"\x00"
"""Behind every buffer."""
ALIGNED = 1024
LARGE_BYTES = 64 << 20
"""Above it fewer splits of the job are compared: every comparison copies all of it."""
ALONE = 8
"""Configurations of LC that are timed alone."""


@final
class Gpu:
    """The GPU of the current context, as `weft.tune.cuda_pair.Machine`."""

    def __init__(self, held: ExitStack) -> None:
        least, greatest = streams.priorities()
        self._main, self._high, self._low = Stream(), Stream(priority=greatest), Stream(priority=least)
        for s in (self._main, self._high, self._low):
            held.callback(s.close)

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        write(address, data)

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        return read_back(address, size)

    def run(self, work: Sequence[Prepared]) -> None:
        """One after the other, until all have ended."""
        for one in work:
            one(self._main.handle)
        self._main.synchronise()

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """On the device, in the order of a stream."""
        streams.copy(to, source, size, stream)

    def beside(self, first: Sequence[Prepared], second: Sequence[Prepared], stream: int) -> None:
        """On two streams; `stream` waits for both."""
        for side, work in ((self._high, first), (self._low, second)):

            def put(handle: int, work: Sequence[Prepared] = work) -> None:
                for one in work:
                    one(handle)

            side.fork(put, stream)
        self._high.join(stream)
        self._low.join(stream)

    def samples_us(self, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
        """Graphs in interleaved rounds, two of which do not count."""
        with ExitStack() as held:
            graphs = [held.enter_context(self._main.graph(work)) for work in works]
            found = [[self._main.time_us(g) for g in graphs] for _ in range(rounds + 2)]
        return [list(x) for x in zip(*found[2:], strict=True)]


@dataclass(frozen=True, slots=True)
class Placed:
    """Buffers of one side on the device."""

    addresses: tuple[int, ...]
    memory: tuple[Memory, ...]


def place(contents: Sequence[bytes], held: ExitStack) -> Placed:
    """Each in memory of its own with a guard behind it."""
    addresses, memory = [], []
    for data in contents:
        whole = data + GUARD
        address = held.enter_context(device_memory(-(-len(whole) // ALIGNED) * ALIGNED))
        addresses.append(address)
        memory.append(Memory(address, whole))
    return Placed(tuple(addresses), tuple(memory))


class Loader:
    """Compiles, loads each cubin once, and knows its modules."""

    def __init__(self, nvrtc: Nvrtc, arch: str, held: ExitStack) -> None:
        self.nvrtc, self.arch, self._held = nvrtc, arch, held
        self._modules: dict[Path, Module] = {}
        self.driver = CudaDriver(self._load, encode_tensor_map)

    def _load(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path)
            self._held.callback(self._modules[path].unload)
        return self._modules[path]

    def compiled(self, text: str, flags: Sequence[str] = ()) -> CompiledCubin:
        """The cubin of a text."""
        return self.nvrtc.compile(text, arch=self.arch, flags=tuple(flags))

    def fill(self, cubin: CompiledCubin, prefix: Sequence[str], roles: Sequence[ForeignRole]) -> None:
        """The `__constant__` variables of foreign kernels, which stand in these namespaces."""
        module = self._load(cubin.path)
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
    return Job(name, tuple(stages), found)


def gemm_of(text: str) -> Gemm:
    """`MxNxK` in bf16. Raises ValueError: it is no three sizes."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(x.isascii() and x.isdigit() and int(x) for x in sizes):
        raise ValueError(f"{text!r} is not of the form 4096x4096x4096")
    m, n, k = map(int, sizes)
    return Gemm(m=m, n=n, k=k, layout="nt", dtype=DType.BF16)


def lc_sources(g: Gemm, facts: GpuFacts, most: int) -> list[RoleSource]:
    """The product's best configurations by the model, as roles."""
    problem = g.problem()
    found = product(problem)
    if not isinstance(found, Product):
        raise ValueError(f"{g.name}: {found.reason}")  # noqa: TRY004 - it is the product
    made: list[RoleSource] = []
    for _, schedule in feasible(g, problem, facts):
        if len(made) == most:
            break
        if dict(schedule.params).get("template") == "tma":
            source = roles(found, schedule)
            if isinstance(source, RoleSource) and len(source.roles) == 1 and not source.pack:
                made.append(source)
    return made


def candidates(
    lc: Sequence[RoleSource], job: Job, facts: GpuFacts, most: int
) -> Iterator[tuple[RoleSource, FusionShape, FusedSource]]:
    """Fused kernels, the LC configurations in turn, up to `most` shapes each."""
    for source in lc:
        for shape in shapes(source, job.sources, facts)[:most]:
            made = fuse(source, job.sources, shape, facts=facts)
            if isinstance(made, FusedSource):
                yield source, shape, made


def together(work: Sequence[Prepared]) -> Prepared:
    """One after the other on a stream."""

    def put(stream: int) -> None:
        for one in work:
            one(stream)

    return put


def refusal(loader: Loader, lc: RoleSource, shape: FusionShape, made: FusedSource, facts: GpuFacts) -> str:
    """Why a fused kernel does not run, from its compilation and that of LC alone in its bounds; empty: it may."""
    alone = fuse(lc, (), shape, facts=facts)
    if isinstance(alone, Declined):
        return alone.reason
    try:
        own = loader.compiled(alone.text, alone.flags).of(alone.entry)
        found = loader.compiled(made.text, made.flags).of(made.entry)
    except ToolchainError as error:
        return str(error).splitlines()[0][:200]
    declined = judge(made, found, facts, own.spill_stores + own.spill_loads)
    return "" if declined is None else declined.reason


def told(lc: RoleSource, shape: FusionShape) -> Row:
    """What a row says of a fused kernel."""
    return {"lc_schedule": str(lc.schedule), "shape": asdict(shape)}


def pair_rows(g: Gemm, job: Job, chosen: argparse.Namespace) -> Iterator[Row]:
    """Rows of one pair; the last one is the best that was kept, or says that nothing was."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise DeviceError(problem=nvrtc.reason)
    case = f"{g.m}x{g.n}x{g.k}/{job.name}"
    with primary_context(), ExitStack() as held:
        facts = gpu_facts(None, calibrate=False)
        loader, gpu = Loader(nvrtc, facts.arch, held), Gpu(held)
        buffers = job.job.buffers()
        be = place([x.tobytes() for x in buffers.values()], held)
        be_addresses = job.addresses(dict(zip(buffers, be.addresses, strict=True)))
        generator = torch.Generator().manual_seed(1)
        sizes = ((g.m, g.k), (g.n, g.k))
        operands = [torch.randn(s, generator=generator).bfloat16().view(torch.int16).numpy().tobytes() for s in sizes]
        lc = place([*operands, bytes([0xA5]) * (2 * g.m * g.n)], held)
        counter, fresh = (held.enter_context(device_memory(BYTES)) for _ in range(2))
        sources = lc_sources(g, facts, ALONE)

        def lc_alone(source: RoleSource) -> tuple[Prepared, Addresses]:
            made = solo(source, "lc")
            work, state = (
                held.enter_context(device_memory(max(16, n))) for n in (made.workspace_bytes, made.state_bytes)
            )
            streams.fill(state, 0, max(16, made.state_bytes))
            at = Addresses(lc.addresses[:2], lc.addresses[2:], (), work, state)
            bound = BoundCuda(made, loader.compiled(made.text, made.flags).path, driver=loader.driver)
            return bound.prepare(at), at

        alone = [lc_alone(source) for source in sources]
        times = [statistics.median(x) for x in gpu.samples_us([p for p, _ in alone], chosen.rounds)]
        best = min(range(len(times)), key=times.__getitem__)
        be_alone: list[Prepared] = []
        for k, (source, at) in enumerate(zip(job.sources, be_addresses, strict=True)):
            original = solo(source, f"be{k}")
            cubin = loader.compiled(original.text, original.flags)
            loader.fill(cubin, (), [job.stages[k]])
            be_alone.append(BoundCuda(original, cubin.path, driver=loader.driver).prepare(at))
        co_runner = persistent(job.sources, ctas=8 * facts.sms, facts=facts)
        if isinstance(co_runner, Declined):
            raise ValueError(f"{job.name}: {co_runner.reason}")  # noqa: TRY004 - it is the job
        cubin = loader.compiled(co_runner.text, co_runner.flags)
        loader.fill(cubin, ("w_be{}",), job.stages)
        drain = BoundFused(co_runner, cubin.path, driver=loader.driver).prepare([Addresses(()), *be_addresses], counter)
        be_side = Side(tuple(be_alone), be.memory)
        be_us = statistics.median(gpu.samples_us([together(be_alone)], chosen.rounds)[0])
        limits = () if sum(len(m.before) for m in be.memory) > LARGE_BYTES else (1, 131, 132, 133)
        kept: Row | None = None
        for source, shape, made in candidates(sources, job, facts, chosen.shapes):
            number = sources.index(source)
            if reason := refusal(loader, source, shape, made, facts):
                yield {"record": "shape", "case": case, **told(source, shape), "declined": reason}
                continue
            cubin = loader.compiled(made.text, made.flags)
            loader.fill(cubin, ("w_be{}",), job.stages)
            fused = BoundFused(made, cubin.path, driver=loader.driver).prepare(
                [alone[number][1], *be_addresses], counter
            )
            stages = made.stages
            own = Pair(Side((alone[number][0],), lc.memory), be_side, fused, drain, counter, fresh, stages, job.exact)
            if wrong := verify(gpu, own, limits):
                yield {"record": "shape", "case": case, **told(source, shape), "wrong": wrong}
                continue
            peers = Pair(Side((alone[best][0],), lc.memory), be_side, fused, drain, counter, fresh, stages, job.exact)
            for launches in launches_for(times[best], be_us, chosen.fractions):
                found = measure(gpu, peers, launches, chosen.rounds)
                row: Row = {
                    "record": "shape", "case": case, **told(source, shape), **asdict(found),
                    "ratio": round(found.ratio, 4), "slowdown": round(found.slowdown, 4),
                    "fraction": round(found.be_us / found.lc_us, 3),
                }  # fmt: skip
                yield row
                if found.drained and (kept is None or found.ratio > float(str(kept["ratio"]))):
                    kept = row
        won = kept is not None and float(str(kept["ratio"])) > 1.0
        base: Row = {
            "record": "case",
            "suite": SUITE,
            "case": case,
            "lc_us": round(times[best], 2),
            "be_us": round(be_us, 2),
        }
        if kept is None:
            yield {**base, "kept": False, "ratio": 1.0, "note": "no shape runs, or none was right"}
        else:
            more = {k: kept[k] for k in ("lc_schedule", "shape", "launches", "fraction", "slowdown", "serial_us",
                                         "streams_us", "fused_us", "inside_blocks")}  # fmt: skip
            yield {**base, **more, "kept": won, "ratio": kept["ratio"] if won else 1.0, "measured_ratio": kept["ratio"]}


def dry(products: Sequence[str], names: Sequence[str], most: int) -> int:
    """Compile fused kernels for an H200, and print what the assembler says; the number that is refused."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        sys.exit(f"benchmarks.gpu_pairs: {nvrtc.reason}")
    facts, bad = GpuFacts(), 0
    with ExitStack() as held:
        loader = Loader(nvrtc, "sm_90a", held)
        for text in products:
            sources = lc_sources(gemm_of(text), facts, 2)
            for name in names:
                job = job_of(name)
                tried = 0
                for source, shape, made in candidates(sources, job, facts, most):
                    reason = refusal(loader, source, shape, made, facts)
                    own = "" if reason else loader.compiled(made.text, made.flags).of(made.entry)
                    print(f"{text}/{name}: {shape.place} x {shape.replicas}, {made.threads} threads: {reason or own}")
                    tried += 1
                    bad += bool(reason)
                if not tried:
                    print(f"{text}/{name}: no shape")
    return bad


def _numbers(text: str) -> list[float]:
    found = [float(x) for x in text.split(",")]
    if not all(0 < x < math.inf for x in found):
        raise ValueError(f"{text}: fractions are above 0")
    return found


def _child(product_text: str, name: str, arguments: Sequence[str], limit_s: float) -> Iterator[Row]:
    """Rows of a pair that is measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_pairs", "--lc", product_text, "--be", name, *arguments, "--inside"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not done after {limit_s:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        said = [x for x in done.stderr.splitlines() if x and not x[0].isspace() and not x.startswith("Traceback")]
        raise RuntimeError(f"its process ended with {done.returncode}: {said[-1][:300] if said else 'no word'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and record; the exit status is 1 where a pair fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lc", default=",".join(PRODUCTS), help="products MxNxK, by commas")
    parser.add_argument("--be", default=",".join(jobs.names()), help="jobs of benchmarks/best_effort, by commas")
    parser.add_argument("--fractions", type=_numbers, default=[0.3, 1.0], help="BE time over LC time, by commas")
    parser.add_argument("--shapes", type=int, default=4, help="shapes of each LC configuration")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=540.0, help="no pair is begun after so many")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a pair")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile for sm_90a")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    products, names = chosen.lc.split(","), chosen.be.split(",")
    end = time.perf_counter() + chosen.seconds
    try:
        for text in products:
            gemm_of(text)
        if unknown := set(names) - set(jobs.names()):
            raise ValueError(f"no job {sorted(unknown)[0]!r}; there are {', '.join(jobs.names())}")
        if min(chosen.rounds, chosen.shapes) < 1:
            raise ValueError("--rounds and --shapes: at least 1")
    except ValueError as error:
        parser.error(str(error))
    if chosen.dry:
        sys.exit(1 if dry(products, names, chosen.shapes) else 0)
    if chosen.inside:
        for row in pair_rows(gemm_of(products[0]), job_of(names[0]), chosen):
            print(json.dumps(row), flush=True)
        return
    own = [
        "--fractions",
        ",".join(map(str, chosen.fractions)),
        "--shapes",
        str(chosen.shapes),
        "--rounds",
        str(chosen.rounds),
    ]
    path = None if chosen.out is None or str(chosen.out) == "-" else chosen.out
    with ExitStack() as ends:
        record = Record(folder_of_gpu(), SUITE, path=path) if chosen.out else None
        if record is not None:
            ends.callback(record.close)
        for text in products:
            for name in names:
                if time.perf_counter() > end:
                    print(f"not begun in time: {text}/{name}", flush=True)
                    continue
                if record is None:
                    for row in _child(text, name, own, chosen.limit):
                        print(json.dumps(row), flush=True)
                    continue
                with record.measuring(case=f"{text}/{name}"):
                    for row in _child(text, name, own, chosen.limit):
                        print(json.dumps(row), flush=True)
                        if row["record"] == "case":
                            record.add(row)


if __name__ == "__main__":
    main()
