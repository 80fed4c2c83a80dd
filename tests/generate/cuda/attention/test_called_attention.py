"""Attention as a training step calls it: result and logarithms near float64 on the host, what is taken and left."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.cases.attention_gradient import gradient_problem
from benchmarks.cases.called_attention import called_attention_problem
from tests.generate.cuda.attention.test_attention_tma import alone, pair, shared
from tests.generate.cuda.calls_of_attention import drawn, exact
from tests.generate.cuda.products import F16, F32
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.attention import called
from weft.generate.cuda.attention.called import called_attention
from weft.generate.cuda.attention.gradient.kernel import GradientConfig
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.attention.shapes import AttentionConfig, SplitAttentionConfig
from weft.generate.cuda.attention.tma_shapes import AttentionTmaConfig
from weft.generate.cuda.predict import predicted_us
from weft.generate.library import opaque_aten, trained_attention
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule
from weft.tune.oracle import calls_own
from weft.tune.verify import build_reference

made = called_attention_problem
CASES: dict[str, tuple[Problem, AttentionConfig | AttentionTmaConfig]] = {
    # by fragments: wr, mi, wk, nb, stages
    "odd": (made(2, 37, 2, 64), AttentionConfig(1, 1, 1, 16, 3)),
    "keys of warps": (made(2, 37, 2, 64, scale=0.3), AttentionConfig(2, 1, 2, 16, 2)),
    "two tiles of rows": (made(1, 70, 2, 64, dtype=F16), AttentionConfig(2, 2, 1, 32, 3)),
    "causal": (made(1, 45, 2, 64, causal=True, dtype=F16), AttentionConfig(1, 1, 2, 16, 2)),
    "packed": (made(2, 37, 2, 64, packed=True), AttentionConfig(1, 1, 1, 16, 3)),
    "wide heads, packed, causal": (made(1, 33, 2, 128, packed=True, causal=True), AttentionConfig(1, 1, 2, 16, 2)),
    "more keys": (made(1, 20, 2, 64, keys=50), AttentionConfig(1, 1, 1, 64, 1)),
    "fewer keys, logarithms first": (made(2, 50, 1, 64, keys=9, results=(1, 0)), AttentionConfig(2, 1, 1, 16, 1)),
    "flat, negative": (made(1, 17, 3, 64, flat=True, scale=-0.2), AttentionConfig(1, 1, 1, 32, 1)),
    "result alone": (made(1, 20, 2, 64, results=(0,)), AttentionConfig(1, 1, 2, 16, 1)),
    "keys shared by a cluster": (made(1, 20, 2, 64, keys=300), SplitAttentionConfig(1, 1, 2, 16, 2, 4)),
    # by warpgroups
    "warpgroup": (made(2, 70, 2, 64), alone(32)),
    "warpgroup, one tile": (made(1, 40, 2, 64, results=(1, 0)), alone(48, 1)),
    "warpgroups in turn": (made(1, 200, 1, 64, dtype=F16, packed=True), pair(48)),
    "warpgroup, causal": (made(1, 200, 2, 64, causal=True), alone(32)),
    "warpgroups, causal, packed": (made(2, 150, 2, 64, causal=True, packed=True), pair(48, 3)),
    "warpgroups share keys": (made(1, 70, 2, 64, keys=300), shared(2, 48)),
    "warpgroups share keys, causal": (made(1, 200, 2, 64, causal=True, packed=True), shared(2, 32)),
    "warpgroup, wide heads": (made(1, 70, 2, 128, packed=True, flat=True, dtype=F16), alone(32)),
    "warpgroup, wide heads, causal": (made(1, 100, 1, 128, causal=True), alone(32)),
    "warpgroups go on, causal": (made(1, 150, 3, 64, causal=True), alone(64, persistent_ctas=2)),
}


def emitted(name: str) -> CudaSource:
    problem, shape = CASES[name]
    found = CudaGenerator().emit(problem, shape.schedule())
    assert isinstance(found, CudaSource), (name, found)
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: emitted(name) for name in CASES}


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


def near(problem: Problem, inputs: list[np.ndarray], found: list[np.ndarray]) -> None:
    unit = 2.0**-11 if problem.graph.type_of(problem.graph.inputs[0]).dtype is F16 else 2.0**-8
    for got, want, node in zip(found, exact(problem, inputs), problem.graph.outputs, strict=True):
        assert np.isfinite(got).all()
        if problem.graph.type_of(node).dtype is F32:  # of products of 16 bits that are added in f32, and 2 ulp
            assert np.abs(got - want).max() <= 2.0**-20 * max(4.0, float(np.abs(want).max()))
        else:
            assert np.linalg.norm(got - want) <= unit * np.linalg.norm(want)
            assert np.abs(got - want).max() <= 4 * unit * np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_near_float64(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    inputs = drawn(problem)
    near(problem, inputs, run(kernels, problem, sources[name], inputs))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["keys of warps", "warpgroups share keys, causal", "warpgroups, causal, packed"])
def test_warps_may_be_far_ahead(name: str, order: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem, inputs = CASES[name][0], drawn(CASES[name][0], 1)
    first, again = (run(kernels, problem, sources[name], inputs, order=k) for k in (0, order))
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["odd", "causal", "keys shared by a cluster", "warpgroups, causal, packed"])
def test_large_scores_keep_their_logarithms(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem, inputs = CASES[name][0], drawn(CASES[name][0], 2)
    inputs = [x * 16 for x in inputs]  # a power of two: of 16 bits still
    near(problem, inputs, run(kernels, problem, sources[name], inputs))


@pytest.mark.parametrize("name", ["odd", "warpgroups share keys", "keys shared by a cluster"])
def test_rows_that_are_no_numbers_are_as_the_librarys(
    name: str, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    """FlashAttention-2 gives infinity as the logarithm where a score is NaN, and where none is above -inf."""
    problem, inputs = CASES[name][0], drawn(CASES[name][0])
    inputs[0][0, 3, 0, 5] = np.nan
    inputs[0][0, 4, 1 % inputs[0].shape[2], :] = 0.0
    out, sums = run(kernels, problem, sources[name], inputs)
    assert np.isnan(out[0, 3, 0]).all() and sums[0, 0, 3] == np.inf
    assert np.isfinite(np.delete(sums[0], 3, axis=1)).all() and np.isfinite(sums[0, 1:]).all()


@pytest.mark.parametrize("name", ["odd", "packed", "warpgroups, causal, packed", "warpgroup, wide heads"])
def test_within_what_a_kernel_is_held_to(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    reference = build_reference(problem, seed=0)
    assert not reference.opaque and len(reference.cases) == 2
    for case in reference.cases:
        got = run(kernels, problem, sources[name], [x.float().numpy() for x in case.inputs])
        for expected, found in zip(case.expected, got, strict=True):
            off = np.abs(found - expected.value.numpy())
            assert expected.limits is not None
            assert np.sqrt((off**2).mean()) <= expected.limits.rmse and off.max() <= expected.limits.max


def test_the_operator_itself_gives_the_same() -> None:
    problem = CASES["causal"][0]
    given = [torch.from_numpy(np.array(x)).double() for x in drawn(problem)]
    found = trained_attention.attention(given[0], given[1], given[2], True, 0.125)
    for got, want in zip(found, exact(problem, [x.numpy() for x in given]), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["packed", "warpgroups, causal, packed"])
def test_gradients_of_what_it_gives(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """The gradients' kernel reads the result and the logarithms that the forward kernel wrote."""
    forward = CASES[name][0]
    positions = forward.graph.type_of(forward.graph.inputs[0]).shape[1]
    backward = gradient_problem(2, positions, 2, 64, causal="causal" in name, packed=True, joined=True)
    source = CudaGenerator().emit(backward, GradientConfig(4, 1).schedule())
    assert isinstance(source, CudaSource)
    inputs = drawn(backward)
    given = run(kernels, forward, sources[name], inputs[1:2])
    (want,) = exact(backward, inputs)
    (got,) = run(Emulated([source]), backward, source, [*inputs[:2], *given])
    assert np.linalg.norm(got - want) <= 2.0**-7 * np.linalg.norm(want)


def test_what_a_mask_hides_is_not_looked_at(sources: dict[str, CudaSource]) -> None:
    """A call is held to finite operands, as the framework's kernels skip tiles as well."""
    assert not any(s.state_bytes for s in sources.values())


SIZES = {
    "ViT-B/16": made(64, 197, 12, 64, packed=True),
    "BERT-base": made(16, 128, 12, 64, packed=True),
    "GPT-2": made(8, 512, 12, 64, causal=True, packed=True),
    "apart": made(8, 256, 12, 64, causal=True, dtype=F16),
    "wide heads": made(8, 200, 8, 128, packed=True),
    "wide heads, causal": made(8, 256, 8, 128, causal=True, dtype=F16, packed=True),
}


def offered(problem: Problem, facts: GpuFacts) -> list[Schedule]:
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    return list(found)


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", SIZES)
def test_offers(name: str, facts: GpuFacts) -> None:
    found = offered(SIZES[name], facts)
    wanted = {"attention", "attention_tma"} if facts is H200 else {"attention"}
    assert {s.param("template") for s in found} == wanted
    assert all(0 < (predicted_us(SIZES[name], s, facts) or 0) < 400 for s in found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_sample_compiles_without_spills(arch: str) -> None:
    facts = H200 if arch == "sm_90a" else A100
    sources = [
        CudaGenerator().emit(p, s) for n in ("ViT-B/16", "GPT-2") for p in [SIZES[n]] for s in offered(p, facts)[:2]
    ]
    compiled_well([x for x in sources if isinstance(x, CudaSource)], arch, facts)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_all_compile_without_spills(arch: str) -> None:
    facts = H200 if arch == "sm_90a" else A100
    sources = [CudaGenerator().emit(p, s) for p in SIZES.values() for s in offered(p, facts)]
    compiled_well([x for x in sources if isinstance(x, CudaSource)], arch, facts)


def test_what_float64_has_no_memory_for_is_left_to_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = made(1, 32, 2, 64)
    assert calls_own(problem.graph) and isinstance(called_attention(problem), Attention)
    for module in (called, opaque_aten):
        monkeypatch.setattr(module, "LARGEST_SCORES", 2 * 32 * 32 - 1)
    assert not calls_own(problem.graph) and isinstance(called_attention(problem), Declined)


def _changed(problem: Problem, **changes: object) -> Problem:
    """With another payload of the call."""
    graph = problem.graph

    def told(attrs: a.Attrs) -> a.Attrs:
        if not isinstance(attrs, a.OpaqueAttrs):
            return attrs
        return replace(attrs, payload=json.dumps({**json.loads(attrs.payload), **changes}))

    nodes = tuple(replace(n, attrs=told(n.attrs)) for n in graph.nodes)
    return replace(problem, graph=replace(graph, nodes=nodes))


def test_what_is_not_taken() -> None:
    plain = made(1, 32, 2, 64)
    tensors: list[object] = [{"tensor": i} for i in range(3)]
    refused = {
        "another operator": _changed(plain, op="weft::recurrent"),
        "named arguments": _changed(plain, kwargs={"scale": 1.0}),
        "fewer arguments": _changed(plain, args=[*tensors, False]),
        "an integer for a flag": _changed(plain, args=[*tensors, 0, 0.125]),
        "f32": made(1, 32, 2, 64, dtype=F32),
        "causal, more keys": made(1, 32, 2, 64, keys=48, causal=True),
        "logarithms alone": made(1, 32, 2, 64, results=(1,)),
        "another order": replace(plain, input_formats=(Format.LAST, *plain.input_formats[1:])),
    }
    for name, problem in refused.items():
        assert isinstance(called_attention(problem), Declined), name
        assert isinstance(CudaGenerator().schedules(problem, H200), Declined), name
