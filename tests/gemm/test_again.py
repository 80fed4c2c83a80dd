"""A kernel against the library's algorithms: in a worker, by the gate and the rounds of all kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.device.cuda.stand_in import cublaslt
from tests.tune.cuda_fake import FakeCudaTransport, FakeGpu

from weft.device.cuda.cublaslt import CublasLt
from weft.device.cuda.facts import profile
from weft.errors import DeviceError
from weft.gemm import again, library
from weft.gemm.epilogue import NAMED, epilogue
from weft.gemm.spec import LAYOUTS, Gemm, typed
from weft.generate.library.execute import BoundCall
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Kernel, Launch, LibraryCall, Pointer, Schedule
from weft.tune.cuda_subject import CallSubject, GpuSubject
from weft.tune.verify import Arena, Binding, build_reference, compare

FACTS = profile("h200")


@pytest.fixture(scope="module")
def lt(tmp_path_factory: pytest.TempPathFactory) -> CublasLt:
    return CublasLt(cublaslt(tmp_path_factory.mktemp("stub")))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, lt: CublasLt) -> None:
    """The stand-in library computes on the host, where a stream is a number."""
    library._offer.cache_clear()
    monkeypatch.setattr(library, "find_cublaslt", lambda: lt)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))


class Ours:
    """A kernel of ours as a subject: right, but for what is done to its result."""

    deterministic, transforms, recordable, packed_bytes = True, False, True, 0
    reads: frozenset[int] = frozenset()

    def __init__(self, g: Gemm, gpu: FakeGpu, us: float, change: Callable[[torch.Tensor, FakeGpu], Any]) -> None:
        self.gemm, self.gpu, self.us, self.change = g, gpu, us, change

    def enqueue(self, arena: Arena, poison: int) -> Binding:
        def call() -> None:
            a, b, *others = (x.double() for x in arena.input_tensors)
            g, out = self.gemm, arena.output_tensors[0]
            product = (a.mT if g.layout[0] == "t" else a) @ (b.mT if g.layout[1] == "t" else b)
            named = {name: x for (name, _), x in zip(g.epilogue.operands, others, strict=False)}
            out.copy_(library.torch_value(g.epilogue, product, named))
            self.gpu.now_us += self.us
            self.change(out, self.gpu)

        return Binding(call, (), (arena,))

    def rotate(self, arenas: Any, base: Binding) -> list[Binding]:
        return [self.enqueue(arena, 0) for arena in arenas]

    def misbehaviour(self) -> None:
        return None


class Worker(FakeCudaTransport):
    """Of a GPU whose kernels take 4 us and whose library takes 5."""

    def __init__(self, g: Gemm, change: Callable[[torch.Tensor, FakeGpu], Any] = lambda out, gpu: None) -> None:
        super().__init__()
        self.gemm, self.change = g, change

    def make(self, problem: Problem, kernel: Kernel, path: str, gpu: Any) -> GpuSubject:
        if isinstance(kernel, LibraryCall):
            return CallSubject(problem, kernel, gpu)
        return Ours(self.gemm, gpu, 4.0, self.change)


SOURCE = CudaSource(
    Schedule("cuda", (("template", "tma"),)), "", (Launch("k", (1, 1, 1), (32, 1, 1), (Pointer("in"), Pointer("out"))),)
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be measured compiles."""
    from weft.tune.cuda_site import CudaSite
    from weft.tune.site import Built

    monkeypatch.setattr(CudaSite, "build", lambda self, kernel, left_s: Built("/nonexistent.cubin", 0.1))


def against(g: Gemm, worker: Worker, cache: Path) -> dict[str, Any]:
    return again.against_cublas(g, SOURCE, FACTS, None, cache, transport=worker)  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiled")
def test_both_sides_have_times_from_one_worker_and_are_known_again(tmp_path: Path) -> None:
    g = Gemm(16, 24, 32, layout="nt", dtype=DType.F32, epilogue=epilogue("bias_relu"))
    worker = Worker(g)
    told = against(g, worker, tmp_path)
    assert told["weft"]["median_us"] == 4.0 and told["library"]["median_us"] == 5.0 and told["ratio"] == 1.25
    assert told["refused"] == {} and told["peer"].endswith("2 algorithms")  # what the heuristic lacks is no refusal
    assert told["library"]["name"] in ("algorithm 0", "algorithm 2", "algorithm 1")
    assert 0 < told["weft"]["error_of_limit"] <= 1
    assert [m["op"] for m in worker.messages] == ["hello", "trial", "bye"]
    (asked,) = [m for m in worker.messages if m["op"] == "trial"]
    assert asked["policy"]["cache"] == "rotated" and asked["problem"]["finite"]  # type: ignore[call-overload,index]
    other = Worker(g)
    assert against(g, other, tmp_path) == told and other.started == 0


def _wrong(out: torch.Tensor, gpu: FakeGpu) -> None:
    out[0, 0] += 1


def _crash(out: torch.Tensor, gpu: FakeGpu) -> None:
    gpu.sound, gpu.pending = False, RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("change", "verdict"), [(_wrong, "wrong"), (_crash, "crash")])
def test_a_kernel_that_fails_in_the_worker_has_no_time(change: Any, verdict: str, tmp_path: Path) -> None:
    g = Gemm(16, 24, 32, dtype=DType.F32)
    worker = Worker(g, change)
    told = against(g, worker, tmp_path)
    assert told["ratio"] is None and "weft" not in told
    (why,) = told["refused"].values()
    assert why.startswith(f"{verdict}: ")
    assert told["library"]["median_us"] == 5.0  # the others went on, in another worker where that was lost
    assert worker.started == (2 if verdict == "crash" else 1)


def test_the_library_alone(tmp_path: Path) -> None:
    g = Gemm(16, 24, 32, dtype=DType.F32, most=3)
    found = again.library_alone(g, FACTS, tmp_path, transport=Worker(g))
    assert found.best is not None and found.best.median_us == 5.0 and found.measured
    assert {o.state for o in found.outcomes} == {"ok"} and len(found.outcomes) == 2


def test_without_the_library_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "find_cublaslt", lambda: Declined("none here"))
    g = Gemm(16, 24, 32, dtype=DType.F32)
    worker = Worker(g)
    with pytest.raises(DeviceError, match="nothing to compare with: none here"):
        against(g, worker, tmp_path)
    assert worker.started == 0


def errors_of(g: Gemm) -> list[str]:
    """What the stand-in's algorithms get wrong, by the gate."""
    problem = replace(g.problem(), finite=True)
    case = build_reference(problem, seed=0).timed
    found = []
    for schedule, call in library.contenders(g, tf32=False):
        out = torch.full((g.m, g.n), float("nan"), dtype=case.expected[0].rounded.dtype)
        try:
            BoundCall(call, {}).run(list(case.inputs), out)
        except DeviceError as error:
            if library.ABSENT not in str(error):
                raise
            continue
        finding = compare(out, case.expected[0], str(schedule))
        found.append(finding.error if finding.verdict.value != "ok" else "")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_library_gets_every_layout_and_epilogue_right(layout: str) -> None:
    for text in (*NAMED, "silu(acc * 0.5 + row) + residual", "max(acc, bias) / 2 - 1"):
        assert errors_of(Gemm(5, 7, 3, layout=layout, dtype=DType.F32, epilogue=epilogue(text))) == ["", ""], text


@pytest.mark.parametrize("types", ["e4m3", "e4m3_e5m2", "e5m2_e4m3", "i8"])
def test_the_library_gets_scales_of_bytes_right(types: str) -> None:
    for text in NAMED:
        assert errors_of(typed(Gemm(16, 32, 48, layout="nt", epilogue=epilogue(text)), types)) == ["", ""], text


@pytest.mark.parametrize(("types", "layout"), [("e5m2", "nt"), ("e4m3", "nn"), ("e4m3", "tn"), ("i8", "nn")])
def test_what_the_library_lacks_has_no_algorithm(types: str, layout: str) -> None:
    assert errors_of(typed(Gemm(16, 32, 48, layout=layout), types)) == []
