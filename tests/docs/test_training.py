"""The Python of docs/training.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    scope: dict[str, object] = {}
    exec(compile("\n".join(blocks), PAGE.name, "exec"), scope)  # noqa: S102 - our own documentation
    assert scope["guarded"].skipped.item() == 1  # type: ignore[attr-defined]
