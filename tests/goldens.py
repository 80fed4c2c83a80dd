"""Texts that a change must not alter unseen: files of `tests/golden`, in folders named as the area of their tests."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
UPDATE = os.environ.get("WEFT_UPDATE_GOLDEN") == "1"
"""Whether files are to be written: asked at once, as tests change the environment."""


def check(name: str, text: str) -> None:
    """Compare a text with the file of this name in `tests/golden`; WEFT_UPDATE_GOLDEN=1 writes the file instead."""
    path = FOLDER / name
    if UPDATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no golden text {name}; look at it after WEFT_UPDATE_GOLDEN=1"
    assert text == path.read_text(encoding="utf-8")
