"""The benchmark of tuning from cold, with processes that say what `weft gemm` would, or fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest
from tests.gemm.test_search import Tuner as Invented

from benchmarks import gpu_gemm_cold
from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import find_nvrtc

SAYS = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[-1]); folder.mkdir()
(folder / "timings.jsonl").write_text('{"state": "ok"}\\n{"state": "wrong"}\\n')
best = {"median_us": 5.0, "rank": 3}
seconds = {"search": 2.0, "start": 1.5, "run": 0.25, "emit": 0.001}
found = {"folder": str(folder), "seconds": seconds, "tried": 2, "feasible": 9, "best": best, "tflops": 1.0}
print(json.dumps([found]))
"""


def child(monkeypatch: pytest.MonkeyPatch, script: str) -> list[str]:
    """Processes that do what the script says in place of the command; the cache directory of each."""
    real, caches = subprocess.run, []

    def run(command: list[str], **named: Any) -> Any:
        if "gemm" not in command:
            return real(command, **named)
        caches.append(named["env"]["WEFT_CACHE_DIR"])
        assert command[1:4] == ["-m", "weft", "gemm"]
        return real([sys.executable, "-c", script, command[-1]], **{**named, "env": dict(os.environ)})

    monkeypatch.setattr(subprocess, "run", run)
    return caches


def test_every_shape_has_an_empty_cache_and_the_last_one_the_cache_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = child(monkeypatch, SAYS)
    gpu_gemm_cold.main(["--out", str(tmp_path / "out.jsonl")])
    assert len(set(caches)) == len(gpu_gemm_cold.SHAPES)
    assert caches[-1] == caches[-2]
    head, *lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert head["record"] == "environment"
    assert [(x["ok"], x["rank"], x["best_us"]) for x in lines] == [(1, 3, 5.0)] * 4
    assert "(start 1.5, run 0.2); best 5.00 us, the model's number 3 of 2 (1 ok)" in capsys.readouterr().out


def test_what_fails_or_takes_too_long_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    child(monkeypatch, "import sys; print('no GPU [W301]', file=sys.stderr); sys.exit(5)")
    with pytest.raises(SystemExit, match="failed: MNK=1024"):
        gpu_gemm_cold.main(["--out", str(out)])
    assert "status 5: no GPU [W301]" in capsys.readouterr().out
    assert [json.loads(x).get("failed") for x in out.read_text().splitlines()[1:]] == ["status 5: no GPU [W301]"] * 4
    child(monkeypatch, "import time; time.sleep(30)")
    with pytest.raises(SystemExit, match="failed: MNK=1024"):
        gpu_gemm_cold.main(["--seconds", "1.5", "--out", str(out)])
    assert "not done after 1 s" in capsys.readouterr().out


def test_without_the_command_line_a_process_takes_its_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tuner(Invented):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__()
            self.seconds = {"run": 3.0}

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            pass

    monkeypatch.setattr("weft.platform.cuda.platform.survey", lambda options: (profile("h200"), find_nvrtc(), {}))
    monkeypatch.setattr("weft.tune.tuner.Tuner", Tuner)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    gpu_gemm_cold.main(["--child", *gpu_gemm_cold.SHAPES[0], "--format", "json", "-o", str(tmp_path)])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["gemm"]["layout"] == "nt"
    assert found["tried"] == 16
    assert {"start", "survey", "rank", "emit", "run", "search"} <= found["seconds"].keys()
    assert (Path(found["folder"]) / "timings.jsonl").exists()


def test_over_the_target_is_said() -> None:
    line = {"case": "MNK=8", "wall_s": 16.0, "seconds": {}, "best_us": 1.0, "rank": 1, "tried": 1, "ok": 1}
    assert "16.0 s OVER 15 s" in gpu_gemm_cold.told(line)
