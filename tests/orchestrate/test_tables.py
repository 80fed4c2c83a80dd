"""Tables by which a convolution reads its image: a template gets them with the problem, others read them as weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.ir.random_graphs import random_inputs
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.generate.contraction.match import Contraction, match
from weft.generate.cuda import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import Extracted, extract
from weft.orchestrate.stored import INLINE_ELEMENTS, tables_inside

ROW, LAST = Format.ROW, Format.LAST
HIGH = 12
DOUBLE = np.arange(2 * HIGH) // 2


def enlarged(b: GraphBuilder, x: NodeId, index: NodeId) -> NodeId:
    """Rows and columns at `index`: nearest neighbours, if that doubles them."""
    for axis in (2, 3):
        x = b.add(Prim.GATHER, x, index, attrs=a.GatherAttrs(axis))
    return x


def upsampled(dtype: DType = DType.F32, *, shared: bool = False) -> Graph:
    """relu(conv(reflected(doubled(x))) + bias); `shared`: the table is a result too, as numbers."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (1, 16, HIGH, HIGH)))
    index = b.constant(DOUBLE.astype(np.int64))
    y = b.add(Prim.PAD, enlarged(b, x, index), attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))
    rng = np.random.default_rng(0)
    w = b.constant(rng.normal(size=(24, 16, 3, 3)).astype(dtype.numpy))
    y = b.add(Prim.CONV, y, w, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))
    bias = b.constant(rng.normal(size=(24, 1, 1)).astype(dtype.numpy))
    y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, bias), 0.0)
    return b.build([y, b.apply(Prim.MUL, b.cast(index, dtype), 2.0)] if shared else [y])


def prims(graph: Graph, c: Candidate) -> Counter[Prim]:
    return Counter(graph.nodes[m].prim for m in bits(c.members))


def whole(graph: Graph, *also: Prim) -> Candidate:
    """The candidate of the convolution with all that is before and behind it."""
    wanted = Counter([Prim.GATHER, Prim.GATHER, Prim.PAD, Prim.CONV, Prim.ADD, Prim.MAX, *also])
    return next(c for c in enumerate_candidates(graph).candidates if prims(graph, c) == wanted)


def cut(graph: Graph, c: Candidate, image: Format = ROW, out: Format = ROW) -> Extracted:
    formats = [image if graph.nodes[i].prim is Prim.INPUT else ROW for i in c.inputs]
    return extract(graph, c, formats, [out] * len(c.outputs))


def table_of(graph: Graph) -> NodeId:
    return next(n.inputs[1] for n in graph.nodes if n.prim is Prim.GATHER)


@pytest.mark.parametrize("shared", [False, True])
def test_a_convolution_gets_the_tables_of_its_image_with_the_problem(shared: bool) -> None:
    graph = upsampled(shared=shared)
    c, table = whole(graph), table_of(graph)
    assert graph.type_of(table).size > INLINE_ELEMENTS
    assert table not in c.inputs
    made = cut(graph, c)
    assert sorted(made.inputs) == list(c.inputs)
    inside = [made.problem.graph.constant(i) for i, n in enumerate(made.problem.graph.nodes) if n.prim is Prim.CONSTANT]
    assert any(np.array_equal(x, DOUBLE) for x in inside)
    found = match(made.problem)
    assert isinstance(found, Contraction), found
    assert found.pack is not None
    rows = [int(x) for x in np.pad(DOUBLE, 1, mode="reflect")]
    assert found.pack.rows == found.pack.cols == tuple(rows)
    inputs = random_inputs(graph)
    weights = {i: graph.constant(i) for i, n in enumerate(graph.nodes) if n.prim is Prim.CONSTANT}
    given = [inputs[0] if i not in weights else weights[i] for i in made.inputs]
    (got,) = evaluate(made.problem.graph, given, precise=True)
    assert_allclose(got, evaluate(graph, inputs, precise=True)[0], rtol=1e-12)


def test_problems_with_other_tables_are_other_problems() -> None:
    one = cut(upsampled(), whole(upsampled())).problem.key
    b = GraphBuilder()
    graph = upsampled()
    table = table_of(graph)
    for i, n in enumerate(graph.nodes):
        if i == table:
            b.constant(np.minimum(DOUBLE + 1, HIGH - 1).astype(np.int64))
        elif n.prim is Prim.INPUT:
            b.input(n.type)
        elif n.prim is Prim.CONSTANT:
            b.constant(graph.constant(i))
        else:
            b.adopt(n, n.inputs)
    other = b.build(graph.outputs)
    assert len(other) == len(graph)
    assert cut(other, whole(other)).problem.key != one


@pytest.mark.parametrize(("arch", "dtype"), [("h200", DType.F16), ("a100", DType.F16)])
def test_templates_for_gpus_take_them(arch: str, dtype: DType) -> None:
    from weft.device.cuda.facts import profile

    facts = GpuFacts() if arch == "h200" else profile(arch)
    graph = upsampled(dtype)
    c = whole(graph)
    for image, out in ((LAST, LAST), (ROW, ROW)):
        found = templates.schedules(cut(graph, c, image, out).problem, facts)
        assert not isinstance(found, Declined), found.reason
        assert "halo" in {s.param("template") for s in found}


def test_without_a_convolution_a_table_is_read_from_memory() -> None:
    b = GraphBuilder()
    index = b.constant(DOUBLE.astype(np.int64))
    x = enlarged(b, b.input(TensorType(DType.F32, (1, 16, HIGH, HIGH))), index)
    graph = b.build([b.apply(Prim.MAX, x, 0.0)])
    for c in enumerate_candidates(graph).candidates:
        if prims(graph, c)[Prim.GATHER]:
            assert index in c.inputs
            assert index in cut(graph, c).inputs


def test_a_table_that_another_member_reads_is_an_input() -> None:
    """Its numbers are added to the result: that reader wants memory, so the gathers read it from there too."""
    b = GraphBuilder()
    index = b.constant(DOUBLE.astype(np.int64))
    x = enlarged(b, b.input(TensorType(DType.F32, (1, 4, HIGH, HIGH))), index)
    y = b.add(
        Prim.CONV, x, b.constant(np.ones((8, 4, 1, 1), np.float32)), attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1))
    )
    cast = b.cast(index, DType.F32)
    graph = b.build([b.apply(Prim.ADD, y, cast)])
    both = [c for c in enumerate_candidates(graph).candidates if {Prim.CAST, Prim.CONV} <= set(prims(graph, c))]
    alone = [c for c in enumerate_candidates(graph).candidates if set(prims(graph, c)) == {Prim.GATHER, Prim.CONV}]
    assert alone
    assert all(index not in c.inputs for c in alone)
    assert all(index in c.inputs and not tables_inside(graph, c.members) for c in both if prims(graph, c)[Prim.GATHER])
    assert any(prims(graph, c)[Prim.GATHER] for c in both)
