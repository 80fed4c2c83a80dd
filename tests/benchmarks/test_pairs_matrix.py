"""The matrix of a record of pairs, and rows for the database as the benchmark makes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cases.colocate_lc import hosts, lc_kernel
from benchmarks.gpu_pairs import job_of
from benchmarks.pairs_matrix import main, row_of, summaries
from tests.typed import approx

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.errors import ArtifactError
from weft.generate.cuda.role.fused import fuse, shapes
from weft.kernels.colocation import FusedSource
from weft.tune.pairs import keep, known, refused
from weft.tune.store import Database

ENVIRONMENT = {"record": "environment", "device": "NVIDIA H200", "driver": "580.1"}
SHAPE = {
    "place": "idle", "threads": 96, "barrier": 4, "shared_offset": 0, "replicas": 1, "min_ctas_per_sm": 0,
    "registers": {"producer": 104, "consumer": 200, "best_effort": 104},
}  # fmt: skip


def case(name: str, **more: Any) -> dict[str, Any]:
    return {"record": "case", "suite": "colocate-pairs", "case": name, "lc_us": 100.0, "be_us": 300.0, **more}


KEPT = case("vgg16/a/mriq", kept=True, ratio=1.3, measured_ratio=1.3, shape=SHAPE, launches=6, fraction=0.5, inside=0.8,
            slowdown=0.1)  # fmt: skip
ROWS = [
    ENVIRONMENT,
    case("vgg16/a/cp", kept=False, ratio=1.0, measured_ratio=0.93),
    case("vgg16/a/sad", kept=False, ratio=1.0, note="no shape runs"),
    case("vgg16/a/fft", kept=False, ratio=1.0, measured_ratio=1.4, wrong="memory 2 differs"),
    case("vgg16/a/lbm", failed="its process ended with -11"),
    {"record": "shape", "case": "vgg16/a/mriq", "declined": "spills"},
    case("vgg16/a/mriq", kept=False, ratio=1.0, note="an older run"),
    KEPT,
]


def test_rows_become_pairs() -> None:
    found = {s.be: s for s in summaries(ROWS)}
    assert {s.lc for s in found.values()} == {"vgg16/a"} and len(found) == 5
    assert {(s.gpu, s.driver) for s in found.values()} == {("NVIDIA H200", "580.1")}
    assert [be for be, s in found.items() if s.kept] == ["mriq"] and found["mriq"].ratio == 1.3
    (point,) = found["mriq"].front
    assert (point.fraction, point.slowdown) == (approx(0.4), 0.1)
    assert point.shape is not None and point.shape.registers is not None and point.shape.registers.consumer == 200
    assert {be: s.reason for be, s in found.items() if not s.kept} == {
        "cp": "0.93 of the best peer", "sad": "no shape runs", "fft": "memory 2 differs",
        "lbm": "its process ended with -11",
    }  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        case("mriq", kept=False, note="x"),
        case("a/b"),
        {**KEPT, "ratio": 0.0},
        {**KEPT, "shape": {"place": "idle"}},
        {**KEPT, "shape": {**SHAPE, "colour": 1}},
        {**KEPT, "slowdown": None},
    ],
)
def test_rows_that_are_none(bad: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="a row of a pair that is none"):
        summaries([ENVIRONMENT, bad])


def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    main([str(file), "-o", str(page)])
    assert "1 of 5 pairs are kept" in page.read_text() and "1.30 ✓" in page.read_text()
    assert "wrote" in capsys.readouterr().out
    file.write_text("{")
    for arguments in ([str(file)], [str(tmp_path / "none")], [str(file), "-o", str(tmp_path)]):
        with pytest.raises(SystemExit, match=r"benchmarks\.pairs_matrix: "):
            main(arguments)


def test_the_benchmarks_kernels_become_rows_of_the_database(tmp_path: Path) -> None:
    nvrtc, facts = find_nvrtc(), profile("h200")
    assert isinstance(nvrtc, Nvrtc)
    kernel, job = lc_kernel("bert_base/product-2048x3072x768"), job_of("mriq", small=True)
    lc = hosts(kernel, facts, 1)[0]
    made = [fuse(lc, job.sources, s, facts=facts) for s in shapes(lc, job.sources, facts)[:2]]
    cubin = tmp_path / "x.cubin"
    cubin.write_bytes(b"code")
    rows = []
    for one in made:
        assert isinstance(one, FusedSource)
        row = row_of((kernel.name, job.name), kernel.problem, lc, job.sources, one, cubin, facts, nvrtc)
        assert row.cubin == hashlib.sha256(b"code").hexdigest() and row.shape == one.shape
        assert row.schedule == lc.schedule and nvrtc.version in row.key.measuring and row.key.gpu == facts.name
        rows.append(refused(row, "not run here"))
    assert rows[0].key != rows[1].key and rows[0].key.job == rows[1].key.job
    with Database.open(tmp_path / "cache") as database:
        keep(database, rows)
        assert [r.key for r in known(database)] == [r.key for r in rows]
    with pytest.raises(OSError, match="No such file"):
        row_of(("a", "b"), kernel.problem, lc, job.sources, made[0], tmp_path / "none", facts, nvrtc)  # type: ignore[arg-type]
