"""The process that may die: builds references, verifies and times kernels, reports each step before taking it.

Started as `python -m weft.tune.worker REQUEST_FD ANSWER_FD BOARD_FD` in a process group of its own. Tensors never
cross the pipes: a problem, a kernel, the path of its shared object and a seed do. What a kernel prints goes to a third
pipe that the parent drains and caps. The order per problem: reference, then verify each kernel, then time all that
passed in interleaved rounds, then verify the last timed outputs. Before each step the worker writes which kernel it
is about to run on a *board*, a page of shared memory, so that the parent knows whom to blame for a crash or a hang.
(A message per step would wake the parent in the middle of a sample, on one of the cores being timed.)

Limits set on the process: no core file, address space to what the parent allows, 256 open files.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import BinaryIO, Protocol, cast, final

import torch

from weft.device.heap import keep_freed_memory, trim_heap
from weft.errors import DeviceError, WeftError
from weft.ir.text import print_graph
from weft.ir.types import Array
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json, kernel_from_json
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, Kernel, KernelSource
from weft.tune.inputs import InputSet
from weft.tune.messages import BOARD, BOARD_BYTES, GarbageError, Message, body_size, decode, encode
from weft.tune.timing import TimingPolicy, preemptions, sets_needed, time_kernels
from weft.tune.verify import (
    NO_TABLES,
    POISONS,
    Arena,
    Binding,
    Check,
    Clock,
    Finding,
    LibrarySubject,
    NativeSubject,
    Reference,
    Subject,
    at_the_fence,
    classify,
    reference_of,
    verify,
    verify_after,
)
from weft.tune.wire import arrays_from_json, problem_from_json

SHARED_BYTES = 1 << 30
"""References of the last graphs that are kept: problems that differ in formats alone share one."""
KEPT_FROM = 4 << 30
"""Bytes that this process may add from which on it keeps what it frees, see `device.heap`."""
SLOW_FACTOR, SLOW_FLOOR_S = 3.0, 30e-6
"""A verified kernel whose shortest call is so many times that of the fastest so far is not timed."""
FENCED_S = 0.1
"""A kernel whose call takes longer is not run beside memory that cannot be touched."""
MAX_TIMED_BYTES = 2 << 30
"""Outputs of all kernels of a trial together; above it there is one set of buffers only."""


class TimeUpError(Exception):
    """The deadline of a trial passed while it ran."""


class Channel(Protocol):
    """Where a trial's events go."""

    def at(self, kernel: int) -> None:
        """Note which kernel runs next; -1: none, it is our own code."""
        ...

    def say(self, **message: Json) -> None:
        """One event."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What running a kernel needs from the world; tests script it."""

    make: Callable[[Problem, Kernel, str], Subject]
    clock: Clock
    """Nanoseconds."""
    preempted: Callable[[], int]


@final
@dataclass(slots=True)
class PipeChannel:
    """The pipes and the board that the parent handed down."""

    requests: BinaryIO
    answers: BinaryIO
    board: mmap.mmap

    def read(self) -> Message | None:
        """The next request; None when the parent is gone."""
        header = self.requests.read(4)
        if len(header) < 4:
            return None
        return decode(self.requests.read(body_size(header)))

    def at(self, kernel: int) -> None:
        """Note on the board which kernel runs next; -1: none, it is our own code."""
        BOARD.pack_into(self.board, 0, kernel)

    def say(self, **message: Json) -> None:
        """One event."""
        self.answers.write(encode(message))
        self.answers.flush()


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What one `trial` message asks for."""

    problem: Problem
    kernels: tuple[tuple[int, Json, str], ...]
    """Number, kernel and path of the shared object (empty for a library call)."""
    always: tuple[int, ...]
    seed: int
    bound_us: float
    l2_bytes: int
    policy: TimingPolicy
    time: bool
    left_s: float
    """After so many seconds no further kernel is looked at; those have no verdict."""
    finite: bool = False
    """Kernels are verified on finite inputs alone."""
    tables: Mapping[int, Array] = field(default_factory=dict)
    """By position, weights that are not drawn."""
    shaken: Mapping[int, str] = field(default_factory=dict)
    """By number, the object of a kernel's other form, which is verified besides."""

    @classmethod
    def from_message(cls, m: Message) -> TrialRequest:
        """Read a message; KeyError, TypeError or ValueError for one that is not such a request."""
        kernels = cast("Sequence[tuple[int, Json, str]]", m["kernels"])
        policy = cast("Mapping[str, float]", m["policy"])
        problem = problem_from_json(m["problem"])
        return cls(
            problem=problem,
            kernels=tuple((int(k), kernel, str(path)) for k, kernel, path in kernels),
            always=tuple(cast("Sequence[int]", m["always"])),
            seed=int(cast("int", m["seed"])),
            bound_us=float(cast("float", m["bound_us"])),
            l2_bytes=int(cast("int", m["l2_bytes"])),
            policy=replace(TimingPolicy(), **policy),  # type: ignore[arg-type]
            time=bool(m["time"]),
            left_s=float(cast("float", m["left_s"])),
            finite=bool(m.get("finite", False)),
            tables=arrays_from_json(problem, m.get("tables", {})),
            shaken={int(k): str(v) for k, v in cast("Mapping[str, str]", m.get("shaken", {})).items()},
        )


def make_subject(problem: Problem, kernel: Kernel, path: str) -> Subject:
    """A kernel that can be bound: a compiled object, or a library call."""
    if isinstance(kernel, KernelSource):
        return NativeSubject(problem, kernel, path)
    if isinstance(kernel, CudaSource):
        raise DeviceError(problem="a CUDA kernel was sent to a worker for the CPU")
    return LibrarySubject(problem, kernel)


REAL = Machine(make_subject, perf_counter_ns, preemptions)


ReferenceKey = tuple[str, int, bool, tuple[tuple[int, bytes], ...]]


def reference_key(problem: Problem, seed: int, tables: Mapping[int, Array]) -> ReferenceKey:
    """Problems with equal ones share a reference but for its layout."""
    values = tuple((k, tables[k].tobytes()) for k in sorted(tables))
    return print_graph(problem.graph), seed, problem.finite, values


@final
class References:
    """The references of the graphs that were asked for last, up to `SHARED_BYTES` in all."""

    def __init__(self) -> None:
        self._kept: dict[ReferenceKey, tuple[Reference, int]] = {}
        """With their bytes."""

    def of(
        self, problem: Problem, seed: int, check: Check = lambda: None, tables: Mapping[int, Array] = NO_TABLES
    ) -> Reference:
        """Row-major; shared by all problems with this graph. What `check` raises ends making it."""
        key = reference_key(problem, seed, tables)
        found = self._kept.pop(key, None)
        if found is None:
            made = reference_of(problem.graph, seed=seed, finite=problem.finite, check=check, tables=tables)
            found = made, made.nbytes
        self._kept[key] = found
        while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > SHARED_BYTES:
            del self._kept[next(iter(self._kept))]
        return found[0]


def run_trial(request: TrialRequest, say: Channel, machine: Machine, references: References | None = None) -> None:
    """Answer one `trial` request: events `verifying`, `verdict` or `skipped`, and a last `done`.

    What is going on when the time is up ends by itself, so that the process stays for what comes after.
    """
    say.at(-1)
    end_ns = machine.clock() + request.left_s * 1e9
    heard = _Listening(say, {number for number, _, _ in request.kernels})

    def check() -> None:
        if machine.clock() > end_ns:
            raise TimeUpError

    try:
        _run(request, heard, machine, references or References(), check)
    except TimeUpError:
        for number in sorted(heard.open):
            say.say(event="skipped", kernel=number)
    say.at(-1)
    say.say(event="done")


@final
@dataclass(frozen=True, slots=True)
class _Listening:
    """A channel, and the kernels that were not given a verdict on it yet."""

    inner: Channel
    open: set[int]

    def at(self, kernel: int) -> None:
        """See `Channel`."""
        self.inner.at(kernel)

    def say(self, **message: Json) -> None:
        """See `Channel`."""
        if message["event"] == "verdict":
            self.open.discard(cast("int", message["kernel"]))
        self.inner.say(**message)


def _run(request: TrialRequest, say: Channel, machine: Machine, references: References, check: Check) -> None:
    """Verify all kernels, then time those that passed.

    Raises:
        TimeUpError: `check` says so.
    """
    reference = references.of(request.problem, request.seed, check, request.tables).laid_out(request.problem)
    if request.finite:
        reference = reference.finite()
    passed: dict[int, _Passed] = {}
    arenas: dict[InputSet, Arena] = {}
    fastest = float("inf")
    for number, encoded, path in request.kernels:
        check()
        say.at(number)
        say.say(event="verifying", kernel=number)
        slow_s = math.inf if number in request.always else max(SLOW_FLOOR_S, SLOW_FACTOR * fastest)
        try:
            kernel = kernel_from_json(encoded)
            subject = machine.make(request.problem, kernel, path)
            held = reference.of_kernel(kernel)
            with torch.inference_mode():
                result = verify(request.problem, subject, held, arenas, slow_s=slow_s, clock=machine.clock, check=check)
                finding = result.finding
                if finding.verdict is Verdict.OK and result.first_call_s < FENCED_S:
                    finding = at_the_fence(request.problem, subject, held, result.outputs, check)
        except (WeftError, RuntimeError, MemoryError, TypeError, ValueError, IndexError, OSError) as error:
            arenas.clear()
            _verdict(say, number, classify(error))
            continue  # the next kernel gets clean buffers
        if finding.verdict is not Verdict.OK:
            _verdict(say, number, finding)
            continue  # rejected
        if result.first_call_s * 1e6 >= 0.9 * request.bound_us:  # what is impossible drives nobody out
            fastest = min(fastest, result.first_call_s)
        passed[number] = _Passed(subject, result.outputs, result.finding)
    say.at(-1)
    arenas.clear()
    if request.time and passed:
        _time(request, reference, passed, say, machine, check)
    else:
        for number, p in passed.items():
            _verdict(say, number, p.finding)


@dataclass(slots=True)
class _Passed:
    subject: Subject
    outputs: tuple[torch.Tensor, ...]
    finding: Finding
    arenas: tuple[Arena, ...] = ()
    bindings: tuple[Binding, ...] = ()


def _verdict(say: Channel, number: int, finding: Finding, samples: Sequence[float] = ()) -> None:
    ratio = finding.ratio if finding.ratio < 1e300 else 1e300  # infinities have no JSON form
    say.say(
        event="verdict",
        kernel=number,
        verdict=finding.verdict.value,
        error=finding.error[:4000],
        ratio=ratio,
        samples=list(samples),
    )


def _time(
    request: TrialRequest,
    reference: Reference,
    passed: dict[int, _Passed],
    say: Channel,
    machine: Machine,
    check: Check,
) -> None:
    graph = request.problem.graph
    inputs = sum(graph.type_of(i).nbytes for i in graph.inputs)
    outputs = sum(graph.type_of(i).nbytes for i in graph.outputs)
    sets = sets_needed(request.policy, inputs + outputs, request.l2_bytes)
    if sets * (inputs + outputs * len(passed)) > MAX_TIMED_BYTES:
        sets = 1
    shared = [Arena(request.problem, reference.timed.inputs) for _ in range(sets)]
    calls = {}
    for number, p in list(passed.items()):
        say.at(number)
        try:
            p.arenas = tuple(Arena(request.problem, (), inputs=s) for s in shared)
            for arena in p.arenas:
                arena.poison(POISONS[0])  # no call that is timed is the first to touch its outputs
            p.bindings = tuple(p.subject.bind(arena, POISONS[0]) for arena in p.arenas)
        except (WeftError, RuntimeError, MemoryError, TypeError, ValueError) as error:
            _verdict(say, number, classify(error))
            del passed[number]
            continue  # it cannot be bound a second time
        calls[number] = [b.call for b in p.bindings]

    def before(number: int) -> None:
        check()
        say.at(number)

    with torch.inference_mode():
        timed = time_kernels(
            calls,
            policy=request.policy,
            always=request.always,
            seed=request.seed,
            before=before,
            clock=machine.clock,
            preempted=machine.preempted,
        )
    for number, p in passed.items():
        say.at(number)
        finding = p.finding
        used = min(timed.calls[number], sets)
        for arena, binding in zip(p.arenas[:used], p.bindings[:used], strict=True):
            after = verify_after(arena, binding, reference, p.outputs, deterministic=p.subject.deterministic)
            if after.verdict is not Verdict.OK:
                finding = after
                break
        samples = timed.samples_us[number]
        median = sorted(samples)[len(samples) // 2]
        if finding.verdict is Verdict.OK and min(samples) <= 0:
            finding = Finding(Verdict.IMPOSSIBLE, "the clock went backwards", finding.ratio)
        if finding.verdict is Verdict.OK and median < 0.9 * request.bound_us:
            text = f"{median:.3f} us is below the roofline's {request.bound_us:.3f} us"
            finding = Finding(Verdict.IMPOSSIBLE, text, finding.ratio)
        _verdict(say, number, finding, samples if finding.verdict is Verdict.OK else ())


def canary(object_path: str, entry: str) -> str:
    """Run sums with a known answer through torch and, if given, a compiled kernel; a text says what is wrong."""
    x = torch.arange(4096, dtype=torch.float32)
    if float((x * 2 + 1).sum()) != 4096.0 * 4096.0:
        return "torch adds wrongly"
    a = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    if float((a @ a).sum()) != float((a.double() @ a.double()).sum()):
        return "torch multiplies wrongly"
    if object_path:
        try:
            function = ctypes.CDLL(object_path)[entry]
        except (OSError, AttributeError) as error:
            return f"the canary kernel does not load: {error}"
        out = torch.zeros(4096)
        function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_long(4096))
        if not torch.equal(out, x * 2 + 1):
            return "a compiled kernel computes wrongly"
    return ""


def _limit(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    if max_bytes > 0:
        most = _address_space() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_space() -> int:
    """Bytes of this process's."""
    with Path("/proc/self/statm").open() as stream:
        return int(stream.read().split()[0]) * resource.getpagesize()


def kept_within(max_bytes: int) -> int:
    """Keep what is freed, where this process may add enough; the address space above which it is given back.

    Free pieces may fit nothing that comes. 0, of `max_bytes`: there is no limit; of the result: nothing is given back.
    """
    if 0 < max_bytes < KEPT_FROM:
        return 0
    keep_freed_memory()
    return _address_space() + max_bytes // 2 if max_bytes else 0


def serve(channel: PipeChannel) -> None:
    """Answer requests until the parent says `bye` or goes away."""
    references, most = References(), 0
    while (message := channel.read()) is not None:
        match message.get("op"):
            case "hello":
                torch.set_num_threads(int(cast("int", message["threads"])))
                most = kept_within(int(cast("int", message["max_bytes"])))
                _limit(int(cast("int", message["max_bytes"])))
                gc.freeze()  # what is loaded stays: walking it after every trial took longer than most trials
                channel.say(event="ready", pid=os.getpid(), torch=torch.__version__)
            case "canary":
                channel.say(event="canary", problem=canary(str(message["object"]), str(message["entry"])))
            case "trial":
                run_trial(TrialRequest.from_message(message), channel, REAL, references)
                gc.collect()
                if 0 < most < _address_space():
                    references = References()
                    trim_heap()
            case "rest":
                references = References()
                trim_heap()
            case "bye":
                return
            case other:
                raise GarbageError(f"request {other!r}")


def main() -> None:
    """Entry point of the process."""
    requests, answers, board = (int(x) for x in sys.argv[1:4])
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink, mmap.mmap(board, BOARD_BYTES) as page:
        serve(PipeChannel(source, sink, page))


if __name__ == "__main__":
    main()
