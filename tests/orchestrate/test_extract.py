"""Problems: what they compute, and when two have the same text."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ir.random_graphs import random_graph, random_inputs
from tests.orchestrate.graphs import Net, residual_net, transformer
from tests.typed import assert_allclose, narrow

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Origin, mask_of
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph
from weft.kernels.candidate import Candidate, Kind
from weft.kernels.formats import Format
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import Extracted, canonical_text, extract, format_choices
from weft.orchestrate.legality import EnumerationLimits

ROW, LAST = Format.ROW, Format.LAST


def rows(graph: Graph, candidate: Candidate) -> Extracted:
    return extract(graph, candidate, [ROW] * len(candidate.inputs), [ROW] * len(candidate.outputs))


def whole(graph: Graph) -> Graph:
    """The same graph that returns every value."""
    return Graph(graph.nodes, graph.inputs, tuple(range(len(graph))), graph.constants, graph.origins)


def check_values(graph: Graph, candidates: Any) -> None:
    values = evaluate(whole(graph), random_inputs(graph), precise=True)
    for c in candidates:
        e = rows(graph, c)
        verify_graph(e.problem.graph)
        assert sorted(e.inputs) == list(c.inputs)
        assert sorted(e.outputs) == list(c.outputs)
        for i, original in zip(e.problem.graph.inputs, e.inputs, strict=True):
            node = e.problem.graph.nodes[i]
            assert node.type == graph.type_of(original)
            assert narrow(a.InputAttrs, node.attrs).is_weight == (graph.nodes[original].prim is Prim.CONSTANT)
        found = evaluate(e.problem.graph, [values[i] for i in e.inputs], precise=True)
        for value, original in zip(found, e.outputs, strict=True):
            assert_allclose(value, values[original], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_problems_compute_what_they_were_cut_from(seed: int) -> None:
    graph = random_graph(seed)
    check_values(graph, enumerate_candidates(graph, EnumerationLimits.complete()).candidates)


def test_problems_of_networks_compute_what_they_were_cut_from() -> None:
    for graph in (transformer(1), residual_net(1)):
        check_values(graph, enumerate_candidates(graph).candidates)


@pytest.mark.parametrize("seed", range(20))
def test_equal_text_means_equal_problem(seed: int) -> None:
    graph = random_graph(seed)
    problems: dict[str, Extracted] = {}
    for c in enumerate_candidates(graph, EnumerationLimits.complete()).candidates:
        e = rows(graph, c)
        other = problems.setdefault(e.problem.key, e)
        assert other.problem.graph.nodes == e.problem.graph.nodes
        assert other.problem.graph.outputs == e.problem.graph.outputs
        assert canonical_text(e.problem) == e.problem.key


def distinct(graph: Graph) -> int:
    return len({rows(graph, c).problem.key for c in enumerate_candidates(graph).candidates})


def test_repeated_blocks_cost_nothing() -> None:
    assert distinct(transformer(2)) == distinct(transformer(6)) < len(enumerate_candidates(transformer(2)).candidates)


def test_golden_text() -> None:
    net = Net()
    x = net.input(2, 32)
    y = net.linear(x, 4)
    graph = net.build(net.relu(y))
    (c,) = [c for c in enumerate_candidates(graph).candidates if c.members.bit_count() == 3]
    assert rows(graph, c).problem.key.splitlines()[:2] == ["%0 = input 2x32xf32 row", "%1 = input 32x4xf32 row weight"]
    (c,) = [c for c in enumerate_candidates(graph).candidates if c.members.bit_count() == 2 and c.inputs[0] == x]
    bias = narrow(a.ConstantAttrs, graph.nodes[graph.origins[0].operands[2]].attrs).digest
    assert rows(graph, c).problem.key == "\n".join(
        [
            "%0 = input 2x32xf32 row",
            "%1 = input 32x4xf32 row weight",
            "%2 = matmul(%0, %1) : 2x4xf32",
            f"%3 = constant() {bias} : 4xf32",
            "%4 = broadcast(%3) BroadcastAttrs(shape=(2, 4)) : 2x4xf32",
            "%5 = add(%2, %4) : 2x4xf32",
            "return %5 row",
            "as linear(%0, %1, %3; )",
        ]
    )


def key_of(make: Any, formats: Any = ()) -> str:
    b = GraphBuilder()
    graph = b.build(make(b))
    work = [i for i, n in enumerate(graph.nodes) if n.prim not in (Prim.INPUT, Prim.CONSTANT, Prim.BROADCAST)]
    inputs = tuple(graph.inputs)
    return rows(graph, Candidate(mask_of(work), inputs, tuple(sorted(set(graph.outputs))))).problem.key


def two(b: GraphBuilder, dtype: DType = DType.F32) -> Any:
    return b.input(TensorType(dtype, (4, 8)), "secret name"), b.input(TensorType(dtype, (4, 8)))


def test_commuted_operands_have_one_text() -> None:
    def make(flip: bool) -> Any:
        def f(b: GraphBuilder) -> Any:
            x, y = two(b)
            e = b.apply(Prim.EXP, x)
            n = b.apply(Prim.NEG, y)
            return [b.apply(Prim.ADD, n, e) if flip else b.apply(Prim.ADD, e, n)]

        return f

    assert key_of(make(False)) == key_of(make(True))


def test_subtraction_does_not_commute() -> None:
    def make(flip: bool) -> Any:
        def f(b: GraphBuilder) -> Any:
            x, y = two(b)
            e, n = b.apply(Prim.EXP, x), b.apply(Prim.NEG, y)
            return [b.apply(Prim.SUB, n, e) if flip else b.apply(Prim.SUB, e, n)]

        return f

    assert key_of(make(False)) != key_of(make(True))


def test_aliasing_is_part_of_the_text() -> None:
    def apart(b: GraphBuilder) -> Any:
        x, y = two(b)
        return [b.apply(Prim.MUL, x, y)]

    def same(b: GraphBuilder) -> Any:
        x = b.input(TensorType(DType.F32, (4, 8)))
        return [b.apply(Prim.MUL, x, x)]

    assert key_of(apart) != key_of(same)


def test_scalars_count_by_value_and_names_not_at_all() -> None:
    def make(value: Any, name: str = "") -> Any:
        def f(b: GraphBuilder) -> Any:
            x = b.input(TensorType(DType.F32, (4, 8)), name)
            return [b.apply(Prim.MUL, x, value)]

        return f

    assert key_of(make(2.0)) == key_of(make(2.0, "other"))
    assert key_of(make(2.0)) != key_of(make(3.0))


def test_weights_count_by_type() -> None:
    def key(seed: int) -> Any:
        net = Net(seed)
        x = net.input(2, 32)
        graph = net.build(net.b.add(Prim.MATMUL, x, net.weight(32, 8)))
        (c,) = enumerate_candidates(graph).candidates
        return rows(graph, c).problem.key

    assert key(1) == key(2)


def test_order_of_outputs_is_canonical() -> None:
    def make(flip: bool) -> Any:
        def f(b: GraphBuilder) -> Any:
            x = b.input(TensorType(DType.F32, (4, 8)))
            first = b.apply(Prim.NEG if flip else Prim.EXP, x)
            second = b.apply(Prim.EXP if flip else Prim.NEG, x)
            return [first, second]

        return f

    assert key_of(make(False)) == key_of(make(True))


def test_the_reason_of_an_opaque_operator_is_no_part_of_it() -> None:
    def make(reason: Any, op: str = "aten.sort.default") -> Any:
        def f(b: GraphBuilder) -> Any:
            x = b.input(TensorType(DType.F32, (4, 8)))
            attrs = a.OpaqueAttrs("aten", op, "[]\n%9 = exp(%0)", 0, (TensorType(DType.F32, (4, 8)),), reason)
            return [b.add(Prim.OPAQUE, x, attrs=attrs)]

        return f

    assert key_of(make("a")) == key_of(make("b"))
    assert key_of(make("a")) != key_of(make("a", "aten.sort.stable"))
    assert len(key_of(make("a")).splitlines()) == 3, "a line break in a payload forges no line"


def test_origin_of_exact_members_is_named() -> None:
    net = Net()
    x = net.input(2, 32)
    y = net.linear(x, 48)
    z = net.rule("softmax", net.b.reshape(y, (2, 6, 8)), axis=2)
    graph = net.build(net.b.reshape(z, (2, 48)))
    origins = {}
    for c in enumerate_candidates(graph).candidates:
        e = rows(graph, c)
        if e.problem.origin_rule:
            origins[e.problem.origin_rule] = e
    assert set(origins) == {"linear", "softmax"}
    linear, softmax = origins["linear"].problem, origins["softmax"].problem
    assert linear.origin_operands == (0, 1, 2)
    assert [graph.nodes[i].prim for i in origins["linear"].inputs] == [Prim.INPUT, Prim.CONSTANT, Prim.CONSTANT]
    assert softmax.origin_params == (("axis", 2),)
    assert softmax.origin_operands == (-1,), "the operand is a view of an input, no input"
    (operand,) = softmax.origin_operand_nodes
    assert softmax.graph.nodes[operand].prim is Prim.RESHAPE
    assert softmax.graph.nodes[operand].inputs == (0,)
    assert "as softmax(%1; axis=2)" in softmax.key


def test_absent_operands_stay_absent() -> None:
    net = Net()
    b = net.b
    x, w = net.input(2, 32), net.weight(32, 8)
    with b.origin(Origin("gemm", (), (x, w, -1))) as index:
        y = b.apply(Prim.MUL, b.add(Prim.MATMUL, x, w), 2.0)
    b.set_origin_results(index, (y,))
    graph = net.build(y)
    (e,) = [e for c in enumerate_candidates(graph).candidates if (e := rows(graph, c)).problem.origin_rule]
    assert e.problem.origin_operands == (0, 1, -1)
    assert e.problem.key.endswith("as gemm(%0, %1, none; )")


def test_formats_of_a_convolution_net() -> None:
    graph = residual_net(1)
    found = enumerate_candidates(graph)
    for c in found.candidates:
        choices = format_choices(graph, c)
        assert len(set(choices)) == len(choices)
        if c.kind is Kind.CONVERT:
            assert [(f.inputs, f.outputs) for f in choices] == [((ROW,), (LAST,)), ((LAST,), (ROW,))]
            continue
        assert set(choices[0].inputs + choices[0].outputs) <= {ROW}
        for f in choices:
            for i, format in zip(c.inputs, f.inputs, strict=True):
                assert format is ROW or graph.nodes[i].prim is not Prim.CONSTANT
        has_conv = any(graph.nodes[m].prim is Prim.CONV for m in range(len(graph)) if c.members >> m & 1)
        assert len(choices) <= (2 if has_conv else 4)
        if has_conv:
            assert len(choices) == 2


def test_formats_are_part_of_the_text() -> None:
    graph = residual_net(1)
    for c in enumerate_candidates(graph).candidates:
        keys = [extract(graph, c, f.inputs, f.outputs).problem.key for f in format_choices(graph, c)]
        assert len(set(keys)) == len(keys)


def test_opaque_calls_have_one_format() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 4, 6, 6)))
    attrs = a.OpaqueAttrs("aten", "aten.sort.default", "[]", 0, (TensorType(DType.F32, (1, 4, 6, 6)),))
    y = b.add(Prim.OPAQUE, x, attrs=attrs)
    assert len(format_choices(b.build([y]), Candidate(1 << y, (x,), (y,)))) == 1


def test_a_conversion_is_a_copy_of_one_value() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, 4, 6, 6)))
    graph = b.build([b.apply(Prim.EXP, x)])
    e = extract(graph, Candidate(0, (x,), (x,), Kind.CONVERT), (ROW,), (LAST,))
    assert e.problem.key == "%0 = input 1x4x6x6xf32 row\nreturn %0 last"
    assert e.inputs == e.outputs == (x,)


def test_bfloat16_constants_survive() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (4, 8)))
    graph = b.build([b.apply(Prim.MUL, x, 0.1)])
    (c,) = enumerate_candidates(graph).candidates
    problem = rows(graph, c).problem
    constant = next(i for i, n in enumerate(problem.graph.nodes) if n.prim is Prim.CONSTANT)
    assert problem.graph.type_of(constant).dtype is DType.BF16


@pytest.mark.parametrize(
    ("inputs", "formats", "message"),
    [((), 0, "neither member nor input"), ((0, 1), 2, "no member reads"), ((0,), 0, "one format per input")],
)
def test_a_candidate_that_is_off_is_refused(inputs: tuple[int, ...], formats: int, message: str) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (4,)))
    b.input(TensorType(DType.F32, (4,)))
    y = b.apply(Prim.EXP, x)
    graph = b.build([y])
    with pytest.raises(InvalidGraphError, match=message):
        extract(graph, Candidate(1 << y, inputs, (y,)), [ROW] * formats, [ROW])
