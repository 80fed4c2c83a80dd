"""Memory, streams and graphs: what is taken is given back, also when something fails on the way."""

from __future__ import annotations

from typing import Any

import pytest
from tests.device.cuda.conftest import FakeGpu

from weft.device.cuda.api import CudaError
from weft.device.cuda.streams import Stream, copy, device_memory, priorities

ANSWERS = {
    "cuMemAlloc": lambda api: (api.CUdeviceptr(4096),),
    "cuMemFree": lambda api: (),
    "cuStreamCreate": lambda api: (api.CUstream(11),),
    "cuStreamCreateWithPriority": lambda api: (api.CUstream(12),),
    "cuStreamDestroy": lambda api: (),
    "cuStreamWaitEvent": lambda api: (),
    "cuMemcpyDtoDAsync": lambda api: (),
    "cuCtxGetStreamPriorityRange": lambda api: (0, -5),
    "cuStreamSynchronize": lambda api: (),
    "cuStreamBeginCapture": lambda api: (),
    "cuStreamEndCapture": lambda api: (api.CUgraph(21),),
    "cuGraphInstantiate": lambda api: (api.CUgraphExec(31),),
    "cuGraphLaunch": lambda api: (),
    "cuGraphDestroy": lambda api: (),
    "cuGraphExecDestroy": lambda api: (),
    "cuEventCreate": lambda api: (api.CUevent(41),),
    "cuEventDestroy": lambda api: (),
    "cuEventRecord": lambda api: (),
    "cuEventSynchronize": lambda api: (),
    "cuEventElapsedTime": lambda api: (0.25,),
}


@pytest.fixture
def device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    def replacement(name: str) -> Any:
        def function(*arguments: Any) -> Any:
            gpu.calls.append((name, *arguments))
            return (gpu.api.CUresult(gpu.fails.get(name, 0)), *ANSWERS[name](gpu.api))

        function.__name__ = name
        return function

    for name in ANSWERS:
        monkeypatch.setattr(gpu.api, name, replacement(name))
    return gpu


def names(gpu: FakeGpu) -> list[str]:
    return [c[0] for c in gpu.calls if c[0] in ANSWERS]


def test_memory_is_freed(device: FakeGpu) -> None:
    def use() -> None:
        with device_memory(64) as address:
            assert address == 4096
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert names(device) == ["cuMemAlloc", "cuMemFree"]
    device.fails["cuMemAlloc"] = 2
    with pytest.raises(CudaError, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\): 64 bytes"), device_memory(64):
        pass


def test_times_are_microseconds_between_events(device: FakeGpu) -> None:
    stream = Stream()
    seen: list[int] = []
    assert stream.time_us(seen.append) == 250.0 and seen == [11]
    order = names(device)[-4:]
    assert order == ["cuEventRecord", "cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"]
    stream.close()
    assert names(device)[-3:] == ["cuEventDestroy", "cuEventDestroy", "cuStreamDestroy"]


def test_a_graph_is_captured_once_and_launched_often(device: FakeGpu) -> None:
    captured: list[Any]
    stream, captured = Stream(), []
    with stream.graph(captured.append) as graph:
        graph(11)
        graph(12)
    assert captured == [11] and [int(c[1]) for c in device.of("cuGraphLaunch")] == [11, 12]
    assert names(device)[-2:] == ["cuStreamSynchronize", "cuGraphExecDestroy"]
    assert len(device.of("cuGraphDestroy")) == 1


def test_a_capture_that_fails_is_ended(device: FakeGpu) -> None:
    stream = Stream()

    def work(handle: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), stream.graph(work):
        pass
    assert names(device)[-3:] == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy"]
    device.fails["cuGraphInstantiate"] = 1
    with pytest.raises(CudaError, match="cuGraphInstantiate failed"), stream.graph(lambda handle: None):
        pass
    assert names(device)[-1] == "cuGraphDestroy"


def test_a_stream_of_a_priority_works_beside_another_one(device: FakeGpu) -> None:
    assert priorities() == (0, -5)
    device.calls.clear()
    worked: list[int] = []
    stream = Stream(priority=-5)
    assert device.calls[0] == ("cuStreamCreateWithPriority", 1, -5)
    device.calls.clear()
    stream.fork(worked.append, 77)
    stream.join(77)
    assert worked == [12]
    assert names(device) == ["cuEventRecord", "cuStreamWaitEvent", "cuEventRecord", "cuStreamWaitEvent"]
    assert [int(device.calls[0][2]), int(device.calls[1][1])] == [77, 12], "it begins behind what is there"
    assert [int(device.calls[2][2]), int(device.calls[3][1])] == [12, 77], "and the other one waits for it"
    device.calls.clear()
    copy(0x200, 0x100, 48, 77)
    *call, on = map(int, device.calls[0][1:])
    assert (device.calls[0][0], *call, on) == ("cuMemcpyDtoDAsync", 0x200, 0x100, 48, 77)
    stream.close()
    assert names(device)[-1] == "cuStreamDestroy"
