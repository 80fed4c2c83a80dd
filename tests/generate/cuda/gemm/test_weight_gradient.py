"""Gradients of convolutions' weights: products that read ranges of padded images where they lie, emulated exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact

from weft import fission
from weft.device.cuda.facts import profile
from weft.generate.cuda import templates
from weft.generate.cuda.space import pruned, space
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract

H200 = profile("h200")
VIEWS = frozenset({Prim.SLICE, Prim.TRANSPOSE})


def _graph(stride: int, channels: int = 16, outputs: int = 24) -> Graph:
    b = GraphBuilder()
    dy, x = (b.input(TensorType(DType.BF16, s)) for s in ((2, outputs, 8 // stride, 6 // stride), (2, channels, 8, 6)))
    how = {"kernel": (3, 3), "strides": (stride, stride), "pads": (1, 1), "dilations": (1, 1)}
    results = fission.apply(b, "conv_weight_gradient", [dy, x], how)
    assert not isinstance(results, Declined)
    return clean_up(b.build(results), strict=False).graph


def _of_ranges(graph: Graph) -> Iterator[Problem]:
    """Products with nothing but views in front, down to images, padded or of one phase, that have channels last."""
    for candidate in enumerate_candidates(graph).candidates:
        prims = [graph.nodes[k].prim for k in range(len(graph)) if candidate.members >> k & 1]
        images = all(graph.type_of(i).rank == 4 for i in candidate.inputs) and len(candidate.inputs) == 2
        views = prims.count(Prim.MATMUL) == 1 and set(prims) - {Prim.MATMUL} <= VIEWS
        if candidate.kind is Kind.GROUP and images and views and len(candidate.outputs) == 1:
            yield extract(graph, candidate, [Format.LAST] * 2, [Format.ROW]).problem


@pytest.mark.parametrize("stride", [1, 2])
def test_a_tap_reads_both_images_where_they_lie(stride: int) -> None:
    problems = {p.key: p for p in _of_ranges(_graph(stride))}
    made: list[tuple[Problem, CudaSource]] = []
    for problem in problems.values():
        ranked = space(problem, H200)
        if isinstance(ranked, Declined):
            continue  # several of its views are stored
        seen: set[object] = set()
        for _, schedule in pruned(problem, H200, ranked, 16):
            template = schedule.param("template")
            if template in ("mma", "wgmma") and template not in seen and len(made) < 6:
                seen.add(template)
                source = templates.emit(problem, schedule)
                assert isinstance(source, CudaSource)
                made.append((problem, source))
    assert len(made) >= 3
    kernels = Emulated([source for _, source in made])
    for problem, source in made:
        assert_exact(kernels, problem, source)
