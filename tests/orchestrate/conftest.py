from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import goldens


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with `tests/golden/orchestrate/<test>.txt`."""

    def check(text: str) -> None:
        name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
        goldens.check(f"orchestrate/{name}.txt", text + "\n")

    return check
