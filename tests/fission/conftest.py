from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import goldens


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with `tests/golden/fission/<test>.txt`."""

    def check(text: str) -> None:
        name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "").removeprefix("golden-")
        goldens.check(f"fission/{name}.txt", text + "\n")

    return check
