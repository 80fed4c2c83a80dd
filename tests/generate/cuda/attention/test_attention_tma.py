"""Attention by warpgroups without a GPU: emulated on the host, and compiled for sm_90a."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import goldens
from tests.generate.cuda.attention.test_attention import compare, inputs_of
from tests.generate.cuda.attentions import BF16, F16, F32, Block, block, plain, problem_of
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.slow import asked, few
from tests.typed import approx

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.fission.sdpa import sdpa
from weft.generate.cuda import templates
from weft.generate.cuda.attention import tma as attention_tma
from weft.generate.cuda.attention.band import band
from weft.generate.cuda.attention.match import Attention, attention
from weft.generate.cuda.attention.tma_shapes import AttentionTmaConfig
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource
from weft.tune.verify import build_reference
from weft.tune.verify import compare as compare_output

H200 = GpuFacts()


def alone(bn: int, stages: int = 2, **changes: int) -> AttentionTmaConfig:
    """One warpgroup that multiplies."""
    return replace(AttentionTmaConfig(1, False, bn, stages, False, 1, 0), **changes)  # type: ignore[arg-type]


def pair(bn: int, stages: int = 2, **changes: int) -> AttentionTmaConfig:
    """Two that take turns."""
    return replace(AttentionTmaConfig(2, False, bn, stages, True, 1, 0), **changes)  # type: ignore[arg-type]


def shared(groups: int, bn: int) -> AttentionTmaConfig:
    """Warpgroups that share the keys of the same rows."""
    return AttentionTmaConfig(groups, True, bn, 2 * groups, False, 1, 0)


def side_by_side(rows: int, keys: int, *, repeated: bool, causal: bool = False) -> Problem:
    """Six heads of q over two of k and v, each beside the next in memory; or k and v `repeated` before the products."""
    b = GraphBuilder()
    q, k, v = (
        b.transpose(b.reshape(b.input(TensorType(F16, (n, heads * 64))), (1, n, heads, 64)), (0, 2, 1, 3))
        for n, heads in ((rows, 6), (keys, 2), (keys, 2))
    )
    if repeated:
        k, v = (
            b.reshape(b.broadcast(b.reshape(x, (1, 2, 1, keys, 64)), (1, 2, 3, keys, 64)), (1, 6, keys, 64))
            for x in (k, v)
        )
    y = sdpa(b, q, k, v, enable_gqa=not repeated, causal=causal, causal_offset=keys - rows)
    assert not isinstance(y, Declined), y.reason
    return problem_of(b, b.transpose(y, (0, 2, 1, 3)))


CASES: dict[str, tuple[Problem, AttentionTmaConfig]] = {
    "one tile": (plain((1, 2), 70, 40, 64), alone(48, 1)),
    "three tiles": (plain((1, 2), 70, 150, 64), alone(64)),
    "turns, bf16": (plain((1, 1), 200, 150, 32, dtype=BF16), pair(48)),
    "three warpgroups": (plain((1, 1), 200, 150, 64), AttentionTmaConfig(3, False, 64, 3, True, 1, 0)),
    "two panels": (plain((1, 1), 70, 70, 128, 144), alone(32)),
    "wide heads": (plain((1, 1), 64, 100, 256), alone(32)),
    "odd columns": (plain((1, 2), 40, 70, 40, 24), alone(32)),
    "blocks go on": (plain((1, 3), 150, 100, 64), alone(64, persistent_ctas=2)),
    "causal": (plain((1, 2), 200, 200, 64, causal=True), alone(32)),
    "causal, tiles of rows higher": (plain((1, 2), 300, 300, 80, causal=True, dtype=BF16), pair(48, 3)),
    "causal, wider tiles of keys": (plain((1, 1), 200, 200, 32, causal=True), alone(96)),
    "causal, more keys": (plain((1, 1), 150, 300, 32, causal=True, dtype=BF16), alone(48)),
    "causal, fewer keys": (plain((1, 1), 300, 100, 32, causal=True), alone(48)),
    "causal, one tile of rows": (plain((1, 2), 60, 60, 32, causal=True), alone(16)),
    "grouped causal": (plain((1, 2), 128, 128, 64, heads=4, causal=True), alone(32)),
    "grouped causal, rows straddle": (plain((1, 2), 100, 128, 64, heads=4, causal=True), alone(32)),
    "grouped": (plain((2, 2), 128, 96, 64, heads=6), pair(32)),
    "grouped, side by side": (side_by_side(128, 100, repeated=False), alone(64)),
    "grouped causal, side by side": (side_by_side(128, 200, repeated=False, causal=True), alone(32)),
    "grouped causal, keys repeated": (side_by_side(64, 100, repeated=True, causal=True), alone(32)),
    "grouped, one row": (plain((2, 2), 1, 100, 128, heads=8), alone(64)),
    "bias": (plain((2, 2), 70, 100, 64, mask=(1, 2, 70, 100), mask_dtype=F16), alone(64)),
    "causal bias": (plain((1, 2), 70, 70, 64, mask=(1, 2, 70, 70), mask_dtype=F16, causal=True), alone(32)),
    "mask of keys": (plain((2, 2), 70, 100, 40, mask=(2, 1, 1, 100)), alone(64)),
    "mask of all": (plain((2, 2), 70, 100, 64, mask=(70, 100)), alone(64)),
    "keys in turn": (plain((1, 2), 70, 300, 64), shared(2, 48)),
    "keys in turn, three, bf16": (plain((1, 2), 70, 300, 80, dtype=BF16), shared(3, 32)),
    "keys in turn, one has none": (plain((1, 1), 70, 60, 32), shared(3, 32)),
    "keys in turn, bias": (plain((1, 2), 70, 200, 64, mask=(1, 2, 70, 200), mask_dtype=F16), shared(2, 48)),
    "keys in turn, causal": (plain((1, 2), 200, 200, 64, causal=True), shared(2, 32)),
    "keys in turn, causal, three, bf16": (plain((1, 2), 200, 230, 64, causal=True, dtype=BF16), shared(3, 32)),
    "soft cap": (plain((1, 2), 64, 100, 64, softcap=2.0), alone(64)),
    "negative scale": (plain((1, 2), 64, 100, 64, scale=-0.3), alone(64)),
    "merged": (block(Block(2, 100, 100, 3, 32, bias=False)), alone(64)),
    "merged, bf16, blocks go on": (
        block(Block(2, 100, 100, 3, 80, bias=False, dtype=BF16)),
        pair(64, persistent_ctas=3),
    ),
}


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {}
    for name, (problem, shape) in CASES.items():
        source = templates.emit(problem, shape.schedule())
        assert isinstance(source, CudaSource), (name, source.reason)
        found[name] = source
    return found


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, "mask of all"))


@pytest.mark.parametrize("name", few(CASES, 4))
def test_values(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Whether copies and products happen at once or as late as the kernel's waits allow."""
    problem = CASES[name][0]
    inputs = inputs_of(problem)
    for late in (False, True):
        compare(run(kernels, problem, sources[name], inputs, defer=late)[0], problem, inputs, name)


JUDGED = [
    "one tile",
    "keys in turn",
    "keys in turn, causal, three, bf16",
    "turns, bf16",
    "causal",
    "causal, more keys",
    "grouped causal",
    "bias",
    "merged",
]


@pytest.mark.parametrize("name", few(JUDGED, 3))
def test_the_tuner_accepts_it(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Integers, NaN and infinities, normal values: the same inputs, limits and comparison as on a device."""
    problem = CASES[name][0]
    types = [problem.graph.type_of(i).dtype for i in problem.graph.inputs]
    out = TORCH_DTYPE[problem.graph.type_of(problem.graph.outputs[0]).dtype]
    for case in build_reference(problem, seed=3).cases:
        inputs = [x.float().numpy() if t is BF16 else x.numpy() for x, t in zip(case.inputs, types, strict=True)]
        got = torch.from_numpy(np.ascontiguousarray(run(kernels, problem, sources[name], inputs)[0])).to(out)
        finding = compare_output(got, case.expected[0], case.kind.value)
        assert finding.verdict is Verdict.OK, finding


@pytest.mark.parametrize("name", few([n for n in CASES if "causal" in n and "bias" not in n], 2))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_no_row_of_a_tile_sees_count_where_they_are_not_finite(
    name: str, value: float, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    problem = CASES[name][0]
    inputs = inputs_of(problem)
    values = (
        inputs[2] if "by side" not in name and "repeated" not in name else inputs[2].reshape(-1, 2, 64).swapaxes(0, 1)
    )
    keys = values.shape[-2]
    values[..., keys - 1, 3] = value
    values[..., keys // 2, 7] = value
    got = run(kernels, problem, sources[name], inputs)[0]
    assert not np.isfinite(got[..., 3].astype(np.float32)).any()
    assert np.isfinite(got[..., 5].astype(np.float32)).all()
    compare(got, problem, inputs, name)


def test_tiles_are_skipped_only_under_a_causal_mask(sources: dict[str, CudaSource]) -> None:
    skipping = {name for name, source in sources.items() if source.state_bytes}
    assert skipping == {n for n in CASES if "causal" in n} - {
        "causal bias",
        "causal, one tile of rows",
        "grouped causal, rows straddle",
        "grouped causal, keys repeated",  # one tile of rows
    }


@pytest.mark.parametrize("name", ["three tiles", "causal", "mask of all"])
def test_what_is_not_finite_goes_where_it_goes_in_float64(
    name: str, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    problem = CASES[name][0]
    inputs = inputs_of(problem)
    inputs[0][0, 1, 3, 0] = np.nan
    inputs[1][0, 0, 5] = np.inf
    inputs[2][0, 0, 7, 2] = -np.inf
    compare(run(kernels, problem, sources[name], inputs)[0], problem, inputs, name)


def test_a_row_without_keys_is_zero_where_the_softmax_is_guarded(
    sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    problem = CASES["mask of all"][0]
    inputs = inputs_of(problem)
    inputs[3][4] = False
    got = run(kernels, problem, sources["mask of all"], inputs)[0]
    assert not got[:, :, 4].any()
    compare(got, problem, inputs, "guarded")


def test_a_row_without_keys_is_nan_where_it_is_not() -> None:
    b = GraphBuilder()
    q, k, v, bias = (b.input(TensorType(F16, s)) for s in ((1, 16, 32), (1, 80, 32), (1, 80, 32), (16, 80)))
    s = b.apply(Prim.ADD, b.cast(b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1))), F32), b.cast(bias, F32))
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, s, b.reduce(Prim.REDUCE_MAX, s, (2,))))
    p = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (2,))), F16)
    problem = problem_of(b, b.add(Prim.MATMUL, p, v))
    source = templates.emit(problem, alone(32).schedule())
    assert isinstance(source, CudaSource), source
    inputs = inputs_of(problem)
    inputs[3][2] = -np.inf
    inputs[3][3, :70] = -np.inf
    got = run(Emulated([source]), problem, source, inputs)[0]
    assert np.isnan(got[0, 2]).all()
    compare(got, problem, inputs, "not guarded")


def matched(problem: Problem) -> Attention:
    found = attention(problem)
    assert not isinstance(found, Declined), found.reason
    return found


def test_causal_masks_are_read_off_the_expression() -> None:
    found = band(matched(plain((2, 2), 20, 40, 16, causal=True)))
    assert found is not None
    assert (found.shift, found.queries, found.repeats, found.scale) == (0, 20, 1, approx(0.25))
    found = band(matched(plain((2, 2), 20, 40, 16, heads=6, causal=True)))
    assert found is not None
    assert (found.queries, found.repeats) == (20, 3)
    found = band(matched(side_by_side(64, 100, repeated=True, causal=True)))
    assert found is not None
    assert (found.shift, found.queries, found.repeats) == (36, 64, 3)
    for other in (
        plain((2, 2), 20, 40, 16),
        plain((2, 2), 20, 40, 16, mask=(20, 40)),
        plain((2, 2), 20, 20, 16, mask=(20, 20), mask_dtype=F16, causal=True),
        plain((2, 2), 20, 40, 16, causal=True, scale=-1.0),
    ):
        assert band(matched(other)) is None


@pytest.mark.parametrize(
    ("prim", "kept", "key_first", "shift"),
    [
        (Prim.LE, True, True, 0),
        (Prim.LT, True, True, -1),
        (Prim.GT, False, True, 0),
        (Prim.GE, False, True, -1),
        (Prim.GE, True, False, 0),
        (Prim.GT, True, False, -1),
        (Prim.LT, False, False, 0),
        (Prim.LE, False, False, -1),
        (Prim.GE, True, True, None),
        (Prim.LE, False, True, None),
    ],
)
def test_every_way_to_write_a_causal_mask(prim: Prim, kept: bool, key_first: bool, shift: int | None) -> None:
    b = GraphBuilder()
    q, k, v = (b.input(TensorType(F16, (2, 48, 32))) for _ in range(3))
    scores = b.cast(b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1))), F32)
    row, key = (b.iota((2, 48, 48), axis, DType.I32) for axis in (1, 2))
    test = b.apply(prim, key, row) if key_first else b.apply(prim, row, key)
    masked = b.apply(Prim.SELECT, test, *((scores, -np.inf) if kept else (-np.inf, scores)))
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, masked, b.reduce(Prim.REDUCE_MAX, masked, (2,))))
    p = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (2,))), F16)
    problem = problem_of(b, b.add(Prim.MATMUL, p, v))
    found = band(matched(problem))
    assert (None if found is None else found.shift) == shift


def refused(problem: Problem) -> str:
    found = templates.emit(problem, alone(64).schedule())
    assert isinstance(found, Declined)
    return found.reason


def test_what_the_copy_engine_cannot_read_is_declined() -> None:
    assert "computed" in refused(block(Block(2, 100, 100, 3, 32)))
    assert "computed" in refused(plain((1, 2), 64, 64, 64, dtype=F32))
    assert "16 bytes" in refused(plain((1, 2), 64, 64, 20))
    assert "no TMA box" in refused(side_by_side(100, 64, repeated=False))


def test_warpgroups_that_share_keys_do_nothing_else() -> None:
    problem = plain((1, 2), 200, 200, 64)
    for shape in (
        replace(shared(2, 32), pingpong=True),
        replace(shared(2, 32), persistent_ctas=1),
        replace(shared(2, 32), stages=3),
    ):
        found = templates.emit(problem, shape.schedule())
        assert isinstance(found, Declined)
        assert "split over keys" in found.reason


def test_schedules_come_from_both_templates_where_both_apply() -> None:
    found = templates.schedules(plain((1, 16), 2048, 2048, 128, causal=True), H200)
    assert not isinstance(found, Declined)
    assert {s.param("template") for s in found[:4]} >= {"attention_tma"}
    for problem, facts in (
        (block(Block(1, 197, 197, 12, 64)), H200),
        (plain((1, 16), 2048, 2048, 128), GpuFacts(capability=80, sms=108)),
        (plain((1, 16), 256, 256, 64, dtype=F32), H200),
    ):
        other = templates.schedules(problem, facts)
        assert not isinstance(other, Declined)
        assert {s.param("template") for s in other} == {"attention"}


def test_every_shape_of_the_model_fits() -> None:
    for problem in (plain((2, 16), 2048, 2048, 64), plain((1, 8), 512, 512, 256), plain((4, 3), 70, 40, 32)):
        p = matched(problem)
        found = attention_tma.ranked(p, H200, keep=100)
        assert found
        assert found == sorted(found, key=lambda x: x[0])
        for _, schedule in found[:10]:
            source = templates.emit(problem, schedule)
            assert isinstance(source, CudaSource), source
            assert source.launches[0].shared_bytes <= H200.shared_per_block


COMPILED = {
    "long": plain((2, 16), 2048, 2048, 64),
    "causal": plain((1, 16), 2048, 2048, 128, causal=True),
    "causal bf16": plain((1, 16), 2048, 2048, 64, causal=True, dtype=BF16),
    "vit": block(Block(16, 197, 197, 12, 64, bias=False)),
    "80": plain((1, 16), 577, 577, 80),
    "256": plain((1, 8), 1024, 1024, 256),
    "bias": plain((2, 8), 512, 512, 64, mask=(1, 8, 512, 512), mask_dtype=F16),
    "grouped causal": plain((1, 8), 4096, 4096, 128, heads=32, causal=True),
}


def compiled(problems: dict[str, Problem], most: int) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    jobs = []
    for name, problem in problems.items():
        for _, schedule in attention_tma.ranked(matched(problem), H200)[:most]:
            source = templates.emit(problem, schedule)
            assert isinstance(source, CudaSource), source
            jobs.append((name, source))
    assert jobs
    results = nvrtc.compile_many([CompileJob(s.text, "sm_90a", s.flags) for _, s in jobs])
    for (name, source), result in zip(jobs, results, strict=True):
        assert isinstance(result, CompiledCubin), result
        assert result.warnings == (), (name, str(source.schedule), result.warnings)  # C7510: products one by one
        own = result.of(source.launches[0].entry)
        assert own.spill_stores == own.spill_loads == own.stack_bytes == 0, (name, str(source.schedule))
        assert gate(result, source.launches[0], H200) is None


def test_a_sample_compiles_without_spills() -> None:
    compiled({name: COMPILED[name] for name in ("causal", "long")}, 1)


@pytest.mark.slow
def test_more_compiles_without_spills() -> None:
    compiled(COMPILED, 4)


def test_text() -> None:
    problem = plain((1, 16), 2048, 2048, 128, causal=True)
    source = templates.emit(problem, AttentionTmaConfig(2, False, 128, 2, True, 1, 0).schedule())
    assert isinstance(source, CudaSource), source
    text = source.text.replace(prelude(), "").replace(tma_header(), "").replace(source.entry, "ENTRY")
    text = f"// {source.schedule}\n{text}"
    goldens.check("cuda/kernels/attention_tma.cu", text)
