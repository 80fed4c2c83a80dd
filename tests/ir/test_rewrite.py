from __future__ import annotations

import pytest
from tests.ir.small_graphs import GRAPHS, conv_batch_norm
from tests.typed import narrow

from weft.errors import InvalidGraphError
from weft.ir.attrs import InputAttrs
from weft.ir.graph import GraphBuilder, Node, NodeId, Origin
from weft.ir.prims import Prim
from weft.ir.rewrite import LOST, Rewriter, compact, replace_nodes, rewrite
from weft.ir.text import print_graph
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph


def nothing(_b: GraphBuilder, _n: Node, _i: tuple[NodeId, ...]) -> NodeId | None:
    return None


@pytest.mark.parametrize("name", GRAPHS)
def test_copying_changes_nothing(name: str) -> None:
    graph = compact(GRAPHS[name]())
    copy = Rewriter(graph).run(nothing)
    verify_graph(copy, data=True)
    inputs_first = all(n.prim is Prim.INPUT for n in graph.nodes[: len(graph.inputs)])
    assert not inputs_first or print_graph(copy, origins=True) == print_graph(graph, origins=True)
    assert rewrite(graph, nothing) == (graph, 0)


def test_constants_are_carried_over_without_a_copy() -> None:
    graph = conv_batch_norm()
    copy = Rewriter(graph).run(nothing)
    assert all(copy.constants[digest] is data for digest, data in graph.constants.items())


def test_origins_follow_their_nodes() -> None:
    graph = conv_batch_norm()

    def drop_the_addition(b: GraphBuilder, node: Node, inputs: tuple[NodeId, ...]) -> NodeId | None:
        return inputs[0] if node.prim is Prim.ADD and b.node(inputs[0]).prim is Prim.CONV else None

    changed, count = rewrite(graph, drop_the_addition)
    verify_graph(changed)
    assert count == 1
    conv = next(i for i, n in enumerate(changed.nodes) if n.prim is Prim.CONV)
    # the result of the addition is now that of the convolution, for its origin and for the reader of it
    assert changed.origins[0].results == (conv,) == changed.origins[1].operands
    assert changed.nodes[conv].origin == 0


def test_nodes_that_go_are_marked_in_origins() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2,)), "x")
    with b.origin(Origin("inner", (), (x,))) as inner:
        y = b.add(Prim.EXP, x)
        b.set_origin_results(inner, [y])
    with b.origin(Origin("outer", (), (y,))) as outer:
        z = b.add(Prim.NEG, y)
        b.set_origin_results(outer, [z])
    graph = b.build([z])
    changed, _ = rewrite(graph, lambda b, n, i: b.add(Prim.ABS, x) if n.prim is Prim.NEG else None)
    assert [o.rule for o in changed.origins] == ["outer"]
    assert changed.origins[0].operands == (LOST,)
    assert changed.origins[0].results == changed.outputs
    assert changed.nodes[changed.outputs[0]].origin == 0


def test_inputs_stay_even_if_nothing_reads_them() -> None:
    b = GraphBuilder()
    types = [TensorType(DType.F32, (2,)), TensorType(DType.I64, (3,))]
    x, _ = (b.input(t, name, is_weight=name == "b") for t, name in zip(types, "ab", strict=True))
    graph = b.build([x], ["y"])
    changed = Rewriter(graph).run(nothing)
    assert [changed.type_of(i) for i in changed.inputs] == types
    assert changed.input_names == ("a", "b")
    assert [narrow(InputAttrs, changed.nodes[i].attrs).is_weight for i in changed.inputs] == [False, True]


def test_inputs_keep_their_order_wherever_they_stand() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2,)), "x")
    y = b.add(Prim.EXP, x)
    z = b.input(TensorType(DType.F32, (2,)), "z")
    graph = b.build([b.add(Prim.SUB, y, z)])
    changed = Rewriter(graph).run(nothing)
    verify_graph(changed)
    assert changed.inputs == (0, 1)
    assert print_graph(changed).splitlines()[-2] == "%3 = sub(%2, %1) : 2xf32"


def test_replacing_a_node_by_another_type_is_an_error() -> None:
    graph = GRAPHS["softmax"]()
    with pytest.raises(InvalidGraphError, match="reduce_max : 4x1xf32 replaced by 4x128xf32"):
        rewrite(graph, lambda b, n, i: i[0] if n.prim is Prim.REDUCE_MAX else None)


def test_nodes_chosen_by_position() -> None:
    graph = GRAPHS["elementwise"]()
    exp = next(i for i, n in enumerate(graph.nodes) if n.prim is Prim.EXP)
    changed, count = replace_nodes(graph, {exp: lambda b, mapped: b.add(Prim.TANH, mapped[graph.inputs[0]])})
    prims = [n.prim for n in changed.nodes]
    assert count == 1
    assert Prim.TANH in prims
    assert Prim.EXP not in prims
    assert replace_nodes(graph, {}) == (graph, 0)


def test_compact_drops_constants_that_nothing_reads() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, ()))
    b.add(Prim.ADD, x, b.scalar(1.0, DType.F32))
    small = compact(b.build([x]))
    assert (len(small), dict(small.constants)) == (1, {})


def test_adopted_origins_must_come_first() -> None:
    b = GraphBuilder()
    with b.origin(Origin("r")), pytest.raises(InvalidGraphError, match="origins adopted"):
        b.adopt_origins((Origin("s"),))
