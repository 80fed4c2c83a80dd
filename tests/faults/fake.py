"""A fake device: the worker's own code over kernels in NumPy, with a scripted clock and a plan of faults.

`FakeTransport` answers the tuner as a worker process would. Trials run through `weft.tune.worker.run_trial` in this
process, so that references, poisons, guards, comparisons and rounds are the real ones; only kernels, time and the
loss of a process are scripted. A seed and a plan reproduce a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import numpy as np
import torch

from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import Kernel, KernelBinary, KernelSource, LibraryCall, Schedule
from weft.tune.messages import GarbageError, Message, body_size, decode, encode
from weft.tune.transport import Fault, WorkerFault
from weft.tune.tuner import ProblemTrial
from weft.tune.verify import Arena, Binding, Buffer
from weft.tune.worker import Machine, TrialRequest, run_trial


class Plan(Enum):
    """What one fake kernel does."""

    OK = "ok"
    WRONG = "wrong value"
    NAN = "nan"
    HALF = "half written"
    UNTOUCHED = "writes nothing"
    GUARD_AFTER = "guard behind an output"
    GUARD_BEFORE = "guard before an output"
    SCRATCH_GUARD = "guard of the workspace"
    INPUT = "input modified"
    STALE_SCRATCH = "reads its workspace before writing it"
    UNSTABLE = "wrong once it is being timed"
    STATE = "other bits at every call, all within the limits"
    CRASH = "crash"
    CRASH_TIMING = "crash while timed"
    CRASH_ONCE = "crash by somebody else's stray write"
    HANG = "hang"
    DEAF = "hang, deaf to SIGTERM"
    MEMORY = "out of memory, says so"
    KILLED = "killed for memory"
    FLOOD = "1 GiB of log"
    GARBAGE = "garbage message"
    HALF_MESSAGE = "half a message"
    LIES = "a verdict on another kernel"
    CLOCK = "clock jumps back"
    SLOW = "slow"
    IMPOSSIBLE = "faster than the roofline"
    REFUSES = "raises"


EXPECTED: Mapping[Plan, frozenset[Verdict]] = {
    Plan.OK: frozenset({Verdict.OK}),
    Plan.WRONG: frozenset({Verdict.WRONG}),
    Plan.NAN: frozenset({Verdict.NAN_CLASS, Verdict.WRONG}),
    Plan.HALF: frozenset({Verdict.UNWRITTEN}),
    Plan.UNTOUCHED: frozenset({Verdict.UNWRITTEN}),
    Plan.GUARD_AFTER: frozenset({Verdict.GUARD}),
    Plan.GUARD_BEFORE: frozenset({Verdict.GUARD}),
    Plan.SCRATCH_GUARD: frozenset({Verdict.GUARD}),
    Plan.INPUT: frozenset({Verdict.INPUT_MODIFIED}),
    Plan.STALE_SCRATCH: frozenset({Verdict.WRONG, Verdict.NAN_CLASS, Verdict.UNSTABLE}),
    Plan.UNSTABLE: frozenset({Verdict.UNSTABLE}),
    Plan.STATE: frozenset({Verdict.UNSTABLE}),
    Plan.CRASH: frozenset({Verdict.POISONED}),
    Plan.CRASH_TIMING: frozenset({Verdict.POISONED}),
    Plan.CRASH_ONCE: frozenset({Verdict.OK}),
    Plan.HANG: frozenset({Verdict.HANG}),
    Plan.DEAF: frozenset({Verdict.HANG}),
    Plan.MEMORY: frozenset({Verdict.OOM}),
    Plan.KILLED: frozenset({Verdict.OOM}),
    Plan.FLOOD: frozenset({Verdict.POISONED}),
    Plan.GARBAGE: frozenset({Verdict.POISONED}),
    Plan.HALF_MESSAGE: frozenset({Verdict.POISONED}),
    Plan.LIES: frozenset({Verdict.POISONED}),
    Plan.CLOCK: frozenset({Verdict.IMPOSSIBLE}),
    Plan.SLOW: frozenset({Verdict.SLOW}),
    Plan.IMPOSSIBLE: frozenset({Verdict.IMPOSSIBLE}),
    Plan.REFUSES: frozenset({Verdict.CRASH}),
}
"""How each plan may be classified; CRASH_ONCE is an innocent kernel."""


class _Lost(BaseException):
    """The scripted end of the process."""

    def __init__(self, fault: WorkerFault) -> None:
        self.fault = fault


@dataclass
class Clock:
    """Nanoseconds that pass only where the script says so."""

    now: int = 1_000_000_000

    def __call__(self) -> int:
        return self.now


@dataclass
class FakeKernel:
    """A subject in NumPy: evaluates the problem, then misbehaves as planned."""

    problem: Problem
    plan: Plan
    cost_ns: int
    device: FakeTransport
    deterministic: bool = True
    transforms: bool = False
    calls: int = 0

    def bind(self, arena: Arena, poison: int) -> Binding:
        if self.plan is Plan.MEMORY:
            raise MemoryError("scripted")
        workspace = Buffer(64, 0x5C)
        workspace.bytes.fill_(poison)
        return Binding(lambda: self.call(arena, workspace), (workspace,))

    def lose(self, fault: Fault, detail: str) -> None:
        raise _Lost(WorkerFault(fault, detail))

    def call(self, arena: Arena, workspace: Buffer) -> None:
        self.calls += 1
        plan = self.plan
        self.device.clock.now += self.cost_ns
        if plan is Plan.CRASH or (plan is Plan.CRASH_TIMING and self.calls > 8):
            self.lose(Fault.CRASH, "SIGSEGV")
        if plan is Plan.CRASH_ONCE and self.device.first(self.problem):
            self.lose(Fault.CRASH, "SIGBUS")
        if plan in (Plan.HANG, Plan.DEAF):
            self.device.clock.now += 10**12
            self.lose(Fault.HANG, "no answer in time")
        if plan is Plan.KILLED:
            self.lose(Fault.OOM, "killed by the system")
        if plan is Plan.FLOOD:
            self.lose(Fault.FLOOD, "printed 1073741824 bytes")
        if plan is Plan.GARBAGE:
            self.device.raw(b"\xff\xff\xff\xfftotal nonsense")
        if plan is Plan.HALF_MESSAGE:
            self.device.raw(encode({"event": "verdict", "kernel": 0})[:9])
        if plan is Plan.LIES:
            lie = {"event": "verdict", "kernel": 10_000, "verdict": "ok", "error": "", "ratio": 0.0, "samples": [1.0]}
            self.device.raw(encode(cast("Message", lie)))
        if plan is Plan.REFUSES:
            raise RuntimeError("scripted refusal")
        if plan is Plan.CLOCK and self.calls > 8:
            self.device.clock.now -= 3_600 * 10**9
        self.write(arena, workspace)

    def write(self, arena: Arena, workspace: Buffer) -> None:
        plan = self.plan
        value = self.device.value(self.problem, [t.numpy() for t in arena.input_tensors])
        out = arena.output_tensors[0]
        flat = out.view(-1)
        if plan is Plan.UNTOUCHED:
            return
        if plan is Plan.HALF:
            flat[: flat.numel() // 2] = value.view(-1)[: flat.numel() // 2]
            return
        out.copy_(value)
        position = (self.calls * 7) % flat.numel()
        if plan is Plan.WRONG or (plan is Plan.UNSTABLE and self.calls > 8):
            flat[position] = flat[position] * 2 + 1
        if plan is Plan.NAN:
            flat[position] = np.nan
        if plan is Plan.STATE:
            flat[position] = (
                torch.nextafter(flat[position], torch.tensor(torch.inf)) if self.calls > 8 else flat[position]
            )
        if plan is Plan.GUARD_AFTER:
            arena.outputs[0]._after[3] = 1
        if plan is Plan.GUARD_BEFORE:
            arena.outputs[0]._before[-1] = 1
        if plan is Plan.SCRATCH_GUARD:
            workspace._after[0] = 1
        if plan is Plan.INPUT:
            arena.inputs[0].bytes[5] ^= 1
        if plan is Plan.STALE_SCRATCH:
            flat[0] += workspace.bytes.view(torch.float32)[0]


@dataclass
class FakeTransport:
    """A worker whose kernels follow a plan by the name of their schedule."""

    plans: Mapping[Schedule, Plan]
    clock: Clock = field(default_factory=Clock)
    costs_ns: Mapping[Schedule, int] = field(default_factory=dict)
    started: int = 0
    killed: int = 0
    faults: int = 0
    sound: bool = True
    """False: the canary computes wrongly."""
    dead_on_arrival: int = 0
    """How many starts fail."""
    on_trial: Callable[[], None] = lambda: None
    _alive: bool = False
    _events: list[Message | WorkerFault | bytes] = field(default_factory=list)
    _board: int = -1
    _seen: set[str] = field(default_factory=set)
    _values: dict[tuple[str, bytes], torch.Tensor] = field(default_factory=dict)

    def first(self, problem: Problem) -> bool:
        """Is this the first time anything asks about this problem?"""
        fresh = problem.key not in self._seen
        self._seen.add(problem.key)
        return fresh

    def value(self, problem: Problem, inputs: list[np.ndarray]) -> torch.Tensor:
        """What the problem is on some inputs; kept, because the same inputs come again and again."""
        key = (problem.key, b"".join(x.tobytes() for x in inputs))
        if key not in self._values:
            if len(self._values) > 50:
                self._values.clear()
            with np.errstate(all="ignore"):
                (result,) = evaluate(problem.graph, [x.copy() for x in inputs])
            self._values[key] = torch.from_numpy(np.ascontiguousarray(result))
        return self._values[key]

    def raw(self, data: bytes) -> None:
        """Bytes on the answer pipe that no message of ours wrote; the process goes on until it is killed."""
        self._events.append(data)
        raise _Lost(WorkerFault(Fault.CRASH, "killed after its message"))

    # --- Transport ---

    def start(self) -> None:
        self.kill()
        self.started += 1
        if self.dead_on_arrival > 0:
            self.dead_on_arrival -= 1
            raise WorkerFault(Fault.CRASH, "exit status 1")
        self._alive, self._events, self._board = True, [], -1

    def kill(self) -> None:
        self.killed += self._alive
        self._alive = False

    def running(self) -> int:
        return self._board

    def send(self, message: Message, timeout_s: float) -> None:
        if not self._alive:
            raise WorkerFault(Fault.CRASH, "no worker")
        message = json.loads(json.dumps(message, allow_nan=False))
        match message["op"]:
            case "hello":
                self._events.append({"event": "ready"})
            case "canary":
                self._events.append({"event": "canary", "problem": "" if self.sound else "adds wrongly"})
            case "trial":
                self.on_trial()
                machine = Machine(self.make, self.clock, lambda: 0)
                try:
                    run_trial(TrialRequest.from_message(message), self, machine)
                except _Lost as lost:
                    self.faults += 1
                    self._events.append(lost.fault)

    def receive(self, timeout_s: float) -> Message:
        if not self._events:
            raise WorkerFault(Fault.HANG, "no answer in time")
        event = self._events.pop(0)
        if isinstance(event, WorkerFault):
            raise event
        if isinstance(event, bytes):
            try:
                size = body_size(event[:4])
                if size > len(event) - 4:
                    raise WorkerFault(Fault.CRASH, "the pipe closed in the middle of a message")
                return decode(event[4:])
            except GarbageError as error:
                raise WorkerFault(Fault.GARBAGE, str(error)) from None
        return event

    # --- Channel ---

    def at(self, kernel: int) -> None:
        self._board = kernel

    def say(self, **message: object) -> None:
        self._events.append(json.loads(json.dumps(message, allow_nan=False)))

    def make(self, problem: Problem, kernel: Kernel, path: str) -> FakeKernel:
        plan = self.plans.get(kernel.schedule, Plan.OK)
        cost = self.costs_ns.get(kernel.schedule, 200_000)
        if plan is Plan.SLOW:
            cost = 3_000_000_000
        if plan is Plan.IMPOSSIBLE:
            cost = 20_000
        return FakeKernel(problem, plan, cost, self)


def small_graph(size: int, variant: int) -> Graph:
    """tanh(x + y) * 0.5 and the like: cheap, with every kind of gate."""
    b = GraphBuilder()
    shape = (3, size)
    x, y = b.input(TensorType(DType.F32, shape)), b.input(TensorType(DType.F32, shape))
    z = b.add((Prim.ADD, Prim.SUB, Prim.MUL)[variant % 3], x, y)
    if variant % 2:
        z = b.apply(Prim.MUL, b.add(Prim.TANH, z), 0.5)
    if variant % 5 == 0:
        z = b.reduce(Prim.REDUCE_SUM, z, [1])
    return b.build([z])


def fake_problem(number: int) -> Problem:
    graph = small_graph(5 + number % 20, number)
    return Problem(graph, f"{number}\n{graph}", (Format.ROW,) * 2, (Format.ROW,))


def fake_trial(number: int, schedules: list[Schedule], bound_us: float = 50.0) -> ProblemTrial:
    """The first schedule stands for a library call, the others for generated kernels that were compiled."""
    kernels: list[tuple[Schedule, Kernel, KernelBinary | None]] = [
        (schedules[0], LibraryCall(schedules[0], (), (), ()), None)
    ]
    for s in schedules[1:]:
        source = KernelSource(s, f"// {s}", "k0")
        kernels.append((s, source, KernelBinary(source.sha256, "", "/nonexistent.so", "k0", 0.1)))
    return ProblemTrial(fake_problem(number), kernels, bound_us)
