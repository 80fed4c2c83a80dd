"""Which device a compilation is for, without a GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from weft import api
from weft.device.cuda.facts import GpuFacts
from weft.errors import DeviceError, OptionError
from weft.options import Options
from weft.pipeline.setting import limits_of, survey
from weft.platform.cuda import platform as gpu
from weft.platform.cuda.platform import Cuda
from weft.platform.table import platform_of


@pytest.mark.parametrize(("device", "looked_for"), [("cpu", False), ("cuda", True), ("cuda:0", True), ("cuda:1", True)])
def test_what_only_gpus_have_is_looked_for_on_any_of_them(device: str, looked_for: bool) -> None:
    assert limits_of(Options(device=device)).attention is looked_for


@pytest.mark.parametrize(
    ("device", "index", "named"), [("cuda", 0, "cuda"), ("cuda", 1, "cuda:1"), ("cuda:1", 1, "cuda:1")]
)
def test_kernels_are_measured_on_the_gpu_that_runs_them(
    device: str, index: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measuring process knows nothing of which GPU is current here."""
    monkeypatch.setattr(gpu, "survey", lambda options, calibrate: (GpuFacts(), None, {}))
    monkeypatch.setattr(gpu, "device_of", lambda options: torch.device("cuda", index))
    setting = survey(Options(device=device, cache_dir=tmp_path))
    assert setting.platform.device == torch.device("cuda", index)
    assert setting.options.device == named


def test_a_gpu_that_is_not_there_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for before anything else is; the framework's own refusal is no error of ours."""

    def properties(device: torch.device) -> SimpleNamespace:
        if device.index >= 2:
            raise AssertionError("Invalid device id")
        return SimpleNamespace(total_memory=device.index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert [Cuda.room_bytes(Options(device=d)) for d in ("cuda", "cuda:1")] == [0, 1]
    with pytest.raises(DeviceError, match=r"device='cuda:77', but there are 2 GPUs .*W301"):
        Cuda.room_bytes(Options(device="cuda:77"))


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "cpu:x", "tpu", "cuda:1\n"])
def test_a_device_that_is_none_is_an_option_at_fault(device: str) -> None:
    with pytest.raises(OptionError, match="'cpu', 'cuda' or 'cuda:N'"):
        api.compile(nn.ReLU(), torch.ones(2), device=device)


class Moved(nn.Module):
    """Notes where it is to go, for there is nothing to go to."""

    place: torch.device | None = None

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device=device))

    def to(self, place: torch.device) -> Moved:  # type: ignore[override]
        self.place = place
        return self


@pytest.mark.parametrize(
    ("device", "place"),
    [("cuda:1", None), ("cuda", None), ("cuda:0", torch.device("cuda", 0)), ("cpu", torch.device("cpu"))],
)
def test_a_model_on_another_gpu_is_copied(
    device: str, place: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(api, "deep_copy", lambda module, _: copy.copy(module))  # there is no memory to copy
    with FakeTensorMode():
        model = Moved("cuda:1")
        placed, copied = api._placed(model, platform_of(device).device_of(Options(device=device)))
    assert isinstance(placed, Moved)
    assert placed.place == place and copied == (placed is not model) == (place is not None)
    assert model.place is None


@pytest.mark.slow
def test_without_library_calls_they_still_stand_where_nothing_else_does(tmp_path: Path) -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.sort(torch.relu(x))[0] * 2, torch.tanh(x + 1)

    x = torch.randn(16, 32)
    options = Options(cache_dir=tmp_path, budget_s=300.0, allow_library=False)
    compiled = api.compile(Sorted(), x, options=options)
    for got, want in zip(compiled(x), Sorted()(x), strict=True):
        torch.testing.assert_close(got, want)
    kinds = [s.kernel.schedule.generator for s in compiled.executable.plan.steps]
    assert "library" in kinds and set(kinds) != {"library"}
