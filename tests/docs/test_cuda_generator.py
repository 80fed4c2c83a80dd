"""The guide to the CUDA generator names files that are there, and every folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "cuda-generator.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "weft" / "generate"
NAMED = {word.partition(":")[0] for word in re.findall(r"`([^`\s]+)`", TEXT)}


def test_what_it_names_is_there() -> None:
    paths = {n for n in NAMED if re.fullmatch(r"[\w/]+/[\w.]*|\w+\.(py|h|toml)", n)}
    homes = (PACKAGE, PACKAGE / "cuda", ROOT)
    assert len(paths) > 50
    assert [p for p in sorted(paths) if not any((home / p).exists() for home in homes)] == []


def test_every_folder_is_named() -> None:
    folders = {path.parent for path in (PACKAGE / "cuda").rglob("__init__.py")} - {PACKAGE / "cuda"}
    told = {str(f.relative_to(PACKAGE / "cuda")) + "/" for f in folders}
    assert {"gemm/tma/", "conv/halo/", "loops/"} <= told
    assert sorted(told - NAMED) == []
    beside = {path.name for path in (PACKAGE / "cuda").glob("*.py")} - {"__init__.py"}
    assert sorted(beside - NAMED) == []
