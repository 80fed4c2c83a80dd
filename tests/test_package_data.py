"""What an installed Weft holds: every file of the source tree, headers and tables too."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_file_of_the_package_is_installed() -> None:
    source = ROOT / "src"
    packages = {p.parent for p in (source / "weft").rglob("__init__.py")}  # a folder without one is not installed
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["weft"]
    installed = {path for p in packages for path in p.glob("*.py")}
    installed |= {path for pattern in patterns for path in (source / "weft").glob(pattern)}
    files = {p for p in (source / "weft").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert len(files) > 500
    assert sum(p.suffix == ".h" for p in files) >= 20
    assert sorted(map(str, files - installed)) == []
