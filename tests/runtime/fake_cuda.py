"""A stand-in for `torch.cuda`, so that the executable for GPUs runs its library calls on the CPU.

Streams and events keep order only; a recorded graph runs its launches again when it is replayed, because the recording
of one is the list of what was called meanwhile (see `Recorded`). What streams and events leave open, a replay does in
random order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from weft.generate.library import execute
from weft.runtime import cuda_executable, streams


@dataclass
class FakeStream:
    """Equal to itself only."""

    name: str
    waited_for: list[str] = field(default_factory=list)
    ended: frozenset[int] = frozenset()
    """Launches of the graph being recorded that come before whatever is put here next."""

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other.name)
        self.ended |= other.ended

    def record_event(self) -> frozenset[int]:
        return self.ended

    def wait_event(self, event: frozenset[int]) -> None:
        self.ended |= event

    def synchronize(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


EVERY_STREAM: list[FakeStream] = []
"""Those of other tests too: a plan that is gone late leaves its streams to whoever comes next."""


@dataclass
class Recorded:
    """A graph: how often it ran, and the launches that it holds."""

    launches: list[object] = field(default_factory=list)
    needs: list[frozenset[int]] = field(default_factory=list)
    """Per launch those before it."""
    replays: int = 0

    def add(self, launch: object, stream: FakeStream) -> None:
        self.launches.append(launch)
        self.needs.append(stream.ended)
        stream.ended |= {len(self.launches) - 1}

    def replay(self) -> None:
        self.replays += 1
        left = set(range(len(self.launches)))
        while left:
            ready = sorted(i for i in left if not self.needs[i] & left)
            chosen = random.Random(self.replays * 1000 + len(left)).choice(ready)
            self.launches[chosen]()  # type: ignore[operator]
            left.remove(chosen)


@dataclass
class FakeCuda:
    """What the process sees of its GPU."""

    current: FakeStream = field(default_factory=lambda: FakeStream("default"))
    capturing: bool = False
    """The caller records a graph of their own."""
    graphs: list[Recorded] = field(default_factory=list)
    policies: list[tuple[bool, bool]] = field(default_factory=list)
    """(TF32 in products, cuDNN takes what its heuristic names) at every call of the library."""
    streams: list[FakeStream] = field(default_factory=list)
    recording: Recorded | None = None
    kept_for: list[str] = field(default_factory=list)
    """Streams that memory was recorded for, one entry per buffer."""

    def new_stream(self, *_: object) -> FakeStream:
        """One more."""
        self.streams.append(FakeStream("recording"))
        EVERY_STREAM.append(self.streams[-1])
        return self.streams[-1]

    def synchronize(self, *_: object) -> None:
        """Wait for the whole device, which cannot be recorded."""
        if self.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Recorded, *, stream: FakeStream | None = None, **_: object) -> Iterator[None]:
        self.recording = graph
        stream = stream or self.new_stream()
        for other in EVERY_STREAM:
            other.ended = frozenset()  # what came before is no part of this graph
        try:
            with self.stream(stream):
                yield
        finally:
            self.recording = None
            self.graphs.append(graph)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put it in place of what the executable asks of torch; library calls note the numeric policy they met."""
    fake = FakeCuda()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)  # `plain_math` sets the policy of the process
    # torch's own test harness, where another test loaded it, forbids that
    names = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(names, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "current_stream", lambda *_: fake.current)
    monkeypatch.setattr(cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(cuda, "stream", fake.stream)
    monkeypatch.setattr(cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(streams, "_FREE", {})
    monkeypatch.setattr(cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(cuda, "graph", fake.graph)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: fake.kept_for.append(stream.name))
    launcher = execute.BoundCall.launcher

    def recorded(real: Callable[[], None], *, last: bool = False) -> Callable[[], None]:
        """`last`: writes what outlives the plan, and does so only when the graph is replayed, as on a device."""

        def launch() -> None:
            if fake.recording is not None:
                fake.recording.add(real, fake.current)
            if fake.recording is None or not last:
                real()

        return launch

    def noting(self: execute.BoundCall, inputs: object, outputs: object) -> object:
        launch = recorded(launcher(self, inputs, outputs))  # type: ignore[arg-type]

        def noted() -> None:
            cudnn = torch.backends.cudnn
            fake.policies.append((torch.backends.cuda.matmul.allow_tf32, cudnn.deterministic and not cudnn.benchmark))
            launch()

        return noted

    monkeypatch.setattr(execute.BoundCall, "launcher", noting)
    copies = cuda_executable.CudaExecutable._copied_outputs
    monkeypatch.setattr(
        cuda_executable.CudaExecutable, "_copied_outputs", lambda self: [recorded(c) for c in copies(self)]
    )
    into = cuda_executable.CudaExecutable._copies_into
    monkeypatch.setattr(
        cuda_executable.CudaExecutable, "_copies_into", lambda self, w: [recorded(c, last=True) for c in into(self, w)]
    )
    return fake
