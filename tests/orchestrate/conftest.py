from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden" / "orchestrate"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with `tests/golden/orchestrate/<test>.txt`; WEFT_UPDATE_GOLDEN=1 writes it instead."""

    def check(text: str) -> None:
        name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("WEFT_UPDATE_GOLDEN") == "1":
            path.write_text(text + "\n")
        assert path.exists(), f"no golden text {path.name}; look at it after WEFT_UPDATE_GOLDEN=1"
        assert text + "\n" == path.read_text()

    return check
