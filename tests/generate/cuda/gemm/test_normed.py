"""Norms on the way of a product's left operand and partial sums of its result, emulated, and compiled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.cases.norm import EPS, leaving, normed
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.slow import asked, few

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.normed import PIECE, stripped
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.mma.kernel import MmaConfig
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import round_to
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
UNIT = {F16: 2.0**-11, BF16: 2.0**-8}


def warpgroups(bm: int, bn: int, consumers: int = 2, stages: int = 3, **more: int) -> Schedule:
    shape = TmaConfig(
        bm, bn, 64, stages, consumers, bool(more.pop("pingpong", 0)), more.pop("split", 1), (1, 1, bm), 0, 1
    )
    return replace(shape, **more).schedule()  # type: ignore[arg-type]


FEW = MmaConfig(32, 32, 64, 16, 16, 1, 3, 1, False).schedule("mma")
SPLIT = MmaConfig(32, 32, 64, 16, 16, 2, 3, 2, False).schedule("mma")
CLUSTER = MmaConfig(32, 32, 32, 16, 16, 1, 3, 2, True).schedule("mma")
GROUP = MmaConfig(64, 32, 64, 64, 32, 1, 4, 1, False, True).schedule("wgmma")
NORMED: dict[str, tuple[Problem, Schedule]] = {
    "own, fragments": (normed(50, 136, 72, "own", stored=True), FEW),
    "own, bf16 in a cluster": (normed(50, 160, 72, "own", BF16, stored=True), CLUSTER),
    "own, split, one row too many": (normed(33, 264, 40, "own", stored=True), SPLIT),
    "own, warpgroups": (normed(70, 136, 40, "own", stored=True), GROUP),
    "parts, fragments": (normed(50, 160, 72, "parts", stored=True), FEW),
    "given, bf16": (normed(50, 96, 72, "given", BF16, stored=True), FEW),
    "rms": (normed(45, 72, 40, "rms", stored=True), FEW),
    "parts, tma": (normed(150, 160, 72, "parts", stored=True), warpgroups(128, 64)),
    "parts, tma bf16, one warpgroup": (normed(70, 416, 72, "parts", BF16, stored=True), warpgroups(64, 64, 1)),
    "given, tma in turns": (
        normed(300, 136, 136, "given", stored=True),
        warpgroups(64, 64, pingpong=1, persistent_ctas=2),
    ),
    "parts, tma split": (normed(70, 256, 72, "parts", stored=True), warpgroups(64, 64, 1, split=2)),
    "parts, tma in pairs": (normed(260, 160, 136, "parts", stored=True), warpgroups(128, 64, multicast=1)),
    "own, tma, one stage": (normed(150, 64, 136, "own", stored=True), warpgroups(128, 64)),
    "own, tma in turns, half a stage, bf16": (
        normed(300, 32, 136, "own", BF16, stored=True),
        warpgroups(64, 64, stages=2, pingpong=1, persistent_ctas=2),
    ),
    "rms, tma": (normed(70, 48, 40, "rms", stored=True), warpgroups(64, 64, 1, stages=2)),
    "parts, tma in order": (normed(150, 160, 200, "parts", stored=True), warpgroups(128, 96)),
    "parts, tma of three in order": (normed(200, 256, 200, "parts", stored=True), warpgroups(192, 96, 3)),
    "parts, tma, one piece": (normed(70, 32, 40, "parts", stored=True), warpgroups(64, 32, 1)),
}
LEAVING: dict[str, tuple[Problem, Schedule]] = {
    "fragments": (leaving(50, 96, 96), FEW),
    "fragments, split": (leaving(51, 256, 64), SPLIT),
    "fragments, cluster, bf16": (leaving(50, 256, 96, BF16), CLUSTER),
    "warpgroups": (leaving(70, 96, 96, residual=False), GROUP),
    "tma": (leaving(150, 160, 96), warpgroups(128, 64)),
    "tma bf16": (leaving(129, 64, 160, BF16), warpgroups(64, 96, 1)),
    "tma split": (leaving(70, 256, 96), warpgroups(64, 64, 1, split=2)),
    "tma in turns": (leaving(300, 256, 160), warpgroups(64, 64, pingpong=1, persistent_ctas=2)),
}


def source_of(name: str, problem: Problem, schedule: Schedule) -> CudaSource:
    p = product(problem)
    assert isinstance(p, Product), p
    template = tma if schedule.param("template") == "tma" else mma
    entry = "k" + "".join(c for c in name if c.isalnum())
    source = template.emit(p, schedule, entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {name: source_of(f"n {name}", *case) for name, case in NORMED.items()}
    return found | {f"leaving, {name}": source_of(f"l {name}", *case) for name, case in LEAVING.items()}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, *(f"leaving, {name}" for name in LEAVING)))


def statistics(x: np.ndarray, inputs: list[TensorType]) -> list[np.ndarray]:
    """What a kernel before has left of x: mean and variance, or mean and spread of pieces."""
    wanted = [t for t in inputs if t.dtype is F32 and t.rank > 2]
    if not wanted:
        return []
    if wanted[0].shape[0] == x.shape[1]:
        pieces = x.reshape(x.shape[1], -1, PIECE)
        mean = pieces.mean(-1, keepdims=True)
        return [mean.astype(np.float32), np.square(pieces - mean).sum(-1, keepdims=True).astype(np.float32)]
    mean = x.mean(-1, keepdims=True)
    return [mean.astype(np.float32), np.square(x - mean).mean(-1, keepdims=True).astype(np.float32)]


def strange_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Normal numbers; row 0 has a mean of 1000 and a variance of 1, row 1 none, rows 2 and 3 have NaN and infinity."""
    x = rng.standard_normal(shape)
    x[0, 0] = 1000 + np.sign(x[0, 0]) * (1 if dtype is F16 else 16)
    x[0, 1] = 3.25
    x[0, 2, 5], x[0, 3, 7] = np.nan, np.inf
    return round_to(x, dtype).astype(np.float64)


@pytest.mark.parametrize("name", few(NORMED, 3))
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_norm_on_the_way_is_that_of_two_kernels(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem, _ = NORMED[name]
    graph = problem.graph
    types = [graph.type_of(i) for i in graph.inputs]
    dtype, rng = types[0].dtype, np.random.default_rng(len(name))
    x = strange_rows(rng, types[0].shape, dtype)
    weights = [t for t in types[1:] if not (t.dtype is F32 and t.rank > 2)]
    drawn = [round_to(rng.standard_normal(t.shape), t.dtype).astype(np.float64) for t in weights]
    given = iter(statistics(x, types))
    rest = iter(drawn)
    inputs = [x, *(next(given) if t.dtype is F32 and t.rank > 2 else next(rest) for t in types[1:])]
    z, y = run(kernels, problem, sources[name], [v.astype(t.dtype.numpy) for v, t in zip(inputs, types, strict=True)])
    w, bias = drawn[-2:]
    mean = 0.0 if "rms" in name else x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.square(x - mean).mean(-1, keepdims=True) + EPS)
    exact = (x - mean) * scale * drawn[0] + (0.0 if "rms" in name else drawn[1])
    y, z = y.astype(np.float64), z.astype(np.float64)
    good = np.ones(x.shape[1], bool)
    good[2:4] = False
    # the operand as it would be stored: rounded once, after an f32 mean
    floor = 4 * 2.0**-24 * (np.abs(mean) * scale * np.abs(drawn[0]) + 8) * np.ones(x.shape)
    error = np.abs(y - exact)[0, good]
    assert (error <= UNIT[dtype] * 1.01 * np.abs(exact)[0, good] + floor[0, good]).all()
    assert np.isnan(y[0, 2]).all()
    assert np.isnan(z[0, 2:4]).all()
    # the product is that of the rounded operand, to the last bits of its own rounding
    want = y[0, good] @ w + bias
    limit = UNIT[dtype] * 2.1 * np.abs(want) + 1e-5 * (np.abs(y[0, good]) @ np.abs(w)) + 2 * UNIT[dtype] * 20
    assert (np.abs(z[0, good] - want) <= limit).all()
    assert not np.isnan(z[0, good]).any()


@pytest.mark.parametrize("name", LEAVING)
def test_partial_sums_are_those_of_what_is_stored(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem, _ = LEAVING[name]
    graph = problem.graph
    types = [graph.type_of(i) for i in graph.inputs]
    rng = np.random.default_rng(len(name))
    inputs = [round_to(rng.standard_normal(t.shape), t.dtype).astype(t.dtype.numpy) for t in types]
    inputs[2] += inputs[2].dtype.type(1000)  # the bias: a mean that would eat the variance
    x, mean, spread = (
        v.astype(np.float64) for v in run(kernels, problem, sources[f"leaving, {name}"], inputs, defer=True)
    )
    exact = sum(v.astype(np.float64) for v in inputs[2:]) + inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)
    assert (np.abs(x - exact) <= UNIT[types[0].dtype] * 3 * np.abs(exact) + 1e-3).all()
    pieces = x.reshape(x.shape[1], -1, PIECE)
    own = pieces.mean(-1, keepdims=True)
    away = np.square(pieces - own).sum(-1, keepdims=True)
    assert (np.abs(mean - own) <= 1e-6 * np.abs(own)).all()
    # distances are those from a mean in f32, one unit of 1000 off at most
    assert (np.abs(spread - away) <= 1e-5 * away + 1e-2 * np.sqrt(away) * 1e-2).all()


def test_own_means_are_for_few_rows_and_partial_sums_for_any() -> None:
    facts = profile("h200")
    own = templates.schedules(normed(128, 768, 2304, "own"), facts)
    parts = templates.schedules(normed(3152, 768, 2304, "parts"), facts)
    assert not isinstance(own, Declined)
    assert not isinstance(parts, Declined)
    assert all(s.param("template") in ("mma", "wgmma") for s in own)
    assert parts[0].param("template") == "tma"
    assert len(parts) <= 6
    leave = templates.schedules(leaving(197, 768, 768), facts)
    assert not isinstance(leave, Declined)
    assert all(isinstance(templates.emit(leaving(197, 768, 768), s), CudaSource) for s in leave)


def _softmax() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (40, 64)))
    wide = b.cast(x, F32)
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, wide, b.reduce(Prim.REDUCE_MAX, wide, (1,))))
    y = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (1,))), F16)
    return _rows(b, y)


def _two_values() -> Problem:
    b = GraphBuilder()
    x, other = (b.input(TensorType(F16, (40, 64))) for _ in range(2))
    scale = b.reduce(Prim.REDUCE_SUM, b.cast(x, F32), (1,))
    y = b.cast(b.apply(Prim.MUL, b.apply(Prim.ADD, b.cast(x, F32), b.cast(other, F32)), scale), F16)
    return _rows(b, y)


def _computed_vector() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (40, 64)))
    gamma = b.input(TensorType(F16, (64,)), is_weight=False)
    wide = b.cast(x, F32)
    y = b.apply(Prim.MUL, b.apply(Prim.SUB, wide, b.reduce(Prim.REDUCE_SUM, wide, (1,))), b.cast(gamma, F32))
    return _rows(b, b.cast(y, F16))


def _rows(b: GraphBuilder, y: int) -> Problem:
    z = b.add(Prim.MATMUL, y, b.input(TensorType(F16, (b.type_of(y).shape[-1], 32)), is_weight=True))
    graph = b.build([z])
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,))


def _transposed() -> Problem:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (64, 40)))
    wide = b.cast(x, F32)
    y = b.cast(b.apply(Prim.SUB, wide, b.reduce(Prim.REDUCE_SUM, wide, (1,))), F16)
    return _rows(b, b.add(Prim.TRANSPOSE, y, attrs=a.TransposeAttrs((1, 0))))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (_softmax(), "reduce_max"),
        (_two_values(), "several values"),
        (_computed_vector(), "no weights"),
        (_transposed(), "before the contraction"),
        (normed(40, 4096, 32, "own"), "long ones"),
        (normed(40, 60, 32, "own"), "no matrix in memory"),
        (leaving(40, 64, 32, F32), "sums over columns"),
    ],
    ids=["softmax", "two values", "a computed vector", "transposed", "long rows", "odd length", "f32"],
)
def test_what_is_no_norm_of_rows_is_declined(problem: Problem, reason: str) -> None:
    found = templates.schedules(problem, profile("h200"))
    assert isinstance(found, Declined), found
    assert reason in found.reason


def test_shapes_that_cannot_are_declined() -> None:
    own, parts, leave = (
        product(x) for x in (normed(70, 128, 64, "own"), normed(70, 128, 64, "parts"), leaving(70, 64, 128))
    )
    assert isinstance(own, Product)
    assert isinstance(parts, Product)
    assert isinstance(leave, Product)
    assert "no kernel before" in str(tma.emit(own, warpgroups(64, 64, 1), "k"))
    assert "registers" in str(tma.emit(parts, warpgroups(256, 64), "k"))
    assert isinstance(tma.emit(leave, warpgroups(64, 64, 1, store=64), "k"), Declined)
    narrow = MmaConfig(32, 16, 64, 16, 16, 1, 3, 1, False)
    assert "neighbouring lanes do not hold" in str(mma.emit(leave, narrow.schedule("mma"), "k"))
    whole = stripped(leaving(70, 64, 128, parts=False))
    assert isinstance(whole, Declined)


@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_kernels_compile_without_spills(arch: str) -> None:
    nvrtc = find_nvrtc()
    if not isinstance(nvrtc, Nvrtc):
        pytest.skip(nvrtc.reason)
    facts = profile("h200" if arch == "sm_90a" else "a100")
    problems = [
        normed(128, 768, 2304, "own"),
        normed(3152, 768, 3072, "parts", act=True),
        normed(197, 768, 2304, "parts", BF16, stored=True),
        leaving(197, 768, 768),
    ]
    sources = []
    for problem in problems:
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found
        source = templates.emit(problem, found[0])
        assert isinstance(source, CudaSource)
        sources.append(source)
    for source, cubin in zip(
        sources, nvrtc.compile_many([CompileJob(s.text, arch, s.flags) for s in sources], threads=1), strict=True
    ):
        assert isinstance(cubin, CompiledCubin), cubin
        assert not cubin.warnings
        used = cubin.of(source.launches[-1].entry)
        assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0)
