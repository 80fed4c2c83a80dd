"""`weft mlp`: what it prints without a GPU, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from weft.cli import app as cli
from weft.nn import FusedMLP

SMALL = ("mlp", "--widths", "3,8,8,1", "--rows", "33", "--rounds", "1", "--device", "cpu")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["weft", *args])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        cli.run()
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return int(ended.value.code or 0), found.out, found.err


@pytest.mark.parametrize("more", [("--against", "eager,cublas"), ("--backward", "--activation", "sin")])
def test_times_errors_and_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    code, out, _ = run(monkeypatch, capsys, *SMALL, *more, "--format", "json")
    data = json.loads(out)
    assert code == 0 and data["widths"] == [3, 8, 8, 1] and data["backward"] == ("--backward" in more)
    assert data["not_fused"] == "the input is on cpu; kernels are for CUDA devices"
    assert data["median_us"]["weft"] > 0 and data["ratio"]["eager"] > 0
    assert data["error"]["weft"] == data["error"]["eager"] < 0.05


def test_each_layer_its_own_activation_and_float32_under_autocast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acts = ("--activation", "sin,silu,sigmoid")
    code, out, _ = run(
        monkeypatch, capsys, *SMALL, *acts, "--dtype", "f32", "--backward", "--against", "eager", "--format", "json"
    )
    data = json.loads(out)
    assert code == 0 and (data["activation"], data["dtype"], data["graph"]) == ("sin,silu,sigmoid", "f32", False)
    assert 1e-5 < data["error"]["weft"] == data["error"]["eager"] < 0.05, "products are those of bf16"
    wide = run(monkeypatch, capsys, *SMALL, *acts, "--dtype", "f16", "--format", "json")
    assert wide[0] == 0 and json.loads(wide[1])["error"]["weft"] < data["error"]["weft"]


def test_people_are_told_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, *SMALL, "--backward")
    assert code == 0 and "not fused" in out and "the input is on cpu" in out and "eager" in out


def test_nothing_to_say_is_not_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a GPU: all of it is fused."""
    monkeypatch.setattr(FusedMLP, "why_not", lambda *_: None)
    code, out, err = run(monkeypatch, capsys, *SMALL)
    assert code == 0 and "eager" in out and "fused" not in out, err


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (("--widths", "64"), 2, "two numbers or more"),
        (("--widths", "64,x"), 2, "not a list"),
        (("--widths", "64,0"), 2, "two numbers or more"),
        (("--widths", "4,4", "--activation", "step"), 2, "'step' is not one of relu"),
        (("--widths", "4,4,4", "--activation", "relu,step"), 2, "'step' is not one of relu"),
        (("--widths", "4,4,4,4", "--activation", "relu,relu"), 2, "2 activations for 3 layers"),
        (("--widths", "4,4", "--graph"), 2, "only a CUDA device has graphs"),
        (("--widths", "4,4", "--against", "eager,\x1b[31m"), 2, "is not one of eager, compile, cublas"),
        (("--widths", "4,4", "--against", "cublas", "--backward"), 2, "no backward pass"),
        (("--widths", "4,4", "--device", "tpu"), 2, "none of cuda"),
        (("--widths", "4,4", "--device", "cuda:99"), 5, "no device cuda:99"),
    ],
)
def test_what_cannot_be_taken_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], code: int, part: str
) -> None:
    given = ("mlp", *(() if "--device" in args else ("--device", "cpu")), *args)
    found, _, err = run(monkeypatch, capsys, *given)
    assert found == code and part in err and "\x1b" not in err, err
