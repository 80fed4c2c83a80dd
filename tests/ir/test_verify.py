from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.ir.small_graphs import GRAPHS

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, Origin
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.ir.verify import verify_graph


def edit(graph: Graph, at: int, **changes: Any) -> Graph:
    nodes = list(graph.nodes)
    nodes[at] = replace(nodes[at], **changes)
    return replace(graph, nodes=tuple(nodes))


def first(graph: Graph, prim: Prim) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n.prim is prim)


def constants(graph: Graph, change: Callable[[np.ndarray], np.ndarray]) -> Graph:
    changed = {digest: change(data) for digest, data in graph.constants.items()}
    for data in changed.values():
        data.setflags(write=False)
    return replace(graph, constants=changed)


F32 = TensorType(DType.F32, (4, 128))
BROKEN: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "order": (lambda g: edit(g, 1, inputs=(2,)), r"%1 reads %2, which does not stand before it"),
    "negative operand": (lambda g: edit(g, 1, inputs=(-1,)), r"%1 reads %-1"),
    "attributes": (lambda g: edit(g, 1, attrs=a.NO_ATTRS), "%1 = reduce_max carries NoAttrs"),
    "axes": (lambda g: edit(g, 1, attrs=a.ReduceAttrs((7,))), "%1 = reduce_max: axes"),
    "type": (lambda g: edit(g, 1, type=F32), "%1 = reduce_max gives 4x1xf32 but says 4x128xf32"),
    "source with operands": (lambda g: edit(g, 6, inputs=(0,), prim=Prim.INPUT, attrs=a.InputAttrs(1)), "has operands"),
    "negative shape": (lambda g: edit(g, 0, type=TensorType(DType.F32, (-1,))), "negative shape"),
    "no input": (lambda g: replace(g, inputs=(1,)), "input 0 is %1, which is no input node"),
    "input out of range": (lambda g: replace(g, inputs=(99,)), "input 0 is %99"),
    "input twice": (lambda g: replace(g, inputs=(0, 0)), "input 1 is %0, whose index is 0"),
    "input lost": (lambda g: replace(g, inputs=()), "1 input nodes, but the signature lists 0"),
    "index": (lambda g: edit(g, 0, attrs=a.InputAttrs(3)), "input 0 is %0, whose index is 3"),
    "output": (lambda g: replace(g, outputs=(99,)), "output 0 is %99, which does not exist"),
    "names": (lambda g: replace(g, output_names=("a", "b")), "2 output names for 1 outputs"),
    "origin of a node": (lambda g: edit(g, 1, origin=5), "%1 comes from origin @5"),
    "nodes of an origin": (lambda g: replace(g, origins=(Origin("r", (), (99,)),)), "origin @0 names %99"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_broken_rule_is_named(what: str) -> None:
    graph = GRAPHS["softmax"]()
    verify_graph(graph, data=True)
    change, message = BROKEN[what]
    with pytest.raises(InvalidGraphError, match=message) as caught:
        verify_graph(change(graph))
    assert "reduce_max" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: replace(g, constants={}), "the data of constant %1 are missing"),
        (lambda g: constants(g, lambda x: x.astype(np.float64)), r"constant %1 is 4x3x3x3xf32, its data are float64"),
        (lambda g: constants(g, lambda x: x.reshape(-1, 1).copy()), r"its data are float32 \(108, 1\)"),
        (lambda g: replace(g, constants={k: x.copy() for k, x in g.constants.items()}), "can be written"),
    ],
)
def test_broken_constants(change: Callable[[Graph], Graph], message: str) -> None:
    with pytest.raises(InvalidGraphError, match=message):
        verify_graph(change(GRAPHS["conv_batch_norm"]()))


def test_data_are_hashed_only_if_asked() -> None:
    graph = constants(GRAPHS["conv_batch_norm"](), lambda x: np.asarray(x + 1))
    verify_graph(graph)
    with pytest.raises(InvalidGraphError, match="not those of its digest"):
        verify_graph(graph, data=True)


def test_a_graph_too_broken_to_print_still_says_what_is_wrong() -> None:
    graph = Graph((Node(Prim.NEG, (), None, F32),), (), (), {})  # type: ignore[arg-type]
    with pytest.raises(InvalidGraphError, match="carries NoneType") as caught:
        verify_graph(graph)
    assert "cannot be printed" in caught.value.__notes__[0]
