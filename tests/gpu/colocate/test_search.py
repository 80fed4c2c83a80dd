"""`weft fuse --search` on a real GPU: every shape right, the best written, and its test program agrees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import benchmarks.best_effort
import pytest

from weft.colocate.fuse import Pair, write
from weft.colocate.search import search_pair
from weft.errors import KernelDeclinedError
from weft.kernels.pairs import PairRecord
from weft.tune.pairs import known
from weft.tune.store import Database

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter", reason="kernels are cut by tree-sitter: pip install weft[fuse]")
LIMIT_S = 300
BEST_EFFORT = Path(benchmarks.best_effort.__path__[0])
PRODUCT = 'product = "M=512 N=512 K=512"\nlayout = "nt"\ndtype = "f16"\n'


def searched(folder: Path, lc: Path, be: list[Path], budget_s: float = 90.0) -> tuple[Pair | None, list[PairRecord]]:
    """None: nothing pays."""
    with Database.open(folder) as database:
        try:
            pair = search_pair(lc, be, database=database, small=True, budget_s=budget_s)
        except KernelDeclinedError as error:
            if not str(error).startswith("do not fuse"):
                raise
            pair = None
        return pair, list(known(database))


@pytest.mark.parametrize(
    ("lc", "be"),
    [
        ("", ["mriq/kernel.toml"]),
        ("cp/kernel.toml", ["aes/kernel.toml"]),
        ("lavamd/kernel.toml", ["histo/clear.toml", "histo/count.toml"]),
    ],
    ids=["product and a table", "two sources", "two stages"],
)
def test_shapes_are_right_and_the_best_is_written(lc: str, be: list[str], tmp_path: Path) -> None:
    kernel = BEST_EFFORT / lc
    if not lc:
        kernel = tmp_path / "product.toml"
        kernel.write_text(PRODUCT)
    stages = [BEST_EFFORT / name for name in be]
    pair, rows = searched(tmp_path, kernel, stages)
    kernels = [r for r in rows if r.key.kernel]
    right = [r for r in kernels if not r.declined]
    assert right, [r.declined for r in kernels]
    wrong = [
        r.declined for r in kernels if "differs" in r.declined or "process" in r.declined or "blocks" in r.declined
    ]
    assert wrong == []
    for r in right:
        assert {"serial", "streams"} <= {name for name, _ in r.peers} and r.lc_us > 0 and r.rounds >= 3
    again, now = searched(tmp_path, kernel, stages)
    assert (again is None) == (pair is None) and len(now) == len(rows), "what is known is not measured again"
    if pair is None:
        assert next(r.declined for r in rows if not r.key.kernel).startswith("do not fuse")
        return
    assert again is not None and again.fused == pair.fused
    if shutil.which("g++") is None:
        return
    write(pair, tmp_path / "out")
    told = ""
    for command in (["g++", "-std=c++17", "-O2", "test.cpp", "-o", "test", "-ldl"], ["./test"]):
        done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        told = done.stdout
    assert "results: equal" in told


def test_a_budget_that_is_short_leaves_the_best_so_far(tmp_path: Path) -> None:
    kernel = tmp_path / "product.toml"
    kernel.write_text(PRODUCT)
    pair, rows = searched(tmp_path, kernel, [BEST_EFFORT / "mriq" / "kernel.toml"], 30.0)
    assert rows and (pair is None or pair.measured is not None)
