"""Candidates become problems: nothing of the process is changed by that."""

from __future__ import annotations

import gc

import pytest

from weft.device.cuda.facts import GpuFacts
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Category, Prim
from weft.ir.types import DType, TensorType
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import collect, without_collection


def fail() -> float:
    with without_collection():
        return 1 / (gc.isenabled() and 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_families_tell_products_from_the_rest() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (64, 64)))
    y = b.apply(Prim.EXP, b.add(Prim.MATMUL, x, x))
    alternatives = find_alternatives(b.build([y]), strict=False)
    found = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    tasks = collect(alternatives.graph, found, alternatives, GpuFacts()).tasks.values()
    assert {t.family.split()[0] for t in tasks} == {"matmul", f"[{Category.ELEMENTWISE.value}]"}
