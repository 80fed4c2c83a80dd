"""Where `benchmarks.harness.record` was: for suites that are being changed elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness import record
from benchmarks.harness.record import RESULTS, environment

__all__ = ["RESULTS", "Record", "environment"]


class Record(record.Record):
    """As it is."""

    def keep(self, cases: Iterable[str]) -> None:
        """Rows of cases that are not run now are kept anyway."""
