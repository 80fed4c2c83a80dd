"""A plan as stages on a stand-in for the GPU: how steps are grouped, results of files, what is declined."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.colocate.fake_device import FakeDevice
from tests.runtime.fake_cuda import EVERY_STREAM, FakeCuda, FakeStream, Recorded, install
from tests.runtime.plans import library_plan

from weft.colocate import staged_plan
from weft.colocate.inference_files import TensorSpec
from weft.colocate.job import JobError, parse_job
from weft.colocate.staged_plan import StagedPlan, network_job, stages_of
from weft.device.cuda import streams as gpu_streams
from weft.device.cuda.facts import profile
from weft.errors import KernelDeclinedError
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.plan import IndexCheck
from weft.kernels.source import CudaSource, Launch, Schedule
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked

FACTS = {"gpu": "NVIDIA H200", "capability": "90"}
CPU = torch.device("cpu")
TEXT = 'name = "net"\nkind = "network"\nmodel = "n.onnx"\ninputs = "in"\noutputs = "out"\n'
LOW, OTHER = 7, 8


@pytest.mark.parametrize(
    ("us", "most", "expected"),
    [
        ([10, 20, 30, 5], 60, [3, 1]),
        ([10, 20, 30, 5], 65, [4]),
        ([100, 1, 1, 100, 1], 60, [1, 2, 1, 1]),
        ([100, 100], 1, [1, 1]),
        ([5], 60, [1]),
    ],
)
def test_steps_that_follow_each_other_are_stages_of_a_bounded_time(
    us: list[float], most: float, expected: list[int]
) -> None:
    assert stages_of(us, most) == expected


class Mark:
    """An event; each is 20 us behind the one that was recorded before."""

    clock = itertools.count()

    def __init__(self, **_: object) -> None:
        self.at = 0

    def record(self, _stream: object) -> None:
        self.at = next(self.clock)

    def elapsed_time(self, other: Mark) -> float:
        return (other.at - self.at) * 0.02


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Streams are numbers for the driver, graphs their own handles; copies and launches happen at once."""
    fake = install(monkeypatch)
    api = SimpleNamespace(
        CUstream=int, CUgraphExec=lambda x: x, cuGraphLaunch=lambda graph, _stream: graph.replay(),
        cuMemHostRegister=lambda *_: None, cuMemHostUnregister=lambda *_: None,
    )  # fmt: skip

    def call(function: Callable[..., object], *args: object, detail: str = "") -> object:
        return function(*args)

    for module in (staged_plan, gpu_streams):
        monkeypatch.setattr(module, "driver_api", lambda: api)
        monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(FakeStream, "cuda_stream", property(lambda self: LOW if self.name == "low" else OTHER))
    monkeypatch.setattr(Recorded, "raw_cuda_graph_exec", lambda self: self, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", stream_of)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(Mark.clock) * 1000)
    return fake


class AtOnce(FakeDevice):
    """What is put on streams happens."""

    def launch(self, graph: Any, stream: int) -> None:
        graph.replay()

    def fill(self, address: int, place: int, size: int, stream: int) -> None:
        ctypes.memmove(address, place, size)

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        ctypes.memmove(place, address, size)


def chain(dtype: DType = DType.F32, steps: int = 5) -> Graph:
    b = GraphBuilder()
    node = b.input(TensorType(dtype, (4, 8)), "x")
    for _ in range(steps):
        node = b.apply(Prim.TANH, node)
    return b.build([node], ["y"])


def plan_of(graph: Graph) -> CudaExecutable:
    return CudaExecutable(Linked(graph, library_plan(graph), {}, None, None, 0, FACTS), device=CPU)


def stream_of(handle: int) -> Any:
    EVERY_STREAM.append(FakeStream("low" if handle == LOW else "other"))
    return EVERY_STREAM[-1]


def low() -> Any:
    return stream_of(LOW)


def test_a_plan_in_stages_gives_its_bits_on_every_stream(cuda: FakeCuda) -> None:
    plan = plan_of(chain())
    found = StagedPlan(plan, low(), AtOnce(), stage_us=2.9)
    assert found.lengths == [2, 2, 1] and len(found.stage_us) == 3
    assert found.inputs == (TensorSpec("x", (4, 8), "float32"),) and found.outputs[0].name == "y"
    assert found.add(OTHER) and not found.add(OTHER) and not found.add(LOW)
    for streams in ([LOW], [OTHER], [LOW, OTHER], [99]):
        x = torch.randn(4, 8)
        y = np.zeros((4, 8), np.float32)
        found.fill([x.data_ptr()], LOW)
        for k in range(3):
            found.launch(k, streams[k % len(streams)])
        found.fetch([y.ctypes.data], LOW)
        assert np.array_equal(y, plan(x)[0].numpy())
    found.close()


def test_times_of_stages_are_an_inference_of_many_back_to_back(cuda: FakeCuda) -> None:
    found = StagedPlan(plan_of(chain()), low(), AtOnce(), stage_us=2.9)
    assert sum(found.stage_us) == pytest.approx(20.0 / staged_plan._INFERENCES), "as the events say"
    assert max(found.stage_us) == pytest.approx(min(found.stage_us))


def test_values_of_indices_are_no_results(cuda: FakeCuda) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4,)), "x")
    y = b.apply(Prim.TANH, x)
    graph = b.build([y, b.apply(Prim.TANH, y)], ["y"])
    plan = replace(library_plan(graph), checks=(IndexCheck(output=1, low=0, bound=4, operator="", input=0),))
    found = StagedPlan(CudaExecutable(Linked(graph, plan, {}, None, None, 0, FACTS), device=CPU), low(), AtOnce())
    assert [x.name for x in found.outputs] == ["y"]
    place = np.zeros(4, np.float32)
    found.fetch([place.ctypes.data], LOW)
    assert np.array_equal(place, found.executable.static_outputs[0].numpy())


def test_types_that_no_file_holds_are_declined(cuda: FakeCuda) -> None:
    with pytest.raises(KernelDeclinedError, match=r"x is bf16, which no \.npz file holds"):
        StagedPlan(plan_of(chain(DType.BF16)), low(), AtOnce())


def test_a_value_repeated_is_declined(cuda: FakeCuda) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 8)), "x")
    graph = b.build([b.broadcast(b.apply(Prim.TANH, x), (4, 8))], ["y"])
    with pytest.raises(KernelDeclinedError, match="a value repeated"):
        StagedPlan(plan_of(graph), low(), AtOnce())


def test_a_job_from_files_to_files(cuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    given = [torch.randn(4, 8) for _ in range(3)]
    for k, x in enumerate(given):
        np.savez(tmp_path / "in" / f"{k}.npz", x.numpy())
    plan, device = plan_of(chain()), AtOnce()
    spec = parse_job(TEXT + "passes = 1\n")
    with ExitStack() as held:
        job = network_job(spec, tmp_path, plan, device=device, stream=low(), held=held, stage_us=2.9)
        assert job.name == "net" and job.kernel_us == max(job.network.stage_us)
        while not job.is_done():
            job.plain(LOW, 0.0)
        job.finish()
        assert (job.progress().passes, job.progress().stage, job.progress().blocks) == (1, 0, 0)
    for k, x in enumerate(given):
        with np.load(tmp_path / "out" / f"{k}.npz") as found:
            assert found.files == ["y"] and np.array_equal(found["y"], plan(x)[0].numpy())


def test_more_memory_than_it_may_have(cuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", np.zeros((4, 8), np.float32))
    with ExitStack() as held, pytest.raises(JobError, match=r"its plan takes [0-9]+ bytes, it may have 64"):
        network_job(
            parse_job(TEXT + 'memory = "64B"\n'), tmp_path, plan_of(chain()), device=AtOnce(), stream=low(),
            held=held,
        )  # fmt: skip


def test_inputs_that_are_none_of_the_networks(cuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", np.zeros((4, 9), np.float32))
    with ExitStack() as held, pytest.raises(JobError, match=r"0\.npz: inputs: expected x: float32\[4, 8\]"):
        network_job(
            parse_job(TEXT), tmp_path, plan_of(chain()), device=AtOnce(), stream=low(), held=held
        )  # fmt: skip


@pytest.mark.parametrize(("cluster", "reason"), [((1, 1, 1), ""), ((2, 1, 1), "kernels in clusters may find no room")])
def test_clusters_are_declined_on_the_rest_of_a_split(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, cluster: tuple[int, int, int], reason: str
) -> None:
    found = StagedPlan(plan_of(chain()), low(), AtOnce())
    launch = Launch("k", (4, 1, 1), (32, 1, 1), (), cluster=cluster)
    steps = [SimpleNamespace(kernel=CudaSource(Schedule("cuda"), "text", (launch,)))]
    found._held = [SimpleNamespace(plan=SimpleNamespace(steps=steps))]  # type: ignore[list-item]
    monkeypatch.setattr(staged_plan, "fits", lambda *_: None)
    why = found.fits(profile("h200"), 36)
    assert (why.reason.startswith(reason) if why else reason == "") and (why is None) == (cluster == (1, 1, 1))
