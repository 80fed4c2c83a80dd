"""How many threads run a plan on the CPU is a choice of the plan: small ones are also timed on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.runtime.plans import PRIMITIVES, library_plan

from weft.device.facts import CpuFacts
from weft.errors import ArtifactError
from weft.generate.cpp.templates.text import team
from weft.generate.library import execute
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import CallStep, LibraryCall, Ref
from weft.platform.cpu import ALONE_US, Cpu
from weft.runtime.artifact import plan_from_json, plan_to_json
from weft.runtime.executable import Executable, Linked


def small() -> Graph:
    b = GraphBuilder()
    return b.build([b.apply(Prim.EXP, b.input(TensorType(DType.F32, (3, 4))))])


def test_small_plans_are_also_tried_on_one_thread() -> None:
    plan = library_plan(small())
    large = replace(plan, name="large", steps=tuple(replace(s, cost_us=2 * ALONE_US) for s in plan.steps))
    found = Cpu(replace(CpuFacts(), threads=4)).variants(small(), [plan, large], timed=True)
    assert [(p.name, p.threads) for p in found] == [("library", 0), ("large", 0), ("library/1 thread", 1)]
    assert Cpu(replace(CpuFacts(), threads=1)).variants(small(), [plan], timed=True) == [plan]
    assert Cpu(replace(CpuFacts(), threads=4)).variants(small(), [plan], timed=False) == [plan]


def test_a_plan_keeps_its_number_of_threads() -> None:
    plan = replace(library_plan(small()), threads=1)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_from_json(plan_to_json(replace(plan, threads=0))).threads == 0


@pytest.mark.parametrize("threads", [-1, 5000, True, "2"])
def test_a_number_of_threads_that_is_none_is_refused(threads: object) -> None:
    data = {**plan_to_json(library_plan(small())), "threads": threads}  # type: ignore[dict-item]
    with pytest.raises(ArtifactError, match="threads"):
        plan_from_json(data)  # type: ignore[arg-type]


def test_calls_of_the_framework_use_the_plans_threads_and_the_callers_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def noting(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.exp(x, out=out)

    monkeypatch.setitem(execute._SPECIAL, "weft.noting", noting)
    graph = small()
    plan = library_plan(graph)
    call = LibraryCall(PRIMITIVES, (), (CallStep("weft.noting", (Ref("in", 0),)),), (Ref("tmp", 0),), out_variant=True)
    plan = replace(plan, steps=(replace(plan.steps[0], kernel=call),))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for threads in (1, 0):
            Executable(Linked(graph, replace(plan, threads=threads), {}, None))(torch.zeros(3, 4))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3]


def test_kernels_of_products_take_no_more_threads_than_they_are_allowed() -> None:
    assert team(4) == "num_threads((int)w_least(omp_get_max_threads(), 4))"
