"""`weft pairs`: what it lists, writes and takes over, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tune.test_pairs import record
from torch import nn

import weft
from weft.cli import app as cli
from weft.kernels.sm_timeline import SmTimeline
from weft.tune.pairs import keep, keep_timeline, of_gpu, read_rows, refused, write_rows
from weft.tune.store import Database

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    for name in [n for n in os.environ if n.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", "pairs", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        out = capsys.readouterr()
        return int(ended.value.code or 0), " ".join(out.out.split()), out.err

    return call


@pytest.fixture
def filled(tmp_path: Path) -> None:
    a100 = record("g", be="cp", ratio=1.1)
    old = record("old", ratio=2.0, started=1.0)
    with Database.open(tmp_path / "cache") as database:
        keep(
            database,
            [
                replace(old, key=replace(old.key, driver="570.1")),
                record("a"),
                record("b", s=0.4, f=1.2, ratio=1.5),
                refused(record("c", be="sad"), "no [room] for it"),
                replace(a100, key=replace(a100.key, gpu="NVIDIA A100")),
            ],
        )


@pytest.mark.usefixtures("filled")
def test_pairs_are_listed_by_gpu(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert "NVIDIA A100, driver 580.1" in out and "NVIDIA H200, driver 580.1" in out
    assert "vgg16/conv3x3-64-224 + mriq 1.500 yes 2+0 0.10/0.50 0.40/1.20" in out
    assert "vgg16/conv3x3-64-224 + sad 1.000 no 0+1 no [room] for it" in out
    assert "1 of 2 pairs kept, geometric mean 1.225" in out and "1 of 1 pairs kept, geometric mean 1.100" in out
    assert "570.1" not in out, "earlier versions only with --all"


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("arguments", "pairs"),
    [
        (["--be", "mri"], ["mriq"]),
        (["--kept"], ["cp", "mriq"]),
        (["--gpu", "a100"], ["cp"]),
        (["--lc", "resnet"], []),
        (["--be", "mriq", "--all"], ["mriq", "mriq"]),
    ],
)
def test_pairs_are_chosen_and_told_as_json(run: Run, arguments: list[str], pairs: list[str]) -> None:
    code, out, _ = run(*arguments, "--format", "json")
    found = json.loads(out)
    assert code == 0 and [p["be"] for p in found["pairs"]] == pairs
    assert (found["geometric_mean"] is None) == (not pairs)
    for p in found["pairs"]:
        assert p["kept"] == bool(p["front"]) and p["ratio"] == max([x["ratio"] for x in p["front"]], default=1.0)
        assert all({"slowdown", "fraction", "cubin", "schedule", "shape"} <= x.keys() for x in p["front"])


def test_none_are_none(run: Run) -> None:
    assert run()[:2] == (0, "no pairs in the tuning database")


@pytest.mark.usefixtures("filled")
def test_matrix_and_records_are_written_and_taken_over(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, lines = tmp_path / "pairs.html", tmp_path / "pairs.jsonl"
    assert run("--report", page, "--export", lines, "--all")[0] == 0
    assert "1.50 ✓" in page.read_text() and "570.1" in page.read_text()
    assert len(read_rows(lines.read_text())) == 5
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "other"))
    code, out, _ = run("--add", lines, "--gpu", "h200")
    assert code == 0 and "1 of 2 pairs kept" in out
    assert run("--add", lines)[0] == 0
    with Database.open(tmp_path / "other") as database:
        assert database.stats().others == {"pair": 10} and len(database.of_kind("pair")) == 5, "the same ones again"


def test_files_that_are_none(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for content, said in (
        (b"{}\n", "malformed record of a pair"),
        (write_rows([record()]).encode() + b"x\n", "line 2"),
        (b"\xff\xfe", "no text in UTF-8"),
    ):
        bad.write_bytes(content)
        code, _, err = run("--add", bad)
        assert code != 0 and said in err and "[W401]" in err and "internal error" not in err
    code, _, err = run("--add", tmp_path / "none")
    assert code != 0 and "cannot be read: No such file" in err
    assert run()[:2] == (0, "no pairs in the tuning database"), "nothing of a bad file is kept"
    code, _, err = run("--report", tmp_path / "no" / "folder.html")
    assert code != 0 and "cannot be written" in err


def test_a_file_that_is_too_large(run: Run, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    code, _, err = run("--add", tmp_path / "large")
    assert code != 0 and "more than 64 MiB" in err


def test_a_recorded_timeline_is_taken_over_and_drawn(run: Run, tmp_path: Path) -> None:
    recorded = Path(__file__).parents[1] / "report" / "sm_timeline.json"
    page = tmp_path / "pairs.html"
    assert run("--timeline", recorded)[0] == 0
    assert run("--report", page)[0] == 0, "it is in the database now"
    assert 'class="lanes"' in page.read_text(encoding="utf-8")
    assert run("--lc", "another", "--report", page)[0] == 0
    assert 'class="lanes"' not in page.read_text(encoding="utf-8")
    for text in ("{", "[1]", '{"lc": "a"}'):
        (tmp_path / "bad.json").write_text(text)
        code, _, err = run("--timeline", tmp_path / "bad.json")
        assert code != 0 and "W401" in err


@pytest.mark.usefixtures("run", "filled")
def test_a_report_asks_for_the_pairs_of_its_gpu(tmp_path: Path) -> None:
    with Database.open(tmp_path / "cache") as database:
        keep_timeline(database, SmTimeline("a", "b", "NVIDIA A100", "", 0, ()))
        pairs, drawn = of_gpu(database, ("cuda", "NVIDIA A100-SXM4-40GB"))
        assert [s.gpu for s in pairs] == ["NVIDIA A100"] and [t.gpu for t in drawn] == ["NVIDIA A100"]
        assert of_gpu(database, ("cpu",)) == ([], []) == of_gpu(database, ())
        assert {s.driver for s in of_gpu(database, ("NVIDIA H200",))[0]} == {"580.1"}, "the newest version of each"


@pytest.mark.usefixtures("filled")
def test_a_report_from_python_shows_the_pairs_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    options = weft.Options(budget_s=0, cache_dir=tmp_path / "cache")
    compiled = weft.compile(nn.ReLU(), torch.zeros(4), options=options)
    compiled.report(page)
    assert "Time of the best peer" not in page.read_text(encoding="utf-8"), "a plan for a CPU"
    there = replace(compiled.record, device="NVIDIA H200")
    monkeypatch.setattr(weft.Compiled, "record", property(lambda _: there))
    compiled.report(page)
    assert "Time of the best peer" in page.read_text(encoding="utf-8")
