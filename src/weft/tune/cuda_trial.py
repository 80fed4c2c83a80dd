"""One trial on a GPU: reference, verify each kernel, time all that passed in interleaved rounds, verify again.

The checks are those of `weft.tune.verify` on device memory; references are evaluated on the device too, with products
of f32 in f32 unless the caller allowed TF32. A kernel that breaks the context or does not end gets its verdict here,
where it is known that it alone was running; then the worker asks to be replaced.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter_ns
from typing import final

import torch

from weft.errors import DeviceError, WeftError
from weft.generate.library.execute import plain_math
from weft.ir.types import Array
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json, kernel_from_json
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource, Kernel
from weft.tune.cuda_device import CaptureError, Gpu, HungError
from weft.tune.cuda_subject import GpuSubject, MakeSubject, MisbehavedError, Predecessor, Waited, make_gpu_subject
from weft.tune.cuda_timing import PROBE_LAUNCHES, Sampler, copies_needed, launches_needed, time_rounds
from weft.tune.inputs import InputSet
from weft.tune.verify import (
    NO_TABLES,
    POISONS,
    Arena,
    Binding,
    Buffer,
    Finding,
    Reference,
    classify,
    reference_of,
    verify,
    verify_after,
    weight_positions,
)
from weft.tune.worker import Channel, ReferenceKey, TrialRequest, reference_key

SLOW_FLOOR_S, SLOW_FACTOR = 0.05, 30.0
"""A first call over so many times the fastest so far, and over the floor, is not timed. It includes loading."""
PROBE_S = 0.05
"""What the first recorded launches of a kernel may take in all."""
SHAKEN_S = 0.01
"""A kernel whose calls take longer is not shaken: that takes many times as long."""
DELAYED = "with warps delayed"
"""What the verdict on a shaken kernel begins with."""
SHAKEN_ROUNDS = 2
"""Times that all inputs are looked at, with other delays each time."""
LIFE_S = 2.0
"""A sign of life is sent at least so often while kernels are timed."""
_ERRORS = (WeftError, RuntimeError, MemoryError, TypeError, ValueError, IndexError, OSError, MisbehavedError)


class RestartError(Exception):
    """This process can no longer use its GPU."""


@final
@dataclass(slots=True)
class Bench:
    """A device with what is kept between the trials of one worker."""

    gpu: Gpu
    allow_tf32: bool = False
    make: MakeSubject = make_gpu_subject
    before: Predecessor | None = None
    """What generated kernels are verified behind; None: nothing."""
    soil: Callable[[], None] | None = None
    """What a shaken kernel is verified behind."""
    clock: Callable[[], int] = perf_counter_ns
    _key: ReferenceKey | None = None
    _reference: Reference | None = None

    def reference(self, problem: Problem, seed: int, tables: Mapping[int, Array] = NO_TABLES) -> Reference:
        """Problems that differ in formats alone come one after another and share one."""
        key = reference_key(problem, seed, tables)
        if self._reference is None or key != self._key:
            self._reference = None  # its memory goes first
            with plain_math(allow_tf32=self.allow_tf32):
                self._reference = reference_of(
                    problem.graph, seed=seed, device=self.gpu.device, finite=problem.finite, tables=tables
                )
            self._key = key
        return self._reference.laid_out(problem)

    def forget(self) -> None:
        """Nothing is kept any more."""
        self._key, self._reference = None, None


@dataclass(slots=True)
class _Passed:
    """A kernel that was verified, on its way to being timed."""

    subject: GpuSubject
    outputs: tuple[torch.Tensor, ...]
    finding: Finding
    arena: Arena
    first_call_s: float
    bindings: list[Binding] = field(default_factory=list)
    sampler: Sampler | None = None
    launches: int = 1


def run_trial(request: TrialRequest, say: Channel, bench: Bench) -> None:
    """Answer one `trial` request: events `verifying`, `verdict` or `skipped`, and a last `done` or `restart`.

    Raises:
        RestartError: after `restart`.
    """
    say.at(-1)
    with torch.inference_mode(), plain_math(allow_tf32=bench.allow_tf32):
        trial = _Trial(request, say, bench)
        trial.verify_all()
        if request.time:
            trial.time_all()
        else:
            trial.replay_all()
        trial.answer()
    say.say(event="done", sm_mhz=bench.gpu.sm_clock_mhz())


@final
class _Trial:
    def __init__(self, request: TrialRequest, say: Channel, bench: Bench) -> None:
        self._request, self._say, self._bench, self._gpu = request, say, bench, bench.gpu
        self._start = monotonic()
        self._said = self._start
        reference = bench.reference(request.problem, request.seed, request.tables)
        self._reference = reference.finite() if request.finite else reference
        self._gpu.wait()
        self._passed: dict[int, _Passed] = {}
        self._variants: list[Arena] = []
        self._shaken: set[int] = set()

    # --- verification ---

    def verify_all(self) -> None:
        """Give every rejected kernel its verdict and keep the others."""
        request, gpu = self._request, self._gpu
        shared: dict[InputSet, Arena] = {}
        fastest = math.inf
        for number, encoded, path in request.kernels:
            if monotonic() - self._start > request.left_s:
                self._say.say(event="skipped", kernel=number)
                continue  # the time is up
            self._say.at(number)
            self._alive(number)
            slow_s = math.inf if number in request.always else max(SLOW_FLOOR_S, SLOW_FACTOR * fastest)
            try:
                kernel = kernel_from_json(encoded)
                subject = self._bench.make(request.problem, kernel, path, gpu)
                waited = Waited(subject, gpu, before=self._before if isinstance(kernel, CudaSource) else None)
                held = self._reference.of_kernel(kernel)
                result = verify(request.problem, waited, held, shared, slow_s=slow_s, clock=self._bench.clock)
            except _ERRORS as error:
                shared.clear()
                self._failed(number, error)
                continue  # the next kernel gets clean buffers
            if result.finding.verdict is not Verdict.OK:
                _verdict(self._say, number, result.finding)
                continue  # rejected
            if form := request.shaken.get(number):
                try:
                    quick = min(result.first_call_s, self._call_s(subject)) < SHAKEN_S
                    finding = self._shake(kernel, form, shared) if quick else None
                except _ERRORS as error:
                    shared.clear()
                    self._failed(number, error)
                    continue
                if finding is not None and finding.verdict is not Verdict.OK:
                    _verdict(self._say, number, finding)
                    continue
                if finding is not None:
                    self._shaken.add(number)
            fastest = min(fastest, result.first_call_s)
            arena = Arena(request.problem, (), inputs=self._base(), device=gpu.device)
            self._passed[number] = _Passed(subject, result.outputs, result.finding, arena, result.first_call_s)
        self._say.at(-1)

    def _call_s(self, subject: GpuSubject) -> float:
        """Of the shortest of some calls, as others may have had the GPU meanwhile."""
        arena = Arena(self._request.problem, (), inputs=self._base(), device=self._gpu.device)
        call, shortest = subject.enqueue(arena, POISONS[0]).call, math.inf
        for _ in range(3):
            self._gpu.wait()
            start = self._bench.clock()
            call()
            self._gpu.wait()
            shortest = min(shortest, (self._bench.clock() - start) * 1e-9)
        return shortest

    def _shake(self, kernel: Kernel, path: str, shared: dict[InputSet, Arena]) -> Finding | None:
        """Verdict on the form of a kernel that is delayed wherever it may be; None: it cannot run here."""
        request, gpu = self._request, self._gpu
        try:
            subject = self._bench.make(request.problem, kernel, path, gpu)
            subject.enqueue(Arena(request.problem, (), inputs=self._base(), device=gpu.device), POISONS[0])
        except DeviceError:  # it takes more of the machine
            return None
        soil = self._bench.soil
        waited = Waited(subject, gpu, before=(lambda _: soil()) if soil is not None else None)
        for _ in range(SHAKEN_ROUNDS):
            result = verify(request.problem, waited, self._reference, shared, slow_s=math.inf, clock=self._bench.clock)
            if result.finding.verdict is not Verdict.OK:
                return replace(result.finding, error=f"{DELAYED}: {result.finding.error}")
        return Finding(Verdict.OK)

    def _before(self, arena: Arena) -> None:
        """Let the inputs that another step would write come late."""
        if self._bench.before is not None:
            graph = self._request.problem.graph
            weights = weight_positions(graph)
            self._bench.before(arena, [k for k in range(len(graph.inputs)) if k not in weights])

    def _failed(self, number: int, error: BaseException) -> None:
        """Verdict on a kernel that raised; RestartError if it took the context with it."""
        self._passed.pop(number, None)
        if isinstance(error, MisbehavedError):
            _verdict(self._say, number, error.finding)
            return
        hung = isinstance(error, HungError)
        if hung or not self._gpu.is_sound():
            verdict = Verdict.HANG if hung else Verdict.CRASH
            _verdict(self._say, number, Finding(verdict, f"{type(error).__name__}: {error}"))
            self._say.say(event="restart", kernel=number)
            raise RestartError(str(error))
        if isinstance(error, CaptureError):
            _verdict(self._say, number, Finding(Verdict.RESOURCE, f"cannot be recorded into a CUDA graph: {error}"))
        else:
            _verdict(self._say, number, classify(error))

    def _alive(self, number: int) -> None:
        self._say.say(event="verifying", kernel=number)
        self._said = monotonic()

    # --- timing ---

    def time_all(self) -> None:
        """Record every kernel that passed, take samples in rounds, and check what the last launches left."""
        for number in list(self._passed):
            self._say.at(number)
            self._alive(number)
            try:
                self._prepare(self._passed[number])
            except _ERRORS as error:
                self._failed(number, error)
        if not self._passed:
            return
        running = next(iter(self._passed))

        def before(number: int) -> None:
            nonlocal running
            running = number
            self._say.at(number)
            if monotonic() - self._said > LIFE_S:
                self._alive(number)

        samplers = {k: p.sampler for k, p in self._passed.items() if p.sampler is not None}
        try:
            samples = time_rounds(
                samplers,
                policy=self._request.policy,
                always=self._request.always,
                seed=self._request.seed,
                before=before,
                spent_us=lambda k, us: us * (self._passed[k].launches + 1) + 100.0,
            )
        except _ERRORS as error:
            self._failed(running, error)
            # it raised in the middle of a round and left the context alone: time the others without it
            self.time_all()
            return
        for number, p in list(self._passed.items()):
            self._say.at(number)
            try:
                p.finding = self._after(p)
            except _ERRORS as error:
                self._failed(number, error)
                continue  # it has its verdict
            self._conclude(number, p, samples[number])
        self._say.at(-1)

    def replay_all(self) -> None:
        """Where nothing is timed: run every kernel that passed once more as a plan does, from a CUDA graph."""
        for number, p in list(self._passed.items()):
            self._say.at(number)
            self._alive(number)
            try:
                p.bindings = [p.subject.enqueue(p.arena, POISONS[0])]
                self._gpu.wait()
                if p.subject.recordable:
                    p.sampler = self._gpu.record([p.bindings[0].call], evict=False)
                    p.finding = self._after(p)
            except _ERRORS as error:
                self._failed(number, error)
        self._say.at(-1)

    def _prepare(self, p: _Passed) -> None:
        """Find the number of launches, make copies of what rotates, and record."""
        gpu, request = self._gpu, self._request
        p.bindings = [p.subject.enqueue(p.arena, POISONS[0])]
        gpu.wait()
        if not p.subject.recordable:
            p.sampler, p.launches = gpu.by_the_clock(p.bindings[0].call), 1
            return
        probing = max(1, min(PROBE_LAUNCHES, int(PROBE_S / max(p.first_call_s, 1e-9))))
        probe = gpu.record([p.bindings[0].call] * probing, evict=False)
        guess = min(probe.sample() for _ in range(2))
        p.launches = launches_needed(request.policy, guess)
        rotating = self._rotating_bytes(p)
        copies = copies_needed(request.policy, p.launches, rotating, request.l2_bytes, gpu.room_bytes())
        p.bindings += p.subject.rotate([self._variant(p, k) for k in range(1, copies)], p.bindings[0])
        gpu.wait()
        calls = [p.bindings[k % copies].call for k in range(p.launches)]
        p.sampler = gpu.record(calls, evict=copies > 1)

    def _rotating_bytes(self, p: _Passed) -> int:
        graph = self._request.problem.graph
        weights = sum(graph.type_of(graph.inputs[k]).nbytes for k in p.subject.reads) + p.subject.packed_bytes
        if self._request.policy.cache != "rotated":
            return weights
        ends = [*graph.inputs, *graph.outputs]
        return sum(graph.type_of(i).nbytes for i in ends) + p.subject.packed_bytes

    def _base(self) -> Arena:
        """The inputs of the timed set; all kernels read the same."""
        if not self._variants:
            self._variants.append(Arena(self._request.problem, self._reference.timed.inputs, device=self._gpu.device))
        return self._variants[0]

    def _variant(self, p: _Passed, number: int) -> Arena:
        """The kernel's arena with the inputs of copy `number`; weights alone are copied unless all rotate."""
        problem, device = self._request.problem, self._gpu.device
        everything = self._request.policy.cache == "rotated"
        if not everything and not p.subject.reads:
            return p.arena  # only packed weights rotate
        while len(self._variants) <= number:
            positions = frozenset(range(len(problem.graph.inputs))) if everything else weight_positions(problem.graph)
            self._variants.append(_copied(problem, self._base(), positions, device))
        source = self._variants[number]
        if everything:
            return Arena(problem, (), inputs=source, device=device)
        other = copy.copy(p.arena)
        other.inputs, other.input_tensors = source.inputs, source.input_tensors
        return other

    def _after(self, p: _Passed) -> Finding:
        """One more sample into poisoned outputs, then every check again."""
        assert p.sampler is not None
        p.arena.poison(POISONS[0])
        p.sampler.sample()
        self._gpu.wait()
        found = p.subject.misbehaviour()
        if found is None:
            found = verify_after(
                p.arena, p.bindings[0], self._reference, p.outputs, deterministic=p.subject.deterministic
            )
        return p.finding if found.verdict is Verdict.OK else found

    def _conclude(self, number: int, p: _Passed, samples: Sequence[float]) -> None:
        median = sorted(samples)[len(samples) // 2]
        finding = p.finding
        if finding.verdict is Verdict.OK and min(samples) <= 0:
            finding = Finding(Verdict.IMPOSSIBLE, "an event came before the one it followed", finding.ratio)
        if finding.verdict is Verdict.OK and median < 0.9 * self._request.bound_us:
            text = f"{median:.3f} us is below the roofline's {self._request.bound_us:.3f} us"
            finding = Finding(Verdict.IMPOSSIBLE, text, finding.ratio)
        shaken = number in self._shaken
        _verdict(self._say, number, finding, samples if finding.verdict is Verdict.OK else (), shaken=shaken)
        del self._passed[number]

    def answer(self) -> None:
        """Verdicts of what is left: everything that passed, where nothing was to be timed."""
        for number, p in self._passed.items():
            _verdict(self._say, number, p.finding, shaken=number in self._shaken)


def _copied(problem: Problem, base: Arena, positions: frozenset[int], device: torch.device) -> Arena:
    """`base` with fresh copies of the inputs at `positions`."""
    other = copy.copy(base)
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    other.inputs = list(base.inputs)
    for k in positions:
        other.inputs[k] = Buffer(types[k].nbytes, 0xFF, device)
        other.inputs[k].bytes.copy_(base.inputs[k].bytes)
    triples = zip(other.inputs, types, problem.input_formats, strict=True)
    other.input_tensors = [b.tensor(t, f) for b, t, f in triples]
    return other


def _verdict(
    say: Channel, number: int, finding: Finding, samples: Sequence[float] = (), *, shaken: bool = False
) -> None:
    ratio = finding.ratio if finding.ratio < 1e300 else 1e300  # infinities have no JSON form
    encoded: list[Json] = [float(x) for x in samples]
    say.say(
        event="verdict",
        kernel=number,
        verdict=finding.verdict.value,
        error=finding.error[:4000],
        ratio=ratio,
        samples=encoded,
        shaken=shaken,
    )
