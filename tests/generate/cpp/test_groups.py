"""Random groups in every element type, and named groups with the shapes that break vector code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.generate.cpp.random_groups import random_problem
from tests.generate.cpp.run_kernels import FACTS, Trial, build, check, run, trials
from tests.ir.random_graphs import random_inputs
from tests.slow import few

from weft import fission
from weft.device.facts import CpuFacts
from weft.generate.cpp import generator
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

ROW, LAST = Format.ROW, Format.LAST


@pytest.fixture
def every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems get parallel schedules too."""
    monkeypatch.setattr(generator, "SERIAL_WORK", 0)
    monkeypatch.setattr(generator, "PARALLEL_WORK", 10**12)


def f32(*shape: int) -> TensorType:
    return TensorType(DType.F32, shape)


def problem(graph: Graph, name: str, ins: Format = ROW, outs: Format | None = None) -> Problem:
    def pick(n: int, f: Format) -> Format:
        return f if graph.type_of(n).rank == 4 else ROW

    return Problem(
        graph, name, tuple(pick(n, ins) for n in graph.inputs), tuple(pick(n, outs or ins) for n in graph.outputs)
    )


@pytest.mark.usefixtures("every_form")
@pytest.mark.parametrize(
    ("dtype", "seeds"),
    [
        *few([(DType.F32, range(i, i + 8)) for i in range(0, 40, 8)], 1, unpack=True),
        pytest.param(DType.F64, range(200, 208), marks=pytest.mark.slow),
        pytest.param(DType.F16, range(300, 308), marks=pytest.mark.slow),
        (DType.BF16, range(400, 408)),
        pytest.param(DType.I64, range(500, 506), marks=pytest.mark.slow),
        (DType.I32, range(600, 606)),
        (DType.I16, range(700, 704)),
        (DType.I8, range(800, 804)),
        (DType.U8, range(900, 904)),
    ],
    ids=lambda x: x.value if isinstance(x, DType) else "",
)
def test_random_groups(dtype: DType, seeds: range) -> None:
    batch: list[Trial] = []
    for seed in seeds:
        p = random_problem(seed, dtype)
        if p is not None:
            found = trials(p, random_inputs(p.graph, seed))
            batch += found if dtype is DType.F32 and seed < 12 else [found[seed % len(found)]]
    assert batch
    check(batch)


def softmax(shape: tuple[int, ...], axis: int) -> Graph:
    b = GraphBuilder()
    x = b.input(f32(*shape))
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, x, [axis])))
    return b.build([b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, [axis]))])


def norm_relu_pad(shape: tuple[int, int, int, int], pad: int) -> Graph:
    b = GraphBuilder()
    x, w = b.input(f32(*shape)), b.input(f32(1, shape[1], 1, 1), is_weight=True)
    n = float(shape[2] * shape[3])
    d = b.apply(Prim.SUB, x, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, x, (2, 3)), n))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), (2, 3)), n)
    y = b.apply(Prim.MUL, b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5))), w)
    y = b.apply(Prim.MAX, y, 0.0)
    return b.build([b.add(Prim.PAD, y, attrs=a.PadAttrs((0, 0, pad, pad), (0, 0, pad, pad), "reflect"))])


def residual_layer_norm(n: int, m: int) -> Graph:
    b = GraphBuilder()
    s = b.apply(Prim.ADD, b.input(f32(n, m)), b.input(f32(n, m)))
    d = b.apply(Prim.SUB, s, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, s, [1]), float(m)))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), [1]), float(m))
    return b.build([s, b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)))])


def group_norm(shape: tuple[int, int, int, int], groups: int) -> Graph:
    b = GraphBuilder()
    x = b.input(f32(*shape))
    n, c, h, w = shape
    z = b.reshape(x, (n, groups, c // groups * h * w))
    size = float(c // groups * h * w)
    d = b.apply(Prim.SUB, z, b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, z, [2]), size))
    v = b.apply(Prim.DIV, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, d, d), [2]), size)
    y = b.apply(Prim.MUL, d, b.apply(Prim.RSQRT, b.apply(Prim.ADD, v, 1e-5)))
    return b.build([b.apply(Prim.NEG, b.reshape(y, shape))])


def pool(
    shape: tuple[int, ...], kernel: int, stride: int, pad: int, prim: Prim = Prim.WINDOW_MAX, dilation: int = 1
) -> Graph:
    b = GraphBuilder()
    x = b.apply(Prim.MUL, b.input(f32(*shape)), -2.0)
    two = (kernel, kernel), (stride, stride), (pad, pad), (pad, pad), (dilation, dilation)
    return b.build([b.apply(Prim.ADD, b.add(prim, x, attrs=a.WindowAttrs(*two)), 1.0)])


def spp(c: int, s: int) -> Graph:
    b = GraphBuilder()
    x = b.input(f32(1, c, s, s))
    pools = [
        b.add(Prim.WINDOW_MAX, x, attrs=a.WindowAttrs((k, k), (1, 1), (k // 2, k // 2), (k // 2, k // 2), (1, 1)))
        for k in (5, 9)
    ]
    return b.build([b.add(Prim.CONCAT, x, *pools, attrs=a.ConcatAttrs(1))])


def upsample_concat(c: int, s: int) -> Graph:
    b = GraphBuilder()
    x, y = b.input(f32(1, c, s, s)), b.input(f32(1, c + 1, 2 * s, 2 * s))
    u = b.reshape(b.broadcast(b.reshape(x, (1, c, s, 1, s, 1)), (1, c, s, 2, s, 2)), (1, c, 2 * s, 2 * s))
    return b.build([b.apply(Prim.MAX, b.add(Prim.CONCAT, u, y, attrs=a.ConcatAttrs(1)), 0.0)])


def heads(n: int, h: int, d: int) -> Graph:
    b = GraphBuilder()
    return b.build([b.transpose(b.reshape(b.input(f32(2, n, h * d)), (2, n, h, d)), (0, 2, 1, 3))])


def scale(*shape: int) -> Graph:
    b = GraphBuilder()
    return b.build([b.apply(Prim.MUL, b.input(f32(*shape)), 3.0)])


PLACED: dict[str, Any] = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1)}


def places(shape: tuple[int, ...], dtype: DType = DType.F32, *, relu: bool = False, **how: Any) -> Graph:
    """Maxima of a pool and their tap numbers; `relu`: of what is scaled and clipped in front."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, shape))
    if relu:
        x = b.apply(Prim.MAX, b.apply(Prim.MUL, x, 2.0), 0.0)
    found = fission.apply(b, "max_pool_taps", [x], PLACED | how)
    assert isinstance(found, tuple)
    return b.build(found)


def places_gradient(shape: tuple[int, ...], dtype: DType = DType.F32, **how: Any) -> Graph:
    """The gradient of a pool by tap numbers, and its sum over images."""
    b = GraphBuilder()
    out = tuple((n - 1) // 2 + 1 for n in shape[2:])
    dy, taps = (b.input(TensorType(t, (*shape[:2], *out))) for t in (dtype, DType.U8))
    found = fission.apply(b, "max_pool_taps_gradient", [dy, taps], {"sizes": shape[2:], **PLACED, **how})
    assert isinstance(found, tuple)
    return b.build([*found, b.reduce(Prim.REDUCE_SUM, b.cast(found[0], DType.F32), (0, 2, 3))])


def joined_sums(rows: int, widths: tuple[int, ...], *, turned: bool = False, stored: bool = False) -> Graph:
    """Column sums of tensors side by side; `turned`: heads lie outside of rows."""
    b = GraphBuilder()
    if turned:
        xs = [b.input(f32(2, n // 8, rows, 8)) for n in widths]
        xs = [b.reshape(b.transpose(x, (0, 2, 1, 3)), (2, rows, n)) for x, n in zip(xs, widths, strict=True)]
    else:
        xs = [b.input(f32(2, rows, n)) for n in widths]
    y = b.add(Prim.CONCAT, *xs, attrs=a.ConcatAttrs(2))
    total = b.reduce(Prim.REDUCE_SUM, b.reshape(y, (2 * rows, sum(widths))), (0,))
    return b.build([total, y] if stored else [total])


NAMED: dict[str, Callable[[], Problem]] = {
    **{
        f"{name}/{f.value}": partial(problem, graph, f"{name}/{f.value}", f)
        for name, graph in {
            "places": places((2, 8, 9, 14)),
            "places-relu": places((2, 8, 9, 14), relu=True),
            "places-gradient": places_gradient((2, 8, 9, 14)),
        }.items()
        for f in (ROW, LAST)
    },
    "joined-sums": lambda: problem(joined_sums(37, (16, 24, 8)), "joined-sums"),
    "joined-sums-odd": lambda: problem(joined_sums(5, (3, 4, 8)), "joined-sums-odd"),
    "joined-sums-turned": lambda: problem(joined_sums(37, (16, 24), turned=True, stored=True), "joined-sums-turned"),
    **{
        f"softmax{s}/{k}": partial(problem, softmax(s, k), f"softmax{s}/{k}")
        for s, k in [((33, 100), 1), ((7, 5), 1), ((3, 20, 7, 9), 1), ((5, 1), 1), ((4, 1000), 0), ((1, 70_001), 1)]
    },
    "softmax/last": lambda: problem(softmax((3, 20, 7, 9), 1), "softmax/last", LAST),
    "norm-pad/row": lambda: problem(norm_relu_pad((2, 3, 20, 31), 2), "norm-pad/row"),
    "norm-pad/last": lambda: problem(norm_relu_pad((2, 18, 20, 31), 2), "norm-pad/last", LAST),
    "norm-pad/row-last": lambda: problem(norm_relu_pad((1, 33, 20, 31), 1), "norm-pad/row-last", ROW, LAST),
    "norm-pad/one-channel": lambda: problem(norm_relu_pad((1, 1, 90, 64), 1), "norm-pad/one-channel"),
    "residual-norm": lambda: problem(residual_layer_norm(17, 101), "residual-norm"),
    "group-norm/row": lambda: problem(group_norm((2, 12, 7, 9), 3), "group-norm/row"),
    "group-norm/last": lambda: problem(group_norm((2, 12, 7, 9), 3), "group-norm/last", LAST),
    **{
        f"pool{k}{s}{p}{d}/{f.value}": partial(
            problem, pool((2, 5, 19, 37), k, s, p, w, d), f"pool{k}{s}{p}{d}/{f.value}", f
        )
        for (k, s, p, d), w in [
            ((2, 2, 0, 1), Prim.WINDOW_MAX),
            ((3, 2, 1, 1), Prim.WINDOW_MAX),
            ((5, 1, 2, 1), Prim.WINDOW_MAX),
            ((5, 1, 2, 1), Prim.WINDOW_SUM),
            ((3, 1, 1, 2), Prim.WINDOW_SUM),
        ]
        for f in (ROW, LAST)
    },
    "spp/row": lambda: problem(spp(20, 13), "spp/row"),
    "spp/last": lambda: problem(spp(20, 13), "spp/last", LAST),
    "upsample-concat/row": lambda: problem(upsample_concat(5, 9), "upsample-concat/row"),
    "upsample-concat/last": lambda: problem(upsample_concat(17, 9), "upsample-concat/last", LAST),
    "heads": lambda: problem(heads(19, 3, 24), "heads"),
    "to-last": lambda: problem(scale(2, 37, 23, 19), "to-last", ROW, LAST),
    "from-last": lambda: problem(scale(2, 37, 23, 19), "from-last", LAST, ROW),
    "one": lambda: problem(scale(1), "one"),
    "scalar": lambda: problem(scale(), "scalar"),
    "empty": lambda: problem(scale(0, 5), "empty"),
    "large": lambda: problem(scale(300_007), "large"),
    "empty-softmax": lambda: problem(softmax((0, 5), 1), "empty-softmax"),
    "empty-row": lambda: problem(softmax((5, 0), 1), "empty-row"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("every_form")
def test_named_groups() -> None:
    batch = []
    for make in NAMED.values():
        p = make()
        batch += trials(p, random_inputs(p.graph, 7))
    check(batch)


def tied(graph: Graph, seed: int) -> list[Array]:
    """Inputs full of equal values, with infinities and NaN."""
    rng, found = np.random.default_rng(seed), list[Array]()
    for i in graph.inputs:
        type = graph.type_of(i)
        x = rng.integers(-2, 3, type.shape).astype(type.dtype.numpy)
        x[rng.random(type.shape) < 0.2] = -np.inf
        x[0, 0] = -np.inf
        x[rng.random(type.shape) < 0.05] = np.nan
        found.append(x)
    return found


@pytest.mark.usefixtures("every_form")
def test_places_of_maxima() -> None:
    """Exact, whatever is equal, infinite or NaN."""
    batch: list[Trial] = []
    windows: list[dict[str, Any]] = [{}, {"dilations": (1, 2), "ceil": True}]
    for dtype in (DType.F32, DType.BF16, DType.F16, DType.F64):
        for number, how in enumerate(windows):
            graph = places((2, 8, 9, 14), dtype, **how)
            found = trials(problem(graph, f"places-{dtype.value}-{number}", (ROW, LAST)[number]), tied(graph, number))
            batch += found if dtype is DType.BF16 else found[:1]
    check(batch)


@pytest.mark.usefixtures("every_form")
def test_gradients_of_pools_and_sums_of_what_is_joined() -> None:
    names = ("places-relu/last", "places-gradient/row", "places-gradient/last", "joined-sums", "joined-sums-turned")
    check([t for n in names for p in [NAMED[n]()] for t in trials(p, random_inputs(p.graph, 7))[:2]])


@pytest.mark.usefixtures("every_form")
@pytest.mark.parametrize("simd_bytes", few([16, 32], 1))
def test_narrow_vectors(simd_bytes: int) -> None:
    batch = []
    for name in ("softmax(33, 100)/1", "norm-pad/last", "pool3211/row", "spp/row", "to-last", "from-last"):
        p = NAMED[name]()
        batch += trials(p, random_inputs(p.graph, 7), CpuFacts(simd_bytes=simd_bytes, threads=2))[:2]
    check(batch)


@pytest.mark.usefixtures("every_form")
def test_equal_bits_run_to_run() -> None:
    p = NAMED["norm-pad/one-channel"]()
    batch = trials(p, random_inputs(p.graph, 7))
    kernels = build(batch)
    for trial in batch:
        first = run(trial, kernels[trial.source.entry])
        for _ in range(3):
            again = run(trial, kernels[trial.source.entry])
            assert [x.tobytes() for x in first] == [x.tobytes() for x in again]


def test_reductions_of_empty_sets() -> None:
    b = GraphBuilder()
    x = b.input(f32(3, 0))
    prims = (Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN)
    p = problem(b.build([b.reduce(prim, x, [1]) for prim in prims]), "empty-sets")
    batch = trials(p, [np.zeros((3, 0), np.float32)])
    got = run(batch[0], build(batch)[batch[0].source.entry])
    assert [float(x.reshape(-1)[0]) for x in got] == [0.0, 1.0, float("-inf"), float("inf")]


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
    batch = trials(p, [data])
    check(batch)
    got = run(batch[0], build(batch)[batch[0].source.entry])
    assert [int(k) for k in got[3].reshape(-1)][1:] == [3, 20, 0]


def test_indices_outside_are_clamped() -> None:
    b = GraphBuilder()
    x, i = b.input(f32(9, 20)), b.input(TensorType(DType.I64, (4,)))
    p = problem(b.build([b.add(Prim.GATHER, x, i, attrs=a.GatherAttrs(0))]), "clamped")
    data = random_inputs(p.graph)[0]
    batch = trials(p, [data, np.array([-5, 0, 8, 10**12])])
    got = run(batch[0], build(batch)[batch[0].source.entry])
    assert (got[0] == np.asarray(data)[[0, 0, 8, 8]]).all()


def test_facts_decide_the_lanes() -> None:
    p = problem(scale(64), "lanes")
    for simd_bytes in (16, 32, 64):
        found = generator.CppGenerator().schedules(p, CpuFacts(simd_bytes=simd_bytes))
        assert not hasattr(found, "reason")
        assert {s.param("lanes") for s in found} == {simd_bytes // 4}
    assert FACTS.threads == 2
