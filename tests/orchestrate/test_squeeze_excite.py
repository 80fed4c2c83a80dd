"""Squeeze-excite as one candidate: where it is offered, and where not; what it is estimated to cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.generate.cuda.conv.test_squeeze_excite import REAL, squeezed
from tests.generate.cuda.products import F16, F32, LAST, ROW
from tests.generate.cuda.test_templates import A100, H200
from torch import nn

from weft.device.cuda.facts import GpuFacts
from weft.frontends.torch import import_exported
from weft.generate.cuda import templates
from weft.generate.cuda.conv.squeeze_excite.match import SqueezeExcite, squeeze_excite
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.passes import clean_up
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import TensorType
from weft.kernels.candidate import Candidate
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate_cuda import gpu_estimate_us, gpu_lower_bound_us
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits

WITH = EnumerationLimits(attention=True)


def fused(graph: Graph, limits: EnumerationLimits = WITH) -> list[Candidate]:
    """Candidates with a sum and two products."""
    found = enumerate_candidates(graph, limits).candidates

    def counted(c: Candidate) -> Counter[Category]:
        return Counter(CATEGORY[graph.nodes[m].prim] for m in bits(c.members))

    return [c for c in found if counted(c)[Category.REDUCE] == 1 and counted(c)[Category.LINEAR] == 2]


class Excited(nn.Module):
    """A grouped convolution, squeeze-excite and a 1x1 convolution, as in RegNetY."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels // 24)
        self.one, self.two = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)
        self.last = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled in between."""
        x = self.conv(x).relu()
        y = self.two(self.one(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return torch.as_tensor(self.last(x * y))


def test_a_block_of_regnet_has_one_candidate_that_the_template_takes() -> None:
    with torch.no_grad():
        program = torch.export.export(Excited(72, 18).eval().half(), (torch.randn(1, 72, 8, 8).half(),))
    graph = clean_up(import_exported(program).graph, strict=False).graph
    (found,) = fused(graph)
    (sink,) = found.outputs
    assert graph.nodes[sink].prim is Prim.MUL and graph.type_of(sink).shape == (1, 72, 8, 8)
    formats = tuple(LAST if graph.type_of(v).shape == (1, 72, 8, 8) else ROW for v in found.inputs)
    problem = extract(graph, found, formats, (LAST,)).problem
    assert isinstance(squeeze_excite(problem), SqueezeExcite)
    offered = templates.schedules(problem, H200)
    assert not isinstance(offered, Declined)
    assert {s.param("template") for s in offered} == {"squeeze_excite"}


def test_there_is_none_on_a_cpu() -> None:
    graph = squeezed(1, 32, 5, 5, 9, constants=True).graph
    assert len(fused(graph)) == 1
    assert fused(graph, EnumerationLimits()) == []


def changed(change: Callable[[GraphBuilder, NodeId, NodeId, NodeId], list[NodeId]]) -> Graph:
    """Outputs of an image, its mean and its gate."""
    b = GraphBuilder()
    x = b.apply(Prim.MAX, b.input(TensorType(F16, (1, 32, 4, 4))), 0.0)
    mean = y = b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((2, 3)))
    attrs = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
    for shape in ((8, 32, 1, 1), (32, 8, 1, 1)):
        y = b.add(Prim.CONV, y, b.input(TensorType(F16, shape), is_weight=True), attrs=attrs)
    return b.build(change(b, x, mean, y))


OTHERS: dict[str, Callable[[GraphBuilder, NodeId, NodeId, NodeId], list[NodeId]]] = {
    "the gate is read elsewhere": lambda b, x, m, y: [b.apply(Prim.MUL, x, y), b.apply(Prim.MAX, y, 1.0)],
    "the gate is a result": lambda b, x, m, y: [b.apply(Prim.MUL, x, y), y],
    "the mean is a result": lambda b, x, m, y: [b.apply(Prim.MUL, x, y), m],
    "another image is scaled": lambda b, x, m, y: [b.apply(Prim.MUL, b.apply(Prim.ADD, x, 1.0), y), x],
    "nothing is scaled": lambda b, x, m, y: [y, x],
    "two images are scaled": lambda b, x, m, y: [b.apply(Prim.MUL, x, y), b.apply(Prim.ADD, x, y)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_another_graph_is_no_candidate(name: str) -> None:
    assert fused(changed(OTHERS[name])) == []


def test_the_same_without_a_change_is_one() -> None:
    assert len(fused(changed(lambda b, x, m, y: [b.apply(Prim.MUL, x, y)]))) == 1


@pytest.mark.parametrize("gate", ["sigmoid", "hard"])
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_an_activation_may_read_its_operand_twice(act: str, gate: str) -> None:
    graph = squeezed(2, 32, 5, 5, 9, act=act, gate=gate, constants=True).graph
    (found,) = fused(graph)
    assert found.outputs == graph.outputs
    assert isinstance(squeeze_excite(squeezed(2, 32, 5, 5, 9, act=act, gate=gate)), SqueezeExcite)


def test_f32_is_no_candidate() -> None:
    assert fused(squeezed(1, 32, 5, 5, 9, dtype=F32, constants=True).graph) == []


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", REAL)
def test_the_estimate_lies_above_the_bound_and_near_the_model(name: str, facts: GpuFacts) -> None:
    estimate, bound = gpu_estimate_us(REAL[name], facts), gpu_lower_bound_us(REAL[name], facts)
    assert bound < estimate < 20
    offered = templates.schedules(REAL[name], facts)
    if not isinstance(offered, Declined) and facts is H200:
        model = min(predicted_us(REAL[name], s, facts) or 0.0 for s in offered)
        assert 0.5 < estimate / model < 2
