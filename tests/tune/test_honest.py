"""Right kernels are not rejected: every primitive and random graphs, run by the framework's own operators."""

from __future__ import annotations

from time import perf_counter_ns

import pytest
import torch
from tests.ir.random_graphs import random_graph
from tests.tune.cases import problem, single_graphs

from weft.generate.library.execute import BoundCall
from weft.generate.library.translate import Program
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import Schedule
from weft.tune.verify import Arena, Binding, Verified, build_reference, verify


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
        self._call = program.finish(Schedule("library"), in_place=False)

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


SKIPPED = {Prim.INPUT, Prim.CONSTANT, Prim.OPAQUE}


@pytest.mark.parametrize("prim", [p for p in Prim if p not in SKIPPED], ids=lambda p: p.value)
def test_single_primitives_pass(prim: Prim) -> None:
    for graph in single_graphs(prim):
        try:
            found = judge(graph).finding
        except (RuntimeError, NotImplementedError):
            continue  # this torch lacks the operator for the type
        assert found.verdict is Verdict.OK, (str(graph), found)
