"""Work of co-runners on the host: what it counts, and that each block counts itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
from benchmarks.best_effort.jobs import Stage
from benchmarks.co_runner.rows import lost_or_doubled
from benchmarks.co_runner.units import CELLS, FOLDER, KINDS
from tests.benchmarks.on_host import Memory, launch

from weft.generate.cuda.foreign import manifest as manifests

BLOCKS, TURNS, PIECES = 11, 3, 640


def stage_of(kind: str, threads: int) -> Stage:
    changes: dict[str, object] = {
        "grid": [BLOCKS, 1, 1],
        "block": [threads, 1, 1],
        "define": {"THREADS": str(threads), "REPEATS": str(TURNS)},
    }
    if kind in ("streaming", "histogram"):
        changes |= {"parameters.data.shape": [PIECES], "parameters.pieces.value": PIECES}
    return Stage(manifests.read(FOLDER / f"{kind}.toml", changes=changes))


def host_text(stage: Stage) -> str:
    """Without what the host does not have."""
    text = re.sub(r'asm volatile\("ex2[^;]*;[^;]*;', "a[j] = exp2f(-a[j]);", stage.text)
    text = re.sub(r'asm volatile\("mov.u64 %0, %%globaltimer;[^;]*;', "now = 0;", text)
    assert "asm" not in text
    return "#define __ldcs(p) (*(p))\n#define ffma our_ffma\n" + text  # a host's library has one of that name


@pytest.mark.parametrize("threads", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_every_block_counts_itself_and_does_its_turns(kind: str, threads: int) -> None:
    stage = stage_of(kind, threads)
    before = {}
    for p, data in stage.pointers:
        before[p.buffer] = np.zeros((data.count * data.per * data.element.nbytes) // 4, np.uint32)
    if "data" in before:
        before["data"] = np.random.default_rng(1).integers(0, 1 << 32, PIECES * 4, np.uint32)
    memory = Memory(before)
    launch(stage, memory, [*range(1, BLOCKS), 0], text=host_text(stage))
    ran = memory.read("ran")
    assert len(ran) == CELLS and lost_or_doubled(ran.tolist(), BLOCKS) == ""
    if kind == "histogram":
        at = (np.arange(BLOCKS * threads * TURNS)) % PIECES
        want = np.bincount(before["data"].view(np.uint8).reshape(PIECES, 16)[at].reshape(-1), minlength=256)
        assert memory.read("counts").tolist() == want.tolist()
    elif kind in ("ffma", "dense"):
        a = np.arange(threads, dtype=np.float64)[:, None] + np.arange(8)
        for _ in range(TURNS * (8 if kind == "dense" else 1)):
            a = a * 0.999 + 0.5
        got = memory.read("out").view(np.float32)[:threads]
        assert np.allclose(got, a.sum(1), rtol=1e-5) and not memory.read("out")[threads:].any()
    elif kind == "exponentials":
        b = (np.arange(threads)[:, None] + np.arange(8)) * 0.001
        for _ in range(TURNS):
            b = np.exp2(-b)
        assert np.allclose(memory.read("out").view(np.float32)[:threads], b.sum(1), rtol=1e-5)


def test_the_full_data_holds_whole_blocks() -> None:
    for kind in ("streaming", "histogram"):
        (pieces,) = [p.values[0] for p in manifests.read(FOLDER / f"{kind}.toml").parameters if p.name == "pieces"]
        assert int(pieces) % 256 == 0 and int(pieces) < 1 << 31
