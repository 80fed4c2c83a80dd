"""What the survey of a GPU asks of its calibration, without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.device.cuda.facts import GpuFacts
from weft.ir.declined import Declined
from weft.options import Options
from weft.platform.cuda import platform as gpu
from weft.platform.cuda.products import Products
from weft.runtime import streams


def test_the_survey_lets_the_framework_measure_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def facts(cache: Path, *, device: int, calibrate: bool, matmul: Products, stream: int) -> GpuFacts:
        assert calibrate
        asked.update(stream=stream, cache=cache, device=device, matmul=matmul, other=matmul("i8", 64))
        return GpuFacts()

    monkeypatch.setattr(gpu, "gpu_facts", facts)
    monkeypatch.setattr(gpu, "device_of", lambda options: torch.device("cuda", 3))
    monkeypatch.setattr(streams, "_FREE", {torch.device("cuda", 3): [SimpleNamespace(cuda_stream=77)]})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(gpu, "find_nvrtc", lambda: Declined("none here"))
    found, compiler, environment = gpu.survey(Options(device="cuda:3", cache_dir=tmp_path, allow_generated=False))
    assert found == GpuFacts() and compiler is None and environment["gpu"] == GpuFacts().name
    assert asked["cache"] == tmp_path and asked["device"] == 3 and asked["stream"] == 77
    assert isinstance(asked["matmul"], Products) and asked["other"] is None
