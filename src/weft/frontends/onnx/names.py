"""Names from a model are data: how they are kept, and how they are shown."""

from __future__ import annotations

import hashlib
import unicodedata

KEPT_BYTES = 1024
SHOWN_CHARS = 80


def kept(name: str, limit: int = KEPT_BYTES) -> str:
    """The name, or its beginning and a digest where it is longer than `limit` bytes."""
    raw = name.encode("utf-8", "surrogatepass")
    if len(raw) <= limit:
        return name
    head = raw[: limit - 20].decode("utf-8", "ignore")
    return f"{head}...{hashlib.sha256(raw).hexdigest()[:16]}"


def shown(name: object) -> str:
    """For a message: one line of at most 80 characters without control, escape, format or bidi characters."""
    text = str(name)
    if len(text) > SHOWN_CHARS:
        text = text[: SHOWN_CHARS - 3] + "..."
    if text.isascii() and text.isprintable():  # as almost all are; every node of a model is asked for its name
        return text
    return "".join(
        c
        if unicodedata.category(c)[0] not in "CZ" or c == " "
        else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
