"""Networks that TVM tunes, with a stand-in for its environment: what is said, kept between runs, and refused."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.harness.record import Row, lines_of
from benchmarks.peers import tvm_process

from benchmarks import tvm_networks as suite
from tools import tables

STAND_IN = """#!{python}
import json, pathlib, sys, time
import numpy as np
_, _, what, model, folder, threads, *inputs = sys.argv
factor = float(pathlib.Path(model).read_text())
if what == "tune":
    if factor == 4.0:
        sys.exit("no such target")
    with open(pathlib.Path(folder) / "database_tuning_record.json", "a") as log:
        log.write(json.dumps([3, "trace"]) + "\\n")
    time.sleep(60)
if factor == 5.0:
    sys.exit("no such operator")
path = pathlib.Path(inputs[0]).parent / "outputs.npz"
np.savez(path, factor * np.load(inputs[0])["arr_0"])
print(json.dumps({{"outputs": str(path), "tasks": 7}}), flush=True)
for line in sys.stdin:
    print(0.001 * int(line), flush=True)
"""


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(suite, "TUNED", tmp_path)
    monkeypatch.setattr(suite, "load", lambda name: (Twice(), (torch.ones(2, 3),)))
    factors = {"candy": 2.0, "resnet50": 3.0, "vgg16": 4.0, "yolov4": 5.0}
    for name, factor in factors.items():
        (tmp_path / f"{name}.onnx").write_text(str(factor))
    monkeypatch.setattr(suite, "onnx_file", lambda name: tmp_path / f"{name}.onnx")
    return tmp_path


def measured(folder: Path, names: Sequence[str], *more: str) -> dict[str, Row]:
    path = folder / "record.jsonl"
    given = ["--python", str(folder / "python"), "--budget", "0", "--timed", "0.5", "--out", str(path), *more]
    if any(name in ("vgg16", "yolov4") for name in names):
        with pytest.raises(SystemExit, match="failed: "):
            suite.main([*names, *given])
    else:
        suite.main([*names, *given])
    return {str(x["case"]).partition("/")[0]: x for x in lines_of(path) if x["record"] == "case"}


def test_a_network_is_tuned_checked_and_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row: Any = measured(folder, ["candy"], "--tune", "1.5")["candy"]
    assert row["peers_ms"]["tvm"] == 1.0 and row["peers_ms"]["eager"] > 0 and row["errors"]["tvm"] == 0.0
    assert row["speedup_tvm"] == round(1.0 / row["weft_ms"], 3)
    assert (row["tvm_tuning_s"], row["tvm_trials"], row["tvm_tasks"], row["tvm_tuned_tasks"]) == (1.5, 1, 7, 1)
    again: Any = measured(folder, ["candy"], "--tune", "1")["candy"]
    assert (again["tvm_tuning_s"], again["tvm_trials"], again["tvm_tuned_tasks"]) == (2.5, 2, 1), "it goes on"
    monkeypatch.setattr(tables, "records", lambda device, name: lines_of(folder / "record.jsonl"))
    assert "| candy/b1/fp32 |" in tables.tvm() and "| 2 | 1 of 7 |" in tables.tvm()


def test_what_is_wrong_is_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row: Any = measured(folder, ["resnet50"], "--tune", "0")["resnet50"]
    assert row["speedup_tvm"] is None and "tvm" not in row["peers_ms"] and row["errors"]["tvm"] == 0.5
    monkeypatch.setattr(tables, "records", lambda device, name: lines_of(folder / "record.jsonl"))
    assert "wrong by 5.0e-01" in tables.tvm()


def test_what_fails_is_a_row_and_others_are_measured(folder: Path) -> None:
    rows = measured(folder, ["vgg16", "yolov4", "candy"], "--tune", "0.5")
    assert "tuning ended with status 1: no such target" in str(rows["vgg16"]["failed"])
    assert "TVM's process ended: " in str(rows["yolov4"]["failed"])
    assert "no such operator" in str(rows["yolov4"]["failed"])
    assert "failed" not in rows["candy"]
    before = (folder / "record.jsonl").read_text().splitlines()[1:]
    measured(folder, [], "--seconds", "0")
    assert (folder / "record.jsonl").read_text().splitlines()[1:] == before


@pytest.mark.parametrize(("bad", "why"), [(["nothing"], "none of"), (["candy", "--python", "/no"], "there is no /no")])
def test_what_is_refused(bad: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        suite.main(bad)
    assert why in capsys.readouterr().err


def test_the_process_answers_until_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    kept: list[Any] = []

    def call() -> list[Any]:
        calls.append(1)
        return [SimpleNamespace(numpy=lambda: np.full(3, 2.0))]

    class Lines(io.StringIO):
        def __iter__(self) -> Any:
            kept.append(np.load(json.loads(capsys.readouterr().out)["outputs"])["arr_0"])
            return super().__iter__()

    network: Any = SimpleNamespace(call=lambda inputs: call, tasks=lambda: 5)
    monkeypatch.setattr(sys, "stdin", Lines("3\n1\n"))
    tvm_process.serve(network, [np.ones(3)])
    assert len(calls) == 5 and kept[0].tolist() == [2.0] * 3
    assert all(float(x) >= 0 for x in capsys.readouterr().out.split())
