"""Starts and stops of best-effort roles: a chain of fused launches runs on while its roles are told to stop.

What a trial measures begins before `stop` is written, by an event on the stream that writes it, and ends with the last
warp of the last block, by `%globaltimer`. Both are the GPU's own nanoseconds: a kernel of one thread between two events
in front of the chain ties them to each other. As the kernel ended before the second of these, a latency is at most too
long, by less than the time between the two events.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch

from benchmarks.co_runner.machine import GRID, LIMIT_S, MOST_BLOCKS, Gpu, apart_us, timed, wait
from benchmarks.co_runner.rows import exact, lost_or_doubled
from benchmarks.co_runner.units import CELLS, ROLE_THREADS, Unit, role_unit
from benchmarks.gpu_pairs import Bench, Candidate, Loader, lc_of, refusal
from weft.device.cuda import streams
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.driver import Bound, Module
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.streams import Stream
from weft.generate.bind import Addresses, Prepared
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import fuse, shapes
from weft.generate.cuda.role.role import RoleSource
from weft.kernels.colocation import BYTES, FusedSource, WorkCounter
from weft.tune.cuda_pair import many

LCS = {1: ("128x3072x768", "128x768x3072"), 16: ("vgg16/conv3x3-64-224", "bert_base/product-2048x768x3072")}
"""Batch -> latency-critical kernels: bert_base's products of 128 tokens; the longest kernel and one of the shortest."""
CHAIN_US = 250.0
"""About how long a chain of launches lasts by the time of LC alone."""
MOST_LAUNCHES = 128
WORKS_US = (20.0, 150.0)
"""For how long a trial works before it is told to stop: from, to."""
HOSTS = 3
"""Configurations of LC that are timed: the fastest that has a shape is taken."""
FIRST = 2
"""Shapes of a configuration that are compiled beforehand."""
ROOM_BYTES = 2048
"""Of the CTA's shared memory that a configuration leaves: more than any unit's role takes."""
NOW = r"""extern "C" __global__ void now(unsigned long long* at) {
  unsigned long long x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
  *(volatile unsigned long long*)at = x;
}
"""


@dataclass(frozen=True, slots=True)
class RoleCase:
    """Which work in the roles of which kernel is told to stop."""

    kind: str
    batch: int
    lc: str

    def __str__(self) -> str:
        return f"role/{self.kind}/b{self.batch}/{self.lc.replace('/', '-')}"


@dataclass(slots=True)
class RoleTrials:
    """What was found, in microseconds."""

    us: list[float] = field(default_factory=list)
    """From before `stop` was written to the end of the last block; 0: none ended behind it."""
    host_us: list[float] = field(default_factory=list)
    """By the host's clock: from its word to when it saw that all blocks that were drawn had ended."""
    clock_us: list[float] = field(default_factory=list)
    """By how much a latency may be too long."""
    missed: int = 0
    """Trials whose chain had not begun, or had ended, when `stop` was written: not among the latencies."""
    finished: int = 0
    worked_us: float = 0.0
    """From the begin of chains to the end of their last blocks."""


def fused_of(unit: Unit, source: RoleSource, facts: GpuFacts) -> list[FusedSource]:
    """Kernels of an LC configuration and one role of further threads, those first that leave LC most registers."""
    role = unit.role().source
    found = [s for s in shapes(source, [role], facts) if (s.place, s.replicas, s.threads) == ("extra", 1, ROLE_THREADS)]
    every = [fuse(source, [role], s, facts=facts) for s in found if not s.fill_grid]
    return [x for x in every if isinstance(x, FusedSource)]


def launches_of(lc_us: float) -> int:
    """Launches in a chain."""
    return max(1, min(MOST_LAUNCHES, math.ceil(CHAIN_US / lc_us)))


def latency_us(ended_ns: int, now_ns: int, gap_us: float) -> float:
    """From the event in front of `stop` to the end of the last block, at least 0.

    `gap_us`: from the event behind the kernel that read `now_ns` to the one in front of `stop`.
    """
    return max(0.0, (ended_ns - now_ns) / 1e3 - gap_us)


@final
class RoleStopper:
    """Starts and stops roles of fused kernels."""

    def __init__(self, gpu: Gpu, held: ExitStack, cache: Path | None = None) -> None:
        """`cache`: folder in which cubins are kept."""
        self.gpu, self._held = gpu, held.enter_context(ExitStack())
        self._loader = Loader(gpu.nvrtc, gpu.facts.arch, self._held, cache)
        self._raiser = gpu.stream(gpu.greatest)
        self._gate = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._seen = torch.zeros(BYTES, dtype=torch.uint8).pin_memory()
        self._ran = torch.zeros(CELLS + 2, dtype=torch.int32, device="cuda")
        self._out = torch.zeros(256, dtype=torch.int32, device="cuda")
        self._now = torch.zeros(1, dtype=torch.int64, device="cuda")
        module = Module(gpu.nvrtc.compile(NOW, arch=gpu.facts.arch).path)
        held.callback(module.unload)
        self._stamp: Bound = module.function("now").bind((1, 1, 1), (1, 1, 1), [self._now.data_ptr()])
        self._benches: dict[str, Bench] = {}

    def prepare(self, cases: Sequence[RoleCase]) -> None:
        """Compile all of them on all cores."""
        compile_all(self._loader, cases, self.gpu.facts)

    def _bound(self, case: RoleCase) -> tuple[Bench, int, FusedSource, Prepared]:
        """The fused kernel of a case, and which configuration of LC is in it.

        Raises:
            ValueError: no shape of any configuration runs.
        """
        if case.lc not in self._benches:
            lc = lc_of(case.lc, self.gpu.facts, HOSTS, ROOM_BYTES)
            self._benches[case.lc] = Bench(lc, self.gpu.facts, self._loader, 3, self._held)
        bench, wrong = self._benches[case.lc], "no shape"
        unit = role_unit(case.kind, case.batch)
        for number in sorted(range(len(bench.lc.sources)), key=lambda k: bench.times[k]):
            for made in fused_of(unit, bench.lc.sources[number], self.gpu.facts):
                assert made.shape is not None  # an LC role is in it
                one = Candidate(number, made.shape, made)
                if wrong := refusal(self._loader, bench.lc.sources[number], one, self.gpu.facts):
                    continue
                cubin = self._loader.compiled(made.text, made.flags)
                be = Addresses(self.gpu.inputs_of(unit), (self._ran.data_ptr(), self._out.data_ptr()))
                bound = BoundFused(made, cubin.path, driver=self._loader.driver)
                fused = bound.prepare([bench.at[number], be], self.gpu.counter.data_ptr())
                return bench, number, made, bench.in_order(number, fused)
        raise ValueError(f"{case}: {wrong}")

    def _settled(self, until: float) -> None:
        """Wait until the host sees that all that was drawn has ended.

        Raises:
            TimeoutError: it has not until then.
        """
        api, stream, copied = driver_api(), self.gpu.copies, timed()
        while True:
            at = self.gpu.counter.data_ptr()
            call(api.cuMemcpyDtoHAsync, self._seen.data_ptr(), at, BYTES, api.CUstream(stream.cuda_stream))
            copied.record(stream)
            while not copied.query():
                pass
            found = WorkCounter.unpack(self._seen.numpy().tobytes())
            if found.stop and found.finished == min(found.ticket, found.end):
                return
            if time.perf_counter() > until:
                raise TimeoutError(f"blocks still run {LIMIT_S:g} s after they were told to stop")

    def run(self, case: RoleCase, trials: int, end: float) -> tuple[RoleTrials, dict[str, object]]:
        """So many starts and stops, or as many as there is time for; and what was measured.

        Raises:
            TimeoutError: roles do not stop.
            ValueError: a block was lost or ran twice, LC's result differs, or nothing runs.
        """
        bench, number, made, fused = self._bound(case)
        launches = launches_of(bench.times[number])
        told: dict[str, object] = {
            "lc_us": round(bench.times[number], 2), "launches": launches, "ctas": made.grid[0], "threads": made.threads,
            "lc_schedule": str(bench.lc.sources[number].schedule), "turns": role_unit(case.kind, case.batch).turns,
        }  # fmt: skip
        outputs = bench.memory[len(bench.lc.inputs) :]
        bench.gpu.run([bench.alone[number]])
        wanted = [bench.gpu.keep(m) for m in outputs]
        for m in outputs:
            bench.gpu.restore(m, m.before)
        with ExitStack() as held:
            own = Stream()
            held.callback(own.close)
            chain = held.enter_context(own.graph(many([fused], launches)))
            roles = len(made.be) * made.grid[0]
            found = self._trials(lambda: chain(self.gpu.low.cuda_stream), roles, trials, end)
        for k, (m, kept) in enumerate(zip(outputs, wanted, strict=True)):
            if (at := bench.gpu.differs(m, kept)) >= 0:
                raise ValueError(f"{case}: latency-critical result {k} differs from byte {at} on")
        return found, told

    def _trials(self, chain: Callable[[], None], roles: int, trials: int, end: float) -> RoleTrials:
        gpu, api, chance, found = self.gpu, driver_api(), random.Random(1), RoleTrials()
        counter, word = gpu.counter.data_ptr(), self._gate.numpy()
        stop = counter + WorkCounter.offset("stop")
        was = replace(WorkCounter.start([GRID], MOST_BLOCKS), stop=1)
        streams.write(counter, was.pack())
        self._ran.zero_()
        torch.cuda.synchronize()
        before, after, first, last = (timed() for _ in range(4))
        raiser, low = api.CUstream(self._raiser.cuda_stream), api.CUstream(gpu.low.cuda_stream)
        gc.disable()
        try:
            for number in range(1, trials + 1):
                if time.perf_counter() > end and number > 1:
                    break
                word[:] = 0
                call(api.cuStreamWaitValue32, raiser, self._gate.data_ptr(), 1, 0)
                first.record(self._raiser)
                call(api.cuStreamWriteValue32, raiser, stop, 1, 0)
                call(api.cuStreamWriteValue32, low, stop, 0, 0)
                call(api.cuMemsetD32Async, self._ran.data_ptr() + 4 * CELLS, 0, 2, low)
                # all of it is on the stream before it begins: no event waits for the host
                call(api.cuStreamWaitValue32, low, self._gate.data_ptr() + 4, 1, 0)
                before.record(gpu.low)
                self._stamp.launch(gpu.low.cuda_stream)
                after.record(gpu.low)
                chain()
                last.record(gpu.low)
                word[1] = 1
                until = time.perf_counter() + chance.uniform(*WORKS_US) / 1e6
                while time.perf_counter() < until:
                    pass
                said = time.perf_counter()
                word[0] = 1
                self._settled(said + LIMIT_S)
                host_us = (time.perf_counter() - said) * 1e6
                wait(last)
                torch.cuda.synchronize()
                now = WorkCounter.unpack(streams.read_back(counter, BYTES))
                if wrong := exact(was, now):
                    raise ValueError(f"trial {number}: {wrong}")
                was = now
                ended_ns, now_ns = (int(x.cpu().view(torch.int64)) for x in (self._ran[CELLS:], self._now))
                found.worked_us += max(0.0, (ended_ns - now_ns) / 1e3) * roles
                gap = apart_us(after, first)
                if gap <= 0.0 or apart_us(first, last) <= 0.0:
                    found.missed += 1
                    continue
                found.us.append(latency_us(ended_ns, now_ns, gap))
                found.host_us.append(host_us)
                found.clock_us.append(apart_us(before, after))
        finally:
            gc.enable()
            word[:] = 1
            call(api.cuStreamWriteValue32, api.CUstream(gpu.copies.cuda_stream), stop, 1, 0)
            torch.cuda.synchronize()
        found.finished = was.finished
        if wrong := lost_or_doubled(self._ran[:CELLS].tolist(), found.finished):
            raise ValueError(wrong)
        if not found.us:
            raise ValueError(f"no chain ran when it was told to stop: {found.missed} trials")
        return found


def compile_all(loader: Loader, cases: Sequence[RoleCase], facts: GpuFacts) -> dict[RoleCase, str]:
    """Compile LC alone and fused kernels of all cases on all cores; what one of each takes, or why none runs."""
    sources = {name: lc_of(name, facts, HOSTS, ROOM_BYTES, contents=False) for name in {c.lc: c for c in cases}}
    alone = [
        m
        for lc in sources.values()
        for m in (*(solo(lc.launches(k)[0], "lc") for k in range(len(lc.sources))), *lc.others)
    ]
    made = [
        (case, source, one)
        for case in cases
        for source in sources[case.lc].sources
        for one in fused_of(role_unit(case.kind, case.batch), source, facts)[:FIRST]
    ]
    texts = [(m.text, m.flags) for m in alone] + [(m.text, m.flags) for _, _, m in made]
    loader.compile_all(texts)
    found: dict[RoleCase, str] = {}
    runs: set[RoleCase] = set()
    for case, source, one in made:
        assert one.shape is not None  # an LC role is in it
        wrong = refusal(loader, source, Candidate(0, one.shape, one), facts)
        if not wrong and case not in runs:
            runs.add(case)
            found[case] = str(loader.compiled(one.text, one.flags).of(one.entry))
        found.setdefault(case, wrong)
    return found
