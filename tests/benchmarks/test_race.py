"""The race of kernels against the library on the host: a stand-in library that computes, graphs that only count."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from benchmarks.harness import race
from benchmarks.harness.race import Contender, Race
from tests.device.cuda.stand_in import cublaslt

from weft.device.cuda.cublaslt import CublasLt
from weft.errors import DeviceError
from weft.gemm.epilogue import NAMED, epilogue
from weft.gemm.spec import LAYOUTS, Gemm, typed
from weft.ir.types import DType


class Graph:
    """Counts what is recorded; a replay takes as long as the recorded contender says."""

    recording: ClassVar[Graph | None] = None
    now_us: ClassVar[float] = 0.0

    def __init__(self) -> None:
        self.us = 0.0

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        Graph.recording = self

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        Graph.now_us += self.us


class Event:
    """Reads the invented clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.us = Graph.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.us - self.us) / 1e3


class Stream:
    """Does everything at once."""

    cuda_stream = 7

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


@pytest.fixture(scope="module")
def lt(tmp_path_factory: pytest.TempPathFactory) -> CublasLt:
    return CublasLt(cublaslt(tmp_path_factory.mktemp("stub")))


def add(r: Race, name: str, us: float, change: Callable[[torch.Tensor], Any] = lambda out: None) -> Contender:
    """A kernel that takes so long; `change` does something to its right result."""

    def launch(number: int) -> Callable[[int], None]:
        def run(stream: int) -> None:
            assert stream == 7
            if Graph.recording is not None:
                Graph.recording.us += us
                return
            r.outputs[number].copy_(r.exact if number == 0 else torch.zeros(()))
            change(r.outputs[number])

        return run

    return r._add(Contender("weft", name, [launch(i) for i in range(len(r.inputs))]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_library_gets_every_layout_and_epilogue_right(layout: str, lt: CublasLt) -> None:
    for text in (*NAMED, "silu(acc * 0.5 + row) + residual", "max(acc, bias) / 2 - 1"):
        r = Race(Gemm(5, 7, 3, layout=layout, dtype=DType.F32, epilogue=epilogue(text)), 1)
        found = r.add_library(lt)
        assert [x.name for x in found] == ["algorithm 0", "algorithm 2"]
        for x in found:
            r._verify(x)
            assert not x.refused, (text, x.refused)
            assert x.error < 1e-6


@pytest.mark.parametrize("types", ["e4m3", "e4m3_e5m2", "e5m2_e4m3"])
def test_the_library_gets_scales_of_8_bit_floats_right(types: str, lt: CublasLt) -> None:
    for text in NAMED:
        r = Race(typed(Gemm(16, 32, 48, layout="nt", epilogue=epilogue(text)), types), 1)
        assert r.inputs[0][0].element_size() == r.inputs[0][1].element_size() == 1
        assert r.outputs[0].dtype is torch.bfloat16
        found = r.add_library(lt)
        assert [x.name for x in found] == ["algorithm 0", "algorithm 2"]
        for x in found:
            r._verify(x)
            assert not x.refused, (text, x.refused)
            assert 0 < x.error < 4e-3


def test_the_library_gets_sums_of_integers_and_what_follows_right(lt: CublasLt) -> None:
    for text in NAMED:
        r = Race(typed(Gemm(16, 32, 48, layout="nt", epilogue=epilogue(text)), "i8"), 1)
        found = r.add_library(lt)
        assert [x.name for x in found] == ["algorithm 0", "algorithm 2"]
        for x in found:
            r._verify(x)
            assert not x.refused, (text, x.refused)
            assert 0 < x.error < 4e-3


@pytest.mark.parametrize(("types", "layout"), [("e5m2", "nt"), ("e4m3", "nn"), ("e4m3", "tn"), ("i8", "nn")])
def test_what_the_library_lacks_has_no_algorithm(types: str, layout: str, lt: CublasLt) -> None:
    assert Race(typed(Gemm(16, 32, 48, layout=layout), types), 1).add_library(lt) == []


def test_operands_of_bytes_are_normal_numbers_of_a_spread_of_32() -> None:
    g = typed(Gemm(256, 192, 160, layout="nt", epilogue=epilogue("bias")), "i8")
    r = Race(g, 1)
    a, b, bias, *scales = r.inputs[0]
    assert a.dtype is b.dtype is torch.int8
    assert bias.dtype is r.outputs[0].dtype is torch.bfloat16
    assert 30 < a.double().std() < 34
    assert a.min() >= -128
    wanted = (a.double() @ b.double().mT) * scales[0].double() * scales[1].double() + bias.double()
    torch.testing.assert_close(r.exact, wanted)
    assert 0.5 < r.exact.std() < 2


def test_sums_of_8_bit_floats_have_the_limit_of_their_results() -> None:
    for fast in (False, True):
        assert Race(typed(Gemm(16, 32, 48, layout="nt", fast=fast), "e4m3"), 1)._limit == race.LIMITS[DType.BF16]


def test_medians_of_interleaved_rounds_tell_who_is_faster() -> None:
    r = Race(Gemm(8, 8, 8), 1)
    times = {"slow": 9.0, "quick": 3.0, "other": 4.0, "slower": 10.0, "wrong": 1.0}
    for name, us in times.items():
        add(r, name, us, (lambda out: out.mul_(1.01)) if name == "wrong" else lambda out: None)
    heard: list[str] = []
    found = {x.name: x for x in r.run(heard.append)}
    assert {n: x.median_us for n, x in found.items()} == pytest.approx({**times, "wrong": math.inf})
    assert "wrong: error 1.00e-02" in found["wrong"].refused
    assert len(found["quick"].samples_us) == race.ROUNDS
    assert len(found["slower"].samples_us) == race.SCREENING  # not among the best three
    assert len(set(heard[len(times) : len(times) + 4])) == 4  # a round has each once


def test_a_kernel_that_leaves_holes_changes_its_mind_or_fails_is_refused() -> None:
    r = Race(Gemm(8, 8, 8), 1)
    calls: list[int] = []

    def fickle(out: torch.Tensor) -> None:
        calls.append(1)
        out[0, 0] += 1e-3 * len(calls)

    def fail(out: torch.Tensor) -> None:
        raise DeviceError(problem="cannot be launched")

    add(r, "holes", 1.0, lambda out: out[3, 3:].fill_(math.nan))
    add(r, "fickle", 1.0, fickle)
    add(r, "fails", 1.0, fail)
    found = {x.name: x.refused for x in r.run()}
    assert "wrong: error nan" in found["holes"]
    assert found["fickle"] == "its result changes from launch to launch"
    assert found["fails"] == "cannot be launched [W301]"


def test_operands_rotate_through_three_times_the_cache() -> None:
    g = Gemm(64, 64, 64)  # 24 KiB a set
    assert len(Race(g, 1 << 20).inputs) == 128
    assert len(Race(g, 1 << 18).inputs) == 32
    assert len(Race(g, 1 << 10).inputs) == 1
    r = Race(g, 1 << 18)
    assert len({x.data_ptr() for x, _ in r.inputs} | {x.data_ptr() for x in r.outputs}) == 64
    assert not torch.equal(r.inputs[0][0], r.inputs[1][0])
    add(r, "one", 2.0)
    (graph, launches) = r._record(r.contenders[0])
    assert launches == 128  # 200 us, whole turns through 32 sets
    assert graph.us == 256  # type: ignore[attr-defined]
