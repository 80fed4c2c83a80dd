"""Texts of kernels, and what the generator refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.generate.cpp.test_groups import NAMED, f32, problem

from weft.device.facts import CpuFacts
from weft.generate.cpp import CppGenerator
from weft.generate.cpp.kernel import runtime_header
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.kernels.source import KernelSource, Schedule

FORM = (("keep", True), ("lanes", 16), ("rows", True), ("threads", 2), ("unroll", 2))


@pytest.mark.parametrize(
    "name",
    [
        "softmax(33, 100)/1", "softmax/last", "norm-pad/row", "norm-pad/last", "residual-norm", "group-norm/row",
        "pool3211/row", "pool5121/last", "upsample-concat/row", "to-last", "heads",
    ],
)  # fmt: skip
def test_text(name: str, golden: Callable[[str, str], None]) -> None:
    kernel = CppGenerator().emit(NAMED[name](), Schedule("cpp", FORM))
    assert isinstance(kernel, KernelSource)
    body = kernel.text.split(runtime_header().rstrip())[1].replace(kernel.entry, "kernel")
    golden("".join(c if c.isalnum() else "-" for c in name), f"workspace {kernel.workspace_bytes}\n{body}")


def test_equal_problems_give_equal_text() -> None:
    texts = [CppGenerator().emit(NAMED["norm-pad/row"](), Schedule("cpp", FORM)) for _ in range(2)]
    assert texts[0] == texts[1]


def test_names_from_the_model_stay_out() -> None:
    b = GraphBuilder()
    x = b.input(f32(64), "*/ evil(); /*")
    p = problem(b.build([b.apply(Prim.NEG, x)], ["*/ evil(); /*"]), "*/ evil(); /*")
    kernel = CppGenerator().emit(p, Schedule("cpp", FORM))
    assert isinstance(kernel, KernelSource)
    assert "evil" not in kernel.text + kernel.entry


def decline(p: object) -> str:
    found = CppGenerator().schedules(p, CpuFacts())  # type: ignore[arg-type]
    assert isinstance(found, Declined)
    return found.reason


def test_opaque_operators_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(4, 4))
    attrs = a.OpaqueAttrs("aten", "aten.sort.default", "{}", 0, (f32(4, 4),))
    assert "opaque" in decline(problem(b.build([b.add(Prim.OPAQUE, x, attrs=attrs)]), "opaque"))


def test_large_constants_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(200, 200))
    c = b.constant(np.ones((200, 200), np.float32))
    assert "constant of 160000 B" in decline(problem(b.build([b.apply(Prim.ADD, x, c)]), "constant"))


def test_constants_without_elements_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(3, 0))
    c = b.constant(np.ones((1, 0), np.float32))
    assert "without elements" in decline(problem(b.build([b.apply(Prim.ADD, x, c)]), "empty"))


def test_outputs_without_work_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(f32(4))
    assert "is an input" in decline(problem(b.build([x]), "input"))


def test_small_problems_stay_on_one_thread() -> None:
    generator, facts = CppGenerator(), CpuFacts(threads=8)
    small = generator.schedules(NAMED["residual-norm"](), facts)
    large = generator.schedules(NAMED["large"](), facts)
    assert not isinstance(small, Declined)
    assert not isinstance(large, Declined)
    assert {s.param("threads") for s in small} == {1}
    assert {s.param("threads") for s in large} == {1, 8}
    assert 2 <= len(small) <= 8
