"""What the L2 cache is asked for while a kernel waits for the one before it: hints, right whoever writes the memory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


@cache
def header() -> str:
    """The functions that ask."""
    return (Path(__file__).parent / "weft_cuda_ahead.h").read_text(encoding="utf-8")


def asked(load: str) -> str:
    """Statements that ask for what statements of `tma_operands.right` copy."""
    text = re.sub(r"w_tma_shared\(&mw, [^;]*?, bar, [^,]*, ", "w_tma_ask(&mw, ", load)
    text = re.sub(r"w_tma\(&mw, [^;]*?, bar, ", "w_tma_ask(&mw, ", text)
    text = re.sub(r"w_bulk\(to, (.*?), bar\)", r"w_bulk_ask(\1)", text)
    assert "bar" not in text, "a copy of another kind"
    return text
