"""The attention template on the host: emulated kernels against float64, what compiles, what is declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import goldens
from tests.generate.cuda.attentions import BF16, F16, F32, Block, block, plain, problem_of
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.slow import asked, few
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.generate.cuda import templates
from weft.generate.cuda.attention.match import attention
from weft.generate.cuda.attention.shapes import AttentionConfig, SplitAttentionConfig
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType, round_bf16
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource
from weft.tune.verify import build_reference
from weft.tune.verify import compare as compare_output

H200 = GpuFacts()
A100 = GpuFacts(capability=80, sms=108, shared_per_sm=167936, shared_per_block=166912)

CASES: dict[str, tuple[Problem, AttentionConfig]] = {
    # (problem, shape): wr, mi, wk, nb, stages
    "one tile": (plain((2, 3), 24, 24, 16), AttentionConfig(1, 1, 2, 16, 1)),
    "all tiles at once": (plain((1, 2), 20, 100, 32), AttentionConfig(1, 1, 2, 16, 4)),
    "ring of two": (plain((1, 2), 20, 150, 32), AttentionConfig(1, 1, 2, 16, 2)),
    "ring of three": (plain((1, 1), 40, 130, 16, 48), AttentionConfig(2, 1, 1, 16, 3)),
    "two tiles of rows": (plain((1, 2), 70, 40, 64), AttentionConfig(1, 2, 2, 32, 1)),
    "warps along rows": (plain((1, 2), 70, 40, 64), AttentionConfig(4, 1, 1, 16, 3)),
    "bf16": (plain((1, 2), 33, 40, 64, dtype=BF16), AttentionConfig(2, 1, 2, 32, 1)),
    "odd sizes": (plain((1, 3), 7, 13, 20, 12), AttentionConfig(1, 1, 2, 16, 1)),
    "odd columns": (plain((1, 2), 9, 19, 17, 5), AttentionConfig(1, 1, 2, 16, 1)),
    "half a chunk": (plain((1, 2), 9, 19, 24, 40), AttentionConfig(1, 1, 2, 16, 1)),
    "wide heads": (plain((1, 1), 17, 33, 144, 160), AttentionConfig(1, 1, 2, 16, 2)),
    "causal": (plain((1, 2), 37, 37, 16, causal=True), AttentionConfig(1, 1, 2, 16, 2)),
    "mask of keys": (plain((2, 2), 20, 40, 16, mask=(2, 1, 1, 40)), AttentionConfig(1, 1, 2, 16, 2)),
    "mask of all": (plain((2, 2), 20, 40, 16, mask=(20, 40)), AttentionConfig(1, 1, 2, 32, 1)),
    "bias": (plain((2, 2), 20, 40, 16, mask=(1, 2, 20, 40), mask_dtype=F16), AttentionConfig(1, 1, 2, 16, 2)),
    "causal bias, bf16": (
        plain((2, 2), 20, 20, 16, mask=(2, 1, 20, 20), mask_dtype=BF16, dtype=BF16, causal=True),
        AttentionConfig(1, 1, 2, 16, 1),
    ),
    "soft cap": (plain((1, 2), 20, 40, 32, softcap=2.0), AttentionConfig(1, 1, 2, 16, 2)),
    "negative scale": (plain((1, 2), 20, 40, 32, scale=-0.3), AttentionConfig(1, 1, 2, 16, 2)),
    "grouped heads": (plain((2, 2), 10, 24, 16, heads=6), AttentionConfig(1, 1, 2, 16, 1)),
    "grouped heads, mask": (plain((2, 2), 10, 24, 16, heads=6, mask=(2, 6, 10, 24)), AttentionConfig(2, 1, 1, 32, 1)),
    "merged": (block(Block(2, 20, 20, 3, 16)), AttentionConfig(1, 1, 2, 16, 1)),
    "merged, no bias": (block(Block(2, 20, 20, 3, 16, bias=False)), AttentionConfig(1, 1, 2, 16, 1)),
    "merged bf16": (block(Block(1, 36, 36, 2, 32, dtype=BF16)), AttentionConfig(1, 1, 2, 16, 2)),
    "fewer keys": (block(Block(2, 70, 24, 2, 32, merged=False)), AttentionConfig(4, 1, 1, 32, 1)),
    "f32": (plain((1, 2), 33, 40, 64, dtype=F32), AttentionConfig(1, 1, 2, 16, 2)),
    "f32, two tiles of rows": (plain((1, 2), 70, 150, 32, dtype=F32), AttentionConfig(2, 2, 2, 16, 2)),
    "f32, odd sizes": (plain((1, 3), 7, 29, 21, 11, dtype=F32), AttentionConfig(1, 1, 1, 32, 1)),
    "f32, causal": (plain((1, 2), 37, 37, 16, causal=True, dtype=F32), AttentionConfig(1, 1, 2, 16, 2)),
    "f32, merged": (block(Block(2, 40, 40, 3, 16, dtype=F32)), AttentionConfig(2, 1, 2, 32, 1)),
    "five tiles at once": (plain((1, 2), 40, 80, 32, mask=(40, 80)), AttentionConfig(2, 1, 1, 16, 5)),
    "five tiles at once, two of rows": (plain((1, 2), 40, 75, 16, dtype=BF16), AttentionConfig(1, 2, 1, 16, 5)),
    "tiles at once, keys of warps": (plain((1, 2), 20, 90, 16), AttentionConfig(1, 1, 2, 16, 3)),
    "nine tiles at once": (plain((1, 2), 20, 140, 16), AttentionConfig(1, 1, 1, 16, 9)),
    "odd heads": (block(Block(1, 20, 20, 3, 12)), AttentionConfig(1, 1, 2, 16, 1)),
    "keys shared by two": (plain((2, 2), 1, 300, 128, heads=8), SplitAttentionConfig(1, 1, 4, 16, 2, 2)),
    "keys shared by four": (plain((1, 2), 20, 500, 64), SplitAttentionConfig(1, 1, 2, 16, 4, 4)),
    "keys shared by eight, bf16": (plain((1, 1), 40, 500, 32, 40, dtype=BF16), SplitAttentionConfig(2, 1, 2, 16, 2, 8)),
    "keys shared by two, masked": (
        plain((2, 2), 20, 300, 64, mask=(2, 1, 1, 300)),
        SplitAttentionConfig(1, 1, 4, 16, 2, 2),
    ),
    "keys shared, some without": (plain((1, 1), 20, 40, 64), SplitAttentionConfig(1, 1, 1, 16, 1, 4)),
}

NETWORKS: dict[str, Problem] = {
    **{f"bert, {n}": block(Block(n, 128, 128, 12, 64)) for n in (1, 16)},
    **{f"vit, {n}": block(Block(n, 197, 197, 12, 64)) for n in (1, 16)},
    **{
        f"segformer, {heads} heads": block(Block(1, rows, 256, heads, 32, merged=False))
        for rows, heads in ((16384, 1), (4096, 2), (1024, 5), (256, 8))
    },
    "long": plain((1, 16), 2048, 2048, 64),
    "causal": plain((1, 16), 1024, 1024, 128, causal=True),
    "masked": plain((2, 12), 384, 384, 64, mask=(2, 1, 1, 384)),
    "80": plain((1, 16), 512, 512, 80),
    "256": plain((1, 8), 512, 512, 256),
    "bert f32": block(Block(1, 128, 128, 12, 64, dtype=F32)),
    "vit f32": block(Block(16, 197, 197, 12, 64, dtype=F32)),
    "segformer f32": block(Block(1, 4096, 256, 2, 32, merged=False, dtype=F32)),
    "256 f32": plain((1, 8), 512, 512, 256, dtype=F32),
    "decoding": plain((1, 8), 1, 4096, 128, heads=32),
}


ROUNDED = {f"tf32, {name}": case for name, case in CASES.items() if name.startswith("f32")} | {
    "tf32, three tiles at once": (plain((1, 2), 40, 75, 32, dtype=F32), AttentionConfig(1, 2, 1, 32, 3)),
    "tf32, ring": (plain((1, 2), 40, 130, 80, dtype=F32), AttentionConfig(2, 1, 2, 16, 2)),
    "tf32, masked": (plain((2, 2), 20, 40, 16, mask=(2, 1, 1, 40), dtype=F32), AttentionConfig(1, 1, 2, 16, 2)),
}
"""Products in TF32."""
ALL = CASES | ROUNDED


def emitted(name: str) -> CudaSource:
    problem, shape = ALL[name]
    source = templates.emit(problem, shape.schedule(tf32=name in ROUNDED))
    assert isinstance(source, CudaSource), source.reason
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: emitted(name) for name in ALL}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


def inputs_of(problem: Problem, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        x = rng.integers(0, 4, t.shape) > 0 if t.dtype is DType.BOOL else rng.standard_normal(t.shape)
        found.append(round_bf16(x.astype(np.float32)) if t.dtype is DType.BF16 else x.astype(t.dtype.numpy))
    return found


def compare(got: np.ndarray, problem: Problem, inputs: list[np.ndarray], name: str) -> None:
    """Near the value in float64; NaN and infinities where those are."""
    with np.errstate(all="ignore"):
        want = numbers(evaluate(problem.graph, inputs, precise=True)[0])
    unit = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-22}[problem.graph.type_of(problem.graph.outputs[0]).dtype]
    unit = 2.0**-12 if name in ROUNDED else unit
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite].astype(np.float64), want[~finite], err_msg=name)
    rms = float(np.sqrt(np.mean(np.square(want[finite])))) + 1e-30
    error = float(np.abs(got[finite].astype(np.float64) - want[finite]).max(initial=0.0))
    assert error <= 6 * unit * max(rms, float(np.abs(want[finite]).max(initial=0.0))), (name, error / unit, rms)


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(ALL, 5))
def test_values(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = ALL[name][0]
    inputs = inputs_of(problem)
    got = run(kernels, problem, sources[name], inputs, defer=defer)[0]
    compare(got, problem, inputs, name)


JUDGED = [
    "one tile",
    "ring of two",
    "odd columns",
    "causal",
    "mask of all",
    "grouped heads",
    "merged",
    "merged bf16",
    "f32",
    "f32, two tiles of rows",
    "f32, odd sizes",
    "f32, causal",
    "f32, merged",
    "five tiles at once",
    "five tiles at once, two of rows",
    "tiles at once, keys of warps",
    "nine tiles at once",
    "keys shared by two",
    "keys shared, some without",
]


@pytest.mark.parametrize("name", few(JUDGED, 5))
def test_the_tuner_accepts_it(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Integers, NaN and infinities, normal values: the same inputs, limits and comparison as on a device."""
    problem = ALL[name][0]
    types = [problem.graph.type_of(i).dtype for i in problem.graph.inputs]
    out = TORCH_DTYPE[problem.graph.type_of(problem.graph.outputs[0]).dtype]
    for case in build_reference(problem, seed=3).cases:
        inputs = [x.float().numpy() if t is BF16 else x.numpy() for x, t in zip(case.inputs, types, strict=True)]
        got = torch.from_numpy(np.ascontiguousarray(run(kernels, problem, sources[name], inputs)[0])).to(out)
        finding = compare_output(got, case.expected[0], case.kind.value)
        assert finding.verdict is Verdict.OK, finding


def extreme(name: str, change: Callable[[list[np.ndarray]], None]) -> tuple[Problem, list[np.ndarray]]:
    inputs = inputs_of(CASES[name][0])
    change(inputs)
    return CASES[name][0], inputs


def nan_in_a_query(x: list[np.ndarray]) -> None:
    x[0][0, 1, 3, 0] = np.nan


def infinity_in_a_key(x: list[np.ndarray]) -> None:
    x[1][0, 0, 5] = np.inf


def infinity_in_a_value(x: list[np.ndarray]) -> None:
    x[2][0, 0, 7, 2] = -np.inf


def huge(x: list[np.ndarray]) -> None:
    x[0] *= 100


def nothing_left(x: list[np.ndarray]) -> None:
    x[3][:, 4] = -np.inf if x[3].dtype.kind == "f" else False  # no key for query 4 of any head: axis 1 or the rows'
    x[3][..., 3, :] = -np.inf if x[3].dtype.kind == "f" else False


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("all tiles at once", nan_in_a_query),
        ("ring of two", infinity_in_a_key),
        ("ring of two", infinity_in_a_value),
        ("all tiles at once", huge),
        ("one tile", huge),
        ("mask of all", nothing_left),
        ("f32, two tiles of rows", infinity_in_a_value),
        ("f32", nan_in_a_query),
    ],
)
def test_what_is_not_finite_goes_where_it_goes_in_float64(
    name: str, change: Callable[[list[np.ndarray]], None], sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    problem, inputs = extreme(name, change)
    got = run(kernels, problem, sources[name], inputs)[0]
    compare(got, problem, inputs, f"{name} {change.__name__}")


def test_a_row_without_keys_is_nan_where_the_softmax_is_not_guarded(kernels: Emulated) -> None:
    b = GraphBuilder()
    q, k, v, bias = (b.input(TensorType(F16, s)) for s in ((1, 16, 16), (1, 24, 16), (1, 24, 16), (16, 24)))
    s = b.apply(Prim.ADD, b.cast(b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1))), F32), b.cast(bias, F32))
    e = b.apply(Prim.EXP, b.apply(Prim.SUB, s, b.reduce(Prim.REDUCE_MAX, s, (2,))))
    p = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (2,))), F16)
    problem = problem_of(b, b.add(Prim.MATMUL, p, v))
    source = templates.emit(problem, AttentionConfig(1, 1, 2, 16, 1).schedule())
    assert isinstance(source, CudaSource), source
    inputs = inputs_of(problem)
    inputs[3][2] = -np.inf
    inputs[3][3, :20] = -np.inf
    got = run(Emulated([source]), problem, source, inputs)[0]
    assert np.isnan(got[0, 2]).all()
    compare(got, problem, inputs, "no guard")


def compiled(problems: dict[str, Problem], arch: str, most: int, *, tf32: bool = False) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    facts = replace(H200 if arch == "sm_90a" else A100, tf32=tf32)
    jobs: list[tuple[str, CudaSource]] = []
    for name, problem in problems.items():
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        assert 1 <= len(found) <= 8
        for schedule in found[:most]:
            source = templates.emit(problem, schedule)
            assert isinstance(source, CudaSource), source
            jobs.append((name, source))
    results = nvrtc.compile_many([CompileJob(s.text, arch, s.flags) for _, s in jobs])
    for (name, source), result in zip(jobs, results, strict=True):
        assert isinstance(result, CompiledCubin), result
        assert result.warnings == (), (name, str(source.schedule), result.warnings)
        own = result.of(source.launches[0].entry)
        assert own.spill_stores == own.spill_loads == 0, (name, str(source.schedule))
        assert gate(result, source.launches[0], facts) is None


def test_a_sample_compiles_without_spills() -> None:
    compiled({"bert": block(Block(1, 128, 128, 12, 64)), "wide": plain((1, 8), 512, 512, 256)}, "sm_90a", 1)
    compiled({"long": plain((1, 16), 2048, 2048, 64, causal=True)}, "sm_80", 1)


@pytest.mark.parametrize("arch", few(["sm_80", "sm_90a"], 1))
def test_a_sample_in_tf32_compiles_without_spills(arch: str) -> None:
    compiled({"vit": block(Block(16, 197, 197, 12, 64, dtype=F32))}, arch, 2, tf32=True)


def test_tf32_only_where_it_is_allowed() -> None:
    problem = plain((1, 8), 64, 64, 64, dtype=F32)
    strict, loose = (templates.schedules(problem, replace(H200, tf32=allowed)) for allowed in (False, True))
    assert not isinstance(strict, Declined)
    assert not isinstance(loose, Declined)
    assert {s.param("template") for s in strict} == {"attention"}
    assert [s.param("template") for s in loose[:1]] == ["attention_tf32"]
    source = templates.emit(problem, strict[0])
    assert isinstance(source, CudaSource)
    assert "tf32" not in source.text


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_networks_compile_without_spills(arch: str) -> None:
    compiled(NETWORKS, arch, 6)


def test_text() -> None:
    problem = block(Block(1, 197, 197, 12, 64))
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined), found.reason
    source = templates.emit(problem, found[0])
    assert isinstance(source, CudaSource), source
    text = f"// {source.schedule}\n{source.text.replace(prelude(), '').replace(source.entry, 'ENTRY')}"
    goldens.check("cuda/kernels/attention.cu", text)


def declined(problem: Problem, facts: GpuFacts = H200) -> str:
    found = templates.schedules(problem, facts)
    assert isinstance(found, Declined)
    return found.reason


def test_what_is_declined_says_why() -> None:
    assert "f64" in declined(plain((1, 2), 16, 16, 16, dtype=DType.F64))
    assert "272" in declined(plain((1, 2), 16, 16, 272))
    assert "7.5" in declined(plain((1, 2), 16, 16, 16), GpuFacts(capability=75))
    b = GraphBuilder()
    x = b.input(TensorType(F16, (2, 8, 8)))
    assert "no softmax" in declined(problem_of(b, b.add(Prim.MATMUL, b.apply(Prim.EXP, b.add(Prim.MATMUL, x, x)), x)))
    b = GraphBuilder()
    x = b.input(TensorType(F16, (2, 8, 8)))
    s = b.cast(b.add(Prim.MATMUL, x, x), F32)
    e = b.apply(Prim.EXP, s)
    p = b.cast(b.apply(Prim.DIV, e, b.reduce(Prim.REDUCE_SUM, e, (2,))), F16)
    assert "maximum" in declined(problem_of(b, b.add(Prim.MATMUL, p, x)))


def test_rows_and_keys_of_what_is_matched() -> None:
    found = attention(plain((2, 2), 10, 24, 16, heads=6))
    assert not isinstance(found, Declined), found.reason
    assert (found.blocks, found.m, found.keys) == (4, 30, 24)  # three heads share keys: they are rows
    found = attention(block(Block(2, 20, 20, 3, 16)))
    assert not isinstance(found, Declined), found.reason
    assert (found.blocks, found.m, found.qk, found.head) == (6, 20, 16, 16)
    assert found.scale == pytest.approx(0.25)
    assert found.out.strides[-1] == 1
    found = attention(plain((2, 2), 20, 40, 16, causal=True))
    assert not isinstance(found, Declined), found.reason
    assert found.scale == 0


def test_schedules_overlap_products_and_softmax_where_all_keys_fit() -> None:
    text = [
        emitted_of(block(Block(1, 40, 80, 2, 16, merged=False)), AttentionConfig(2, 1, 1, 16, stages))
        for stages in (2, 5)
    ]
    assert ["float even[" in t for t in text] == [False, True]


def emitted_of(problem: Problem, shape: AttentionConfig) -> str:
    source = templates.emit(problem, shape.schedule())
    assert isinstance(source, CudaSource), source
    return source.text
