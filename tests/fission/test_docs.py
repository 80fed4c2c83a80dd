"""The Python of docs/writing-a-rule.md runs as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-rule.md"


def test_the_tutorial_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    source = "\n".join(blocks)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, PAGE.name, "exec"), {"__name__": "tutorial"})  # noqa: S102
    assert "= max(" in printed.getvalue() and printed.getvalue().count(" cast(") == 2


def test_the_page_names_files_that_exist() -> None:
    for path in ("src/weft/fission/registry.py", "tests/fission/test_golden.py"):
        assert path in PAGE.read_text()
        assert (PAGE.parents[1] / path).exists()
