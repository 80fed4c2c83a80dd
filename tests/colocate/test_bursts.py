"""Bursts and overload: queries that are refused as they come, those that are not, and figures over recorded samples."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.data.colocate_samples import FILE
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.colocate.recorded import constant, samples
from tests.colocate.virtual_machine import VirtualMachine
from tests.goldens import FOLDER, check

from weft.colocate import compare as c
from weft.colocate.arrivals import Arrivals, poisson
from weft.colocate.live import LiveBackend, run
from weft.colocate.operating import prepare
from weft.colocate.outcome import Outcome, off_lindley_us
from weft.colocate.policies import make
from weft.colocate.policy import Admission
from weft.kernels.samples import SampleRecord, read

US = 1000
STEADY = samples(constant(100.0), launch_us=5.0, stop_us=10.0)
POLICIES = ("exclusive", "serial", "tally", "green:16", "weft")
PAGE = Path(__file__).parents[2] / "docs" / "colocation.md"
BURSTS = (("gamma:3", 0.5, False), ("spikes:10", 0.5, False), ("poisson", 1.5, True))


def both(policy: str, arrivals: Arrivals, record: SampleRecord = STEADY) -> list[Outcome]:
    """Simulated, and on a machine with constant times."""
    p = prepare(record, policy, "net", "" if policy == "exclusive" else "work", 500 * US)
    cell = c.Cell("net", "work", 500 * US, 1.5, c.RELATIVE, arrivals, 1, True)
    machine = VirtualMachine(
        [round(x.lc.at(0.5) * 1e3) for x in p.points], [x.variant.idle_rate for x in p.points],
        [x.variant.be_us / x.variant.lc_us for x in p.points], launch_ns=5 * US, stop_ns=10 * US,
    )  # fmt: skip
    made = make(policy, p.setting)
    backend = LiveBackend(machine, [(p, arrivals)], policy=made, admission=Admission(p.setting))
    return [c.simulated(p, cell), run(made, backend)]


@st.composite
def traces(draw: st.DrawFn) -> Arrivals:
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 20, 90, 150, 400, 2500]), min_size=1, max_size=60))
    return Arrivals(np.cumsum(np.array(gaps, dtype=np.int64)) * US, "random")


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8, deadline=None)
@given(arrivals=traces())
def test_every_query_is_answered_or_refused_and_none_both(policy: str, arrivals: Arrivals) -> None:
    for out in both(policy, arrivals):
        done = {n for n, at in enumerate(out.done_ns) if at > 0}
        refused = set(out.refused)
        assert len(refused) == len(out.refused) and not done & refused
        assert done | refused == set(range(len(arrivals)))
        assert all(out.variants[n] == -1 and out.begin_ns[n] == -1 for n in refused)
        assert off_lindley_us(out) >= 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_at_one_and_a_half_times_the_load_those_admitted_are_in_time(policy: str) -> None:
    for out in both(policy, poisson(15_000.0, 4000, seed=2)):
        late = [q.number for q in out.queries if out.done_ns[q.number] > q.deadline_ns]
        assert 0.2 < len(out.refused) / 4000 < 0.6
        # `serial` spends their headroom afterwards, and beside a partition they take longer than alone
        most = 0.01 if policy in ("exclusive", "tally", "weft") else 0.15
        assert len(late) <= most * (4000 - len(out.refused))


def test_nobody_is_refused_whom_there_is_time_for() -> None:
    for out in both("exclusive", poisson(1_000.0, 1000, seed=3)):
        assert not out.refused


def test_a_summary_is_of_those_that_were_answered() -> None:
    arrivals = poisson(15_000.0, 1000, seed=2)
    p = prepare(STEADY, "weft", "net", "work", 500 * US)
    cell = c.Cell("net", "work", 500 * US, 1.5, c.RELATIVE, arrivals, 1, True)
    for out in both("weft", arrivals):
        found = c.summed_up([p], cell, out)[0]
        assert found.refused == len(out.refused) > 0 and found.kept
        assert sum(v.queries for v in found.variants) == 1000 - found.refused
        assert found.latency.queries + (1000 - found.refused) // 50 == 1000 - found.refused
    none = c.simulated(p, replace(cell, admit=False))
    assert not c.summed_up([p], cell, none)[0].kept, "without it the queue grows"


def lines() -> list[str]:
    record = read(json.loads(FILE.read_text(encoding="utf-8")))
    found = []
    for process, load, admit in BURSTS:
        cell = c.cell_of(
            record, "resnet50/b1", "dense", qos_ms=None, load=load, of_peak=True, process=process, trace=None,
            queries=5000, admit=admit,
        )  # fmt: skip
        made = c.compare(record, ["serial", "tally", "green:36", "weft"], cell)
        found += [
            f"| resnet50/b1 + dense, {process} at {load:g} | `{r.policy}` | {r.latency.quantile_us(0.5):.1f}"
            f" | {r.p99_us:.1f} | {r.latency.violations} | {r.refused} | {r.be_throughput:.4f} |"
            for r in made.runs
        ]
    return found


def test_simulated_figures_are_those_of_before_and_of_the_page() -> None:
    made = lines()
    check("colocate/bursts.txt", "\n".join(made) + "\n")
    page = re.findall(r"^\| resnet50/b1 \+ dense, \S+ at .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert page == (FOLDER / "colocate" / "bursts.txt").read_text(encoding="utf-8").splitlines()
