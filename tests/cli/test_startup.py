"""Help, completion and whatever only looks at files need no heavy package; errors and warnings have one form."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.command_line import Weft, runner

import weft as installed
from weft.cli import app as cli
from weft.cli.later import LATER
from weft.cli.show import ratio, wants_json
from weft.errors import BudgetWarning
from weft.kernels.dataclass_json import to_json
from weft.kernels.record import CompileRecord, StepRecord

HEAVY = ("torch", "onnx", "scipy", "onnxruntime", "sympy")
PARTS = ("api", "generate", "ir", "kernels", "pipeline", "report", "runtime", "tune")
"""Packages that no help needs; each costs hundredths of a second."""
PROGRAM = f"""
import sys
sys.argv = ["weft", *sys.argv[1:]]
from weft.cli import main
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
else:
    code = 0
loaded = [m for m in {HEAVY!r} if m in sys.modules]
if sys.argv[-1:] == ["--help"]:
    parts = ("rich.console", *(f"weft.{{x}}" for x in {PARTS!r}))
    loaded += [m for m in sys.modules if any(m == x or m.startswith(x + ".") for x in parts)]
print("LOADED", code, *loaded, file=sys.stderr)
"""


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Weft:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    return runner(monkeypatch, capsys)


def empty(kind: type, **given: Any) -> Any:
    """A record with nothing in its fields but what is given."""
    values: dict[str, Any] = dict(given)
    for name, parameter in inspect.signature(kind).parameters.items():
        text = str(parameter.annotation)
        nothing = () if "tuple" in text else "" if text == "str" else False if text == "bool" else 0
        values.setdefault(name, nothing if parameter.default is parameter.empty else parameter.default)
    return kind(**values)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record of one kernel, beside no plan."""
    place = tmp_path / "m.weft.record.json"
    steps = (empty(StepRecord, schedule="cpp(lanes=8)"),)
    place.write_text(json.dumps(to_json(empty(CompileRecord, steps=steps))))
    return place


@pytest.mark.parametrize(
    "command",
    [
        "--help", "--version", "db stats", "db verify", "pairs", "pairs --format json", "explain RECORD", "db --help",
        "explain --help", "compile --help", "bench --help", "run --help", "check --help", "COMPLETE", "COMPLETE db",
        *(f"{name} --help" for name in LATER),
        "explain missing.weft", "nonsense",
    ],
)  # fmt: skip
def test_no_framework_is_loaded(command: str, record: Path, tmp_path: Path) -> None:
    source = str(Path(installed.__file__ or "").parents[1])
    environment = os.environ | {"WEFT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": source}
    words = command.replace("RECORD", str(record)).split()
    if words[0] == "COMPLETE":
        environment |= {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["weft", *words[1:], ""])}
        environment |= {"COMP_CWORD": str(len(words))}
        words = []
    call = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=environment, check=False)
    told = done.stderr.splitlines()[-1].split()
    assert told[0] == "LOADED" and told[2:] == [], done.stderr
    code = {"explain missing.weft": "3", "nonsense": "2"}.get(command, "0")
    assert told[1] == code, done.stderr
    assert command != "COMPLETE" or {"gemm", "compile", "db"} <= set(done.stdout.split())
    assert command != "--version" or done.stdout == f"weft {installed.__version__}\n"
    if command == "--help":
        assert all(f"  {name} " in done.stdout for name in (*LATER, "compile", "db"))


@pytest.mark.parametrize("name", LATER)
def test_what_is_said_of_a_command_before_it_is_loaded(name: str, weft: Weft) -> None:
    module, function, short = LATER[name]
    found = getattr(importlib.import_module(module), function)
    text = str(found.info.help) if isinstance(found, typer.Typer) else inspect.getdoc(found) or ""
    assert text.startswith(short)
    code, out, _ = weft(name, "--help")
    assert code == 0 and short in " ".join(out.split()) and f"weft {name}" in out


def test_an_error_is_json_where_that_is_asked_for(weft: Weft, tmp_path: Path) -> None:
    code, out, err = weft("explain", tmp_path / "missing.weft", "--format", "json")
    found = json.loads(out)["error"]
    assert code == 3 and found["code"] == "W401" and "no readable record" in found["message"]
    assert "weft compile" in found["todo"] and "[W401]" in err and "W401" not in found["message"]
    code, out, _ = weft("explain", tmp_path / "missing.weft")
    assert code == 3 and not out


def test_a_command_that_cannot_be_read_is_json_too(weft: Weft) -> None:
    code, out, err = weft("db", "burn", "--format=json")
    found = json.loads(out)["error"]
    assert code == 2 and found["code"] == "W001" and "burn" in found["message"] and "Usage" in err


def test_a_bug_is_json_too(weft: Weft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(cli, "_record", fails)
    code, out, err = weft("explain", tmp_path / "m.weft", "--format", "json")
    found = json.loads(out)["error"]
    assert code == 70 and found["code"] == "W900" and "ZeroDivisionError" in found["message"] and "full log" in err


def test_who_asks_for_json() -> None:
    assert wants_json(["check", "m.onnx", "--format", "json"]) and wants_json(["db", "--format=json"])
    for other in (["db"], ["db", "--format", "text"], ["db", "--format"], ["run", "--", "--format", "json"]):
        assert not wants_json(other)


def test_warnings_are_in_one_form(weft: Weft, monkeypatch: pytest.MonkeyPatch, record: Path) -> None:
    def warns(*_: object) -> None:
        warnings.warn("Weft: something\nis so", UserWarning, stacklevel=1)
        warnings.warn("the budget ended", BudgetWarning, stacklevel=1)
        warnings.warn_explicit("old \x1b[31mname", FutureWarning, "/some/where/library.py", 7)
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_record", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, _, err = weft("explain", record)
    assert [x for x in err.splitlines() if x.startswith("weft: warning")] == [
        "weft: warning: something is so",
        "weft: warning: the budget ended",
        "weft: warning: old ?[31mname (FutureWarning of library.py)",
    ]


def test_peers_are_looked_for_before_anything_is_tuned(
    weft: Weft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tuned(*_: object, **__: object) -> None:
        raise AssertionError("it was tuned")

    model = tmp_path / "m.onnx"
    model.write_bytes(b"")
    monkeypatch.setattr(cli, "compile_model", tuned)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = weft("bench", model, "--against", "onnxruntime")
    assert code == 2 and "pip install onnxruntime" in err


def test_ratios_are_never_nothing() -> None:
    shown = [ratio(x) for x in (1.0, 12.345, 0.25, 0.004321, 0.0000123, float("inf"))]
    assert shown == ["1.00", "12.35", "0.25", "0.0043", "1.2e-05", "-"]
