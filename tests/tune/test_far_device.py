"""References, inputs and comparisons never mix a GPU's tensors with the CPU's: on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.ir.random_graphs import random_graph
from tests.tune.cases import problem, single_graphs
from tests.tune.far_device import FAR, Far, FarGenerator, FarMode

from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.verify import build_reference, compare

MAKERS = (
    Prim.EXP, Prim.CAST, Prim.DIV, Prim.MOD, Prim.POW, Prim.SHL, Prim.SELECT, Prim.SLICE, Prim.PAD, Prim.GATHER,
    Prim.TAKE_ALONG, Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.ARGMAX, Prim.WINDOW_SUM, Prim.WINDOW_MAX,
    Prim.MATMUL, Prim.CONV,
)  # fmt: skip
"""Their evaluation makes tensors of its own, or differs on a GPU."""


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "Generator", FarGenerator)
    with FarMode():
        yield


def near(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, Far)
    return x.inside


def check(graph: Graph, format: Format = Format.ROW) -> int:
    """Values are those of the CPU, right outputs are accepted, wrong ones are not."""
    far, cpu = (build_reference(problem(graph, format, format), seed=3, device=d) for d in (FAR, torch.device("cpu")))
    judged = 0
    for there, here in zip(far.cases, cpu.cases, strict=True):
        for x, y in zip(there.inputs, here.inputs, strict=True):
            assert torch.equal(
                near(x).contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8)
            )
        for k, (a, b) in enumerate(zip(there.expected, here.expected, strict=True)):
            assert torch.allclose(near(a.value).double(), b.value.double(), rtol=1e-12, equal_nan=True)
            assert (a.equal, a.skip, a.finite, a.limits) == (b.equal, b.skip, b.finite, b.limits)
            got = Far(b.rounded.clone())
            assert compare(got, a, f"output {k}").verdict is Verdict.OK
            wrong = Far((~b.rounded if b.rounded.dtype == torch.bool else b.rounded + 100).clone())
            wanted = compare(wrong.inside, b, "there").verdict
            assert compare(wrong, a, "here").verdict is wanted
            judged += wanted is not Verdict.OK
    return judged


@pytest.mark.parametrize("prim", MAKERS, ids=lambda p: p.value)
def test_each_primitive(prim: Prim) -> None:
    graphs = list(single_graphs(prim))
    assert sum(check(graph) for graph in (graphs[0], graphs[-2])) > 0


@pytest.mark.parametrize("seed", range(3))
def test_random_graphs(seed: int) -> None:
    assert check(random_graph(seed), Format.LAST) >= 0


def test_the_simulation_notices_a_mixture() -> None:
    x = torch.ones(3, device=FAR)
    assert isinstance(x, Far) and isinstance(x.to("cpu"), torch.Tensor) and not isinstance(x.to("cpu"), Far)
    with pytest.raises(AssertionError, match="two devices"):
        x + torch.ones(3)


def test_inputs_are_drawn_on_the_device() -> None:
    graph = next(iter(single_graphs(Prim.MATMUL)))
    for kind in InputSet:
        assert all(isinstance(x, Far) for x in draw(graph, kind, Domain.ZERO_MEAN, seed=1, device=FAR))
