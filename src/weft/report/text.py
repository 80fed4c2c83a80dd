"""Text of a record made fit for a page: what a name may hold is decided here."""

from __future__ import annotations

import json
import math

BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""

INVISIBLE = frozenset("\u200b\u200c\u200d\u2060\ufeff\u2028\u2029")


def clean(text: str, limit: int = 160) -> str:
    r"""A name for a page: control, reordering, invisible and unpaired characters are written `\u202e`, the rest is cut.

    Markup is not escaped here: the page does that, by autoescape and by `textContent`.
    """
    shown = "".join(map(_character, text[: limit + 1]))
    return shown if len(text) <= limit else shown[: limit - 1] + "…"


def clean_source(text: str, limit: int) -> str:
    """A source text for a page: as `clean`, but lines and tabs stay."""
    shown = text[:limit].replace("\r\n", "\n")
    line = shown.replace("\n", "").replace("\t", "")
    if not line.isprintable() or not (BIDI | INVISIBLE).isdisjoint(line):  # of a kernel's text next to never
        shown = "".join(c if c in "\n\t" else _character(c) for c in shown)
    return shown if len(text) <= limit else f"{shown}\n… {len(text) - limit} characters left out\n"


def _character(c: str) -> str:
    if c.isprintable() and c not in BIDI and c not in INVISIBLE:
        return c
    return f"\\u{ord(c):04x}" if c != "\n" else "\\n"


def script_json(value: object) -> str:
    """JSON for a `<script type="application/json">` element: ASCII, and no `<` that could end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def finite(value: float) -> float | None:
    """A time in microseconds for JSON, to four significant digits; None where there is none."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def microseconds(value: float) -> str:
    """A time for people: `12.3 µs`, `1.234 ms`, `2.50 s`, or a dash."""
    if not math.isfinite(value) or value <= 0:
        return "–"
    if value >= 1e6:
        return f"{value / 1e6:.2f} s"
    return f"{value / 1e3:.3f} ms" if value >= 1e3 else f"{value:.1f} µs"


def seconds(value: float) -> str:
    """A duration for people."""
    if value >= 90:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 0.1 else f"{value * 1e3:.0f} ms"


def size(count: int) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
