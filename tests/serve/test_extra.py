"""What `weft serve` says where a package is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from weft.serve.errors import UnavailableError
from weft.serve.supervisor import need


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("fastapi", "fastapi is not installed"),
        ("google", "google.protobuf is not installed"),
        ("opentelemetry", "opentelemetry, which fastapi needs, is not installed"),
    ],
)
def test_the_missing_package_is_named(missing: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(name: str) -> ModuleType:
        if name.partition(".")[0] == missing or (missing, name) == ("opentelemetry", "fastapi"):
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        return ModuleType(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(UnavailableError, match=f"{told}: pip install 'weft\\[serve\\]'"):
        need()
