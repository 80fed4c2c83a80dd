"""One offline HTML file that says what a compilation found, chose and refused, and why."""

from __future__ import annotations

from weft.report.page import render

__all__ = ["render"]
