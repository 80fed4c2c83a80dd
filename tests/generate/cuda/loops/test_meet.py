"""Blocks that share rows and meet through memory: at once, one after another, and again and again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.generate.cpp.test_groups import NAMED, norm_relu_pad, problem
from tests.generate.cuda.emulate import build, check, run, trial
from tests.generate.cuda.loops.test_groups import norm
from tests.ir.random_graphs import random_inputs
from tests.slow import few
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.cross_cta import cross_cta_forms, factors_together
from weft.generate.cuda.loops.forms import Form
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


def half(p: Problem) -> Problem:
    """The same over numbers of 16 bits, computed in f32."""
    b = GraphBuilder()
    mapped: dict[int, int] = {}
    for n, node in enumerate(p.graph.nodes):
        if node.prim is Prim.INPUT:
            mapped[n] = b.cast(b.input(replace(node.type, dtype=DType.F16)), DType.F32)
        elif node.prim is Prim.CONSTANT:
            mapped[n] = b.constant(p.graph.constant(n))
        else:
            mapped[n] = b.add(node.prim, *(mapped[i] for i in node.inputs), attrs=node.attrs)
    graph = b.build([b.cast(mapped[n], DType.F16) for n in p.graph.outputs])
    return replace(p, graph=graph, key=f"{p.key}-half")


MEETING: dict[str, tuple[Problem, Form]] = {
    "rows": (norm(3, 4100), Form(threads=64, per_row=64, single_pass=True, cross_cta=3)),
    "rows-one-too-many": (norm(2, 1037), Form(threads=128, per_row=128, single_pass=True, cross_cta=8)),
    "columns": (norm(24, 500, columns=True), Form(threads=64, columns=2, single_pass=True, cross_cta=5)),
    "pad": (
        problem(norm_relu_pad((2, 24, 20, 31), 2), "meet-pad", Format.LAST),
        Form(threads=64, columns=4, single_pass=True, cross_cta=12),
    ),
    "pad-row": (NAMED["norm-pad/row"](), Form(threads=64, per_row=64, single_pass=True, cross_cta=2)),
    "half-rows": (half(norm(3, 4096)), Form(threads=64, per_row=64, single_pass=True, cross_cta=4)),
    "half-pad": (
        half(problem(norm_relu_pad((2, 24, 20, 31), 2), "meet-pad", Format.LAST)),
        Form(threads=64, columns=1, single_pass=True, cross_cta=9),
    ),
    "groups": (NAMED["group-norm/last"](), Form(threads=64, columns=2, single_pass=True, cross_cta=2)),
}


def test_meeting_blocks_are_right() -> None:
    batch = [trial(p, form.schedule(), random_inputs(p.graph, 3)) for p, form in MEETING.values()]
    for one in batch:
        (launch,) = one.source.launches
        assert "w_meet<" in one.source.text and launch.cluster == (1, 1, 1), one.source.schedule
        assert one.source.state_bytes and not one.source.workspace_bytes
    check(batch)


@pytest.mark.slow
def test_a_part_that_stays_away_is_reduced_by_those_who_wait() -> None:
    """Blocks one after another: the first finds nobody and reduces all parts; bits and the state are as ever."""
    batch = [trial(p, form.schedule(), random_inputs(p.graph, 5)) for p, form in MEETING.values()]
    library = build(batch)
    for one in batch:
        at_once, alone, again = (run(one, library, together=x)[0] for x in (True, False, True))
        assert np.array_equal(np.asarray(at_once), np.asarray(alone)), one.source.schedule
        assert np.array_equal(np.asarray(at_once), np.asarray(again)), one.source.schedule


@pytest.mark.parametrize("name", few(["rows", "rows-one-too-many", "columns"], 1))
def test_variance_keeps_its_digits(name: str) -> None:
    p, form = MEETING[name]
    rng = np.random.default_rng(5)
    shape = p.graph.type_of(p.graph.inputs[0]).shape
    data = (3000 + rng.standard_normal(shape)).astype(np.float32)
    data.reshape(shape[0], -1)[:, 0] = 0  # a value far away, where a formula might look for the typical one
    one = trial(p, form.schedule(), [data])
    got, want = run(one, build([one]))[0], evaluate(p.graph, [data], precise=True)[0]
    assert np.abs(np.asarray(got) - np.asarray(want)).max() < 2e-3  # |mean| / deviation is 3000: eps costs as much


def test_what_is_not_finite_stays_in_its_row() -> None:
    p, form = MEETING["rows"]
    data = np.random.default_rng(1).standard_normal((3, 4100)).astype(np.float32)
    data[1, 4099] = np.inf
    got = np.asarray(run(one := trial(p, form.schedule(), [data]), build([one]))[0])
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


def test_only_one_pass_meets() -> None:
    """A form that does not apply is ignored: reductions that are no mean and variance, rows of one block."""
    softmax = NAMED["softmax(33, 100)/1"]()
    for p, form in (
        (softmax, Form(threads=64, single_pass=True, cross_cta=4)),
        (norm(3, 60), Form(per_row=64, single_pass=True, cross_cta=4)),
    ):
        source = trial(p, form.schedule(), []).source
        assert "w_meet<" not in source.text and not source.state_bytes


@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_no_spills(arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    for name in ("pad", "rows", "groups", "half-rows", "half-pad"):
        p, form = MEETING[name]
        source = trial(p, form.schedule(), []).source
        assert source.capability <= int(re.sub(r"\D", "", arch))
        for _, used in nvrtc.compile(source.text, arch=arch, cache_dir=tmp_path).resources:
            assert used.spill_stores == used.spill_loads == used.stack_bytes == 0, name
            assert used.registers <= 128, name


def test_numbers_of_16_bits_wait_as_they_were() -> None:
    for name in ("half-rows", "half-pad"):
        p, form = MEETING[name]
        assert "w_open<w_f16>(" in trial(p, form.schedule(), []).source.text, name


def test_factors_of_a_row_are_multiplied_first() -> None:
    b = GraphBuilder()
    x, p, q = (b.input(TensorType(DType.F32, shape)) for shape in ((4, 60), (4, 1), (4, 1)))
    wide = [b.broadcast(f, (4, 60)) for f in (p, q)]
    for y, together in (
        (b.apply(Prim.MUL, b.apply(Prim.MUL, x, wide[0]), wide[1]), True),
        (b.apply(Prim.MUL, wide[1], b.apply(Prim.MUL, wide[0], x)), True),
        (b.apply(Prim.MUL, b.apply(Prim.MUL, x, x), wide[1]), False),
    ):
        graph = b.build([y])
        found = factors_together(graph)
        inputs = random_inputs(graph, 1)
        assert_allclose(evaluate(found, inputs)[0], evaluate(graph, inputs)[0], rtol=1e-5)
        assert (found.inputs[0] in found.nodes[found.outputs[0]].inputs) is together


def test_meetings_fill_the_machine_and_read_sectors() -> None:
    facts = GpuFacts()
    first, second = cross_cta_forms(facts, 64, 64 * 12544 * 2, access=16, lanes=8, beside=True)
    assert first.columns == second.columns == 2 and first.cross_cta == second.cross_cta == 33  # 4 groups of 16 channels
    assert first.threads < second.threads
    large = cross_cta_forms(facts, 512, 512 * 50176 * 2, access=16, lanes=8, beside=True)
    assert [f.columns for f in large] == [4, 2]
    for form in large:
        groups = 512 // (form.columns * 8)
        assert groups * form.cross_cta > 2 * facts.sms and 512 * 50176 * 2 / (groups * form.cross_cta) < 96 << 10
    rows = cross_cta_forms(facts, 32, 32 * 50176 * 2, access=16, lanes=8, beside=False)
    assert rows[0].cross_cta == 4 and rows[0].per_row == rows[0].threads and not rows[0].columns


def test_no_meeting_of_one_block_or_of_too_many() -> None:
    facts = GpuFacts()
    assert cross_cta_forms(facts, 4096, 4096 * 512 * 2, access=16, lanes=8, beside=False) == []
    assert cross_cta_forms(facts, 1, 1 << 30, access=16, lanes=8, beside=False) == []


@pytest.mark.parametrize("capability", [80, 90])
def test_norms_of_few_long_rows_are_offered_it_first(capability: int) -> None:
    p = half(problem(norm_relu_pad((1, 64, 112, 112), 1), "meet-offered", Format.LAST))
    schedules = CudaGenerator().schedules(p, GpuFacts(capability=capability))
    assert not isinstance(schedules, Declined)
    assert schedules[0].param("cross_cta") == 33 and "w_meet<" in trial(p, schedules[0], []).source.text
