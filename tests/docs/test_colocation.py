"""The examples of docs/colocation.md: those without a GPU are run, the other is compiled and its names looked up."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "colocation.md"
BUDGETS, BESIDE, SEARCH, PEAK = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_budgets_are_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(BUDGETS, PAGE.name, "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    said = re.findall(r"^print\(.*\)  # (.*)$", BUDGETS, re.MULTILINE)
    assert len(said) == 2 and capsys.readouterr().out.splitlines() == said
    assert names["half"].duty == 0.5


def test_the_search_finds_what_the_page_says() -> None:
    names: dict[str, Any] = {}
    exec(compile(SEARCH, PAGE.name, "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    assert names["found"].effort == 45


def test_the_peak_load_is_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PEAK, PAGE.name, "exec", dont_inherit=True), {})  # noqa: S102 - our own page
    (said,) = re.findall(r"^print\(.*\)  # (.*)$", PEAK, re.MULTILINE)
    assert capsys.readouterr().out.strip() == said


def test_what_the_other_part_imports_is_there() -> None:
    tree = ast.parse(BESIDE)
    imported = [x for x in tree.body if isinstance(x, ast.ImportFrom)]
    assert imported
    for line in imported:
        module = importlib.import_module(str(line.module))
        assert all(hasattr(module, name.name) for name in line.names)
