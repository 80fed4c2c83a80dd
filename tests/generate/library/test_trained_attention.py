"""Attention of a training step as one call: values and gradients beside torch's, in a step, and from a payload."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.cases.attention_gradient import gradient_problem
from benchmarks.cases.called_attention import called_attention_problem
from tests.generate.cuda.calls_of_attention import drawn as drawn_operands
from tests.generate.cuda.calls_of_attention import exact
from torch.nn import functional

from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.frontends.torch import importer
from weft.generate.library import LibraryGenerator, opaque_aten, trained_attention
from weft.generate.library.deterministic import deterministic
from weft.generate.library.execute import TORCH_DTYPE, BoundCall
from weft.generate.library.opaque_aten import run_aten
from weft.ir.attrs import OpaqueAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import LibraryCall
from weft.tune.oracle import Mode, evaluate

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Tensors = list[torch.Tensor]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((got.double() - want.double()).norm() <= 16 * torch.finfo(dtype).eps * want.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_torch(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, g = drawn(*[(2, 9, 3, 16)] * 4, dtype=dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    turned = [x.transpose(1, 2) for x in exact]
    want = functional.scaled_dot_product_attention(turned[0], turned[1], turned[2], is_causal=causal, scale=0.3)
    want = want.transpose(1, 2)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, sums = trained_attention.attention(given[0], given[1], given[2], causal, 0.3)
    assert out.dtype is dtype and out.is_contiguous() and near(out, want, dtype)
    assert sums.shape == (2, 3, 9) and sums.dtype is (dtype if dtype is torch.float64 else torch.float32)
    mine = torch.autograd.grad(out, given, g)
    theirs = torch.autograd.grad(want, exact, g.double())
    for got, right in zip(mine, theirs, strict=True):
        assert got.dtype is dtype and near(got, right, dtype)


def test_keys_may_be_more_than_queries() -> None:
    q, k, v = drawn((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8), dtype=torch.float64)
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    want = functional.scaled_dot_product_attention(a, b, c)
    torch.testing.assert_close(trained_attention.attention(q, k, v, False, 8**-0.5)[0].transpose(1, 2), want)


def test_what_tensors_without_memory_give_is_what_real_ones_do() -> None:
    for dtype in DTYPES:
        given = drawn((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8), dtype=dtype)
        out, sums = trained_attention.attention(*given, False, 0.3)
        real = (out, sums, *trained_attention.attention_backward(out, *given, out, sums, False, 0.3))
        meta = [x.to("meta") for x in given]
        out, sums = trained_attention.attention(*meta, False, 0.3)
        fake = (out, sums, *trained_attention.attention_backward(out, *meta, out, sums, False, 0.3))
        assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in fake]


@pytest.mark.parametrize(
    ("shapes", "dtype", "device"),
    [
        ([(2, 3, 9, 16)] * 3, torch.bfloat16, "cpu"),
        ([(2, 3, 9, 16)] * 3, torch.float32, "cuda"),
        ([(2, 3, 9, 12)] * 3, torch.bfloat16, "cuda"),
        ([(2, 3, 9, 256)] * 3, torch.bfloat16, "cuda"),
        ([(2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 32)], torch.bfloat16, "cuda"),
        ([(2, 3, 9, 16), (2, 1, 9, 16), (2, 1, 9, 16)], torch.bfloat16, "cuda"),
        ([(3, 9, 16)] * 3, torch.bfloat16, "cuda"),
    ],
)
def test_kernels_are_asked_only_for_what_they_have(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str
) -> None:
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(s, dtype=dtype, device=device) for s in shapes)
        assert not trained_attention.is_taken(q, k, v)
        q, k, v = (torch.empty(2, 3, 9, 16, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        assert trained_attention.is_taken(q, k, v)


def payload(op: str) -> str:
    args = [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}, True, 0.3]
    return json.dumps({"op": op, "overload": "", "args": args, "kwargs": {}})


def test_a_payload_may_name_it_and_nothing_else_of_ours() -> None:
    given = drawn(*[(2, 9, 3, 16)] * 3, dtype=torch.float32)
    found = run_aten(payload("weft::attention"), given)
    assert torch.equal(found[0], trained_attention.attention(*given, True, 0.3)[0])
    with pytest.raises(ArtifactError, match="not admitted"):
        run_aten(payload("weft::other"), given)


def flags() -> tuple[bool, bool, bool]:
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, fills


def test_what_is_imported_is_what_payloads_may_name() -> None:
    assert {f"{name.replace('::', '.')}.default" for name in opaque_aten.OWN} == importer._OWN


def test_flags_are_as_they_were_whatever_is_raised() -> None:
    before, inside = flags(), []

    def fails() -> None:
        with deterministic(warn_only=False):
            inside.append(flags())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert inside == [(True, False, False)] and flags() == before


def graph_of(op: str) -> Graph:
    b = GraphBuilder()
    kind = TensorType(DType.BF16, (2, 9, 3, 16))
    q, k, v = (b.input(kind, name) for name in "qkv")
    types = kind, TensorType(DType.F32, (2, 3, 9))
    attrs = [OpaqueAttrs("aten", op, payload(op), n, types) for n in range(2)]
    return b.build([b.add(Prim.OPAQUE, q, k, v, attrs=x) for x in attrs])


def test_the_judge_of_whole_plans_computes_it_in_float64() -> None:
    graph = graph_of("weft::attention")
    given = drawn(*[(2, 9, 3, 16)] * 3, dtype=torch.bfloat16)
    found = evaluate(graph, given, Mode.PRECISE, seed=0, calls=True)
    assert not isinstance(found, Declined)
    exact = trained_attention.attention(*(x.double() for x in given), True, 0.3)
    assert all(torch.equal(got, want) for got, want in zip(found.outputs, exact, strict=True))
    assert found.outputs[0].dtype is torch.float64 and found.exact == (False, False)
    assert isinstance(evaluate(graph, given, Mode.PRECISE, seed=0), Declined), (
        "kernels may differ where it is not finite"
    )
    assert isinstance(evaluate(graph_of("aten::other"), given, Mode.PRECISE, seed=0, calls=True), Declined)


def test_a_call_reads_slices_where_they_lie() -> None:
    for problem in (called_attention_problem(2, 9, 3, 64, packed=True), gradient_problem(2, 9, 3, 64, packed=True)):
        found = LibraryGenerator().schedules(problem, GpuFacts())
        assert not isinstance(found, Declined) and [s.param("form") for s in found] == ["primitives"]
        call = LibraryGenerator().emit(problem, found[0])
        assert isinstance(call, LibraryCall)
        targets = [x.target for x in call.run]
        assert set(targets) <= {"aten.slice.Tensor", "aten.reshape.default", "weft.opaque_aten", "weft.result"}
        given = drawn_operands(problem)
        types = [TORCH_DTYPE[problem.graph.type_of(i).dtype] for i in problem.graph.inputs]
        outputs = BoundCall(call, {}).run([torch.from_numpy(x).to(t) for x, t in zip(given, types, strict=True)])
        for got, want in zip(outputs, exact(problem, given), strict=True):
            assert near(got, torch.from_numpy(want), torch.bfloat16)
    joined = gradient_problem(2, 9, 3, 64, packed=True, joined=True)
    assert isinstance(LibraryGenerator().schedules(joined, GpuFacts()), Declined)
