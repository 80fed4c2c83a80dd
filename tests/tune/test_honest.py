"""Right kernels are not rejected: every primitive and random graphs, run by the framework's own operators."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns

import pytest
import torch
from tests.ir.random_graphs import random_graph
from tests.slow import few
from tests.tune.cases import problem, single_graphs
from tests.typed import some

from weft.generate.library.execute import TORCH_DTYPE, BoundCall
from weft.generate.library.translate import Program
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import Schedule
from weft.tune.bulk import classes
from weft.tune.inputs import InputSet
from weft.tune.verify import (
    Arena,
    Binding,
    Buffer,
    Expected,
    Verified,
    _clear_of_overflow,
    build_reference,
    compare,
    verify,
)


class FrameworkSubject:
    """The graph primitive by primitive through the framework, in its own types."""

    deterministic = False
    transforms = False

    def __init__(self, graph: Graph) -> None:
        self._weights: dict[int, torch.Tensor] = {}
        program = Program(graph)
        for node, n in enumerate(graph.nodes):
            if n.prim is Prim.CONSTANT:
                position = len(graph.inputs) + len(self._weights)
                program.bind_weight(node, position)
                data = torch.tensor(graph.constant(node))
                self._weights[position] = data.to(torch.bfloat16) if n.type.dtype is DType.BF16 else data
        self._call = program.finish(Schedule("library"))

    def bind(self, arena: Arena, poison: int) -> Binding:
        bound = BoundCall(self._call, self._weights)

        def run() -> None:
            for result, out in zip(bound.run(arena.input_tensors), arena.output_tensors, strict=True):
                out.copy_(result)

        return Binding(run, ())


def judge(graph: Graph, format: Format = Format.ROW) -> Verified:
    posed = problem(graph, format, format)
    return verify(posed, FrameworkSubject(graph), build_reference(posed, seed=0), {}, slow_s=60, clock=perf_counter_ns)


@pytest.mark.parametrize("seed", range(80))
def test_random_graphs_pass(seed: int) -> None:
    found = judge(random_graph(1000 + seed), Format.LAST if seed % 2 else Format.ROW).finding
    assert found.verdict is Verdict.OK, found


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_next_to_an_overflow_inside_rounding_decides(dtype: DType) -> None:
    """A scaled value that is just finite may be infinite in a right kernel, whose order or functions differ a little.

    Sines of 30 times their argument, as in a network of sines: gradients grow by 30 a layer, and a sum over rows takes
    an infinite one into every result of its column.
    """
    largest = torch.finfo(TORCH_DTYPE[dtype]).max
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (32,)))
    third = b.apply(Prim.MUL, x, b.scalar(1 / 3, dtype))  # rounded, so that nothing is exact

    def scaled(most: float) -> NodeId:
        """Of magnitude `most` for 2, and small again in the end."""
        steep = b.apply(Prim.MUL, third, b.scalar(1.5 * 256, dtype))
        return b.apply(Prim.MUL, b.apply(Prim.MUL, steep, b.scalar(most / 256, dtype)), b.scalar(2.0**-12, dtype))

    outputs = [scaled(part * largest) for part in (0.98, 1.5, 0.1)]
    whole = build_reference(problem(b.build(outputs)), seed=0).cases[0]
    given = whole.inputs[0].abs()
    assert whole.kind is InputSet.INTEGERS and bool((given == 2).any())
    for want, doubt in zip(whole.expected, (given == 2, given >= 1, given < 0), strict=True):
        assert (torch.ones_like(doubt) if want.judged is None else want.judged).tolist() == (~doubt).tolist()
        got = torch.where(doubt, want.rounded * torch.inf, want.rounded)
        assert compare(got, want, "here").verdict is Verdict.OK
        got[int((~doubt).nonzero()[0])] = torch.inf
        assert compare(got, want, "here").verdict is Verdict.NAN_CLASS


SKIPPED = {Prim.INPUT, Prim.CONSTANT, Prim.OPAQUE}


@pytest.mark.parametrize("prim", few([p for p in Prim if p not in SKIPPED], 24), ids=lambda p: p.value)
def test_single_primitives_pass(prim: Prim) -> None:
    for graph in single_graphs(prim):
        try:
            found = judge(graph).finding
        except (RuntimeError, NotImplementedError):
            continue  # this torch lacks the operator for the type
        assert found.verdict is Verdict.OK, (str(graph), found)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 65520.0), (torch.bfloat16, 3.3961775292304783e38)])
def test_rounding_may_decide_what_is_just_infinite_and_nothing_else(dtype: torch.dtype, least: float) -> None:
    """A right sum in another order may be infinite where the exact one is the largest number, or the reverse."""
    kind = DType.F16 if dtype is torch.float16 else DType.BF16
    factors = (1 - 1e-6, 1 + 1e-6, -1 + 1e-6, 0.97, 1.03, 1e-3, 0.0)
    value = torch.tensor([least * f for f in factors], dtype=torch.float64)
    exact = value.to(dtype)
    assert exact[0].isfinite() and exact[1].isinf() and exact[3].isfinite() and exact[4].isinf()
    assert some(_clear_of_overflow(value, exact, kind, None)).tolist() == [False] * 3 + [True] * 4
    known = torch.tensor([True] * 5 + [False, True])
    assert some(_clear_of_overflow(value, exact, kind, known)).tolist() == [False] * 3 + [True, True, False, True]
    finite = value[3:4]
    assert _clear_of_overflow(finite, finite.to(dtype), kind, None) is None

    want = Expected(
        value, exact, False, None, _clear_of_overflow(value, exact, kind, None), False, False, classes(exact)
    )
    other = exact.clone()
    other[0], other[1] = float("inf"), torch.finfo(dtype).max
    assert compare(other, want, "here").verdict is Verdict.OK
    for place, wrong in ((3, float("inf")), (4, torch.finfo(dtype).max), (6, float("nan"))):
        broken = exact.clone()
        broken[place] = wrong
        assert compare(broken, want, "here").verdict is Verdict.NAN_CLASS


class Counted:
    """Another subject, with how often it was bound."""

    deterministic = transforms = False

    def __init__(self, subject: FrameworkSubject, scratch: int) -> None:
        self._subject, self._scratch, self.bound = subject, scratch, 0

    def bind(self, arena: Arena, poison: int) -> Binding:
        self.bound += 1
        found = self._subject.bind(arena, poison)
        return replace(found, scratch=tuple(Buffer(8, 0) for _ in range(self._scratch)))


@pytest.mark.parametrize(("scratch", "times"), [(0, 3), (1, 6)])
def test_weights_are_prepared_once_per_set_where_nothing_is_poisoned(scratch: int, times: int) -> None:
    graph = next(single_graphs(Prim.MATMUL))
    posed = problem(graph, Format.ROW, Format.ROW)
    subject = Counted(FrameworkSubject(graph), scratch)
    found = verify(posed, subject, build_reference(posed, seed=0), {}, slow_s=60, clock=perf_counter_ns)
    assert found.finding.verdict is Verdict.OK and subject.bound == times


def test_inputs_are_remembered_without_a_copy_where_they_lie_as_they_were_drawn() -> None:
    posed = problem(next(single_graphs(Prim.MATMUL)), Format.ROW, Format.ROW)
    case = build_reference(posed, seed=0).timed
    arena = Arena(posed, case.inputs)
    assert [c.data_ptr() for c in arena.copies] == [x.data_ptr() for x in case.inputs]
    assert arena.inputs_unmodified()
    arena.input_tensors[0].view(-1)[0] += 1
    assert not arena.inputs_unmodified()
