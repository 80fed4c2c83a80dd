"""Every suite imports on a machine without a GPU and tells its options; every command that is named can be run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks

ROOT = Path(__file__).parents[2]
SUITES = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem != "__init__")
DOCUMENTS = [ROOT / "README.md", ROOT / "Makefile", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"-m ((?:benchmarks|lab|tools)\.[a-z_0-9.]*[a-z_0-9])")


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_tells_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage:") and "--help" in shown


def test_every_suite_has_its_place_in_the_list() -> None:
    assert set(re.findall(r"`([a-z_]+)`", benchmarks.__doc__ or "")) == set(SUITES)


def commands() -> Iterator[tuple[str, str]]:
    """Modules that somebody is told to run, and where."""
    for path in DOCUMENTS:
        if path.exists():
            yield from ((found, path.name) for found in COMMAND.findall(path.read_text()))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl")):
        with path.open() as file:
            head = json.loads(file.readline())
        yield from ((found, path.name) for found in COMMAND.findall(str(head.get("command", ""))))
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        yield from ((found, path.name) for found in COMMAND.findall(path.read_text()))


def test_every_command_that_is_named_can_be_run() -> None:
    named = set(commands())
    assert len(named) > 60
    missing = [(x, where) for x, where in named if importlib.util.find_spec(x) is None]
    assert not missing


@pytest.mark.slow
def test_nobody_depends_on_the_lab() -> None:
    """What stands there may break with any change of the product: no suite, tool, test or part of it imports it."""
    for folder in ("benchmarks", "tools", "tests", "src", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
                assert not [x for x in names if x.split(".")[0] == "lab"], path
