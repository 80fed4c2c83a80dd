"""Products of 8-bit floats as one call of the framework."""

from __future__ import annotations

import pytest
import torch
from tests.generate.cuda.gemm.test_float8 import BF16, E4, E5, F16, F32, product
from tests.typed import narrow

from weft.device.cuda.facts import GpuFacts
from weft.frontends.torch.dtypes import from_numpy
from weft.generate.library import LibraryGenerator
from weft.generate.library.execute import BoundCall
from weft.ir.attrs import InputAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate, round_to
from weft.ir.types import TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall, Schedule

SCALED = Schedule("library", (("form", "scaled_mm"),))


@pytest.mark.parametrize(
    "problem",
    [
        product(32, 48, 64),
        product(16, 32, 64, E4, E5, BF16, scales="none"),
        product(16, 32, 64, E5, E4, F32, weight=True),
        product(16, 32, 64, weight=True, turned=False),
    ],
)
def test_it_means_the_problem(problem: Problem) -> None:
    listed = LibraryGenerator().schedules(problem, GpuFacts())
    assert not isinstance(listed, Declined)
    assert SCALED in listed
    call = LibraryGenerator().emit(problem, SCALED)
    assert isinstance(call, LibraryCall), call
    assert [s.target for s in call.run].count("aten._scaled_mm.default") == 1
    chance = torch.Generator().manual_seed(0)
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    arrays = [round_to(torch.randn(t.shape, generator=chance).numpy(), t.dtype) for t in types]
    tensors = [from_numpy(x, t.dtype) for x, t in zip(arrays, types, strict=True)]
    given = [narrow(InputAttrs, problem.graph.nodes[n].attrs) for n in problem.graph.inputs]
    weights = {k: tensors[k] for k, x in enumerate(given) if x.is_weight}
    (found,) = BoundCall(call, weights).run(tensors)
    (wanted,) = evaluate(problem.graph, arrays)
    out = problem.graph.type_of(problem.graph.outputs[0]).dtype
    torch.testing.assert_close(found, from_numpy(wanted, out), rtol=2 * torch.finfo(found.dtype).eps, atol=1e-4)


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (product(16, 32, 64, E5, E5), "two e5m2"),
        (product(16, 24, 64), "no multiple of 16"),
        (product(16, 32, 64, turned=False), "along the sum"),
        (product(16, 32, 64, scales="rows"), "one number"),
        (product(16, 32, 64, bias=F16), "behind the product"),
        (product(16, 32, 64, out=E4), "a result of f8e4m3"),
        (product(16, 32, 64, batch=2), "not one product"),
    ],
)
def test_what_it_is_not_says_why(problem: Problem, part: str) -> None:
    found = LibraryGenerator().emit(problem, SCALED)
    assert isinstance(found, Declined)
    assert part in found.reason


def test_other_products_are_left_alone() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(F16, (16, 32))), b.input(TensorType(F16, (32, 16)))
    graph = b.build([b.add(Prim.MATMUL, x, w)])
    problem = Problem(graph, str(graph), (Format.ROW,) * 2, (Format.ROW,))
    listed = LibraryGenerator().schedules(problem, GpuFacts())
    assert not isinstance(listed, Declined)
    assert SCALED not in listed
    assert isinstance(LibraryGenerator().emit(problem, SCALED), Declined)
