"""Kernels that record when their roles ran: the same results, every run of a role once, and other kernels unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests import goldens
from tests.generate.cuda import fusing
from tests.generate.cuda.fused_emulator import Counter, FusedKernels
from tests.generate.cuda.fusing import TMA_PROBLEM, fma, lc_is_right, lc_memory, meet, tma_role
from tests.generate.cuda.role.test_fused import FACTS, expected, first_shape
from tests.slow import few

from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.role import fused
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource, WorkCounter
from weft.kernels.sm_timeline import RawSpan, raw_spans, timeline, timeline_from_json, timeline_to_json, trace_bytes

RECORD = Path(__file__).parents[3] / "report" / "sm_timeline.json"
JOB = [fma(11), meet(5)]


def traced(spans: int, replicas: int = 1) -> FusedSource:
    shape = first_shape(tma_role(), JOB, replicas=replicas)
    found = fused.fuse(tma_role(), JOB, shape, facts=FACTS, spans=spans)
    assert isinstance(found, FusedSource), found
    return found


def launched(source: FusedSource, room: int, launches: int = 4) -> tuple[list[RawSpan], int, WorkCounter]:
    kernels = FusedKernels([source])
    counter = Counter(WorkCounter.start(source.stages, sum(source.stages)), trace_bytes(room))
    memory = [fusing.of(x) for x in JOB]
    for k in range(launches):
        lc = lc_memory(TMA_PROBLEM)
        error = kernels.run(source, {0: lc, 1: memory[0], 2: memory[1]}, counter, gang=2, seed=k + 1)
        assert not error and lc_is_right(TMA_PROBLEM, lc)
    assert counter.buffer.intact() and all(b.intact() for m in memory for b in m.buffers)
    if counter.now.finished == sum(source.stages):
        for one, m in zip(JOB, memory, strict=True):
            np.testing.assert_array_equal(fusing.result(m), expected(one))
    found, left_out = raw_spans(counter.trace)
    return found, left_out, counter.now


@pytest.mark.parametrize("replicas", few([2, 1], 1))
def test_every_run_of_a_role_is_recorded_once(replicas: int) -> None:
    source = traced(256, replicas)
    found, left_out, counter = launched(source, 256)
    assert left_out == 0
    lc = [s for s in found if s.role == 0]
    ctas = source.grid[0] * source.grid[1] * source.grid[2]
    assert sorted(s.cta for s in lc) == sorted(list(range(ctas)) * 4), "LC once in each CTA of each launch"
    blocks = [(s.stage, s.block) for s in found if s.role > 0]
    assert len(blocks) == counter.finished > 0 and len(set(blocks)) == len(blocks), "each block once"
    assert {s.role for s in found} <= set(range(replicas + 1))
    assert all(s.begin < s.end and s.ns <= s.end for s in found)
    for a in found:  # a role runs one block after another
        same = [b for b in found if b is not a and (b.cta, b.role) == (a.cta, a.role)]
        assert not any(a.begin < b.end and b.begin < a.end for b in same)


@pytest.mark.slow
def test_spans_for_which_there_is_no_room_are_counted() -> None:
    found, left_out, counter = launched(traced(3), 3)
    everything, none, _ = launched(traced(256), 256)
    assert len(found) == 3 and none == 0 and left_out > 0 and counter.finished > 0
    assert len(everything) > 3


def test_kernels_that_do_not_record_have_nothing_of_it() -> None:
    shape = first_shape(tma_role(), JOB)
    plain = fused.fuse(tma_role(), JOB, shape, facts=FACTS)
    assert isinstance(plain, FusedSource)
    assert plain == fused.fuse(tma_role(), JOB, shape, facts=FACTS, spans=0)
    assert "w_span" not in plain.text and "w_trace" not in plain.text and "globaltimer" not in plain.text
    assert traced(8).parameters == plain.parameters and traced(8).shared_bytes == plain.shared_bytes


@pytest.mark.skipif(isinstance(find_nvrtc(), Declined), reason="no NVRTC")
def test_it_compiles_without_spills() -> None:
    nvrtc = find_nvrtc()
    assert not isinstance(nvrtc, Declined)
    cubin = nvrtc.compile(traced(4096).text, arch="sm_90a")
    assert fused.judge(traced(4096), cubin.of("fused"), FACTS) is None


def test_the_record_of_a_launch() -> None:
    """As what the tests of the report read; WEFT_UPDATE_GOLDEN=1 writes that anew."""
    found, left_out, _ = launched(traced(256, 2), 256)
    one = timeline(found, left_out, lc="product", be="fma", gpu="emulated", kernel="e" * 64)
    assert timeline_from_json(timeline_to_json(one)) == one
    assert one.busy_us(best_effort=False) > 0 < one.busy_us(best_effort=True)
    if goldens.UPDATE:
        RECORD.write_text(json.dumps(timeline_to_json(one), indent=1) + "\n", encoding="utf-8")
    kept = timeline_from_json(json.loads(RECORD.read_text(encoding="utf-8")))
    assert (kept.lc, kept.sm, kept.left_out) == (one.lc, one.sm, 0)
    assert {s.role for s in kept.spans} == {s.role for s in one.spans} == {0, 1, 2}
    assert [s.cta for s in kept.spans if s.role == 0] == [s.cta for s in one.spans if s.role == 0]
