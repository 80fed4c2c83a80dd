"""Policies over the samples recorded on an H200: figures that a change must not move unseen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.data.colocate_samples import FILE
from tests.goldens import FOLDER, check

from weft.colocate.compare import cell_of, compare
from weft.colocate.policies import NAMES
from weft.kernels.samples import read

CELLS = [
    ("resnet50/b1", "dense", 0.8),
    ("resnet50/b1", "dense", 0.4),
    ("vgg16/b16", "cp", 0.8),
    ("bert_base/b16", "cp", 0.5),
]

PAGE = Path(__file__).parents[2] / "docs" / "colocation.md"


@pytest.mark.parametrize(("model", "job", "load"), CELLS)
def test_simulated_figures_are_those_of_before(model: str, job: str, load: float) -> None:
    record = read(json.loads(FILE.read_text(encoding="utf-8")))
    cell = cell_of(
        record, model, job, qos_ms=None, load=load, of_peak=False, process="poisson", trace=None, queries=2000
    )
    found = compare(record, [*NAMES, "green:36"], cell)
    lines = [
        f"{r.policy}: p50 {r.latency.quantile_us(0.5):.1f} p99 {r.p99_us:.1f} over {r.over_exclusive:.3f} "
        f"be {r.be_throughput:.4f} system {r.system_throughput:.4f} variants {[v.queries for v in r.variants]}"
        for r in found.runs
    ]
    lines += [f"{r.policy}: refused: {r.reason}" for r in found.refused]
    check(f"colocate/{model.replace('/', '-')}-{job}-{load:g}.txt", "\n".join(lines) + "\n")


def test_the_table_of_the_documentation_has_these_figures() -> None:
    """`| resnet50/b1 + dense, 0.4 | tally | p50 | p99 | best-effort | system |` of each policy that ran."""
    row = r"^\| (\S+) \+ (\S+), ([\d.]+) \| `([\w:]+)` \| (.*) \|$"
    rows = re.findall(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 20
    for model, job, load, policy, figures in rows:
        text = (FOLDER / f"colocate/{model.replace('/', '-')}-{job}-{float(load):g}.txt").read_text(encoding="utf-8")
        line = next(x for x in text.splitlines() if x.startswith(f"{policy}: p50"))
        found = re.match(r".* p50 ([\d.]+) p99 ([\d.]+) over ([\d.]+) be ([\d.]+) system ([\d.]+)", line)
        assert found is not None
        assert figures.split(" | ") == list(found.groups()), (policy, line)
