"""The tutorial's code runs."""

from __future__ import annotations

import re
from pathlib import Path


def test_writing_a_generator() -> None:
    page = (Path(__file__).parents[3] / "docs" / "writing-a-generator.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    space: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "writing-a-generator.md", "exec"), space)  # noqa: S102 - our own page
    assert space["kernel"]
