"""A best-effort job of kernels in the memory of a GPU, in every form in which a scheduler runs it.

    job = KernelJob(read_job(path), path.parent, facts=facts, held=held)
    beside = job.co_runner(facts.sms)                       # CoRunner, or Declined
    job.begin(low)                                          # the job goes on where it was
    beside.launch(low)
    job.snapshot(low)                                       # stands behind the launch
    job.stop(copies)                                        # raised without a multiprocessor; `low` is waited for ...
    job.read()
    job.run_pass(low)                                       # or its kernels as they stand in their files, once
    save_progress(file, job.progress())

All forms share buffers and one work counter (`weft.kernels.colocation.WorkCounter`). Nothing here waits for a stream: a
call that takes a stream puts a few words or a copy on it, in its order. The host knows of the device what the last
`read` said; blocks are numbered through all passes there without end, and modulo 2^32 in the counter.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol, final

from weft.colocate.contents import contents
from weft.colocate.fuse import by_itself, constant_names
from weft.colocate.job import JobError, digest
from weft.colocate.pair_machine import GUARD, first_difference
from weft.colocate.pair_worker import Loaded, bound_plain, source_of_ours
from weft.colocate.side import Buffer, Constant, Side, shared_memory, side
from weft.device.cuda import streams
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.device.cuda.dispatch import Queue
from weft.device.cuda.driver import Function, Module, encode_tensor_map
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.occupancy import occupancy
from weft.device.cuda.resident import prefer_shared
from weft.device.cuda.resources import MAX_SPILL_BYTES, Resources, gate
from weft.device.cuda.streams import device_memory
from weft.errors import DeviceError, KernelDeclinedError
from weft.generate.bind import Addresses, BoundCuda, CudaDriver, Encode, Prepared
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda.foreign.read import Compile
from weft.generate.cuda.role.fused import stages_of
from weft.generate.cuda.role.persistent import needs, persistent
from weft.ir.declined import Declined
from weft.kernels.colocation import BYTES, FusedSource, WorkCounter
from weft.kernels.scheduling import JobProgress, JobSpec
from weft.sm_budget import SmBudget

MOST_AHEAD = (1 << 31) - 1
"""Blocks that a limit lies ahead, at most: numbers of the counter are compared by the sign of their difference."""
NEAR = 1 << 30
"""Blocks before a limit at which it is raised."""
WHOLE = 256
"""Of a duty: all of the time."""
ENTRY = "w_co_runner"
PASSES_AT, KEPT_AT, PLACED_BYTES = BYTES, BYTES + 4, BYTES + 16
"""Behind the counter lie two more words, the plain passes that have ended and a limit that fused steps lower for a
while (`weft.colocate.whole_kernels`); and what all of it takes."""
_MASK = (1 << 32) - 1


# -- the device


class Pinned(Protocol):
    """A copy of device memory in memory of the host that a copy engine reaches."""

    def copy(self, stream: int) -> None:
        """Copy anew, in the order of a stream."""
        ...

    def read(self) -> bytes:
        """The last copy that has happened; before any the content when this was made."""
        ...


class JobDevice(Protocol):
    """What a job needs of a GPU. Addresses and streams are plain integers."""

    @property
    def encode(self) -> Encode:
        """Encodes tensor maps."""
        ...

    def room(self, size: int) -> int:
        """Address of so many bytes, aligned to 256."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device, and be done: what is launched later on any stream finds it there."""
        ...

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        ...

    def load(self, path: Path, *, prefer_shared: bool = True) -> Loaded:
        """A cubin; its functions leave as much of a multiprocessor to shared memory as there is, or as they need."""
        ...

    def put(self, address: int, value: int, stream: int) -> None:
        """Write a word of 32 bits, in the order of a stream and without a multiprocessor."""
        ...

    def recorded(self, work: Prepared, stream: int) -> int:
        """A graph of what is put on an idle stream: its handle, for `Queue.launch`."""
        ...

    def through(self, queue: Queue) -> None:
        """From now on words and copies are put on streams by it."""
        ...

    def pinned(self, address: int, size: int) -> Pinned:
        """A copy of so many bytes, which can be made anew."""
        ...

    def wait(self) -> None:
        """Until all that was put on streams has ended."""
        ...


@final
class CudaJobDevice:
    """The GPU of the current context. `held` gives back all that this takes."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        self._queue: Queue | None = None
        self.encode: Encode = encode_tensor_map

    def room(self, size: int) -> int:
        """See `JobDevice`. CudaError: there is not so much [W302]."""
        return self._held.enter_context(device_memory(size))

    def write(self, address: int, data: bytes) -> None:
        """See `JobDevice`. The copy of what is not pinned may return early, and streams of ours wait for no other."""
        with contextlib.suppress(DeviceError):  # of the queue: a job is told to stop whatever has failed
            self._drain()
        streams.write(address, data)
        api = driver_api()
        call(api.cuStreamSynchronize, api.CUstream(0))

    def read(self, address: int, size: int) -> bytes:
        """See `JobDevice`."""
        self._drain()
        return streams.read_back(address, size)

    def load(self, path: Path, *, prefer_shared: bool = True) -> Loaded:
        """See `JobDevice`. DeviceError: it cannot be loaded [W301, W302]."""
        module = Module(path)
        self._held.callback(module.unload)
        return _Preferring(module) if prefer_shared else module

    def put(self, address: int, value: int, stream: int) -> None:
        """See `JobDevice`."""
        if self._queue is not None:
            self._queue.write(address, value, stream)
        else:
            api = driver_api()
            call(api.cuStreamWriteValue32, api.CUstream(stream), address, value, 0)

    def recorded(self, work: Prepared, stream: int) -> int:
        """See `JobDevice`. CudaError: it cannot be captured [W302]."""
        self._drain()
        graph = streams.captured(work, stream)
        self._held.callback(streams.destroyed, graph)
        return graph

    def through(self, queue: Queue) -> None:
        """See `JobDevice`."""
        self._queue = queue

    def pinned(self, address: int, size: int) -> Pinned:
        """See `JobDevice`."""
        api = driver_api()
        place = int(call(api.cuMemHostAlloc, size, 0, detail=f"{size} bytes"))
        self._held.callback(call, api.cuMemFreeHost, place)
        ctypes.memmove(place, self.read(address, size), size)
        return _PinnedCopy(self, place, address, size)

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        """Copy device memory into pinned memory, in the order of a stream."""
        if self._queue is not None:
            self._queue.copy(place, address, size, stream)
        else:
            api = driver_api()
            call(api.cuMemcpyDtoHAsync, place, address, size, api.CUstream(stream))

    def wait(self) -> None:
        """See `JobDevice`. CudaError: a kernel failed [W302]."""
        self._drain()
        call(driver_api().cuCtxSynchronize)

    def _drain(self) -> None:
        if self._queue is not None:
            self._queue.drain()


@final
@dataclass(frozen=True, slots=True)
class _PinnedCopy:
    device: CudaJobDevice
    place: int
    address: int
    size: int

    def copy(self, stream: int) -> None:
        self.device.copy(self.place, self.address, self.size, stream)

    def read(self) -> bytes:
        return ctypes.string_at(self.place, self.size)


@final
@dataclass(frozen=True, slots=True)
class _Preferring:
    """A module whose functions prefer the carve-out of all that runs beside a co-runner."""

    module: Module

    def function(self, entry: str) -> Function:
        found = self.module.function(entry)
        prefer_shared(found)
        return found

    def variable(self, name: str) -> tuple[int, int]:
        return self.module.variable(name)


# -- numbers of blocks


def place_of(stages: Sequence[int], number: int) -> tuple[int, int, int]:
    """(passes, stage, blocks of the stage) before the block of that number; `stages` have so many blocks each."""
    ends = tuple(accumulate(stages))
    passes, rest = divmod(number, ends[-1])
    stage = bisect_right(ends, rest)
    return passes, stage, rest - (ends[stage] - stages[stage])


def counter_at(stages: Sequence[int], number: int) -> WorkCounter:
    """The work counter of a job in which all blocks before that number have ended and none may be drawn."""
    _, stage, blocks = place_of(stages, number)
    numbers = (number, number, number, number - blocks + stages[stage], stage, number)
    return WorkCounter(*(n & _MASK for n in numbers))


@final
class JobCount:
    """Where a job stands, as the host knows it: from what it put on streams, and from the counter as it was seen last.

    Two ways lead ahead. Blocks are drawn from the counter; a plain pass is all kernels once, and the counter does not
    move. Of a job of so many passes, those that were begun plainly are taken off the counter's limit.
    """

    def __init__(self, stages: Sequence[int], passes: int = 0, *, begin: int = 0, mixes: bool = True) -> None:
        """At the block `begin`.

        Args:
            stages: blocks of each, at least one in all.
            passes: of the whole job; 0: without end.
            begin: number of the first block, those of passes before it included.
            mixes: whether a plain pass may stand anywhere; otherwise only between two passes.
        """
        self.stages, self.passes, self.mixes = tuple(stages), passes, mixes
        self.pass_blocks = sum(stages)
        self.ended = self.before = begin
        """Blocks of the counter that have ended; and the number before which all have."""
        self.stands = True
        """Whether nothing draws: what drew last was seen to have ended."""
        self.limit = begin
        self.begun = self.passed = 0
        """Plain passes that were put on a stream, and those that have ended."""
        self._launch = 0
        """Number of the last `begin`."""

    @property
    def is_done(self) -> bool:
        """Whether all passes have ended."""
        return self.passes > 0 and self.ended >= (self.passes - self.passed) * self.pass_blocks

    @property
    def mark(self) -> int:
        """What `stop` is raised to: the number of the launch, so that a counter tells whose stop it holds; never 0."""
        return self._launch % _MASK + 1

    def begin(self, most_blocks: int = 0) -> dict[str, int]:
        """Let blocks be drawn from where the job stands; words of the counter, in the order in which they are written.

        Raises:
            ValueError: a number of blocks, and it is not known where the job stands.
        """
        if most_blocks and not self.stands:
            raise ValueError("a number of further blocks, of a job that was not seen to stand still")
        limit = min(self._most(), self.ended + most_blocks) if most_blocks else self._most()
        words: dict[str, int] = {}
        if limit < self.limit:  # what was granted and not drawn is forgotten: it may lie behind the limit
            words = {"end": self.ended, "ticket": self.ended}
        self.limit, self.stands = limit, False
        self._launch += 1
        return {name: number & _MASK for name, number in {**words, "limit": limit}.items()}

    @property
    def is_low(self) -> bool:
        """Whether what draws now would soon be at its limit, and more is left."""
        return self.limit - self.ended < NEAR and self.limit < self._most()

    def extend(self) -> int:
        """Raise the limit of what draws now to all that is left, as far as is known; the word."""
        self.limit = max(self.limit, self._most())
        return self.limit & _MASK

    def begin_pass(self) -> Declined | None:
        """Count a plain pass as begun; or why there is none now."""
        if not self.mixes and not (self.stands and self.ended % self.pass_blocks == 0):
            return Declined("a pass reads what the one before it wrote: that is to be seen to have ended")
        if self.passes and not self.stands:
            return Declined("how many blocks are left is not known: what draws them is to be seen to have ended")
        if self.passes and self.ended > (self.passes - self.begun - 1) * self.pass_blocks:
            return Declined("less than a whole pass is left")
        self.begun += 1
        return None

    def see(self, counter: WorkCounter, passed: int) -> None:
        """Take what a snapshot shows; what is older than what is known changes nothing."""
        passes = self.passed + (passed - self.passed & _MASK)
        self.passed = passes if passes <= self.begun else self.passed
        ended = self._number(counter.finished)
        if ended > self.limit:
            return
        self.ended = ended
        over = counter.stop == self.mark or ended == self.limit
        if self.stands or (over and counter.limit == self.limit & _MASK and drawn(counter) == counter.finished):
            self.stands, self.before = True, ended
        else:  # blocks end in any order, stages do not
            self.before = max(self.before, ended - place_of(self.stages, ended)[2])

    def check(self, counter: WorkCounter, passed: int) -> str:
        """Take what the counter shows when all that was launched has ended; or what is wrong with it."""
        ended = self._number(counter.finished)
        if drawn(counter) != counter.finished:
            return f"{drawn(counter)} blocks were drawn, {counter.finished} have ended (modulo 2^32)"
        if ended > (self.ended if self.stands else self.limit):
            between = f"{self.ended & _MASK} and {(self.ended if self.stands else self.limit) & _MASK}"
            return f"{counter.finished} blocks have ended: it cannot be but between {between} (modulo 2^32)"
        if passed != self.begun & _MASK:
            return f"{passed} plain passes have ended, {self.begun & _MASK} were begun (modulo 2^32)"
        want = counter_at(self.stages, ended)
        if (counter.stage, counter.open) != (want.stage, want.open):
            return f"stage {counter.stage} is open up to {counter.open}, not {want.stage} up to {want.open}"
        self.ended = self.before = ended
        self.stands, self.passed = True, self.begun
        return ""

    def progress(self) -> tuple[int, int, int]:
        """(passes, stage, blocks of the stage): all before have ended."""
        passes, stage, blocks = place_of(self.stages, self.before)
        return passes + self.passed, stage, blocks

    def _most(self) -> int:
        """The highest limit that is possible now."""
        ahead = self.ended + MOST_AHEAD
        return min(ahead, (self.passes - self.begun) * self.pass_blocks) if self.passes else ahead

    def _number(self, word: int) -> int:
        """The number that a word of the counter means, none before `ended`."""
        return self.ended + (word - self.ended & _MASK)


def drawn(counter: WorkCounter) -> int:
    """Blocks that were drawn, modulo 2^32: draws in vain, which leave `ticket` above `end`, are none."""
    return counter.end if counter.ticket - counter.end & _MASK < 1 << 31 else counter.ticket


# -- the job


@dataclass(frozen=True, slots=True)
class PlainKernel:
    """A stage's kernel as it stands in its file."""

    title: str
    """For people."""
    blocks: int
    launch: Prepared
    """Puts all of it on a stream."""


@dataclass(frozen=True, slots=True)
class CoRunner:
    """The job as a persistent kernel."""

    ctas: int
    threads: int
    """Of a CTA."""
    launch: Prepared
    """Puts it on a stream; it draws what `KernelJob.begin` allowed, and ends at the limit or at `stop`."""
    takes: SmBudget
    """Of a multiprocessor that holds its share of the CTAs."""
    chunk: int = 1
    """Blocks that a CTA draws at once, at most."""
    ahead: bool = False
    """Whether it draws the next chunk while the last block of one runs."""


@dataclass(frozen=True, slots=True)
class _Code:
    path: Path
    entry: str
    """As the compiler calls it."""
    symbols: tuple[str, ...]
    """Of constants, likewise."""
    resources: tuple[tuple[str, Resources], ...]
    warnings: tuple[str, ...]

    @property
    def own(self) -> Resources:
        """Of the entry."""
        return dict(self.resources)[self.entry]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A buffer between guards."""

    buffer: Buffer
    base: int

    @property
    def address(self) -> int:
        return self.base + len(GUARD)

    @property
    def guards(self) -> tuple[tuple[str, int], ...]:
        return (("in front of", self.base), ("behind", self.address + self.buffer.nbytes))


@final
class KernelJob:
    """A job of kind `kernels`, compiled, loaded and placed. Not for two threads at once."""

    def __init__(
        self,
        spec: JobSpec,
        folder: Path,
        *,
        facts: GpuFacts,
        held: ExitStack,
        device: Callable[[ExitStack], JobDevice] = CudaJobDevice,
        compiler: Compile = compile_confined,
        small: bool = False,
        progress: JobProgress | None = None,
    ) -> None:
        """Read the stages, compile and load their kernels, and fill buffers and constants.

        Args:
            spec: what `weft.colocate.job.read_job` gave.
            folder: where its job.toml lies; stages are looked for there and below.
            facts: the GPU.
            held: gives back all that this takes. At its end the job is told to stop first.
            device: makes what reaches the GPU, from what holds its memory; left out: that of the current context.
            compiler: of kernels; it gives the names that constants have in a cubin.
            small: with the `[small]` of each kernel.toml applied.
            progress: where the job goes on (`weft.colocate.job.resume`); left out: at its begin. Buffers hold what the
                files say in any case.

        Raises:
            JobError: another kind of job, a stage outside of the folder, more memory than it may have, or the progress
                of another job [W018].
            ManifestError: a kernel.toml cannot be taken [W015].
            KernelDeclinedError: a kernel cannot be drawn by blocks, keeps a state of its own, is for another GPU, or
                does not compile [W205].
            OptionError: stages share a buffer, and its file is too small for one [W001].
            ArtifactError: a file with the content of a buffer cannot be read [W401].
            DeviceError: tree-sitter or NVRTC is not installed; the GPU has no room, or refuses a kernel [W301, W302].
        """
        self.name, self._facts, self._digest = spec.name, facts, digest(spec)
        self.compiler = compiler
        """Of all its kernels."""
        self.passes = spec.passes
        """That the job has; 0: it does not end."""
        self.sides = tuple(
            side(path, f"be{i}", facts, small=small, changes={}) for i, path in enumerate(_paths(spec, folder))
        )
        """The stages, in order."""
        self.stages = _stage_blocks(self.sides, facts)
        """Blocks of each."""
        self.pass_blocks = sum(self.stages)
        buffers, means = shared_memory(self.sides)
        _within(spec, buffers)
        self._begin = begin = _first_block(spec, self.stages, progress)
        self.mixes = len(self.sides) == 1 or not _carries(self.sides, means)
        """Whether a plain pass may stand anywhere: of several stages, no pass reads what the one before it wrote."""
        self._count = JobCount(self.stages, spec.passes, begin=begin, mixes=self.mixes)
        self.ends = mine = ExitStack()
        """What is given back with the job, the last that came first."""
        with ExitStack() as failed:
            failed.push(mine)
            self._folder = Path(mine.enter_context(tempfile.TemporaryDirectory(prefix="weft-job-")))
            codes = self._compiled([_plain_job(one, facts.arch) for one in self.sides])
            self._spills = max(c.own.spill_stores + c.own.spill_loads for c in codes)
            self.registers = max(c.own.registers for c in codes)
            """Of a thread of its kernels by themselves, at most."""
            self._device = device(mine)
            self._placed = {name: self._place(b) for name, b in buffers.items()}
            self.addresses = tuple(_addresses(one, self._placed, means) for one in self.sides)
            """Of the buffers of each stage."""
            self.counter = self._device.room(PLACED_BYTES)
            """Address of the work counter."""
            self._device.write(self.counter, counter_at(self.stages, begin).pack().ljust(PLACED_BYTES, b"\0"))
            self._seen = self._device.pinned(self.counter, PLACED_BYTES)
            self._plain = tuple(
                PlainKernel(one.title, blocks, self._alone(one, code, at))
                for one, blocks, code, at in zip(self.sides, self.stages, codes, self.addresses, strict=True)
            )
            self._loaded: dict[str, tuple[_Code, Loaded] | Declined] = {}
            """Co-runners by their texts."""
            self._co_runners: dict[tuple[int, int, int, bool, int], CoRunner | Declined] = {}
            self._throttle: dict[str, int] = {}
            """As it was put on a stream last; all launches that draw wait for each other."""
            self._queue: Queue | None = None
            self._graphs: dict[tuple[Prepared, int], int] = {}
            failed.pop_all()
        held.push(mine)
        held.callback(self._end)  # before all that is loaded later, too, is given back

    # -- forms

    @property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of each buffer, the guards around it with it."""
        return tuple((p.base, p.buffer.nbytes + 2 * len(GUARD)) for p in self._placed.values())

    def forget_results(self) -> None:
        """What its kernels write holds what it held at first. Nothing of the job may run; who calls has kept `memory`.

        Raises:
            DeviceError: the GPU refuses it [W302].
        """
        for placed in self._placed.values():
            if placed.buffer.written:
                self._device.write(placed.address, contents(placed.buffer))

    @property
    def exact(self) -> bool:
        """Whether its results have one value, bit by bit, in whatever order its blocks run."""
        return not any(p.buffer.rtol for p in self._placed.values())

    def plain(self) -> tuple[PlainKernel, ...]:
        """The kernel of each stage, to be launched whole: to be timed, say. Such a launch counts for nothing.

        A launch of the job itself is `run_pass`.
        """
        return self._plain

    def co_runner(
        self, ctas: int, *, threads: int = 0, chunk: int = 1, ahead: bool = False, counter: int = 0
    ) -> CoRunner | Declined:
        """The persistent kernel of so many CTAs, compiled, loaded and bound once; or why there is none.

        One that draws single blocks ends sooner at a stop, by the blocks that a CTA has drawn; all others share one
        text. Under a throttle all draw single blocks.

        Args:
            ctas: of the whole grid; all of them stay at once.
            threads: of a CTA; 0: as the largest block.
            chunk: blocks that a CTA draws at once, at most, and runs to their end.
            ahead: of chunks of several blocks the next one is drawn while the last block of one runs.
            counter: address of another work counter than the job's own, for measurements: what is drawn there counts
                for nothing.

        Raises:
            KernelDeclinedError: its constants are not those of the files [W205].
            DeviceError: the GPU refuses it [W301, W302].
        """
        source = persistent(
            [s.source for s in self.sides],
            ctas=ctas,
            entry=ENTRY,
            threads=threads,
            chunk=chunk,
            ahead=ahead,
            facts=self._facts,
        )
        if isinstance(source, Declined):
            return source
        key = ctas, source.threads, chunk, ahead, counter
        if key not in self._co_runners:
            found = self._bound(source, counter or self.counter)
            self._co_runners[key] = found if isinstance(found, Declined) else replace(found, chunk=chunk, ahead=ahead)
        return self._co_runners[key]

    def asked(self, source: FusedSource) -> ConfinedJob:
        """What the compiler is asked for of a kernel that has all stages as roles; see `with_roles`."""
        return ConfinedJob(source.text, self._facts.arch, (source.entry, *constant_names(self.sides)))

    def with_roles(self, source: FusedSource, result: ConfinedResult) -> BoundFused:
        """A kernel that has all stages as roles beside another's, once it is compiled: loaded, its constants filled.

        Its functions ask for no more shared memory than they need, as those of a plan.

        Raises:
            KernelDeclinedError: a constant is not there, or is too small [W205].
            DeviceError: the GPU refuses it [W301, W302].
        """
        module = self.module(result, prefer_shared=False)
        self.fill(module, result.names[1:])
        return BoundFused(source, self._cubin(result), driver=self._driver(module))

    def module(self, result: ConfinedResult, *, prefer_shared: bool = True) -> Loaded:
        """Machine code on the job's device, until the job is given back.

        Raises:
            DeviceError: the GPU refuses it [W301, W302].
        """
        return self._device.load(self._cubin(result), prefer_shared=prefer_shared)

    def fill(self, module: Loaded, symbols: Sequence[str]) -> None:
        """Fill the constants of all stages in one more kernel that has them as roles.

        `symbols`: as the compiler calls them, in the order of `weft.colocate.fuse.constant_names(sides)`.

        Raises:
            KernelDeclinedError: a constant is not there, or is too small [W205].
            DeviceError: the GPU does not answer [W302].
        """
        self._fill(module, symbols, [c for s in self.sides for c in s.constants])

    # -- in the order of a stream

    def begin(self, stream: int, *, duty: int = WHOLE, period_ns: int = 0, sms: int = 0, most_blocks: int = 0) -> None:
        """Let launches behind this on the stream draw blocks; the job goes on where it was.

        What drew before has ended, or does so before this on the stream; a `stop` of it has happened. The limit is all
        that the job may still run, at most `MOST_AHEAD` blocks from what the last `read` said.

        Args:
            stream: its handle.
            duty: 256ths of the time in which CTAs begin blocks; 0: a pause.
            period_ns: nanoseconds of the GPU's time of which all CTAs work in the same part; 0: each rests by itself.
            sms: multiprocessors with numbers below it work; 0: all do.
            most_blocks: so many and no more from here on (the rest of a stage, or of a pass); 0: all.

        Raises:
            ValueError: a number out of range; or `most_blocks` where the job was not seen to stand still.
            DeviceError: the GPU does not answer [W302].
        """
        if not 0 <= duty <= WHOLE or not 0 <= period_ns <= _MASK or not 0 <= sms <= _MASK or most_blocks < 0:
            raise ValueError(
                f"a duty of {duty}, a period of {period_ns} ns, {sms} multiprocessors, {most_blocks} blocks"
            )
        words = self._count.begin(most_blocks)
        throttle = {"duty": duty, "sms": sms, "period": period_ns}
        changed = {name: x for name, x in throttle.items() if self._throttle.get(name) != x}
        for name, value in {**words, **changed, "stop": 0}.items():
            self._device.put(self.counter + WorkCounter.offset(name), value, stream)
        self._throttle.update(throttle)

    def extend(self, stream: int) -> None:
        """Raise the limit of what draws now, as far as the last `read` allows.

        Jobs of more than `MOST_AHEAD` blocks end there if nobody does so. Nothing is put before it is near: fused steps
        may have lowered the word for a while.

        Raises:
            DeviceError: the GPU does not answer [W302].
        """
        if self._count.is_low:
            self._device.put(self.counter + WorkCounter.offset("limit"), self._count.extend(), stream)

    def stop(self, stream: int) -> None:
        """Raise `stop`: no further block is drawn. It is the number of the launch, by which `read` knows it.

        Put on its stream behind `begin`, and not left there when the next one happens: a late stop ends that launch.

        Raises:
            DeviceError: the GPU does not answer [W302].
        """
        self._device.put(self.counter + WorkCounter.offset("stop"), self._count.mark, stream)

    def run_pass(self, stream: int) -> Declined | None:
        """Put the kernels of all stages on a stream, once, and count that pass when it has ended; or why not.

        Nothing draws meanwhile. Whatever the counter has of another pass stays there. With a number of passes the job
        must have been seen to stand still; see `mixes`, too. All passes stand on one stream, or wait for each other.

        Raises:
            DeviceError: the GPU refuses it [W302].
        """
        if (declined := self._count.begin_pass()) is not None:
            return declined
        if self._queue is None:
            self.put_pass(stream)
        else:
            self._queue.launch(self.recorded(self.put_pass, stream), stream)
        self._device.put(self.counter + PASSES_AT, self._count.begun & _MASK, stream)
        return None

    def put_pass(self, stream: int) -> None:
        """Launch the kernels of all stages once, which counts for nothing."""
        for kernel in self._plain:
            kernel.launch(stream)

    # -- by a queue

    def through(self, queue: Queue) -> None:
        """From now on all that a stream is given for is put there by it."""
        self._queue = queue
        self._device.through(queue)

    def recorded(self, work: Prepared, stream: int) -> int:
        """A graph of a launch of this job (`put_pass`, `CoRunner.launch`), captured once on a stream that is idle then.

        Raises:
            DeviceError: the GPU refuses it [W302].
        """
        key = work, stream
        if key not in self._graphs:
            self._graphs[key] = self._device.recorded(work, stream)
        return self._graphs[key]

    def snapshot(self, stream: int) -> None:
        """Copy the counter to the host, by a copy engine. Behind a launch on its stream it shows where that stopped.

        Raises:
            DeviceError: the GPU does not answer [W302].
        """
        self._seen.copy(stream)

    # -- what is known

    def read(self) -> WorkCounter:
        """The last snapshot, which must have happened; before any it is the counter at the begin."""
        counter, passed = _unpacked(self._seen.read())
        self._count.see(counter, passed)
        return counter

    @property
    def ended_blocks(self) -> int:
        """Blocks that were drawn and have ended since this was made, by the last `read`."""
        return self._count.ended - self._begin

    @property
    def ended_passes(self) -> int:
        """Plain passes that have ended, by the last `read`."""
        return self._count.passed

    @property
    def stands(self) -> bool:
        """Whether what drew last was seen to have ended, with all its blocks."""
        return self._count.stands

    @property
    def is_done(self) -> bool:
        """Whether all passes have ended, by the last `read`."""
        return self._count.is_done

    def progress(self) -> JobProgress:
        """How far the job has come, by the last `read`: exact where it stands.

        While blocks are drawn those of the open stage do not count, since they end in any order.
        """
        return JobProgress(self._digest, *self._count.progress())

    def check(self) -> str:
        """What is wrong, when all that was launched has ended: an overwritten guard, a lost block; empty: nothing is.

        It reads the device itself, and counts as a `read`.

        Raises:
            DeviceError: the GPU does not answer [W302].
        """
        for name, placed in self._placed.items():
            for where, address in placed.guards:
                at = first_difference(self._device.read(address, len(GUARD)), GUARD)
                if at >= 0:
                    return f"byte {at} of the guard {where} buffer {name} was overwritten"
        return self._count.check(*_unpacked(self._device.read(self.counter, PLACED_BYTES)))

    # -- what it is made of

    def _compiled(self, jobs: Sequence[ConfinedJob]) -> list[_Code]:
        found = []
        for job, result in zip(jobs, self.compiler(jobs), strict=True):
            code = self._kept(job, result)
            if isinstance(code, Declined):
                raise KernelDeclinedError(reason=f"{job.names[0]}: {code.reason}")
            found.append(code)
        return found

    def _kept(self, job: ConfinedJob, result: ConfinedResult | Declined) -> _Code | Declined:
        if isinstance(result, Declined):
            first = next((x for x in result.reason.splitlines() if "error" in x), result.reason[:200])
            return Declined(f"it does not compile for {job.arch}: {first[:300]}")
        entry, *symbols = result.names
        return _Code(self._cubin(result), entry, tuple(symbols), result.resources, result.warnings)

    def _cubin(self, result: ConfinedResult) -> Path:
        path = self._folder / f"{hashlib.sha256(result.code).hexdigest()}.cubin"
        if not path.exists():
            path.write_bytes(result.code)
        return path

    def _place(self, buffer: Buffer) -> _Placed:
        found = _Placed(buffer, self._device.room(buffer.nbytes + 2 * len(GUARD)))
        self._device.write(found.address, contents(buffer))
        for _, address in found.guards:
            self._device.write(address, GUARD)
        return found

    def _alone(self, one: Side, code: _Code, at: Addresses) -> Prepared:
        module = self._device.load(code.path)  # its own: stages of one text may differ in their constants
        self._fill(module, code.symbols, one.constants)
        if (own := source_of_ours(one)) is not None:
            return BoundCuda(own, code.path, driver=self._driver(module)).prepare(at, dependent=False)
        return bound_plain(one, module, code.entry, at, self._device.encode)

    def _driver(self, module: Loaded) -> CudaDriver:
        """As what binds kernels takes it."""
        return CudaDriver(lambda path: module, self._device.encode)

    def _bound(self, source: FusedSource, counter: int) -> CoRunner | Declined:
        if source.text not in self._loaded:  # it is that of any number of CTAs and of blocks in a chunk
            self._loaded[source.text] = self._load(source)
        found = self._loaded[source.text]
        if isinstance(found, Declined):
            return found
        (code, module), facts = found, self._facts
        of_an_sm = math.ceil(source.grid[0] / facts.sms)
        fit = occupancy(facts, source.threads, source.shared_bytes + code.own.shared_bytes, code.own.registers)
        if of_an_sm > fit:
            return Declined(f"{source.grid[0]} CTAs of {source.threads} threads: {fit * facts.sms} stay at once")
        bound = BoundFused(source, code.path, driver=self._driver(module))
        launch = bound.prepare([Addresses(()), *self.addresses], counter)
        takes = needs(source, code.own.registers, code.own.shared_bytes, of_an_sm, facts)
        return CoRunner(source.grid[0], source.threads, launch, takes)

    def _load(self, source: FusedSource) -> tuple[_Code, Loaded] | Declined:
        """Compile a co-runner, load it and fill its constants; or why it is not run."""
        job = self.asked(source)
        code = self._kept(job, *self.compiler([job]))
        if isinstance(code, Declined):
            return code
        most = self._spills + MAX_SPILL_BYTES
        if (declined := gate(code.resources, code.warnings, source, self._facts, max_spill_bytes=most)) is not None:
            return declined
        module = self._device.load(code.path)
        self.fill(module, code.symbols)
        return code, module

    def _fill(self, module: Loaded, symbols: Sequence[str], constants: Sequence[Constant]) -> None:
        if len(symbols) != len(constants) or not all(symbols):
            raise KernelDeclinedError(reason=f"{self.name}: the compiler names other constants than the files fill")
        for symbol, constant in zip(symbols, constants, strict=True):
            address, size = module.variable(symbol)
            data = contents(constant.data)
            if len(data) > size:
                raise KernelDeclinedError(reason=f"{constant.name}: {size} bytes, and {len(data)} are to be filled in")
            self._device.write(address, data)

    def _end(self) -> None:
        with contextlib.suppress(DeviceError):  # of a GPU that answers no more nothing runs
            self._device.write(self.counter + WorkCounter.offset("stop"), struct.pack("<I", self._count.mark))
            self._device.wait()


def _bad(spec: JobSpec, key: str, problem: str, remedy: str) -> JobError:
    return JobError(where=spec.name, key=key, problem=problem, remedy=remedy)


def _paths(spec: JobSpec, folder: Path) -> list[Path]:
    """Of the stages."""
    if spec.kind != "kernels":
        raise _bad(spec, "kind", f"a job of kind {spec.kind!r}, not of kernels", "give a job of kind 'kernels'")
    root = folder.resolve()
    for stage in spec.stages:
        if not (folder / stage).resolve().is_relative_to(root):
            raise _bad(spec, "stages", f"{stage[:80]!r} leads out of the folder", "put it beside the job.toml")
    return [folder / stage for stage in spec.stages]


def _stage_blocks(sides: Sequence[Side], facts: GpuFacts) -> tuple[int, ...]:
    """Of each stage, if all can be drawn by blocks."""
    for one in sides:
        if one.state:
            reason = f"{one.title} keeps {one.state[0]} from launch to launch: each form of the job would have its own"
            raise KernelDeclinedError(reason=reason)
        if one.source.capability > facts.capability or (one.source.exact_arch and facts.capability != 90):
            raise KernelDeclinedError(reason=f"{one.title} needs compute capability 9.0; this is {facts.name}")
    found = stages_of([one.source for one in sides])
    if isinstance(found, Declined):
        raise KernelDeclinedError(reason=found.reason)
    return tuple(s.blocks for s in found)


def _within(spec: JobSpec, buffers: Mapping[str, Buffer]) -> None:
    """Refuse a job whose buffers take more than it may have."""
    size = sum(b.nbytes + 2 * len(GUARD) for b in buffers.values()) + PLACED_BYTES
    if spec.memory_bytes and size > spec.memory_bytes:
        raise _bad(spec, "memory", f"its buffers take {size} bytes, it may have {spec.memory_bytes}", "raise it")


def _first_block(spec: JobSpec, stages: Sequence[int], progress: JobProgress | None) -> int:
    """The number of the block with which the job goes on."""
    if progress is None:
        return 0
    if progress.job != digest(spec):
        raise _bad(spec, "progress", "it is of another job", "resume it with `weft.colocate.job.resume`")
    if progress.stage >= len(stages) or progress.blocks >= stages[progress.stage]:
        problem = f"block {progress.blocks} of stage {progress.stage}; the stages have {', '.join(map(str, stages))}"
        raise _bad(spec, "progress", problem, "remove the file to begin anew")
    number = progress.passes * sum(stages) + sum(stages[: progress.stage]) + progress.blocks
    if spec.passes and number > spec.passes * sum(stages):
        raise _bad(spec, "progress", f"it is behind the last of {spec.passes} passes", "remove the file to begin anew")
    return number


def _carries(sides: Sequence[Side], means: Mapping[tuple[str, str, int], str]) -> bool:
    """Whether a pass reads what one before it wrote: a buffer that is written, and was not written when it is read."""
    read: set[str] = set()
    written: set[str] = set()
    for one in sides:
        for (kind, i), buffer in one.memory.items():
            name = means[one.name, kind, i]
            if (kind == "in" or buffer.init != "poison") and name not in written:
                read.add(name)
        written |= {means[one.name, kind, i] for kind, i in one.memory if kind == "out"}
    return bool(read & written)


def _plain_job(one: Side, arch: str) -> ConfinedJob:
    """The kernel of a stage by itself; its names begin with its entry."""
    own = source_of_ours(one)
    if own is None:
        return by_itself(one, arch)
    return ConfinedJob(own.text, arch, (own.launches[0].entry, *(f"&{c.symbol}" for c in one.constants)))


def _addresses(one: Side, placed: Mapping[str, _Placed], means: Mapping[tuple[str, str, int], str]) -> Addresses:
    def of(kind: str) -> list[int]:
        count = sum(k == kind for k, _ in one.memory)
        return [placed[means[one.name, kind, i]].address for i in range(count)]

    return Addresses(of("in"), of("out"))


def _unpacked(data: bytes) -> tuple[WorkCounter, int]:
    """The counter, and the word behind it."""
    (passed,) = struct.unpack_from("<I", data, PASSES_AT)
    return WorkCounter.unpack(data[:BYTES]), passed
