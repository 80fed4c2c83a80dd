"""The gradients of attention as a kernel: near float64 in the emulation, what is taken and what is left."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.cases.attention_gradient import gradient_problem
from tests.generate.cuda.calls_of_attention import drawn, exact
from tests.generate.cuda.products import F16, F32
from tests.generate.cuda.tensor_emulator import Emulated, emitted, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import few
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.attention.gradient import kernel, match
from weft.generate.cuda.attention.gradient.kernel import GradientConfig
from weft.generate.cuda.attention.gradient.match import AttentionGradient, attention_gradient
from weft.generate.cuda.predict import predicted_us
from weft.generate.library import opaque_aten, trained_attention
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule
from weft.tune.oracle import calls_own
from weft.tune.verify import build_reference

CASES: dict[str, tuple[Problem, GradientConfig]] = {
    "odd": (gradient_problem(2, 37, 2, 64), GradientConfig(3, 2)),
    "causal": (gradient_problem(1, 45, 2, 64, causal=True, dtype=F16), GradientConfig(4, 2)),
    "whole tiles": (gradient_problem(1, 32, 1, 64, dtype=F16), GradientConfig(4, 1)),
    "more keys": (gradient_problem(1, 20, 2, 64, keys=50, scale=0.2), GradientConfig(6, 2)),
    "fewer keys": (gradient_problem(2, 50, 1, 64, keys=9), GradientConfig(5, 2)),
    "wide heads": (gradient_problem(1, 33, 1, 128, results=(2, 0)), GradientConfig(6, 1)),
    "flat": (gradient_problem(1, 17, 3, 64, flat=True), GradientConfig(4, 2)),
    "one tensor": (gradient_problem(1, 32, 2, 64, one=True, results=(1,)), GradientConfig(3, 4)),
    "packed": (gradient_problem(2, 37, 2, 64, packed=True, joined=True), GradientConfig(3, 2)),
    "packed, causal": (gradient_problem(1, 45, 3, 64, packed=True, causal=True, dtype=F16), GradientConfig(4, 2)),
    "packed, wide heads": (gradient_problem(1, 33, 2, 128, packed=True, joined=True), GradientConfig(6, 1)),
    "joined": (gradient_problem(2, 20, 1, 64, joined=True, results=(2, 0, 1), flat=True), GradientConfig(4, 2)),
    "of Q alone": (gradient_problem(1, 19, 2, 64, causal=True, results=(0,)), GradientConfig(4, 2)),
}


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return emitted(CASES)


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("name", CASES)
def test_near_float64(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    inputs = drawn(problem)
    unit = 2.0**-11 if problem.graph.type_of(problem.graph.inputs[0]).dtype is F16 else 2.0**-8
    for got, want in zip(run(kernels, problem, sources[name], inputs), exact(problem, inputs), strict=True):
        assert np.linalg.norm(got - want) <= unit * np.linalg.norm(want)
        assert np.abs(got - want).max() <= 4 * unit * np.abs(want).max()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["odd", "causal"])
def test_warps_may_be_far_ahead(name: str, order: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem, inputs = CASES[name][0], drawn(CASES[name][0], 1)
    first, again = (run(kernels, problem, sources[name], inputs, order=k) for k in (0, order))
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["odd", "causal", "wide heads", "packed"])
def test_within_what_a_kernel_is_held_to(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Of operands that belong together no more than of the worst case's: the verifier's."""
    problem = CASES[name][0]
    reference = build_reference(problem, seed=0)
    assert not reference.opaque and len(reference.cases) == 2
    for case in reference.cases:
        got = run(kernels, problem, sources[name], [x.float().numpy() for x in case.inputs])
        for expected, found in zip(case.expected, got, strict=True):
            off = np.abs(found - expected.value.numpy())
            assert expected.limits is not None and not expected.equal
            assert 0 < np.sqrt((off**2).mean()) <= expected.limits.rmse and off.max() <= expected.limits.max


def test_the_operator_itself_gives_the_same() -> None:
    problem = CASES["causal"][0]
    given = [torch.from_numpy(np.array(x)) for x in drawn(problem)]
    found = trained_attention.attention_backward(*(x.double() for x in given), True, 0.125)
    for got, want in zip(found, exact(problem, [x.numpy() for x in given]), strict=True):
        assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-9)
    halves = [x.half() if x.dim() == 4 else x for x in given]
    for got, want in zip(trained_attention.attention_backward(*halves, True, 0.125), found, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 2.0**-10, "what it rounds is what kernels round"


SIZES = {
    "ViT-B/16": gradient_problem(64, 197, 12, 64),
    "BERT-base": gradient_problem(16, 128, 12, 64),
    "causal": gradient_problem(8, 256, 12, 64, causal=True, dtype=F16),
    "wide heads": gradient_problem(8, 128, 8, 128),
    "ViT-B/16, packed": gradient_problem(64, 197, 12, 64, packed=True, joined=True),
}


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", SIZES)
def test_offers(name: str, facts: GpuFacts) -> None:
    m = attention_gradient(SIZES[name])
    assert isinstance(m, AttentionGradient)
    found = CudaGenerator().schedules(SIZES[name], facts)
    assert not isinstance(found, Declined)
    assert {s.param("template") for s in found} == {"attention_gradient"}
    for s in (GradientConfig.of(x) for x in found):
        assert s.ctas * (kernel.shared_bytes(m) + facts.shared_reserved) <= facts.shared_per_sm
        assert s.ctas * s.warps <= kernel.MOST_WARPS[m.width]
        assert 0 < (predicted_us(SIZES[name], s.schedule(), facts) or 0) < 400


@pytest.mark.parametrize("arch", few(["sm_90a", "sm_80"], 1))
def test_they_compile_without_spills(arch: str) -> None:
    facts = H200 if arch == "sm_90a" else A100
    made = [CudaGenerator().emit(p, s) for p in SIZES.values() for s in _schedules(p, facts)]
    compiled_well([x for x in made if isinstance(x, CudaSource)], arch, facts)


def _schedules(problem: Problem, facts: GpuFacts) -> list[Schedule]:
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined)
    return list(found)


def test_more_positions_than_shared_memory_holds_are_left_to_libraries() -> None:
    assert isinstance(CudaGenerator().schedules(gradient_problem(1, 512, 2, 64), H200), Declined)
    assert isinstance(CudaGenerator().schedules(gradient_problem(1, 384, 2, 64), A100), Declined)
    assert not isinstance(CudaGenerator().schedules(gradient_problem(1, 384, 2, 64), H200), Declined)


def test_what_float64_has_no_memory_for_is_left_to_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that nothing was compared with would be in plans."""
    problem = gradient_problem(1, 32, 2, 64)
    assert calls_own(problem.graph) and not isinstance(attention_gradient(problem), Declined)
    for module in (match, opaque_aten):
        monkeypatch.setattr(module, "LARGEST_SCORES", 2 * 32 * 32 - 1)
    assert not calls_own(problem.graph) and isinstance(attention_gradient(problem), Declined)
    assert build_reference(problem, seed=0).opaque
    assert isinstance(attention_gradient(gradient_problem(1 << 12, 256, 8, 64)), Declined)


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
    plain = gradient_problem(1, 32, 2, 64)
    tensors = json.loads(_payload(plain.graph))["args"]
    refused = {
        "another operator": _changed(plain, op="weft::recurrent_backward"),
        "named arguments": _changed(plain, kwargs={"scale": 1.0}),
        "fewer arguments": _changed(plain, args=tensors[:7]),
        "an integer for a flag": _changed(plain, args=[*tensors[:6], 0, 0.125]),
        "f32": gradient_problem(1, 32, 2, 64, dtype=F32),
        "40 elements of a head": gradient_problem(1, 32, 2, 40),
        "causal, more keys": gradient_problem(1, 32, 2, 64, keys=48, causal=True),
        "another order": replace(plain, input_formats=(Format.LAST, *plain.input_formats[1:])),
    }
    for name, problem in refused.items():
        assert isinstance(attention_gradient(problem), Declined), name
        assert isinstance(CudaGenerator().schedules(problem, H200), Declined), name


def _payload(graph: Graph) -> str:
    attrs = graph.nodes[graph.outputs[0]].attrs
    assert isinstance(attrs, a.OpaqueAttrs)
    return attrs.payload
