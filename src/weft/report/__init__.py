"""One offline HTML file that says what a compilation found, chose and refused, and why; another one for pairs."""

from __future__ import annotations

from weft.report.page import render
from weft.report.pairs import render_pairs

__all__ = ["render", "render_pairs"]
