"""Rows that lie far apart where exponentials are shifted: which are found, what is moved, and who is right there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.slow import few
from tests.tune.cases import problem
from tests.tune.test_honest import FrameworkSubject
from tests.typed import some

from weft.fission.sdpa import sdpa
from weft.fission.softmax import log_softmax, logsumexp, softmax
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.measurement import Verdict
from weft.tune.inputs import Domain, InputSet, draw, draw_rows
from weft.tune.oracle import Evaluation, Mode, decisions, evaluate
from weft.tune.rows import APART, APART_F64
from weft.tune.shifts import asks_for_empty_rows, shifts
from weft.tune.verify import Arena, Binding, Finding, build_reference, verify

FLOATS = [DType.F16, DType.BF16, DType.F32, DType.F64]


def built(b: GraphBuilder, y: NodeId | Declined) -> Graph:
    assert not isinstance(y, Declined), y
    return b.build([y])


def of_rows(rule: Callable[..., NodeId | Declined], dtype: DType, shape: tuple[int, ...], **given: object) -> Graph:
    b = GraphBuilder()
    return built(b, rule(b, b.input(TensorType(dtype, shape)), **given))


def attention(
    dtype: DType, rows: int = 24, keys: int = 40, depth: int = 16, *, mask: DType | None = None, causal: bool = False
) -> Graph:
    b = GraphBuilder()
    q, k, v = (b.input(TensorType(dtype, (2, 3, n, depth))) for n in (rows, keys, keys))
    given: dict[str, Any] = {} if mask is None else {"mask": b.input(TensorType(mask, (2, 1, rows, keys)))}
    return built(b, sdpa(b, q, k, v, causal=causal, **given))


def shifted(graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is shifted and its maxima, in float64."""
    (shift,) = shifts(graph)
    maximum = shift.maximum
    found = evaluate(
        replace(graph, outputs=(graph.nodes[maximum].inputs[0], maximum)), inputs, Mode.PRECISE, seed=0, exactness=False
    )
    assert isinstance(found, Evaluation)
    return found.outputs[0], found.outputs[1]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.value)
@pytest.mark.parametrize("rule", [softmax, log_softmax, logsumexp], ids=lambda r: r.__name__)
def test_rows_of_an_input_are_moved_and_keep_their_differences(
    rule: Callable[..., NodeId | Declined], dtype: DType
) -> None:
    axis = {"axes": (1,)} if rule is logsumexp else {"axis": 1}
    graph = of_rows(rule, dtype, (6, 9, 50), **axis)
    (moved,) = some(draw_rows(graph, Domain.ZERO_MEAN, seed=3))
    (still,) = draw(graph, InputSet.ROWS, Domain.ZERO_MEAN, seed=3)
    apart = APART_F64 if dtype is DType.F64 else APART
    by = moved.double() - still.double()
    if dtype is DType.BF16:  # keeps 8 bits of the element that lies above its row
        by = (by / apart).round() * apart
    assert set(by.unique().tolist()) == {-apart, 0.0, apart, 2 * apart}
    above = by - by.median(dim=1, keepdim=True).values
    assert int((above != 0).sum(1).max()) == 1 and 0.3 < float((above != 0).any(1).double().mean()) < 0.7
    assert min(float((above[:, k] != 0).double().mean()) for k in (0, -1)) > 0.1, "often the first or last of its row"
    flat = by.median(dim=1).values.reshape(-1)
    assert float((flat[1:] == flat[:-1]).double().mean()) < 0.6, "neighbours differ"


@pytest.mark.parametrize("seed", range(5))
def test_each_of_the_last_vector_is_the_largest_of_a_row(seed: int) -> None:
    """A kernel that left one of them out of the maximum was right on all inputs: 33 rows had others on top."""
    graph = of_rows(softmax, DType.F32, (64, 100), axis=1)
    (moved,) = some(draw_rows(graph, Domain.ZERO_MEAN, seed=seed))
    on_top = moved.max(1).values > moved.median(1).values + APART / 2
    assert {99, 98, 97, 96} <= set(moved.argmax(1)[on_top].tolist())


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.value)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_scores_are_moved_in_the_factors(dtype: DType, causal: bool) -> None:
    graph = attention(dtype, causal=causal)
    inputs = draw_rows(graph, Domain.ZERO_MEAN, seed=3)
    assert inputs is not None
    scores, top = shifted(graph, inputs)
    apart = APART_F64 if dtype is DType.F64 else APART
    levels = (top / apart).round()
    assert set(levels.unique().tolist()) == {-1.0, 0.0, 1.0, 2.0}
    lifted = (levels == 1) & (scores.isfinite().sum(-1, keepdim=True) > 1)
    rows = scores[lifted.expand(scores.shape)].view(-1, scores.shape[-1])
    differences = (rows.nan_to_num(neginf=apart) - apart).unique().tolist()
    assert set(differences) <= {0.0, -apart, -2 * apart}, "no noise that 16 bits would round"
    if not causal:
        plain = scores[(levels == 0).expand(scores.shape)].view(-1, scores.shape[-1])
        assert float((plain - plain.mean(-1, keepdim=True)).abs().max()) > 2, "the others are as they were"


def test_inputs_that_are_added_to_the_factors_are_zero() -> None:
    b = GraphBuilder()
    both = [b.input(TensorType(DType.F16, (2, 30, 16))) for _ in range(2)]
    biases = [b.input(TensorType(DType.F16, (16,)), is_weight=True) for _ in range(2)]
    q, k = (b.apply(Prim.ADD, x, y) for x, y in zip(both, biases, strict=True))
    graph = built(b, softmax(b, b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1))), axis=-1))
    inputs = draw_rows(graph, Domain.ZERO_MEAN, seed=3)
    assert inputs is not None and not inputs[2].any() and not inputs[3].any()
    assert set((shifted(graph, inputs)[1] / APART).round().unique().tolist()) == {-1.0, 0.0, 1.0, 2.0}


def test_what_cannot_be_moved_is_left_alone() -> None:
    def graph_of(make: Callable[[GraphBuilder, NodeId], NodeId | Declined]) -> Graph:
        b = GraphBuilder()
        return built(b, make(b, b.input(TensorType(DType.F32, (8, 8)))))

    other = graph_of(  # the maximum is that of something else
        lambda b, x: b.apply(Prim.EXP, b.apply(Prim.SUB, x, b.reduce(Prim.REDUCE_MAX, b.apply(Prim.ABS, x), (1,))))
    )
    bounded = graph_of(lambda b, x: softmax(b, b.apply(Prim.TANH, x), axis=1))
    itself = graph_of(lambda b, x: softmax(b, b.add(Prim.MATMUL, x, b.transpose(x, (1, 0))), axis=1))
    assert not shifts(other) and len(shifts(bounded)) == len(shifts(itself)) == 1
    for graph in (other, bounded, itself):
        assert draw_rows(graph, Domain.ZERO_MEAN, seed=0) is None
        assert InputSet.ROWS not in {c.kind for c in build_reference(problem(graph), seed=0).cases}
    assert draw_rows(of_rows(softmax, DType.F32, (8, 8), axis=1), Domain.UNIT, seed=0) is None
    assert draw_rows(of_rows(softmax, DType.F32, (0, 8), axis=1), Domain.ZERO_MEAN, seed=0) is None


@pytest.mark.parametrize("mask", [DType.BOOL, DType.F32])
def test_whether_anything_is_in_a_row_is_not_decided_by_rounding(mask: DType) -> None:
    """So masked attention is compared value by value on all sets but the adversarial one."""
    graph = attention(DType.F32, mask=mask)
    assert len(asks_for_empty_rows(graph)) == 2 and decisions(graph) == ((False, 0.0),)
    cases = {c.kind: c.expected[0] for c in build_reference(problem(graph), seed=0).cases}
    assert all((e.limits is None) == (kind is InputSet.ADVERSARIAL) for kind, e in cases.items())
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (8, 8)))
    plain = b.build([b.apply(Prim.EQ, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.EXP, x), (1,)), 0.0)])
    assert not asks_for_empty_rows(plain), "it may vanish by rounding"


# --- right ones ---------------------------------------------------------------------------------------------


class Called:
    """A function of the inputs."""

    deterministic = False
    transforms = False

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function

    def bind(self, arena: Arena, poison: int) -> Binding:
        return Binding(lambda: arena.output_tensors[0].copy_(self._function(*arena.input_tensors)), ())


def judged(graph: Graph, function: Callable[..., torch.Tensor] | None = None, *, apart: bool = True) -> Finding:
    """By all sets of finite values (as library calls are judged), or by all but the one whose rows are apart."""
    posed = problem(graph)
    reference = build_reference(posed, seed=0).finite()
    assert InputSet.ROWS in {c.kind for c in reference.cases}
    if not apart:
        reference = replace(reference, cases=tuple(c for c in reference.cases if c.kind is not InputSet.ROWS))
    subject = FrameworkSubject(graph) if function is None else Called(function)
    return verify(posed, subject, reference, {}, slow_s=60, clock=perf_counter_ns).finding


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.value)
def test_the_framework_is_right(dtype: DType) -> None:
    graphs = [
        (of_rows(softmax, dtype, (30, 70), axis=1), lambda x: F.softmax(x, 1)),
        (of_rows(softmax, dtype, (30, 70), axis=0), lambda x: F.softmax(x, 0)),
        (of_rows(log_softmax, dtype, (30, 70), axis=1), lambda x: F.log_softmax(x, 1)),
        (of_rows(logsumexp, dtype, (30, 70), axes=(1,)), lambda x: torch.logsumexp(x, 1, keepdim=True)),
    ]
    for graph, function in graphs:
        for found in (judged(graph), judged(graph, function)):
            assert found.verdict is Verdict.OK, (str(graph), found)


@pytest.mark.parametrize("dtype", few(FLOATS, 1), ids=lambda d: d.value)
@pytest.mark.parametrize("mask", ["none", "bool", "own type", "causal"])
def test_attention_of_the_framework_is_right(dtype: DType, mask: str) -> None:
    kind = {"bool": DType.BOOL, "own type": dtype}.get(mask)
    graph = attention(dtype, depth=40, mask=kind, causal=mask == "causal")

    def called(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, m, is_causal=mask == "causal")

    def math(*x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return called(*x)

    for function in (None, called, math):
        found = judged(graph, function)
        assert found.verdict is Verdict.OK, (function, found)


def powers_of_two(x: torch.Tensor) -> torch.Tensor:
    """Each operand of the difference is multiplied by itself, as kernels do whose exponentials are powers of two."""
    factor = torch.tensor(1.4426950408889634, dtype=x.dtype)
    e = torch.exp2(x * factor - x.amax(1, keepdim=True) * factor)
    return e / e.sum(1, keepdim=True)


def test_kernels_may_take_powers_of_two() -> None:
    found = judged(of_rows(softmax, DType.F32, (30, 200), axis=1), powers_of_two)
    assert found.verdict is Verdict.OK, found


# --- wrong ones ---------------------------------------------------------------------------------------------


def by(shift: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Softmax over axis 1 with a shift of one's own."""

    def run(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - shift(x))
        return e / e.sum(1, keepdim=True)

    return run


WRONG = {
    "none": torch.zeros_like,
    "another row's": lambda x: x.amax(1, keepdim=True).roll(1, 0),
    "the first row's": lambda x: x[:1].amax(1, keepdim=True),
    "of all rows": lambda x: x.amax((0, 1), keepdim=True),
    "begins with 0": lambda x: x.amax(1, keepdim=True).clamp(min=0),
    "without the last of the row": lambda x: x[:, :-1].amax(1, keepdim=True),
    "without the first of the row": lambda x: x[:, 1:].amax(1, keepdim=True),
}


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64], ids=lambda d: d.value)
@pytest.mark.parametrize("name", WRONG)
def test_another_shift_is_seen_there_alone(name: str, dtype: DType) -> None:
    graph = of_rows(softmax, dtype, (40, 30), axis=1)
    assert judged(graph, by(WRONG[name]), apart=False).verdict is Verdict.OK
    seen = judged(graph, by(WRONG[name]))
    assert seen.verdict is not Verdict.OK and "rows far apart" in seen.error, seen
