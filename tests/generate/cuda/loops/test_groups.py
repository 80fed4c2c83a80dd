"""CUDA kernels on the emulated machine: random groups in every element type and random forms, and named groups."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.generate.cpp.random_groups import random_problem
from tests.generate.cpp.test_groups import NAMED, f32, joined_sums, norm_relu_pad, problem
from tests.generate.cuda.emulate import Trial, build, check, run, trial, trials
from tests.ir.random_graphs import random_inputs
from tests.slow import few
from tests.typed import assert_allclose

from weft.device.cuda.facts import profile
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.intrinsics.approx import may_approximate
from weft.generate.cuda.loops import choose
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.split import split_rows
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

H200 = profile("h200")


def random_form(seed: int) -> Form:
    """Parameters that the rules might choose for a far larger problem."""
    rng = random.Random(seed)
    return Form(
        threads=rng.choice([32, 64, 128]),
        vector=rng.choice([4, 8, 16, 16]),
        items=rng.choice([1, 1, 2, 3]),
        fuse=rng.random() < 0.7,
        keep=rng.random() < 0.6,
        per_row=rng.choice([0, 0, 1, 4, 16, 32, 64, 256]),
        columns=rng.choice([0, 0, 1, 2, 8]),
        cluster=rng.choice([1, 1, 2, 4]),
        spread=rng.choice([0, 0, 3, 20]),
        tile=rng.random() < 0.4,
        num_splits=rng.choice([1, 1, 2, 4]),
        single_pass=rng.random() < 0.5,
        corners=rng.random() < 0.5,
        whole=rng.random() < 0.5,
        apart=rng.random() < 0.3,
        cross_cta=rng.choice([1, 2, 3]),
    )


SEEDS = {
    DType.F32: range(8),
    DType.F16: range(300, 303),
    DType.BF16: range(400, 402),
    DType.F64: range(200, 202),
    DType.I64: range(500, 501),
    DType.I32: range(600, 601),
    DType.I16: range(700, 701),
    DType.I8: range(800, 801),
    DType.U8: range(900, 901),
}


@pytest.mark.slow
def test_random_groups() -> None:
    """All in one build: the compiler's start costs more than a kernel."""
    batch: list[Trial] = []
    for dtype, seeds in SEEDS.items():
        for seed in seeds:
            p = random_problem(seed, dtype)
            if p is not None:
                batch.append(trial(p, random_form(seed).schedule(), random_inputs(p.graph, seed)))
    assert len(batch) >= 12
    check(batch)


QUICK = (
    "softmax(33, 100)/1", "softmax/last", "norm-pad/row-last", "residual-norm", "group-norm/last", "pool3211/row",
    "pool5121/last", "spp/last", "upsample-concat/last", "heads", "scalar", "empty", "empty-softmax", "empty-row",
    "places/last", "places-relu/last", "places-gradient/last", "joined-sums", "joined-sums-odd", "joined-sums-turned",
)  # fmt: skip


def test_named_groups() -> None:
    batch = []
    for name in QUICK:
        p = NAMED[name]()
        batch += trials(p, random_inputs(p.graph, 7))[:1]
    check(batch)


def norm(rows: int, length: int, *, columns: bool = False) -> Problem:
    """Mean and variance of long rows; `columns`: the rows' elements lie apart in memory."""
    b = GraphBuilder()
    x = b.input(f32(1, rows, length, 1) if columns else f32(rows, length))
    axis = [2] if columns else [1]
    d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, axis), float(length)))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), axis), float(length))
    graph = b.build([b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)))])
    return problem(graph, f"norm-{rows}-{length}-{columns}", Format.LAST if columns else Format.ROW)


LONG = {
    "cluster": (norm(3, 4100), Form(threads=128, per_row=128, cluster=4)),
    "cluster-odd": (norm(2, 1037), Form(threads=128, per_row=128, cluster=2)),
    "spread": (norm(3, 4100), Form(threads=64, fuse=False, spread=18)),
    "spread-columns": (norm(24, 500, columns=True), Form(threads=128, fuse=False, spread=12)),
    "several-rows-per-block": (norm(37, 520), Form(threads=256, per_row=64)),
    "in-registers": (norm(5, 640), Form(threads=64, per_row=64)),
    "columns": (norm(20, 77, columns=True), Form(threads=128, columns=2)),
    "cluster-columns": (norm(24, 500, columns=True), Form(threads=128, columns=2, cluster=4)),
    "cluster-norm-pad": (
        problem(norm_relu_pad((2, 24, 20, 31), 2), "norm-pad-24", Format.LAST),
        Form(threads=64, columns=2, cluster=2),
    ),
    "columns-joined": (NAMED["joined-sums"](), Form(threads=64, columns=2)),
    "columns-joined-turned": (NAMED["joined-sums-turned"](), Form(threads=64, columns=2, num_splits=2, spread=6)),
    "spread-joined": (NAMED["joined-sums-turned"](), Form(threads=64, fuse=False, spread=6)),
    "parts": (norm(3, 4100), Form(threads=128, per_row=64, num_splits=10, spread=12)),
    "parts-columns": (norm(24, 500, columns=True), Form(threads=128, columns=2, num_splits=5, spread=12)),
    "parts-norm-pad": (NAMED["norm-pad/last"](), Form(threads=128, columns=2, num_splits=5, spread=20)),
    "parts-groups": (NAMED["group-norm/last"](), Form(threads=64, num_splits=7, spread=12)),
    "once": (norm(3, 4100), Form(threads=128, per_row=128, single_pass=True)),
    "once-cluster": (norm(3, 4100), Form(threads=128, per_row=128, cluster=4, single_pass=True)),
    "once-cluster-short": (norm(2, 1037), Form(threads=128, per_row=128, cluster=8, single_pass=True)),
    "once-columns": (norm(24, 500, columns=True), Form(threads=128, columns=2, single_pass=True)),
    "once-cluster-columns": (norm(24, 500, columns=True), Form(threads=64, columns=1, cluster=4, single_pass=True)),
    "once-cluster-norm-pad": (
        problem(norm_relu_pad((2, 24, 20, 31), 2), "once-pad-24", Format.LAST),
        Form(threads=64, columns=4, cluster=4, single_pass=True),
    ),
    "once-parts-norm-pad": (
        NAMED["norm-pad/last"](),
        Form(threads=128, columns=2, num_splits=5, spread=20, single_pass=True),
    ),
    "once-groups": (NAMED["group-norm/last"](), Form(threads=64, columns=2, cluster=2, single_pass=True)),
    "once-parts-groups": (NAMED["group-norm/last"](), Form(threads=64, num_splits=7, spread=12, single_pass=True)),
    "once-parts-norm-pad-row": (
        NAMED["norm-pad/row"](),
        Form(threads=64, per_row=64, num_splits=4, spread=30, single_pass=True),
    ),
    "parts-norm-pad-row": (NAMED["norm-pad/row"](), Form(threads=64, per_row=32, num_splits=4, spread=30)),
}


@pytest.mark.slow
def test_long_rows() -> None:
    check([trial(p, form.schedule(), random_inputs(p.graph, 3)) for p, form in LONG.values()])


def norm_up(height: int, width: int) -> Problem:
    """A norm whose result is gathered twice along both axes."""
    b = GraphBuilder()
    x = b.input(f32(1, 16, height, width))
    n, shape = float(height * width), (1, 16, height, width)
    d = b.apply(Prim.SUB, x, b.broadcast(b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, [2, 3]), n), shape))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), [2, 3]), n)
    y = b.apply(Prim.MUL, d, b.broadcast(b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)), shape))
    for axis, size in ((2, 2 * height), (3, 2 * width)):
        y = b.add(Prim.GATHER, y, b.input(TensorType(DType.I64, (size,))), attrs=a.GatherAttrs(axis))
    return problem(b.build([y]), f"norm-up-{height}", Format.LAST)


def test_what_is_indexed_is_read_in_batches() -> None:
    p = norm_up(12, 25)
    x = np.random.default_rng(3).standard_normal((1, 16, 12, 25)).astype(np.float32)
    inputs: list[np.ndarray] = [x, np.arange(24) // 2, np.arange(50) // 2]
    forms = (
        Form(threads=64, columns=2, num_splits=3, spread=2),
        Form(threads=64, columns=2, num_splits=3, spread=2, single_pass=True),
        Form(threads=32, columns=2, cluster=2, single_pass=True),
        Form(threads=64, columns=2, num_splits=3, single_pass=True, apart=True),
    )
    batch = [trial(p, form.schedule(), inputs) for form in forms]
    for one in batch[:3]:
        text = one.source.text.split("w_index c = 0u")[-1]
        assert text.index("w_ldv<4>(in0") < text.index("out0")
    assert [len(one.source.launches) for one in batch] == [2, 2, 1, 3]
    check(batch)


def test_one_pass_is_one() -> None:
    passes = {name: trial(p, form.schedule(), []).source.text.count("w_moments<") for name, (p, form) in LONG.items()}
    assert {name for name, n in passes.items() if n} == {name for name in LONG if name.startswith("once")}


def test_short_rows_that_follow_each_other_share_warps() -> None:
    source = trial(norm(4096, 16), Form().schedule(), []).source  # a row of 64 bytes is no run among others
    threads = [launch.grid[0] * launch.block[0] for launch in source.launches]
    assert len(threads) == 1 and threads[0] <= 4 * 4096


def test_rows_in_parts_take_two_launches() -> None:
    for name in ("parts", "parts-columns", "parts-groups", "parts-norm-pad", "parts-norm-pad-row"):
        p, form = LONG[name]
        source = trial(p, form.schedule(), []).source
        assert len(source.launches) == 2, name
        assert source.launches[1].grid[0] > source.launches[0].grid[0] // form.num_splits, name
        assert not source.state_bytes, name


@pytest.mark.parametrize("name", few(["parts", "parts-columns", "once", "once-cluster", "once-cluster-columns"], 2))
def test_variance_in_parts_keeps_its_digits(name: str) -> None:
    p, form = LONG[name]
    rng = np.random.default_rng(5)
    shape = p.graph.type_of(p.graph.inputs[0]).shape
    data = (3000 + rng.standard_normal(shape)).astype(np.float32)
    data.reshape(shape[0], -1)[:, 0] = 0  # a value far away, where a formula might look for the typical one
    one = trial(p, form.schedule(), [data])
    got, want = run(one, build([one]))[0], evaluate(p.graph, [data], precise=True)[0]
    assert np.abs(np.asarray(got) - np.asarray(want)).max() < 2e-3  # |mean| / deviation is 3000: eps costs as much


@pytest.mark.slow
def test_gelu_and_softmax_of_16_bits_are_rough_and_right() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (64, 80)))
    f = b.cast(x, DType.F32)
    half = b.apply(Prim.MUL, f, 0.5)
    erf = b.apply(Prim.ERF, b.apply(Prim.MUL, f, 0.70710678))
    gelu = b.cast(b.apply(Prim.MUL, half, b.apply(Prim.ADD, erf, 1.0)), DType.F16)
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, f, b.broadcast(b.reduce(Prim.REDUCE_MAX, f, [1]), (64, 80))))
    softmax = b.apply(Prim.DIV, e, b.broadcast(b.reduce(Prim.REDUCE_SUM, e, [1]), (64, 80)))
    p = problem(b.build([gelu, b.cast(softmax, DType.F16), b.cast(erf, DType.F16)]), "rough")
    data = np.random.default_rng(1).standard_normal((64, 80)) * 4
    data[0, :4] = [0.0, -0.0, np.inf, 60000.0]
    check([trial(p, Form(per_row=32).schedule(), [data.astype(np.float16)])])
    text = trial(p, Form(per_row=32).schedule(), []).source.text.split("role.pdl_wait();")[-1]
    assert "w_rough_exp" in text
    assert "w_erf" in text and "w_rough_erf" not in text  # the error function itself is a result
    b = GraphBuilder()
    f = b.cast(b.input(TensorType(DType.F16, (64, 80))), DType.F32)
    erf = b.apply(Prim.ERF, b.apply(Prim.MUL, f, 0.70710678))
    gelu = b.apply(Prim.MUL, b.apply(Prim.MUL, f, 0.5), b.apply(Prim.ADD, erf, 1.0))
    p = problem(b.build([b.cast(gelu, DType.F16)]), "rough-gelu")
    assert "w_rough_erf" in trial(p, Form().schedule(), []).source.text
    data = np.linspace(-12, 12, 64 * 80).reshape(64, 80).astype(np.float16)
    data[0, :4] = [0.0, -0.0, np.inf, 60000.0]
    check([trial(p, Form().schedule(), [data])])


def test_what_may_not_be_rough() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (8,)))
    quotient = b.apply(Prim.DIV, b.cast(x, DType.F32), 3.0)
    assert may_approximate(b.build([b.cast(quotient, DType.F16)]))
    assert not may_approximate(b.build([quotient]))  # a result of 32 bits
    assert not may_approximate(b.build([b.cast(b.apply(Prim.FLOOR, quotient), DType.F16)]))  # floor(6 / 3) must be 2


def test_only_whole_parts_and_known_chains_are_cut() -> None:
    graph = LONG["parts"][0].graph
    assert split_rows(graph, 10) is not None
    assert split_rows(graph, 3) is None  # 4100 elements
    assert split_rows(graph, 1) is None
    assert split_rows(NAMED["softmax(33, 100)/1"]().graph, 4) is None  # the sum needs the whole row's maximum
    b = GraphBuilder()
    x = b.input(f32(2, 64))
    total = b.reduce(Prim.REDUCE_SUM, x, [1])
    d = b.apply(Prim.SUB, x, b.apply(Prim.MUL, total, 1 / 32))  # not the mean
    assert split_rows(b.build([b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), [1])]), 4) is None


def test_squares_about_the_mean_that_are_too_large_are_infinite_in_parts_too() -> None:
    b = GraphBuilder()
    x = b.input(f32(3, 64))
    mean = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, x, [1]), 1 / 64)
    d = b.apply(Prim.SUB, x, b.broadcast(mean, (3, 64)))
    graph = b.build([b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), [1])])
    parted = split_rows(graph, 4)
    assert parted is not None
    values = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    values[0, 7] = 1e25
    values[1] *= np.float32(3e17)  # squares fit, the square of a part's sum would not
    with np.errstate(over="ignore", invalid="ignore"):
        (whole,), (found,) = (evaluate(g, [values]) for g in (graph, parted))
    assert np.isinf(found[0])
    assert not np.isnan(found).any()
    assert_allclose(found[1:], whole[1:], rtol=1e-5)


def test_one_read_of_the_input() -> None:
    p, form = LONG["in-registers"]
    text = trial(p, form.schedule(), []).source.text.split("w_release();")[-1]
    assert text.count("w_ldv<4>(in0") == 1
    p, form = norm(5, 64 * 1024), Form(threads=64, per_row=64)  # too long for registers: read again by each stage
    assert trial(p, form.schedule(), []).source.text.split("w_release();")[-1].count("w_ldv<4>(in0") == 3


def mixed(dtype: DType, first: Format, second: Format, out: Format) -> Problem:
    b = GraphBuilder()
    x, y = (b.input(TensorType(dtype, (2, 72, 7, 24))) for _ in range(2))
    graph = b.build([b.apply(Prim.ADD, b.apply(Prim.NEG, x), y)])
    return Problem(graph, f"mixed-{dtype.value}-{first.value}-{second.value}-{out.value}", (first, second), (out,))


def test_tiles() -> None:
    row, last = Format.ROW, Format.LAST
    problems = [mixed(d, f, g, h) for d in (DType.F16, DType.F32) for f, g, h in ((row, last, last), (last, row, row))]
    b = GraphBuilder()
    problems.append(problem(b.build([b.transpose(b.input(f32(3, 40, 50)), (2, 0, 1))]), "transpose"))
    batch = [trial(p, Form(tile=True, threads=64).schedule(), random_inputs(p.graph, 1)) for p in problems]
    assert all("W_SHARED" in one.source.text.split("w_remote")[-1] for one in batch)
    check(batch)


def test_no_tile_at_indices_read_at_run_time() -> None:
    b = GraphBuilder()
    x, i = b.input(f32(1, 32, 9, 64)), b.input(TensorType(DType.I64, (11,)))
    graph = b.build([b.add(Prim.GATHER, x, i, attrs=a.GatherAttrs(2))])
    p = Problem(graph, "gather-tile", (Format.ROW, Format.ROW), (Format.LAST,))
    inputs = [random_inputs(graph)[0], np.arange(11) % 9]
    check([trial(p, Form(tile=True, threads=64).schedule(), inputs)])


def test_change_of_format_alone() -> None:
    b = GraphBuilder()
    graph = b.build([b.input(f32(2, 24, 9, 7))])
    p = Problem(graph, "convert", (Format.ROW,), (Format.LAST,))
    check(trials(p, random_inputs(p.graph, 1)))


def test_equal_bits_run_to_run() -> None:
    batch = [trial(p, form.schedule(), random_inputs(p.graph, 3)) for p, form in (LONG["spread"], LONG["cluster"])]
    library = build(batch)
    for one in batch:
        first = run(one, library)
        assert [x.tobytes() for x in first] == [x.tobytes() for x in run(one, library)]


def test_reductions_of_empty_sets() -> None:
    b = GraphBuilder()
    x = b.input(f32(3, 0))
    prims = (Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN)
    one = trial(
        problem(b.build([b.reduce(prim, x, [1]) for prim in prims]), "empty-sets"),
        Form().schedule(),
        [np.zeros((3, 0), np.float32)],
    )
    got = run(one, build([one]))
    assert [float(x.reshape(-1)[0]) for x in got] == [0.0, 1.0, float("-inf"), float("inf")]


@pytest.mark.slow
def test_nan_and_infinity_reach_the_result() -> None:
    b = GraphBuilder()
    x = b.input(f32(4, 37))
    outs = [b.reduce(Prim.REDUCE_MAX, x, [1]), b.reduce(Prim.REDUCE_MIN, x, [1]), b.apply(Prim.MAX, x, 0.0)]
    outs += [b.add(Prim.ARGMAX, x, attrs=a.ArgAttrs(1)), b.add(Prim.ARGMIN, x, attrs=a.ArgAttrs(1))]
    p = problem(b.build(outs), "nan")
    data = np.random.default_rng(0).standard_normal((4, 37)).astype(np.float32)
    data[1, [3, 36]] = np.nan
    data[2, 20] = np.inf
    data[3, :] = -np.inf
    batch = [
        trial(p, form.schedule(), [data]) for form in (Form(per_row=32), Form(per_row=64, cluster=2), Form(per_row=1))
    ]
    check(batch)
    library = build(batch)
    for one in batch:
        assert [int(k) for k in run(one, library)[3].reshape(-1)][1:] == [3, 20, 0]


def test_indices_outside_are_clamped() -> None:
    b = GraphBuilder()
    x, i = b.input(f32(9, 20)), b.input(TensorType(DType.I64, (4,)))
    p = problem(b.build([b.add(Prim.GATHER, x, i, attrs=a.GatherAttrs(0))]), "clamped")
    data = random_inputs(p.graph)[0]
    one = trial(p, Form().schedule(), [data, np.array([-5, 0, 8, 10**12])])
    assert (run(one, build([one]))[0] == np.asarray(data)[[0, 0, 8, 8]]).all()


def image_sums(shape: tuple[int, ...], kept: int, *, dtype: DType = DType.F32) -> Problem:
    """Sums over each image's channels, or groups of them, of images with channels last: gradients of a group norm.

    `kept`: channels, or groups, that are left.
    """
    n, c, height, width = shape
    b = GraphBuilder()
    x, dy = b.input(TensorType(dtype, shape)), b.input(TensorType(dtype, shape))
    y = b.cast(b.apply(Prim.MUL, x, dy), DType.F32) if dtype is not DType.F32 else b.apply(Prim.MUL, x, dy)
    if kept == c:
        y = b.reduce(Prim.REDUCE_SUM, b.reshape(y, (n, c, height * width)), (2,))
    else:
        y = b.reduce(Prim.REDUCE_SUM, b.reshape(y, (n, kept, c // kept, height, width)), (2, 3, 4))
    return problem(b.build([y]), f"image-sums-{shape}-{kept}", Format.LAST)


@pytest.mark.parametrize("kept", [64, 32])
def test_few_channels_of_many_images_are_divided_among_ctas(kept: int) -> None:
    """A CTA has several rows side by side: sixteen of them took 8.2 ms on an H200 for what memory takes 42 us for."""
    p = image_sums((16, 64, 256, 256), kept, dtype=DType.BF16)
    found = choose.forms(p, H200)
    for form in found[:3]:
        source = trial(p, form.schedule(), []).source
        assert form.spread and source.launches[0].grid[0] > 0.9 * H200.sms, form
        assert source.launches[0].block[0] == 256


@pytest.mark.parametrize("turned", [False, True])
def test_columns_of_what_is_joined_are_divided_among_ctas(turned: bool) -> None:
    """And read in vectors, each from the one tensor or the other: a vector never lies in two."""
    widths = (768,) * 3
    graph = joined_sums(64 * 98, widths, turned=turned, stored=True)
    p = problem(graph, f"joined-{turned}")
    first = choose.forms(p, H200)[0]
    assert first.columns and (first.num_splits > 1 or first.cluster > 1)
    made = CudaGenerator().emit(p, first.schedule())
    assert isinstance(made, CudaSource)
    assert "w_ldv<4>(in2 +" in made.text and "w_ld(in" not in made.text
    assert max(x.grid[0] for x in made.launches) >= H200.sms
    odd = problem(joined_sums(64 * 98, (768, 767, 1), turned=False), "odd")
    text = CudaGenerator().emit(odd, choose.forms(odd, H200)[0].schedule())
    assert isinstance(text, CudaSource) and "w_ld(in2" in text.text


def test_sums_of_images_divided_among_ctas() -> None:
    rng = np.random.default_rng(8)
    batch = []
    for kept in (16, 4):
        p = image_sums((3, 16, 20, 31), kept)
        inputs: list[np.ndarray] = [rng.standard_normal((3, 16, 20, 31)).astype(np.float32) for _ in range(2)]
        forms = [Form(threads=128, fuse=False, spread=n) for n in (0, 12, 36)]
        batch += [trial(p, form.schedule(), inputs) for form in forms]
    grids = [one.source.launches[0].grid[0] for one in batch]
    assert grids[1] > grids[0] and grids[4] > grids[3]
    check(batch)


def test_of_rows_that_a_transpose_turned_nothing_is_known() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (16, 64, 256, 256)))
    turned = b.reshape(b.add(Prim.TRANSPOSE, x, attrs=a.TransposeAttrs((0, 2, 3, 1))), (16, 256, 256 * 64))
    p = problem(b.build([b.reduce(Prim.REDUCE_SUM, b.cast(turned, DType.F32), (2,))]), "turned", Format.LAST)
    assert not choose._rows_are_neighbours(p, p.graph.outputs[0])


def halved(shape: tuple[int, ...], prim: Prim = Prim.REDUCE_SUM, format: Format = Format.ROW) -> Problem:
    """Sums of 2 by 2 elements: the gradient of an image that was made twice as large."""
    n, c, h, w = shape
    b = GraphBuilder()
    x = b.input(f32(*shape))
    y = b.reduce(prim, b.reshape(x, (n, c, h // 2, 2, w)), (3,))
    y = b.reduce(prim, b.reshape(y, (n, c, h // 2, w // 2, 2)), (4,))
    return problem(b.build([b.reshape(y, (n, c, h // 2, w // 2))]), f"halved-{shape}-{prim.value}", format)


@pytest.mark.parametrize("format", [Format.ROW, Format.LAST])
def test_a_thread_has_whole_rows_where_they_are_short_and_many(format: Format) -> None:
    """Two elements of a row were shared by eight threads of CTAs of 32: 3.8 ms on an H200, and 0.13 by the bytes."""
    p = halved((16, 128, 256, 256), format=format)
    form = choose.forms(p, H200)[0]
    source = trial(p, form.schedule(), []).source
    assert [launch.block[0] for launch in source.launches] == [256] * len(source.launches)
    assert source.launches[0].grid[0] == 16 * 128 * 128 * 256 // 4 // 256
    assert "role.sync" not in source.text.split('extern "C"')[-1]


def test_short_rows_of_a_thread() -> None:
    rng = np.random.default_rng(4)
    batch = []
    shape = (3, 8, 158, 1020)  # a last CTA whose threads have nothing to do
    x = rng.standard_normal(shape).astype(np.float32)
    for prim, format in ((Prim.REDUCE_SUM, Format.ROW), (Prim.REDUCE_MAX, Format.LAST)):
        p = halved(shape, prim, format)
        batch += [trial(p, form.schedule(), [x]) for form in (Form(threads=256), Form(threads=128, fuse=False))]
    assert all(one.source.launches[0].block[0] >= 128 for one in batch[:2])
    check(batch)
