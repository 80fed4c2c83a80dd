"""Norms whose results are stored to all places of pads and resizes that show them, on the emulated machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.generate.cuda.emulate import FACTS, Trial, build, check, run, trial
from tests.ir.random_graphs import random_inputs
from tests.slow import few

from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.cross_cta import balanced, stashed
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.scatter import FEW, LONGEST, scatter
from weft.ir import attrs as a
from weft.ir.attrs import PadMode
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

CHANNELS, HEIGHT, WIDTH = 32, 9, 11
MEET = Form(threads=64, columns=2, single_pass=True, cross_cta=3, scatter=True)
FORMS = (
    MEET,
    Form(threads=64, columns=1, single_pass=True, cross_cta=2, scatter=True, smem_stash=True),
    Form(threads=64, columns=2, single_pass=True, num_splits=3, spread=8, scatter=True),
    Form(threads=64, columns=2, num_splits=3, spread=8, scatter=True),
    Form(threads=64, columns=2, single_pass=True, cluster=2, scatter=True),
    Form(threads=64, columns=2, single_pass=True, apart=True, num_splits=3, scatter=True),
    Form(threads=64, fuse=False, scatter=True),
)


def shown(
    *,
    images: int = 1,
    dtype: DType = DType.F16,
    sizes: tuple[int, int] | None = None,
    pad: PadMode | None = "reflect",
    residual: bool = False,
    last: bool = True,
    weights: bool = True,
    twice: bool = False,
) -> Problem:
    """A norm with ReLU (and a second image added), gathered to so many rows and columns, padded by (1, 2, 2, 1)."""
    b = GraphBuilder()
    shape = (images, CHANNELS, HEIGHT, WIDTH)
    given = b.input(TensorType(dtype, shape))
    x, n = b.cast(given, DType.F32), float(HEIGHT * WIDTH)
    d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, (2, 3)), n))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), (2, 3)), n)
    y = b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)))
    inner = y = b.cast(b.apply(Prim.MAX, y, 0.0), dtype)
    if residual:
        inner = y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, shape)))
    for axis, size in zip((2, 3), sizes or (), strict=False):
        y = b.add(Prim.GATHER, y, b.input(TensorType(DType.I64, (size,)), is_weight=weights), attrs=a.GatherAttrs(axis))
    if pad is not None:
        y = b.add(Prim.PAD, y, attrs=a.PadAttrs((0, 0, 1, 2), (0, 0, 2, 1), pad))
    graph = b.build([y, inner] if twice else [y])
    kind = Format.LAST if last else Format.ROW

    def formats(nodes: tuple[NodeId, ...]) -> tuple[Format, ...]:
        return tuple(kind if graph.type_of(k).rank == 4 else Format.ROW for k in nodes)

    return Problem(graph, str(graph), formats(graph.inputs), formats(graph.outputs))


def inputs_of(p: Problem, *indices: Array) -> list[Array]:
    """Random numbers, and these indices."""
    found, given = random_inputs(p.graph, 4), iter(indices)
    return [
        next(given) if p.graph.type_of(n).dtype is DType.I64 else x for n, x in zip(p.graph.inputs, found, strict=True)
    ]


def batch_of(p: Problem, inputs: list[Array], forms: tuple[Form, ...] = FORMS) -> list[Trial]:
    batch = [trial(p, form.schedule(), inputs) for form in forms]
    for one in batch:
        assert "w_show<" in one.source.text, one.source.schedule
    return batch


def test_all_forms_are_right() -> None:
    batch = []
    for dtype, forms in ((DType.F16, FORMS), (DType.BF16, FORMS[:2]), (DType.F32, FORMS[2:5])):
        p = shown(images=2, dtype=dtype)
        batch += batch_of(p, inputs_of(p), forms)
    check(batch)


def test_pads_and_resizes() -> None:
    batch = []
    rows, columns = np.arange(2 * HEIGHT) // 2, np.arange(2 * WIDTH) // 2
    for p in (
        shown(pad="edge"),
        shown(residual=True),
        shown(residual=True, pad=None, sizes=(18, 22)),
        shown(sizes=(18, 22)),
    ):
        indices = (rows, columns) if any(p.graph.type_of(n).dtype is DType.I64 for n in p.graph.inputs) else ()
        batch += batch_of(p, inputs_of(p, *indices), FORMS[:2])
    check(batch)


def test_any_indices() -> None:
    """Elements that many show, or none; out of order; out of range, which counts as the nearest."""
    many, none = 3 * FEW, np.array([8, 0, 5, -7, 99, 1])
    rows = np.concatenate([np.full(many, 3), none])
    columns = np.concatenate([none[::-1], np.full(2 * many, 6)])
    p = shown(sizes=(len(rows), len(columns)))
    check(batch_of(p, inputs_of(p, rows, columns), FORMS[:3]))


def test_blocks_one_after_another_give_the_same_bits() -> None:
    p = shown(residual=True)
    batch = batch_of(p, inputs_of(p), FORMS[:2])
    library = build(batch)
    for one in batch:
        first, alone = (np.asarray(run(one, library, together=x)[0]) for x in (True, False))
        assert np.array_equal(first, alone), one.source.schedule


def test_what_is_read_is_read_once() -> None:
    """Values wait where they are needed: no kernel of blocks that meet reads the image a second time."""
    for form, p in ((MEET, shown()), (replace(MEET, smem_stash=True), shown(residual=True))):
        one = trial(p, form.schedule(), [])
        behind = one.source.text.rpartition("w_meet<")[2]
        assert "w_ldv<8>(in0" not in behind and "w_ldv<8>(in1" not in behind
        (launch,) = one.source.launches
        assert (
            bool(launch.shared_bytes) is form.smem_stash
            and ("W_DYNAMIC_16(sm, 4096)" in one.source.text) is form.smem_stash
        )


def test_where_it_does_not_apply_nothing_changes() -> None:
    for p in (
        shown(pad="constant"),
        shown(pad=None),
        shown(last=False),
        shown(sizes=(18, 22), weights=False, pad=None),
        shown(twice=True),
    ):
        assert scatter(p) is None
        plain, asked = (trial(p, replace(MEET, scatter=x).schedule(), []).source for x in (False, True))
        assert plain.text.replace(plain.entry, "") == asked.text.replace(asked.entry, "")
        assert "w_show<" not in plain.text


def test_too_many_rows() -> None:
    assert scatter(shown(sizes=(LONGEST - 3, 22))) is not None
    assert scatter(shown(sizes=(LONGEST + 1, 22))) is None


@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_no_spills(arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    for form in FORMS[:3]:
        source = trial(shown(residual=True, sizes=(18, 22)), form.schedule(), []).source
        for _, used in nvrtc.compile(source.text, arch=arch, cache_dir=tmp_path).resources:
            assert used.spill_stores == used.spill_loads == used.stack_bytes == 0


def image_norm(images: int, channels: int, side: int) -> Problem:
    """A norm with ReLU of so many images, padded by reflection."""
    b = GraphBuilder()
    shape, n = (images, channels, side, side), float(side * side)
    x = b.cast(b.input(TensorType(DType.F16, shape)), DType.F32)
    d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, (2, 3)), n))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), (2, 3)), n)
    y = b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)))
    y = b.cast(b.apply(Prim.MAX, y, 0.0), DType.F16)
    graph = b.build([b.add(Prim.PAD, y, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))])
    return Problem(graph, str(graph), (Format.LAST,), (Format.LAST,))


def test_where_it_is_offered() -> None:
    """First for much data whose pixels a block has whole, with values in shared memory; second for little data."""
    much, little = (CudaGenerator().schedules(image_norm(*x), FACTS) for x in ((16, 32, 224), (1, 128, 56)))
    assert not isinstance(much, Declined) and not isinstance(little, Declined)
    first, second = much[0], little[1]
    assert first.param("smem_stash") and first.param("scatter") and second.param("scatter")
    assert FACTS.sms * 2 % int(str(first.param("cross_cta"))) == 0
    (launch,) = trial(image_norm(16, 32, 224), first, []).source.launches
    assert 2 * launch.shared_bytes < FACTS.shared_per_sm < 3 * launch.shared_bytes
    plain = CudaGenerator().schedules(shown(pad=None), FACTS)
    assert not isinstance(plain, Declined)
    assert not any("scatter" in dict(s.params) for s in plain)


@pytest.mark.parametrize(("side", "meets"), [(360, True), (363, False), (448, False)])
def test_blocks_meet_only_over_rows_that_one_launch_takes(side: int, meets: bool) -> None:
    """Of longer rows sum and squares are launches of their own: one block for all of a row was offered first."""
    p = image_norm(1, 32, side)
    found = CudaGenerator().schedules(p, FACTS)
    assert not isinstance(found, Declined)
    meeting = [trial(p, s, []).source.text for s in found if dict(s.params).get("cross_cta", 1) != 1]
    assert bool(meeting) == meets
    assert all("w_meet<" in text for text in meeting)


def test_much_data_is_divided_evenly() -> None:
    """As many blocks for each multiprocessor, or nearly; none where there is little, or runs would be short."""
    sizes = {"access": 16, "lanes": 8}
    for rows, stored in ((2048, 2048 * 3136 * 2), (512, 512 * 50176 * 2)):
        for form in balanced(FACTS, rows, stored, **sizes):
            blocks = rows // 32 * form.cross_cta
            assert 0.9 < blocks / FACTS.sms / -(-blocks // FACTS.sms) <= 1
    assert [f.cross_cta for f in balanced(FACTS, 2048, 2048 * 3136 * 2, **sizes)] == [4, 2]
    assert balanced(FACTS, 128, 128 * 3136 * 2, **sizes) == []
    assert stashed(FACTS, 2048, 2048 * 3136 * 2, beside=128, **sizes) == []
