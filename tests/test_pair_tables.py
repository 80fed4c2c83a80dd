"""Tables of pairs: every pair that was measured stands in them, the lost ones too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import pair_tables, record_tables


def row(case: str, ratio: float | None, **more: object) -> dict[str, object]:
    base: dict[str, object] = {
        "record": "case",
        "case": case,
        "commit": "c1",
        "lc_us": 10.0,
        "be_us": 300.0,
        "kept": False,
        "ratio": 1.0,
    }
    if ratio is not None:
        shape = {"replicas": 2, "threads": 128, "place": "extra"}
        peers = {"serial": 9.0, "streams": 8.0}
        base |= {"measured_ratio": ratio, "peers_us": peers, "shape": shape, "fraction": 0.4, "slowdown": 0.1,
                 "idle_slowdown": 0.02, "kept": ratio > 1, "ratio": max(1.0, ratio)}  # fmt: skip
    return base | more


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / record_tables.GPU
    folder.mkdir()
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    return folder / "colocate-pairs.jsonl"


def write(path: Path, *rows: dict[str, object]) -> None:
    head = {"record": "environment", "device": "GPU", "driver": "1", "commit": "c0", "command": "x"}
    path.write_text("".join(json.dumps(x) + "\n" for x in (head, *rows)))


def test_lost_pairs_stand_beside_kept_ones(lines: Path) -> None:
    write(lines, row("net/a/cp", 1.21), row("net/a/fft", 0.8), row("net/b/cp", None), row("net/b/fft", 1.0, wrong="x"))
    text = pair_tables.pairs()
    assert "| `net/a` | 10.0 | **1.21** | 0.80 |" in text and "| `net/b` | 10.0 | none | 1.00 |" in text
    mean = 1.21**0.25
    assert (
        f"4 pairs, 1 kept; geometric mean with the others at 1.00: {mean:.3f}; of those kept: 1.210; not right: 1;"
        in text
    )
    assert "commit c1; `x`" in text
    (kept,) = [x for x in pair_tables.pair_peers().splitlines() if x.startswith("| `")]
    assert kept == "| `net/a/cp` | 1.210 | 0.40 | 0.10 | 0.02 | streams | 2 x 128 extra |"


def test_a_pair_that_failed_is_not_left_out(lines: Path) -> None:
    failed: dict[str, object] = {"record": "case", "case": "net/a/fft", "commit": "c1", "failed": "no word for 60 s"}
    write(lines, row("net/a/cp", 0.9), failed)
    text = pair_tables.pairs()
    assert "net/a/fft | **failed** at c1: no word for 60 s" in text
    assert "| `net/a` | 10.0 | 0.90 | failed |" in text and "| alone, µs |  | 300 |  |" in text
    assert "2 pairs, 0 kept; geometric mean with the others at 1.00: 1.000;" in text and "failed: 1." in text
    ratios = failed | {"kept": True, "ratio": 9.0, "measured_ratio": 9.0}  # a row says failed, whatever else it says
    write(lines, row("net/a/cp", 1.44), ratios)
    text = pair_tables.pairs()
    assert "2 pairs, 1 kept; geometric mean with the others at 1.00: 1.200;" in text and "9.00" not in text
    assert [x for x in pair_tables.pair_peers().splitlines() if "fft" in x] == []


def test_pairs_that_all_failed_are_a_table(lines: Path) -> None:
    write(lines, {"record": "case", "case": "net/a/fft", "commit": "c1", "failed": "ended with -11"})
    assert "| `net/a` |  | failed |" in pair_tables.pairs()
    assert "1 pairs, 0 kept" in pair_tables.pairs()


def test_nothing_is_said_of_what_was_not_measured(lines: Path) -> None:
    assert "not measured yet" in pair_tables.pairs() and "not measured yet" in pair_tables.pair_peers()
