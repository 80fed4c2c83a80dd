"""Every table of measurements in the documents is made from a record, and is the one that the record makes now."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import model_quality
from tools import record_tables, tables

ROOT = Path(__file__).parent.parent
NO_MEASUREMENTS = (
    "| stage | function |", "| layer (top first) |", "| file | holds |", "| Code | Class |", "| Class | Meaning |",
    "| | in kernels | else |", "| letter | meaning |", "| | |", "| file | |", "| flag | key |",
    "| term | of | constant", "| command | what it does |", "| module | what it does |", "| trap | what to do",
    "| Weft | standard", "| word |", "| change |", "| term |", "| in `cuda/", "| section | measured by |",
    "| construct |", "| layer | file |", "| option | meaning |", "| policy | rule |",
    "| option | default |", "| HTTP | gRPC |", "| answer | gRPC | when |", "| what | what happens |",
    "| model + job, load | policy |",  # simulated: held by tests/colocate/test_recorded_policies.py
)  # fmt: skip
"""Heads of tables that describe and measure nothing."""
MARK = re.compile(r"<!-- table: (\S+) -->")
OF_MODELS = {"shipped", "model-quality", "model-quality-tables", "model-quality-later", "model-quality-types"}
"""Made by `benchmarks.model_quality` and `benchmarks.shipped_table`, whose tests hold them."""


def by_hand(text: str) -> Iterator[str]:
    """Heads of the tables that stand between no marks."""
    inside, before = False, ""
    for line in text.splitlines():
        inside = (inside or bool(MARK.match(line))) and line != "<!-- end -->"
        if not inside and re.fullmatch(r"\|[-:| ]+\|", line) and before.startswith("|"):
            yield before
        before = line


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda p: p.name)
def test_a_table_of_measurements_is_made_from_a_record(path: Path) -> None:
    text = path.read_text()
    assert not [head for head in by_hand(text) if not head.startswith(NO_MEASUREMENTS)]
    assert set(MARK.findall(text)) <= set(tables.TABLES) | OF_MODELS
    assert len(MARK.findall(text)) == text.count("<!-- end -->")


def test_tables_are_those_of_the_records() -> None:
    """`python tools/tables.py` writes them."""
    assert tables.stale() == []


def test_no_record_is_without_a_table_or_a_document() -> None:
    """What nobody shows is not looked at, and grows old."""
    texts = "".join(p.read_text() for p in (*tables.DOCUMENTS, *(ROOT / "tools").glob("*tables.py")))
    names = {p.stem for p in (*ROOT.glob("benchmarks/results/*/*.jsonl"), *record_tables.STUDIES.glob("*.jsonl"))}
    assert len(names) > 40
    assert not {n for n in names if f'"{n}"' not in texts and f"{n}.jsonl" not in texts and f"table: {n} " not in texts}


def test_a_case_that_fails_stands_in_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    head = {"record": "environment", "device": "CPU", "threads": 2, "torch": "3", "commit": "c1", "command": "x"}
    row = {
        "record": "case", "case": "candy/b1/fp32", "weft_ms": 2.0, "operators": 1, "kernels": 1, "tuning_s": 1.0,
        "warm_s": 1.0, "agrees": True, "peers_ms": {"eager": 4.0, "inductor": 3.0, "onnxruntime": 5.0},
    }  # fmt: skip
    lost = {**row, "case": "vgg16/b1/fp32", "weft_ms": 8.0}
    gone = {"record": "case", "case": "vit/b1/fp32", "failed": "W601: no", "commit": "c1", "last_measured": "c0"}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "networks.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (head, row, lost, gone)))
    shown = tables.networks()
    assert "| vit/b1/fp32 | **failed** at c1: W601: no (last measured at c0) |" in shown
    assert "| vgg16 | 8.00 | 4.00 | **3.00** |  | 5.00 |" in shown, "what loses stays"
    assert "| geometric mean |  |  |  |  |  | **1.00** |" in shown, "of what was measured"
    widths = {line.count("|") for line in shown.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_training_is_that_of_the_documents_until_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    assert "| 64, 4096 rows | 23 (612, 606) |" in record_tables.mlp_training()
    head = {"record": "environment", "device": "GPU", "torch": "2", "commit": "c1", "command": "x"}
    own = {"forward": 10.0, "step": 20.0, "graph": 15.0}
    time = {"record": "case", "kind": "time", "case": "4 x 64", "fused": own, "eager": {"step": 50.0, "failed": "no"}}
    check = {"record": "case", "kind": "check", "case": "4 x 64", "right": True, "equal_bits": False}
    gone = {"record": "case", "kind": "check", "case": "wide", "failed": "E: no", "commit": "c1"}
    (tmp_path / "nvidia-h200").mkdir()
    lines = "".join(json.dumps(x) + "\n" for x in (head, time, check, gone))
    (tmp_path / "nvidia-h200" / "mlp-training.jsonl").write_text(lines)
    shown = record_tables.mlp_training()
    assert "| 4 x 64 | 10 | 20 | 2.50 |  | 15 |  |" in shown
    assert "| wide | **failed** at c1: E: no |" in shown
    assert "gradients of 0 of 1 networks right" in shown


def test_a_run_that_did_not_end_has_no_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    head = {"record": "environment", "device": "CPU", "commit": "c1"}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "budget.jsonl").write_text(json.dumps(head) + "\n")
    assert "| budgets: kept | CPU |  |  | the run did not end | c1 |" in tables.trust()


def test_tables_of_models_stand_in_the_document_of_the_models() -> None:
    assert set(MARK.findall(model_quality.DOCUMENT.read_text())) >= OF_MODELS
