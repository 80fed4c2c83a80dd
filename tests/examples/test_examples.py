"""The examples run, on any machine, and learn something in a few steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sizes are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_image_is_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    found = load("image_regression").main(["--device", "cpu", "--size", "16", "--steps", "80"])
    ways = [(name, way) for name in ("sines", "relu, frequencies") for way in ("modules", "FusedMLP")]
    assert [(name, way) for name, way, *_ in found] == ways
    for (_, _, decibels, seconds), (_, _, own, own_seconds) in zip(found[::2], found[1::2], strict=True):
        assert own == pytest.approx(decibels, abs=1e-6)  # the fallback is the module
        assert own > 12.5 and seconds > 0 and own_seconds > 0
    assert "not fused: the input is on cpu" in capsys.readouterr().out


def test_a_step_that_could_be_recorded_is_the_step() -> None:
    module = load("image_regression")
    x, wanted = module.positions(8), module.picture(8).reshape(-1, 3)
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        found.append(module.train(module.siren(8), x, wanted, 20, 5e-3, graphed=graphed)[0])
    assert found[0] == found[1]


def test_a_picture_has_colours_between_0_and_1() -> None:
    picture = load("image_regression").picture(16)
    assert picture.shape == (16, 16, 3) and 0 <= float(picture.min()) < float(picture.max()) <= 1


def test_a_distance_is_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("signed_distance")
    plain, fused = module.main(["--device", "cpu", "--points", "256", "--steps", "60"])
    assert fused[1:3] == pytest.approx(plain[1:3], abs=1e-6)
    at = module.points(256, torch.Generator().manual_seed(5))
    assert fused[1] < 0.7 * float((module.distance(at) - module.distance(at).mean()).abs().mean())
    assert "not fused: the input is on cpu" in capsys.readouterr().out
