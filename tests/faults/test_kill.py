"""kill -9 at any instant: no committed result is lost, and the next run goes on where the last one was."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from tests.faults.fake import FakeTransport, fake_trial
from tests.typed import some

from weft.device.facts import CpuFacts
from weft.kernels.source import Schedule
from weft.options import Options
from weft.tune.store import FILE_NAME, Database
from weft.tune.tuner import ProblemTrial, Tuner

KILLS = 50
TRIALS = 400


def trials() -> list[ProblemTrial]:
    return [fake_trial(n, [Schedule("library"), Schedule("cpp", (("t", 1),))]) for n in range(TRIALS)]


def _tune(folder: Path, report: int) -> None:
    """Tune; write one byte pair per problem whose results were given out."""
    torch.set_num_threads(1)
    with Database.open(folder) as database:
        transport = FakeTransport({})
        with Tuner(Options(), CpuFacts(), database, transport=transport) as tuner:
            for k, _ in enumerate(tuner.measure(trials())):
                if k % 2:
                    os.write(report, (k // 2).to_bytes(2, "big"))


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    rng = random.Random(11)
    context = multiprocessing.get_context("fork")
    given_out: set[int] = set()
    done_before = 0
    kills = 0
    longest = 0.25
    for _ in range(KILLS):
        read, write = os.pipe()
        child = context.Process(target=_tune, args=(tmp_path, write))
        child.start()
        os.close(write)
        time.sleep(rng.uniform(0.02, longest))
        longest *= 1.0 if done_before else 1.1  # a busy machine has not come to its first commit yet
        if child.is_alive():
            os.kill(some(child.pid), signal.SIGKILL)
            kills += 1
        child.join()
        data = b""
        while chunk := os.read(read, 1 << 16):
            data += chunk
        os.close(read)
        given_out |= {int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data) - 1, 2)}
        if not (tmp_path / FILE_NAME).exists():
            continue  # killed before it made the file
        with Database.open(tmp_path) as database:
            assert not database.problems
            rows = database.stats().rows
            good, bad = database.verify()
            assert bad == 0 and good == rows >= done_before
            done_before = rows
            stored = {m.measurement.problem_key.split("\n")[0] for m in database.records()}
            assert {str(n) for n in given_out} <= stored
    assert kills >= KILLS // 2
    repeated = sqlite3.connect(tmp_path / FILE_NAME)
    most = repeated.execute("SELECT max(n) FROM (SELECT count(*) AS n FROM trials GROUP BY key)").fetchone()[0]
    repeated.close()
    assert most == 1  # nothing that was committed was measured again
    with Database.open(tmp_path) as database, Tuner(Options(), CpuFacts(), database, transport=FakeTransport({})) as t:
        found = list(t.measure(trials()))
    assert len(found) == 2 * TRIALS
