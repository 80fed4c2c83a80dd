"""The watcher of products part by part: a child that ends, that dies, that hangs, and time that is up."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.child import Child

from benchmarks import gpu_gemm_parts


def says(*lines: dict[str, Any]) -> str:
    return "".join(f"print({json.dumps(x)!r}, flush=True)\n" for x in lines)


def watched(monkeypatch: pytest.MonkeyPatch, out: Path, script: str, seconds: float = 20.0) -> tuple[bool, list[Any]]:
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **named: real([sys.executable, "-c", script], **named))
    out.touch()
    flags = dict.fromkeys(("promotions", "targets", "places", "few", "stores", "weak", "local"), False)
    given = argparse.Namespace(out=str(out), cache="", only="", **flags)
    done = gpu_gemm_parts.watch(given, time.monotonic() + seconds)
    return done, [json.loads(x) for x in out.read_text().splitlines()]


def test_lines_are_kept_until_all_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    result = {"case": "a", "name": "b", "us": 3.0}
    script = (
        says({"begin": "a"}, {"running": "b"}, result, {"end": "a"}, {"all": True}) + "import time; time.sleep(600)"
    )
    assert watched(monkeypatch, tmp_path / "out", script) == (True, [result, {"end": "a"}])


def test_one_that_dies_leaves_what_it_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = says({"begin": "a"}, {"running": "b"}) + "raise SystemExit(1)"
    assert watched(monkeypatch, tmp_path / "out", script) == (False, [{"stuck": "a", "name": "b"}])


def test_the_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = says({"begin": "a"}) + "import time; time.sleep(600)"
    assert watched(monkeypatch, tmp_path / "out", script, 0.5) == (True, [])
    assert "the time is up" in capsys.readouterr().out


def test_silence_is_a_stall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plain = Child.line
    monkeypatch.setattr(Child, "line", lambda self, seconds: plain(self, min(seconds, 0.5)))
    script = says({"begin": "a"}, {"running": "b"}) + "import time; time.sleep(600)"
    assert watched(monkeypatch, tmp_path / "out", script) == (False, [{"stuck": "a", "name": "b"}])
