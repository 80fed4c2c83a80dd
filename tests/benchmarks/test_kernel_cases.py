"""The benchmarks of single kernels without a GPU: options, kernels, cases in turn, and the record."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks.harness import kernel_cases
from benchmarks.harness.kernel_cases import Kernel, Shop, opened, parser

from benchmarks import gpu_grouped, gpu_pooled
from weft.device.cuda.facts import profile
from weft.errors import DeviceError
from weft.ir.declined import Declined

SMALL: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "pooled": (gpu_pooled, ("--only=inception_v3 2", "--batch=1")),
    "grouped": (gpu_grouped, ("--only=q beside", "--batch=1")),
}
HEADS = {
    "pooled": "inception_v3 2 1 {'fused': 1, 'conv': 1, 'pool': 3}",
    "grouped": "q beside k, v b1",
}


@pytest.mark.parametrize("name", list(SMALL))
def test_options_are_told(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, _ = SMALL[name]
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{option} " in text for option in ("--only", "--first", "--seconds", "--threads", "--out", "--dry"))


@pytest.mark.parametrize("name", list(SMALL))
def test_kernels_are_made_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options = SMALL[name]
    monkeypatch.setattr(sys, "argv", ["x", "--dry", "--first=1", "--threads=1", *options])
    assert module.main() == 0
    assert HEADS[name] in capsys.readouterr().out


def measured(name: str) -> Callable[..., dict[str, object]]:
    """What one case gives, of which a kernel was wrong."""
    ways = ["fused_us", "two_us", "conv_us", "pool_us", "cudnn + pool_us", "torch_us"]
    tried: dict[str, object] = {k: ["1.0 x", "WRONG 1 y"] for k in ("tried", "tried_conv", "tried_pool")}
    pooled = {**dict.fromkeys(ways, 1.0), "saved": 1.5, "fused": "f", "conv": None, **tried}
    rows: dict[str, dict[str, object]] = {"pooled": pooled, "grouped": {"wrong": ["WRONG 1 y"]}}
    return lambda *_, **__: rows[name]


@pytest.mark.parametrize("name", list(SMALL))
def test_a_line_is_written_for_each_case(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options = SMALL[name]
    record = tmp_path / "record.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", f"--out={record}", *options])
    monkeypatch.setattr(kernel_cases, "gpu_facts", lambda *_, **__: profile("h200"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(Shop, "compiled", lambda *_: [])
    if name == "grouped":
        monkeypatch.setattr(gpu_grouped.Group, "measured", measured(name))
        monkeypatch.setattr(gpu_grouped, "Watch", type("Still", (), {}))
    else:
        monkeypatch.setattr(module, "measured", measured(name))
    monkeypatch.setattr(module, "Bench", lambda: None)
    # torch's own test harness, where another test loaded it, forbids to set cuDNN's flags
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    with torch.backends.cudnn.flags(benchmark=False):
        assert module.main() == 1, "one was wrong"
    first, second = record.read_text().splitlines()
    assert json.loads(first)["record"] == "environment"
    line = json.loads(second)
    assert line["name"] in HEADS[name] and measured(name)().items() <= line.items()
    assert "WRONG" in capsys.readouterr().out


def shop(**changes: object) -> Shop:
    given = parser("Words.\n\nMore.", first=2, seconds=60.0, threads=1).parse_args(["--dry", "--only=one,two"])
    for name, value in changes.items():
        setattr(given, name, value)
    return opened(given)


def test_cases_are_begun_in_time_and_left_out_after_it() -> None:
    made = shop()
    seen = []
    for item, found in made.in_turn([1, 2, 3], lambda x: 10 * x, ahead=1):
        seen.append((item, found))
        made.end = math.inf if item < 2 else 0.0
    assert seen == [(1, 10), (2, 20)]
    assert shop(seconds=-1.0).closed and not list(shop(seconds=-1.0).in_turn([1], lambda x: x, ahead=1))
    assert [made.wants(x) for x in ("number one", "the two", "three")] == [True, True, False]


def test_a_case_that_does_not_end_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("signal.alarm", asked.append)
    for _ in shop().in_turn([1, 2], lambda x: x, ahead=2, patience_s=9):
        time.sleep(0)
    assert asked == [9, 0, 9, 0]


def test_without_a_compiler_or_a_gpu_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object, **__: object) -> None:
        raise DeviceError(problem="no GPU")

    monkeypatch.setattr(kernel_cases, "gpu_facts", none)
    with pytest.raises(DeviceError, match="no GPU"):
        shop(dry=False)
    monkeypatch.setattr(kernel_cases, "find_nvrtc", lambda: Declined("no NVRTC here"))
    with pytest.raises(SystemExit) as ended:
        shop()
    assert ended.value.code == 2
    assert "no NVRTC here" in capsys.readouterr().err


def test_what_is_declined_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    problem = gpu_pooled.problem_of(gpu_pooled.cases(1)["vgg16 5"], conv=False, pool=True)
    found: list[Kernel] = shop().of_schedules(problem, Declined("for a reason"), 3)
    assert found == []
    assert "declined: for a reason" in capsys.readouterr().out
