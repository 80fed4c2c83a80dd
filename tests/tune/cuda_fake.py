"""A GPU that is none: the worker's own code over host memory, kernels as functions of addresses, scripted time.

`FakeGpu` and `fake_driver` stand for torch's CUDA and the driver; everything between them (binding, buffers, guards,
references, comparison, rounds, the protocol with the tuner) is the real thing.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from weft.generate.bind import CudaDriver
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import (
    CallStep,
    CudaSource,
    Kernel,
    KernelBinary,
    Launch,
    LibraryCall,
    Pointer,
    Ref,
    Schedule,
)
from weft.tune.cuda_device import HANG_S, CaptureError, HungError
from weft.tune.cuda_subject import CallSubject, CudaSubject, GpuSubject
from weft.tune.cuda_trial import Bench, RestartError, run_trial
from weft.tune.messages import Message
from weft.tune.transport import Fault, WorkerFault
from weft.tune.tuner import ProblemTrial
from weft.tune.verify import CPU
from weft.tune.worker import TrialRequest

LIBRARY_US = 5.0
"""What a library call takes."""
N = 96
"""Elements of each tensor of the problem."""


def tuner_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the tuner waits before it starts a worker again, as they come: nobody waits for them.

    `time.sleep` itself stays as it is: a thread that an earlier test left, and that looks for something now and then,
    would look without a pause, and a list of its waits would fill the memory.
    """
    waited: list[float] = []
    stand_in = SimpleNamespace(sleep=waited.append, perf_counter=time.perf_counter)
    monkeypatch.setattr("weft.tune.tuner.time", stand_in)
    return waited


class Act(Enum):
    """What a fake kernel does besides y = x * w."""

    OK = "ok"
    SLOWER = "right, and slower"
    WRONG = "one element off"
    HALF = "the second half is not written"
    GUARD = "one element too many"
    NAN = "a NaN"
    INPUT = "writes to its input"
    STATE = "leaves its counter at one"
    STALE = "reads its workspace before writing it"
    PACK_GUARD = "packs beyond the buffer"
    DRIFTS = "other bits once it was called often"
    LATE = "wrong once it is recorded"
    ILLEGAL = "an illegal address"
    ILLEGAL_LATE = "an illegal address once it is recorded"
    HANG = "no end"
    HANG_LATE = "no end once it is recorded"
    REFUSED = "the driver refuses the launch"
    MEMORY = "out of memory"
    RACE = "wrong where it is delayed"


@dataclass
class FakeGpu:
    """Computes at once, on the CPU; `wait` raises what a launch left behind, as an asynchronous device does."""

    device: torch.device = CPU
    stream: int = 7
    sound: bool = True
    pending: BaseException | None = None
    recorded: int = 0
    evictions: list[bool] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    patience_s: list[float] = field(default_factory=list)
    """Of each wait."""
    room: int = 1 << 30
    now_us: float = 0.0
    """Scripted time of everything that was launched so far."""

    def wait(self, limit_s: float = HANG_S) -> None:
        self.patience_s.append(limit_s)
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def is_sound(self) -> bool:
        return self.sound

    def room_bytes(self) -> int:
        return self.room

    def record(self, calls: Sequence[Callable[[], object]], *, evict: bool) -> FakeSampler:
        calls[0]()
        self.wait()
        self.recorded += 1
        self.evictions.append(evict)
        self.launches.append(len(calls))
        return FakeSampler(self, list(calls))

    def by_the_clock(self, call: Callable[[], object]) -> FakeSampler:
        return FakeSampler(self, [call])

    def sm_clock_mhz(self) -> int:
        return 1755


@dataclass
class FakeSampler:
    gpu: FakeGpu
    calls: list[Callable[[], object]]

    def sample(self) -> float:
        start = self.gpu.now_us
        for call in self.calls:
            call()
        self.gpu.wait()
        return (self.gpu.now_us - start) / len(self.calls) or LIBRARY_US


def array(address: int, count: int) -> np.ndarray:
    """f32 elements at an address of host memory."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


@dataclass
class FakeKernel:
    """Entries `pack` (w2 = 2 w) and `run` (y = x * w2 / 2), which misbehave as told."""

    act: Act
    gpu: FakeGpu
    shaken: bool = False
    runs: int = 0

    def pack(self, w: int, packed: int) -> None:
        array(packed, N)[:] = array(w, N) * 2
        if self.act is Act.PACK_GUARD:
            array(packed, N + 1)[N] = 1.0

    def run(self, x: int, packed: int, y: int, work: int, state: int) -> None:
        act, gpu = self.act, self.gpu
        self.runs += 1
        gpu.now_us += 9.0 if act is Act.SLOWER else 3.0
        late = gpu.recorded > 0
        if act is Act.ILLEGAL or (act is Act.ILLEGAL_LATE and late):
            gpu.sound, gpu.pending = False, RuntimeError("CUDA error: an illegal memory access was encountered")
            return
        if act is Act.HANG or (act is Act.HANG_LATE and late):
            gpu.pending = HungError("no end within 5 s")
            return
        if act is Act.REFUSED:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        if act is Act.MEMORY:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 TiB")
        out, scratch = array(y, N), array(work, N)
        stale = scratch[0]
        with np.errstate(all="ignore"):
            scratch[:] = array(x, N) * array(packed, N)
            value = scratch * np.float32(0.5)
        if act is Act.HALF:
            out[: N // 2] = value[: N // 2]
            return
        out[:] = value
        if act is Act.WRONG or (act is Act.LATE and late) or (act is Act.RACE and self.shaken):
            out[5] = out[5] * 2 + 1
        if act is Act.DRIFTS and late:
            out[5] = np.nextafter(out[5], np.float32(np.inf))
        if act is Act.NAN:
            out[5] = np.nan
        if act is Act.GUARD:
            array(y, N + 1)[N] = 1.0
        if act is Act.INPUT:
            array(x, N)[3] += 1.0
        if act is Act.STALE:
            out[0] += stale
        if act is Act.STATE:
            array(state, 1)[0] = 1.0


@dataclass
class _Function:
    body: Callable[..., None]

    def prepare(self, shared_bytes: int, cluster: Any) -> None:
        assert shared_bytes <= 1 << 16

    def bind(
        self, grid: Any, block: Any, arguments: Any, *, shared_bytes: int, cluster: Any, dependent: bool
    ) -> _Bound:
        assert dependent
        return _Bound(self.body, tuple(arguments))


@dataclass
class _Bound:
    body: Callable[..., None]
    arguments: tuple[int, ...]

    def launch(self, stream: int) -> None:
        assert stream == 7 and all(self.arguments)
        self.body(*self.arguments)


@dataclass
class _Module:
    kernel: FakeKernel

    def function(self, entry: str) -> _Function:
        entries: dict[str, Callable[..., None]] = {"pack": self.kernel.pack, "run": self.kernel.run}
        return _Function(entries[entry])


def fake_driver(act: Act, gpu: FakeGpu) -> CudaDriver:
    def encode(*_: object, **__: object) -> bytes:
        raise AssertionError("no tensor maps here")

    def load(path: Path) -> Any:
        return _Module(FakeKernel(act, gpu, shaken=path.stem == "shaken"))

    return CudaDriver(load, encode)


def schedule(act: Act, number: int = 0) -> Schedule:
    return Schedule("cuda", (("act", act.value), ("n", number)))


def source(act: Act, number: int = 0) -> CudaSource:
    """y = x * w in f32 with repacked weights, a workspace and a counter."""
    pointers = (Pointer("in", 0), Pointer("packed"), Pointer("out"), Pointer("work"), Pointer("state"))
    return CudaSource(
        schedule(act, number),
        f"// {act.value} {number}",
        (Launch("run", (1, 1, 1), (32, 1, 1), pointers),),
        pack=(Launch("pack", (1, 1, 1), (32, 1, 1), (Pointer("in", 1), Pointer("packed"))),),
        workspace_bytes=4 * N,
        state_bytes=16,
        packed_bytes=(4 * N,),
        replaces_weights=(1,),
    )


LIBRARY = LibraryCall(
    Schedule("library"),
    (),
    (CallStep("aten.mul.Tensor", (Ref("in", 0), Ref("in", 1))),),
    (Ref("tmp", 0),),
)


def problem() -> Problem:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (N,))), b.input(TensorType(DType.F32, (N,)), is_weight=True)
    graph = b.build([b.add(Prim.MUL, x, w)])
    return Problem(graph, f"product\n{graph}", (Format.ROW,) * 2, (Format.ROW,))


def trial(acts: Sequence[Act], *, bound_us: float = 0.0) -> ProblemTrial:
    """The library call first, then one kernel per act."""
    kernels: list[tuple[Schedule, Kernel, KernelBinary | None]] = [(LIBRARY.schedule, LIBRARY, None)]
    for number, act in enumerate(acts):
        made = source(act, number)
        kernels.append((made.schedule, made, KernelBinary(made.sha256, "", "/nonexistent.cubin", "run", 0.1)))
    return ProblemTrial(problem(), kernels, bound_us)


@dataclass
class FakeCudaTransport:
    """A worker process for a fake GPU."""

    gpu: FakeGpu = field(default_factory=FakeGpu)
    started: int = 0
    killed: int = 0
    sick_canaries: int = 0
    """So many first canaries find the GPU still busy."""
    refuses_capture: bool = False
    messages: list[Message] = field(default_factory=list)
    _alive: bool = False
    _events: list[Message | WorkerFault] = field(default_factory=list)
    _board: int = -1

    def start(self) -> None:
        self.kill()
        self.started += 1
        self.gpu = FakeGpu()
        self._alive, self._events, self._board = True, [], -1

    def kill(self) -> None:
        self.killed += self._alive
        self._alive = False

    def running(self) -> int:
        return self._board

    def send(self, message: Message, timeout_s: float) -> None:
        message = json.loads(json.dumps(message, allow_nan=False))
        self.messages.append(message)
        match message["op"]:
            case "hello":
                self._events.append({"event": "ready"})
            case "canary":
                if self.sick_canaries > 0:
                    self.sick_canaries -= 1
                    self._events.append(WorkerFault(Fault.HANG, "no answer in time"))
                else:
                    self._events.append({"event": "canary", "problem": ""})
            case "trial":
                try:
                    run_trial(TrialRequest.from_message(message), self, Bench(self.gpu, make=cast("Any", self.make)))
                except RestartError:
                    self._alive = False

    def receive(self, timeout_s: float) -> Message:
        if not self._events:
            raise WorkerFault(Fault.CRASH, "the pipe is closed")
        event = self._events.pop(0)
        if isinstance(event, WorkerFault):
            raise event
        return event

    def at(self, kernel: int) -> None:
        self._board = kernel

    def say(self, **message: object) -> None:
        self._events.append(json.loads(json.dumps(message, allow_nan=False)))

    def make(self, problem: Problem, kernel: Kernel, path: str, gpu: FakeGpu) -> GpuSubject:
        if isinstance(kernel, CudaSource):
            act = Act(dict(kernel.schedule.params)["act"])
            return CudaSubject(problem, kernel, Path(path).name, gpu, driver=fake_driver(act, gpu))
        assert isinstance(kernel, LibraryCall)
        subject = CallSubject(problem, kernel, gpu)
        if not self.refuses_capture:
            return subject
        return _Uncapturable(subject)


class _Uncapturable:
    """A call whose recording fails, as one that waits for the device does."""

    deterministic, transforms, recordable, packed_bytes = False, False, True, 0

    def __init__(self, subject: CallSubject) -> None:
        self._subject = subject
        self.reads = subject.reads

    def rotate(self, arenas: Any, base: Any) -> Any:
        return self._subject.rotate(arenas, base)

    def misbehaviour(self) -> None:
        return None

    def enqueue(self, arena: Any, poison: Any) -> Any:
        binding = self._subject.enqueue(arena, poison)
        gpu = self._subject._gpu
        original, plain = gpu.record, binding.call

        def record(calls: Any, *, evict: Any) -> Any:
            if plain in calls:
                raise CaptureError("operation not permitted when stream is capturing")
            return original(calls, evict=evict)

        vars(gpu)["record"] = record
        return binding


EXPECTED: Mapping[Act, str] = {
    Act.OK: "ok",
    Act.SLOWER: "ok",
    Act.WRONG: "wrong",
    Act.HALF: "unwritten",
    Act.GUARD: "guard",
    Act.NAN: "nan_class wrong",
    Act.INPUT: "input_modified",
    Act.STATE: "unstable",
    Act.STALE: "wrong nan_class unstable",
    Act.PACK_GUARD: "guard",
    Act.DRIFTS: "unstable",
    Act.LATE: "unstable",
    Act.ILLEGAL: "crash",
    Act.ILLEGAL_LATE: "crash",
    Act.HANG: "hang",
    Act.HANG_LATE: "hang",
    Act.REFUSED: "crash",
    Act.MEMORY: "oom",
    Act.RACE: "ok",
}
"""Verdicts that an act may get."""
