"""The memory of a soak, and how it tells failures."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from weft.options import Options


def test_memory_that_grows_is_not_flat() -> None:
    assert abs(soak.growth([400.0 + k % 7 for k in range(600)])[0]) < 10
    rise, median = soak.growth([400.0 + 0.01 * k for k in range(600)])
    assert rise == pytest.approx(36.0) and median == pytest.approx(404.5, abs=0.1)
    log = soak.Log(rss_mb=[400.0 + 0.01 * k for k in range(600)], in_use_mb=[200.0] * 600)
    log.mappings = [900.0 + 0.1 * k for k in range(600)]
    end = soak.summary(log, 600)
    assert (end["mappings"], end["mappings_rise_per_h"]) == (945, 360)
    assert end["flat"] is False and end["in_use_rise_mb_per_h"] == 0.0 and end["bound_mb_per_h"] == 20.2
    # what is loaded once does not count, what is not given back does
    once = soak.Log(rss_mb=[min(400.0 + k, 600.0) for k in range(600)])
    assert soak.summary(once, 600)["flat"] is True


PRODUCTS = """
import os
import torch
from benchmarks import soak
os.environ.update(%r)
weights = torch.randn(96, 48)
def call(low, high):
    for rows in range(low, high):
        torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 48), weights, None, "none", [], "")
with torch.no_grad():
    call(1, 80)
    before = soak.in_use_mb()
    call(80, 160)
print(soak.in_use_mb() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN")
def test_what_the_framework_keeps_of_each_shape_is_bounded_by_its_settings() -> None:
    """They are read when it first calls oneDNN, after the soak has set them."""
    assert soak.in_use_mb() > 0
    kept = []
    for settings in (dict.fromkeys(soak.CAPACITIES, "1024"), soak.CAPACITIES):
        command = [sys.executable, "-c", PRODUCTS % settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        kept.append(float(done.stdout))
    assert kept[1] < max(kept[0] / 4, 0.1)


def test_what_the_allocator_has_given_out_is_counted() -> None:
    before = soak.in_use_mb()
    held = bytearray(64 << 20)
    assert soak.in_use_mb() - before == (0.0 if before == 0.0 else pytest.approx(64.0, abs=4.0))
    del held


def test_each_kind_of_failure_of_a_soak_is_told_once_with_its_count() -> None:
    log = soak.Log()
    work = soak.Soak([], Path(), Options(), log, math.inf)
    raised = iter([KeyError("a"), KeyError("b"), ValueError("c")])

    def step(_: random.Random) -> None:
        error = next(raised, None)
        if error is None:
            work.end = 0.0
            return
        raise error

    work.pause = lambda seconds: None  # type: ignore[method-assign]
    work.forever("grow", step, 1)
    log.fail("wrong", "calls block 3", "neither of the two results")
    found = [(f["case"], f["outcome"], f["count"], str(f["note"]).splitlines()[-1]) for f in log.failures.values()]
    assert found == [
        ("grow", "failed", 2, "KeyError: 'a'"),
        ("grow", "failed", 1, "ValueError: c"),
        ("calls block 3", "wrong", 1, "neither of the two results"),
    ]
    assert log.counts == {"failed": 3, "wrong": 1}
