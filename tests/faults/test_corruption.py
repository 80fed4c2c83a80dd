"""A damaged database: nothing damaged is used, nothing is fatal, the tuner can go on writing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.tune.records import KERNEL, environment, measurement

from weft.tune import store
from weft.tune.store import FILE_NAME, Database

ENV = environment()
ROWS = 40


def damage(rng: random.Random, data: bytearray) -> None:
    kind = rng.choice(["flip", "flips", "truncate", "zero", "swap", "noise"])
    at = rng.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "flips":
        for _ in range(50):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "zero":
        end = min(len(data), at + rng.choice([1, 16, 4096]))
        data[at:end] = bytes(end - at)
    elif kind == "swap":
        page = 4096
        a, b = (rng.randrange(max(len(data) // page, 1)) * page for _ in range(2))
        data[a : a + page], data[b : b + page] = data[b : b + page], data[a : a + page]
    else:
        end = min(len(data), at + 512)
        data[at:end] = rng.randbytes(end - at)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sqlite", "segments"])
def test_three_hundred_corruptions(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "segments":
        monkeypatch.setattr(store, "file_system_type", lambda path, mounts: "nfs")
    true = {(m.problem_key, m.schedule): m for m in (measurement(n, s) for n in range(ROWS // 4) for s in range(4))}
    pristine = tmp_path / "pristine"
    with Database.open(pristine) as db:
        for n in range(ROWS // 4):
            db.commit([measurement(n, s) for s in range(4)], ENV)
    rng = random.Random(7)
    complete = 0
    for trial in range(150):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine, folder)
        path = folder / FILE_NAME if backend == "sqlite" else next((folder / store.SEGMENT_FOLDER).glob("*.seg"))
        data = bytearray(path.read_bytes())
        damage(rng, data)
        path.write_bytes(data)
        with Database.open(folder) as db:
            found = [m for n in range(ROWS // 4) for m in db.lookup_all(measurement(n).problem_key)]
            for m in found:
                assert m == true[m.problem_key, m.schedule], f"trial {trial}: a damaged record was used"
            complete += len(found) == ROWS
            db.commit(measurement(1000), ENV)
            assert db.lookup(measurement(1000).problem_key, measurement(1000).schedule, KERNEL, ENV) == measurement(
                1000
            )
            assert db.stats().rows >= 1
        with Database.open(folder) as db:
            assert db.lookup(measurement(1000).problem_key, measurement(1000).schedule, KERNEL, ENV) == measurement(
                1000
            )
    assert complete < 150
