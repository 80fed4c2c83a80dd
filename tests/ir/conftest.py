from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import goldens


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with `tests/golden/ir/<file>-<case>.txt`."""

    def check(text: str) -> None:
        case = request.node.name.partition("[")[2].removesuffix("]")
        name = f"{request.path.stem.removeprefix('test_')}-{case}"
        goldens.check(f"ir/{name}.txt", text + "\n")

    return check
