"""`weft fuse --search`: shapes of a pair verified and timed on the GPU of this machine, and the best of them taken.

Shapes are compiled here, under limits; a process of its own that may die runs them (`pair_worker`). The search is that
of `weft.tune.pairs.study`: each measurement is kept in the tuning database at once, kernels that are wrong or that
ended their process among them, and so is the verdict `do not fuse`. When the seconds are spent, the best so far is
taken, and the next search goes on from there.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast, final

from weft.colocate.fuse import (
    ENTRY,
    REST,
    Known,
    Pair,
    architectures,
    by_itself,
    compile_pair,
    constant_names,
    judged,
    ordered,
    read_sides,
)
from weft.colocate.pair_process import LostError, PairProcess
from weft.colocate.pair_worker import drain_of, source_of_ours, text_digest
from weft.colocate.side import Buffer, Side
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.errors import DeviceError, KernelDeclinedError, NoGpuError, OptionError
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import fuse, shapes
from weft.generate.cuda.role.persistent import persistent
from weft.ir.declined import Declined
from weft.kernels.codec import Json
from weft.kernels.colocation import FusedSource, FusionShape
from weft.kernels.dataclass_json import to_json
from weft.kernels.pairs import PairKey, PairRecord, PairSummary
from weft.tune.cuda_pair import PairTimes
from weft.tune.cuda_site import driver_version
from weft.tune.keys import canonical, digest
from weft.tune.pairs import Arm, fused_digest, known, measuring, refused, study, summed_up, timed
from weft.tune.store import Database

SECONDS = 120.0
"""Of a search."""
MOST_SECONDS = 86_400.0
MOST_ARMS = 24
"""Shapes that are looked at."""
COMPILERS = 8
"""Processes of the compiler at once, at most."""
MEASURING_PARTS = ("colocate/contents.py", "colocate/pair_machine.py", "colocate/pair_worker.py")
"""Their sources decide what these times mean, besides those of `weft.tune.pairs`."""
_EXACT = 90


class Prober(Protocol):
    """What runs kernels: `PairProcess`."""

    def ask(self, request: Mapping[str, Json]) -> Mapping[str, Any]:
        """What became of a request. LostError: the process died or hung over it."""

    def close(self) -> None:
        """End it."""


class TimeUpError(Exception):
    """The seconds of a search are spent."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape of the pair."""

    shape: FusionShape
    fused: FusedSource


@final
@dataclass(slots=True)
class Code:
    """Compiles kernels side by side into a folder; each once."""

    folder: Path
    arch: str
    pool: ThreadPoolExecutor
    _under_way: dict[ConfinedJob, Future[list[ConfinedResult | Declined]]] = field(default_factory=dict)

    def begin(self, text: str, names: Sequence[str]) -> ConfinedJob:
        """Begin with a text, if nobody has."""
        job = ConfinedJob(text, self.arch, tuple(names))
        if job not in self._under_way:
            self._under_way[job] = self.pool.submit(compile_confined, [job])
        return job

    def of(self, job: ConfinedJob) -> ConfinedResult | Declined:
        """What became of it."""
        (found,) = self._under_way[job].result()
        return found

    def path(self, result: ConfinedResult) -> Path:
        """Its machine code as a file."""
        at = self.folder / f"{hashlib.sha256(result.code).hexdigest()}.cubin"
        if not at.exists():
            at.write_bytes(result.code)
        return at


def gpu_here() -> GpuFacts:
    """The GPU of this machine.

    Raises:
        NoGpuError: there is none, or none that `weft fuse` compiles for [W301].
    """
    try:
        facts = gpu_facts(None, calibrate=False)
    except DeviceError as error:
        raise NoGpuError(problem=f"no search without a GPU: {str(error).splitlines()[0]}") from None
    if facts.capability // 10 != 8 and facts.capability != _EXACT:
        raise NoGpuError(problem=f"no search: kernels are compiled for sm_80 and sm_90a, and {facts.name} runs neither")
    return facts


def search_pair(
    lc: Path,
    be: Sequence[Path],
    *,
    database: Database,
    ratio: float = 1.0,
    small: bool = False,
    changes: Mapping[str, Mapping[str, object]] | None = None,
    budget_s: float = SECONDS,
    gpu: Callable[[], GpuFacts] = gpu_here,
    start: Callable[[Mapping[str, Json]], Prober] = PairProcess,
    clock: Callable[[], float] = time.monotonic,
) -> Pair:
    """Measure the shapes of a pair, and take the best.

    Args:
        lc: kernel.toml of the latency-critical kernel.
        be: those of the stages of the best-effort job.
        database: where measurements are kept and looked up.
        ratio: as of `fuse_pair`; shapes are timed with as many blocks as launches come to.
        small: as of `fuse_pair`.
        changes: as of `fuse_pair`.
        budget_s: no measurement is begun after so many seconds.
        gpu: what says which GPU there is.
        start: makes what runs kernels, from what it is told first.
        clock: in seconds.

    Raises:
        KernelDeclinedError: the two cannot share a CTA, or it does not pay: `do not fuse` [W205].
        NoGpuError: there is no GPU here [W301].
        and as `fuse_pair`.
    """
    if not 0.0 < budget_s <= MOST_SECONDS:
        raise OptionError(option="--budget", problem=f"{budget_s} is outside of 0 to {MOST_SECONDS:g} seconds")
    began = clock()
    facts = gpu()
    sides = read_sides(lc, be, ratio=ratio, small=small, changes=changes)
    arch = "sm_90a" if facts.capability == _EXACT else "sm_80"
    if arch not in architectures(sides):
        raise KernelDeclinedError(reason=f"a kernel of the pair needs compute capability 9.0; this is {facts.name}")
    for one in sides:
        if one.state:
            told = f"{one.title} keeps {one.state[0]} from launch to launch: no two runs of it can be compared"
            raise KernelDeclinedError(reason=told)
    read = clock()
    search = _Search(sides, facts, arch, database, began + budget_s, clock)
    first: dict[str, Json] = {
        "kernels": [[one.name, str(path)] for one, path in zip(sides, [lc, *be], strict=True)],
        "small": small,
        "changes": cast("Json", {k: dict(v) for k, v in (changes or {}).items()}),
    }
    with _code(arch) as code:
        summary, complete = search.run(code, first, start)
    best = chosen(summary)
    pair = _taken(sides, best, facts, arch, ratio)
    pair.measured = told_of(summary, best, facts, complete=complete)
    pair.seconds = {"read": read - began, "search": clock() - read}
    return pair


@contextmanager
def _code(arch: str) -> Iterator[Code]:
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="weft-fuse-"))
        pool = ThreadPoolExecutor(max(1, min(COMPILERS, os.cpu_count() or 1)))
        held.callback(pool.shutdown, wait=True, cancel_futures=True)
        yield Code(Path(folder), arch, pool)


def candidates(sides: Sequence[Side], facts: GpuFacts, arch: str) -> list[Candidate]:
    """Shapes of a pair on a GPU, at most `MOST_ARMS`, those first that `fuse_pair` would try first."""
    sources = [s.source for s in sides[1:]]
    role = sides[0].source.roles[0]
    fills = math.prod(role.grid) < facts.sms and role.grid[1:] == (1, 1) and math.prod(role.cluster) == 1
    known_: Known = {}
    found: list[Candidate] = []
    for shape in ordered(sides, shapes(sides[0].source, sources, facts), arch, known_):
        if shape.fill_grid and not fills:
            continue  # LC has a CTA for each multiprocessor
        made = fuse(sides[0].source, sources, shape, entry=ENTRY, facts=facts)
        if isinstance(made, FusedSource):
            found.append(Candidate(shape, made))
        if len(found) == MOST_ARMS:
            break
    return found


def key_of(sides: Sequence[Side], fused: FusedSource, facts: GpuFacts, arch: str) -> PairKey:
    """Of a fused kernel: besides its text what buffers hold, and what measures."""
    nvrtc = find_nvrtc()
    compiler = "none" if isinstance(nvrtc, Declined) else f"{nvrtc.identity()} {arch}"
    job = digest("\0".join(side_digest(s) for s in sides[1:]))
    told = measuring(compiler, *MEASURING_PARTS)
    return PairKey(side_digest(sides[0]), job, fused_digest(fused), 0, facts.name, driver_version(), told)


def side_digest(one: Side) -> str:
    """SHA-256 of a kernel by itself and of what its buffers hold."""
    held = {f"{kind} {i}": _buffer(b) for (kind, i), b in one.memory.items()}
    held |= {c.name: _buffer(c.data) for c in one.constants}
    launch: Json = [one.entry, one.grid, one.block, one.shared_bytes]
    return digest("\0".join([solo(one.source, "w_alone").sha256, one.text, canonical(launch), canonical(held)]))


def _buffer(b: Buffer) -> Json:
    file = "" if b.file is None else hashlib.sha256(b.file.read_bytes()).hexdigest()
    return [b.name, b.nbytes, b.init, b.scalar, b.seed, b.low, b.high, b.rtol, file]


@final
class _Search:
    """Of one pair."""

    def __init__(
        self,
        sides: tuple[Side, ...],
        facts: GpuFacts,
        arch: str,
        database: Database,
        end: float,
        clock: Callable[[], float],
    ) -> None:
        self.sides, self.facts, self.arch = sides, facts, arch
        self.database, self.end, self.clock = database, end, clock
        self._jobs: dict[PairKey, ConfinedJob] = {}

    def run(
        self, code: Code, first: Mapping[str, Json], start: Callable[[Mapping[str, Json]], Prober]
    ) -> tuple[PairSummary, bool]:
        """What the database knows at the end, and whether all was measured."""
        every = candidates(self.sides, self.facts, self.arch)
        if not every:
            raise KernelDeclinedError(reason=f"{_names(self.sides)}: no shape holds both")
        arms = [self._arm(c) for c in every]
        there = {r.key for r in known(self.database)}
        names = (ENTRY, *constant_names(self.sides))
        for arm in arms:
            if arm.record.key not in there:
                self._jobs[arm.record.key] = code.begin(arm.source.text, names)
        prober: list[Prober] = []

        def measure(arm: Arm, rounds: int) -> PairRecord:
            self._in_time()
            if arm.record.key not in self._jobs:
                self._jobs[arm.record.key] = code.begin(arm.source.text, names)
            built = self._built(arm, code)
            if isinstance(built, str):
                return refused(arm.record, built)
            self._in_time()
            if not prober:
                prober.append(start(self._first(first, code)))
            path, symbols = built
            record = replace(arm.record, cubin=path.stem)
            request: dict[str, Json] = {
                "shape": to_json(arm.source.shape), "kernel": arm.record.key.kernel, "path": str(path),
                "symbols": list(symbols), "rounds": rounds,
            }  # fmt: skip
            try:
                found = prober[0].ask(request)
            except LostError as error:
                return refused(record, f"it ended the process that ran it: {error}")
            return _answered(record, found, sum(arm.source.stages), rounds)

        complete = True
        try:
            study(self.database, arms, measure)
        except TimeUpError:
            complete = False
        finally:
            for one in prober:
                one.close()
        keys = {a.record.key for a in arms}
        mine = [r for r in known(self.database) if r.key in keys]
        if not mine:
            problem = "was spent before one shape was measured"
            raise OptionError(option="--budget", problem=problem)
        (summary,) = summed_up(mine)
        return summary, complete

    def _in_time(self) -> None:
        if self.clock() > self.end:
            raise TimeUpError

    def _arm(self, one: Candidate) -> Arm:
        key = key_of(self.sides, one.fused, self.facts, self.arch)
        names = (self.sides[0].title, ", ".join(s.title for s in self.sides[1:]))
        return Arm(PairRecord(key, *names, self.sides[0].source.schedule, one.shape), one.fused)

    def _built(self, arm: Arm, code: Code) -> tuple[Path, tuple[str, ...]] | str:
        """Its machine code and the symbols of its constants; or why it is not run."""
        found = code.of(self._jobs[arm.record.key])
        if isinstance(found, Declined):
            return f"it does not compile: {(found.reason.splitlines() or ['no reason'])[0][:300]}"
        reason = judged(self.sides[0].source, arm.source, found, self.arch, self.facts)
        return reason if reason is not None else (code.path(found), found.names[1:])

    def _first(self, first: Mapping[str, Json], code: Code) -> dict[str, Json]:
        """What the process is told: the files, and machine code of the kernels by themselves and of the job alone."""
        rest = drain_of(self.sides, self.facts)
        if isinstance(rest, Declined):
            raise KernelDeclinedError(reason=rest.reason)
        jobs = {"rest": code.begin(rest.text, (REST, *constant_names(self.sides[1:])))}
        for s in self.sides:
            own = source_of_ours(s)
            if own is None:
                job = by_itself(s, self.arch)
                jobs[s.name] = code.begin(job.text, job.names)
            else:
                names = (own.launches[0].entry, *(f"&{c.symbol}" for c in s.constants))
                jobs[s.name] = code.begin(own.text, names)
        codes: dict[str, Json] = {}
        for name, job in jobs.items():
            found = code.of(job)
            if isinstance(found, Declined):
                raise KernelDeclinedError(reason=f"{name} does not compile: {found.reason[:300]}")
            codes[name] = [str(code.path(found)), *found.names]
        return {**first, "facts": self.facts.to_json(), "digest": text_digest(self.sides), "codes": codes}


def _names(sides: Sequence[Side]) -> str:
    return f"{sides[0].title} and {', '.join(s.title for s in sides[1:])}"


def _answered(record: PairRecord, found: Mapping[str, Any], total: int, rounds: int) -> PairRecord:
    if found.get("event") != "times":
        return refused(record, str(found.get("reason") or "an answer that is none"))
    try:
        times = PairTimes(
            int(found["launches"]), float(found["lc_us"]), float(found["be_us"]),
            {str(k): float(v) for k, v in found["peers"].items()}, float(found["fused_us"]), float(found["inside_us"]),
            float(found["idle_us"]), int(found["inside_blocks"]), bool(found["drained"]),
        )  # fmt: skip
        return timed(record, times, total, times.peers, rounds)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        return refused(record, f"times that are none: {error!r}")


def chosen(summary: PairSummary) -> PairRecord:
    """The best of a pair that pays.

    Raises:
        KernelDeclinedError: nothing does: `do not fuse` [W205].
    """
    if not summary.front:
        raise KernelDeclinedError(
            reason=f"do not fuse {summary.lc} with {summary.be} on {summary.gpu}: {summary.reason} "
            f"({summary.measured} kernels measured, {summary.declined} declined; `weft pairs` lists them; without "
            "--search the first that compiles is written)"
        )
    return max(summary.front, key=lambda r: r.ratio)


def told_of(summary: PairSummary, best: PairRecord, facts: GpuFacts, *, complete: bool) -> dict[str, object]:
    """What a search came to, for `fused.json`."""
    peer, us = best.best_peer
    return {
        "gpu": facts.name, "driver": summary.driver, "ratio": round(best.ratio, 4), "peer": peer,
        "peer_us": round(us, 2), "slowdown": round(best.slowdown, 4), "fraction": round(best.fraction, 4),
        "rounds": best.rounds, "launches": best.launches, "measured": summary.measured,
        "declined": summary.declined, "complete": complete,
    }  # fmt: skip


def _taken(sides: tuple[Side, ...], best: PairRecord, facts: GpuFacts, arch: str, ratio: float) -> Pair:
    """The pair in the shape that was chosen: for this GPU, and for the other architecture if it fits there."""
    sources = [s.source for s in sides[1:]]
    assert best.shape is not None  # of what was measured
    fused = fuse(sides[0].source, sources, best.shape, entry=ENTRY, facts=facts)
    rest = persistent(sources, ctas=facts.sms, entry=REST, facts=facts)
    assert isinstance(fused, FusedSource)  # it was run
    assert isinstance(rest, FusedSource)
    limit = max(1, round(ratio * sum(fused.stages)))
    pair = Pair(sides, fused, rest, ratio, limit, max(1, math.ceil(ratio)))
    code: Known = {}
    if (reason := compile_pair(pair, [arch], code)) is not None:
        raise KernelDeclinedError(reason=f"{_names(sides)}: {reason}")
    for other in ("sm_80", "sm_90a"):
        if other == arch:
            continue
        if other not in architectures(sides):
            pair.declined[other] = "a kernel of the pair uses what GPUs from sm_90a on have alone"
        elif (reason := compile_pair(pair, ["sm_80", "sm_90a"], code)) is not None:
            pair.declined[other] = reason
    return pair
