"""Convolutions with pools as one candidate: where it is offered, and where not; what it is estimated to cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from benchmarks.models import NETWORKS
from tests.generate.cuda.products import LAST, ROW, convolution, pooled_convolution
from tests.generate.cuda.test_templates import A100, H200
from torch import nn

from weft.frontends.torch import import_exported
from weft.generate.cuda import templates
from weft.generate.cuda.conv.pooled.match import Pooled, pooled
from weft.ir.declined import Declined
from weft.ir.graph import Graph, bits
from weft.ir.passes import clean_up
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Candidate, Problem
from weft.kernels.source import CudaSource
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate_cuda import gpu_estimate_us, gpu_lower_bound_us
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits
from weft.pipeline.problems import collect

WITH = EnumerationLimits(attention=True)


def fused(graph: Graph, limits: EnumerationLimits = WITH) -> list[Candidate]:
    found = enumerate_candidates(graph, limits).candidates
    kinds = {Category.LINEAR, Category.WINDOW}
    return [c for c in found if kinds <= {CATEGORY[graph.nodes[m].prim] for m in bits(c.members)}]


def extracted(graph: Graph, candidate: Candidate) -> Problem:
    formats = tuple(LAST if graph.nodes[v].prim is Prim.INPUT else ROW for v in candidate.inputs)
    return extract(graph, candidate, formats, (LAST,)).problem


def test_a_convolution_and_its_pool_are_one_candidate_and_a_problem_of_the_template() -> None:
    graph = pooled_convolution(1, 16, 9, 9, 24, 3, 1, 1, residual=True, behind=True, constants=True).graph
    (found,) = fused(graph)
    assert Counter(graph.nodes[m].prim for m in bits(found.members)) == Counter(
        {Prim.CONV: 1, Prim.ADD: 4, Prim.MAX: 2, Prim.WINDOW_MAX: 1}
    )
    assert found.outputs == graph.outputs
    assert isinstance(pooled(extracted(graph, found)), Pooled)


def test_averages_hold_the_casts_around_them() -> None:
    graph = pooled_convolution(1, 16, 9, 9, 24, 3, 1, 1, mean=True, constants=True).graph
    (found,) = fused(graph)
    assert sum(graph.nodes[m].prim is Prim.CAST for m in bits(found.members)) == 2
    assert isinstance(pooled(extracted(graph, found)), Pooled)


@pytest.mark.parametrize(
    "graph",
    [
        pooled_convolution(1, 32, 9, 9, 24, 3, 1, 1, shared=True).graph,
        pooled_convolution(1, 32, 9, 9, 32, 3, 1, 1, groups=4).graph,
        pooled_convolution(1, 32, 9, 9, 24, 1).graph,
        convolution(1, 32, 9, 9, 24, 3, 1, 1).graph,
    ],
    ids=["read by others", "groups", "1x1", "no pool"],
)
def test_where_it_is_not_offered(graph: Graph) -> None:
    assert fused(graph) == []


def test_not_without_the_limit() -> None:
    assert fused(pooled_convolution(1, 32, 9, 9, 24, 3, 1, 1).graph, EnumerationLimits()) == []


def test_the_estimate_knows_what_is_computed_twice() -> None:
    """Where windows overlap, a tile computes its border again, not each place of each window."""
    apart = pooled_convolution(16, 64, 113, 113, 64, 3, 1, 1, pool=(2, 2, 0))
    over = pooled_convolution(16, 64, 113, 113, 64, 3, 1, 1, pool=(3, 2, 0))
    first, second = gpu_estimate_us(apart, H200), gpu_estimate_us(over, H200)
    assert first < second < 1.3 * first
    for problem, us in ((apart, first), (over, second)):
        assert gpu_lower_bound_us(problem, H200) < us


def network(module: nn.Module, size: int) -> Graph:
    """The graph of a network of zeros in f16, at a small size: its weights were never made."""
    module = module.to_empty(device="cpu").half().eval()
    for parameter in (*module.parameters(), *module.buffers()):
        parameter.data.zero_()
    with torch.no_grad():
        program = torch.export.export(module, (torch.zeros(1, 3, size, size, dtype=torch.half),))
    return clean_up(import_exported(program).graph, strict=False).graph


def layers(name: str) -> Sequence[nn.Module]:
    with torch.device("meta"):
        return list(NETWORKS[name].build().children())


@pytest.mark.parametrize(
    ("name", "count", "size", "pools"),
    [("vgg16", 31, 64, [(64, 32), (128, 16), (256, 8), (512, 4), (512, 2)]), ("resnet50", 2, 64, [(64, 16)])],
)
def test_networks_have_them(name: str, count: int, size: int, pools: list[tuple[int, int]]) -> None:
    """All convolutions of VGG-16 in front of pools, and ResNet-50's first, are candidates with kernels."""
    graph = network(nn.Sequential(*layers(name)[:count]), size)
    found = fused(graph)
    assert [graph.type_of(c.outputs[0]).shape[1:3] for c in found] == pools
    problems = [e.problem for e in collect(graph, found, Alternatives(graph, {}), A100).tasks.values()]
    last = [p for p in problems if set(p.output_formats) == {LAST}]
    assert len(last) == len(pools)
    for problem in last:
        schedules = templates.schedules(problem, A100)
        assert not isinstance(schedules, Declined), schedules.reason
        source = templates.emit(problem, schedules[0])
        assert isinstance(source, CudaSource)
        assert len(source.launches) == 1
