"""When each kernel ran: kernels find their steps, events stand in for a profiler, the CPU goes by its clock."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, install
from tests.runtime.plans import library_plan
from tests.runtime.test_cuda_executable import inputs, linked, products
from tests.typed import approx

from weft.kernels.timeline import Span
from weft.runtime import timeline as module
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable, InputError, Linked
from weft.runtime.timeline import MARKER, assign, step_names, timeline


def spans(*names: str) -> list[Span]:
    return [Span(name, 10.0 + 5.0 * k, 3.0) for k, name in enumerate(names)]


def test_kernels_of_equal_name_keep_their_order() -> None:
    marked = spans(MARKER, "gemm", MARKER, "k1", "copy", MARKER, "gemm", MARKER, "k1", MARKER)
    replayed = spans("gemm", "k1", "copy", "gemm", "k1", "memset")
    found = assign(list(reversed(replayed)), marked)
    assert [(s.name, s.step) for s in found] == [
        ("gemm", 0), ("k1", 1), ("copy", 1), ("gemm", 2), ("k1", 3), ("memset", -1),
    ]  # fmt: skip
    assert found[0].start_us == 0.0 and found[1].start_us == 5.0
    assert assign([], marked) == ()


def test_branches_that_run_at_once_are_told_apart_by_name() -> None:
    marked = spans(MARKER, "a", MARKER, "b", MARKER)
    assert [(s.name, s.step) for s in assign(spans("b", "a"), marked)] == [("b", 1), ("a", 0)]


class Event:
    """Ten microseconds after the one before."""

    count = 0

    def __init__(self, **_: object) -> None:
        self.at = -1

    def record(self) -> None:
        self.at = Event.count = Event.count + 1

    def elapsed_time(self, later: Event) -> float:
        assert 0 < self.at <= later.at
        return (later.at - self.at) / 100


def test_events_where_there_is_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: FakeCuda = install(monkeypatch)
    exe = CudaExecutable(linked(), device=torch.device("cpu"))
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(module, "_record", lambda run: [])
    found = timeline(exe, inputs())
    assert found.source == "events" and found.microseconds == pytest.approx(30.0)
    assert [(s.step, s.start_us, s.duration_us) for s in found.spans] == [
        (k, approx(10.0 * k), approx(10.0)) for k in range(3)
    ]
    assert [s.name for s in found.spans] == ["library: matmul", "library: tanh", "library: matmul"]
    assert slept and cuda.graphs[0].replays == 1


def test_the_profiler_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    exe = CudaExecutable(linked(), device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    answers = [spans(MARKER, "gemm", MARKER, "tanh", MARKER, "gemm", MARKER), spans("gemm", "tanh", "gemm")]
    monkeypatch.setattr(module, "_record", lambda run: (run(), answers.pop(0))[1])
    found = timeline(exe, inputs())
    assert found.source == "profiler" and [s.step for s in found.spans] == [0, 1, 2]


def test_the_cpu_goes_by_its_clock() -> None:
    graph = products()
    exe = Executable(Linked(graph, library_plan(graph), {}, None))
    found = timeline(exe, inputs())
    assert found.source == "clock" and [s.name for s in found.spans] == step_names(exe)
    ends = [s.start_us + s.duration_us for s in found.spans]
    assert [s.start_us for s in found.spans[1:]] == ends[:-1] and found.microseconds == ends[-1]
    with pytest.raises(InputError):
        timeline(exe, inputs()[:1])
