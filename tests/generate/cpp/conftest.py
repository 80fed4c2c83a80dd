from __future__ import annotations

from collections.abc import Callable

import pytest
from tests import goldens


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/cpp/<name>.txt`."""

    def compare(name: str, text: str) -> None:
        goldens.check(f"cpp/{name}.txt", text)

    return compare
