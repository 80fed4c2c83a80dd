"""Every error that can reach a user: its own code, a text that formats, advice, an exit code, a row in the docs."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import string
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import weft
from weft.errors import UserError, WeftError

SOURCE = Path(weft.__file__).parent
DOCS = SOURCE.parent.parent / "docs" / "errors.md"
EXIT_CODES = {2, 3, 4, 5, 70}
ROOTS = (WeftError, UserError)
"""Only their subclasses are raised."""


@cache
def classes() -> tuple[type[WeftError], ...]:
    """Every error class of the package: its modules define them, so all are imported."""
    for module in pkgutil.walk_packages([str(SOURCE)], "weft."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:  # an optional dependency is not installed
                if str(error.name or "").startswith("weft"):
                    raise
    found: list[type[WeftError]] = []
    todo: list[type[WeftError]] = [WeftError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo.extend(kind.__subclasses__())
    return tuple(sorted((k for k in set(found) if k.__module__.startswith("weft.")), key=lambda k: k.__name__))


def raised() -> list[type[WeftError]]:
    return [k for k in classes() if k not in ROOTS]


def fields(kind: type[WeftError]) -> set[str]:
    text = kind.template + kind.todo
    return {name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name}


def test_the_walk_finds_them() -> None:
    names = {k.__name__ for k in classes()}
    assert {"OptionError", "InputError", "ExternalPathError", "ToolchainError", "InvalidGraphError"} <= names
    assert len(names) >= 24


def test_codes_are_unique() -> None:
    """A subclass may keep its parent's code where it means the same: same text, same exit code."""
    by_code: dict[str, list[type[WeftError]]] = defaultdict(list)
    for kind in raised():
        by_code[kind.code].append(kind)
    for code, kinds in by_code.items():
        assert re.fullmatch(r"W[0-9]{3}", code) and code != WeftError.code
        top = min(kinds, key=lambda k: len(k.__mro__))
        for kind in kinds:
            assert issubclass(kind, top), f"{kind.__name__} and {top.__name__} share {code}"
            assert (kind.template, kind.exit_code) == (top.template, top.exit_code)


@pytest.mark.parametrize("kind", raised(), ids=lambda k: k.__name__)
def test_texts_format_and_advise(kind: type[WeftError]) -> None:
    assert kind.exit_code in EXIT_CODES and kind.template and kind.todo and kind.__doc__
    details: dict[str, object] = {name: f"<{name}>" for name in fields(kind)}
    if kind.__name__ == "ToolchainError":
        details |= {"status": 1, "log": "log"}
    error = kind(where="here", **details)
    first, advice = str(error).splitlines()
    assert first.startswith("here: ") and first.endswith(f" [{kind.code}]")
    assert advice.startswith("  ") and advice.strip()
    assert not re.search(r"\{\w*\}", str(error))


def test_the_family_of_a_code() -> None:
    """The first digit says whose fault it is, and with it the exit code."""
    wanted = {"0": {2}, "1": {3}, "2": {4}, "3": {5}, "4": {3}, "9": {70}}
    for kind in raised():
        assert kind.exit_code in wanted[kind.code[1]], kind.__name__


def _raises() -> list[tuple[str, type[WeftError], ast.Call]]:
    """Every `SomeError(...)` in the package, for the error classes of ours."""
    by_name = {k.__name__: k for k in classes()}
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name in by_name:
                    found.append((f"{path.relative_to(SOURCE)}:{node.lineno}", by_name[name], node))
    return found


def test_every_place_fills_its_text() -> None:
    """A forgotten keyword would turn the error into a KeyError, just where it is needed."""
    places = _raises()
    assert len(places) > 100
    for where, kind, call in places:
        assert kind not in ROOTS, f"{where} raises a root"
        assert not call.args, f"{where} passes positional arguments"
        given = {k.arg for k in call.keywords}
        if None not in given:  # no `**details`
            assert fields(kind) <= given, f"{where}: {kind.__name__} needs {sorted(fields(kind) - given)}"


def _rows() -> list[list[str]]:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| W")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_docs_list_every_code() -> None:
    rows = _rows()
    assert all(len(row) == 5 and row[3] and row[4] for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    listed = {(row[0], row[1], int(row[2])) for row in rows if row[1]}
    assert listed == {(k.code, k.__name__, k.exit_code) for k in raised()}


def test_codes_in_the_source_are_listed() -> None:
    listed = {row[0] for row in _rows()}
    for path in SOURCE.rglob("*.py"):
        for code in re.findall(r"\bW[0-9]{3}\b", path.read_text(encoding="utf-8")):
            assert code in listed or code == WeftError.code, f"{path.name} mentions {code}"
