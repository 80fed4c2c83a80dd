from __future__ import annotations

import pytest
from tests.device.cuda.conftest import FakeGpu

from weft.device.cuda import describe as module
from weft.device.cuda.describe import describe
from weft.ir.declined import Declined


def test_a_gpu_in_a_line(gpu: FakeGpu) -> None:
    assert describe()["gpu"] == (
        "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 140 GiB, driver for CUDA 13.0"
    )


def test_several(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGpu, "cuDeviceGetCount", lambda self: (2,))
    gpu.attributes[75] = 7
    lines = describe()
    assert set(lines) == {"gpu 0", "gpu 1", "nvrtc"}
    assert lines["gpu 1"].startswith("not usable (NVIDIA H200 has compute capability 7.0; Weft needs 8.0")


def test_none(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.fails["cuInit"] = 100
    monkeypatch.setattr(module, "find_nvrtc", lambda: Declined("not installed"))
    assert describe() == {
        "gpu": "none (cuInit failed: CUDA_ERROR_NO_DEVICE (100) [W302])",
        "nvrtc": "none (not installed): library plans only on a GPU",
    }
