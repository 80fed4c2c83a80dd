from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "cpp"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/cpp/<name>.txt`; WEFT_UPDATE_GOLDEN=1 writes it instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("WEFT_UPDATE_GOLDEN") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden text {path.name}; look at it after WEFT_UPDATE_GOLDEN=1"
        assert text == path.read_text()

    return compare
