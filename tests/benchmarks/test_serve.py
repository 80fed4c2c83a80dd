"""The benchmark of the server, with few queries."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import serve


def test_few_queries(tmp_path: Path) -> None:
    path = tmp_path / "serve.jsonl"
    serve.main(["--count", "30", "--seconds", "10", "--only", "loop", "embedded"], path)
    rows = {x["case"]: x for x in map(json.loads, path.read_text().splitlines()) if x.get("record") == "case"}
    assert set(rows) == {f"{c}: {k}" for c in ("loop", "embedded") for k in ("closed", "open")}
    for row in rows.values():
        assert row["queries"] > 20 and row["wrong"] == row["errors"] == 0 and row["p50_ms"] <= row["p99_ms"]
