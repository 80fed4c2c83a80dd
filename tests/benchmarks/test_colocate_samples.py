"""The record of samples is what the script makes of the other records, and every figure says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.data import colocate_samples as made

from weft.kernels.samples import read


def test_the_file_is_what_the_script_makes() -> None:
    assert made.main(["--check"]) == 0


def test_another_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setattr(made, "FILE", tmp_path / "x.json")
    assert made.main(["--check"]) == 1 and (tmp_path / "x.json").read_text() == "{}"
    assert made.main([]) == 0 and made.main(["--check"]) == 0


def test_every_source_is_a_row_of_a_record() -> None:
    record = read(json.loads(made.FILE.read_text(encoding="utf-8")))
    for source in record.sources:
        rows = [r for r in made.rows_of(source.file)[1] if r["case"] == source.case and r["commit"] == source.commit]
        assert rows, source
    assert {s.file for s in record.sources} == {
        "networks.jsonl", "colocate-guests.jsonl", "colocate-pairs.jsonl", "colocate-stop.jsonl"
    }  # fmt: skip
    assert all(s.fraction > s.slowdown for s in record.steps if s.pays) and sum(s.pays for s in record.steps) >= 20
    assert {"resnet50/b1", "vgg16/b16", "bert_base/b16"} <= {m.name for m in record.models} and len(record.jobs) == 13
