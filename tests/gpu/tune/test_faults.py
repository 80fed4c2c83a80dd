"""Broken kernels as candidates, two of each kind: a small version of `benchmarks.gpu_faults`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from benchmarks.gpu_faults import KINDS, Bench, Tally, inject, is_good, table
from tests.gpu.conftest import Tell

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.options import Options

pytestmark = pytest.mark.gpu


def test_broken_kernels_harm_nobody(shared_cache: Path, stated: GpuFacts, nvrtc: Nvrtc, tell: Tell) -> None:
    """All kinds at once, each by a tuner of its own, so that a fault of one stands beside sound kernels of others."""
    options = Options(device="cuda", cache_dir=shared_cache, threads=1, build_jobs=1)
    bench = Bench(stated, nvrtc, options)
    tallies = {name: Tally() for name in KINDS}
    deadline = time.monotonic() + 60

    def work(name: str) -> None:
        inject(bench, name, range(2), tallies[name], jobs=1, deadline=deadline)

    threads = [threading.Thread(target=work, args=(name,)) for name in KINDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    tell(table(tallies))
    assert all(t.injected == 2 and is_good(t) for t in tallies.values()), tallies
